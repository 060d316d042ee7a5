"""The agent among strangers: what they say about a job changes nothing, is answered by no order, and is seen."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from test_agent_daemon import JOB, KEY, MANAGER_KEY, OTHER_KEY, Site

from schedd_agent.daemon import key_path, main, read_key
from stageout.core.config import ConfigError, mapping_settings
from stageout.core.signing import KeyUnusable, SigningKey, load_key, succeeds
from stageout.core.states import State
from stageout.model.job import HistoryRecord, Status
from stageout.wire.custody import AGENT_AD, MANAGER_AD, ORDERS_AD, Action, check_signature, read_notice

FORGED = [State.DELIVERED, State.RELEASED, State.FAILED, State.LOST, State.CANCELLED, State.SUPERSEDED, State.MOVING]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def refused(site: Site) -> str:
    """The refusals in the agent's newest notice."""
    site.passes(15)
    return " | ".join(read_notice(site.collector.ads[AGENT_AD, "ap"]["StageOutPayload"]).extra["refused"])


def test_signed_reports_drive_a_job_to_its_end(site: Site) -> None:
    site.complete(key=MANAGER_KEY.public)
    site.report(State.ACCEPTED, key=MANAGER_KEY)
    site.passes()
    (order,) = site.orders_for(MANAGER_KEY.public)
    assert order.action is Action.CONFIRM
    assert site.job.ad_state.keys == MANAGER_KEY.public
    assert site.job.ad_state.manager == "m1"
    site.report(State.DELIVERED, acknowledged=order.number, key=MANAGER_KEY)
    site.passes()
    assert site.queue.left[JOB] == HistoryRecord(Status.COMPLETED, 1)


def test_orders_and_notices_are_signed(site: Site) -> None:
    site.complete(key=MANAGER_KEY.public)
    site.passes(15)
    for (kind, _), ad in site.collector.ads.items():
        check_signature(kind, ad, KEY.public)
    assert {kind for kind, _ in site.collector.ads} == {AGENT_AD, ORDERS_AD}


@pytest.mark.parametrize("state", FORGED)
@pytest.mark.parametrize("place", ["m1", "slot1@evil"])
@pytest.mark.parametrize("key", [OTHER_KEY, None], ids=["other-key", "unsigned"])
def test_nobody_else_can_end_a_job(site: Site, state: State, place: str, key: SigningKey | None) -> None:
    site.complete(key=MANAGER_KEY.public)
    site.report(State.ACCEPTED, key=MANAGER_KEY)
    site.passes()
    confirmed = site.orders_for(MANAGER_KEY.public)
    site.report(State.MOVING, acknowledged=confirmed[0].number, key=MANAGER_KEY)
    site.passes(6)
    before = site.job
    site.report(state, key=key, acknowledged=10**15, place=place)
    site.passes(12)
    if place != "m1":
        assert site.job == before
    assert site.job.status == Status.COMPLETED
    assert site.job.ad_state.state in ("Moving", "Accepted")
    assert site.orders_for(MANAGER_KEY.public) == [], "what others say is answered by no order to the real one"
    site.report(State.DELIVERED, key=MANAGER_KEY)
    site.passes()
    assert site.queue.left[JOB] == HistoryRecord(Status.COMPLETED, 1)


@pytest.mark.parametrize("field", ["number", "manager", "acknowledged", "sandboxes"])
def test_a_report_of_other_types_is_refused_and_the_others_are_read(site: Site, field: str) -> None:
    """Any daemon that may advertise can sign one with a key of its own: the agent must not end by it."""
    site.complete(key=MANAGER_KEY.public)
    site.report(State.ACCEPTED, key=OTHER_KEY, place="slot1@evil")
    evil = site.collector.ads["StageOutManager", "slot1@evil"]
    changed = json.dumps({**json.loads(evil["StageOutPayload"]), field: [["x"]]})
    signature = OTHER_KEY.sign(MANAGER_AD, changed)
    site.collector.ads["StageOutManager", "slot1@evil"] = {
        **evil, "StageOutPayload": changed, "StageOutSignature": signature, "MyType": MANAGER_AD
    }  # fmt: skip
    site.report(State.ACCEPTED, key=MANAGER_KEY)
    site.passes()
    assert [order.action for order in site.orders_for(MANAGER_KEY.public)] == [Action.CONFIRM]
    assert f"not a report: {field}" in refused(site)


@pytest.mark.parametrize("state", [State.DELIVERED, State.FAILED, State.LOST])
def test_an_impostor_is_named(site: Site, state: State) -> None:
    site.complete(key=MANAGER_KEY.public)
    site.report(state, key=OTHER_KEY)
    assert f"m1 {OTHER_KEY.public}: {state} of run 1 of {JOB} is not believed" in refused(site)


def test_an_impostor_with_several_stories_does_not_fill_the_log(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("stageout.core.log.warn", lambda event, **facts: said.append(f"{event} {facts}"))
    site.complete(key=MANAGER_KEY.public)
    for state in (State.FAILED, State.LOST) * 3:
        site.report(state, key=OTHER_KEY)
        site.passes()
    for state in (State.FAILED, State.LOST):
        assert sum(f"{state} of run 1" in line for line in said) == 1
        assert f"{state} of run 1" in refused(site)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"StageOutSignature": ""}, "not signed"),
        ({"StageOutSignature": OTHER_KEY.sign("StageOutManager", "x")}, "not that of"),
        ({"StageOutPayload": "{}"}, "not a report"),
    ],
)
def test_a_report_that_was_changed_on_the_way_is_refused(site: Site, change: dict[str, str], words: str) -> None:
    site.complete(key=MANAGER_KEY.public)
    site.report(State.DELIVERED, key=MANAGER_KEY)
    ads = site.collector.ads
    ads["StageOutManager", "m1"] = {**ads["StageOutManager", "m1"], **change}
    assert words in refused(site)
    assert site.job.status == Status.COMPLETED


def test_orders_of_a_job_whose_output_others_claim_never_reach_the_manager(site: Site) -> None:
    """Forget, supersede and cancel delete bytes: each goes to the key that reported, and the real one has another."""
    site.complete(key=MANAGER_KEY.public)
    site.report(State.FAILED, key=MANAGER_KEY)
    site.passes()
    assert site.job.status == Status.HELD
    site.report(State.SUPERSEDED, key=OTHER_KEY, place="slot1@evil")
    site.queue.found[JOB] = replace(site.job, status=Status.IDLE, run=1)
    site.report(State.FAILED, key=OTHER_KEY, place="slot2@evil")
    site.passes(3)
    actions = {order.action for order in site.orders_for(MANAGER_KEY.public)}
    assert actions <= {Action.CONFIRM, Action.SUPERSEDE}, "the job runs again: its own old output is superseded"
    assert Action.FORGET not in actions


def test_an_old_report_is_not_played_back_even_after_a_restart(site: Site) -> None:
    site.complete(key=MANAGER_KEY.public)
    site.report(State.FAILED, key=MANAGER_KEY)
    recorded = site.collector.ads["StageOutManager", "m1"]
    site.report(State.MOVING, key=MANAGER_KEY)
    site.passes(15)
    site.start()
    site.collector.ads["StageOutManager", "m1"] = recorded
    site.passes(3)
    assert site.job.status == Status.COMPLETED, "the failure of before the retry does not hold the job"
    assert "is old" in refused(site)


def test_silence_is_no_evidence_while_others_speak_in_the_name(site: Site) -> None:
    """A daemon that writes over a manager's ad must not make its output count as lost."""
    site.complete(key=MANAGER_KEY.public)
    site.passes()
    site.report(State.MOVING, key=OTHER_KEY)
    for _ in range(3):
        site.passes(60)
        ads = site.collector.ads
        ads["StageOutManager", "m1"] = {**ads["StageOutManager", "m1"], "StageOutSignature": "x"}
    assert site.job.status == Status.COMPLETED
    del site.collector.ads["StageOutManager", "m1"]
    site.passes(130)
    assert site.job.status == Status.IDLE, "nobody speaks any more: lost after the lease"


@pytest.mark.parametrize("key", [MANAGER_KEY, OTHER_KEY])
def test_without_the_record_the_keys_in_the_job_count(site: Site, key: SigningKey) -> None:
    """The AP's records are rotated; the job's ad remembers whom they named."""
    site.complete(key=MANAGER_KEY.public)
    site.report(State.MOVING, key=MANAGER_KEY)
    site.passes(6)
    (site.path / "job.runs.7.0.ads").unlink()
    site.start()
    site.report(State.RETRY_WAIT, key=key)
    site.passes(6)
    assert site.job.ad_state.state == ("RetryWait" if key is MANAGER_KEY else "Moving")


def test_output_from_before_reports_were_signed_is_delivered_after_an_upgrade(site: Site) -> None:
    site.complete(key="")
    site.report(State.ACCEPTED)
    site.passes()
    assert [order.action for order in site.orders_for("")] == [Action.CONFIRM]
    site.report(State.ACCEPTED, key=MANAGER_KEY)
    site.passes()
    (order,) = site.orders_for(MANAGER_KEY.public)
    site.report(State.DELIVERED, acknowledged=order.number, key=MANAGER_KEY)
    site.passes()
    assert site.queue.left[JOB] == HistoryRecord(Status.COMPLETED, 1)


# ---- the agent's key -------------------------------------------------------------------------------------------------


def test_a_new_key_is_vouched_for_by_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = mapping_settings({"SPOOL": str(tmp_path)})
    monkeypatch.setattr("stageout.daemon.reader_of", lambda *_: lambda: settings)
    assert main(["--key"]) == 99
    assert "start the agent first" in capsys.readouterr().err
    old = read_key(settings).public
    assert main(["--key"]) == 0
    assert capsys.readouterr().out.strip() == old
    assert main(["--new-key"]) == 0
    new = load_key(key_path(settings))
    assert new is not None
    assert capsys.readouterr().out.strip() == new.public != old
    assert succeeds(new.public, old, new.vouches)


def test_a_key_in_the_configuration_that_is_not_the_agents_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("stageout").propagate = True
    read_key(mapping_settings({"SPOOL": str(tmp_path), "STAGEOUT_AGENT_KEY": "ed25519:x"}))
    assert "agent-key-misconfigured told=ed25519:x" in caplog.text


def test_a_key_that_cannot_be_stored_is_said(tmp_path: Path) -> None:
    with pytest.raises(KeyUnusable, match="cannot be stored"):
        read_key(mapping_settings({"SPOOL": str(tmp_path / "nowhere")}))


def test_without_a_spool_the_agent_makes_no_key_wherever_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="SPOOL is not set"):
        read_key(mapping_settings({}))
    assert not list(tmp_path.iterdir())
