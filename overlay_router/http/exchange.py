"""One request and its answer on a client's connection."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from email.utils import formatdate

from overlay_router.http.asking import Desk
from overlay_router.http.files import Files
from overlay_router.http.stream import Stream
from stageout.overlay.http.chunks import Chunks
from stageout.overlay.http.claims import Subject
from stageout.overlay.http.heads import CHUNKED, Head, Refused, answer_head
from stageout.overlay.http.names import path_of
from stageout.overlay.http.operations import FOLDER
from stageout.overlay.rules.operations import Malformed
from stageout.overlay.rules.rights import Right
from stageout.overlay.rules.via import split

#: Files never act as pages of this router, and nothing of another site's page is carried out.
_SAFE = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "sandbox; default-src 'none'"}
_DRAIN_BYTES = 64 * 1024


class Exchange:
    """One request.

    :param subject: who asks. :param files: the connection's.
    :ivar answered: an answer has begun. :ivar keeps: the connection can bring another request.
    :ivar via: NAMEs of routers behind this one. :ivar own: a path of the router's own resources, "" for a name.
    :raises Refused: the target is none.
    """

    def __init__(self, stream: Stream, desk: Desk, head: Head, subject: Subject, files: Files) -> None:
        self.stream, self.desk, self.head, self.subject, self.files = stream, desk, head, subject, files
        self.answered, self.keeps = False, head.keeps
        raw, mark, query = head.target.partition("?")
        try:
            self.via, raw = split(raw)
        except Malformed as why:
            raise Refused(400, str(why)) from None
        self.own = raw if raw.startswith(f"{FOLDER}/") else ""
        self.path, self.query = ("", query) if self.own else path_of(raw + mark + query)
        self._left = max(0, head.body_bytes)
        self._chunks = Chunks(stream.line) if head.body_bytes == CHUNKED else None
        self._waits = head.expects

    def allow(self, right: Right, path: str | None = None) -> None:
        """Check a right. :raises Refused: 403, whether or not the name exists."""
        if not self.subject.may(right, self.path if path is None else path):
            raise Refused(403, f"the token gives no right to {right.value} this name")

    def read_into(self, view: memoryview) -> int:
        """Read some bytes of the body, 0 at its end. :raises Refused: it is malformed. :raises OSError: it is cut."""
        if self._waits:
            self._waits = False
            self.stream.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        due = self._chunks.due() if self._chunks else self._left
        if not due:
            return 0
        count = self.stream.read_into(view[: min(due, len(view))])
        if self._chunks:
            self._chunks.took(count)
        else:
            self._left -= count
        return count

    def body(self, most_bytes: int) -> bytes:
        """Read a small body whole. :raises Refused: 413: it is larger."""
        data, memory = bytearray(), memoryview(bytearray(min(most_bytes, 65536)))
        if self.head.body_bytes > most_bytes:
            raise Refused(413, f"the body of such a request has at most {most_bytes} bytes")
        while count := self.read_into(memory):
            data += memory[:count]
            if len(data) > most_bytes:
                raise Refused(413, f"the body of such a request has at most {most_bytes} bytes")
        return bytes(data)

    def begin(self, status: int, fields: Mapping[str, str]) -> None:
        """Send the head of the answer; what of the request's body was not read ends the connection."""
        if self._chunks is not None and not self._chunks.ended:
            self.keeps = False
        if self._left:
            self.keeps = False
        self.answered = True
        told = {"Date": formatdate(usegmt=True), "Server": "stageout", **fields}
        if status >= 200:
            told["Connection"] = "keep-alive" if self.keeps else "close"
        self.stream.send(answer_head(status, told))

    def answer(self, status: int, fields: Mapping[str, str] | None = None, body: bytes = b"") -> None:
        """Send a whole answer."""
        length = {} if status in (204, 304) else {"Content-Length": str(len(body))}
        self.begin(status, {**length, **(fields or {})})
        if self.head.method != "HEAD" and body:
            self.stream.send(body)

    def refuse(self, why: Refused) -> None:
        """Answer with a problem (RFC 9457)."""
        path = self.head.target.partition("?")[0]
        fields = {"Content-Type": "application/problem+json", "Cache-Control": "no-store", **_SAFE, **why.headers}
        self.answer(why.status, fields, why.problem(path if path.isascii() else ""))

    def stream_out(self, fields: Mapping[str, str], pieces: Iterable[bytes], status: int = 200) -> None:
        """Send an answer whose length is not known before."""
        self.begin(status, {"Transfer-Encoding": "chunked", **_SAFE, **fields})
        if self.head.method == "HEAD":
            return
        for piece in pieces:
            if piece:
                self.stream.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        self.stream.send(b"0\r\n\r\n")

    @property
    def safe(self) -> Mapping[str, str]:
        """Fields of answers that hold what users wrote."""
        return _SAFE


def gathered(pieces: Iterable[str], most_bytes: int = _DRAIN_BYTES) -> Iterable[bytes]:
    """Put small texts together."""
    held, size = [], 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= most_bytes:
            yield "".join(held).encode()
            held, size = [], 0
    yield "".join(held).encode()


Handler = Callable[[Exchange], None]


def json_line(facts: Mapping[str, object]) -> str:
    """Return a line of JSON."""
    return json.dumps(facts) + "\n"
