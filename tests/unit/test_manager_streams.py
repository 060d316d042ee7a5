"""The chosen streams and the observed rates change the calls of plugins, with real ledger and plugin processes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from daemon_site import accepted, in_thread, served
from manager_site import Site, made, run
from policy_site import TOKENS, Service

from sandbox_manager.custody import schema
from sandbox_manager.report.control import Control
from sandbox_manager.scheduling import rates
from sandbox_manager.scheduling.deadlines import LEAST_S, Observed
from sandbox_manager.scheduling.rates import MOST_SERVERS, Rates, ServerRate
from stageout.cli.node import read_streams
from stageout.core.errors import ErrorClass
from stageout.core.states import FileState, State
from stageout.core.streams import Choice, FixedStreams
from stageout.model.batch import BatchOutcome
from stageout.model.file import StoredFile
from tests.polling import until

HEEDS = r'StageOutConcurrency = true\nStageOutInParts = "copy"'
NOW = 1_800_000_000.0


@pytest.fixture
def site() -> Iterator[Site]:
    with made({"STAGEOUT_TUNING": "fixed", "STAGEOUT_TUNING_MAX": "3", "STAGEOUT_TUNING_STREAMS": "2"}) as found:
        yield found


async def _delivered(node: Any, job: str, *urls: str) -> None:
    facts = node.facts(job)
    await node.confirm(await node.hand_off(dict.fromkeys(urls, b"x"), facts), facts=facts)
    await node.until_state(State.RELEASED, facts)


def test_the_chosen_numbers_and_limits_reach_the_plugin(site: Site) -> None:
    site.plugins = [site.write_plugin("copy_plugin", "copy,other", more=HEEDS)]

    async def story() -> None:
        async with site.manager() as node:
            await _delivered(node, "1.0", *(f"copy://h/ok/{number}" for number in range(5)))
            await _delivered(node, "2.0", "other://h/ok/a", "other://h/ok/b")

    run(story())
    first, second = (call["env"] for call in site.calls())
    assert (first["STAGEOUT_CONCURRENCY"], first["STAGEOUT_PARALLELISM"]) == ("2", "2")
    assert (second["STAGEOUT_CONCURRENCY"], second["STAGEOUT_PARALLELISM"]) == ("2", "1")
    assert first["STAGEOUT_PLUGIN_LIFETIME_S"] == str(int(LEAST_S))
    assert "STAGEOUT_STALL_BYTES_PER_S" not in first, "nothing is known yet"


def test_what_a_destination_reached_limits_the_next_call_also_after_a_restart(site: Site) -> None:
    async def story() -> None:
        for job in ("1.0", "2.0"):
            async with site.manager() as node:
                await _delivered(node, job, f"copy://h/ok/{job}")

    run(story())
    second = site.calls()[1]["env"]
    assert second["STAGEOUT_PLUGIN_LIFETIME_S"] == str(int(LEAST_S))
    assert float(second["STAGEOUT_STALL_BYTES_PER_S"]) >= 1
    assert second["STAGEOUT_STALL_WINDOW_S"] == "30"


def test_what_the_administrator_says_about_stalls_goes_before(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEOUT_STALL_BYTES_PER_S", "7")

    async def story() -> None:
        async with site.manager() as node:
            for job in ("1.0", "2.0"):
                await _delivered(node, job, f"copy://h/ok/{job}")

    run(story())
    assert [call["env"]["STAGEOUT_STALL_BYTES_PER_S"] for call in site.calls()] == ["7", "7"]


def test_the_node_says_what_goes_where_at_once(site: Site) -> None:
    async def story() -> None:
        async with site.manager() as node:
            await _delivered(node, "1.0", "copy://h/ok/a")
            control = Control(node.pipeline, dict)
            path = Path(site.base / "control")
            await control.start(path)
            import asyncio

            [report] = await asyncio.get_running_loop().run_in_executor(None, read_streams, path)
            await control.stop()
        assert (report.server, report.tuning, report.streams) == ("copy://h", "fixed", 3)
        assert report.grant == "No policy service: the limits of this node."

    run(story())


def test_without_a_grant_nothing_is_sent_until_there_is_one(site: Site) -> None:
    class Granted(FixedStreams):
        files_at_once = 0

        def choose(self, server: str, parallelism: int, waiting: int | None = None) -> Choice:
            return replace(super().choose(server, parallelism, waiting), files_at_once=self.files_at_once)

    async def story() -> None:
        streams = Granted(site.rules.tuning.knobs)
        async with site.manager(moving=False, streams=lambda rules, start: streams) as node:
            facts = node.facts()
            await node.confirm(await node.hand_off({"copy://h/ok/a": b"x"}, facts), facts=facts)
            node.pipeline.start_batches()
            assert len(node.pipeline.custody.running) == 0
            assert node.state(facts) is State.CONFIRMED
            streams.files_at_once = 1
            node.pipeline.start_batches()
            await until(lambda: site.delivered() == ["a"], "the file is sent")

    run(story())


def test_the_daemon_sends_within_a_real_services_grant_and_gives_it_back(site: Site, tmp_path: Path) -> None:
    """From the configuration to the plugin's environment; at the stop the streams are free at once."""
    site.write_plugin("copy_plugin", "copy,other", more=HEEDS)
    service = Service(tmp_path, INITIAL=2, INCREMENT=0, MAX_PAIR=2).start()
    token = tmp_path / "token"
    token.write_text(TOKENS["cms"])
    site.knobs.update({"STAGEOUT_POLICY_URL": f"http://127.0.0.1:{service._port}", "STAGEOUT_POLICY_TOKEN": str(token)})
    leases: list[Any] = []

    async def story() -> None:
        async with served(site) as node:
            site.flag("hold")
            await accepted(node, "copy://h/wait/a", "copy://h/ok/b", "copy://h/ok/c")
            await until(lambda: (site.base / "waiting").exists(), "a file is on its way")
            leases.extend((await in_thread(lambda: service.ask("GET", "/v1/leases"))).json["leases"])
            site.flag("hold", up=False)
            await until(lambda: sorted(site.delivered()) == ["a", "b", "c"], "all arrive")

    try:
        run(story())
        assert service.granted() == 0
    finally:
        service.close()
    [lease] = leases
    assert (lease["source"], lease["destination"], lease["client"]) == ("test", "h", "manager@ep.test/copy://h")
    environment = site.calls()[0]["env"]
    assert int(environment["STAGEOUT_CONCURRENCY"]) * int(environment["STAGEOUT_PARALLELISM"]) == 2


# ---- the table ------------------------------------------------------------------------------------------------------


def _after(kind: ErrorClass | None, known: Rates, took_s: float) -> ServerRate | None:
    class File:
        size_bytes = 10**9

    judged = BatchOutcome()
    if kind is None:
        judged.delivered.append(StoredFile(0, "u", "f", 1, 0, 1, state=FileState.DELIVERED))
    else:
        judged.waiting.append(StoredFile(0, "u", "f", 1, 0, 1, error_code=kind.code))
    return known.after("https://d", [File()], judged, took_s, 4, NOW)  # type: ignore[list-item]


def test_deadlines_and_stalls_teach_other_failures_do_not() -> None:
    known = Rates()
    assert _after(ErrorClass.STALLED, known, 30) is None, "nothing known: nothing to correct"
    assert _after(ErrorClass.CONNECT_FAILED, known, 30) is None
    delivered = _after(None, known, 10)
    assert delivered is not None
    assert _after(ErrorClass.SERVER_ERROR, known, 1) is None
    missed = _after(ErrorClass.DEADLINE, known, 600)
    assert missed is not None
    assert missed.observed.slow_bytes_s(NOW) < delivered.observed.slow_bytes_s(NOW) / 1.9
    assert known.level("https://d", NOW) == 4
    assert known.level("https://d", NOW + 40 * 86400) == 0


def test_the_table_is_bounded_and_the_oldest_goes() -> None:
    db = sqlite3.connect(":memory:", isolation_level=None)
    schema.make(db)
    for number in range(MOST_SERVERS + 5):
        rates.keep(db, f"https://{number}", ServerRate(Observed(1.5, 0.5, NOW + number), 7))
    found = Rates()
    found.load(db)
    assert db.execute("SELECT count(*) FROM rates").fetchone() == (MOST_SERVERS,)
    assert found.of("https://4") is None
    assert found.of("https://5") == Observed(1.5, 0.5, NOW + 5)
    assert found.level("https://5", NOW) == 7
