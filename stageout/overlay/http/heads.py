"""Heads of HTTP/1.1 requests: ``h11`` reads them, and what it lets pass is refused here.

Two readers of one head must never disagree about where it ends, or the second one takes a body for a request. So a head
has one form only: lines end with CR LF, no line is folded, and the length of the body is said once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

#: Bytes of a whole head.
MAX_HEAD_BYTES = 16 * 1024
CHUNKED = -1
_LENGTH = re.compile(r"[0-9]{1,18}")
_FIELD = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:")
#: The last byte may be the CR of an end of line that has not come whole.
_BREAK = re.compile(rb"\r(?!\n|\Z)|(?<!\r)\n|\r\n[ \t]")
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
#: Fields that stand for one value; a second one is refused, not joined.
_ONCE = frozenset(
    {"host", "content-length", "transfer-encoding", "content-range", "range", "authorization", "proxy-authorization",
     "destination", "overwrite", "depth", "if-range", "expect", "source", "origin"}
)  # fmt: skip


class Refused(Exception):
    """The answer to a request that is not carried out.

    :param reason: for the client; names nothing that it may not see. :param headers: further fields of the answer.
    :param members: further ones of the problem, for programs.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        headers: Mapping[str, str] | None = None,
        members: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(reason)
        self.status, self.reason, self.headers, self.members = status, reason, dict(headers or {}), dict(members or {})

    def problem(self, path: str = "") -> bytes:
        """Return the body of the answer (RFC 9457). :param path: the client's."""
        title = HTTPStatus(self.status).phrase
        facts = {"type": "about:blank", "title": title, "status": self.status, "detail": self.reason}
        return json.dumps({**self.members, **facts, **({"instance": path} if path else {})}).encode() + b"\n"


@dataclass(frozen=True)
class Head:
    """A request without its body.

    :param target: as it came. :param fields: by their names in small letters.
    :param body_bytes: length of the body, :data:`CHUNKED`, or 0.
    """

    method: str
    target: str
    fields: Mapping[str, str]
    body_bytes: int = 0
    keeps: bool = True

    def get(self, name: str) -> str:
        """Return a field, "" without one."""
        return self.fields.get(name, "")

    @property
    def expects(self) -> bool:
        """Tell whether the client waits for "100 Continue" before its body."""
        return self.get("expect").lower() == "100-continue"


def end_of_head(data: bytes | bytearray) -> int:
    """Return the number of bytes of the head that these bytes begin with, 0 while its end is missing.

    :raises Refused: it can never be one.
    """
    end = data.find(b"\r\n\r\n")
    told = bytes(data[: end + 2] if end >= 0 else data)
    if _BREAK.search(told):
        raise Refused(400, "lines of a head end with CR LF, and none is folded")
    if max(end, len(data) if end < 0 else 0) > MAX_HEAD_BYTES:
        raise Refused(431, f"a head has at most {MAX_HEAD_BYTES} bytes")
    return end + 4 if end >= 0 else 0


def read_head(data: bytes) -> Head:
    """Read a whole head. :raises Refused: it is none, or leaves open where the request ends."""
    import h11  # which is installed with the overlay's extra: without it a router answers no HTTP

    lines = data[:-4].split(b"\r\n")
    if _CONTROL.search(data) or not all(map(_FIELD.match, lines[1:])):
        raise Refused(400, "the head is malformed")
    reader = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES + 4)
    try:
        reader.receive_data(data)
        request = reader.next_event()
    except h11.RemoteProtocolError as problem:
        status = problem.error_status_hint
        raise Refused(status if status in (431, 501) else 400, f"the head is malformed: {problem}") from None
    if not isinstance(request, h11.Request):
        raise Refused(400, "the head is malformed")
    fields: dict[str, str] = {}
    for raw_name, raw_value in request.headers:
        name, value = raw_name.decode("ascii"), raw_value.decode("latin-1")
        if name in fields and name in _ONCE:
            raise Refused(400, f"the field {name} may be there once")
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    if request.http_version not in (b"1.0", b"1.1"):
        raise Refused(505, "this is no request of HTTP/1.1")
    is_old = request.http_version == b"1.0"
    keeps = not is_old and "close" not in fields.get("connection", "").lower()
    body_bytes = _body_bytes(fields, data, is_old)
    return Head(request.method.decode("ascii"), request.target.decode("latin-1"), fields, body_bytes, keeps)


def _body_bytes(fields: Mapping[str, str], data: bytes, is_old: bool) -> int:
    length, coding = fields.get("content-length"), fields.get("transfer-encoding")
    if coding is not None:
        if length is not None or is_old:
            raise Refused(400, "a body has a length, or is chunked")
        if coding.lower() != "chunked":
            raise Refused(501, "no coding of a body but chunked is known here")
        return CHUNKED
    # h11 takes a list of equal lengths for one: so the field is looked at as it came
    said = [line for line in data.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    if length is None:
        return 0
    if len(said) != 1 or not _LENGTH.fullmatch(said[0].partition(b":")[2].strip(b" \t").decode("latin-1")):
        raise Refused(400, "Content-Length is a number of digits, once")
    return int(length)


def answer_head(status: int, fields: Mapping[str, str]) -> bytes:
    """Write the head of an answer."""
    phrase = HTTPStatus(status).phrase
    lines = [f"HTTP/1.1 {status} {phrase}", *(f"{name}: {value}" for name, value in fields.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
