"""One request over libcurl: stalls, time limits, headers, error pages. This module has no notion of files and
retries.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Protocol
from urllib.parse import urlsplit

import pycurl

from stageout import __version__
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.api import Context
from stageout.protocols.curl.failures import certificate_problem, ftp_words, of_curl, of_status
from stageout.protocols.curl.localfile import SourceFile
from stageout.protocols.curl.proxies import named_by_environment, named_by_machine, proxy_in_use
from stageout.protocols.curl.settings import Settings, in_data_slot

_BUFFER_BYTES = 512 * 1024
_BLOCK_BYTES = 1 << 20  # libcurl delivers 16 KiB at a time, too little for a write and a digest each
_TEXT_BYTES = 16 * 1024
_MOST_LINES = 1000
_MOST_TEXT_BYTES = 1 << 20  # limit for error pages without end
_MOST_TEXT_S = 5.0  # limit for slow error pages
_LOOK_INTERVAL_S = 0.2
_DRAIN_BYTES_PER_S = 20e6  # minimum speed of a server that computes a digest after the last byte
_SUCCESS = range(200, 300)
_QUICK = ("GET", "PUT", "HEAD", "")  # time limit for other requests, such as a slow MOVE


class Receiver(Protocol):
    """Receiver of the body of a successful answer."""

    def begin(self, reply: Reply) -> None:
        """Receive status and headers before the data."""

    def write(self, data: bytes) -> None:
        """Receive the next block. The last one comes at the end of the request, after a failure as well."""


@dataclass
class Query:
    """A request.

    :param method: HTTP method; "" for FTP. :param url: for the request line.
    :param headers: complete lines. :param source: the body to send, None for none.
    :param receiver: gets the body of a success; None: ``Reply.text`` gets its first bytes.
    :param options: further options of libcurl.
    :param limit_s: time limit in seconds; 0: unlimited while bytes move.
    :param head_only: end the request after the head of the answer.
    :param whole_text: the answer counts only if its body is complete.
    """

    method: str
    url: str
    headers: list[str] = field(default_factory=list)
    source: SourceFile | None = None
    receiver: Receiver | None = None
    options: dict[int, Any] = field(default_factory=dict)
    limit_s: float = 0.0
    head_only: bool = False
    whole_text: bool = False


@dataclass
class Reply:
    """A response.

    :param status: status of HTTP, or the last reply of FTP; 0 when there was none.
    :param headers: headers of the last answer, names in lower case. :param lines: all lines of an FTP dialogue.
    :param text: first bytes of a body without receiver. :param length_bytes: announced by the server, -1 unknown.
    :param first_byte_s: seconds from the start of the request. :param server: address of the connection.
    :param redirected: another URL answered than the requested one.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    text: bytes = b""
    length_bytes: int = -1
    first_byte_s: float = 0.0
    server: str = ""
    redirected: bool = False

    @property
    def success(self) -> bool:
        """A final positive HTTP status."""
        return self.status in _SUCCESS


class Meter(Protocol):
    """Counters of transferred bytes and of connection time."""

    def moved(self, request_bytes: int) -> None:
        """Record the transferred bytes of the current request. :raises TransferFailure: the plugin has to end."""

    def connected(self, seconds: float) -> None:
        """Record the duration of a request since its connection was made."""


class Watch:
    """Monitor of one request. It ends a request that stalls, or when the plugin has to end.

    Like HTCondor's own plugin it checks consecutive windows of time. A pause may therefore be longer than one window if
    data came before and after it.
    """

    def __init__(
        self, settings: Settings, size_bytes: int, answer_timeout_s: float, moved: Callable[[int], None]
    ) -> None:
        self._settings = settings
        self._size_bytes = size_bytes
        self._answer_timeout_s = answer_timeout_s
        self._moved = moved
        self._since_s = time.monotonic()  # start of the window
        self._before_bytes = 0
        self._begun = False  # whether bytes have moved
        self._looked_s = 0.0
        self.failure: BaseException | None = None
        self.enough: Callable[[float], bool] = lambda now_s: False

    @property
    def is_patience(self) -> bool:
        """Tell whether a stall or a time limit ended the request."""
        failure = self.failure
        return failure is None or (
            isinstance(failure, TransferFailure) and failure.kind in (ErrorClass.STALLED, ErrorClass.TIMED_OUT)
        )

    def __call__(self, down_total: float, down_now: float, up_total: float, up_now: float) -> int:
        """Check the progress. libcurl calls it at least once a second, and aborts the request if it returns 1."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_INTERVAL_S:
            return 0
        self._looked_s = now_s
        try:
            self._look(now_s, int(down_now + up_now))
        except BaseException as error:
            self.failure = error
            return 1
        return int(self.enough(now_s))

    def _look(self, now_s: float, moved_bytes: int) -> None:
        self._moved(moved_bytes)
        if moved_bytes and not self._begun:
            self._begun, self._since_s = True, now_s
        waiting = not moved_bytes or 0 < self._size_bytes <= moved_bytes
        window_s = self._answer_window_s(moved_bytes) if waiting else self._settings.stall_window_s
        if now_s - self._since_s > window_s:
            self._check(window_s, moved_bytes, waiting)
            self._since_s, self._before_bytes = now_s, moved_bytes

    def _answer_window_s(self, moved_bytes: int) -> float:
        return self._answer_timeout_s + moved_bytes / _DRAIN_BYTES_PER_S

    def _check(self, window_s: float, moved_bytes: int, waiting: bool) -> None:
        gain_bytes = moved_bytes - self._before_bytes
        enough_bytes = self._settings.stall_bytes_per_s * window_s
        if waiting and gain_bytes < max(1.0, enough_bytes):
            # HTCondor treats silence as slowness. In a data slot the tuner must not conclude that the link is slow.
            kind = ErrorClass.TIMED_OUT if in_data_slot() else ErrorClass.STALLED
            raise TransferFailure(kind, f"no answer within {window_s:.0f} s")
        if gain_bytes < enough_bytes:
            text = f"stalled: {gain_bytes} bytes moved within {window_s:.0f} s, {moved_bytes} bytes so far"
            raise TransferFailure(ErrorClass.STALLED, text)


class _Exchange:
    """The callbacks of one request."""

    def __init__(self, query: Query, watch: Watch, proxied: bool) -> None:
        self._query = query
        self._watch = watch
        self._begun = False
        self._text_bytes = 0
        self._pieces: list[bytes] = []
        self._waiting_bytes = 0
        self._head_s = 0.0  # time when the head of the last answer ended
        # A proxy's answer to CONNECT comes first and looks like the server's, until a body follows.
        self._may_be_tunnel = query.url.startswith("https:") and proxied
        self.reply = Reply()
        watch.enough = self._text_takes_long

    @property
    def answered(self) -> bool:
        """Tell whether the answer counts although the connection was closed, because its head is sufficient."""
        query = self._query
        sent = query.source is None or query.source.read_whole
        ended = self._head_s and self.reply.status >= 200 and not (self._may_be_tunnel and self.reply.success)
        if not query.method or not ended or query.whole_text or (not sent and self.reply.success):
            return False
        return query.receiver is None or not self.reply.success

    def _text_takes_long(self, now_s: float) -> bool:
        return self.answered and now_s - self._head_s > _MOST_TEXT_S

    def header(self, raw: bytes) -> None:
        line = raw.decode("utf-8", "surrogateescape").strip(" \t\r\n")  # other bytes stay unchanged, as with curl
        if len(self.reply.lines) < _MOST_LINES:
            self.reply.lines.append(line)
        if not self._query.method:
            return
        if line.startswith("HTTP/"):
            code = line.split(" ", 2)[1:2]
            self.reply.status = int(code[0]) if code and code[0].isdigit() else 0
            self._head_s = 0.0
            self.reply.headers.clear()
            self.reply.lines = [line]
        elif ":" in line:
            name, _, value = line.partition(":")
            known = self.reply.headers.get(name.strip().lower())
            value = value.strip()
            self.reply.headers[name.strip().lower()] = f"{known}, {value}" if known else value
        elif not line and self.reply.status >= 200:
            self._head_s = time.monotonic()

    def body(self, data: bytes) -> int | None:
        receiver, self._may_be_tunnel = self._query.receiver, False
        if self._query.head_only:
            return -1
        if receiver is None or (self._query.method and not self.reply.success):
            self.reply.text += data[: max(_TEXT_BYTES - len(self.reply.text), 0)]
            self._text_bytes += len(data)
            return None if self._text_bytes <= _MOST_TEXT_BYTES else -1
        try:
            self.begin()
        except BaseException as error:
            self._watch.failure = error
            return -1
        self._pieces.append(data)
        self._waiting_bytes += len(data)
        return None if self._waiting_bytes < _BLOCK_BYTES or self.flush() else -1

    def flush(self) -> bool:
        """Give the receiver all pending data. Return False if it failed; ``watch`` then has the reason."""
        block = b"".join(self._pieces)
        self._pieces.clear()
        self._waiting_bytes = 0
        if not block or self._query.receiver is None:
            return True
        try:
            self._query.receiver.write(block)
        except BaseException as error:
            self._watch.failure = self._watch.failure or error
            return False
        return True

    def begin(self) -> None:
        """Call the receiver's begin, once."""
        if self._query.receiver is not None and not self._begun:
            self._begun = True
            self._query.receiver.begin(self.reply)

    def read(self, most_bytes: int) -> object:
        source = self._query.source
        assert source is not None
        try:
            return source.read(most_bytes)
        except BaseException as error:
            self._watch.failure = error
            return pycurl.READFUNC_ABORT

    def seek(self, offset: int, origin: int) -> int:
        source = self._query.source
        if source is None or offset or origin:
            return pycurl.SEEKFUNC_CANTSEEK
        source.rewind()
        return pycurl.SEEKFUNC_OK


class Transport:
    """Client for requests. Each thread has its own handle, whose connections are reused for the next files."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._proxied: bool | None = None  # from the environment, which does not change after the first request

    def perform(
        self,
        query: Query,
        context: Context,
        settings: Settings,
        meter: Meter,
    ) -> Reply:
        """Make one request. HTTP errors are answers, not failures.

        :raises TransferFailure: there was no complete answer, the receiver or source failed, or the plugin has to end.
        """
        curl = self._handle()
        size_bytes = query.source.size_bytes if query.source else 0
        watch = Watch(settings, size_bytes, _answer_timeout_s(query, settings), meter.moved)
        if self._proxied is None:
            self._proxied = named_by_environment()
        proxy = named_by_machine(query.url, context)
        exchange = _Exchange(query, watch, self._proxied or bool(proxy))
        self._prepare(curl, query, settings, proxy)
        curl.setopt(pycurl.HEADERFUNCTION, exchange.header)
        curl.setopt(pycurl.WRITEFUNCTION, exchange.body)
        curl.setopt(pycurl.XFERINFOFUNCTION, watch)
        if query.source:
            query.source.rewind()
            curl.setopt(pycurl.READFUNCTION, exchange.read)
            curl.setopt(pycurl.SEEKFUNCTION, exchange.seek)
        try:
            curl.perform()
            if not exchange.flush():
                raise pycurl.error(pycurl.E_WRITE_ERROR, "")
        except pycurl.error as error:
            exchange.flush()  # the received data can be continued
            self._fill(curl, query, exchange.reply)
            self._note(curl, meter)
            if not exchange.answered or not watch.is_patience:
                self._explain(curl, query, context, exchange.reply, watch, error, settings.retry_budget_s <= 0)
        else:
            self._fill(curl, query, exchange.reply)
            self._note(curl, meter)
            if not query.method or exchange.reply.success:
                exchange.begin()
        return exchange.reply

    def _handle(self) -> pycurl.Curl:
        curl: pycurl.Curl | None = getattr(self._local, "curl", None)
        if curl is None:
            curl = self._local.curl = pycurl.Curl()
        return curl

    def _prepare(self, curl: pycurl.Curl, query: Query, settings: Settings, proxy: str) -> None:
        curl.reset()  # reset only options; connections stay
        options: dict[int, Any] = {
            pycurl.URL: query.url,
            pycurl.NOSIGNAL: 1,
            pycurl.NOPROGRESS: 0,
            pycurl.PROTOCOLS: pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS | pycurl.PROTO_FTP,
            pycurl.HTTP_VERSION: pycurl.CURL_HTTP_VERSION_1_1,  # one connection for each file that moves
            pycurl.CONNECTTIMEOUT_MS: max(1, int(settings.connect_timeout_s * 1000)),
            pycurl.FTP_RESPONSE_TIMEOUT: max(1, int(settings.response_timeout_s)),
            pycurl.BUFFERSIZE: _BUFFER_BYTES,
            pycurl.UPLOAD_BUFFERSIZE: _BUFFER_BYTES,
            pycurl.TCP_KEEPALIVE: 1,
            pycurl.USERAGENT: f"stageout/{__version__}",
            pycurl.HTTPHEADER: [line.encode("utf-8", "surrogateescape") for line in query.headers],
        }
        if query.limit_s:
            options[pycurl.TIMEOUT_MS] = max(1, int(query.limit_s * 1000))
        if proxy:
            options[pycurl.PROXY] = proxy
        if query.url.startswith("https:") or proxy or self._proxied:
            options.update(_trust())
        options.update(_method_options(query))
        options.update(query.options)
        for option, value in options.items():
            curl.setopt(option, value)

    def _fill(self, curl: pycurl.Curl, query: Query, reply: Reply) -> None:
        status = int(curl.getinfo(pycurl.RESPONSE_CODE))
        if not query.method:
            reply.status = status
        elif not status:  # only a proxy's answer to CONNECT arrived, or nothing
            reply.status, reply.headers, reply.lines = 0, {}, []
        reply.length_bytes = int(curl.getinfo(pycurl.CONTENT_LENGTH_DOWNLOAD))
        reply.first_byte_s = float(curl.getinfo(pycurl.STARTTRANSFER_TIME))
        reply.server = str(curl.getinfo(pycurl.PRIMARY_IP) or "")

    def _note(self, curl: pycurl.Curl, meter: Meter) -> None:
        meter.connected(curl.getinfo(pycurl.TOTAL_TIME) - curl.getinfo(pycurl.CONNECT_TIME))
        with contextlib.suppress(TransferFailure):  # the next step detects that the plugin has to end
            meter.moved(int(curl.getinfo(pycurl.SIZE_DOWNLOAD) + curl.getinfo(pycurl.SIZE_UPLOAD)))

    def _explain(
        self,
        curl: pycurl.Curl,
        query: Query,
        context: Context,
        reply: Reply,
        watch: Watch,
        error: pycurl.error,
        one_attempt: bool,
    ) -> None:
        code = int(error.args[0])
        facts: dict[str, Any] = {"LibcurlReturnCode": code}
        if reply.status:
            facts["TransferHTTPStatusCode"] = reply.status
        host = urlsplit(query.url).netloc
        if isinstance(watch.failure, TransferFailure):
            watch.failure.server = watch.failure.server or host
            watch.failure.developer = {**facts, **watch.failure.developer}
            raise watch.failure from None
        if watch.failure is not None:
            raise watch.failure
        words = str(error.args[1] if len(error.args) > 1 else "")
        proxy = "" if _answered(curl, reply) else proxy_in_use(query.url, context)
        server, place = (proxy, f"proxy {proxy}") if proxy else (host, host)
        kind, text = self._classify(curl, query, server, reply, code, words, one_attempt)
        stage = _proxy_stage(curl) if proxy else ""
        raise TransferFailure(kind, f"{place}: {text}", server, developer=facts, intermediate=stage) from None

    def _classify(
        self, curl: pycurl.Curl, query: Query, server: str, reply: Reply, code: int, words: str, one_attempt: bool
    ) -> tuple[ErrorClass, str]:
        if code in (pycurl.E_COULDNT_RESOLVE_HOST, pycurl.E_COULDNT_RESOLVE_PROXY):
            from stageout.protocols.curl.names import lookup_failure

            return lookup_failure(urlsplit(f"//{server}").hostname or "", one_attempt)
        tunnel_status = int(curl.getinfo(pycurl.HTTP_CONNECTCODE))
        if tunnel_status >= 300:
            return of_status(tunnel_status), words
        if code == pycurl.E_OPERATION_TIMEDOUT and not curl.getinfo(pycurl.STARTTRANSFER_TIME):
            if not curl.getinfo(pycurl.NAMELOOKUP_TIME):
                return ErrorClass.NAME_LOOKUP_FAILED, "its name was not resolved in time; check the node's DNS"
            return ErrorClass.CONNECT_FAILED, "no connection in time; is the server up, is a firewall in between?"
        kind = of_curl(code, 0 if query.method else reply.status)
        if not query.method:
            words = ftp_words(reply.lines) or words
        if kind is ErrorClass.TLS_UNTRUSTED:
            problem = certificate_problem(int(curl.getinfo(pycurl.SSL_VERIFYRESULT)))
            return kind, f"{problem or 'its certificate is for another name'} ({words})"
        return kind, words or f"libcurl error {code}"


def _answered(curl: pycurl.Curl, reply: Reply) -> bool:
    """Tell whether a proxy, if there is one, has passed on an answer or opened its tunnel."""
    return bool(reply.status) or int(curl.getinfo(pycurl.HTTP_CONNECTCODE)) in _SUCCESS


def _proxy_stage(curl: pycurl.Curl) -> str:
    return "PostConnection" if curl.getinfo(pycurl.HTTP_CONNECTCODE) else "Connection"


def _answer_timeout_s(query: Query, settings: Settings) -> float:
    """Return the time limit for an answer. While a job waits, a silent server gets no more time than a stalled one."""
    patient = in_data_slot() or query.method not in _QUICK
    return settings.response_timeout_s if patient else min(settings.response_timeout_s, settings.stall_window_s)


def _method_options(query: Query) -> dict[int, Any]:
    if query.source:
        return {pycurl.UPLOAD: 1, pycurl.INFILESIZE_LARGE: query.source.size_bytes}
    if query.method == "HEAD":
        return {pycurl.NOBODY: 1}
    if query.method not in ("", "GET"):
        return {pycurl.CUSTOMREQUEST: query.method}
    return {}


@lru_cache(maxsize=1)
def _trust() -> dict[int, Any]:
    """Choose the certificate authorities: those named by the environment, else the system's.

    The libcurl inside pycurl may not know where this system keeps them. CURL_CA_BUNDLE is ignored: it may belong to the
    job's own programs, and HTCondor's own plugin does not read it either.
    """
    import ssl

    system, environment = ssl.get_default_verify_paths(), os.environ
    bundle = environment.get("SSL_CERT_FILE") or system.cafile or ""
    folder = environment.get("X509_CERT_DIR") or environment.get("SSL_CERT_DIR") or system.capath or ""
    options: dict[int, Any] = {}
    if Path(bundle).is_file():
        options[pycurl.CAINFO] = bundle
    if Path(folder).is_dir() and folder:
        options[pycurl.CAPATH] = folder
    return options
