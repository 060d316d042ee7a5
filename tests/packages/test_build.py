"""The quick part of the packages' tests: wheel, sdist, versions, locks. ``make dist-test`` runs more."""

from __future__ import annotations

import configparser
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from stageout import __version__
from tests.packages.programs import FRAGMENTS, ORIGINS, PROGRAMS, unpack_harness, version_lines

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools" / "packages"


def tool(name: str) -> ModuleType:
    """Load a program of tools/packages."""
    spec = importlib.util.spec_from_file_location(f"packages_{name}", TOOLS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tracked() -> set[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return {name for name in names if name and (ROOT / name).exists()}


@pytest.fixture(scope="session")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel; its dependencies are those of the environment that runs the tests."""
    venv = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", venv, "install", "-q", "--no-deps", "--no-index", wheel]
    subprocess.run(list(map(str, pip)), check=True)
    # A line of a .pth file adds a directory, and nothing of the .pth files there: the checkout is not found.
    (site,) = venv.glob("lib/python*/site-packages")
    (dependencies,) = {path for path in sys.path if path.startswith(sys.prefix) and path.endswith("site-packages")}
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    return venv


def test_the_sdist_has_every_file_of_the_repository(built: Path) -> None:
    with tarfile.open(built / f"stageout-{__version__}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked() - names == set()


def test_the_wheel_has_the_product_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(built / f"stageout-{__version__}-py3-none-any.whl") as archive:
        names = set(archive.namelist())
    prefix = f"stageout-{__version__}.data"
    tops = ("stageout", "sandbox_manager", "schedd_agent", "policy_service", "overlay_router", "stageout_web")
    assert {name for name in tracked() if name.startswith(tops) and name.endswith(".py")} <= names
    assert {f"{prefix}/data/share/stageout/condor_config.d/{name}" for name in FRAGMENTS} <= names
    assert {f"{prefix}/data/share/stageout/{name}" for name in ("stageout.dag", "stageout.cpf")} <= names
    assert {f"{prefix}/scripts/{path.name}" for path in (ROOT / "plugins").glob("*_plugin")} <= names
    licenses = {name.rpartition("/")[2] for name in names if name.startswith(f"stageout-{__version__}.dist-info/")}
    assert {"LICENSE", "NOTICE"} <= licenses
    assert {name.partition("/")[0] for name in names} == {*tops, prefix, f"stageout-{__version__}.dist-info"}


def test_all_programs_say_the_same_version(installed: Path) -> None:
    programs = {path.name for path in (installed / "bin").iterdir() if re.match(r"stageout|\w+_plugin$", path.name)}
    assert programs - {"stageout_dag_post"} == set(PROGRAMS)  # the script of DAG nodes is started with a node's name
    environment = {"PATH": os.defpath, "CONDOR_CONFIG": os.devnull}
    said = []
    for name in PROGRAMS:
        command = [installed / "bin" / name, "--version"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/", env=environment)
        said.append(done.stdout.rstrip("\n"))
    assert said == version_lines()


def test_the_harness_of_the_sdist_runs_the_installed_product(built: Path, installed: Path, tmp_path: Path) -> None:
    """With the harness in its path the demonstration finds no module of the product but the wheel's."""
    unpack_harness(built / f"stageout-{__version__}.tar.gz", tmp_path)
    command = [installed / "bin/python", "-c", ORIGINS]
    environment = {"PATH": os.defpath, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/", env=environment)
    (site,) = installed.glob("lib/python*/site-packages")
    assert done.stdout.splitlines() == [str(tmp_path), *[str(site)] * 6, str(installed)]


def test_the_checksums_are_those_of_the_files(built: Path) -> None:
    lines = (built / "SHA256SUMS").read_text().splitlines()
    assert {line.split("  ")[1] for line in lines} == {path.name for path in built.iterdir()} - {"SHA256SUMS"}
    subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=built, check=True)


def test_a_tag_of_another_version_builds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, TOOLS / "build.py", "--out", tmp_path / "dist", "--tag", "v999.0", "python"]
    refused = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert refused.returncode == 2
    assert f"the tag must be v{__version__}, not v999.0" in refused.stderr
    assert not (tmp_path / "dist").exists()


LOCK = """\
# a lock
old==1.0 ; python_full_version < '3.11' \\
    --hash=sha256:aa \\
    --hash=sha256:bb
new==2.0 ; python_full_version >= '3.11' \\
    --hash=sha256:cc
all==3.0 \\
    --hash=sha256:dd
"""


def test_markers_are_those_of_the_python_that_is_asked_for() -> None:
    applicable = tool("wheels").applicable
    assert list(applicable(LOCK, "3.9")) == ["old==1.0 --hash=sha256:aa --hash=sha256:bb", "all==3.0 --hash=sha256:dd"]
    assert list(applicable(LOCK, "3.11")) == ["new==2.0 --hash=sha256:cc", "all==3.0 --hash=sha256:dd"]


@pytest.mark.parametrize("name", ["pilot", "runtime", "dev", "bench-docs"])
def test_locks_have_one_version_with_hashes_for_each_python(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    for version in ("3.9", "3.11", "3.14"):
        lines = list(tool("wheels").applicable(text, version))
        names = [re.split(r"[=<>\[]", line)[0] for line in lines]
        assert len(names) == len(set(names)) > 3
        assert [line for line in lines if not re.match(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}", line)] == []


def test_locks_cover_the_ranges_of_users() -> None:
    """A requirement that is new in setup.cfg needs ``make lock``."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    locks = {
        "pilot": [setup.get("options", "install_requires")],
        "runtime": [
            setup.get("options.extras_require", extra) for extra in ("overlay", "policy", "credentials", "globus")
        ],
        "dev": [setup.get("options", "install_requires"), setup.get("options.extras_require", "test")],
        "bench-docs": [setup.get("options.extras_require", extra) for extra in ("bench", "docs")],
    }
    for name, texts in locks.items():
        lines = list(tool("wheels").applicable((ROOT / "requirements" / f"{name}.txt").read_text(), "3.11"))
        locked = {
            canonicalize_name(one.name): next(iter(one.specifier)).version
            for one in (Requirement(line.split(" ")[0]) for line in lines)
        }
        wanted = [Requirement(line) for text in texts for line in text.splitlines() if line.strip()]
        missing = [str(one) for one in wanted if locked.get(canonicalize_name(one.name), "0") not in one.specifier]
        assert missing == [], f"requirements/{name}.txt: run make lock"


def test_workflows_and_documents_name_targets_that_there_are() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for name in (".github/workflows/ci.yml", "RELEASING.md", "CONTRIBUTING.md", "README.md"):
        page = ROOT / name
        named = set(re.findall(r"(?:run:|`|PATH|^) ?make ([a-z-]+)", page.read_text(), re.M))
        assert named and named <= targets, page
