"""A terminal whose end is no tree of its own: files in a spool, until a transfer plugin has delivered them (rule 10).

To its senders it is a terminal: there is no CUSTODY, and RESULT comes when the plugin has verified the file. Inside it
is a spool like a custodian's, with the same records: what is whole and right is delivered again and again, also after a
restart, until it is at its destination, is refused there for good, or has expired. So it is delivered at least once.
"""

from __future__ import annotations

from collections.abc import Collection

from overlay_router import terminal
from overlay_router.custodian import Custodian
from overlay_router.deposits import Terminals
from overlay_router.destination import Reply
from overlay_router.lots import Spool
from overlay_router.spool import EgressStore, Held, Key
from overlay_router.states import Kind, Op, Outcome, Result
from overlay_router.terminal import Step
from overlay_router.tree import Tree
from stageout.core.clock import Clock
from stageout.core.errors import ErrorClass
from stageout.wire import overlay
from stageout.wire.egress import Targets
from stageout.wire.overlay import Answer, Open, Operation


class _Anybody(Terminals):
    """The names were judged already, by key or capability."""

    def reason_against(self, terminal: str, key: str) -> str:
        """None."""
        return ""


class Egress(Custodian):
    """What plugins deliver. :param targets: which names, and where to."""

    def __init__(self, store: EgressStore, tree: Tree, spool: Spool, targets: Targets, clock: Clock) -> None:
        super().__init__(store, tree, spool, _Anybody({}), "", clock)
        self.targets = targets

    def serves(self, path: str) -> bool:
        """Whether a name is delivered by a plugin, or is the directory of such names."""
        return self.targets.covers(path) is not None

    def refusal(self, path: str) -> Answer | None:
        """Why a name cannot be looked at or fetched here, None where it can."""
        target = self.targets.covers(path)
        if target is None:
            return None
        text = f"{path}: what is here is delivered to {target.shown} and not kept: look there"
        return Answer(code=ErrorClass.NOT_SUPPORTED.code, message=text)

    def open(self, ask: Open, peer: str, digest: str = "") -> Reply:
        """OPENED, with all blocks when the file is being delivered; NOSPACE, or the RESULT that is final."""
        held = self._held.get((ask.origin, ask.seq))
        transfer = self._store.transfer(held.tid) if held and not held.damaged else None
        if transfer is not None and transfer.sender == peer:
            return self._opened(transfer, peer)
        if ask.lot:
            return Reply(peer, overlay.Result(ask.origin, ask.seq, "failed", "lot"))
        return super().open(ask, peer, digest)

    def operate(self, operation: Operation, peer: str, digest: str) -> list[Reply]:
        """Take a PUBLISH when its data are whole; nothing else can be asked of a plugin."""
        final = self._final(operation, peer)
        if final is not None:
            return [Reply(peer, final)]
        reason = self._reason_against(operation)
        if reason:
            result = Result(Outcome.FAILED, reason, code=ErrorClass.NOT_SUPPORTED.code)
            return self._end(operation, peer, result)
        return _not_pending(super().operate(operation, peer, digest))

    def whole(self, tid: int) -> list[Reply]:
        """All blocks are there and nobody writes any more: the PUBLISH that waits for them is taken."""
        return _not_pending(super().whole(tid))

    def ready(self, busy: Collection[Key]) -> tuple[list[Held], list[Reply]]:
        """What may be delivered now, most urgent first, and answers for what may not be any more.

        Of files of one name only the oldest: they arrive in the order in which they were asked for.

        :param busy: what is being delivered.
        """
        first: dict[str, Held] = {}
        for held in sorted(self._held.values(), key=lambda one: one.taken_at):
            first.setdefault(held.operation.path, held)
        found: list[Held] = []
        replies: list[Reply] = []
        for held in first.values():
            if held.damaged or held.key in busy:
                continue
            record = self._store.record(held.operation.origin)
            step, result = terminal.judge(record, _op(held.operation), int(self._clock.wall_s()))
            if step is Step.EXECUTE:
                found.append(held)
            elif step is Step.RECORD and result is not None:
                replies += self.settle(held.key, result)
        return sorted(found, key=lambda one: (-one.operation.priority, one.taken_at)), replies

    def _reason_against(self, operation: Operation) -> str:
        target = self.targets.find(operation.path) or self.targets.find(operation.target)
        place = target.shown if target else "nowhere: it is not below any path that this gateway delivers"
        if operation.kind != "publish" or target is None:
            return f"{operation.kind} cannot be done: what is here goes to {place}"
        if operation.absent or operation.generation >= 0:
            return f"a precondition cannot be checked at {place}"
        return ""

    def _in_custody(self, held: Held, peer: str) -> Reply:
        return Reply(peer, overlay.Result(*held.key, "pending"))


def _not_pending(replies: list[Reply]) -> list[Reply]:
    """Without what answers a STATUS only."""
    return [
        one for one in replies if not (isinstance(one.message, overlay.Result) and one.message.outcome == "pending")
    ]


def _op(operation: Operation) -> Op:
    """The operation as the terminal rule knows it."""
    return Op(
        int(operation.origin, 16), operation.seq, Kind(operation.kind), operation.path, expires=operation.expires,
        after=operation.after,
    )  # fmt: skip
