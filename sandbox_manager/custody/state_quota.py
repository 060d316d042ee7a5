"""The state of plugins as the quota counts it, and its removal when its user has no output here any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from sandbox_manager.custody.plugin_state import PluginState
from sandbox_manager.custody.registry import Registry
from sandbox_manager.rules import Rules
from stageout.core import log

T = TypeVar("T")


class StateQuota:
    """Bytes that plugins keep for their next call.

    :param state: the directories. :param disk: where the removing is done.
    :ivar bytes_by_uid: of the quota, by user.
    """

    def __init__(self, state: PluginState, registry: Registry, disk: Executor, rules: Callable[[], Rules]) -> None:
        self._state, self._registry, self._disk, self._rules = state, registry, disk, rules
        self.bytes_by_uid: dict[int, int] = {}

    async def load(self) -> None:
        """Measure all directories (at start)."""
        self.bytes_by_uid.update(await self._on_disk(self._state.sizes))

    async def forget_unneeded(self) -> None:
        """Remove the state of plugins whose user has no output left here."""
        uids = {box.uid for box in self._registry.by_id.values() if not box.freed}
        try:
            await self._on_disk(lambda: self._state.keep_only(uids))
        except OSError as problem:
            log.warn("state-cleanup-failed", problem=problem)
        for uid in self.bytes_by_uid.keys() - uids:
            del self.bytes_by_uid[uid]

    async def account_freed(self, uid: int) -> None:
        """Remove what plugins keep for an account of the manager's own that has no output any more: the next owner may
        have it then."""
        has_output = any(uid == holder for holder, _ in self._registry.holders)
        if has_output or all(uid != account.uid for account in self._rules().accounts):
            return
        try:
            await self._on_disk(lambda: self._state.forget(uid))
        except OSError as problem:
            log.warn("state-cleanup-failed", problem=problem)
        else:
            self.bytes_by_uid.pop(uid, None)

    async def _on_disk(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)
