"""One route of a file on its way: a control connection in a thread, and connections that carry blocks, each in one.

A connection that has nothing under way when the file is there is left to the next one (:mod:`stageout.overlay.kept`).
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from stageout.core import log
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.cargo import Loan, Share
from stageout.overlay.channel import Channel
from stageout.overlay.kept import Circuit, Place, kept, place
from stageout.overlay.links import Lane, links
from stageout.overlay.sockets import FAR_CONNECTIONS, LONG_S, Sockets
from stageout.overlay.tcp import Segments
from stageout.overlay.wire.blocks import Part
from stageout.overlay.wire.messages import BLOCK_BYTES, Attach, Heartbeat, Message, Opened
from stageout.overlay.wire.route import Route, shown

if TYPE_CHECKING:
    from stageout.overlay.sending import Sending

#: Silence after which one of several routes counts as dead: so long, or three round trips where that is more.
LEAST_SILENCE_S = 1.0
_LOOK_S = 0.05
#: A connection on loan by which nothing leaves is looked at ever more seldom. Where blocks wait for one it comes back
#: then, and none is lent for a while.
_MOST_LOOK_S, _NOT_LENT_S = 0.5, 2.0
FIRST_PAUSE_S, _MAX_PAUSE_S = 0.25, 4.0
_ROUND_TRIPS = 8
_DOUBLINGS = 20
#: A control connection that another file has left must answer within this time, or a new one is made.
_TRIAL_S = 5.0
#: A router that has enough connections of one host or key says so, or just closes one more. Connections that are made
#: before they are needed, and those that are kept, must not be the reason that a file does not go: it is tried so often
#: again.
_CROWDED, _CHANCES = frozenset({ErrorClass.CONNECTION_LOST, ErrorClass.SERVER_BUSY}), 2
#: Numbers of heartbeats: an answer to one of an earlier file is none to a later one.
_BEATS = itertools.count(1)


class Way:
    """One route: its control connection, in a thread, and those that carry blocks, each in one.

    :ivar had: what the other side had said that it has when it was asked by this route.
    :ivar opened: what it said last by this route, None while that is down.
    """

    def __init__(self, sending: Sending, route: Route, is_one_of_several: bool) -> None:
        self._sending, self.route, self._several = sending, route, is_one_of_several
        self.control: Channel | None = None
        self._lane: Lane | None = None
        self.carriers: set[int] = set()
        self.problem: TransferFailure | None = None
        self.sent_bytes = 0
        self.moved_s = self._up_s = 0.0
        self.moved = 0
        self.had = b""
        self.opened: Opened | None = None
        self.damages = 0
        self._epoch = ""
        self.sockets = Sockets(sending.cargo.connections, sending.cargo.most_connections)
        self._manned: set[int] = set()
        self._acked_bytes = 0
        self._channels: set[Channel] = set()
        self._busy: set[Channel] = set()
        self._left: set[Channel] = set()
        self._proven: set[Channel] = set()
        self._lent: set[Channel] = set()
        self._not_lent_until_s = float("-inf")
        self._spare: list[Channel] = []
        self._coming: list[Future[Channel]] = []
        self._was_tried = False
        self._chances = _CHANCES
        self._files = 0
        self._flow = ""
        self._is_on_trial = False
        self._trips_s: list[float] = []
        self._silent = 0
        self._lock, self._hearing = threading.Lock(), threading.Lock()

    def run(self) -> None:
        """Keep the route up until all is over, or somebody must change something first."""
        cargo = self._sending.cargo
        hop = self.route[0] if self.route else cargo.gateway.server
        with links().lane(hop, cargo.claim) as self._lane:
            self._keep_up()

    def _keep_up(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._sending.over:
            started_s = time.monotonic()
            try:
                self._once()
            except TransferFailure as failure:
                with self._sending.changed:
                    if self._sending.over:
                        return
                    if not self._has_made_room(failure):
                        self.problem = failure
                    self._sending.changed.notify_all()
                if not failure.kind.retryable:
                    return
            except Exception as problem:
                self._sending.fail(TransferFailure(ErrorClass.UNKNOWN, f"{type(problem).__name__}: {problem}"))
                raise
            if time.monotonic() - started_s > _MAX_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            self._pause(pause_s)
            pause_s = min(_MAX_PAUSE_S, pause_s * 2)

    def _has_made_room(self, failure: TransferFailure) -> bool:
        """Tell whether it may be that idle connections took the place of one that is needed. There are none now."""
        if self._up_s or not self._chances or failure.kind not in _CROWDED:
            return False
        self._chances -= 1
        if failure.kind is ErrorClass.SERVER_BUSY:
            kept().close()
        return True

    def share(self) -> Share:
        """The work of the route."""
        sockets = self.sockets
        return Share(self.route, self.sent_bytes, str(self.problem or ""), sockets.now, sockets.reason)

    def rate(self) -> float:
        """Blocks a second since it came up."""
        return self.moved / max(1e-3, time.monotonic() - self._up_s)

    def say(self, message: Message) -> bool:
        """Tell whether it could be said by this route."""
        with self._lock:
            control = self.control
            try:
                if control is not None:
                    control.send(message)
            except TransferFailure:
                return False  # its own thread notices too
            return control is not None

    def close(self) -> None:
        """End its connections; their threads notice and close them."""
        with self._lock:
            for channel in list(self._channels):
                channel.abort()
            control, self.control = self.control, None
            spare, self._spare = self._spare, []
            coming, self._coming = self._coming, []
        if control is not None:
            control.finish()
        for channel in spare:
            channel.close()
        for future in coming:
            future.add_done_callback(_close)

    def leave(self) -> None:
        """The file is there, and each block went once: the next file may have those connections that had some of it.

        No thread touches them now, and nothing is under way on them. One that had none may have come after the end of
        the file: then it was refused, as its next user would find out too late.
        """
        if not self._hearing.acquire(timeout=_LOOK_S):
            return
        try:
            with self._lock:
                control, self.control = self.control, None
                if control is None:
                    return
                carriers = list(self._channels & self._proven - self._busy) if self._sending.keeps else []
                self._channels.difference_update(carriers)
                self._left.update((control, *carriers))
        finally:
            self._hearing.release()
        kept().leave(self._place, Circuit(control, carriers, min(self._trips_s), self._files + 1))

    @property
    def _place(self) -> Place:
        cargo = self._sending.cargo
        return place("put", cargo.gateway, self.route, cargo.claim)

    def _pause(self, seconds: float) -> None:
        with self._sending.changed:
            self._sending.changed.wait_for(lambda: self._sending.over, seconds)

    def _once(self) -> None:
        """Until the control connection ends: one that another file has left, if there is one that is still good."""
        cargo = self._sending.cargo
        circuit = kept().take(self._place, cargo.gateway, self._lane)
        if circuit is not None and circuit.control is not None:
            self._spare, self._files = circuit.carriers, circuit.files
            self._flow = circuit.control.flow  # two flows for one file would give it two parts in relays
            self._is_on_trial = True
            try:
                self._use(circuit.control, circuit.round_trip_s)
                return
            except TransferFailure:
                if not self._is_on_trial:
                    raise
            finally:
                self._is_on_trial = False
        self._flow = ""
        self._files, started_s, is_made = 0, time.monotonic(), threading.Event()
        if not self._was_tried:
            self._was_tried = True
            self._prepare(is_made)
        try:
            control = Channel(cargo.gateway, self.route, self._lane)
        except BaseException:
            self.close()
            raise
        finally:
            is_made.set()
        self._use(control, time.monotonic() - started_s)

    def _prepare(self, is_made: threading.Event) -> None:
        """Have connections for blocks made at the same time as the one for control: each takes several round trips.

        :param is_made: the one for control. Where that takes long, more are needed.
        """
        first = self._wanted
        self._make_ahead(first)

        def more() -> None:
            if not is_made.wait(LONG_S) and not self._sending.over:
                self.sockets.note_way(LONG_S)
                self._make_ahead(self._wanted - first)

        if first < min(FAR_CONNECTIONS, self._sending.table.open):
            threading.Thread(target=more, daemon=True).start()

    def _make_ahead(self, number: int) -> None:
        """So many connections, each in a thread."""

        def connect(future: Future[Channel]) -> None:
            try:
                future.set_result(Channel(self._sending.cargo.gateway, self.route, self._lane, flow=self._flow))
            except Exception as problem:  # whoever needs it makes another one, and says why that cannot be
                future.set_exception(problem)

        for _ in range(number):
            future: Future[Channel] = Future()
            with self._lock:
                if self._sending.over:
                    return  # nobody would take it, or close it
                self._coming.append(future)
            threading.Thread(target=connect, args=(future,), daemon=True).start()

    @property
    def _wanted(self) -> int:
        """Return how many connections for blocks there should be."""
        return min(self.sockets.now, self._sending.table.open)

    def _made_before(self) -> Channel | None:
        """A connection that another file has left, or that was made before it was needed."""
        with self._lock:
            if self._spare:
                return self._spare.pop()
            future = self._coming.pop() if self._coming else None
        return None if future is None or future.exception() else future.result()

    def _use(self, control: Channel, trip_s: float) -> None:
        self._trips_s = [trip_s]
        self.sockets.note_way(trip_s)
        with self._owned(control):
            self.had = self._sending.had()
            self._sending.has_asked = True
            control.send(self._sending.cargo.ask())
            try:
                self._listen(control, self._trips_s)
            finally:
                was_up = self.control is not None
                self.close()
                self._sending.down(self, was_up)

    @contextlib.contextmanager
    def _owned(self, channel: Channel) -> Iterator[Channel]:
        """It is closed at the end, if it was not left to the next file."""
        try:
            yield channel
        finally:
            if channel not in self._left:
                channel.close()

    def _listen(self, control: Channel, trips_s: list[float]) -> None:
        """Messages until the connection ends; a heartbeat four times within the silence that is allowed."""
        sending = self._sending
        heard_s = beat_s = time.monotonic()
        number = -1
        while not sending.over:
            silence_s = self._silence_s(trips_s)
            if control.has_more(min(FIRST_PAUSE_S, silence_s / 4)):
                with self._hearing:
                    if control in self._left:
                        return
                    message = control.receive()
                heard_s = time.monotonic()
                if isinstance(message, Heartbeat) and message.echo == number:
                    trips_s[:] = [*trips_s[1 - _ROUND_TRIPS :], heard_s - beat_s]
                elif isinstance(message, Opened):
                    self._opened(control, message)
                else:
                    sending.hear(self, message)
            now_s = time.monotonic()
            self._tune(control, now_s, min(trips_s))
            if now_s - max(heard_s, self.moved_s) > silence_s:
                self._silent += not self._is_on_trial
                raise control.failure(ErrorClass.STALLED, f"silent for {silence_s:.1f} s")
            if now_s - beat_s > silence_s / 4:
                number, beat_s = next(_BEATS), now_s
                with self._lock:
                    if control not in self._left:
                        control.send(Heartbeat(number))

    def _silence_s(self, trips_s: list[float]) -> float:
        """A route that was given up for nothing is given twice the time when it is back."""
        timeout_s = self._sending.cargo.gateway.timeout_s
        if self._is_on_trial:
            return min(timeout_s, _TRIAL_S)
        if not self._several:
            return timeout_s
        return min(timeout_s, max(LEAST_SILENCE_S, 3 * max(trips_s)) * (1 << min(self._silent, _DOUBLINGS)))

    def _opened(self, control: Channel, message: Opened) -> None:
        began_anew, self._epoch = message.epoch != self._epoch, message.epoch
        if self.control is not None and began_anew:  # what it does not list is not there any more
            self._sending.hear(self, message)
            return
        if self.control is not None:
            self.damages += 1
            self._sending.damaged(self, message, control)
            return
        self._sending.hear(self, message)
        self._sending.joined(self)
        with self._lock:
            if self._sending.over:
                return
            self.control, self.problem, self._is_on_trial = control, None, False
            self._up_s, self.moved = time.monotonic(), 0
        self.sockets.begin(time.monotonic())
        with self._lock:
            self._manned = set()
        self._man(control)
        self._sending.repeat(self)

    def _man(self, control: Channel) -> None:
        """As many connections as there should be; what is too much ends by itself, the latest first."""
        with self._lock:
            for place in range(self._wanted):
                if place not in self._manned:
                    self._manned.add(place)
                    threading.Thread(target=self._carry, args=(control, place), daemon=True).start()

    def _tune(self, control: Channel, now_s: float, round_trip_s: float) -> None:
        """Another number of connections, where that is better."""
        if self.sockets.is_fixed or self.control is not control or not self._sending.table.queue:
            return
        with self._lock:
            acked_bytes = self._acked_bytes + sum(channel.acked_bytes for channel in self._channels)
            segments = sum((channel.segments for channel in self._channels), Segments())
        sample = self.sockets.look(now_s, acked_bytes, round_trip_s, segments)
        if sample is not None and sample.after != sample.before:
            log.event("connections-changed", route=shown(self.route), connections=sample.after, before=sample.before,
                      rate_mb_s=round(sample.rate / 1e6, 3), why=sample.reason)  # fmt: skip
            self._man(control)

    def _leaves(self, control: Channel, place: int) -> bool:
        """Tell whether a connection is one too many; then it ends."""
        with self._lock:
            if self.control is control and place >= self.sockets.now:
                self._manned.discard(place)
                return True
            return False

    def _carry(self, control: Channel, place: int) -> None:
        """Connections for blocks, one after the other, as long as the control connection lasts."""
        pause_s = FIRST_PAUSE_S
        file = self._sending.duplicate()
        if file < 0:
            return
        try:
            while self.control is control and not self._sending.over and not self._leaves(control, place):
                number = self._sending.carrier(self)
                spare = self._made_before()
                try:
                    if self._blocks(control, number, place, file, spare):
                        return
                except TransferFailure as failure:
                    self._sending.lost(number, failure, spare is not None)
                    if self.control is control and spare is None:
                        self._pause(pause_s)
                        pause_s = min(_MAX_PAUSE_S, pause_s * 2)
        except Exception as problem:
            self._sending.fail(TransferFailure(ErrorClass.UNKNOWN, f"{type(problem).__name__}: {problem}"))
            raise
        finally:
            os.close(file)

    def _blocks(self, control: Channel, number: int, place: int, file: int, spare: Channel | None) -> bool:
        """Blocks over one connection; True when it is one too many, and all that it had was sent.

        :param spare: one that was made before; None: a new one is made.
        """
        sending = self._sending
        with self._owned(spare or Channel(sending.cargo.gateway, self.route, self._lane, flow=self._flow)) as channel:
            with self._lock:
                if self.control is not control:
                    return False
                self._channels.add(channel)
                self._busy.add(channel)
            try:
                channel.send(Attach(sending.tid))
                buffer = memoryview(mmap.mmap(-1, sending.cargo.ask().block_bytes))  # the kernel copies faster to pages
                while self.control is control and not sending.over:
                    if self._leaves(control, place):
                        self._await_staged(control, channel, number)
                        return True
                    if self._lend(control, channel, number):
                        continue
                    part = self._next(channel, number)
                    if part is not None:
                        self._send(channel, part, sending.read(part.block, file, buffer, channel))
            finally:
                with self._lock:
                    self._channels.discard(channel)
                    self._busy.discard(channel)
                    if channel not in self._left:
                        self._acked_bytes += channel.acked_bytes
        return False

    def _lend(self, control: Channel, channel: Channel, number: int) -> bool:
        """Let somebody else send by a connection, who would; whether that was so, and it is back, or all is over.

        One that carries blocks stays here at least: what has to be read from the file must be able to leave, too.

        :raises TransferFailure: as :meth:`_follow`.
        """
        sending, turn = self._sending, self._sending.turn
        if not sending.grows or time.monotonic() < self._not_lent_until_s:
            return False
        with self._lock:
            if channel in self._left or len(self._channels - self._lent) < 2:
                return False
            self._busy.add(channel)
            self._lent.add(channel)
        try:
            loan = sending.cargo.lend(channel, turn[0])
            if loan is not None:
                self._follow(loan, turn, control, channel, number)
        finally:
            with self._lock:
                self._lent.discard(channel)
        return loan is not None

    def _follow(self, loan: Loan, turn: tuple[int, str], control: Channel, channel: Channel, number: int) -> None:
        """Until a connection on loan is back, or all is over.

        At its end, however it comes, each block that has left is SENT. So if it is lost, or this route, or the transfer
        has begun anew meanwhile, they are given to others by whoever hears of the failure.

        :raises TransferFailure: that is so.
        """
        sending, look_s = self._sending, _LOOK_S
        try:
            with loan:
                while self.control is control and sending.turn == turn and not sending.over and not loan.is_back:
                    left = loan.wait(look_s)
                    look_s = _LOOK_S if left else min(2 * look_s, _MOST_LOOK_S)
                    if left:
                        self.sent_bytes += sending.went(left, number)
                        self._proven.add(channel)
                    if channel.lendable() is None or not sending.grows or self._is_wanted_back(look_s):
                        loan.recall()
                    if channel.has_more(0):
                        channel.receive()  # nothing comes here but the reason of its end
        finally:
            self.sent_bytes += sending.went(loan.rest(), number)
        if not sending.over and (self.control is not control or sending.turn != turn):
            raise channel.failure(ErrorClass.CONNECTION_LOST, "what was sent by it may have to come again")

    def _is_wanted_back(self, look_s: float) -> bool:
        """Tell whether a connection on loan is needed here: the last one that was not lent has ended, or blocks
        wait."""
        with self._lock:
            if self._channels <= self._lent:
                return True
        if look_s < _MOST_LOOK_S or not self._sending.table.queue:
            return False
        self._not_lent_until_s = time.monotonic() + _NOT_LENT_S
        return True

    def _await_staged(self, control: Channel, channel: Channel, number: int) -> None:
        """A sender that left before its blocks are STAGED would not hear that one of them was refused, or that its end
        has died.

        :raises TransferFailure: that is so; they are sent again by others.
        """
        while self.control is control and not self._sending.over and self._sending.has_under_way(number):
            if channel.has_more(FIRST_PAUSE_S):
                channel.receive()

    def _next(self, channel: Channel, number: int) -> Part | None:
        """A block, or a part of one, for a connection; while there is none, it may be left to the next file."""
        with self._lock:
            self._busy.discard(channel)
        part = self._sending.take(self, number, channel.prompt_bytes)
        with self._lock:
            if channel in self._left:
                return None
            if part is not None:
                self._busy.add(channel)
            elif channel.has_more(0):
                channel.receive()  # nothing comes here but the reason of its end
        return part

    def _send(self, channel: Channel, part: Part, data: memoryview | None) -> None:
        """:param data: all of the block."""
        if data is None:
            return
        whole_bytes, data = len(data), data[part.start : part.end]
        if len(data) == whole_bytes:
            channel.send_block(self._sending.tid, part.block, data)
        else:
            channel.send_part(self._sending.tid, part.block * BLOCK_BYTES + part.start, data)
        self._proven.add(channel)
        self.sent_bytes += len(data)
        try:
            self._sending.cargo.count(len(data))
        except TransferFailure as failure:
            self._sending.fail(failure)


def _close(future: Future[Channel]) -> None:
    if not future.exception():
        future.result().close()
