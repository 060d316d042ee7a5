"""The protocol class of ``plugins/gsiftp_plugin``: all files of a call in one list, each verified at its destination.

In globus-url-copy one refused file makes later files of the list fail. So the plugin moves failed files again, each by
itself, and a file that then fails does so for a reason of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes, urlsplit, urlunsplit

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.api import BatchProtocol, Outcome, Transfer
from stageout.plugin.urls import as_written, bare_url, host_of, safe_url
from stageout.protocols.gsiftp import proxy
from stageout.protocols.gsiftp.abilities import program_path
from stageout.protocols.gsiftp.dialogue import Dialogue
from stageout.protocols.gsiftp.program import Pair, Program, read_knobs

_POLICIES = ("off", "if-available", "required")
_SAMPLE = "sample_bytes"


@dataclass
class Move:
    """The transfer of one file.

    :param part: local name during the transfer. :param size_bytes: -1 while unknown. :param moved_bytes: over the
        network.
    """

    transfer: Transfer
    pair: Pair
    url: str
    part: Path
    local: Path
    policy: str
    size_bytes: int = -1
    modified_ns: int = 0
    moved_bytes: int = 0
    done: bool = False

    @property
    def host(self) -> str:
        """Return the server, for messages."""
        return host_of(self.url)

    def finish(self, result: Outcome | TransferFailure) -> None:
        """Report the result, and clean up after a failure."""
        self.done = True
        if isinstance(result, TransferFailure) and self.part != self.local:
            self.part.unlink(missing_ok=True)
        self.transfer.finish(result)


class GsiftpProtocol(BatchProtocol):
    """gsiftp and ftp."""

    def move(self, transfers: Sequence[Transfer], upload: bool, concurrency: int) -> None:
        """Move all files of a call; see the module docstring."""
        path = program_path(os.environ)
        moves = [move for move in (self._prepared(each, upload) for each in transfers) if move is not None]
        if not moves:
            return
        knobs = read_knobs(moves[0].transfer.context, concurrency)
        batch = _Batch(Program(path, knobs, upload), upload, knobs.streams)
        try:
            batch.run(moves)
        except BaseException:
            for move in moves:
                if not move.done and not upload:
                    move.part.unlink(missing_ok=True)
            raise

    def _prepared(self, transfer: Transfer, upload: bool) -> Move | None:
        try:
            return _prepare(transfer, upload)
        except TransferFailure as failure:
            transfer.finish(failure)
            return None


def _prepare(transfer: Transfer, upload: bool) -> Move:
    request = transfer.request
    url = as_written(bare_url(request.encoded_url))
    parts = urlsplit(url)
    if not parts.hostname or not parts.path.strip("/") or parts.path.endswith("/"):
        raise TransferFailure(ErrorClass.BAD_URL, f"{safe_url(url)} names no file on a host")
    if not unquote_to_bytes(parts.path).isascii():  # globus-url-copy cuts the name there without an error
        text = f"{safe_url(url)}: globus-url-copy takes only ASCII in names on a server; rename the file"
        raise TransferFailure(ErrorClass.NOT_SUPPORTED, text, parts.netloc)
    if parts.scheme.lower() == "gsiftp":
        proxy.checked(os.environ, parts.netloc)
    url = urlunsplit((parts.scheme.lower(), parts.netloc, parts.path, "", ""))
    local = Path(request.local_path)
    part = local if upload else local.with_name(f".{local.name[:100]}.{os.urandom(4).hex()}.part")
    place = "file://" + quote(os.fsencode(part))
    given = str(request.data.get("checksum_policy") or transfer.context.setting("CHECKSUM_POLICY", "if-available"))
    policy = given.strip().lower().replace("_", "-")
    if policy not in _POLICIES:
        text = f"checksum policy {given!r} does not exist: write {', '.join(_POLICIES)}"
        raise TransferFailure(ErrorClass.BAD_REQUEST, text)
    move = Move(transfer, Pair(place, url) if upload else Pair(url, place), url, part, local, policy)
    if upload:
        move.size_bytes, move.modified_ns = _stat(local)
    return move


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _stat(path: Path) -> tuple[int, int]:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
    except OSError as error:
        raise TransferFailure(ErrorClass.LOCAL_FILE, f"cannot read {path.name}: {error.strerror}") from None
    return status.st_size, status.st_mtime_ns


class _Batch:
    """All files of one call."""

    def __init__(self, program: Program, upload: bool, streams: int) -> None:
        self._program = program
        self._upload = upload
        self._streams = streams

    def run(self, moves: list[Move]) -> None:
        samples = [move for move in moves if _SAMPLE in move.transfer.request.data and not self._upload]
        whole = [move for move in moves if move not in samples]
        sizes = {int(move.transfer.request.data[_SAMPLE]) for move in samples}
        if len(samples) > 1 and len(sizes) == 1:
            self._program.transfer([move.pair for move in samples], _watch(samples), self._streams, *sizes)
        for move in samples:
            self._sample(move)
        if len(whole) > 1:
            self._program.transfer([move.pair for move in whole], _watch(whole), self._streams)
            self._settle(whole)
        for move in whole:
            if not move.done:
                self._alone(move)

    def _sample(self, move: Move) -> None:
        """Move only the first bytes of a file, for a measurement, which needs no verification."""
        most_bytes = int(move.transfer.request.data[_SAMPLE])
        size_bytes, dialogue = _size(move.part), Dialogue()
        if size_bytes != most_bytes:
            dialogue = self._program.transfer([move.pair], _watch([move]), self._streams, most_bytes)
            size_bytes = _size(move.part)
        if dialogue.errors or not size_bytes:
            move.finish(_failure(dialogue, move))
        else:
            move.finish(self._kept(move, size_bytes, "", ""))

    def _alone(self, move: Move) -> None:
        try:
            dialogue = self._program.transfer([move.pair], _watch([move]), self._streams)
            if dialogue.refusal is not None and dialogue.refusal.kind is ErrorClass.NOT_SUPPORTED and self._streams > 1:
                move.transfer.context.log("no parallel streams on this server", host=move.host)
                dialogue = self._program.transfer([move.pair], _watch([move]), 1)
            if not dialogue.errors:
                self._settle([move])
            if not move.done:
                move.finish(_failure(dialogue, move))
        except TransferFailure as failure:
            failure.server = failure.server or move.host
            move.finish(failure)

    def _settle(self, moves: Sequence[Move]) -> None:
        """Finish those files whose servers confirm them."""
        here = [move for move in moves if move.part.exists()]
        if not here:
            return
        digests = any(move.policy != "off" for move in here)
        said, differing = self._program.compare([move.pair for move in here], digests, _watch(here))
        for move in here:
            try:
                verified = self._verified(move, said, move.pair.target in differing)
            except TransferFailure as failure:
                move.finish(failure)
                continue
            if verified:
                move.finish(self._kept(move, move.part.stat().st_size, verified, said.digests.get(move.url, "")))

    def _verified(self, move: Move, said: Dialogue, differs: bool) -> str:
        """Verify a file. Return "md5" or "size"; "" if the server does not report the file.

        :raises TransferFailure: SOURCE_CHANGED, NOT_VERIFIED, CONTENT_MISMATCH.
        """
        size_bytes, modified_ns = _stat(move.part)
        if self._upload and (size_bytes, modified_ns) != (move.size_bytes, move.modified_ns):
            text = f"{move.local.name} changed while it was being sent: let the job end its writing before it exits"
            raise TransferFailure(ErrorClass.SOURCE_CHANGED, text)
        if said.sizes_bytes.get(move.url) != size_bytes:
            return ""
        if move.url in said.digests and move.policy != "off":
            if differs:
                text = f"{move.host} has other content of {move.local.name} than was moved: its MD5 differs"
                raise TransferFailure(ErrorClass.CONTENT_MISMATCH, text, move.host)
            return "md5"
        if move.policy == "required":
            text = f"{move.host} states no checksum of {move.local.name}, and the checksum policy is required"
            raise TransferFailure(ErrorClass.NOT_VERIFIED, text, move.host)
        return "size"

    def _kept(self, move: Move, size_bytes: int, verified: str, digest: str) -> Outcome | TransferFailure:
        """Rename a download to its final name. On return it is durable."""
        if not self._upload:
            try:
                with move.part.open("rb") as file:
                    os.fsync(file.fileno())
                move.part.replace(move.local)
            except OSError as error:
                return TransferFailure(ErrorClass.LOCAL_FILE, f"cannot keep {move.local.name}: {error.strerror}")
        digests = {"md5": digest} if verified == "md5" else {}
        facts = {"TransferHostName": move.host, "Streams": self._streams}
        return Outcome(
            size_bytes, max(size_bytes, move.moved_bytes), verified=verified, digests=digests, developer=facts
        )


def _watch(moves: Sequence[Move]) -> Callable[[int], None]:
    """Make the callback that reports progress to the framework, which may end the plugin."""
    only = moves[0] if len(moves) == 1 else None

    def watch(moved_bytes: int) -> None:
        if only is not None:
            only.moved_bytes = moved_bytes
        moves[0].transfer.context.progress(moved_bytes if only is not None else 0)

    return watch


def _failure(dialogue: Dialogue, move: Move) -> TransferFailure:
    """Return the failure of a file that did not arrive."""
    refusal = dialogue.refusal
    words = next(iter(dialogue.errors), "")
    if refusal is not None:
        return _refused(refusal.kind, refusal.code, refusal.text or words, move)
    if not dialogue.answers and not dialogue.began:
        text = f"globus-url-copy does not run on this node ({dialogue.first_words or 'no word of it'}): install it anew"
        return TransferFailure(ErrorClass.PLUGIN_BROKEN, text)
    if not dialogue.answers:
        from stageout.protocols.curl.names import lookup_failure

        kind, text = lookup_failure(urlsplit(move.url).hostname or "")
        if kind is ErrorClass.NAME_LOOKUP_FAILED:  # the name resolves now, so the connection failed
            kind, text = ErrorClass.CONNECT_FAILED, "no connection; is the server up, is a firewall in between?"
        return TransferFailure(kind, f"{move.host}: {text}", move.host)
    if dialogue.login and not dialogue.logged_in:
        text = f"{move.host} and this node do not trust each other's certificates: {words}; check X509_CERT_DIR"
        return TransferFailure(ErrorClass.TLS_UNTRUSTED, text, move.host)
    if dialogue.errors:
        return TransferFailure(ErrorClass.CONNECTION_LOST, f"{move.host}: {words}", move.host)
    text = f"{move.host} does not have all of {move.local.name} after the transfer"
    return TransferFailure(ErrorClass.SIZE_MISMATCH, text, move.host)


def _refused(kind: ErrorClass, code: int, words: str, move: Move) -> TransferFailure:
    text = f"{move.host} answered {code} to the transfer of {move.local.name}: {words}"
    if kind is ErrorClass.CREDENTIAL_REFUSED and move.url.startswith("gsiftp:"):
        if proxy.checked(os.environ, move.host).limited:
            text += (
                "; the proxy is a limited one: set DELEGATE_FULL_JOB_GSI_CREDENTIALS = True where the job is submitted"
            )
        else:
            text += "; is the subject of the certificate known there?"
    return TransferFailure(kind, text, move.host, developer={"FtpReplyCode": code})
