"""http, https, dav and davs: downloads that resume, uploads that are verified by asking the server."""

from __future__ import annotations

import email.utils
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

import pycurl

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.api import Context, Outcome, Request
from stageout.plugin.urls import bare_url, encode_upload_url, split_scheme
from stageout.protocols.curl import classify, digests
from stageout.protocols.curl.digests import Digester, Policy
from stageout.protocols.curl.exchange import Answer, Exchanger, server_of
from stageout.protocols.curl.files import PartFile, SourceFile
from stageout.protocols.curl.retrying import with_retries

_WANTED = {"Want-Repr-Digest": "sha-256=5, md5=3", "Want-Digest": "adler32;q=0.4,md5;q=0.6,sha-256;q=0.8"}
_PROPFIND = (
    b'<?xml version="1.0"?><propfind xmlns="DAV:"><prop><getcontentlength/>'
    b'<checksums xmlns="http://owncloud.org/ns"/></prop></propfind>'
)


@dataclass(frozen=True)
class Target:
    """Where a request goes.

    :param url: for the wire. :param dav: WebDAV's methods may be used. :param service: of the credential, "" for none.
    """

    url: str
    dav: bool
    service: str
    handle: str

    @property
    def presigned(self) -> bool:
        """The query signs one method on one object: nothing else can be asked with it."""
        names = {name.lower() for name in parse_qs(urlsplit(self.url).query)}
        return bool(names & {"x-amz-signature", "signature", "x-goog-signature", "sig"})

    def headers(self, context: Context, **more: str) -> dict[str, str]:
        """Headers of a request; the token is read anew each time. libcurl drops it when redirected to another host."""
        made = {name.replace("_", "-"): value for name, value in more.items()}
        if self.service:
            made["Authorization"] = f"Bearer {context.credential(self.service, self.handle)}"
        return made


def target_of(request: Request, context: Context, upload: bool) -> Target:
    """The target of a request."""
    scheme = split_scheme(request.url)
    destination = str(context.job_attribute("OutputDestination") or "") if upload else ""
    url = bare_url(encode_upload_url(request.url, destination))
    dav = scheme.method in ("dav", "davs")
    if dav:
        url = ("https" if scheme.method == "davs" else "http") + url[url.index("://") :]
    return Target(url.partition("#")[0], dav, scheme.service, scheme.handle)


def refuse_bad(answer: Answer) -> None:
    """:raises TransferFailure: by the table, with the server's own words, for a status of 400 and above."""
    kind = classify.of_status(answer.status)
    if kind is not None:
        words = f": {answer.words}" if answer.words else ""
        raise TransferFailure(
            kind,
            f"server {server_of(answer.url)} answered {answer.status}{words}",
            server=server_of(answer.url),
            retry_after_s=retry_after_s(answer.headers.get("retry-after", "")),
            developer={"HttpStatus": answer.status},
        )


def retry_after_s(value: str) -> float | None:
    """Seconds in a Retry-After header (RFC 9110, 10.2.3), None when there is none."""
    if value.isdigit():
        return float(value)
    moment = email.utils.parsedate_tz(value) if value else None
    return max(0.0, email.utils.mktime_tz(moment) - time.time()) if moment else None


# ---- download --------------------------------------------------------------------------------------------------------


@dataclass
class _Fetch:
    """What is known of a download between its attempts."""

    policy: Policy
    owner: dict[str, str]
    etag: str = ""
    total: int | None = None
    digester: Digester = field(default_factory=lambda: Digester(()))
    theirs: dict[str, str] = field(default_factory=dict)
    moved_bytes: int = 0
    first_byte_s: float = 0.0


def download(exchanger: Exchanger, request: Request, context: Context) -> Outcome:
    """Fetch a file; an interrupted download goes on only if the server has the same version (strong ETag)."""
    target = target_of(request, context, upload=False)
    fetch = _Fetch(digests.policy_of(request, context), digests.wanted_by_owner(request))
    with PartFile(request.local_path) as part:
        with_retries(context, lambda: _fetch_once(exchanger, target, part, fetch, context))
        part.finish()
    verified = _compared(fetch) or ("size" if fetch.total is not None else "")
    facts = {"HttpHost": server_of(target.url)}
    return Outcome(part.size_bytes, fetch.moved_bytes, fetch.first_byte_s, verified, fetch.digester.values(), facts)


def _fetch_once(exchanger: Exchanger, target: Target, part: PartFile, fetch: _Fetch, context: Context) -> None:
    headers = target.headers(context, **_WANTED) if not target.presigned else target.headers(context)
    resumed_at = part.size_bytes if fetch.etag else 0
    if resumed_at:
        headers.update({"Range": f"bytes={resumed_at}-", "If-Range": fetch.etag})

    def begin(answer: Answer) -> None:
        _begin(answer, part, fetch, resumed_at)

    def write(chunk: bytes) -> None:
        part.write(chunk)
        fetch.digester.update(chunk)
        fetch.moved_bytes += len(chunk)

    before = fetch.moved_bytes
    answer = exchanger.run(
        "GET", target.url, context, headers=headers, write=write, on_answer=begin, before_bytes=before
    )
    if answer.status == 416 and resumed_at:
        part.restart()
        fetch.etag = ""
        raise TransferFailure(
            ErrorClass.CONNECTION_LOST, "the server cannot go on where it stopped", server_of(target.url)
        )
    refuse_bad(answer)
    if not answer.received_bytes:
        _begin(answer, part, fetch, resumed_at)
    fetch.first_byte_s = answer.first_byte_s
    _check(part, fetch, target)


def _begin(answer: Answer, part: PartFile, fetch: _Fetch, resumed_at: int) -> None:
    """The head is there: go on where the last attempt stopped, or start from zero."""
    length = answer.headers.get("content-length", "")
    goes_on = answer.status == 206 and resumed_at > 0
    if goes_on:
        found = re.match(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("content-range", ""))
        same = answer.headers.get("etag", fetch.etag) == fetch.etag
        if not found or int(found[1]) != resumed_at or not same:
            part.restart()
            fetch.etag = ""
            raise TransferFailure(ErrorClass.CONNECTION_LOST, "the server did not go on where the last attempt stopped")
        fetch.total = int(found[2])
        return
    part.restart()
    fetch.total = int(length) if length.isdigit() else None
    etag = answer.headers.get("etag", "")
    fetch.etag = etag if etag.startswith('"') and answer.headers.get("accept-ranges") != "none" else ""
    fetch.theirs = {} if fetch.policy is Policy.OFF else digests.offered(answer.headers)
    fetch.digester = Digester(digests.chosen(fetch.policy, fetch.owner, tuple(fetch.theirs)))


def _check(part: PartFile, fetch: _Fetch, target: Target) -> None:
    server = server_of(target.url)
    try:
        if fetch.total is not None and part.size_bytes != fetch.total:
            text = f"{part.size_bytes} bytes arrived, {server} announced {fetch.total}"
            raise TransferFailure(ErrorClass.SIZE_MISMATCH, text, server)
        verified = _compared(fetch)
    except TransferFailure:
        part.restart()
        fetch.etag = ""
        raise
    digests.require(fetch.policy, verified, f"{server} offers no digest of the file")


def _compared(fetch: _Fetch) -> str:
    ours = fetch.digester.values()
    by_owner = digests.compare(ours, fetch.owner, "checksum in PluginData")
    return digests.compare(ours, fetch.theirs, "the server's digest") or by_owner


# ---- upload ----------------------------------------------------------------------------------------------------------


def upload(exchanger: Exchanger, request: Request, context: Context) -> Outcome:
    """Send a file and ask the server what it has. WebDAV: under a temporary name first."""
    target = target_of(request, context, upload=True)
    policy, owner = digests.policy_of(request, context), digests.wanted_by_owner(request)
    moved = 0

    def once() -> tuple[str, Answer]:
        nonlocal moved
        source.rewind()
        answer = _Put(exchanger, target, source, context, moved).run()
        moved += answer.sent_bytes
        source.check_unchanged()
        ours = source.complete_digests()
        digests.compare(ours, owner, "checksum in PluginData")
        return _verify(exchanger, target, source, answer, policy, context), answer

    with SourceFile(request.local_path, digests.chosen(policy, owner)) as source:
        verified, answer = with_retries(context, once)
        facts = {"HttpHost": server_of(target.url), "HttpStatus": answer.status}
        return Outcome(source.size_bytes, moved, answer.first_byte_s, verified, dict(source.digests), facts)


class _Put:
    """One attempt to put one file."""

    def __init__(
        self, exchanger: Exchanger, target: Target, source: SourceFile, context: Context, moved_bytes: int
    ) -> None:
        self._exchanger = exchanger
        self._target = target
        self._source = source
        self._context = context
        self._moved_bytes = moved_bytes

    def run(self) -> Answer:
        """Put the file under its name."""
        if not self._target.dav:
            answer = self._send(self._target.url)
            refuse_bad(answer)
            return answer
        return self._through_temporary()

    def _through_temporary(self) -> Answer:
        temporary = beside(self._target.url, f".{secrets.token_hex(8)}.part")
        answer = self._send(temporary)
        if answer.status in (403, 404, 409) and self._make_parents():
            self._source.rewind()
            answer = self._send(temporary)
        try:
            refuse_bad(answer)
            self._move(temporary)
        except TransferFailure:
            self._ask("DELETE", temporary)
            raise
        return answer

    def _send(self, url: str) -> Answer:
        size = self._source.size_bytes
        options = {
            pycurl.READFUNCTION: self._source.read,
            pycurl.SEEKFUNCTION: self._source.seek,
            pycurl.INFILESIZE_LARGE: size,
        }
        headers = self._target.headers(self._context)
        return self._exchanger.run(
            "PUT",
            url,
            self._context,
            headers=headers,
            options=options,
            upload_bytes=size,
            before_bytes=self._moved_bytes,
        )

    def _move(self, temporary: str) -> None:
        headers = self._target.headers(self._context, Destination=self._target.url, Overwrite="T")
        answer = self._exchanger.run("MOVE", temporary, self._context, headers=headers)
        refuse_bad(answer)

    def _make_parents(self) -> bool:
        """Make missing collections, outermost first; False when none was missing."""
        missing = []
        for parent in parents(self._target.url):
            if self._ask("HEAD", parent).status != 404:
                break
            missing.append(parent)
        for parent in reversed(missing):
            answer = self._ask("MKCOL", parent)
            if answer.status != 405:  # somebody else made it meanwhile
                refuse_bad(answer)
        return bool(missing)

    def _ask(self, method: str, url: str) -> Answer:
        return self._exchanger.run(method, url, self._context, headers=self._target.headers(self._context))


def beside(url: str, suffix: str) -> str:
    """The URL of a hidden neighbour of a file."""
    parts = urlsplit(url)
    folder, _, name = parts.path.rpartition("/")
    return urlunsplit(parts._replace(path=f"{folder}/.{name[:150]}{suffix}"))


def parents(url: str) -> list[str]:
    """Collections above a file, innermost first."""
    parts = urlsplit(url)
    names = parts.path.split("/")[1:-1]
    return [
        urlunsplit(parts._replace(path="/" + "/".join(names[:count]) + "/", query=""))
        for count in range(len(names), 0, -1)
    ]


def _verify(
    exchanger: Exchanger, target: Target, source: SourceFile, put: Answer, policy: Policy, context: Context
) -> str:
    """Ask the server what it has; the name of what agreed: a digest, "size", or "" when it cannot be asked."""
    server = server_of(target.url)
    ours = source.complete_digests()
    headers: Mapping[str, str] = {**put.headers, "x-amz-request-id": "1"} if target.presigned else put.headers
    verified = "" if policy is Policy.OFF else digests.compare(ours, digests.offered(headers), server)
    if not target.presigned:
        there = _look(exchanger, target, context)
        if there.size_bytes is not None and there.size_bytes != source.size_bytes:
            text = f"{server} has {there.size_bytes} bytes, {source.size_bytes} were sent"
            raise TransferFailure(ErrorClass.SIZE_MISMATCH, text, server)
        if policy is not Policy.OFF:
            verified = digests.compare(ours, there.digests, server) or verified
        verified = verified or ("size" if there.size_bytes is not None else "")
    digests.require(policy, verified, f"{server} gives no digest of what it stored")
    return verified


@dataclass(frozen=True)
class _There:
    size_bytes: int | None = None
    digests: dict[str, str] = field(default_factory=dict)


def _look(exchanger: Exchanger, target: Target, context: Context) -> _There:
    """What the server says of the file: by HEAD, else PROPFIND, else the first byte."""
    wanted: dict[str, Any] = target.headers(context, **_WANTED)
    head = exchanger.run("HEAD", target.url, context, headers=wanted)
    if head.status == 404:
        raise TransferFailure(
            ErrorClass.SIZE_MISMATCH, "the file is not there after it was sent", server_of(target.url)
        )
    found = digests.offered(head.headers)
    length = head.headers.get("content-length", "")
    if head.status == 200 and length.isdigit():
        return _There(int(length), found)
    if target.dav:
        asked = exchanger.run("PROPFIND", target.url, context, headers={**wanted, "Depth": "0"}, body=_PROPFIND)
        size = re.search(rb"<[^>]*getcontentlength[^>]*>\s*(\d+)\s*<", asked.body)
        if asked.status == 207 and size:
            return _There(int(size[1]), found)
    byte = exchanger.run("GET", target.url, context, headers={**wanted, "Range": "bytes=0-0"}, write=lambda _: None)
    total = re.match(r"bytes 0-0/(\d+)", byte.headers.get("content-range", ""))
    return _There(int(total[1]) if total and byte.status == 206 else None, found)
