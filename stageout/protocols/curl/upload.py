"""Uploads: send, check what the server has, publish under the final name. A retry goes on at the step that failed."""

from __future__ import annotations

import abc
import contextlib
import enum
from typing import NamedTuple

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.api import Outcome
from stageout.protocols.curl.attempts import Movement
from stageout.protocols.curl.digests import WANTED, stated_by_server, strongest
from stageout.protocols.curl.ftp import Ftp
from stageout.protocols.curl.http import LARGE_BYTES, Http
from stageout.protocols.curl.localfile import SourceFile, temporary_name
from stageout.protocols.curl.task import Task
from stageout.protocols.curl.transport import Reply

# A server that answers so cannot say what it has; any other refusal is a failure.
_SAYS_NOTHING = frozenset({401, 403, 405, 406, 411, 415, 501})
_GONE = frozenset({404, 410})
_SERVER_ERRORS = 500  # and above
#: The answer to a PUT, or to MKCOL, where the directory around it is missing.
NO_DIRECTORY = frozenset({404, 409})
_MAKES_DIRECTORIES = {"http": "dav", "https": "davs"}
_CHEAP_DIGEST = "adler32"  # for the result ad, where the server states none


class Stored(NamedTuple):
    """The destination's own description of a file. ``size_bytes`` None: unknown."""

    size_bytes: int | None = None
    digests: dict[str, str] = {}  # noqa: RUF012 - never changed


class Step(enum.IntEnum):
    """The step to be done next."""

    SEND = 0
    CHECK = 1
    PUBLISH = 2


class Upload(Movement):
    """One file on its way out."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._address = task.address
        self._target = task.address
        self._path = task.path
        self._expected = task.user_digests()
        self._step = Step.SEND
        self._answered = Stored()
        self._verified = ""
        names = ("md5",) if task.address.signed_for_amazon else task.servers.digests(task.address.origin)
        self._source = SourceFile(task.path, {*self._expected, *(() if task.no_digests else names)})

    @property
    def milestone(self) -> int:
        """Steps done."""
        return int(self._step)

    @property
    def repeatable(self) -> bool:
        """Not when the server has taken a large file whole and then refused it."""
        return self._step is not Step.SEND or self._source.size_bytes < LARGE_BYTES or not self._source.read_whole

    def attempt(self) -> Outcome:
        """Go on with the step that is due."""
        if self._step is Step.SEND:
            self._answered = self._send()
            self._check_source()
            self._step = Step.CHECK
        if self._step is Step.CHECK:
            try:
                self._verified = self._check()
            except TransferFailure as failure:
                if failure.kind in (ErrorClass.SIZE_MISMATCH, ErrorClass.CONTENT_MISMATCH):
                    self._step = Step.SEND
                raise
            self._step = Step.PUBLISH
        while not self._publish():
            self._answered = self._send()
            self._check_source()
            self._verified = self._check()
        return Outcome(
            size_bytes=self._source.size_bytes,
            transferred_bytes=self._task.progress.total_bytes,
            verified=self._verified,
            digests=self._source.digests(),
            developer=self._facts(),
        )

    def close(self) -> None:
        """Let go of the local file."""
        self._source.close()

    @abc.abstractmethod
    def _send(self) -> Stored:
        """Send the file to ``self._target``; returns what the answer already states."""

    @abc.abstractmethod
    def _look(self) -> Stored:
        """Ask the server what it has at ``self._target``."""

    def _publish(self) -> bool:
        """Give the file its final name, where it does not have it yet. False: it has to be sent in another way."""
        return True

    def _facts(self) -> dict[str, object]:
        return {}

    def _check_source(self) -> None:
        self._source.check_unchanged()
        for name, value in self._expected.items():
            if self._source.digest(name) != value:
                text = f"{self._path.name} does not have the {name} that the job's PluginData states"
                raise TransferFailure(ErrorClass.SOURCE_CHANGED, text)

    def _check(self) -> str:
        """Compare what the server has with what was sent. Returns what agreed: "", "size" or a digest's name."""
        if self._task.no_digests:
            return self._compare(Stored(self._look().size_bytes))
        name = strongest(self._answered.digests)
        if name:
            return self._compare(self._answered)
        verified = self._compare(self._look())
        if verified not in ("", "size"):
            return verified
        self._task.servers.learn_digest(self._address.origin, _CHEAP_DIGEST)
        if self._task.digest_required:
            text = f"{self._address.host or self._address.shown} states no digest of what it stored, and the checksum"
            raise TransferFailure(ErrorClass.NOT_VERIFIED, f"{text} policy is required", self._address.host)
        return verified

    def _compare(self, stored: Stored) -> str:
        host, source = self._address.host or self._address.shown, self._source
        if stored.size_bytes is not None and stored.size_bytes != source.size_bytes:
            text = f"{host} has {stored.size_bytes} bytes of {self._path.name}, {source.size_bytes} were sent"
            raise TransferFailure(ErrorClass.SIZE_MISMATCH, text, self._address.host)
        name = strongest(set(stored.digests) & set(source.digests())) or strongest(stored.digests)
        if name is None:
            return "" if stored.size_bytes is None else "size"
        self._task.servers.learn_digest(self._address.origin, name)
        if stored.digests[name] != source.digest(name):
            text = f"{host} has other content than was sent of {self._path.name}: its {name} differs"
            facts = {"Expected": source.digest(name), "Found": stored.digests[name]}
            raise TransferFailure(ErrorClass.CONTENT_MISMATCH, text, self._address.host, developer=facts)
        return name


class HttpUpload(Upload):
    """PUT to the final name: for servers of which nothing more is known, and for signed URLs."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._http = Http(task)

    def abandon(self) -> None:
        """Nothing to remove: what stands under the final name is the server's."""

    def _send(self) -> Stored:
        reply = self._put()
        if not reply.success:
            raise self._http.failure(reply, f"upload of {self._path.name}", self._missing_directory(reply))
        return Stored(None, self._stated(reply))

    def _missing_directory(self, reply: Reply) -> str:
        """Return advice for a PUT into a directory that does not exist; "" when that is not the reason."""
        folder, method = self._target.parent(), self._target.method
        if (
            reply.status not in NO_DIRECTORY
            or folder is None
            or self._target.signed
            or method not in _MAKES_DIRECTORIES
        ):
            return ""
        with contextlib.suppress(TransferFailure):
            if self._http.ask("HEAD", folder).status in _GONE:
                advice = f"make it, or write {_MAKES_DIRECTORIES[method]}:// instead of {method}://"
                return f"the directory {folder.path} does not exist there; {advice}, which makes directories"
        return ""

    def _stated(self, reply: Reply) -> dict[str, str]:
        amazon = self._target.signed_for_amazon
        return stated_by_server(reply.headers, whole_body=False, about_upload=True, amazon=amazon)

    def _put(self) -> Reply:
        return self._http.ask("PUT", self._target, source=self._source)

    def _look(self) -> Stored:
        if self._target.signed:
            return Stored()  # the signature is for PUT only
        trusted = not (self._shows_what_it_has() or self._task.digest_required)
        try:
            reply = self._http.ask("HEAD", self._target, () if self._task.no_digests else WANTED)
        except TransferFailure as failure:
            if trusted and failure.kind in (ErrorClass.STALLED, ErrorClass.TIMED_OUT):
                return Stored()
            raise
        if reply.status in _SAYS_NOTHING or (trusted and reply.status >= _SERVER_ERRORS):
            return Stored()
        if reply.status in _GONE and not self._shows_what_it_has():
            return Stored()
        if reply.status in _GONE:
            text = f"{self._address.host} took {self._path.name} and now has no such file"
            raise TransferFailure(ErrorClass.SIZE_MISMATCH, text, self._address.host)
        if not reply.success:
            raise self._http.failure(reply, f"question about the upload of {self._path.name}")
        return stored_by_head(reply)

    def _shows_what_it_has(self) -> bool:
        """Tell whether a file that is not found is lost. Ingest services take files that nobody can read."""
        return False

    def _facts(self) -> dict[str, object]:
        return self._http.facts


def stored_by_head(reply: Reply) -> Stored:
    """Read the description of a file from the answer to a HEAD."""
    length = reply.headers.get("content-length", "")
    return Stored(int(length) if length.isdigit() else None, stated_by_server(reply.headers, whole_body=True))


class FtpUpload(Upload):
    """STOR under a temporary name, SIZE, then RNFR and RNTO."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._target = task.address.beside(temporary_name(task.address.name))
        self._ftp = Ftp(task)
        self._sent = False

    def abandon(self) -> None:
        """Remove the temporary file."""
        if self._sent:
            try:
                self._ftp.delete(self._target)
            except TransferFailure as failure:
                self._task.context.log("a temporary file stays on the server", name=self._target.name, why=failure)

    def _send(self) -> Stored:
        self._sent = True
        self._ftp.store(self._target, self._source)
        return Stored()

    def _look(self) -> Stored:
        return Stored(*self._ftp.look(self._target, not self._task.no_digests))

    def _publish(self) -> bool:
        self._ftp.rename(self._target, self._address)
        return True

    def _facts(self) -> dict[str, object]:
        return self._ftp.facts
