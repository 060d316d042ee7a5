"""Values in the ads of HTCondor's bindings. Loads no bindings.

A string may have bytes that are not UTF-8, and anybody may write such a string into an ad of theirs. The bindings
decode a string when it is read. Then they raise UnicodeDecodeError, or SystemError for a list and for names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from stageout.core import log

#: Exceptions of the bindings for a value that is not UTF-8.
UNDECODABLE = (UnicodeError, SystemError)
_NAMES = ("GlobalJobId", "Name")
_LOGGED_MAX = 100

#: Called with the name of the ad and with the attribute that cannot be decoded.
OnSkipped = Callable[[str, str], None]


class SkippedAttributes:
    """Attributes that cannot be decoded. Each is logged once."""

    def __init__(self) -> None:
        self._logged: dict[tuple[str, str], None] = {}

    def add(self, ad: str, attribute: str) -> None:
        """Log an attribute, unless it is among the last hundred."""
        matter = (ad, attribute)
        if matter not in self._logged:
            log.warn("attribute-skipped", ad=ad, attribute=attribute)
            while len(self._logged) >= _LOGGED_MAX:
                del self._logged[next(iter(self._logged))]
            self._logged[matter] = None


def decoded(ad: Mapping[str, Any], names: Iterable[str], on_skipped: OnSkipped) -> dict[str, Any]:
    """Return the attributes of these names that an ad has, without those that cannot be decoded."""
    found = {}
    for name in names:
        try:
            value = ad.get(name)
        except UNDECODABLE:
            on_skipped(name_of(ad), name)
            continue
        if value is not None:
            found[name] = value
    return found


def value_of(ad: Mapping[str, Any], name: str) -> Any:
    """Return an attribute, None when the ad lacks it or it cannot be decoded."""
    return decoded(ad, [name], lambda ad, attribute: None).get(name)


def name_of(ad: Any) -> str:
    """Return the name of an ad as a literal, in which other bytes are octal numbers."""
    for name in _NAMES:
        try:
            return str(ad.lookup(name))
        except KeyError:
            continue
    return ""
