"""Reasons why output is not delivered yet, in one sentence of the page's own: without words of servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from stageout.core.errors import ErrorClass
from stageout.core.reasons import FAILURES
from stageout.core.states import State
from stageout_web.model import MOVING, TROUBLE, WAITING, Node, Pool, SandboxSummary

_WAITS = {
    State.ACCEPTED.value: "Waits for the access point's confirmation.",
    State.CONFIRMED.value: "Waits for a free data slot.",
    State.LEASED.value: "The transfer begins.",
    State.HANDED_OVER.value: "Routers deliver it.",
}
#: Reasons of output that only waits its turn come after all others.
_USUAL = frozenset(_WAITS.values())


def happened_now(code: int) -> str:
    """Return what happened to output that may still be delivered. :param code: of an error class."""
    text = FAILURES[ErrorClass.from_code(code)].happened
    return text.replace(", in any attempt", "").replace(", in every attempt", "")


def reason(sandbox: SandboxSummary, is_silent: bool, away: frozenset[str]) -> str:
    """Return why a sandbox is not delivered; "" for one that is, or is being sent.

    :param is_silent: its node sends no reports. :param away: servers that the node cannot reach.
    """
    if sandbox.group == TROUBLE:
        if sandbox.state == State.LOST:
            return "The output was lost. The agent runs the job again."
        return FAILURES[ErrorClass.from_code(sandbox.error_code)].happened
    if sandbox.group not in (WAITING, MOVING):
        return ""
    if is_silent:
        return "The node sends no reports."
    if sandbox.is_paused:
        return "Paused on request."
    if sandbox.state == State.RETRY_WAIT:
        return happened_now(sandbox.error_code)
    if sandbox.state == State.CONFIRMED and sandbox.server in away:
        return "The node cannot reach the destination."
    return _WAITS.get(sandbox.state, "")


class Why:
    """Reasons of the outputs of a pool, at one moment."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._nodes: dict[int, tuple[bool, frozenset[str]]] = {}

    def of(self, node: Node, sandbox: SandboxSummary) -> str:
        """Return why a sandbox of a node is not delivered."""
        facts = self._nodes.get(id(node))
        if facts is None:
            away = frozenset(one.server for one in node.servers)
            facts = self._nodes[id(node)] = self._pool.is_silent(node), away
        return reason(sandbox, *facts)

    def all(self) -> Iterator[tuple[SandboxSummary, str]]:
        """Yield all sandboxes that wait, with their reasons."""
        for node, sandbox in self._pool.sandboxes():
            if text := self.of(node, sandbox):
                yield sandbox, text


class Reasons:
    """The reasons of some outputs."""

    def __init__(self) -> None:
        self._failed, self._others = Counter[str](), Counter[str]()

    def add(self, sandbox: SandboxSummary, text: str) -> None:
        """Count a sandbox."""
        (self._failed if sandbox.group == TROUBLE else self._others)[text] += 1

    def main(self) -> str:
        """Return the most frequent reason of failed output, else of output that does not only wait its turn."""
        unusual = Counter({text: number for text, number in self._others.items() if text not in _USUAL})
        for found in (self._failed, unusual, self._others):
            if found:
                return min(found, key=lambda text: (-found[text], text))
        return ""
