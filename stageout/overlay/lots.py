"""Space at a router, reserved before there is anything to send."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.wire import messages


@dataclass(frozen=True)
class Lot:
    """Reserved space. :param expires: Unix time in seconds; renew it before."""

    gateway: Gateway
    number: str
    left_bytes: int
    expires: int


def reserve(gateway: Gateway, size_bytes: int, lifetime_s: int, path: str = "") -> Lot:
    """Reserve space for puts at or below a path; it is allocated on return.

    :param lifetime_s: at most a week. :raises TransferFailure: NO_SPACE_REMOTE, QUOTA_EXCEEDED, PERMISSION_DENIED, ...
    """
    return _ask(gateway, messages.Lot(secrets.token_hex(16), "reserve", size_bytes, lifetime_s, path))


def renew(gateway: Gateway, number: str, lifetime_s: int) -> Lot:
    """Keep a lot for so long from now. :raises TransferFailure: NOT_FOUND when its time was over, ..."""
    return _ask(gateway, messages.Lot(number, "renew", lifetime_s=lifetime_s))


def release(gateway: Gateway, number: str) -> None:
    """Give back what is left of a lot. :raises TransferFailure: as :func:`renew`."""
    _ask(gateway, messages.Lot(number, "release"))


def _ask(gateway: Gateway, ask: messages.Lot) -> Lot:
    with Channel(gateway) as channel:
        channel.send(ask)
        answer = channel.receive()
    if not isinstance(answer, messages.Reserved):
        raise channel.failure(ErrorClass.NOT_SUPPORTED, f"{type(answer).__name__} where RESERVED was due")
    if answer.code:
        again_s = float(answer.retry_after_s) if answer.retry_after_s >= 0 else None
        raise TransferFailure(ErrorClass.from_code(answer.code), answer.message, gateway.server, again_s)
    return Lot(gateway, answer.lot, answer.left_bytes, answer.expires)
