"""Matters that need a person, each with what to do. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from stageout.core.errors import ErrorClass
from stageout.core.explanations import EXPLANATIONS
from stageout.core.states import State, plain_word
from stageout_web.format import count, duration
from stageout_web.model import LEFT, TROUBLE, Pool

#: An agent sends a notice every minute; a manager sends a report every five minutes.
AGENT_SILENT_S = 300
SERVICE_SILENT_S = 660
#: A sandbox should be confirmed after this time (STAGEOUT_CONFIRM_TIMEOUT).
UNCONFIRMED_S = 3600


class Matter(NamedTuple):
    """Something that needs a person.

    :param title: one sentence. :param action: next step; text between backquotes is a command.
    :param view, query: page with the objects that are affected. :param outputs: number of job outputs affected.
    """

    title: str
    action: str
    view: str
    query: Mapping[str, str]
    outputs: int


def matters(pool: Pool) -> list[Matter]:
    """Return all matters, the most outputs first."""
    found = [
        *_failed(pool), *_unreachable(pool), *_unconfirmed(pool), *_silent_nodes(pool), *_silent_agents(pool),
        *_left(pool),
        *_routers(pool), *_policies(pool),
    ]  # fmt: skip
    return sorted(found, key=lambda matter: -matter.outputs)


def _failed(pool: Pool) -> Iterator[Matter]:
    """Yield failed output by class of the error and server. Lost output has a row of its own."""
    groups = Counter(
        (box.state == State.LOST, box.error_code, box.server) for _, box in pool.boxes() if box.group == TROUBLE
    )
    for (is_lost, code, server), number in groups.items():
        where = f" for {server}" if server else ""
        if is_lost:
            title = f"{count(number, 'output')}{where} lost."
            yield Matter(title, "Nothing: the agent runs these jobs again.", "jobs", {"state": "Lost"}, number)
            continue
        explanation = EXPLANATIONS[ErrorClass.from_code(code)]
        query = {"state": State.FAILED.value, "error": str(code), "server": server}
        yield Matter(
            f"{count(number, 'output')}{where} failed. {explanation.happened}",
            explanation.action,
            "jobs",
            query,
            number,
        )


def _unreachable(pool: Pool) -> Iterator[Matter]:
    tallies = pool.by_server()
    for server, reports in pool.troubled_servers().items():
        since_at = min(report.since_at for _, report in reports)
        title = (
            f"{server} cannot be reached from {count(len(reports), 'node')} "
            f"for {duration(pool.now_at - since_at)}. Its outputs wait."
        )
        action = "Ask the administrator of the server. The nodes try again by themselves."
        tally = tallies.get(server)
        outputs = tally.waiting + tally.moving if tally else 0
        yield Matter(title, action, "destination", {"server": server}, outputs)


def _unconfirmed(pool: Pool) -> Iterator[Matter]:
    late_at = pool.now_at - UNCONFIRMED_S
    schedds = Counter(
        box.schedd for _, box in pool.boxes() if box.state == State.ACCEPTED and 0 < box.accepted_at < late_at
    )
    for schedd, number in schedds.items():
        title = f"{count(number, 'output')} of {schedd} without confirmation for more than an hour."
        action = f"Look into the log of the agent on {schedd} (`ScheddAgentLog`). Jobs that still run are in order."
        yield Matter(title, action, "jobs", {"state": State.ACCEPTED.value, "q": schedd}, number)


def _silent_nodes(pool: Pool) -> Iterator[Matter]:
    for node in pool.silent_nodes():
        total = node.total()
        title = f"{node.host} sent no report for {duration(pool.now_at - node.heard_at)}."
        action = (
            "See whether the node is up. Its output is taken for lost after `STAGEOUT_LEASE` at the latest, and the "
            "jobs run again."
        )
        yield Matter(title, action, "node", {"name": node.name}, total.waiting + total.moving + total.trouble)


def _silent_agents(pool: Pool) -> Iterator[Matter]:
    schedds = Counter(box.schedd for _, box in pool.boxes() if box.group != TROUBLE)
    for schedd, number in schedds.items():
        heard_at = pool.agents.get(schedd, 0)
        if pool.silent_s(heard_at) > AGENT_SILENT_S:
            title = f"The agent of {schedd} sends no notices. {count(number, 'output')} may wait for it."
            action = f"Start it on {schedd}: `condor_on -daemon SCHEDD_AGENT`"
            yield Matter(title, action, "jobs", {"q": schedd}, number)


def _left(pool: Pool) -> Iterator[Matter]:
    """Yield output whose jobs have left the queue: no job shows what becomes of it."""
    for schedd, states in pool.left.items():
        number = sum(states.values())
        parts = ", ".join(f"{found} {plain_word(state)}" for state, found in states.items())
        title = f"{count(number, 'output')} of jobs that have left the queue of {schedd}: {parts}."
        action = "Nobody waits for it in the queue. With owners and reasons: `stageout status --all` on that machine."
        yield Matter(title, action, "jobs", {"q": schedd, "group": LEFT}, number)


def _routers(pool: Pool) -> Iterator[Matter]:
    """Yield routers that cannot deliver files in their custody."""
    for router in pool.routers.values():
        failing = [one for one in router.report.custody if one.problems]
        if failing:
            files = count(sum(one.files for one in failing), "file")
            title = f"Router {router.name} cannot deliver to all destinations. {files} in its custody may wait."
            action = "Its page names the destinations. The router tries again by itself."
            yield Matter(title, action, "router", {"name": router.name}, 0)


def _policies(pool: Pool) -> Iterator[Matter]:
    """Yield services whose policy or settings cannot be used."""
    for service in pool.policies.values():
        if not (service.report.is_policy_ok and service.report.is_reconfig_ok):
            title = f"The service {service.name} cannot use its configuration."
            action = "Look into its log (`StageoutPolicyLog`), mend the setting, and run `condor_reconfig`."
            yield Matter(title, action, "policy", {}, 0)
