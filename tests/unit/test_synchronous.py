"""Why a transfer is synchronous: the table of codes, and that every sentence of plugins and manager has one."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stageout.cli import status
from stageout.cli.history import details, entry
from stageout.cli.render import job_details
from stageout.cli.rows import as_json, explained, merge
from stageout.cli.why import Why, why
from stageout.core.classads import ClassAd
from stageout.core.synchronous import CAUSES, NOT_SAID, code_of, sentence_of
from tests.unit.test_cli_jobs import job

ROOT = Path(__file__).parents[2]
#: Exceptions whose text goes to the plugin.
_RAISED = {
    "Refused",
    "NotIdentified",
    "NotClaimed",
    "BadCredential",
    "Full",
    "No",
    "CannotOffer",
    "_unreadable",
    "_cannot",
}
#: Functions that return the text, "" for none.
_RETURNED = {"admission.py": "_", "pilot_end.py": "reason_against", "trust.py": "claimed"}
_PLACES = ("sandbox_manager/*.py", "stageout/handoff/*.py", "stageout/plugin/carried.py")


def _text(node: ast.AST | None) -> str:
    """The constant parts of a string; "" for what is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "1" for part in node.values)
    return ""


def _sentences() -> Iterator[tuple[str, str]]:
    for path in (path for places in _PLACES for path in ROOT.glob(places)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _RAISED:
                yield path.name, _text(node.args[0])
            if isinstance(node, ast.FunctionDef) and node.name.startswith(_RETURNED.get(path.name, "?")):
                yield from ((path.name, text) for back in ast.walk(node) for text in _returned(back))


def _returned(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Return):
        value = node.value
        yield from map(_text, (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,))


def test_every_sentence_of_a_refusal_has_a_code() -> None:
    found = {(place, text) for place, text in _sentences() if len(text) > 20}
    assert len(found) > 50
    assert [(place, text) for place, text in sorted(found) if code_of(text) == "Failed"] == []


def test_codes_are_names_of_attributes_and_differ() -> None:
    codes = [cause.code for cause in CAUSES]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch("[A-Z][A-Za-z]+", code) for code in codes)


def test_a_sentence_of_the_table_has_its_own_code() -> None:
    assert {cause.code: code_of(cause.sentence) for cause in CAUSES} == {cause.code: cause.code for cause in CAUSES}


def test_every_code_of_the_transform_is_in_the_table_and_on_the_page() -> None:
    text = (ROOT / "condor_config.d/20-stageout-ap.conf").read_text()
    (line,) = (line for line in text.splitlines() if "EVALSET StageOutSynchronousCode" in line)
    assert all(map(sentence_of, re.findall('"([A-Za-z]+)"', line)))
    page = (ROOT / "docs/SYNCHRONOUS.md").read_text().partition("## Codes")[2]
    assert Counter(re.findall(r"^\| `(\w+)` \|", page, re.M)) == Counter(cause.code for cause in CAUSES)


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("the job of alice@x runs as slot1, an account that other owners may share", "SlotUser"),
        ("the data slot of slot1_1@ep is full (STAGEOUT_DATA_SLOT_DEPTH)", "SlotFull"),
        ("output of x would take 9 MB of 8 MB (STAGEOUT_OWNER_QUOTA_MB)", "OwnerQuota"),
        ("the sandbox manager has too many hand-offs waiting", "Busy"),
        ("hand-off failed: KeyError: 'x'", "Failed"),
    ],
)
def test_reasons(reason: str, code: str) -> None:
    assert code_of(reason) == code


def record(*reasons: str | None, run: int = 1) -> ClassAd:
    """An OUTPUT record of a run; None for a plugin that says nothing."""
    ads = [ClassAd({} if one is None else {"DeveloperData": ClassAd({"StageOutSynchronous": one})}) for one in reasons]
    return ClassAd({"NumShadowStarts": run, "OutputPluginResultList": ads})


SYNCHRONOUS: dict[str, Any] = {"TransferOutputStats": None}


def test_the_reason_of_the_last_run_counts() -> None:
    records = [
        record("the sandbox manager is stopping"),
        record(None, "the job of a runs as b, an account that other owners may share", run=2),
    ]
    assert why(job(**SYNCHRONOUS, NumShadowStarts=2), records).code == "SlotUser"


def test_a_job_that_was_left_out_says_so_before_it_runs() -> None:
    known = why(job(JobStatus=1, StageOutGuard=False, StageOutSynchronousCode="DagNode", **SYNCHRONOUS), [])
    assert known == Why("DagNode", sentence_of("DagNode"))
    assert why(job(StageOutSynchronousCode="DagNode"), []) == Why(), "a marked job's attribute is not the transform's"


def test_a_plugin_that_says_nothing_and_jobs_without_url_output() -> None:
    assert why(job(**SYNCHRONOUS), [record(None)]).code == NOT_SAID
    assert why(job(**SYNCHRONOUS), []) == Why()
    assert why(job(), [record("x")]) == Why(), "it was handed off"


def test_status_and_history_show_code_and_sentence() -> None:
    one = job(**SYNCHRONOUS)
    reason = "the data slot of slot1_1@ep is full (STAGEOUT_DATA_SLOT_DEPTH)"
    records = [record(reason)]
    (row,) = explained(merge([one], []), {str(one.id): why(one, records)})
    for lines in (job_details(row, 0.0), details(entry(one, records))):
        text = "\n".join(lines)
        assert reason in text and "SlotFull" in text and "Synchronous" in text
    (shown,) = as_json([row], 0.0)["jobs"]
    assert (shown["synchronous_code"], shown["reason"]) == ("SlotFull", reason)


def test_records_are_read_once_while_one_watches() -> None:
    asked = []

    def output_records(wanted: Any) -> list[ClassAd]:
        asked.append(str(wanted))
        return [
            ClassAd({**record("the sandbox manager is stopping"), "ClusterId": 12, "ProcId": proc}) for proc in (0, 1)
        ]

    jobs = [job(**SYNCHRONOUS, ProcId=proc, GlobalJobId=f"ap#12.{proc}#1") for proc in (0, 1, 2)]
    queue: Any = SimpleNamespace(jobs=lambda wanted: (jobs, []), output_records=output_records)
    causes: dict[Any, Why] = {}
    for _ in range(2):
        rows = status._look(queue, SimpleNamespace(), [jobs[0].id], None, causes).rows  # type: ignore[arg-type]
        assert [row.synchronous_code for row in rows] == ["Stopping", "Stopping", ""]
    assert asked == ["12"]
