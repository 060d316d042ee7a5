"""The ledger: what is promised is on the disk, together and one by one."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from overlay_router.local.store import Store
from sandbox_manager.custody import clock_jumps, housekeeping, orders, queries, recovery, updates
from sandbox_manager.custody.credentials import StoredCredentials
from sandbox_manager.custody.ledger import Ledger, LedgerError, get_meta, set_meta
from sandbox_manager.custody.redirects import FallbackRules, no_plugin
from sandbox_manager.custody.schema import VERSION
from sandbox_manager.rules import read_rules
from stageout.core.config import mapping_settings
from stageout.core.errors import ErrorClass
from stageout.core.states import FILE_MOVES, FileState, IllegalMove, State
from stageout.model.file import StoredFile
from stageout.model.run import RunFacts
from stageout.model.sandbox import SlotKey
from stageout.wire.custody import Action, JobKey, Order, OrderSheet, Run
from tests.unit.ledger_steps import attempt, bring

ROOT = Path(__file__).resolve().parents[2]


def new_sandbox(job: str = "ap#1.0#1", number: int = 1) -> RunFacts:
    return RunFacts(Run(job, number, "a@x"), "a", 5, 5, SlotKey("ep", 1, 1), "slot1_1@ep")


def new_files(count: int = 1, url: str = "https://h/d/{}", size: int = 10) -> list[StoredFile]:
    return [StoredFile(i, url.format(i), f"f{i}", size, 1, 2**64 - 1 - i) for i in range(count)]


def add(db: sqlite3.Connection, ticket: str, box: RunFacts | None = None, files: list[StoredFile] | None = None) -> int:
    return updates.add_ticket(db, box or new_sandbox(), ticket, "/p", files or new_files(), "boot", 100)


@pytest.fixture
def db(tmp_path: Path) -> Iterable[sqlite3.Connection]:
    ledger = Ledger(tmp_path / "l")
    connection = ledger._connection
    connection.execute("BEGIN")
    yield connection
    connection.execute("ROLLBACK")
    ledger.close()


def sheet(*wanted: tuple[Action, int, tuple[str, ...], int], first: int = 1) -> OrderSheet:
    return OrderSheet(
        "agent", "m", 0,
        tuple(
            Order(first + index, action, "ap#1.0#1", number, tickets, files, owner="a@x")
            for index, (action, number, tickets, files) in enumerate(wanted)
        ),
    )  # fmt: skip


# ---- writing --------------------------------------------------------------------------------------------------------


def test_what_is_written_is_there_after_a_restart(tmp_path: Path) -> None:
    async def write() -> None:
        ledger = Ledger(tmp_path / "l")
        await ledger.write(lambda db: add(db, "t1"), "record-accepted")
        assert await ledger.read(lambda db: len(queries.all_sandboxes(db))) == 1
        ledger.close()

    asyncio.run(write())
    ledger = Ledger(tmp_path / "l")
    box = asyncio.run(ledger.read(queries.all_sandboxes))[0]
    ledger.close()
    assert (box.state, box.tickets, box.bytes_left) == (State.ACCEPTED, ("t1",), 10)


def test_the_ledger_is_written_through(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l")
    assert ledger._connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert ledger._connection.execute("PRAGMA synchronous").fetchone() == (2,)
    ledger.close()


def test_changes_that_come_together_are_committed_together(tmp_path: Path) -> None:
    async def write() -> int:
        ledger = Ledger(tmp_path / "l")
        commits = 0

        def count(text: str) -> None:
            nonlocal commits
            commits += text == "COMMIT"

        ledger._connection.set_trace_callback(count)
        await asyncio.gather(*(ledger.write(lambda db, i=i: set_meta(db, f"k{i}", "v")) for i in range(300)))
        assert await ledger.read(lambda db: get_meta(db, "k299")) == "v"
        ledger.close()
        return commits

    assert asyncio.run(write()) < 30


def test_a_change_that_fails_takes_nothing_with_it(tmp_path: Path) -> None:
    def bad(db: sqlite3.Connection) -> None:
        set_meta(db, "bad", "half")
        raise IllegalMove("sandbox", State.RELEASED, State.MOVING)

    async def write() -> None:
        ledger = Ledger(tmp_path / "l")
        one, two, three = await asyncio.gather(
            ledger.write(lambda db: set_meta(db, "one", "1")),
            ledger.write(bad),
            ledger.write(lambda db: set_meta(db, "three", "3")),
            return_exceptions=True,
        )
        assert (one, three) == (None, None)
        assert isinstance(two, IllegalMove)
        assert await ledger.read(lambda db: [get_meta(db, name) for name in ("one", "bad", "three")]) == ["1", "", "3"]
        ledger.close()

    asyncio.run(write())


@pytest.mark.parametrize("new", FileState)
@pytest.mark.parametrize("old", FileState)
def test_a_file_moves_as_the_table_allows_and_no_other_way(
    db: sqlite3.Connection, old: FileState, new: FileState
) -> None:
    add(db, "t")
    bring(db, old)
    if new in FILE_MOVES[old]:
        assert updates.move_files(db, {old}, new, "sandbox = ?", [(1,)]) == 1
    else:
        with pytest.raises(IllegalMove, match=f"a file cannot go from {old.name} to {new.name}"):
            updates.move_files(db, {old}, new, "sandbox = ?", [(1,)])
    (now,) = db.execute("SELECT state FROM files").fetchone()
    assert now == (new if new in FILE_MOVES[old] else old)


def test_a_file_in_another_state_stays_as_it_is(db: sqlite3.Connection) -> None:
    add(db, "t", files=new_files(2))
    updates.move_files(db, {FileState.WAITING}, FileState.MOVING, "position = ?", [(0,)])
    assert updates.move_files(db, {FileState.MOVING}, FileState.DELIVERED, "sandbox = ?", [(1,)]) == 1
    assert db.execute("SELECT state FROM files ORDER BY position").fetchall() == [
        (FileState.DELIVERED,), (FileState.WAITING,),
    ]  # fmt: skip


def test_one_function_changes_the_state_of_a_file() -> None:
    """All others say which files move, from where and where to."""
    texts = {path: path.read_text() for path in (ROOT / "sandbox_manager").rglob("*.py")}
    found = [
        (path.name, statement)
        for path, text in texts.items()
        for statement in re.findall(r"UPDATE files SET [^\"]*?\bstate = ", text)
        if not re.search(r"\bWHERE\b", statement)
    ]
    assert found == [("updates.py", "UPDATE files SET {also} state = ")]


def test_a_failed_commit_is_told_to_everybody_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stageout.core import durable

    async def write() -> None:
        ledger = Ledger(tmp_path / "l")
        monkeypatch.setattr(durable, "_faults", durable.parse_faults("record-accepted=EIO"))
        with pytest.raises(OSError, match="planned at record-accepted"):
            await ledger.write(lambda db: add(db, "t1"), "record-accepted")
        assert await ledger.read(queries.all_sandboxes) == []
        monkeypatch.setattr(durable, "_faults", {})
        await ledger.write(lambda db: add(db, "t2"), "record-accepted")
        assert [box.tickets for box in await ledger.read(queries.all_sandboxes)] == [("t2",)]
        ledger.close()

    asyncio.run(write())


def test_a_failed_change_is_answered_although_no_room_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same disk fails when it is asked for its free space: the answer must come all the same."""
    from stageout.core import durable

    class FailingDisk:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def statvfs(self, path: Path) -> os.statvfs_result:
            raise OSError(errno.EIO, "Input/output error")

    async def write() -> None:
        ledger = Ledger(tmp_path / "l")
        with monkeypatch.context() as failing:
            failing.setattr(durable, "_faults", durable.parse_faults("record-accepted=EIO"))
            failing.setattr(durable, "disk", FailingDisk())
            with pytest.raises(OSError, match="planned at record-accepted"):
                await asyncio.wait_for(ledger.write(lambda db: add(db, "t1"), "record-accepted"), 10)
            assert await ledger.give_up_reserve() is False
        await asyncio.wait_for(ledger.write(lambda db: add(db, "t2"), "record-accepted"), 10)
        ledger.close()

    asyncio.run(write())


def test_a_damaged_or_newer_ledger_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"no database" * 1000)
    with pytest.raises(LedgerError, match="put it back from a backup"):
        Ledger(tmp_path / "bad")
    ledger = Ledger(tmp_path / "new")
    ledger._connection.execute("PRAGMA user_version = 99")
    ledger.close()
    with pytest.raises(LedgerError, match="version 99"):
        Ledger(tmp_path / "new")


def test_hand_offs_at_once_share_the_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the design's 300 a second were a matter of the disk."""
    together, write_group = [], Ledger._write_group

    def counted(ledger: Ledger, group: Sequence[Any]) -> None:
        together.append(len(group))
        write_group(ledger, group)

    monkeypatch.setattr(Ledger, "_write_group", counted)

    async def write() -> None:
        ledger = Ledger(tmp_path / "l")
        await asyncio.gather(
            *(
                ledger.write(
                    lambda db, i=i: add(db, f"t{i}", new_sandbox(f"ap#{i}.0#1"), new_files(3)), "record-accepted"
                )
                for i in range(600)
            )
        )
        ledger.close()

    asyncio.run(write())
    assert sum(together) == 600
    assert len(together) < 100, together


def test_numbers_of_states_never_change() -> None:
    names = "Offered Accepted Confirmed Leased Moving RetryWait HandedOver Delivered Released Failed Cancelled "
    names += "Superseded Lost"
    assert [str(queries.STATE_OF[number]) for number in range(13)] == names.split()


# ---- which run, which files -----------------------------------------------------------------------------------------


def test_inode_numbers_of_all_sizes_come_back(db: sqlite3.Connection) -> None:
    box = add(db, "t1")
    assert next(queries.all_files(db, box)).inode == 2**64 - 1


def test_confirmation_names_all_hand_offs(db: sqlite3.Connection) -> None:
    box = add(db, "t1")
    add(db, "t2", files=new_files(2, "https://h/e/{}"))
    orders.apply_orders(db, sheet((Action.CONFIRM, 1, ("t1", "t2"), 3)), 5)
    found = queries.sandbox(db, box)
    assert found and (found.state, found.files_left, found.confirmed_at) == (State.CONFIRMED, 3, 5)


def test_a_hand_off_that_is_not_in_the_record_is_dropped(db: sqlite3.Connection) -> None:
    box = add(db, "t1")
    add(db, "t2", files=new_files(2, "https://h/e/{}"))
    orders.apply_orders(db, sheet((Action.CONFIRM, 1, ("t1",), 1)), 5)
    found = queries.sandbox(db, box)
    assert found and (found.state, found.files_left, found.files_total) == (State.CONFIRMED, 1, 1)
    assert updates.dropped_tickets(db, box) == ["t2"]


@pytest.mark.parametrize(("tickets", "files"), [(("t1", "elsewhere"), 3), (("t1",), 7)])
def test_confirmation_waits_for_what_is_missing(db: sqlite3.Connection, tickets: tuple[str, ...], files: int) -> None:
    box = add(db, "t1")
    orders.apply_orders(db, sheet((Action.CONFIRM, 1, tickets, files)), 5)
    found = queries.sandbox(db, box)
    assert found and found.state is State.ACCEPTED
    assert "this node" in found.reason


def test_a_late_hand_off_completes_the_confirmation(db: sqlite3.Connection) -> None:
    box = add(db, "t1")
    orders.apply_orders(db, sheet((Action.CONFIRM, 1, ("t1", "t2"), 2)), 5)
    add(db, "t2", files=new_files(1, "https://h/e/{}"))
    orders.confirm_late(db, box, 6)
    assert updates.state_of(db, box) is State.CONFIRMED


def test_of_two_hand_offs_of_one_url_the_later_counts(db: sqlite3.Connection) -> None:
    box = add(db, "t1", files=new_files(3))
    add(db, "t2", files=new_files(2, size=20))
    orders.apply_orders(db, sheet((Action.CONFIRM, 1, ("t1", "t2"), 5)), 5)
    wanted = {(item.ticket, item.position) for item in queries.all_files(db, box)}
    assert wanted == {("t1", 2), ("t2", 0), ("t2", 1)}


def test_of_one_url_in_a_hand_off_the_last_file_counts(db: sqlite3.Connection) -> None:
    box = add(db, "t1", files=[*new_files(3, "https://h/same"), *(replace(one, position=3) for one in new_files(1))])
    orders.apply_orders(db, sheet((Action.CONFIRM, 1, ("t1",), 4)), 5)
    assert [(item.position, item.url) for item in queries.all_files(db, box)] == [
        (2, "https://h/same"),
        (3, "https://h/d/0"),
    ]


def test_an_earlier_hand_off_counts_when_only_it_is_in_the_record(db: sqlite3.Connection) -> None:
    box = add(db, "t1", files=new_files(2))
    add(db, "t2", files=new_files(2, size=20))
    orders.apply_orders(db, sheet((Action.CONFIRM, 1, ("t1",), 2)), 5)
    assert {item.ticket for item in queries.all_files(db, box)} == {"t1"}


def test_a_run_that_uploaded_itself_needs_nothing_of_ours(db: sqlite3.Connection) -> None:
    box = add(db, "t1")
    orders.apply_orders(db, sheet((Action.CONFIRM, 1, (), 0)), 5)
    assert updates.state_of(db, box) is State.CANCELLED


def test_a_run_that_is_not_here_is_lost_and_said_so(db: sqlite3.Connection) -> None:
    (box,) = orders.apply_orders(db, sheet((Action.CONFIRM, 1, ("t9",), 1)), 5)
    found = queries.sandbox(db, box)
    assert found and found.state is State.LOST
    assert "no record" in found.reason


def test_orders_are_carried_out_once_and_in_order(db: sqlite3.Connection) -> None:
    box = add(db, "t1")
    confirm, cancel = (Action.CONFIRM, 1, ("t1",), 1), (Action.CANCEL, 1, (), 0)
    orders.apply_orders(db, sheet(confirm), 5)
    assert orders.apply_orders(db, sheet(confirm), 6) == set()
    orders.apply_orders(db, sheet(confirm, cancel), 7)
    assert updates.state_of(db, box) is State.CANCELLED
    assert updates.acknowledged(db) == {"agent": 2}
    orders.apply_orders(db, sheet(confirm, first=3), 8)
    assert updates.state_of(db, box) is State.CANCELLED


@pytest.mark.parametrize("action", [Action.SUPERSEDE, Action.CANCEL])
def test_runs_up_to_the_number_end(db: sqlite3.Connection, action: Action) -> None:
    boxes = [add(db, f"t{number}", new_sandbox(number=number)) for number in (1, 2, 3)]
    orders.apply_orders(db, sheet((action, 2, (), 0)), 5)
    ends = State.SUPERSEDED if action is Action.SUPERSEDE else State.CANCELLED
    assert [updates.state_of(db, box) for box in boxes] == [ends, ends, State.ACCEPTED]


def test_confirming_a_newer_run_ends_the_older(db: sqlite3.Connection) -> None:
    old, new = add(db, "t1"), add(db, "t2", new_sandbox(number=2))
    orders.apply_orders(db, sheet((Action.CONFIRM, 2, ("t2",), 1)), 5)
    assert [updates.state_of(db, box) for box in (old, new)] == [State.SUPERSEDED, State.CONFIRMED]


def test_retry_never_confirms(db: sqlite3.Connection) -> None:
    box = add(db, "t1")
    updates.set_state(db, box, State.FAILED, 5)
    orders.apply_orders(db, sheet((Action.RETRY, 1, (), 0)), 6)
    assert updates.state_of(db, box) is State.FAILED


def test_retry_after_a_failure_starts_afresh(db: sqlite3.Connection) -> None:
    box = add(db, "t1")
    orders.apply_orders(db, sheet((Action.CONFIRM, 1, ("t1",), 1)), 5)
    updates.set_state(db, box, State.LEASED, 5)
    (item,) = updates.claim_files(db, box, 1, 6, 10, 10)
    updates.set_state(db, box, State.MOVING, 5)
    failed = replace(item, state=FileState.FAILED, error_code=40, error="no")
    updates.record_results(db, [failed])
    updates.end(db, box, State.FAILED, 7, "no", 40)
    orders.apply_orders(db, sheet((Action.RETRY, 1, (), 0), first=2), 8)
    found = queries.sandbox(db, box)
    assert found and (found.state, found.attempts, found.failed, found.ended_at) == (State.CONFIRMED, 0, 0, 0)


def test_retry_of_what_waits_for_its_next_attempt_makes_it_due(db: sqlite3.Connection) -> None:
    box = add(db, "t1")
    orders.apply_orders(db, sheet((Action.CONFIRM, 1, ("t1",), 1)), 5)
    attempt(db, FileState.WAITING, times=4, next_attempt=9999)
    assert updates.claim_files(db, box, 1, 6, 10, 10) == []
    orders.apply_orders(db, sheet((Action.RETRY, 1, (), 0), first=2), 6)
    (item,) = updates.claim_files(db, box, 1, 6, 10, 10)
    assert item.attempts == 1


def test_credentials_are_not_exchanged_below_a_mover(db: sqlite3.Connection) -> None:
    box = add(db, "t1")
    orders.apply_orders(db, sheet((Action.CONFIRM, 1, ("t1",), 1)), 5)
    held = StoredCredentials("t1", "[A = 1]", "", ())
    assert updates.renew(db, replace(held, ticket="gone"), 6) is None
    (item,) = updates.claim_files(db, box, 1, 6, 10, 10)
    assert updates.renew(db, held, 6) is None
    waits = replace(item, state=FileState.WAITING, next_attempt=9, error_code=50, error="later")
    updates.record_results(db, [waits])
    assert updates.renew(db, held, 6) == box


def test_forget_waits_for_the_bytes(db: sqlite3.Connection) -> None:
    box = add(db, "t1")
    orders.apply_orders(db, sheet((Action.CANCEL, 1, (), 0), (Action.FORGET, 1, (), 0)), 5)
    assert queries.sandbox(db, box) is not None
    updates.record_released(db, box, ["t1"], 6)
    assert queries.sandbox(db, box) is None
    assert updates.newest_run(db, JobKey("ap#1.0#1", "a@x")) == 1


def test_numbers_of_forgotten_sandboxes_are_never_used_again(db: sqlite3.Connection) -> None:
    """The record of a sandbox under its number must not be taken for another's."""
    box = add(db, "t1")
    ticket = db.execute("SELECT max(id) FROM tickets").fetchone()[0]
    orders.apply_orders(db, sheet((Action.CANCEL, 1, (), 0), (Action.FORGET, 1, (), 0)), 5)
    updates.record_released(db, box, ["t1"], 6)
    assert queries.sandbox(db, box) is None
    assert add(db, "t2", new_sandbox("ap#2.0#1")) > box
    assert db.execute("SELECT max(id) FROM tickets").fetchone()[0] > ticket


def test_forget_does_not_touch_what_is_not_at_its_end(db: sqlite3.Connection) -> None:
    box = add(db, "t1")
    orders.apply_orders(db, sheet((Action.FORGET, 1, (), 0)), 5)
    found = queries.sandbox(db, box)
    assert found and (found.state, found.forgettable) == (State.ACCEPTED, False)


# ---- restart and deadlines ------------------------------------------------------------------------------------------


def moving(db: sqlite3.Connection, ticket: str = "t1") -> int:
    box = add(db, ticket, files=new_files(2))
    orders.apply_orders(db, sheet((Action.CONFIRM, 1, (ticket,), 2)), 5)
    updates.set_state(db, box, State.LEASED, 5)
    updates.claim_files(db, box, 1, 6, 1, 10)
    updates.set_state(db, box, State.MOVING, 5)
    return box


def test_after_a_restart_moving_files_wait_again(db: sqlite3.Connection) -> None:
    box = moving(db)
    updates.mark_synced(db, ["t1"])
    assert recovery.reconcile_ledger(db, ["t1"], "other boot", 9, 60.0) == ({box}, [])
    found = queries.sandbox(db, box)
    assert found and (found.state, found.moving, found.files_left, found.attempts) == (State.CONFIRMED, 0, 2, 0)


def test_after_a_restart_of_the_manager_unsynced_data_is_synced(db: sqlite3.Connection) -> None:
    box = add(db, "t1")
    assert recovery.reconcile_ledger(db, ["t1"], "boot", 9, 60.0) == (set(), ["t1"])
    assert updates.state_of(db, box) is State.ACCEPTED


def test_a_sync_without_a_recorded_end_is_not_believed(db: sqlite3.Connection) -> None:
    """The kernel may have told its failure to the manager that died."""
    box = moving(db)
    updates.mark_syncing(db, ["t1"])
    assert recovery.reconcile_ledger(db, ["t1"], "boot", 9, 60.0) == ({box}, [])
    found = queries.sandbox(db, box)
    assert found and found.state is State.LOST
    assert "nobody knows" in found.reason


def test_what_the_disk_has_lost_is_lost_unless_nobody_needs_it_any_more(db: sqlite3.Connection) -> None:
    box = moving(db)
    other = add(db, "t2", new_sandbox("ap#2.0#1"))
    updates.end(db, other, State.CANCELLED, 6)
    assert list(recovery.mark_tickets_lost(db, {"t1": "EIO", "t2": "EIO", "t3": "EIO"}, 9)) == [box]
    found = queries.sandbox(db, box)
    assert found and (found.state, found.reason, found.files_left) == (State.LOST, "EIO", 0)


def test_no_file_waits_longer_than_was_meant_when_the_clock_was_set_back(db: sqlite3.Connection) -> None:
    box = moving(db)
    updates.mark_synced(db, ["t1"])
    updates.moving_back(db, box)
    for position, due in enumerate((50, 110)):
        attempt(db, FileState.WAITING, position, error_code=20, next_attempt=due)
    assert recovery.reconcile_ledger(db, ["t1"], "boot", 9, 30.0) == ({box}, [])
    assert [row[0] for row in db.execute("SELECT next_attempt FROM files ORDER BY position")] == [50, 9]


class SetClock:
    """A clock whose two hands are set by the test."""

    def __init__(self) -> None:
        self.mono, self.wall = 5.0, 1000.0

    def monotonic_s(self) -> float:
        return self.mono

    def wall_s(self) -> float:
        return self.wall


def test_what_waits_for_a_server_that_is_back_is_due(db: sqlite3.Connection) -> None:
    boxes = [
        add(db, f"t{number}", new_sandbox(f"ap#{number}.0#1"), new_files(2, f"https://{host}/d/{{}}"))
        for number, host in enumerate(("back", "back", "away"))
    ]
    attempt(db, FileState.WAITING, 0, error_code=ErrorClass.CONNECT_FAILED.code, next_attempt=900)
    attempt(db, FileState.WAITING, 1, error_code=ErrorClass.NO_SPACE_REMOTE.code, next_attempt=900)
    before = dict(db.execute("SELECT id, change FROM sandboxes"))
    places = {host: number for number, host in db.execute("SELECT id, host FROM destinations")}
    codes = {ErrorClass.CONNECT_FAILED}
    assert updates.wake(db, boxes[1:], [places["back"]], codes, 500) == {boxes[1]}, "of those that are asked for"
    assert updates.wake(db, boxes, [places["back"]], codes, 500) == {boxes[0]}, "the other one is due already"
    assert updates.wake(db, boxes, [], codes, 500) == set()
    found = db.execute("SELECT sandbox, position FROM files WHERE next_attempt = 500 ORDER BY 1").fetchall()
    assert found == [(boxes[0], 0), (boxes[1], 0)], "their other files failed for another reason"
    changed = {box for box, change in db.execute("SELECT id, change FROM sandboxes") if change != before[box]}
    assert changed == set(boxes[:2]), "reports say so"


def test_the_clock_is_watched() -> None:
    clock = SetClock()
    watch = clock_jumps.WallWatch(clock)
    seen = []
    for passed_s, jump_s in ((1000, 0), (1, -30), (1, -7200), (1, 0), (1, 7200)):
        clock.mono += passed_s
        clock.wall += passed_s + jump_s
        seen.append(watch.jump_s())
        assert watch.jump_s() == seen[-1], "until that is handled"
        watch.handled(seen[-1])
    assert seen == [0, 0, -7200, 0, 7200]


@pytest.mark.parametrize(
    ("jump_s", "now", "times"),
    [(86_400, 86_500, (86_500, 86_410, 0)), (-50, 60, (60, 10, 0)), (-50, 9, (9, 9, 0))],
)
def test_ages_stay_what_they_were_when_the_clock_is_set(
    jump_s: int, now: int, times: tuple[int, int, int], db: sqlite3.Connection
) -> None:
    box = add(db, "t1")
    orders.apply_orders(db, sheet((Action.CONFIRM, 1, ("t1",), 1)), 10)
    updates.raise_fence(db, new_sandbox().run, 100)
    assert updates.keep_ages(db, jump_s, now) == {box}
    assert db.execute("SELECT accepted_at, confirmed_at, ended_at FROM sandboxes").fetchall() == [times]
    assert db.execute("SELECT at FROM fences WHERE owner = 'a@x'").fetchall() == [(times[0],)]
    if jump_s > 0:  # what came since then is left as it is
        late = updates.add_sandbox(db, new_sandbox("ap#2.0#1"), now - 5)
        updates.keep_ages(db, jump_s, now)
        assert updates.times(db, late).accepted_at == now - 5


def test_after_a_restart_of_the_machine_unsynced_data_is_lost(db: sqlite3.Connection) -> None:
    box = moving(db)
    assert recovery.reconcile_ledger(db, ["t1"], "other boot", 9, 60.0) == ({box}, [])
    found = queries.sandbox(db, box)
    assert found and found.state is State.LOST
    assert "before the output was safely on its disk" in found.reason


def test_a_sandbox_without_its_directory_is_lost(db: sqlite3.Connection) -> None:
    box = add(db, "t1")
    updates.mark_synced(db, ["t1"])
    recovery.reconcile_ledger(db, [], "boot", 9, 60.0)
    assert updates.state_of(db, box) is State.LOST


def test_what_is_delivered_is_not_lost_with_its_directory(db: sqlite3.Connection) -> None:
    box = moving(db)
    for old, new in (({FileState.WAITING}, FileState.MOVING), ({FileState.MOVING}, FileState.DELIVERED)):
        updates.move_files(db, old, new, "sandbox = ?", [(box,)])
    updates.end(db, box, State.DELIVERED, 9)
    recovery.reconcile_ledger(db, [], "other boot", 9, 60.0)
    assert updates.state_of(db, box) is State.DELIVERED


_NO_FALLBACK = FallbackRules(no_plugin, 0.0, lambda destination: "")


def deadlines(db: sqlite3.Connection, now: int) -> set[int]:
    rules = read_rules(mapping_settings({"STAGEOUT_RETENTION": "1000000", "STAGEOUT_CONFIRM_TIMEOUT": "60"}))
    boxes = queries.all_sandboxes(db)
    touched = set(housekeeping.pass_deadlines(db, [box.id for box in boxes], rules, now, _NO_FALLBACK))
    assert touched <= {box.id for box in boxes if housekeeping.may_be_due(box, rules, now)}
    return touched


def test_unconfirmed_sandboxes_are_reported_and_later_lost(db: sqlite3.Connection) -> None:
    box = add(db, "t1")
    assert deadlines(db, 150) == set()
    assert deadlines(db, 161) == {box}
    found = queries.sandbox(db, box)
    assert found and (found.state, found.reason) == (State.ACCEPTED, "not confirmed by the access point within 60 s")
    assert deadlines(db, 162) == set()
    deadlines(db, 1_000_101)
    assert updates.state_of(db, box) is State.LOST


def tried(db: sqlite3.Connection, box: int, position: int, kind: ErrorClass) -> None:
    attempt(db, FileState.WAITING, position, error_code=kind.code)
    updates.keep_attempts(db, box, 1, 0)


def test_attempts_that_count_are_those_of_the_file_with_the_most_of_them(db: sqlite3.Connection) -> None:
    box = add(db, "t1", files=new_files(2))
    for attempts, excused in ((5, 5), (3, 0), (6, 5)):
        updates.keep_attempts(db, box, attempts, excused)
    found = queries.sandbox(db, box)
    assert found and (found.attempts, found.attempts - found.excused) == (6, 3)


def test_what_waits_too_long_fails_with_its_last_words(db: sqlite3.Connection) -> None:
    box = add(db, "t1")
    orders.apply_orders(db, sheet((Action.CONFIRM, 1, ("t1",), 1)), 5)
    tried(db, box, 0, ErrorClass.SERVER_ERROR)
    updates.set_reason(db, box, "come back")
    assert deadlines(db, 100 + 259200) == set()
    deadlines(db, 100 + 259200 + 1801)
    found = queries.sandbox(db, box)
    assert found and (found.state, found.files_left) == (State.FAILED, 1)
    assert found.reason == "come back (gave up after 72.5 hours)"


@pytest.mark.parametrize(("kind", "waiting"), [(ErrorClass.SERVER_ERROR, 1), (ErrorClass.CONNECT_FAILED, 0)])
def test_a_file_fails_untried_only_if_its_server_was_not_reached(
    db: sqlite3.Connection, kind: ErrorClass, waiting: int
) -> None:
    box = add(db, "t1", files=new_files(2))
    orders.apply_orders(db, sheet((Action.CONFIRM, 1, ("t1",), 2)), 5)
    assert deadlines(db, 500_000) == set()
    tried(db, box, 0, kind)
    assert deadlines(db, 500_000) == {box}
    found = queries.sandbox(db, box)
    assert found and sum(part.files for part in found.waiting) == waiting
    assert found.state is (State.CONFIRMED if waiting else State.FAILED)
    assert deadlines(db, 500_000) == set()


def test_bytes_of_a_failure_are_kept_for_the_retention_time(db: sqlite3.Connection) -> None:
    box = add(db, "t1")
    updates.end(db, box, State.FAILED, 100, "no")
    assert deadlines(db, 1_000_100) == set()
    deadlines(db, 1_000_101)
    found = queries.sandbox(db, box)
    assert found and (found.state, found.files_left) == (State.LOST, 0)


def test_records_of_ends_go_at_last(db: sqlite3.Connection) -> None:
    box = add(db, "t1")
    updates.end(db, box, State.CANCELLED, 100)
    assert deadlines(db, 1_000_101) == {box}
    updates.record_released(db, box, ["t1"], 1_000_102)
    assert queries.sandbox(db, box) is None


def test_jobs_that_nothing_is_held_of_are_forgotten_in_time(db: sqlite3.Connection) -> None:
    add(db, "t1")
    updates.raise_fence(db, Run("ap#2.0#1", 4, "a@x"), 100)
    updates.drop_old_fences(db, 100)
    assert queries.fences(db) == {JobKey("ap#1.0#1", "a@x"): 1, JobKey("ap#2.0#1", "a@x"): 4}
    updates.drop_old_fences(db, 101)
    assert queries.fences(db) == {JobKey("ap#1.0#1", "a@x"): 1}


@pytest.mark.parametrize("is_there", [False, True])
def test_a_ledger_that_was_emptied_or_removed_does_not_make_an_end_of_the_sandboxes(
    is_there: bool, tmp_path: Path
) -> None:
    """They were removed as nobody's, with output that had been taken over."""
    sandboxes = tmp_path / "sandboxes"
    (sandboxes / "ticket").mkdir(parents=True)
    if is_there:
        (tmp_path / "l").touch()
    for _ in range(2):
        with pytest.raises(LedgerError, match=r"has 1 sandboxes: put it back .* the jobs run again"):
            Ledger(tmp_path / "l", sandboxes)
    (sandboxes / "ticket").rmdir()
    Ledger(tmp_path / "l", sandboxes).close()
    (sandboxes / "ticket").mkdir()
    Ledger(tmp_path / "l", sandboxes).close()


@pytest.mark.parametrize("version", [0, VERSION])
def test_the_database_of_another_program_is_not_touched(version: int, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "l")) as connection:
        connection.execute("CREATE TABLE theirs (data BLOB)")
        connection.execute(f"PRAGMA user_version = {version}")
        connection.commit()
    before = (tmp_path / "l").read_bytes()
    with pytest.raises(LedgerError, match="of another program"):
        Ledger(tmp_path / "l")
    assert (tmp_path / "l").read_bytes() == before


def test_the_database_of_a_router_is_no_ledger(tmp_path: Path) -> None:
    """It has a table of the same name as one of ours."""
    Store(tmp_path / "l").close()
    before = (tmp_path / "l").read_bytes()
    with pytest.raises(LedgerError, match="of another program"):
        Ledger(tmp_path / "l")
    assert (tmp_path / "l").read_bytes() == before
