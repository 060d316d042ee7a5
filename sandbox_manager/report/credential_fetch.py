"""The fetching of renewed credentials from the access point's agent, while output waits for its destination."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from sandbox_manager.custody import queries
from sandbox_manager.custody.credentials import BadCredential, Credential, StoredCredentials
from sandbox_manager.intake.agents import AgentTable
from sandbox_manager.pipeline import Pipeline
from stageout.core import log
from stageout.core.clock import wall_now
from stageout.core.errors import Advice, ErrorClass
from stageout.core.http import exchange
from stageout.core.states import State
from stageout.model.sandbox import Sandbox
from stageout.wire.renewal import MAX_ANSWER_BYTES, MAX_ASKS, PATH, Answer, Ask, BadRenewal, read_answers, request_bytes

_TIMEOUT_S = 20.0
#: Searches in the urgent window before the end of a credential, and seconds between two of them.
_SEARCHES, _LEAST_S, _MOST_S = 60, 1.0, 60.0
#: States in which output still needs its credentials.
_NEEDED = frozenset({State.CONFIRMED, State.LEASED, State.MOVING, State.RETRY_WAIT})


def interval_s(urgent_window_s: float) -> float:
    """Return the seconds between two searches for credentials that must be renewed."""
    return max(_LEAST_S, min(_MOST_S, urgent_window_s / _SEARCHES or _MOST_S))


class NotReached(Exception):
    """The agent's port did not answer as it should; the text says what to do."""


class Want(NamedTuple):
    """One credential near or past its end, or refused."""

    sandbox: Sandbox
    ticket: str
    credential: Credential

    @property
    def ask(self) -> Ask:
        """As it is asked for."""
        run, held = self.sandbox.run, self.credential
        return Ask(
            job=run.job,
            run_number=run.number,
            ticket=self.ticket,
            kind=held.kind,
            service=held.service,
            digest=held.digest,
        )


@dataclass
class Fetcher:
    """Client that fetches missing credentials, and writes into each sandbox why none came.

    :param sign: (kind, text) -> signature with the manager's key.
    """

    pipeline: Pipeline
    agents: AgentTable
    sign: Callable[[str, str], str]

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(2, "credentials")
        self._trouble: dict[str, str] = {}

    def facts(self) -> dict[str, Any]:
        """Return for people which access points were asked, and what was in the way."""
        return {"CredentialSources": [{"Schedd": schedd, "Problem": text} for schedd, text in self._trouble.items()]}

    async def run(self) -> None:
        """Fetch credentials in a round now and then, for ever."""
        while True:
            await asyncio.sleep(interval_s(self.pipeline.rules.limits.urgent_window_s))
            await self.round()

    async def round(self) -> None:
        """Ask once for everything that is wanted now."""
        sandboxes = {
            sandbox.id: sandbox for sandbox in self.pipeline.store.registry.by_id.values() if self._may_want(sandbox)
        }
        if not sandboxes:
            return
        held = await self.pipeline.store.ledger.read(lambda db: _held(db, sandboxes))
        wanted: dict[str, list[Want]] = {}
        for want in self._wants(sandboxes, held):
            wanted.setdefault(want.sandbox.run.schedd, []).append(want)
        for schedd, wants in wanted.items():
            for start in range(0, len(wants), MAX_ASKS):
                await self._ask(schedd, wants[start : start + MAX_ASKS])

    def _may_want(self, sandbox: Sandbox) -> bool:
        return sandbox.state in _NEEDED and (_is_refused(sandbox) or self._is_near(sandbox.deadline_at))

    def _is_near(self, end: int) -> bool:
        return 0 < end < wall_now(self.pipeline.custody.clock) + self.pipeline.rules.limits.urgent_window_s

    def _wants(self, sandboxes: dict[int, Sandbox], held: Iterable[tuple[int, StoredCredentials]]) -> Iterator[Want]:
        for number, item in held:
            sandbox = sandboxes[number]
            for credential in item.credentials:
                if _is_refused(sandbox) or self._is_near(credential.expires_at):
                    yield Want(sandbox, item.ticket, credential)

    async def _ask(self, schedd: str, wants: Sequence[Want]) -> None:
        url, certificate = self.agents.credential_port(schedd)
        trouble, answers = "", [Answer(None)] * len(wants)
        if not url:
            trouble = f"it is not renewed: {schedd} offers no port for that (STAGEOUT_CREDENTIAL_PORT)"
        else:
            manager = self.pipeline.manager.name
            body = request_bytes(
                manager, agent=schedd, certificate=certificate, asks=[want.ask for want in wants], sign=self.sign
            )
            try:
                data = await asyncio.get_running_loop().run_in_executor(self._thread, post, url, certificate, body)
                answers = read_answers(data, len(wants))
            except (NotReached, BadRenewal) as problem:
                trouble = f"it is not renewed: {problem}"
        if self._trouble.get(schedd) != trouble:
            log.event("credential-source-changed", schedd=schedd, problem=trouble or None)
            self._trouble[schedd] = trouble
        for want, answer in zip(wants, answers):
            await self._use(want, answer, trouble)

    async def _use(self, want: Want, answer: Answer, trouble: str) -> None:
        why = trouble or answer.reason
        if answer.content is not None:
            try:
                if await self.pipeline.custody.renewal.put(want.ticket, want.credential, answer.content):
                    return
                why = "what came from the access point is no newer"
            except (BadCredential, OSError) as problem:
                why = str(problem)
        if want.sandbox.state is State.RETRY_WAIT and _is_refused(want.sandbox):
            await self.pipeline.custody.renewal.say_why_not(want.sandbox.id, why)


def _held(db: sqlite3.Connection, sandboxes: Iterable[int]) -> list[tuple[int, StoredCredentials]]:
    return [(sandbox, held) for sandbox in sandboxes for held in queries.tickets_with_credentials(db, sandbox)]


def _is_refused(sandbox: Sandbox) -> bool:
    return ErrorClass.from_code(sandbox.error_code).advice is Advice.NEEDS_CREDENTIAL


def post(url: str, certificate: str, body: bytes) -> bytes:
    """Send a request to the agent that has exactly this certificate. Blocks.

    :param certificate: its SHA-256, hexadecimal. :raises NotReached: no answer, another certificate, a refusal.
    """
    place = urlsplit(url).netloc
    try:
        status, data = exchange(
            "POST", f"{url}{PATH}", body, timeout_s=_TIMEOUT_S, certificate=certificate, most_bytes=MAX_ANSWER_BYTES
        )
    except OSError as problem:
        raise NotReached(f"{place} cannot be reached ({problem or type(problem).__name__})") from None
    if status != 200:
        raise NotReached(f"{place} answered {status}")
    return data
