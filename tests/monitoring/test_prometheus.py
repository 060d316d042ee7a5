"""A real Prometheus reads the four daemons, and the example's alerts and dashboard find their values there."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))

from daemon_site import accepted, in_thread, served
from manager_site import made
from policy_site import Service
from test_agent_daemon import JOB
from test_agent_daemon import Site as AgentSite

from schedd_agent.metrics import put_pool
from stageout.core.config import mapping_settings
from stageout.core.metrics import Readings
from stageout.core.metrics_server import MetricsServer
from stageout.core.states import State
from stageout.wire.custody import FlowReport, Report
from stageout_web.service import Daemon as WebDaemon
from tests.harness.ports import free_ports
from tests.harness.router import RouterProcess
from tests.monitoring.queries import EXAMPLE, alerts, dashboard_queries
from tests.polling import DEADLINE_S, wait_for

JOBS = ("stageout-manager", "stageout-agent", "stageout-policy", "stageout-router")


def tool(name: str) -> str:
    """Return a program of Debian's package ``prometheus``, which ``tools/install`` installs."""
    found = shutil.which(name)
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{name} is not installed (Debian's package prometheus)")
    return found


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [tool("promtool"), *arguments], cwd=EXAMPLE, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize(
    "arguments",
    [("check", "config", "prometheus.yml"), ("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")],
)
def test_promtool_accepts_the_example(arguments: tuple[str, ...]) -> None:
    done = promtool(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    """A running Prometheus.

    :param folder: for its data and configuration. :param ports: of the targets, by job.
    """

    def __init__(self, folder: Path, ports: dict[str, int]) -> None:
        self._folder = folder
        [self._port] = free_ports(1)
        settings = yaml.safe_load((EXAMPLE / "prometheus.yml").read_text())
        settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        jobs = settings["scrape_configs"] = [job for job in settings["scrape_configs"] if job["job_name"] in ports]
        for job in jobs:
            job["static_configs"] = [{"targets": [f"127.0.0.1:{ports[job['job_name']]}"]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
        shutil.copy(EXAMPLE / "alerts.yml", folder)

    @contextlib.contextmanager
    def running(self) -> Iterator[Prometheus]:
        """Run it for the block."""
        command = [
            tool("prometheus"),
            f"--config.file={self._folder}/prometheus.yml",
            f"--storage.tsdb.path={self._folder}/data",
            f"--web.listen-address=127.0.0.1:{self._port}",
        ]
        with (self._folder / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            yield self
        finally:
            process.terminate()
            process.wait(DEADLINE_S)

    def ask(self, path: str, **fields: str) -> Any:
        """Ask its interface. :raises AssertionError: it refuses the question."""
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(fields)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as problem:
            if problem.code >= 500:  # it starts
                raise
            raise AssertionError(f"{fields}: {problem.read().decode()}") from None

    def targets_up(self) -> set[str]:
        """Return the jobs whose targets answer."""
        with contextlib.suppress(OSError):
            return {one["labels"]["job"] for one in self.ask("targets")["activeTargets"] if one["health"] == "up"}
        return set()

    def series(self, query: str) -> list[dict[str, Any]]:
        """Return the result of a query."""
        return list(self.ask("query", query=query)["result"])


class AgentSource:
    """An agent whose passes the test drives: one job is held, one is delivered, one moves."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._site = site = AgentSite(folder)
        site.complete()
        site.queue.found[JOB] = replace(site.job, entered_at=int(site.clock.wall_s()))
        site.report(State.ACCEPTED)
        site.passes()
        (order,) = site.orders
        site.report(State.DELIVERED, acknowledged=order.number)
        site.passes(2)
        site.complete(run=2)
        site.report(State.FAILED, run=2)
        site.passes(3)

    async def metrics(self) -> Readings:
        """Return the values of this moment, with a second manager in the pool."""
        found = self._site.agent.readings()
        flow = FlowReport("https://h", 100, files_waiting=1, bytes_waiting=10, files_moving=1, bytes_moving=10)
        put_pool(found, [*self._site.agent.report_table.reports(), Report("m2", "", 1, 1, {}, 20, flows=(flow,))], 2.0)
        return found


@contextlib.asynccontextmanager
async def published(part: str, source: Any, port: int) -> AsyncIterator[None]:
    """Publish the metrics of a part in this process, as its program does."""
    prefix = f"STAGEOUT_{part}_METRICS"
    server = MetricsServer(part.lower(), prefix, mapping_settings({f"{prefix}_PORT": str(port)}))
    await server.start(source)
    try:
        yield
    finally:
        await server.close()


@contextlib.contextmanager
def policy_and_router(folder: Path, ports: dict[str, int]) -> Iterator[None]:
    """Run a policy service with a lease, and a custodian whose terminal is away, as programs."""
    for name in ("policy", "router"):
        (folder / name).mkdir()
    settings = {
        "STAGEOUT_ROUTER_METRICS_PORT": str(ports["stageout-router"]),
        "STAGEOUT_ROUTER_TERMINALS": "127.0.0.1:9",
        "STAGEOUT_ROUTER_KEY": str(folder / "router/site.key"),
    }
    service = Service(folder / "policy", METRICS_PORT=ports["stageout-policy"])
    with RouterProcess(folder / "router", settings), contextlib.closing(service.start()):
        service.lease("mover", pair=("here", "there"))
        yield


@contextlib.asynccontextmanager
async def manager_and_agent(folder: Path, ports: dict[str, int]) -> AsyncIterator[None]:
    """Serve a manager that has delivered a file, and an agent, from this process."""
    with made() as site:
        async with (
            served(site) as node,
            published("MANAGER", node.daemon, ports["stageout-manager"]),
            published("AGENT", AgentSource(folder / "agent"), ports["stageout-agent"]),
        ):
            await accepted(node, "copy://h/ok/a")
            yield


@contextlib.asynccontextmanager
async def page(folder: Path, port: int) -> AsyncIterator[None]:
    """Publish the metrics of a web page that has read the pool."""
    settings = {"STAGEOUT_WEB_DIR": str(folder), "SPOOL": str(folder), "COLLECTOR_HOST": "cm.example.org"}
    daemon = WebDaemon(lambda: mapping_settings(settings))
    daemon._state.updated_at = time.time()
    try:
        async with published("WEB", daemon, port):
            yield
    finally:
        daemon._ring.close()


def test_promtool_finds_no_fault_in_what_the_daemons_publish(tmp_path: Path) -> None:
    """Beside the syntax it checks names, units, help texts and duplicates."""
    promtool_path = tool("promtool")
    ports = dict(zip((*JOBS, "stageout-web"), free_ports(len(JOBS) + 1)))
    found: dict[str, str] = {}

    def scrape(port: int) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    def fault_in(text: str) -> str:
        command = [promtool_path, "check", "metrics"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60)
        return done.stdout + done.stderr if done.returncode else ""

    async def story() -> None:
        async with manager_and_agent(tmp_path, ports), page(tmp_path / "web", ports["stageout-web"]):
            for name, port in ports.items():
                text = await in_thread(scrape, port)
                assert "stageout_build_info" in text
                found[name] = await in_thread(fault_in, text)

    with policy_and_router(tmp_path, ports):
        asyncio.run(asyncio.wait_for(story(), 3 * DEADLINE_S))
    assert found == dict.fromkeys(ports, "")
    assert "no help text" in fault_in("# TYPE stageout_x gauge\nstageout_x 1\n")


def check(prometheus: Prometheus) -> None:
    """Check that Prometheus reads all daemons, and that each query of the example has a result."""
    wait_for(lambda: prometheus.targets_up() == set(JOBS), lambda: f"{JOBS} up; these are: {prometheus.targets_up()}")
    for title, query in dashboard_queries():
        wait_for(functools.partial(prometheus.series, query), f"{title}: {query} finds values")
    for rule in alerts():
        prometheus.series(rule["expr"])
    found = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in found} == {rule["alert"] for rule in alerts()}
    wait_for(lambda: _health(prometheus) == {"ok"}, lambda: f"healthy rules; they are {_health(prometheus)}")


def _health(prometheus: Prometheus) -> set[str]:
    return {rule["health"] for group in prometheus.ask("rules")["groups"] for rule in group["rules"]}


def test_prometheus_reads_all_daemons_and_every_query_finds_values(tmp_path: Path) -> None:
    tool("prometheus")
    ports = dict(zip(JOBS, free_ports(len(JOBS))))
    (tmp_path / "prometheus").mkdir()
    prometheus = Prometheus(tmp_path / "prometheus", ports)

    async def story() -> None:
        async with manager_and_agent(tmp_path, ports):
            with prometheus.running():
                await in_thread(check, prometheus)

    with policy_and_router(tmp_path, ports):
        asyncio.run(asyncio.wait_for(story(), 3 * DEADLINE_S))
