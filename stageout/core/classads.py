"""ClassAds, read and written without HTCondor's bindings.

Plugins start in the way of every job: importing ``classad2`` costs more than the rest of a plugin, and some input
derails it (``docs/developer/decisions/0001-classads-in-plugins.md``). Importing this module loads nothing. The parser
is in :mod:`stageout.core.classad_parser`, which loads regular expressions.

Values in an ad: str, int, float, bool, None (UNDEFINED), list, :class:`ClassAd`, and :class:`Expr` for everything
that is not a literal. Names are case-insensitive. Bytes that are not UTF-8 are kept as surrogate escapes (PEP 383).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping

TYPE_CHECKING = False  # known to type checkers by its name; typing itself is not worth its import time here
if TYPE_CHECKING:
    from typing import Any

_MAX_INT = 2**63 - 1
_RESERVED = frozenset(("true", "false", "undefined", "error", "is", "isnt", "parent"))
_SHORT = {"\n": "\\n", "\t": "\\t", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


class ClassAdSyntaxError(ValueError):
    """Text that is not a ClassAd; the message has the position."""


class Expr:
    """An expression that is not a literal, stored as its text."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expr) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"Expr({self.text!r})"


class ClassAd(MutableMapping[str, "Any"]):
    """A mapping whose keys ignore case and keep their first spelling."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any] | None = None) -> None:
        self._items: dict[str, tuple[str, Any]] = {}
        if items is not None:
            self.update(items)

    def __getitem__(self, name: str) -> Any:
        return self._items[name.lower()][1]

    def __setitem__(self, name: str, value: Any) -> None:
        key = name.lower()
        known = self._items.get(key)
        self._items[key] = (name if known is None else known[0], value)

    def __delitem__(self, name: str) -> None:
        del self._items[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._items

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        theirs = other if isinstance(other, ClassAd) else ClassAd(other)
        return len(self) == len(theirs) and all(name in theirs and theirs[name] == self[name] for name in self)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ClassAd({dict(self)!r})"

    def text(self, name: str, default: str = "") -> str:
        """Return the attribute when it is a string, else ``default``."""
        value = self.get(name)
        return value if isinstance(value, str) else default

    def integer(self, name: str, default: int = 0) -> int:
        """Return the attribute when it is an integer, else ``default``."""
        value = self.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else default


def decode(data: bytes) -> str:
    """Decode the bytes of a file with ClassAds; bytes that are not UTF-8 survive."""
    return data.decode("utf-8", "surrogateescape")


def quote(text: str) -> str:
    """Write a string literal in ASCII without newline. NUL, which a ClassAd cannot hold, becomes a blank."""
    if text.isascii() and text.isprintable():
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return '"' + "".join(map(_escape, text)) + '"'


def _escape(char: str) -> str:
    if char in _SHORT:
        return _SHORT[char]
    if " " <= char <= "~":
        return char
    if char == "\0":
        return " "
    try:
        data = char.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a lone surrogate that stands for no byte
        data = b"?"
    return "".join(f"\\{byte:03o}" for byte in data)


def unparse(value: object, quoted: Callable[[str], str] = quote) -> str:
    """Write the literal for a value, in one line of the new syntax.

    :param quoted: makes the literals of strings.
    :raises TypeError: for a type that ClassAds do not have.
    """
    if isinstance(value, str):
        return quoted(value)
    if value is None:
        return "undefined"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value) if -_MAX_INT <= value <= _MAX_INT else _real(float(value))
    if isinstance(value, float):
        return _real(value)
    if isinstance(value, Expr):
        return value.text
    if isinstance(value, Mapping):
        return unparse_ad(value, quoted)
    if isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray)):
        return "{ " + ", ".join([unparse(item, quoted) for item in value]) + " }"
    raise TypeError(f"no ClassAd literal for {type(value).__name__}")


def unparse_ad(ad: Mapping[str, Any], quoted: Callable[[str], str] = quote) -> str:
    """Write an ad in one line of the new syntax.

    :param quoted: makes the literals of strings.
    """
    return "[ " + "; ".join([f"{_name(name)} = {unparse(value, quoted)}" for name, value in ad.items()]) + " ]"


def unparse_old(ad: Mapping[str, Any]) -> str:
    """Write an ad in the old syntax, one attribute per line. Newlines in strings are lost, because that syntax has
    none.
    """
    return "".join(f"{name} = {_old(value)}\n" for name, value in ad.items())


def _old(value: object) -> str:
    if isinstance(value, str):
        flat = " ".join(value.split("\n")).replace("\0", " ").replace("\r", " ")
        return '"' + flat.replace('"', '\\"') + '"'
    return unparse(value)


def _name(name: str) -> str:
    plain = name.isascii() and name.isidentifier() and name.lower() not in _RESERVED
    return name if plain else "'" + quote(name)[1:-1].replace('\\"', '"').replace("'", "\\'") + "'"


def _real(value: float) -> str:
    if value != value:
        return 'real("NaN")'
    if value in (float("inf"), float("-inf")):
        return 'real("INF")' if value > 0 else 'real("-INF")'
    text = repr(value)
    if "." not in text:
        mantissa, mark, exponent = text.partition("e")
        text = f"{mantissa}.0{mark}{exponent}"
    return text
