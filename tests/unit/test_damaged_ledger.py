"""A ledger with damage in it: what one byte costs, and what it does not."""

from __future__ import annotations

import os
import random
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandbox_manager.custody import orders, queries, updates
from sandbox_manager.custody.credentials import Credential, StoredCredentials
from sandbox_manager.custody.ledger import Ledger, LedgerError, set_meta
from sandbox_manager.report import reporter
from sandbox_manager.scheduling import rates
from sandbox_manager.scheduling.deadlines import Observed
from sandbox_manager.scheduling.rates import ServerRate
from stageout.core import durable
from stageout.core.states import FileState, State
from stageout.model.file import StoredFile
from stageout.model.run import RunFacts
from stageout.model.sandbox import SlotKey
from stageout.wire.custody import Action, Order, OrderSheet, Run
from tests.polling import until
from tests.unit.daemon_site import accepted, in_thread, served
from tests.unit.ledger_steps import damage
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
        damage(ledger_of(site), "UPDATE sandboxes SET state = 77 WHERE job LIKE '%#2.0#%'")
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


# ---- the definitions of tables, indexes and triggers -----------------------------------------------------------------


def redefine(path: Path, old: str, new: str) -> None:
    """Change a definition as a flipped bit does, which SQLite notices no more than that."""
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA writable_schema = ON")
        assert db.execute("UPDATE sqlite_master SET sql = replace(sql, ?, ?)", (old, new)).rowcount
        assert db.execute("SELECT count(*) FROM sqlite_master WHERE instr(sql, ?)", (new,)).fetchone()[0]
        db.commit()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("next_attempt, size)", "next_attempt)"),
        ("sandbox, state) WHERE error_code != 0", "sandbox, state) WHERE error_code != 1"),
        ("files = files - 1", "files = files - 3"),
        ("AFTER UPDATE OF state ON", "AFTER UPDATE OF staue ON"),
        ("CREATE INDEX tickets_of ON tickets (sandbox)", "CREATE INDEX tickets_of ON tickets (plugin)"),
    ],
)
def test_a_damaged_definition_of_an_index_or_a_trigger_is_made_anew(
    tmp_path: Path, old: str, new: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ledger.sqlite"
    _filled(path)
    redefine(path, old, new)
    _works(path)
    assert [record.message for record in caplog.records if record.message.startswith("ledger-repaired ")]


@pytest.mark.parametrize("column", ["sql", "name", "tbl_name"])
def test_a_definition_that_is_no_text_stops_the_manager_with_advice(tmp_path: Path, column: str) -> None:
    path = tmp_path / "ledger.sqlite"
    _filled(path)
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA writable_schema = ON")
        db.execute(f"UPDATE sqlite_master SET {column} = CAST({column} AS BLOB) WHERE name = 'files_due'")
        db.commit()
    with pytest.raises(LedgerError, match=r"malformed.*put it back from a backup"):
        Ledger(path)


def test_sums_that_a_damaged_trigger_has_left_are_counted_anew(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    _filled(path)
    redefine(path, "files = files - 1", "files = files - 3")
    with closing(sqlite3.connect(path)) as db:
        updates.move_files(db, {FileState.WAITING}, FileState.FAILED, "position = ?", [(0,)])
        db.commit()
    with closing(Ledger(path)) as ledger:
        box = queries.sandbox(ledger._connection, 1)
        assert box is not None and (box.files_total, box.failed) == (3, 1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("excused INTEGER", "dxcused INTEGER"), ("credential_ends_at", "credential_ends_au"),
        ("verified TEXT", "verified TEXV"), ("CREATE TABLE rates", "CREATE TABLE rades"),
    ],
)  # fmt: skip
def test_a_damaged_definition_of_a_table_stops_the_manager_with_advice(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "ledger.sqlite"
    _filled(path)
    redefine(path, old, new)
    with pytest.raises(LedgerError, match=r"malformed.*put it back from a backup"):
        Ledger(path)


def test_a_database_of_another_program_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE pictures (id)")
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="database of another program"):
        Ledger(path)
    assert path.read_bytes() == before


def _filled(path: Path) -> None:
    """A ledger with a sandbox of three files."""
    with closing(Ledger(path)) as ledger:
        _add(ledger._connection, "1.0", "a" * 32)


def _add(db: sqlite3.Connection, job: str, ticket: str) -> int:
    owner = RunFacts(Run(f"ap#{job}#1", 1, "a"), "a", 1, 1, SlotKey("ep", 1, 1), "slot1_1@ep")
    files = [StoredFile(at, f"https://h/{at}", str(at), 5, 1, at) for at in range(3)]
    return updates.add_ticket(db, owner, ticket, "/p", files, "boot", 1)


def _works(path: Path) -> None:
    """Open a ledger, and carry old and new output through it to its end."""
    with closing(Ledger(path)) as ledger:
        db = ledger._connection
        new = _add(db, "2.0", "b" * 32)
        for box, ticket in ((1, "a" * 32), (new, "b" * 32)):
            found = queries.sandbox(db, box)
            assert found is not None and (found.tickets, found.files_total, found.bytes_left) == ((ticket,), 3, 15)
            assert [item.url for item in queries.all_files(db, box)] == [f"https://h/{at}" for at in range(3)]
            held = StoredCredentials(ticket, "", "", (Credential("token", "t", 9, "d"),))
            updates.keep_credentials(db, held)
            order = Order(box, Action.CONFIRM, found.run.job, 1, (ticket,), 3, owner=found.run.owner)
            orders.apply_orders(db, OrderSheet("ap", "ep", 1, (order,)), 10)
            for state in (State.LEASED, State.MOVING):
                updates.set_state(db, box, state, 10)
            (part,) = queries.sandbox(db, box).waiting  # type: ignore[union-attr]
            taken = updates.claim_files(db, box, part.destination, 20, 9, 99)
            results = [replace(item, state=FileState.DELIVERED) for item in taken]
            updates.record_results(db, results)
            updates.end(db, box, State.DELIVERED, 30)
            updates.may_forget(db, box)
            updates.record_released(db, box, [ticket], 40)
        assert queries.all_sandboxes(db) == []
        assert not db.execute("SELECT 1 FROM files").fetchall() + db.execute("SELECT 1 FROM sums").fetchall()
        set_meta(db, "x", "y")
        rates.keep(db, "s", ServerRate(Observed(1.0, 1.0, 1), 1))
        updates.keep_unknown(db, ["c" * 32], 5, 9)
        updates.drop_old_fences(db, 99)


def _schema_bytes(content: bytes) -> list[int]:
    """Offsets of the header, and of the pages with definitions."""
    size = int.from_bytes(content[16:18], "big")
    pages = [at for at in range(0, len(content), size) if at == 0 or b"CREATE " in content[at : at + size]]
    return [at + byte for at in pages for byte in range(size)]


def test_a_flipped_bit_in_the_schema_is_repaired_or_explained(tmp_path: Path) -> None:
    """Nothing between: a manager that runs and can do nothing tells nobody why."""
    path, damaged = tmp_path / "ledger.sqlite", tmp_path / "damaged.sqlite"
    _filled(path)
    content = path.read_bytes()
    places = _schema_bytes(content)
    chance = random.Random(27)
    outcomes: Counter[str] = Counter()
    for at in [chance.choice(places) for _ in range(120)]:
        one = bytearray(content)
        one[at] ^= 1 << chance.randrange(8)
        for left in tmp_path.glob("damaged.*"):
            left.unlink()
        damaged.write_bytes(one)
        try:
            _works(damaged)
            outcomes["works"] += 1
        except LedgerError as problem:
            assert "backup" in str(problem) or "start that version again" in str(problem), (at, problem)
            outcomes["explained"] += 1
        except Exception as problem:
            raise AssertionError(f"bit of byte {at}, {one[at]:#x} for {content[at]:#x}: {problem!r}") from problem
    assert outcomes["works"] and outcomes["explained"]
