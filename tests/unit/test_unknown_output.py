"""A ledger that is older than its spool: accepted output that it does not know is never deleted in silence."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from stageout.core import durable
from stageout.core.states import State
from stageout.wire.custody import Action
from tests.unit.manager_site import Node, Site, made, run


@pytest.fixture
def site() -> Iterator[Site]:
    with made() as found:
        yield found


def ledger_of(site: Site) -> Path:
    return site.base / "spool" / "ledger" / "ledger.sqlite"


def backup(site: Site, name: str) -> Path:
    """A copy of the ledger, with all that is committed."""
    target = site.base / name
    with closing(sqlite3.connect(ledger_of(site))) as db, closing(sqlite3.connect(target)) as copy:
        db.backup(copy)
    return target


def put_back(site: Site, copy: Path) -> None:
    """The steps that docs/administrator/monitoring.md gives the administrator."""
    for name in ("ledger.sqlite-wal", "ledger.sqlite-shm"):
        (ledger_of(site).parent / name).unlink(missing_ok=True)
    shutil.copy(copy, ledger_of(site))


async def first(node: Node) -> str:
    return (await node.hand_off({"copy://h/ok/a": b"first"})).ticket


async def second(node: Node) -> str:
    return (await node.hand_off({"copy://h/ok/b": b"second", "copy://h/ok/c": b"2"}, node.facts("2.0"))).ticket


def unknown(site: Site) -> list[str]:
    place = site.base / "spool" / "unknown"
    return sorted(path.name for path in place.iterdir())


async def _two_with_backups(site: Site) -> tuple[str, str, Path, Path]:
    async with site.manager(moving=False) as node:
        one = await first(node)
        older = backup(site, "older")
        two = await second(node)
        return one, two, older, backup(site, "newest")


def test_output_that_a_restored_ledger_does_not_know_is_kept(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        one, two, older, _ = await _two_with_backups(site)
        put_back(site, older)
        async with site.manager() as node:
            assert unknown(site) == [two]
            kept = site.base / "spool" / "unknown" / two
            assert (kept / "0").read_bytes() == b"second"
            assert kept.parent.stat().st_mode & 0o777 == 0o700, "the owner's jobs do not come there"
            assert node.pipeline.custody.orphans.facts() == {"UnknownOutput": 1}
            await node.order(Action.CONFIRM, tickets=[one], files=1)
            await node.until_state(State.RELEASED)
            await node.order(Action.CONFIRM, node.facts("2.0"), [two], 2)
            box = await node.until_state(State.LOST, node.facts("2.0"))
            assert f"kept in unknown/{two}" in box.reason

    run(story())
    assert site.delivered() == ["a"]
    assert [record.message for record in caplog.records if "unknown-output-found " in record.message]


def test_a_run_of_which_one_hand_off_is_unknown_is_lost_at_once(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            one = await first(node)
            older = backup(site, "older")
            two = (await node.hand_off({"copy://h/ok/b": b"second"})).ticket
        put_back(site, older)
        async with site.manager() as node:
            await node.order(Action.CONFIRM, tickets=[one, two], files=2)
            assert f"unknown/{two}" in (await node.until_state(State.LOST)).reason

    run(story())
    assert site.delivered() == []


def test_the_newest_ledger_brings_the_output_back(site: Site) -> None:
    async def story() -> None:
        _, two, older, newest = await _two_with_backups(site)
        put_back(site, older)
        async with site.manager(moving=False):
            assert unknown(site) == [two]
        put_back(site, newest)
        async with site.manager() as node:
            assert unknown(site) == []
            await node.order(Action.CONFIRM, node.facts("2.0"), [two], 2)
            await node.until_state(State.RELEASED, node.facts("2.0"))

    run(story())
    assert sorted(site.delivered()) == ["b", "c"]


def test_what_a_restored_ledger_says_is_newer_than_what_was_said_before(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            one = await first(node)
            older = backup(site, "older")
            await node.order(Action.CONFIRM, tickets=[one], files=1)
            said = node.box()
        put_back(site, older)
        async with site.manager(moving=False) as node:
            now = node.box()
            assert said and now
            assert (said.state, now.state) == (State.CONFIRMED, State.ACCEPTED)
            assert now.change > said.change

    run(story())


def test_a_journal_that_was_cut_off_costs_no_bytes(site: Site) -> None:
    """The manager is killed, and the machine's disk has lost the end of the ledger's journal."""
    tickets = site.base / "tickets"

    async def until_killed() -> None:
        async with site.manager(moving=False) as node:
            journal = ledger_of(site).with_name("ledger.sqlite-wal")
            one = await first(node)
            with closing(sqlite3.connect(ledger_of(site))) as db:
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            whole = journal.stat().st_size
            two = await second(node)
            tickets.write_text(f"{one} {two} {whole}")
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        run(until_killed())
        os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    one, two, whole = tickets.read_text().split()
    journal = ledger_of(site).with_name("ledger.sqlite-wal")
    assert journal.stat().st_size > int(whole)
    os.truncate(journal, int(whole))

    async def after() -> None:
        async with site.manager() as node:
            assert unknown(site) == [two]
            assert sorted((site.base / "spool" / "unknown" / two).iterdir())
            await node.order(Action.CONFIRM, tickets=[one], files=1)
            await node.until_state(State.RELEASED)

    run(after())
    assert site.delivered() == ["a"]


def test_only_time_or_a_person_removes_what_was_set_aside(site: Site) -> None:
    site.knobs["STAGEOUT_RETENTION"] = "2000"

    async def story() -> None:
        _, two, older, _ = await _two_with_backups(site)
        put_back(site, older)
        async with site.manager(moving=False) as node:
            node.clock.ahead_s = 1900
            await node.pipeline.forget_old_jobs()
            assert unknown(site) == [two]
        async with site.manager(moving=False) as node:
            node.clock.ahead_s = 2100
            await node.pipeline.forget_old_jobs()
            assert unknown(site) == []
            assert node.pipeline.custody.orphans.facts() == {"UnknownOutput": 0}

    run(story())


def test_what_a_person_removed_is_forgotten(site: Site) -> None:
    async def story() -> None:
        _, two, older, _ = await _two_with_backups(site)
        put_back(site, older)
        async with site.manager(moving=False) as node:
            shutil.rmtree(site.base / "spool" / "unknown" / two)
            await node.pipeline.forget_old_jobs()
            assert node.pipeline.custody.orphans.facts() == {"UnknownOutput": 0}
            assert await node.ledger.read(lambda db: db.execute("SELECT * FROM unknown").fetchall()) == []

    run(story())


def test_directories_that_were_promised_to_nobody_go_and_others_stay(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False):
            pass
        place = site.base / "spool" / "sandboxes"
        (place / ("0" * 32)).mkdir()
        (place / ".stray-0123456789abcdef").mkdir()
        (place / ".stray-0123456789abcdef" / "file").touch()
        (place / "lost+found").mkdir()
        async with site.manager(moving=False):
            assert [path.name for path in place.iterdir()] == ["lost+found"]
            assert unknown(site) == []

    run(story())


def test_a_hand_off_on_its_way_to_its_record_is_left_alone(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            place = site.base / "spool" / "sandboxes" / ("1" * 32)
            place.mkdir()
            (place / "0").touch()
            await node.pipeline.custody.orphans.collect()
            assert place.exists() and unknown(site) == []
            await node.pipeline.custody.orphans.collect()
            assert unknown(site) == ["1" * 32]

    run(story())


@pytest.mark.parametrize("when", ["kill-before", "kill-after", "EIO"])
@pytest.mark.parametrize("label", ["spool-aside", "record-unknown", "spool-take-back"])
def test_a_manager_that_dies_there_loses_nothing(site: Site, label: str, when: str) -> None:
    async def before() -> tuple[str, Path, Path]:
        _, two, older, newest = await _two_with_backups(site)
        return two, older, newest

    async def starts() -> None:
        async with site.manager(moving=False):
            pass

    async def delivers() -> None:
        async with site.manager() as node:
            await node.order(Action.CONFIRM, node.facts("2.0"), [two], 2)
            await node.until_state(State.RELEASED, node.facts("2.0"))

    two, older, newest = asyncio.run(before())
    put_back(site, older)
    if label == "spool-take-back":
        run(starts())
        put_back(site, newest)
    child = os.fork()
    if not child:
        durable._faults.update(durable.parse_faults(f"{label}={when}"))
        run(starts())
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) == when.startswith("kill"), status
    kept = [*site.base.glob(f"spool/sandboxes/{two}/0"), *site.base.glob(f"spool/unknown/{two}/0")]
    assert [path.read_bytes() for path in kept] == [b"second"]
    put_back(site, newest)
    run(delivers())
    assert sorted(site.delivered()) == ["b", "c"]
