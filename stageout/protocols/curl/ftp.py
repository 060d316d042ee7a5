"""FTP requests about one file."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote

import pycurl

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.protocols.curl.address import Address
from stageout.protocols.curl.digests import LENGTHS_BYTES, read_value
from stageout.protocols.curl.localfile import SourceFile
from stageout.protocols.curl.task import Task
from stageout.protocols.curl.transport import Query, Receiver, Reply

_CREATE_AND_RETRY = 2  # CURLFTP_CREATE_DIR_RETRY
_HASH_REPLY = re.compile(r"213 (\S+) \d+-\d+ ([0-9A-Fa-f]+)\b")
_HASH_NAMES = {"SHA-512": "sha512", "SHA-256": "sha256", "SHA-1": "sha1", "MD5": "md5", "CRC32": "crc32"}


class Ftp:
    """Requests for one file, as the user of its URL, or as anonymous."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.facts: dict[str, Any] = {}

    def retrieve(self, receiver: Receiver) -> Reply:
        """RETR."""
        reply = self._perform(self._task.address, receiver=receiver)
        self.facts["TransferHTTPStatusCode"] = reply.status
        return reply

    def store(self, address: Address, source: SourceFile) -> Reply:
        """STOR; directories that are missing are made."""
        options = {pycurl.FTP_CREATE_MISSING_DIRS: _CREATE_AND_RETRY}
        reply = self._perform(address, source=source, options=options)
        self.facts["TransferHTTPStatusCode"] = reply.status
        return reply

    def look(self, address: Address, with_digest: bool) -> tuple[int | None, dict[str, str]]:
        """Size of a file (SIZE), and its digest where the server can say it (HASH).

        :returns: size in bytes, None when the server does not tell; digests.
        """
        commands = [f"*HASH {address.name}"] if with_digest else []
        reply = self._perform(address, options={pycurl.NOBODY: 1, **_after(commands)})
        return (reply.length_bytes if reply.length_bytes >= 0 else None), _hashes(reply.lines)

    def rename(self, source: Address, target: Address) -> None:
        """RNFR, RNTO; an older file of that name is replaced."""
        rename = [f"RNFR {source.name}", f"RNTO {target.name}"]
        try:
            self._command(target, rename)
        except TransferFailure as failure:
            if failure.developer.get("LibcurlReturnCode") != pycurl.E_QUOTE_ERROR:
                raise
            self._command(target, [f"*DELE {target.name}", *rename])  # some servers replace nothing by themselves

    def delete(self, address: Address, refusal_is_failure: bool = False) -> None:
        """DELE. :param refusal_is_failure: else a file that stays, or is not there, is no error."""
        self._command(address, [f"{'' if refusal_is_failure else '*'}DELE {address.name}"])

    def exists(self, address: Address) -> bool:
        """Tell whether the server has a file of this name (SIZE). :raises TransferFailure: no answer."""
        try:
            return self.look(address, with_digest=False)[0] is not None
        except TransferFailure as failure:
            if failure.kind is ErrorClass.NOT_FOUND:
                return False
            raise

    def _command(self, address: Address, commands: list[str]) -> Reply:
        folder = address.parent() or address
        return self._perform(folder, options={pycurl.NOBODY: 1, **_after(commands)})

    def _perform(
        self,
        address: Address,
        source: SourceFile | None = None,
        receiver: Receiver | None = None,
        options: dict[int, Any] | None = None,
    ) -> Reply:
        options = dict(options or {})
        if self._task.address.user:
            options.update({pycurl.USERNAME: self._task.address.user, pycurl.PASSWORD: self._task.address.password})
        query = Query("", address.url, source=source, receiver=receiver, options=options)
        task = self._task
        task.progress.begin()
        return task.transport.perform(query, task.context, task.settings, task.progress)


def _after(commands: list[str]) -> dict[int, Any]:
    """Commands to be given when the connection stands in the directory of the URL."""
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
