"""The process: settings, signals, the listening socket. A child of condor_master, or alone."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import os
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aiohttp import web

from policy_service.advert import Advert, ad_of
from policy_service.api import Api
from policy_service.book import Book, Rules
from policy_service.model import Refused
from policy_service.site_policy import BuiltIn, Decider, PolicyError, open_policy
from policy_service.store import Store
from policy_service.tokens import TokenError, Tokens
from policy_service.views import Picture
from stageout import __version__
from stageout.core import log
from stageout.core.clock import SystemClock
from stageout.core.config import ConfigError, Settings, condor_settings, environment_settings, reload_condor
from stageout.core.ending import end
from stageout.core.errors import StageoutError
from stageout.tuning.policies import Limits

EXIT_NO_RESTART = 99
"""condor_master does not start a daemon again that exits with this status."""

_SWEEP_S = 1.0


def rules_of(settings: Settings) -> Rules:
    """Read the administrator's settings. :raises ConfigError: a knob cannot be used."""
    limits = Limits(
        initial=settings.count("STAGEOUT_POLICY_INITIAL"),
        increment=settings.count("STAGEOUT_POLICY_INCREMENT"),
        max_pair=settings.count("STAGEOUT_POLICY_MAX_PAIR"),
        max_client=settings.count("STAGEOUT_POLICY_MAX_CLIENT"),
        reserved=_by_owner(settings, "STAGEOUT_POLICY_RESERVED"),
    )
    total = sum(limits.reserved.values())
    if total > limits.max_pair:
        raise ConfigError(f"STAGEOUT_POLICY_RESERVED: {total} in all, more than STAGEOUT_POLICY_MAX_PAIR: reserve less")
    return Rules(limits, settings.number("STAGEOUT_POLICY_LEASE"), _by_owner(settings, "STAGEOUT_POLICY_PRIORITIES"))


def _by_owner(settings: Settings, name: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for item in settings.text(name).replace(",", " ").split():
        owner, _, number = item.partition("=")
        if not owner or not number.isdecimal():
            raise ConfigError(f"{name}: cannot read {item!r}; write OWNER=NUMBER, ...")
        found[owner] = int(number)
    return found


def database_of(settings: Settings) -> Path:
    """Return the path of the leases. :raises ConfigError: it depends on a parameter that is not set."""
    return Path(settings.path("STAGEOUT_POLICY_DIR")) / "policy.sqlite"


def tls_of(settings: Settings) -> ssl.SSLContext | None:
    """TLS of the listening socket; None on loopback without a certificate.

    :raises ConfigError: tokens would go over the network in clear, or the certificate cannot be used.
    """
    certificate, host = settings.text("STAGEOUT_POLICY_CERT"), settings.text("STAGEOUT_POLICY_HOST")
    if not certificate:
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(host).is_loopback:
                return None
        raise ConfigError(
            f"STAGEOUT_POLICY_HOST = {host}: tokens would be sent in clear; set STAGEOUT_POLICY_CERT,"
            " or 127.0.0.1 behind a proxy with TLS"
        )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, settings.text("STAGEOUT_POLICY_KEY") or None)
    except (OSError, ssl.SSLError) as problem:
        raise ConfigError(f"STAGEOUT_POLICY_CERT, STAGEOUT_POLICY_KEY: {problem}") from problem
    return context


class Daemon:
    """One service.

    :param load: reads the settings (again). :param pool_name: local name in the pool that is to know of it; None: none.
    :raises StageoutError: settings, tokens or database cannot be used.
    """

    def __init__(self, load: Callable[[], Settings], pool_name: str | None = None) -> None:
        self._load = load
        self._pool_name = pool_name
        settings = load()
        rules, tokens = rules_of(settings), Tokens(Path(settings.text("STAGEOUT_POLICY_TOKENS")))
        self._tls = tls_of(settings)
        self._host, self._port = settings.text("STAGEOUT_POLICY_HOST"), settings.count("STAGEOUT_POLICY_PORT")
        store = Store(database_of(settings))
        self._policy = settings.text("STAGEOUT_POLICY")
        self._book = Book(store, SystemClock(), rules, _policy_at_start(self._policy))
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="book")
        self._api = Api(self._book, tokens, self._worker)

    async def run(self) -> None:
        """Serve until told to stop.

        :raises OSError: the address cannot be listened on.
        """
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        reloads: set[asyncio.Task[None]] = set()

        def reload() -> None:
            task = loop.create_task(self._reload())
            reloads.add(task)
            task.add_done_callback(reloads.discard)

        for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGHUP, reload)
        runner = web.AppRunner(self._api.application(), access_log=None, shutdown_timeout=5)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port, ssl_context=self._tls).start()
            url = f"{'https' if self._tls else 'http'}://{self._host}:{runner.addresses[0][1]}"
            log.event("start", version=__version__, pid=os.getpid(), url=url, policy=self._book.decider.name)
            async with self._advertised(url):
                await self._sweep_until(stop)
        finally:
            await runner.cleanup()
            await self._api.call(self._book.close)
            self._worker.shutdown()
        log.event("stop")

    @contextlib.asynccontextmanager
    async def _advertised(self, url: str) -> AsyncIterator[None]:
        """In the pool's collector meanwhile."""
        if self._pool_name is None:
            yield
            return

        async def facts() -> Mapping[str, str | int]:
            return ad_of(url, await self._api.call(lambda: Picture.of(self._book)))

        task = asyncio.get_running_loop().create_task(Advert(self._pool_name, facts).run())
        try:
            yield
        finally:
            await end([task])

    async def _sweep_until(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stop.wait(), _SWEEP_S)
            with contextlib.suppress(Refused):  # it is in the log, and tried again in a second
                await self._api.call(self._book.expire)

    async def _reload(self) -> None:
        """Settings, tokens and policy as they are now; what cannot be used is refused, and the old one goes on."""
        try:
            await self._api.call(self._read_again)
        except StageoutError as problem:
            self._book.reconfig_problem = str(problem)
            log.error("reconfig-refused", problem=problem)
        else:
            self._book.reconfig_problem = ""
            log.event("reconfig", policy=self._book.decider.name)

    def _read_again(self) -> None:
        settings = self._load()
        rules, tokens = rules_of(settings), Tokens(Path(settings.text("STAGEOUT_POLICY_TOKENS")))
        decider = open_policy(settings.text("STAGEOUT_POLICY"))
        old, self._book.decider = self._book.decider, decider
        self._book.rules, self._api.tokens = rules, tokens
        old.close()


def _policy_at_start(name: str) -> Decider:
    """The policy of the settings, or the greedy one when that one is bad: the service must come up."""
    try:
        return open_policy(name)
    except PolicyError as problem:
        log.error("policy-refused", problem=problem, instead="greedy")
        fallback = BuiltIn("greedy")
        fallback.problem = str(problem)
        return fallback


def _load_condor(local_name: str) -> Settings:
    reload_condor()
    return condor_settings(local_name)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the service (``stageout-policy-service``); condor_master starts it, or anything else with ``--alone``."""
    parser = argparse.ArgumentParser("stageout-policy-service", description="Grants streams between sites, as leases.")
    parser.add_argument("-local-name", "--local-name", default="", help="read NAME.KNOB before KNOB")
    parser.add_argument(
        "--alone", action="store_true", help="no HTCondor: settings are _CONDOR_KNOB in the environment"
    )
    parser.add_argument("-f", "-t", dest="ignored", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    options = parser.parse_args(argv)

    def load() -> Settings:
        return environment_settings() if options.alone else _load_condor(options.local_name)

    try:
        log.open_daemon_log(load(), "STAGEOUT_POLICY_SERVICE_LOG", "StageoutPolicyLog")
        daemon = Daemon(load, None if options.alone else options.local_name)
    except (ConfigError, TokenError) as problem:
        _end(problem, EXIT_NO_RESTART)
    except StageoutError as problem:
        _end(problem, 1)
    try:
        asyncio.run(daemon.run())
    except OSError as problem:
        _end(problem, 1)


def _end(problem: Exception, status: int) -> None:
    log.error("cannot-start", problem=problem)
    print(f"stageout-policy-service: {problem}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
