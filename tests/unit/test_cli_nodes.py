"""One process that waits for all nodes of a DAG, and the POST script that asks it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stageout.cli.exits import Unavailable
from stageout.cli.jobs import Job, JobId
from stageout.cli.nodes import Answers, Places, SharedLook, lead, places_for
from tests.harness.pool.waiting import wait_until
from tests.unit.test_cli_jobs import job
from tests.unit.test_cli_wait import DONE, Schedd

SCRIPT = Path(__file__).resolve().parents[2] / "plugins" / "stageout_dag_post"
LATER = 75


def _node(number: int, **changes: object) -> Job:
    return job(ClusterId=number, ProcId=0, DAGManJobId=9, JobStatus=4, **changes)


def _lead(schedd: Schedd, directory: Path, own: str) -> list[float]:
    """Lead for ``own``; the pauses."""
    slept: list[float] = []
    cluster, proc = own.split(".")
    fetch = lambda: schedd.jobs([JobId(12), JobId(13), JobId(14)])  # noqa: E731
    assert lead(JobId(int(cluster), int(proc)), Answers(directory), SharedLook(schedd, fetch), slept.append) == 0
    return slept


def test_all_that_ask_are_answered_by_one_look(tmp_path: Path) -> None:
    for name in ("12.0", "13.0", "14.0"):
        (tmp_path / name).touch()
    on_its_way = _node(12, StageOutState="Moving")
    failed = _node(13, StageOutState="Failed", StageOutReason="404: no such collection")
    schedd = Schedd([on_its_way, failed], [_node(12, **DONE)], past=[_node(14, **DONE)])
    assert _lead(schedd, tmp_path, "12.0") == [0.5]
    assert (tmp_path / "12.0").read_text() == "delivered its output is at its destination\n"
    assert (tmp_path / "13.0").read_text() == "failed failed: 404: no such collection\n"
    assert (tmp_path / "14.0").read_text().startswith("delivered ")
    assert schedd.asked_history == [[JobId(14, 0)]], "one question for all that have left"


def test_a_last_look_answers_also_those_behind_the_own_node(tmp_path: Path) -> None:
    for name in ("12.0", "13.0", "14.0"):
        (tmp_path / name).touch()
    schedd = Schedd([_node(12, **DONE), _node(13, **DONE)], past=[_node(14, **DONE)])
    assert _lead(schedd, tmp_path, "12.0") == []
    assert all((tmp_path / name).read_text().startswith("delivered ") for name in ("12.0", "13.0", "14.0"))


def test_a_node_that_nobody_knows_fails_alone(tmp_path: Path) -> None:
    (tmp_path / "13.0").touch()
    waiting = [_node(12, StageOutState="Moving")]
    schedd = Schedd(*[waiting] * 3, Unavailable("restarts"), [_node(12, **DONE)])
    assert len(_lead(schedd, tmp_path, "12.0")) == 4
    assert (tmp_path / "13.0").read_text().startswith("failed 13.0: no such job")
    assert (tmp_path / "12.0").read_text().startswith("delivered ")


def test_a_leader_looks_often_after_news_and_seldom_after_long_silence(tmp_path: Path) -> None:
    """A node of a chain waits some seconds: so its answer must not be late by as much."""
    waiting = [_node(12, StageOutState="Moving")]
    slept = _lead(Schedd(*[waiting] * 40, [_node(12, **DONE)]), tmp_path, "12.0")
    assert slept[0] == 0.5
    late = [(sum(slept[:number]), pause_s) for number, pause_s in enumerate(slept)]
    assert all(pause_s <= 1 + before_s / 4 for before_s, pause_s in late)
    assert slept[-1] == 10.0


def test_a_question_or_an_answer_makes_the_leader_look_soon(tmp_path: Path) -> None:
    waiting = [_node(12, StageOutState="Moving"), _node(13, StageOutState="Moving")]
    schedd = Schedd(*[waiting] * 12, [waiting[0], _node(13, **DONE)], [waiting[0]], [_node(12, **DONE)])
    slept: list[float] = []

    def sleep(pause_s: float) -> None:
        slept.append(pause_s)
        if len(slept) == 5:
            (tmp_path / "13.0").touch()

    fetch = lambda: schedd.jobs([JobId(12), JobId(13)])  # noqa: E731
    assert lead(JobId(12, 0), Answers(tmp_path), SharedLook(schedd, fetch), sleep) == 0
    assert slept[4] > 0.9
    assert slept[5] == 0.5
    assert slept[11] > 0.9
    assert slept[12] == 0.5


@pytest.mark.parametrize(("most", "count"), [(None, 0), (0, 10), (1, 0), (2, 1), (7, 3), (20, 10), (500, 10)])
def test_places_leave_half_of_the_limit_to_scripts_that_need_not_wait(
    tmp_path: Path, most: int | None, count: int
) -> None:
    assert places_for(most) == count
    places = Places(tmp_path / "7.places")
    places.make(20)
    places.make(most)
    names = [path.name for path in (tmp_path / "7.places").iterdir()]
    assert len(names) == count
    assert all(path.is_fifo() for path in (tmp_path / "7.places").iterdir())
    assert sorted("".join(names)) == (list("0123456789") if count else []), "each job has one place that it may try"


def test_all_that_stay_are_woken_when_there_is_an_answer_and_when_the_leader_ends(tmp_path: Path) -> None:
    asks, places = tmp_path / "7", Places(tmp_path / "7.places")
    asks.mkdir()
    for name in ("12.0", "13.0"):
        (asks / name).touch()
    places.make(4)
    pipes = [os.open(path, os.O_RDWR | os.O_NONBLOCK) for path in sorted((tmp_path / "7.places").iterdir())]
    waiting = _node(12, StageOutState="Moving")
    schedd = Schedd([waiting, _node(13, **DONE)], [waiting], [_node(12, **DONE)])
    heard: list[bytes] = []

    def read(descriptor: int) -> bytes:
        try:
            return os.read(descriptor, 100)
        except BlockingIOError:
            return b""

    def sleep(_: float) -> None:
        heard.append(b"".join(map(read, pipes)))

    fetch = lambda: schedd.jobs([JobId(12), JobId(13)])  # noqa: E731
    assert lead(JobId(12, 0), Answers(asks), SharedLook(schedd, fetch), sleep, places) == 0
    heard.append(b"".join(map(read, pipes)))
    assert heard == [b"\n\n", b"", b"\n\n"]
    for descriptor in pipes:
        os.close(descriptor)


def test_places_that_nobody_waits_at_or_that_are_full_hold_nobody_up(tmp_path: Path) -> None:
    places = Places(tmp_path / "7.places")
    places.wake()
    places.make(2)
    places.wake()
    (pipe,) = (os.open(path, os.O_RDWR | os.O_NONBLOCK) for path in (tmp_path / "7.places").iterdir())
    with pytest.raises(BlockingIOError):
        while True:
            os.write(pipe, b"x" * 4096)
    places.wake()
    os.close(pipe)


class Post:
    """The script beside a ``stageout`` that notes its calls and answers as told."""

    def __init__(self, directory: Path) -> None:
        self.bin = directory / "bin"
        self.bin.mkdir()
        (self.bin / "stageout_dag_post").symlink_to(SCRIPT)
        self.calls = self.bin / "calls"
        self.asks = directory / f"stageout-dag-{os.getuid()}" / "7"
        self.directory = directory

    def answers(self, line: str) -> None:
        text = f'#!/bin/sh\necho "$@" >> {self.calls}\n[ -z "{line}" ] || echo "{line}" > "$5/$6"\n'
        (self.bin / "stageout").write_text(f"{text}[ -n '{line}' ] || {{ echo no bindings >&2; exit 1; }}\n")
        (self.bin / "stageout").chmod(0o755)

    def run(self, *own: str, job: str = "12.0", count: str = "1", returned: str = "0") -> int:
        return self.start(*own, job=job, count=count, returned=returned).wait(60)

    def start(self, *own: str, job: str, count: str = "1", returned: str = "0") -> subprocess.Popen[bytes]:
        words = [str(self.bin / "stageout_dag_post"), "7", "A", job, count, returned, *own]
        env = {**os.environ, "TMPDIR": str(self.directory)}
        return subprocess.Popen(words, cwd=self.directory, env=env)

    def reasons(self) -> str:
        return (self.directory / "stageout-failed.log").read_text()


@pytest.fixture
def post(tmp_path: Path) -> Iterator[Post]:
    made = Post(tmp_path)
    made.answers("delivered it is there")
    yield made


def test_the_first_waits_and_the_others_come_back(post: Post) -> None:
    post.asks.mkdir(parents=True)
    post.asks.parent.chmod(0o700)
    held = os.open(post.asks, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert [post.run(), post.run(job="13.1", count="2")] == [LATER, LATER]
    os.close(held)
    assert sorted(path.name for path in post.asks.iterdir()) == ["12.0", "13"]
    assert not post.calls.exists()
    (post.asks / "13").write_text("delivered it is there\n")
    assert post.run(job="13.1", count="2") == 0, "answered by the one that waited"
    assert not post.calls.exists()
    assert post.run() == 0
    assert post.calls.read_text() == f"wait --dag 7 --answers {post.asks} 12.0\n"
    assert not post.asks.exists()


class Leader:
    """A leader with a place for each of some POST scripts, which the test plays."""

    def __init__(self, post: Post, most_scripts: int) -> None:
        self.post = post
        post.asks.mkdir(parents=True)
        post.asks.parent.chmod(0o700)
        self.places = Places(post.asks.with_name("7.places"))
        self.places.make(most_scripts)
        self._lock = os.open(post.asks, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def start(self, job: str) -> subprocess.Popen[bytes]:
        """Start a POST script and wait for its question."""
        script = self.post.start(job=job)
        wait_until(lambda: (self.post.asks / job).exists(), what="the question")
        return script

    def is_staying(self, script: subprocess.Popen[bytes]) -> bool:
        """Wait until the script holds a place or ends."""
        wait_until(lambda: script.poll() is not None or self._has_reader(script), what="a reader of a place")
        return script.poll() is None

    def _has_reader(self, script: subprocess.Popen[bytes]) -> bool:
        children = Path(f"/proc/{script.pid}/task/{script.pid}/children").read_text().split()
        return any(b"timeout" in Path(f"/proc/{child}/cmdline").read_bytes() for child in children)

    def answer(self, job: str) -> None:
        (self.post.asks / job).write_text("delivered it is there\n")
        self.places.wake()

    def end(self) -> None:
        self.places.wake()
        os.close(self._lock)


def test_some_scripts_stay_until_they_are_woken_and_the_rest_come_back(post: Post) -> None:
    leader = Leader(post, 4)
    staying = [leader.start("13.0"), leader.start("14.0")]
    assert [leader.is_staying(script) for script in staying] == [True, True]
    assert post.run(job="15.0") == LATER, "both places are taken"
    leader.answer("14.0")
    assert staying[1].wait(20) == 0
    assert staying[0].poll() is None
    third = leader.start("15.0")
    assert leader.is_staying(third), "a place is free again"
    for name in ("13.0", "15.0"):
        leader.answer(name)
    assert [staying[0].wait(20), third.wait(20)] == [0, 0]
    assert not post.asks.exists()
    assert not post.asks.with_name("7.places").exists()
    leader.end()


def test_a_script_that_stays_takes_the_lead_when_the_leader_ends(post: Post) -> None:
    leader = Leader(post, 2)
    script = leader.start("13.0")
    assert leader.is_staying(script)
    leader.end()
    assert script.wait(20) == 0
    assert post.calls.read_text() == f"wait --dag 7 --answers {post.asks} 13.0\n"


def test_of_many_that_ask_each_looks_into_one_place(post: Post) -> None:
    """A look into a place costs a process."""
    leader = Leader(post, 20)
    for number in range(101, 112):
        (post.asks / f"{number}.0").touch()
    script = leader.start("23.0")
    assert leader.is_staying(script)
    assert post.run(job="33.0") == LATER, "the place for its last digit is taken"
    leader.answer("23.0")
    assert script.wait(20) == 0
    leader.end()


def test_scripts_of_a_crowd_start_less_often(post: Post) -> None:
    leader = Leader(post, 1)
    for number in range(1000, 1201):
        (post.asks / f"{number}.0").touch()
    begin_s = time.monotonic()
    assert post.run(job="13.0") == LATER
    assert time.monotonic() - begin_s >= 0.25
    leader.end()


@pytest.mark.parametrize(("returned", "status"), [("0", 1), ("3", 3), ("75", 1), ("-9", 1)])
def test_a_failed_delivery_fails_the_node_and_says_why(post: Post, returned: str, status: int) -> None:
    post.answers("failed 404: no such collection")
    assert post.run("/bin/true", returned=returned) == status
    assert "node A, job 12.0: 404: no such collection" in post.reasons()


@pytest.mark.parametrize(
    ("own", "returned", "status"),
    [("", "0", 0), ("", "2", 2), ("", "75", 1), ("", "-1004", 1),
     ("exit 0", "3", 0), ("exit 4", "0", 4), ("exit 75", "0", 1)],
)  # fmt: skip
def test_the_own_script_decides_after_the_delivery(post: Post, own: str, returned: str, status: int) -> None:
    assert post.run(*(("sh", "-c", own) if own else ()), returned=returned) == status


def test_the_own_script_may_stand_in_the_directory_of_the_node(post: Post) -> None:
    (post.directory / "own.sh").write_text('#!/bin/sh\nexit "$1"\n')
    (post.directory / "own.sh").chmod(0o755)
    assert post.run("own.sh", "5") == 5


@pytest.mark.parametrize("job", ["0.3", "-1.-1"])
def test_a_node_without_a_job_waits_for_nothing(post: Post, job: str) -> None:
    assert post.run(job=job) == 0
    assert not post.calls.exists()


def test_a_command_that_cannot_wait_fails_the_node(post: Post) -> None:
    post.answers("")
    assert post.run() == 1
    assert "stageout wait ended with status 1: no bindings" in post.reasons()


def test_questions_are_not_left_in_a_directory_of_somebody_else(post: Post) -> None:
    post.asks.parent.symlink_to(post.directory)
    assert post.run() == 1
    assert "belongs to somebody else" in post.reasons()
