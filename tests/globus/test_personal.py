"""A personal endpoint for one call: made, used, removed, also after a crash. The program is a stand-in."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from stageout.core.errors import ErrorClass
from tests.globus.conftest import Bench, error
from tests.harness.globus.world import PERSONAL

#: Takes the arguments of the real program; the relay is the emulated service's.
_PROGRAM = """#!{python}
import http.client, sys
from pathlib import Path
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if "-setup" in arguments:
    Path(arguments["-dir"], "key").write_text(arguments["-setup"])
    sys.exit({setup_status})
arguments = dict(zip(sys.argv[2::2], sys.argv[3::2]))
Path({folder!r}, "allowed").write_text(arguments["-restrict-paths"])
relay = http.client.HTTPConnection("127.0.0.1", {port})
relay.request("POST", "/relay/" + Path(arguments["-dir"], "key").read_text())
relay.getresponse()
"""


@pytest.fixture
def bench(bench: Bench, tmp_path: Path) -> Bench:
    """A node with the program and without a collection."""
    bench.set(LOCAL="", PERSONAL=str(program(bench, tmp_path)))
    return bench


def program(bench: Bench, folder: Path, setup_status: int = 0) -> Path:
    path = folder / "globusconnectpersonal"
    port = bench.globus.address.rpartition(":")[2]
    path.write_text(_PROGRAM.format(python=sys.executable, folder=str(folder), port=port, setup_status=setup_status))
    path.chmod(0o755)
    return path


def endpoints(bench: Bench) -> list[str]:
    """Names of the personal endpoints that there are."""
    return [one.name for one in bench.globus.world.collections.values() if one.kind == PERSONAL]


def test_there_and_back(bench: Bench, tmp_path: Path) -> None:
    run = bench.upload({"d/a": b"a", "d/b": b"b"})
    assert run.succeeded, run.printed
    assert (tmp_path / "allowed").read_text() == f"rw{bench.scratch}"
    bench.put("c", b"content")
    run = bench.download("c")
    assert run.succeeded, run.printed
    assert (bench.scratch / "c").read_bytes() == b"content"
    assert len(bench.globus.tasks) == 2
    assert endpoints(bench) == []
    assert not list(bench.scratch.glob(".globusconnect*"))


def test_sigterm_removes_it(bench: Bench) -> None:
    bench.globus.change(bench.archive.id, rate_bytes_s=1000.0)
    process = bench.start({"a": b"x" * 500_000})
    bench.until("the task runs", lambda: bench.globus.tasks and bench.globus.tasks[0].bytes_transferred)
    process.terminate()
    assert process.wait(60) == 11
    assert bench.globus.tasks[0].status == "FAILED"
    bench.until("the endpoint to be removed", lambda: endpoints(bench) == [])


def test_the_next_call_removes_what_a_killed_one_left(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.globus.change(bench.archive.id, rate_bytes_s=1000.0)
    process = bench.start({"a": b"x" * 500_000})
    bench.until("the task runs", lambda: bench.globus.tasks and bench.globus.tasks[0].bytes_transferred)
    process.kill()
    process.wait()
    (left,) = (one for one in bench.globus.world.collections.values() if one.kind == PERSONAL)
    head, _, tail = left.name.rpartition("-")
    old = f"{head.rpartition('-')[0]}-{time.time() - 700:.0f}-{tail}"
    bench.globus.change(left.id, name=old, offline=True)  # as if ten minutes had passed, and the program with them
    bench.globus.change(bench.archive.id, rate_bytes_s=None)
    assert bench.upload({"b": b"y"}).succeeded
    assert endpoints(bench) == []


def test_a_program_that_does_not_work_is_said_and_leaves_nothing(bench: Bench, tmp_path: Path) -> None:
    program(bench, tmp_path, setup_status=3)
    run = bench.upload({"a": b"x"})
    assert error(run) is ErrorClass.PLUGIN_BROKEN
    assert "-setup ended with status 3" in run.ads[0].text("TransferError")
    bench.set(PERSONAL="/no/such/program")
    assert "cannot be run" in bench.upload({"a": b"x"}).ads[0].text("TransferError")
    assert endpoints(bench) == []
