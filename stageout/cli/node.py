"""Queries of this machine's sandbox manager over its control socket."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from stageout.cli.exits import CommandError, Unavailable
from stageout.core.classads import ClassAd
from stageout.core.config import Settings
from stageout.core.sockets import connect_to
from stageout.wire.control import StreamsReport
from stageout.wire.custody import FileReport, FlowReport, Report, SandboxReport, ServerReport
from stageout.wire.handoff import BadMessage, receive_frame, send_frame
from stageout.wire.typed import IllTyped, built

T = TypeVar("T")
_TIMEOUT_S = 30.0
_CREDENTIALS = struct.Struct("3i")


def spool_directory(settings: Settings) -> str:
    """Return STAGEOUT_SPOOL or its default, without symbolic links."""
    return os.path.realpath(settings.path("STAGEOUT_SPOOL"))


def control_socket(settings: Settings) -> Path:
    """Return the control socket of this node's manager."""
    return Path(spool_directory(settings)) / "run" / "control"


class LocalReport(NamedTuple):
    """The sandboxes on this node. :param is_whole: False if other users may have more sandboxes here."""

    report: Report
    is_whole: bool


def local_report(now: float) -> LocalReport:
    """Ask for the sandboxes in this node's custody: all for root and the manager's user, one's own for others.

    :param now: wall clock, seconds.
    :raises Unavailable: no manager answers on this node.
    """
    return _asked(lambda path: read_status(path, now))


def local_streams() -> list[StreamsReport]:
    """Ask how many streams this node uses to each server, and why.

    :raises Unavailable: no manager answers on this node.
    """
    return _asked(read_streams)


def _asked(question: Callable[[Path], T]) -> T:
    from stageout.cli.condor import load_bindings
    from stageout.condor.configuration import condor_settings

    load_bindings()
    path = control_socket(condor_settings())
    try:
        return question(path)
    except (OSError, EOFError, BadMessage) as problem:
        raise Unavailable(
            f"no sandbox manager answers at {path} ({problem}). Is this an execute point, and does "
            "'stageout doctor' find its manager running?"
        ) from None


def read_status(path: Path, now: float) -> LocalReport:
    """Query the manager's status. The answer contains what this user may see.

    :param now: wall clock time of the report in seconds.
    :raises OSError: nothing listens on the socket. :raises BadMessage: the answer is not of this version.
    """
    sandboxes: list[SandboxReport] = []
    files: list[FileReport] = []
    sandbox: dict[str, Any] | None = None
    for frame in _ask(path, {"op": "status"}):
        if frame["op"] == "files":
            files += _list(FileReport, frame.get("files"))
            continue
        if sandbox is not None:
            sandboxes.append(_sandbox(sandbox, files))
        if frame["op"] == "end":
            servers, flows = _list(ServerReport, frame.get("servers")), _list(FlowReport, frame.get("flows"))
            name = str(frame.get("manager", ""))
            report = Report(name, "", 0, int(now), {}, 0, tuple(sandboxes), tuple(servers), flows=tuple(flows))
            return LocalReport(report, os.geteuid() in (0, frame["peer_uid"]))
        if frame["op"] != "sandbox":
            raise BadMessage(f"unexpected {frame['op']!r}: {frame.get('reason', '')}")
        sandbox, files = frame.get("sandbox"), []
    raise BadMessage("the manager stopped in the middle of its answer")


def read_streams(path: Path) -> list[StreamsReport]:
    """Read the streams to each server, and the reasons.

    :raises OSError: nothing listens on the socket. :raises BadMessage: the answer is not of this version.
    """
    (frame,) = _ask(path, {"op": "streams"})
    try:
        return _list(StreamsReport, frame["streams"])
    except KeyError as problem:
        raise BadMessage(f"not a report about streams: {problem}") from None


def _sandbox(item: object, files: list[FileReport]) -> SandboxReport:
    try:
        return replace(built(SandboxReport, item), files=tuple(files))
    except IllTyped as problem:
        raise BadMessage(f"not a sandbox: {problem}") from None


def _list(cls: Callable[..., T], items: object) -> list[T]:
    """Read a list of a frame; empty if absent. :raises BadMessage: the list has items of another type."""
    try:
        return [built(cls, item) for item in items] if isinstance(items, list) else []
    except IllTyped as problem:
        raise BadMessage(str(problem)) from None


def manager_facts(settings: Settings) -> ClassAd:
    """Query all figures of the manager, with its name, its uid (from the kernel) and the bytes at risk.

    :raises OSError: no socket exists, or nothing listens there.
    """
    path = control_socket(settings)
    (frame,) = _ask(path, {"op": "metrics"})
    figures = ClassAd(frame["metrics"]) if isinstance(frame.get("metrics"), dict) else ClassAd()
    return ClassAd(
        {
            **figures,
            "Manager": figures.text("StageOutManager"),
            "Uid": frame["peer_uid"],
            "BytesAtRisk": figures.integer("StageOutBytesAtRisk"),
        }
    )


def _ask(path: Path, question: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the frames of the answer, each with the uid of the sender; "end", "metrics" and "streams" are the last."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_TIMEOUT_S)
        connect_to(sock, path)
        _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        send_frame(sock, question)
        while True:
            frame = receive_frame(sock)
            if frame["op"] == "refuse":
                raise CommandError(f"the sandbox manager says: {frame.get('reason')}")
            yield {**frame, "peer_uid": uid}
            if frame["op"] in ("end", "metrics", "streams"):
                return
