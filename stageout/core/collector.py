"""The collector, asked from a process of its own.

HTCondor's bindings hold the interpreter while they wait for the network: with a collector that does not answer,
everything in the same process would stand still. So a child does the asking, and is killed when it takes too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from stageout.core.children import module_command

_PATIENCE_S = 20.0
_MAX_LINE_BYTES = 256 * 1024 * 1024


class CollectorError(Exception):
    """The collector did not do what was asked; the text says why."""


class CollectorChild:
    """The collector(s) of the HTCondor configuration, through a child process that is started when needed.

    :param local_name: as of the daemon. :param patience_s: for one question, then the child is replaced.
    :param host: collector of another pool, asked in place of these.
    """

    def __init__(self, local_name: str = "", patience_s: float = _PATIENCE_S, host: str = "") -> None:
        self._host = host
        self._argv = module_command("stageout.core.collector_child", local_name)
        self._patience_s = patience_s
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def query(
        self, constraint: str, attributes: Sequence[str], ad_type: str = "Any"
    ) -> list[Mapping[str, Any]]:  # fmt: skip
        """Return the ads that match.

        :param constraint: a ClassAd expression. :param ad_type: name of an htcondor2.AdType. "Any" scans every ad of
            the pool, and "Generic" finds only ads whose MyType is "Generic". :raises CollectorError: no answer.
        """
        question = {"op": "query", "constraint": constraint, "attributes": list(attributes), "ad_type": ad_type}
        answer = await self._ask(question)
        ads: list[Mapping[str, Any]] = answer["ads"]
        return ads

    async def publish(self, ad: Mapping[str, Any], command: str = "UPDATE_AD_GENERIC") -> None:
        """Publish an ad in the table of the update command; an ad of the same key is replaced.

        :raises CollectorError: refused, or no answer.
        """
        await self._ask({"op": "advertise", "ad": ad, "command": command})

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
        self._child.stdin.write(json.dumps({**question, "host": self._host}).encode("ascii") + b"\n")
        await self._child.stdin.drain()
        line = await self._child.stdout.readline()
        if not line:
            raise OSError("the process that asks ended")
        answer: dict[str, Any] = json.loads(line)
        return answer
