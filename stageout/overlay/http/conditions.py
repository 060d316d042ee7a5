"""Ranges and conditions of requests (RFC 9110)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from stageout.overlay.http.heads import Head, Refused

_RANGE = re.compile(r"([0-9]{0,18})-([0-9]{0,18})")
#: Parts of one answer; more are answered with the whole file. davix asks for as many as 3,900 characters hold.
_MOST_RANGES = 1024


def ranges(head: Head, size_bytes: int, etag: str, modified: str) -> list[tuple[int, int]]:
    """Return the parts of a file, [start, end), that a GET asks for; none for the whole file.

    :param modified: its Last-Modified. :raises Refused: 416: no part of it is there.
    """
    said = head.get("range").strip()
    unit, _, listed = said.partition("=")
    if unit.strip().lower() != "bytes" or head.get("if-range") not in ("", etag, modified):
        return []
    wanted = [_RANGE.fullmatch(one.strip()) for one in listed.split(",")]
    if len(wanted) > _MOST_RANGES or not all(one and (one[1] or one[2]) for one in wanted):
        return []
    pairs = [(one[1], one[2]) for one in wanted if one]
    if any(first and last and int(first) > int(last) for first, last in pairs):
        return []
    found = [part for part in (_part(first, last, size_bytes) for first, last in pairs) if part[0] < part[1]]
    if not found:
        raise Refused(416, "the file has no such bytes", {"Content-Range": f"bytes */{size_bytes}"})
    return found if sum(end - start for start, end in found) <= size_bytes else []


def _part(first: str, last: str, size_bytes: int) -> tuple[int, int]:
    if not first:
        return max(0, size_bytes - int(last)), size_bytes
    return int(first), min(size_bytes, int(last) + 1) if last else size_bytes


def is_among(etag: str, listed: str) -> bool:
    """Tell whether an entity tag is one of a list, or the list is ``*``. Weak ones match nothing."""
    return listed.strip() == "*" or etag in _tags(listed)


def is_unchanged(head: Head, etag: str, modified: str) -> bool:
    """Tell whether a GET is answered with 304: the client has that version."""
    if head.get("if-none-match"):
        return is_among(etag, head.get("if-none-match").replace("W/", ""))
    return bool(modified) and head.get("if-modified-since") == modified


def _tags(listed: str) -> Iterable[str]:
    return (one.strip() for one in listed.split(","))
