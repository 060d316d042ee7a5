"""The cases of the design, one test for each, on the rules themselves. Random schedules: test_rules_bugs.py."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stageout.overlay.rules import custody, limits, operations, rights, sender, terminal
from stageout.overlay.rules.operations import DIRECT, Fields, Hop, Identity, Kind, Row, moved
from stageout.overlay.rules.rights import Action, Asker, Entry, Grant, NoRight, Right, Token
from stageout.overlay.rules.sender import AfterAsking
from stageout.overlay.rules.states import ENDS, MOVES, IllegalMove, Role, State
from stageout.overlay.rules.terminal import Found, Known, Seen, Step, Verdict

NOW = 1_000_000
FILE = Fields("o1", 2, Kind.FILE, "/alice/f", "T", NOW, NOW + 86400, size=2)
OWNER = "key:holder"
LIST = ("d0", "d1")
EXECUTE = Verdict(Step.EXECUTE)


def identity(seq: int = 2, owner: str = OWNER) -> Identity:
    return Identity(owner, "o1", seq)


def row(state: State = State.RECEIVING, seq: int = 2, hop: Hop = DIRECT, **more: Any) -> Row:
    fields = replace(FILE, seq=seq, **more.pop("fields", {}))
    return Row(identity(seq), fields, state, hop, issuer="key:user", custody=True, **more)


def judge(fields: Fields = FILE, hop: Hop = DIRECT, seen: Seen = Seen(), now: int = NOW, **known: Any) -> Verdict:  # noqa: B008
    rows = {one.identity.seq: one for one in known.pop("rows", ())}
    return terminal.judge(identity(fields.seq), fields, hop, Known(rows, **known), seen, now)


# ---- tokens, keys and owners


def test_the_token_ends_and_the_link_is_away() -> None:
    kept = row(State.DELIVERING, manifest=LIST, blocks=dict(enumerate(LIST)))
    kept = custody.on_answer(kept, None, "", NOW + 3600)
    assert kept.state is State.CUSTODY
    assert not custody.asks_for_end(kept, FILE.expires)
    assert custody.asks_for_end(kept, FILE.expires + 1)


def test_a_pilot_signs_and_ends_and_its_user_may_see_fetch_and_cancel() -> None:
    held = row(State.CUSTODY)
    for action in (Action.SEE, Action.FETCH, Action.CANCEL):
        rights.check_action(Asker("key:user"), held, action)


def test_a_bearer_pilot_without_key_needs_an_entry() -> None:
    rights.check_custody(Entry("/alice"), FILE, signed=False)
    with pytest.raises(NoRight):
        rights.check_custody(None, FILE, signed=False)


def test_a_holder_cannot_write_an_earlier_time() -> None:
    token = Token("user", "job", frozenset({"T"}), (Grant(frozenset(Right), ()),), NOW, NOW, NOW + 60, "holder", True)
    late = {"now": NOW + 7200, "received": NOW + 7000, "carrier": "gw", "listed": frozenset({"gw"})}
    with pytest.raises(rights.BadToken):
        rights.check_chain(FILE, token, "holder", "T", {"user": "/alice"}, **late)  # type: ignore[arg-type]


@pytest.mark.parametrize(("owner", "router"), [("key:other", ""), ("key:gw", "gw"), ("key:user2", "gw")])
def test_strangers_holders_and_custodians_do_not_cancel_or_settle(owner: str, router: str) -> None:
    for action in (Action.CANCEL, Action.SETTLE):
        with pytest.raises(NoRight):
            rights.check_action(Asker(owner, router), row(carriers=frozenset({"gw"})), action)


def test_a_removed_key_stops_its_operations() -> None:
    token = Token("user", "user", frozenset({"T"}), (Grant(frozenset(Right), ()),), NOW, NOW, NOW + 60, "", True)
    with pytest.raises(NoRight, match="removed"):
        rights.check_chain(FILE, token, "user", "T", {}, NOW)
    assert not custody.may_drop_bytes(row(State.REFUSED), NOW)


# ---- terminal rule


def test_one_operation_by_two_routes_executes_once() -> None:
    assert judge() == EXECUTE
    assert judge(rows=[row(State.DONE)], hop=Hop("gw", 1, 1)) == Verdict(Step.ANSWER, State.DONE)


@pytest.mark.parametrize("reason", ["403", "507", "EACCES"])
def test_a_refusal_is_no_result(reason: str) -> None:
    assert judge(seen=Seen(denied=reason)) == Verdict(Step.REFUSE, State.REFUSED, reason)
    refused = custody.on_answer(row(State.DELIVERING), State.REFUSED, reason, NOW)
    assert moved(Role.CUSTODIAN, refused, State.DELIVERING).state is State.DELIVERING
    assert judge() == EXECUTE


def test_a_second_copy_after_a_cancel() -> None:
    assert judge(rows=[row(State.CANCELLED)]) == Verdict(Step.ANSWER, State.CANCELLED)


def test_a_cancel_comes_first() -> None:
    assert terminal.cancel(FILE, Known(), NOW) == Verdict(Step.RECORD, State.CANCELLED)
    assert custody.cancel(row(State.RECEIVING)).state is State.CANCELLING


def test_a_cancel_during_delivery_has_one_answer() -> None:
    asked = custody.cancel(row(State.DELIVERING))
    assert asked.state is State.CANCELLING
    for end in (State.DONE, State.CANCELLED):
        assert custody.on_answer(asked, end, "", NOW).state is end
    assert terminal.cancel(FILE, Known({2: row(State.DONE)}), NOW).state is State.DONE


def test_expiry_while_the_terminal_publishes() -> None:
    late = row(State.DELIVERING)
    assert custody.asks_for_end(late, FILE.expires + 1)
    assert custody.on_answer(late, State.DONE, "", FILE.expires + 1).state is State.DONE
    assert custody.give_up(late, FILE.expires + 300) is late
    unknown = custody.give_up(late, FILE.expires + 601)
    assert unknown.state is State.EXPIRED_UNKNOWN
    assert custody.is_only_copy(unknown)
    assert judge(now=FILE.expires + 1, rows=[row(State.DONE)]).state is State.DONE


def test_the_same_number_with_other_fields() -> None:
    with pytest.raises(operations.Differs):
        judge(replace(FILE, path="/alice/g"), rows=[row(State.DONE)])


def test_below_low_and_after_the_result_was_forgotten() -> None:
    assert judge(low=3).step is Step.SETTLED
    assert judge(now=FILE.expires + 1) == Verdict(Step.RECORD, State.EXPIRED)
    kept = custody.on_answer(row(State.DELIVERING), *judge(low=3)[1:], NOW)
    assert not custody.may_drop_bytes(kept, FILE.expires)


def test_op2_waits_for_a_refused_op1() -> None:
    dependent = replace(FILE, seq=3, after=(2,))
    assert judge(dependent).step is Step.HOLD
    assert judge(dependent, rows=[row(State.RECEIVING)]).step is Step.HOLD
    assert judge(dependent, now=FILE.expires + 1).state is State.EXPIRED
    with pytest.raises(limits.ShareFull):
        limits.check_share(limits.used([row(State.HELD)] * 4), limits.Share(9, 4, 9, 99), limits.Share(held=1))


@pytest.mark.parametrize("state", [State.FAILED, State.EXPIRED])
def test_op2_fails_with_op1(state: State) -> None:
    assert judge(replace(FILE, seq=3, after=(2,)), rows=[row(state)]) == Verdict(
        Step.RECORD, State.FAILED, "dependency"
    )
    failed = custody.on_answer(row(State.DELIVERING, 3), State.FAILED, "dependency", NOW)
    assert not custody.may_drop_bytes(failed, NOW)
    assert custody.may_drop_bytes(failed, NOW, by_owner=True)


def test_op2_executes_after_a_cancelled_op1_and_its_edges() -> None:
    dependent = replace(FILE, seq=3, after=(2,))
    assert judge(dependent, rows=[row(State.CANCELLED)]) == EXECUTE
    assert judge(dependent, rows=[row(State.CANCELLED, fields={"after": (1,)})]).step is Step.HOLD


DELETE_D = replace(FILE, seq=1, kind=Kind.DELETE, path="/alice/d", size=None)
PUT_D_F = replace(FILE, path="/alice/d/f")
RENAME_D = replace(DELETE_D, kind=Kind.RENAME, second="/alice/e")


@pytest.mark.parametrize("count", [40, 3_000])
def test_cancelled_ones_that_wait_for_each_other_are_looked_at_once(count: int) -> None:
    rows = [
        row(State.CANCELLED, seq, fields={"after": tuple(range(max(1, seq - 8), seq)), "all_below": seq - 1})
        for seq in range(1, count)
    ]
    last = replace(FILE, seq=count, after=tuple(range(count - 8, count)))
    assert judge(last, rows=rows).step is Step.EXECUTE
    assert judge(last, rows=[replace(rows[0], state=State.RECEIVING), *rows[1:]]).step is Step.HOLD
    assert judge(replace(last, all_below=count), rows=rows[1:]).step is Step.HOLD


def test_a_delete_of_a_directory_races_with_a_put_below_it() -> None:
    """Two origins: either order. One origin, or one custodian: an older delete never takes a newer file away."""
    put, delete = (replace(row(State.DONE, one.seq), fields=one) for one in (PUT_D_F, DELETE_D))
    stranger = replace(put, identity=Identity("key:other", "o9", 9))
    assert operations.touches(DELETE_D, PUT_D_F)
    assert judge(DELETE_D, marks=(stranger,)) == judge(PUT_D_F, marks=(delete,)) == EXECUTE
    assert judge(DELETE_D, marks=(put,)).state is State.SUPERSEDED
    assert judge(replace(PUT_D_F, seq=1), marks=(replace(delete, identity=identity(2)),)).state is State.SUPERSEDED
    first = replace(row(State.CUSTODY, 1, Hop("A", 5, 1)), fields=DELETE_D)
    second = replace(row(State.CUSTODY, 2, Hop("A", 5, 2)), fields=PUT_D_F)
    assert custody.is_blocked(second, [first, second])


def test_names_that_touch() -> None:
    assert not operations.touches(DELETE_D, replace(FILE, path="/alice/d2"))
    assert not operations.touches(PUT_D_F, replace(FILE, kind=Kind.MKDIR, path="/alice/d"))
    assert operations.touches(PUT_D_F, RENAME_D)
    assert not operations.touches(PUT_D_F, replace(RENAME_D, path="/alice/c", second="/alice/d"))
    assert operations.touches(FILE, replace(RENAME_D, path="/"))


def test_a_put_that_a_later_rename_overtook_fails_and_keeps_its_bytes() -> None:
    """The file was never stored, so nothing replaced it."""
    rename = replace(row(State.DONE, 3), fields=replace(RENAME_D, seq=3))
    assert judge(PUT_D_F, marks=(rename,)) == Verdict(Step.RECORD, State.FAILED, "overtaken")
    onto = replace(rename, fields=replace(RENAME_D, seq=3, path="/alice/c", second=PUT_D_F.path))
    assert judge(PUT_D_F, marks=(onto,)).state is State.SUPERSEDED
    failed = custody.on_answer(row(State.DELIVERING), State.FAILED, "overtaken", NOW)
    assert not custody.may_drop_bytes(failed, NOW)


def test_a_rename_of_a_directory_waits_for_all_below() -> None:
    rename = replace(FILE, seq=3, kind=Kind.RENAME, second="/alice/g", all_below=3, size=None)
    assert judge(rename, rows=[row(State.FAILED)]).step is Step.HOLD
    assert judge(rename, rows=[row(State.FAILED)], low=2) == EXECUTE


def test_op1_refused_at_a_and_op2_done_by_b() -> None:
    newer = row(State.DONE, 3, Hop("B", 1, 1))
    assert judge(hop=Hop("A", 1, 1), marks=(newer,)) == Verdict(Step.RECORD, State.SUPERSEDED)
    stranger = replace(newer, identity=Identity("key:other", "o9", 9))
    assert judge(hop=Hop("A", 1, 1), marks=(stranger,)) == EXECUTE


def test_two_owners_through_one_custodian_keep_its_order() -> None:
    newer = replace(row(State.DONE, hop=Hop("A", 5, 2)), identity=Identity("key:other", "o9", 9))
    assert judge(hop=Hop("A", 5, 1), marks=(newer,)).state is State.SUPERSEDED
    assert judge(hop=Hop("A", 4, 9), marks=(newer,)).state is State.SUPERSEDED
    assert judge(hop=Hop("A", 6, 1), marks=(newer,)) == EXECUTE


def test_a_batch_comes_twice() -> None:
    rows = [row(State.CANCELLED, 3), row(State.DONE, 4)]
    steps = [judge(replace(FILE, seq=seq), rows=rows).step for seq in (3, 4, 5)]
    assert steps == [Step.ANSWER, Step.ANSWER, Step.EXECUTE]


def test_numbers_of_a_batch_are_judged_one_by_one() -> None:
    """Number 3 was cancelled, number 5 refused; then the batch comes again."""
    batch = [replace(FILE, seq=seq) for seq in (3, 4, 5, 6)]
    operations.check_batch(3, 6, batch)
    rows = [row(State.CANCELLED, 3), row(State.DONE, 4), row(State.FAILED, 6, reason="precondition")]
    assert [judge(fields, rows=rows) for fields in batch] == [
        Verdict(Step.ANSWER, State.CANCELLED), Verdict(Step.ANSWER, State.DONE), EXECUTE,
        Verdict(Step.ANSWER, State.FAILED, "precondition"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("first", "last", "numbers", "changes"),
    [
        (1, 3, (1, 3), {}), (1, 2, (1, 2, 3), {}), (1, 2, (2, 1), {}), (1, 2, (1, 1), {}), (1, 2**63, (1,), {}),
        (1, 0, (), {}), (1, 4097, range(1, 4098), {}), (1, 1, (1,), {"size": (8 << 20) + 1}),
        (1, 1, (1,), {"size": None}),
        (1, 9, range(1, 10), {"size": 8 << 20}), (1, 1, (1,), {"kind": Kind.DELETE}),
    ],
)  # fmt: skip
def test_a_batch_has_no_gaps_and_bounds(first: int, last: int, numbers: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(operations.Malformed):
        operations.check_batch(first, last, [replace(FILE, seq=seq, **changes) for seq in numbers])


def test_the_largest_batch() -> None:
    operations.check_batch(1, 4096, [replace(FILE, seq=seq) for seq in range(1, 4097)])
    operations.check_batch(7, 14, [replace(FILE, seq=seq, size=8 << 20) for seq in range(7, 15)])
    with pytest.raises(operations.Malformed):
        operations.check_batch(1, 2, [replace(FILE, seq=1), replace(FILE, seq=2, origin="o2")])


def test_65536_held_operations_fill_the_share() -> None:
    held = row(State.HELD, 3, fields={"after": (1,)})
    limit = limits.Share(rows=10**6, held=65_536, cancels=10**6, size=10**9)
    limits.check_share(limits.used([held] * 65_535), limit, limits.Share(rows=1, held=1, size=2))
    full = limits.used([held] * 65_536)
    with pytest.raises(limits.ShareFull):
        limits.check_share(full, limit, limits.Share(rows=1, held=1, size=2))
    limits.check_share(full, limit, limits.Share(rows=1, size=2))  # other operations of the subject go on
    assert judge(replace(FILE, seq=3, after=(1,)), rows=[held], now=FILE.expires + 1).state is State.EXPIRED


def test_a_false_precondition_is_final() -> None:
    assert judge(seen=Seen(holds=False)) == Verdict(Step.RECORD, State.FAILED, "precondition")


@pytest.mark.parametrize(
    "wrong", [{"seq": 0}, {"after": (2**63 - 1,)}, {"after": (2,)}, {"after": (1,) * 9}, {"expires": NOW + 8 * 86400},
              {"size": -1}, {"all_below": 3}, {"expires": NOW - 1}],
)  # fmt: skip
def test_numbers_are_checked_when_they_are_read(wrong: dict[str, Any]) -> None:
    operations.check_ranges(FILE)
    with pytest.raises(operations.Malformed):
        operations.check_ranges(replace(FILE, **wrong))


# ---- bytes


def test_half_the_ranges_at_the_terminal_are_no_custody() -> None:
    half = row(manifest=LIST, blocks={0: "d0"})
    assert not custody.may_take(half, 0)
    whole = replace(half, blocks=dict(enumerate(LIST)))
    assert custody.may_take(whole, 0)
    assert not custody.may_take(whole, 601)
    assert not custody.may_take(replace(whole, custody=False), 0)


def test_the_tail_brings_other_bytes() -> None:
    assert custody.keep_digest({0: "d0"}, 0, "d0") == {0: "d0"}
    with pytest.raises(custody.BlockDiffers):
        custody.keep_digest({0: "d0"}, 0, "other")


def test_forged_blocks_are_cleared_by_the_signed_list() -> None:
    assert custody.wrong_blocks({0: "d0", 1: "forged", 2: "more"}, LIST) == [1, 2]


MIB = 1 << 20


@pytest.mark.parametrize(
    ("start", "moved_size", "size", "numbers"),
    [
        (0, 4 * MIB, 9 * MIB, [0, 1, 2, 3]), (2 * MIB, 2 * MIB - 1, 9 * MIB, [2]), (2 * MIB, MIB - 1, 9 * MIB, []),
        (8 * MIB, 5, 8 * MIB + 5, [8]), (8 * MIB, 4, 8 * MIB + 5, []), (7 * MIB, MIB + 4, 8 * MIB + 5, [7]),
        (0, 0, 9 * MIB, []),
    ],
)  # fmt: skip
def test_a_cut_range_counts_up_to_its_last_whole_block(
    start: int, moved_size: int, size: int, numbers: list[int]
) -> None:
    assert list(custody.whole_blocks(start, moved_size, size)) == numbers


def test_power_fails_1_s_after_a_204() -> None:
    """Only blocks of the stored bitmap count. Others may come with other digests: the first ones were never seen."""
    after = custody.after_power_failure(row(blocks={0: "d0", 1: "torn"}, manifest=LIST), frozenset({0}))
    assert dict(after.blocks) == {0: "d0"}
    assert not custody.is_whole(after)
    assert custody.is_whole(replace(after, blocks=custody.keep_digest(after.blocks, 1, "d1")))


# ---- deaths, epochs and time


@pytest.mark.parametrize(
    ("kind", "found", "state"),
    [
        (Kind.FILE, Found(path=7), State.DONE), (Kind.FILE, Found(staged=7), State.COMPLETE),
        (Kind.DELETE, Found(trash=7), State.DONE), (Kind.DELETE, Found(path=7), State.COMPLETE),
        (Kind.RENAME, Found(second=7), State.DONE), (Kind.RENAME, Found(path=7, second=8), State.COMPLETE),
        (Kind.DELETE, Found(), State.DONE), (Kind.DELETE, Found(path=9, trash=7), State.DONE),
    ],
)  # fmt: skip
def test_the_inode_decides_between_intent_and_done(kind: Kind, found: Found, state: State) -> None:
    intent = row(State.PUBLISHING, inode=7, fields={"kind": kind, "second": "/alice/g"})
    assert terminal.recovered(intent, found) is state


def test_a_restored_database_asks_first() -> None:
    assert terminal.needs_new_epoch(5, 6)
    assert not terminal.needs_new_epoch(6, 6)
    assert terminal.needs_new_epoch(6, 6, 1, 2)  # the same old copy comes back twice
    assert not terminal.needs_new_epoch(6, 6, 2, 2)
    assert not terminal.needs_new_epoch(5, 6, 2, 1)
    epoch = terminal.new_epoch(NOW, NOW + 5)
    assert epoch > NOW + 5
    assert judge(epoch=epoch).step is Step.ASK_FIRST
    assert judge(epoch=epoch, hop=Hop(known_epoch=epoch)) == EXECUTE
    assert judge(epoch=epoch, hop=Hop(known_epoch=epoch), seen=Seen(is_foreign=True)).reason == "outcome-unknown"
    assert judge(replace(FILE, made=epoch + 600), epoch=epoch) == EXECUTE
    assert judge(epoch=epoch, now=FILE.expires + 1).state is State.EXPIRED_UNKNOWN
    assert terminal.cancel(FILE, Known(epoch=epoch), NOW).state is State.EXPIRED_UNKNOWN


@pytest.mark.parametrize(
    ("kind", "shown", "second", "after"),
    [
        (Kind.FILE, "d", None, AfterAsking.DONE), (Kind.FILE, "other", None, AfterAsking.REPEAT),
        (Kind.FILE, None, None, AfterAsking.REPEAT), (Kind.DELETE, None, None, AfterAsking.DONE),
        (Kind.DELETE, "d", None, AfterAsking.UNKNOWN), (Kind.RENAME, None, "d", AfterAsking.DONE),
        (Kind.RENAME, "d", None, AfterAsking.UNKNOWN), (Kind.MKDIR, "", None, AfterAsking.DONE),
    ],
)  # fmt: skip
def test_the_names_show_the_outcome(kind: Kind, shown: str | None, second: str | None, after: AfterAsking) -> None:
    assert sender.after_asking(replace(FILE, kind=kind), "d", shown, second, []) is after
    assert sender.after_asking(FILE, "d", "other", None, [row(State.DONE, 3)]) is AfterAsking.SUPERSEDED
    moved_on = replace(row(State.DONE, 3), fields=replace(RENAME_D, path=FILE.path, seq=3))
    assert sender.after_asking(FILE, "d", "other", None, [moved_on]) is AfterAsking.UNKNOWN


def test_no_etag_is_given_twice() -> None:
    assert len({terminal.etag(epoch, number) for epoch in (1, 0x11) for number in (1, 0x11)}) == 4


def test_the_custodians_database_is_lost() -> None:
    directories = [row(State.DELIVERING, seq, Hop("A", 5, 9 - seq)) for seq in (2, 3)]
    epoch, rows = custody.rebuild(directories, 4)
    assert (epoch, [one.identity.seq for one in rows], {one.state for one in rows}) == (6, [3, 2], {State.CUSTODY})
    assert custody.is_blocked(rows[1], rows)
    assert not custody.is_blocked(rows[1], [custody.on_answer(moved(Role.CUSTODIAN, rows[0], State.DELIVERING),
                                                              State.REFUSED, "507", NOW), rows[1]])  # fmt: skip


def test_marks_outlive_older_operations() -> None:
    done = row(State.DONE, hop=Hop("A", 1, 1), ended=NOW)
    assert not terminal.may_forget(done, 9, NOW + operations.LONGEST_S)
    assert terminal.may_forget(done, 9, NOW + operations.LONGEST_S + 3601)
    assert terminal.may_forget(row(State.DONE, ended=NOW), 3, NOW)
    assert not terminal.may_forget(row(State.CANCELLED), 2, FILE.expires + 3600)
    assert not terminal.may_forget(row(State.HELD), 9, NOW * 2)


def test_a_jump_of_the_clock_expires_nothing() -> None:
    clock = limits.Clock(NOW, 10.0)
    for wall in (NOW + 31_536_000, NOW - 31_536_000):
        assert clock.at(wall, 20.0) == limits.Clock(NOW, 10.0, False)
        assert clock.at(wall, 20.0).confirmed(wall, 20.0).at(wall + 5, 25.0) == limits.Clock(wall + 5, 25.0)
    assert clock.at(NOW - 5, 20.0).latest == NOW


def test_a_reservation_without_data_has_a_lease() -> None:
    assert not limits.lease_ended(0, 599)
    assert limits.lease_ended(0, 600)


def test_cancel_records_are_bounded_by_the_share() -> None:
    rows = [row(State.CANCELLED)] * 3
    with pytest.raises(limits.ShareFull):
        limits.check_share(limits.used(rows), limits.Share(9, 9, 3, 9), limits.Share(rows=1, cancels=1))
    assert limits.used([row(State.FAILED), row(State.DONE), row(State.REFUSED)]).size == 4


# ---- the sender


def test_a_push_at_a_router_that_never_got_op_7() -> None:
    assert sender.reached({6: State.DONE}, 6, 7) == (False, [7])
    assert sender.reached({6: State.DONE, 7: State.CANCELLED}, 6, 7) == (True, [])


def test_low_stays_below_waiting_dependents() -> None:
    waits = row(State.RECEIVING, 3, fields={"after": (1,)})
    assert sender.low({1: row(State.FAILED, 1), 2: row(State.DONE), 3: waits}) == 1
    assert sender.low({1: row(State.DONE, 1), 2: row(State.DONE), 3: row(State.HELD, 3)}) == 3


def test_a_commit_counts_what_is_durable_here() -> None:
    here = {1: State.CUSTODY, 2: State.DONE, 3: State.REFUSED, 4: State.RECEIVING}
    assert sender.reached(here, 1, 3, "custody") == (True, [])
    assert sender.reached(here, 1, 3) == (False, [])
    assert sender.reached(here, 1, 4, "custody") == (False, [])
    assert sender.reached(here, 1, 5, "custody") == (False, [5])


def test_two_hosts_answer_for_one_name() -> None:
    known = sender.check_router(sender.Router("key1"), sender.Router("key1", 500))
    assert known == sender.Router("key1", 500)
    assert sender.check_router(known, sender.Router("key1", 700)).epoch == 700  # its database was restored
    for other in (sender.Router("key2", 500), sender.Router("key1", 400)):
        with pytest.raises(sender.OtherRouter):
            sender.check_router(known, other)
    assert sender.check_router(sender.Router(""), sender.Router("renewed", 5)) == sender.Router("", 5)


def test_release_decides_when_bytes_may_go() -> None:
    assert sender.may_free("custody", 1, None, 1)
    assert not sender.may_free("custody", 2, None, 1)
    assert not sender.may_free("delivered", 1, None, 2)
    assert sender.may_free("delivered", 1, State.DONE, 0)
    assert not sender.may_free("delivered", 1, State.FAILED, 0)


# ---- the page


def test_the_page_of_cases_names_tests_that_exist() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs/developer/overlay-cases.md").read_text()
    files = [*root.glob("tests/unit/test_rules_*.py"), *root.glob("tests/overlay/test_*.py")]
    there = set(re.findall(r"^(?:async )?def (test_\w+)", "\n".join(one.read_text() for one in files), re.M))
    assert set(re.findall(r"`(test_\w+)`", page)) - there == set()
    here = set(re.findall(r"^def (test_\w+)", Path(__file__).read_text(), re.M))
    assert len(here & set(re.findall(r"`(test_\w+)`", page))) > 30


# ---- the table of states


@pytest.mark.parametrize("role", list(Role))
def test_all_moves_that_are_not_in_the_table_raise(role: Role) -> None:
    for old in State:
        for new in State:
            if old is new or new in MOVES[role].get(old, ()):
                assert moved(role, row(old), new).state is new
            else:
                with pytest.raises(IllegalMove):
                    moved(role, row(old), new)


def test_ends_stay_and_every_other_state_can_end() -> None:
    for role, table in MOVES.items():
        assert set(table) & ENDS <= {State.LOST}
        assert all(moves & ENDS for state, moves in table.items() if state is not State.LOST), role
