"""HTTP requests about one file: credential, redirects, and the meaning of an error status."""

from __future__ import annotations

import base64
import binascii
import os
import time
from calendar import timegm
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pycurl

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.protocols.curl.address import Address
from stageout.protocols.curl.failures import of_status, s3_code, server_words
from stageout.protocols.curl.localfile import SourceFile
from stageout.protocols.curl.proxies import proxy_in_use
from stageout.protocols.curl.servers import Habit
from stageout.protocols.curl.settings import positive_number
from stageout.protocols.curl.task import Task
from stageout.protocols.curl.transport import Query, Receiver, Reply

_MOST_REDIRECTS = 30  # as HTCondor's own plugin
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
LARGE_BYTES = 1 << 20
_MOVES = frozenset({"GET", "PUT"})
_PROXY_REFUSED = 407
_EXPECTATION_FAILED = 417
#: Seconds for a request that the transfer does not need.
QUESTION_S = 5.0
ENDED = (ErrorClass.DEADLINE, ErrorClass.NOT_ATTEMPTED)


class Http:
    """Requests for one file. Its credential is sent to its host only."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._home = task.address
        self._context = task.context
        self._proxy_problem = ""
        self.facts: dict[str, Any] = {}
        self.unanswered: TransferFailure | None = None  # the reason why the last query failed

    def ask(
        self,
        method: str,
        address: Address,
        headers: tuple[str, ...] = (),
        source: SourceFile | None = None,
        receiver: Receiver | None = None,
        options: dict[int, Any] | None = None,
        limit_s: float = 0.0,
        head_only: bool = False,
        whole_text: bool = False,
        repeated: bool = False,
    ) -> Reply:
        """Make a request and follow redirects. An HTTP error is an answer.

        :param limit_s: as in :class:`Query`, for all redirects together.
        :param repeated: the source was sent before in this attempt.
        :raises TransferFailure: no answer, too many redirects, or no credential.
        """
        most_redirects = positive_number(self._context, "CURL_MAX_REDIRS") or _MOST_REDIRECTS
        query = Query(method, "", [], source, receiver, options or {}, limit_s, head_only, whole_text)
        home, end_s, redirected = address, time.monotonic() + limit_s, False
        for _ in range(most_redirects + 1):
            if limit_s:
                query.limit_s = max(0.1, end_s - time.monotonic())
            reply = self._ask_one(query, address, headers, repeated or redirected)
            if not limit_s:
                self._note(method, address, reply)
            if reply.status not in _REDIRECTS or "location" not in reply.headers:
                if query.method != method:  # the headers describe something else
                    reply.headers = {}
                reply.redirected = redirected
                return reply
            if reply.status == 303 and query.method == "PUT":  # its status shows whether the server accepted the file
                query = replace(query, method="GET", source=None, head_only=True)
            address = self._elsewhere(address, reply)
            redirected = redirected or address.url != home.url
        text = f"{self._home.host} redirects more than {most_redirects} times; check the URL"
        facts = {**self.facts, "LibcurlReturnCode": pycurl.E_TOO_MANY_REDIRECTS}
        raise TransferFailure(ErrorClass.BAD_URL, text, server=self._home.host, developer=facts)

    def question(
        self, method: str, address: Address, headers: tuple[str, ...] = (), body: dict[int, Any] | None = None
    ) -> Reply | None:
        """Send an optional request with a short time limit. The head of the answer is enough unless the text is needed.

        If the policy requires a digest, the server has unlimited time to compute it.

        :returns: None without an answer, which means nothing; ``unanswered`` then has the reason.
        :raises TransferFailure: the plugin has to end.
        """
        self.unanswered, limit_s = None, QUESTION_S
        if self._task.digest_required:
            limit_s = max(limit_s, self._task.settings.response_timeout_s)
        try:
            return self.ask(method, address, headers, options=body, limit_s=limit_s, head_only=method == "GET")
        except TransferFailure as failure:
            if failure.kind in ENDED:
                raise
            self.unanswered = failure
            self._context.log(f"{method} brought no answer", place=address.shown, why=failure)
            return None

    def _ask_one(self, query: Query, address: Address, headers: tuple[str, ...], repeated: bool) -> Reply:
        """Make one request. Repeat it if the server rejects ``Expect: 100-continue``."""
        servers, source = self._task.servers, query.source
        query.url = address.url
        lines = [*headers, *self._authorisation(address)]
        is_asked = _asks_first(source, repeated) and not servers.has(address.origin, Habit.REFUSES_EXPECT)
        query.headers = [*lines, *_expect(source, is_asked)]
        reply = self._perform(query, self._identity(address))
        if is_asked and reply.status == _EXPECTATION_FAILED:
            servers.learn(address.origin, Habit.REFUSES_EXPECT)
            query.headers = [*lines, "Expect:"]
            reply = self._perform(query, self._identity(address))
        return reply

    def _elsewhere(self, address: Address, reply: Reply) -> Address:
        try:
            return address.redirected(reply.headers["location"])
        except TransferFailure as failure:
            failure.developer = {**self.facts, "LibcurlReturnCode": pycurl.E_REMOTE_FILE_NOT_FOUND}
            raise

    def _perform(self, query: Query, identity: dict[int, Any]) -> Reply:
        """Make a request with the job's X.509 proxy. Omit the proxy if it is unreadable, because few servers need
        it.
        """
        task = self._task
        task.progress.begin()
        shown = replace(query, options={**identity, **query.options}) if identity else query
        try:
            return task.transport.perform(shown, task.context, task.settings, task.progress)
        except TransferFailure as failure:
            if not identity or failure.developer.get("LibcurlReturnCode") != pycurl.E_SSL_CERTPROBLEM:
                raise
            self._proxy_problem = "the X.509 proxy (X509_USER_PROXY) cannot be read"
            self._context.log(self._proxy_problem, error=failure)
        task.progress.begin()
        return task.transport.perform(query, task.context, task.settings, task.progress)

    def _authorisation(self, address: Address) -> list[str]:
        if address.origin != self._home.origin:
            return [f"Authorization: Basic {_basic(address)}"] if address.user else []
        if self._home.service:
            token = self._context.credential(self._home.service, self._home.handle)
            if not token.isascii() or not token.isprintable():
                text = f"the credential {self._home.service} holds characters that no token has; renew it"
                raise TransferFailure(ErrorClass.CREDENTIAL_REFUSED, text, server=self._home.host)
            return [f"Authorization: Bearer {token}"]
        return [f"Authorization: Basic {_basic(self._home)}"] if self._home.user else []

    def _identity(self, address: Address) -> dict[int, Any]:
        """Choose the job's X.509 proxy if it exists and the job does not use a token."""
        path = os.environ.get("X509_USER_PROXY", "")
        foreign = self._home.service or address.origin != self._home.origin
        if foreign or self._proxy_problem or not path or not Path(path).is_file():
            return {}
        return {pycurl.SSLCERT: path, pycurl.SSLKEY: path}

    def _note(self, method: str, address: Address, reply: Reply) -> None:
        if method in _MOVES:
            self.facts["TransferHTTPStatusCode"] = reply.status
        for header, name, word in (("x-cache", "HttpCacheHitOrMiss", 0), ("via", "HttpCacheHost", 1)):
            words = reply.headers.get(header, "").replace(",", " ").split()
            if len(words) > word:  # "HIT from HOST" and "VERSION HOST"
                self.facts[name] = words[word]
        if address.origin != self._home.origin:
            self.facts["RedirectedTo"] = address.host
        self._context.log(f"{method} {reply.status}", place=address.shown, first_byte_s=round(reply.first_byte_s, 3))

    def failure(self, reply: Reply, deed: str, cause: str = "") -> TransferFailure:
        """Make the failure for an error answer.

        :param deed: the operation, as in "upload of NAME". :param cause: the cause if known; else the server's text.
        """
        kind = self._kind(reply)
        reason = reply.lines[0].partition(" ")[2] if reply.lines else str(reply.status)
        words = cause or server_words(reply.text, reason)
        proxy = proxy_in_use(self._home.url, self._context) if reply.status == _PROXY_REFUSED else ""
        place = f"proxy {proxy}" if proxy else self._home.host
        text = f"{place} answered {reason} to the {deed}" + (f": {words}" if words else "")
        hint = self._proxy_problem if kind in _CREDENTIAL_KINDS and self._proxy_problem else _HINTS.get(kind, "")
        hint = signing_advice(self._home.url, reply.status, reply.text) or hint
        if hint:
            text += f"; {hint}"
        code = pycurl.E_HTTP_RETURNED_ERROR if reply.status >= 400 else pycurl.E_REMOTE_FILE_NOT_FOUND
        facts = {**self.facts, "TransferHTTPStatusCode": reply.status, "LibcurlReturnCode": code}
        if s3_code(reply.text):
            facts["ServerCode"] = s3_code(reply.text)
        stage = "PostConnection" if proxy else ""
        return TransferFailure(kind, text, proxy or self._home.host, retry_after_s(reply.headers), facts, stage)

    def _kind(self, reply: Reply) -> ErrorClass:
        kind = of_status(reply.status, reply.text)
        if kind not in (ErrorClass.CREDENTIAL_REFUSED, ErrorClass.PERMISSION_DENIED):
            return kind
        if self._home.signature_expired or (self._home.service and self._token_expired()):
            return ErrorClass.CREDENTIAL_EXPIRED
        if kind is ErrorClass.CREDENTIAL_REFUSED and not (self._home.service or self._home.user or self._home.signed):
            return ErrorClass.CREDENTIAL_MISSING
        return kind

    def _token_expired(self) -> bool:
        """Tell whether the token is an expired JWT."""
        import json

        try:
            token = self._context.credential(self._home.service, self._home.handle)
            claims = token.split(".")[1]
            expires_s = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["exp"]
            return time.time() >= float(expires_s)
        except (TransferFailure, IndexError, KeyError, TypeError, ValueError, binascii.Error):
            return False


_CREDENTIAL_KINDS = (
    ErrorClass.CREDENTIAL_MISSING,
    ErrorClass.CREDENTIAL_REFUSED,
    ErrorClass.PERMISSION_DENIED,
)
_HINTS = {
    ErrorClass.CREDENTIAL_MISSING: "name a credential in the URL, as in service+https://",
    ErrorClass.CREDENTIAL_REFUSED: "check the credential that the URL names",
    ErrorClass.CREDENTIAL_EXPIRED: "the credential is past its own end: renew it",
}


_SIGNED_HERE = ("host",)


def signing_advice(url: str, status: int, body: bytes) -> str:
    """Explain why a signed URL cannot work, as far as the URL and the answer show; otherwise ""."""
    if status not in (400, 403):
        return ""
    if s3_code(body) == "RequestTimeTooSkewed":
        return "the clocks of the signer and of the server differ: check the clock of the machine that signs"
    query = {key.lower(): value for key, value in parse_qsl(urlsplit(url).query, keep_blank_values=True)}
    if not any(key.endswith("-signature") for key in query):
        return ""
    names = next((value for key, value in query.items() if key.endswith("-signedheaders")), "host")
    others = [name for name in names.lower().split(";") if name and name not in _SIGNED_HERE]
    if others:
        return f"the URL is signed for the header {', '.join(others)}, which is not sent: sign the URL for host alone"
    sums = [key for key in query if key.startswith("x-amz-checksum-")]
    if sums:
        return f"the URL is signed for one content only ({', '.join(sums)}): sign it without a checksum"
    return ""


def _basic(address: Address) -> str:
    return base64.b64encode(f"{address.user}:{address.password}".encode()).decode()


def _expect(source: SourceFile | None, is_asked: bool) -> list[str]:
    """Decide about ``Expect: 100-continue``. Above a size limit libcurl sends it itself, and then handles 417."""
    if source is None or (is_asked and source.size_bytes > LARGE_BYTES):
        return []
    return ["Expect: 100-continue"] if is_asked else ["Expect:"]


def _asks_first(source: SourceFile | None, repeated: bool) -> bool:
    """Tell whether to ask before sending the body. It is worth a round trip for large bodies and for repetitions."""
    return source is not None and (source.size_bytes >= LARGE_BYTES or (repeated and source.size_bytes > 0))


def retry_after_s(headers: dict[str, str]) -> float | None:
    """Read the wait that a server asks for, in seconds from now; None without a request to wait."""
    text = headers.get("retry-after", "").strip()
    if text.isdigit():
        return float(text)
    if not text:
        return None
    from email.utils import parsedate_tz

    when = parsedate_tz(text)
    if when is None:
        return None
    now = parsedate_tz(headers.get("date", ""))
    now_s = timegm((*now[:6], 0, 0, 0)) - (now[9] or 0) if now else time.time()
    return max(0.0, timegm((*when[:6], 0, 0, 0)) - (when[9] or 0) - now_s)
