"""Fairness: whatever others have waiting, everybody's turn comes, and soon. Deterministic: counted in batches."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from test_slots import LIMITS, TEMPLATE

from sandbox_manager.custody.registry import Backlog, order
from sandbox_manager.rules import Limits
from sandbox_manager.scheduling.breaker import Flow
from sandbox_manager.scheduling.planner import FILE_BYTES, HALF_LIFE_S, Load, PlanInput, Shares, cost_bytes, plan
from sandbox_manager.scheduling.slots import SlotUsage
from stageout.core.states import State
from stageout.model.batch import Batch
from stageout.model.sandbox import OCCUPYING, Destination, Sandbox, SlotKey, Waiting, occupant_of
from stageout.wire.custody import Run

USUAL = replace(LIMITS, movers=4, movers_per_server=3, movers_per_owner=3, batch_files=200, batch_bytes=1 << 30)


class Node:
    """Plans, sends and counts; every batch takes one tick, whatever is in it."""

    def __init__(self, limits: Limits = USUAL, cpus: int = 8) -> None:
        self.limits = replace(limits, cpus=cpus)
        self.boxes: dict[int, Sandbox] = {}
        self.backlog = Backlog(lambda box: float("inf"))
        self.places = {number: Destination("/p", "https", f"host{number}") for number in range(1, 6)}
        self.load, self.shares, self.tick, self.dead = Load(), Shares(), 0.0, set[str]()
        self.running: list[Batch] = []
        self.ended: list[Batch] = []

    def put(self, owner: str, files: int, size_bytes: int = 1000, destination: int = 1, slot: int = 0) -> int:
        number = len(self.boxes) + 1
        self._keep(
            replace(
                TEMPLATE, id=number, run=Run(f"ap#{number}.0#1", 1, owner), bytes_left=size_bytes,
                slot=SlotKey("ep", 1, slot or number), waiting=(Waiting(destination, files, size_bytes, 0),),
            )
        )  # fmt: skip
        return number

    def _keep(self, box: Sandbox) -> None:
        self.boxes[box.id] = box
        self.backlog.put(box)

    def plan(self) -> list[Batch]:
        occupants = [(occupant_of(box), 1) for box in self.boxes.values() if box.state in OCCUPYING]
        inputs = PlanInput(
            self.places, SlotUsage(occupants, self.places, self.limits), self.limits, self.load,
            lambda server: Flow.NONE if server in self.dead else Flow.ALL,
            lambda owner: self.shares.of(owner, self.tick), 0,
        )  # fmt: skip
        batches = plan(self.backlog, inputs)
        for batch in batches:
            for part in batch.parts:
                self._keep(replace(self.boxes[part.sandbox], state=State.MOVING))
        self.running += batches
        return batches

    def end(self, batch: Batch) -> None:
        """One batch is delivered."""
        self.tick += 1
        self.running.remove(batch)
        self.load.end(batch)
        self.ended.append(batch)
        self.shares.give(batch.owner, sum(part.files for part in batch.parts), batch.size_bytes, self.tick)
        for part in batch.parts:
            box = self.boxes[part.sandbox]
            (waiting,) = box.waiting
            left = waiting.files - part.files
            rest = (
                (replace(waiting, files=left, size_bytes=waiting.size_bytes * left // waiting.files),) if left else ()
            )
            state = State.CONFIRMED if left else State.RELEASED
            self._keep(replace(box, state=state, waiting=rest, bytes_left=rest[0].size_bytes if rest else 0))

    def batches_until(self, sandbox: int, most: int = 10_000) -> int:
        """Batches that end before this sandbox's first one starts."""
        ended = 0
        while True:
            if any(part.sandbox == sandbox for batch in self.plan() for part in batch.parts):
                return ended
            assert self.running, "nothing moves and it still waits"
            assert ended < most
            self.end(self.running[0])
            ended += 1


def test_one_file_among_a_hundred_thousand_leaves_at_once() -> None:
    node = Node()
    for _ in range(1000):
        node.put("a", 100)
    for _ in range(20):
        node.plan()
        node.end(node.running[0])
    assert node.batches_until(node.put("b", 1)) == 0


def test_nor_does_one_sandbox_of_a_hundred_thousand_files_in_the_same_data_slot_hold_it_up() -> None:
    node = Node(cpus=1)
    node.put("a", 100_000, slot=1)
    node.plan()
    assert node.batches_until(node.put("b", 1, slot=1)) == 0


def test_a_third_and_a_fourth_owner_wait_for_the_end_of_one_batch_at_most() -> None:
    node = Node()
    for owner in "abc":
        for _ in range(50):
            node.put(owner, 1000)
    for _ in range(10):
        node.plan()
        node.end(node.running[0])
    assert node.batches_until(node.put("d", 1)) <= 1


def test_a_destination_that_never_ends_holds_up_no_other() -> None:
    node = Node()
    for _ in range(1000):
        node.put("a", 100, destination=1)
    stuck = node.plan()
    assert len(stuck) == 2
    for _ in range(20):
        node.put("a", 1, destination=2)
    assert {batch.destination for batch in node.plan()} == {2}
    node.dead.add("https://host2")
    assert node.batches_until(node.put("b", 1, destination=3)) == 0


def test_owners_with_much_to_send_get_equal_shares_of_bytes() -> None:
    node = Node(replace(USUAL, movers=1))
    for _ in range(400):
        node.put("large", 1, 4 << 30)
        node.put("small", 100, 100 << 20)
    given: dict[str, float] = defaultdict(float)
    for _ in range(300):
        node.plan()
        node.end(node.running[0])
    for batch in node.ended:
        given[batch.owner] += cost_bytes(batch.planned_files, batch.size_bytes)
    assert 0.5 < given["large"] / given["small"] < 2


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcde"), st.integers(1, 1000), st.integers(0, 1 << 32), st.integers(1, 3)),
        min_size=1, max_size=40,
    ),
    st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3),
)  # fmt: skip
def test_everything_is_sent_once_within_all_bounds(
    boxes: list[tuple[str, int, int, int]], movers: int, per_server: int, per_owner: int, active: int
) -> None:
    limits = replace(
        USUAL, movers=movers, movers_per_server=per_server, movers_per_owner=per_owner, active=active, batch_files=50
    )
    node = Node(limits)
    for owner, files, size_bytes, destination in boxes:
        node.put(owner, files, size_bytes, destination)
    sent: dict[int, int] = defaultdict(int)
    while node.plan() or node.running:
        assert node.load.movers == len(node.running) <= movers
        assert max(node.load.by_server.values()) <= per_server
        assert max(node.load.by_owner.values()) <= min(per_owner, max(1, movers - 1))
        assert max(node.load.by_both.values()) <= max(1, per_server - 1)
        keys = [(part.sandbox, batch.destination) for batch in node.running for part in batch.parts]
        assert len(keys) == len(set(keys))
        assert all(sum(part.files for part in batch.parts) <= 50 for batch in node.running)
        node.end(node.running[0])
        for part in node.ended[-1].parts:
            sent[part.sandbox] += part.files
    assert sent == {number: files for number, (_, files, _, _) in enumerate(boxes, 1)}
    assert not node.load.running
    assert not any(node.load.by_server.values())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 8), st.integers(0, 3), st.integers(0, 5), st.integers(0, 200), st.sampled_from(list(State))
        ),
        max_size=60,
    )
)
def test_lanes_are_what_a_sort_would_give(changes: list[tuple[int, int, int, int, State]]) -> None:
    """Puts and drops in any order leave the queues as if they had been made anew."""
    deadlines = {number: float(number * 37 % 11) for number in range(9)}
    backlog, boxes = Backlog(lambda box: deadlines[box.id]), {}
    for now, (number, priority, size_bytes, ready_at, state) in enumerate(changes):
        waiting = (Waiting(1, 1, size_bytes, ready_at),) if size_bytes else ()
        box = replace(
            TEMPLATE, id=number, priority=priority, bytes_left=size_bytes, state=state, paused=priority == 3,
            waiting=waiting,
        )  # fmt: skip
        boxes[number] = box
        backlog.put(box)
        for queue in backlog.queues.values():
            queue.wake(now)
    sends = {State.CONFIRMED, State.LEASED, State.MOVING, State.RETRY_WAIT}
    listed = [box for box in boxes.values() if box.state in sends and box.waiting and not box.paused]
    due = sorted((box for box in listed if box.waiting[0].ready_at <= 60), key=order)
    urgent = sorted((box for box in due if deadlines[box.id] < 5), key=lambda box: (deadlines[box.id], box.id))
    expected = [box.id for box in urgent] + [box.id for box in due if box not in urgent]
    for queue in backlog.queues.values():
        queue.wake(60)
    assert [box.id for queue in backlog.queues.values() for box, _ in queue.due(5)] == expected
    assert sum(map(len, backlog.queues.values())) == len(listed)
    assert backlog.waiting_for(frozenset({1})) == sorted(box.id for box in listed)


def test_what_was_given_fades() -> None:
    shares = Shares()
    shares.give("a", 1, 3 * FILE_BYTES, 0)
    assert shares.of("a", 0) == 4 * FILE_BYTES
    assert shares.of("a", HALF_LIFE_S) == 2 * FILE_BYTES
    shares.give("a", 0, FILE_BYTES, HALF_LIFE_S)
    assert shares.of("a", HALF_LIFE_S) == 3 * FILE_BYTES
    shares.fade(HALF_LIFE_S)
    assert shares.of("a", 2 * HALF_LIFE_S) == 1.5 * FILE_BYTES
    shares.fade(10 * HALF_LIFE_S)
    assert shares.of("a", 10 * HALF_LIFE_S) == 0
