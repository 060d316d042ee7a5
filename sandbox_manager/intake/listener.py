"""The manager's side of a hand-off, from the plugin's offer to the receipt.

The order of steps is in ``docs/developer/durable-steps.md``. A plugin that does not get as far as its receipt uploads
itself, so a failure here before ``record-accepted`` leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sandbox_manager.custody.credentials import StoredCredentials
from sandbox_manager.custody.orders import Refused
from sandbox_manager.custody.spool import Overrun, Spool, SpoolError
from sandbox_manager.intake.acceptance import Acceptance, Handoff, Refusal, Reservation
from sandbox_manager.intake.admission import reason_against_job
from sandbox_manager.intake.client_limits import Client, ClientLimits, ThrottledLog
from sandbox_manager.intake.counters import HandoffCounters
from sandbox_manager.intake.link import Link
from sandbox_manager.intake.peers import NotIdentified, Peer, peer_of
from stageout.core import durable, log
from stageout.core.classad_parser import parse_ad
from stageout.core.classads import ClassAdSyntaxError, unparse_ad
from stageout.core.clock import Clock
from stageout.core.config import Settings
from stageout.core.ending import end, outlast
from stageout.core.sockets import listen_at
from stageout.core.synchronous import FAILED, NotTaken
from stageout.core.units import size
from stageout.model.run import RunFacts
from stageout.model.sandbox import SlotKey
from stageout.wire import handoff as wire
from stageout.wire.custody import REFUSALS_SHOWN, RefusalReport, Run
from stageout.wire.handoff import OfferedFile, Receipt

T = TypeVar("T")
_DOCTOR = "stageout-doctor"
_AT_ONCE = 16
_ACCEPT_AGAIN_S = 0.1
_FEW_FILES = 200
#: A copy that takes no longer is not worth a comparison with sending.
_LEAST_COPY_S = 1.0
#: Memory that a file on offer takes besides the bytes of its row.
_FILE_BYTES = 512
#: Between two looks at what a hand-off on its way takes of the spool; a look takes at most this part of the time.
_LOOK_S, _LOOK_PART = 0.2, 10
#: Seconds that a run waits after it has overrun its offer.
_OVERRUN_S = 300.0
#: Of a reason in the report.
_REASON_CHARS = 300


class Identifier(Protocol):
    """The source of the owner of offered output (:class:`sandbox_manager.intake.identity.Identity`)."""

    async def identify(self, peer: Peer) -> RunFacts:
        """Find the facts about the peer's run. :raises NotIdentified: with the reason."""


@dataclass(frozen=True)
class IntakeLimits:
    """The bounds of one client, and of all together.

    :param clients: connections at once. :param clients_per_user: connections at once of one uid.
    :param files: in one hand-off. :param silence_s: seconds without a message after which a client is dropped.
    :param offers_bytes: memory for all offers. :param offers_bytes_per_user: memory for the offers of one uid.
    """

    clients: int = 256
    clients_per_user: int = 192
    files: int = 100_000
    silence_s: float = 5.0
    offers_bytes: int = 256 * 1024 * 1024
    offers_bytes_per_user: int = 160 * 1024 * 1024


@dataclass(frozen=True)
class _Offer:
    plugin: str
    files: Sequence[OfferedFile]
    context: wire.TransferContext

    @property
    def size_bytes(self) -> int:
        return sum(item.size_bytes for item in self.files)


@dataclass(frozen=True)
class _Copy:
    size_bytes: int
    within_s: float
    began_s: float


class Intake:
    """Server of the hand-off socket.

    :param spool: opened. :param acceptance: takes what plugins offer. :param clock: for figures in the log.
    """

    def __init__(
        self,
        spool: Spool,
        identity: Identifier,
        acceptance: Acceptance,
        settings: Settings,
        clock: Clock,
        *,
        limits: IntakeLimits = IntakeLimits(),
        on_refusal: Callable[[], None] = lambda: None,
    ) -> None:
        self._spool = spool
        self._identity = identity
        self._acceptance = acceptance
        self._clock = clock
        self._limits = limits
        self._timeout_s = settings.number("STAGEOUT_HANDOFF_TIMEOUT") + limits.silence_s
        self._encrypted = settings.condor("ENCRYPT_EXECUTE_DIRECTORY").strip().lower() in ("true", "yes", "1")
        # Two: a hand-off of very many files holds up no small one.
        self._quick, self._slow = self._threads = [ThreadPoolExecutor(1, thread_name_prefix="intake") for _ in range(2)]
        self._tasks: set[asyncio.Task[None]] = set()
        self._client_limits = ClientLimits(
            limits.clients, limits.clients_per_user, limits.offers_bytes, limits.offers_bytes_per_user
        )
        self._refused, self._gone = ThrottledLog("handoff-refused"), ThrottledLog("client-disconnected")
        self.counters = HandoffCounters()
        self.refusals: deque[RefusalReport] = deque(maxlen=REFUSALS_SHOWN)
        self._on_refusal = on_refusal
        self._overruns: dict[Run, float] = {}
        self._listener: socket.socket | None = None
        self._path = Path()

    # ---- life --------------------------------------------------------------------------------------------------------

    async def start(self, socket_path: Path) -> None:
        """Listen. On return plugins can connect. :raises SpoolError: the socket cannot be made."""
        self._path = socket_path
        try:
            self._listener = listen_at(socket_path, 0o666 if os.geteuid() == 0 else 0o600)
        except OSError as problem:
            raise SpoolError(f"cannot listen on {socket_path}: {problem}; is STAGEOUT_SPOOL writable?") from None
        self._listen_again(self._listener)

    async def stop(self, grace_s: float = 5.0) -> None:
        """Take no more clients, let running hand-offs end for ``grace_s`` seconds, then drop them."""
        if self._listener is not None:
            self._path.unlink(missing_ok=True)
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        await end(self._tasks)
        for thread in self._threads:
            thread.shutdown(wait=True)

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _listen_again(self, listener: socket.socket) -> None:
        if listener is self._listener:
            asyncio.get_running_loop().add_reader(listener, self._accept_clients, listener)

    def _accept_clients(self, listener: socket.socket) -> None:
        """Take those who wait, some at a time, so that others get their turn."""
        for _ in range(_AT_ONCE):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as problem:
                # Out of descriptors or memory: give others time to end.
                log.warn("connection-accept-failed", problem=problem)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)
                loop.call_later(_ACCEPT_AGAIN_S, self._listen_again, listener)
                return
            connection.setblocking(False)
            self._run(self._client(connection), "client")

    # ---- one client --------------------------------------------------------------------------------------------------

    async def _client(self, connection: socket.socket) -> None:
        peer = None
        try:
            async with Link(connection, self._limits.silence_s) as link:
                try:
                    peer = peer_of(connection)
                    with self._client_limits.admit(peer.uid) as client:
                        await self._serve(link, peer, client)
                except (NotTaken, wire.BadMessage) as no:
                    code = no.code if isinstance(no, NotTaken) else FAILED
                    self._refused.add(*_who(peer), reason=no)
                    self.counters.refused(self._clock.monotonic_s(), str(no), code)
                    await link.send(wire.refusal(str(no), code))
        except (EOFError, OSError, asyncio.TimeoutError) as problem:
            self._gone.add(*_who(peer), problem=problem or type(problem).__name__)
        except Exception as problem:
            log.error("handoff-failed", pid=peer and peer.pid, problem=repr(problem))
        finally:
            if peer is not None:
                peer.close()

    async def _serve(self, link: Link, peer: Peer, client: Client) -> None:
        """Serve one hand-off, from offer to receipt.

        Nothing is read from a process that is not known to be a job's, but for those of root and of the manager's own
        user: it may be the doctor's.
        """
        started_s = self._clock.monotonic_s()
        latest_s = started_s + self._timeout_s
        try:
            facts = await self._identity.identify(peer)
        except NotIdentified as no:
            if peer.uid not in (0, os.geteuid()):
                raise
            link.count_memory(client.use_memory)
            await self._probe(link, peer, client, latest_s, no=no)
            return
        link.count_memory(client.use_memory)
        with self._reported(facts.run):
            offer = await self._read_offer(link, await link.receive("offer"), client, latest_s)
            _check_job(facts, offer, self._encrypted)
            if link.is_gone:
                raise EOFError("the plugin did not wait for the answer")
            receipt = await self._receive(link, facts, offer, self._record)
        self.counters.accepted(self._clock.monotonic_s())
        milliseconds = round((self._clock.monotonic_s() - started_s) * 1000, 1)
        log.event(
            "sandbox-accepted",
            ticket=receipt.ticket,
            job=facts.run.job,
            run=facts.run.number,
            owner=facts.owner,
            files=receipt.files,
            size_bytes=receipt.size_bytes,
            ms=milliseconds,
        )
        with durable.step("handoff-reply"):
            await link.send(wire.accepted_message(receipt))

    @contextlib.contextmanager
    def _reported(self, run: Run) -> Iterator[None]:
        """Report a refusal: until the transfer has ended the access point cannot know why it is synchronous."""
        try:
            yield
        except NotTaken as no:
            self.refusals.append(
                RefusalReport(
                    job=run.job, number=run.number, code=no.code, reason=str(no)[:_REASON_CHARS], owner=run.owner
                )
            )
            self._on_refusal()
            raise

    async def _probe(self, link: Link, peer: Peer, client: Client, latest_s: float, no: NotIdentified) -> None:
        """Try a hand-off for the doctor, up to the record, and leave nothing behind.

        :param no: why the peer is not a job's plugin; raised when it does not ask for a probe.
        """
        head = await link.receive("offer")
        schedd = head.get("probe")
        if not isinstance(schedd, str):
            raise no
        facts = RunFacts(
            run=Run(f"{schedd}#0.0#0", 0, _DOCTOR),
            user=_DOCTOR,
            uid=peer.uid,
            gid=peer.gid,
            slot=SlotKey("", -1, 0),
            slot_name="no slot",
            guard=True,
        )
        try:
            offer = await self._read_offer(link, head, client, latest_s)
            _check_job(facts, offer, self._encrypted)
            await self._receive(link, facts, offer, self._remove)
        except Refused as refusal:
            await link.send(wire.refusal(str(refusal), refusal.code))
        else:
            await link.send({"op": "probed"})

    async def _remove(self, handoff: Handoff) -> None:
        """Remove the files of a probe."""
        await self._on_disk(1, self._spool.discard, handoff.ticket)
        self._acceptance.unreserve(handoff.reservation)

    def facts(self) -> dict[str, Any]:
        """Describe how many hand-offs were refused lately, and why, for people."""
        return self.counters.facts(self._clock.monotonic_s())

    def figures(self) -> dict[str, Any]:
        """Return the counts by code, for the slot ads."""
        return self.counters.figures(self._clock.monotonic_s())

    async def _read_offer(self, link: Link, head: dict[str, Any], client: Client, latest_s: float) -> _Offer:
        count, plugin, context = self._head(head)
        client.use_memory(count * _FILE_BYTES)
        files: list[OfferedFile] = []
        while len(files) < count:
            files += wire.offered_files(await link.receive("files"))
            if self._clock.monotonic_s() > latest_s:
                raise asyncio.TimeoutError("the plugin has stopped waiting for the answer")
        if len(files) > count:
            raise wire.BadMessage(f"{len(files)} files came, {count} were announced")
        return _Offer(plugin, files, context)

    def _head(self, head: dict[str, Any]) -> tuple[int, str, wire.TransferContext]:
        count, plugin = head.get("files"), head.get("plugin")
        if head.get("version") != wire.VERSION:
            versions = f"{head.get('version')}, the manager {wire.VERSION}"
            raise Refused(f"the plugin speaks hand-off version {versions}", "Version")
        if type(count) is not int or count < 1 or not isinstance(plugin, str):
            raise wire.BadMessage("'offer' has the number of files and the plugin")
        if count > self._limits.files:
            raise Refused(f"{count} files are more than the {self._limits.files} of one hand-off", "TooMany")
        return count, plugin, wire.offered_context(head)

    async def _receive(
        self, link: Link, facts: RunFacts, offer: _Offer, record: Callable[[Handoff], Awaitable[T]]
    ) -> T:
        """Let the plugin link, check what it linked, record it. A failure at any step leaves neither files nor
        reservation."""
        self._check_overruns(facts.run)
        urls = [item.url for item in offer.files]
        reservation = self._acceptance.may_accept(
            facts, files=len(urls), size_bytes=offer.size_bytes, urls=urls, plugin=offer.plugin
        )
        if isinstance(reservation, Refusal):
            raise Refused(reservation.reason)
        ticket = secrets.token_hex(16)
        try:
            place = await self._on_disk(1, self._spool.prepare_intake, ticket, facts.uid, facts.gid)
            await link.send({"op": "go", "ticket": ticket, "directory": str(place)})
            copy = await self._linked(link, ticket, offer, reservation)
            if copy:
                self._copied(ticket, copy)
            credentials = offer.context.credentials
            account = reservation.account
            files = await self._on_disk(
                len(offer.files), self._spool.claim, ticket, offer.files, facts.uid, facts.gid, credentials, account
            )
            stored = None
            if offer.context != wire.TransferContext():
                stored = await self._on_disk(1, self._store_credentials, ticket, offer.context)
            if link.is_gone:
                raise EOFError("the plugin ended before its files were accepted")
            kept = facts.kept_by(account)
            return await record(
                Handoff(
                    ticket=ticket, facts=kept, plugin=offer.plugin, files=files, reservation=reservation, stored=stored
                )
            )
        except BaseException as problem:
            if isinstance(problem, Overrun):
                self._overruns[facts.run] = asyncio.get_running_loop().time() + _OVERRUN_S
            try:
                await self._on_disk(_FEW_FILES + 1, self._spool.discard, ticket)  # the user may have put more there
            finally:
                self._acceptance.unreserve(reservation)
            raise

    def _check_overruns(self, run: Run) -> None:
        """Refuse a run that lately put more into the spool than it had offered. :raises Refused: with the reason."""
        now_s = asyncio.get_running_loop().time()
        self._overruns = {known: until_s for known, until_s in self._overruns.items() if until_s > now_s}
        if run in self._overruns:
            left_s = self._overruns[run] - now_s
            text = f"this run put more into the spool than it had offered; its offers are refused for {left_s:.0f} s"
            raise Refused(text, Overrun.code)

    def _store_credentials(self, ticket: str, offered: wire.TransferContext) -> StoredCredentials:
        found = self._spool.safe.examine_offered(ticket, offered.credentials, self._clock.wall_s())
        return StoredCredentials(ticket, _checked_ad(offered.job_ad), _checked_ad(offered.plugin_data), found)

    async def _record(self, handoff: Handoff) -> Receipt:
        try:
            return await self._acceptance.accept(handoff)
        except Exception as problem:
            log.error("handoff-write-failed", ticket=handoff.ticket, problem=repr(problem))
            raise Refused(f"the sandbox manager cannot record it: {problem}", "Disk") from problem

    async def _linked(self, link: Link, ticket: str, offer: _Offer, reservation: Reservation) -> _Copy | None:
        """Wait for the plugin's links; it speaks every second while it works. Returns the copy that was necessary."""
        # Copies are made where links cannot be: then the time depends on the size.
        limit_s = 30 + len(offer.files) / 1000 + offer.size_bytes / 10e6
        latest_s = self._clock.monotonic_s() + limit_s
        copy, received = None, self._receiver(ticket, offer)
        while True:
            message = await received(link.receive("linking", "linked", "too-slow" if copy else "copy"))
            if message["op"] == "linked":
                return copy
            if self._clock.monotonic_s() > latest_s:
                raise Refused(f"the links were not made within {limit_s:.0f} s", "ManagerSlow")
            if message["op"] == "copy":
                copy = await self._let_copy(link, message, offer, reservation, limit_s=limit_s)
            elif message["op"] == "too-slow" and copy:
                raise Refused(
                    f"the job's files cannot be linked into the spool (is it another filesystem?), and a copy of "
                    f"{size(copy.size_bytes)} would take longer than {copy.within_s:.1f} s",
                    "OtherFilesystem",
                )

    def _receiver(
        self, ticket: str, offer: _Offer
    ) -> Callable[[Coroutine[Any, Any, dict[str, Any]]], Awaitable[dict[str, Any]]]:
        """Return a function that waits for a message, and now and then checks the space of the hand-off in the spool.

        Many messages do not delay a check. The function raises Overrun.
        """
        loop = asyncio.get_running_loop()
        next_s = loop.time() + _LOOK_S

        async def wait(receive: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
            nonlocal next_s
            message = loop.create_task(receive)
            try:
                while True:
                    await asyncio.wait({message}, timeout=max(0.0, next_s - loop.time()))
                    if loop.time() >= next_s:
                        began_s = loop.time()
                        await self._check_intake(ticket, offer)
                        next_s = loop.time() + max(_LOOK_S, (loop.time() - began_s) * _LOOK_PART)
                    if message.done():
                        return message.result()
            finally:
                await end({message})

        return wait

    async def _check_intake(self, ticket: str, offer: _Offer) -> None:
        files, credentials = offer.files, offer.context.credentials
        await self._on_disk(len(files), self._spool.check_intake, ticket, files, credentials)

    def _copied(self, ticket: str, copy: _Copy) -> None:
        now_s = self._clock.monotonic_s()
        took_s = now_s - copy.began_s
        self.counters.copied(now_s, copy.size_bytes, took_s)
        log.event("output-copied", ticket=ticket, size_bytes=copy.size_bytes, ms=round(took_s * 1000, 1))

    async def _let_copy(
        self, link: Link, message: dict[str, Any], offer: _Offer, reservation: Reservation, limit_s: float
    ) -> _Copy:
        """Reserve room for a copy and say how long it may take: no longer than sending the files."""
        size_bytes = message.get("size_bytes")
        if type(size_bytes) is not int or not 0 <= size_bytes <= offer.size_bytes:
            raise wire.BadMessage("'copy' has the number of bytes, at most those of the offer")
        sending_s = self._acceptance.may_copy(reservation, size_bytes)
        if isinstance(sending_s, Refusal):
            raise Refused(sending_s.reason)
        within_s = max(_LEAST_COPY_S + len(offer.files) / 1000, min(sending_s, limit_s))
        began_s = self._clock.monotonic_s()
        await link.send({"op": "go", "within_s": round(within_s, 3)})
        return _Copy(size_bytes, within_s, began_s)

    async def _on_disk(self, files: int, work: Callable[..., T], *args: Any) -> T:
        """Run to the end even when this hand-off is dropped meanwhile: nothing may be undone under its feet."""
        thread = self._quick if files <= _FEW_FILES else self._slow
        step = asyncio.get_running_loop().run_in_executor(thread, work, *args)
        is_cancelled = await outlast(step)
        try:
            result = step.result()
        except OSError as problem:
            raise Refused(f"the spool cannot take files: {problem}", "Disk") from problem
        if is_cancelled:
            raise asyncio.CancelledError
        return result


def _who(peer: Peer | None) -> tuple[int, int | None]:
    return (-1, None) if peer is None else (peer.uid, peer.pid)


def _checked_ad(text: str) -> str:
    """Write the text of an ad anew: nothing else may come into a plugin's input. :raises BadMessage: it is no ad."""
    try:
        return unparse_ad(parse_ad(text)) if text else ""
    except ClassAdSyntaxError as problem:
        raise wire.BadMessage(f"not a ClassAd: {problem}") from None


def _check_job(facts: RunFacts, offer: _Offer, encrypted: bool) -> None:
    """Refuse what must not be delivered afterwards. :raises Refused: with the reason."""
    reason = reason_against_job(facts, [item.url for item in offer.files], encrypted)
    if reason:
        raise Refused(reason)
