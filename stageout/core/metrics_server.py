"""Publication of metrics: an HTTP endpoint for Prometheus, and a file for the textfile collector of node_exporter.

Both are off unless a setting switches them on. Only then prometheus-client is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from stageout import __version__
from stageout.core import log
from stageout.core.config import KNOBS, ConfigError, Settings
from stageout.core.durable import write_all
from stageout.core.ending import end, outlast
from stageout.core.metrics import Histogram, Kind, Readings

if TYPE_CHECKING:
    import prometheus_client

#: Connections at the same time. Prometheus needs one.
MOST_CONNECTIONS = 8
_REQUEST_S = 5.0
_REQUEST_BYTES = 8192
_ANSWER_S = 10.0
#: Seconds for which the values of one scrape serve the next ones.
_FRESH_S = 1.0
FILE_INTERVAL_S = 30.0
_PLAIN = "text/plain; charset=utf-8"


@dataclass(frozen=True)
class MetricsSettings:
    """Settings of one daemon's metrics. :param port: 0 for no endpoint. :param file: None for no file."""

    host: str
    port: int
    file: Path | None


def metrics_settings(settings: Settings, prefix: str) -> MetricsSettings:
    """Read the settings. :param prefix: of their names. :raises ConfigError: one cannot be used."""
    name = f"{prefix}_FILE"
    file = settings.path(name) if name in KNOBS else ""
    if file and not file.endswith(".prom"):
        raise ConfigError(f"{name} = {file}: node_exporter reads only files whose names end in .prom")
    return MetricsSettings(
        settings.text(f"{prefix}_HOST"), settings.count(f"{prefix}_PORT"), Path(file) if file else None
    )


class Source(Protocol):
    """A daemon with metrics."""

    async def metrics(self) -> Readings:
        """Return the values of this moment."""


class MetricsServer:
    """The published metrics of one daemon.

    :param daemon: its name. :param prefix: of the names of its settings. :param settings: as they are at the start.
    """

    def __init__(self, daemon: str, prefix: str, settings: Settings) -> None:
        self._daemon, self._prefix, self._settings = daemon, prefix, settings
        self._source: Source
        self._now = MetricsSettings("", 0, None)
        self._server: asyncio.AbstractServer | None = None
        self._clients: set[asyncio.Task[None]] = set()
        self._writing: asyncio.Task[None] | None = None
        self._texts: dict[bool, bytes] = {}
        self._readings, self._read_s = Readings(), float("-inf")
        self._problem = ""
        self._reading: asyncio.Lock

    async def start(self, source: Source) -> None:
        """Publish the metrics of a daemon if a setting asks for it. A port that cannot be opened is logged."""
        self._source, self._reading = source, asyncio.Lock()
        await self.update_settings(self._settings)

    async def update_settings(self, settings: Settings) -> None:
        """Use changed settings. :raises ConfigError: they cannot be used, and the old ones stay."""
        wanted = metrics_settings(settings, self._prefix)
        if wanted == self._now:
            return
        await self.close()
        try:
            await self._open(wanted)
        except (OSError, ImportError, ValueError, OverflowError) as problem:  # such as a host that is no name
            advice = f"set {self._prefix}_HOST and {self._prefix}_PORT to a free address"
            if isinstance(problem, ImportError):
                advice = "install prometheus-client (pip install 'stageout[metrics]')"
            log.error("metrics-open-failed", host=wanted.host, port=wanted.port, problem=problem, advice=advice)
            return
        self._now = wanted

    async def _open(self, wanted: MetricsSettings) -> None:
        if wanted.port or wanted.file:
            await asyncio.get_running_loop().run_in_executor(None, _load)
        if wanted.port:
            self._server = await asyncio.start_server(self._connected, wanted.host, wanted.port, limit=_REQUEST_BYTES)
            log.event("metrics-opened", host=wanted.host, port=wanted.port)
        if wanted.file:
            self._writing = asyncio.get_running_loop().create_task(self._keep_file(wanted.file))

    async def close(self) -> None:
        """Stop publishing. On return the port is closed and the file is gone: old values would mislead."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        writing, self._writing = self._writing, None
        await end([*self._clients, *([writing] if writing else [])])
        if self._now.file:
            with contextlib.suppress(OSError):
                self._now.file.unlink()
        self._now = MetricsSettings("", 0, None)

    # ---- values ------------------------------------------------------------------------------------------------------

    async def _render(self, with_process: bool) -> bytes:
        """Return the metrics as text, at most a second old, so that many scrapes cost no more than one."""
        async with self._reading:
            loop = asyncio.get_running_loop()
            if loop.time() - self._read_s >= _FRESH_S:
                self._readings = await self._source.metrics()
                self._readings.put("stageout_build_info", 1, self._daemon, __version__)
                self._read_s = loop.time()
                self._texts.clear()
            if with_process not in self._texts:
                self._texts[with_process] = rendered(self._readings, with_process)
            return self._texts[with_process]

    async def _values(self, with_process: bool) -> bytes | None:
        """Return the text, None when the values cannot be read. Log a problem once."""
        problem = ""
        try:
            return await asyncio.wait_for(self._render(with_process), _ANSWER_S)
        except Exception as found:
            problem = repr(found)
            return None
        finally:
            if problem and problem != self._problem:
                log.error("metrics-failed", problem=problem)
            self._problem = problem

    # ---- file --------------------------------------------------------------------------------------------------------

    async def _keep_file(self, path: Path) -> None:
        known = ""
        while True:
            text, problem = await self._values(with_process=False), ""  # node_exporter has metrics of these names
            try:
                if text is not None:
                    await _replace_in_thread(path, text)
            except OSError as found:
                problem = str(found)
            if problem and problem != known:
                log.error("metrics-write-failed", path=path, problem=problem, advice=f"correct {self._prefix}_FILE")
            known = problem
            await asyncio.sleep(FILE_INTERVAL_S)

    # ---- endpoint ----------------------------------------------------------------------------------------------------

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._clients) >= MOST_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request and close the connection."""
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _REQUEST_S)
            writer.write(await self._answer(head))
            await asyncio.wait_for(writer.drain(), _ANSWER_S)
            writer.close()
            await asyncio.wait_for(writer.wait_closed(), _ANSWER_S)
        except (OSError, EOFError, asyncio.LimitOverrunError, asyncio.TimeoutError):
            pass  # a client that sends no request, or does not read the answer
        finally:
            writer.transport.abort()

    async def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.decode("latin-1").partition("\r\n")[0].partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if path != "/metrics":
            return _response("404 Not Found", b"Only /metrics is here.\n")
        if method not in ("GET", "HEAD"):
            return _response("405 Method Not Allowed", b"Only GET is allowed.\n", more="Allow: GET, HEAD\r\n")
        text = await self._values(with_process=True)
        if text is None:
            return _response("503 Service Unavailable", b"The values cannot be read: see the log.\n")
        return _response("200 OK", text, content_type(), with_body=method == "GET")


def _response(status: str, body: bytes, kind: str = _PLAIN, more: str = "", *, with_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (body if with_body else b"")


async def _replace_in_thread(path: Path, text: bytes) -> None:
    """Replace the file. A cancelled call ends after the write, which could else make the file again later."""
    work = asyncio.get_running_loop().run_in_executor(None, _replace, path, text)
    is_cancelled = await outlast(work)
    problem = work.exception()
    if is_cancelled:
        raise asyncio.CancelledError
    if problem:
        raise problem


def _replace(path: Path, text: bytes) -> None:
    """Replace the file at once: node_exporter must never read half of it. It is not durable."""
    aside = path.with_name(f".{path.name}.new")
    aside.unlink(missing_ok=True)
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        os.fchmod(descriptor, 0o644)
        write_all(descriptor, text)
    finally:
        os.close(descriptor)
    aside.replace(path)


def _load() -> None:
    import prometheus_client  # noqa: F401 - a tenth of a second, and many installations have none


def content_type() -> str:
    """Return the content type of :func:`rendered`."""
    from prometheus_client import CONTENT_TYPE_LATEST

    return CONTENT_TYPE_LATEST


def rendered(readings: Readings, with_process: bool) -> bytes:
    """Return the metrics in Prometheus' text format. :param with_process: with memory and CPU time of this process."""
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
    from prometheus_client.registry import Collector

    class Moment(Collector):
        """The values of one moment."""

        def collect(self) -> Iterator[prometheus_client.Metric]:
            """Yield each metric with its values."""
            return _families(readings)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Moment())
    if with_process:
        ProcessCollector(registry=registry)
    return generate_latest(registry)


def _families(readings: Readings) -> Iterator[prometheus_client.Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    for metric, values in readings.items():
        if metric.kind is Kind.HISTOGRAM:
            histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
            for labels, value in values.items():
                assert isinstance(value, Histogram)
                histogram.add_metric(labels, value.buckets(), value.sum_s)
            yield histogram
            continue
        kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        family = kind(metric.name, metric.help, labels=metric.labels)
        for labels, value in values.items():
            assert not isinstance(value, Histogram)
            family.add_metric(labels, value)
        yield family
