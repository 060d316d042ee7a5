"""An owner writes another job's name, and whatever else he may, into jobs of his own: nothing comes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_agent_daemon import JOB, USER, Site

from stageout.core.states import State
from stageout.model.job import HistoryRecord, Job, JobAdState, Status
from stageout.wire.custody import Action, JobKey, Order, is_job_name, is_name_of
from stageout.wire.owner_requests import Verb

HOSTILE = "mallory@pool"
_REQUESTS = [*(verb.value for verb in Verb), "redirect r1 https://evil/ ", "retry run=1", "cancel run=1", "", "x"]

#: A job of the hostile user. All of this is the owner's to write, but not the numbers of the job and the user.
_HOSTILE_JOBS = st.builds(
    Job,
    name=st.just(JOB),
    cluster=st.integers(8, 99),
    proc=st.integers(0, 3),
    status=st.sampled_from(list(Status)),
    run=st.integers(0, 9),
    user=st.just(HOSTILE),
    handed_off=st.integers(0, 3),
    priority=st.integers(-5, 5),
    dag=st.integers(0, 8),
    has_ended=st.booleans(),
    hold_code=st.sampled_from([0, 3, 12]),
    hold_subcode=st.sampled_from([0, 20001, 20072]),
    held_at_exit=st.booleans(),
    request=st.sampled_from(_REQUESTS),
    reconnects=st.integers(0, 1),
    owner=st.just("mallory"),
    ad_state=st.builds(
        JobAdState,
        state=st.sampled_from(["None", *(state.value for state in State)]),
        run=st.integers(0, 9),
        manager=st.just("m1"),
    ),
)


def _story(path: Path, hostile: list[Job]) -> tuple[list[list[Order]], list[Any], Site]:
    """Deliver the victim's output beside hostile jobs. Return the orders after each pass, and the states shown."""
    path.mkdir(parents=True, exist_ok=True)
    site = Site(path)
    for job in hostile:
        site.queue.found[f"{job.cluster}.{job.proc}"] = job
    orders: list[list[Order]] = []
    shown: list[Any] = []
    site.complete()
    for state in (State.ACCEPTED, State.MOVING, State.RETRY_WAIT, State.DELIVERED, State.RELEASED):
        acknowledged = max((order.number for order in orders[-1]), default=0) if orders else 0
        site.report(state, acknowledged=acknowledged)
        site.passes(5)
        orders.append([replace(order, number=0) for order in site.orders])
        shown.append(site.queue.found[JOB].ad_state if JOB in site.queue.found else "left")
    return orders, shown, site


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(hostile=st.lists(_HOSTILE_JOBS, min_size=1, max_size=20, unique_by=lambda job: (job.cluster, job.proc)))
def test_jobs_that_carry_the_victims_name_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, hostile: list[Job]
) -> None:
    calm = _story(tmp_path_factory.mktemp("calm"), [])
    beside = _story(tmp_path_factory.mktemp("beside"), hostile)
    assert beside[:2] == calm[:2]
    for job in hostile:
        assert beside[2].queue.found[f"{job.cluster}.{job.proc}"] == job, "the agent has edited it"
    assert all(order.owner == USER for orders in beside[0] for order in orders)


@pytest.mark.parametrize("same_number", [False, True])
def test_a_job_of_another_user_has_no_part_in_the_output(tmp_path: Path, same_number: bool) -> None:
    """With the same number, too: after the loss of the queue its numbers begin again."""
    site = Site(tmp_path)
    site.complete()
    site.report(State.FAILED)
    del site.queue.found[JOB]
    number = 7 if same_number else 8
    ad_state = JobAdState(State.FAILED.value, 1, manager="m1")
    site.queue.found[JOB] = Job(
        JOB, number, 0, Status.REMOVED, 5, user=HOSTILE, owner="mallory", handed_off=2, request="cancel",
        ad_state=ad_state,
    )  # fmt: skip
    site.passes(30)
    assert [order.action for order in site.orders] == []
    assert site.queue.found[JOB].ad_state == ad_state


def test_the_history_of_another_user_cancels_nothing(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.complete()
    site.report(State.MOVING)
    del site.queue.found[JOB]
    site.queue.left[JobKey(JOB, HOSTILE)] = HistoryRecord(Status.REMOVED, 9, owner="mallory")
    site.passes(30)
    assert Action.CANCEL not in [order.action for order in site.orders]


def test_a_job_without_a_user_is_nobodys(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.complete()
    site.queue.found[JOB] = replace(site.job, user="")
    assert not site.job.has_own_name
    site.report(State.ACCEPTED)
    site.passes(5)
    assert site.orders == [] and site.job.ad_state == JobAdState()


@pytest.mark.parametrize(
    ("name", "is_own"),
    [
        ("ap#7.0#1700000000", True),
        ("ap#7.0", True),
        ("ap#7.1#1700000000", False),
        ("ap#70.0#1700000000", False),
        ("ap#7.0#", False),
        ("ap#7.0#17\n", False),
        ("ap#7.0#-1", False),
        ("ap#7.0#99999999999", False),
        ("aq#7.0#1700000000", False),
        ("ap##7.0#1", False),
        ("", False),
    ],
)
def test_the_name_of_a_job(name: str, is_own: bool) -> None:
    assert is_name_of(name, "ap", "7.0") is is_own
    if is_own:
        assert is_job_name(name)
