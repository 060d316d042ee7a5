"""Names that plugins deliver, on their way back: fetched by the same plugin, and sent when they are whole.

A client that asks for the present version gets bytes whose fetch began after its request, so no kept copy is ever taken
for the present version: clients that ask while a fetch runs share the next one. A client that asks for a version by its
number (it lost its connection in the middle, or wants another range of it) gets that version, from a kept copy if there
is one. The number is of the content: a file that is fetched again with the same bytes has the same one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlay_router.custodians.forwarder import OnDisk
from overlay_router.delivery.call import Kit, told
from overlay_router.delivery.egress import Egress
from overlay_router.delivery.fetched import DIGEST, Fetched, FetchedFiles, manifest_of, version_of
from overlay_router.delivery.turns import Turns, Wish
from overlay_router.local.lookups import refusal
from overlay_router.local.replies import Published
from overlay_router.local.tree import BadPath, checked
from stageout.core import log
from stageout.core.errors import ErrorClass
from stageout.core.pools import Pool
from stageout.movers import trees
from stageout.movers.mover import Equipment, Mover, PluginCall, Stopped, end_leftovers
from stageout.movers.results import Delivered, Failure, SentFile
from stageout.overlay.wire.egress import Target
from stageout.overlay.wire.frames import Checksum
from stageout.overlay.wire.messages import Answer, Get, Heartbeat, encode

_COALESCE_S = 0.05
_LOOK_S = 0.1
_REAP_S = 5.0
_GONE_S = 1.0
_AWAKE_TURNS = 10
#: The files that an earlier router has left are gone within this time, or something is wrong there.
_READY_S = 60.0
_AHEAD_BYTES = 64 * 1024 * 1024
_MODE = 0o644
Equip = Callable[[Target], Awaitable[Kit]]


@dataclass(eq=False)
class _Round:
    """One fetch of a name. :param wish: has a key for each who waits for it; without any it is stopped."""

    wish: Wish
    task: asyncio.Task[Fetched | Answer] | None = None
    begun: bool = False
    mover: Mover | None = None
    stopped: bool = False

    def stop(self) -> None:
        """Nobody wants it any more."""
        self.stopped = True
        if self.mover is not None:
            self.mover.stop()
        elif self.task is not None:
            self.task.cancel()


class Fetching:
    """All that comes back to one gateway. :meth:`run` beside everything.

    :param directory: of the spool, for what is fetched. :param most: plugins at once; whose they are is a matter of
        :mod:`overlay_router.delivery.turns`. :param keep_s: how long a copy is kept after its last use.
    :param equip: says what a plugin is run with; raises OSError where there is none, or its credentials cannot be
        read. :param on_disk: runs a call in the thread that owns the egress.
    """

    def __init__(
        self, egress: Egress, directory: Path, most: int, keep_s: float, equip: Equip, on_disk: OnDisk
    ) -> None:
        self._egress, self._directory, self._equip, self._on_disk = egress, directory, equip, on_disk
        self._files = FetchedFiles(egress.spool, keep_s, egress.clock)
        self._rounds: dict[str, _Round] = {}
        self._all: set[_Round] = set()  # those, too, for which a later one stands, or nobody waits
        self._threads = Pool(max_workers=most, thread_name_prefix="fetching")
        self._turns, self._granted = Turns(most), dict[Wish, asyncio.Future[None]]()
        self._names = (f"{secrets.token_hex(4)}-{number}" for number in itertools.count(1))
        self._is_ready = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled; then plugins are killed. The files that an earlier router had fetched go first."""
        try:
            while True:
                await self._tidied()
                await asyncio.sleep(_REAP_S)
        finally:
            for one in self._all:
                one.stop()
            await asyncio.gather(*(one.task for one in self._all if one.task), return_exceptions=True)
            self._threads.shutdown()

    async def _tidied(self) -> None:
        try:
            if not self._is_ready.is_set():
                await asyncio.to_thread(_emptied, self._directory)
                self._is_ready.set()
            await self._on_disk(self._files.reap)
        except OSError as problem:
            log.error("fetch-cleanup-failed", problem=problem, advice=f"look at {self._directory} and at the processes")

    async def file(self, ask: Get, key: str) -> Published | Answer:
        """The open file for a GET, which is the caller's to close; or why there is none. :param key: of who asks."""
        try:
            target = self._egress.targets.find(checked(ask.path))
        except BadPath as problem:
            return refusal(ask.path, problem)
        if target is None:
            return _no(ErrorClass.NOT_SUPPORTED, f"{ask.path}: only what is below it is delivered: name a file")
        try:
            await asyncio.wait_for(self._is_ready.wait(), _READY_S)
        except asyncio.TimeoutError:
            text = f"{ask.path}: this gateway's spool cannot be used yet; its administrator finds the reason in the log"
            return _no(ErrorClass.SERVER_BUSY, text)
        kept = await self._on_disk(lambda: self._files.find(ask.path, ask.generation)) if ask.generation > 0 else None
        found = kept or await self._fetched(target, ask.path, key)
        if isinstance(found, Answer):
            return found
        if ask.generation >= 0 and found.version != ask.generation:
            return _no(ErrorClass.CONFLICT, f"{ask.path}: another version is at {target.shown} now")
        return await self._opened(found)

    async def _opened(self, found: Fetched) -> Published | Answer:
        opening = asyncio.ensure_future(self._on_disk(lambda: self._files.open(found)))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_closed)  # the thread opens it nevertheless
            raise
        except OSError as problem:
            return _no(ErrorClass.SERVER_ERROR, f"{found.path}: {problem.strerror}")

    async def _fetched(self, target: Target, path: str, key: str) -> Fetched | Answer:
        """With all who asked since the last fetch of that name began."""
        mine, before = self._rounds.get(path), None
        if mine is None or mine.begun:
            mine, before = _Round(Wish(target)), mine
            mine.task = asyncio.get_running_loop().create_task(self._carried_out(target, path, mine, before))
            self._rounds[path] = mine
            self._all.add(mine)
            mine.task.add_done_callback(lambda task: self._all.discard(mine))
        assert mine.task is not None
        mine.wish.keys.append(key)
        self._begin_next()
        try:
            return await asyncio.shield(mine.task)
        finally:
            mine.wish.keys.remove(key)
            if not mine.wish.keys and not mine.task.done():
                self._forget(path, mine)
                mine.stop()

    def _forget(self, path: str, one: _Round) -> None:
        if self._rounds.get(path) is one:
            del self._rounds[path]

    async def _carried_out(self, target: Target, path: str, mine: _Round, before: _Round | None) -> Fetched | Answer:
        """Never more than one fetch of a name at once, and each in its turn."""
        try:
            if before is not None and before.task is not None:
                await asyncio.wait([before.task])
            await asyncio.sleep(_COALESCE_S)
            async with self._place(mine.wish):
                mine.begun = True
                return await self._fetch(target, path, mine)
        except OSError as problem:
            return _no(ErrorClass.SERVER_ERROR, f"{target.shown}: {problem}")
        finally:
            self._forget(path, mine)

    @contextlib.asynccontextmanager
    async def _place(self, wish: Wish) -> AsyncIterator[None]:
        """While it lasts, one of the places; its turn is waited for."""
        granted = self._granted[wish] = asyncio.get_running_loop().create_future()
        self._turns.ask(wish)
        try:
            self._begin_next()
            await granted
            yield
        finally:
            del self._granted[wish]
            self._turns.leave(wish)
            self._begin_next()

    def _begin_next(self) -> None:
        """All whose turn it is; one that is not wanted any more leaves by itself."""
        while (wish := self._turns.next()) is not None:
            if not self._granted[wish].done():
                self._granted[wish].set_result(None)

    async def _fetch(self, target: Target, path: str, mine: _Round) -> Fetched | Answer:
        """:raises OSError: the spool fails, or there is no plugin for it."""
        kit, file = await self._equip(target), self._directory / next(self._names)
        work = file.with_name(f"{file.name}.work")
        is_kept = False
        try:
            if not await self._on_disk(lambda: self._files.grow(file, self._ahead_bytes)):
                return self._no_room(path)
            log.event("fetch-started", path=path, source=target.shown)
            cargo = SentFile(file, target.url_of(path), path.rpartition("/")[2], 0)
            equipment = Equipment(kit.credentials)
            call = PluginCall(
                work, kit.plugin, os.geteuid(), os.getegid(), (cargo,), kit.lifetime_s, equipment, fetches=True
            )
            failure = await self._moved(call, file, mine)
            if failure is not None:
                log.warn(
                    "fetch-failed", path=path, source=target.shown, problem=failure.message, kind=failure.kind.name
                )
                return _no(*told(target, failure))
            fetched = await self._checked(target, path, file, mine)
            is_kept = isinstance(fetched, Fetched)
            return fetched
        finally:
            if not is_kept:
                await asyncio.shield(asyncio.ensure_future(self._on_disk(lambda: self._files.drop(file))))

    async def _moved(self, call: PluginCall, file: Path, mine: _Round) -> Failure | None:
        """Run the plugin; it is killed when what it writes finds no room, or nobody waits for it."""
        mover = mine.mover = Mover(call)
        if mine.stopped:
            mover.stop()
        running = asyncio.get_running_loop().run_in_executor(self._threads, mover.run)
        has_room = True
        while not (await asyncio.wait([running], timeout=_LOOK_S))[0]:
            used_bytes = await asyncio.to_thread(_used_bytes, call.directory)
            wanted = used_bytes + self._ahead_bytes
            if has_room and not await self._on_disk(lambda wanted=wanted: self._files.grow(file, wanted)):  # type: ignore[misc]
                has_room = False
                mover.stop()
        try:
            (answer,) = await running
        except Stopped:
            if has_room:
                return Failure(ErrorClass.NOT_ATTEMPTED, "nobody waits for it any more")
            return Failure(ErrorClass.NO_SPACE_REMOTE, _no_room_for(call.files[0].name, self._files.most_bytes))
        if isinstance(answer, Delivered):
            return None
        if isinstance(answer, Failure):
            return answer
        return Failure(ErrorClass.PLUGIN_BROKEN, "the plugin speaks of custody where it was to fetch")

    async def _checked(self, target: Target, path: str, file: Path, mine: _Round) -> Fetched | Answer:
        """A whole file gets its version, and is kept; what this gateway has delivered itself is compared."""
        known = await self._on_disk(lambda: self._egress.delivered(path))
        kind = known.digest if known else DIGEST
        # in the thread of the plugin that has ended: large files would take all those that others share
        size_bytes, manifest = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: manifest_of(file, kind, lambda: not mine.stopped)
        )
        if not await self._on_disk(lambda: self._files.grow(file, size_bytes)):
            return self._no_room(path)
        fetched = Fetched(path, file, size_bytes, version_of(manifest), known.mode if known else _MODE)
        await self._on_disk(lambda: self._files.keep(fetched))
        as_delivered = known is not None and (known.size_bytes, known.manifest) == (size_bytes, manifest)
        log.event("file-fetched", path=path, source=target.shown, size_bytes=size_bytes, as_delivered=as_delivered)
        if known is not None and not as_delivered:
            log.warn("delivered-file-changed", path=path, source=target.shown, size_bytes=size_bytes,
                     delivered_bytes=known.size_bytes,
                     advice="somebody else has changed it there; if nobody has, look at that storage")  # fmt: skip
        return fetched

    @property
    def _ahead_bytes(self) -> int:
        """Room for what a plugin writes until it is looked at again."""
        return min(_AHEAD_BYTES, self._files.most_bytes // 8)

    def _no_room(self, path: str) -> Answer:
        return _no(ErrorClass.NO_SPACE_REMOTE, _no_room_for(path, self._files.most_bytes))


async def awake(
    sock: socket.socket, checksum: Checksum, heartbeats: bool, work: Awaitable[Published | Answer]
) -> Published | Answer:
    """Wait for an answer that may take long, as long as who asked is there.

    :param heartbeats: he hears one every ten seconds, so that he knows the same of this side.
    :raises ConnectionResetError: he has gone.
    """
    waiting = asyncio.ensure_future(work)
    try:
        for turn in itertools.count(1):
            if (await asyncio.wait([waiting], timeout=_GONE_S))[0]:
                break
            with contextlib.suppress(BlockingIOError):
                if not sock.recv(1, socket.MSG_PEEK):
                    raise ConnectionResetError("who asked has gone")
            if heartbeats and turn % _AWAKE_TURNS == 0:
                await asyncio.get_running_loop().sock_sendall(sock, encode(Heartbeat(), checksum))
    except BaseException:
        waiting.cancel()
        waiting.add_done_callback(_closed)
        raise
    return waiting.result()


def _closed(future: asyncio.Future[Any]) -> None:
    """Nobody takes the answer."""
    if not future.cancelled() and future.exception() is None:
        found = future.result()
        if isinstance(found, Published):
            os.close(found.file)


def _no(kind: ErrorClass, message: str) -> Answer:
    return Answer(code=kind.code, message=message)


def _no_room_for(name: str, most_bytes: int) -> str:
    return (
        f"{name}: no room in the gateway's spool, of which {most_bytes} bytes are for what comes back; ask again later"
    )


def _used_bytes(directory: Path) -> int:
    used = 0
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for one in entries:
            with contextlib.suppress(OSError):  # it has another name by now
                used += one.stat(follow_symlinks=False).st_size
    return used


def _emptied(directory: Path) -> None:
    """Plugins of an earlier router are ended, and what they have fetched is removed."""
    directory.mkdir(mode=0o700, exist_ok=True)
    end_leftovers(directory)
    trees.remove(directory.parent, directory.name)
    directory.mkdir(mode=0o700)
