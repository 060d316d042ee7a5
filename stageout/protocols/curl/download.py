"""Downloads by HTTP and FTP: under a temporary name, resumed only for the same version of the file, and verified."""

from __future__ import annotations

import re

import pycurl

from stageout.core.errors import Advice, ErrorClass, TransferFailure
from stageout.plugin.api import Outcome
from stageout.protocols.curl.attempts import Movement
from stageout.protocols.curl.digests import WANTED, Stated, stated_by_server, strongest
from stageout.protocols.curl.ftp import Ftp
from stageout.protocols.curl.http import Http
from stageout.protocols.curl.localfile import PartFile
from stageout.protocols.curl.servers import Habit
from stageout.protocols.curl.task import Task
from stageout.protocols.curl.transport import Reply

CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
WHOLE = (200, 203, 204)  # the answer contains the file; 204: the file is empty
_NO_SUCH_RANGE = 416
_MOST_REFUSALS = 2
_STRONG_AGE_S = 60.0


class Download(Movement):
    """Download of one file: the common part of HTTP and FTP."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._address = task.address
        self._expected = task.user_digests()
        self._part = PartFile(task.path)
        self._announced_bytes: int | None = None
        self._stated = Stated()
        self._most_bytes = 0

    @property
    def milestone(self) -> int:
        """Return the largest number of bytes that were ever received."""
        self._most_bytes = max(self._most_bytes, self._part.size_bytes if self.resumable else 0)
        return self._most_bytes

    @property
    def resumable(self) -> bool:
        """Tell whether the download can continue after the received bytes."""
        return False

    def abandon(self) -> None:
        """Remove the partial file, unless the disk is full."""
        self._part.discard()

    def write(self, data: bytes) -> None:
        """Write data from the network."""
        self._part.write(data)

    def _restart(self, stated: Stated, announced_bytes: int | None) -> None:
        self._stated = stated if not self._task.no_digests else Stated()
        self._announced_bytes = announced_bytes
        likely = () if self._task.no_digests else self._task.servers.digests(self._address.origin)
        wanted = {strongest(names) for names in (self._stated.sure, self._stated.perhaps, self._expected)} - {None}
        self._part.restart({name for name in wanted if name} or likely)

    def _finish(self) -> Outcome:
        """Verify the file, then rename it to its final name."""
        try:
            verified = self._verify()
        except TransferFailure:
            self._forget()
            raise
        self._part.commit()
        return Outcome(
            size_bytes=self._part.size_bytes,
            transferred_bytes=self._task.progress.total_bytes,
            verified=verified,
            digests=self._part.digests(),
        )

    def _forget(self) -> None:
        """Discard the partial file, so that the next attempt starts from the beginning."""
        self._part.restart(())

    def _verify(self) -> str:
        size_bytes, host = self._part.size_bytes, self._address.host
        if self._announced_bytes is not None and size_bytes != self._announced_bytes:
            text = f"{host} announced {self._announced_bytes} bytes and sent {size_bytes}"
            raise TransferFailure(ErrorClass.SIZE_MISMATCH, text, host)
        verified = "" if self._announced_bytes is None else "size"
        name = strongest(self._stated.perhaps)
        if name and self._part.digest(name) == self._stated.perhaps[name]:
            verified = name
        verified = self._agreeing(self._stated.sure, host) or verified
        verified = self._agreeing(self._expected, "the job's PluginData") or verified
        if verified in ("", "size") and not self._task.no_digests:
            verified = self._agreeing(self._asked_digests(), host) or verified
        if self._task.digest_required and verified in ("", "size"):
            text = f"{host} states no digest of this file and the checksum policy is required; give one in PluginData"
            raise TransferFailure(ErrorClass.NOT_VERIFIED, text, host)
        return verified

    def _agreeing(self, digests: dict[str, str], whose: str) -> str:
        """Return the name of the digest that agrees; "" if the server states none.

        :raises TransferFailure: CONTENT_MISMATCH.
        """
        name = strongest(set(digests) & set(self._part.digests())) or strongest(digests)
        if name is None or self._part.digest(name) == digests[name]:
            return name or ""
        host, facts = self._address.host, {"Expected": digests[name]}
        text = f"the file from {host} does not have the {name} that {whose} states"
        raise TransferFailure(ErrorClass.CONTENT_MISMATCH, text, host, developer=facts)

    def _asked_digests(self) -> dict[str, str]:
        """Ask the server for digests of the received version. It may have none."""
        return {}


class HttpDownload(Download):
    """Download over HTTP."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._http = Http(task)
        self._validator = ""
        self._refusals = 0  # refusals of ranges
        self._headers: dict[str, str] = {}  # of the answer that the received bytes belong to

    @property
    def resumable(self) -> bool:
        """Tell whether a strong validator exists for the version of the received bytes, or the rest can be compared."""
        known = bool(self._validator) or (self._announced_bytes is not None and self._comparable)
        return known and self._refusals < _MOST_REFUSALS

    @property
    def _comparable(self) -> bool:
        """Tell whether a date or a digest can show that the rest belongs to the same version."""
        return "last-modified" in self._headers or bool(self._stated.sure or self._expected)

    def attempt(self) -> Outcome:
        """Send one GET, for the missing part if that is safe."""
        headers: tuple[str, ...] = ()
        if self._part.size_bytes and self.resumable:
            headers = (f"Range: bytes={self._part.size_bytes}-",)
            headers = (*headers, f"If-Range: {self._validator}") if self._validator else headers
        try:
            reply = self._http.ask("GET", self._address, headers, receiver=self)
            is_refused = bool(headers) and not _brings_data(reply)
            if is_refused:
                self._check_refusal(self._http, reply)
        except TransferFailure as failure:
            if not headers or not is_nonsense(failure):
                raise
            is_refused = True
        if is_refused:
            self._forget()
            reply = self._http.ask("GET", self._address, receiver=self)
        return self._ended_plainly(reply)

    def _ended_plainly(self, reply: Reply) -> Outcome:
        if not _brings_data(reply):
            raise self._http.failure(reply, f"download of {self._address.name}")
        outcome = self._finish()
        outcome.developer.update(self._http.facts)
        return outcome

    def _check_refusal(self, http: Http, reply: Reply) -> None:
        """Request the whole file after the server has permanently refused a range, which a download does not need.

        :raises TransferFailure: this was the first refusal, and the next request may succeed.
        """
        failure = http.failure(reply, f"download of {self._address.name}")
        self._refusals += 1
        passing = failure.kind.advice is Advice.RETRY_HERE and reply.status != _NO_SUCH_RANGE
        if passing and self._refusals == 1:
            raise failure
        self._task.context.log("no range is given; begun again without", status=reply.status)

    def begin(self, reply: Reply) -> None:
        """Read the head of a successful answer, which contains the rest of the file or all of it."""
        if reply.status == 206 and self._part.size_bytes:
            self._continue(reply)
        elif reply.status in WHOLE:
            text = "0" if reply.status == 204 else reply.headers.get("content-length", "")
            length = int(text) if text.isdigit() and "transfer-encoding" not in reply.headers else None
            self._validator, self._headers = strong_validator(reply.headers), reply.headers
            amazon = self._address.signed_for_amazon
            self._restart(stated_by_server(reply.headers, whole_body=True, amazon=amazon), length)
        else:
            raise self._http.failure(reply, f"download of {self._address.name}")

    def _continue(self, reply: Reply) -> None:
        found = CONTENT_RANGE.fullmatch(reply.headers.get("content-range", "").strip())
        fits = found is not None and int(found[1]) == self._part.size_bytes
        if found and found[3] != "*" and self._announced_bytes is not None:
            fits = fits and int(found[3]) == self._announced_bytes
        if not fits or not self._same_version(reply.headers):
            self._forget()
            text = f"{self._address.host} continued another version of {self._address.name}; begun again"
            raise TransferFailure(ErrorClass.CONTENT_MISMATCH, text, self._address.host)
        self._task.context.log("resumed", at_bytes=self._part.size_bytes)

    def _same_version(self, headers: dict[str, str]) -> bool:
        if self._validator:
            return same_version(self._validator, headers)
        names = ("etag", "last-modified")  # the length was compared
        return all(headers.get(name) == self._headers.get(name) for name in names)

    def _forget(self) -> None:
        self._validator, self._headers = "", {}
        super()._forget()

    def _asked_digests(self) -> dict[str, str]:
        """Ask for digests with HEAD, because some servers refuse a GET that asks for digests."""
        origin, servers, required = self._address.origin, self._task.servers, self._task.digest_required
        asks = required or not servers.has(origin, Habit.STATES_NO_DIGESTS)
        if self._address.signed or not asks:
            return {}
        reply = self._http.question("HEAD", self._address, WANTED)
        stated = Stated()
        if reply is not None and reply.status == 200:
            stated = stated_by_server(reply.headers, whole_body=True)
        if not stated.names:
            servers.learn(origin, Habit.STATES_NO_DIGESTS)
        if reply is None or not self._is_received_version(reply):
            return {}
        agreeing = {name: value for name, value in stated.perhaps.items() if self._part.digest(name) == value}
        found = strongest(stated.names)
        if found:
            servers.learn_digest(origin, found)
        return stated.sure or agreeing

    def _is_received_version(self, reply: Reply) -> bool:
        """Tell whether an answer describes the received version: length, date and tag are the same."""
        length = reply.headers.get("content-length", str(self._part.size_bytes))
        names = ("etag", "last-modified")
        return length == str(self._part.size_bytes) and all(
            reply.headers.get(name) == self._headers.get(name) for name in names
        )


class FtpDownload(Download):
    """Download over FTP. Servers have no version identifiers, so downloads start from the beginning."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._ftp = Ftp(task)

    def attempt(self) -> Outcome:
        """Send one RETR."""
        reply = self._ftp.retrieve(self)
        unknown = (-1, 0) if self._part.size_bytes else (-1,)  # older versions of libcurl parse "213 many" as 0
        self._announced_bytes = None if reply.length_bytes in unknown else reply.length_bytes
        outcome = self._finish()
        outcome.developer.update(self._ftp.facts)
        return outcome

    def begin(self, reply: Reply) -> None:
        """Prepare for the data of an answer."""
        self._restart(Stated(), None)


def is_nonsense(failure: TransferFailure) -> bool:
    """Tell whether the answer to a range request was invalid HTTP."""
    return failure.developer.get("LibcurlReturnCode") == pycurl.E_UNSUPPORTED_PROTOCOL


def _brings_data(reply: Reply) -> bool:
    return reply.status in WHOLE or reply.status == 206


def strong_validator(headers: dict[str, str]) -> str:
    """Return the validator for ``If-Range`` (RFC 9110, 8.8): a strong ETag, or a date older than the answer."""
    tag = headers.get("etag", "")
    if tag.startswith('"') and tag.endswith('"') and len(tag) > 2:
        return tag
    from email.utils import parsedate_to_datetime

    try:
        modified = parsedate_to_datetime(headers["last-modified"])
        answered = parsedate_to_datetime(headers["date"])
        old = (answered - modified).total_seconds() >= _STRONG_AGE_S
    except (KeyError, TypeError, ValueError):
        return ""
    return headers["last-modified"] if old else ""


def same_version(validator: str, headers: dict[str, str]) -> bool:
    """Tell whether a partial answer belongs to the version of the received bytes. Without validators it does."""
    name = "etag" if validator.startswith('"') else "last-modified"
    return headers.get(name, validator) == validator
