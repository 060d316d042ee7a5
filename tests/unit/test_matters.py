"""The one list of matters: each kind from what reports and notices say, with age, owner and next step."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from stageout.core.errors import ErrorClass
from stageout.core.metrics import METRICS, Readings
from stageout.core.reasons import FAILURES
from stageout.wire import matters as module
from stageout.wire.custody import (
    AGENT_AD,
    BadPayload,
    FlowReport,
    RefusalReport,
    RefusedIdentity,
    Report,
    SandboxReport,
    ServerReport,
    SilentManager,
    read_report,
)
from stageout.wire.matters import Kind, Matter, NodeFacts, PoolFacts, as_json, matters, put_matters
from stageout.wire.services import POLICY_AD, ROUTER_AD, Letters
from stageout_web.model import Pool, node_of
from stageout_web.views.now import attention
from stageout_web.views.page import PageContext
from tests.unit.web_site import NOW, SCHEDD, agent_ad, job_name, notice_of, policy_ad, router_ad, sandbox

HOUR_S = 3600
NODE = "manager@ep1.example.org"
_ROUTER = "router@gw.example.org:9620"


def report(*boxes: SandboxReport, **more: Any) -> Report:
    """The report of a node. :param more: fields."""
    return replace(Report(NODE, "key", 1, NOW, {}, 0, boxes), **more)


def letters(*ads: dict[str, Any]) -> Letters:
    """The letters in these ads, by default of an agent that is alive."""
    found = Letters()
    for ad in ads or (agent_ad(SCHEDD),):
        try:
            found.take(ad)
        except BadPayload:
            assert "StageOutPayload" not in ad, "a notice of this test can be read"
    return found


def facts(*reports: Report, told: Letters | None = None, heard_at: int = NOW) -> PoolFacts:
    """The knowledge of a pool with these reports."""
    nodes = [NodeFacts(one, heard_at, one.sandboxes, lambda one=one: one) for one in reports]  # type: ignore[misc]
    return PoolFacts(NOW, nodes, letters() if told is None else told)


def only(found: list[Matter]) -> Matter:
    (matter,) = found
    return matter


FULL = {"code": ErrorClass.NO_SPACE_REMOTE.code}
#: kind -> knowledge that has one matter of that kind and no other, its age, its owner, and words of it.
CASES: dict[Kind, tuple[PoolFacts, int, tuple[str, ...], tuple[str, ...]]] = {
    Kind.RETRIES: (
        facts(report(sandbox(1, "RetryWait", failing_since=NOW - 2 * HOUR_S, **FULL))), 2 * HOUR_S,
        ("alice@example.org",), ("The destination has no space.", "tries again by itself", "`stageout redirect`"),
    ),
    Kind.NAME: (
        facts(report(sandbox(1, "RetryWait", failing_since=NOW - 5, code=ErrorClass.NAME_NOT_RESOLVED.code))), 5,
        ("alice@example.org",), ("No host has the name", "`stageout redirect`"),
    ),
    Kind.FAILED: (
        facts(report(sandbox(1, "Failed", ended_at=NOW - 60, **FULL))), 60, ("alice@example.org",),
        ("1 output for store.example.org failed.", "`stageout retry`"),
    ),
    Kind.RERUNS: (
        facts(report(sandbox(1, "Lost", ended_at=NOW - 60))), 60, ("alice@example.org",), ("lost", "runs these jobs"),
    ),
    Kind.UNREACHABLE: (
        facts(report(sandbox(1, "RetryWait", failing_since=NOW - 2 * HOUR_S, code=20),
                     servers=(ServerReport("https://store.example.org", "open", "no route", 9, NOW - HOUR_S, 0),))),
        HOUR_S, ("alice@example.org",), ("store.example.org cannot be reached from 1 node",),
    ),
    Kind.UNCONFIRMED: (
        facts(report(sandbox(1, "Accepted", accepted_at=NOW - 2 * HOUR_S))), 2 * HOUR_S, ("alice@example.org",),
        (SCHEDD, "ScheddAgentLog"),
    ),
    Kind.OLD: (
        facts(report(sandbox(1, "Moving", accepted_at=NOW - 50 * HOUR_S))), 50 * HOUR_S, ("alice@example.org",),
        ("more than 1d00h", "stageout status --all"),
    ),
    Kind.PILOT_ENDS: (
        facts(report(sandbox(1, "Moving"), ends_in_s=600)), 0, ("alice@example.org",),
        ("ep1.example.org ends in 10m00s", "STAGEOUT_PILOT_ROUTER"),
    ),
    Kind.SPOOL_FULL: (
        facts(report(sandbox(1, "Moving"), full_since=NOW - 300, spool_bytes=9 << 30, spool_limit_bytes=10 << 30)), 300,
        ("alice@example.org",), ("ep1.example.org takes no new jobs", "9.7 GB of 10.7 GB"),
    ),
    Kind.SILENT_NODE: (
        facts(report(sandbox(1, "Moving")), heard_at=NOW - HOUR_S), HOUR_S, ("alice@example.org",),
        ("ep1.example.org sends no reports", "STAGEOUT_LEASE"),
    ),
    Kind.SILENT_AGENT: (
        facts(report(sandbox(1, "Moving")), told=letters(agent_ad(SCHEDD, NOW - 400))), 400, ("alice@example.org",),
        ("condor_on -daemon SCHEDD_AGENT",),
    ),
    Kind.HANDOFFS_REFUSED: (
        facts(report(handoffs=10, handoffs_refused={"SpoolFull": 3, "SlotFull": 1})), 0, (),
        ("4 of 10 hand-offs refused", "SpoolFull 3, SlotFull 1", "synchronous.md"),
    ),
    Kind.IDENTITY: (
        facts(told=letters(notice_of(SCHEDD, identities=[RefusedIdentity("eve@x", "job", 1, ("7.0",), NOW - 50)]))), 50,
        ("eve@x",), ("GlobalJobId of 1 job", "7.0", "SECURE_JOB_ATTRS"),
    ),
    Kind.LEFT: (
        facts(report(sandbox(1, "Moving")),
              told=letters(notice_of(SCHEDD, left={"Moving": 1}, left_jobs=[[job_name(1), "alice@example.org"]]))),
        60, ("alice@example.org",), ("1 output of jobs that have left the queue", "1 sending"),
    ),
    Kind.ROUTER: (facts(told=letters(router_ad(_ROUTER))), 5400, (), ("cannot deliver", "12 files")),
    Kind.POLICY: (facts(told=letters(policy_ad())), 0, (), ("cannot use its configuration", "condor_reconfig")),
    Kind.VERSIONS: (
        facts(report(version="1.0"), report(version="1.1", manager="m2"), report(version="1.1", manager="m3")), 0, (),
        ("2 versions", "1.0 on 1 node", "1.1 on 2 nodes"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", Kind, ids=str)
def test_each_kind_has_age_owner_and_next_step(kind: Kind) -> None:
    known, age_s, owners, words = CASES[kind]
    matter = only(matters(known))
    assert (matter.kind, matter.age_s(NOW), matter.owners) == (kind, age_s, owners)
    said = f"{matter.title} {matter.action}"
    assert [word for word in words if word not in said] == [], said
    assert matter.title.endswith(".") and matter.action
    assert matter.whose(NOW).startswith(f"Owner: {owners[0] if owners else 'the administrator'}.")


@pytest.mark.parametrize(
    "known",
    [
        facts(report(sandbox(1, "RetryWait", failing_since=NOW - 1700, **FULL))),
        facts(report(sandbox(1, "RetryWait", failing_since=NOW - 9 * HOUR_S, paused=1, **FULL))),
        facts(report(sandbox(1, "Moving", accepted_at=NOW - 23 * HOUR_S))),
        facts(report(sandbox(1, "Accepted", accepted_at=NOW - HOUR_S + 60))),
        facts(report(sandbox(1, "Delivered", accepted_at=NOW - 99 * HOUR_S, files_left=0, bytes_left=0), ends_in_s=9)),
        facts(report(), heard_at=NOW - HOUR_S),
        facts(report(sandbox(1)), heard_at=NOW - 290),
        facts(report(handoffs=10, handoffs_refused={"SlotFull": 1})),
        facts(report(servers=(ServerReport("https://gone.example.org", "open", "", 9, NOW - HOUR_S, 0),))),
        facts(report(full_since=NOW - 300)),
        facts(report(version="1.1"), told=letters(notice_of(SCHEDD, version="1.1"))),
        facts(report(sandbox(1)), told=letters(agent_ad(SCHEDD, NOW - 290))),
        facts(told=letters(router_ad(_ROUTER, NOW - 600, custody=()))),
    ],
)
def test_what_is_in_order_is_no_matter(known: PoolFacts) -> None:
    assert matters(known) == []


def test_a_pilot_whose_output_arrives_in_time_is_no_matter() -> None:
    flow = FlowReport("https://store.example.org", 10**8, 10**8, 0.1, 1, 1, "", 1, 1000)
    assert matters(facts(report(sandbox(1, "Confirmed"), ends_in_s=600, flows=(flow,)))) == []


def test_a_server_without_an_address_is_a_name_and_not_a_server_that_is_away() -> None:
    away = ServerReport("https://store.example.org", "open", "no such host", 9, NOW - HOUR_S, 0)
    lost, refused = ErrorClass.NAME_LOOKUP_FAILED.code, ErrorClass.CONNECT_FAILED.code
    boxes = [
        sandbox(number, "RetryWait", failing_since=NOW - 9, code=code) for number, code in ((1, lost), (2, refused))
    ]
    assert only(matters(facts(report(boxes[0], servers=(away,))))).kind is Kind.NAME
    found = matters(facts(report(*boxes, servers=(away,))))
    assert [(one.kind, one.outputs) for one in found] == [(Kind.NAME, 1), (Kind.UNREACHABLE, 1)]
    assert matters(facts(report(boxes[0]))) == [], "a name server may be away for a moment"


def test_a_server_that_only_a_second_file_needs_is_a_matter() -> None:
    away = ServerReport("https://two.example.org", "open", "", 9, NOW - HOUR_S, 0)
    flow = FlowReport("https://two.example.org", files_waiting=1)
    matter = only(matters(facts(report(sandbox(1, "Moving"), servers=(away,), flows=(flow,)))))
    assert (matter.kind, matter.query) == (Kind.UNREACHABLE, {"server": "two.example.org"})


def test_outputs_with_one_cause_are_one_matter_with_the_oldest_age() -> None:
    boxes = [
        sandbox(number, "RetryWait", failing_since=NOW - number * HOUR_S, owner=f"{'ab'[number % 2]}@x", **FULL)
        for number in (1, 2, 3)
    ]
    matter = only(matters(facts(report(*boxes[:2]), report(boxes[2], manager="m2"))))
    assert (matter.outputs, matter.age_s(NOW), matter.owners) == (3, 3 * HOUR_S, ("b@x", "a@x"))


def test_an_agent_remembers_a_silent_node_whose_report_has_expired() -> None:
    silent = SilentManager(NODE, 900, 2, 300, ("alice@example.org",))
    told = letters(notice_of(SCHEDD, silent=[silent]))
    matter = only(matters(facts(told=told)))
    assert (matter.kind, matter.outputs, matter.age_s(NOW), matter.owners) == (
        Kind.SILENT_NODE, 2, 900, ("alice@example.org",)
    )  # fmt: skip
    assert "run again in 5m00s" in matter.action
    both = matters(facts(report(sandbox(1)), told=told, heard_at=NOW - HOUR_S))
    assert [one.kind for one in both] == [Kind.SILENT_NODE], "one node is one matter"


def test_owners_whose_name_a_node_refuses_are_those_that_the_startd_named() -> None:
    refusal = RefusalReport("forged#1.0#1", 1, "Identity", "GlobalJobId is not the job's", "eve@x")
    matter = only(matters(facts(report(handoffs=100, handoffs_refused={"Identity": 1}, refusals=(refusal,)))))
    assert (matter.kind, matter.owners) == (Kind.IDENTITY, ("eve@x",))
    assert "forged" not in repr(matter)


def test_the_most_urgent_kind_is_first() -> None:
    boxes = (sandbox(1, "Failed", ended_at=NOW, **FULL), sandbox(2, "Moving", accepted_at=NOW - 99 * HOUR_S))
    found = matters(facts(report(*boxes, ends_in_s=60, version="1"), report(version="2", manager="m2")))
    assert [one.kind for one in found] == [Kind.PILOT_ENDS, Kind.FAILED, Kind.OLD, Kind.VERSIONS]
    assert [list(Kind).index(one.kind) for one in found] == sorted(list(Kind).index(one.kind) for one in found)


HOSTILE = '<script>alert(1)</script>`condor_rm -all`\n\x1b[31m"&'


def _hostile() -> list[PoolFacts]:
    """Knowledge with a hostile text in each place that somebody but the pool's daemons may write, and in theirs."""
    box = sandbox(1, "RetryWait", failing_since=NOW - 9 * HOUR_S, reason=HOSTILE, accepted_at=NOW - 99 * HOUR_S, **FULL)
    box = replace(box, files=(replace(box.files[0], error=HOSTILE, name=HOSTILE),))
    boxes = (
        box, replace(box, owner=HOSTILE), replace(box, job=f"{HOSTILE}#1.0#1"),
        replace(box, files=(replace(box.files[0], url=f"https://{HOSTILE}/x"),)),
    )  # fmt: skip
    one = report(
        *boxes, manager=HOSTILE, version=HOSTILE, full_since=NOW - 9, ends_in_s=9, handoffs=9,
        handoffs_refused={HOSTILE: 9, "Identity": 1}, refusals=(RefusalReport(HOSTILE, 1, "Identity", "", HOSTILE),),
        servers=(ServerReport(f"https://{HOSTILE}", "open", HOSTILE, 1, NOW - 9, 0),),
    )  # fmt: skip
    told = letters(
        notice_of(
            HOSTILE, version="x", left={"Moving": 1}, silent=[SilentManager(HOSTILE, 9, 1, 9, (HOSTILE,))],
            identities=[RefusedIdentity(HOSTILE, what, 1, (HOSTILE,), NOW) for what in ("job", "output")],
        ),
        {**router_ad(_ROUTER), "Name": HOSTILE}, {**policy_ad(), "Name": HOSTILE},
    )  # fmt: skip
    return [facts(one, told=told), facts(one, told=told, heard_at=NOW - 9999)]


@pytest.mark.parametrize("known", _hostile())
def test_no_text_of_others_is_markup_or_a_command(known: PoolFacts) -> None:
    found = matters(known)
    assert len({one.kind for one in found}) > 7
    for matter in found:
        said = f"{matter.title} {matter.action}"
        commands = re.findall("`([^`]*)`", said)
        assert said.count("`") % 2 == 0 and not any("condor_rm" in command for command in commands), said
        assert said.isprintable() and all(owner.isprintable() for owner in matter.owners)
    state = type("State", (), {"matters": found, "pool": type("Pool", (), {"now_at": NOW})})
    page = attention(PageContext(), state)  # type: ignore[arg-type]
    assert "<script" not in page and html.escape("<script>") in page
    assert json.loads(json.dumps(as_json(found, NOW)))


def test_texts_about_errors_come_from_the_one_table() -> None:
    for kind in ErrorClass:
        box = sandbox(1, "Failed", ended_at=NOW - 60, code=kind.code)
        matter = only(matters(facts(report(box))))
        assert FAILURES[kind].happened in matter.title
        assert "secret words" not in f"{matter.title} {matter.action}"


def test_every_kind_has_series_before_its_first_event() -> None:
    for found in ([], [only(matters(CASES[kind][0])) for kind in Kind]):
        readings = Readings()
        put_matters(readings, found, NOW)
        values = {metric.name: dict(series) for metric, series in readings.items()}
        assert set(values) == {
            "stageout_pool_matters", "stageout_pool_matter_outputs", "stageout_pool_matter_age_seconds"
        } <= set(METRICS)  # fmt: skip
        for series in values.values():
            assert set(series) == {(kind.value,) for kind in Kind}
        assert set(values["stageout_pool_matters"].values()) == {bool(found)}


def test_the_page_has_the_same_matters_from_its_compact_form() -> None:
    for known, *_ in CASES.values():
        pool = Pool()
        for node in known.nodes:
            text = json.dumps(node.report, default=lambda one: dict(vars(one)))
            pool.put(node_of(read_report(text), text, node.heard_at))
        pool.reach(NOW)
        pool.set_letters(known.letters)
        assert matters(pool.facts()) == matters(known)


def test_limits_fit_the_intervals() -> None:
    """A report of a router comes every 300 s and a notice every 60 s."""
    assert module.SERVICE_SILENT_S > 2 * 300
    assert module.AGENT_SILENT_S > 2 * 60


def test_of_many_letters_the_newest_counts_and_a_bad_one_hides_no_other() -> None:
    found = Letters()
    for ad in (notice_of(SCHEDD, version="new"), {**notice_of(SCHEDD, version="old"), "LastHeardFrom": NOW - 9}):
        found.take(ad)
    assert found.notices[SCHEDD].extra["version"] == "new"
    for kind in (ROUTER_AD, POLICY_AD, AGENT_AD):
        with pytest.raises(BadPayload):
            found.take({"MyType": kind, "Name": "x", "StageOutSchedd": "x", "LastHeardFrom": NOW})
    assert (list(found.notices), found.routers, found.policies) == ([SCHEDD], {}, {})
