"""A router's grants for a time: space, and the right to deliver alone. No I/O; described in docs/developer/wire.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Lot:
    """Reserve space, or renew or release what was reserved; answered by RESERVED.

    :param lot: 32 random hexadecimal digits, chosen by whoever reserves. :param action: "reserve", "renew", "release".
    :param lifetime_s: from now on. :param path: the lot is for puts at or below it, "" for all.
    """

    lot: str
    action: str
    size_bytes: int = 0
    lifetime_s: int = 0
    path: str = ""


@dataclass(frozen=True)
class Reserved:
    """A lot as it is now: what is left of it, and until when (Unix time). :param code: as of an ANSWER."""

    lot: str
    left_bytes: int
    expires: int
    code: int = 0
    message: str = ""
    retry_after_s: int = -1


@dataclass(frozen=True)
class Lease:
    """A gateway asks for the right to deliver to some places, alone and for a time; answered by LEASED. For routers.

    :param holder: who asks, the same after its restarts. :param places: SHA-256 of the URLs, in hexadecimal digits.
    :param lifetime_s: from now on; 0 gives them back. :param held: it has them, and they have not run out.
    """

    holder: str
    places: tuple[str, ...]
    lifetime_s: int
    held: bool = False


@dataclass(frozen=True)
class Leased:
    """Positions of the places that the asker alone may deliver to now."""

    granted: tuple[int, ...]
