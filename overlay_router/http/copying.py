"""COPY between this router and another server (HTTP-TPC, as FTS and gfal2 ask for it)."""

from __future__ import annotations

import contextlib
import http.client
import os
import threading
import time
from collections.abc import Callable, Iterable

from overlay_router.http import dav
from overlay_router.http.exchange import Exchange
from overlay_router.http.remote import Failed, Remote, passed_on
from overlay_router.http.writing import Writing
from stageout.core.threads import started
from stageout.overlay.http import digests
from stageout.overlay.http.heads import Head, Refused
from stageout.overlay.http.names import parts_of
from stageout.overlay.rules.rights import Right

_MARKER_S = 5.0
_MOST_BODY_BYTES = 64 * 1024


class Copying:
    """Answers COPY. :param hosts: servers that are allowed; called for each request."""

    def __init__(self, writing: Writing, hosts: Callable[[], Iterable[str]]) -> None:
        self._writing, self._hosts = writing, hosts

    def __call__(self, one: Exchange) -> None:
        """Answer one request. :raises Refused: it is refused before it begins."""
        source, target = one.head.get("source"), one.head.get("destination")
        if source and target:
            raise Refused(400, "a COPY has a Source or a Destination")
        if not source and _is_own(target, one.head):
            return dav.copy_here(self._writing, one)
        one.body(_MOST_BODY_BYTES)
        if source:
            one.allow(Right.CREATE)
            if not one.path or one.head.target.endswith("/"):
                raise Refused(409, "a file cannot be copied to the name of a directory")
        else:
            one.allow(Right.READ)
        if one.head.get("credential").lower() not in ("", "none"):
            raise Refused(400, "no credentials are delegated here: send a TransferHeaderAuthorization")
        remote = Remote(source or target, self._hosts(), passed_on(one.head.fields))
        with contextlib.closing(remote):
            return self._pull(one, remote) if source else self._push(one, remote)

    def _pull(self, one: Exchange, remote: Remote) -> None:
        overwrites, is_checked = one.head.get("overwrite").strip().upper() != "F", _is_checked(one.head)

        def pull(moved: Callable[[int], None]) -> None:
            answer = remote.get()
            length = answer.getheader("Content-Length")
            if length is None and not answer.chunked:  # then a cut would look like the end
                raise Failed("the source does not say how long the file is")
            size = None if answer.chunked or length is None else int(length)
            told = Head("PUT", "/", {name.lower(): value for name, value in answer.getheaders()})
            try:
                promised = digests.promised(told)
            except Refused:
                promised = {}
            body = _Body(answer, remote if is_checked else None)
            self._writing.deposit(one, one.path, body, size, promised, overwrites, moved=moved)

        _Reported(one, remote).run(pull)

    def _push(self, one: Exchange, remote: Remote) -> None:
        facts, descriptor = one.desk.ask("look", path=one.path)
        try:
            if facts["directory"]:
                raise Refused(501, "a directory is not copied: copy its files")
            size, overwrites = os.fstat(descriptor).st_size, one.head.get("overwrite").strip().upper() != "F"

            def push(moved: Callable[[int], None]) -> None:
                digest = remote.put(descriptor, size, overwrites, moved)
                if _is_checked(one.head):
                    remote.compare(digest)

            _Reported(one, remote).run(push)
        finally:
            os.close(descriptor)


def _is_own(target: str, head: Head) -> bool:
    """Tell whether a COPY is one of WebDAV. A client of a third-party copy waits for markers, within a router, too."""
    host = parts_of(target).netloc.lower()
    by_others = head.get("x-number-of-streams") or any(name.startswith("transferheader") for name in head.fields)
    return not host or (host == head.get("host").lower() and not by_others)


def _is_checked(head: Head) -> bool:
    """Tell whether a copy fails unless the other end tells the digest."""
    return head.get("requirechecksumverification").strip().lower() == "true"


class _Body:
    """The body of a server's answer. :param checked: at its end this server is asked for the digest."""

    def __init__(self, answer: http.client.HTTPResponse, checked: Remote | None) -> None:
        self._answer, self._checked, self._hasher = answer, checked, digests.Adler()

    def read_into(self, view: memoryview) -> int:
        """Read some bytes, 0 at the end. :raises Failed: it was cut, or differs."""
        try:
            data = self._answer.read1(len(view))  # as much as has come: the client hears how far it is
        except (OSError, http.client.HTTPException) as problem:
            raise Failed(f"the source was lost: {problem}") from None
        view[: len(data)] = data
        if self._checked:
            self._hasher.update(view[: len(data)])
            if not data:
                self._checked.compare(self._hasher.digest())
        return len(data)


class _Reported:
    """A copy whose client sees every five seconds how far it is, and cancels it by ending the connection."""

    def __init__(self, one: Exchange, remote: Remote) -> None:
        self._one, self._remote = one, remote
        self._moved, self._ended, self._problem = 0, threading.Event(), ""

    def run(self, work: Callable[[Callable[[int], None]], None]) -> None:
        """Answer with 202, work, and tell the outcome in the last line."""
        one = self._one
        one.begin(202, {"Content-Type": "text/perf-marker-stream", "Transfer-Encoding": "chunked"})
        telling = started(self._tell)
        last = "success: Created"
        try:
            work(self._count)
        except (Failed, Refused) as why:
            last = f"failure: {why}"
        except OSError as problem:
            last = f"failure: {os.strerror(problem.errno) if problem.errno else problem}"
        finally:
            self._ended.set()
            telling.join()
        if self._problem:
            raise ConnectionResetError(self._problem)
        self._chunk(last + "\n")
        one.stream.send(b"0\r\n\r\n")

    def _count(self, count: int) -> None:
        self._moved += count

    def _tell(self) -> None:
        next_s = time.monotonic() + _MARKER_S
        try:
            while not self._ended.wait(0.2):
                if self._one.stream.has_ended():
                    raise ConnectionResetError("the client has ended the copy")
                if time.monotonic() >= next_s:
                    next_s += _MARKER_S
                    self._chunk(
                        f"Perf Marker\n    Timestamp: {int(time.time())}\n    Stripe Index: 0\n    Stripe Bytes"
                        f" Transferred: {self._moved}\n    Total Stripe Count: 1\nEnd\n"
                    )
        except OSError as problem:
            self._problem = str(problem)
            self._remote.stop()

    def _chunk(self, text: str) -> None:
        data = text.encode("utf-8", "replace")
        self._one.stream.send(b"%x\r\n%b\r\n" % (len(data), data))
