"""``stageout explain``: what is said of a job, and that what is not known is said to be unknown."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stageout.cli import explain, submit_file
from stageout.cli.exits import CommandError, Unavailable, UnknownJob, UsageError
from stageout.cli.explain import OK, PROBLEM, UNKNOWN, Line, Subject, decision
from stageout.cli.explain_job import story
from stageout.cli.jobs import Job
from stageout.cli.main import main
from stageout.cli.outputs import Output, outputs_of
from stageout.core.classads import ClassAd
from stageout.core.config import mapping_settings
from stageout.core.reasons import CAUSES, Cause
from stageout.wire.custody import FlowReport, RefusalReport, Report, ServerReport
from tests.unit.test_cli_jobs import job

NOTHING = mapping_settings({})


def subject(**attributes: Any) -> Subject:
    return Subject("a job", ClassAd(attributes), True)


def test_outputs_are_named_with_their_urls() -> None:
    ad = ClassAd(
        {
            "OutputDestination": "davs://h/d",
            "TransferOutput": "a, b,c",
            "TransferOutputRemaps": "b = https://other/x ; c=kept.txt",
        }
    )
    assert outputs_of(ad) == [Output("b", "https://other/x"), Output("a", "davs://h/d/a")]
    assert outputs_of(ClassAd({"OutputDestination": "davs://h/d/"})) == [Output("", "davs://h/d/")]
    assert outputs_of(ClassAd({"TransferOutput": "a"})) == []
    assert outputs_of(ClassAd({"TransferOutputRemaps": r"a\=b = http://h/x\;y"})) == [Output(r"a\=b", r"http://h/x\;y")]


OUT = [Output("a", "davs://h/d/a")]


@pytest.mark.parametrize(
    ("given", "outputs", "kind", "code"),
    [
        ({"StageOutGuard": True}, OUT, "hand-off", ""),
        ({"StageOutGuard": False, "StageOutSynchronousCode": "DagNode"}, OUT, "synchronous", "DagNode"),
        ({"StageOutGuard": False}, OUT, "synchronous", "NotMarked"),
        ({"StageOutGuard": True, "TransferPlugins": "davs=my_plugin"}, OUT, "synchronous", "Plugin"),
        ({"StageOutGuard": True, "TransferPlugins": "a=b; c, davs=my_plugin"}, OUT, "synchronous", "Plugin"),
        ({"StageOutGuard": True}, [], "none", ""),
    ],
)
def test_the_decision_is_the_access_point_s(given: dict[str, Any], outputs: list[Output], kind: str, code: str) -> None:
    found = decision(subject(**given), outputs)
    assert (found[:2], bool(found[2])) == ((kind, code), True)


def test_without_transforms_nothing_is_promised() -> None:
    assert decision(Subject("a job", ClassAd(), False), OUT)[0] == "unknown"


def slot(machine: str, methods: str, manager: str = "") -> ClassAd:
    more = {"StageOutManager": manager} if manager else {}
    return ClassAd({"Machine": machine, "HasFileTransferPluginMethods": methods, **more})


class Silent:
    """A pool or queue that does not answer, or answers with what it was given."""

    def __init__(self, *ads: ClassAd, heard_at: float = 0) -> None:
        self._ads, self._heard_at = list(ads), heard_at

    def name(self) -> str:
        return "schedd"

    def ads(self, *_: object) -> list[ClassAd]:
        if not self._ads:
            raise Unavailable("nobody answers")
        return self._ads

    def agent_heard_at(self, _: str) -> float:
        return self._heard_at

    delivered_to = ads


def lines(outputs: list[Output], pool: Silent, own: dict[str, str] | None = None) -> list[Line]:
    return list(explain._pool_lines(outputs, pool, pool, own or {}))  # type: ignore[arg-type]


def test_a_plugin_of_the_job_itself_counts() -> None:
    plugin, _ = lines(OUT, Silent(slot("e1", "http")), {"davs": "my_plugin"})
    assert plugin == Line("plugin", OK, "davs: the job brings my_plugin (transfer_plugins)")


@pytest.mark.parametrize(("asks", "is_file", "kind", "number"), [
    (False, True, "hand-off", 1), (True, True, "hand-off", 0), (False, False, "hand-off", 0), (False, True, "none", 0),
])  # fmt: skip
def test_a_submit_file_may_be_a_node_of_a_dag(asks: bool, is_file: bool, kind: str, number: int) -> None:
    found = list(explain._dag_lines(Subject("a file", ClassAd(), True, is_file, asks), kind))
    assert len(found) == number
    assert all(line.name == "dag" and "DagNode" in line.text and "StageOutAsync = true" in line.text for line in found)


def test_a_directory_with_the_name_of_a_job_is_no_submit_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("1234").mkdir()
    queue: Any = type("Empty", (Silent,), {"first_ad": lambda *_: None, "ended_ad": lambda *_: None})()
    with pytest.raises(UnknownJob):
        explain._subject("1234", NOTHING, queue)


HELD_BY_US = {"JobStatus": 5, "HoldReasonCode": 12, "HoldReasonSubCode": 20033, "HoldReason": "403; retry"}
HELD_BY_HTCONDOR = {"JobStatus": 5, "HoldReasonCode": 12, "HoldReasonSubCode": 2, "HoldReason": "no such file"}
SENT_NOW = {"JobStatus": 6, "TransferOutputStats": None, "RemoteHost": "slot1_1@ep1"}


@pytest.mark.parametrize(
    ("facts", "in_queue", "kind", "state", "failed", "is_open"),
    [
        ({**HELD_BY_US, "StageOutState": "Failed", "StageOutRun": 1}, True, "hand-off", "failed", True, True),
        ({"StageOutState": "Moving"}, True, "hand-off", "sending", False, True),
        ({"StageOutState": "Delivered", "StageOutRun": 1}, True, "hand-off", "delivered", False, False),
        ({"StageOutState": "Delivered", "StageOutRun": 1}, False, "hand-off", "delivered", False, False),
        ({"StageOutState": "Moving"}, False, "hand-off", "sending", True, False),
        ({"TransferOutputStats": None}, True, "synchronous", "synchronous", False, False),
        ({"TransferOutputStats": None, "JobStatus": 3}, False, "unknown", "removed", True, False),
        ({**HELD_BY_HTCONDOR, "StageOutState": "Moving", "StageOutRun": 1}, True, "hand-off", "sending", False, True),
        (
            {**HELD_BY_HTCONDOR, "StageOutState": "Delivered", "StageOutRun": 1},
            True,
            "hand-off",
            "delivered",
            False,
            False,
        ),
        (SENT_NOW, True, "synchronous", "transferring output", False, True),
    ],
)
def test_of_a_job_that_has_ended_it_says_what_happened(
    facts: dict[str, Any], in_queue: bool, kind: str, state: str, failed: bool, is_open: bool
) -> None:
    one = replace(job(**facts), in_queue=in_queue)
    found = story(one, OUT, *daemons_of(one))
    assert found is not None
    assert (found.delivery[0], found.state, found.failed, found.open) == (kind, state, failed, is_open)
    text = " ".join([found.delivery[2], *(text for _, text in found.facts)])
    assert not re.search(r"\bwill\b|if the sandbox manager|after the job's end", text)
    assert ("3 files, 3.0 MB were handed off" in text) is (kind == "hand-off")
    assert ("SlotFull" in text) is (facts is SENT_NOW)


@pytest.mark.parametrize("facts", [{"JobStatus": 1}, {"JobStatus": 2}, {"JobStatus": 5, "HoldReasonCode": 1}])
def test_of_a_job_that_has_not_ended_nothing_happened_yet(facts: dict[str, Any]) -> None:
    one = job(TransferOutputStats=None, **facts)
    assert story(one, OUT, *daemons_of(one)) is None


def daemons_of(one: Job) -> tuple[Any, Any]:
    """A schedd with this job, and a collector whose node has refused the job's hand-off."""
    refusal = RefusalReport(one.global_id, 1, "SlotFull", "the data slot is full", one.user)
    queue = SimpleNamespace(
        jobs=lambda wanted: ([one] if one.in_queue else [], []), history=lambda wanted: [one],
        output_records=lambda wanted: [], name=lambda: "ap",
    )  # fmt: skip
    pool = SimpleNamespace(
        reports=lambda managers: [Report("ep1", "", 1, 1, {}, 0, refusals=(refusal,))],
        managers_of=lambda slots: {"ep1"}, heard=set, agent_heard_at=lambda schedd: int(time.time()),
    )  # fmt: skip
    return queue, pool


def test_machines_and_managers_of_the_pool_are_counted() -> None:
    slots = [slot("e1", "http,davs", "m1"), slot("e1", "http,davs", "m1"), slot("e2", "DAVS"), slot("e3", "http")]
    plugin, agent = lines(OUT, Silent(*slots, heard_at=time.time() - 3))
    assert (plugin.level, agent.level) == (OK, OK)
    assert "davs: 2 of 3 machines have one, 1 of them a sandbox manager" in plugin.text
    plugin, agent = lines([Output("a", "tape://h/a")], Silent(*slots))
    assert (plugin.level, agent.level) == (PROBLEM, PROBLEM)
    assert "none of 3 machines has a plugin for tape://" in plugin.text
    assert "NoAgent" in agent.text


@pytest.mark.parametrize("scheme", ["osdf", "pelican", "box", "tape", "root"])
def test_a_scheme_that_no_plugin_of_stageout_moves(scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A URL in the place of the file, a pool without a plugin for it, and a pool with a third-party one."""
    assert main(["explain", f"{scheme}:///x"]) == 1
    said = capsys.readouterr().err
    assert f"{scheme}:///x: no plugin of stageout moves {scheme}:// URLs" in said
    assert "Choose a URL of these" in said and "stageout wrap" in said
    outputs = [Output("a", f"{scheme}:///x")]
    line, _ = lines(outputs, Silent(slot("e1", "http")))
    assert line.level == PROBLEM and "stageout wrap" in line.text
    line, _ = lines(outputs, Silent(slot("e1", f"http,{scheme}")))
    assert line.level == UNKNOWN and "1 of 1 machines have one" in line.text and "stageout wrap" in line.text


@pytest.mark.parametrize("url", ["https://h/x", "token+davs://h/x", "globus://c/x"])
def test_a_url_that_can_be_tried_is_no_submit_file(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", url]) == 64
    assert f"stageout check {url}" in capsys.readouterr().err


def test_a_collector_that_does_not_answer_leaves_it_unknown() -> None:
    assert [line.level for line in lines(OUT, Silent())] == [UNKNOWN]


def test_servers_are_tried_and_nothing_is_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        (line,) = explain._server_lines(
            [Output("a", f"davs://127.0.0.1:{port}/a"), Output("b", f"davs://127.0.0.1:{port}/b")]
        )
        assert line.level == OK
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(1) == b""
    (line,) = explain._server_lines([Output("a", f"davs://127.0.0.1:{port}/a")])
    assert (line.level, f"127.0.0.1:{port}" in line.text) == (PROBLEM, True)
    (line,) = explain._server_lines([Output("a", "file:///a"), Output("fallback", "file:///b")])
    assert "a path of the node that runs the job: use it only if all nodes mount" in line.text
    for url in ("file:///a", "globus://uuid/a", "davs://h:port/a"):
        assert [line.level for line in explain._server_lines([Output("a", url)])] == [UNKNOWN]


def credential(ad: ClassAd, url: str, folder: Path | None = None) -> Line:
    settings = mapping_settings({"SEC_CREDENTIAL_DIRECTORY_OAUTH": str(folder)}) if folder else NOTHING
    (line,) = explain._credential_lines(ad, [Output("a", url)], settings)
    return line


def test_credentials_and_their_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("_CONDOR_CREDS", raising=False)
    url = "cms+davs://h/a"
    missing = credential(ClassAd(), url)
    assert (missing.level, "use_oauth_services = cms" in missing.text) == (PROBLEM, True)
    for prefix, name in (("my_service", "my_service"), ("my_service.handle", "my_service")):
        assert credential(ClassAd(), f"{prefix}+davs://h/a").text.endswith(f"add use_oauth_services = {name}")
    wants = ClassAd({"OAuthServicesNeeded": "other,cms"})
    assert credential(wants, url).level == UNKNOWN
    import pwd

    kept = tmp_path / pwd.getpwuid(os.geteuid()).pw_name
    kept.mkdir()
    for end_s, level in ((7200, OK), (-7200, PROBLEM)):
        claims = base64.urlsafe_b64encode(json.dumps({"exp": time.time() + end_s}).encode()).decode().rstrip("=")
        (kept / "cms.use").write_text(f"e30.{claims}.c2ln")
        line = credential(wants, url, tmp_path)
        assert (line.level, "the token of cms" in line.text) == (level, True)
    proxy = ClassAd({"x509userproxy": "/tmp/x509up", "x509UserProxyExpiration": int(time.time()) + 60})
    assert credential(proxy, "davs://h/a").level == OK
    assert credential(ClassAd({"x509userproxy": "/tmp/x509up"}), "davs://h/a").level == UNKNOWN


def test_the_time_comes_from_enough_jobs_or_is_unknown() -> None:
    def outlook(*seconds: int) -> Line:
        queue = Silent(*(ClassAd({"Seconds": one, "Bytes": 10**6}) for one in seconds))
        return explain._time_line(OUT, queue)  # type: ignore[arg-type]

    assert (outlook(5, 6).level, "not enough data" in outlook(5, 6).text) == (UNKNOWN, True)
    assert (outlook().level, outlook().text) == (UNKNOWN, "nobody answers")
    line = outlook(10, 20, 90)
    assert line.level == OK
    assert line.text == "20s after the job's end (median of 3 jobs to this server, 10s to 1m30s, 1.0 MB each)"


class Reporting(Silent):
    """A collector with managers' reports."""

    def __init__(self, *reports: Report, slots: Sequence[ClassAd] = (), heard_at: float = 0) -> None:
        super().__init__(*slots, heard_at=heard_at)
        self._reports = list(reports)

    def reports(self) -> list[Report]:
        return self._reports


def test_nodes_that_send_to_the_server_tell_how_much_moves_at_once() -> None:
    def lines_of(*reports: Report) -> list[Line]:
        return list(explain._node_lines(OUT, Reporting(*reports)))  # type: ignore[arg-type]

    assert [(line.name, line.level) for line in lines_of()] == [("streams", UNKNOWN)]
    flows = (FlowReport("davs://h", 3 * 10**6, limit=4), FlowReport("davs://other", 1, limit=9))
    busy = Report("m1", "", 1, 1, {}, 0, flows=flows)
    idle = Report("m2", "", 1, 1, {}, 0, flows=(FlowReport("davs://h:443", limit=8),))
    (line,) = lines_of(busy, idle)
    assert line == Line(
        "streams", OK, "2 nodes sending to the server now: 4 to 8 files at once for each node, 3.0 MB/s (median)"
    )
    away = ServerReport("davs://h", "open", "no route to host", 3, 1, 0)
    problem, _ = lines_of(Report("m3", "", 1, 1, {}, 0, servers=(away,)))
    assert problem == Line("server", PROBLEM, "1 node cannot reach davs://h: no route to host")


def tool(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_a_submit_file_that_htcondor_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.sub"
    file.touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CommandError, match="condor_submit is not installed here"):
        submit_file.first_job(file, mapping_settings({"BIN": "/none"}))
    tool(tmp_path, "condor_submit", "echo 'Dry-Run job(s)'; echo 'ERROR: no executable' >&2; exit 1")
    with pytest.raises(CommandError, match=r"does not take .*a\.sub: ERROR: no executable"):
        submit_file.first_job(file, NOTHING)
    with pytest.raises(UsageError, match=r"neither a submit file nor a job"):
        submit_file.first_job(tmp_path / "none.sub", NOTHING)


def test_only_the_first_job_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.sub"
    file.touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    text = r'Dry-Run job(s)\n::checked\nClusterId=1\nProcId=0\nArgs="a = b"\n.\nProcId=1\n.\n2 job(s) dry-run'
    tool(tmp_path, "condor_submit", f"printf '{text}'")
    assert submit_file.first_job(file, NOTHING) == 'ClusterId=1\nProcId=0\nArgs="a = b"\n'
    assert submit_file.transformed("ClusterId=1\n", NOTHING) is None


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("exit 3", "it ended with status 3"),
        ("echo 'bad  rule' >&2; exit 1", "bad rule"),
        ("echo 'ClusterId=1'", "status 0"),
    ],
)
def test_job_transforms_that_are_not_applied(
    script: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = mapping_settings({"JOB_TRANSFORM_NAMES": "Gone, StageOut", "JOB_TRANSFORM_StageOut": "SET x 1"})
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    tool(tmp_path, "condor_transform_ads", script)
    with pytest.raises(CommandError, match=f"does not apply the job transforms of this machine: .*{problem}"):
        submit_file.transformed("ClusterId=1\n", settings)
    tool(tmp_path, "condor_transform_ads", 'cat; echo StageOutGuard=true; echo "Names=$2"')
    assert submit_file.transformed("ClusterId=1\n", settings) == "ClusterId=1\nStageOutGuard=true\nNames=StageOut\n"


@pytest.mark.parametrize(("methods", "status"), [("http,davs", 0), ("http", 1)])
def test_the_status_says_whether_a_problem_was_found(
    methods: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ad = ClassAd({"TransferOutput": "a", "OutputDestination": "davs://127.0.0.1:1/d", "StageOutGuard": True})
    monkeypatch.setattr(explain, "load_bindings", lambda: None)
    monkeypatch.setattr(explain, "condor_settings", lambda: NOTHING)
    monkeypatch.setattr(explain, "_server_lines", lambda _: [])
    monkeypatch.setattr(explain, "_subject", lambda *_: Subject("a file", ad, True, is_file=True))
    monkeypatch.setattr(explain, "Queue", lambda *_: Silent())
    pool = Reporting(slots=[slot("e1", methods, "m@e1")], heard_at=time.time())
    monkeypatch.setattr(explain, "Pool", lambda *_: pool)
    assert main(["explain", "a file"]) == status
    shown = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[3:]]
    assert shown == [
        ["delivery", "ok"],
        ["dag", "ok"],
        ["plugin", "problem" if status else "ok"],
        ["agent", "ok"],
        ["streams", "unknown"],
        ["time", "unknown"],
    ]
    assert main(["explain", "a file", "--json"]) == status
    facts = json.loads(capsys.readouterr().out)
    assert [[item["name"], item["level"]] for item in facts["lines"]] == shown


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.name)
def test_every_reason_is_explained_by_its_name_and_its_numbers(
    cause: Cause, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(explain, "load_bindings", lambda: None)
    monkeypatch.setattr(explain, "condor_settings", lambda: NOTHING)
    monkeypatch.setattr(explain, "Queue", lambda *_: NoJobs())
    kind = cause.kind
    codes = [cause.name, cause.name.upper(), *([str(kind.code), str(cause.hold_subcode)] if kind else [])]
    for code in codes:
        assert main(["explain", code]) == 0
        first, who, action = capsys.readouterr().out.splitlines()
        assert first.startswith(f"{cause.name} (error code {kind.code}," if kind else f"{cause.name}: ")
        assert first.endswith(f": {cause.happened}")
        assert (who.split(None, 1)[1], action.split(None, 3)[3]) == (cause.actor.value, cause.action)
        assert main(["explain", code, "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert (facts["code"], facts["reason"], facts["what_to_do"]) == (cause.name, cause.happened, cause.action)
        assert facts.get("hold_subcode", 0) == cause.hold_subcode


class NoJobs(Silent):
    """A queue whose jobs have other numbers."""

    def first_ad(self, *_: object) -> None:
        return None

    ended_ad = first_ad


def test_a_number_that_is_neither_job_nor_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(explain, "load_bindings", lambda: None)
    monkeypatch.setattr(explain, "condor_settings", lambda: NOTHING)
    monkeypatch.setattr(explain, "Queue", lambda *_: NoJobs())
    assert main(["explain", "999999"]) != 0
    assert "999999: no such job" in capsys.readouterr().err
