"""Build everything that a release consists of: ``python tools/packages/build.py [STEP...]``.

Steps, in this order: ``python`` (sdist, and the wheel that is made from it), ``pilot`` (the single file),
``wheelhouse`` (wheels for sites without a network), ``packages`` (Debian packages and RPMs), ``sbom`` (the list of all
components). The last act writes SHA256SUMS of all files in the directory. Decision 0037 has the tools and the reasons.

The same sources make the same files, byte for byte: all times are those of the last commit, or of SOURCE_DATE_EPOCH.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import notices
from distributions import Facts, make_deb, make_rpm
from metadata import describe, metadata_of, unset
from tree import make_tree
from wheels import MACHINES, download

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.9", "3.10", "3.11", "3.12", "3.13", "3.14")
LOCK = ROOT / "requirements" / "runtime.txt"
PILOT_LOCK = ROOT / "requirements" / "pilot.txt"
#: In the sdist: the documents, as they are read.
MANUAL = "manual"
#: Digest of the sources that the files in the directory were made from, all of them.
STAMP = ".built-from"


class Target(NamedTuple):
    """One package.

    :param kind: "deb" or "rpm". :param distribution: last part of the release. :param python: its ``/usr/bin/python3``.
    :param system: requirements that the distribution's own packages meet, each ``python3-NAME``; decision 0054 has why.
    """

    kind: str
    distribution: str
    python: str
    system: tuple[str, ...] = ()


TARGETS = (
    Target("deb", "deb12", "3.11"),
    Target("deb", "deb13", "3.13"),
    Target("deb", "deb14", "3.14"),
    Target("rpm", "el9", "3.9", ("pycurl",)),
    Target("rpm", "el10", "3.12"),
)


class Build(NamedTuple):
    """The needs of all steps.

    :param address: of the project, "" where setup.cfg has it. :param machines: to build for. :param epoch: time of all
        files, in s since 1970.
    """

    out: Path
    version: str
    address: str
    machines: Sequence[str]
    targets: Sequence[Target]
    epoch: int

    @property
    def wheel(self) -> Path:
        return _there(self.out / f"stageout-{self.version}-py3-none-any.whl")

    @property
    def sdist(self) -> Path:
        return _there(self.out / f"stageout-{self.version}.tar.gz")


def main() -> int:
    """Build what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(STEPS)}; default: all")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: %(default)s")
    parser.add_argument("--tag", help="refuse to build unless this is the tag of the sources' version")
    parser.add_argument("--address", default="", help="of the project on its code host; default: that of setup.cfg")
    parser.add_argument("--machine", action="append", choices=MACHINES, help="default: all")
    parser.add_argument("--target", action="append", choices=[one.distribution for one in TARGETS], help="default: all")
    parser.add_argument("--if-changed", action="store_true", help="only if the files there are of other sources")
    options = parser.parse_args()
    if unknown := set(options.steps) - set(STEPS):
        parser.error(f"no such step: {', '.join(unknown)}")
    version = source_version()
    if options.tag not in (None, f"v{version}"):
        parser.error(f"the sources are version {version}: the tag must be v{version}, not {options.tag}")
    about = metadata_of(ROOT)
    if options.tag and unset(options.address or about["url"], about["author_email"]):
        parser.error("setup.cfg: set url (or give --address) and author_email: a release has an address and a mail")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    machines = options.machine or MACHINES
    digest = f"{sources_digest()} {options.address} {' '.join(machines)}\n"
    if options.if_changed and (out / STAMP).exists() and (out / STAMP).read_text() == digest:
        print(f"{out} is of these sources already")
        return 0
    (out / STAMP).unlink(missing_ok=True)
    if not options.steps:
        clear(out)
    os.environ.update(SOURCE_DATE_EPOCH=str(source_epoch()), PYTHONHASHSEED="0", TZ="UTC", LC_ALL="C.UTF-8")
    os.umask(0o022)
    targets = [one for one in TARGETS if not options.target or one.distribution in options.target]
    build = Build(out, version, options.address, machines, targets, source_epoch())
    for step, make in _BUILDERS.items():
        if step in (options.steps or STEPS):
            make(build)
    (out / "SHA256SUMS").write_text(checksums(out))
    if not options.steps and not options.target:
        (out / STAMP).write_text(digest)
    return 0


def clear(out: Path) -> None:
    """Remove what an earlier build left, of whatever version. Files of others stay."""
    for path in [*out.glob("stageout[-_]*"), *out.glob("SHA256SUMS*")]:
        path.unlink()


def source_epoch() -> int:
    """Return the time of the sources in s since 1970: SOURCE_DATE_EPOCH, the last commit, or that of the sdist."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(given)
    if (ROOT / ".git").exists():
        command = ["git", "log", "-1", "--format=%ct"]
        return int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    return int((ROOT / "PKG-INFO").stat().st_mtime)


def sources_digest() -> str:
    """Return a digest of the names and contents of all source files, and of the time that they are given."""
    total = hashlib.sha256(str(source_epoch()).encode())
    for name in sorted(_source_files()):
        total.update(f"{name}\0{hashlib.sha256((ROOT / name).read_bytes()).hexdigest()}\0".encode())
    return total.hexdigest()


def source_version() -> str:
    """Return ``stageout.__version__``, the only place that has it, without importing the package."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "stageout" / "__init__.py").read_text(), re.M)
    assert found
    return found.group(1)


def checksums(out: Path) -> str:
    """Return one line for each file, as ``sha256sum -c`` reads them."""
    files = sorted(path for path in out.iterdir() if path.is_file() and path.name not in ("SHA256SUMS", STAMP))
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)


def build_python(build: Build) -> None:
    """Build the sdist, and the wheel from the sdist: what it lacks, the wheel would lack."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        for name in _source_files():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
            target.chmod(0o755 if (ROOT / name).stat().st_mode & 0o100 else 0o644)
        describe(source, build.version, build.address)
        if not (source / MANUAL).exists():
            make_manual(source / MANUAL)
        _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(build.out), str(source)], cwd=source)
    _normalize(build.sdist, build.epoch)


def make_manual(folder: Path) -> None:
    """Make both books as HTML, and the man pages."""
    _run([sys.executable, "docs/_ext/books.py", str(folder / "html")])
    subprocess.run(
        [sys.executable, "docs/_ext/man.py", str(folder / "man")],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True,
    )  # fmt: skip
    for path in (folder / "html").rglob(".buildinfo"):
        path.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and not path.stat().st_size:
            path.write_text("\n")  # checkers of packages take an empty file for a fault


def _normalize(path: Path, epoch: int) -> None:
    """Write an sdist again: setuptools gives its own files the time of the build, and the builder's user."""
    with tarfile.open(path) as old:
        members = [(member, old.extractfile(member)) for member in sorted(old.getmembers(), key=lambda one: one.name)]
        plain = io.BytesIO()
        with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as new:
            for member, content in members:
                member.mtime, member.pax_headers = epoch, {}
                new.addfile(_of_root(member), content)
    with open(path, "wb") as stream, gzip.GzipFile("", "wb", fileobj=stream, mtime=epoch) as packed:
        packed.write(plain.getvalue())


def _source_files() -> list[str]:
    """Names of the project's files: those that git knows of, else (an unpacked sdist) all that its list has."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        return [name for name in names if name and (ROOT / name).is_file()]
    (listed,) = ROOT.glob("*.egg-info/SOURCES.txt")
    return [name for name in listed.read_text().splitlines() if (ROOT / name).is_file()]


def build_pilot(build: Build) -> None:
    """Build the single file for pilots, one for each kind of machine."""
    for machine in build.machines:
        name = "stageout-pilot.pyz" if machine == MACHINES[0] else f"stageout-pilot-{machine}.pyz"
        _run([sys.executable, str(ROOT / "tools/pilot/build.py"), "--machine", machine, str(build.out / name)])


def build_wheelhouse(build: Build) -> None:
    """Pack the product's wheel and all wheels that it needs on any Python of PYTHONS."""
    for machine in build.machines:
        name = f"stageout-{build.version}-wheelhouse-{machine}"
        with tempfile.TemporaryDirectory() as scratch:
            house = Path(scratch) / name
            for python in PYTHONS:
                download(LOCK, python, house, machine)
            shutil.copy2(build.wheel, house)
            for file, text in _papers(build, house.glob("*.whl")).items():
                (house / file).write_text(text)
            # Wheels are compressed already.
            with tarfile.open(build.out / f"{name}.tar", "w") as archive:
                for path in [house, *sorted(house.iterdir())]:
                    member = archive.gettarinfo(str(path), str(path.relative_to(scratch)))
                    member.mtime = build.epoch
                    member.mode = 0o755 if member.isdir() else 0o644
                    with open(path, "rb") if member.isfile() else io.BytesIO() as content:
                        archive.addfile(_of_root(member), content)


def _of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def _papers(build: Build, wheels: Iterable[Path]) -> dict[str, str]:
    """Return the notices and the list of components of some wheels, by the names of their files."""
    found = notices.components(wheels)
    return {"THIRD-PARTY.txt": notices.notices(found), "sbom.cdx.json": _sbom(build, found)}


def _sbom(build: Build, found: Sequence[notices.Component]) -> str:
    time = datetime.datetime.fromtimestamp(build.epoch, datetime.timezone.utc)
    return notices.sbom(build.version, found, time.strftime("%Y-%m-%dT%H:%M:%SZ"))


def build_packages(build: Build) -> None:
    """Build one package for each target and each kind of machine."""
    about = metadata_of(ROOT)
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(build.sdist) as archive:
            archive.extractall(scratch)
        source = Path(scratch) / f"stageout-{build.version}"
        for target in build.targets:
            for machine in build.machines:
                place = Path(scratch) / f"{target.distribution}-{machine}"
                wheels = [build.wheel, *download(LOCK, target.python, place / "wheels", machine, target.system)]
                facts = Facts(
                    build.version, f"1.{target.distribution}", target.python, machine, build.epoch,
                    build.address or about["url"], about["author"], about["author_email"],
                    notices.expression(notices.components(wheels)), [f"python3-{name}" for name in target.system],
                )  # fmt: skip
                root = place / "root"
                make_tree(root, target, wheels, source, _papers(build, wheels), build.epoch)
                (make_deb if target.kind == "deb" else make_rpm)(root, facts, build.out)
                shutil.rmtree(place)


def build_sbom(build: Build) -> None:
    """Write the list of all components that any file of the release contains."""
    with tempfile.TemporaryDirectory() as scratch:
        for machine in build.machines:
            for python in PYTHONS:
                for lock in (LOCK, PILOT_LOCK):
                    download(lock, python, Path(scratch), machine)
        found = notices.components([build.wheel, *Path(scratch).glob("*.whl")])
    (build.out / f"stageout-{build.version}.cdx.json").write_text(_sbom(build, found))


def _there(path: Path) -> Path:
    if not path.exists():
        sys.exit(f"{path} is not there: build the step 'python' first")
    return path


def _run(command: Sequence[str], *, cwd: Path = ROOT) -> None:
    subprocess.run(command, cwd=cwd, check=True)


_BUILDERS: dict[str, Callable[[Build], None]] = {
    "python": build_python,
    "pilot": build_pilot,
    "wheelhouse": build_wheelhouse,
    "packages": build_packages,
    "sbom": build_sbom,
}
STEPS = tuple(_BUILDERS)


if __name__ == "__main__":
    sys.exit(main())
