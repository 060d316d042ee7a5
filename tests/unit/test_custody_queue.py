"""The order in which a custodian delivers."""

from __future__ import annotations

import time

from overlay_router.operations.queue import Queue, Waiting
from stageout.overlay.rules.operations import Identity


def _row(number: int, name: str = "", owner: str = "a", share: str = "", **more: int) -> Waiting:
    return Waiting(
        Identity(owner, "0" * 32, number), (name or f"f{number}",), (1, number), share or owner, "t",
        **{"received": 1000, **more},
    )  # fmt: skip


def _all(queue: Queue) -> list[int]:
    found = []
    while row := queue.take(lambda hop: False):
        found.append(row.identity.seq)
        queue.end(row.identity, row.names)
    return found


def _queue(*rows: Waiting) -> Queue:
    queue = Queue()
    for row in rows:
        queue.put(row)
    return queue


def test_versions_of_a_name_leave_in_their_order() -> None:
    queue = _queue(_row(3, "f", priority=9), _row(1, "f"), _row(2, "f", priority=5))
    first = queue.take(lambda hop: False)
    assert first and first.identity.seq == 1
    assert queue.take(lambda hop: False) is None, "the first one is on its way"
    queue.put(first)
    assert _all(queue) == [1, 2, 3]


def test_owners_promise_no_order_to_each_other() -> None:
    queue = _queue(_row(2, "f"), _row(1, "f", owner="b"))
    assert queue.take(lambda hop: False) and queue.take(lambda hop: False)


def test_a_row_with_two_names_waits_for_both() -> None:
    both = _row(3)._replace(names=("f", "g"))
    assert _all(_queue(both, _row(2, "g"), _row(1, "f"), _row(4, "g", priority=9)))[2:] == [3, 4]


def test_a_refused_one_blocks_nobody() -> None:
    queue = _queue(_row(1, "f"), _row(2, "f"))
    first = queue.take(lambda hop: False)
    assert first
    queue.end(first.identity, first.names)  # refused
    second = queue.take(lambda hop: False)
    assert second and second.identity.seq == 2
    queue.put(first)
    third = queue.take(lambda hop: False)
    assert third and third.identity.seq == 1


def test_priority_waiting_and_deadline() -> None:
    assert _all(_queue(_row(1), _row(2, priority=1), _row(3, deadline=5), _row(4, deadline=4))) == [2, 4, 3, 1]
    assert _all(_queue(_row(1, received=2000, priority=10), _row(2, received=1000))) == [2, 1], "it has waited long"


def test_a_subject_with_many_rows_has_its_share() -> None:
    queue = _queue(*(_row(number) for number in range(1, 101)), _row(200, owner="b"), _row(201, owner="b"))
    assert {200, 201} < set(_all(queue)[:5])


def test_weights() -> None:
    queue = Queue(lambda share: 3.0 if share == "b" else 1.0)
    for number in range(1, 101):
        queue.put(_row(number))
        queue.put(_row(1000 + number, owner="b"))
    assert 28 <= sum(seq > 1000 for seq in _all(queue)[:40]) <= 32


def test_a_router_that_is_away_holds_up_nobody_else() -> None:
    queue = _queue(_row(1), _row(2)._replace(hop="other"))
    found = queue.take(lambda hop: hop == "t")
    assert found and found.hop == "other"
    assert queue.take(lambda hop: hop == "t") is None and len(queue) == 1


def test_an_ended_row_is_not_delivered() -> None:
    queue = _queue(_row(1), _row(2))
    queue.end(_row(1).identity, _row(1).names)
    assert _all(queue) == [2] and not len(queue)


def test_a_hundred_thousand_versions_of_one_name() -> None:
    began = time.monotonic()
    queue = _queue(*(_row(number, "f") for number in range(100_000, 0, -1)))
    assert _all(queue) == list(range(1, 100_001))
    assert time.monotonic() - began < 30
