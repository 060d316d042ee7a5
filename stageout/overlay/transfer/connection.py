"""One connection of a client to a router: HTTP/1.1 in TLS 1.3, directly or through relays (CONNECT).

Heads are written from checked values only, and answers are read strictly: a reader that guesses where an answer ends
would take a part of a file for the next one. Bytes of files pass no library: they go by sendfile and recv_into.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.rules.silence import BODY_TIMEOUT_S, IDLE_TIMEOUT_S, LEAST_SILENCE_S, ROUND_TRIPS
from stageout.overlay.rules.via import joined

_MOST_HEAD_BYTES, _READ_BYTES = 64 * 1024, 64 * 1024
#: Of an answer that is no file: a state, a list of results.
_MOST_BODY_BYTES = 64 << 20
_CONNECT_S = 10.0
_PART_BYTES = 1 << 20
_STATUS = re.compile(rb"HTTP/1\.1 ([1-5][0-9]{2})(?: [\t\x20-\x7e\x80-\xff]*)?")
_FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([\t\x20-\x7e\x80-\xff]*?)[ \t]*")
_LENGTH = re.compile(r"[0-9]{1,18}")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})")
_TARGET = re.compile(r"[!-~]+")
_NAME, _VALUE = re.compile(r"[A-Za-z0-9-]+"), re.compile(r"[\t\x20-\x7e]*")
#: Offsets in struct tcp_info (linux/tcp.h): bytes on the way, the last acknowledgement (ms), the round trip (us).
_UNACKED_AT, _LAST_ACK_AT, _TRIP_AT, _INFO_BYTES = 24, 56, 68, 72
_U32 = struct.Struct("=I")

#: Class of a failure by the status of an answer.
_CLASSES = {
    400: ErrorClass.REQUEST_REJECTED, 401: ErrorClass.CREDENTIAL_REFUSED, 403: ErrorClass.PERMISSION_DENIED,
    404: ErrorClass.NOT_FOUND, 405: ErrorClass.NOT_SUPPORTED, 407: ErrorClass.CREDENTIAL_REFUSED,
    409: ErrorClass.CONFLICT, 410: ErrorClass.REQUEST_REJECTED, 412: ErrorClass.CONFLICT, 413: ErrorClass.TOO_LARGE,
    416: ErrorClass.REQUEST_REJECTED, 422: ErrorClass.CONTENT_MISMATCH, 429: ErrorClass.THROTTLED,
    501: ErrorClass.NOT_SUPPORTED, 502: ErrorClass.CONNECT_FAILED, 503: ErrorClass.SERVER_BUSY,
    504: ErrorClass.CONNECT_FAILED, 507: ErrorClass.NO_SPACE_REMOTE,
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """The head of an answer. :param fields: by their names in small letters. :param body_bytes: -1: in chunks."""

    status: int
    fields: Mapping[str, str]
    body_bytes: int
    keeps: bool = True

    def get(self, name: str) -> str:
        """Return a field, "" without one."""
        return self.fields.get(name, "")


class Refusal(TransferFailure):
    """A router has refused a request. :ivar status: of its answer. :ivar facts: its body."""

    def __init__(self, kind: ErrorClass, text: str, server: str, answer: Answer, facts: Mapping[str, Any]) -> None:
        wait = answer.get("retry-after")
        super().__init__(kind, text, server, float(wait) if _LENGTH.fullmatch(wait) else None)
        self.status, self.facts = answer.status, facts


class Address(NamedTuple):
    """A router's host and port."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return it as it stands in URLs and requests."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass
class Trust:
    """Routers that are believed. :param ca: file with the certificates of a CA; "": those that OpenSSL knows.

    :param pin: the router's public key as ``sha256//BASE64``, whatever its certificate says. :param is_plain: no TLS,
        for one machine and benchmarks.
    """

    ca: str = ""
    pin: str = ""
    is_plain: bool = False
    _context: ssl.SSLContext | None = field(default=None, repr=False)

    def secured(self, sock: socket.socket, host: str) -> socket.socket:
        """Begin TLS on a connection. :raises TransferFailure: TLS_UNTRUSTED. :raises OSError: it is lost."""
        if self.is_plain:
            return sock
        if self._context is None:
            self._context = self._made()
        try:
            found = self._context.wrap_socket(sock, server_hostname=host)
        except ssl.SSLCertVerificationError as problem:
            words = f"the certificate of {host} is not trusted: {problem.verify_message} (--cacert names a CA)"
            raise TransferFailure(ErrorClass.TLS_UNTRUSTED, words, host) from None
        except ssl.SSLEOFError:
            raise ConnectionResetError("it was closed") from None
        except ssl.SSLError as problem:
            words = f"{host} does not speak TLS 1.3: {problem.reason or problem}"
            raise TransferFailure(ErrorClass.TLS_UNTRUSTED, words, host) from None
        if self.pin and _pin(found.getpeercert(binary_form=True) or b"") != self.pin:
            found.close()
            raise TransferFailure(ErrorClass.TLS_UNTRUSTED, f"{host} has another key than the pinned one", host)
        return found

    def _made(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if self.pin:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        try:
            if self.ca:
                context.load_verify_locations(self.ca)
            elif not self.pin:
                context.load_default_certs()
        except (OSError, ssl.SSLError) as problem:
            words = f"{self.ca}: {problem.strerror or problem} (--cacert)"
            raise TransferFailure(ErrorClass.TLS_UNTRUSTED, words) from None
        return context


def _pin(certificate: bytes) -> str:
    import base64
    import hashlib

    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = x509.load_der_x509_certificate(certificate).public_key()
    digest = hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()
    return f"sha256//{base64.b64encode(digest).decode()}"


@dataclass(frozen=True)
class Place:
    """The router that requests go to, and how it is reached.

    :param authorization: returns the value of the field; called for each request. :param relay_authorization: the same
        for the relay, with its address and the one that it leads to. :param told: called with the Date of answers.
    :param via: NAMEs of routers for which that one takes custody, the terminal last.
    """

    address: Address
    trust: Trust
    authorization: Callable[[], str] = lambda: ""
    relay_authorization: Callable[[Address, Address], str] = lambda relay, to: ""
    told: Callable[[str], None] = lambda date: None
    via: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """Return its address, for people."""
        return str(self.address)


Route = tuple[Address, ...]


class Connection:
    """A connection to a router. One thread uses it; another one may only call :meth:`abort`.

    :param route: relays on the way, in order.
    :raises TransferFailure: it cannot be made.
    """

    def __init__(self, place: Place, route: Route = (), timeout_s: float = _CONNECT_S) -> None:
        self.place, self.route = place, route
        self._buffer = bytearray()
        self._is_ended = False
        self.requests = 0
        stops = [*route, place.address]
        began_s = time.monotonic()
        self._sock = _connected(stops[0], timeout_s)
        try:
            for relay, to in zip(stops, stops[1:]):
                self._connect(relay, to)
            self._sock = place.trust.secured(self._sock, place.address.host)
        except TransferFailure:
            self._sock.close()
            raise
        except OSError as problem:
            self._sock.close()
            raise self._failure(problem, ErrorClass.CONNECT_FAILED) from None
        #: Seconds until it was there: some round trips.
        self.made_s = time.monotonic() - began_s
        self._patience(BODY_TIMEOUT_S)

    def request(
        self, method: str, target: str, fields: Mapping[str, str] | None = None, body: bytes = b"", more_bytes: int = 0
    ) -> None:
        """Send a request. :param more_bytes: length of the body that follows by :meth:`send_file`.

        :raises TransferFailure: the connection is lost.
        """
        said, target = {"Host": self.place.url, **(fields or {})}, joined(self.place.via, target)
        authorization = self.place.authorization()
        if authorization:
            said["Authorization"] = authorization
        if body or more_bytes or method in ("PUT", "POST"):
            said["Content-Length"] = str(len(body) + more_bytes)
        self.requests += 1
        self._send(_written(method, target, said) + body)

    def send_file(self, file: int, offset: int, count: int, moved: Callable[[int], None]) -> None:
        """Send a part of a file as the body of a request. :raises TransferFailure: the connection is lost, or the file
        is shorter now.
        """
        is_plain, end = self.place.trust.is_plain, offset + count
        memory = None if is_plain else memoryview(bytearray(min(_PART_BYTES, count)))
        while offset < end:
            try:
                if memory is None:
                    sent = os.sendfile(self._sock.fileno(), file, offset, min(_PART_BYTES, end - offset))
                else:
                    sent = os.preadv(file, [memory[: min(_PART_BYTES, end - offset)]], offset)
                    self._sock.sendall(memory[:sent])
            except BlockingIOError:
                self._writable()
                continue
            except OSError as problem:
                raise self._failure(problem) from None
            if not sent:
                raise TransferFailure(ErrorClass.SOURCE_CHANGED, "the file became shorter while it was sent")
            offset += sent
            moved(sent)

    def send(self, data: bytes | memoryview) -> None:
        """Send a part of a body. :raises TransferFailure: the connection is lost."""
        self._send(data)

    def answer(self, timeout_s: float = BODY_TIMEOUT_S, is_head: bool = False) -> Answer:
        """Read the head of an answer; its body follows by :meth:`read` or :meth:`read_into`.

        :raises TransferFailure: the connection is lost, or the answer is malformed.
        """
        self._sock.settimeout(timeout_s)
        try:
            while True:
                found = _parsed(self._head(), is_head)
                if found.status != 100:
                    break
        finally:
            self._sock.settimeout(BODY_TIMEOUT_S)
        self._is_ended |= not found.keeps
        if found.get("date"):
            self.place.told(found.get("date"))
        return found

    def ask(
        self,
        method: str,
        target: str,
        fields: Mapping[str, str] | None = None,
        body: bytes = b"",
        timeout_s: float = BODY_TIMEOUT_S,
    ) -> tuple[Answer, bytes]:
        """Send a request, and return the answer with its body. :raises TransferFailure: as of both."""  # fmt: skip
        self.request(method, target, fields, body)
        answer = self.answer(timeout_s, is_head=method == "HEAD")
        return answer, self.read(answer)

    def read(self, answer: Answer, most_bytes: int = _MOST_BODY_BYTES) -> bytes:
        """Read the body of an answer. :raises TransferFailure: the connection is lost; the body is too long."""
        data = bytearray()
        for part in self.parts(answer):
            data += part
            if len(data) > most_bytes:
                raise self._malformed("the answer is too long")
        return bytes(data)

    def parts(self, answer: Answer) -> Iterator[bytes]:
        """Read the body of an answer part by part. :raises TransferFailure: the connection is lost."""
        left = answer.body_bytes
        while left > 0 or (left < 0 and (left := -self._chunk()) < 0):
            is_chunked, count = left < 0, abs(left)
            while count:
                part = self._some(count)
                count -= len(part)
                yield part
            if not is_chunked:
                return
            left = -1
            if self._line():
                raise self._malformed("a chunk is longer than it says")

    def read_into(self, view: memoryview) -> int:
        """Read some bytes of a body of known length. :raises TransferFailure: the connection is lost."""
        if self._buffer:
            count = min(len(view), len(self._buffer))
            view[:count] = self._buffer[:count]
            del self._buffer[:count]
            return count
        try:
            count = self._sock.recv_into(view)
        except OSError as problem:
            raise self._failure(problem) from None
        if not count:
            raise self._failure(ConnectionResetError("it was closed"))
        return count

    @property
    def is_ended(self) -> bool:
        """Tell whether no further request can go by it."""
        return self._is_ended

    @property
    def is_silent(self) -> bool:
        """Tell whether bytes on their way have not been acknowledged for three round trips. Any thread may ask."""
        try:
            told = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            unacked, ack_ms, trip_us = (_U32.unpack_from(told, at)[0] for at in (_UNACKED_AT, _LAST_ACK_AT, _TRIP_AT))
        except (OSError, struct.error):
            return False
        return bool(unacked) and ack_ms / 1e3 > max(LEAST_SILENCE_S, ROUND_TRIPS * trip_us / 1e6)

    def abort(self) -> None:
        """End it at once, whatever another thread does with it."""
        self._is_ended = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it."""
        self._is_ended = True
        self._sock.close()

    def refused(self, answer: Answer, body: bytes, what: str) -> Refusal:
        """Return the failure that a refusal means. :param what: the name that the request was about."""
        kind = _CLASSES.get(answer.status, ErrorClass.SERVER_ERROR)
        try:
            facts = json.loads(body) if body else {}
        except ValueError:
            is_text = answer.get("content-type").startswith("text/plain")
            facts = {"detail": body.decode("utf-8", "replace").strip()} if is_text else {}
        facts = facts if isinstance(facts, dict) else {}
        reason = facts.get("detail") or facts.get("reason") or facts.get("title")
        said = reason if isinstance(reason, str) and reason.isprintable() else f"status {answer.status}"
        return Refusal(kind, f"{what}: {self.place.url} answers: {said[:500]}", self.place.url, answer, facts)

    def _connect(self, relay: Address, to: Address) -> None:
        fields = {"Host": str(to)}
        authorization = self.place.relay_authorization(relay, to)
        if authorization:
            fields["Proxy-Authorization"] = authorization
        self._sock.sendall(_written("CONNECT", str(to), fields))
        found = _parsed(self._head(), is_head=False, is_connect=True)
        if found.status != 200:
            body = self.read(found, _READ_BYTES)
            refusal = self.refused(found, body, f"the relay {relay}")
            refusal.server, refusal.intermediate = str(relay), "Connection"
            raise refusal
        if self._buffer:  # TLS behind it begins with our bytes
            raise self._malformed("the relay sent bytes behind its answer")

    def _patience(self, seconds: float) -> None:
        self._sock.settimeout(seconds)
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))

    def _send(self, data: bytes | memoryview) -> None:
        try:
            self._sock.sendall(data)
        except OSError as problem:
            raise self._failure(problem) from None

    def _writable(self) -> None:
        ready = select.poll()
        ready.register(self._sock, select.POLLOUT)
        if not ready.poll(int(BODY_TIMEOUT_S * 1000)):
            raise self._failure(TimeoutError("it takes no bytes"))

    def _more(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
        except OSError as problem:
            raise self._failure(problem) from None
        if not data:
            raise self._failure(ConnectionResetError("it was closed"))
        self._buffer += data

    def _head(self) -> bytes:
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > _MOST_HEAD_BYTES:
                raise self._malformed("the head of its answer is too long")
            self._more()
        head = bytes(self._buffer[:end])
        del self._buffer[: end + 4]
        return head

    def _some(self, most: int) -> bytes:
        if not self._buffer:
            self._more()
        part = bytes(self._buffer[:most])
        del self._buffer[:most]
        return part

    def _line(self) -> bytes:
        while (end := self._buffer.find(b"\r\n")) < 0:
            if len(self._buffer) > _MOST_HEAD_BYTES:
                raise self._malformed("a line of its answer is too long")
            self._more()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _chunk(self) -> int:
        """Return the length of the next chunk, 0 at the end of the body."""
        line = self._line()
        if not _CHUNK.fullmatch(line):
            raise self._malformed("the size of a chunk is hexadecimal digits")
        count = int(line, 16)
        while not count and self._line():
            pass  # trailers
        return count

    def _malformed(self, words: str) -> TransferFailure:
        self._is_ended = True
        return TransferFailure(ErrorClass.SERVER_ERROR, f"{self.place.url}: {words}", self.place.url)

    def _failure(self, problem: OSError, kind: ErrorClass = ErrorClass.CONNECTION_LOST) -> TransferFailure:
        self._is_ended = True
        is_late = isinstance(problem, TimeoutError)
        why = "nothing came" if is_late else problem.strerror or str(problem)
        by = f" by {', '.join(map(str, self.route))}" if self.route else ""
        words = f"the connection to {self.place.url}{by} is lost: {why}"
        return TransferFailure(ErrorClass.STALLED if is_late else kind, words, self.place.url)


def _connected(to: Address, timeout_s: float) -> socket.socket:
    try:
        sock = socket.create_connection(to, timeout=timeout_s)
    except socket.gaierror as problem:
        is_late = problem.errno == socket.EAI_AGAIN
        kind = ErrorClass.NAME_LOOKUP_FAILED if is_late else ErrorClass.NAME_NOT_RESOLVED
        raise TransferFailure(kind, f"{to.host}: {problem.strerror}", str(to)) from None
    except OSError as problem:
        words = f"no connection to {to}: {problem.strerror or problem}"
        raise TransferFailure(ErrorClass.CONNECT_FAILED, words, str(to)) from None
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(IDLE_TIMEOUT_S * 1000))
    return sock


def _written(method: str, target: str, fields: Mapping[str, str]) -> bytes:
    """Write a head. :raises ValueError: a value would end its line."""
    if not _TARGET.fullmatch(target):
        raise ValueError(f"no target of a request: {target!r}")
    for name, value in fields.items():
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise ValueError(f"no field of a request: {name!r}")
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


def _parsed(head: bytes, is_head: bool, is_connect: bool = False) -> Answer:
    """Read the head of an answer. :raises TransferFailure: it is none of HTTP/1.1, or leaves open where it ends."""
    first, *lines = head.split(b"\r\n")
    status = _STATUS.fullmatch(first)
    found = [_FIELD.fullmatch(line) for line in lines]
    if status is None or not all(found):
        raise TransferFailure(ErrorClass.SERVER_ERROR, "the other side does not answer in HTTP/1.1")
    fields: dict[str, str] = {}
    for one in found:
        if one is None:
            continue
        name, value = one[1].decode("ascii").lower(), one[2].decode("latin-1")
        if name in fields and name in ("content-length", "transfer-encoding", "content-range", "etag"):
            raise TransferFailure(ErrorClass.SERVER_ERROR, f"the answer has two fields {name}")
        fields[name] = f"{fields[name]}, {value}" if name in fields else value
    code, length = int(status[1]), fields.get("content-length")
    keeps = "close" not in fields.get("connection", "").lower()
    if length is not None and not _LENGTH.fullmatch(length):
        raise TransferFailure(ErrorClass.SERVER_ERROR, "the length of the answer is no number")
    if code < 200 or code in (204, 304) or is_head or (is_connect and code == 200):
        return Answer(code, fields, 0, keeps)
    coding = fields.get("transfer-encoding")
    if (coding is None) == (length is None) or (coding is not None and coding.lower() != "chunked"):
        raise TransferFailure(ErrorClass.SERVER_ERROR, "the answer leaves open where it ends")
    return Answer(code, fields, -1 if length is None else int(length), keeps)
