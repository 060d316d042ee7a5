"""``stageout history -files``: records selected as condor_history selects them, printed, and summed up."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from schedd_agent.file_records import key_of
from stageout.cli import file_history
from stageout.cli.exits import Exit
from stageout.cli.file_history import overview, totals
from stageout.cli.main import main
from stageout.core.config import mapping_settings
from stageout.core.history import FILE_NAME, HistoryFile, took_s

NOW = 1_700_000_000


def record(number: int, owner: str = "alice", **more: Any) -> dict[str, Any]:
    """A file of job ``number``.0 that took ``number`` seconds and was delivered ``number`` hours before now."""
    at = NOW - 3600 * number
    return {
        "MyType": "StageOutFile", "GlobalJobId": f"ap#{number}.0#1", "ClusterId": number, "ProcId": 0,
        "NumShadowStarts": 1, "Owner": owner, "StageOutManager": "m", "StageOutFileNumber": 0, "StageOutFiles": 1,
        "StageOutAcceptedAt": at - number, "StageOutState": "Delivered", "TransferFileBytes": 1000 * number,
        "TransferFileName": f"out{number}", "TransferUrl": f"https://dest/{number}", "TransferHostName": "dest",
        "StageOutPlugin": "curl", "TransferEndTime": at, "RecordWriteDate": at, **more,
    }  # fmt: skip


RECORDS = [
    record(9), record(8, "bob"), record(7, StageOutPlugin="gsiftp", TransferHostName="other"),
    record(6, StageOutState="Failed", TransferError="403: no\nway", StageOutErrorCode=30),
    {**record(5), "StageOutFiles": 40},
    record(4, "bob"), record(3), record(2), record(1),
]  # fmt: skip


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """A function that runs the command as alice and returns its status and output."""
    HistoryFile(tmp_path / FILE_NAME, key_of, lambda: NOW, 2000).append(RECORDS)
    monkeypatch.setattr(file_history, "condor_settings", lambda: mapping_settings({"SPOOL": str(tmp_path)}))
    monkeypatch.setattr(file_history, "whose_jobs", lambda: "alice")
    monkeypatch.setattr(time, "time", lambda: float(NOW))
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()

    def run(*arguments: str) -> tuple[int, str]:
        try:
            status = main(["history", *arguments])
        except SystemExit as end:
            status = int(end.code or 0)
        found = capsys.readouterr()
        return status, found.out + found.err

    yield run
    monkeypatch.undo()
    time.tzset()


def clusters(output: str) -> list[int]:
    return [ad["ClusterId"] for ad in json.loads(output)["files"]]


def test_an_owner_sees_his_own_files_newest_first(site: Any) -> None:
    status, output = site("-files", "-json")
    assert (status, clusters(output)) == (Exit.OK, [1, 2, 3, 5, 6, 7, 9])
    assert json.loads(output)["schema"] == 1
    assert json.loads(output)["files"][0] == record(1)


@pytest.mark.parametrize("all_users", ["-a", "--all", "-allusers"])
def test_all_users(site: Any, all_users: str) -> None:
    assert clusters(site("-files", all_users, "--json")[1]) == list(range(1, 10))


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("8", "9.0", "1.1", "-files"), [8, 9]),
        (("-constraint", "TransferFileBytes > 6000"), [7, 9]),
        (("--constraint", 'stageoutstate == "failed"'), [6]),
        (("-constraint", "NoSuchAttribute > 5"), []),
        (("-constraint", "TransferError"), []),
        (("-since", "3h"), [1, 2, 3]),
        (("--since", str(NOW - 7200)), [1, 2]),
        (("-since", "2023-11-14T21:00"), [1]),
        (("-since", "2023-11-14"), [1, 2, 3, 5, 6, 7, 9]),
        (("-limit", "2", "--files"), [1, 2]),
        (("-allusers", "-since", "9h", "-constraint", 'Owner == "bob"', "-limit", "1"), [4]),
    ],
)
def test_selection(site: Any, arguments: tuple[str, ...], wanted: list[int]) -> None:
    if any("constraint" in word for word in arguments):
        pytest.importorskip("classad2")
    assert clusters(site(*arguments, "-json")[1]) == wanted


@pytest.mark.parametrize("option", ["-constraint", "-af"])
def test_an_empty_expression_is_refused(site: Any, option: str) -> None:
    pytest.importorskip("classad2")
    assert site(option, "")[0] == Exit.USAGE


def test_scanning_stops_where_older_records_begin(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    before = file_history.newest_first

    def newest_first(path: Path) -> Any:
        for entry in before(path):
            seen.append(entry)
            yield entry

    monkeypatch.setattr(file_history, "newest_first", newest_first)
    site("-since", "2h")
    assert len(seen) == 3


def test_the_table(site: Any) -> None:
    lines = site("-allusers", "-files")[1].splitlines()
    assert lines[0].split() == ["JOB", "OWNER", "STATE", "SIZE", "TOOK", "ENDED", "FILE", "TO", "ERROR"]
    assert lines[1].split()[:5] == ["1.0", "alice", "delivered", "1.0", "kB"]
    assert lines[6].split()[:3] == ["6.0", "alice", "failed"]
    assert "403: no way" in lines[6]


def test_files_that_were_not_listed_are_one_line() -> None:
    rest = {name: value for name, value in record(1).items() if not name.startswith("TransferU")}
    del rest["TransferFileName"]
    assert "(68 files not listed)" in overview([{**rest, "StageOutFiles": 68}], 0)[1]


def test_attributes_and_expressions_are_printed_as_condor_does(site: Any) -> None:
    pytest.importorskip("classad2")
    asked = ("ClusterId", "transferfilename", "TransferFileBytes / 3.0", "Nothing")
    output = site("-files", "-limit", "2", "-af", *asked)[1]
    assert output.splitlines() == ["1 out1 333.3333333333333 undefined", "2 out2 666.6666666666666 undefined"]
    assert site("6", "-autoformat", "TransferError")[1] == "403: no way\n"
    rows = json.loads(site("1", "--af", "Owner", "Nothing", "-json")[1])["files"]
    assert rows == [{"Owner": "alice", "Nothing": None}]


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("owner", {"alice": (45, 62000 - 35000, 1), "bob": (2, 12000, 0)}),
        ("destination", {"dest": (46, 32000, 1), "other": (1, 7000, 0)}),
        ("plugin", {"curl": (46, 32000, 1), "gsiftp": (1, 7000, 0)}),
        ("day", {"2023-11-14": (47, 39000, 1)}),
    ],
)
def test_totals(site: Any, word: str, wanted: dict[str, tuple[int, int, int]]) -> None:
    rows = json.loads(site("-allusers", "-totals", word, "-json")[1])["totals"]
    assert {row[word]: (row["files"], row["size_bytes"], row["undelivered_files"]) for row in rows} == wanted


def test_median_and_percentile_count_each_delivered_file() -> None:
    rows = [record(number) for number in range(1, 101)]
    total = totals(rows, "owner")["alice"]
    assert (total.percentile_s(0.5), total.percentile_s(0.95)) == (50, 95)
    total = totals([record(1), {**record(9), "StageOutFiles": 99}, record(20, StageOutState="Lost")], "owner")["alice"]
    assert (total.percentile_s(0.5), total.percentile_s(0.95)) == (9, 9)
    assert totals([record(1, StageOutState="Failed")], "owner")["alice"].percentile_s(0.5) is None


def test_a_duration_is_known_only_of_what_arrived() -> None:
    assert took_s(record(5)) == 5
    assert took_s(record(5, StageOutState="Failed")) is None
    assert took_s({**record(5), "StageOutAcceptedAt": 0}) is None


def test_totals_as_a_table(site: Any) -> None:
    lines = site("-totals", "owner")[1].splitlines()
    assert lines[0].split() == ["DELIVERED", "SIZE", "UNDELIVERED", "MEDIAN", "95%", "OWNER"]
    assert lines[1].split() == ["45", "27.0", "kB", "1", "5s", "5s", "alice"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-constraint", "5 =="), "not a ClassAd expression"),
        (("-since", "yesterday"), "is not a time; give one such as 12h"),
        (("-totals", "colour"), "invalid choice"),
        (("-files", "-name", "other"), "on the access point only"),
        (("-files", "-pool", "other"), "on the access point only"),
        (("-limit", "0"), "number of records"),
    ],
)
def test_what_cannot_be_asked_is_refused(site: Any, arguments: tuple[str, ...], words: str) -> None:
    if "-constraint" in arguments:
        pytest.importorskip("classad2")
    status, output = site(*arguments)
    assert (status, words in output) == (Exit.USAGE, True), output


def test_no_records_are_no_error(site: Any, tmp_path: Path) -> None:
    for path in tmp_path.glob(f"{FILE_NAME}*"):
        os.unlink(path)  # noqa: PTH108
    assert site("-files") == (Exit.OK, overview((), 0)[0] + "\n")
    assert site("-totals", "day")[0] == Exit.OK
    assert json.loads(site("-files", "-json")[1])["files"] == []


def test_a_machine_without_spool_says_where_to_ask(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_history, "condor_settings", lambda: mapping_settings({}))
    status, output = site("-files")
    assert (status, "on the access point" in output) == (Exit.FAILED, True)
