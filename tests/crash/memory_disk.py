"""A filesystem in memory that forgets what was not synced when the power goes.

It takes the place of the module ``os`` behind :data:`stageout.core.durable.disk`. Its promises are those of POSIX and
no more: the data of a file are safe after fsync or fdatasync of the file, a name after fsync of its directory.
Everything else survives a loss of power by chance, each name by itself; a rename survives as a whole or not at all, as
in every journal.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace, TracebackType
from typing import Any

_BLOCK = 4096
_TOTAL_BLOCKS = 1 << 18


class Node:
    """A file or a directory."""

    __slots__ = ("ctime", "data", "durable", "entries", "gid", "ino", "links", "mode", "mtime", "saved", "uid")

    def __init__(self, ino: int, mode: int, now_ns: int) -> None:
        self.ino = ino
        self.mode = mode
        self.uid = self.gid = os.geteuid()
        self.mtime = self.ctime = now_ns
        self.links = 0
        self.data = b""
        self.saved: bytes | None = None
        self.entries: dict[str, Node] = {}
        self.durable: dict[str, Node] = {}

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)


@dataclass
class _Change:
    """A change of names that is not on the disk yet: (directory, name, what it names now)."""

    names: list[tuple[Node, str, Node | None]]


@dataclass
class _Opened:
    node: Node
    owner: object
    position: int = 0
    is_appending: bool = False


@dataclass
class _Entry:
    name: str
    node: Node

    def is_dir(self, follow_symlinks: bool = True) -> bool:
        return self.node.is_directory


class _Listing:
    def __init__(self, entries: list[_Entry]) -> None:
        self._entries = entries

    def __enter__(self) -> Iterator[_Entry]:
        return iter(self._entries)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


@dataclass
class MemoryDisk:
    """The disk of one machine. Attributes that it lacks are those of ``os`` (constants, ``geteuid``).

    :param now_ns: time for mtime and ctime. :param called: told before each call that changes something.
    :param refuses: told when the next sync of data fails, once: the file holds zeros then, and later syncs succeed.
    :param full: nothing can be written. :param keeps_names: nothing can be removed.
    :param ails: it does not say how full it is.
    """

    now_ns: Callable[[], int]
    called: Callable[[str], None] = lambda name: None
    full: bool = False
    refuses: Callable[[], None] | None = None
    keeps_names: bool = False
    ails: bool = False
    owner: object = None
    _opened: dict[int, _Opened] = field(default_factory=dict)
    _locks: dict[int, _Opened] = field(default_factory=dict)
    _pending: list[_Change] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._numbers = itertools.count(100)
        self._inodes = itertools.count(2)
        self.root = self._new(stat.S_IFDIR | 0o755)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    # ---- for the simulation ------------------------------------------------------------------------------------------

    def make_dirs(self, path: str) -> None:
        """Make a directory with all above it, on the disk already."""
        node = self.root
        for name in _parts(path):
            inner = node.entries.get(name)
            if inner is None:
                inner = self._new(stat.S_IFDIR | 0o755)
                node.entries[name] = node.durable[name] = inner
            node = inner

    def files_below(self, path: str) -> list[str]:
        """Paths of everything below a directory."""
        found = []
        waiting = [(path.rstrip("/"), self._node(path))]
        while waiting:
            above, node = waiting.pop()
            for name, inner in node.entries.items():
                found.append(f"{above}/{name}")
                if inner.is_directory:
                    waiting.append((f"{above}/{name}", inner))
        return found

    def exists(self, path: str) -> bool:
        """Is there anything under this path?"""
        try:
            self._node(path)
        except OSError:
            return False
        return True

    def put(self, path: str, data: bytes) -> None:
        """Write a file as some other program does: not synced."""
        descriptor = self.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self.write(descriptor, data)
        self.close(descriptor)

    def get(self, path: str) -> bytes:
        """Content of a file."""
        return self._node(path).data

    def forget(self, path: str) -> None:
        """Remove a tree, durably."""
        above, name = self._place(path, None)
        node = above.entries.pop(name, None)
        above.durable.pop(name, None)
        for one in [node, *(self._below(node) if node else ())]:
            if one is not None:
                one.links -= 1

    def end_process(self, owner: object) -> None:
        """A process is gone: so are its descriptors and locks."""
        for number in [number for number, opened in self._opened.items() if opened.owner is owner]:
            del self._opened[number]
        self._locks = {ino: holder for ino, holder in self._locks.items() if holder.owner is not owner}

    def lose_power(self, random: Random) -> None:
        """Forget what was not synced, each thing by chance."""
        chance = random.choice((0.0, 0.5, 0.8, 1.0, 1.0))
        for change in self._pending:
            if random.random() < chance:
                _apply(change)
        self._pending.clear()
        self._opened.clear()
        self._locks.clear()
        seen: set[int] = set()
        for node in [self.root, *self._below(self.root, durable=True)]:
            if node.ino in seen:
                continue
            seen.add(node.ino)
            if node.is_directory:
                node.entries = dict(node.durable)
            else:
                node.data = node.saved = _after_the_loss(node, random, chance)

    def _below(self, node: Node, durable: bool = False) -> Iterator[Node]:
        for inner in list((node.durable if durable else node.entries).values()):
            yield inner
            if inner.is_directory:
                yield from self._below(inner, durable)

    # ---- system calls ------------------------------------------------------------------------------------------------

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        above, name = self._place(path, dir_fd)
        node = above.entries.get(name) if name else above
        if node is None:
            if not flags & os.O_CREAT:
                raise _error(errno.ENOENT, path)
            self._change("open")
            node = self._new(stat.S_IFREG | mode)
            self._name((above, name, node))
        elif flags & os.O_CREAT and flags & os.O_EXCL:
            raise _error(errno.EEXIST, path)
        elif flags & os.O_DIRECTORY and not node.is_directory:
            raise _error(errno.ENOTDIR, path)
        if flags & os.O_TRUNC and node.data:
            node.data, node.saved = b"", None
        number = next(self._numbers)
        self._opened[number] = _Opened(node, self.owner, is_appending=bool(flags & os.O_APPEND))
        return number

    def close(self, descriptor: int) -> None:
        opened = self._opened.pop(descriptor, None)
        if opened is not None and self._locks.get(opened.node.ino) is opened:
            del self._locks[opened.node.ino]

    def try_lock(self, descriptor: int) -> bool:
        """As flock(2)."""
        opened = self._open_file(descriptor)
        holder = self._locks.setdefault(opened.node.ino, opened)
        return holder is opened

    def read(self, descriptor: int, count: int) -> bytes:
        opened = self._open_file(descriptor)
        part = opened.node.data[opened.position : opened.position + count]
        opened.position += len(part)
        return part

    def pread(self, descriptor: int, count: int, position: int) -> bytes:
        return self._open_file(descriptor).node.data[position : position + count]

    def write(self, descriptor: int, data: Any) -> int:
        self._change("write")
        opened = self._open_file(descriptor)
        part = bytes(data)
        node = opened.node
        if opened.is_appending:
            opened.position = len(node.data)
        node.data = node.data[: opened.position] + part + node.data[opened.position + len(part) :]
        node.saved = None if node.saved is None else node.saved
        opened.position += len(part)
        node.mtime = node.ctime = self.now_ns()
        return len(part)

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        above, name = self._place(path, dir_fd)
        if name in above.entries or not name:
            raise _error(errno.EEXIST, path)
        self._change("mkdir")
        self._name((above, name, self._new(stat.S_IFDIR | mode)))

    def link(
        self, source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:  # fmt: skip
        from_directory, from_name = self._place(source, src_dir_fd)
        above, name = self._place(target, dst_dir_fd)
        node = from_directory.entries.get(from_name)
        if node is None:
            raise _error(errno.ENOENT, source)
        if name in above.entries:
            raise _error(errno.EEXIST, target)
        self._change("link")
        self._name((above, name, node))

    def rename(self, source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        from_directory, from_name = self._place(source, src_dir_fd)
        above, name = self._place(target, dst_dir_fd)
        node = from_directory.entries.get(from_name)
        if node is None:
            raise _error(errno.ENOENT, source)
        self._change("rename", needs_room=False)
        self._name((from_directory, from_name, None), (above, name, node))

    replace = rename

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        above, name = self._place(path, dir_fd)
        node = above.entries.get(name)
        if node is None:
            raise _error(errno.ENOENT, path)
        if node.is_directory:
            raise _error(errno.EISDIR, path)
        self._change("unlink", needs_room=False)
        if self.keeps_names:
            raise _error(errno.EIO, path)
        self._name((above, name, None))

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        above, name = self._place(path, dir_fd)
        node = above.entries.get(name)
        if node is None:
            raise _error(errno.ENOENT, path)
        if node.entries:
            raise _error(errno.ENOTEMPTY, path)
        self._change("rmdir", needs_room=False)
        self._name((above, name, None))

    def fsync(self, descriptor: int) -> None:
        self._change("fsync", needs_room=False)
        node = self._open_file(descriptor).node
        if node.is_directory:
            self._settle(node)
        else:
            node.saved = node.data

    def ftruncate(self, descriptor: int, length: int) -> None:
        self._change("ftruncate", needs_room=False)
        node = self._open_file(descriptor).node
        node.data = node.data[:length].ljust(length, b"\0")
        node.mtime = node.ctime = self.now_ns()

    def fdatasync(self, descriptor: int) -> None:
        refuses, self.refuses = self.refuses, None
        if refuses is None:
            return self.fsync(descriptor)
        node = self._open_file(descriptor).node
        node.data = node.saved = b"\0" * len(node.data)
        refuses()
        raise _error(errno.EIO, descriptor)

    def chmod(self, path: Any, mode: int, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> None:
        node = self._node(path, dir_fd)
        node.mode = stat.S_IFMT(node.mode) | mode
        node.ctime = self.now_ns()

    def fchmod(self, descriptor: int, mode: int) -> None:
        node = self._open_file(descriptor).node
        node.mode = stat.S_IFMT(node.mode) | mode
        node.ctime = self.now_ns()

    def chown(self, path: Any, uid: int, gid: int, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> None:
        _own(self._node(path, dir_fd), uid, gid)

    def fchown(self, descriptor: int, uid: int, gid: int) -> None:
        _own(self._open_file(descriptor).node, uid, gid)

    def stat(self, path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> Any:
        return _facts(self._node(path, dir_fd))

    def lstat(self, path: Any, *, dir_fd: int | None = None) -> Any:
        return _facts(self._node(path, dir_fd))

    def fstat(self, descriptor: int) -> Any:
        return _facts(self._open_file(descriptor).node)

    def listdir(self, path: Any = ".") -> list[str]:
        return list(self._directory(path).entries)

    def scandir(self, path: Any = ".") -> _Listing:
        return _Listing([_Entry(name, node) for name, node in self._directory(path).entries.items()])

    def statvfs(self, path: Any) -> Any:
        if self.ails:
            raise _error(errno.EIO, path)
        return SimpleNamespace(f_bavail=0 if self.full else _TOTAL_BLOCKS, f_frsize=_BLOCK, f_blocks=_TOTAL_BLOCKS)

    def copy_file_range(self, source: int, target: int, count: int, *more: Any) -> int:
        return self.write(target, self.read(source, count)) if self._left(source) else 0

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _left(self, descriptor: int) -> int:
        opened = self._open_file(descriptor)
        return len(opened.node.data) - opened.position

    def _directory(self, path: Any) -> Node:
        return self._open_file(path).node if isinstance(path, int) else self._node(path)

    def _open_file(self, descriptor: int) -> _Opened:
        try:
            return self._opened[descriptor]
        except KeyError:
            raise _error(errno.EBADF, descriptor) from None

    def _change(self, name: str, needs_room: bool = True) -> None:
        self.called(name)
        if self.full and needs_room:
            raise _error(errno.ENOSPC, name)

    def _new(self, mode: int) -> Node:
        return Node(next(self._inodes), mode, self.now_ns())

    def _place(self, path: Any, dir_fd: int | None) -> tuple[Node, str]:
        """The directory of a name, and the name; of the root itself an empty one."""
        parts = _parts(os.fspath(path))
        node = self.root if dir_fd is None else self._open_file(dir_fd).node
        for name in parts[:-1]:
            inner = node.entries.get(name)
            if inner is None:
                raise _error(errno.ENOENT, path)
            node = inner
        return node, parts[-1] if parts else ""

    def _node(self, path: Any, dir_fd: int | None = None) -> Node:
        above, name = self._place(path, dir_fd)
        node = above.entries.get(name) if name else above
        if node is None:
            raise _error(errno.ENOENT, path)
        return node

    def _name(self, *names: tuple[Node, str, Node | None]) -> None:
        now_ns = self.now_ns()
        for directory, name, node in names:
            old = directory.entries.pop(name, None)
            if old is not None:
                old.links -= 1
                old.ctime = now_ns
            if node is not None:
                directory.entries[name] = node
                node.links += 1
                node.ctime = now_ns
        self._pending.append(_Change(list(names)))

    def _settle(self, directory: Node) -> None:
        """Bring all names of a directory to the disk, and earlier changes of the same names elsewhere."""
        wanted: set[tuple[int, str]] = set()
        chosen: list[_Change] = []
        rest: list[_Change] = []
        for change in reversed(self._pending):
            keys = {(node.ino, name) for node, name, _ in change.names}
            if any(node is directory for node, _, _ in change.names) or keys & wanted:
                wanted |= keys
                chosen.append(change)
            else:
                rest.append(change)
        for change in reversed(chosen):
            _apply(change)
        self._pending = rest[::-1]


def _apply(change: _Change) -> None:
    for directory, name, node in change.names:
        if node is None:
            directory.durable.pop(name, None)
        else:
            directory.durable[name] = node


def _after_the_loss(node: Node, random: Random, chance: float) -> bytes:
    """Data that were not synced are there, are zeros, or are not there. The bytes of a file before it grew are
    there."""
    if node.saved == node.data or random.random() < chance / 2:
        return node.data
    kept = node.saved if node.saved and node.data.startswith(node.saved) else b""
    zeros = kept + b"\0" * (len(node.data) - len(kept))
    return random.choice((zeros, zeros, kept, node.saved or b""))


def _own(node: Node, uid: int, gid: int) -> None:
    node.uid = uid if uid >= 0 else node.uid
    node.gid = gid if gid >= 0 else node.gid


def _facts(node: Node) -> Any:
    return SimpleNamespace(
        st_mode=node.mode, st_uid=node.uid, st_gid=node.gid, st_size=len(node.data), st_ino=node.ino, st_dev=7,
        st_nlink=node.links, st_mtime_ns=node.mtime, st_ctime_ns=node.ctime,
    )  # fmt: skip


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def _error(number: int, what: object) -> OSError:
    return OSError(number, os.strerror(number), str(what))
