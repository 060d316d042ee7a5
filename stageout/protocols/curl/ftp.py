"""FTP requests about one file."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote

import pycurl

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.protocols.curl.address import Address
from stageout.protocols.curl.digests import LENGTHS_BYTES, Stated, read_value
from stageout.protocols.curl.evidence import Witness
from stageout.protocols.curl.http import ENDED, QUESTION_S
from stageout.protocols.curl.localfile import SourceFile
from stageout.protocols.curl.task import Task
from stageout.protocols.curl.transport import Query, Receiver, Reply

_CREATE_AND_RETRY = 2  # CURLFTP_CREATE_DIR_RETRY
_HASH_REPLY = re.compile(r"213 (\S+) \d+-\d+ ([0-9A-Fa-f]+)\b")
_LISTED_SIZE = re.compile(r"\s?(?:[^ ]*;)?size=([0-9]{1,18});", re.IGNORECASE)
_REFUSED = (pycurl.E_REMOTE_FILE_NOT_FOUND, pycurl.E_FTP_COULDNT_RETR_FILE, pycurl.E_REMOTE_ACCESS_DENIED)
_HASH_NAMES = {"SHA-512": "sha512", "SHA-256": "sha256", "SHA-1": "sha1", "MD5": "md5", "CRC32": "crc32"}


class Ftp:
    """Requests for one file, as the user in its URL, or as anonymous."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.facts: dict[str, Any] = {}
        self.unanswered: TransferFailure | None = None  # the reason why the last query failed

    def retrieve(self, receiver: Receiver) -> Reply:
        """Retrieve a file (RETR)."""
        reply = self._perform(self._task.address, receiver=receiver)
        self.facts["TransferHTTPStatusCode"] = reply.status
        return reply

    def store(self, address: Address, source: SourceFile) -> Reply:
        """Store a file (STOR), and create missing directories."""
        options = {pycurl.FTP_CREATE_MISSING_DIRS: _CREATE_AND_RETRY}
        reply = self._perform(address, source=source, options=options)
        self.facts["TransferHTTPStatusCode"] = reply.status
        return reply

    def size_and_digest(self, address: Address, with_digest: bool) -> Witness | None:
        """Query the size of a file (SIZE), and its digest (HASH).

        :returns: the server's answers; None without an answer, and then ``unanswered`` has the reason.
        :raises TransferFailure: the plugin has to end.
        """
        commands = [f"*HASH {address.name}"] if with_digest else []
        reply = self._question(address, commands)
        if reply is None:
            return None
        size_bytes = reply.length_bytes if reply.length_bytes >= 0 else None
        silent = "" if size_bytes is not None else "it states no length"
        return Witness("SIZE", size_bytes, Stated(_hashes(reply.lines)), silent)

    def listed_size(self, address: Address) -> Witness | None:
        """Query the facts about a file (MLST). Returns and raises as :meth:`size_and_digest`."""
        reply = self._question(address.parent() or address, [f"*MLST {address.name}"])
        if reply is None:
            return None
        found = next((found for found in map(_LISTED_SIZE.match, reply.lines) if found), None)
        return Witness("MLST", int(found[1]) if found else None, silent="" if found else "it states no length")

    def delete(self, address: Address) -> None:
        """Delete a file (DELE). :raises TransferFailure: refused, or the file does not exist."""
        options = {pycurl.NOBODY: 1, **_after([f"DELE {address.name}"])}
        self._perform(address.parent() or address, options=options)

    def exists(self, address: Address) -> bool:
        """Tell whether the server has a file of this name (SIZE). :raises TransferFailure: no answer."""
        try:
            return self._perform(address, options={pycurl.NOBODY: 1}).length_bytes >= 0
        except TransferFailure as failure:
            if failure.kind is ErrorClass.NOT_FOUND:
                return False
            raise

    def _question(self, address: Address, commands: list[str]) -> Reply | None:
        """Send an optional request with a short time limit. A refusal is an answer."""
        self.unanswered = None
        try:
            return self._perform(address, options={pycurl.NOBODY: 1, **_after(commands)}, limit_s=QUESTION_S)
        except TransferFailure as failure:
            if failure.kind in ENDED:
                raise
            if failure.developer.get("LibcurlReturnCode") in _REFUSED:
                return Reply()
            self.unanswered = failure
            self._task.context.log("a question brought no answer", place=address.shown, why=failure)
            return None

    def _perform(
        self,
        address: Address,
        source: SourceFile | None = None,
        receiver: Receiver | None = None,
        options: dict[int, Any] | None = None,
        limit_s: float = 0.0,
    ) -> Reply:
        options = dict(options or {})
        if self._task.address.user:
            options.update({pycurl.USERNAME: self._task.address.user, pycurl.PASSWORD: self._task.address.password})
        query = Query("", address.url, source=source, receiver=receiver, options=options, limit_s=limit_s)
        task = self._task
        task.progress.begin()
        return task.transport.perform(query, task.context, task.settings, task.progress)


def _after(commands: list[str]) -> dict[int, Any]:
    """Make the libcurl options for commands to send in the directory of the URL."""
    for command in commands:
        if any(ord(char) < 32 for char in command):
            raise TransferFailure(ErrorClass.BAD_URL, f"FTP cannot carry the file name {quote(command)}; rename it")
    return {pycurl.POSTQUOTE: [command.encode("utf-8", "surrogateescape") for command in commands]} if commands else {}


def _hashes(lines: list[str]) -> dict[str, str]:
    for line in lines:
        found = _HASH_REPLY.match(line)
        name = _HASH_NAMES.get(found[1].upper()) if found else None
        if found and name and len(found[2]) == 2 * LENGTHS_BYTES[name]:
            value = read_value(name, found[2])
            return {name: value} if value else {}
    return {}
