"""Where operations that come to a router end: in its own tree, with a plugin, or in its spool on the way elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from overlay_router.copying.copies import Copies
from overlay_router.custodians.custodian import Custodian
from overlay_router.custodians.spool import FIRST_EGRESS_TID, FIRST_TID
from overlay_router.data.jobs import Report
from overlay_router.delivery.egress import Egress
from overlay_router.local.destination import Destination
from overlay_router.local.parts import Parts
from overlay_router.local.replies import Attached, Reply
from overlay_router.local.small_files import Arrived
from overlay_router.local.store import Transfer
from overlay_router.operations.custodian import MakesCustodian
from overlay_router.operations.terminal import MakesTerminal
from stageout.overlay.wire import messages
from stageout.overlay.wire.frames import BadFrame
from stageout.overlay.wire.messages import Message
from stageout.overlay.wire.packs import MAX_FILES, PackedFile


@dataclass(frozen=True)
class Ends:
    """A destination, a custodian, what plugins deliver; or none of it: a relay. Used in one thread.

    :param copies: of files of the destination, to other routers. :param operations: makes the role
        for those that come by HTTP and end here. :param custody: of those that come by HTTP for other routers.
    """

    destination: Destination | None = None
    custodian: Custodian | None = None
    egress: Egress | None = None
    copies: Copies | None = None
    operations: MakesTerminal | None = None
    custody: MakesCustodian | None = None
    _parts: Parts = field(default_factory=Parts, init=False)

    def __bool__(self) -> bool:
        return bool(self._all)

    @property
    def _all(self) -> list[Destination | Custodian]:
        return [end for end in (self.destination, self.custodian, self.egress) if end is not None]

    @property
    def epoch(self) -> str:
        """Of the destination's store, "" without one."""
        return self.destination.epoch if self.destination is not None else ""

    def goes_out(self, path: str) -> bool:
        """Tell whether a name belongs to what plugins deliver."""
        return self.egress is not None and self.egress.serves(path)

    def elsewhere(self, path: str) -> messages.Answer | None:
        """Return why a name that plugins deliver cannot be looked at here; None for any other."""
        return self.egress.refusal(path) if self.egress is not None else None

    def open(self, ask: messages.Open, peer: str, digest: str) -> Reply:
        """The answer to an OPEN. :param digest: the kind of digests that the peer uses."""
        end = self._end_for(ask)
        return end.open(ask, peer, digest) if end else Reply(peer, _nowhere(ask))

    def decide(self, message: Message, peer: str, digest: str) -> list[Reply]:
        """Answer a message of a control connection. :param digest: the kind of digests that the peer uses.

        :raises BadFrame: it is not for a router.
        """
        if isinstance(message, messages.Operation):
            to = self._end_for(message)
            if isinstance(to, Custodian):
                return to.operate(message, peer, digest)
            return to.operate(message, peer) if to else [Reply(peer, _nowhere(message))]
        if isinstance(message, messages.Low):
            for one in (self.copies, *self._all):
                if one is not None:
                    one.low(message)
            return []
        if isinstance(message, messages.Copy):
            return self.copies.take(message, peer) if self.copies else [Reply(peer, _carries_nothing(message))]
        if not isinstance(message, (messages.Cancel, messages.Status)):
            raise BadFrame(f"{type(message).__name__} is not for a terminal")
        if isinstance(message, messages.Status) and message.files:
            return [Reply(peer, self._pack_status(message))]
        end = self._end_of(message.origin, message.seq)
        is_early = end is None or end is self.destination
        if isinstance(message, messages.Cancel) and not message.data_only and is_early and self.custodian is not None:
            self.custodian.cancel_early(message, peer)
        if end is None:
            return [Reply(peer, messages.Result(message.origin, message.seq, "unknown"))]
        return end.cancel(message, peer) if isinstance(message, messages.Cancel) else end.status(message, peer)

    def _pack_status(self, ask: messages.Status) -> Message:
        """The outcome of a pack, wherever its files end."""
        if ask.files > MAX_FILES:
            raise BadFrame(f"no pack has {ask.files} files")
        for end in self._all:
            found = end.packed(ask)
            if found is not None:
                return found
        held = self.custodian.packs.custody(ask.origin, ask.seq, ask.files) if self.custodian is not None else None
        waits = self.egress is not None and self.egress.gathers(ask.origin, ask.seq)
        return held or messages.Result(ask.origin, ask.seq, "pending" if waits else "unknown")

    def reason_against(self, pack: messages.Pack) -> str:
        """Return why a pack cannot be taken here, "" if it can."""
        if pack.terminal:
            return "" if self.custodian is not None else "this router takes nothing into custody"
        if self.destination is not None or self._all_go_out(pack):
            return ""
        return "unpacked" if self._any_goes_out(pack) else "this router has no tree of its own"

    def _any_goes_out(self, pack: messages.Pack) -> bool:
        return self.egress is not None and any(map(self.goes_out, pack.paths))

    def _all_go_out(self, pack: messages.Pack) -> bool:
        return self.egress is not None and all(map(self.goes_out, pack.paths))

    def apart(self, batch: Sequence[Arrived]) -> list[list[Arrived]]:
        """The packs of each end by themselves: what fails at one does not concern the others."""
        groups: dict[tuple[bool, bool, bool], list[Arrived]] = {}
        for one in batch:
            onward, out = bool(one.pack.terminal), self._any_goes_out(one.pack)
            group = (True, False, False) if onward else (False, out, out and self._all_go_out(one.pack))
            groups.setdefault(group, []).append(one)
        return list(groups.values())

    def is_elsewhere(self, ask: messages.Cancel, arrived: Arrived) -> bool:
        """Tell whether it is about a file of this pack, which does not end in the tree: that remembers it without the
        pack.

        The tree hears it at once, so that what waits for the disk is not executed.
        """
        pack = arrived.pack
        covers = pack.origin == ask.origin and pack.seq <= ask.seq < pack.seq + len(pack.paths)
        return covers and (bool(pack.terminal) or self._any_goes_out(pack))

    def pack(self, batch: Sequence[Arrived]) -> list[Reply]:
        """Take packs of small files: into custody for other terminals, to be delivered by plugins, or into the tree.

        :raises OSError: the disk fails; ask again.
        """
        replies: list[Reply] = []
        onward = [arrived for arrived in batch if arrived.pack.terminal]
        if onward:
            assert self.custodian is not None
            replies += self.custodian.take(onward)
        here = list[Arrived]()
        for one in batch:
            if self._all_go_out(one.pack) and not one.pack.terminal:
                assert self.egress is not None
                replies += self.egress.pack([one])
            elif self._any_goes_out(one.pack) and not one.pack.terminal:
                replies += self._mixed(one)
            elif not one.pack.terminal:
                here.append(one)
        if here:
            assert self.destination is not None
            replies += self.destination.pack(here)
        return replies

    def _mixed(self, arrived: Arrived) -> list[Reply]:
        """A pack of which some files are for plugins, and the others for the tree.

        The plugins' end takes theirs, and answers for all: it records what became of the others, too.
        """
        assert self.egress is not None
        assert self.destination is not None
        pack = arrived.pack
        out = [file for file in arrived.files if self.goes_out(file.path)]
        answered = self.egress.pack([arrived._replace(files=out)])
        if answered:
            return answered
        runs = groupby(arrived.files, lambda file: self.goes_out(file.path))
        mine = [_part(arrived, list(files)) for goes_out, files in runs if not goes_out]
        replies = self.destination.pack(mine)
        seqs = [file.seq for one in mine for file in one.files]
        results = self.destination.results_of(pack.origin, seqs)
        others = [reply for reply in replies if not isinstance(reply.message, (messages.Packed, messages.NoSpace))]
        return others + self.egress.note(pack, arrived.peer, seqs, results)

    def attach(self, tid: int) -> Attached | None:
        """The file of a live transfer; None for a number that is closed."""
        end = self._holder(tid)
        return end.attach(tid) if end else None

    def sender_of(self, tid: int) -> str:
        """The sender of a live transfer's data, "" for a number that is closed."""
        return next((item.sender for item in self.transfers() if item.tid == tid), "")

    def record(self, report: Report) -> tuple[Report, list[Reply], bool]:
        """Record what a worker reports, with the blocks that its parts make whole. All of it is durable on return.

        :return: the report with those blocks; what is to be said; whether all blocks are recorded now.
        :raises OSError: it is to be reported again.
        """
        found = self.attach(report.tid) if report.parts else None
        if found is not None:
            parted = {start // found.transfer.ask.block_bytes for start, _ in report.parts}
            report = self._parts.put_together(report, found, self._among(report.tid, parted))
        if not report.blocks:
            return report, [], False
        replies = self.staged(report.tid, [(block, bytes.fromhex(digest)) for block, digest in report.blocks])
        self._parts.recorded(report.tid, (block for block, _ in report.blocks))
        return report, replies, self.is_whole(report.tid)

    def written_late(self, report: Report) -> list[Reply]:
        """Blocks were written just before nothing more of a file was. If one is not what was recorded, all come again.

        A custodian, or who has plugins deliver, looks at what it has before that goes on. :raises OSError: as of
        :meth:`record`.
        """
        end = self._holder(report.tid)
        if not isinstance(end, Destination):
            return []
        found = end.attach(report.tid) if report.parts else None
        if found is not None:
            parted = {start // found.transfer.ask.block_bytes for start, _ in report.parts}
            report = self._parts.put_together(report, found, end.among(report.tid, parted))
        return end.written_late(report.tid, {block: bytes.fromhex(digest) for block, digest in report.blocks})

    def _among(self, tid: int, blocks: Collection[int]) -> Collection[int]:
        """Return which of these blocks are recorded where a file ends; a custodian's are checked when they go on."""
        end = self._holder(tid)
        return end.among(tid, blocks) if isinstance(end, (Destination, Egress)) else ()

    def staged(self, tid: int, blocks: Iterable[tuple[int, bytes]]) -> list[Reply]:
        """Blocks (position, digest) of a transfer whose bytes are on the disk."""
        end = self._holder(tid)
        return end.staged(tid, blocks) if end else []

    def is_whole(self, tid: int) -> bool:
        """Tell whether all blocks of a live transfer are recorded: nothing more may be written then."""
        end = self._holder(tid)
        return end is not None and end.is_whole(tid)

    def whole_of(self, message: messages.Operation) -> list[int]:
        """Transfers of an operation whose blocks are all recorded."""
        end = self._end_for(message)
        return end.whole_of(message.origin, message.seq) if end else []

    def whole(self, tid: int) -> list[Reply]:
        """All blocks are there and nobody writes any more: an operation that waits for them goes on."""
        self._parts.forget(tid)
        end = self._holder(tid)
        return end.whole(tid) if end else []

    def transfers(self) -> list[Transfer]:
        """Data that come now."""
        return [item for end in self._all for item in end.transfers()]

    def is_change(self, message: Message) -> bool:
        """Tell whether it changes names of the destination's tree."""
        if not isinstance(message, messages.Operation) or self.destination is None:
            return False
        return self._end_for(message) is self.destination

    def knows(self, origin: str, seq: int) -> bool:
        """Tell whether anything of an operation is, or was, here."""
        known = (one for one in (self.copies, *self._all) if one is not None)
        return any(one.knows(origin, seq) for one in known)

    def best_known(self, origins: Sequence[str], seq: int) -> list[str]:
        """Put first the origin that has an operation of that number here, as far as one has."""
        return sorted(origins, key=lambda origin: not self.knows(origin, seq))

    def inherit(self, said: str, known: str) -> None:
        """Operations of an origin were cancelled before the first of them came, which says whose they are."""
        if self.destination is not None:
            for seq in self.destination.unwanted(said):
                self.destination.cancel(messages.Cancel(known, seq), "")

    def _end_for(self, message: messages.Open | messages.Operation) -> Destination | Custodian | None:
        if message.terminal:
            return self.custodian
        names = (message.path, message.target) if isinstance(message, messages.Operation) else (message.path,)
        return self.egress if any(name and self.goes_out(name) for name in names) else self.destination

    def _end_of(self, origin: str, seq: int) -> Destination | Custodian | Copies | None:
        for end in (self.copies, self.custodian, self.egress):
            if end is not None and end.knows(origin, seq):
                return end
        return self.destination

    def _holder(self, tid: int) -> Destination | Custodian | None:
        if tid > FIRST_TID:
            return self.custodian
        return self.egress if tid > FIRST_EGRESS_TID else self.destination


def _part(arrived: Arrived, files: list[PackedFile]) -> Arrived:
    """Files of a pack that follow each other, as a pack of its own."""
    first, pack = files[0].seq - arrived.pack.seq, arrived.pack
    some = slice(first, first + len(files))
    mine = replace(
        pack, seq=files[0].seq, paths=pack.paths[some], sizes_bytes=pack.sizes_bytes[some], modes=pack.modes[some]
    )  # fmt: skip
    return arrived._replace(pack=mine, files=files)


def _carries_nothing(message: messages.Copy) -> messages.Result:
    reason = "this router has no key to show to others (STAGEOUT_ROUTER_NEIGHBOURS): it carries out no copies"
    return messages.Result(message.origin, message.seq, "failed", reason)


def _nowhere(message: messages.Open | messages.Operation) -> messages.Result:
    reason = "this router takes nothing into custody" if message.terminal else "this router has no tree of its own"
    return messages.Result(message.origin, message.seq, "failed", reason)
