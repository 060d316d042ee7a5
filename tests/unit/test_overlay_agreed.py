"""Numbers that processes agree on: whoever is killed in a change, or stopped with the lock, the others go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stageout.overlay import agreed as module
from stageout.overlay import uplink as uplink_module
from stageout.overlay.uplink import Uplink

_RATE = 50e6


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Uplink, Uplink]]:
    """Processes of one router, as far as uplinks go."""
    both = Uplink(_RATE, tmp_path / "shared"), Uplink(_RATE, tmp_path / "shared")
    yield both
    for one in both:
        one.close()


#: Kills a process with -9 after each number of bytes of a change, from either end of it, and takes a turn after each.
_KILLED = """
import os, signal, sys, time
from pathlib import Path
from stageout.overlay import agreed
from stageout.overlay.uplink import Uplink

path, whole = Path(sys.argv[1]), agreed._put

def dies_after(count, from_behind):
    def put(table, place, record):
        at = len(record) - count if from_behind else 0
        whole(table, place + at, record[at : at + count])
        os.kill(os.getpid(), signal.SIGKILL)
    return put

here = Uplink(50e6, path)
flow = here.turn(("", 0), 1.0)
for count in range(61):
    for from_behind in (False, True) if count % 8 == 4 else (False,):
        before = here._agreed.read()
        child = os.fork()
        if not child:
            mine = Uplink(50e6, path)
            agreed._put = dies_after(count, from_behind)
            mine.take(mine.turn(("", 0), 1.0), mine.piece_bytes)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        after = here._agreed.read()
        assert after == before or count == 60, (count, before, after)
        began_s = time.monotonic()
        here.take(flow, here.piece_bytes)
        assert time.monotonic() - began_s < 5, count
assert here._agreed._newest > 60
"""


def test_whoever_is_killed_at_any_point_of_a_change_the_others_go_on(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path / "shared")], check=True, timeout=120)


@contextmanager
def _stopped(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that was stopped in the middle of a change, with the lock."""
    text = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from stageout.overlay import agreed\n"
        "from stageout.overlay.uplink import Uplink\n"
        "here, whole = Uplink(50e6, Path(sys.argv[1])), agreed._put\n"
        "turn = here.turn(('', 0), 1.0)\n"
        "def put(table, place, record):\n"
        "    whole(table, place, record[:30])\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    whole(table, place, record)\n"
        "agreed._put = put\n"
        "here.take(turn, here.piece_bytes)\n"
        "agreed._put = whole\n"
        "here.take(turn, here.piece_bytes)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", text, str(path)])
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        yield process
    finally:
        process.kill()
        process.wait()


def test_one_that_is_stopped_with_the_lock_is_waited_for_once(two: tuple[Uplink, Uplink]) -> None:
    flows = [one.turn(("", 0), 0.5) for one in two]
    with _stopped(two[0].path) as process:
        began_s, pieces = time.monotonic(), 60
        for _ in range(pieces // 2):
            for one, flow in zip(two, flows):
                one.take(flow, one.piece_bytes)
        took_s = time.monotonic() - began_s
        assert took_s > pieces * two[0].piece_bytes / _RATE - 0.05, "they still keep to what the line carries"
        assert two[0]._agreed._locked() >= 0, "another lock is to be had at once"
        two[0]._agreed._set(two[0]._table[module._LOCK_AT], module.fcntl.F_UNLCK)
        virtual = two[0]._virtual()
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(60) == 0
    assert two[1]._virtual() >= virtual, "what it writes is older than what counts"


def test_one_that_stands_still_with_the_lock_costs_each_of_the_others_one_wait(
    two: tuple[Uplink, Uplink], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, here = two[0]._agreed, two[1]._agreed
    waits = list[float]()
    monkeypatch.setattr(module, "time", _Clock(waits))
    with stopped.held():
        for _ in range(3):
            with here.held():
                here.read()
                here.write([0.0] * len(uplink_module._KNOWN))
        assert 0.04 < sum(waits) < 0.06


class _Clock:
    def __init__(self, waits: list[float]) -> None:
        self._waits = waits

    def monotonic(self) -> float:
        return sum(self._waits)

    def sleep(self, seconds: float) -> None:
        self._waits.append(seconds)


def test_of_two_copies_that_are_damaged_none_counts(two: tuple[Uplink, Uplink]) -> None:
    one = two[0]
    one.take(one.turn(("", 0), 1.0), one.piece_bytes)
    for place in module._COPIES:
        one._table[place + 20] ^= 1
    assert one._agreed.read() is None
    two[1].take(two[1].turn(("", 0), 1.0), two[1].piece_bytes)
    assert one._agreed.read() is not None
