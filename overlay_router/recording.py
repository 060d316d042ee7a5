"""Blocks that a worker reports: recorded, and only then said to their sender; where that cannot be, he hears why."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable

from overlay_router.custodians.forwarder import OnDisk
from overlay_router.data.jobs import Report
from overlay_router.data.pool import Pool
from overlay_router.ends import Ends
from overlay_router.local.replies import Reply
from overlay_router.outgoing import Outgoing
from stageout.core import log

#: Transfers whose data are whole and that are remembered to be so; a late connection comes within seconds.
_WHOLE = 4096
#: A full disk is tried again after so long; a sender waits so long without a word.
RECORD_AGAIN_S, _SILENCE_S = 1.0, 5.0


class Recording:
    """The blocks that came, on their way into the records.

    :param on_disk: runs a call in the thread that owns the ends. :param deliver: sends replies.
    :param end_lines: ends the control connections of a sender, who hears the problem.
    """

    def __init__(
        self,
        ends: Ends,
        on_disk: OnDisk,
        deliver: Callable[[list[Reply]], None],
        end_lines: Callable[[str, Exception], None],
        outgoing: Outgoing,
        pool: Pool,
    ) -> None:
        self._ends, self._on_disk, self._deliver, self._end_lines = ends, on_disk, deliver, end_lines
        self._outgoing, self._pool = outgoing, pool
        self._whole: dict[int, None] = {}
        self._waiting: dict[int, Exception] = {}
        self._late: dict[int, list[Report]] = {}

    def is_whole(self, tid: int) -> bool:
        """Tell whether nobody may write to a transfer any more."""
        return tid in self._whole

    def comes_again(self, tid: int) -> None:
        """Blocks of it were not right, and come again."""
        self._whole.pop(tid, None)
        self._pool.hang_up(tid)

    def check(self, tid: int) -> None:
        """Of a transfer that is opened. :raises OSError: :raises sqlite3.Error: for that its blocks are not recorded.

        Else its sender would be told so again and again, and begin anew each time without being any the wiser.
        """
        if tid in self._waiting:
            raise self._waiting[tid]

    async def record(self, report: Report) -> None:
        """The blocks that came are recorded and acknowledged; when that fails (a full disk), as soon as it can.

        Its sender waits, and hears after some seconds what for.
        """
        since_s = time.monotonic()
        try:
            while True:
                try:
                    return await self.recorded(report)
                except (OSError, sqlite3.Error) as problem:
                    log.error("blocks-write-failed", tid=report.tid, problem=problem, again_s=RECORD_AGAIN_S)
                    if time.monotonic() - since_s >= _SILENCE_S:
                        await self._tell(report.tid, problem)
                await asyncio.sleep(RECORD_AGAIN_S)
        finally:  # also when the connection ends that waits for it
            self._waiting.pop(report.tid, None)

    async def _tell(self, tid: int, problem: Exception) -> None:
        is_told, self._waiting[tid] = tid in self._waiting, problem
        if not is_told:
            await self.not_written(tid, problem)

    async def not_written(self, tid: int, problem: Exception) -> None:
        """Data of a transfer cannot be kept now: its sender hears it, and asks for the transfer again."""
        try:
            sender = await self._on_disk(lambda: self._ends.sender_of(tid))
        except sqlite3.Error as unread:  # he hears it when he asks for anything
            log.error("blocks-read-failed", tid=tid, problem=unread)
            return
        self._end_lines(sender, problem)

    async def recorded(self, came: Report) -> None:
        """As :meth:`record`, once. :raises OSError: :raises sqlite3.Error: it cannot be now."""
        if came.late:
            self._deliver(await self._on_disk(lambda: self._ends.written_late(came)))
            return
        # In one: what takes them into custody, or sends them on, may come right behind, and must not know more.
        report, replies, is_whole = await self._on_disk(lambda: self._ends.record(came))
        self._deliver(replies)
        self._outgoing.staged(report.tid, report.blocks, is_whole)
        if is_whole:
            await self.close(report.tid)
            self._deliver(await self._on_disk(lambda: self._ends.whole(report.tid)))
            self._outgoing.look()

    async def close(self, tid: int) -> None:
        """Late copies of blocks must not reach a file that has its name: nobody writes to a whole one any more."""
        self._whole[tid] = None
        while len(self._whole) > _WHOLE:
            del self._whole[next(iter(self._whole))]
        late = self._late.setdefault(tid, [])
        late += await self._pool.no_more(tid)
        for report in tuple(late):  # of whose connection ends meanwhile they are for the next one
            await self.record(report)
            late[:] = [one for one in late if one is not report]
        if not late:
            self._late.pop(tid, None)
