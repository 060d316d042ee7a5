"""The policy service: settings, and the listening socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web

from policy_service.advert import advertise, make_ad
from policy_service.api import Api
from policy_service.lease_store import LeaseStore
from policy_service.lease_table import LeaseRules, LeaseTable
from policy_service.model import RequestRefused
from policy_service.site_policy import ActivePolicy, BuiltInPolicy, PolicyError, open_policy
from policy_service.views import LeaseSnapshot
from stageout import daemon
from stageout.condor.collector_child import CollectorChild
from stageout.core import log
from stageout.core.clock import SystemClock
from stageout.core.config import ConfigError, Settings
from stageout.core.ending import end
from stageout.core.errors import StageoutError
from stageout.core.listening import in_url, tls_of
from stageout.core.metrics import Readings
from stageout.core.tokens import TokenTable
from stageout.tuning.policies import Limits

_SWEEP_S = 1.0


def rules_of(settings: Settings) -> LeaseRules:
    """Read the administrator's settings. :raises ConfigError: a knob cannot be used."""
    limits = Limits(
        initial=settings.count("STAGEOUT_POLICY_INITIAL"),
        increment=settings.count("STAGEOUT_POLICY_INCREMENT"),
        max_pair=settings.count("STAGEOUT_POLICY_MAX_PAIR"),
        max_client=settings.count("STAGEOUT_POLICY_MAX_CLIENT"),
        reserved=_numbers_by_owner(settings, "STAGEOUT_POLICY_RESERVED"),
    )
    total = sum(limits.reserved.values())
    if total > limits.max_pair:
        raise ConfigError(f"STAGEOUT_POLICY_RESERVED: {total} in all, more than STAGEOUT_POLICY_MAX_PAIR: reserve less")
    return LeaseRules(
        limits, settings.number("STAGEOUT_POLICY_LEASE"), _numbers_by_owner(settings, "STAGEOUT_POLICY_PRIORITIES")
    )


def _numbers_by_owner(settings: Settings, name: str) -> dict[str, int]:
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


class Daemon:
    """One service.

    :param load: reads the settings (again). :param pool_name: local name in the pool; None outside a pool.
    :raises StageoutError: settings, tokens or database cannot be used.
    """

    def __init__(self, load: Callable[[], Settings], pool_name: str | None = None) -> None:
        self._load = load
        self._pool_name = pool_name
        settings = load()
        rules, tokens = rules_of(settings), TokenTable(Path(settings.text("STAGEOUT_POLICY_TOKENS")))
        self._tls = tls_of(settings, "STAGEOUT_POLICY_HOST", "STAGEOUT_POLICY_CERT", "STAGEOUT_POLICY_KEY")
        self._host, self._port = settings.text("STAGEOUT_POLICY_HOST"), settings.count("STAGEOUT_POLICY_PORT")
        store = LeaseStore(database_of(settings))
        self._policy = settings.text("STAGEOUT_POLICY")
        self._table = LeaseTable(store, SystemClock(), rules, _policy_at_start(self._policy))
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="leases")
        self._api = Api(self._table, tokens, self._worker)
        self._stop = asyncio.Event()

    async def serve(self, started: Callable[..., None] = daemon.log_started) -> None:
        """Serve until :meth:`stop`. :raises OSError: the address cannot be listened on."""
        runner = web.AppRunner(self._api.application(), access_log=None, shutdown_timeout=5)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port, ssl_context=self._tls).start()
            url = f"{'https' if self._tls else 'http'}://{in_url(self._host)}:{runner.addresses[0][1]}"
            started(url=url, policy=self._table.policy.name)
            async with self._advertised(url):
                await self._sweep()
        finally:
            await runner.cleanup()
            await self._api.call(self._table.close)
            self._worker.shutdown()

    def stop(self, fast: bool) -> None:
        """Ask the service to end. :param fast: makes no difference, answers are short."""
        self._stop.set()

    @contextlib.asynccontextmanager
    async def _advertised(self, url: str) -> AsyncIterator[None]:
        """Publish the service's ad in the pool's collector while the block runs."""
        if self._pool_name is None:
            yield
            return

        async def ad() -> Mapping[str, Any]:
            return make_ad(url, await self._api.call(lambda: LeaseSnapshot.of(self._table)))

        task = asyncio.get_running_loop().create_task(advertise(CollectorChild(self._pool_name), ad))
        try:
            yield
        finally:
            await end([task])

    async def _sweep(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _SWEEP_S)
            with contextlib.suppress(RequestRefused):  # it is in the log, and tried again in a second
                await self._api.call(self._table.expire)

    async def metrics(self) -> Readings:
        """Return the values of this moment."""
        return await self._api.readings()

    async def reload(self) -> Settings:
        """Read settings, tokens and policy again. :raises StageoutError: one cannot be used, and the old ones stay."""
        try:
            settings = await self._api.call(self._read_again)
        except StageoutError as problem:
            self._table.note_reconfig(str(problem))
            raise
        self._table.note_reconfig()
        return settings

    def _read_again(self) -> Settings:
        settings = self._load()
        rules, tokens = rules_of(settings), TokenTable(Path(settings.text("STAGEOUT_POLICY_TOKENS")))
        policy = open_policy(settings.text("STAGEOUT_POLICY"))
        self._api.replace_tokens(tokens)
        self._table.change_rules(rules, policy)
        return settings


def _policy_at_start(name: str) -> ActivePolicy:
    """Open the configured policy, or the greedy one when that fails: the service must start."""
    try:
        return open_policy(name)
    except PolicyError as problem:
        log.error("policy-refused", problem=problem, instead="greedy")
        return BuiltInPolicy("greedy", str(problem))
