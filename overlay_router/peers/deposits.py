"""The peers that may deposit here for which terminals: a custodian is no open proxy."""

from __future__ import annotations

from collections.abc import Mapping

from stageout.core.config import ConfigError
from stageout.overlay.wire.route import BadRoute, address, next_hop, written

_NAME = "STAGEOUT_ROUTER_TERMINALS"


class Terminals:
    """Terminals that this router delivers to.

    :param keys: of each terminal, the names of the keys that may deposit for it; an empty set for all keys.
    """

    def __init__(self, keys: Mapping[str, frozenset[str]]) -> None:
        self._keys = dict(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def names(self, terminal: str) -> bool:
        """Tell whether this router delivers to it."""
        return terminal in self._keys

    def reason_against(self, terminal: str, key: str) -> str:
        """Return why a deposit with that key is refused; "" when it is not."""
        terminal, _ = next_hop(terminal)
        allowed = self._keys.get(terminal)
        if allowed is None:
            return f"this router takes nothing into custody for {terminal}: {_NAME} does not name it"
        if allowed and key not in allowed:
            return f"the key {key!r} may not deposit for {terminal} ({_NAME})"
        return ""


def same_key(one: str, other: str) -> bool:
    """Tell whether two senders have shown the same key."""
    return one.partition("/")[0] == other.partition("/")[0]


def read_terminals(text: str) -> Terminals:
    """``HOST[:PORT][=KEY,KEY] ...``. :raises ConfigError: an address cannot be used."""
    found: dict[str, frozenset[str]] = {}
    for word in text.split():
        place, _, names = word.partition("=")
        try:
            found[written(*address(place))] = frozenset(filter(None, names.split(",")))
        except BadRoute as problem:
            raise ConfigError(f"{_NAME}: {problem}; write HOST:PORT[=KEY,KEY], apart by blanks") from None
    return Terminals(found)
