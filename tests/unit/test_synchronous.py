"""Why a transfer is synchronous: the table of codes, and that every refusal of plugins and manager has one."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sandbox_manager.custody.credentials import BadCredential
from sandbox_manager.custody.orders import Refused
from sandbox_manager.custody.spool import NotClaimed
from sandbox_manager.intake.client_limits import Full
from sandbox_manager.intake.peers import NotIdentified
from stageout.cli import status
from stageout.cli.history import details, entry
from stageout.cli.main import main
from stageout.cli.render import job_details
from stageout.cli.rows import as_json, explained, merge
from stageout.cli.why import Why, why
from stageout.core.classads import ClassAd
from stageout.core.errors import ErrorClass
from stageout.core.reasons import CAUSES, FAILURES, REFUSALS, Actor, named, sentence_of
from stageout.core.synchronous import FAILED, NO_REASON, NOT_SAID, NotTaken, Reason
from stageout.handoff.links import CannotOffer
from stageout.wire.custody import RefusalReport, Report
from stageout.wire.handoff import refusal, refused_code
from tests.unit.test_cli_jobs import job

ROOT = Path(__file__).parents[2]
CODES = set(REFUSALS)
_PLACES = ("sandbox_manager/**/*.py", "stageout/handoff/*.py", "stageout/plugin/*.py")
#: Calls that refuse a hand-off -> position of the code among their arguments.
_REFUSING = {
    "Refused": 1,
    "NotIdentified": 1,
    "NotClaimed": 1,
    "BadCredential": 1,
    "Full": 1,
    "HandoffRefused": 1,
    "Reason": 0,
}


def _refusals() -> Iterator[tuple[str, str, ast.expr | None]]:
    """Place, name and code of each call that refuses."""
    for path in (path for places in _PLACES for path in ROOT.glob(places)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _REFUSING:
                at = _REFUSING[node.func.id]
                code = node.args[at] if len(node.args) > at else None
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.func.id, code


def test_every_refusal_has_a_code_of_the_table() -> None:
    found = list(_refusals())
    assert len(found) > 50
    literals = [(place, code.value) for place, _, code in found if isinstance(code, ast.Constant) and code.value]
    assert [(place, code) for place, code in literals if code not in CODES] == []
    # A custody's refusal is a Reason, which brings its code; the other classes have one of their own.
    without = {ast.unparse(ast.parse(_line(place))) for place, name, code in found if name == "Refused" and not code}
    assert without == {
        "raise Refused(reason)", "raise Refused(reservation.reason)", "raise Refused(sending_s.reason)"
    }  # fmt: skip
    assert [place for place, name, code in found if name in ("HandoffRefused", "Reason") and code is None] == []


def _line(place: str) -> str:
    name, _, number = place.partition(":")
    return (ROOT / name).read_text().splitlines()[int(number) - 1].strip()


def test_classes_of_refusals_have_codes_of_the_table() -> None:
    codes = {one.__name__: one.code for one in (NotIdentified, NotClaimed, BadCredential, Full, CannotOffer)}
    assert set(codes.values()) < CODES - {FAILED}
    assert {one.__name__ for one in NotTaken.__subclasses__()} == codes.keys() - {"CannotOffer"} | {"Refused"}


def test_a_refusal_takes_the_code_of_its_reason() -> None:
    assert Refused(Reason("SlotFull", "full")).code == "SlotFull"
    assert (NotIdentified("x").code, NotIdentified("x", "SlotUser").code) == ("Unidentified", "SlotUser")
    assert (NotTaken("x").code, bool(NO_REASON)) == (FAILED, False)


@pytest.mark.parametrize(
    ("message", "code"),
    [({"code": "SlotFull"}, "SlotFull"), ({}, ""), ({"code": 7}, ""), ({"code": "a b"}, ""), ({"code": "a" * 99}, "")],
)
def test_the_code_of_a_managers_answer(message: dict[str, Any], code: str) -> None:
    """Older managers send none."""
    assert refused_code({"op": "refuse", "reason": "no", **message}) == code
    assert refused_code(refusal("no", "SlotFull")) == "SlotFull"


def test_codes_are_names_of_attributes_and_differ() -> None:
    codes = [cause.name for cause in CAUSES if cause.kind is None]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch("[A-Z][A-Za-z]+", code) for code in codes)


def test_every_code_of_the_transform_is_in_the_table_and_on_the_page() -> None:
    text = (ROOT / "condor_config.d/20-stageout-ap.conf").read_text()
    (line,) = (line for line in text.splitlines() if "EVALSET StageOutSynchronousCode" in line)
    assert all(map(sentence_of, re.findall('"([A-Za-z]+)"', line)))
    page = (ROOT / "docs/user/synchronous.md").read_text().partition("## Codes")[2]
    assert Counter(re.findall(r"^\| `(\w+)` \|", page, re.M)) == Counter(list(REFUSALS))


def record(*reasons: tuple[str, str] | None, run: int = 1) -> ClassAd:
    """An OUTPUT record of a run: codes ("" for none) and sentences; None for a plugin that says nothing."""
    ads = [ClassAd({} if one is None else {"DeveloperData": _told(*one)}) for one in reasons]
    return ClassAd({"NumShadowStarts": run, "OutputPluginResultList": ads})


def _told(code: str, sentence: str) -> ClassAd:
    return ClassAd({"StageOutSynchronous": sentence, **({"StageOutSynchronousCode": code} if code else {})})


STOPPING = ("Stopping", "the sandbox manager is stopping")
SYNCHRONOUS: dict[str, Any] = {"TransferOutputStats": None}


def test_the_reason_of_the_last_run_counts() -> None:
    records = [
        record(STOPPING),
        record(None, ("SlotUser", "the job of a runs as b, an account that other owners may share"), run=2),
    ]
    assert why(job(**SYNCHRONOUS, NumShadowStarts=2), records).code == "SlotUser"


def test_a_plugin_that_sends_no_code() -> None:
    assert why(job(**SYNCHRONOUS), [record(("", "the data slot is full"))]) == Why(FAILED, "the data slot is full")


def test_a_job_that_was_left_out_says_so_before_it_runs() -> None:
    known = why(job(JobStatus=1, StageOutGuard=False, StageOutSynchronousCode="DagNode", **SYNCHRONOUS), [])
    assert known == Why("DagNode", sentence_of("DagNode"))
    assert why(job(StageOutSynchronousCode="DagNode"), []) == Why(), "a marked job's attribute is not the transform's"


def test_a_plugin_that_says_nothing_and_jobs_without_url_output() -> None:
    assert why(job(**SYNCHRONOUS), [record(None)]).code == NOT_SAID
    assert why(job(**SYNCHRONOUS), []) == Why()
    assert why(job(), [record(STOPPING)]) == Why(), "it was handed off"


def test_status_and_history_show_code_and_sentence() -> None:
    one = job(**SYNCHRONOUS)
    reason = "the data slot of slot1_1@ep is full (STAGEOUT_DATA_SLOT_DEPTH)"
    records = [record(("SlotFull", reason))]
    (row,) = explained(merge([one], []), {str(one.id): why(one, records)})
    for lines in (job_details(row, 0.0), details(entry(one, records))):
        text = "\n".join(lines)
        assert reason in text and "SlotFull" in text and "synchronous" in text
    (shown,) = as_json([row], 0.0)["jobs"]
    assert (shown["synchronous_code"], shown["reason"]) == ("SlotFull", reason)


@pytest.mark.parametrize(
    ("running", "shown"),
    [
        ({"JobStatus": 2, "TransferringOutput": True}, "SlotFull"),
        ({"JobStatus": 6}, "SlotFull"),
        ({"JobStatus": 2}, ""),
        ({"JobStatus": 6, "NumShadowStarts": 2}, ""),
        ({"JobStatus": 6, "StageOutGuard": False}, ""),
    ],
)
def test_a_job_whose_output_is_being_sent_says_why_its_node_refused_it(running: dict[str, Any], shown: str) -> None:
    """The records of the access point have the reason only after the transfer, which may take hours."""
    one = job(RemoteHost="slot1_1@ep1", **SYNCHRONOUS, **running)
    reason = "the data slot of slot1_1@ep is full (STAGEOUT_DATA_SLOT_DEPTH)"
    refusals = [RefusalReport(name, 1, "SlotFull", reason, one.user) for name in ("ap#1.0#1", one.global_id)]
    refusals.append(RefusalReport(one.global_id, 1, "Disk", "of another owner's job", "mallory@x"))
    report = replace(Report("ep1", "", 5, 0, {}, 0), refusals=tuple(refusals))
    pool: Any = SimpleNamespace(
        managers_of=lambda slots: {"ep1"} if slots == {"slot1_1@ep1"} else set(),
        reports=lambda managers: [report] if managers == {"ep1"} else [],
    )
    queue: Any = SimpleNamespace(jobs=lambda wanted: ([one], []))
    (row,) = status.look(queue, pool, [one.id], None, {}).rows
    assert (row.synchronous, row.synchronous_code, row.reason) == (False, shown, reason if shown else "")
    text = "\n".join(job_details(row, 0.0))
    assert ("being transferred while the job holds its slot" in text) is bool(shown)
    assert ("transferring output" in text) is (running != {"JobStatus": 2})


def test_records_are_read_once_while_one_watches() -> None:
    asked = []

    def output_records(wanted: Any) -> list[ClassAd]:
        asked.append(str(wanted))
        return [ClassAd({**record(STOPPING), "ClusterId": 12, "ProcId": proc}) for proc in (0, 1)]

    jobs = [job(**SYNCHRONOUS, ProcId=proc, GlobalJobId=f"ap#12.{proc}#1") for proc in (0, 1, 2)]
    queue: Any = SimpleNamespace(jobs=lambda wanted: (jobs, []), output_records=output_records)
    causes: dict[Any, Why] = {}
    for _ in range(2):
        rows = status.look(queue, SimpleNamespace(), [jobs[0].id], None, causes).rows  # type: ignore[arg-type]
        assert [row.synchronous_code for row in rows] == ["Stopping", "Stopping", ""]
    assert asked == ["12"]


def _trees(*places: str) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(path for place in places for path in ROOT.glob(place)):
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def test_every_row_of_the_table_is_used() -> None:
    """A refusal's code stands where somebody refuses, an error class where somebody fails."""
    names, kinds = set(), set()
    for name, tree in _trees("stageout/**/*.py", "sandbox_manager/**/*.py", "schedd_agent/*.py"):
        if name in ("stageout/core/reasons.py", "stageout/core/errors.py"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "ErrorClass":
                kinds.add(node.attr)
    line = (ROOT / "condor_config.d/20-stageout-ap.conf").read_text().partition("EVALSET StageOutSynchronousCode")[2]
    names |= set(re.findall('"([A-Za-z]+)"', line.partition("\n")[0]))
    assert [code for code in REFUSALS if code not in names] == []
    assert [kind.name for kind in ErrorClass if kind.name not in kinds] == []


def test_every_row_says_who_can_act_and_what_to_do() -> None:
    assert set(FAILURES) == set(ErrorClass)
    assert len({cause.name.lower() for cause in CAUSES}) == len(CAUSES)
    for cause in CAUSES:
        assert cause.happened and cause.steps, cause.name
        assert cause.steps.startswith("nothing:") == (cause.actor is Actor.NOBODY), cause.name


#: Modules that refuse a hand-off after its peer is known -> codes. The rest is policy, and only admission asks it.
_BEYOND_POLICY = {
    "sandbox_manager/intake/listener.py": {
        "Version",
        "TooMany",
        "Overrun.code",
        "Disk",
        "ManagerSlow",
        "OtherFilesystem",
    },
    "sandbox_manager/custody/orders.py": {"OtherRun"},
}
#: Modules that answer a question of admission with a reason.
_ASKED = {
    "sandbox_manager/intake/admission.py", "sandbox_manager/report/trust.py",
    "sandbox_manager/custody/redirects.py",
}  # fmt: skip
_IDENTITY = {f"sandbox_manager/intake/{name}.py" for name in ("identity", "peers", "startd")}


def test_policy_refuses_in_admission_only() -> None:
    refused: dict[str, set[str]] = {}
    reasons, strangers = set(), set()
    for name, tree in _trees("sandbox_manager/**/*.py"):
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id == "Refused" and name in _BEYOND_POLICY:
                codes = [ast.unparse(code).strip("'") for code in node.args[1:2]]
                refused.setdefault(name, set()).update(codes)
            elif node.func.id == "Refused":
                refused[name] = {"?"}
            elif node.func.id == "Reason":
                reasons.add(name)
            elif node.func.id == "NotIdentified":
                strangers.add(name)
    assert refused == _BEYOND_POLICY
    assert reasons == _ASKED
    assert strangers == _IDENTITY


def test_the_pipeline_says_where_the_rest_refuses() -> None:
    said = ast.get_docstring(ast.parse((ROOT / "sandbox_manager/pipeline.py").read_text())) or ""
    first = said.partition("2. ")[0]
    for name in ("intake/admission.py", "intake/identity.py", *(name.partition("/")[2] for name in _BEYOND_POLICY)):
        assert f"``{name}``" in first, name


@pytest.mark.parametrize("text", ["CONNECT_FAILED", "connect_failed", "20020", "20"])
def test_explain_prints_a_row_of_the_table(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    cause = named(text)
    assert cause is FAILURES[ErrorClass.CONNECT_FAILED]
    assert main(["explain", cause.name]) == 0
    shown = capsys.readouterr().out
    assert all(one in shown for one in ("20020", cause.actor.value, cause.happened, cause.action))


def test_explain_prints_a_refusal_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--json", "slotfull"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["code"], shown["who"], "hold_subcode" in shown) == ("SlotFull", Actor.NODE.value, False)
    assert shown["what_to_do"] == REFUSALS["SlotFull"].action
    assert named("NoSuchCode") is None
