"""Conversion of JSON to dataclasses with verified types, for input from any source. No I/O."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

#: The limits of integers in ClassAds and SQLite.
MOST_NUMBER = 2**63 - 1
#: Seconds of the wall clock that :mod:`time` and :mod:`datetime` can show on every platform (year 6325).
LATEST_AT = 1 << 37
#: A time, in seconds of the wall clock. One that is out of range is read as the nearest that is not.
WallClock = Annotated[int, "wall clock"]
_Reader = Callable[[Any], Any]
T = TypeVar("T")


class IllTyped(ValueError):
    """A value has another type than its declaration; the text names it."""


def built(cls: Callable[..., T], row: object) -> T:
    """Build a dataclass or named tuple from a JSON value.

    :param row: an object with a value for each field without default; for a named tuple a list. This function changes
        its objects. It ignores undeclared fields, which a newer version may have written.
    :raises IllTyped: the value has another type.
    """
    found: T = _reader(cls)(row)
    return found


def _of_class(cls: Any, readers: Mapping[str, _Reader], row: object) -> Any:
    if not isinstance(row, dict):
        raise IllTyped(f"{row!r:.60} is no {cls.__name__}")
    name = ""
    for unknown in row.keys() - readers.keys():
        del row[unknown]
    try:
        for name, value in row.items():
            read = readers[name]
            if (read is _text and type(value) is str) or (read is _whole and _is_whole(value)):
                continue  # the usual case; a report has many of them
            row[name] = read(value)
        return cls(**row)
    except IllTyped as problem:
        raise IllTyped(f"{name}: {problem}") from None
    except TypeError:
        raise IllTyped(f"{cls.__name__} lacks some of {', '.join(sorted(readers.keys() - row.keys()))}") from None


def _of_row(cls: Any, readers: tuple[_Reader, ...], row: object) -> Any:
    if not isinstance(row, list) or len(row) != len(readers):
        raise IllTyped(f"{row!r:.60} is no {cls.__name__}")
    return cls(*(reader(value) for reader, value in zip(readers, row)))


@functools.cache
def _reader(hint: Any) -> _Reader:
    """Return the function that reads a value declared like this."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    if get_origin(hint) is tuple:
        return functools.partial(_list, _reader(get_args(hint)[0]))
    if get_origin(hint) is not None:
        return functools.partial(_table, _reader(get_args(hint)[1]))
    if issubclass(hint, enum.Enum):
        return functools.partial(_word, hint)
    readers = {name: _reader(inner) for name, inner in get_type_hints(hint, include_extras=True).items()}
    if dataclasses.is_dataclass(hint):
        return functools.partial(_of_class, hint, readers)
    return functools.partial(_of_row, hint, tuple(readers.values()))


def _text(value: object) -> object:
    if type(value) is not str:
        raise IllTyped(f"{value!r:.60} is no text")
    return value


def _is_whole(value: object) -> bool:
    return type(value) is int and -MOST_NUMBER <= value <= MOST_NUMBER


def _whole(value: object) -> object:
    if not _is_whole(value):
        raise IllTyped(f"{value!r:.60} is no whole number that can be kept")
    return value


def _wall_clock(value: object) -> object:
    return min(max(0, value), LATEST_AT) if type(value) is int else _whole(value)


def _number(value: object) -> object:
    return value if type(value) is float and math.isfinite(value) else _whole(value)


def _list(reader: _Reader, value: object) -> object:
    if not isinstance(value, list):
        raise IllTyped(f"{value!r:.60} is no list")
    return tuple(map(reader, value))


def _table(reader: _Reader, value: object) -> object:
    if not isinstance(value, dict):
        raise IllTyped(f"{value!r:.60} is no object")
    return {name: reader(inner) for name, inner in value.items()}


def _word(words: type[enum.Enum], value: object) -> object:
    try:
        return words(value)
    except ValueError:
        raise IllTyped(f"{value!r:.60} is no {words.__name__}") from None


_PLAIN: Mapping[Any, _Reader] = {
    str: _text,
    int: _whole,
    WallClock: _wall_clock,
    float: _number,
    Any: lambda value: value,
}
