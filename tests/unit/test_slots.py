"""Data slots and batches: who is sent next, and who must not block whom; when a failed file is tried again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from sandbox_manager.custody.registry import Backlog, Registry
from sandbox_manager.report.reporter import sandbox_report
from sandbox_manager.rules import Limits, RetryRules, last_attempt_at
from sandbox_manager.scheduling.breaker import Flow
from sandbox_manager.scheduling.planner import Load, PlanInput, plan
from sandbox_manager.scheduling.retry import Verdict, decide_retry
from sandbox_manager.scheduling.slots import SlotUsage, is_stuck, positions_free
from stageout.core.errors import OF_NODE, UNREACHABLE, Advice, ErrorClass
from stageout.core.states import FileState, State
from stageout.model.batch import Batch, Part
from stageout.model.sandbox import OCCUPYING, Destination, Occupant, Sandbox, SlotKey, Waiting, occupant_of
from stageout.movers.results import Failure
from stageout.movers.schemes import method_of, split_url
from stageout.wire.custody import JobKey, Run

LIMITS = Limits(
    active=1, depth=2, cpus=4, movers=4, movers_per_server=2, movers_per_owner=4, batch_files=10, batch_bytes=1000,
    urgent_window_s=100,
)  # fmt: skip
PLACES = {
    1: Destination("/p", "https", "one"),
    2: Destination("/p", "https", "two"),
    3: Destination("/q", "dav", "one"),
}
NOW = 1000


TEMPLATE = Sandbox(
    id=0, run=Run("ap#1.0#1", 1, "a"), user="a", uid=1, gid=1, shared_uid=False, slot=SlotKey("ep", 1, 1),
    slot_name="s", priority=0, state=State.CONFIRMED, change=1, paused=False, reason="", error_code=0,
    named_tickets=(), accepted_at=0, confirmed_at=1, retried_at=0, ended_at=0, forgettable=False,
    tickets=("t",), freed=False, files_total=1, files_left=1, bytes_total=10, bytes_left=10, moving=0, failed=0,
    attempts=0, excused=0, waiting=(Waiting(1, 1, 10, 0),),
)  # fmt: skip


def box(
    number: int, slot: int | SlotKey = 0, state: State = State.CONFIRMED, owner: str = "a", **changed: Any
) -> Sandbox:
    key = slot if isinstance(slot, SlotKey) else SlotKey("ep", 1, slot or number)
    run = Run(f"ap#{number}.0#1", 1, owner)
    return replace(TEMPLATE, id=number, run=run, slot=key, state=state, **{"accepted_at": number, **changed})


def planned(
    *boxes: Sandbox,
    limits: Limits = LIMITS,
    load: Load | None = None,
    flow: Callable[[str], Flow] = lambda server: Flow.ALL,
    share: Callable[[str], float] = lambda owner: 0.0,
    deadline: Callable[[Sandbox], float] = lambda item: float("inf"),
    batch_files: Callable[[Destination], int] = lambda place: 0,
) -> list[Batch]:
    backlog = Backlog(deadline)
    for item in boxes:
        backlog.put(item)
    places = SlotUsage(occupants_of(boxes), PLACES, limits)
    return plan(backlog, PlanInput(PLACES, places, limits, load or Load(), flow, share, NOW, batch_files))


def occupants_of(boxes: Iterable[Sandbox]) -> list[tuple[Occupant, int]]:
    return [(occupant_of(item), 1) for item in boxes if item.state in OCCUPYING]


def free(
    boxes: Iterable[Sandbox], slot: SlotKey, owner: str, flow: Callable[[str], Flow] = lambda server: Flow.ALL
) -> int:
    taken = [
        (one.slot, one.owner, count)
        for one, count in occupants_of(boxes)
        if one.slot.parent == slot.parent and not is_stuck(one, PLACES, flow)
    ]
    return positions_free(slot, owner, taken, LIMITS)


def sent(batches: list[Batch]) -> list[list[int]]:
    return [[part.sandbox for part in batch.parts] for batch in batches]


def running(owner: str, server: str = "https://one", count: int = 1) -> Load:
    load = Load()
    for number in range(count):
        load.start(Batch(owner, 1, 1, 1, server, False, (Part(-number, 1),), 0))
    return load


def test_one_batch_across_jobs() -> None:
    assert sent(planned(box(1), box(2), box(3))) == [[1, 2, 3]]


@pytest.mark.parametrize(
    "other",
    [
        {"owner": "b"},
        {"uid": 2},
        {"gid": 2},
        {"waiting": (Waiting(2, 1, 10, 0),)},
        {"waiting": (Waiting(3, 1, 10, 0),)},
    ],
)
def test_what_does_not_travel_together(other: dict[str, Any]) -> None:
    assert sent(planned(box(1), box(2, **other), limits=replace(LIMITS, movers_per_server=3))) == [[1], [2]]


def test_order_is_priority_then_size_then_age() -> None:
    big, small, urgent = box(1, bytes_left=500), box(3), box(4, priority=5, bytes_left=900)
    assert sent(planned(big, small, box(2), urgent, limits=replace(LIMITS, cpus=9))) == [[4, 2, 3, 1]]


def test_what_is_begun_goes_on_before_what_is_not_of_the_same_priority() -> None:
    begun = box(1, state=State.MOVING, bytes_left=500)
    assert sent(planned(begun, box(2), box(3, priority=1))) == [[3, 1, 2]]


def test_a_deadline_that_is_near_goes_first_of_all() -> None:
    boxes = [box(1, priority=9), box(2), box(3, owner="b"), box(4, owner="b", priority=9)]
    ends = {2: NOW + 50.0, 3: NOW + 20.0, 1: NOW + 5000.0}
    batches = planned(*boxes, deadline=lambda item: ends.get(item.id, float("inf")), share=lambda owner: owner == "b")
    assert sent(batches) == [[3, 4], [2, 1]]


def test_the_owner_who_had_least_lately_goes_first() -> None:
    boxes = [box(1, owner="much", priority=99), box(2, owner="little"), box(3, owner="none", bytes_left=10**9)]
    shares = {"much": 5e9, "little": 1e9}
    wide = replace(LIMITS, movers_per_server=9)
    assert sent(planned(*boxes, share=lambda owner: shares.get(owner, 0.0), limits=wide)) == [[3], [2], [1]]


def test_what_an_owner_has_under_way_counts_as_given() -> None:
    load = running("a", server="https://two")
    assert sent(planned(box(1), box(2, owner="b"), load=load)) == [[2], [1]]


def test_one_owner_leaves_a_mover_and_a_place_of_each_server_to_others() -> None:
    limits = replace(LIMITS, cpus=99, batch_files=1, movers=5, movers_per_server=3, movers_per_owner=9)
    many = [box(number) for number in range(1, 20)]
    assert len(planned(*many, limits=limits)) == 2
    elsewhere = [box(number, waiting=(Waiting(2, 1, 10, 0),)) for number in range(20, 40)]
    assert len(planned(*many, *elsewhere, limits=limits)) == 4
    assert len(planned(*many, *elsewhere, limits=replace(limits, movers_per_owner=1))) == 1
    other = box(50, owner="b")
    assert sent(planned(*many, other, limits=limits, load=running("a", count=2))) == [[50]]
    alone = replace(limits, movers=1, movers_per_server=1)
    assert len(planned(*many, limits=alone)) == 1


def test_the_first_sandbox_of_an_owner_waits_for_no_other_owner_s_place() -> None:
    busy = [box(number, slot=7, state=State.MOVING, waiting=(), moving_at=(1,)) for number in (1, 2, 3, 4)]
    assert sent(planned(*busy, box(5, slot=7), box(6, owner="b", slot=7), box(7, owner="b", slot=8))) == [[6]]


def test_a_plugin_may_want_more_files_in_one_batch() -> None:
    boxes = [box(number, waiting=(Waiting(number % 2 + 1, 6, 10, 0),)) for number in range(1, 7)]

    def wanted(place: Destination) -> int:
        return 11 if place.host == "one" else 5

    batches = planned(*boxes, batch_files=wanted)
    assert {batch.destination: sum(part.files for part in batch.parts) for batch in batches} == {1: 11, 2: 10}


def test_a_data_slot_sends_one_sandbox_at_a_time() -> None:
    assert sent(planned(box(1, slot=7), box(2, slot=7), box(3, slot=8))) == [[1, 3]]
    assert sent(planned(box(1, slot=7, state=State.MOVING, waiting=(), moving_at=(1,)), box(2, slot=7))) == []


def test_what_is_being_sent_to_one_server_holds_up_nothing_for_another() -> None:
    """The first may never answer."""
    stuck = box(1, slot=7, state=State.MOVING, waiting=(), moving_at=(1,))
    others = [box(number, slot=7, waiting=(Waiting(2, 1, 10, 0),)) for number in (2, 3)]
    assert sent(planned(stuck, *others, box(4, slot=7))) == [[2]]


def test_a_sandbox_that_waits_for_a_time_gives_its_place_away() -> None:
    waits = box(1, slot=7, state=State.RETRY_WAIT, waiting=(Waiting(1, 1, 10, NOW + 5),))
    assert sent(planned(waits, box(2, slot=7))) == [[2]]
    due = box(1, slot=7, state=State.RETRY_WAIT, waiting=(Waiting(1, 1, 10, NOW),))
    assert sent(planned(due)) == [[1]]


def test_data_slots_of_a_partitionable_slot_are_bounded_by_its_cpus() -> None:
    boxes = [box(number, slot=number) for number in range(1, 9)]
    assert sent(planned(*boxes)) == [[1, 2, 3, 4]]
    boxes = [box(number, slot=number, owner="ab"[number % 2]) for number in range(1, 9)]
    wide = replace(LIMITS, movers_per_server=3)
    assert sent(planned(*boxes, limits=wide)) == [[1, 3, 5, 7], [2]]
    static = [box(number, slot=SlotKey("ep", number, 0)) for number in range(1, 9)]
    assert sent(planned(*static)) == [[1, 2, 3, 4, 5, 6, 7, 8]]


def test_movers_of_the_node_and_of_a_server_are_bounded() -> None:
    owners = [box(number, owner=f"o{number}") for number in range(1, 5)]
    assert len(planned(*owners)) == 2
    elsewhere = [box(number, owner=f"o{number}", waiting=(Waiting(2, 1, 10, 0),)) for number in range(5, 9)]
    assert len(planned(*owners, *elsewhere, limits=replace(LIMITS, cpus=9, movers=3))) == 3
    assert planned(*owners, load=Load(movers=4)) == []


def test_two_schemes_of_one_server_are_counted_apart_by_method() -> None:
    assert PLACES[1].server != PLACES[3].server


def test_batches_are_bounded_in_files_and_bytes() -> None:
    many = box(1, waiting=(Waiting(1, 50, 10, 0),))
    (batch,) = planned(many)
    assert [(part.sandbox, part.files) for part in batch.parts] == [(1, 10)]
    heavy = [box(number, waiting=(Waiting(1, 1, 600, 0),)) for number in (1, 2)]
    assert sent(planned(*heavy)) == [[1]]
    (large,) = planned(box(1, waiting=(Waiting(1, 1, 5000, 0),)))
    assert (large.parts, large.size_bytes) == ((Part(1, 1),), LIMITS.batch_bytes)


def test_files_that_are_being_sent_are_not_sent_twice() -> None:
    assert planned(box(1, state=State.MOVING), load=Load(running={(1, 1)})) == []


@pytest.mark.parametrize(
    ("state", "at", "reason"),
    [
        (State.RETRY_WAIT, 0, "paused by its owner, `stageout resume` goes on; before that: 507: full"),
        (State.FAILED, NOW + 9, "507: full"),
    ],
)
def test_a_paused_sandbox_says_so_and_promises_no_attempt(state: State, at: int, reason: str) -> None:
    one = box(1, state=state, paused=True, reason="507: full", waiting=(Waiting(1, 1, 10, NOW + 9),))
    said = sandbox_report(one, 20, ())
    assert (said.reason, said.next_attempt_at) == (reason, at)


def test_the_limit_of_attempts_stays_and_those_that_do_not_count_are_apart() -> None:
    said = sandbox_report(box(1, state=State.RETRY_WAIT, attempts=5, excused=3), 20, ())
    assert (said.attempts, said.excused, said.attempts_limit) == (5, 3, 20)


def test_paused_sandboxes_wait_and_hold_no_place() -> None:
    paused = box(1, slot=7, paused=True)
    assert sent(planned(paused, box(2, slot=7))) == [[2]]
    assert is_stuck(occupant_of(paused), PLACES, lambda server: Flow.ALL)


@pytest.mark.parametrize("state", [State.ACCEPTED, State.CONFIRMED])
def test_output_for_a_server_that_is_away_holds_no_place_also_when_its_probe_is_due(state: State) -> None:
    one = occupant_of(box(1, state=state))
    assert [is_stuck(one, PLACES, lambda server, flow=flow: flow) for flow in (Flow.NONE, Flow.ONE, Flow.ALL)] == [
        True, True, False,
    ]  # fmt: skip


def test_an_open_breaker_lets_nobody_through_and_a_probe_is_one_file() -> None:
    boxes = [box(number, waiting=(Waiting(1, 5, 10, 0),)) for number in (1, 2)]
    assert planned(*boxes, flow=lambda server: Flow.NONE) == []
    (batch,) = planned(*boxes, flow=lambda server: Flow.ONE)
    assert (batch.probe, [(part.sandbox, part.files) for part in batch.parts]) == (True, [(1, 1)])
    two_owners = [box(1), box(2, owner="b")]
    assert len(planned(*two_owners, flow=lambda server: Flow.ONE)) == 1


def test_a_dead_destination_blocks_no_other() -> None:
    def flow(server: str) -> Flow:
        return Flow.NONE if server.endswith("one") else Flow.ALL

    dead, alive = box(1, slot=7), box(2, slot=7, waiting=(Waiting(2, 1, 10, 0),))
    assert sent(planned(dead, alive, flow=flow)) == [[2]]
    assert free([dead], dead.slot, "a", flow) == 3


def test_places_of_a_data_slot() -> None:
    slot = SlotKey("ep", 1, 7)
    states = (State.ACCEPTED, State.CONFIRMED, State.MOVING, State.RETRY_WAIT, State.FAILED)
    boxes = [box(number, slot=7, state=state) for number, state in enumerate(states)]
    assert free(boxes, slot, "a") == 0
    assert free(boxes, SlotKey("ep", 1, 8), "a") == 3
    crowd = [box(number + 1, slot=number + 1) for number in range(12)]
    assert free(crowd, SlotKey("ep", 1, 99), "a") == 0
    assert free(crowd, SlotKey("ep", 1, 99), "somebody new") == 1
    assert free(crowd, SlotKey("other", 1, 99), "a") == 3


def test_registry_keeps_its_lists_apart() -> None:
    registry = Registry()
    registry.put(box(1))
    registry.put(box(2, state=State.ACCEPTED))
    assert [set(queue) for queue in registry.backlog.queues.values()] == [{1}]
    assert sum(count for _, count in registry.occupying()) == 2
    registry.put(box(1, state=State.RELEASED))
    assert not registry.backlog.queues
    assert sum(count for _, count in registry.occupying()) == 1
    assert registry.bytes_at_risk == 10
    registry.drop(2)
    assert (registry.of_run(Run("ap#2.0#1", 1, "a")), registry.newest_run(JobKey("ap#2.0#1", "a"))) == (None, 1)
    assert (registry.bytes_at_risk, list(registry.occupying())) == (0, [])


@pytest.mark.parametrize(
    ("url", "scheme", "host", "method"),
    [
        ("https://h/x", "https", "h", "https"),
        ("CRED+HTTPS://U:P@Host:80/x?y=//z", "cred+https", "host:80", "https"),
        ("my-store.v2://h?x", "my-store.v2", "h", "v2"),
        ("file:///tmp/x", "file", "", "file"),
    ],
)
def test_urls(url: str, scheme: str, host: str, method: str) -> None:
    assert split_url(url) == (scheme, host)
    assert method_of(scheme) == method


# ---- when again -----------------------------------------------------------------------------------------------------

RULES = RetryRules(attempts=5, initial_delay_s=20, max_delay_s=1800, delivery_timeout_s=1000)


def verdict(
    kind: ErrorClass, attempts: int = 0, excused: int = 0, accepted_at: float = NOW, renewable: bool = False,
    **more: Any,
) -> Any:  # fmt: skip
    failure = Failure(kind, "words", **more)
    return decide_retry(RULES, failure, attempts, excused, accepted_at, NOW, lambda: 1.0, renewable)


@pytest.mark.parametrize("kind", ErrorClass)
def test_every_class_has_an_answer(kind: ErrorClass) -> None:
    found = verdict(kind)
    assert (found.state is FileState.FAILED) == (not kind.retryable)
    assert found.excused == (kind in UNREACHABLE or (kind in OF_NODE and kind.retryable))


def test_waits_double_up_to_the_longest() -> None:
    waits = [verdict(ErrorClass.STALLED, attempts).next_attempt - NOW for attempts in range(4)]
    assert waits == [20, 40, 80, 160]
    assert verdict(ErrorClass.STALLED, 3, accepted_at=NOW + 10000).next_attempt - NOW == 160
    long = RetryRules(attempts=0, initial_delay_s=20, max_delay_s=1800, delivery_timeout_s=1e9)
    assert decide_retry(long, Failure(ErrorClass.STALLED, ""), 500, 0, NOW, NOW, lambda: 1.0).next_attempt == NOW + 1800


def test_the_server_s_own_wait_is_kept() -> None:
    assert verdict(ErrorClass.SERVER_ERROR, retry_after_s=300).next_attempt == NOW + 300


def test_attempts_end() -> None:
    assert verdict(ErrorClass.STALLED, 3).state is FileState.WAITING
    last = verdict(ErrorClass.STALLED, 4)
    assert last.state is FileState.FAILED
    assert last.message == "words (gave up after 5 attempts)"
    excused = verdict(ErrorClass.STALLED, 7, 3).message
    assert excused == "words (gave up after 5 attempts)", "those that do not count are not named"


def test_an_unreachable_server_uses_up_no_attempts_only_time() -> None:
    assert verdict(ErrorClass.CONNECT_FAILED, 500, 500).state is FileState.WAITING
    assert verdict(ErrorClass.CONNECT_FAILED, 500, 500).next_attempt == NOW + 60
    assert verdict(ErrorClass.STALLED, 500, 496).state is FileState.FAILED
    assert verdict(ErrorClass.CONNECT_FAILED, 1, 1, accepted_at=NOW - 1000).state is FileState.FAILED


def test_the_last_attempt_is_made_when_time_is_up() -> None:
    found = verdict(ErrorClass.STALLED, 3, accepted_at=NOW - 950)
    assert (found.state, found.next_attempt) == (FileState.WAITING, NOW + 50)


@pytest.mark.parametrize("kind", [kind for kind in ErrorClass if kind.advice is Advice.NEEDS_CREDENTIAL])
def test_only_a_credential_that_can_be_renewed_is_waited_for(kind: ErrorClass) -> None:
    waits = verdict(kind, renewable=True)
    assert (waits.state, waits.next_attempt, waits.excused) == (FileState.WAITING, NOW + 300, True)
    assert verdict(kind) == Verdict(FileState.FAILED, 0, False, "words")


def test_the_report_says_until_when_a_file_is_tried_again() -> None:
    waiting = box(1, state=State.RETRY_WAIT, attempts=1, accepted_at=NOW - 100, retried_at=NOW - 10)
    assert last_attempt_at(waiting, RULES) == NOW - 10 + 1000
    assert last_attempt_at(replace(waiting, attempts=0), RULES) == 0
    assert last_attempt_at(replace(waiting, state=State.FAILED), RULES) == 0
    rules = replace(RULES, credential_timeout_s=5000)
    expired = replace(waiting, error_code=ErrorClass.CREDENTIAL_EXPIRED.code)
    assert (last_attempt_at(waiting, rules), last_attempt_at(expired, rules)) == (NOW + 990, NOW + 4990)
    assert sandbox_report(waiting, 20, (), gives_up_at=7).gives_up_at == 7
