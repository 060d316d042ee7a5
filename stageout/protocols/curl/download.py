"""Downloads by HTTP and FTP: under a temporary name, resumed only with the same version of the file, verified."""

from __future__ import annotations

import re

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.api import Outcome
from stageout.protocols.curl.attempts import Movement
from stageout.protocols.curl.digests import WANTED, stated_by_server, strongest
from stageout.protocols.curl.ftp import Ftp
from stageout.protocols.curl.http import Http
from stageout.protocols.curl.localfile import PartFile
from stageout.protocols.curl.task import Task
from stageout.protocols.curl.transport import Reply

CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
WHOLE = (200, 203, 204)  # the answer is the file; 204: it is empty
_STRONG_AGE_S = 60.0
_PLAIN_DIGESTS = ("adler32",)  # when nobody states one: for the result ad, and cheap


class Download(Movement):
    """One file on its way in: what HTTP and FTP have in common."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._address = task.address
        self._expected = task.user_digests()
        self._part = PartFile(task.path)
        self._announced_bytes: int | None = None
        self._stated: dict[str, str] = {}
        self._most_bytes = 0

    @property
    def milestone(self) -> int:
        """The most that was ever here of the file."""
        self._most_bytes = max(self._most_bytes, self._part.size_bytes if self.resumable else 0)
        return self._most_bytes

    @property
    def resumable(self) -> bool:
        """The bytes here may be continued."""
        return False

    def abandon(self) -> None:
        """Remove the part, unless the disk is full."""
        self._part.discard()

    def write(self, data: bytes) -> None:
        """Take data from the network."""
        self._part.write(data)

    def _restart(self, stated: dict[str, str], announced_bytes: int | None) -> None:
        self._stated = stated if not self._task.no_digests else {}
        self._announced_bytes = announced_bytes
        wanted = {name for name in (strongest(self._stated), strongest(self._expected)) if name}
        self._part.restart(wanted or (() if self._task.no_digests else _PLAIN_DIGESTS))

    def _finish(self) -> Outcome:
        """Verify, then give the file its name."""
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
        """Discard the part that is here: the next attempt begins anew."""
        self._part.restart(())

    def _verify(self) -> str:
        size_bytes, host = self._part.size_bytes, self._address.host
        if self._announced_bytes is not None and size_bytes != self._announced_bytes:
            text = f"{host} announced {self._announced_bytes} bytes and sent {size_bytes}"
            raise TransferFailure(ErrorClass.SIZE_MISMATCH, text, host)
        verified = "" if self._announced_bytes is None else "size"
        for digests, whose in ((self._stated, host), (self._expected, "the job's PluginData")):
            name = strongest(digests)
            if name is None:
                continue
            if self._part.digest(name) != digests[name]:
                text = f"the file from {host} does not have the {name} that {whose} states"
                raise TransferFailure(ErrorClass.CONTENT_MISMATCH, text, host, developer={"Expected": digests[name]})
            verified = name
        if self._task.digest_required and verified in ("", "size"):
            text = f"{host} states no digest of this file and the checksum policy is required; give one in PluginData"
            raise TransferFailure(ErrorClass.NOT_VERIFIED, text, host)
        return verified


class HttpDownload(Download):
    """Over HTTP."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._http = Http(task)
        self._validator = ""
        self._headers: dict[str, str] = {}  # of the answer that these bytes are from

    @property
    def resumable(self) -> bool:
        """The server gave a strong name for the version that these bytes are of, or the rest can be compared."""
        return bool(self._validator) or (self._announced_bytes is not None and self._comparable)

    @property
    def _comparable(self) -> bool:
        """A date or a digest tells whether the rest is of the same version."""
        return "last-modified" in self._headers or bool(self._stated or self._expected)

    def attempt(self) -> Outcome:
        """One GET, of what is still missing where that is safe."""
        headers = () if self._task.no_digests else WANTED
        if self._part.size_bytes and self.resumable:
            headers = (*headers, f"Range: bytes={self._part.size_bytes}-")
            headers = (*headers, f"If-Range: {self._validator}") if self._validator else headers
        reply = self._http.ask("GET", self._address, headers, receiver=self)
        if reply.status not in WHOLE and reply.status != 206:
            if reply.status == 416:
                self._forget()
            raise self._http.failure(reply, f"download of {self._address.name}")
        outcome = self._finish()
        outcome.developer.update(self._http.facts)
        return outcome

    def begin(self, reply: Reply) -> None:
        """The head of a successful answer, which brings the rest of the file or the whole."""
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
        names = ("etag", "last-modified")  # the length has been compared
        return all(headers.get(name) == self._headers.get(name) for name in names)

    def _forget(self) -> None:
        self._validator, self._headers = "", {}
        super()._forget()


class FtpDownload(Download):
    """Over FTP. A server has no names for versions, so nothing is continued."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._ftp = Ftp(task)

    def attempt(self) -> Outcome:
        """One RETR."""
        reply = self._ftp.retrieve(self)
        self._announced_bytes = reply.length_bytes if reply.length_bytes >= 0 else None
        outcome = self._finish()
        outcome.developer.update(self._ftp.facts)
        return outcome

    def begin(self, reply: Reply) -> None:
        """Data comes."""
        self._restart({}, None)


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
    """Tell whether a partial answer agrees with the version that was begun; one without validators does."""
    name = "etag" if validator.startswith('"') else "last-modified"
    return headers.get(name, validator) == validator
