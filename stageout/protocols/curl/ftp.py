"""ftp: whole files, under a temporary name first, verified by size."""

from __future__ import annotations

import secrets
from urllib.parse import unquote, urlsplit, urlunsplit

import pycurl

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.api import Context, Outcome, Request
from stageout.protocols.curl import digests
from stageout.protocols.curl.digests import Digester
from stageout.protocols.curl.exchange import Exchanger, server_of
from stageout.protocols.curl.files import PartFile, SourceFile
from stageout.protocols.curl.retrying import with_retries
from stageout.protocols.curl.web import target_of


def download(exchanger: Exchanger, request: Request, context: Context) -> Outcome:
    """Fetch a file. An interrupted one starts again: FTP cannot say whether the server's file is still the same."""
    url = target_of(request, context, upload=False).url
    policy, owner = digests.policy_of(request, context), digests.wanted_by_owner(request)
    with PartFile(request.local_path) as part:
        moved = 0

        def once() -> Digester:
            nonlocal moved
            part.restart()
            digester = Digester(digests.chosen(policy, owner))

            def write(chunk: bytes) -> None:
                part.write(chunk)
                digester.update(chunk)

            answer = exchanger.run("GET", url, context, write=write, before_bytes=moved)
            moved += answer.received_bytes
            digests.compare(digester.values(), owner, "checksum in PluginData")
            return digester

        digester = with_retries(context, once)
        verified = digests.compare(digester.values(), owner, "checksum in PluginData")
        digests.require(policy, verified, "FTP servers offer no digests; give one as checksum in PluginData")
        part.finish()
    return Outcome(part.size_bytes, moved, 0.0, verified or "size", digester.values())


def upload(exchanger: Exchanger, request: Request, context: Context) -> Outcome:
    """Send a file; missing directories are made."""
    url = target_of(request, context, upload=True).url
    policy, owner = digests.policy_of(request, context), digests.wanted_by_owner(request)
    digests.require(policy, "", "FTP servers offer no digests")
    moved = 0

    def once() -> None:
        nonlocal moved
        source.rewind()
        moved += _put(exchanger, url, source, context, moved)
        source.check_unchanged()
        digests.compare(source.complete_digests(), owner, "checksum in PluginData")
        size = _size(exchanger, url, context)
        if size != source.size_bytes:
            text = f"{server_of(url)} has {size} bytes, {source.size_bytes} were sent"
            raise TransferFailure(ErrorClass.SIZE_MISMATCH, text, server_of(url))

    with SourceFile(request.local_path, digests.chosen(policy, owner)) as source:
        with_retries(context, once)
        return Outcome(source.size_bytes, moved, 0.0, "size", dict(source.digests))


def _put(exchanger: Exchanger, url: str, source: SourceFile, context: Context, moved: int) -> int:
    parts = urlsplit(url)
    folder, _, name = parts.path.rpartition("/")
    temporary = f".{secrets.token_hex(8)}.part"
    plain = unquote(name)
    if "\r" in plain or "\n" in plain:
        raise TransferFailure(ErrorClass.BAD_URL, "FTP cannot carry a line break in a file name")
    options = {
        pycurl.READFUNCTION: source.read,
        pycurl.SEEKFUNCTION: source.seek,
        pycurl.INFILESIZE_LARGE: source.size_bytes,
        pycurl.FTP_CREATE_MISSING_DIRS: 2,
        pycurl.POSTQUOTE: [f"RNFR {temporary}", f"RNTO {plain}"],
    }
    target = urlunsplit(parts._replace(path=f"{folder}/{temporary}"))
    size = source.size_bytes
    return exchanger.run("PUT", target, context, options=options, upload_bytes=size, before_bytes=moved).sent_bytes


def _size(exchanger: Exchanger, url: str, context: Context) -> int:
    answer = exchanger.run("HEAD", url, context)
    length = answer.headers.get("content-length", "")
    return int(length) if length.isdigit() else -1
