"""The sandboxes of this node, as its manager tells them: from a real manager, and from one that answers wrongly."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from manager_site import Site, made, run

from sandbox_manager.report import control
from sandbox_manager.report.control import Control
from stageout.cli import node
from stageout.cli.exits import CommandError
from stageout.cli.node import LocalReport, read_status, read_streams
from stageout.core.sockets import listen_at
from stageout.wire.custody import FileReport, ServerReport
from stageout.wire.handoff import BadMessage, encode_frame
from tests.unit.test_cli_status import box


@pytest.fixture
def site() -> Iterator[Site]:
    with made() as found:
        yield found


def test_the_sandboxes_and_their_files_are_those_of_the_manager(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "FILES_PER_FRAME", 2)

    found: list[LocalReport] = []

    async def story() -> None:
        async with site.manager(moving=False) as manager:
            for job, names in (("1.0", "abcde"), ("2.0", "fg")):
                await manager.hand_off({f"copy://h/ok/{name}": b"x" for name in names}, manager.facts(job))
            served, path = Control(manager.pipeline, dict), Path(site.base / "control")
            await served.start(path)
            try:
                found.append(await asyncio.get_running_loop().run_in_executor(None, read_status, path, 7.5))
            finally:
                await served.stop()

    run(story())
    ((report, is_whole),) = found
    assert is_whole
    assert (report.sent_at, report.key) == (7, "")
    assert [
        (one.job.split("#")[1], one.files_total, sorted(file.url[-1] for file in one.files)) for one in report.sandboxes
    ] == [("1.0", 5, [*"abcde"]), ("2.0", 2, [*"fg"])]


def _answer(path: Path, frames: Sequence[dict[str, Any]]) -> None:
    """Answer one question."""
    listener = listen_at(path, 0o666)

    def serve() -> None:
        with listener, listener.accept()[0] as client:
            client.recv(4096)
            for frame in frames:
                client.sendall(encode_frame(frame))

    listener.setblocking(True)
    threading.Thread(target=serve, daemon=True).start()


_FILE = asdict(FileReport("a", "x://y/a", 10, "Moving"))
_SERVER = asdict(ServerReport("x://y", "open", "no route", 3, 1, 0))


def test_an_answer_has_sandboxes_with_files_and_an_end(tmp_path: Path) -> None:
    first, second = (asdict(box(job=f"ap#{number}.0#1", files=())) for number in (1, 2))
    frames = [
        {"op": "sandbox", "sandbox": first},
        {"op": "files", "files": [_FILE, _FILE]},
        {"op": "files", "files": [_FILE]},
        {"op": "sandbox", "sandbox": second},
        {"op": "end", "manager": "m", "servers": [_SERVER], "flows": "none"},
    ]
    _answer(tmp_path / "s", frames)
    report, _ = read_status(tmp_path / "s", 1.0)
    assert [(one.job, len(one.files)) for one in report.sandboxes] == [("ap#1.0#1", 3), ("ap#2.0#1", 0)]
    assert (report.manager, report.servers, report.flows) == ("m", (ServerReport(**_SERVER),), ())


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([{"op": "refuse", "reason": "too many"}], "the sandbox manager says: too many"),
        ([{"op": "streams", "reason": "odd"}], "unexpected 'streams': odd"),
        ([{"op": "sandbox", "sandbox": {"job": 1}}, {"op": "end"}], "not a sandbox"),
        ([{"op": "end", "servers": [{"server": 1}]}], "server"),
        ([{"op": "files", "files": [{"size": "x"}]}], "size"),
    ],
)
def test_an_answer_that_is_none_is_an_error(tmp_path: Path, frames: list[dict[str, Any]], said: str) -> None:
    _answer(tmp_path / "s", frames)
    with pytest.raises((CommandError, BadMessage), match=said):
        read_status(tmp_path / "s", 1.0)


def test_an_answer_that_breaks_off_is_an_error(tmp_path: Path) -> None:
    _answer(tmp_path / "s", [{"op": "sandbox", "sandbox": asdict(box())}])
    with pytest.raises((OSError, EOFError)):
        read_status(tmp_path / "s", 1.0)


def test_what_users_of_the_managers_account_and_root_see_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for uid, is_whole in ((0, True), (os.geteuid(), True), (12345, False)):
        _answer(tmp_path / "s", [{"op": "end"}])
        monkeypatch.setattr(node.os, "geteuid", lambda uid=uid: uid)
        assert read_status(tmp_path / "s", 1.0).is_whole is is_whole
        monkeypatch.undo()
        (tmp_path / "s").unlink()


def test_a_manager_that_takes_no_call_is_waited_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "_TIMEOUT_S", 0.2)
    path, errors = tmp_path / "socket", list[type]()

    def ask() -> None:
        try:
            read_streams(path)
        except OSError as problem:
            errors.append(type(problem))

    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(path))
        listener.listen(0)
        first.connect(str(path))  # no other one has room
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(20)
        assert not asking.is_alive()
    asking.join()
    assert errors
