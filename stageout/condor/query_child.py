"""A child process that queries a daemon of HTCondor: a line on its stdin for each question, a line back as the answer.

HTCondor's bindings hold the interpreter while they wait for the network: with a daemon that does not answer, everything
in the same process would stand still. So a child asks, and it is killed when that takes too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any


class QueryChild:
    """The child, which is started when needed. Its module answers with :func:`stageout.core.children.answer_lines`.

    :param argv: of the child. :param daemon: whom it asks. :param error: raised without an answer.
    :param timeout_s: for one question. :param line_bytes: longest answer.
    """

    def __init__(
        self, argv: Sequence[str], daemon: str, error: type[Exception], timeout_s: float, line_bytes: int
    ) -> None:
        self._argv, self._daemon, self._error = argv, daemon, error
        self._timeout_s, self._line_bytes = timeout_s, line_bytes
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()

    async def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a question. The error of this child is raised without one."""
        async with self._turn:
            try:
                answer = await asyncio.wait_for(self._exchange(question), self._timeout_s)
            except asyncio.TimeoutError:
                await self.close()
                raise self._error(f"the {self._daemon} did not answer within {self._timeout_s:.0f} s") from None
            except (OSError, ValueError) as problem:
                await self.close()
                raise self._error(f"cannot ask the {self._daemon}: {problem}") from None
            except asyncio.CancelledError:
                await self.close()  # its answer would be taken for that to the next question
                raise
        if "error" in answer:
            raise self._error(str(answer["error"]))
        return answer

    async def _exchange(self, question: Mapping[str, Any]) -> dict[str, Any]:
        if self._child is None or self._child.returncode is not None:
            pipe = asyncio.subprocess.PIPE
            self._child = await asyncio.create_subprocess_exec(
                *self._argv, stdin=pipe, stdout=pipe, limit=self._line_bytes
            )
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(json.dumps(question).encode("ascii") + b"\n")
        await self._child.stdin.drain()
        line = await self._child.stdout.readline()
        if not line:
            raise OSError("the process that asks ended")
        answer: dict[str, Any] = json.loads(line)
        return answer
