"""Files in this router's spool on their way to another terminal, for who cannot reach that one."""

from __future__ import annotations

import asyncio
import os

from overlay_router.custodian import Custodian
from overlay_router.destination import Published
from overlay_router.forwarder import OnDisk
from overlay_router.keys import Key
from overlay_router.spool import Held
from stageout.core import log
from stageout.core.errors import ErrorClass
from stageout.wire import frames
from stageout.wire.overlay import BLOCK_BYTES, Answer, Get, Stat


async def entry(custodian: Custodian | None, on_disk: OnDisk, key: Key, ask: Stat) -> Answer:
    """What a STAT with a terminal is answered: the newest such file in custody, generation 0, or why there is none."""
    held = await _held(custodian, on_disk, key, ask)
    if isinstance(held, Answer):
        return held
    operation, name = held.operation, ask.path.rpartition("/")[2]
    return Answer((name,), ("file",), (operation.size_bytes,), (operation.mode,), (held.taken_at,))


async def file(custodian: Custodian | None, on_disk: OnDisk, key: Key, ask: Get) -> Published | Answer:
    """That file for a GET, every block of it checked; or why there is none."""
    held = await _held(custodian, on_disk, key, ask)
    if isinstance(held, Answer):
        return held
    assert custodian is not None
    try:
        found = await on_disk(lambda: os.open(custodian.file(held), os.O_RDONLY | os.O_CLOEXEC))
    except OSError as problem:
        return Answer(code=ErrorClass.SERVER_ERROR.code, message=f"{ask.path}: {problem.strerror}")
    is_right = False
    try:
        digests = await on_disk(lambda: custodian.digests(held))
        is_right = await asyncio.to_thread(_is_right, found, held, digests)
    finally:
        if not is_right:
            os.close(found)
    if is_right:
        return Published(held.operation.size_bytes, held.operation.mode, 0, found)
    log.error("custody-damaged", path=ask.path, advice="check the disk of the spool")
    return Answer(code=ErrorClass.SERVER_ERROR.code, message=f"{ask.path}: the copy in this router's spool is damaged")


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
    digest, size_bytes = frames.digests()[held.digest], held.operation.size_bytes
    try:
        return len(digests) == held.operation.blocks and all(
            digest(os.pread(file, min(BLOCK_BYTES, size_bytes - at * BLOCK_BYTES), at * BLOCK_BYTES)) == known
            for at, known in enumerate(digests)
        )
    except OSError:
        return False
