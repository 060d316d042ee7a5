"""The answers of a router that change no file: look-ups, the data that a GET will send, lots, leases."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import replace

from overlay_router.copying.copier import Copier
from overlay_router.custodians.finding import Finding
from overlay_router.custodians.forwarder import OnDisk
from overlay_router.data.jobs import Job
from overlay_router.delivery.fetching import Fetching, awake
from overlay_router.delivery.leases import Leases
from overlay_router.ends import Ends
from overlay_router.line import Line
from overlay_router.local.destination import Destination
from overlay_router.local.replies import Published
from overlay_router.peers.greeting import Peer, Unwelcome
from overlay_router.peers.rights import Rights, outside
from stageout.core.clock import boot_clock_s
from stageout.core.errors import ErrorClass
from stageout.overlay.wire import frames, packs
from stageout.overlay.wire.blocks import PART_BYTES
from stageout.overlay.wire.fields import is_origin
from stageout.overlay.wire.frames import BadFrame
from stageout.overlay.wire.messages import BLOCK_BYTES, Answer, Get, GetPack, Lease, Leased, List, Lot, Reserved, Stat

_TAKEN_WITHIN_S = 60.0
#: Of a file that is sent, digests of so many blocks (1 TiB) are in memory; what is behind them is read instead.
_MOST_KNOWN = 1024 * 1024


class Questions:
    """Answers of one router.

    :param node: its name. :param ends: where operations end. :param rights: who may look at what.
    :param on_disk: runs a call in the thread that owns the disk. :param leases: that it gives, None for none.
    :param copier: that carries out copies, None where there is none.
    :param fetching: what plugins deliver, on its way back; None where there is nothing of the kind.
    """

    def __init__(
        self,
        node: str,
        ends: Ends,
        rights: Rights,
        on_disk: OnDisk,
        leases: Leases | None,
        copier: Copier | None,
        fetching: Fetching | None = None,
    ) -> None:
        self._node, self._ends, self._rights, self._on_disk = node, ends, rights, on_disk
        self._leases, self._copier, self._fetching = leases, copier, fetching
        self._finding = Finding(ends.custodian, on_disk)

    def tree(self, peer: Peer) -> Destination:
        """The router's own tree.

        :raises Unwelcome: it has none.
        """
        if self._ends.destination is None:
            text = f"{self._node} keeps no files of its own: name it as a gateway, not in a URL"
            raise Unwelcome(text, peer.checksum)
        return self._ends.destination

    def refusal(self, peer: Peer, ask: Stat | List | Get | GetPack) -> str:
        """Return why a peer may not look at that, "" if it may."""
        return self._rights.refusal(peer.key, ask, int(time.time()), peer.nonce)

    async def look_up(self, line: Line, ask: Stat | List) -> None:
        """Send what there is: one entry, or page by page as it is taken.

        :raises Unwelcome: there is no tree here. :raises asyncio.TimeoutError: a page was not taken for a minute.
        """
        refusal = self.refusal(line.peer, ask)
        elsewhere = self._ends.elsewhere(ask.path)
        if refusal:
            denied = ErrorClass.PERMISSION_DENIED.code
            line.send(Answer(code=denied, message=refusal, store=self._ends.epoch))
        elif isinstance(ask, Stat) and ask.terminal:
            line.send(await self._finding.entry(line.peer.key, ask))
        elif isinstance(ask, Stat) and self._ends.goes_out(ask.path):
            egress, path = self._ends.egress, ask.path
            assert egress is not None
            line.send(await self._on_disk(lambda: egress.entry(path)))
        elif elsewhere is not None:
            line.send(elsewhere)
        elif isinstance(ask, Stat):
            tree, asked = self.tree(line.peer), ask
            found = await self._on_disk(lambda: tree.look_up(asked))
            line.send(replace(found, bearer=self._copier.bearer if self._copier else ""))
        else:
            pages = self.tree(line.peer).entries(ask)
            while (page := await asyncio.to_thread(next, pages, None)) is not None:
                line.send(page)
                if page.more or line.writer.transport.get_write_buffer_size():
                    await asyncio.wait_for(line.writer.drain(), _TAKEN_WITHIN_S)
                if not page.more:
                    break

    async def file(self, peer: Peer, ask: Get, sock: socket.socket) -> Published:
        """The open file that a GET on that connection is answered with; it is the caller's to close.

        :raises ConnectionError: who asked has gone. :raises Unwelcome: it may not be read, or there is none.
        :raises BadFrame: it is not a part that can be asked for.
        """
        if (ask.start or ask.end) and (
            ask.blocks != 1 or ask.start % PART_BYTES or not ask.start < ask.end <= BLOCK_BYTES
        ):
            raise BadFrame(f"a GET of bytes {ask.start} to {ask.end} of {ask.blocks} blocks")
        refusal = self.refusal(peer, ask)
        if refusal:
            raise Unwelcome(refusal, peer.checksum, code=ErrorClass.PERMISSION_DENIED.code)
        if ask.terminal:
            found = await self._finding.file(peer.key, ask)
        elif self._fetching is not None and self._ends.goes_out(ask.path):
            checksum = frames.checksums()[peer.checksum]
            found = await awake(sock, checksum, ask.waits, self._fetching.file(ask, peer.key.name))
        else:
            tree = self.tree(peer)
            known = min(ask.blocks or _MOST_KNOWN, _MOST_KNOWN)
            found = await self._on_disk(lambda: tree.published(ask.path, ask.generation, ask.first_block, known))
        if isinstance(found, Answer):
            raise Unwelcome(found.message, peer.checksum, code=found.code)
        return found

    async def root(self, peer: Peer, ask: GetPack) -> int:
        """The directory that a GET_PACK is answered from; a descriptor, which is the caller's to close.

        :raises Unwelcome: not all of it may be read, or comes from there. :raises BadFrame: it asks for too much.
        """
        packs.check_asked(ask)
        refusal = self.refusal(peer, ask)
        if refusal:
            raise Unwelcome(refusal, peer.checksum, code=ErrorClass.PERMISSION_DENIED.code)
        if any(map(self._ends.goes_out, ask.paths)):
            text = "a plugin fetches some of these: ask for each by itself"
            raise Unwelcome(text, peer.checksum, code=ErrorClass.NOT_SUPPORTED.code)
        return self.tree(peer).root()

    async def lot(self, peer: Peer, ask: Lot) -> Reserved:
        """A lot reserved, renewed or released, or why not.

        :raises Unwelcome: there is no tree here. :raises BadFrame: its name is not one.
        """
        key, tree = peer.key, self.tree(peer)
        if not is_origin(ask.lot):
            raise BadFrame("a lot without 32 hexadecimal digits")
        refusal = "" if key.allows(ask.path) else outside(key, ask.path)
        if self._ends.goes_out(ask.path):
            refusal = "no space can be held for what a plugin delivers"
        if self._rights.insists:
            refusal = "this router takes nothing without a capability, and lots have none"
        if refusal:
            return Reserved(ask.lot, 0, 0, ErrorClass.PERMISSION_DENIED.code, refusal)
        return await self._on_disk(lambda: tree.lot(ask, key.name))

    async def lease(self, peer: Peer, ask: Lease) -> Leased:
        """The answer to a gateway that wants to deliver alone. Any router may be named as the one that gives leases.

        :raises BadFrame: it is not for this peer, or for this router.
        """
        if self._leases is None or not peer.key.is_router:
            raise BadFrame(f"the key {peer.key.name!r} is not marked as that of a router: it gets no leases")
        leases, name = self._leases, peer.key.name
        return await self._on_disk(lambda: leases.answer(name, ask, boot_clock_s()))


def sending_job(peer: Peer, ask: Get, found: Published) -> Job:
    """The work of a worker for a client that has asked for a file, of which the manifest is said where the client can
    compare it."""
    kind, manifest = found.content or ("", "")
    return Job(
        "send", 0, peer.checksum, peer.digest, BLOCK_BYTES, found.size_bytes, ask.first_block, found.generation,
        found.mode, blocks=ask.blocks, peer=peer.key.name, ends=peer.key.ends, nonce=peer.nonce, to=peer.host,
        priority=ask.priority, deadline=ask.deadline, flow=ask.flow, path=ask.path, mtime_ns=found.mtime_ns,
        manifest=manifest if kind == peer.digest else "", known=kind, start=ask.start, end=ask.end,
    )  # fmt: skip
