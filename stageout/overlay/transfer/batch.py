"""Many small files in one request: batches of operations to a router, and one question for many files from it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Union

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.arrivals import new_mark, not_written, part_name, private, umask
from stageout.overlay.http import operations, signing
from stageout.overlay.http.names import encoded
from stageout.overlay.rules.operations import BATCH_FILE_SIZE, LONGEST_S
from stageout.overlay.sources import open_source
from stageout.overlay.transfer.connection import Answer, Connection, Place, Refusal
from stageout.overlay.transfer.identity import Identity

#: A larger file goes alone. A batch has so many files, and about so many bytes: enough for several connections.
SMALL_BYTES = BATCH_FILE_SIZE
MOST_FILES, MOST_BYTES = 1024, 8 << 20
_MOST_LINE_BYTES, _READ_BYTES = 8 << 20, 1 << 20
_MODE = re.compile("[0-7]{1,4}")
#: Seconds for a router to bring a batch to its disk.
_TAKES_S = 120.0
_GOOD = frozenset({"done", "superseded"})
_CLASSES = {
    "not-found": ErrorClass.NOT_FOUND, "forbidden": ErrorClass.PERMISSION_DENIED, "too-large": ErrorClass.TOO_LARGE,
}  # fmt: skip


class Small(NamedTuple):
    """A small file. :param local: name here. :param path: below the root of the router."""

    local: Path
    path: str
    size: int


Outcome = Callable[[Small, Union[int, TransferFailure]], None]


@dataclass
class Batches:
    """Small files of one origin. May be used in several threads, each with its own connection.

    :param ended: called with the size of each file, or its failure.
    """

    place: Place
    identity: Identity
    origin: str
    ended: Outcome

    def put(self, connection: Connection, first: int, files: Sequence[Small]) -> None:
        """Send files, with the numbers from ``first`` on. A file that cannot be read leaves its number unused.

        :raises TransferFailure: nothing is known of any file that has not ended.
        """
        kind = "sha-256" if self.identity.key else next(iter(operations.digest_kinds()))
        digest = operations.digest_kinds()[kind].of
        listed, parts, sent = [], [], []
        for one in files:
            try:
                data, mode, mtime = _content(one.local)
            except TransferFailure as failure:
                self.ended(one, failure)
                continue
            sent.append((one, len(data)))
            parts.append(data)
            listed.append({"path": encoded(one.path), "size": len(data), "mode": mode, "mtime": mtime,
                           "digest": digest(data).hex()})  # fmt: skip
        if not sent:
            return
        made = int(self.identity.now) - 1
        facts = {"terminal": self.identity.router, "made": made, "expires": made + LONGEST_S, "digest_kind": kind,
                 "files": listed}  # fmt: skip
        line = json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
        fields = {"Content-Type": operations.BATCH_TYPE}
        signed = self.identity.sign(signing.BATCH, signing.batch_payload(line))
        if signed:
            fields["Stageout-Signature"] = signed
        target = operations.place(self.origin, first, first + len(sent) - 1)
        answer, body = connection.ask("PUT", target, fields, b"".join([line, b"\n", *parts]), _TAKES_S)
        if answer.status != 200:
            raise connection.refused(answer, body, f"{len(sent)} small files")
        failed = self._failed(answer, body, len(sent), first)
        for at, (one, size) in enumerate(sent):
            self.ended(one, failed.get(first + at) or size)

    def _failed(self, answer: Answer, body: bytes, count: int, first: int) -> dict[int, TransferFailure]:
        """Return the failures by number. :raises Refusal: each file has to be looked at first.

        :raises TransferFailure: the answer does not fit.
        """
        found: dict[int, TransferFailure] = {}
        try:
            *lines, last = [json.loads(line) for line in body.splitlines()]
            for line in lines:
                if line.get("reason") == "ask-first":
                    words = "the router's records may be older than these files: each has to be looked at"
                    raise Refusal(ErrorClass.CONFLICT, words, self.place.url, replace(answer, status=409), line)
                if line["state"] not in _GOOD:
                    kind = ErrorClass.CONFLICT if line["state"] == "failed" else ErrorClass.REQUEST_REJECTED
                    words = f"{line['state']}: {line.get('reason') or 'no reason was given'}"
                    found[int(line["seq"])] = TransferFailure(kind, words, self.place.url)
            if int(last["done"]) + len(lines) != count or not all(first <= at < first + count for at in found):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            words = f"the answer of {self.place.url} does not fit to the batch"
            raise TransferFailure(ErrorClass.SERVER_ERROR, words, self.place.url) from None
        return found


def _content(local: Path) -> tuple[bytes, int, int]:
    """Return a small file with its mode and time. :raises TransferFailure: it cannot be read, or is too large now."""
    file, status = open_source(local)
    try:
        data = os.read(file, status.st_size + 1)
        while len(data) < status.st_size and (more := os.read(file, status.st_size + 1 - len(data))):
            data += more
    except OSError as problem:
        raise TransferFailure(ErrorClass.LOCAL_FILE, f"{local}: {problem.strerror}") from None
    finally:
        os.close(file)
    if len(data) != status.st_size or len(data) > SMALL_BYTES:
        raise TransferFailure(ErrorClass.SOURCE_CHANGED, f"{local} was changed while it was sent")
    return data, status.st_mode & 0o777, int(status.st_mtime)


class Fetching:
    """Small files from a router. Parameters as of :class:`Batches`."""

    def __init__(self, place: Place, ended: Outcome) -> None:
        self._place, self._ended = place, ended
        self._mask, self._mark = umask(), new_mark()

    def get(self, connection: Connection, files: Sequence[Small]) -> None:
        """Fetch files. :raises TransferFailure: those that have not ended may be fetched again."""
        asked = json.dumps([encoded(one.path) for one in files]).encode()
        connection.request("POST", f"{operations.FOLDER}/fetch", {"Content-Type": "application/json"}, asked)
        answer = connection.answer(_TAKES_S)
        if answer.status != 200:
            raise connection.refused(answer, connection.read(answer), f"{len(files)} small files")
        reader = _Reader(connection.parts(answer))
        try:
            told = json.loads(reader.line())
            kind, listed = str(told.get("digest_kind", "")), told["files"]
            if len(listed) != len(files):
                raise ValueError
            for one, facts in zip(files, listed):
                self._take(one, facts, kind, reader)
        except (ValueError, KeyError, TypeError, AttributeError):
            connection.close()
            words = f"the answer of {self._place.url} does not fit to the question"
            raise TransferFailure(ErrorClass.SERVER_ERROR, words, self._place.url) from None
        reader.end()

    def _take(self, one: Small, facts: dict[str, Any], kind: str, reader: _Reader) -> None:
        if "error" in facts:
            words = str(facts["error"])
            self._ended(one, TransferFailure(_CLASSES.get(words, ErrorClass.REQUEST_REJECTED), words, self._place.url))
            return
        size, mode = int(facts["size"]), facts.get("mode", 0o644)
        if not 0 <= size <= SMALL_BYTES:
            raise ValueError
        data = reader.take(size)
        mode = int(mode, 8) if isinstance(mode, str) and _MODE.fullmatch(mode) else mode
        kinds = operations.digest_kinds()
        if facts.get("digest") and kind in kinds and kinds[kind].of(data).hex() != facts["digest"]:
            words = "it is not what was published"
            self._ended(one, TransferFailure(ErrorClass.CONTENT_MISMATCH, words, self._place.url))
            return
        try:
            self._write(one.local, data, int(mode) & 0o777 & ~self._mask, int(facts["mtime"]))
        except OSError as problem:
            self._ended(one, not_written(one.local, problem))
        else:
            self._ended(one, size)

    def _write(self, local: Path, data: bytes, mode: int, mtime: int) -> None:
        self._mark += 1
        part = local.with_name(part_name(local.name, self._mark))
        try:
            with open(part, "xb", buffering=0, opener=private) as file:
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
                os.fchmod(file.fileno(), mode)
                os.utime(file.fileno(), (mtime, mtime))  # by it --update knows the file again
            part.replace(local)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


class _Reader:
    """Lines and bytes of a body. :param parts: it, in parts of any length."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts, self._buffer = parts, bytearray()

    def line(self) -> bytes:
        """Return a line without its end. :raises ValueError: there is none."""
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > _MOST_LINE_BYTES:
                raise ValueError
            self._more()
        return self._cut(end, 1)

    def take(self, count: int) -> bytes:
        """Return so many bytes. :raises ValueError: there are fewer."""
        while len(self._buffer) < count:
            self._more()
        return self._cut(count, 0)

    def end(self) -> None:
        """Read the rest, which nobody wants."""
        for _ in self._parts:
            pass

    def _more(self) -> None:
        part = next(self._parts, b"")
        if not part:
            raise ValueError
        self._buffer += part

    def _cut(self, count: int, more: int) -> bytes:
        found = bytes(self._buffer[:count])
        del self._buffer[: count + more]
        return found
