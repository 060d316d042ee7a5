"""Fields of the overlay's messages, as they are read: anything that the protocol does not allow raises BadFrame."""

from __future__ import annotations

from typing import Any

from stageout.overlay.wire.frames import BadFrame
from stageout.wire.address import is_address

MAX_AFTER = 8
MAX_PATH_BYTES = 4096
MAX_RANGES = 4096
MAX_NUMBER = 2**63 - 1
#: Of a directory in one answer, and files of a pack.
MAX_ENTRIES = 1024
#: Of one router; a list of links in an answer has at most 16 times as many.
MAX_LINKS = 32
MAX_ROUTES = 16
#: Of every file: what is checked by one digest, and staged as a whole.
BLOCK_BYTES = 1024 * 1024

Range = tuple[int, int]
#: A link of the router that says so: to whom (HOST:PORT), bytes a second, round trip in microseconds.
LinkRow = tuple[str, int, int]
#: A link that a router knows of: from, to, bytes a second, round trip in microseconds, age in milliseconds.
KnownRow = tuple[str, str, int, int, int]
#: Senders by a router's uplink: to whom, key ("" for itself), priority, transfers, thousandths of it, bytes a second.
ShareRow = tuple[str, str, int, int, int, int]

_WORDS = {
    "kind": ("publish", "rename", "delete", "mkdir", "setattr"),
    "outcome": ("done", "failed", "cancelled", "expired", "stale", "lost", "pending", "unknown"),
    "release": ("delivered", "custody"),
    "outcomes": ("failed", "cancelled", "expired", "stale", "lost", "pending"),
    "action": ("reserve", "renew", "release"),
    "kinds": ("file", "directory", "link", "other"),
    "attributes": ("mode", "size"),
}
_LEAST = {"generation": -1, "source_generation": -1, "retry_after_s": -1}
#: Lists that may be longer than the usual.
_MOST = dict.fromkeys(
    (
        "names", "kinds", "sizes_bytes", "modes", "modified", "paths", "generations", "failed", "outcomes", "reasons",
        "codes", "places", "granted", "cancelled",
    ),
    MAX_ENTRIES,
)  # fmt: skip
_MOST_TEXTS = 16


def _number(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not _LEAST.get(name, 0) <= value <= MAX_NUMBER:
        raise BadFrame(f"{name} is not a number that the protocol allows")
    if name == "block_bytes" and value != BLOCK_BYTES:
        raise BadFrame(f"block_bytes is {value}: blocks have {BLOCK_BYTES} bytes")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadFrame(f"{name} is neither true nor false")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or _size_bytes(value) > MAX_PATH_BYTES or "\0" in value:
        raise BadFrame(f"{name} is not a text of at most {MAX_PATH_BYTES} bytes")
    if name in _WORDS and value not in _WORDS[name]:
        raise BadFrame(f"{name} {value!r} is not one of {', '.join(_WORDS[name])}")
    return value


def _size_bytes(text: str) -> int:
    if text.isascii():
        return len(text)
    try:
        return len(text.encode(errors="surrogateescape"))
    except UnicodeError:  # half of a character that stands for no byte
        return MAX_PATH_BYTES + 1


def _texts(name: str, value: Any) -> tuple[str, ...]:
    most = _MOST.get(name, _MOST_TEXTS)
    if not isinstance(value, list) or len(value) > most:
        raise BadFrame(f"{name} is not a list of at most {most} texts")
    if set(map(type, value)) == {str} and (set(value).issubset(_WORDS[name]) if name in _WORDS else _are_plain(value)):
        return tuple(value)
    return tuple(_text(name, item) for item in value)


def _are_plain(texts: list[str]) -> bool:
    """Tell whether :func:`_text` would take all of these as they are: a quick look at them together."""
    together = "".join(texts)
    return together.isascii() and "\0" not in together and max(map(len, texts)) <= MAX_PATH_BYTES


def _numbers(name: str, value: Any) -> tuple[int, ...]:
    most = _MOST.get(name, MAX_AFTER)
    if not isinstance(value, list) or len(value) > most:
        raise BadFrame(f"{name} is not a list of at most {most} numbers")
    if set(map(type, value)) == {int} and min(value) >= _LEAST.get(name, 0) and max(value) <= MAX_NUMBER:
        return tuple(value)
    return tuple(_number(name, item) for item in value)


def _ranges(name: str, value: Any) -> tuple[Range, ...]:
    if not isinstance(value, list) or len(value) > MAX_RANGES:
        raise BadFrame(f"{name} is not a list of at most {MAX_RANGES} ranges")
    found: list[Range] = []
    for item in value:
        if not isinstance(item, list) or len(item) != 2:
            raise BadFrame(f"{name} has something that is not a range")
        first, end = (_number(name, number) for number in item)
        if not (found[-1][1] if found else -1) < first < end:
            raise BadFrame(f"{name} is not in order")
        found.append((first, end))
    return tuple(found)


def _routes(name: str, value: Any) -> tuple[tuple[str, ...], ...]:
    if not isinstance(value, list) or len(value) > MAX_ROUTES:
        raise BadFrame(f"{name} is not a list of at most {MAX_ROUTES} routes")
    return tuple(tuple(_address(name, router) for router in _texts(name, route)) for route in value)


def _links(name: str, value: Any) -> tuple[LinkRow, ...]:
    return tuple(
        (_address(name, to), _number(name, rate), _number(name, rtt)) for to, rate, rtt in _rows(name, value, 3, 1)
    )


def _known(name: str, value: Any) -> tuple[KnownRow, ...]:
    return tuple(
        (_address(name, a), _address(name, b), _number(name, rate), _number(name, rtt), _number(name, age))
        for a, b, rate, rtt, age in _rows(name, value, 5, 16)
    )


def _sharers(name: str, value: Any) -> tuple[ShareRow, ...]:
    rows = _rows(name, value, 6, 1)
    return tuple((_text(name, to), _text(name, owner), *_four(name, rest)) for to, owner, *rest in rows)


def _four(name: str, values: list[Any]) -> tuple[int, int, int, int]:
    priority, flows, share, rate = (_number(name, value) for value in values)
    return priority, flows, share, rate


def _rows(name: str, value: Any, width: int, times: int) -> list[list[Any]]:
    if not isinstance(value, list) or len(value) > MAX_LINKS * times:
        raise BadFrame(f"{name} is not a list of at most {MAX_LINKS * times} links")
    if not all(isinstance(row, list) and len(row) == width for row in value):
        raise BadFrame(f"{name} has something that is not a link")
    return value


def _address(name: str, value: Any) -> str:
    if not isinstance(value, str) or not is_address(value):
        raise BadFrame(f"{name} has something that is not HOST:PORT")
    return value


#: For each kind of field, what reads it: called with its name and its value out of JSON.
READERS = {
    int: _number,
    bool: _flag,
    str: _text,
    tuple[str, ...]: _texts,
    tuple[int, ...]: _numbers,
    tuple[Range, ...]: _ranges,
    tuple[tuple[str, ...], ...]: _routes,
    tuple[LinkRow, ...]: _links,
    tuple[KnownRow, ...]: _known,
    tuple[ShareRow, ...]: _sharers,
}


def is_origin(text: str) -> bool:
    """Tell whether a text is what an origin calls itself, or its name for a lot: 32 random hexadecimal digits."""
    return len(text) == 32 and all(char in "0123456789abcdef" for char in text)
