"""Values in the ads of HTCondor's bindings, and expressions that the bindings evaluate.

A string may have bytes that are not UTF-8, and anybody may write such a string into an ad of theirs. The bindings
decode a string when it is read. Then they raise UnicodeDecodeError, or SystemError for a list and for names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from stageout.condor import bindings
from stageout.core import log
from stageout.core.classads import ClassAd, unparse

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


def plain(ad: Any) -> ClassAd:
    """Convert an ad of the bindings to one with plain values, without values that are not UTF-8."""
    classad = bindings.classad()
    items = {}
    for name in _names(ad):
        with contextlib.suppress(*UNDECODABLE):
            found = ad[name]
            value = _plain_value(ad.eval(name) if isinstance(found, classad.ExprTree) else found)
            if value is not None:
                items[name] = value
    return ClassAd(items)


def _names(ad: Any) -> list[str]:
    """Return the names of an ad's attributes; none when one cannot be decoded."""
    try:
        return list(ad)
    except UNDECODABLE:
        return []


def _plain_value(value: Any) -> Any:
    classad = bindings.classad()
    if isinstance(value, classad.ClassAd):
        return plain(value)
    if isinstance(value, (list, tuple)):
        return [_plain_value(item) for item in value]
    return None if isinstance(value, (classad.Value, classad.ExprTree)) else value


def read_old(text: str) -> ClassAd:
    """Read an ad in the old syntax, with plain values. :raises CondorError: the text is no ad."""
    with bindings.faults():
        return plain(bindings.classad().parseOne(text, bindings.classad().ParserType.Old))


class Expression:
    """A ClassAd expression, as the bindings read it. :raises CondorError: the text is no expression."""

    def __init__(self, text: str) -> None:
        with bindings.faults():
            self._tree = bindings.classad().ExprTree(text)

    def __str__(self) -> str:
        return str(self._tree)

    def value_in(self, ad: Any) -> Any:
        """Evaluate the expression in an ad of the bindings; the result is a value of the bindings."""
        return self._tree.eval(ad)

    def holds(self, record: str) -> bool:
        """Tell whether the expression is true in an ad that is written in the old syntax."""
        value = self._value(record)
        return not isinstance(value, (bindings.classad().Value, str)) and bool(value)

    def value(self, record: str) -> Any:
        """Return the plain value in an ad that is written in the old syntax, None where it is undefined."""
        value = _plain_value(self._value(record))
        return dict(value) if isinstance(value, ClassAd) else value

    def text(self, record: str) -> str:
        """Return the value in an ad that is written in the old syntax, as HTCondor's tools print it."""
        classad, value = bindings.classad(), self._value(record)
        if isinstance(value, classad.Value):
            return "undefined" if value == classad.Value.Undefined else "error"
        plain_value = _plain_value(value)
        return plain_value if isinstance(plain_value, str) else unparse(plain_value)

    def _value(self, record: str) -> Any:
        classad = bindings.classad()
        try:
            with bindings.faults():
                return self._tree.eval(classad.parseOne(record, classad.ParserType.Old))
        except bindings.CondorError:
            return classad.Value.Error
