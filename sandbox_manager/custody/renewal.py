"""Renewed credentials come into custody: into the ticket's directory first, then into the ledger."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from sandbox_manager.custody import queries, updates
from sandbox_manager.custody.credentials import BadCredential, Credential, Safe, StoredCredentials, examine
from sandbox_manager.custody.ledger import SandboxStore
from stageout.core import log
from stageout.core.clock import Clock, wall_now
from stageout.core.states import State

T = TypeVar("T")


class Renewal:
    """The replacement of credentials by renewed ones."""

    def __init__(self, store: SandboxStore, safe: Safe, clock: Clock) -> None:
        self._store = store
        self._safe = safe
        self._clock = clock

    async def put(self, ticket: str, old: Credential, content: bytes) -> bool:
        """Take over a new credential if it is one. On return it is on the disk and files that waited for it are due.

        False when it is no newer than what is there, while the ticket's files are being sent, or when it is gone.

        :raises BadCredential: there is no usable credential in it. :raises OSError: the disk fails.
        """
        new = examine(old.kind, old.service, content)
        if new.digest == old.digest or 0 < new.expires_at <= max(old.expires_at, wall_now(self._clock)):
            return False
        held = await self._store.ledger.read(lambda db: queries.held(db, ticket))
        if held is None or old not in held.credentials:
            return False
        credentials = tuple(new if item == old else item for item in held.credentials)
        try:
            await _in_thread(lambda: self._safe.replace(ticket, new, content))
        except FileNotFoundError:
            return False  # Released meanwhile.
        if not await self._record(replace(held, credentials=credentials)):
            return False
        log.event("credential-renewed", ticket=ticket, kind=new.kind, service=new.service, ends_at=new.expires_at)
        return True

    async def say_why_not(self, sandbox_id: int, why: str) -> None:
        """Put into the words of a sandbox that needs a credential why none has come."""

        def change(db: sqlite3.Connection) -> Iterable[int]:
            sandbox, worst = queries.sandbox(db, sandbox_id), queries.first_error(db, sandbox_id)
            if sandbox is None or worst is None or sandbox.state is not State.RETRY_WAIT:
                return []
            text = f"needs credential: {worst.error}; {why}"
            if text == sandbox.reason:
                return []
            updates.set_reason(db, sandbox_id, text)
            return [sandbox_id]

        await self._store.write(change)

    async def mend(self) -> None:
        """Bring the ledger into agreement with the credentials in the spool (at start)."""
        for held in await self._store.ledger.read(queries.tickets_with_credentials):
            try:
                found = await _in_thread(lambda held=held: self._safe.examined(held))  # type: ignore[misc]
            except (OSError, BadCredential) as problem:
                log.warn("credential-read-failed", ticket=held.ticket, problem=problem)
                continue
            if found != held.credentials:
                await self._record(replace(held, credentials=found))

    async def _record(self, held: StoredCredentials) -> bool:
        def change(db: sqlite3.Connection) -> Iterable[int]:
            sandbox = updates.renew(db, held, wall_now(self._clock))
            return [] if sandbox is None else [sandbox]

        return bool(await self._store.write(change, "record-renewed"))


async def _in_thread(work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(None, work)
