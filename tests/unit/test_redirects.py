"""Redirects: failed and waiting files get another URL once, and each refusal leaves everything as it was."""

from __future__ import annotations

import argparse
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sandbox_manager.custody import orders, queries, updates
from sandbox_manager.custody.credentials import Credential, StoredCredentials
from sandbox_manager.custody.ledger import Ledger
from sandbox_manager.custody.redirects import PluginChoice
from stageout.cli import redirect as command
from stageout.cli.exits import CommandError, UsageError
from stageout.cli.main import build_parser
from stageout.core import durable
from stageout.core.states import FileState, State
from stageout.core.synchronous import NO_REASON, Reason
from stageout.model.file import StoredFile
from stageout.model.run import RunFacts
from stageout.model.sandbox import Destination, SlotKey
from stageout.movers.schemes import comparable_url
from stageout.wire.custody import (
    Action,
    Order,
    OrderSheet,
    Run,
    orders_ad,
    payload_of,
    read_orders,
)
from stageout.wire.owner_requests import redirect_problem
from tests.polling import until
from tests.unit.ledger_steps import attempt, take
from tests.unit.manager_site import Node, Site, made, run

JOB = "ap#1.0#1"
NEW = "https://new.org/d/"


@pytest.fixture
def db(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(Ledger(tmp_path / "ledger")) as ledger:
        yield ledger._connection


def _accept(
    db: sqlite3.Connection, *names: str, confirmed: bool = True, token: str = "", data: str = "", host: str = "old"
) -> int:
    """Output of run 1 at ``https://old/p/NAME``, in one hand-off. Returns its sandbox."""
    held = StoredCredentials("t", "", data, (Credential("token", token, 0, "d"),) if token else ())
    scheme = f"{token}+https" if token else "https"
    owner = RunFacts(Run(JOB, 1, "a"), "a", 1, 1, SlotKey("ep", 1, 1), "slot1_1@ep")
    new = [
        StoredFile(at, f"{scheme}://{host}/{'p' if host else 'old/p'}/{name}", name, 5, 1, 1)
        for at, name in enumerate(names)
    ]
    box = updates.add_ticket(db, owner, "t", "/p", new, "boot", 1, held.digest)
    updates.keep_credentials(db, held)
    if confirmed:
        orders.apply_orders(
            db, OrderSheet("ap", "ep", 1, (Order(1, Action.CONFIRM, JOB, 1, ("t",), len(names), owner="a"),)), 10
        )
    return box


def _plugin(path: str, scheme: str) -> PluginChoice:
    problem = NO_REASON if scheme.endswith("https") else Reason("Plugin", f"no plugin moves {scheme}")
    return PluginChoice("/p2", problem)


def _redirect(db: sqlite3.Connection, url: str = NEW, name: str = "", number: int = 2) -> str:
    """Give the order. Returns the reason of the refusal."""
    order = Order(number, Action.REDIRECT, JOB, 1, request="r", new_url=url, only_file=name, owner="a")
    orders.apply_orders(db, OrderSheet("ap", "ep", 1, (order,)), 20, _plugin)
    (box,) = queries.all_sandboxes(db)
    return box.refused


def _urls(db: sqlite3.Connection) -> list[str]:
    return [row[0] for row in db.execute("SELECT url FROM files ORDER BY ticket, position")]


def _content(db: sqlite3.Connection) -> dict[str, list[dict[str, Any]]]:
    """All rows, without what every order changes: its number, its answer, and the count of changes."""
    found = {}
    for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name != 'orders_done'"):
        cursor = db.execute(f"SELECT * FROM {table}")
        names = [column[0] for column in cursor.description]
        found[table] = [dict(zip(names, row)) for row in cursor]
    for row in found["sandboxes"]:
        del row["refused"], row["change"]
    return found


def test_failed_and_waiting_files_get_the_new_directory(db: sqlite3.Connection) -> None:
    box = _accept(db, "a", "b")
    attempt(db, FileState.WAITING, times=3, error_code=40, next_attempt=99)
    attempt(db, FileState.FAILED, 1)
    updates.end(db, box, State.FAILED, 10, "planned")
    assert _redirect(db) == ""
    assert _urls(db) == ["https://new.org/d/a", "https://new.org/d/b"]
    found = queries.sandbox(db, box)
    assert found is not None
    assert (found.state, found.attempts, found.files_left) == (State.CONFIRMED, 0, 2)
    assert {queries.destinations(db)[part.destination] for part in found.waiting} == {
        Destination("/p2", "https", "new.org")
    }


def test_one_file_gets_the_whole_url(db: sqlite3.Connection) -> None:
    _accept(db, "a", "b")
    assert _redirect(db, "https://new.org/other", "b") == ""
    assert _redirect(db, NEW, "a", 3) == ""
    assert _urls(db) == ["https://new.org/d/a", "https://new.org/other"]


@pytest.mark.parametrize("state", [FileState.DELIVERED, FileState.HANDED_OVER])
def test_a_file_that_has_gone_is_not_sent_again(db: sqlite3.Connection, state: FileState) -> None:
    _accept(db, "a", "b")
    attempt(db, state, 0, proof="r:1 abababababababababababababababab 1-1 99")
    assert _redirect(db) == ""
    assert _urls(db) == ["https://old/p/a", "https://new.org/d/b"]
    assert "delivered, or in custody" in _redirect(db, NEW, "a", 3)


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_file_that_may_arrive_at_the_old_place_is_left_and_named(db: sqlite3.Connection, is_sent: bool) -> None:
    box = _accept(db, "a", "b")
    if is_sent:
        take(db, 0)
    else:
        updates.keep_receipts(db, [("a receipt", next(queries.all_files(db, box)).ticket_id, 0)])
    assert _redirect(db).startswith("a: being sent now")
    assert _urls(db) == ["https://old/p/a", "https://new.org/d/b"]


def test_an_order_that_is_given_again_changes_nothing(db: sqlite3.Connection) -> None:
    """The agent repeats it under another number after its restart; the file may be on its way to the new URL."""
    _accept(db, "a")
    _redirect(db)
    take(db)
    assert _redirect(db, number=3) == ""
    assert db.execute("SELECT url, state, attempts FROM files").fetchall() == [("https://new.org/d/a", 1, 1)]


def test_a_second_redirect_counts(db: sqlite3.Connection) -> None:
    _accept(db, "a")
    _redirect(db)
    _redirect(db, "https://third/", number=3)
    assert _urls(db) == ["https://third/a"]


@pytest.mark.parametrize(
    ("given", "url", "name", "reason"),
    [
        ({}, "https://user:secret@new.org/d/", "", "has a user"),
        ({}, "https://new.org/d?X-Amz-Signature=1", "", "a query"),
        ({}, "new/place", "", "must be scheme://host/path"),
        ({}, "ftp://new.org/d", "", "no plugin moves ftp"),
        ({}, NEW, "c", "c is not a file"),
        ({}, "https://old/p/b", "a", "two files would get the URL https://old/p/b"),
        ({}, "https://OLD:443/p/b", "a", "two files would get the URL https://OLD:443/p/b"),
        ({"names": ("x/a", "y/a")}, NEW, "", "two files would get the URL https://new.org/d/a"),
        ({"confirmed": False}, NEW, "", "not confirmed"),
        ({"token": "mine"}, NEW, "", "a is sent with mine, which goes to another server only if the URL names it"),
        ({"data": "[PluginData = 1]", "host": ""}, "https:///new/d/", "", "PluginData"),
        ({}, "other+https://new.org/d", "", "no credential other came"),
        ({"token": "mine"}, "other+https://new.org/d", "", "no credential other came"),
        ({"data": "[PluginData = 1]"}, NEW, "", "PluginData"),
    ],
)
def test_a_refusal_changes_nothing(
    db: sqlite3.Connection, given: dict[str, Any], url: str, name: str, reason: str
) -> None:
    given = dict(given)
    _accept(db, *given.pop("names", ("a", "b")), **given)
    before, (box,) = _content(db), queries.all_sandboxes(db)
    assert reason in _redirect(db, url, name)
    assert _content(db) == before
    assert queries.all_sandboxes(db)[0].change == box.change + 1, "the reason is reported"
    assert all("old/p" in one for one in _urls(db))


@pytest.mark.parametrize("url", ["mine+https://new.org/d/", "mine+https://old/other/"])
def test_a_token_goes_where_the_url_names_it(db: sqlite3.Connection, url: str) -> None:
    box = _accept(db, "a", token="mine")
    assert _redirect(db, url) == ""
    found = queries.sandbox(db, box)
    assert found is not None
    (part,) = found.waiting
    assert queries.destinations(db)[part.destination].credentials_digest == queries.stored_credentials(db, "t").digest


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("Mine+https://new.org/d/", ""),
        ("mine+https://new.org/d/", "no credential mine came"),
        ("mine+https://old/p2/", "no credential mine came"),
    ],
)
def test_the_name_of_a_token_has_its_own_case(db: sqlite3.Connection, url: str, reason: str) -> None:
    _accept(db, "a", token="Mine")
    assert _redirect(db, url).startswith(reason) and bool(_redirect(db, url, number=3)) is bool(reason)


def test_a_redirect_that_was_carried_out_counts_when_all_is_delivered(db: sqlite3.Connection) -> None:
    """An agent that was restarted asks again."""
    _accept(db, "a", "b")
    attempt(db, FileState.DELIVERED, 1)
    assert _redirect(db) == ""
    attempt(db, FileState.DELIVERED)
    assert _redirect(db, number=3) == ""
    assert _redirect(db, "https://new.org/d/a", "a", number=4) == ""
    assert _redirect(db, "https://third/", number=5) == "no file waits or has failed"


def test_the_exact_name_of_a_file_wins(db: sqlite3.Connection) -> None:
    _accept(db, "x/out", "out")
    assert _redirect(db, "https://new.org/one", "out") == ""
    assert _urls(db) == ["https://old/p/x/out", "https://new.org/one"]


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("https://h/p", "HTTPS://H:443/p", True), ("tok+https://h/p", "https://h/p", True),
        ("http://h:80/p", "http://h/p", True), ("https://h:80/p", "https://h/p", False),
        ("https://h/p", "https://h/P", False), ("https://h/p", "http://h/p", False),
        ("https://h//p", "https://h/p", False), ("file:///d/P", "file:///d/p", False),
    ],
)  # fmt: skip
def test_urls_that_certainly_name_the_same_file(one: str, other: str, is_same: bool) -> None:
    assert (comparable_url(one) == comparable_url(other)) is is_same


def test_nothing_is_left_to_redirect(db: sqlite3.Connection) -> None:
    _accept(db, "a")
    attempt(db, FileState.DELIVERED)
    assert _redirect(db) == "no file waits or has failed"


@pytest.mark.parametrize(
    ("url", "is_good"),
    [
        ("https://h/p", True), ("tok.en+https://h:1/p/", True), ("file:///data/x", True), ("https://", False),
        ("h/p", False), ("https://h/a b", False), ("https://h/ü", False), ("https://h/a#b", False),
        ("https://h/a\nb", False), ("https://h/" + "a" * 4000, False), ("-x://h/p", False),
    ],
)  # fmt: skip
def test_urls_of_a_redirect(url: str, is_good: bool) -> None:
    assert (redirect_problem(url) == "") is is_good


def test_earlier_readers_see_no_new_fields() -> None:
    plain, new = (Order(1, Action.RETRY, JOB, 1), Order(2, Action.REDIRECT, JOB, 1, (), 0, 0, "r", NEW, "a"))
    text = payload_of(orders_ad(OrderSheet("ap", "ep", 1, (plain,))))
    assert not any(word in text for word in ("request", "new_url", "only_file"))
    assert read_orders(payload_of(orders_ad(OrderSheet("ap", "ep", 1, (plain, new))))).orders == (plain, new)


def _options(*words: str) -> argparse.Namespace:
    return build_parser("redirect").parse_args(["redirect", *words])


@pytest.mark.parametrize(("job", "url"), [("12", NEW), ("12.0", "https://u:p@h/"), ("12.0", "https://h/?sig=1")])
def test_the_command_refuses_before_it_asks(job: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stageout.cli.condor.Queue", lambda *_: pytest.fail("it asks"))
    options = _options(job, url)
    with pytest.raises(UsageError):
        command.run(options)


def test_a_request_without_an_answer_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = SimpleNamespace(set_request=lambda *_: pytest.fail("it asks"))
    asked = SimpleNamespace(id="12.0", request="redirect r1 https://new/d/")
    monkeypatch.setattr("stageout.cli.condor.Queue", lambda *_: queue)
    monkeypatch.setattr("stageout.cli.condor.Pool", lambda *_: None)
    monkeypatch.setattr(command, "jobs_for", lambda *_: [asked])
    options = _options("12.0", NEW)
    with pytest.raises(CommandError, match="redirect has no answer yet"):
        command.run(options)


def test_the_request_names_the_run_that_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    queue = SimpleNamespace(set_request=lambda _, text: written.append(text))
    monkeypatch.setattr("stageout.cli.condor.Queue", lambda *_: queue)
    monkeypatch.setattr("stageout.cli.condor.Pool", lambda *_: None)
    monkeypatch.setattr(command, "jobs_for", lambda *_: [SimpleNamespace(id="12.0", request="", run=3)])

    def answered(queue: object, pool: object, asked: dict[str, object], *_: object) -> int:
        written.append(str(asked["12.0"]))
        return 0

    monkeypatch.setattr(command, "await_answers", answered)
    command.run(_options("12.0", "a file", NEW))
    sent, waited = written
    assert re.fullmatch(rf"redirect run=3 [0-9a-f]{{8}} {re.escape(NEW)} a file", sent)
    assert waited == sent, "the command waits for the answer to this request"


# ---- a manager with plugins ------------------------------------------------------------------------------------------


async def _ask(node: Node, url: str) -> str:
    facts, node.site.orders = node.facts(), node.site.orders + 1
    run, request = facts.run, f"{node.site.orders}"
    order = Order(node.site.orders, Action.REDIRECT, run.job, 1, request=request, new_url=url, owner=run.owner)
    await node.pipeline.apply_orders(OrderSheet("agent@ap", "manager@ep", 1, (order,)))
    box = node.box()
    assert box is not None
    return box.refused


def test_failed_output_arrives_at_the_new_url() -> None:
    async def work(site: Site) -> None:
        async with site.manager() as node:
            receipt = await node.hand_off({"copy://old/ok/a": b"one", "copy://old/refuse/b": b"two"})
            await node.confirm(receipt)
            await node.until_state(State.FAILED)
            assert "no plugin of this node moves gopher URLs" in await _ask(node, "gopher://new/ok")
            assert await _ask(node, "other://new/ok") == ""
            await node.until_state(State.RELEASED)
        assert sorted(site.delivered()) == ["a", "b"], "a file that had arrived is not sent again"
        assert (site.base / "dest" / "b").read_bytes() == b"two"
        assert site.calls()[-1]["urls"] == ["other://new/ok/b"]

    with made() as site:
        run(work(site))


def test_output_that_waits_for_a_silent_server_is_redirected() -> None:
    async def work(site: Site) -> None:
        async with site.manager() as node:
            receipt = await node.hand_off({"copy://old/busy/a": b"one"})
            await node.confirm(receipt)
            await until(lambda: node.state() is State.RETRY_WAIT, lambda: "the retry")
            assert await _ask(node, "copy://new/ok/") == ""
            await node.until_state(State.RELEASED)
        assert site.delivered() == ["a"]

    with made() as site:
        run(work(site))


@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_the_order_sends_each_file_to_one_place(after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the commit the old URL stands and the order comes again. After it the new one does."""

    async def work(site: Site) -> None:
        async with site.manager() as node:
            receipt = await node.hand_off({"copy://old/ok/a": b"one", "copy://old/refuse/b": b"two"})
            await node.confirm(receipt)
            await node.until_state(State.FAILED)
            if after:
                await _ask(node, "copy://new/ok/")
            else:
                with monkeypatch.context() as broken, pytest.raises(OSError, match="planned"):
                    broken.setattr(durable, "step", _dying)
                    await _ask(node, "copy://new/ok/")
        async with site.manager() as node:
            site.orders -= 1  # the agent has no acknowledgement
            assert await _ask(node, "copy://new/ok/") == ""
            await node.until_state(State.RELEASED)
        assert sorted(site.delivered()) == ["a", "b"]

    with made() as site:
        run(work(site))


def _dying(label: str) -> Any:
    if label == "record-order":
        raise OSError("planned")
    return nullcontext()
