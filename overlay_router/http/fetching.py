"""``POST /.stageout/v1/fetch``: many small files in one answer: a line of JSON, then their bytes."""

from __future__ import annotations

import errno
import json
import os
from typing import Any

from overlay_router.http.exchange import Exchange
from stageout.overlay.http.heads import Refused
from stageout.overlay.http.names import decoded
from stageout.overlay.http.operations import BATCH_TYPE, json_value
from stageout.overlay.rules.operations import BATCH_FILE_SIZE, BATCH_FILES, BATCH_SIZE
from stageout.overlay.rules.rights import Right

_MOST_QUESTION_BYTES = 8 << 20
#: Words for the statuses with which a single file is refused.
_WORDS = {403: "forbidden", 404: "not-found", 413: "too-large"}


def fetch(one: Exchange) -> None:
    """Answer one request. :raises Refused: it is refused as a whole."""
    if one.head.method != "POST":
        raise Refused(405, "files are fetched with POST", {"Allow": "POST"})
    asked = json_value(one.body(_MOST_QUESTION_BYTES), _MOST_QUESTION_BYTES)
    if not isinstance(asked, list) or not all(isinstance(path, str) for path in asked):
        raise Refused(400, "the body is a JSON list of paths")
    if len(asked) > BATCH_FILES:
        raise Refused(413, f"at most {BATCH_FILES} files are fetched together")
    listed: list[dict[str, Any]] = []
    parts: list[bytes] = []
    left = BATCH_SIZE
    for path in asked:
        try:
            facts, data = _file(one, decoded(path), left)
        except Refused as why:
            facts, data = {"error": _WORDS.get(why.status, why.reason)}, b""
        except OSError as problem:
            if isinstance(problem, ConnectionError):
                raise
            facts, data = {"error": errno.errorcode.get(problem.errno or 0, "unreadable")}, b""
        left -= len(data)
        listed.append({"path": path, **facts})
        parts.append(data)
    line = json.dumps({"files": listed}).encode() + b"\n"
    length = len(line) + sum(map(len, parts))
    fields = {"Content-Type": BATCH_TYPE, "Cache-Control": "no-store", "Content-Length": str(length), **one.safe}
    one.begin(200, fields)
    one.stream.send(line + b"".join(parts) if length <= BATCH_FILE_SIZE else line)
    for data in parts if length > BATCH_FILE_SIZE else ():
        one.stream.send(data)


def _file(one: Exchange, path: str, left: int) -> tuple[dict[str, Any], bytes]:
    """Return facts and bytes of a file. :raises Refused: it is not sent."""
    one.allow(Right.READ, path)
    facts, file = one.desk.ask("look", path=path)
    try:
        status = os.fstat(file)
        if facts["directory"]:
            raise Refused(404, "this name is no file")
        if status.st_size > min(BATCH_FILE_SIZE, left):
            raise Refused(413, "the file is too large to be fetched with others")
        data = os.pread(file, status.st_size, 0)
        if len(data) != status.st_size:
            raise Refused(503, "the file is changed now")
        return {
            "size": len(data), "mtime": int(status.st_mtime), "mode": status.st_mode & 0o777, "etag": facts["etag"],
        }, data  # fmt: skip
    finally:
        os.close(file)
