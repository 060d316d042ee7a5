"""The manager as a daemon: orders and reports through a collector, figures, the control socket, signals."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from daemon_site import FakeIdentity, Served, accepted, in_thread, served
from manager_site import AGENT, SCHEDD, UID, Site, made, run

from sandbox_manager import daemon
from sandbox_manager.custody.spool import Spool, SpoolBusy, SpoolError
from sandbox_manager.daemon import Daemon, Dependencies, manager_name
from sandbox_manager.intake.admission import Admission
from sandbox_manager.intake.agents import AgentTable
from sandbox_manager.intake.startd_process import StartdError, StartdProcess
from sandbox_manager.pipeline import Pipeline
from sandbox_manager.report import startd_cron
from sandbox_manager.report.collector import CollectorProcess
from stageout.condor.bindings import CondorError
from stageout.core.clock import SystemClock
from stageout.core.config import ConfigError, mapping_settings
from stageout.core.states import MOVES
from stageout.daemon import EXIT_NO_RESTART, EXIT_RESTART
from stageout.model.sandbox import SyncState
from stageout.movers.schemes import shown_url
from stageout.wire.custody import (
    Action,
    AgentNotice,
    Order,
    OrderSheet,
    orders_ad,
    read_report,
)
from tests.descriptors import many_open
from tests.in_loop import in_loop
from tests.polling import until
from tests.unit.ledger_steps import damage

ROOT_DIR = Path(__file__).resolve().parents[2]


@pytest.fixture
def site() -> Iterator[Site]:
    with made() as found:
        yield found


def test_from_hand_off_to_delivery_through_the_collector(site: Site) -> None:
    async def story() -> None:
        async with served(site) as node:
            receipt = await accepted(node, "copy://h/ok/a", "copy://h/ok/b")
            assert receipt["manager_name"] == "manager@ep.test"
            await until(lambda: node.collector.last() == {"1.0": "Released"}, node.collector.last)
            report = node.collector.reports[-1]
            assert report.acknowledged == {SCHEDD: 1}
            assert report.bytes_at_risk == 0
            assert {item.verified for item in report.sandboxes[0].files} == {"size"}
            numbers = [item.number for item in node.collector.reports]
            assert numbers == sorted(set(numbers))
            changes = [box.change for item in node.collector.reports for box in item.sandboxes]
            assert changes == sorted(changes)

    run(story())
    assert sorted(site.delivered()) == ["a", "b"]


def test_a_report_has_the_times_and_figures_of_each_delivery(site: Site) -> None:
    async def story() -> None:
        async with served(site) as node:
            began_at = int(time.time())
            await accepted(node, "copy://h/ok/a")
            await until(lambda: node.collector.last() == {"1.0": "Released"}, node.collector.last)
            report = node.collector.reports[-1]
            (box,) = report.sandboxes
            (file,) = box.files
            assert began_at <= box.accepted_at <= box.confirmed_at <= file.began_at <= file.ended_at <= box.ended_at
            assert (file.digest, file.streams, file.route, box.paused) == ("md5:00", 1, "", 0)
            assert (report.cpu_slots, report.data_slots, report.flows) == (4, 12, ())
            assert 0 < report.spool_bytes < report.spool_limit_bytes

    run(story())


def test_a_report_has_the_servers_with_output_that_waits_or_moves(site: Site) -> None:
    site.flag("hold")

    async def story() -> None:
        async with served(site) as node:
            await accepted(node, "copy://h/wait/a", "copy://other/wait/b")
            await until(lambda: len(node.collector.reports[-1].flows) == 2, node.collector.reports)
            flows = {flow.server: flow for flow in node.collector.reports[-1].flows}
            assert flows["copy://h"].files_moving + flows["copy://h"].files_waiting == 1
            assert flows["copy://h"].work_bytes_per_s == 0, "nothing is known yet"
            assert flows["copy://h"].tuning == "starting"
            (box,) = node.collector.reports[-1].sandboxes
            assert {bool(file.began_at) for file in box.files if file.state == "Moving"} <= {True}
            site.flag("hold", up=False)
            await until(lambda: node.collector.last() == {"1.0": "Released"}, node.collector.last)
            assert node.collector.reports[-1].flows == ()

    run(story())


def test_report_numbers_grow_over_restarts(site: Site) -> None:
    numbers: list[int] = []

    async def story() -> None:
        async with served(site) as node:
            numbers.append(node.collector.reports[-1].number)

    run(story())
    run(story())
    assert numbers[0] < numbers[1]


def test_a_report_that_is_refused_goes_into_the_slot_ads(site: Site) -> None:
    async def story() -> None:
        async with served(site) as node:
            node.collector.confirms = False
            node.collector.refuses = True
            await accepted(node, "copy://h/ok/a")
            state = node.run_dir / "state.json"
            await until(lambda: startd_cron.read_state(state)["report"].get("StageOutSandboxes") == 1, state.read_text)
            text = slots_of(startd_cron.read_state(state), time.time())
            figures, report = text.split("- figures update:true\n")
            assert "StageOutAccept = true" in figures
            assert "StageOutDataSlotsFree = 11" in figures
            assert "StageOutBytesAtRisk = 3" in figures
            payload = re.search(r'StageOutPayload = "(.*)"\n', report)
            assert payload
            assert read_report(payload[1].replace('\\"', '"')).sandboxes[0].state == "Accepted"
            node.collector.refuses = False
            site.flag("x")
            await in_thread(node.hand_off, "copy://h/ok/b")
            await until(lambda: startd_cron.read_state(state)["report"] == {}, "the report to leave the slot ads")

    run(story())


def slots_of(state: dict[str, Any], now: float) -> str:
    """Return the first ads for the startd."""
    return startd_cron.blocks(startd_cron.shown_by(state, now), startd_cron.Shown({}, {}))


def test_only_what_matters_to_matchmaking_sends_all_slots_to_the_collector() -> None:
    def told(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
        first, then = (startd_cron.shown_by({"figures": item}, 1000) for item in (before, after))
        return [line for line in startd_cron.blocks(then, first).splitlines() if line.startswith("- ")]

    usual = {"StageOutAccept": True, "StageOutSpoolMB": 1, "StageOutHeartbeat": 990}
    later = {**usual, "StageOutSpoolMB": 2, "StageOutHeartbeat": 1000}
    assert told(usual, later) == ["- figures update:false", "- report update:false"]
    assert told(usual, {**later, "StageOutAccept": False}) == ["- figures update:true", "- report update:false"]


def test_a_report_is_in_the_collector_as_soon_as_that_answers_again(site: Site) -> None:
    """A collector that does not answer holds the question for 20 s; such a time must not count as the report's cost."""

    async def story() -> None:
        async with served(site) as node:
            node.collector.confirms = False
            node.collector.patience_s = 1.5
            node.collector.silent = node.collector.refuses = True
            state = node.run_dir / "state.json"
            await accepted(node, "copy://h/ok/a")
            await until(lambda: startd_cron.read_state(state)["report"] != {}, "the report in the slot ads")
            node.collector.silent = node.collector.refuses = False
            start_s = time.monotonic()
            await until(lambda: node.collector.last() == {"1.0": "Accepted"}, "the report in the collector")
            assert time.monotonic() - start_s < 12.0
            await until(lambda: startd_cron.read_state(state)["report"] == {}, "the report to leave the slot ads")

    run(story())


def test_a_collector_that_was_started_again_gets_the_report_at_once(site: Site) -> None:
    async def story() -> None:
        async with served(site) as node:
            await until(lambda: node.collector.reports and node.collector.looks > 1, "the first report")
            collector = node.collector
            last = (0, 0)

            def is_quiet() -> bool:
                nonlocal last
                if len(collector.reports) != last[0]:
                    last = len(collector.reports), collector.looks
                return collector.looks > last[1] + 3

            await until(is_quiet, "an end of the reports")
            collector.empty = True
            await until(lambda: len(collector.reports) > last[0], "a report that nothing else asked for")

    run(story())


def test_orders_are_looked_for_often_only_while_output_waits(site: Site) -> None:
    async def story() -> None:
        async with served(site) as node:
            node.collector.confirms = False

            async def looks(seconds: float) -> int:
                before = node.collector.looks
                await asyncio.sleep(seconds)
                return node.collector.looks - before

            await until(lambda: node.collector.looks > 1, "the first looks")
            at_rest = await looks(2.0)
            await accepted(node, "copy://h/ok/a")
            waiting = await looks(2.0)
            assert 2 <= at_rest <= 6, "every 0.4 s"
            assert waiting > 2 * at_rest, "every 0.1 s"

    run(story())


def test_a_full_disk_stops_new_jobs_until_there_is_room(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [1 << 40]
    monkeypatch.setattr(Spool, "free_bytes", lambda self: free[0])

    async def story() -> None:
        async with served(site) as node:
            for megabytes, expected in ((200, True), (70, True), (60, False), (100, False), (130, True)):
                free[0] = megabytes << 20
                (answer,) = await in_thread(lambda: node.ask(op="metrics"))
                assert answer["metrics"]["StageOutAccept"] is expected, megabytes

    run(story())


def test_a_filesystem_too_small_for_output_keeps_no_job_away(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spool, "free_bytes", lambda self: 10 << 20)
    monkeypatch.setattr(Spool, "total_bytes", lambda self: 12 << 20)

    async def story() -> None:
        async with served(site) as node:
            (answer,) = await in_thread(lambda: node.ask(op="metrics"))
            assert answer["metrics"]["StageOutAccept"] is True

    run(story())


def test_without_a_manager_a_node_takes_work_as_any_other() -> None:
    assert "StageOutAccept = true" in slots_of({}, 0)
    old = {"figures": {"StageOutAccept": False, "StageOutHeartbeat": 1000}}
    assert "StageOutAccept = false" in slots_of(old, 1100)
    assert "StageOutAccept = true" in slots_of(old, 1200)


def test_the_cron_streams_each_change(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    argv = [sys.executable, "-m", "sandbox_manager.report.startd_cron", str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT_DIR) as cron:
        try:
            assert cron.stdout

            def block() -> str:
                assert cron.stdout
                lines = [cron.stdout.readline()]
                while not lines[-1].startswith("- report"):
                    lines.append(cron.stdout.readline())
                return "".join(lines)

            assert "StageOutAccept = true" in block()
            state = {"figures": {"StageOutAccept": False, "StageOutHeartbeat": int(time.time())}}
            (tmp_path / "run" / "new").write_text(json.dumps(state))
            (tmp_path / "run" / "new").rename(tmp_path / "run" / "state.json")
            assert "StageOutAccept = false" in block()
        finally:
            cron.kill()


def test_a_full_spool_stops_new_jobs_until_there_is_room(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.knobs["STAGEOUT_SPOOL_QUOTA_MB"] = "100"
    used: dict[str, int] = {"bytes": 0}
    fixed = property(lambda self: used["bytes"], lambda self, value: None)
    monkeypatch.setattr(Admission, "movable_bytes", fixed)

    async def story() -> None:
        async with served(site) as node:

            async def accepting() -> bool:
                (answer,) = await in_thread(lambda: node.ask(op="metrics"))
                return bool(answer["metrics"]["StageOutAccept"])

            for megabytes, expected in ((89, True), (91, False), (75, False), (69, True), (75, True)):
                used["bytes"] = megabytes * 10**6
                assert await accepting() is expected, megabytes

    run(story())


def test_messages_that_cannot_be_read_are_ignored(site: Site) -> None:
    async def story() -> None:
        async with served(site) as node:
            node.collector.extra = [
                {"MyType": "StageOutAgent", "Name": "x", "StageOutPayload": "{"},
                {"MyType": "StageOutOrders", "Name": "y"},
                orders_ad(
                    OrderSheet(
                        "evil",
                        "manager@other",
                        1,
                        (Order(1, Action.CANCEL, f"{SCHEDD}#1.0#1700000000", 9, owner="alice@test"),),
                    )
                ),
            ]
            await accepted(node, "copy://h/ok/a")
            await until(lambda: node.collector.last() == {"1.0": "Released"}, node.collector.last)

    run(story())


def test_a_silent_collector_stops_acceptance_when_agents_are_no_longer_fresh() -> None:
    class Ticks:
        now = 0.0

        def monotonic_s(self) -> float:
            return self.now

        def wall_s(self) -> float:
            return self.now

    clock = Ticks()
    book = AgentTable(clock, 180)
    notice = AgentNotice(AGENT, SCHEDD, "", 1, 5)
    book.record_notice(notice, age_s=200)
    assert not book.is_fresh(SCHEDD)  # an old ad that the collector still had
    book.record_notice(AgentNotice(AGENT, SCHEDD, "", 2, 6), age_s=1e9)  # new here, whatever the clocks say
    assert book.fresh == [SCHEDD]
    clock.now = 181
    book.record_notice(AgentNotice(AGENT, SCHEDD, "", 2, 6), age_s=0)
    assert not book.is_fresh(SCHEDD)
    assert not book.is_fresh("other")


def test_status_and_metrics_on_the_node(site: Site) -> None:
    async def story() -> None:
        async with served(site) as node:
            node.collector.confirms = False
            await accepted(node, "copy://user:pw@h/ok/a?sig=1", "copy://h/ok/b")
            box, files, end = await in_thread(lambda: node.ask(op="status"))
            assert (box["sandbox"]["state"], box["files"]) == ("Accepted", 2)
            assert {item["url"] for item in files["files"]} == {"copy://h/ok/a", "copy://h/ok/b"}
            assert end == {"op": "end", "manager": "manager@ep.test", "servers": [], "flows": []}
            assert len(await in_thread(lambda: node.ask(op="status", job="1.0"))) == 3
            assert len(await in_thread(lambda: node.ask(op="status", job="2.0"))) == 1
            (metrics,) = await in_thread(lambda: node.ask(op="metrics"))
            assert metrics["metrics"]["Sandboxes"] == {"Accepted": 1}
            (no,) = await in_thread(lambda: node.ask(op="dance"))
            assert no["op"] == "refuse"

    run(story())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: somebody else asks")
def test_users_see_their_own(site: Site) -> None:
    code = (
        "import socket, sys; sys.path.insert(0, sys.argv[2]); import struct, json\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
        "body = b'{\"op\": \"status\"}'; s.sendall(struct.pack('>I', len(body)) + body)\n"
        "print(s.makefile('rb').read().count(b'\"op\":\"sandbox\"'))\n"
    )

    async def story() -> None:
        async with served(site) as node:
            node.collector.confirms = False
            await accepted(node, "copy://h/ok/a")
            argv = ["/usr/bin/env", "python3", "-c", code, str(node.run_dir / "control"), "."]
            for uid, expected in ((UID, "1"), (UID + 1, "0"), (0, "1")):
                done = await in_thread(
                    lambda uid=uid: subprocess.run(argv, user=uid, capture_output=True, text=True, cwd="/", check=True)
                )
                assert done.stdout.strip() == expected, uid

    run(story())


def test_reconfiguration_is_taken_over_and_nonsense_is_not(site: Site) -> None:
    async def story() -> None:
        async with served(site) as node:
            node.settings["STAGEOUT_DATA_SLOT_DEPTH"] = "7"
            await node.daemon.reload()
            assert node.daemon._rules.limits.depth == 7
            node.settings["STAGEOUT_DATA_SLOT_DEPTH"] = "many"
            with pytest.raises(ConfigError, match="STAGEOUT_DATA_SLOT_DEPTH"):
                await node.daemon.reload()
            assert node.daemon._rules.limits.depth == 7

    run(story())


def test_two_managers_never_share_a_spool(site: Site) -> None:
    async def story() -> None:
        async with served(site):
            with pytest.raises(SpoolBusy, match="in use by another"):
                await Served(site).daemon.serve()

    run(story())


def ledger_of(site: Site) -> Path:
    return site.base / "spool/ledger/ledger.sqlite"


def spoil_leases(site: Site) -> None:
    damage(ledger_of(site), "INSERT INTO meta VALUES ('lease_s:ap', 'soon')")


def block_socket(site: Site) -> None:
    (site.base / "spool/run/control").mkdir()


@pytest.mark.parametrize("spoil", [spoil_leases, block_socket])
def test_a_start_that_fails_begins_no_sync(
    spoil: Callable[[Site], None], site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output whose sync has begun counts as lost when the manager ends before the sync does."""
    begun: list[str] = []
    pipelines: list[Pipeline] = []

    def recorded(**facts: Any) -> Pipeline:
        pipelines.append(Pipeline(**facts))
        return pipelines[-1]

    async def story() -> None:
        async with site.manager(moving=False) as node:
            await node.hand_off({"copy://h/ok/a": b"a"})
        damage(ledger_of(site), "UPDATE tickets SET synced = 0")
        monkeypatch.setattr(Spool, "write_back", lambda spool, tickets: begun.extend(tickets))
        monkeypatch.setattr(daemon, "Pipeline", recorded)
        spoil(site)
        with pytest.raises((ValueError, OSError)):
            await Served(site).daemon.serve()
        await pipelines[0].custody.background.stop()
        assert begun == []

    run(story())


def test_a_start_syncs_what_was_accepted_before_it(site: Site) -> None:
    def synced() -> list[tuple[int]]:
        with closing(sqlite3.connect(ledger_of(site))) as db:
            return db.execute("SELECT synced FROM tickets").fetchall()

    async def story() -> None:
        async with site.manager(moving=False) as node:
            await node.hand_off({"copy://h/ok/a": b"a"})
        damage(ledger_of(site), "UPDATE tickets SET synced = 0")
        async with served(site):
            await until(lambda: synced() == [(SyncState.DONE.value,)], lambda: f"the sync; the ledger has {synced()}")

    run(story())


def test_a_graceful_stop_says_what_is_left(site: Site) -> None:
    async def story() -> None:
        node = Served(site)
        node.collector.confirms = False
        task = asyncio.ensure_future(node.daemon.serve())
        await until(lambda: node.socket.exists() and node.collector.reports, "the daemon")
        await accepted(node, "copy://h/ok/a")
        node.daemon.stop(fast=False)
        await task
        assert node.collector.reports[-1].bytes_at_risk == 3
        assert not node.socket.exists()
        figures = startd_cron.read_state(node.run_dir / "state.json")["figures"]
        assert figures["StageOutAccept"] is True, "without a manager the node takes jobs as any other"

    run(story())


def test_the_manager_s_name_is_the_startd_s() -> None:
    def name(**values: str) -> str:
        return manager_name(mapping_settings({"FULL_HOSTNAME": "h.test", **values}))

    assert name() == "manager@h.test"
    assert name(STARTD_NAME="ep1") == "manager@ep1@h.test"
    assert name(STARTD_NAME="ep1@") == "manager@ep1"
    assert name(STARTD_NAME="glidein_7@node") == "manager@glidein_7@node"


def test_urls_are_shown_without_secrets() -> None:
    assert shown_url("https://u:p@h/a/b?sig=x") == "https://h/a/b"
    assert shown_url("https://h?x") == "https://h"


# ---- as a process ----------------------------------------------------------------------------------------------------


def environment(site: Site, **values: str) -> dict[str, str]:
    settings = {
        "EXECUTE": str(site.base / "execute"),
        "LOG": str(site.base / "log"),
        "STAGEOUT_SPOOL": str(site.base / "spool"),
        "FILETRANSFER_PLUGINS": str(site.plugin),
        "COLLECTOR_HOST": "127.0.0.1:9",
        **values,
    }
    ours = {name: value for name, value in os.environ.items() if not name.startswith("_CONDOR_")}
    return {**ours, "CONDOR_CONFIG": "/dev/null", **{f"_CONDOR_{name}": value for name, value in settings.items()}}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"STAGEOUT_MAX_MOVERS": "many"}, "STAGEOUT_MAX_MOVERS = many"),
        ({"STAGEOUT_SPOOL": "/proc/nowhere"}, "STAGEOUT_SPOOL = /proc/nowhere"),
        ({"STAGEOUT_SPOOL": "here/spool"}, "STAGEOUT_SPOOL = here/spool: write an absolute path"),
        ({"EXECUTE": "here"}, "EXECUTE = here: write an absolute path"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_not_started_again(
    site: Site, values: dict[str, str], words: str
) -> None:
    argv = [sys.executable, "-m", "sandbox_manager.daemon"]
    done = subprocess.run(
        argv, env=environment(site, **values), cwd=ROOT_DIR, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == EXIT_NO_RESTART
    assert words in done.stderr
    assert words in (site.base / "log" / "SandboxManagerLog").read_text()


@pytest.mark.parametrize("step", ["spool-open", "manager-key"])
@pytest.mark.parametrize(("fault", "status"), [("ENOSPC", EXIT_RESTART), ("EDQUOT", EXIT_RESTART), ("EROFS", 99)])
def test_a_manager_whose_disk_is_full_is_started_again(site: Site, step: str, fault: str, status: int) -> None:
    """Jobs share the disk with the spool, and make room when they end."""
    argv = [sys.executable, "-m", "sandbox_manager.daemon"]
    values = {**environment(site), "STAGEOUT_FAULTS": f"{step}={fault}"}
    done = subprocess.run(
        argv, env=values, cwd=ROOT_DIR, capture_output=True, text=True, timeout=30, check=False
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    assert os.strerror(getattr(errno, fault)) in (site.base / "log" / "SandboxManagerLog").read_text()


def test_a_spool_inside_execute_is_refused(site: Site) -> None:
    node = in_loop(lambda: Served(site))
    node.settings["STAGEOUT_SPOOL"] = str(site.base / "execute" / "spool")
    again = in_loop(lambda: Daemon(Dependencies(node._read, node.collector, SystemClock(), lambda _: FakeIdentity())))
    with pytest.raises(SpoolError, match="inside EXECUTE"):
        asyncio.run(again.serve())
    del node.settings["EXECUTE"]
    with pytest.raises(ConfigError, match="EXECUTE is not set"):
        Daemon(Dependencies(node._read, node.collector, SystemClock(), lambda settings: FakeIdentity()))


def test_a_collector_that_hangs_does_not_hold_up_the_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are taken and never answered."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("CONDOR_CONFIG", "/dev/null")
        monkeypatch.setenv("_CONDOR_COLLECTOR_HOST", f"127.0.0.1:{server.getsockname()[1]}")

        async def story() -> None:
            collector = CollectorProcess(timeout_s=1.5)
            beats = 0
            question = asyncio.ensure_future(collector.messages("m"))
            while not question.done():
                await asyncio.sleep(0.05)
                beats += 1
            assert beats > 15
            with pytest.raises(CondorError, match="did not answer within"):
                question.result()
            await collector.close()

        run(story())


def test_a_startd_that_hangs_does_not_hold_up_the_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        (tmp_path / ".startd_address").write_text(f"<127.0.0.1:{server.getsockname()[1]}>\n$CondorVersion: 25.14.1 $\n")
        monkeypatch.setenv("CONDOR_CONFIG", "/dev/null")
        monkeypatch.setenv("_CONDOR_LOG", str(tmp_path))

        async def story() -> None:
            ask = StartdProcess(timeout_s=1.5)
            beats = 0
            question = asyncio.ensure_future(in_thread(ask))
            while not question.done():
                await asyncio.sleep(0.05)
                beats += 1
            assert beats > 15
            with pytest.raises(StartdError, match="did not answer within"):
                question.result()
            ask.close()

        run(story())


def test_a_startd_that_is_not_there_is_an_error_with_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONDOR_CONFIG", "/dev/null")
    monkeypatch.setenv("_CONDOR_LOG", str(tmp_path))
    with many_open():  # of a node with thousands of connections
        ask = StartdProcess()
        for _ in range(2):
            with pytest.raises(StartdError, match="startd_address"):
                ask()
        ask.close()


def test_a_collector_that_is_away_is_an_error_with_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONDOR_CONFIG", "/dev/null")
    monkeypatch.setenv("_CONDOR_COLLECTOR_HOST", "127.0.0.1:9")

    async def story() -> None:
        collector = CollectorProcess()
        with pytest.raises(CondorError):
            await collector.messages("m")
        with pytest.raises(CondorError):
            await collector.advertise(asdict(AgentNotice(AGENT, SCHEDD, "", 1, 1)))
        await collector.close()

    run(story())


def test_the_picture_of_the_states_has_the_legal_moves() -> None:
    drawn = re.findall(r'data-move="(\w+) (\w+)"', (ROOT_DIR / "docs/explanation/states.svg").read_text())
    assert sorted(drawn) == sorted((str(old), str(new)) for old, targets in MOVES.items() for new in targets)


def test_labels_in_the_code_are_those_of_the_documentation() -> None:
    documented = set(
        re.findall(r"^\| `([a-z-]+)` \|", (ROOT_DIR / "docs/developer/durable-steps.md").read_text(), re.M)
    )
    texts = [
        path.read_text() for top in ("sandbox_manager", "stageout/movers") for path in (ROOT_DIR / top).rglob("*.py")
    ]
    code = "".join(re.sub(r'log\.\w+\(\s*"[a-z-]+"', "", text) for text in texts)
    quoted = r'"((?:record|report)-[a-z-]+|mover-exec|spool-(?:open|state|move|sync|data|release|aside|take-back))"'
    used = set(re.findall(quoted, code))
    assert used <= documented
    assert {label for label in documented if label.split("-")[0] in ("record", "spool", "mover", "report")} == used
