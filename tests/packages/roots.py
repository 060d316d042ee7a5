"""The packages of ``make dist``, each installed into a clean root: ``make dist-test``. Needs root and debootstrap.

The file has no test's name: ``make test`` leaves it out, and only runs test_build.py.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from stageout import __version__
from tests.harness.pool.errors import PoolError
from tests.harness.pool.image import Image, debian_mirror, find_image, run_host
from tests.packages.programs import FRAGMENTS, IMPORT_ALL, ORIGINS, PROGRAMS, unpack_harness, version_lines

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"
SHARE = "/usr/share/stageout/condor_config.d"
EXTRAS = "overlay,policy,credentials,globus"
_VERSIONS = " && ".join(f"/opt/stageout/bin/{name} --version" for name in PROGRAMS)
#: Packages of Debian that Python from elsewhere needs.
_LIBRARIES = ("libssl3", "libsqlite3-0", "libffi8", "libreadline8", "zlib1g", "libbz2-1.0", "liblzma5")
#: Suite and Python of a root for each Debian package.
_DEBIAN = {"deb12": "bookworm", "deb13": "trixie"}


def pythons() -> dict[str, Path]:
    """Return an interpreter for each version of Python that is installed here and supported."""
    found = {}
    for version in (f"3.{minor}" for minor in range(9, 15)):
        name = f"python{version}"
        places = [shutil.which(name), *(Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/{name}")]
        for path in filter(None, places):
            if not subprocess.run([path, "-c", "import venv, ensurepip, ssl, sqlite3"], capture_output=True).returncode:
                found[version] = Path(path)
    return found


def package(pattern: str) -> Path:
    found = list(DIST.glob(pattern))
    assert len(found) == 1, f"{pattern}: {found}; run make dist"
    return found[0]


@pytest.fixture(autouse=True)
def report(request: pytest.FixtureRequest) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"  {request.node.name}: {time.monotonic() - began:.1f} s")


@pytest.fixture(scope="session")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheelhouse")
    with tarfile.open(package("stageout-*-wheelhouse-x86_64.tar")) as archive:
        archive.extractall(place)
    (house,) = place.iterdir()
    return house


def test_checksums() -> None:
    subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=DIST, check=True)


@pytest.mark.parametrize("version", [f"3.{minor}" for minor in range(9, 15)])
def test_wheelhouse_installs_without_an_index(version: str, wheelhouse: Path, tmp_path: Path) -> None:
    """All modules can be imported, nothing is missing, and the single file runs on the same Python."""
    if version not in pythons():
        pytest.skip(f"NOT TESTED: Python {version} is not installed here")
    python = tmp_path / "venv/bin/python"
    run_host([str(pythons()[version]), "-m", "venv", str(tmp_path / "venv")])
    find = ["--no-index", "--find-links", str(wheelhouse)]
    run_host([str(python), "-m", "pip", "install", "-q", *find, f"stageout[{EXTRAS}]"])
    assert "No broken requirements" in run_host([str(python), "-m", "pip", "check"]).stdout
    said = run_host(["sh", "-ec", f"cd /; {_VERSIONS.replace('/opt/stageout', str(tmp_path / 'venv'))}"]).stdout
    assert said.splitlines() == version_lines()
    print(run_host(["sh", "-ec", f"cd /; {python} -c '{IMPORT_ALL}'"]).stdout.strip())
    pilot = shutil.copy(package("stageout-pilot.pyz"), tmp_path)
    for name in ("stageout", "stageout-sandbox-manager", "stageout_curl_plugin"):
        assert run_host([str(pythons()[version]), pilot, name, "--version"]).stdout == f"{name} {__version__}\n"


def test_the_sdist_builds_the_same_wheel_and_its_tests_run(tmp_path: Path) -> None:
    with tarfile.open(package("stageout-*.tar.gz")) as archive:
        archive.extractall(tmp_path)
    source = tmp_path / f"stageout-{__version__}"
    run_host([sys.executable, str(source / "tools/packages/build.py"), "--out", str(tmp_path / "dist"), "python"])
    ours, theirs = (package("stageout-*.whl"), tmp_path / "dist" / package("stageout-*.whl").name)
    assert ours.read_bytes() == theirs.read_bytes()
    tests = ["tests/unit/test_retry.py", "tests/unit/test_states.py", "tests/unit/test_classads.py"]
    there = [name for name in tests if (source / name).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *there]
    print(run_host(["sh", "-ec", f"cd {source} && PYTHONPATH={source} {' '.join(command)}"]).stdout.splitlines()[-1])


@pytest.mark.parametrize("target", ["deb12", "el9"])
def test_the_same_sources_make_the_same_package(target: str, tmp_path: Path) -> None:
    for pattern in ("stageout-*.whl", f"stageout-{__version__}.tar.gz"):
        shutil.copy(package(pattern), tmp_path)
    build = [sys.executable, str(ROOT / "tools/packages/build.py"), "--out", str(tmp_path), "--target", target]
    run_host(["sh", "-ec", 'umask 077; exec "$@"', "sh", *build, "--machine", "x86_64", "packages"])
    (made,) = tmp_path.glob(f"stageout*1.{target}*")
    assert made.read_bytes() == (DIST / made.name).read_bytes()


@pytest.mark.parametrize("pattern", ["stageout_*_arm64.deb", "stageout-*.aarch64.rpm"])
def test_packages_of_the_other_machine_have_its_code_only(pattern: str, tmp_path: Path) -> None:
    """They are not run here."""
    found = sorted(DIST.glob(pattern))
    assert found
    for number, path in enumerate(found):
        place = tmp_path / str(number)
        place.mkdir()
        unpack = f"rpm2cpio {path} | cpio -idm --quiet" if path.suffix == ".rpm" else f"dpkg-deb -x {path} ."
        run_host(["sh", "-ec", f"cd {place}; {unpack}"])
        heads = {name: name.read_bytes()[:20] for name in place.rglob("*.so*") if name.is_file()}
        machines = {int.from_bytes(head[18:20], "little") for head in heads.values() if head[:4] == b"\x7fELF"}
        assert machines == {183}, path.name


@pytest.mark.parametrize(
    ("program", "pattern", "fault"),
    [
        ("lintian", "stageout_*.deb", "E: "),
        (f"rpmlint -c {ROOT}/tools/packages/rpmlint.toml", "stageout-*.rpm", ": E: "),
    ],
)
def test_checkers_of_packages_find_no_error(program: str, pattern: str, fault: str) -> None:
    command = program.split()
    if not shutil.which(command[0]):
        pytest.skip(f"NOT TESTED: {command[0]} is not installed here")
    options = ["--allow-root", "--profile", "debian"] if command[0] == "lintian" else []
    for path in sorted(DIST.glob(pattern)):
        said = subprocess.run([*command, *options, str(path)], capture_output=True, text=True, timeout=800)
        assert said.stdout.strip(), said.stderr
        assert [line for line in said.stdout.splitlines() if fault in line] == []


def test_an_index_would_take_wheel_and_sdist(tmp_path: Path) -> None:
    run_host([sys.executable, "-m", "pip", "install", "-q", "--target", str(tmp_path), "twine < 8"])
    files = [str(package("stageout-*.whl")), str(package(f"stageout-{__version__}.tar.gz"))]
    check = ["env", f"PYTHONPATH={tmp_path}", sys.executable, "-m", "twine", "check", "--strict", *files]
    assert run_host(check).stdout.count("PASSED") == 2


def clean_root(place: Path, suite: str, packages: Sequence[str]) -> Image:
    """Build a minimal Debian. :param packages: beside what every Debian has."""
    root = place / suite
    script = [] if Path(f"/usr/share/debootstrap/scripts/{suite}").exists() else ["/usr/share/debootstrap/scripts/sid"]
    include = f"--include={','.join(['ca-certificates', *packages])}"
    run_host(["debootstrap", "--variant=minbase", include, suite, str(root), debian_mirror(), *script])
    return Image(suite, root, place)


def htcondor_root(place: Path) -> Image:
    """Copy the root that pools are made of: HTCondor 25.14 on Debian forky."""
    root = place / "forky"
    run_host(["cp", "-a", "--reflink=auto", str(find_image("25.14").root), str(root)])
    return Image("forky", root, place)


def shell(image: Image, script: str, timeout_s: float = 900) -> str:
    return image.run(["sh", "-ec", script], timeout_s=timeout_s).stdout


def files_below(root: Path) -> set[str]:
    """Names of all files but those that package managers keep for themselves, and what entering the root makes."""
    own = ("var/lib/dpkg", "var/lib/apt", "var/log", "var/cache", "var/lib/rpm", "usr/lib/sysimage/rpm")
    ours = ("etc/ld.so.cache", "root/.rpmdb", "etc/hosts", "etc/resolv.conf", "proc", "dev", "sys")
    names = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_symlink() or not path.is_dir()}
    return {name for name in names if not name.startswith((*own, *ours))}


def check_installed(image: Image) -> None:
    """As an ordinary user: versions, modules, fragments, and what HTCondor reads of it."""
    said = shell(image, f"cd /; setpriv --reuid 65534 --regid 65534 --clear-groups sh -ec '{_VERSIONS}'")
    assert said.splitlines() == version_lines()
    (image.root / "tmp/all.py").write_text(IMPORT_ALL)
    (image.root / "tmp/all.py").chmod(0o644)
    as_nobody = "setpriv --reuid 65534 --regid 65534 --clear-groups"
    print(" ", shell(image, f"cd /; {as_nobody} /opt/stageout/bin/python -B /tmp/all.py").strip())
    (image.root / "tmp/all.py").unlink()
    assert set(shell(image, f"cd /; {as_nobody} ls {SHARE}").split()) == FRAGMENTS
    assert shell(image, f"{as_nobody} cat /usr/share/condor/config.d/10-stageout.conf").endswith(
        "STAGEOUT_BIN = /opt/stageout/bin\n"
    )
    for place in ("bash-completion/completions/stageout", "fish/vendor_completions.d/stageout.fish"):
        assert "explain" in shell(image, f"{as_nobody} cat /usr/share/{place}")
    assert "explain" in shell(image, f"{as_nobody} cat /usr/share/zsh/*/_stageout")
    assert shell(image, "stageout --version") == f"stageout {__version__}\n"
    doc = image.root / "usr/share/doc/stageout"
    for page in ("man1/stageout.1", "man8/stageout-web.8", "man8/stageout-router.8"):
        assert re.search(rb"^\.TH ", gzip.decompress((image.root / f"usr/share/man/{page}.gz").read_bytes()), re.M)
    assert (doc / "html/index.html").exists() and list((doc / "examples").iterdir())
    assert (doc / "changelog.gz").exists() or (doc / "CHANGELOG.md").exists()
    listed = {one["name"] for one in json.loads((doc / "sbom.cdx.json").read_text())["components"]}
    assert {"cryptography", "OpenSSL", "uPlot"} <= listed
    where = shell(image, "cd /; /opt/stageout/bin/python -c 'import pycurl; print(pycurl.__file__)'")
    assert where.startswith("/usr") == ({"pycurl", "curl"} & listed == set())
    third = (doc / "THIRD-PARTY.txt").read_text()
    assert [name for name in listed if f"\n{name}" not in third] == []
    compiled = list((image.root / "opt/stageout/lib").rglob("stageout/plugin/__pycache__/__init__.*.pyc"))
    assert len(compiled) == 1 and compiled[0].stat().st_mode & 0o444 == 0o444


def install_deb(image: Image, distribution: str) -> None:
    """With the strictest umask an administrator may have."""
    shutil.copy(package(f"stageout_*.{distribution}_amd64.deb"), image.root / "tmp/stageout.deb")
    shell(image, "umask 077; dpkg -i /tmp/stageout.deb")
    (image.root / "tmp/stageout.deb").unlink()


@pytest.mark.parametrize("distribution", [*_DEBIAN])
def test_debian_package(distribution: str, tmp_path: Path) -> None:
    """Installed, upgraded by itself, removed: nothing is left."""
    image = clean_root(tmp_path, _DEBIAN[distribution], ["python3"])
    before = files_below(image.root)
    install_deb(image, distribution)
    check_installed(image)
    install_deb(image, distribution)
    check_installed(image)
    shell(image, "dpkg -P stageout")
    assert {name for name in files_below(image.root) - before if "__pycache__" not in name} == set()
    assert not (image.root / "opt/stageout").exists()


def test_debian_package_refuses_another_python(tmp_path: Path) -> None:
    """The package for Debian 13 is not configured where Python is 3.11."""
    control = run_host(["dpkg-deb", "-f", str(package("stageout_*.deb13_amd64.deb")), "Depends"]).stdout
    assert control.startswith("python3 (>= 3.13), python3 (<< 3.14), ")


def el9_root(place: Path) -> Image:
    """Make a Debian 11: an Enterprise Linux cannot be had from Debian's mirror, and this one has its Python and pycurl.

    Both have Python 3.9 and pycurl 7.43.0.6. libcurl is 7.74.0 with GnuTLS here, 7.76.1 with OpenSSL there.
    """
    return clean_root(place, "bullseye", ["python3", "python3-pycurl", "rpm", "cpio"])


def el10_root(place: Path) -> Image:
    """Make a Debian 12 with the Python 3.12 that is installed here."""
    if "3.12" not in pythons():
        pytest.skip("NOT TESTED: Python 3.12 is not installed here")
    image = clean_root(place, "bookworm", ["rpm", "cpio", *_LIBRARIES])
    home = pythons()["3.12"].resolve().parents[1]
    shutil.copytree(home, image.root / str(home).lstrip("/"), symlinks=True)
    for folder in [image.root / str(part).lstrip("/") for part in home.parents][:-1]:
        folder.chmod(0o755)  # /root is closed to others
    (image.root / "usr/bin/python3").symlink_to(home / "bin/python3.12")
    return image


@pytest.mark.parametrize(
    ("distribution", "make_root", "requires"),
    [("el9", el9_root, ["python(abi) = 3.9", "python3-pycurl"]), ("el10", el10_root, ["python(abi) = 3.12"])],
)
def test_rpm(distribution: str, make_root: Callable[[Path], Image], requires: list[str], tmp_path: Path) -> None:
    """On Debian with rpm and a Python of the right version."""
    image = make_root(tmp_path)
    rpm = package(f"stageout-*.{distribution}.x86_64.rpm")
    shutil.copy(rpm, image.root / "tmp/stageout.rpm")
    before = files_below(image.root)
    # A look into it as root must not write onto the machine.
    names = shell(image, "rpm2cpio /tmp/stageout.rpm | cpio -t --quiet").split()
    assert names and [name for name in names if not name.startswith("./")] == []
    said = shell(image, "rpm -qp --requires /tmp/stageout.rpm").splitlines()
    assert [line for line in said if "python" in line] == requires
    for command in ("-i", "-U --replacepkgs"):
        shell(image, f"umask 077; rpm {command} --nodeps /tmp/stageout.rpm")
        check_installed(image)
        # rpm prints each file that differs from the package's own list; .pyc files are not in that list.
        assert shell(image, "rpm -V --nodeps stageout") == ""
    shell(image, "rpm -e stageout")
    assert {name for name in files_below(image.root) - before if "__pycache__" not in name} == set()
    assert not (image.root / "opt/stageout").exists()


def test_ansible_role(tmp_path: Path) -> None:
    """Twice on a clean root: the second run changes nothing."""
    image = clean_root(tmp_path, "bookworm", ["python3", "python3-apt"])
    deb = package("stageout_*.deb12_amd64.deb")
    shutil.copy(deb, image.root / "tmp" / deb.name)
    shutil.copytree(ROOT / "examples/ansible", image.root / "tmp/ansible")
    target = str(image.root / "tmp/core")
    run_host(
        [sys.executable, "-m", "pip", "install", "-q", "--only-binary=:all:", "--python-version", "3.11", "--target",
         target, "ansible-core < 2.20"]
    )  # fmt: skip
    play = (
        "export PYTHONPATH=/tmp/core HOME=/root LC_ALL=C.UTF-8; cd /tmp/ansible; umask 077;"
        "printf '[execute_points]\\nlocalhost ansible_connection=local\\n[access_points]\\n' >local.ini;"
        "python3 -m ansible playbook -i local.ini site.yml"
    )
    assert "playbook: site.yml" in shell(image, f"{play} --syntax-check")
    settings = '{"stageout_settings": {"STAGEOUT_MAX_MOVERS": 6}}'
    run = f"{play} -e stageout_package=/tmp/{deb.name} -e '{settings}'"
    first = shell(image, run)
    assert "failed=0" in first and "Run condor_restart on localhost" in first, first
    assert "changed=0" in shell(image, run)
    config = image.root / "etc/condor/config.d"
    assert (config / "20-stageout-ep.conf").readlink() == Path(f"{SHARE}/20-stageout-ep.conf")
    assert "STAGEOUT_MAX_MOVERS = 6" in (config / "90-stageout-site.conf").read_text()
    shutil.rmtree(image.root / "tmp/core")
    check_installed(image)


_CONTAINERS = {
    "router": ["/opt/stageout/bin/stageout-router --version"],
    "policy-service": ["/opt/stageout/bin/stageout-policy-service --version"],
    "execute-point": ["condor_config_val SANDBOX_MANAGER DAEMON_LIST FILETRANSFER_PLUGINS"],
    "access-point": ["condor_config_val SCHEDD_AGENT DAEMON_LIST JOB_TRANSFORM_NAMES"],
}


@pytest.fixture(scope="session")
def base_container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Command of buildah, with a store of its own that holds a Debian forky as ``stageout-test-base``."""
    if not shutil.which("buildah"):
        pytest.skip("NOT BUILT: buildah is not installed here")
    place = tmp_path_factory.mktemp("containers")
    buildah = ["buildah", "--root", str(place / "store"), "--runroot", str(place / "run"), "--storage-driver", "vfs"]
    image = clean_root(place, "forky", [])
    settings = run_host(
        ["apt-config", "dump", "Acquire::Check-Valid-Until"]
    ).stdout  # as this machine's mirror needs it
    (image.root / "etc/apt/apt.conf.d/99host").write_text(settings)
    name = run_host([*buildah, "from", "scratch"]).stdout.split()[-1]
    run_host([*buildah, "add", name, str(image.root), "/"])
    run_host([*buildah, "commit", "--rm", name, "stageout-test-base"])
    shutil.rmtree(image.root)
    yield buildah
    shutil.rmtree(place)


def build_container(target: str, buildah: list[str]) -> str:
    """Build one target of the Containerfile, and make a container of it. Returns its name."""
    build = ["build", "--isolation", "chroot", "--pull-never", "--build-arg", "BASE=localhost/stageout-test-base"]
    file = ["-f", "tools/packages/Containerfile", "--target", target, "-t", f"stageout-{target}"]
    run_host(["sh", "-ec", 'cd "$0" && exec "$@"', str(ROOT), *buildah, *build, *file, "."], timeout_s=1800)
    return run_host([*buildah, "from", "--pull-never", f"localhost/stageout-{target}"]).stdout.split()[-1]


@pytest.mark.parametrize("target", [*_CONTAINERS])
def test_container(target: str, base_container: list[str]) -> None:
    name = build_container(target, base_container)
    for command in _CONTAINERS[target]:
        print(" ", run_host([*base_container, "run", "--isolation", "chroot", name, "--", *command.split()]).stdout)
    run_host([*base_container, "rm", name])


def test_demo_from_the_debian_package(tmp_path: Path) -> None:
    """The demonstration runs on what the package has put into the root, with the HTCondor of that root.

    The harness comes from the sdist, and nothing else does.
    """
    image = htcondor_root(tmp_path)
    install_deb(image, "deb14")
    check_installed(image)
    unpack_harness(package("stageout-*.tar.gz"), image.root / "opt/harness")
    (image.root / "tmp/origins.py").write_text(ORIGINS)
    said = shell(image, "cd /; PYTHONPATH=/opt/harness /opt/stageout/bin/python /tmp/origins.py").splitlines()
    assert said == ["/opt/harness", *["/opt/stageout/lib/python3.14/site-packages"] * 6, "/opt/stageout"]
    # The demonstration's own destination, a WebDAV server, is no part of the product.
    server = [sys.executable, "-m", "pip", "install", "-q", "--only-binary=:all:", "--python-version", "3.14"]
    server += ["--platform", "manylinux_2_28_x86_64", "--target", str(image.root / "opt/server"), "wsgidav", "cheroot"]
    run_host(server)
    paths = "PYTHONPATH=/opt/server:/opt/harness"
    demo = f"cd /; {paths} exec /opt/stageout/bin/python -m tests.harness.demo --out /tmp/demo"
    root = str(image.root)
    # Not chroot: what enters the namespaces of the demonstration's nodes would see this machine's root.
    enter = (
        f"mount --bind {root} {root}; cd {root}; mount -t proc proc proc; mount --rbind /dev dev;"
        "mount --rbind /sys sys;"
        'pivot_root . .; umount -l .; exec env -i PATH="$PATH" HOME=/root LC_ALL=C.UTF-8 sh -ec "$0"'
    )
    try:
        said = run_host(["unshare", "-m", "--propagation", "private", "sh", "-ec", enter, demo], timeout_s=900).stdout
    except PoolError:
        for log in image.root.glob("tmp/demo/logs/**/*Log"):
            print(f"--- {log}\n{log.read_text(errors='replace')[-3000:]}")
        raise
    print("  " + said.splitlines()[-1])
    assert "HTCondor host" in said and "demo: delivered 16/16 jobs, 48/48 files verified" in said, said
