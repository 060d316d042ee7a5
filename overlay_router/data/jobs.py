"""The messages between daemon and worker about connections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

#: Blocks, and as many parts, of one message: some 40 KiB. A socket takes none of more than about 200 KiB.
_TOLD_AT_ONCE = 512


@dataclass(frozen=True)
class Job:
    """The job for a connection.

    :param kind: "receive", "send", "send-pack" (files below a root), or "relay" between two connections; "close",
        without any: nothing more of that transfer is written; "hang-up": connections by which nothing more of it is
        written end; "end": connections of the key ``peer`` end, those alone whose ``ends`` is over by then, if that
        is given; "share", with the connection to a carrier: it sees
        what comes.
    :param tid: of what is received.
    :param size_bytes: of the file.
    :param block: the first one to send. :param blocks: how many at most, 0: all. :param start: and :param end: of the
        part of it that is sent, and nothing else; 0: it is no part.
    :param generation: of the file that is sent. :param mode: of that file.
    :param hop: address of the router that a relay passes on to. :param peer: name of the peer's key.
    :param ends: when its connections end, in Unix time; 0: never.
    :param cert: file of the certificate, of "tls" between a connection and a plain one. :param cert_key: of its key.
    :param host: of the other side, on the side that connects: then ``cert`` has the certificates that it trusts.
    :param flow: transfer that a relay passes on, with its owner, priority and deadline; of "send" all but the owner.
    :param to: address that files go to on this connection; of "relay": that comes back, and what ``flow`` says is for.
    :param nonce: of this router's WELCOME on the connection. :param paths: of the files of a pack.
    :param path: of the file that is sent, with :param mtime_ns: when it was found, and :param manifest: for FOUND.
    :param known: kind of the digests of its blocks from ``block`` on, which come in a third descriptor; "" for none.
    """

    kind: str
    tid: int = 0
    checksum: str = "crc32"
    digest: str = ""
    block_bytes: int = 0
    size_bytes: int = 0
    block: int = 0
    generation: int = 0
    mode: int = 0
    hop: str = ""
    peer: str = ""
    cert: str = ""
    cert_key: str = ""
    host: str = ""
    blocks: int = 0
    flow: str = ""
    owner: str = ""
    priority: int = 0
    deadline: int = 0
    nonce: str = ""
    to: str = ""
    paths: tuple[str, ...] = ()
    path: str = ""
    mtime_ns: int = 0
    manifest: str = ""
    known: str = ""
    start: int = 0
    end: int = 0
    ends: float = 0


@dataclass(frozen=True)
class Again:
    """The use of a connection when its job is done. :param peer: name of its key. :param nonce: of its WELCOME.

    :param ends: as of the job.

    :param host: that it comes from. :param frame: the ATTACH, GET or GET_PACK that came, in hexadecimal digits.
    """

    peer: str
    checksum: str
    digest: str
    nonce: str
    frame: str
    host: str = ""
    ends: float = 0


@dataclass(frozen=True)
class Report:
    """Blocks whose bytes are on the disk: position and digest in hexadecimal digits; or why it ended; or what a relay
    has passed on to a hop; or that a connection of a peer, for a transfer, has ended; or that nothing more of a
    transfer is written.

    :param parts: of blocks, on the disk too: where each begins in the file, and its length.
    :param digest: the kind that their blocks are to have.
    :param late: these were written just before nothing more of the transfer was, and are not known to be on the disk.
    :param damaged: path of a published file of which a block, :param block:, is not what it was.
    """

    tid: int
    blocks: tuple[tuple[int, str], ...] = ()
    parts: tuple[tuple[int, int], ...] = ()
    digest: str = ""
    problem: str = ""
    errno: int = 0
    hop: str = ""
    moved_bytes: int = 0
    ended: str = ""
    closed: bool = False
    late: bool = False
    damaged: str = ""
    block: int = 0

    def in_messages(self) -> Iterator[Report]:
        """The same in reports that are small enough for one message each: while a disk is slow, many blocks come."""
        yield replace(self, blocks=self.blocks[:_TOLD_AT_ONCE], parts=self.parts[:_TOLD_AT_ONCE])
        for start in range(_TOLD_AT_ONCE, max(len(self.blocks), len(self.parts)), _TOLD_AT_ONCE):
            end = start + _TOLD_AT_ONCE
            yield replace(self, blocks=self.blocks[start:end], parts=self.parts[start:end])
