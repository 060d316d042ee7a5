"""S3's multipart upload: parts over several connections, then one object.

Each pre-signed URL allows one request only. Therefore one for a PUT of the whole object cannot become several parts.
Users who want parts sign them in advance and put the URLs into PluginData (``s3_parts``: part_bytes, urls, complete,
abort). At a server that accepts the job's token, or needs none, the plugin begins and ends the upload itself
(``s3_multipart``).
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit
from xml.sax.saxutils import escape

import pycurl

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.protocols.curl.address import Address, address_of
from stageout.protocols.curl.digests import Stated
from stageout.protocols.curl.evidence import Sent, Verdict, Witness
from stageout.protocols.curl.http import Http
from stageout.protocols.curl.localfile import SourceFile
from stageout.protocols.curl.settings import value_of
from stageout.protocols.curl.streams import SharedProgress, StreamProgress
from stageout.protocols.curl.task import Task
from stageout.protocols.curl.transport import Reply
from stageout.protocols.curl.upload import HttpUpload

_LEAST_PART_BYTES = 8 << 20  # S3 requires parts of 5 MiB or more, except the last one
_MOST_PARTS = 10_000
_XML = ("Content-Type: application/xml",)
_UPLOAD_ID = re.compile(rb"<UploadId>([^<]+)</UploadId>")
_TAG = re.compile(rb"<ETag>(?:&quot;|&#34;|\")?([0-9a-fA-F]{32}-\d+)(?:&quot;|&#34;|\")?</ETag>")
_ERROR = re.compile(rb"<Error>.*?<Code>([^<]+)</Code>", re.S)


@dataclass(frozen=True)
class Signed:
    """URLs that the job's owner has signed, one for each request."""

    part_bytes: int
    urls: tuple[str, ...]
    complete: str
    abort: str


def read_signed(data: Mapping[str, Any]) -> Signed | None:
    """Read ``s3_parts`` of PluginData; None if absent.

    :raises TransferFailure: BAD_REQUEST for invalid values.
    """
    given = value_of(data, "s3_parts")
    if given is None:
        return None
    found = {name: value_of(given, name) if isinstance(given, Mapping) else None for name in ("part_bytes", "urls")}
    complete, abort = (
        str(value_of(given, name) or "") if isinstance(given, Mapping) else "" for name in ("complete", "abort")
    )
    urls = found["urls"] if isinstance(found["urls"], list) else []
    if not isinstance(found["part_bytes"], int) or found["part_bytes"] < 1 or not urls or not complete:
        text = "PluginData: s3_parts needs part_bytes (a number), urls (a list, one per part) and complete (a URL)"
        raise TransferFailure(ErrorClass.BAD_REQUEST, text)
    return Signed(found["part_bytes"], tuple(map(str, urls)), complete, abort)


def wants_parts(task: Task) -> bool:
    """Tell whether to send a file in parts: PluginData has signed parts, or the server is S3 and the file is large."""
    if value_of(task.request.data, "s3_parts") is not None:
        return True
    if value_of(task.request.data, "s3_multipart") is not True or task.address.signed:
        return False
    return task.path.is_file() and task.path.stat().st_size > task.settings.split_bytes


class PartsUpload(HttpUpload):
    """Upload of one file in parts."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._signed = read_signed(task.request.data)
        least = max(_LEAST_PART_BYTES, -(-self._source.size_bytes // _MOST_PARTS))
        self._part_bytes = self._signed.part_bytes if self._signed else least
        self._count = max(1, -(-self._source.size_bytes // self._part_bytes))
        if self._signed and len(self._signed.urls) < self._count:
            text = (
                f"s3_parts has {len(self._signed.urls)} urls, {task.path.name} needs {self._count}: sign more of them"
            )
            raise TransferFailure(ErrorClass.BAD_REQUEST, f"{text}, or give a larger part_bytes")
        self._upload_id = ""
        self._is_whole = False
        self._tags: dict[int, str] = {}
        self._sums: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._shared = SharedProgress(task.context, task.progress)

    @property
    def milestone(self) -> int:
        """Return the number of uploaded parts and of completed steps."""
        return len(self._tags) + _MOST_PARTS * super().milestone

    def abandon(self) -> None:
        """Ask the server to discard the parts."""
        url = self._signed.abort if self._signed else self._query(f"uploadId={quote(self._upload_id, safe='')}")
        if (self._signed and url) or self._upload_id:
            with contextlib.suppress(TransferFailure):
                if self._http.question("DELETE", self._at(url)) is not None:
                    return
            self._task.context.log("parts of an upload stay on the server")

    def _send(self) -> tuple[Sent, Stated]:
        if not self._signed and not self._upload_id:
            self._begin_upload()
        self._send_parts()
        self._is_whole = self._complete()
        return Sent(self._source.size_bytes), Stated()

    def _begin_upload(self) -> None:
        empty = {pycurl.POSTFIELDS: ""}
        reply = self._http.ask("POST", self._at(self._query("uploads")), _XML, options=empty, whole_text=True)
        found = _UPLOAD_ID.search(reply.text)
        if not reply.success or not found:
            raise self._http.failure(reply, f"start of the upload of {self._path.name} in parts")
        self._upload_id = found[1].decode()

    def _send_parts(self) -> None:
        self._shared.stop = None
        waiting = [number for number in range(1, self._count + 1) if number not in self._tags]
        streams = min(self._task.context.parallelism, len(waiting))
        threads = [threading.Thread(target=self._work, args=(waiting,), daemon=True) for _ in range(streams - 1)]
        for thread in threads:
            thread.start()
        self._work(waiting)
        for thread in threads:
            thread.join()
        if self._shared.stop is not None:
            raise self._shared.stop

    def _work(self, waiting: list[int]) -> None:
        task = replace(self._task, progress=StreamProgress(self._task.context, self._shared))
        http = Http(task)
        while self._shared.stop is None:
            with self._lock:
                number = waiting.pop(0) if waiting else 0
            if not number:
                return
            try:
                self._part(http, number)
            except BaseException as failure:
                self._shared.stop = self._shared.stop or failure

    def _part(self, http: Http, number: int) -> None:
        start = (number - 1) * self._part_bytes
        length = min(self._part_bytes, self._source.size_bytes - start)
        source = SourceFile(self._path, ("md5",), start, length)
        source.begin_attempt()
        try:
            reply = http.ask("PUT", self._at(self._part_url(number)), source=source)
            if not reply.success:
                raise http.failure(reply, f"upload of part {number} of {self._path.name}")
            md5, tag = source.digests()["md5"], reply.headers.get("etag", "")
        finally:
            source.close()
        plain = tag.strip('"').lower()
        if len(plain) == 32 and plain != md5 and "x-amz-server-side-encryption" not in reply.headers:
            text = f"{self._address.host} has other content of part {number} of {self._path.name} than was sent"
            raise TransferFailure(ErrorClass.CONTENT_MISMATCH, text, self._address.host)
        with self._lock:
            self._tags[number], self._sums[number] = tag, bytes.fromhex(md5)

    def _complete(self) -> bool:
        """Complete the upload. Return whether the object's tag shows that it contains all parts."""
        rows = (
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(tag)}</ETag></Part>"
            for number, tag in sorted(self._tags.items())
        )
        body = f"<CompleteMultipartUpload>{''.join(rows)}</CompleteMultipartUpload>"
        url = self._signed.complete if self._signed else self._query(f"uploadId={quote(self._upload_id, safe='')}")
        reply = self._http.ask("POST", self._at(url), _XML, options={pycurl.POSTFIELDS: body}, whole_text=True)
        refused = _ERROR.search(reply.text)
        if not reply.success or refused:  # S3 sends 200 before it knows the result
            if refused and reply.success:
                word = refused[1].decode(errors="replace")
                text = f"{self._address.host} could not put {self._path.name} together: {word}"
                raise TransferFailure(ErrorClass.SERVER_ERROR, text, self._address.host)
            raise self._http.failure(reply, f"end of the upload of {self._path.name} in parts")
        self._upload_id = ""
        return self._tag_agrees(reply)

    def _tag_agrees(self, reply: Reply) -> bool:
        """Tell whether the object's tag is the digest of the parts' digests, which proves all parts and their order.

        :raises TransferFailure: CONTENT_MISMATCH when the tag differs.
        """
        found = _TAG.search(reply.text)
        if not found or any(len(tag.strip('"')) != 32 for tag in self._tags.values()):
            return False
        sums = b"".join(self._sums[number] for number in sorted(self._sums))
        expected = f"{hashlib.md5(sums, usedforsecurity=False).hexdigest()}-{self._count}"
        if found[1].decode().lower() != expected:
            self._tags.clear()
            text = f"{self._address.host} put other content together than was sent of {self._path.name}"
            raise TransferFailure(ErrorClass.CONTENT_MISMATCH, text, self._address.host)
        return True

    def _witnesses(self, verdict: Verdict) -> Iterator[Witness]:
        if self._is_whole:
            yield Witness("the object's tag", self._source.size_bytes)
        elif not self._signed:  # no signed URL allows this query
            yield from super()._witnesses(verdict)

    def _part_url(self, number: int) -> str:
        if self._signed:
            return self._signed.urls[number - 1]
        return self._query(f"partNumber={number}&uploadId={quote(self._upload_id, safe='')}")

    def _query(self, query: str) -> str:
        parts = urlsplit(self._address.url)
        return urlunsplit(parts._replace(query="&".join(filter(None, (parts.query, query)))))

    def _at(self, url: str) -> Address:
        return address_of(url) if self._signed else replace(self._address, url=url)
