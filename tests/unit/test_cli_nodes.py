"""One process that waits for all nodes of a DAG, and the POST script that asks it."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stageout.cli.exits import Unavailable
from stageout.cli.jobs import Job, JobId
from stageout.cli.nodes import Answers, SharedLook, lead
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
        words = [str(self.bin / "stageout_dag_post"), "7", "A", job, count, returned, *own]
        env = {**os.environ, "TMPDIR": str(self.directory)}
        return subprocess.run(words, cwd=self.directory, env=env, timeout=60).returncode

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
