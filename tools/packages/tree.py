"""The files of a Debian package or an RPM, below a directory."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from installer import install
from installer.destinations import SchemeDictionaryDestination
from installer.sources import WheelFile

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PREFIX = "/opt/stageout"
DOC = "usr/share/doc/stageout"
_SHARE = f"{PREFIX}/share/stageout"
#: The shells' completions: name below _SHARE/completions, and where each kind of package links it.
_COMPLETIONS = (
    ("bash", "stageout.bash", "bash-completion/completions/stageout"),
    ("fish", "stageout.fish", "fish/vendor_completions.d/stageout.fish"),
    ("zsh", "_stageout", {"deb": "zsh/vendor-completions/_stageout", "rpm": "zsh/site-functions/_stageout"}),
)


class Target(Protocol):
    """Dependencies of the tree: ``deb`` or ``rpm``, and the version of Python."""

    @property
    def kind(self) -> str:
        """Return "deb" or "rpm"."""

    @property
    def python(self) -> str:
        """Return such as "3.11"."""


def make_tree(
    root: Path, target: Target, wheels: Sequence[Path], source: Path, papers: Mapping[str, str], epoch: int
) -> None:
    """Make the tree.

    :param source: an unpacked sdist: the documents, the man pages, examples and change log are its.
    :param papers: further documents by name. :param epoch: time of all files, in s since 1970.
    """
    _install(root, target.python, wheels)
    share = root / "usr/share"
    _link(root / "usr/bin/stageout", f"{PREFIX}/bin/stageout")
    _link(share / "stageout", _SHARE)
    for shell, name, place in _COMPLETIONS:
        _completion(shell, root / _SHARE.lstrip("/") / "completions" / name)
        _link(share / (place if isinstance(place, str) else place[target.kind]), f"{_SHARE}/completions/{name}")
    # HTCondor reads this directory before /etc/condor/config.d: packages leave their settings here.
    _copy(HERE / "10-stageout.conf", share / "condor/config.d/10-stageout.conf")
    for page in sorted((source / "manual/man").glob("*.[1-8]")):
        _pack(page.read_bytes(), share / f"man/man{page.suffix[1:]}" / f"{page.name}.gz")
    doc = root / DOC
    shutil.copytree(source / "manual/html", doc / "html")
    shutil.copytree(source / "examples", doc / "examples")
    for name in ("README.md", "NOTICE"):
        _copy(source / name, doc / name)
    for name, text in papers.items():
        (doc / name).write_text(text)
    if target.kind == "deb":
        _pack((source / "CHANGELOG.md").read_bytes(), doc / "changelog.gz")
        _copy(HERE / "copyright", doc / "copyright")
        _copy(HERE / "lintian-overrides", share / "lintian/overrides/stageout")
    else:
        _copy(source / "CHANGELOG.md", doc / "CHANGELOG.md")
        _copy(source / "LICENSE", share / "licenses/stageout/LICENSE")
    for path in [root, *root.rglob("*")]:
        if not path.is_symlink():
            is_library = ".so" in path.suffixes
            is_run = path.is_dir() or (path.stat().st_mode & 0o100 and not is_library)
            path.chmod(0o755 if is_run else 0o644)
        os.utime(path, (epoch, epoch), follow_symlinks=False)


def _install(root: Path, python: str, wheels: Sequence[Path]) -> None:
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
    # The documents in packages are for their developers.
    for name in ("doc", "man"):
        shutil.rmtree(prefix / "share" / name, ignore_errors=True)
    _link(prefix / "bin/python", "/usr/bin/python3")
    (prefix / "pyvenv.cfg").write_text(f"home = /usr/bin\ninclude-system-site-packages = true\nversion = {python}\n")


def _completion(shell: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "stageout.cli.main", "completion", shell]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    path.write_bytes(done.stdout)


def _link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def _copy(source: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, path)


def _pack(data: bytes, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data, 9, mtime=0))
