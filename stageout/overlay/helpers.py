"""Further connections for packs, over a long way: TCP begins slowly on each, so several fill it round trips sooner."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

from stageout.core.errors import TransferFailure
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.wire.messages import Low, Pack
from stageout.overlay.wire.route import Route

MOST = 6
_LOOK_S = 0.5


class Parcel(NamedTuple):
    """A pack as it is sent."""

    head: Pack
    digests: Sequence[bytes]
    data: bytes


class Helpers:
    """They send packs; results are heard on the connection of whoever asks them to.

    One that loses its connection ends that one, too: what has no result is then said again by who waits for it.

    :param number: of connections, which begin to be made at once. :param origin: of the packs.
    """

    def __init__(self, gateway: Gateway, route: Route, origin: str, number: int) -> None:
        self._gateway, self._route, self._origin = gateway, route, origin
        self._todo: SimpleQueue[Parcel | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._hearing: Channel | None = None
        self._alive, self._over = number, False
        for _ in range(number):
            threading.Thread(target=self._run, daemon=True).start()

    def send(self, parcel: Parcel, hearing: Channel) -> bool:
        """Have a pack sent; False when nobody can. :param hearing: where its result is waited for."""
        with self._lock:
            self._hearing = hearing
            if self._alive and not self._over:
                self._todo.put(parcel)
            return self._alive > 0 and not self._over

    def close(self) -> None:
        """They end when they have sent what they were given."""
        with self._lock:
            self._over, self._hearing = True, None
            for _ in range(self._alive):
                self._todo.put(None)

    def _next(self, channel: Channel) -> Parcel | None:
        """None: there is no more. :raises TransferFailure: the connection has ended, maybe while there was nothing."""
        while True:
            while channel.has_more(0):
                channel.receive()  # results are said on all connections
            with contextlib.suppress(Empty):
                return self._todo.get(timeout=_LOOK_S)

    def _run(self) -> None:
        is_lost = False
        try:
            with Channel(self._gateway, self._route) as channel:
                channel.send(Low(self._origin, 0))
                while (parcel := self._next(channel)) is not None:
                    is_lost = True  # from now on: what was sent may not have arrived
                    channel.send_pack(parcel.head, parcel.digests, (parcel.data,))
        except TransferFailure:
            pass
        finally:
            with self._lock:
                self._alive -= 1
                is_lost |= not self._alive and not self._todo.empty()
                if is_lost and self._hearing is not None:
                    self._hearing.abort()
