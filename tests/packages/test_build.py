"""The quick part of the packages' tests: wheel, sdist, versions, locks. ``make dist-test`` runs more."""

from __future__ import annotations

import configparser
import email
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from stageout import __version__
from tests.packages.programs import FRAGMENTS, ORIGINS, PROGRAMS, unpack_harness, version_lines

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools" / "packages"


def tool(name: str) -> ModuleType:
    """Load a program of tools/packages, with the others in its path. Another package is called ``build``."""
    if str(TOOLS) not in sys.path:
        sys.path.append(str(TOOLS))
    spec = importlib.util.spec_from_file_location(f"packages_{name}", TOOLS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
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
    assert programs == set(PROGRAMS)
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


def test_the_same_sources_make_the_same_files(built: Path, tmp_path: Path) -> None:
    """The umask, the time zone and the hour of the build make no difference: times are those of the last commit."""
    build = [sys.executable, TOOLS / "build.py", "--out", tmp_path, "python"]
    script = 'umask 077; exec "$@"'
    environment = {**os.environ, "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7"}
    subprocess.run(["sh", "-c", script, "sh", *map(str, build)], check=True, capture_output=True, env=environment)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in built.iterdir()}
    assert [path.name for path in built.iterdir() if path.read_bytes() != (tmp_path / path.name).read_bytes()] == []


def test_the_sdist_has_the_documents_as_they_are_read(built: Path) -> None:
    with tarfile.open(built / f"stageout-{__version__}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        assert len({member.mtime for member in archive.getmembers()}) == 1
    programs = [name for name in PROGRAMS if name.startswith("stageout-") and name != "stageout-startd-cron"]
    assert {f"manual/man/{name}.8" for name in programs} | {"manual/man/stageout.1"} <= names
    assert {
        f"manual/html/{book}{name}" for book in ("", "developer/") for name in ("index.html", "searchindex.js")
    } <= names


def test_the_metadata_says_whose_it_is_and_under_which_licence(built: Path) -> None:
    with zipfile.ZipFile(built / f"stageout-{__version__}-py3-none-any.whl") as wheel:
        facts = email.message_from_bytes(wheel.read(f"stageout-{__version__}.dist-info/METADATA"))
        names = wheel.namelist()
    assert facts["License-Expression"] == "Apache-2.0 AND MIT"
    assert facts["Author"] and facts["Author-email"] and facts["Home-page"]
    assert {"LICENSE", "NOTICE", "stageout_web/static/uplot.LICENSE"} <= set(facts.get_all("License-File", []))
    assert f"stageout-{__version__}.dist-info/licenses/stageout_web/static/uplot.LICENSE" in names
    assert "Programming Language :: Python :: 3.14" in facts.get_all("Classifier", [])
    links = re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", facts.get_payload())
    assert links and [link for link in links if not "".join(link).startswith(("http", "#"))] == []


def test_links_of_the_readme_become_absolute() -> None:
    page = '[a](docs/a.md#b) [![b](docs/b.png)](CI) [c](https://c) [d](#d) <img src="docs/d.svg">'
    assert tool("metadata").absolute_links(page, "https://h/p", "1.2") == (
        "[a](https://h/p/blob/v1.2/docs/a.md#b) [![b](https://h/p/raw/v1.2/docs/b.png)](https://h/p/blob/v1.2/CI)"
        ' [c](https://c) [d](#d) <img src="https://h/p/raw/v1.2/docs/d.svg">'
    )


def test_the_address_is_in_one_place() -> None:
    """The release sets it there, and may not forget it."""
    found = [name for name in tracked() if b"stageout.invalid" in (ROOT / name).read_bytes()]
    assert set(found) <= {"setup.cfg", "tests/packages/test_build.py"}
    command = [sys.executable, TOOLS / "build.py", "--tag", f"v{__version__}", "--out", "/nonexistent", "python"]
    address = configparser.ConfigParser()
    address.read(ROOT / "setup.cfg")
    if "stageout.invalid" in address["metadata"]["url"]:
        refused = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert refused.returncode == 2 and "set url" in refused.stderr


def test_a_new_build_leaves_nothing_of_another_version(tmp_path: Path) -> None:
    for name in ("stageout-0.0.9.tar.gz", "stageout_0.0.9-1.deb12_amd64.deb", "stageout-pilot.pyz", "SHA256SUMS"):
        (tmp_path / name).touch()
    (tmp_path / "of-somebody-else").touch()
    tool("build").clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["of-somebody-else"]


@pytest.mark.skipif(not shutil.which("gpg"), reason="gpg is not installed")
def test_a_release_signs_its_checksums(tmp_path: Path) -> None:
    home, dist = tmp_path / "keys", tmp_path / "dist"
    home.mkdir(mode=0o700)
    dist.mkdir()
    (dist / "file").write_text("content")
    (dist / "SHA256SUMS").write_text(tool("build").checksums(dist))
    environment = {**os.environ, "GNUPGHOME": str(home)}
    key = ["gpg", "--batch", "--passphrase", "", "--quick-gen-key", "release@example.org", "ed25519", "sign"]
    subprocess.run(key, check=True, env=environment, capture_output=True)
    sign = ["make", "-s", "-C", str(ROOT), "sign", f"DIST={dist}", "KEY=release@example.org"]
    verify = ["gpg", "--verify", str(dist / "SHA256SUMS.asc"), str(dist / "SHA256SUMS")]
    try:
        subprocess.run(sign, check=True, env=environment, capture_output=True)
        subprocess.run(verify, check=True, env=environment, capture_output=True)
        (dist / "file").write_text("another content")
        assert subprocess.run(sign, env=environment, capture_output=True).returncode
    finally:
        subprocess.run(["gpgconf", "--kill", "all"], env=environment)


def wheel_of(folder: Path, name: str, facts: str, files: dict[str, bytes]) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Name: {name}\nVersion: 1.0\n{facts}\n")
        for file, data in files.items():
            wheel.writestr(file, data)
    return path


def test_notices_name_each_library_with_its_licence(tmp_path: Path) -> None:
    notices = tool("notices")
    curl = {"c.libs/libcurl-330bcbb6.so.4.8.0": b"..libcurl/8.9.1 ..", "c.libs/libpsl-cd0eeb45.so.5": b""}
    text = {"c-1.0.dist-info/licenses/COPYING": b"The words of c.\r\n"}
    found = notices.components([wheel_of(tmp_path, "c", "License-Expression: LGPL-2.1-only OR MIT", {**curl, **text})])
    assert [(one.name, one.version, one.license) for one in found] == [
        ("c", "1.0", "LGPL-2.1-only OR MIT"), ("curl", "8.9.1", "curl"), ("libpsl", "", "MIT"),
    ]  # fmt: skip
    assert notices.expression(found) == "(LGPL-2.1-only OR MIT) AND MIT AND curl"
    page = notices.notices(found)
    for words in ("The words of c.", "curl 8.9.1, within c 1.0", "permission notice appear in all copies"):
        assert words in page
    listed = json.loads(notices.sbom("0.1", found, "2026-01-01T00:00:00Z"))
    assert [(one["name"], one.get("version")) for one in listed["components"]] == [
        ("c", "1.0"), ("curl", "8.9.1"), ("libpsl", None),
    ]  # fmt: skip
    assert listed["components"][0]["hashes"][0]["content"] and listed["bomFormat"] == "CycloneDX"


@pytest.mark.parametrize(
    ("facts", "files", "says"),
    [
        ("License: MIT", {"x.libs/libnew-330bcbb6.so.1": b""}, "libnew.*add its licence"),
        ("License: of my own", {}, "x: no licence .* 'of my own'"),
        ("", {}, "x: no licence"),
    ],
)
def test_what_has_no_known_licence_ends_the_build(
    facts: str, files: dict[str, bytes], says: str, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=says):
        tool("notices").components([wheel_of(tmp_path, "x", facts, files)])


def test_every_library_that_may_be_delivered_has_a_text() -> None:
    for name, library in tool("notices").LIBRARIES.items():
        assert library.texts and all(path.stat().st_size > 500 for path in library.texts), name


def test_no_tag_becomes_a_release_without_pools() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert {"unit", "pool"} <= set(jobs["release"]["needs"])
    for name in jobs["release"]["needs"]:
        assert "if" not in jobs[name] or "startsWith(github.ref, 'refs/tags/v')" in jobs[name]["if"]
    assert "make test" in str(jobs["pool"]["steps"])


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
    assert list(applicable(LOCK, "3.11", ("new",))) == ["all==3.0 --hash=sha256:dd"]


def test_no_package_has_libraries_that_its_python_gets_no_more() -> None:
    """pycurl's last wheel for Python 3.9 is of 2025: decision 0054."""
    old = [target for target in tool("build").TARGETS if target.python == "3.9"]
    assert old and all("pycurl" in target.system for target in old)


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
