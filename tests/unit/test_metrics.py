"""Metrics: the table, the endpoint as hostile and honest clients see it, the file, and the values of the daemons."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from daemon_site import accepted, served
from hypothesis import given
from hypothesis import strategies as st
from manager_site import Site, made, run
from prometheus_client.parser import text_string_to_metric_families

from overlay_router import report
from stageout.core import metrics_server
from stageout.core.config import ConfigError, Settings, mapping_settings
from stageout.core.metrics import (
    _IDLE_S,
    METRICS,
    OTHER,
    UNKNOWN,
    FairLabels,
    Histogram,
    Kind,
    Readings,
    bounded,
    host_of,
    relabelled,
)
from stageout.core.metrics_server import MOST_CONNECTIONS, MetricsServer, Source, metrics_settings, rendered
from stageout.core.states import State
from stageout.daemon import supervise
from tests.harness.ports import free_ports
from tests.polling import DEADLINE_S, until

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "STAGEOUT_MANAGER_METRICS"


class Values:
    """A daemon that counts its scrapes."""

    def __init__(self) -> None:
        self.scrapes = 0
        self.fails = False

    async def metrics(self) -> Readings:
        self.scrapes += 1
        if self.fails:
            raise RuntimeError("no values")
        found = Readings()
        found.put("stageout_manager_movers", self.scrapes)
        return found


def knobs(port: int = 0, file: str = "") -> Settings:
    return mapping_settings({f"{PREFIX}_PORT": str(port), f"{PREFIX}_FILE": file})


@asynccontextmanager
async def published(values: Values, settings: Settings) -> AsyncIterator[MetricsServer]:
    server = MetricsServer("test", PREFIX, settings)
    try:
        await server.start(values)
        yield server
    finally:
        await server.close()


def ask(port: int, path: str = "/metrics", method: str = "GET") -> tuple[int, str, str]:
    """Return status, content type and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.headers.get("Content-Type", ""), answer.read().decode()


async def in_thread(*arguments: object) -> tuple[int, str, str]:
    return await asyncio.get_running_loop().run_in_executor(None, ask, *arguments)  # type: ignore[arg-type]


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


# ---- table -----------------------------------------------------------------------------------------------------------


def test_names_follow_the_conventions_of_prometheus() -> None:
    assert len(METRICS) > 40
    for name, metric in METRICS.items():
        assert name.startswith("stageout_")
        assert name == name.lower()
        assert name.endswith("_total") == (metric.kind is Kind.COUNTER), name
        assert metric.help.endswith(".")
        assert not {"owner", "user", "file", "url", "job"} & set(metric.labels), name
        for unit in ("_ms", "_mb", "_kb", "_minutes", "_percent"):
            assert unit not in name


def test_an_undeclared_metric_or_label_is_refused() -> None:
    found = Readings()
    with pytest.raises(KeyError):
        found.put("stageout_manager_other", 1)
    with pytest.raises(KeyError):
        found.put_all("stageout_manager_other", {})
    with pytest.raises(ValueError, match="labels"):
        found.put("stageout_manager_movers", 1, "x")


def test_servers_beyond_the_largest_share_a_label() -> None:
    sizes = {f"h{number}": float(number) for number in range(100)}
    labels = bounded(sizes, most=3)
    assert relabelled(sizes, labels) == {"h99": 99.0, "h98": 98.0, "h97": 97.0, OTHER: sum(range(97))}
    assert relabelled({"new": 1.0}, labels) == {OTHER: 1.0}


def test_owners_get_labels_in_turn() -> None:
    """Somebody with the largest servers of all does not take the labels of others."""
    sizes = {f"h{number}": 1000.0 + number for number in range(100)} | {"small": 1.0, "tiny": 0.5, "shared": 2.0}
    owners = {name: ["mallory"] for name in sizes} | {"small": ["bob"], "tiny": ["bob"], "shared": ["bob", "mallory"]}
    labels = bounded(sizes, lambda: owners, 4)
    assert {label for label in labels.values() if label != OTHER} == {"h99", "shared", "h98", "small"}


_USES = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("xyz"), st.floats(0, _IDLE_S / 3)), max_size=60)


@given(_USES, st.integers(1, 4))
def test_labels_are_few_and_a_name_keeps_its_own_until_it_is_forgotten(
    uses: list[tuple[str, str, float]], most: int
) -> None:
    held: dict[str, float] = {}
    labels, now_s = FairLabels(held.pop, most), 0.0  # type: ignore[arg-type]  # what is not held raises
    for name, owner, later_s in uses:
        now_s += later_s
        before = dict(held)
        label = labels.label(name, owner, now_s)
        assert label in (name, OTHER)
        assert label == name or name not in before, "a counter does not change its label"
        if label == name:
            held[name] = now_s
        lost = before.keys() - held.keys()
        assert len(held) <= most and len(lost) <= 1
        assert not lost or (label == name and len(before) == most), "one goes for one that comes"
        if any(now_s - used_s >= _IDLE_S for used_s in before.values()):
            assert label == name, "a name that nobody has used for a day makes room"


def test_an_owner_of_many_names_makes_room_for_others_until_they_have_as_many() -> None:
    forgotten: list[str] = []
    labels = FairLabels(forgotten.append, 4)
    assert [labels.label(name, "rich", 1.0) for name in "abcde"] == [*"abcd", OTHER]
    assert labels.label("a", "rich", 2.0) == "a", "b is the oldest now"
    assert [labels.label(name, "new", 3.0) for name in "xyz"] == ["x", "y", OTHER]
    assert forgotten == ["b", "c"]
    assert [labels.label(name, "rich", 4.0) for name in "bcad"] == [OTHER, OTHER, "a", "d"]
    assert labels.label("third", "third", 5.0) == "third"
    assert labels.label(OTHER, "new", 6.0) == OTHER, "no server takes that name"
    assert len(forgotten) == 3


def test_a_name_that_two_owners_use_counts_as_one_of_the_owner_with_fewer() -> None:
    forgotten: list[str] = []
    labels = FairLabels(forgotten.append, 3)
    for name, owner in (("a", "x"), ("b", "x"), ("c", "y")):
        labels.label(name, owner, 1.0)
    labels.label("a", "y", 2.0)  # it stays with x: each has one other name
    assert labels.label("d", "z", 3.0) == "d"
    assert forgotten == ["b"]


@pytest.mark.parametrize(
    ("server", "host"),
    [
        ("https://Host.Example:8443", "host.example:8443"),
        ("https://user:secret@host/path?token=x", "host"),
        ("https://host?x=@other/", "host"),
        ("file:///data/x", "file"),
        ("https://[::1]:80/x", "[::1]:80"),
        ("https://\ud800/x", UNKNOWN),
        ("https://a b/x", UNKNOWN),
        (f"https://{'a' * 101}/x", UNKNOWN),
        ("", UNKNOWN),
    ],
)
def test_a_url_becomes_a_host(server: str, host: str) -> None:
    assert host_of(server) == host


def test_a_histogram_is_read_as_prometheus_reads_it() -> None:
    durations = Histogram((0.1, 1.0))
    for value_s in (0.05, 0.1, 0.5, 7.0):
        durations.observe(value_s)
    found = Readings()
    found.put("stageout_manager_sync_duration_seconds", durations)
    [family] = text_string_to_metric_families(rendered(found, with_process=False).decode())
    shown = {(one.name.rpartition("_")[2], one.labels.get("le", "")): one.value for one in family.samples}
    assert shown[("bucket", "0.1")] == 2
    assert shown[("bucket", "+Inf")] == shown[("count", "")] == 4
    assert shown[("sum", "")] == pytest.approx(7.65)


def test_any_label_can_be_encoded() -> None:
    found = Readings()
    found.put("stageout_manager_handoffs_refused_total", 1, 'a"\n\\\ud800')
    assert b'reason="a\\"\\n\\\\?"' in rendered(found, with_process=False)


def test_the_library_is_loaded_only_where_metrics_are_on() -> None:
    code = (
        "import sys, sandbox_manager.daemon, schedd_agent.daemon, overlay_router.daemon, policy_service.daemon\n"
        "import stageout.plugin, stageout.protocols.curl.protocol, stageout.cli.main\n"
        "print([name for name in sys.modules if name.startswith('prometheus_client')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- endpoint --------------------------------------------------------------------------------------------------------


def test_metrics_are_off_unless_a_setting_asks_for_them(tmp_path: Path) -> None:
    async def story() -> None:
        values = Values()
        async with published(values, knobs()) as server:
            assert server._server is None
        assert values.scrapes == 0

    asyncio.run(story())


def test_only_metrics_are_served_and_on_loopback(port: int) -> None:
    async def story() -> None:
        values = Values()
        async with published(values, knobs(port)) as server:
            assert server._server is not None
            [listener] = server._server.sockets
            assert listener.getsockname()[0] == "127.0.0.1"
            status, kind, text = await in_thread(port)
            assert status == 200
            assert kind.startswith("text/plain; version=")
            names = {family.name for family in text_string_to_metric_families(text)}
            assert {"stageout_build_info", "stageout_manager_movers", "process_resident_memory_bytes"} <= names
            assert (await in_thread(port, "/metrics?name=x"))[0] == 200
            assert (await in_thread(port, "/metrics", "HEAD"))[::2] == (200, "")
            for path in ("/", "/metrics/", "//metrics", "/../etc/passwd", "http://127.0.0.1/metrics"):
                assert (await in_thread(port, path))[0] == 404
            assert (await in_thread(port, "/metrics", "POST"))[0] == 405
            assert values.scrapes == 1, "scrapes within a second cost no more than one"

    asyncio.run(story())


def test_clients_that_say_nothing_cannot_hold_all_connections(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "_REQUEST_S", 0.2)

    async def story() -> None:
        async with published(Values(), knobs(port)) as server:
            connect = functools.partial(socket.create_connection, ("127.0.0.1", port))
            loop = asyncio.get_running_loop()
            silent = [await loop.run_in_executor(None, connect) for _ in range(3 * MOST_CONNECTIONS)]
            await until(lambda: len(server._clients) == MOST_CONNECTIONS, "the connections")
            await until(lambda: not server._clients, "the end of the silent ones")
            for one in silent:
                one.close()
            assert (await in_thread(port))[0] == 200

    asyncio.run(story())


@pytest.mark.parametrize("request_text", [b"\r\n\r\n", b"GET\r\n\r\n", b"\xff\xfe \x00\r\n\r\n", b"x" * 20_000])
def test_nonsense_gets_no_values(port: int, request_text: bytes) -> None:
    def send() -> bytes:
        with socket.create_connection(("127.0.0.1", port), 10) as talk, contextlib.suppress(ConnectionError):
            talk.sendall(request_text)
            return talk.recv(65536)
        return b""

    async def story() -> None:
        async with published(Values(), knobs(port)):
            answer = await asyncio.get_running_loop().run_in_executor(None, send)
            assert b"stageout_" not in answer
            assert (await in_thread(port))[0] == 200

    asyncio.run(story())


def test_values_that_cannot_be_read_are_an_error_of_the_scrape(port: int) -> None:
    async def story() -> None:
        values = Values()
        values.fails = True
        async with published(values, knobs(port)):
            assert (await in_thread(port))[0] == 503
            values.fails = False
            assert (await in_thread(port))[0] == 200

    asyncio.run(story())


def test_a_reconfiguration_opens_and_closes_the_port(port: int) -> None:
    async def story() -> None:
        async with published(Values(), knobs()) as server:
            await server.update_settings(knobs(port))
            assert (await in_thread(port))[0] == 200
            await server.update_settings(knobs())
            with pytest.raises(ConnectionRefusedError):
                await in_thread(port)

    asyncio.run(story())


def test_a_port_that_is_taken_does_not_stop_the_daemon(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    async def story() -> None:
        async with published(Values(), knobs(port)), published(Values(), knobs(port)):
            assert (await in_thread(port))[0] == 200

    asyncio.run(story())


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_a_host_that_is_no_name_is_logged(host: str, port: int) -> None:
    async def story() -> None:
        wrong = mapping_settings({f"{PREFIX}_PORT": str(port), f"{PREFIX}_HOST": host})
        async with published(Values(), knobs()) as server:
            await server.update_settings(wrong)
            await server.update_settings(knobs(port))
            assert (await in_thread(port))[0] == 200

    asyncio.run(story())


class Reloaded(Values):
    """A daemon that reads its settings again, and stops after the third time."""

    def __init__(self) -> None:
        super().__init__()
        self.reloads = 0
        self._changed = asyncio.Event()

    async def serve(self, started: Callable[..., None]) -> None:
        started()
        while self.reloads < 3:
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.wait_for(self._changed.wait(), DEADLINE_S)
            self._changed.clear()

    def stop(self, fast: bool) -> None:
        self.reloads = 3

    async def reload(self) -> Settings:
        self.reloads += 1
        self._changed.set()
        return knobs()


class Broken(MetricsServer):
    """Metrics with a fault."""

    async def start(self, source: Source) -> None:
        raise RuntimeError("a fault")

    async def follow(self, settings: Settings) -> None:
        raise RuntimeError("a fault")


def test_a_daemon_reads_its_settings_again_after_a_fault_of_its_metrics() -> None:
    made: list[Reloaded] = []

    def make() -> Reloaded:
        made.append(Reloaded())
        return made[-1]

    asyncio.run(supervise(make, published=Broken("test", PREFIX, knobs())))
    assert [daemon.reloads for daemon in made] == [3]


# ---- file ------------------------------------------------------------------------------------------------------------


def test_the_file_for_node_exporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "FILE_INTERVAL_S", 0.05)
    monkeypatch.setattr(metrics_server, "_FRESH_S", 0.0)
    path = tmp_path / "stageout.prom"

    async def story() -> None:
        values = Values()
        async with published(values, knobs(file=str(path))):
            await until(lambda: values.scrapes > 3 and path.exists(), "the file")
            text = path.read_text()
            names = {family.name for family in text_string_to_metric_families(text)}
            assert names == {"stageout_build_info", "stageout_manager_movers"}, "node_exporter has process_* itself"
            assert path.stat().st_mode & 0o777 == 0o644
        assert list(tmp_path.iterdir()) == [], "old values would mislead"

    asyncio.run(story())


def test_the_file_does_not_come_back_after_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, replace = tmp_path / "stageout.prom", metrics_server._replace
    began, may_go_on = threading.Event(), threading.Event()

    def slow(path: Path, text: bytes) -> None:
        began.set()
        may_go_on.wait(DEADLINE_S)
        replace(path, text)

    async def story() -> None:
        server = MetricsServer("test", PREFIX, knobs(file=str(path)))
        await server.start(Values())
        await until(began.is_set, "the write")
        closing = asyncio.ensure_future(server.close())
        await asyncio.wait({closing}, timeout=0.1)
        may_go_on.set()
        await closing

    monkeypatch.setattr(metrics_server, "_replace", slow)
    asyncio.run(story())
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_never_written_through_a_link(tmp_path: Path) -> None:
    path, other = tmp_path / "stageout.prom", tmp_path / "other"
    other.write_text("kept")
    (tmp_path / ".stageout.prom.new").symlink_to(other)
    path.symlink_to(other)
    metrics_server._replace(path, b"x 1\n")
    assert other.read_text() == "kept"
    assert path.read_text() == "x 1\n"


def test_the_name_of_the_file_is_one_that_node_exporter_reads() -> None:
    with pytest.raises(ConfigError, match=r"\.prom"):
        metrics_settings(knobs(file="/var/lib/x/stageout.txt"), PREFIX)
    with pytest.raises(ConfigError, match="absolute"):
        metrics_settings(knobs(file="stageout.prom"), PREFIX)


# ---- sandbox manager -------------------------------------------------------------------------------------------------


@pytest.fixture
def site() -> Iterator[Site]:
    with made() as found:
        yield found


def samples(readings: Readings) -> dict[tuple[str, ...], float]:
    """Return values by name and values of the labels."""
    text = rendered(readings, with_process=False).decode()
    return {
        (one.name, *one.labels.values()): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def test_values_of_a_manager(site: Site) -> None:
    async def story() -> None:
        async with served(site) as node:
            first = await node.daemon.metrics()
            declared = {name for name, metric in METRICS.items() if metric.part == "manager"}
            assert {metric.name for metric, _ in first.items()} == declared
            assert samples(first)["stageout_manager_sandboxes", "Released"] == 0
            assert samples(first)["stageout_manager_destination_attempts_total", OTHER, "failed"] == 0
            assert samples(first)["stageout_manager_handoffs_refused_total", "SpoolFull"] == 0
            await accepted(node, "copy://h/ok/a", "copy://h/ok/b")
            await until(lambda: node.collector.last() == {"1.0": "Released"}, node.collector.last)
            found = samples(await node.daemon.metrics())
            plugin = site.plugin.name
            assert found["stageout_manager_sandboxes", "Released"] == 1
            assert found["stageout_manager_files", "delivered"] == 2
            assert found["stageout_manager_bytes", "delivered"] == 6
            assert found["stageout_manager_bytes", "waiting"] == 0
            assert found["stageout_manager_attempts_total", plugin, "delivered"] == 2
            assert found["stageout_manager_delivered_bytes_total", plugin] == 6
            assert found["stageout_manager_transfer_seconds_total", plugin] > 0
            assert found["stageout_manager_handoffs_accepted_total",] == 1
            assert found["stageout_manager_ledger_write_duration_seconds_count",] > 3
            assert found["stageout_manager_sync_duration_seconds_count",] >= 1
            assert found["stageout_manager_destination_attempts_total", "h", "delivered"] == 2
            assert found["stageout_manager_destination_delivered_bytes_total", "h"] == 6
            assert found["stageout_manager_custody_seconds_count",] == 1
            assert 0 <= found["stageout_manager_custody_seconds_sum",] < 600
            assert found["stageout_manager_lost_bytes_total",] == 0
            assert found["stageout_manager_oldest_undelivered_age_seconds",] == 0
            assert found["stageout_manager_data_slots",] == 12
            assert found["stageout_manager_data_slots_busy",] == 0
            assert found["stageout_manager_accepting",] == 1
            assert 0 <= found["stageout_manager_report_age_seconds",] < 60
            limit = found["stageout_manager_spool_limit_bytes",]
            assert 0 < found["stageout_manager_spool_used_bytes",] < limit

    run(story())
    assert set(map(str, State)) >= {"Released"}


def test_output_that_waits_for_a_server_that_is_away(site: Site) -> None:
    async def story() -> None:
        async with served(site) as node:
            site.flag("down")
            await accepted(node, "copy://Away.Example:8443/ok/a")
            waiting = ("stageout_manager_destination_bytes", "away.example:8443")

            async def samples_of_an_open_breaker() -> dict[tuple[str, ...], float] | None:
                found = samples(await node.daemon.metrics())
                return found if found.get(("stageout_manager_breakers_open",)) and found[waiting] else None

            found = await until(samples_of_an_open_breaker, "the breaker to open")
            assert found[waiting] == 3
            assert found["stageout_manager_attempts_total", site.plugin.name, "connect_failed"] >= 1
            assert found["stageout_manager_destination_up", "away.example:8443"] == 0
            assert found["stageout_manager_destination_attempts_total", "away.example:8443", "retried"] >= 1
            assert found["stageout_manager_custody_seconds_count",] == 0
            assert found["stageout_manager_files", "waiting"] == 1

    run(story())


# ---- router ----------------------------------------------------------------------------------------------------------


def test_values_of_a_router_are_those_of_its_reports(tmp_path: Path) -> None:
    summary = {"files": 3, "size_bytes": 50, "single": 1, "single_bytes": 5, "damaged": 0, "oldest_s": 9}
    facts = {"summary": summary, "problems": {"t:1": "refused"}, "oldest": []}
    assert samples(report.readings(tmp_path)) == {}
    (tmp_path / "custody.json").write_text(json.dumps(facts))
    (tmp_path / "egress.json").write_text("{")
    found = report.readings(tmp_path)
    assert {metric.name for metric, _ in found.items()} == {
        name for name, metric in METRICS.items() if metric.part == "router"
    }
    assert samples(found)["stageout_router_custody_bytes", "custody"] == 50
    assert samples(found)["stageout_router_delivery_problems", "custody"] == 1
