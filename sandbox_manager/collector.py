"""The collector, asked from a process of its own.

HTCondor's bindings hold the interpreter while they wait for the network: with a collector that does not answer,
everything in the same process would stand still, hand-offs too. So a child does the asking, and is killed when it takes
too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from stageout.core.children import module_command
from stageout.wire.custody import AGENT_AD, MANAGER_AD, ORDERS_AD

ATTRIBUTES = ("MyType", "Name", "StageOutManager", "StageOutPayload", "StageOutSignature", "LastHeardFrom")
_PATIENCE_S = 20.0
_MAX_LINE_BYTES = 256 * 1024 * 1024


class CollectorError(Exception):
    """The collector did not do what was asked; the text says why."""


class Collector(Protocol):
    """What the manager wants of the collector."""

    async def messages(self, manager: str) -> Sequence[Mapping[str, Any]]:
        """Agents' notices, and their orders for this manager. :raises CollectorError: no answer."""

    async def advertise(self, ad: Mapping[str, Any]) -> None:
        """Publish an ad. :raises CollectorError: it is refused, or there is no answer."""

    async def standing(self, manager: str) -> str:
        """Signature of the report in a manager's name, "" without one. :raises CollectorError: no answer."""

    async def advertise_apart(self, ad: Mapping[str, Any]) -> None:
        """Publish an ad as an ordinary pilot may, without a startd. :raises CollectorError: as above."""

    async def close(self) -> None:
        """Ask nothing more."""


class CollectorProcess:
    """The collector(s) of the HTCondor configuration, through a child process that is started when needed.

    :param local_name: as of the daemon. :param patience_s: for one question, then the child is replaced.
    """

    def __init__(self, local_name: str = "", patience_s: float = _PATIENCE_S) -> None:
        self._argv = module_command("sandbox_manager.collector_child", local_name)
        self._patience_s = patience_s
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def messages(self, manager: str) -> Sequence[Mapping[str, Any]]:
        """Agents' notices, and their orders for this manager."""
        constraint = (
            f'MyType == "{AGENT_AD}" || (MyType == "{ORDERS_AD}" && StageOutManager == {json.dumps(manager)})'
        )  # fmt: skip
        answer = await self._ask({"op": "query", "constraint": constraint, "attributes": ATTRIBUTES})
        ads: list[Mapping[str, Any]] = answer["ads"]
        return ads

    async def standing(self, manager: str) -> str:
        """Signature of the report that is there in a manager's name."""
        constraint = f'MyType == "{MANAGER_AD}" && Name == {json.dumps(manager)}'
        answer = await self._ask({"op": "query", "constraint": constraint, "attributes": ["StageOutSignature"]})
        return str(answer["ads"][0].get("StageOutSignature", "")) if answer["ads"] else ""

    async def advertise(self, ad: Mapping[str, Any]) -> None:
        """Publish an ad among the collector's generic ones."""
        await self._ask({"op": "advertise", "ad": ad, "command": "UPDATE_AD_GENERIC"})

    async def advertise_apart(self, ad: Mapping[str, Any]) -> None:
        """Publish an ad among those of the masters, for which ADVERTISE_MASTER is enough."""
        await self._ask({"op": "advertise", "ad": ad, "command": "UPDATE_MASTER_AD"})

    async def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()

    async def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        async with self._turn:
            try:
                answer = await asyncio.wait_for(self._talk(question), self._patience_s)
            except asyncio.TimeoutError:
                await self.close()
                raise CollectorError(f"the collector did not answer within {self._patience_s:.0f} s") from None
            except OSError as problem:
                await self.close()
                raise CollectorError(f"cannot ask the collector: {problem}") from None
            except asyncio.CancelledError:
                await self.close()  # its answer would be taken for that to the next question
                raise
        if "error" in answer:
            raise CollectorError(str(answer["error"]))
        return answer

    async def _talk(self, question: Mapping[str, Any]) -> dict[str, Any]:
        if self._child is None or self._child.returncode is not None:
            pipe = asyncio.subprocess.PIPE
            self._child = await asyncio.create_subprocess_exec(
                *self._argv, stdin=pipe, stdout=pipe, limit=_MAX_LINE_BYTES
            )  # fmt: skip
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(json.dumps(question).encode("ascii") + b"\n")
        await self._child.stdin.drain()
        line = await self._child.stdout.readline()
        if not line:
            raise OSError("the process that asks ended")
        answer: dict[str, Any] = json.loads(line)
        return answer
