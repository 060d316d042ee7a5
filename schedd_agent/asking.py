"""Queries to custodians of the overlay: one connection for many questions."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from stageout.core.config import ConfigError, Settings
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.key_file import gateway_of
from stageout.wire.deposits import earlier_operation_of, operation_of
from stageout.wire.overlay import Cancel, Custody, Result, Status
from stageout.wire.route import BadRoute, address, addresses

_AT_ONCE = 500


class Asker:
    """Questions to custodians. :param key: file with the key that they know this access point by."""

    def __init__(self, key: Path) -> None:
        self._key = key

    def __call__(self, custodian: str, names: Sequence[str], cancel: bool) -> Mapping[str, tuple[str, str]]:
        """Name of a deposit -> (outcome, reason), without those of which the custodian cannot say more yet.

        :raises TransferFailure: it was not reached, or the key cannot be read.
        """
        gateway = gateway_of(*address(custodian), self._key)
        found = _ask(gateway, {operation_of(name, gateway.secret): name for name in names}, cancel)
        unknown = [name for name, (outcome, _) in found.items() if outcome == "unknown"]
        if unknown:  # its pilot may be of an earlier release
            known = _ask(gateway, {earlier_operation_of(name, gateway.secret): name for name in unknown}, cancel)
            found.update(known)
        return found


def _ask(gateway: Gateway, by_key: Mapping[tuple[str, int], str], cancel: bool) -> dict[str, tuple[str, str]]:
    """Answers by name. :param by_key: operation -> name."""
    keys = list(by_key)
    found: dict[tuple[str, int], tuple[str, str]] = {}
    for start in range(0, len(keys), _AT_ONCE):
        with Channel(gateway) as channel:
            for key in keys[start : start + _AT_ONCE]:
                if cancel:
                    channel.send(Cancel(*key))
                channel.send(Status(*key))
            last = secrets.token_hex(16), 1  # answers come in order, and not each question has one that names it
            channel.send(Status(*last))
            while last not in found:
                answer = channel.receive()
                if isinstance(answer, Custody):
                    found.setdefault((answer.origin, answer.seq), ("custody", ""))
                elif isinstance(answer, Result):
                    found[answer.origin, answer.seq] = (answer.outcome, answer.reason)
            del found[last]
    # who asks for one deposit of an origin is told of the others, too, when something becomes of them
    return {by_key[key]: answer for key, answer in found.items() if key in by_key}


def custodians_of(settings: Settings) -> tuple[str, ...]:
    """Return the keys whose answers count. :raises ConfigError: an address cannot be used."""
    try:
        return addresses(settings.text("STAGEOUT_CUSTODIANS"))
    except BadRoute as problem:
        raise ConfigError(f"STAGEOUT_CUSTODIANS: {problem}") from None
