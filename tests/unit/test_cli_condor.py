"""Requests for many jobs at a schedd that refuses, or that stops answering."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import classad2
import pytest

from stageout.cli import condor
from stageout.cli.exits import CommandError, Unavailable
from stageout.cli.jobs import JobId
from stageout.condor import bindings

JOBS = [JobId(7, number) for number in range(1000)]


class Bindings:
    """Bindings with one schedd. :ivar dies_after: edits before it is silent. :ivar refused: jobs that it refuses."""

    def __init__(self) -> None:
        self.calls, self.dies_after = 0, 10**6
        self.param = {"COLLECTOR_HOST": "cm"}
        self.refused: set[str] = set()
        self.ads: list[Any] = []
        self.asked: set[str] = set()
        self.values: dict[str, str] = {}
        self.DaemonType = self.QueryOpt = type("Names", (), {"Schedd": 1, "IncludeClusterAd": 1})

    def Collector(self, *_: object) -> Any:
        return type("Collector", (), {"locate": lambda *_: {"Name": "ap"}})()

    def Schedd(self, _: object) -> Any:
        return self

    def edit(self, jobs: Any, name: str, value: str) -> int:
        self.calls += 1
        wanted = {jobs} if isinstance(jobs, str) else set(jobs)
        if self.calls > self.dies_after:
            raise RuntimeError("Unable to commit transaction:")
        if wanted & self.refused:
            raise RuntimeError("Unable to commit transaction: not yours")
        self.asked |= wanted
        self.values.update(dict.fromkeys(wanted, value))
        return len(wanted)

    def query(self, wanted: str, *_: object, **__: object) -> list[Any]:
        if self.calls > self.dies_after:
            raise RuntimeError("Failed to connect to schedd.")
        return [ad for ad in self.ads if classad2.ExprTree(wanted).eval(ad) is True]


@pytest.fixture
def schedd(monkeypatch: pytest.MonkeyPatch) -> Bindings:
    made = Bindings()
    monkeypatch.setattr(bindings, "htcondor", lambda: made)
    return made


def test_a_refused_job_does_not_stop_the_others(schedd: Bindings) -> None:
    schedd.refused = {"7.3", "7.500"}
    refused = condor.Queue().set_requests(dict.fromkeys(JOBS, "retry run=1"))
    assert [str(job) for job, _ in refused] == ["7.3", "7.500"]
    assert len(schedd.asked) == 998


@pytest.mark.parametrize(("edits", "asked"), [(2, 400), (0, 0)])
def test_a_silent_schedd_is_not_asked_for_each_job(schedd: Bindings, edits: int, asked: int) -> None:
    schedd.dies_after = edits
    refused = condor.Queue().set_requests(dict.fromkeys(JOBS, "retry run=1"))
    assert [job for job, _ in refused] == JOBS[asked:]
    assert all(isinstance(problem, Unavailable) and f"{job}: not confirmed" in str(problem) for job, problem in refused)
    assert (len(schedd.asked), schedd.calls) == (asked, edits + 1)


def test_each_job_gets_its_own_request(schedd: Bindings) -> None:
    wanted = {job: f"retry run={1 + (job.proc or 0) % 3}" for job in JOBS}
    assert condor.Queue().set_requests(wanted) == []
    assert schedd.values == {str(job): f'"{text}"' for job, text in wanted.items()}
    assert schedd.calls == 6, "jobs of the same run share transactions"


def test_a_silent_schedd_leaves_the_jobs_of_other_runs(schedd: Bindings) -> None:
    schedd.dies_after = 1
    refused = condor.Queue().set_requests({JobId(7, number): f"retry run={number // 2 + 1}" for number in range(6)})
    assert [str(job) for job, _ in refused] == ["7.2", "7.3", "7.4", "7.5"]


def test_a_schedd_that_goes_away_between_single_jobs(schedd: Bindings) -> None:
    schedd.refused, schedd.dies_after = {"7.1"}, 5
    refused = condor.Queue().set_requests(dict.fromkeys(JOBS, "retry run=1"))
    assert len(refused) == 1000 - len(schedd.asked)
    assert "not yours" in str(refused[0][1])
    assert schedd.calls == 6


def test_the_nodes_of_a_dag_are_the_jobs_of_its_user(schedd: Bindings) -> None:
    alice, bob = "alice@example.org", 'bob" || true || "@example.org'
    root = {"ClusterId": 5, "ProcId": 0, "JobStatus": 2, "User": alice}
    nodes = [{**root, "ClusterId": 6 + number, "DAGManJobId": 5} for number in range(2)]
    others = [{**nodes[0], "ClusterId": 8, "User": bob}, {**nodes[0], "ClusterId": 9, "DAGManJobId": 4}]
    schedd.ads = [classad2.ClassAd(ad) for ad in (root, *nodes, *others)]
    assert [job.id.cluster for job in condor.Queue().jobs_of_dag(5)[0]] == [6, 7]
    schedd.ads[0]["User"] = bob
    assert [job.id.cluster for job in condor.Queue().jobs_of_dag(5)[0]] == [8]
    del schedd.ads[0]
    assert len(condor.Queue().jobs_of_dag(5)[0]) == 3, "the DAGMan job has gone, and each node is looked up by itself"


class SilentCollector:
    """Bindings of a machine whose collector does not answer."""

    param: ClassVar[dict[str, str]] = {"COLLECTOR_HOST": "cm.example.org:9618"}

    class AdType:
        Any = 1

    class DaemonType:
        Schedd = 1

    def Collector(self, *_: object) -> Any:
        def fail(*_: object) -> Any:
            raise RuntimeError("Failed communication with collector.")

        return type("Collector", (), {"locate": fail, "query": fail})()


@pytest.mark.parametrize(("pool", "name"), [(None, "cm.example.org:9618"), ("cm2.example.org", "cm2.example.org")])
def test_a_collector_that_does_not_answer_is_named(
    pool: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bindings, "htcondor", SilentCollector)
    for question in (lambda: condor.Pool(pool).ads("true"), lambda: condor.Queue("ap", pool).name()):
        with pytest.raises(Unavailable, match=rf"^the collector {name} does not answer \(Failed communication with"):
            question()


@pytest.mark.parametrize(("configured", "used"), [("", "15"), ("QUERY_TIMEOUT = 4", "4"), ("QUERY_TIMEOUT = 90", "90")])
def test_the_wait_for_a_collector_is_bounded(configured: str, used: str, tmp_path: Path) -> None:
    """HTCondor waits 60 s for an answer, and its bindings take no limit of their own."""
    config = tmp_path / "condor_config"
    config.write_text(f"{configured}\n")
    program = (
        "import htcondor2; from stageout.cli.condor import load_bindings; load_bindings(); "
        "print(htcondor2.param['QUERY_TIMEOUT'])"
    )
    argv, env = [sys.executable, "-c", program], {**os.environ, "CONDOR_CONFIG": str(config)}
    assert subprocess.run(argv, env=env, check=True, capture_output=True, text=True).stdout.strip() == used


@pytest.mark.parametrize(
    ("files", "words"),
    [(("dpkg", "rpm"), "apt install condor"), (("rpm",), "dnf install python3-condor"), ((), "[condor]")],
)
def test_missing_bindings_come_from_where_the_package_came_from(
    files: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(bindings, "DPKG_LIST", str(tmp_path / "dpkg"))
    monkeypatch.setattr(bindings, "PACKAGED", str(tmp_path / "rpm"))
    monkeypatch.setitem(sys.modules, "htcondor2", None)
    with pytest.raises(CommandError, match=re.escape(words)):
        condor.load_bindings()
