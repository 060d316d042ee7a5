"""GET and HEAD: files with ranges and digests, directories as pages and as lines of JSON."""

from __future__ import annotations

import html
import os
import re
import secrets
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qs, quote

from overlay_router.below import OWN, directory_below
from overlay_router.http.exchange import Exchange, gathered, json_line
from stageout.overlay.http import conditions, digests
from stageout.overlay.http.heads import Head, Refused
from stageout.overlay.http.names import encoded
from stageout.overlay.http.operations import BLOCK_BYTES, SIZES
from stageout.overlay.rules.rights import Right

_READ_BYTES = 1 << 20
_MOST_DIGESTS = 10_000
#: Digests that this process computes at once; who waits longer than that asks again.
_computing, _WAITS_S = threading.BoundedSemaphore(2), 30.0
#: No links of a sandbox that does not allow it lead to downloads.
_OF_PAGES = "sandbox allow-downloads; default-src 'none'"
#: Parts of the range of a file whose blocks are verified, kinds of kept digests, and most blocks of one answer.
_ONE_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})")
_KINDS = {"xxh3-128": "xxh3"}
_MOST_BLOCKS = 64
_JSON_LINES = "application/x-ndjson"


class Digests:
    """Digests of files of this process, by entity tag and kind: a file is read once."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, etag: str, kind: str, digest: bytes) -> None:
        """Remember one."""
        with self._lock:
            self._known[etag, kind] = digest
            if len(self._known) > _MOST_DIGESTS:
                self._known.popitem(last=False)

    def of(self, etag: str, kind: str, file: int) -> bytes:
        """Return one. :raises Refused: 503: many files are read for others now."""
        found = self._known.get((etag, kind))
        if found is not None:
            return found
        if not _computing.acquire(timeout=_WAITS_S):
            raise Refused(503, "digests of other files are computed now", {"Retry-After": "30"})
        try:
            hasher, offset, memory = digests.KINDS[kind](), 0, memoryview(bytearray(_READ_BYTES))
            while count := os.preadv(file, [memory], offset):
                hasher.update(memory[:count])
                offset += count
        finally:
            _computing.release()
        self.keep(etag, kind, hasher.digest())
        return hasher.digest()


_NOTHING: Mapping[str, str] = {}


class Reading:
    """Answers GET and HEAD. :param kept: digests of files."""

    def __init__(self, kept: Digests) -> None:
        self._kept = kept

    def __call__(self, one: Exchange) -> None:
        """Answer one request. :raises Refused: it is refused."""
        one.allow(Right.READ)
        facts, descriptor = one.desk.ask("look", path=one.path, **_wanted_blocks(one.head))
        try:
            if facts["directory"]:
                self._directory(one, descriptor)
            else:
                self.file(one, descriptor, facts["etag"], kept=_blocks(facts))
        finally:
            os.close(descriptor)

    def file(
        self,
        one: Exchange,
        file: int,
        etag: str,
        more: Mapping[str, str] = _NOTHING,
        kept: Mapping[str, str] = _NOTHING,
    ) -> None:
        """Answer with an open file.

        :param more: fields of the answer. :param kept: those of an answer with one range.
        :raises Refused: it is another version.
        """
        if one.head.target.partition("?")[0].endswith("/"):
            raise Refused(404, "there is no such directory")
        status, head = os.fstat(file), one.head
        modified = formatdate(int(status.st_mtime), usegmt=True)
        fields = {
            "ETag": etag, "Last-Modified": modified, "Accept-Ranges": "bytes", "Cache-Control": "no-cache",
            "Stageout-Mode": f"{status.st_mode & 0o777:03o}", **one.safe, **more,
        }  # fmt: skip
        if head.get("if-match") and not conditions.is_among(etag, head.get("if-match")):
            raise Refused(412, "the file is another version")
        if conditions.is_unchanged(head, etag, modified):
            return one.answer(304, fields)
        field, kind = digests.wanted(head)
        if field:
            fields[field] = digests.field(field, kind, self._kept.of(etag, kind, file))
        fields["Content-Disposition"] = (
            f"attachment; filename*=UTF-8''{quote(os.fsencode(one.path.rpartition('/')[2]))}"
        )
        size = status.st_size
        parts = conditions.ranges(head, size, etag, modified) if head.method == "GET" else []
        if len(parts) > 1:
            return self._parts(one, file, size, parts, fields)
        start, end = parts[0] if parts else (0, size)
        if parts:
            fields.update(kept)
            fields["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        fields["Content-Length"], fields["Content-Type"] = str(end - start), "application/octet-stream"
        one.begin(206 if parts else 200, fields)
        if head.method == "GET":
            one.stream.send_file(file, start, end - start)
        return None

    def _parts(self, one: Exchange, file: int, size: int, parts: list[tuple[int, int]], fields: dict[str, str]) -> None:
        """Answer with several ranges."""
        mark = secrets.token_hex(12)
        heads = [
            f"\r\n--{mark}\r\nContent-Type: application/octet-stream\r\nContent-Range: bytes {start}-{end - 1}/{size}"
            "\r\n\r\n".encode()
            for start, end in parts
        ]
        last = f"\r\n--{mark}--\r\n".encode()
        whole = sum(map(len, heads)) + sum(end - start for start, end in parts) + len(last)
        kind = f"multipart/byteranges; boundary={mark}"
        one.begin(206, {**fields, "Content-Length": str(whole), "Content-Type": kind})
        for head, (start, end) in zip(heads, parts):
            one.stream.send(head)
            one.stream.send_file(file, start, end - start)
        one.stream.send(last)

    def _directory(self, one: Exchange, descriptor: int) -> None:
        raw, _, query = one.head.target.partition("?")
        asked = parse_qs(query, keep_blank_values=True)
        if not raw.endswith("/") and "list" not in asked:
            return one.answer(301, {"Location": encoded(one.path, is_directory=True)})
        if "list" in asked:
            deep = asked.get("depth") == ["infinity"]
            lines = map(json_line, _tree(descriptor, one.path, deep))
            return one.stream_out({"Content-Type": _JSON_LINES, "Cache-Control": "no-store"}, gathered(lines))
        fields = {
            "Content-Type": "text/html; charset=utf-8", "Cache-Control": "no-store",
            "Content-Security-Policy": _OF_PAGES,
        }  # fmt: skip
        return one.stream_out(fields, gathered(_page(descriptor, one.path)))


def _wanted_blocks(head: Head) -> dict[str, int]:
    """Return the blocks whose digests a GET of one range wants, {} for none."""
    found = _ONE_RANGE.fullmatch(head.get("range").strip())
    if not found or head.get("stageout-want-blocks") != "1":
        return {}
    first, end = int(found[1]), int(found[2]) + 1
    blocks = -(-end // BLOCK_BYTES) - first // BLOCK_BYTES
    return (
        {"first": first // BLOCK_BYTES, "blocks": blocks}
        if not first % BLOCK_BYTES and 0 < blocks <= _MOST_BLOCKS
        else {}
    )


def _blocks(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields with kept digests of blocks, {} without any."""
    kind, text = _KINDS.get(facts.get("kind", ""), ""), facts.get("digests", "")
    if not kind or not text:
        return {}
    width = 2 * SIZES[kind]
    return {
        "Stageout-Block-Kind": kind,
        "Stageout-Blocks": ",".join(text[at : at + width] for at in range(0, len(text), width)),
    }


def entries(directory: int, is_root: bool) -> Iterator[tuple[str, os.stat_result]]:
    """Names in a directory with what they are; symbolic links are not followed."""
    with closing(os.scandir(directory)) as found:
        for entry in found:
            if is_root and entry.name == OWN:
                continue
            try:
                yield entry.name, entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # deleted meanwhile


def kind_of(mode: int) -> str:
    """Return the word for a kind of file."""
    if stat.S_ISREG(mode):
        return "file"
    return "directory" if stat.S_ISDIR(mode) else "link" if stat.S_ISLNK(mode) else "other"


def _tree(top: int, path: str, is_deep: bool) -> Iterator[dict[str, object]]:
    """Entries of a directory, and of those below it. Names are relative to the first, and percent-encoded."""
    waiting = [""]
    while waiting:
        below = waiting.pop()
        with _opened(top, below) as directory:
            if directory < 0:
                continue
            for name, status in entries(directory, not path and not below):
                inner, kind = f"{below}/{name}" if below else name, kind_of(status.st_mode)
                yield {
                    "name": encoded(inner)[1:], "kind": kind, "size": status.st_size if kind == "file" else None,
                    "modified": int(status.st_mtime), "mode": f"{status.st_mode & 0o777:03o}",
                }  # fmt: skip
                if is_deep and kind == "directory":
                    waiting.append(inner)


@contextmanager
def _opened(top: int, below: str) -> Iterator[int]:
    """Return the descriptor of a directory, or -1 if the directory was deleted."""
    try:
        found = directory_below(top, below.split("/") if below else ())
    except OSError:
        yield -1
        return
    try:
        yield found
    finally:
        os.close(found)


def _page(directory: int, path: str) -> Iterator[str]:
    title = html.escape(os.fsencode("/" + path).decode("utf-8", "replace"))
    yield f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>\n'
    yield f"<body><h1>{title}</h1>\n<table>\n<tr><th>Name</th><th>Size</th><th>Modified</th></tr>\n"
    if path:
        yield '<tr><td><a href="../">../</a></td><td></td><td></td></tr>\n'
    for name, status in sorted(entries(directory, not path), key=lambda found: os.fsencode(found[0])):
        kind = kind_of(status.st_mode)
        shown = html.escape(os.fsencode(name).decode("utf-8", "replace")) + ("/" if kind == "directory" else "")
        size = str(status.st_size) if kind == "file" else ""
        target = html.escape("./" + encoded(name, kind == "directory")[1:])
        link = f'<a href="{target}">{shown}</a>' if kind in ("file", "directory") else shown
        yield f"<tr><td>{link}</td><td>{size}</td><td>{formatdate(status.st_mtime, usegmt=True)}</td></tr>\n"
    yield "</table></body></html>\n"
