"""Files in this router's spool on their way to another terminal, for who cannot reach that one."""

from __future__ import annotations

import asyncio
import os
from typing import NamedTuple

from overlay_router.custodians.custodian import Custodian
from overlay_router.custodians.forwarder import OnDisk
from overlay_router.custodians.pack_custody import HeldFile
from overlay_router.custodians.spool import Held
from overlay_router.local.replies import Published
from overlay_router.peers.keys import Key
from stageout.core import log
from stageout.core.errors import ErrorClass
from stageout.overlay.wire import frames
from stageout.overlay.wire.messages import BLOCK_BYTES, Answer, Get, Stat

_REMEMBERED = 1000


class _Mark(NamedTuple):
    """A file as it was when it was checked."""

    tid: int
    inode: int
    size_bytes: int
    mtime_ns: int


class Finding:
    """Answers about one custodian's spool, None when there is none.

    :param on_disk: runs a call in the thread that owns the custodian.
    """

    def __init__(self, custodian: Custodian | None, on_disk: OnDisk) -> None:
        self._custodian, self._on_disk = custodian, on_disk
        self._checks: dict[_Mark, asyncio.Task[bool]] = {}

    async def entry(self, key: Key, ask: Stat) -> Answer:
        """The answer to a STAT with a terminal: the newest such file, generation 0, or why there is none."""
        found = await _found(self._custodian, self._on_disk, key, ask)
        if isinstance(found, Answer):
            return found
        name = ask.path.rpartition("/")[2]
        if isinstance(found, HeldFile):
            pack, position = found.pack, found.position
            size_bytes, mode, taken_at = pack.sizes_bytes[position], pack.modes[position], found.held.taken_at
        else:
            size_bytes, mode, taken_at = found.operation.size_bytes, found.operation.mode, found.taken_at
        return Answer((name,), ("file",), (size_bytes,), (mode,), (taken_at,))

    async def file(self, key: Key, ask: Get) -> Published | Answer:
        """That file for a GET, every block of it checked; or why there is none.

        It is read as a whole for the first GET, and for another one only if it was touched since.
        """
        found = await _found(self._custodian, self._on_disk, key, ask)
        if isinstance(found, Answer):
            return found
        assert self._custodian is not None
        try:
            if isinstance(found, HeldFile):
                published = await self._small(self._custodian, found)
            else:
                published = await self._large(self._custodian, found)
        except OSError as problem:
            return Answer(code=ErrorClass.SERVER_ERROR.code, message=f"{ask.path}: {problem.strerror}")
        except frames.NoDigest as problem:
            return Answer(code=ErrorClass.SERVER_ERROR.code, message=f"{ask.path}: {problem}")
        if published is not None:
            return published
        log.error("custody-damaged", path=ask.path, advice="check the disk of the spool")
        text = f"{ask.path}: the copy in this router's spool is damaged"
        return Answer(code=ErrorClass.SERVER_ERROR.code, message=text)

    async def _small(self, custodian: Custodian, found: HeldFile) -> Published | None:
        """A file of a pack, by itself in memory; None for one that is damaged."""
        data = await self._on_disk(lambda: custodian.packs.read(found))
        if data is None:
            return None
        file = os.memfd_create("file-of-pack", os.MFD_CLOEXEC)
        os.pwrite(file, data, 0)
        return Published(len(data), found.pack.modes[found.position], 0, file)

    async def _large(self, custodian: Custodian, held: Held) -> Published | None:
        """A file of its own; None for one that is damaged."""
        file = await self._on_disk(lambda: os.open(custodian.file(held), os.O_RDONLY | os.O_CLOEXEC))
        is_right = False
        try:
            digests = await self._on_disk(lambda: custodian.digests(held))
            is_right = await self._is_right(file, held, digests)
        finally:
            if not is_right:
                os.close(file)
        return Published(held.operation.size_bytes, held.operation.mode, 0, file) if is_right else None

    async def _is_right(self, found: int, held: Held, digests: list[bytes]) -> bool:
        status = os.fstat(found)
        mark = _Mark(held.tid, status.st_ino, status.st_size, status.st_mtime_ns)
        check = self._checks.get(mark)
        if check is None:
            own = os.dup(found)  # whoever asked first may go away meanwhile
            check = asyncio.get_running_loop().create_task(asyncio.to_thread(_is_right, own, held, digests))
            self._checks[mark] = check
            if len(self._checks) > _REMEMBERED:
                del self._checks[next(iter(self._checks))]
        if not await asyncio.shield(check):
            self._checks.pop(mark, None)
            return False
        return True


async def _found(custodian: Custodian | None, on_disk: OnDisk, key: Key, ask: Stat | Get) -> Held | HeldFile | Answer:
    if custodian is None:
        return Answer(code=ErrorClass.NOT_FOUND.code, message="this router takes nothing into custody")
    where = ask.terminal, ask.path
    alone, packed = await on_disk(lambda: (custodian.find(*where), custodian.packs.find(*where)))
    if alone is not None and packed is not None:
        newest: Held | HeldFile | None = packed if packed.held.taken_at > alone.taken_at else alone
    else:
        newest = alone or packed
    # a file may go by further custodians: whoever may deposit for the next one may ask what is on its way
    refusal = custodian.terminals.reason_against(_terminal_of(newest) if newest else ask.terminal, key.name)
    if refusal and (newest or custodian.terminals.names(ask.terminal)):
        return Answer(code=ErrorClass.PERMISSION_DENIED.code, message=refusal)
    text = f"{ask.path}: nothing of that name is here on its way to {ask.terminal}"
    return newest or Answer(code=ErrorClass.NOT_FOUND.code, message=text)


def _terminal_of(found: Held | HeldFile) -> str:
    return found.held.terminal if isinstance(found, HeldFile) else found.operation.terminal


def _is_right(file: int, held: Held, digests: list[bytes]) -> bool:
    """Tell whether all blocks are what came in; the descriptor is closed then."""
    try:
        digest, size_bytes = frames.digest_of_kind(held.digest), held.operation.size_bytes
        return len(digests) == held.operation.blocks and all(
            digest(os.pread(file, min(BLOCK_BYTES, size_bytes - at * BLOCK_BYTES), at * BLOCK_BYTES)) == known
            for at, known in enumerate(digests)
        )
    except OSError:
        return False
    finally:
        os.close(file)
