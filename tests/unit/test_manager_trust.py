"""The daemon and its keys: what it signs, whom it obeys, and what it does about those who write over its report."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon_site import AGENT_KEY, accepted, in_thread, served
from manager_site import SCHEDD, Site, made, run

from sandbox_manager.daemon import KEY_FILE
from stageout.cli.node import manager_facts
from stageout.core.config import mapping_settings
from stageout.core.signing import SigningKey
from stageout.core.states import State
from stageout.wire.custody import Action, AgentNotice, Order, OrderSheet, notice_ad, orders_ad
from tests.polling import until

JOB = f"{SCHEDD}#1.0#1700000000"
EVIL = SigningKey(b"e" * 32)


@pytest.fixture
def site() -> Iterator[Site]:
    with made() as found:
        yield found


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("stageout").propagate = True
    caplog.set_level(logging.INFO, logger="stageout")


def test_receipt_and_report_carry_one_key_that_outlives_a_restart(site: Site) -> None:
    keys = []

    async def story() -> None:
        async with served(site) as node:
            node.collector.confirms = False
            if not keys:
                keys.append((await accepted(node, "copy://h/ok/a"))["manager_key"])
            keys.append(node.collector.reports[-1].key)

    run(story())
    run(story())
    assert len(set(keys)) == 1 and keys[0].startswith("ed25519:")
    path = site.base / "spool" / "ledger" / KEY_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_lost_key_is_not_passed_over_in_silence(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with served(site) as node:
            node.collector.confirms = False
            if not node.collector.reports[-1].sandboxes:
                await accepted(node, "copy://h/ok/a")

    run(story())
    (site.base / "spool" / "ledger" / KEY_FILE).unlink()
    run(story())
    (line,) = [record.getMessage() for record in caplog.records if "manager-key-changed" in record.getMessage()]
    assert "put manager_key back" in line


def test_forged_orders_change_nothing_and_are_named(site: Site) -> None:
    async def story() -> None:
        async with served(site) as node:
            node.collector.confirms = False
            receipt = await accepted(node, "copy://h/ok/a")
            node.collector.extra = [notice_ad(AgentNotice(SCHEDD, SCHEDD, EVIL.public, 10**15, 1), EVIL)]
            for number, action in enumerate(Action):
                run_number = 9 if action is Action.SUPERSEDE else 1
                order = Order(10**15 + number, action, JOB, run_number, (receipt["ticket"],), 1, owner="alice@test")
                sheet = OrderSheet(SCHEDD, "manager@ep.test", 1, (order,), node.collector.manager_key)
                node.collector.extra.append({**orders_ad(sheet, EVIL), "Name": f"evil/{action.value}"})

            async def all_refused() -> dict[str, str] | None:
                (answer,) = await in_thread(lambda: node.ask(op="metrics"))
                refused = {item["Ad"]: item["Problem"] for item in answer["metrics"]["Refused"]}
                return refused if len(refused) == 1 + len(Action) else None

            found = await until(all_refused, "each forged ad to be refused")
            assert "that of ap is" in found.pop(SCHEDD)
            assert all("not that of" in text for text in found.values())
            await until(lambda: node.collector.last() == {"1.0": str(State.ACCEPTED)}, node.collector.last)
            assert node.collector.reports[-1].sandboxes[0].reason == ""

    run(story())
    assert site.delivered() == []


def test_an_order_that_was_carried_out_is_not_played_back(site: Site) -> None:
    """PAUSE, then RESUME: the recorded PAUSE sheet comes again."""

    async def story() -> None:
        async with served(site) as node:
            node.collector.confirms = False
            await accepted(node, "copy://h/ok/a")

            def sheet(number: int, action: Action) -> dict[str, Any]:
                orders = (Order(number, action, JOB, 1, owner="alice@test"),)
                made = OrderSheet(SCHEDD, "manager@ep.test", 1, orders, node.collector.manager_key)
                return {**orders_ad(made, AGENT_KEY), "Name": f"sheet{number}"}

            def paused() -> bool:
                reasons = [box.reason for box in node.collector.reports[-1].sandboxes]
                return reasons == ["paused by its owner, `stageout resume` goes on"]

            recorded = sheet(1, Action.PAUSE)
            node.collector.extra = [recorded]
            await until(paused, "pause")
            node.collector.extra = [sheet(2, Action.RESUME)]
            await until(lambda: not paused(), "resume")
            seen = len(node.collector.reports)
            node.collector.extra = [recorded, sheet(3, Action.RETRY)]
            await until(lambda: node.collector.reports[-1].acknowledged == {SCHEDD: 3}, "the order after it")
            assert len(node.collector.reports) > seen
            assert not paused()

    run(story())


def test_a_spool_may_have_a_path_that_is_too_long_for_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory of a pilot often has."""
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))

    async def story(site: Site) -> None:
        async with served(site) as node:
            settings = mapping_settings({"STAGEOUT_SPOOL": str(node.run_dir.parent), "EXECUTE": "/x"})
            facts = await in_thread(lambda: manager_facts(settings))
            assert facts["Uid"] == os.geteuid() and facts["Manager"]
            assert stat.S_IMODE((node.run_dir / "control").stat().st_mode) == 0o666

    with made() as site:
        run(story(site))


def test_the_control_socket_keeps_few_clients(site: Site) -> None:
    """A peer that holds it open keeps neither its descriptors nor the next one that asks."""

    async def story() -> None:
        async with served(site) as node:
            path = str(node.run_dir / "control")

            def hold() -> list[socket.socket]:
                held = [socket.socket(socket.AF_UNIX) for _ in range(65)]
                for talk in held:
                    talk.connect(path)
                    with contextlib.suppress(ConnectionError):  # the last may be let go already
                        talk.sendall(struct.pack(">I", 100))
                held[-1].settimeout(10)
                with contextlib.suppress(ConnectionError):
                    assert held[-1].recv(1) == b"", "one too many is let go at once"
                return held

            held = await in_thread(hold)
            for talk in held:
                talk.close()

            async def metrics() -> Any:
                with contextlib.suppress(OSError, EOFError):
                    return await in_thread(lambda: node.ask(op="metrics"))

            (answer,) = await until(metrics, "an answer")
            assert answer["op"] == "metrics"

    run(story())
