"""Messages by which routers know their links, and by which everybody asks for routes. No I/O.

They are among the messages of :mod:`stageout.overlay.wire.messages`, where they are read and written.
"""

from __future__ import annotations

from dataclasses import dataclass

from stageout.overlay.wire.fields import KnownRow, LinkRow, ShareRow


@dataclass(frozen=True)
class Heartbeat:
    """As the first frame: this is another router. A ``number`` is answered by a heartbeat with it as ``echo``."""

    number: int = 0
    echo: int = 0


@dataclass(frozen=True)
class Links:
    """All links of one router, signed by it, passed on unchanged by all others.

    :param router: its address. :param key: its public key. :param incarnation: grows with each of its starts.
    :param number: grows with each message of an incarnation. :param age_ms: since it was made; not signed.
    """

    router: str
    key: str
    incarnation: int
    number: int
    links: tuple[LinkRow, ...]
    signature: str = ""
    age_ms: int = 0


@dataclass(frozen=True)
class Routes:
    """Ask a router for its routes to a terminal (ROUTED), or, without one, for the links from a position on (KNOWN)."""

    terminal: str = ""
    first: int = 0


@dataclass(frozen=True)
class Routed:
    """Routes from the router that was asked, itself left out, the terminal last.

    :param routes: those in use, widest first. :param others: looked at and not in use.
    :param reasons: why, for each of both in turn. :param reason: why this set is in use.
    """

    terminal: str
    routes: tuple[tuple[str, ...], ...]
    others: tuple[tuple[str, ...], ...] = ()
    reasons: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Known:
    """Links that a router knows of, in order of their ends.

    :param total: how many there are. :param router: its own address in them, "" where it does not say.
    :param uplink: bytes a second that all it sends shares, 0: not known. :param used: of these, lately.
    :param sharers: who sends by it, as far as who asks may know, the fastest first.
    """

    total: int
    links: tuple[KnownRow, ...]
    router: str = ""
    uplink: int = 0
    used: int = 0
    sharers: tuple[ShareRow, ...] = ()


@dataclass(frozen=True)
class Probe:
    """So many bytes follow this frame as they are, to be thrown away and timed (PROBED)."""

    size_bytes: int


@dataclass(frozen=True)
class Probed:
    """The last bytes of a probe, and how long they took to come."""

    size_bytes: int
    time_us: int
