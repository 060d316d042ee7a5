"""Uploads: send the file to its name, then verify it at the server. Verification never makes a good upload fail.

:mod:`evidence` has the rules for the server's answers.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Iterator
from dataclasses import replace

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.api import Outcome
from stageout.protocols.curl.attempts import Movement, wait
from stageout.protocols.curl.dav import NO_COLLECTION, length_in, make_collections, properties
from stageout.protocols.curl.digests import WANTED, Stated, stated_by_server, strongest
from stageout.protocols.curl.evidence import GONE, Sent, Verdict, Witness, is_page, witness_of
from stageout.protocols.curl.failures import S3_CODES, s3_code
from stageout.protocols.curl.ftp import Ftp
from stageout.protocols.curl.http import LARGE_BYTES, Http
from stageout.protocols.curl.localfile import SourceFile
from stageout.protocols.curl.servers import Habit
from stageout.protocols.curl.task import Task
from stageout.protocols.curl.transport import Reply

_MAKES_DIRECTORIES = {"http": "dav", "https": "davs"}
_DAV = ("dav", "davs")
_CHEAP_DIGEST = "adler32"  # digest for the result ad if the server states none
_MOST_WRONG_COPIES = 2  # copies of one file: a server that stores other content twice does so again
_SECOND_LOOK_S = 1.0
_BREAKS = frozenset(  # failures of a connection, or of the plugin
    {
        ErrorClass.CONNECTION_LOST,
        ErrorClass.STALLED,
        ErrorClass.TIMED_OUT,
        ErrorClass.DEADLINE,
        ErrorClass.NOT_ATTEMPTED,
    }
)
_FRESH = ("Cache-Control: no-cache",)
_ONE_BYTE = ("Range: bytes=0-0", *_FRESH)
_ACCEPTED = 202
_PROPERTIES = 207


class Upload(Movement):
    """Upload of one file."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._address = task.address
        self._path = task.path
        self._expected = task.user_digests()
        self._sent: Sent | None = None  # the server has accepted the file, and no answer contradicts that yet
        self._stated = Stated()
        self._wrong_copies = 0
        self._is_last = False
        names = ("md5",) if task.address.signed_for_amazon else task.servers.digests(task.address.origin)
        self._source = SourceFile(task.path, {*self._expected, *(() if task.no_digests else names)})

    @property
    def milestone(self) -> int:
        """Return 1 after the server has accepted the file, otherwise 0."""
        return int(self._sent is not None)

    @property
    def repeatable(self) -> bool:
        """Tell whether to retry: not after a refusal at the end of a large file, nor when the server stores wrong
        copies.
        """
        return not self._is_last and self._wrong_copies < _MOST_WRONG_COPIES

    def attempt(self) -> Outcome:
        """Send the file unless the server has accepted it already, and verify it."""
        if self._sent is None:
            self._source.begin_attempt()
            try:
                self._sent, self._stated = self._send()
            except TransferFailure as failure:
                if failure.kind in _BREAKS and self._source.is_begun:
                    failure.message += "; a part of the file may stand under its name there"
                raise
            self._check_source()
        verified = self._verify(self._sent)
        return Outcome(
            size_bytes=self._source.size_bytes,
            transferred_bytes=self._task.progress.total_bytes,
            verified=verified,
            digests=self._source.digests(),
            developer=self._facts(),
        )

    def abandon(self) -> None:
        """Do nothing, because the upload wrote only to the final name."""

    def close(self) -> None:
        """Close the local file."""
        self._source.close()

    @abc.abstractmethod
    def _send(self) -> tuple[Sent, Stated]:
        """Send the file. Return facts about the sent data and the digests in the answer."""

    @abc.abstractmethod
    def _witnesses(self, verdict: Verdict) -> Iterator[Witness]:
        """Query the server while the verdict is doubtful. End when no further query is useful."""

    def _facts(self) -> dict[str, object]:
        return {}

    def _unanswered(self) -> TransferFailure | None:
        """Return the reason why the last query failed; None when it was answered."""
        return None

    def _check_source(self) -> None:
        self._source.check_unchanged()
        for name, value in self._expected.items():
            if self._source.digest(name) != value:
                text = f"{self._path.name} does not have the {name} that the job's PluginData states"
                raise TransferFailure(ErrorClass.SOURCE_CHANGED, text)

    def _verify(self, sent: Sent) -> str:
        """Compare the server's file with the sent one. Return the evidence: "", "size" or a digest's name."""
        try:
            verdict = self._hear(sent)
            if isinstance(verdict, Verdict) and verdict.contradicted:
                wait(self._task, _SECOND_LOOK_S)  # some servers show a file later than they accept it
                verdict = self._hear(sent)
            if isinstance(verdict, str):
                return verdict
            if verdict.contradicted:
                raise self._contradiction(verdict.last)
        except TransferFailure as failure:
            if failure.kind in (ErrorClass.SIZE_MISMATCH, ErrorClass.CONTENT_MISMATCH):
                self._sent, self._wrong_copies = None, self._wrong_copies + 1
            raise
        if self._task.digest_required:
            raise self._unanswered() or self._not_verified()
        return "size" if verdict.confirmed else ""

    def _hear(self, sent: Sent) -> Verdict | str:
        """Collect the evidence. Return the name of a digest that agrees, or else the combined result.

        :raises TransferFailure: CONTENT_MISMATCH.
        """
        verdict = Verdict(sent)
        name = self._agreeing_digest(Witness("PUT", None, self._stated))
        if name:
            return name
        for witness in self._witnesses(verdict):
            verdict.hear(witness)
            self._task.context.log(f"{witness.name} says", size=witness.size_bytes, nothing=witness.silent or "no")
            name = self._agreeing_digest(witness)
            if name:
                return name
        if not self._task.no_digests:
            self._task.servers.learn_digest(self._address.origin, _CHEAP_DIGEST)
        return verdict

    def _agreeing_digest(self, witness: Witness) -> str:
        """Return the name of a stated digest that agrees, "" if none is comparable.

        :raises TransferFailure: CONTENT_MISMATCH if a digest differs that certainly belongs to this file.
        """
        stated, source, ours = witness.stated, self._source, set(self._source.digests())
        name = strongest(stated.names & ours) or strongest(stated.sure) or strongest(stated.perhaps)
        if name is None or self._task.no_digests or witness.size_bytes not in (None, source.size_bytes):
            return ""
        self._task.servers.learn_digest(self._address.origin, name)
        value = source.digest(name)
        if value in (stated.sure.get(name), stated.perhaps.get(name)):
            return name
        if witness.silent or name not in stated.sure:
            return ""
        text = f"{self._place} has other content than was sent of {self._path.name}: its {name} differs"
        facts = {"Expected": value, "Found": stated.sure[name]}
        raise TransferFailure(ErrorClass.CONTENT_MISMATCH, text, self._address.host, developer=facts)

    @property
    def _place(self) -> str:
        return self._address.host or self._address.shown

    def _contradiction(self, witness: Witness) -> TransferFailure:
        size_bytes, name = self._source.size_bytes, self._path.name
        if self._sent is not None and self._sent.page:
            text = f"{self._place} answered the upload of {name} with a web page and does not have it; log in there?"
        elif witness.missing or witness.size_bytes is None:
            text = f"{self._place} took {name} and now has no such file"
        else:
            text = f"{self._place} has {witness.size_bytes} bytes of {name}, {size_bytes} were sent"
        return TransferFailure(ErrorClass.SIZE_MISMATCH, text, self._address.host)

    def _not_verified(self) -> TransferFailure:
        text = f"{self._place} states no digest of what it stored, and the checksum policy is required"
        return TransferFailure(ErrorClass.NOT_VERIFIED, text, self._address.host)


class HttpUpload(Upload):
    """PUT to the final name. ``dav`` and ``davs`` create missing collections."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._http = Http(task)
        self._is_dav = task.address.method in _DAV and not task.address.signed

    def _send(self) -> tuple[Sent, Stated]:
        start_s = time.monotonic()
        reply = self._put()
        if not reply.success:
            failure = self._http.failure(reply, f"upload of {self._path.name}", self._missing_directory(reply))
            was_sent = self._source.size_bytes >= LARGE_BYTES and self._source.read_whole
            self._is_last = was_sent and s3_code(reply.text) not in S3_CODES
            raise failure
        page, took_s = reply.status == 200 and is_page(reply), time.monotonic() - start_s
        sent = Sent(self._source.size_bytes, reply.headers.get("date", ""), took_s, reply.status == _ACCEPTED, page)
        amazon = self._address.signed_for_amazon
        return sent, stated_by_server(reply.headers, whole_body=False, about_upload=True, amazon=amazon)

    def _put(self) -> Reply:
        """Send the file with PUT. If the collection is missing, create it and send the file again."""
        reply = self._http.ask("PUT", self._address, source=self._source)
        if not self._is_dav or reply.status not in NO_COLLECTION:
            return reply
        with self._task.servers.making(self._address.origin):
            refused = make_collections(self._http, self._address)
        reply = self._http.ask("PUT", self._address, source=self._source, repeated=True)
        if refused is not None and reply.status in NO_COLLECTION:
            raise refused
        return reply

    def _missing_directory(self, reply: Reply) -> str:
        """Return advice for a PUT into a directory that does not exist; "" if that is not the reason."""
        folder, method = self._address.parent(), self._address.method
        if (
            reply.status not in NO_COLLECTION
            or folder is None
            or self._address.signed
            or method not in _MAKES_DIRECTORIES
        ):
            return ""
        answer = self._http.question("HEAD", folder)
        if answer is not None and answer.status in GONE:
            advice = f"make it, or write {_MAKES_DIRECTORIES[method]}:// instead of {method}://"
            return f"the directory {folder.path} does not exist there; {advice}, which makes directories"
        return ""

    def _witnesses(self, verdict: Verdict) -> Iterator[Witness]:
        """Confirm with HEAD, with PROPFIND of WebDAV if HEAD does not suffice, and with a one-byte range if there is a
        doubt.
        """
        sent, origin, servers = self._sent, self._address.origin, self._task.servers
        is_deaf = servers.has(origin, Habit.ANSWERS_NO_QUESTIONS) and not self._task.digest_required
        if sent is None or self._address.signed or is_deaf:
            return  # the signature is for PUT only
        reply = self._head()
        if reply is None:
            servers.learn(origin, Habit.ANSWERS_NO_QUESTIONS)
            return
        sent = replace(sent, shows=reply.status in GONE and self._shows_collections())
        yield witness_of("HEAD", reply, sent)
        if not verdict.confirmed and self._is_dav:
            reply = properties(self._http, self._address)
            if reply is not None:
                yield witness_of("PROPFIND", reply, sent, length_in(reply.text))
        if verdict.doubtful:
            reply = self._http.question("GET", self._address, _ONE_BYTE)
            if reply is not None:
                yield witness_of("GET of one byte", reply, sent)

    def _head(self) -> Reply | None:
        """Send a HEAD that asks for digests. Send it without this request if the server rejects that."""
        servers, origin, task = self._task.servers, self._address.origin, self._task
        asks = not task.no_digests and (task.digest_required or not servers.has(origin, Habit.STATES_NO_DIGESTS))
        reply = self._http.question("HEAD", self._address, (*WANTED, *_FRESH) if asks else _FRESH)
        if asks and (reply is None or not reply.success):
            servers.learn(origin, Habit.STATES_NO_DIGESTS)
            reply = self._http.question("HEAD", self._address, _FRESH)
        return reply

    def _shows_collections(self) -> bool:
        """Tell whether 404 means that the file is missing. Ingest services accept files that nobody can read."""
        folder, servers, origin = self._address.parent(), self._task.servers, self._address.origin
        shows = servers.has(origin, Habit.SHOWS_COLLECTIONS)
        if shows is None and self._is_dav and folder is not None:
            reply = properties(self._http, folder)
            shows = reply is not None and reply.status == _PROPERTIES
            servers.learn(origin, Habit.SHOWS_COLLECTIONS, shows)
        return bool(shows)

    def _facts(self) -> dict[str, object]:
        return self._http.facts

    def _unanswered(self) -> TransferFailure | None:
        return self._http.unanswered


class FtpUpload(Upload):
    """STOR to the final name, then SIZE and HASH, and MLST if there is a doubt."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._ftp = Ftp(task)

    def _send(self) -> tuple[Sent, Stated]:
        self._ftp.store(self._address, self._source)
        return Sent(self._source.size_bytes), Stated()

    def _witnesses(self, verdict: Verdict) -> Iterator[Witness]:
        servers, origin = self._task.servers, self._address.origin
        if servers.has(origin, Habit.ANSWERS_NO_QUESTIONS) and not self._task.digest_required:
            return
        found = self._ftp.size_and_digest(self._address, not self._task.no_digests)
        if found is None:
            servers.learn(origin, Habit.ANSWERS_NO_QUESTIONS)
            return
        yield found
        if verdict.doubtful:
            found = self._ftp.listed_size(self._address)
            if found is not None:
                yield found

    def _facts(self) -> dict[str, object]:
        return self._ftp.facts

    def _unanswered(self) -> TransferFailure | None:
        return self._ftp.unanswered
