"""Copies carried out: which begin, how many at once, when one that failed is tried again. A process for each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

from overlay_router.copying.copies import LATE, Commanded, Copies, Key
from overlay_router.copying.copyist import Order
from overlay_router.custodians.forwarder import OnDisk
from overlay_router.local.destination import Destination
from overlay_router.local.replies import Reply
from overlay_router.peers.keys import OwnCredential
from overlay_router.peers.origins import as_said
from overlay_router.rules.states import Outcome, Result
from stageout.core import log
from stageout.core.children import module_command
from stageout.core.errors import ErrorClass
from stageout.core.pauses import growing_s
from stageout.overlay.wire import token
from stageout.overlay.wire.messages import Answer, Copy
from stageout.overlay.wire.route import Route

_FIRST_S, _LONGEST_S = 1.0, 60.0
_LOOK_S = 5.0
_REASON_CHARS = 200
_NOT_KNOWN = "whether it is there is not known: the other router was asked, and did not answer"

Ways = Callable[[str], Awaitable["tuple[Route, ...]"]]
"""Routes from here to a router, none if there are none."""


@dataclass
class _Try:
    """A copy that is being carried out, or waits to be. :param until_s: on the loop's clock.

    :param task: of the try that goes on now.
    """

    failures: int = 0
    until_s: float = 0.0
    task: asyncio.Task[None] | None = None
    process: asyncio.subprocess.Process | None = None

    def stop(self) -> None:
        """End the process, if there is one."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()


class Copier:
    """Carries out what was commanded. :meth:`run` beside everything.

    :param on_disk: runs a call in the thread that owns copies and destination. :param tell: sends replies.
    :param ways: routes to a router. :param own: what this router shows to others. :param most: copies at once.
    """

    def __init__(
        self,
        copies: Copies,
        destination: Destination,
        on_disk: OnDisk,
        tell: Callable[[list[Reply]], None],
        ways: Ways,
        own: OwnCredential,
        most: int,
    ) -> None:
        self._copies, self._destination, self._on_disk, self._tell, self._ways = (
            copies,
            destination,
            on_disk,
            tell,
            ways,
        )
        self._own, self._most = own, most
        self._tries: dict[Key, _Try] = {}
        self.wake = asyncio.Event()

    @property
    def busy(self) -> frozenset[Key]:
        """The copies that are being carried out."""
        return frozenset(key for key, one in self._tries.items() if one.task is not None)

    @property
    def bearer(self) -> str:
        """Name by which other routers know this one's key, once it is proved: a warrant is for that."""
        return token.known_as(self._own.now.key[0])

    async def reason_against(self, ask: Copy, unreadable: str) -> str:
        """Return why a copy is not taken on, "" if it is: what may be written is for the other router to judge.

        :param unreadable: why who commands it may not read the file, "" if he may.
        """
        if await self._on_disk(lambda: self._copies.knows(ask.origin, ask.seq)):
            return ""
        if unreadable:
            return unreadable[:_REASON_CHARS]
        found = await self._on_disk(lambda: self._destination.published(ask.source, ask.source_generation, blocks=1))
        if isinstance(found, Answer):
            return found.message[:_REASON_CHARS]
        os.close(found.file)
        if found.size_bytes != ask.size_bytes:
            return "source"
        return "" if await self._ways(ask.terminal) else "unreachable"

    async def run(self) -> None:
        """Carry out until cancelled; what is under way is dropped then, and goes on at the next start."""
        try:
            while True:
                self.wake.clear()
                await self._begin()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.wake.wait(), self._until_next_s())
        finally:
            tasks = [one.task for one in self._tries.values() if one.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def cancelled(self, key: Key) -> None:
        """Somebody does not want it any more."""
        one = self._tries.get(key)
        if one is not None:
            one.until_s = 0.0
            one.stop()
        self.wake.set()

    async def _begin(self) -> None:
        now_s = asyncio.get_running_loop().time()
        due = await self._on_disk(self._copies.due)
        live = {one.key for one in due}
        for one in (one for key, one in self._tries.items() if key not in live):
            one.stop()
        self._tries = {key: one for key, one in self._tries.items() if key in live or one.task is not None}
        for commanded in due:
            one = self._tries.setdefault(commanded.key, _Try())
            if len(self.busy) >= self._most:
                break
            if one.task is None and one.until_s <= now_s:
                one.task = asyncio.get_running_loop().create_task(self._try(commanded, one))

    def _until_next_s(self) -> float:
        now_s = asyncio.get_running_loop().time()
        waits = [one.until_s - now_s for one in self._tries.values() if one.task is None and one.until_s > now_s]
        return min([_LOOK_S, *waits])

    async def _try(self, commanded: Commanded, one: _Try) -> None:
        try:
            if await self._on_disk(lambda: self._copies.has(commanded)):
                end = await self._carried_out(commanded, one)
                await self._record(commanded, one, end)
        except Exception as problem:  # not recorded, or no process: tried again, but not at once
            log.error("copy-write-failed", origin=commanded.key[0], problem=repr(problem))
            self._later(one)
        finally:
            one.task = one.process = None
            self.wake.set()

    async def _carried_out(self, commanded: Commanded, one: _Try) -> dict[str, Any]:
        """Return how a process ended that carried it out. :raises OSError: it could not be started.

        A copy that is given up ends so only when the other router, if it has heard of it, says that it was not done.
        """
        copy, gives_up, file, known = commanded.copy, self._given_up(commanded), -1, ("", "")
        if gives_up is None:
            found = await self._on_disk(lambda: self._destination.published(copy.source, copy.source_generation))
            if isinstance(found, Answer):
                gives_up = {"problem": found.message, "code": found.code, "again": False}
            else:
                file, known = found.file, (found.digests.hex(), found.content.digest if found.content else "")
        try:
            if gives_up is not None and not commanded.reached:
                return {**gives_up, "sure": True}
            routes = await self._ways(copy.terminal)
            if not routes:
                words = f"no route to {copy.terminal} is known here"
                return {"problem": words, "code": ErrorClass.CONNECT_FAILED.code, "again": True}
            own, cancel = self._own.now, gives_up is not None
            name, secret = own.key
            asked = as_said(copy, commanded.sender)  # as its warrant names it
            order = Order(asked, f"/proc/self/fd/{file}", name, secret.hex(), routes, own.ca, cancel, *known)
            end = await self._run(order, file, commanded.key, one)
            was_not_made = gives_up and end.get("outcome") == Outcome.CANCELLED.value
            return {**gives_up, "sure": True} if gives_up and was_not_made else end
        finally:
            if file >= 0:
                os.close(file)

    def _given_up(self, commanded: Commanded) -> dict[str, Any] | None:
        """Return how a copy ends that is not to be made any more, unless it has been."""
        if self._copies.is_late(commanded):
            return {"outcome": Outcome.EXPIRED.value, "reason": LATE}
        if commanded.key in self._copies.cancelled:
            return {"outcome": Outcome.CANCELLED.value}
        if commanded.given_up is None:
            return None
        problem, code = commanded.given_up
        return {"problem": problem, "code": code, "again": False}

    async def _run(self, order: Order, file: int, key: Key, one: _Try) -> dict[str, Any]:
        process = await asyncio.create_subprocess_exec(
            *module_command("overlay_router.copying.copyist"), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            pass_fds=(file,) if file >= 0 else (),
        )  # fmt: skip
        one.process = process
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                process.stdin.write(json.dumps(asdict(order)).encode())
                process.stdin.write_eof()
            end: dict[str, Any] = {}
            while line := await process.stdout.readline():
                end = json.loads(line)
                if "moved_bytes" in end:
                    moved_bytes = int(end["moved_bytes"])
                    self._tell(await self._on_disk(lambda: self._copies.moved(key, moved_bytes)))  # noqa: B023
            await process.wait()
            return end
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _record(self, commanded: Commanded, one: _Try, end: dict[str, Any]) -> None:
        key = commanded.key
        if "outcome" in end:
            self._tell(await self._on_disk(lambda: self._copies.settle(key, _result(end))))
            return
        if key in self._copies.cancelled and not end.get("problem"):
            return  # it was stopped for that: the other router is told next
        problem = str(end.get("problem") or "the process that carried it out died")
        code = int(end.get("code") or ErrorClass.UNKNOWN.code)
        self._tell(await self._on_disk(lambda: self._copies.stands(key, problem, code)))
        if commanded.given_up is not None and not end.get("sure"):
            await self._ask_again(commanded, one)
        elif end.get("again", True):
            self._later(one)
        elif commanded.reached and not end.get("sure"):
            await self._on_disk(lambda: self._copies.give_up(commanded, problem, code))
        else:
            reason = _reason(problem, code)
            if code in _UNREACHED and not commanded.reached:
                reason = "unreachable"
            result = Result(Outcome.FAILED, reason, code=code if code in _ROTTEN else 0)
            self._tell(await self._on_disk(lambda: self._copies.settle(key, result)))

    async def _ask_again(self, commanded: Commanded, one: _Try) -> None:
        """It has failed for good, and the other router has not said whether it was made nevertheless."""
        if commanded.given_up is None or not self._copies.is_unanswered(commanded):
            self._later(one)
            return
        reason = f"{_reason(*commanded.given_up)}; {_NOT_KNOWN}"
        key = commanded.key
        self._tell(await self._on_disk(lambda: self._copies.settle(key, Result(Outcome.FAILED, reason))))

    def _later(self, one: _Try) -> None:
        one.failures += 1
        one.until_s = asyncio.get_running_loop().time() + growing_s(_FIRST_S, _LONGEST_S, one.failures)


#: The file is not what it was when the copy was commanded.
_SOURCE = frozenset({ErrorClass.SOURCE_CHANGED.code, ErrorClass.CONFLICT.code, ErrorClass.NOT_FOUND.code})
#: Nor what it was when it was published, although nobody has changed it.
_ROTTEN = frozenset({ErrorClass.CONTENT_MISMATCH.code})
#: The other router does not let this one in, or is not who it should be.
_UNREACHED = frozenset(
    {
        ErrorClass.PERMISSION_DENIED.code,
        ErrorClass.CREDENTIAL_REFUSED.code,
        ErrorClass.TLS_UNTRUSTED.code,
    }
)


def _reason(problem: str, code: int) -> str:
    return "source" if code in _SOURCE else problem[:_REASON_CHARS]


def _result(end: dict[str, Any]) -> Result:
    if end["outcome"] == "stale":
        return Result(Outcome.FAILED, "its origin has settled it at the other router already")
    return Result(Outcome(end["outcome"]), str(end.get("reason", "")), int(end.get("generation", 0)))
