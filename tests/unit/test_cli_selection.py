"""Requests for many jobs: which are chosen, and what is asked."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from stageout.cli import request, selection
from stageout.cli.exits import CommandError, Unavailable, UsageError
from stageout.cli.jobs import Job, JobId
from stageout.cli.main import build_parser, main
from stageout.cli.selection import is_at, is_selection, selected
from stageout.core.classads import ClassAd
from stageout.wire.custody import FileReport, Report, SandboxReport
from tests.unit.test_cli_jobs import job


@pytest.mark.parametrize(
    ("url", "host", "expected"),
    [
        ("davs://h.org/a", "h.org", True),
        ("davs://h.org:443/a", "H.ORG:443", True),
        ("davs://h.org/a", "h.org:443", True),
        ("davs://h.org:8443/a", "h.org", True),
        ("davs://h.org:8443/a", "h.org:443", False),
        ("cms+davs://u:p@h.org/a", "davs://h.org", True),
        ("http://h.org/a", "davs://h.org", False),
        ("davs://other.h.org/a", "h.org", False),
        ("davs://[::1]:9/a", "[::1]:9", True),
        ("file:///a", "h.org", False),
    ],
)
def test_servers_are_compared_by_host_port_and_scheme(url: str, host: str, expected: bool) -> None:
    assert is_at(url, host) is expected


def options(*words: str) -> argparse.Namespace:
    return build_parser("retry").parse_args(["retry", *words])


@pytest.mark.parametrize("words", [[], ["1.0", "--destination", "h"], ["1.0", "-constraint", "true"], ["1.0", "--all"]])
def test_jobs_are_named_or_chosen(words: list[str]) -> None:
    with pytest.raises(UsageError):
        is_selection(options(*words))
    assert is_selection(options("--destination", "h"))
    assert is_selection(options("-constraint", "true"))
    assert not is_selection(options("1.0"))


@pytest.mark.parametrize("host", ["", "/", "h.org:44x", "2001:db8::1", "davs://", "davs:///a"])
def test_words_that_name_no_server_are_refused(host: str) -> None:
    with pytest.raises(UsageError, match="names no server"):
        Site(2).choose("--destination", host)


@pytest.fixture(autouse=True)
def alice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests run as an ordinary user."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(selection, "whose_jobs", lambda: "alice")


def test_root_says_whose_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(UsageError, match="--all for the jobs of all users"):
        Site(2).choose("--destination", "a.org")
    assert Site(2).choose("--destination", "a.org", "--all") == [0, 1]


def test_without_jobs_the_command_line_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["retry"]) == 64
    assert capsys.readouterr().err.startswith("stageout: name jobs, or choose them")


class Site:
    """A queue and a collector with jobs in stage-out."""

    def __init__(self, count: int, place: str = "davs://a.org/d") -> None:
        self.found = [_ended(number) for number in range(count)]
        self.places = dict.fromkeys(range(count), place)
        self.reported: list[Report] | None = []
        self.set: list[JobId] = []
        self.refuses: set[int] = set()

    def jobs_with_outputs(self, owner: str | None, expression: str | None) -> list[tuple[Job, ClassAd]]:
        self.asked = (owner, expression)
        return [(one, ClassAd({"OutputDestination": self.places[one.id.proc or 0]})) for one in self.found]

    def reports(self, managers: object) -> list[Report]:
        if self.reported is None:
            raise Unavailable("away")
        return self.reported

    def set_requests(self, values: Mapping[JobId, str]) -> list[tuple[JobId, CommandError]]:
        self.set += [one for one in values if one.proc not in self.refuses]
        self.values = dict(values)
        return [(one, CommandError("no")) for one in values if one.proc in self.refuses]

    def choose(self, *words: str) -> list[int | None]:
        site: Any = self
        return [found.id.proc for found in selected(site, site, options(*words))]

    def ask(self, *words: str) -> tuple[list[int | None], int]:
        site: Any = self
        given = options(*words)
        waited, refused = request._ask_selected(site, selected(site, site, given), given)
        return [one.proc for one in waited], len(refused)


def _ended(number: int) -> Job:
    moved = ClassAd({"STAGEOUTFilesCountLastRun": 1, "STAGEOUTSizeBytesLastRun": 5})
    return job(
        ClusterId=7, ProcId=number, GlobalJobId=f"ap#7.{number}#1", JobStatus=4, NumShadowStarts=1,
        TransferOutputStats=moved, StageOutState="RetryWait", StageOutReason="507", StageOutManager="m",
    )  # fmt: skip


def _report(number: int, url: str, files_left: int = 1) -> SandboxReport:
    return SandboxReport(
        f"ap#7.{number}#1", 1, "alice@x", "RetryWait", 1, "", 0, (), 2, files_left, 10, 5, 1, 0, 0, 0,
        files=(FileReport("a", url, 5, "RetryWait"), FileReport("b", "davs://b.org/d/b", 5, "Delivered")),
    )  # fmt: skip


def test_all_that_the_expression_matches_are_chosen() -> None:
    site = Site(3)
    assert site.choose("-constraint", "JobPrio > 3", "--all") == [0, 1, 2]
    assert site.asked == (None, "JobPrio > 3")


def test_jobs_are_chosen_by_the_server_of_files_that_wait() -> None:
    site = Site(3)
    site.places[1] = "davs://b.org/d"
    assert site.choose("--destination", "b.org") == [1]
    # Job 0 waits for b.org only, job 2 has more files than the report names.
    boxes = (_report(0, "davs://b.org/d/a"), _report(1, "davs://a.org/d/a"), _report(2, "davs://b.org/d/a", 9))
    site.reported = [Report("m", "", 1, 1, {}, 5, boxes)]
    assert site.choose("--destination", "b.org") == [0]
    assert site.choose("--destination", "a.org") == [1, 2]


def test_without_the_collector_the_jobs_own_lists_count() -> None:
    site = Site(2)
    site.reported = None
    assert site.choose("--destination", "a.org") == [0, 1]


def test_each_chosen_job_is_asked_for_and_refusals_are_kept_apart(capsys: pytest.CaptureFixture[str]) -> None:
    site = Site(3)
    site.refuses = {1}
    site.found[2] = replace(site.found[2], run=3)
    assert site.ask("-constraint", "true") == ([0, 2], 1)
    assert {job.proc: text for job, text in site.values.items()} == {
        0: "retry run=1",
        1: "retry run=1",
        2: "retry run=3",
    }
    assert capsys.readouterr().out == "retry asked for 2 jobs\n"


def test_a_dry_run_asks_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    site = Site(2)
    assert site.ask("-constraint", "true", "--dry-run") == ([], 0)
    assert site.set == []
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "7.0  alice  waiting to retry: 507",
        "7.1  alice  waiting to retry: 507",
        "retry would be asked for 2 jobs",
    ]


def test_a_dry_run_has_words_for_output_without_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    site = Site(1)
    site.found = [replace(site.found[0], state="None", reason="")]
    site.ask("-constraint", "true", "--dry-run")
    assert capsys.readouterr().out.startswith("7.0  alice  waiting for a report\n")


def test_many_jobs_are_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    site = Site(51)
    assert site.ask("-constraint", "true") == ([], 0)
    assert len(site.set) == 51
    assert "does not wait for so many" in capsys.readouterr().out
    assert site.ask("-constraint", "true", "--json") == ([], 0)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["outcome"] for one in told] == ["waiting"] * 51
