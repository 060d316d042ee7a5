"""Fallbacks: output that its destination does not take goes to the job's second destination, each file once."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandbox_manager.custody import housekeeping, orders, queries, updates
from sandbox_manager.custody.credentials import Credential, StoredCredentials
from sandbox_manager.custody.ledger import Ledger
from sandbox_manager.custody.redirects import FallbackRules, PluginChoice, problem_of
from sandbox_manager.custody.spool import Spool
from sandbox_manager.delivery import batch, results
from sandbox_manager.delivery.results import decide_batch, manager_error, update_state
from sandbox_manager.intake.startd import readable_slots
from sandbox_manager.report.reporter import file_report, sandbox_report
from sandbox_manager.rules import RetryRules, read_rules
from schedd_agent.file_records import _file_attributes
from stageout.cli.explain import fallback_lines
from stageout.cli.render import job_details
from stageout.cli.rows import rows_of_report
from stageout.core import durable
from stageout.core.classads import ClassAd
from stageout.core.config import mapping_settings
from stageout.core.errors import ErrorClass
from stageout.core.states import FileState, State
from stageout.core.synchronous import NO_REASON, Reason
from stageout.model.file import StoredFile
from stageout.model.run import RunFacts
from stageout.model.sandbox import Destination, Sandbox, SlotKey
from stageout.movers.results import Failure
from stageout.movers.schemes import fallback_problem
from stageout.wire.custody import (
    Action,
    FileReport,
    Order,
    OrderSheet,
    Report,
    Run,
    SandboxReport,
    read_report,
    report_ad,
)
from tests.polling import until
from tests.unit.ledger_steps import attempt, damage, judge, take
from tests.unit.manager_site import Site, made, run

JOB = "ap#1.0#1"
BACK = "https://new.org/d/"


def _plugin(path: str, scheme: str) -> PluginChoice:
    problem = NO_REASON if scheme.endswith("https") else Reason("Plugin", f"no plugin moves {scheme}")
    return PluginChoice("/p2", problem)


def _rules(after_s: float = 0.0, away: str = "") -> FallbackRules:
    return FallbackRules(_plugin, after_s, lambda destination: away)


@pytest.fixture
def db(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(Ledger(tmp_path / "ledger")) as ledger:
        yield ledger._connection


def _new(name: str, at: int = 0) -> StoredFile:
    return StoredFile(at, f"https://old/p/{name}", name, 5, 1, 1)


def _moving(db: sqlite3.Connection, *names: str, fallback: str = BACK, problem: str = "") -> int:
    """Output of run 1 that is being sent to ``https://old/p/NAME``. Returns its sandbox."""
    owner = RunFacts(Run(JOB, 1, "a"), "a", 1, 1, SlotKey("ep", 1, 1), "slot1_1@ep")
    box = updates.add_ticket(db, owner, "t", "/p", [_new(name, at) for at, name in enumerate(names)], "boot", 1)
    updates.offer_fallback(db, box, fallback, problem)
    orders.apply_orders(
        db, OrderSheet("ap", "ep", 1, (Order(1, Action.CONFIRM, JOB, 1, ("t",), len(names), owner="a"),)), 10
    )
    _send(db, box)
    return box


def _send(db: sqlite3.Connection, box: int) -> None:
    if updates.state_of(db, box) is not State.MOVING:
        updates.set_state(db, box, State.LEASED, 10)
        updates.set_state(db, box, State.MOVING, 10)
    take(db)


def _fail(
    db: sqlite3.Connection, box: int, text: str, *positions: int, state: FileState = FileState.FAILED, **more: Any
) -> Sandbox:
    """Record that files were not sent, and what becomes of their sandbox."""
    judge(db, state, *positions, error_code=33, error=text)
    return _settled(db, box, **more)


def _settled(db: sqlite3.Connection, box: int, now: int = 20, after_s: float = 0.0) -> Sandbox:
    update_state(db, box, lambda destination: True, _rules(after_s), now)
    found = queries.sandbox(db, box)
    assert found is not None
    return found


def _urls(db: sqlite3.Connection) -> list[str]:
    return [row[0] for row in db.execute("SELECT url FROM files ORDER BY ticket, position")]


def test_failed_files_go_to_the_fallback_with_fresh_attempts(db: sqlite3.Connection) -> None:
    box = _moving(db, "a", "b")
    judge(db, FileState.DELIVERED, 1)
    found = _fail(db, box, "403 from old")
    assert (found.state, found.attempts, found.files_left, found.retried_at) == (State.CONFIRMED, 0, 1, 20)
    assert found.reason == f"goes to the fallback {BACK} because the destination failed: 403 from old"
    assert _urls(db) == ["https://new.org/d/a", "https://old/p/b"]
    assert [queries.destinations(db)[part.destination] for part in found.waiting] == [
        Destination("/p2", "https", "new.org")
    ]
    _send(db, box)
    judge(db, FileState.DELIVERED)
    found = _settled(db, box)
    assert found.state is State.DELIVERED
    assert found.reason == f"1 file delivered to the fallback {BACK} because the destination failed: 403 from old"
    updates.record_released(db, box, ["t"], 30)
    kept = queries.sandbox(db, box)
    assert kept is not None and (kept.state, kept.reason) == (State.RELEASED, found.reason)


def test_without_a_fallback_output_fails_as_before(db: sqlite3.Connection) -> None:
    found = _fail(db, _moving(db, "a", fallback=""), "403")
    assert (found.state, found.reason) == (State.FAILED, "403")


def test_delivered_output_that_never_fell_back_has_no_reason(db: sqlite3.Connection) -> None:
    box = _moving(db, "a")
    judge(db, FileState.DELIVERED)
    assert (_settled(db, box).reason, _urls(db)) == ("", ["https://old/p/a"])


def test_a_failure_there_too_gives_both_reasons(db: sqlite3.Connection) -> None:
    box = _moving(db, "a")
    _fail(db, box, "403 from old")
    _send(db, box)
    found = _fail(db, box, "no space at new")
    assert (found.state, found.error_code) == (State.FAILED, 33)
    assert found.reason == (
        f"the destination and the fallback failed. Destination: 403 from old. Fallback {BACK}: no space at new"
    )


def test_a_retry_sends_to_the_fallback_and_not_back(db: sqlite3.Connection) -> None:
    box = _moving(db, "a")
    _fail(db, box, "403 from old")
    _send(db, box)
    _fail(db, box, "no space at new")
    orders.apply_orders(db, OrderSheet("ap", "ep", 1, (Order(2, Action.RETRY, JOB, 1, owner="a"),)), 30)
    assert updates.state_of(db, box) is State.CONFIRMED and _urls(db) == ["https://new.org/d/a"]
    _send(db, box)
    assert _fail(db, box, "still no space").state is State.FAILED


def test_a_file_that_its_owner_redirected_afterwards_does_not_come_back(db: sqlite3.Connection) -> None:
    box = _moving(db, "a")
    _fail(db, box, "403 from old")
    order = Order(2, Action.REDIRECT, JOB, 1, request="r", new_url="https://third/", owner="a")
    orders.apply_orders(db, OrderSheet("ap", "ep", 1, (order,)), 30, _plugin)
    _send(db, box)
    found = _fail(db, box, "third is full")
    assert (found.state, found.reason, _urls(db)) == (State.FAILED, "third is full", ["https://third/a"])
    orders.apply_orders(db, OrderSheet("ap", "ep", 1, (Order(3, Action.RETRY, JOB, 1, owner="a"),)), 30)
    _send(db, box)
    judge(db, FileState.DELIVERED)
    assert _settled(db, box).reason == "", "it is at the third URL"


def test_a_redirect_before_the_failure_leaves_the_fallback(db: sqlite3.Connection) -> None:
    box = _moving(db, "a")
    updates.moving_back(db, box)
    order = Order(2, Action.REDIRECT, JOB, 1, request="r", new_url="https://third/", owner="a")
    orders.apply_orders(db, OrderSheet("ap", "ep", 1, (order,)), 30, _plugin)
    _send(db, box)
    assert _fail(db, box, "third is full").state is State.CONFIRMED
    assert _urls(db) == ["https://new.org/d/a"]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_file_that_may_be_at_a_router_or_is_damaged_stays(db: sqlite3.Connection, is_damaged: bool) -> None:
    box = _moving(db, "a", "b")
    if is_damaged:
        damage(db, "UPDATE files SET url = CAST(x'68b0' AS TEXT) WHERE position = 0")
    else:
        updates.keep_receipts(db, [("a receipt", next(queries.all_files(db, box)).ticket_id, 0)])
    assert _fail(db, box, "403").state is State.CONFIRMED
    assert _urls(db)[1] == "https://new.org/d/b" and "new" not in _urls(db)[0]
    attempt(db, FileState.DELIVERED, 1)
    _send(db, box)
    assert _fail(db, box, "403 again").reason == "403 again"


def test_two_files_that_would_get_one_url_both_stay(db: sqlite3.Connection) -> None:
    box = _moving(db, "x/a", "y/a")
    found = _fail(db, box, "403")
    assert (found.state, found.fallback) == (State.FAILED, "")
    assert found.reason.startswith("403; the fallback was not used: two files would get the URL https://new.org/d/a")


def test_the_first_destination_is_no_fallback(db: sqlite3.Connection) -> None:
    found = _fail(db, _moving(db, "a", fallback="https://OLD:443/p"), "403")
    assert (found.state, found.reason, _urls(db)) == (State.FAILED, "403", ["https://old/p/a"])


def test_a_fallback_that_proves_useless_while_output_waits_is_reported_once(db: sqlite3.Connection) -> None:
    box = _moving(db, "x/a", "y/a")
    updates.moving_back(db, box)
    updates.set_state(db, box, State.RETRY_WAIT, 20)
    before = queries.sandbox(db, box)
    assert _pass_deadlines(db, 61, 60, "away") == {box}
    found = queries.sandbox(db, box)
    assert before and found and found.change > before.change
    assert found.fallback == "" and found.fallback_note.startswith("two files would get")
    assert _pass_deadlines(db, 71, 60, "away") == set()


# ---- whose failure it is ---------------------------------------------------------------------------------------------

_REFUSED = Failure(ErrorClass.PERMISSION_DENIED, "403 from old")
_AWAY = Failure(ErrorClass.CONNECT_FAILED, "connection refused")
_NO_PLUGIN = "no plugin of this node moves https URLs any more"
#: Failures that say nothing of the destination, and the words of their reasons.
_OF_NODE = [
    pytest.param(manager_error(OSError("disk")), "the manager cannot send", id="manager"),
    pytest.param(results.failure_of_node(ErrorClass.UNKNOWN, "the spool cannot be read"), "the spool", id="spool"),
    pytest.param(results.failure_of_node(ErrorClass.CREDENTIAL_EXPIRED, "it ended"), "it ended", id="expired"),
    pytest.param(results.failure_of_node(ErrorClass.PLUGIN_BROKEN, _NO_PLUGIN), "no plugin", id="no-plugin"),
    pytest.param(batch._CHANGED, "was changed", id="changed"),
    pytest.param(batch._IN_DOUBT, "came or went", id="in-doubt"),
    *(
        pytest.param(Failure(kind, f"plugin: {kind.name}"), kind.name, id=kind.name.lower())
        for kind in (
            ErrorClass.LOCAL_FILE, ErrorClass.SOURCE_CHANGED, ErrorClass.NO_SPACE_LOCAL, ErrorClass.PLUGIN_BROKEN,
            ErrorClass.NOT_ATTEMPTED,
        )
    ),
]  # fmt: skip


def _answer(db: sqlite3.Connection, box: int, *answers: Failure, now: int = 20, after_s: float = 0.0) -> Sandbox:
    """Decide about the files that are being sent, and record that."""
    files = [item for item in queries.all_files(db, box) if item.state is FileState.MOVING]
    rules = RetryRules(1, 20, 1800, 1_000_000)
    updates.record_results(db, decide_batch(files, answers, rules, lambda sandbox: 1, now).all)
    updates.keep_attempts(db, box, 1, 0)
    return _settled(db, box, now, after_s)


@pytest.mark.parametrize(("failure", "words"), _OF_NODE)
def test_a_fault_of_the_node_sends_nothing_to_the_fallback(
    db: sqlite3.Connection, failure: Failure, words: str
) -> None:
    box = _moving(db, "a")
    found = _answer(db, box, failure, now=5000, after_s=60)
    assert found.fallback_note == "" and _urls(db) == ["https://old/p/a"]
    assert _pass_deadlines(db, 5000, 60) == set() or found.state is State.FAILED
    _pass_deadlines(db, 2_000_000, 60)
    found = _settled(db, box, now=2_000_000, after_s=60)
    assert (found.state, _urls(db)) == (State.FAILED, ["https://old/p/a"])
    assert words in found.reason and "because the destination" not in found.reason


@pytest.mark.parametrize("failure", [_REFUSED, _AWAY, Failure(ErrorClass.UNKNOWN, "unknown to the plugin")])
def test_a_destination_that_refuses_or_is_away_counts(db: sqlite3.Connection, failure: Failure) -> None:
    found = _answer(db, _moving(db, "a"), failure, now=5000, after_s=60)
    assert found.fallback_note.startswith(failure.message) and _urls(db) == ["https://new.org/d/a"]


def test_the_reason_names_the_destination_s_failure_not_the_node_s(db: sqlite3.Connection) -> None:
    box = _moving(db, "a", "b")
    found = _answer(db, box, batch._CHANGED, _REFUSED)
    assert found.reason == f"goes to the fallback {BACK} because the destination failed: 403 from old"
    _send(db, box)
    found = _answer(db, box, batch._CHANGED, batch._CHANGED)
    assert found.state is State.FAILED
    assert found.reason == f"{batch._CHANGED.message}; the destination had failed before: 403 from old"


def test_only_the_last_failure_of_a_file_counts(db: sqlite3.Connection) -> None:
    box = _moving(db, "a")
    _answer(db, box, Failure(ErrorClass.THROTTLED, "slow down"))
    _send(db, box)
    found = _answer(db, box, manager_error(OSError("disk")), now=900, after_s=60)
    assert found.fallback_note == "" and _urls(db) == ["https://old/p/a"]


# ---- STAGEOUT_FALLBACK_AFTER -----------------------------------------------------------------------------------------


def test_files_that_were_tried_for_long_go_to_the_fallback(db: sqlite3.Connection) -> None:
    box = _moving(db, "a", "b", "c")
    judge(db, FileState.WAITING, 1)
    early = _fail(db, box, "come back", 0, state=FileState.WAITING, now=60, after_s=60)
    assert early.fallback_note == "", "59 s have passed"
    found = _settled(db, box, now=61, after_s=60)
    assert found.state is State.MOVING and found.fallback_note == "come back"
    assert _urls(db) == ["https://new.org/d/a", "https://new.org/d/b", "https://old/p/c"], "c is being sent"
    _fail(db, box, "come back", state=FileState.WAITING, now=100, after_s=60)
    assert _urls(db)[2] == "https://old/p/c"
    assert _pass_deadlines(db, 121, after_s=60) == {box}
    assert _urls(db)[2] == "https://new.org/d/c"


def _pass_deadlines(db: sqlite3.Connection, now: int, after_s: float, away: str = "") -> set[int]:
    knobs = {"STAGEOUT_FALLBACK_AFTER": str(after_s), "STAGEOUT_RETENTION": "10000000"}
    rules = read_rules(mapping_settings(knobs))
    due = [box.id for box in queries.all_sandboxes(db) if housekeeping.may_be_due(box, rules, now)]
    return set(housekeeping.pass_deadlines(db, due, rules, now, _rules(after_s, away)))


def _waiting(db: sqlite3.Connection) -> int:
    box = _moving(db, "a")
    updates.moving_back(db, box)
    updates.set_state(db, box, State.RETRY_WAIT, 20)
    return box


def _tried(db: sqlite3.Connection, box: int, text: str) -> None:
    attempt(db, FileState.WAITING, error_code=20, error=text)
    updates.keep_attempts(db, box, 1, 0)
    updates.set_reason(db, box, text)


@pytest.mark.parametrize(("away", "falls_back"), [("", False), ("connection refused", True)])
def test_output_whose_turn_has_not_come_waits_unless_its_server_is_away(
    db: sqlite3.Connection, away: str, falls_back: bool
) -> None:
    box = _waiting(db)
    assert _pass_deadlines(db, 60, 60, away) == set()
    assert _pass_deadlines(db, 61, 60, away) == ({box} if falls_back else set())
    assert _urls(db) == (["https://new.org/d/a"] if falls_back else ["https://old/p/a"])


def test_paused_output_waits_for_its_owner(db: sqlite3.Connection) -> None:
    box = _waiting(db)
    updates.set_paused(db, box, True)
    assert _pass_deadlines(db, 1000, 60, "away") == set() and _urls(db) == ["https://old/p/a"]


def test_a_pause_that_is_given_up_does_not_send_output_elsewhere(db: sqlite3.Connection) -> None:
    box = _waiting(db)
    updates.set_paused(db, box, True)
    assert _pass_deadlines(db, 20_000_000, 0) == {box}
    assert updates.state_of(db, box) is State.FAILED and _urls(db) == ["https://old/p/a"]


def test_output_that_waited_for_the_delivery_timeout_goes_to_the_fallback(db: sqlite3.Connection) -> None:
    box = _waiting(db)
    _tried(db, box, "timeout")
    assert _pass_deadlines(db, 300_000, 0) == {box}
    found = queries.sandbox(db, box)
    assert found is not None
    assert (found.state, _urls(db)) == (State.RETRY_WAIT, ["https://new.org/d/a"])
    assert "timeout (gave up after" in found.fallback_note
    _tried(db, box, "timeout there")
    assert _pass_deadlines(db, 600_000, 0) == {box}
    found = queries.sandbox(db, box)
    assert found is not None and found.state is State.FAILED
    assert "Destination: timeout (gave up" in found.reason and "timeout there (gave up" in found.reason


# ---- what a job may name ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        (BACK, ""), ("tok+https://h:1/p", ""), ("https://u:p@h/", "a user"), ("https://h/?sig=1", "a query"),
        ("False", "must be scheme://"), ('strcat("https://", Owner)', "must be scheme://"),
        ("https://h/\n", "must be scheme://"), ("https://h/" + "a" * 1000, "more than 1000 characters"),
    ],
)  # fmt: skip
def test_urls_of_a_fallback(url: str, problem: str) -> None:
    assert problem in fallback_problem(url) and bool(problem) is bool(fallback_problem(url))


@pytest.mark.parametrize(
    ("url", "token", "data", "problem"),
    [
        (BACK, "", "", ""), ("ftp://h/", "", "", "no plugin moves ftp"), (BACK, "mine", "", "only if the URL names it"),
        ("other+https://h/", "", "", "no credential other"), (BACK, "", "[PluginData = 1]", "PluginData"),
        ("https://old/second/", "", "[PluginData = 1]", ""),
    ],
)  # fmt: skip
def test_a_hand_off_looks_whether_its_files_can_go_there(url: str, token: str, data: str, problem: str) -> None:
    held = StoredCredentials("t", "", data, (Credential("token", token, 0, "d"),) if token else ())
    found = problem_of(url, "/p", [_new("a")], held, _plugin)
    assert problem in found and bool(problem) is bool(found)


def test_one_hand_off_that_cannot_use_it_is_enough(db: sqlite3.Connection) -> None:
    box = _moving(db, "a")
    for problem in ("a token", "", "another"):
        updates.offer_fallback(db, box, BACK, problem)
    found = queries.sandbox(db, box)
    assert found is not None and (found.fallback, found.fallback_note) == ("", "a token")


def test_an_attribute_that_cannot_be_decoded_is_an_invalid_fallback() -> None:
    classad2 = pytest.importorskip("classad2")
    ad = classad2.ClassAd(r'[Name="slot1_1"; StageOutFallback="\377"]')
    (slot,) = readable_slots([ad], ["Name", "StageOutFallback"], lambda *fault: None)
    assert fallback_problem(str(slot["StageOutFallback"]))


def test_earlier_readers_of_reports_see_no_new_fields(db: sqlite3.Connection) -> None:
    box = queries.sandbox(db, _moving(db, "a"))
    assert box is not None
    with_one, without = (sandbox_report(one, 0, ()) for one in (box, replace(box, fallback="")))
    texts = [str(report_ad(Report("m", "", 1, 1, {}, 0, (one,)))["StageOutPayload"]) for one in (with_one, without)]
    assert ["fallback" in text for text in texts] == [True, False]
    assert read_report(texts[0]).sandboxes[0].fallback == BACK


def test_the_jobs_ad_and_the_records_of_files_name_the_fallback(db: sqlite3.Connection) -> None:
    found = _delivered_there(db)
    rows = [file_report(row, found, {}) for row in queries.all_files(db, found.id)]
    box = sandbox_report(found, 0, rows)
    reasons = {ad["TransferFileName"]: ad.get("StageOutReason") for ad in map(_file_attributes_of(box), box.files)}
    assert reasons == {"a": box.reason, "b": None}
    row = rows_of_report(Report("m", "", 1, 1, {}, 0, (box,)))[0]
    assert f"  fallback  {BACK}, used because the destination failed: 403 from old" in job_details(row, 2.0)
    (row,) = rows_of_report(Report("m", "", 1, 1, {}, 0, (replace(box, fallback_note=""),)))
    assert f"  fallback  {BACK}, if delivery fails" in job_details(row, 2.0)
    (row,) = rows_of_report(Report("m", "", 1, 1, {}, 0, (replace(box, fallback=""),)))
    assert "  fallback  ignored: 403 from old" in job_details(row, 2.0)


def _delivered_there(db: sqlite3.Connection) -> Sandbox:
    box = _moving(db, "a", "b")
    judge(db, FileState.DELIVERED, 1)
    _fail(db, box, "403 from old")
    _send(db, box)
    judge(db, FileState.DELIVERED)
    return _settled(db, box)


def _file_attributes_of(box: SandboxReport) -> Callable[[FileReport], dict[str, Any]]:
    return lambda file: _file_attributes(file, box)


@pytest.mark.parametrize(
    ("value", "kind", "level", "text"),
    [
        (BACK, "hand-off", "ok", f"if delivery fails: {BACK}"), (BACK, "synchronous", "ok", "not used"),
        ("https://u:p@h/", "hand-off", "problem", "a user"), (7, "hand-off", "problem", "must be scheme://"),
    ],
)  # fmt: skip
def test_explain_tells_of_the_fallback(value: object, kind: str, level: str, text: str) -> None:
    (line,) = fallback_lines(ClassAd({"StageOutFallback": value}), kind)
    assert line.level == level and text in line.text


def test_explain_says_nothing_without_a_fallback() -> None:
    assert not list(fallback_lines(ClassAd({}), "hand-off"))


# ---- a manager with plugins ------------------------------------------------------------------------------------------


def test_refused_output_arrives_at_the_fallback() -> None:
    async def work(site: Site) -> None:
        async with site.manager() as node:
            facts = node.facts(fallback="other://new/ok/")
            receipt = await node.hand_off({"copy://old/ok/a": b"one", "copy://old/refuse/b": b"two"}, facts)
            await node.confirm(receipt)
            box = await node.until_state(State.RELEASED)
        assert "1 file delivered to the fallback other://new/ok/" in box.reason and "quota exceeded" in box.reason
        assert sorted(site.delivered()) == ["a", "b"]
        assert [call["urls"] for call in site.calls()][-1] == ["other://new/ok/b"]

    with made() as site:
        run(work(site))


def test_both_refuse() -> None:
    async def work(site: Site) -> None:
        async with site.manager() as node:
            receipt = await node.hand_off({"copy://old/refuse/b": b"two"}, node.facts(fallback="copy://new/refuse"))
            await node.confirm(receipt)
            box = await node.until_state(State.FAILED)
        assert box.reason.startswith("the destination and the fallback failed. Destination: ")
        assert box.reason.count("quota exceeded") == 2 and len(site.calls()) == 2

    with made() as site:
        run(work(site))


def test_an_invalid_fallback_loses_no_output() -> None:
    async def work(site: Site) -> None:
        async with site.manager() as node:
            facts = node.facts(fallback="gopher://new/ok/")
            receipt = await node.hand_off({"copy://old/refuse/b": b"two"}, facts)
            await node.confirm(receipt)
            box = await node.until_state(State.FAILED)
        assert "; the fallback was not used: no plugin of this node moves gopher URLs" in box.reason

    with made() as site:
        run(work(site))


def test_output_that_waits_for_a_silent_server_falls_back() -> None:
    async def work(site: Site) -> None:
        async with site.manager() as node:
            receipt = await node.hand_off({"copy://old/busy/a": b"one"}, node.facts(fallback="copy://new/ok/"))
            await node.confirm(receipt)
            await until(lambda: node.state() is State.RETRY_WAIT, lambda: "the retry")
            node.clock.ahead_s = 100
            await node.pipeline.run_housekeeping()
            await node.until_state(State.RELEASED)
        assert site.delivered() == ["a"]

    with made({"STAGEOUT_FALLBACK_AFTER": "90"}) as site:
        run(work(site))


def test_a_failure_that_is_not_recorded_has_not_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(site: Site) -> None:
        with monkeypatch.context() as broken:
            broken.setattr(durable, "step", _dying)
            async with site.manager() as node:
                receipt = await node.hand_off({"copy://old/refuse/b": b"two"}, node.facts(fallback="copy://new/ok/"))
                await node.confirm(receipt)
                await until(site.calls, lambda: "the first attempt")
                box = node.box()
        assert box is not None and box.fallback_note == ""
        async with site.manager() as node:
            assert "delivered to the fallback" in (await node.until_state(State.RELEASED)).reason
        assert site.delivered() == ["b"]

    with made() as site:
        run(work(site))


def _dying(label: str) -> Any:
    if label == "record-failed":
        raise OSError("planned")
    return nullcontext()


def test_after_a_restart_output_stays_at_the_fallback() -> None:
    async def work(site: Site) -> None:
        async with site.manager() as node:
            receipt = await node.hand_off({"copy://old/refuse/b": b"two"}, node.facts(fallback="copy://new/busy/"))
            await node.confirm(receipt)
            await until(lambda: node.state() is State.RETRY_WAIT, lambda: "the attempt at the fallback")
        async with site.manager() as node:
            site.wait_s = 0
            await node.order(Action.RETRY)
            await until(lambda: len(site.calls()) > 2, lambda: "one more attempt")
        assert [call["urls"] for call in site.calls()].count(["copy://old/refuse/b"]) == 1

    with made() as site:
        run(work(site))


def test_a_spool_that_cannot_be_read_for_some_time_is_no_failure_of_the_destination(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreadable(*_: object) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    async def work(site: Site) -> None:
        async with site.manager() as node:
            with monkeypatch.context() as broken:
                broken.setattr(Spool, "unchanged", unreadable)
                receipt = await node.hand_off({"copy://old/ok/a": b"one"}, node.facts(fallback="copy://new/ok/"))
                await node.confirm(receipt)
                await until(lambda: node.state() is State.RETRY_WAIT, lambda: "the first attempt")
                node.clock.ahead_s = 100
                await node.pipeline.run_housekeeping()
                await until(lambda: node.box().attempts > 1, lambda: "the second attempt")
            assert "the spool cannot be read" in node.box().reason
            node.clock.ahead_s = 200
            assert (await node.until_state(State.RELEASED)).reason == ""
        assert [call["urls"] for call in site.calls()] == [["copy://old/ok/a"]]

    with made({"STAGEOUT_FALLBACK_AFTER": "90", "STAGEOUT_ATTEMPTS": "1"}) as site:
        run(work(site))
