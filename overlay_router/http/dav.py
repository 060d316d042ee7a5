"""The part of WebDAV (RFC 4918, class 1) that rclone, davix and gfal2 use: names, and what they are."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from email.utils import formatdate
from xml.parsers import expat
from xml.sax.saxutils import escape, quoteattr

from overlay_router.http.exchange import Exchange, Handler, gathered
from overlay_router.http.reading import entries
from overlay_router.http.writing import Writing
from stageout.overlay.http.heads import Refused
from stageout.overlay.http.names import decoded, encoded, is_here
from stageout.overlay.rules.rights import Right

_MOST_BODY_BYTES = 64 * 1024
_MOST_PROPERTIES = 200
_XML = "application/xml; charset=utf-8"
_NO_DEPTH = '<?xml version="1.0" encoding="utf-8"?>\n<D:error xmlns:D="DAV:"><D:propfind-finite-depth/></D:error>\n'


def options(one: Exchange) -> None:
    """OPTIONS."""
    one.body(_MOST_BODY_BYTES)
    methods = "OPTIONS, GET, HEAD, PUT, PROPFIND, PROPPATCH, MKCOL, MOVE, DELETE, COPY"
    one.answer(200, {"DAV": "1", "MS-Author-Via": "DAV", "Allow": methods})


def propfind(one: Exchange) -> None:
    """PROPFIND of a name, or of a directory and all that is in it. :raises Refused: it is refused."""
    one.allow(Right.READ)
    wanted = _wanted(one.body(_MOST_BODY_BYTES))
    depth = one.head.get("depth")
    if depth not in ("0", "1"):
        return one.answer(403, {"Content-Type": _XML, **one.safe}, _NO_DEPTH.encode())
    facts, descriptor = one.desk.ask("look", path=one.path)
    try:
        status = os.fstat(descriptor)
        if facts["directory"] is False and one.head.target.endswith("/"):
            raise Refused(404, "there is no such directory")
        inner = entries(descriptor, not one.path) if facts["directory"] and depth == "1" else iter(())
        texts = _multistatus(one.path, status, inner, wanted)
        one.stream_out({"Content-Type": _XML, "Cache-Control": "no-store"}, gathered(texts), 207)
    finally:
        os.close(descriptor)
    return None


def proppatch(one: Exchange) -> None:
    """PROPPATCH: this router keeps no properties. :raises Refused: always."""
    one.allow(Right.MODIFY)
    one.body(_MOST_BODY_BYTES)
    raise Refused(403, "this router keeps no properties")


def mkcol(one: Exchange) -> None:
    """MKCOL. :raises Refused: it is refused."""
    one.allow(Right.CREATE)
    if one.body(_MOST_BODY_BYTES):
        raise Refused(415, "a body of MKCOL says nothing here")
    if not one.path:
        raise Refused(405, "the root is there")
    one.desk.ask("operate", kind="mkdir", path=one.path, share=one.subject.name)
    one.answer(201)


def delete(one: Exchange) -> None:
    """DELETE of a file, or of a directory with all that is in it. :raises Refused: it is refused."""
    one.allow(Right.MODIFY)
    one.body(_MOST_BODY_BYTES)
    if not one.path:
        raise Refused(403, "the root stays")
    if one.head.get("depth").lower() not in ("", "infinity"):
        raise Refused(400, "a directory is deleted with all that is in it")
    match = one.head.get("if-match")
    one.desk.ask("operate", kind="delete", path=one.path, share=one.subject.name, match=match)
    one.answer(204)


def move(one: Exchange) -> None:
    """MOVE. :raises Refused: it is refused."""
    one.body(_MOST_BODY_BYTES)
    target = destination(one)
    one.allow(Right.MODIFY)
    one.allow(Right.CREATE, target)
    if not one.path or not target or target == one.path:
        raise Refused(403, "this name cannot be moved there")
    answer, _ = one.desk.ask(
        "operate", kind="rename", path=one.path, target=target, share=one.subject.name, **_overwrites(one, target)
    )
    one.answer(204 if answer["replaced"] else 201)


def copy_here(writing: Writing, one: Exchange) -> None:
    """COPY of a file to another name of this router. :raises Refused: it is refused."""
    one.body(_MOST_BODY_BYTES)
    target = destination(one)
    one.allow(Right.READ)
    one.allow(Right.CREATE, target)
    if not target or target == one.path:
        raise Refused(403, "this name cannot be copied there")
    facts, descriptor = one.desk.ask("look", path=one.path)
    try:
        if facts["directory"]:
            raise Refused(501, "a directory is not copied: copy its files")
        size, replaces = os.fstat(descriptor).st_size, not _overwrites(one, target)["absent"]
        status, etag, _ = writing.deposit(one, target, File(descriptor), size, {}, replaces, parents=False)
    finally:
        os.close(descriptor)
    one.answer(status, {"ETag": etag})


class File:
    """The bytes of an open file. :param descriptor: belongs to the caller."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._offset = descriptor, 0

    def read_into(self, view: memoryview) -> int:
        """Read some of them, 0 at the end."""
        count = os.preadv(self._descriptor, [view], self._offset)
        self._offset += count
        return count


def destination(one: Exchange) -> str:
    """Return the path of the field Destination. :raises Refused: it is no name of this router."""
    url = one.head.get("destination")
    if not url:
        raise Refused(400, "the field Destination is missing")
    return decoded(is_here(url, one.head.get("host")))


def _overwrites(one: Exchange, target: str) -> dict[str, bool]:
    said = one.head.get("overwrite").strip().upper()
    if said not in ("", "T", "F"):
        raise Refused(400, "Overwrite is T or F")
    return {"absent": said == "F", "creates": not one.subject.may(Right.MODIFY, target)}


def _wanted(body: bytes) -> list[tuple[str, str]] | None:
    """Return the properties that are asked for, as (namespace, name); None for all.

    :raises Refused: 400: the body is malformed, or has a DTD.
    """
    if not body.strip():
        return None
    stack, found, kinds, roots = list[str](), list[tuple[str, str]](), set[str](), list[str]()

    def begin(name: str, _: object) -> None:
        stack.append(name)
        if len(stack) == 1:
            roots.append(name)
        if len(stack) == 2:
            kinds.add(name)
        if len(stack) == 3 and stack[1] == "DAV: prop":
            space, _, local = name.rpartition(" ")
            found.append((space, local))

    def refuse(*_: object) -> None:
        raise Refused(400, "a body has no DTD")

    parser = expat.ParserCreate(namespace_separator=" ")
    parser.StartElementHandler, parser.EndElementHandler = begin, lambda name: stack.pop()
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(body, True)
    except expat.ExpatError:
        raise Refused(400, "the body is malformed") from None
    if roots != ["DAV: propfind"] or len(found) > _MOST_PROPERTIES:
        raise Refused(400, "the body is no propfind")
    return found if "DAV: prop" in kinds else None


def _multistatus(
    path: str, status: os.stat_result, inner: Iterator[tuple[str, os.stat_result]], wanted: list[tuple[str, str]] | None
) -> Iterator[str]:
    yield '<?xml version="1.0" encoding="utf-8"?>\n<D:multistatus xmlns:D="DAV:">\n'
    yield _response(path, status, wanted)
    for name, found in inner:
        if stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode):
            yield _response(f"{path}/{name}" if path else name, found, wanted)
    yield "</D:multistatus>\n"


def _response(path: str, status: os.stat_result, wanted: list[tuple[str, str]] | None) -> str:
    is_directory = stat.S_ISDIR(status.st_mode)
    name = os.fsencode(path.rpartition("/")[2]).decode("utf-8", "replace")
    values = {
        "resourcetype": "<D:collection/>" if is_directory else "",
        "getlastmodified": formatdate(int(status.st_mtime), usegmt=True),
        "displayname": escape("".join(one if one.isprintable() else "\ufffd" for one in name)),
        **({} if is_directory else {"getcontentlength": str(status.st_size)}),
    }  # fmt: skip
    asked = [("DAV:", name) for name in values] if wanted is None else wanted
    have = [name for space, name in asked if space == "DAV:" and name in values]
    lack = [(space, name) for space, name in asked if space != "DAV:" or name not in values]
    text = f"<D:response><D:href>{escape(encoded(path, is_directory))}</D:href>"
    if have or not lack:
        told = "".join(f"<D:{name}>{values[name]}</D:{name}>" for name in have)
        text += f"<D:propstat><D:prop>{told}</D:prop><D:status>HTTP/1.1 200 OK</D:status></D:propstat>"
    if lack:
        told = "".join(f"<x:{name} xmlns:x={quoteattr(space)}/>" if space else f"<{name}/>" for space, name in lack)
        text += f"<D:propstat><D:prop>{told}</D:prop><D:status>HTTP/1.1 404 Not Found</D:status></D:propstat>"
    return text + "</D:response>\n"


#: The methods of WebDAV, but for COPY.
HANDLERS: Mapping[str, Handler] = {
    "OPTIONS": options, "PROPFIND": propfind, "PROPPATCH": proppatch, "MKCOL": mkcol, "DELETE": delete, "MOVE": move,
}  # fmt: skip
