"""The pages about the command show what it really prints, takes and means."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import time
from dataclasses import fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from stageout.cli import render
from stageout.cli.doctor import report
from stageout.cli.doctor.findings import Role, fail, ok
from stageout.cli.exits import Exit
from stageout.cli.history import entry
from stageout.cli.main import _protect_job_ids, build_parser
from stageout.cli.rows import SCHEMA, Destination, Row
from stageout.overlay.cli import ls, routes
from stageout.overlay.operations import Entry
from stageout.overlay.wire.messages import Known, Routed
from stageout.wire.custody import FileReport
from tests.unit.test_cli_doctor import Fake
from tests.unit.test_cli_jobs import job
from tests.unit.test_cli_status import RECORD

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "user/before", "user/commands", "user/dags", "administrator/doctor", "overlay/commands",
    "plugin/front-ends", "reference/json", "reference/json-overlay",
    "developer/reports",
)  # fmt: skip

TEXT = "\n".join((ROOT / "docs" / f"{page}.md").read_text() for page in PAGES)
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.S | re.M)
(VERBS,) = [action.choices for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)]
WORDS = set(re.findall(r"`([^`\n]+)`", TEXT))


def printed(command: str) -> list[str]:
    """The output of a command as the document shows it."""
    (block,) = [str(body) for _, body in BLOCKS if body.startswith(f"$ {command}\n")]
    return block.splitlines()[1:]


@pytest.fixture(scope="module")
def sample() -> dict[str, Any]:
    (text,) = [body for kind, body in BLOCKS if kind == "json"]
    data: dict[str, Any] = json.loads(text)
    return data


@pytest.fixture(scope="module")
def row(sample: dict[str, Any]) -> Row:
    (item,) = sample["jobs"]
    return Row(**{**item, "files": tuple(FileReport(**file) for file in item["files"])})


def test_the_json_has_the_real_fields(sample: dict[str, Any], row: Row) -> None:
    assert sample["schema"] == SCHEMA
    assert list(sample["jobs"][0]) == [item.name for item in fields(Row)]
    assert all(list(place) == [item.name for item in fields(Destination)] for place in sample["destinations"])
    assert all(list(file) == [item.name for item in fields(FileReport)] for file in sample["jobs"][0]["files"])


def test_the_text_is_what_is_printed_for_that_json(sample: dict[str, Any], row: Row) -> None:
    assert render.jobs_table([row], sample["at"]) == printed("stageout status")
    assert render.job_details(row, sample["at"]) == printed("stageout status 12.0")


def test_every_field_is_explained() -> None:
    names = [item.name for kind in (Row, FileReport, Destination) for item in fields(kind)]
    item = entry(job(), [RECORD])
    names += [*item, *item["runs"][0], *item["runs"][0]["files"][0]]
    data = report.as_json([Role.AP], [ok("x", "y")])
    names += [*data, "name", "level", "text", "remedy"]
    assert [name for name in names if name not in WORDS] == []


def test_every_check_is_listed() -> None:
    names = {item.name for item in report.examine(Fake(), list(Role))}
    named = {name for name in names if not name.startswith("plugin ")}
    assert named <= WORDS, named - WORDS


def test_every_exit_status_is_listed() -> None:
    page = (ROOT / "docs/reference/stageout.md").read_text()
    section = page.partition("## Exit statuses")[2].partition("### Daemons")[0]
    table = re.findall(r"^\| (\d{1,2}) \|", section, re.M)
    assert [int(number) for number in table] == sorted(Exit)


def _calls() -> list[str]:
    """Every call in the document, without the command's name."""
    lines = [line for kind, body in BLOCKS if kind not in ("json", "python") for line in body.splitlines()]
    found = [re.search(r"(?:^|[\s/])stageout ([a-z][^&#]*)", line) for line in [*lines, *sorted(WORDS)]]
    return sorted({call[1].strip() for call in found if call})


@pytest.mark.parametrize("call", _calls())
def test_every_call_is_understood(call: str) -> None:
    assert _understood(call)


def test_there_are_calls() -> None:
    assert len(_calls()) >= 15


def test_the_doctor_looks_like_that() -> None:
    shown = printed("stageout doctor --role ap")
    findings = [
        ok("version", "HTCondor 25.14.1"),
        fail(
            "agent-notice",
            "the agent of ap.example.org was last heard of 412 s ago",
            "is the agent running (condor_who -daemons)? Its log is in the LOG directory",
        ),
    ]
    assert report.as_text([Role.AP], findings, colour=False) == shown


def test_routes_look_like_that() -> None:
    here, relay, store = (f"{name}.example.org:9621" for name in ("gateway", "relay1", "store"))
    links = [
        (gateway_link, to, rate, rtt, 4200)
        for gateway_link, to, rate, rtt in (
            (here, relay, 118_204_000, 1347),
            (here, store, 31_000_000, 67_100),
            (relay, store, 112_500_000, 66_000),
        )
    ]
    routed = Routed(
        store,
        ((relay, store), (store,)),
        (("relay2.example.org:9621", relay, store),),
        ("112 MB/s, 67.3 ms", "31.0 MB/s, 67.1 ms", f"31.0 MB/s, 70 ms; shares {relay} with a route in use"),
        "first found",
    )
    sharers = (("192.0.2.7", "alice", 3, 1, 500, 11_100_000), (store, "", 0, 2, 500, 1_400_000))
    said = Known(3, (), here, 25_000_000, 12_500_000, sharers)
    shown = [*routes.as_text(here, links, [routed]), *routes.uplink_text(said)]
    assert shown == printed("stageout routes gateway.example.org store.example.org")
    assert routes.uplink_text(Known(3, ())) == []
    assert "neighbour-connect-failed" in routes.as_text(here, [], [])[0]
    data = routes.as_json(links, [routed], said)
    rows = [*data["links"], *data["routes"], *data["uplink"]["sharers"], data["uplink"]]  # type: ignore[index, misc]
    assert [name for row in rows for name in row if name not in WORDS] == []


def test_a_listing_looks_like_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    noon = int(datetime(2026, 3, 1, 12, tzinfo=timezone.utc).timestamp())
    entries = [Entry("2026", "directory", 0, 0o755, noon), Entry("results.tar", "file", 40960000, 0o644, noon)]
    shown = printed("stageout ls -l overlay://gateway.example.org/alice")
    assert [ls.line(entry, long=True) for entry in entries] == shown
    monkeypatch.undo()
    time.tzset()


def test_the_dag_of_the_help_is_the_one_of_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = [line for kind, body in BLOCKS if kind == "dag" for line in body.splitlines() if "stageout wait" in line]
    with pytest.raises(SystemExit):
        build_parser().parse_args(["wait", "--help"])
    assert line in capsys.readouterr().out


def _understood(call: str) -> bool:
    values = {"JOB": "12.0", "COMMAND": "wait", "$RETURN": "0", "$JOBID": "12.0", "${1%.*}": "12", "SCHEDD": "ap"}
    words = [values.get(word, word) for word in shlex.split(call)]
    return bool(build_parser().parse_args(_protect_job_ids(words)).command == words[0])


def _other_pages() -> list[Path]:
    examples = [path for path in (ROOT / "examples").rglob("*") if path.is_file()]
    return [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *examples]


def test_other_documents_call_the_command_as_it_is() -> None:
    for path in _other_pages():
        text = path.read_text().replace("\\\n", " ")
        for verb in re.findall(r"`stageout ([a-z]+)", text):
            assert verb in VERBS, f"{path}: stageout {verb}"
        if path.suffix == ".md":  # a sentence may begin with the name, too
            text = "\n".join(re.findall(r"^ *```\w*\n(.*?)^ *```$", text, re.S | re.M))
        for call in re.findall(r"^(?:\$ )?stageout ([a-z][^&#|>\n]*)", text, re.M):
            assert _understood(call), f"{path}: stageout {call}"
