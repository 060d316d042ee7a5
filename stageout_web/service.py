"""The web page as a service: settings, the listening socket, and the readings of the pool."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from stageout import daemon
from stageout.condor.collector_child import CollectorChild
from stageout.core import log
from stageout.core.config import ConfigError, Settings
from stageout.core.ending import end
from stageout.core.errors import StageoutError
from stageout.core.history import FILE_NAME
from stageout.core.listening import in_url, name_of_pool, tls_of
from stageout.core.metrics import Readings
from stageout.core.tokens import TokenTable
from stageout_web.connections import listen
from stageout_web.queue import JobQueue
from stageout_web.readers import HEADER_NAME, Network, Proxies, Readers, Rights
from stageout_web.records import Records
from stageout_web.ring import Ring
from stageout_web.server import BASE, Server
from stageout_web.state import PageState

#: Settings of TLS, and settings that count from the start to the end of the daemon.
_TLS = "STAGEOUT_WEB_HOST", "STAGEOUT_WEB_CERT", "STAGEOUT_WEB_CERT_KEY"
_PROXY_TOKEN, _USER_HEADER = "STAGEOUT_WEB_PROXY_TOKEN", "STAGEOUT_WEB_USER_HEADER"
_LASTING = "STAGEOUT_WEB_HOST", "STAGEOUT_WEB_PORT", "STAGEOUT_WEB_BASE", "STAGEOUT_WEB_DIR"


def tokens_of(settings: Settings) -> TokenTable | None:
    """Return the readers' tokens, None without any. :raises StageoutError: their file cannot be used."""
    path = settings.text("STAGEOUT_WEB_TOKENS")
    return TokenTable(Path(path)) if path else None


def base_of(settings: Settings) -> str:
    """Return the path below which the page is shown. :raises ConfigError: it is not a path."""
    base = settings.text("STAGEOUT_WEB_BASE").rstrip("/")
    if not BASE.match(base):
        raise ConfigError(f"STAGEOUT_WEB_BASE = {base}: write a path of letters, digits and ._~-, such as /stageout")
    return base


def names_of(settings: Settings) -> list[str]:
    """Return the host names under which browsers may reach the page, besides localhost."""
    own = (settings.condor("FULL_HOSTNAME"), settings.text("STAGEOUT_WEB_HOST"))
    return [name for name in (*own, *settings.text("STAGEOUT_WEB_NAMES").replace(",", " ").split()) if name]


def rights_of(settings: Settings) -> Rights:
    """Return who may change deliveries."""
    names = settings.text("STAGEOUT_WEB_OPERATORS").replace(",", " ").split()
    return Rights(frozenset(names), settings.flag("STAGEOUT_WEB_OWNERS"))


def proxies_of(settings: Settings) -> Proxies:
    """Return the proxies that may name users. :raises StageoutError: their settings or their tokens cannot be used."""
    words, path = settings.text("STAGEOUT_WEB_PROXIES").replace(",", " ").split(), settings.text(_PROXY_TOKEN)
    header = settings.text(_USER_HEADER)
    if not HEADER_NAME.fullmatch(header):
        raise ConfigError(f"{_USER_HEADER} = {header}: write the name of a header, such as X-Stageout-User")
    if bool(words) != bool(path):
        raise ConfigError(f"set both STAGEOUT_WEB_PROXIES and {_PROXY_TOKEN}: an address alone proves no proxy")
    return Proxies(map(_network, words), TokenTable(Path(path)) if path else None, header)


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as problem:
        raise ConfigError(f"STAGEOUT_WEB_PROXIES: {problem}; write addresses, such as 127.0.0.1") from None


class Daemon:
    """The daemon.

    :param load: reads the settings (again). :raises StageoutError: settings or tokens cannot be used.
    """

    def __init__(self, load: Callable[[], Settings], local_name: str = "") -> None:
        self._load = load
        settings = load()
        self._settings = settings
        self._lasting = _lasting(settings)
        self._interval_s = settings.number("STAGEOUT_WEB_INTERVAL")
        self._tls = tls_of(settings, *_TLS)
        self._collector, self._queue = CollectorChild(local_name), JobQueue()
        self._ring = _ring(Path(settings.path("STAGEOUT_WEB_DIR")) / "ring.sqlite")
        records = Records(Path(settings.condor("SPOOL")) / FILE_NAME)
        self._state = PageState(self._collector, self._queue, self._ring, records)
        self._state.set_interval(self._interval_s)
        self._server = Server(
            self._state, Readers(tokens_of(settings), rights_of(settings), proxies_of(settings)), base_of(settings),
            settings.count("STAGEOUT_WEB_READERS"), name_of_pool(settings.condor("COLLECTOR_HOST")),
            names_of(settings),
        )  # fmt: skip
        self._stop = asyncio.Event()

    async def serve(self, started: Callable[..., None] = daemon.log_started) -> None:
        """Serve until :meth:`stop`. :raises OSError: the address cannot be listened on."""
        host, port = self._settings.text("STAGEOUT_WEB_HOST"), self._settings.count("STAGEOUT_WEB_PORT")
        runner = web.AppRunner(
            self._server.application(), access_log=None, shutdown_timeout=2, keepalive_timeout=15,
            handler_cancellation=True,
        )  # fmt: skip
        await runner.setup()
        try:
            for listener in await listen(host, port, self._server.connections):
                await web.SockSite(runner, listener, ssl_context=self._tls).start()
            started(
                url=f"{'https' if self._tls else 'http'}://{in_url(host)}:{runner.addresses[0][1]}{base_of(self._settings)}"
            )
            await self._update_until_stop()
        finally:
            self._server.close()
            await runner.cleanup()
            await self._collector.close()
            await self._queue.close()
            self._ring.close()

    def stop(self, fast: bool) -> None:
        """Ask the daemon to end. :param fast: makes no difference, answers are short."""
        self._stop.set()

    async def _update_until_stop(self) -> None:
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._update()), loop.create_task(self._stop.wait())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await end(tasks)

    async def _update(self) -> None:
        """Read the pool every few seconds. A reading that fails for an unexpected reason is logged."""
        before = ""
        while True:
            try:
                await self._state.tick()
                self._server.tick()
            except Exception:
                trace = traceback.format_exc()
                if trace != before:
                    log.error("reading-failed", trace=trace)
                before = trace
            if self._state.ticks == 1:
                gc.collect()
                gc.freeze()  # what stays for long is not looked through again
            await asyncio.sleep(self._interval_s)

    async def metrics(self) -> Readings:
        """Return the values of this moment."""
        found = Readings()
        found.put("stageout_web_readers", self._server.streams)
        found.put("stageout_web_connections", len(self._server.connections))
        found.put("stageout_web_sandboxes", sum(len(node.sandboxes) for node in self._state.pool.nodes.values()))
        if self._state.updated_at:
            found.put("stageout_web_reading_age_seconds", max(0.0, time.time() - self._state.updated_at))
        return found

    async def reload(self) -> Settings:
        """Read the settings again and log those that need a restart.

        :raises StageoutError: they cannot be used, and the old ones stay.
        """
        settings = self._load()
        tokens, proxies = tokens_of(settings), proxies_of(settings)
        base_of(settings)
        tls = tls_of(settings, *_TLS)
        if self._tls is not None and tls is not None:
            self._tls.load_cert_chain(settings.text(_TLS[1]), settings.text(_TLS[2]) or None)
        lasting = _lasting(settings)
        for name in [name for name, value in lasting.items() if value != self._lasting[name]]:
            log.warn("setting-ignored", problem=f"{name} has changed: restart stageout-web to use it")
        self._server.set_most_streams(settings.count("STAGEOUT_WEB_READERS"))
        self._interval_s = settings.number("STAGEOUT_WEB_INTERVAL")
        self._state.set_interval(self._interval_s)
        self._server.readers.replace(tokens, rights_of(settings), proxies)
        return settings


def _lasting(settings: Settings) -> dict[str, str]:
    """Return the settings that count until the daemon ends. For the certificate, only its presence counts."""
    found = {name: settings.text(name) for name in _LASTING}
    return {**found, _TLS[1]: str(bool(settings.text(_TLS[1])))}


def _ring(path: Path) -> Ring:
    """Open the history. :raises ConfigError: its directory cannot be written."""
    try:
        return Ring(path)
    except (StageoutError, OSError) as problem:
        raise ConfigError(f"STAGEOUT_WEB_DIR: {problem}") from None
