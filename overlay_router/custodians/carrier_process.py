"""The process that delivers for a forwarder: orders go in, what it says comes out, each as one line of JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import Awaitable, Callable
from typing import Any

from overlay_router.pauses import FIRST_S
from stageout.core import log
from stageout.core.children import module_command

_LINE_BYTES = 64 * 1024 * 1024


class CarrierProcess:
    """One process at a time; another is started when that has died.

    :param module: what it runs. :param heard: called with what it says, one after the other. When that fails, the
        process is killed: nobody heard it out, and all that it was doing is to begin anew.
    :param wake: set when it has died.
    """

    def __init__(self, module: str, heard: Callable[[dict[str, Any]], Awaitable[None]], wake: asyncio.Event) -> None:
        self._module, self._heard, self._wake = module, heard, wake
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Tell whether there is one, which takes orders."""
        return self._process is not None and self._process.returncode is None

    async def has_died(self) -> bool:
        """While none is running: whether there was one. All that it said has been heard on return."""
        if self._listening is not None:
            await self._listening
        return self._listening is not None

    async def start(self, *arguments: str, files: tuple[int, ...] = ()) -> None:
        """Start one. :param files: descriptors that it has too. :raises OSError: no process is to be had."""
        command = module_command(self._module, *arguments)
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=_LINE_BYTES, pass_fds=files
        )
        self._listening = asyncio.get_running_loop().create_task(self._listen(self._process))

    def write(self, order: dict[str, Any]) -> None:
        """Give it an order; one that has died, or was never started, does not hear it."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._process.stdin.write(json.dumps(order).encode() + b"\n")

    async def end(self) -> None:
        """Kill it."""
        if self._process is not None and self.is_running:
            self._process.kill()
            await self._process.wait()

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                await self._heard(json.loads(line))
        except Exception as problem:  # not understood, or not recorded: that must not end all deliveries
            log.error("delivery-write-failed", problem=repr(problem))
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()
        self._wake.set()


async def attempt(work: Awaitable[None]) -> None:
    """One round of a forwarder. The reason of a failure is in the log, and a moment passes before the next one."""
    try:
        await work
    except Exception as problem:  # a full disk, above all: what leaves makes room; or no process was started
        advice = "look at the disk of the spool and its database, and at the limit of processes"
        log.error("custody-read-failed", problem=repr(problem), advice=advice)
        await asyncio.sleep(FIRST_S)
