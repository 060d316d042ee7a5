"""Deliveries by transfer plugins: which files are next, one plugin process for some of them, what its answers mean.

The way of a file, top to bottom: :meth:`Outflow._begin` chooses files of one target;
:class:`overlay_router.delivery.call.Call`
runs the plugin in a thread; :meth:`Outflow._record` settles what is delivered or refused for good, and has the rest
tried again. A plugin that was killed, or whose answer was not recorded, is run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from overlay_router.custodians.forwarder import OnDisk
from overlay_router.custodians.spool import Held, Key
from overlay_router.delivery.call import Again, Call, Damaged, End, File, Kit, told
from overlay_router.delivery.egress import Egress
from overlay_router.delivery.fetching import Fetching
from overlay_router.delivery.lessee import Lessee
from overlay_router.local.replies import Reply
from overlay_router.pauses import FIRST_S, FORGET_EVERY_S, Pause
from overlay_router.rules.states import Outcome, Result
from stageout.core import log
from stageout.core.clock import Clock
from stageout.core.errors import Advice, ErrorClass
from stageout.core.pools import Pool
from stageout.movers.mover import end_leftovers
from stageout.movers.plugins_table import Plugin, PluginsTable
from stageout.movers.results import Delivered, Failure
from stageout.overlay.wire.egress import Target

_IDLE_S = 5.0
_COALESCE_S = 0.05
_BATCH_FILES = 100
_BATCH_BYTES = 256 * 1024 * 1024
_LEAST_LIFETIME_S = 10.0
_CREDENTIAL_BYTES = 1024 * 1024
#: Failures that say something of the server, not of one file: everything for the target waits.
_AWAY = frozenset(
    {
        ErrorClass.NAME_NOT_RESOLVED, ErrorClass.NAME_LOOKUP_FAILED, ErrorClass.CONNECT_FAILED,
        ErrorClass.SERVER_BUSY, ErrorClass.THROTTLED,
    }
)  # fmt: skip


@dataclass(frozen=True)
class Means:
    """The parameters of plugin calls.

    :param home: directory for their work. :param fetched: for files that come back, in the spool.
    :param report: file that says what is on its way.
    :param plugins: executables of FILETRANSFER_PLUGINS. :param most: calls at once.
    :param lifetime_s: of one call, at most. :param credentials: directory of tokens (``SERVICE.use``) and a proxy
        (``x509_proxy``), None for none. :param lessee: asks for leases, None where no other gateway delivers to the
        same places. :param keep_s: how long what was fetched is kept after its last use.
    """

    home: Path
    fetched: Path
    report: Path
    plugins: tuple[str, ...]
    most: int
    lifetime_s: float
    credentials: Path | None = None
    lessee: Lessee | None = None
    keep_s: float = 0.0


class Outflow:
    """Delivers what an :class:`Egress` holds. :meth:`run` beside everything.

    :param on_disk: runs a call in the thread that owns the egress. :param tell: sends replies.
    :ivar fetching: the way back.
    """

    def __init__(
        self, egress: Egress, means: Means, on_disk: OnDisk, tell: Callable[[list[Reply]], None], clock: Clock
    ) -> None:
        self._egress, self._means, self._on_disk, self._tell, self._clock = egress, means, on_disk, tell, clock
        self._table = PluginsTable(asks_as_itself=True)
        self._threads = Pool(max_workers=means.most, thread_name_prefix="egress")
        self._calls: dict[Call, asyncio.Task[None]] = {}
        #: Operations whose data are looked up now, for a call.
        self._beginning: frozenset[Key] = frozenset()
        self._pauses: dict[Key | str, Pause] = {}
        self._problems: dict[str, str] = {}
        self._forget_s = 0.0
        # Never those of an earlier router: its guards may still look for what runs for them.
        self._numbers = (f"{secrets.token_hex(4)}-{number}" for number in itertools.count(1))
        self.wake = asyncio.Event()
        self.fetching = Fetching(egress, means.fetched, means.most, means.keep_s, self._equipped, on_disk)

    @property
    def busy(self) -> frozenset[Key]:
        """The operations that are being delivered, or about to be: they must not come to their end here."""
        return self._beginning.union(file.held.key for call in self._calls for file in call.files)

    @property
    def problems(self) -> dict[str, str]:
        """Return why deliveries to a target fail now."""
        return dict(self._problems)

    async def run(self) -> None:
        """Deliver until cancelled; then plugins are killed, and what they had not verified is sent again after a start.

        Nothing is delivered as long as plugins of an earlier router run.
        """
        try:
            while not await self._is_alone():
                await asyncio.sleep(FIRST_S)
            await asyncio.to_thread(self._table.load, self._means.plugins)
            self._name_missing()
            while True:
                self.wake.clear()
                await self._try_to_begin()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.wake.wait(), self._until_next_s())
                await asyncio.sleep(_COALESCE_S)
        finally:
            for call in self._calls:
                call.stop()
            await asyncio.gather(*self._calls.values(), return_exceptions=True)
            self._threads.shutdown()

    def _name_missing(self) -> None:
        """Targets that no plugin delivers to: whatever comes for them waits here."""
        for target in self._egress.targets.known:
            if self._table.find("", target.scheme) is None:
                advice = f"name a plugin for {target.scheme} in FILETRANSFER_PLUGINS and start the router again"
                log.error("target-unsupported", prefix=f"/{target.prefix}", to=target.shown, advice=advice)

    def cancelled(self, key: Key) -> None:
        """Somebody does not want it any more: a plugin that has it is killed."""
        for call in self._calls:
            if any(file.held.key == key for file in call.files):
                call.stop()
        self._pauses.pop(key, None)
        self.wake.set()

    async def _is_alone(self) -> bool:
        try:
            self._means.home.mkdir(mode=0o700, exist_ok=True)
            await asyncio.to_thread(end_leftovers, self._means.home)
        except OSError as problem:
            log.error("egress-start-failed", problem=problem, advice=f"look at {self._means.home} and at the processes")
            return False
        return True

    async def _try_to_begin(self) -> None:
        try:
            await self._begin()
        except Exception as problem:  # a full disk, above all: deliveries must not end for ever
            log.error(
                "egress-read-failed", problem=repr(problem), advice="look at the disk of the spool and its database"
            )
            await asyncio.sleep(FIRST_S)

    async def _begin(self) -> None:
        busy = self.busy
        ready, replies = await self._on_disk(lambda: self._egress.ready(busy))
        self._tell(replies)
        for target, some in self._batches(ready):
            plugin = self._table.find("", target.scheme)
            if plugin is None:
                await asyncio.to_thread(self._table.load, self._means.plugins)
                advice = f"name a plugin for {target.scheme} in FILETRANSFER_PLUGINS"
                self._pause(target, target.url, 0.0, f"no plugin for {target.scheme}", advice=advice)
                continue
            try:
                left_s = min(held.operation.expires for held in some) - self._clock.wall_s()
                kit = await asyncio.to_thread(self._kit, plugin, left_s)
            except OSError as problem:
                advice = "see STAGEOUT_ROUTER_EGRESS_CREDENTIALS"
                self._pause(target, target.url, 0.0, f"credentials: {problem}", advice=advice)
                continue
            await self._call(target, some, kit)
        await self._forget()

    async def _forget(self) -> None:
        """The records of files that have ended, and of targets that nothing goes to, once a minute."""
        now_s = self._clock.monotonic_s()
        if now_s < self._forget_s:
            return
        self._forget_s = now_s + FORGET_EVERY_S
        held = await self._on_disk(self._egress.held)
        targets = {target for one in held if (target := self._egress.targets.find(one.operation.path)) is not None}
        kept = {*(one.key for one in held), *(target.url for target in targets)}
        shown = {target.shown for target in targets}
        self._pauses = {what: pause for what, pause in self._pauses.items() if what in kept}
        self._problems = {place: why for place, why in self._problems.items() if place in shown}

    async def _call(self, target: Target, some: list[Held], kit: Kit) -> None:
        """Begin a call, without files that have ended meanwhile."""
        self._beginning = frozenset(held.key for held in some)
        try:
            files, bad = await self._on_disk(lambda: self._files(some))
            for held, problem in bad:
                words = f"its records cannot be read: {problem}"
                self._pause(target, held.key, 0.0, words, path=held.operation.path)
            if files:
                call = Call(target, files, kit)
                self._calls[call] = asyncio.get_running_loop().create_task(self._carry_out(call))
        finally:
            self._beginning = frozenset()

    def _batches(self, ready: Sequence[Held]) -> list[tuple[Target, list[Held]]]:
        """The operations that begin now: a target never takes all places, and one that is away is tried with one file
        at a time."""
        now_s, load = self._clock.monotonic_s(), Counter(call.target for call in self._calls)
        chosen: list[tuple[Target, list[Held]]] = []
        waiting: dict[Target, list[Held]] = {}
        for held in ready:
            target = self._egress.targets.find(held.operation.path)
            if target is not None and self._pauses.get(held.key, Pause()).until_s <= now_s:
                waiting.setdefault(target, []).append(held)
        for target, some in waiting.items():
            away = self._pauses.get(target.url, Pause())
            at_once = 1 if away.failures or self._means.most == 1 else self._means.most - 1
            while some and away.until_s <= now_s and load[target] < at_once:
                if len(self._calls) + len(chosen) >= self._means.most:
                    return chosen
                chosen.append((target, _taken(some, 1 if away.failures else _BATCH_FILES)))
                load[target] += 1
        return chosen

    def _files(self, some: Sequence[Held]) -> tuple[list[File], list[tuple[Held, Exception]]]:
        """The operations that have not ended meanwhile; and those whose records cannot be read, which hold up no
        others."""
        files, bad = list[File](), list[tuple[Held, Exception]]()
        for held in filter(self._egress.has, some):
            try:
                files.append(File(held, Path(self._egress.file(held)), tuple(self._egress.digests(held))))
            except Exception as problem:
                bad.append((held, problem))
        return files, bad

    async def _equipped(self, target: Target) -> Kit:
        """For a file that is fetched. :raises OSError: there is no plugin, or the credentials cannot be read."""
        plugin = self._table.find("", target.scheme)
        if plugin is None:
            await asyncio.to_thread(self._table.load, self._means.plugins)
            plugin = self._table.find("", target.scheme)
        if plugin is None:
            raise OSError(f"no plugin for {target.scheme}: its administrator can name one in FILETRANSFER_PLUGINS")
        return await asyncio.to_thread(self._kit, plugin, self._means.lifetime_s)

    def _kit(self, plugin: Plugin, left_s: float) -> Kit:
        """:raises OSError: credentials cannot be read."""
        means = self._means
        return Kit(
            plugin, means.home / next(self._numbers), max(_LEAST_LIFETIME_S, min(means.lifetime_s, left_s)),
            _contents(means.credentials), means.lessee,
        )  # fmt: skip

    async def _carry_out(self, call: Call) -> None:
        for file in call.files:
            log.event("delivery-started", origin=file.held.key[0], seq=file.held.key[1], path=file.held.operation.path,
                      to=call.target.shown)  # fmt: skip
        try:
            ends = await asyncio.get_running_loop().run_in_executor(self._threads, call.run)
            for file, end in zip(call.files, ends):
                try:
                    self._tell(await self._record(call.target, file.held, end))
                except Exception as problem:  # of this file: the others have their end
                    words = f"not recorded: {problem!r}"
                    self._pause(call.target, file.held.key, 0.0, words, path=file.held.operation.path)
        except Exception as problem:  # not run, or not recorded: a fault of ours must not end all deliveries
            self._pause(call.target, call.target.url, 0.0, f"not delivered, or not recorded: {problem!r}")
        finally:
            del self._calls[call]
            self.wake.set()

    async def _record(self, target: Target, held: Held, end: End) -> list[Reply]:
        if isinstance(end, Delivered):
            self._pauses.pop(target.url, None)
            self._pauses.pop(held.key, None)
            self._problems.pop(target.shown, None)
            log.event("file-delivered", path=held.operation.path, to=target.shown, verified=end.verified)
            return await self._on_disk(lambda: self._egress.settle(held.key, Result(Outcome.DONE)))
        if isinstance(end, Damaged):
            return await self._on_disk(lambda: self._egress.damaged(held.key, end.blocks))
        if isinstance(end, Again):
            self._pause(target, held.key, 0.0, end.why, path=held.operation.path)
            return []
        return await self._failed(target, held, end)

    async def _failed(self, target: Target, held: Held, failure: Failure) -> list[Reply]:
        """By the table: tried again here, or the sender hears it."""
        advice = failure.kind.advice
        if advice is not Advice.RETRY_HERE:
            kind, reason = told(target, failure)
            log.error("delivery-failed", path=held.operation.path, to=target.shown, problem=failure.message,
                      kind=failure.kind.name, advice=advice.value)  # fmt: skip
            self._pauses.pop(held.key, None)
            result = Result(Outcome.FAILED, reason, code=kind.code)
            return await self._on_disk(lambda: self._egress.settle(held.key, result))
        away = failure.kind in _AWAY
        what = target.url if away else held.key
        self._pause(target, what, failure.retry_after_s, failure.message, path=held.operation.path)
        return []

    def _pause(self, target: Target, what: Key | str, least_s: float, problem: str, **facts: object) -> None:
        pause = self._pauses.setdefault(what, Pause())
        now_s = self._clock.monotonic_s()
        pause.more(now_s, least_s)
        self._problems[target.shown] = problem
        log.warn("delivery-failed", to=target.shown, problem=problem, again_s=round(pause.until_s - now_s), **facts)

    def _until_next_s(self) -> float:
        now_s = self._clock.monotonic_s()
        waits = [pause.until_s - now_s for pause in self._pauses.values() if pause.until_s > now_s]
        return min([_IDLE_S, *waits])


def _taken(some: list[Held], most: int) -> list[Held]:
    """The first files of a list, removed from it: so many, or so many bytes."""
    taken = [some.pop(0)]
    size_bytes = taken[0].operation.size_bytes
    while some and len(taken) < most and size_bytes + some[0].operation.size_bytes <= _BATCH_BYTES:
        size_bytes += some[0].operation.size_bytes
        taken.append(some.pop(0))
    return taken


def _contents(directory: Path | None) -> dict[str, bytes]:
    """Credentials as they are now. :raises OSError: they cannot be read."""
    if directory is None:
        return {}
    files = [path for path in directory.iterdir() if path.is_file() and not path.name.startswith(".")]
    return {path.name: path.read_bytes()[:_CREDENTIAL_BYTES] for path in files}
