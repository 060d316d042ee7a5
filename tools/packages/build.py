"""Build everything that a release consists of: ``python tools/packages/build.py [STEP...]``.

Steps, in this order: ``python`` (sdist, and the wheel that is made from it), ``pilot`` (the single file),
``wheelhouse`` (wheels for sites without a network), ``packages`` (Debian packages and RPMs, by nfpm). The last act
writes SHA256SUMS of all files in the directory. Decision 0037 has the tools and the reasons.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from installer import install
from installer.destinations import SchemeDictionaryDestination
from installer.sources import WheelFile
from wheels import MACHINE, download

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "/opt/stageout"
PYTHONS = ("3.9", "3.10", "3.11", "3.12", "3.13", "3.14")
LOCK = ROOT / "requirements" / "runtime.txt"
NFPM = "github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.43.0"
STEPS = ("python", "pilot", "wheelhouse", "packages")


class Target(NamedTuple):
    """One package.

    :param kind: "deb" or "rpm". :param distribution: last part of the release. :param python: its ``/usr/bin/python3``.
    """

    kind: str
    distribution: str
    python: str


TARGETS = (
    Target("deb", "deb12", "3.11"),
    Target("deb", "deb13", "3.13"),
    Target("deb", "deb14", "3.14"),
    Target("rpm", "el9", "3.9"),
    Target("rpm", "el10", "3.12"),
)


def main() -> int:
    """Build what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(STEPS)}; default: all")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: %(default)s")
    parser.add_argument("--tag", help="refuse to build unless this is the tag of the sources' version")
    options = parser.parse_args()
    if unknown := set(options.steps) - set(STEPS):
        parser.error(f"no such step: {', '.join(unknown)}")
    version = source_version()
    if options.tag not in (None, f"v{version}"):
        parser.error(f"the sources are version {version}: the tag must be v{version}, not {options.tag}")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for step in STEPS:
        if step in (options.steps or STEPS):
            _BUILDERS[step](out, version)
    (out / "SHA256SUMS").write_text(checksums(out))
    return 0


def source_version() -> str:
    """Return ``stageout.__version__``, the only place that has it, without importing the package."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "stageout" / "__init__.py").read_text(), re.M)
    assert found
    return found.group(1)


def checksums(out: Path) -> str:
    """Return one line for each file, as ``sha256sum -c`` reads them."""
    files = sorted(path for path in out.iterdir() if path.is_file() and path.name != "SHA256SUMS")
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)


def build_python(out: Path, version: str) -> None:
    """Build the sdist, and the wheel from the sdist: what it lacks, the wheel would lack."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        for name in _source_files():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
        _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)], cwd=Path(scratch))


def _source_files() -> list[str]:
    """Names of the project's files: those that git knows of, else (an unpacked sdist) all that its list has."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        return [name for name in names if name and (ROOT / name).is_file()]
    (listed,) = ROOT.glob("*.egg-info/SOURCES.txt")
    return [name for name in listed.read_text().splitlines() if (ROOT / name).is_file()]


def build_pilot(out: Path, version: str) -> None:
    """Build the single file for pilots."""
    _run([sys.executable, str(ROOT / "tools/pilot/build.py"), str(out / "stageout-pilot.pyz")])


def build_wheelhouse(out: Path, version: str) -> None:
    """Pack the product's wheel and all wheels that it needs on any Python of PYTHONS."""
    name = f"stageout-{version}-wheelhouse-{MACHINE}"
    with tempfile.TemporaryDirectory() as scratch:
        house = Path(scratch) / name
        for python in PYTHONS:
            download(LOCK, python, house)
        shutil.copy2(wheel_in(out, version), house)
        # Wheels are compressed already.
        with tarfile.open(out / f"{name}.tar", "w") as archive:
            archive.add(house, name, filter=_by_root)


def _by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Let all users read it, whatever umask it was built with."""
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    member.mode = 0o755 if member.isdir() else 0o644
    return member


def build_packages(out: Path, version: str) -> None:
    """Build one package for each of TARGETS."""
    with tempfile.TemporaryDirectory() as scratch:
        nfpm = _nfpm(Path(scratch))
        for target in TARGETS:
            tree = Path(scratch) / target.distribution
            make_tree(tree, target.python, [wheel_in(out, version), *download(LOCK, target.python, tree / "wheels")])
            major, minor = target.python.split(".")
            environment = {
                "VERSION": version,
                "RELEASE": f"1.{target.distribution}",
                "PYTHON": target.python,
                "NEXT_PYTHON": f"{major}.{int(minor) + 1}",
                "TREE": str(tree / PREFIX.lstrip("/")),
            }
            command = [nfpm, "package", "-f", "tools/packages/nfpm.yaml", "-p", target.kind, "-t", str(out)]
            _run(command, cwd=ROOT, env={**os.environ, **environment})


def _nfpm(scratch: Path) -> str:
    """Return the program: ``$NFPM``, else one that Go makes."""
    if given := os.environ.get("NFPM"):
        return given
    go = shutil.which("go", path=f"{os.environ['PATH']}:/usr/local/go/bin")
    if go is None:
        sys.exit("packages: NOT BUILT: nfpm is made with Go, which is not installed; or set NFPM=/path/of/nfpm")
    _run([go, "install", NFPM], env={**os.environ, "GOBIN": str(scratch), "GOFLAGS": "-mod=mod"})
    return str(scratch / "nfpm")


def make_tree(root: Path, python: str, wheels: Sequence[Path]) -> None:
    """Install wheels below ``root/PREFIX``, as a virtual environment of the system's Python is laid out.

    HTCondor's bindings are the system's, of the same version as the daemons (decision 0005), so its packages are seen.
    """
    prefix = root / PREFIX.lstrip("/")
    library = f"{PREFIX}/lib/python{python}/site-packages"
    destination = SchemeDictionaryDestination(
        {
            "purelib": library,
            "platlib": library,
            "scripts": f"{PREFIX}/bin",
            "data": PREFIX,
            "headers": f"{PREFIX}/include",
        },
        interpreter=f"{PREFIX}/bin/python",
        script_kind="posix",
        destdir=str(root),
    )
    for path in wheels:
        with WheelFile.open(path) as wheel:
            install(wheel, destination, additional_metadata={"INSTALLER": b"stageout\n"})
    (prefix / "bin/python").symlink_to("/usr/bin/python3")
    (prefix / "pyvenv.cfg").write_text(f"home = /usr/bin\ninclude-system-site-packages = true\nversion = {python}\n")
    add_completions(prefix / "share/stageout/completions")
    for path in [prefix, *prefix.rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def add_completions(folder: Path) -> None:
    """Write the completion scripts of all shells into a new directory, as nfpm.yaml names them."""
    folder.mkdir(parents=True)
    for shell, name in (("bash", "stageout.bash"), ("zsh", "_stageout"), ("fish", "stageout.fish")):
        command = [sys.executable, "-m", "stageout.cli.main", "completion", shell]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
        (folder / name).write_bytes(done.stdout)


def wheel_in(out: Path, version: str) -> Path:
    """Return the product's wheel in the directory."""
    path = out / f"stageout-{version}-py3-none-any.whl"
    if not path.exists():
        sys.exit(f"{path} is not there: build the step 'python' first")
    return path


def _run(command: Sequence[str], *, cwd: Path = ROOT, env: dict[str, str] | None = None) -> None:
    subprocess.run(command, cwd=cwd, env=env, check=True)


_BUILDERS = {
    "python": build_python,
    "pilot": build_pilot,
    "wheelhouse": build_wheelhouse,
    "packages": build_packages,
}


if __name__ == "__main__":
    sys.exit(main())
