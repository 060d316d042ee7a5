"""Files in this router's spool on their way to another terminal, for who cannot reach that one."""

from __future__ import annotations

import asyncio
import os
from typing import NamedTuple

from overlay_router.custodian import Custodian
from overlay_router.destination import Published
from overlay_router.forwarder import OnDisk
from overlay_router.keys import Key
from overlay_router.spool import Held
from stageout.core import log
from stageout.core.errors import ErrorClass
from stageout.wire import frames
from stageout.wire.overlay import BLOCK_BYTES, Answer, Get, Stat

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
        """What a STAT with a terminal is answered: the newest such file, generation 0, or why there is none."""
        held = await _held(self._custodian, self._on_disk, key, ask)
        if isinstance(held, Answer):
            return held
        operation, name = held.operation, ask.path.rpartition("/")[2]
        return Answer((name,), ("file",), (operation.size_bytes,), (operation.mode,), (held.taken_at,))

    async def file(self, key: Key, ask: Get) -> Published | Answer:
        """That file for a GET, every block of it checked; or why there is none.

        It is read as a whole for the first GET, and for another one only if it was touched since.
        """
        held = await _held(self._custodian, self._on_disk, key, ask)
        if isinstance(held, Answer):
            return held
        custodian = self._custodian
        assert custodian is not None
        try:
            found = await self._on_disk(lambda: os.open(custodian.file(held), os.O_RDONLY | os.O_CLOEXEC))
        except OSError as problem:
            return Answer(code=ErrorClass.SERVER_ERROR.code, message=f"{ask.path}: {problem.strerror}")
        is_right = False
        try:
            digests = await self._on_disk(lambda: custodian.digests(held))
            is_right = await self._is_right(found, held, digests)
        finally:
            if not is_right:
                os.close(found)
        if is_right:
            return Published(held.operation.size_bytes, held.operation.mode, 0, found)
        log.error("custody-damaged", path=ask.path, advice="check the disk of the spool")
        text = f"{ask.path}: the copy in this router's spool is damaged"
        return Answer(code=ErrorClass.SERVER_ERROR.code, message=text)

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


async def _held(custodian: Custodian | None, on_disk: OnDisk, key: Key, ask: Stat | Get) -> Held | Answer:
    if custodian is None:
        return Answer(code=ErrorClass.NOT_FOUND.code, message="this router takes nothing into custody")
    refusal = custodian.terminals.reason_against(ask.terminal, key.name)
    if refusal:
        return Answer(code=ErrorClass.PERMISSION_DENIED.code, message=refusal)
    held = await on_disk(lambda: custodian.find(ask.terminal, ask.path))
    text = f"{ask.path}: nothing of that name is here on its way to {ask.terminal}"
    return held or Answer(code=ErrorClass.NOT_FOUND.code, message=text)


def _is_right(file: int, held: Held, digests: list[bytes]) -> bool:
    """Whether all blocks are what came in; the descriptor is closed then."""
    digest, size_bytes = frames.digests()[held.digest], held.operation.size_bytes
    try:
        return len(digests) == held.operation.blocks and all(
            digest(os.pread(file, min(BLOCK_BYTES, size_bytes - at * BLOCK_BYTES), at * BLOCK_BYTES)) == known
            for at, known in enumerate(digests)
        )
    except OSError:
        return False
    finally:
        os.close(file)
