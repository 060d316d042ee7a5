"""Edits of many jobs in few transactions: order, refusals, and what a death in the middle leaves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from schedd_agent.edit_groups import apply_grouped
from schedd_agent.edits import Change, Edit, edit_for
from schedd_agent.model import MarkDelivered, UpdateAdState
from schedd_agent.queue import QueueError
from stageout.core import durable
from stageout.model.job import Job, JobAdState, Status


class Table:
    """Attributes of jobs by id, and the transactions that wrote them.

    :param gone: jobs that have left: they abort a transaction. :param most: transactions until the process dies.
    """

    def __init__(self, *job_ids: str, gone: Sequence[str] = (), most: int = 10_000) -> None:
        self.ads: dict[str, dict[str, str]] = {job_id: {} for job_id in job_ids}
        self.gone, self.most = set(gone), most
        self.transactions: list[tuple[str, tuple[str, ...]]] = []

    def set_in(self, job_ids: Sequence[str], change: Change) -> None:
        if len(self.transactions) == self.most:
            raise KeyboardInterrupt
        self.transactions.append((change.name, tuple(job_ids)))
        if self.gone & set(job_ids):
            raise QueueError(f"{job_ids[0]}: no such job")
        for job_id in job_ids:
            self.ads[job_id][change.name] = change.value


def _always() -> bool:
    return True


def _job(cluster: int, shown: JobAdState) -> Job:
    return Job(f"ap#{cluster}.0#1", cluster, 0, Status.COMPLETED, 1, "alice@test", ad_state=shown)


def _delivered(cluster: int, shown: JobAdState = JobAdState(), size_bytes: int = 5) -> Edit:  # noqa: B008 - frozen
    new = JobAdState("Delivered", 1, "1 file", attempts=1, manager=f"m{cluster}", keys=f"k{cluster}")
    edit = edit_for(_job(cluster, shown), MarkDelivered(new, {"Bytes": size_bytes}), 0.0)
    assert edit
    return edit


def test_an_attribute_with_the_same_value_is_one_transaction() -> None:
    table = Table("1.0", "2.0", "3.0")
    done = apply_grouped([_delivered(1), _delivered(2), _delivered(3, size_bytes=6)], table.set_in, _always)
    assert (done.refused, done.left) == ({}, set())
    assert table.transactions == [
        ("StageOutStats", ("1.0", "2.0")),
        ("StageOutStats", ("3.0",)),
        ("StageOutRun", ("1.0", "2.0", "3.0")),
        ("StageOutReason", ("1.0", "2.0", "3.0")),
        ("StageOutState", ("1.0", "2.0", "3.0")),
    ]


def test_reason_and_state_are_logged_and_nothing_else() -> None:
    logged = {}

    def set_in(job_ids: Sequence[str], change: Change) -> None:
        logged[change.name] = change.is_logged

    apply_grouped([_delivered(1), _delivered(2)], set_in, _always)
    assert {name for name, is_logged in logged.items() if is_logged} == {"StageOutReason", "StageOutState"}
    assert len(logged) == 4


def test_delivery_adds_no_facts_about_the_way_to_an_ad_that_has_none() -> None:
    """Each would be a transaction for each node. Facts that the ad has are brought up to date."""
    assert {change.name for change in _delivered(1).changes} == {
        "StageOutStats", "StageOutRun", "StageOutReason", "StageOutState"
    }  # fmt: skip
    on_the_way = JobAdState("Moving", 1, "moving", 5, 1, 2, 99, "m9", "k9", "held")
    changes = {change.name: change.value for change in _delivered(1, on_the_way).changes}
    assert changes == {
        "StageOutStats": "[ Bytes = 5 ]", "StageOutBytesLeft": "0", "StageOutFilesLeft": "0", "StageOutAttempts": "1",
        "StageOutNextAttempt": "0", "StageOutManager": '"m1"', "StageOutKeys": '"k1"', "StageOutCustody": '""',
        "StageOutReason": '"1 file"', "StageOutState": '"Delivered"',
    }  # fmt: skip


def test_the_state_is_last_in_every_job_whatever_the_others_write() -> None:
    """The orders of attributes differ: one job writes only its state, another one all attributes."""
    shown = [JobAdState("Moving", 1, "1 file", manager="m1", keys="k1", attempts=1), JobAdState(), JobAdState("x", 0)]
    edits = [_delivered(number, ad_state) for number, ad_state in enumerate(shown, 1)]
    progress = edit_for(_job(4, JobAdState()), UpdateAdState(JobAdState("Moving", 1)), 0.0)
    assert progress
    table = Table(*(edit.job_id for edit in edits), "4.0")
    apply_grouped([*edits, progress], table.set_in, _always)
    for edit in (*edits, progress):
        written = [name for name, job_ids in table.transactions if edit.job_id in job_ids]
        assert written == [change.name for change in edit.changes]
        assert written[-1] == "StageOutState"


@pytest.mark.parametrize("most", range(5))
def test_a_death_between_two_transactions_leaves_no_state_before_its_facts(most: int) -> None:
    table = Table("1.0", "2.0", most=most)
    edits = [_delivered(1), _delivered(2)]
    try:
        apply_grouped(edits, table.set_in, _always)
    except KeyboardInterrupt:
        assert most < 4
    for edit in edits:
        ad = table.ads[edit.job_id]
        whole = {change.name: change.value for change in edit.changes}
        assert "StageOutState" not in ad or ad == whole
    again = Table("1.0", "2.0")
    apply_grouped(edits, again.set_in, _always)
    assert again.ads == {edit.job_id: {change.name: change.value for change in edit.changes} for edit in edits}


def test_a_group_that_one_job_aborts_is_repeated_job_by_job() -> None:
    table = Table("1.0", "2.0", "3.0", gone=["2.0"])
    done = apply_grouped([_delivered(number) for number in (1, 2, 3)], table.set_in, _always)
    assert list(done.refused) == ["2.0"]
    assert not done.left
    for job_id in ("1.0", "3.0"):
        assert table.ads[job_id]["StageOutState"] == '"Delivered"'
    assert table.ads["2.0"] == {}
    repeated = [job_ids for name, job_ids in table.transactions if "2.0" in job_ids]
    assert repeated == [("1.0", "2.0", "3.0"), ("2.0",)], "a refused job has no further edits"


def test_a_schedd_that_answers_nobody_is_not_asked_for_every_job() -> None:
    """Each question may take as long as its time-out."""
    table = Table("1.0", "2.0", "3.0", gone=["1.0", "2.0", "3.0"])
    done = apply_grouped(
        [_delivered(number) for number in (1, 2, 3)], table.set_in, lambda: len(table.transactions) < 2
    )
    assert table.transactions == [("StageOutStats", ("1.0", "2.0", "3.0")), ("StageOutStats", ("1.0",))]
    assert (list(done.refused), done.left) == (["1.0"], {"2.0", "3.0"})


def test_both_steps_have_their_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    for label in ("edit-delivered", "edit-group"):
        table = Table("1.0", "2.0")
        monkeypatch.setattr(durable, "_faults", durable.parse_faults(f"{label}=EIO"))
        with pytest.raises(OSError, match=label):
            apply_grouped([_delivered(1), _delivered(2)], table.set_in, _always)
        assert table.transactions == []
