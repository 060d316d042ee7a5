"""The overlay's pure core, rule by rule."""

from __future__ import annotations

import pytest

from overlay_router.rules import custody, lots, names, terminal
from overlay_router.rules.states import Kind, Op, Outcome, Release, Result
from overlay_router.rules.terminal import OriginRecord, Step, judge
from stageout.overlay.wire import blocks, graph
from stageout.overlay.wire.blocks import Block


def op(seq: int, kind: Kind, path: str, target: str = "", after: tuple[int, ...] = ()) -> Op:
    return Op(1, seq, kind, path, target, expires=100, after=after)


def test_edges_leave_out_what_another_edge_implies() -> None:
    unsettled = {
        1: op(1, Kind.MKDIR, "d"),
        2: op(2, Kind.PUBLISH, "d/x", after=(1,)),
        3: op(3, Kind.PUBLISH, "other"),
        4: op(4, Kind.RENAME, "d/x", "d/y", after=(2,)),
    }
    assert graph.edges(op(5, Kind.DELETE, "d"), unsettled) == (4,)
    assert graph.edges(op(5, Kind.PUBLISH, "d/z"), unsettled) == (1,)
    assert graph.edges(op(5, Kind.PUBLISH, "d/y"), unsettled) == (4,)
    assert graph.edges(op(5, Kind.PUBLISH, "dd"), unsettled) == ()


def test_mkdir_does_not_overtake_what_fails_without_it() -> None:
    assert graph.edges(op(2, Kind.MKDIR, "d"), {1: op(1, Kind.PUBLISH, "d/x")}) == (1,)


def test_more_than_eight_edges_wait_at_the_origin() -> None:
    unsettled = {seq: op(seq, Kind.PUBLISH, f"d/{seq}") for seq in range(1, 10)}
    after = graph.edges(op(10, Kind.DELETE, "d"), unsettled)
    assert len(after) == 9
    assert graph.must_wait(after)
    assert not graph.must_wait(after[1:])


def test_low_stops_before_a_failure_that_somebody_waits_for() -> None:
    outcomes = {1: Outcome.DONE, 2: Outcome.FAILED, 3: Outcome.DONE}
    waiting = {4: op(4, Kind.DELETE, "x", after=(2,))}
    assert graph.low_water(0, outcomes, waiting) == 1
    assert graph.low_water(0, outcomes, {}) == 3
    assert graph.low_water(0, {2: Outcome.DONE}, {}) == 0


def test_terminal_rule_in_order() -> None:
    done, failed = Result(Outcome.DONE), Result(Outcome.FAILED)
    record = OriginRecord(low=2, results={4: done, 5: failed}, cancelled={6, 7})
    wish = op(4, Kind.DELETE, "x", after=(3,))
    assert judge(record, op(2, Kind.DELETE, "x"), now=500).step is Step.STALE
    assert judge(record, wish, now=101) == (Step.ANSWER, done)
    assert judge(record, wish._replace(seq=8), now=101) == (Step.RECORD, Result(Outcome.EXPIRED))
    assert judge(record, wish._replace(seq=8), now=100).step is Step.HOLD
    assert judge(record, wish._replace(seq=8), now=0, held_ops=terminal.HELD_OPS_LIMIT).step is Step.BUSY
    assert judge(record, wish._replace(seq=6), now=0).step is Step.HOLD
    assert judge(record, wish._replace(seq=6, after=(5,)), now=0) == (Step.RECORD, Result(Outcome.CANCELLED))
    dependency = Result(Outcome.FAILED, "dependency")
    assert judge(record, wish._replace(seq=8, after=(4, 5)), now=0) == (Step.RECORD, dependency)
    assert judge(record, wish._replace(seq=8, after=(1, 4)), now=0).step is Step.EXECUTE


def test_low_never_falls() -> None:
    record = OriginRecord(results={1: Result(Outcome.DONE), 2: Result(Outcome.DONE)}, cancelled={1})
    terminal.raise_low(record, 1)
    terminal.raise_low(record, 0)
    assert (record.low, set(record.results), record.cancelled) == (1, {2}, set())


@pytest.mark.parametrize(
    "todo",
    [
        op(9, Kind.PUBLISH, "d/new"),
        op(9, Kind.PUBLISH, "d/x"),
        op(9, Kind.MKDIR, "e"),
        op(9, Kind.RENAME, "d", "e"),
        op(9, Kind.RENAME, "d/x", "y"),
        op(9, Kind.DELETE, "d"),
        op(9, Kind.SETATTR, "d/x"),
    ],
    ids=lambda todo: f"{todo.kind.value}-{todo.path}",
)
def test_recovery_knows_whether_an_intent_happened(todo: Op) -> None:
    tree = {"d": names.Entry(1), "d/x": names.Entry(2, "old"), "y": names.Entry(3, "y")}
    assert names.refusal(tree, todo) == ""
    intent = names.intent(tree, todo, 7, "new")
    assert not names.happened(tree, intent)
    names.apply(tree, intent)
    assert names.happened(tree, intent)


@pytest.mark.parametrize(
    ("todo", "reason"),
    [
        (op(9, Kind.PUBLISH, "gone/x"), "conflict: there is no directory 'gone': make it first"),
        (op(9, Kind.PUBLISH, "d/x/y"), "conflict: 'd/x' is not a directory"),
        (op(9, Kind.PUBLISH, "d"), "conflict: 'd' is a directory"),
        (op(9, Kind.MKDIR, "d"), "conflict: 'd' is there already"),
        (op(9, Kind.DELETE, "gone"), "conflict: there is no 'gone'"),
        (op(9, Kind.RENAME, "gone", "d/new"), "conflict: there is no 'gone'"),
        (op(9, Kind.RENAME, "d/x", "gone/x"), "conflict: there is no directory 'gone': make it first"),
        (op(9, Kind.RENAME, "d", "d/below"), "conflict: 'd' cannot become 'd/below', which is itself or below it"),
        (op(9, Kind.RENAME, "d/x", "d"), "conflict: 'd' is there already, and only a file can replace a file"),
        (op(9, Kind.PUBLISH, "d/x")._replace(absent=True), "precondition"),
        (op(9, Kind.PUBLISH, "d/x")._replace(generation=2), "precondition"),
        (op(9, Kind.PUBLISH, "d/x")._replace(generation=3), ""),
    ],
)
def test_refusals(todo: Op, reason: str) -> None:
    tree = {"d": names.Entry(1), "d/x": names.Entry(2, "old")}
    assert names.refusal(tree, todo, generation=3) == reason


def test_a_done_rename_raises_both_generations() -> None:
    assert names.bumped({"a": 4}, op(1, Kind.RENAME, "a", "b")) == {"a": 5, "b": 1}


def test_only_blocks_of_the_dead_route_are_ready_again() -> None:
    table = blocks.BlockTable(4)
    assert [blocks.take(table, route) for route in (0, 1, 0)] == [0, 1, 2]
    blocks.sent(table, 2, 1)
    blocks.staged(table, [1])
    assert blocks.carrier_down(table, 0) == [0]
    assert table.state == [Block.READY, Block.STAGED, Block.SENT, Block.READY]
    assert blocks.ready(table) == [0, 3]
    assert [blocks.take(table, 1) for _ in range(3)] == [3, 0, None], "what was never sent goes first"
    assert [blocks.under_way(table, carriers) for carriers in ((0,), (1,), (0, 1))] == [0, 3, 3]


def test_parts_cover_each_block_once_and_a_lost_one_takes_its_block_with_it() -> None:
    table, unit = blocks.BlockTable(2), blocks.PART_BYTES
    size_bytes, mib = (1 << 20) + unit + 5, 1 << 20

    def parts(carrier: int, most: int) -> blocks.Part | None:
        return blocks.take_part(table, carrier, most, mib, size_bytes)

    assert [parts(0, 8 * unit), parts(1, 12 * unit)] == [(0, 0, mib // 2), (0, mib // 2, mib)]
    assert [parts(1, unit), parts(2, unit), parts(0, unit)] == [(1, 0, unit), (1, unit, unit + 5), None]
    blocks.staged(table, [1])
    assert blocks.carrier_down(table, 2) == [], "what is STAGED is not lost with a connection that had a part of it"
    assert blocks.carrier_down(table, 0) == [0], "although another has the other half"
    assert parts(1, unit) == (0, 0, unit)
    assert blocks.carrier_down(table, 1) == [0]
    assert blocks.take(table, 3) == 0, "nothing is left of a block that was lost before all of it was taken"
    assert (parts(1, unit), table.rest, blocks.carrier_down(table, 1)) == (None, None, [])
    blocks.reopened(table, [0])
    parts(1, unit)
    blocks.staged(table, [1])
    assert (parts(1, unit), table.rest) == (None, None), "an earlier copy of it has arrived: its rest is not needed"


def test_tail_duplicates_the_oldest_on_an_idle_route_only() -> None:
    table = blocks.BlockTable(2)
    blocks.sent(table, 1, 0)
    assert blocks.tail(table, (1,)) == []
    blocks.sent(table, 0, 0)
    assert blocks.tail(table, (0,)) == []
    assert blocks.tail(table, (1,)) == [1, 0], "a small file may be duplicated whole"
    wide = blocks.BlockTable(10_000)
    for index in range(wide.count):
        blocks.sent(wide, index, 0)
    assert blocks.tail(wide, (1,)) == list(range(200)), "of a large one 2 %"


def test_a_new_tid_starts_from_its_bitmap() -> None:
    table = blocks.BlockTable(3)
    blocks.staged(table, [0, 1])
    blocks.reopened(table, [2])
    assert blocks.ready(table) == [0, 1]
    blocks.staged(table, [0, 1])
    assert blocks.complete(table)


def test_illegal_moves_are_refused() -> None:
    table = blocks.BlockTable(1)
    blocks.move(table, 0, Block.FREED)
    with pytest.raises(blocks.IllegalMove):
        blocks.move(table, 0, Block.SENT)
    with pytest.raises(blocks.IllegalMove):
        blocks.staged(table, [1])


def test_who_may_free_what_when() -> None:
    assert not custody.may_free(Release.DELIVERED, 1, 1, final=False)
    assert not custody.may_free(Release.CUSTODY, 2, 1, final=False)
    assert custody.may_free(Release.CUSTODY, 2, 2, final=False)
    assert custody.may_free(Release.DELIVERED, 1, 0, final=True)


@pytest.mark.parametrize("lacking", ["block", "op", "lot"])
def test_custody_needs_blocks_operation_and_lot(lacking: str) -> None:
    assert custody.may_grant(2, [0, 1], op_durable=True, has_lot=True)
    staged = [0] if lacking == "block" else [0, 1]
    assert not custody.may_grant(2, staged, op_durable=lacking != "op", has_lot=lacking != "lot")


def test_bytes_freed_at_custody_that_never_came_are_lost() -> None:
    assert custody.verdict_at_expiry(Release.CUSTODY, 1, Outcome.EXPIRED) is Outcome.LOST
    assert custody.verdict_at_expiry(Release.CUSTODY, 0, Outcome.EXPIRED) is Outcome.EXPIRED
    assert custody.verdict_at_expiry(Release.DELIVERED, 1, Outcome.EXPIRED) is Outcome.EXPIRED
    assert custody.verdict_at_expiry(Release.CUSTODY, 1, Outcome.DONE) is Outcome.DONE


def test_lots_are_all_or_nothing_and_five_percent_stay() -> None:
    spool = lots.Spool(1_000)
    assert lots.reserve(spool, "a", 900, 0) is None
    assert lots.reserve(spool, "b", 51, 0) == lots.RETRY_AFTER_S
    assert lots.reserved_bytes(spool) == 900
    assert lots.reserve(spool, "a", 950, 0) is None
    assert lots.reserve(spool, "a", 951, 0) == lots.RETRY_AFTER_S
    lots.release(spool, "a")
    assert lots.reserved_bytes(spool) == 0


def test_leases_run_out_unless_renewed_or_in_custody() -> None:
    spool = lots.Spool(1_000)
    for owner in ("idle", "busy", "custody"):
        lots.reserve(spool, owner, 10, 0)
    lots.pin(spool, "custody")
    assert lots.renew(spool, "busy", 30)
    assert lots.expire(spool, lots.LEASE_S + 1) == ["idle"]
    assert not lots.renew(spool, "idle", 31)
    assert set(spool.lots) == {"busy", "custody"}


@pytest.mark.parametrize("low", [0, 4, 5])
@pytest.mark.parametrize("now", [100, 101])
@pytest.mark.parametrize("stored", [{}, {5: Result(Outcome.DONE)}])
@pytest.mark.parametrize("cancelled", [set(), {5}])
def test_what_is_new_is_what_would_be_executed(
    low: int, now: int, stored: dict[int, Result], cancelled: set[int]
) -> None:
    record = OriginRecord(low, stored, cancelled)
    judged = judge(record, op(5, Kind.PUBLISH, "f"), now).step is Step.EXECUTE
    assert terminal.are_new(record, (5,), 100, now) is judged
