"""The place of a root or a spool: data that are missing are lost only while the place itself is there.

A filesystem that was unmounted, or a directory that was moved away, takes all of them with it, and brings them back.
Neither inodes nor devices tell whether it is the same one: those of two filesystems that were filled alike are the
same, and a device may have another number when it is mounted again. So each place has a name of its own, in a file.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from overlay_router.below import OWN
from stageout.core import durable

_GONE = "the directory of before is not there: mount it, or put it back"
_OTHER = (
    "{root} is not the directory in which the files of these records are: mount it, or put it back. If that one is lost"
    " for good, or was emptied on purpose, as the router's user: mkdir -p -m 700 {own} && echo {name} > {file}"
)


class Place:
    """A directory with a name, which is made when it has none.

    :param root: has the router's own directory already. :ivar name: 32 hexadecimal digits; durable.
    :raises OSError: it can be neither read nor written.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.file = root, _file(root)
        self.name = _read(root)
        if not self.name:
            self.name = os.urandom(16).hex()
            durable.write_file("router-place", self.file, f"{self.name}\n".encode())

    def data_folders(self) -> list[Path]:
        """The transfers here that have not come whole, and those that are in custody."""
        folders = (self.root / OWN / "staging", self.root / OWN / "packs")
        return [folder for folder in folders if folder.is_dir()]

    def check(self) -> None:
        """:raises OSError: it, or what lies there, is not the directory of before, or that cannot be read now."""
        if _read(self.root) != self.name:
            raise OSError(errno.ESTALE, _GONE, str(self.root))


def reason_against(root: Path, name: str) -> str:
    """Return why a directory is not the one of that name, and what to do; "" if it is. Nothing is made in it.

    :raises OSError: what is there cannot be read.
    """
    if _read(root) == name:
        return ""
    return _OTHER.format(root=root, own=root / OWN, name=name, file=_file(root))


def _file(root: Path) -> Path:
    return root / OWN / "place"


def _read(root: Path) -> str:
    try:
        return durable.read_file(_file(root)).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return ""
