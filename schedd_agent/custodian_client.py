"""Queries to custodians of the overlay, many on one connection."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from stageout.core.config import ConfigError, Settings
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.key_file import gateway_of
from stageout.overlay.wire.messages import Cancel, Custody, Result, Status
from stageout.overlay.wire.route import BadRoute, address, addresses
from stageout.wire.deposits import earlier_operation_of, operation_of

_AT_ONCE = 500
#: A router has another secret for the key, or no line of that name.
_REFUSED = (ErrorClass.CREDENTIAL_REFUSED, ErrorClass.PERMISSION_DENIED)


class CustodianClient:
    """Client of the custodians.

    :param keys: files with keys that pilots deposit with. While keys change there are several: a custodian finds a
        deposit only with the key that it was made with.
    """

    def __init__(self, *keys: Path) -> None:
        self.keys = keys

    def __call__(self, custodian: str, names: Sequence[str], cancel: bool) -> Mapping[str, tuple[str, str]]:
        """Return outcome and reason by name of a deposit, for deposits whose state the custodian knows.

        :param cancel: withdraw the deposits too.
        :raises TransferFailure: the custodian cannot be reached, refuses all keys, or a key cannot be read.
        """
        found: dict[str, tuple[str, str]] = {}
        refusals = []
        unknown = list(names)
        for key in self.keys:
            gateway = gateway_of(*address(custodian), key)
            try:
                for operation in operation_of, earlier_operation_of:  # pilots of an earlier release made other names
                    if unknown:
                        found.update(_ask(gateway, {operation(name, gateway.secret): name for name in unknown}, cancel))
                        unknown = [name for name in unknown if found.get(name, ("", ""))[0] == "unknown"]
            except TransferFailure as problem:
                if problem.kind not in _REFUSED:
                    raise
                refusals.append(problem)
        if len(refusals) == len(self.keys):
            raise refusals[0]
        return found


def _ask(gateway: Gateway, by_key: Mapping[tuple[str, int], str], cancel: bool) -> dict[str, tuple[str, str]]:
    """Return the answers by name. :param by_key: operation -> name."""
    keys = list(by_key)
    found: dict[tuple[str, int], tuple[str, str]] = {}
    for start in range(0, len(keys), _AT_ONCE):
        with Channel(gateway) as channel:
            for key in keys[start : start + _AT_ONCE]:
                if cancel:
                    channel.send(Cancel(*key))
                channel.send(Status(*key))
            last = (
                secrets.token_hex(16),
                1,
            )  # Answers come in order, and some name no question: an unknown operation ends the list.
            channel.send(Status(*last))
            while last not in found:
                answer = channel.receive()
                if isinstance(answer, Custody):
                    found.setdefault((answer.origin, answer.seq), ("custody", ""))
                elif isinstance(answer, Result):
                    found[answer.origin, answer.seq] = (answer.outcome, answer.reason)
            del found[last]
    # A custodian also reports other deposits of the same origin.
    return {by_key[key]: answer for key, answer in found.items() if key in by_key}


def keys_of(settings: Settings) -> tuple[Path, ...]:
    """Return the files in STAGEOUT_CUSTODIAN_KEY. :raises ConfigError: a path cannot be used."""
    files = [word.strip() for word in settings.text("STAGEOUT_CUSTODIAN_KEY").split(",")]
    bad = next((file for file in files if not file.startswith("/")), None)
    if bad is not None:
        raise ConfigError(f"STAGEOUT_CUSTODIAN_KEY: write absolute paths, with commas between, not {bad!r}")
    return tuple(map(Path, files))


def custodians_of(settings: Settings) -> tuple[str, ...]:
    """Return the addresses in STAGEOUT_CUSTODIANS. :raises ConfigError: an address cannot be used."""
    try:
        return addresses(settings.text("STAGEOUT_CUSTODIANS"))
    except BadRoute as problem:
        raise ConfigError(f"STAGEOUT_CUSTODIANS: {problem}") from None
