"""One exchange with a server: a libcurl transfer with the limits that every transfer has, and its answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pycurl

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.api import Context
from stageout.protocols.curl import classify

_BODY_KEPT_BYTES = 64 * 1024
_WORDS_SHOWN = 200
_PROTOCOLS = pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS | pycurl.PROTO_FTP


@dataclass(frozen=True)
class Limits:
    """When a transfer counts as dead.

    :param connect_s: for name look-up, connection and TLS. :param stall_s: window in which at least
        ``stall_bytes_per_s`` on average must move. :param answer_s: wait for the answer after everything was sent.
    """

    connect_s: int
    stall_s: float
    stall_bytes_per_s: float
    answer_s: float

    @classmethod
    def of(cls, context: Context) -> Limits:
        """Read the knobs CONNECT_TIMEOUT_S, STALL_S, STALL_BYTES_PER_S, ANSWER_S."""
        return cls(
            int(_number(context, "CONNECT_TIMEOUT_S", 30)),
            _number(context, "STALL_S", 60),
            _number(context, "STALL_BYTES_PER_S", 1024),
            _number(context, "ANSWER_S", 300),
        )


def _number(context: Context, name: str, default: float) -> float:
    try:
        return float(context.setting(name, str(default)))
    except ValueError:
        return default


@dataclass
class Answer:
    """What the server said at the end.

    :param status: HTTP status or FTP reply code. :param headers: lower-case name -> value, of the last response.
    :param words: printable beginning of the body, when it was not data. :param url: after redirects.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    url: str = ""
    sent_bytes: int = 0
    received_bytes: int = 0
    first_byte_s: float = 0.0

    @property
    def words(self) -> str:
        """Beginning of the body, fit for a message."""
        text = "".join(char if char.isprintable() else " " for char in self.body.decode("utf-8", "replace"))
        return " ".join(text.split())[:_WORDS_SHOWN]


class Watch:
    """Watches a running transfer: moved bytes for the context, and the end of one that stalls."""

    def __init__(self, limits: Limits, context: Context, before_bytes: int) -> None:
        self.limits = limits
        self._context = context
        self._before = before_bytes
        self._started = self._window_start = time.monotonic()
        self._window_bytes = 0
        self.upload_bytes: int | None = None
        self.failure: TransferFailure | None = None

    def __call__(self, down_total: int, down: int, up_total: int, up: int) -> int:
        """libcurl's progress call, about once a second and whenever bytes move. 1 ends the transfer."""
        moved = down + up
        try:
            self._context.progress(self._before + moved)
        except TransferFailure as failure:
            self.failure = failure
            return 1
        now = time.monotonic()
        if self._context.remaining_s <= 0:
            self.failure = TransferFailure(ErrorClass.DEADLINE, "the plugin's time was used up")
        elif self._stalled(moved, up, now):
            text = f"less than {self.limits.stall_bytes_per_s:.0f} bytes/s for {now - self._window_start:.0f} s"
            self.failure = TransferFailure(ErrorClass.STALLED, text)
        return 1 if self.failure else 0

    def _stalled(self, moved: int, up: int, now: float) -> bool:
        waits_for_answer = self.upload_bytes is not None and up >= self.upload_bytes
        window = self.limits.answer_s if waits_for_answer else self.limits.stall_s
        span = now - self._window_start
        if moved - self._window_bytes >= self.limits.stall_bytes_per_s * max(span, 1.0):
            if span >= 1.0:
                self._window_start, self._window_bytes = now, moved
            return False
        return span > window


class Exchanger:
    """Makes exchanges; one libcurl handle (and its connections) per thread."""

    def __init__(self) -> None:
        self._local = threading.local()

    def run(
        self,
        method: str,
        url: str,
        context: Context,
        *,
        headers: Mapping[str, str] | None = None,
        write: Callable[[bytes], int | None] | None = None,
        on_answer: Callable[[Answer], None] | None = None,
        options: Mapping[int, Any] | None = None,
        upload_bytes: int | None = None,
        before_bytes: int = 0,
        body: bytes = b"",
    ) -> Answer:
        """Do one exchange and return the answer, whatever its HTTP status.

        :param write: takes the data of a response below 300; other bodies are kept as words.
        :param on_answer: called when the head of the final response is there, before its data.
        :param upload_bytes: size of what the READFUNCTION in ``options`` gives.
        :param before_bytes: moved for this file before.
        :raises TransferFailure: no answer; classified by libcurl's code.
        """
        handle = self._handle()
        answer, watch = Answer(url=url), Watch(Limits.of(context), context, before_bytes)
        watch.upload_bytes = upload_bytes
        sink = _Sink(answer, write, on_answer)
        _set_common(handle, url, watch, sink)
        if headers:
            handle.setopt(pycurl.HTTPHEADER, [f"{name}: {value}" for name, value in headers.items()])
        _set_method(handle, method, body)
        _set_proxy(handle, url, context)
        for option, value in (options or {}).items():
            handle.setopt(option, value)
        try:
            handle.perform()
        except pycurl.error as problem:
            self._explain(handle, problem, answer, watch, sink, url, method)
        _note(handle, answer)
        return answer

    def _handle(self) -> pycurl.Curl:
        handle: pycurl.Curl | None = getattr(self._local, "handle", None)
        if handle is None:
            handle = self._local.handle = pycurl.Curl()
        handle.reset()
        return handle

    def _explain(
        self,
        handle: pycurl.Curl,
        problem: pycurl.error,
        answer: Answer,
        watch: Watch,
        sink: _Sink,
        url: str,
        method: str,
    ) -> None:
        code, text = int(problem.args[0]), str(problem.args[1] if len(problem.args) > 1 else "")
        _note(handle, answer)
        if sink.failure is not None:
            raise sink.failure
        if watch.failure is not None:
            watch.failure.server = watch.failure.server or server_of(url)
            raise watch.failure
        refused = classify.of_status(answer.status) if url.startswith("http") else None
        if refused is not None and code in (55, 56, 65):  # refused before all was sent: the answer says why
            return
        ftp = url.startswith("ftp")
        kind = classify.of_libcurl(code, answer.status, ftp, method == "GET")
        raise TransferFailure(kind, f"{text or 'failed'} (libcurl {code})", server=server_of(url))


class _Sink:
    """Takes heads and data of the response; data only of the final, successful one."""

    def __init__(
        self,
        answer: Answer,
        write: Callable[[bytes], int | None] | None,
        on_answer: Callable[[Answer], None] | None,
    ) -> None:
        self._answer = answer
        self._write = write
        self._on_answer = on_answer
        self._announced = False
        self.failure: TransferFailure | None = None

    def head(self, line: bytes) -> None:
        """One line of a head."""
        text = line.decode("latin-1").strip()
        if text.startswith("HTTP/"):
            parts = text.split(" ", 2)
            self._answer.headers, self._answer.body = {}, b""
            self._answer.status = int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else 0
        elif ":" in text:
            name, _, value = text.partition(":")
            self._answer.headers[name.strip().lower()] = value.strip()

    def data(self, chunk: bytes) -> int | None:
        """A piece of a body."""
        if self._write is None or self._answer.status >= 300:
            if len(self._answer.body) < _BODY_KEPT_BYTES:
                self._answer.body += chunk
            return None
        try:
            if not self._announced:
                self._announced = True
                if self._on_answer:
                    self._on_answer(self._answer)
            return self._write(chunk)
        except TransferFailure as failure:
            self.failure = failure
        except OSError as problem:
            self.failure = local_failure(problem)
        return -1


def local_failure(problem: OSError) -> TransferFailure:
    """A local file cannot be written or read."""
    import errno

    full = problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    kind = ErrorClass.NO_SPACE_LOCAL if full else ErrorClass.LOCAL_FILE
    return TransferFailure(kind, f"local file: {problem.strerror or problem}")


def server_of(url: str) -> str:
    """Host and port of a URL."""
    parts = urlsplit(url)
    return (parts.hostname or "") + (f":{parts.port}" if parts.port else "")


def _set_common(handle: pycurl.Curl, url: str, watch: Watch, sink: _Sink) -> None:
    handle.setopt(pycurl.URL, url.encode("ascii"))
    handle.setopt(pycurl.NOSIGNAL, 1)
    handle.setopt(pycurl.USERAGENT, "stageout-curl")
    handle.setopt(pycurl.FOLLOWLOCATION, 1)
    handle.setopt(pycurl.MAXREDIRS, 10)
    handle.setopt(pycurl.PROTOCOLS, _PROTOCOLS)
    handle.setopt(pycurl.REDIR_PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS)
    handle.setopt(pycurl.CONNECTTIMEOUT, watch.limits.connect_s)
    handle.setopt(pycurl.NOPROGRESS, 0)
    handle.setopt(pycurl.XFERINFOFUNCTION, watch)
    handle.setopt(pycurl.HEADERFUNCTION, sink.head)
    handle.setopt(pycurl.WRITEFUNCTION, sink.data)
    handle.setopt(pycurl.BUFFERSIZE, 512 * 1024)
    handle.setopt(pycurl.TCP_KEEPALIVE, 1)


def _set_method(handle: pycurl.Curl, method: str, body: bytes) -> None:
    if method == "HEAD":
        handle.setopt(pycurl.NOBODY, 1)
    elif method == "PUT":
        handle.setopt(pycurl.UPLOAD, 1)
        handle.setopt(pycurl.UPLOAD_BUFFERSIZE, 2 * 1024 * 1024)
    elif method != "GET":
        handle.setopt(pycurl.CUSTOMREQUEST, method)
        if body:
            handle.setopt(pycurl.POSTFIELDS, body)


def _set_proxy(handle: pycurl.Curl, url: str, context: Context) -> None:
    """``<method>_proxy`` of the machine's ad; libcurl itself reads ``http_proxy`` and so on of the environment."""
    proxy = context.machine_attribute(f"{url.split(':', 1)[0]}_proxy")
    if isinstance(proxy, str) and proxy:
        handle.setopt(pycurl.PROXY, proxy)


def _note(handle: pycurl.Curl, answer: Answer) -> None:
    answer.status = int(handle.getinfo(pycurl.RESPONSE_CODE)) or answer.status
    answer.url = str(handle.getinfo(pycurl.EFFECTIVE_URL) or answer.url)
    answer.sent_bytes = int(handle.getinfo(pycurl.SIZE_UPLOAD))
    answer.received_bytes = int(handle.getinfo(pycurl.SIZE_DOWNLOAD))
    answer.first_byte_s = float(handle.getinfo(pycurl.STARTTRANSFER_TIME))
