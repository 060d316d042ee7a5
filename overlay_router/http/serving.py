"""A client's connection in a worker, from its first head to its end."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping

from overlay_router.http import dav
from overlay_router.http.asking import Desk, Lost
from overlay_router.http.copying import Copying
from overlay_router.http.exchange import Exchange, Handler
from overlay_router.http.fetching import fetch
from overlay_router.http.files import Files
from overlay_router.http.operations import Operations
from overlay_router.http.reading import Digests, Reading
from overlay_router.http.relaying import PassOn, relay
from overlay_router.http.stream import Stream
from overlay_router.http.via import Via
from overlay_router.http.writing import Writing
from stageout.core import log
from stageout.overlay.http.claims import NOBODY, Subject
from stageout.overlay.http.heads import Head, Refused, answer_head, read_head
from stageout.overlay.http.operations import FOLDER
from stageout.overlay.http.tokens import Access, token_of
from stageout.overlay.rules.rights import BadToken, check_times

#: Seconds to the first byte of the next request, and from there to the end of its head.
_IDLE_S, _HEAD_S = 60.0, 10.0
#: So long the rest of a body is read that is not wanted.
_DRAIN_S = 30.0
_PLAIN = (
    "this port belongs to a stageout router, which answers HTTP in TLS only (https://): "
    "docs/overlay/standard-tools.md of stageout shows how to get files in and out with curl and other tools."
)
#: Chromium reads the first challenge only, and asks people for a password if it is Basic.
_CHALLENGE = 'Basic realm="stageout", Bearer realm="stageout"'


class Service:
    """HTTP in one worker: who may ask, and the connections that are open. :param pass_on: as CONNECT takes it."""

    def __init__(self, pass_on: PassOn) -> None:
        self.pass_on = pass_on
        self.access, self.takes_plain = Access(frozenset(), {}, {}), False
        self.copy_hosts: tuple[str, ...] = ()
        self._open: dict[Connection, socket.socket] = {}
        self._lock = threading.Lock()
        kept = Digests()
        reading, writing = Reading(kept), Writing(kept)
        self.handlers: Mapping[str, Handler] = {
            "GET": reading, "HEAD": reading, "PUT": writing, **dav.HANDLERS,
            "COPY": Copying(writing, lambda: self.copy_hosts),
        }  # fmt: skip
        self.operations = Operations(lambda: self.access)
        self.via = Via(self.operations, reading)

    def become(self, facts: bytes) -> None:
        """Take other keys. Connections of subjects whose issuer is gone, or is another now, end."""
        told = json.loads(facts)
        before, self.takes_plain, self.copy_hosts = self.access, told["plain"], tuple(told["copy_hosts"])
        own = {name: (public, prefix) for name, (public, prefix) in told["keys"].items()}
        issuers = {name: (prefix, keys) for name, (prefix, keys) in told["issuers"].items()}
        self.access = Access(frozenset(told["audiences"]), own, issuers, frozenset(told["routers"]))
        with self._lock:
            for connection, raw in self._open.items():
                if connection.subject is not NOBODY and not self.access.takes(connection.subject, before):
                    with contextlib.suppress(OSError):
                        raw.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def counted(self, connection: Connection, raw: socket.socket) -> Iterator[None]:
        """While a connection is served."""
        with self._lock:
            self._open[connection] = raw
        try:
            yield
        finally:
            with self._lock:
                del self._open[connection]


class Connection:
    """One client. :param channel: to the daemon. :ivar subject: whose token came last."""

    def __init__(self, service: Service, stream: Stream, channel: socket.socket) -> None:
        self._service, self._stream, self._desk = service, stream, Desk(channel)
        self.subject, self._files = NOBODY, Files()

    def run(self) -> None:
        """Serve requests until the client ends, or is too slow; both sockets are closed."""
        stream = self._stream
        with self._service.counted(self, stream.raw), contextlib.closing(stream.raw), contextlib.closing(self._desk):
            try:
                first_s = _HEAD_S
                while self._request(first_s):
                    first_s = _IDLE_S
            except (OSError, ssl.SSLError):
                pass  # the client has gone, or the daemon has ended it
            except Exception as problem:  # a fault in one request ends its connection alone
                log.error("http-request-failed", subject=self.subject.name, problem=repr(problem))
            finally:
                self._files.close()

    def _request(self, first_s: float) -> bool:
        """Serve one; whether another may come."""
        try:
            data = self._stream.head(first_s, _HEAD_S)
            if not data:
                self._stream.end()
                return False
            head = read_head(data)
        except ImportError:
            self._last(Refused(501, "HTTP needs h11 and PyJWT at the router: install stageout[overlay]"))
            return False
        except Refused as why:
            self._last(why)
            return False
        is_private = self._stream.is_secure or self._service.takes_plain
        if head.method == "CONNECT":
            self._relay(head, is_private)
            return False
        if not is_private:
            self._last(Refused(400, _PLAIN), is_text=True)
            return False
        try:
            one = Exchange(self._stream, self._desk, head, NOBODY, self._files)
        except Refused as why:
            self._last(why)
            return False
        try:
            self._check(head)
            one.subject = self._authorized(head.get("authorization"))
            handler = self._service.handlers.get(head.method)
            if one.own:
                handler = fetch if one.own == f"{FOLDER}/fetch" else self._service.operations
            elif one.via:
                handler = self._service.via
            if handler is None:
                raise Refused(405, f"{head.method} is not known here", {"Allow": ", ".join(self._service.handlers)})
            handler(one)
        except Refused as why:
            if one.answered:
                return False
            if isinstance(why, Lost):
                one.keeps = False
            one.refuse(why)
        except OSError as problem:
            if one.answered or isinstance(problem, (ConnectionError, BlockingIOError, ssl.SSLError)):
                raise
            log.error("http-request-failed", subject=one.subject.name, problem=problem)
            one.refuse(Refused(*_of_disk(problem)))
        if not one.keeps:
            self._stream.end(_DRAIN_S)
        return one.keeps

    def _relay(self, head: Head, is_private: bool) -> None:
        try:
            self._check(head)
            if head.body_bytes:
                raise Refused(400, "CONNECT has no body")
            subject = self._authorized(head.get("proxy-authorization"), 407, "Proxy-Authenticate")
            relay(self._stream, self._desk, head, subject, is_private, self._service.pass_on)
        except Refused as why:
            self._last(why)

    def _check(self, head: Head) -> None:
        """:raises Refused: it is no request for this router."""
        host = head.get("host")
        if not host:
            raise Refused(400, "a request names its Host")
        origin = head.get("origin")
        if origin and origin.partition("://")[2].lower() != host.lower():
            raise Refused(403, "pages of other sites cannot use this router")
        if head.get("expect") and not head.expects:
            raise Refused(417, "nothing but 100-continue can be expected here")

    def _authorized(self, field: str, status: int = 401, challenge: str = "WWW-Authenticate") -> Subject:
        """Return whose request it is. :raises Refused: with that status and challenge, or 429."""
        token = token_of(field)
        if not token:
            raise Refused(status, "a request needs a token: as Bearer, or as password", {challenge: _CHALLENGE})
        try:
            subject = self._service.access.subject(token)
            check_times(subject.token, time.time())
        except BadToken as why:
            raise Refused(status, str(why), {challenge: f'{_CHALLENGE}, error="invalid_token"'}) from None
        if subject.name != self.subject.name:
            self._desk.ask("proved", share=subject.name)
        self.subject = subject
        return subject

    def _last(self, why: Refused, is_text: bool = False) -> None:
        """Answer what is no request; nothing that follows is one, either."""
        body, kind = why.problem(), "application/problem+json"
        if is_text:
            body, kind = f"{why.reason[0].upper()}{why.reason[1:]}\n".encode(), "text/plain"
        fields = {"Content-Type": kind, "Content-Length": str(len(body)), "Connection": "close", **why.headers}
        self._stream.send(answer_head(why.status, fields) + body)
        self._stream.end(_DRAIN_S)


def busy(words: str) -> bytes:
    """Return the answer where a request cannot even be read."""
    body = Refused(503, words).problem()
    fields = {"Retry-After": "5", "Content-Type": "application/problem+json", "Content-Length": str(len(body))}
    return answer_head(503, {**fields, "Connection": "close"}) + body


def _of_disk(problem: OSError) -> tuple[int, str, dict[str, str]]:
    if problem.errno in (errno.EACCES, errno.EPERM):
        return 403, "the router's user may not do that", {}
    return 503, f"the router's disk: {os.strerror(problem.errno or 0)}", {"Retry-After": "30"}
