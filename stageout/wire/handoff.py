"""Messages of a hand-off: plugin (client) and sandbox manager over a Unix stream socket.

A frame is a 4-byte big-endian length and that many bytes of JSON. The dialogue is::

    plugin                                   manager
    offer  (files in chunks of <= 1000)  ->            who is the peer? consent? room? a data slot?
                                         <-  go        ticket and directory for the links   (or: refuse, reason, code)
    copy   (bytes that cannot be linked) ->            is there room for a copy?
                                         <-  go        seconds that the copy may take       (or: refuse)
    too-slow                             ->            the copy would take longer
                                         <-  refuse
    linking (at least every second)      ->            nothing: the plugin is alive
    linked (names = positions in offer,  ->            moves the directory into its own tree, writes the ledger
      credential-N the Nth credential)
                                         <-  accepted  the receipt: ACCEPTED is durable      (or: refuse)

``copy`` comes only where a file could neither be linked nor cloned; all the others are linked then.

The doctor starts the same dialogue as root, or as the manager's own user: ``offer`` then has a field ``probe`` with the
name of a schedd, and the answer to ``linked`` is ``probed``: everything was done but the record, and nothing is left.

The socket is ``SPOOL/run/NAME``; the name comes from the execute directory (:func:`socket_name`), so a plugin never
talks to the manager of another startd. File names never travel as names of links: link ``17`` is the file at
position 17 of the offer. Local paths may hold any byte but NUL: they travel as JSON strings with surrogate escapes
(PEP 383).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from _socket import socket

VERSION = 1
MAX_FRAME_BYTES = 4 * 1024 * 1024
FILES_PER_FRAME = 1000
MAX_CREDENTIALS = 50
MAX_CREDENTIAL_BYTES = 256 * 1024
MAX_ADS_CHARS = 512 * 1024
_MOST_CODE_CHARS = 40
_LENGTH = struct.Struct(">I")


class BadMessage(Exception):
    """The other side sent a message that violates the protocol."""


class OfferedFile(NamedTuple):
    """One file of an offer.

    :param url: HTCondor's destination URL.
    :param local_path: absolute path in the scratch directory.
    :param size_bytes: size at the time of the offer.
    """

    url: str
    local_path: str
    size_bytes: int


class OfferedCredential(NamedTuple):
    """One credential of an offer; its content never travels in a message.

    :param kind: "token" (``_CONDOR_CREDS/SERVICE.use``) or "proxy" (X.509).
    :param service: name of the file without ``.use``; "" for a proxy.
    """

    kind: str
    service: str
    size_bytes: int

    @property
    def file_name(self) -> str:
        """Name of the credential's file in a directory of credentials."""
        return f"{self.service}.use" if self.kind == "token" else "x509_proxy"


class TransferContext(NamedTuple):
    """Data that the plugin needs besides the files, and that is deleted at the end of the job.

    :param job_ad: attributes of the job's ad that the plugin may read, an ad in the new syntax; "" for none.
    :param plugin_data: ``PluginData`` and ``METHOD_PluginData`` from HTCondor, in the same syntax.
    """

    credentials: tuple[OfferedCredential, ...] = ()
    job_ad: str = ""
    plugin_data: str = ""


_NOTHING = TransferContext()


def credential_link(number: int) -> str:
    """Name the link of the offer's credential of this number."""
    return f"credential-{number}"


class Receipt(NamedTuple):
    """Proof of custody, carried to the access point in the plugin's result ads (DeveloperData.StageOutReceipt).

    :param ticket: random name of this hand-off, 32 hexadecimal digits.
    :param manager_name: name of the manager that has custody, as in its report ad.
    :param manager_key: public key of the manager ("" until reports are signed).
    :param files: number of files taken over.
    :param size_bytes: their sum.
    """

    ticket: str
    manager_name: str
    manager_key: str
    files: int
    size_bytes: int

    def as_attributes(self) -> dict[str, Any]:
        """Convert the fields to ClassAd attributes (architecture, "Who speaks the truth")."""
        return {
            "Ticket": self.ticket,
            "ManagerName": self.manager_name,
            "ManagerKey": self.manager_key,
            "Files": self.files,
            "Bytes": self.size_bytes,
        }


def socket_name(execute_dir: str) -> str:
    """Name the socket of the manager that serves jobs below ``execute_dir`` (symbolic links are resolved)."""
    return _sha256(os.fsencode(os.path.realpath(execute_dir)))[:16] + ".sock"


def _sha256(data: bytes) -> str:
    """Compute the digest by the interpreter's own module if it has one, because hashlib loads OpenSSL while a job
    waits.
    """
    for name in ("_sha2", "_sha256"):  # from Python 3.12 on, and before
        try:
            return str(__import__(name).sha256(data).hexdigest())
        except ImportError:
            continue
    import hashlib

    return hashlib.sha256(data).hexdigest()


def accepted_receipt(message: dict[str, Any]) -> Receipt:
    """Read the receipt in an ``accepted`` frame.

    :raises BadMessage: wrong shape.
    """
    row = message.get("receipt")
    if message["op"] == "accepted" and isinstance(row, dict):
        texts = [row.get(name) for name in ("ticket", "manager_name", "manager_key")]
        counts = [row.get(name) for name in ("files", "size_bytes")]
        if all(isinstance(text, str) for text in texts) and all(type(count) is int for count in counts):
            return Receipt(*texts, *counts)  # type: ignore[arg-type]
    raise BadMessage(f"expected 'accepted' with a receipt, got {message['op']!r}")


def accepted_message(receipt: Receipt) -> dict[str, Any]:
    """Make the ``accepted`` frame."""
    row = {
        "ticket": receipt.ticket, "manager_name": receipt.manager_name, "manager_key": receipt.manager_key,
        "files": receipt.files, "size_bytes": receipt.size_bytes,
    }  # fmt: skip
    return {"op": "accepted", "receipt": row}


def refusal(reason: str, code: str) -> dict[str, Any]:
    """Make the ``refuse`` frame. :param code: of the reason (:mod:`stageout.core.synchronous`)."""
    return {"op": "refuse", "reason": reason, "code": code}


def refused_code(message: dict[str, Any]) -> str:
    """Return the code of a ``refuse`` frame; "" for a manager that sends none."""
    code = message.get("code")
    return code if isinstance(code, str) and code.isalpha() and len(code) <= _MOST_CODE_CHARS else ""


def send_frame(sock: socket, message: dict[str, Any]) -> None:
    """Send one frame (blocking, within the socket's time-out)."""
    sock.sendall(encode_frame(message))


def encode_frame(message: dict[str, Any]) -> bytes:
    """Encode one frame. :raises BadMessage: it is longer than a frame may be."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    if len(body) > MAX_FRAME_BYTES:
        raise BadMessage(f"a frame of {len(body)} bytes is above the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def receive_frame(sock: socket) -> dict[str, Any]:
    """Receive one frame (blocking, within the socket's time-out).

    :raises BadMessage: not a frame. :raises EOFError: the other side closed.
    """
    (length,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size))
    return decode_body(_receive_exactly(sock, checked_length(length)))


def checked_length(length: int) -> int:
    """Return the ``length`` of a frame's body in bytes. :raises BadMessage: it exceeds the limit."""
    if length > MAX_FRAME_BYTES:
        raise BadMessage(f"a frame of {length} bytes is above the limit of {MAX_FRAME_BYTES}")
    return length


def decode_body(body: bytes) -> dict[str, Any]:
    """Decode the message in a frame's body. :raises BadMessage: the body is invalid."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as problem:
        raise BadMessage(f"not JSON: {problem}") from None
    if not isinstance(message, dict) or not isinstance(message.get("op"), str):
        raise BadMessage("a message is an object with a string 'op'")
    return message


def _receive_exactly(sock: socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = sock.recv(count - len(parts))
        if not part:
            raise EOFError("the other side closed the connection")
        parts += part
    return bytes(parts)


def offer_frames(
    files: Sequence[OfferedFile], plugin: str, context: TransferContext = _NOTHING
) -> Iterator[dict[str, Any]]:
    """Make the frames of an offer: a head with the totals, then the files in chunks.

    :param plugin: absolute path of the plugin executable that the starter called.
    """
    total = sum(item.size_bytes for item in files)
    yield {
        "op": "offer", "version": VERSION, "plugin": plugin, "files": len(files), "size_bytes": total,
        "credentials": [[item.kind, item.service, item.size_bytes] for item in context.credentials],
        "job_ad": context.job_ad, "plugin_data": context.plugin_data,
    }  # fmt: skip
    for start in range(0, len(files), FILES_PER_FRAME):
        chunk = files[start : start + FILES_PER_FRAME]
        yield {"op": "files", "files": [[item.url, item.local_path, item.size_bytes] for item in chunk]}


def offered_files(message: dict[str, Any]) -> list[OfferedFile]:
    """Read the files in one ``files`` frame.

    :raises BadMessage: wrong shape.
    """
    rows = message.get("files")
    if not isinstance(rows, list) or len(rows) > FILES_PER_FRAME:
        raise BadMessage(f"'files' is a list of at most {FILES_PER_FRAME} rows")
    return [_offered_file(row) for row in rows]


def _offered_file(row: Any) -> OfferedFile:
    if isinstance(row, list) and len(row) == 3:
        url, local_path, size_bytes = row
        if isinstance(url, str) and isinstance(local_path, str) and type(size_bytes) is int and size_bytes >= 0:
            return OfferedFile(url, local_path, size_bytes)
    raise BadMessage("a row of 'files' is [url, local path, size in bytes]")


def offered_context(message: dict[str, Any]) -> TransferContext:
    """Read the context in an ``offer`` frame.

    :raises BadMessage: wrong shape, or too much.
    """
    rows = message.get("credentials", [])
    ads = [message.get(name, "") for name in ("job_ad", "plugin_data")]
    if not isinstance(rows, list) or len(rows) > MAX_CREDENTIALS:
        raise BadMessage(f"'credentials' is a list of at most {MAX_CREDENTIALS} rows")
    if not all(isinstance(text, str) and text.isascii() and len(text) <= MAX_ADS_CHARS for text in ads):
        raise BadMessage(f"'job_ad' and 'plugin_data' are ASCII texts of at most {MAX_ADS_CHARS} characters")
    credentials = tuple(_offered_credential(row) for row in rows)
    if len({item.file_name for item in credentials}) < len(credentials):
        raise BadMessage("a credential is offered twice")
    return TransferContext(credentials, *ads)


def _offered_credential(row: Any) -> OfferedCredential:
    if isinstance(row, list) and len(row) == 3:
        kind, service, size_bytes = row
        if isinstance(service, str) and type(size_bytes) is int and 0 <= size_bytes <= MAX_CREDENTIAL_BYTES:
            if kind == "token" and is_service(service):
                return OfferedCredential(kind, service, size_bytes)
            if kind == "proxy" and not service:
                return OfferedCredential(kind, service, size_bytes)
    raise BadMessage("a row of 'credentials' is [kind, service, size in bytes]")


def is_service(name: str) -> bool:
    """Tell whether a text has letters, digits, ``_`` and ``-`` only, and so is safe as a file name."""
    return 0 < len(name) <= 200 and name.isascii() and name.replace("_", "a").replace("-", "a").isalnum()
