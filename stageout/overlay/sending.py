"""One file over several routes at once.

Each route has a control connection of its own and connections that carry blocks. All of them pull from one table, so
the shares follow the speeds. The router says STAGED and its answer on every control connection. So when a route dies,
by a reset or by silence, the blocks that went with it unconfirmed are given to the others at once, and nothing else
changes. A route that idles at the end sends again what slower ones still have on their way. A dead one is tried again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Union

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.cargo import Cargo as Cargo
from stageout.overlay.cargo import Share as Share
from stageout.overlay.cargo import report as report
from stageout.overlay.channel import Channel
from stageout.overlay.way import FIRST_PAUSE_S, Way
from stageout.overlay.wire import blocks
from stageout.overlay.wire.blocks import PART_BYTES, BlockTable, Part
from stageout.overlay.wire.messages import (
    BLOCK_BYTES,
    MAX_RANGES,
    Custody,
    Message,
    NoSpace,
    Opened,
    Operation,
    Range,
    Result,
    Staged,
)
from stageout.overlay.wire.route import Route, shown

#: A connection without a block looks so often whether another route is late with one; that a block comes, it is told.
_LOOK_S, _IDLE_LOOK_S = 0.05, 0.5
_LOSSES = 4
_NOT_FINAL = ("pending", "unknown")
_DAMAGES = 3
Answer = Union[Result, Custody]


class RecordsLost(TransferFailure):
    """The router does not know any more what it has executed, and a PUBLISH has no answer yet."""


class Sending:
    """Send a file over all routes until the router says what became of it.

    :param file: descriptor of the file; each thread reads by a duplicate of its own.
    :param patience_s: how long all routes may be gone before it fails. None may be reached at first: it fails at once.
    :param grows: its blocks are sent as :meth:`arrived` names them, and it is published after :meth:`complete`.
    :param checks: when the router has lost its records after PUBLISH was said, it ends with :class:`RecordsLost`: the
        sender finds out whether that has happened. Else all is sent again.
    """

    def __init__(
        self,
        cargo: Cargo,
        file: int,
        routes: Sequence[Route],
        patience_s: float,
        grows: bool = False,
        checks: bool = False,
    ) -> None:
        self._checks = checks
        self.cargo, self._file, self._patience_s = cargo, file, patience_s
        lock = threading.RLock()
        self.changed = threading.Condition(lock)
        # Connections with nothing to send wait apart: of a block that arrives one of them has to hear, and nobody else.
        self.ready = threading.Condition(lock)
        self.table = BlockTable(cargo.blocks)
        self._grows = grows
        if grows:
            blocks.await_all(self.table)
        self.over = self.has_asked = False
        self.tid = 0
        self._epoch = ""
        self._answer: Answer | None = None
        self._failure: TransferFailure | None = None
        self._reading = 0
        self._order: Operation | None = None
        self._carriers = 0
        self._losses = 0
        self._damages = 0
        self._up_s = 0.0
        self._went: set[int] = set()
        self._went_again = False
        self.keeps = self._takes_parts = False
        self.ways = [Way(self, route, len(routes) > 1) for route in routes]

    def run(self) -> Answer:
        """The router's first answer. :raises TransferFailure: it is not to be had."""
        for way in self.ways:
            threading.Thread(target=way.run, daemon=True).start()
        with self.changed:
            while self._answer is None and self._failure is None:
                self.changed.wait(FIRST_PAUSE_S)
                if self._answer is None:
                    self._look()
        if self._answer is None:
            self.close()
            assert self._failure is not None
            raise self._failure
        return self._answer

    def arrived(self, indices: Iterable[int], first: bool = False) -> None:
        """These blocks of a file that grows may be sent. :param first: before all others."""
        with self.changed:
            before = len(self.table.queue)
            blocks.arrived(self.table, indices, first)
            self.ready.notify(len(self.table.queue) - before)

    def wake(self) -> None:
        """One of the connections that have nothing to send looks whether it is wanted for something else."""
        with self.changed:
            self.ready.notify()

    def went(self, indices: Collection[int], carrier: int) -> int:
        """Somebody else has sent these blocks of a file that grows, by a connection of ours: their size in bytes."""
        size_bytes = self.cargo.ask().size_bytes
        with self.changed:
            blocks.went(self.table, indices, carrier)
            self._went.update(indices)
        return sum(min(BLOCK_BYTES, size_bytes - index * BLOCK_BYTES) for index in indices)

    def lacking(self, indices: Iterable[int]) -> None:
        """These blocks of a file that grows are not here any more, until :meth:`arrived` names them again."""
        with self.changed:
            blocks.lacking(self.table, indices)

    def _notify(self) -> None:
        self.changed.notify_all()
        self.ready.notify_all()

    def is_waiting(self, block: int) -> bool:
        """Tell whether a block is still to be taken."""
        return self.table.state[block] is blocks.Block.READY

    def is_staged(self, block: int) -> bool:
        """Tell whether a block is durable at the other side."""
        return self.table.state[block] is blocks.Block.STAGED

    @property
    def turn(self) -> tuple[int, str]:
        """Number and epoch of the transfer there: with another one, what was sent before must perhaps come again."""
        return self.tid, self._epoch

    @property
    def grows(self) -> bool:
        """Tell whether more of its blocks may come."""
        return self._grows

    def complete(self) -> None:
        """The file grows no more: all its blocks have arrived."""
        self._grows = False
        self.publish()

    def say(self, message: Message) -> None:
        """Tell the router something by whatever route is up."""
        for way in self.ways:
            if way.say(message):
                return

    def close(self) -> None:
        """The end. If nothing can be under way any more, the connections are left to the next file; else all are
        closed: data that are still on their way are not needed."""
        with self.changed:
            self.over = True
            done = isinstance(self._answer, Result) and self._answer.outcome == "done"
            self._notify()
        for way in self.ways:
            if done and not self._went_again:
                way.leave()
            way.close()

    def shares(self) -> tuple[Share, ...]:
        """The work of each route."""
        return tuple(way.share() for way in self.ways)

    def fail(self, failure: TransferFailure) -> None:
        """End it: the file, or whoever wants it, is the reason, and no other route can help."""
        with self.changed:
            self._failure = self._failure or failure
            self._notify()

    def hear(self, way: Way, message: Message) -> None:
        """A message of the router. :raises TransferFailure: it cannot be."""
        mine = self.cargo.ask()
        told = getattr(message, "origin", mine.origin), getattr(message, "seq", mine.seq)
        if told != (mine.origin, mine.seq):
            return  # of a file that this connection served before
        with self.changed:
            if isinstance(message, Opened):
                self._opened(way, message)
            elif isinstance(message, Staged) and message.tid == self.tid and message.epoch in ("", self._epoch):
                self._staged(message)
            elif isinstance(message, Custody) or (isinstance(message, Result) and message.outcome not in _NOT_FINAL):
                self._answer = self._answer or message
            elif isinstance(message, NoSpace):
                server = self.cargo.gateway.server
                text = f"{server} has no room for it"
                self.fail(TransferFailure(ErrorClass.NO_SPACE_REMOTE, text, server, float(message.retry_after_s)))
            if not isinstance(message, Staged) or len(self.ways) > 1:
                self._notify()  # of one route, what is STAGED gives nobody anything to do, and there are many of these
        self.publish()

    def _named(self, ranges: Sequence[Range]) -> list[int]:
        """Blocks in ranges. :raises TransferFailure: the file has no such blocks."""
        if ranges and ranges[-1][1] > self.table.count:
            server = self.cargo.gateway.server
            raise TransferFailure(
                ErrorClass.NOT_SUPPORTED, f"{server} names blocks that the file does not have", server
            )
        return [block for first, end in ranges for block in range(first, end)]

    def had(self) -> bytes:
        """The blocks that the other side has reported before it is asked: a byte for each block."""
        with self.changed:
            return blocks.had(self.table) if self.tid else b""

    def _opened(self, way: Way, message: Opened) -> None:
        already, (had, way.had) = self._named(message.staged), (way.had, b"")
        way.opened = message
        if self.tid and (message.tid, message.epoch) != (self.tid, self._epoch):
            if self._checks and self._order is not None and message.epoch != self._epoch:
                server = self.cargo.gateway.server
                self.fail(RecordsLost(ErrorClass.SERVER_ERROR, f"{server} has lost its records", server))
                return  # what was said stands, and is not said again: to these records it would be new
            blocks.reopened(self.table, already)
            self._order = None
        else:
            blocks.staged(self.table, already)
            if blocks.forgotten(self.table, self._unnamed(message.staged, had)):
                self._order = None
        self.tid, self._epoch, self.keeps = message.tid, message.epoch, message.keeps
        self._takes_parts = message.parts
        self._up_s = time.monotonic()

    def _unnamed(self, ranges: Sequence[Range], had: bytes) -> Iterator[int]:
        """Blocks that the other side had, and does not name now: it has lost its data, but not its records."""
        end = ranges[-1][1] if len(ranges) == MAX_RANGES else len(had)  # there may be more than one message can name
        gaps = zip([0, *(end for _, end in ranges)], [*(first for first, _ in ranges), end])
        return (block for gap in gaps for block in range(*gap) if had[block : block + 1] == b"\1")

    def damaged(self, way: Way, message: Opened, control: Channel) -> None:
        """The router found that blocks are not what the manifest says; each route hears it, one is enough."""
        with self.changed:
            if way.damages <= self._damages:
                return
            self._damages = way.damages
            if self._damages > _DAMAGES:
                self.fail(control.failure(ErrorClass.CONTENT_MISMATCH, "blocks were damaged again and again"))
            blocks.reopened(self.table, self._named(message.staged))
            self._notify()

    def joined(self, way: Way) -> None:
        """A route that comes up knows what the others know."""
        with self.changed:
            way.damages = self._damages

    def _staged(self, message: Staged) -> None:
        now_s = time.monotonic()
        for block in self._named(message.staged):
            carriers = self.table.carriers.get(block, [])
            for way in self.ways:
                if any(carrier in way.carriers for carrier in carriers):
                    way.moved_s = now_s
                    way.moved += 1
            blocks.staged(self.table, [block])
        self._losses, self._up_s = 0, now_s

    def carrier(self, way: Way) -> int:
        """A number for a new connection of a route."""
        with self.changed:
            self._carriers += 1
            way.carriers.add(self._carriers)
            return self._carriers

    def has_under_way(self, carrier: int) -> bool:
        """Tell whether something that went with a connection is not yet STAGED."""
        with self.changed:
            return blocks.under_way(self.table, (carrier,)) > 0

    def take(self, way: Way, carrier: int, prompt_bytes: int = BLOCK_BYTES) -> Part | None:
        """A block, or a part of one, for a connection that has nothing to send; None when there is none for now.

        :param prompt_bytes: what that connection carries in a moment, a multiple of PART_BYTES.
        """
        with self.changed:
            if self.over:
                return None
            part = self._next(carrier, prompt_bytes)
            if part is None:
                late = self._late(way)
                if late is not None:
                    blocks.sent(self.table, late, carrier)
                    part = Part(late, 0, BLOCK_BYTES)
            if part is None:
                self.ready.wait(_LOOK_S if len(self.ways) > 1 else _IDLE_LOOK_S)
            else:
                self._reading += 1
                if not part.start:
                    self._went_again |= part.block in self._went
                    self._went.add(part.block)
            return part

    def _next(self, carrier: int, prompt_bytes: int) -> Part | None:
        """The data that were not yet sent: blocks, and at the end parts, so that all connections end at the same time.

        Several routes send whole blocks, and repeat those that are late: a part has no carrier of its own.
        """
        carriers = self.ways[0].sockets.now
        if self.table.rest is None:
            is_end = self._takes_parts and not self._grows and len(self.ways) == 1 and len(self.table.queue) < carriers
            if prompt_bytes >= BLOCK_BYTES or not is_end:
                block = blocks.take(self.table, carrier)
                return None if block is None else Part(block, 0, BLOCK_BYTES)
        even_bytes = len(self.table.queue) * BLOCK_BYTES // (2 * carriers) // PART_BYTES * PART_BYTES
        most_bytes = max(PART_BYTES, prompt_bytes, even_bytes)
        return blocks.take_part(self.table, carrier, most_bytes, BLOCK_BYTES, self.cargo.ask().size_bytes)

    def _late(self, way: Way) -> int | None:
        """A block that an idle route should send again: of those that a route of less than half its own rate has, which
        would come later; or, when it has nothing under way itself, the oldest.
        """
        found = [] if self._grows else blocks.tail(self.table, way.carriers)
        if blocks.under_way(self.table, way.carriers):
            slow = {carrier for other in self.ways if 2 * other.rate() < way.rate() for carrier in other.carriers}
            found = [block for block in found if slow.issuperset(self.table.carriers[block])]
        return next(iter(found), None)

    def read(self, block: int, file: int, buffer: memoryview, channel: Channel) -> memoryview | None:
        """The bytes of a block that was taken; None when they cannot be had: it comes again, or that ends it all."""
        data = None
        try:
            data = self.cargo.take(block, file, buffer, channel)
        except TransferFailure as failure:
            self.fail(failure)
        with self.changed:
            self._reading -= 1
        if self._failure is None:
            self.publish()
        return data

    def publish(self) -> None:
        """Say PUBLISH by all routes as soon as every block was read: the router waits for what is on its way."""
        with self.changed:
            ready = not self._reading and not any(self.table.state[i] is blocks.Block.READY for i in self.table.queue)
            ready = ready and self.table.rest is None
            if self.over or self._grows or not self.tid or not ready or self._order is not None:
                return
            channel = next((way.control for way in self.ways if way.control), None)
            if channel is None:
                return  # whichever route comes back says it
            try:
                self._order = self.cargo.publish(self.tid, channel)
            except TransferFailure as failure:
                self.fail(failure)
                return
        for way in self.ways:
            way.say(self._order)

    def repeat(self, way: Way) -> None:
        """A route came up: it hears the PUBLISH too."""
        if self._failure is not None:
            return
        if self._order is not None:
            way.say(self._order)
        else:
            self.publish()

    def lost(self, carrier: int, failure: TransferFailure, was_kept: bool = False) -> None:
        """A connection is gone: what it had on its way goes by the others. :param was_kept: that had to be expected."""
        with self.changed:
            blocks.carrier_down(self.table, carrier)
            self._losses += not was_kept
            if self._losses > _LOSSES * (1 + sum(way.sockets.now for way in self.ways)):
                self._failure = self._failure or failure
            self._notify()

    def down(self, way: Way, was_up: bool) -> None:
        """A route is gone, with all its connections."""
        with self.changed:
            if was_up:
                self._up_s = time.monotonic()
            for carrier in way.carriers:
                blocks.carrier_down(self.table, carrier)
            way.carriers.clear()
            way.opened = None
            self._believe_others()
            self._notify()
        self.publish()

    def _believe_others(self) -> None:
        """The answer of a route that is up counts, if there is one: any other came late, of a router that has died."""
        told = [(way, way.opened) for way in self.ways if way.opened is not None]
        if told and all((opened.tid, opened.epoch) != (self.tid, self._epoch) for _, opened in told):
            self._opened(*told[0])

    def duplicate(self) -> int:
        """A descriptor of the file for one thread; -1 when all is over, and the file perhaps closed."""
        with self.changed:
            return -1 if self.over else os.dup(self._file)

    def _look(self) -> None:
        """Tell whether there is still hope."""
        problems = [way.problem for way in self.ways if way.problem is not None]
        if len(problems) < len(self.ways) or any(way.control for way in self.ways):
            return
        hopeless = not self._up_s or all(not problem.kind.retryable for problem in problems)
        if not hopeless and time.monotonic() - self._up_s < self._patience_s:
            return
        best = next((problem for problem in problems if problem.kind.retryable), problems[0])
        text = "; ".join(dict.fromkeys(f"{_by(way.route)}{way.problem}" for way in self.ways))
        self._failure = self._failure or TransferFailure(best.kind, text, best.server, best.retry_after_s)


def _by(route: Route) -> str:
    return f"by {shown(route)}: " if route else ""
