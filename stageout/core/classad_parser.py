"""Parser of ClassAds, in the new syntax and the old one. Values are those of :mod:`stageout.core.classads`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from stageout.core.classads import ClassAd, ClassAdSyntaxError, Expr

_MAX_DEPTH = 64
#: Most characters of an integer: one of 64 bits has 20.
_MOST_DIGITS = 300
_BLANK = re.compile(r"(?:\s+|//[^\n]*|/\*.*?\*/)*", re.S)
_STRING = r'"(?:[^"\\]|\\.)*"'
_LITERAL = re.compile(
    rf"(?P<string>{_STRING})"
    r"|(?P<real>-?(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])|-?\d+[eE][+-]?\d+(?![\w.]))"
    r"|(?P<int>-?\d+(?![\w.]))"
    r'|(?P<special>real\s*\(\s*"[+-]?(?:INF|NaN)"\s*\))'
    r"|(?P<word>true|false|undefined)(?!\w)",
    re.S | re.I,
)
_NAME = re.compile(r"([A-Za-z_]\w*)|'((?:[^'\\]|\\.)*)'", re.S | re.A)
# The common case in one match: name = literal, then its end.
_FAST = re.compile(r'\s*([A-Za-z_]\w*)\s*=\s*(?:"([^"\\]*)"|(-?[1-9]\d{0,18}|0))\s*([;\]])', re.A)
_PIECE = re.compile(rf"{_STRING}|'(?:[^'\\]|\\.)*'|//[^\n]*|/\*.*?\*/|[\[\](){{}};,]|/|[^\[\](){{}};,\"'/]+", re.S)
_ESCAPE = re.compile(r"\\([0-3][0-7]{0,2}|[4-7][0-7]?|.)", re.S)
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a"}
_WORDS = {"true": True, "false": False, "undefined": None}
_OLD_LINE = re.compile(r"\s*([A-Za-z_][\w.]*)\s*=(?!=)\s*(.*?)\s*\Z", re.S)
# In the old syntax a backslash escapes nothing but a quote that is not the last character of the line.
_LONE_BACKSLASH = re.compile(r'\\(?!"(?!\s*\Z))')


def _blank(source: str, at: int) -> int:
    found = _BLANK.match(source, at)
    return found.end() if found else at


def _broken(source: str, at: int, wanted: str) -> ClassAdSyntaxError:
    seen = repr(source[at : at + 20]) if at < len(source) else "the end"
    return ClassAdSyntaxError(f"ClassAd broken at character {at}: {wanted} expected, found {seen}")


def parse_ads(source: str) -> Iterator[ClassAd]:
    """Yield the ads of a new-syntax stream: any space or comments or nothing between them, ``{ , }`` tolerated.

    :raises ClassAdSyntaxError: at the first ad that is broken, after all good ones before it.
    """
    at = 0
    while True:
        at = _blank(source, at)
        while source[at : at + 1] in ("{", "}", ","):
            at = _blank(source, at + 1)
        if at >= len(source):
            return
        if source[at] != "[":
            raise _broken(source, at, "'['")
        ad, at = _ad(source, at, 0)
        yield ad


def parse_ad(source: str) -> ClassAd:
    """Parse exactly one new-syntax ad.

    :raises ClassAdSyntaxError: it is damaged or missing, or another one follows.
    """
    ads = list(parse_ads(source))
    if len(ads) != 1:
        raise ClassAdSyntaxError(f"expected one ClassAd, found {len(ads)}")
    return ads[0]


def parse_old(source: str) -> ClassAd:
    """Parse one ad in the old syntax, a line per attribute (``.job.ad``, ``.machine.ad``, output of ``-classad``).

    Lines that are no attribute are left out, as HTCondor does with the output of a plugin's query.
    """
    ad = ClassAd()
    for line in source.split("\n"):
        found = _OLD_LINE.match(line)
        if not found:
            continue
        text = _LONE_BACKSLASH.sub(r"\\\\", found[2])
        try:
            value, end = _value(text, 0, 0)
        except ClassAdSyntaxError:
            continue
        if _blank(text, end) == len(text):
            ad[found[1]] = value
    return ad


def _ad(source: str, at: int, depth: int) -> tuple[ClassAd, int]:
    """Parse the ad whose ``[`` is at ``at``. Return it and the position after it."""
    if depth > _MAX_DEPTH:
        raise ClassAdSyntaxError(f"ClassAd broken at character {at}: nested more than {_MAX_DEPTH} deep")
    ad = ClassAd()
    at += 1
    while True:
        fast = _FAST.match(source, at)
        if fast:
            name, string, number, mark = fast.groups()
            ad[name] = int(number) if string is None else string
            at = fast.end()
            if mark == "]":
                return ad, at
            continue
        at = _blank(source, at)
        if source.startswith("]", at):
            return ad, at + 1
        if source.startswith(";", at):
            at += 1
            continue
        at = _attribute(source, at, depth, ad)


def _attribute(source: str, at: int, depth: int, ad: ClassAd) -> int:
    found = _NAME.match(source, at)
    if not found:
        raise _broken(source, at, "the name of an attribute")
    at = _blank(source, found.end())
    if not source.startswith("=", at):
        raise _broken(source, at, "'='")
    at = _blank(source, at + 1)
    ad[found[1] or unescape(found[2])], at = _value(source, at, depth)
    at = _blank(source, at)
    if source[at : at + 1] not in (";", "]") or at >= len(source):
        raise _broken(source, at, "';' or ']'")
    return at


def _value(source: str, at: int, depth: int) -> tuple[Any, int]:
    """Parse the value at ``at``: a literal if it extends to the next end, else an expression. Return its end as
    well.
    """
    start = at
    value: Any = None
    head = source[at : at + 1]
    if head == "[":
        value, at = _ad(source, at, depth + 1)
    elif head == "{":
        value, at = _list(source, at, depth + 1)
    else:
        found = _LITERAL.match(source, at)
        if not found:
            return _expression(source, start)
        value, at = _literal(source, found)
    after = _blank(source, at)
    if after >= len(source) or source[after] in ";],}":
        return value, at
    return _expression(source, start)


def _literal(source: str, found: re.Match[str]) -> tuple[Any, int]:
    kind, text, at = found.lastgroup, found[0], found.end()
    if kind == "string":
        value = text[1:-1]
        after = _blank(source, at)
        while source.startswith('"', after):  # neighbouring literals are one string
            following = _LITERAL.match(source, after)
            if not following:
                break
            value, at = value + following[0][1:-1], following.end()
            after = _blank(source, at)
        return unescape(value), at
    if kind == "int":
        if len(text) > _MOST_DIGITS:
            raise _broken(source, found.start(), f"an integer of at most {_MOST_DIGITS} digits")
        return int(text), at
    if kind == "word":
        return _WORDS[text.lower()], at
    return float(text.split('"')[1] if kind == "special" else text), at


def _list(source: str, at: int, depth: int) -> tuple[list[Any], int]:
    if depth > _MAX_DEPTH:
        raise ClassAdSyntaxError(f"ClassAd broken at character {at}: nested more than {_MAX_DEPTH} deep")
    values: list[Any] = []
    at = _blank(source, at + 1)
    while not source.startswith("}", at):
        value, at = _value(source, at, depth)
        values.append(value)
        at = _blank(source, at)
        if source.startswith(",", at):
            at = _blank(source, at + 1)
        elif not source.startswith("}", at):
            raise _broken(source, at, "',' or '}'")
    return values, at + 1


def _expression(source: str, start: int) -> tuple[Expr, int]:
    """Read the text from ``start`` up to the first ``;``, ``,``, ``]`` or ``}`` outside brackets and quotes."""
    closing = {"[": "]", "(": ")", "{": "}"}
    open_: list[str] = []
    at = start
    while at < len(source):
        found = _PIECE.match(source, at)
        if not found:
            raise _broken(source, at, "a closing quote")
        piece = found[0]
        if piece in closing:
            open_.append(closing[piece])
        elif open_ and piece == open_[-1]:
            open_.pop()
        elif not open_ and piece in (";", ",", "]", "}"):
            break
        elif piece in ("]", ")", "}"):
            raise _broken(source, at, "another bracket")
        at = found.end()
    text = source[start:at].strip()
    if not text or open_:
        raise _broken(source, at, "a value" if not open_ else open_[-1])
    return Expr(text), at


def unescape(text: str) -> str:
    """Resolve the escapes in a string literal without its quotes, also octal bytes that make up UTF-8."""
    if "\\" not in text:
        return text
    plain = _ESCAPE.sub(_unescape_one, text)
    if plain.isascii():
        return plain
    return plain.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")


def _unescape_one(found: re.Match[str]) -> str:
    what = found[1]
    if "0" <= what[0] <= "7":
        code = int(what, 8)
        return chr(code) if code < 0x80 else chr(0xDC00 + code)  # one byte; joined to characters afterwards
    return _SIMPLE.get(what, what)
