"""The control socket: ``stageout status`` on the node, with every file of a sandbox, and figures for monitoring."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sandbox_manager.custody import queries
from sandbox_manager.intake.client_limits import ClientLimits, Full, ThrottledLog
from sandbox_manager.pipeline import Pipeline
from sandbox_manager.report.flows import flow_reports
from sandbox_manager.report.reporter import file_report, sandbox_report
from sandbox_manager.rules import last_attempt_at
from stageout.core.sockets import listen_at
from stageout.model.sandbox import Sandbox
from stageout.wire.handoff import FILES_PER_FRAME, BadMessage, decode_body, encode_frame

_PATIENCE_S = 30.0
_QUESTION_S = 5.0
_QUESTION_BYTES = 4096
_MOST_CLIENTS, _MOST_OF_USER = 64, 16


class Control:
    """Server of the socket ``run/control``.

    :param figures: returns the attributes that the slot ads show. :param trust: keys, what was refused, and who renews
    credentials.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        figures: Callable[[], Mapping[str, Any]],
        trust: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._pipeline = pipeline
        self._figures = figures
        self._trust = trust
        # Root and the manager's own user look after the node: others cannot take their places.
        self._client_limits = ClientLimits(_MOST_CLIENTS, _MOST_OF_USER, reserved={0, os.geteuid()})
        self._dropped = ThrottledLog("control-connection-dropped")
        self._server: asyncio.Server | None = None
        self._path = Path()

    async def start(self, path: Path) -> None:
        """Listen. :raises OSError: the socket cannot be made."""
        self._path = path
        # Not start_unix_server: that looks at the address of the socket, which names a directory that is closed again.
        self._server = await asyncio.start_server(self._client, sock=listen_at(path, 0o666))

    async def stop(self) -> None:
        """Answer nobody any more."""
        if self._server is not None:
            self._path.unlink(missing_ok=True)
            self._server.close()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        uid = _peer_uid(writer)
        try:
            with self._client_limits.admit(uid):
                question = await asyncio.wait_for(_frame(reader), _QUESTION_S)
                await asyncio.wait_for(self._answer(question, uid, writer), _PATIENCE_S)
        except (Full, BadMessage, OSError, EOFError, asyncio.TimeoutError) as problem:
            self._dropped.add(uid, problem=repr(problem))
        finally:
            with contextlib.suppress(OSError):
                writer.close()
                await writer.wait_closed()

    async def _answer(self, question: Mapping[str, Any], uid: int, writer: asyncio.StreamWriter) -> None:
        if question["op"] == "status":
            await self._status(str(question.get("job") or ""), uid, writer)
        elif question["op"] == "metrics":
            await _send(writer, {"op": "metrics", "metrics": self.metrics()})
        elif question["op"] == "streams":
            reports = [asdict(report) for report in self._pipeline.scheduler.calls.reports()]
            await _send(writer, {"op": "streams", "streams": reports})
        else:
            await _send(writer, {"op": "refuse", "reason": f"unknown question {question['op']!r}"})

    async def _status(self, job: str, uid: int, writer: asyncio.StreamWriter) -> None:
        sandboxes = [
            sandbox for sandbox in list(self._pipeline.store.registry.by_id.values()) if _may_see(uid, sandbox)
        ]
        for sandbox in sandboxes:
            if job in ("", sandbox.run.job, sandbox.run.job_id):
                await self._send_sandbox(sandbox, writer)
        servers = [asdict(one) for one in self._pipeline.scheduler.breakers.troubles()]
        flows = [asdict(one) for one in flow_reports(self._pipeline)]
        name = self._pipeline.manager.name
        await _send(writer, {"op": "end", "manager": name, "servers": servers, "flows": flows})

    async def _send_sandbox(self, sandbox: Sandbox, writer: asyncio.StreamWriter) -> None:
        files = await self._pipeline.store.ledger.read(lambda db: list(queries.all_files(db, sandbox.id)))
        destinations = self._pipeline.store.registry.destinations
        rules = self._pipeline.rules.retry
        report = sandbox_report(sandbox, rules.attempts, (), gives_up_at=last_attempt_at(sandbox, rules))
        await _send(writer, {"op": "sandbox", "sandbox": asdict(report), "files": len(files)})
        for start in range(0, len(files), FILES_PER_FRAME):
            chunk = [asdict(file_report(row, sandbox, destinations)) for row in files[start : start + FILES_PER_FRAME]]
            await _send(writer, {"op": "files", "files": chunk})

    def metrics(self) -> dict[str, Any]:
        """Return the figures of the whole manager."""
        registry = self._pipeline.store.registry
        states = {str(state): count for state, count in registry.states.items() if count}
        movers = len(self._pipeline.custody.running)
        return {**self._figures(), **self._trust(), "Sandboxes": states, "MoversRunning": movers}


def _may_see(uid: int, sandbox: Sandbox) -> bool:
    """Return whether a user may see a sandbox. Accounts of the manager's own have output of other owners later."""
    return uid in (0, os.geteuid()) or (uid == sandbox.uid and not sandbox.is_foreign)


async def _frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    (length,) = struct.unpack(">I", await reader.readexactly(4))
    if length > _QUESTION_BYTES:
        raise BadMessage(f"a question of {length} bytes is above the limit of {_QUESTION_BYTES}")
    return decode_body(await reader.readexactly(length))


async def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(encode_frame(message))
    await writer.drain()


def _peer_uid(writer: asyncio.StreamWriter) -> int:
    sock: socket.socket = writer.get_extra_info("socket")
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


def condor_uid() -> int:
    """Return the uid of the user condor, as whom a startd below a root master runs its cron jobs; -1 without one."""
    try:
        return pwd.getpwnam("condor").pw_uid
    except KeyError:
        return -1
