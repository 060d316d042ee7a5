"""``stageout redirect --server``: where the files of many jobs go, and what is asked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

from stageout.cli import redirect, selection
from stageout.cli.exits import CommandError
from stageout.cli.jobs import Job
from stageout.cli.main import main
from stageout.cli.redirect import planned
from stageout.core.classads import ClassAd
from stageout.wire.custody import FileReport
from tests.unit.test_cli_jobs import job

NEW = "mytoken+https://new.org/store/"


def waiting(name: str, url: str, state: str = "RetryWait") -> FileReport:
    return FileReport(name, url, 1, state)


def asked(*files: FileReport, new: str = NEW, left: int | None = None) -> list[tuple[str, str]]:
    one = job(StageOutFilesLeft=len(files) if left is None else left)
    return [(move.file, move.url) for move in planned(one, files, "old.org", new)]


def test_paths_stay_below_the_new_url() -> None:
    files = [waiting(name, f"https://old.org/alice/7/{name}") for name in ("a", "b")]
    assert asked(*files) == [("", "mytoken+https://new.org/store/alice/7/")]
    assert asked(*files, new="https://new.org") == [("", "https://new.org/alice/7/")]
    assert asked(waiting("a", "https://old.org/a")) == [("", "mytoken+https://new.org/store/")]


def test_files_for_other_servers_stay_where_they_are() -> None:
    """Without FILE a request would take them along."""
    found = asked(waiting("a", "https://old.org/d/a"), waiting("b", "https://other.org/d/b", "Failed"))
    assert found == [("a", "mytoken+https://new.org/store/d/")]


def test_each_file_keeps_its_own_directory() -> None:
    found = asked(waiting("a", "https://old.org/d/a"), waiting("b", "https://old.org/e/b"))
    assert found == [("a", "mytoken+https://new.org/store/d/"), ("b", "mytoken+https://new.org/store/e/")]


@pytest.mark.parametrize(
    ("files", "left", "words"),
    [
        ([waiting("a", "https://old.org/d/a")], 2, "has not reported all files"),
        ([], 1, "has not reported all files"),
        ([waiting("a", "https://old.org/d d/a")], 1, "without spaces"),
        ([waiting("a", "https://old.org/d/../../other/a")], 1, "would leave the new URL"),
        ([waiting("a", "https://old.org/d/%2e%2E/a")], 1, "would leave the new URL"),
    ],
)
def test_what_cannot_be_planned_is_refused(files: Sequence[FileReport], left: int, words: str) -> None:
    """A file that the report does not name might be for another server."""
    with pytest.raises(CommandError, match=words):
        asked(*files, left=left)


@pytest.mark.parametrize(
    "words",
    ["", "1.0", "1.0 f https://x/ more", "--server old.org https://x/ 1.0", "1 https://x/", "1.0 nothing",
     "--server old.org https://u:p@x/", "1.0 https://x/ --all", "--server / https://x/ --all"],
)  # fmt: skip
def test_words_that_say_nothing_are_refused(words: str) -> None:
    assert main(["redirect", *words.split()]) == 64


class Queue:
    """Two jobs whose output waits for old.org; the second one has a request already."""

    def __init__(self) -> None:
        self.written: list[tuple[str, str]] = []

    def jobs_with_outputs(self, owner: str | None, expression: str | None) -> list[tuple[Job, ClassAd]]:
        moved = ClassAd({"STAGEOUTFilesCountLastRun": 1, "STAGEOUTSizeBytesLastRun": 5})
        ad = {"JobStatus": 4, "TransferOutputStats": moved, "StageOutState": "RetryWait", "StageOutManager": "m"}
        return [
            (job(ClusterId=7, ProcId=proc, GlobalJobId=f"ap#7.{proc}#1", StageOutFilesLeft=2, **ad), ClassAd())
            for proc in range(2)
        ]

    def set_request(self, job_id: object, value: str) -> None:
        self.written.append((str(job_id), value))


def test_a_job_has_one_request_at_a_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    queue: Any = Queue()
    files = {
        "7.0": [waiting(name, f"https://old.org/{name}/f") for name in "ab"],
        "7.1": [waiting("c", "https://old.org/c/f")],
    }
    rounds: list[list[str]] = []

    def answered(queue: object, pool: object, asked: dict[object, object], *_: object) -> int:
        rounds.append([str(one) for one in asked])
        return 0

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("stageout.cli.condor.Queue", lambda *_: queue)
    monkeypatch.setattr("stageout.cli.condor.Pool", lambda *_: None)
    monkeypatch.setattr(redirect, "selected", lambda *_: [one for one, _ in queue.jobs_with_outputs("", None)])
    monkeypatch.setattr(redirect, "reports_on", lambda *_: [])
    monkeypatch.setattr(redirect, "waiting_files", lambda row: files[row.job])
    monkeypatch.setattr(redirect, "await_answers", answered)
    monkeypatch.setattr(selection, "whose_jobs", lambda: "alice")
    words = ["redirect", "--server", "old.org", "https://new.org"]
    assert main([*words, "--dry-run"]) == 1, "7.1 has two files, and one is not reported"
    assert capsys.readouterr().out == "7.0  a  https://new.org/a/\n7.0  b  https://new.org/b/\n"
    assert queue.written == []
    assert main(words) == 1
    assert rounds == [["7.0"], ["7.0"]]
    assert [text.split(" ", 3)[3] for _, text in queue.written] == ["https://new.org/a/ a", "https://new.org/b/ b"]
