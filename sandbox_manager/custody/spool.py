"""The spool of accepted output: one directory per hand-off, the files in it under their position numbers.

Below a root manager a directory belongs to root and lets only one group pass (0710), which no account has and each
mover of its owner gets: the plugin can open a file by its path while it sends, no other process can, not even the
owner's, and nobody can list, remove or replace anything. Where everything is one user, all is 0700.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sandbox_manager.custody.credentials import DIRECTORY as CREDENTIALS
from sandbox_manager.custody.credentials import Safe
from sandbox_manager.custody.quota import PluginState
from stageout.core import durable, log
from stageout.core.errors import StageoutError, is_disk_full
from stageout.core.synchronous import NotTaken
from stageout.model.file import StoredFile
from stageout.model.run import Account
from stageout.movers import trees
from stageout.wire.handoff import OfferedCredential, OfferedFile, credential_link

#: Groups of movers are numbered from here by the owner's uid: above what accounts have, below the largest numbers.
_FIRST_GROUP = 0x60000000
_GROUPS = 0x10000000
_PARTS = ("run", "intake", "sandboxes", "unknown", "movers", "state", "ledger")
_OURS_ALONE = ("unknown", "ledger")
#: Of a hand-off on its way, beside the bytes of the offer: the last step of a copy may go beyond the file's end.
_INTAKE_MORE_BYTES = 4 * 1024 * 1024
#: Names in it, beside those of the offer.
_INTAKE_MORE_NAMES = 16
#: A block, and by how much a filesystem that allocates in advance (XFS) may exceed the size of a file.
_BLOCK_BYTES, _ALLOCATED_MOST = 512, 2
_TICKET = re.compile(r"[0-9a-f]{32}\Z")


class SpoolError(StageoutError):
    """The spool cannot be used as configured; the text says what to do."""


class SpoolBusy(SpoolError):
    """Another manager uses the spool; it may be about to end."""

    is_temporary = True


class _Refused(Exception):
    """The disk did not take data; the text is the kernel's."""


@dataclass
class Synced:
    """Outcome of a sync.

    :param on_disk: tickets that are there. :param lost: ticket -> why the disk has lost its data; its bytes are gone.
    :param again: tickets that the sync did not get to; nothing is known against them.
    """

    on_disk: list[str] = field(default_factory=list)
    lost: dict[str, str] = field(default_factory=dict)
    again: list[str] = field(default_factory=list)


class NotClaimed(NotTaken):
    """The linked files differ from the offer; the message says how."""

    code = "Files"


class Overrun(NotClaimed):
    """A hand-off on its way takes more of the spool than was offered."""


class Spool:
    """The directory STAGEOUT_SPOOL. Methods block for as long as the disk does; call them from a thread.

    :param root: the directory itself, made when missing. :param execute: HTCondor's EXECUTE.
    """

    def __init__(self, root: Path, execute: Path) -> None:
        self.root = Path(os.path.realpath(root))
        self.execute = Path(os.path.realpath(execute))
        self._intake, self._sandboxes = self.root / "intake", self.root / "sandboxes"
        self._unknown = self.root / "unknown"
        self._root_mode = os.geteuid() == 0
        self._lock = -1
        self._undeleted: set[str] = set()
        self._own: tuple[int, int] | None = None
        self._own_root: tuple[int, int] | None = None
        self._private_groups = False
        self.safe = Safe(self._sandboxes)
        self.state = PluginState(self.root / "state")

    # ---- at start ----------------------------------------------------------------------------------------------------

    def open(self, forbidden: Mapping[str, str]) -> None:
        """Make and check the directories, remove what earlier hand-offs left half done.

        :param forbidden: parameter -> directory whose content HTCondor deletes (EXECUTE, SPOOL, LOG).
        :raises SpoolError: a directory is in the wrong place or somebody else's.
        """
        self._check_location(forbidden)
        try:
            with durable.step("spool-open"):
                self._make(self.root, 0o711)
                for part in _PARTS:
                    self._make(self.root / part, 0o700 if part in _OURS_ALONE else 0o711)
                self._own, self._own_root = _identity(self._sandboxes), _identity(self.root)
                self._acquire_lock()
                for path in (self.root, self.root.parent):
                    self._sync_names(path)
            self._private_groups = self._root_mode and self._may_have_private_groups()
        except OSError as problem:
            text = f"STAGEOUT_SPOOL = {self.root}: {problem}; give it a place that can be written"
            raise SpoolError(text, is_temporary=is_disk_full(problem)) from None
        for left in durable.disk.listdir(self._intake):
            self.withdraw(left)

    def close(self) -> None:
        """Let another manager use the spool."""
        if self._lock >= 0:
            durable.disk.close(self._lock)
            self._lock = -1

    def _acquire_lock(self) -> None:
        descriptor = durable.disk.open(self.root / "ledger" / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not durable.lock(descriptor):
            durable.disk.close(descriptor)
            raise SpoolBusy(
                f"STAGEOUT_SPOOL = {self.root} is in use by another sandbox manager; give each startd's manager its own"
            )
        self._lock = descriptor

    def _check_location(self, forbidden: Mapping[str, str]) -> None:
        for name, value in forbidden.items():
            path = Path(os.path.realpath(value)) if value else None
            if path is not None and (path == self.root or path in self.root.parents):
                raise SpoolError(
                    f"STAGEOUT_SPOOL = {self.root} is inside {name} = {path}, which HTCondor empties; "
                    "set STAGEOUT_SPOOL to a directory beside it on the same filesystem"
                )
        for parent in self.root.parents if self._root_mode else ():
            mode = parent.stat().st_mode if parent.exists() else 0
            if mode & 0o022 and not mode & stat.S_ISVTX:
                raise SpoolError(
                    f"STAGEOUT_SPOOL = {self.root}: others than its owner may rename what is in {parent}; "
                    f"chmod go-w {parent}, or set STAGEOUT_SPOOL elsewhere"
                )

    def _may_have_private_groups(self) -> bool:
        """Return False in a container that maps only some numbers of groups."""
        try:
            durable.disk.chown(self._intake, -1, _FIRST_GROUP)
            durable.disk.chown(self._intake, -1, 0)
        except OSError as problem:
            log.warn(
                "group-isolation-disabled", problem=problem, now="a job's primary group can reach its output by path"
            )
            return False
        return True

    @staticmethod
    def private_group(uid: int) -> int | None:
        """Return the group that only movers of this user have, None for accounts with very large numbers."""
        return _FIRST_GROUP + uid if 0 <= uid < _GROUPS else None

    def group_of(self, uid: int, gid: int) -> int:
        """Return the group that may pass through the directories of a user's output. :param gid: the user's own."""
        private = self.private_group(uid) if self._private_groups else None
        return gid if private is None else private

    def _make(self, path: Path, mode: int) -> None:
        with contextlib.suppress(FileExistsError):
            durable.disk.mkdir(path, 0o700)
        found = durable.disk.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise SpoolError(
                f"{path} is not a directory of uid {os.geteuid()}; remove it, or set STAGEOUT_SPOOL elsewhere"
            )
        durable.disk.chmod(path, mode if self._root_mode else 0o700)

    def state_of(self, uid: int, gid: int) -> Path:
        """Return the directory for the state of this user's plugins. :raises OSError: it cannot be made."""
        return self.state.directory_of(uid, gid, self.private_group(uid) if self._private_groups else None)

    # ---- one hand-off ------------------------------------------------------------------------------------------------

    def prepare_intake(self, ticket: str, uid: int, gid: int) -> Path:
        """Make the directory into which this user may link. Not on the disk, and need not be."""
        path = self._intake / ticket
        durable.make_dir("intake-mkdir", path, 0o700)
        if self._root_mode:
            durable.disk.chown(path, uid, gid)
        return path

    def withdraw(self, ticket: str) -> None:
        """Remove a hand-off that was not accepted, and all that its user put there; never raises."""
        try:
            trees.remove(self._intake, ticket)
        except OSError as problem:
            log.warn("intake-cleanup-failed", ticket=ticket, problem=problem)
            self._undeleted.add(ticket)
        else:
            self._undeleted.discard(ticket)

    def withdraw_again(self) -> None:
        """Remove the hand-offs that could not be removed before."""
        for ticket in sorted(self._undeleted):
            self.withdraw(ticket)

    def check_intake(
        self, ticket: str, offered: Sequence[OfferedFile], credentials: Sequence[OfferedCredential] = ()
    ) -> None:
        """Check that a hand-off on its way stays within its offer: until the claim its user may write there.

        :raises Overrun: it does not. :raises OSError: the directory cannot be read.
        """
        with trees.opened(self._intake / ticket) as directory:
            _check_bounds(directory, offered, credentials)

    def claim(
        self,
        ticket: str,
        offered: Sequence[OfferedFile],
        uid: int,
        gid: int,
        credentials: Sequence[OfferedCredential] = (),
        account: Account | None = None,
    ) -> list[StoredFile]:
        """Take the links away from their user, check them against the offer and move them to their place.

        Survives the manager's death on return; a power loss only after :meth:`sync`.

        :param account: that gets the files; None: they stay their user's.
        :raises NotClaimed: something is not as offered; the ticket is gone then.
        """
        path = self._intake / ticket
        try:
            with durable.step("intake-claim"):
                files = self._checked(path, offered, uid, gid, credentials=credentials, account=account)
            with durable.step("spool-move"):
                durable.disk.rename(path, self._sandboxes / ticket)
        except (OSError, NotClaimed) as problem:
            self.withdraw(ticket)
            raise NotClaimed(str(problem), "Disk" if isinstance(problem, OSError) else "") from problem
        return files

    def _checked(
        self,
        path: Path,
        offered: Sequence[OfferedFile],
        uid: int,
        gid: int,
        credentials: Sequence[OfferedCredential],
        account: Account | None,
    ) -> list[StoredFile]:
        with trees.opened(path) as directory:
            if self._root_mode:
                # From here on the user can add and remove nothing, not even through a descriptor he holds.
                group = self.group_of(account.uid, account.gid) if account else self.group_of(uid, gid)
                durable.disk.fchown(directory, 0, group)
                durable.disk.fchmod(directory, 0o710)
            wanted = {str(position) for position in range(len(offered))}
            wanted.update(map(credential_link, range(len(credentials))))
            names = trees.names(directory, len(wanted) + 1)
            if set(names) != wanted:
                more = "or more " if len(names) > len(wanted) else ""
                raise NotClaimed(f"{len(names)} {more}names were linked where {len(wanted)} files were offered")
            _check_bounds(directory, offered, credentials)
            if credentials:
                self._lock_away(directory, credentials, uid)
            held = [
                self._held(ticket=path.name, directory=directory, position=at, offered=item, uid=uid)
                for at, item in enumerate(offered)
            ]
            if account is None:
                return held
            with durable.step("intake-account"):
                return [_given(directory, item, account, gid) for item in held]

    def _lock_away(self, directory: int, credentials: Sequence[OfferedCredential], uid: int) -> None:
        """Move the credentials of a ticket where nobody but the manager comes."""
        durable.disk.mkdir(CREDENTIALS, 0o700, dir_fd=directory)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        inner = durable.disk.open(CREDENTIALS, flags, dir_fd=directory)
        try:
            for number, item in enumerate(credentials):
                link = credential_link(number)
                found = durable.disk.stat(link, dir_fd=directory, follow_symlinks=False)
                if not stat.S_ISREG(found.st_mode) or found.st_uid != uid or found.st_nlink != 1:
                    raise NotClaimed(f"{link} is not a file of the job's own")
                if found.st_size != item.size_bytes:
                    raise NotClaimed(f"{link} has {found.st_size} bytes, {item.size_bytes} were offered")
                durable.disk.rename(link, item.file_name, src_dir_fd=directory, dst_dir_fd=inner)
                durable.disk.chmod(item.file_name, 0o600, dir_fd=inner)
        finally:
            durable.disk.close(inner)

    def _held(self, ticket: str, directory: int, position: int, offered: OfferedFile, uid: int) -> StoredFile:
        found = durable.disk.stat(str(position), dir_fd=directory, follow_symlinks=False)
        name = self.shown_name(offered.local_path)
        if not stat.S_ISREG(found.st_mode):
            raise NotClaimed(f"{name} is not a regular file")
        if found.st_uid != uid:
            raise NotClaimed(f"{name} belongs to uid {found.st_uid}, the job is uid {uid}")
        if not found.st_mode & stat.S_IRUSR:
            raise NotClaimed(f"{name} cannot be read by its owner")
        if found.st_size != offered.size_bytes:
            raise NotClaimed(f"{name} has {found.st_size} bytes, {offered.size_bytes} were offered: it still changes")
        return StoredFile(
            position=position,
            url=offered.url,
            name=name,
            size_bytes=found.st_size,
            mtime_ns=found.st_mtime_ns,
            inode=found.st_ino,
            ticket=ticket,
        )

    def shown_name(self, local_path: str) -> str:
        """Return a file's path inside the scratch directory, in printable characters."""
        with contextlib.suppress(ValueError):
            parts = Path(local_path).relative_to(self.execute).parts
            scratch = 2 if len(parts) > 2 and parts[1] == "scratch" else 1
            return printable("/".join(parts[scratch:]))
        return printable(local_path.rpartition("/")[2])

    # ---- in custody --------------------------------------------------------------------------------------------------

    def path(self, ticket: str, position: int) -> Path:
        """Return the path of a file."""
        return self._sandboxes / ticket / str(position)

    def write_back(self, tickets: Sequence[str]) -> None:
        """Have the data of tickets written before they are synced. This takes as long as the disk needs for the bytes.

        The sync finds each failure again, also when the manager dies here.
        """
        for ticket in tickets:
            with contextlib.suppress(OSError):
                _each_file(self._sandboxes / ticket, durable.write_back)

    def sync(self, tickets: Sequence[str]) -> Synced:
        """Bring the data and the names of tickets to the disk. A ticket that was released meanwhile is left out.

        The kernel tells the failure of a write once: a second sync of the same file succeeds, over zeros. So the bytes
        of a ticket that the disk has refused are removed at once, and nobody can believe them any more.
        """
        synced = Synced()
        with durable.step("spool-sync"):
            for ticket in tickets:
                self._sync_data(ticket, synced)
            try:
                for parent in (self._sandboxes, self._intake) if synced.on_disk else ():
                    self._sync_names(parent)
            except OSError as problem:
                log.error("spool-sync-failed", names=self.root, problem=problem)
                synced.again, synced.on_disk = [*synced.again, *synced.on_disk], []
        return synced

    def _sync_data(self, ticket: str, synced: Synced) -> None:
        path = self._sandboxes / ticket
        try:
            _sync_directory(path)
            with contextlib.suppress(FileNotFoundError):  # no credentials, or one is just being renewed, which syncs it
                _sync_directory(path / CREDENTIALS)
        except FileNotFoundError:
            return
        except _Refused as problem:
            log.error("spool-sync-failed", ticket=ticket, problem=problem, advice="check the disk (dmesg)")
            synced.lost[ticket] = f"the node's disk lost output that it should have written: {problem}"
            self.discard(ticket)
        except OSError as problem:
            log.error("spool-sync-failed", ticket=ticket, problem=problem)
            synced.again.append(ticket)
        else:
            synced.on_disk.append(ticket)

    def _sync_names(self, path: Path) -> None:
        with trees.opened(path) as directory:
            durable.disk.fsync(directory)

    def unchanged(self, held: StoredFile) -> bool:
        """Return whether a file is the accepted one with its content unchanged (by size and mtime).

        :raises FileNotFoundError: it is gone. :raises OSError: nobody can say: the spool cannot be read, or is away.
        """
        try:
            found = durable.disk.lstat(self.path(held.ticket, held.position))
        except FileNotFoundError:
            self._check_there()
            raise
        return (found.st_size, found.st_mtime_ns, found.st_ino) == (held.size_bytes, held.mtime_ns, held.inode)

    def _check_there(self) -> None:
        """Check that the spool's filesystem is mounted. :raises OSError: it is not."""
        try:
            found = _identity(self._sandboxes)
        except FileNotFoundError:
            raise OSError(errno.ENODEV, f"{self._sandboxes} is not there: is its filesystem mounted?") from None
        if found != self._own:  # an older one may lie below the place where the filesystem was mounted
            raise OSError(errno.ENODEV, f"{self._sandboxes} is another directory now: is its filesystem mounted?")

    def deleted(self, tickets: Iterable[str]) -> list[str]:
        """Return the tickets whose directory was deleted. The directory of all of them is made anew if it was, too.

        :raises OSError: nobody can say: the spool cannot be read, or its filesystem is not mounted.
        """
        try:
            self._check_there()
        except OSError:
            if not self._is_deleted():
                raise
            with durable.step("spool-open"):
                self._make(self._sandboxes, 0o711)
                self._sync_names(self.root)
            self._own = _identity(self._sandboxes)
        return sorted(set(tickets).difference(self.directories()))

    def _is_deleted(self) -> bool:
        """Tell whether somebody has removed the directory of all sandboxes: the one around it is still the same."""
        if self._own is None or self._own_root is None or self._own[0] != self._own_root[0]:
            return False
        return _identity(self.root) == self._own_root

    def change_mark(self, ticket: str, position: int) -> tuple[int, int]:
        """Return the file's ctime, which no owner can set back, and its number of names.

        The same before and after reading proves unchanged content. With another number of names the ctime proves
        nothing: HTCondor removes a name with the scratch directory, and that changes the ctime too.
        """
        found = durable.disk.lstat(self.path(ticket, position))
        return found.st_ctime_ns, found.st_nlink

    def discard(self, ticket: str) -> None:
        """Undo a hand-off that was not recorded, however far it came; never raises."""
        self.withdraw(ticket)
        try:
            self.release(ticket)
        except OSError as problem:
            log.warn("spool-cleanup-failed", ticket=ticket, problem=problem)

    def release(self, ticket: str) -> None:
        """Remove the bytes of a ticket; one that is gone already is no error. :raises OSError: they cannot be."""
        with durable.step("spool-release"):
            trees.remove(self._sandboxes, ticket)

    def directories(self) -> list[str]:
        """Tickets that have a directory."""
        return list(filter(_TICKET.match, durable.disk.listdir(self._sandboxes)))

    # ---- without a record --------------------------------------------------------------------------------------------

    def remove_parts(self) -> None:
        """Finish removals that a crash interrupted. :raises OSError: they cannot be finished."""
        for path in (self._sandboxes, self._unknown):
            for name in durable.disk.listdir(path):
                if name.startswith(trees.MOVED):
                    trees.remove(path, name)

    def set_aside(self, tickets: Iterable[str]) -> list[str]:
        """Move directories of tickets that the ledger does not know to ``unknown/``. Returns the tickets moved.

        A directory without any file is removed: no hand-off of nothing is accepted.

        :raises OSError: some could not be moved.
        """
        with durable.step("spool-aside"):
            moved = [ticket for ticket in tickets if not self._is_removed_empty(ticket)]
            self._move(moved, self._sandboxes, self._unknown)
        return moved

    def move_back(self, tickets: Iterable[str]) -> list[str]:
        """Move directories of tickets that the ledger knows back to their place. Returns those.

        :raises OSError: some could not be moved.
        """
        back = sorted(set(self.unknown()).intersection(tickets).difference(self.directories()))
        if back:
            with durable.step("spool-take-back"):
                self._move(back, self._unknown, self._sandboxes)
        return back

    def _is_removed_empty(self, ticket: str) -> bool:
        try:
            durable.disk.rmdir(self._sandboxes / ticket)
        except OSError as problem:
            if problem.errno != errno.ENOTEMPTY:
                raise
            return False
        return True

    def _move(self, tickets: Sequence[str], source: Path, target: Path) -> None:
        for ticket in tickets:
            durable.disk.rename(source / ticket, target / ticket)
        for path in (target, source) if tickets else ():
            self._sync_names(path)

    def unknown(self) -> list[str]:
        """Tickets that were set aside."""
        return list(filter(_TICKET.match, durable.disk.listdir(self._unknown)))

    def remove_unknown(self, tickets: Iterable[str]) -> None:
        """Remove what was set aside of these tickets. :raises OSError: it cannot be removed."""
        with durable.step("spool-release"):
            for ticket in tickets:
                trees.remove(self._unknown, ticket)

    # ---- room --------------------------------------------------------------------------------------------------------

    def free_bytes(self) -> int:
        """Return the bytes that the filesystem still takes."""
        found = durable.disk.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    def total_bytes(self) -> int:
        """Size of the filesystem."""
        found = durable.disk.statvfs(self.root)
        return found.f_blocks * found.f_frsize


def printable(text: str) -> str:
    """``text`` in characters that any log, ledger and terminal takes: others as ``\\xff`` or ``\\n``."""
    decoded = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in decoded)


def _check_bounds(directory: int, offered: Sequence[OfferedFile], credentials: Sequence[OfferedCredential]) -> None:
    """Check the number of names in a ticket's directory, and the bytes that they take. :raises Overrun: too many.

    A file that has other names, as one in the scratch directory, counts by its size; one that is only here also by its
    blocks, which may lie beyond its end.
    """
    most = len(offered) + len(credentials) + _INTAKE_MORE_NAMES
    names = trees.names(directory, most + 1)
    if len(names) > most:
        raise Overrun(f"more than {most} names were linked where {len(offered)} files were offered")
    offered_bytes = sum(item.size_bytes for item in offered) + sum(item.size_bytes for item in credentials)
    taken_bytes = 0
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            found = durable.disk.stat(name, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                raise Overrun(f"{printable(name)} is not a regular file")
            blocks_bytes = found.st_blocks * _BLOCK_BYTES // _ALLOCATED_MOST if found.st_nlink == 1 else 0
            taken_bytes += max(found.st_size, blocks_bytes)
    if taken_bytes > offered_bytes + _INTAKE_MORE_BYTES:
        raise Overrun(f"{taken_bytes} bytes are in the spool where {offered_bytes} were offered")


def _identity(path: Path) -> tuple[int, int]:
    """Return device and inode, which identify a directory."""
    found = durable.disk.lstat(path)
    return found.st_dev, found.st_ino


def _given(directory: int, held: StoredFile, account: Account, gid: int) -> StoredFile:
    """Give a file to an account.

    No process of the job's account can open the file for writing any more. A process that has it open cannot set its
    times back, so each later change shows in them. The job's group may still read the file under other names: the
    plugin has to upload it when the hand-off comes to nothing, or when HTCondor repeats the upload.

    :param gid: the job's group. :raises NotClaimed: the file has changed meanwhile.
    """
    name = str(held.position)
    durable.disk.chown(name, account.uid, gid, dir_fd=directory, follow_symlinks=False)
    durable.disk.chmod(name, 0o440, dir_fd=directory)
    found = durable.disk.stat(name, dir_fd=directory, follow_symlinks=False)
    if found.st_size != held.size_bytes:
        raise NotClaimed(f"{held.name} has {found.st_size} bytes, {held.size_bytes} were offered: it still changes")
    return replace(held, mtime_ns=found.st_mtime_ns)


def _sync_directory(path: Path) -> None:
    """Sync the files in a ticket's directory, then their names."""
    _each_file(path, _fdatasync)
    with trees.opened(path) as directory:
        _or_refused(durable.disk.fsync, directory)


def _each_file(path: Path, work: Callable[[int], None]) -> None:
    """Call ``work`` with a descriptor of each file in a ticket's directory."""
    with trees.opened(path) as directory:
        for name in trees.names(directory):
            if name == CREDENTIALS:
                continue
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = durable.disk.open(name, flags, dir_fd=directory)
            try:
                work(descriptor)
            finally:
                durable.disk.close(descriptor)


def _fdatasync(descriptor: int) -> None:
    _or_refused(durable.disk.fdatasync, descriptor)


def _or_refused(sync: Callable[[int], None], descriptor: int) -> None:
    """Sync a descriptor. :raises _Refused: the kernel reports a failure, which it will not report again."""
    try:
        with durable.step("spool-data"):
            sync(descriptor)
    except OSError as problem:
        raise _Refused(problem.strerror) from problem
