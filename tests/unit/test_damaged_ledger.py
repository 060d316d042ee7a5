"""A ledger with damage in it: what one byte costs, and what it does not."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sandbox_manager.custody import queries
from sandbox_manager.custody.ledger import Ledger, LedgerError
from sandbox_manager.report import reporter
from stageout.core import durable
from stageout.core.states import State
from tests.polling import until
from tests.unit.daemon_site import accepted, in_thread, served
from tests.unit.manager_site import Node, Site, made, run


@pytest.fixture
def site() -> Iterator[Site]:
    with made() as found:
        yield found


def ledger_of(site: Site) -> Path:
    return site.base / "spool" / "ledger" / "ledger.sqlite"


def flip(path: Path, text: bytes) -> None:
    """One byte of a text becomes another, which UTF-8 does not know, in each place where it is on the disk."""
    content = path.read_bytes()
    assert text in content
    path.write_bytes(content.replace(text, text[:-1] + bytes([text[-1] ^ 0x80])))


def page_of(path: Path, name: str) -> tuple[int, int]:
    """Where the first page of a table or an index begins, and how long it is."""
    with closing(sqlite3.connect(path)) as db:
        (size,) = db.execute("PRAGMA page_size").fetchone()
        (root,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,)).fetchone()
    return (root - 1) * size, size


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


async def _two_jobs(site: Site) -> dict[str, str]:
    """Tickets of two jobs whose output waits."""
    async with site.manager(moving=False) as node:
        tickets = {}
        for job, name in (("1.0", "good"), ("2.0", "bad")):
            facts = node.facts(job)
            receipt = await node.hand_off({f"copy://h/ok/{name}": b"x"}, facts)
            await node.confirm(receipt, facts=facts)
            tickets[name] = receipt.ticket
        return tickets


async def _bad_is_lost(node: Node) -> None:
    await node.until_state(State.RELEASED, node.facts("1.0"))
    box = await node.until_state(State.LOST, node.facts("2.0"))
    assert "the ledger" in box.reason and "damaged" in box.reason


def test_a_flipped_byte_in_a_url_costs_one_sandbox(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        await _two_jobs(site)
        flip(ledger_of(site), b"copy://h/ok/bad")
        async with site.manager() as node:
            await _bad_is_lost(node)

    run(story())
    assert site.delivered() == ["good"]
    assert [
        record.message
        for record in caplog.records
        if record.message.startswith("sandbox-lost ") and "damaged" in record.message
    ]


@pytest.mark.parametrize("text", [b"copy://h/ok/bad", b"scratch/bad", b"#2.0#1700000000", b"alice@test"])
def test_reports_go_on_whatever_text_is_damaged(site: Site, text: bytes) -> None:
    async def story() -> None:
        async with served(site) as node:
            node.collector.confirms = False
            await accepted(node, "copy://h/ok/good")
        await _two_jobs(site)
        flip(ledger_of(site), text if text in ledger_of(site).read_bytes() else b"bad")
        async with served(site) as node:
            node.collector.confirms = False
            await until(lambda: node.collector.last().get("1.0") is not None, node.collector.last)
            assert len(node.collector.reports[-1].sandboxes) == 2
            answers = await in_thread(lambda: node.ask(op="status"))
            assert [answer["op"] for answer in answers].count("sandbox") == 2
            (metrics,) = await in_thread(lambda: node.ask(op="metrics"))
            assert metrics["metrics"]["ReportProblem"] == ""

    run(story())


def test_a_state_that_no_version_knows_is_a_loss(site: Site) -> None:
    async def story() -> None:
        await _two_jobs(site)
        with closing(sqlite3.connect(ledger_of(site))) as db:
            db.execute("UPDATE sandboxes SET state = 77 WHERE job LIKE '%#2.0#%'")
            db.commit()
        async with site.manager() as node:
            await node.until_state(State.RELEASED, node.facts("1.0"))
            assert node.state(node.facts("2.0")) is State.LOST

    run(story())
    assert site.delivered() == ["good"]


@pytest.mark.parametrize("index", ["files_due", "tickets_of"])
def test_an_index_that_is_damaged_is_made_anew(site: Site, index: str, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        await _two_jobs(site)
        at, size = page_of(ledger_of(site), index)
        last = ledger_of(site).read_bytes()[at + size - 1]
        overwrite(ledger_of(site), at + size - 1, bytes([last ^ 0x55]))
        async with site.manager() as node:
            for job in ("1.0", "2.0"):
                await node.until_state(State.RELEASED, node.facts(job))

    run(story())
    assert sorted(site.delivered()) == ["bad", "good"]
    assert [record.message for record in caplog.records if record.message.startswith("ledger-repaired ")]


@pytest.mark.parametrize("table", ["files", "sandboxes", "tickets"])
def test_a_page_that_is_damaged_stops_the_manager_and_deletes_nothing(site: Site, table: str) -> None:

    tickets: dict[str, str] = {}

    async def kept() -> None:
        tickets.update(await _two_jobs(site))

    run(kept())
    at, size = page_of(ledger_of(site), table)
    overwrite(ledger_of(site), at, os.urandom(size))
    with pytest.raises(LedgerError, match=r"malformed|disk image.*put it back from a backup"):
        Ledger(ledger_of(site))
    for ticket in tickets.values():
        assert (site.base / "spool" / "sandboxes" / ticket / "0").read_bytes() == b"x"


def test_nothing_is_taken_while_no_report_can_be_made(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **more: Any) -> Any:
        raise ValueError("a fault in the report")

    async def story() -> None:
        async with served(site) as node:
            node.collector.confirms = False
            await accepted(node, "copy://h/ok/a")

            async def metrics() -> Any:
                (found,) = await in_thread(lambda: node.ask(op="metrics"))
                return found["metrics"]

            assert (await metrics())["ReportProblem"] == ""
            with monkeypatch.context() as broken:
                broken.setattr(reporter, "report_ad", fails)
                await in_thread(node.hand_off, "copy://h/ok/b")

                async def metrics_with_the_fault() -> Any:
                    found = await metrics()
                    return found if "a fault in the report" in found["ReportProblem"] else None

                assert (await until(metrics_with_the_fault, "the fault"))["StageOutAccept"] is False
                answer = await in_thread(node.hand_off, "copy://h/ok/c")
                assert answer["op"] == "refuse" and "report" in answer["reason"]
            await accepted(node, "copy://h/ok/d")
            assert (await metrics())["StageOutAccept"] is True

    run(story())


def test_one_sandbox_whose_files_cannot_be_read_is_reported_without_them(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = queries.files_in_trouble_first

    def fails(db: sqlite3.Connection, box: int, *more: Any) -> Any:
        if box == 1:
            raise sqlite3.DatabaseError("database disk image is malformed")
        return real(db, box, *more)

    async def story() -> None:
        await _two_jobs(site)
        monkeypatch.setattr(queries, "files_in_trouble_first", fails)
        async with served(site) as node:
            files = {box.run.job_id: len(box.files) for box in node.collector.reports[0].sandboxes}
            assert files == {"1.0": 0, "2.0": 1}

    run(story())


@pytest.mark.parametrize("when", ["kill-before", "kill-after"])
def test_a_manager_that_dies_in_the_repair_repairs_again(site: Site, when: str) -> None:
    async def damage() -> None:
        await _two_jobs(site)

    run(damage())
    at, size = page_of(ledger_of(site), "files_due")
    last = ledger_of(site).read_bytes()[at + size - 1]
    overwrite(ledger_of(site), at + size - 1, bytes([last ^ 0x55]))
    child = os.fork()
    if not child:
        durable._faults.update(durable.parse_faults(f"ledger-repair={when}"))
        Ledger(ledger_of(site))
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    Ledger(ledger_of(site)).close()
    with closing(sqlite3.connect(ledger_of(site))) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
