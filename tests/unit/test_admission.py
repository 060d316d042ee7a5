"""May a hand-off be taken? Limits to the byte, with what was promised to others on their way in."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sandbox_manager.custody.registry import Registry
from sandbox_manager.intake.admission import LEAST_FREE_BYTES, Admission, Offer
from sandbox_manager.rules import Limits
from sandbox_manager.scheduling.breaker import Flow
from stageout.core.synchronous import NO_REASON
from stageout.model.run import Account, RunFacts
from stageout.model.sandbox import NAME_BYTES, SlotKey
from stageout.wire.custody import Run

QUOTA_BYTES = 1_000_000
OWNER_BYTES = 600_000
FACTS = RunFacts(Run("ap#1.0#1", 1, "alice@test"), "alice", 1, 1, SlotKey("ep", 1, 1), "slot1_1@ep", guard=True)


@dataclass
class _Rules:
    quota_bytes: int = QUOTA_BYTES
    owner_quota_bytes: int = OWNER_BYTES
    require_verified: bool = False
    accounts: tuple[Account, ...] = ()
    limits: Limits = field(default_factory=lambda: Limits(100, 100, 100, 4, 4, 4, 200, 1 << 30, 0.0))


@pytest.fixture
def admission() -> Admission:
    """Everything but room is as it should be."""
    plugin = SimpleNamespace(verifies=True, path="/plugin")
    around: dict[str, Any] = {
        "agents": SimpleNamespace(is_fresh=lambda schedd: True, objection=lambda schedd, key: NO_REASON),
        "table": SimpleNamespace(registered=lambda name: plugin, find=lambda name, scheme: plugin),
        "spool": SimpleNamespace(free_bytes=lambda: 1 << 40),
        "end": SimpleNamespace(reason_against=lambda servers, size_bytes: ""),
    }
    return Admission(Registry(), flow=lambda server: Flow.ALL, rules=cast(Any, _Rules), **around)


def _offer(size_bytes: int, owner: str = "alice@test", job: int = 1, run: int = 1) -> Offer:
    """One file that takes so much of the quota."""
    facts = replace(FACTS, run=Run(f"ap#{job}.0#1", run, owner))
    return Offer(facts, 1, size_bytes - NAME_BYTES, frozenset({"https"}), frozenset({"h"}), "/plugin")


def test_owner_s_share_is_used_to_its_last_byte(admission: Admission) -> None:
    assert admission.reason_against(_offer(OWNER_BYTES)) == ""
    assert "STAGEOUT_OWNER_QUOTA_MB" in admission.reason_against(_offer(OWNER_BYTES + 1))


def test_what_was_promised_counts_in_the_owner_s_share(admission: Admission) -> None:
    number = admission.reserve(_offer(OWNER_BYTES - 5000))
    assert admission.reason_against(_offer(5000, job=2)) == ""
    assert "STAGEOUT_OWNER_QUOTA_MB" in admission.reason_against(_offer(5001, job=2))
    assert admission.reason_against(_offer(5001, "bob@test", job=2)) == ""
    admission.unreserve(number)
    assert admission.reason_against(_offer(OWNER_BYTES, job=2)) == ""


def test_what_was_promised_counts_in_the_quota(admission: Admission) -> None:
    admission.reserve(_offer(OWNER_BYTES))
    rest_bytes = QUOTA_BYTES - OWNER_BYTES
    assert admission.reason_against(_offer(rest_bytes, "bob@test", job=2)) == ""
    assert "STAGEOUT_SPOOL_QUOTA_MB" in admission.reason_against(_offer(rest_bytes + 1, "bob@test", job=2))


def test_nothing_is_taken_when_the_manager_stops(admission: Admission) -> None:
    admission.stop()
    assert admission.reason_against(_offer(5000)) == "the sandbox manager is stopping"


@pytest.mark.parametrize("run", [1, 2])
def test_no_run_is_taken_after_a_newer_one(admission: Admission, run: int) -> None:
    admission.registry.fence(Run("ap#1.0#1", 2, "alice@test"))
    assert bool(admission.reason_against(_offer(5000, run=run))) is (run < 2)


def test_copies_under_way_have_their_room(admission: Admission) -> None:
    free_bytes = LEAST_FREE_BYTES + 100_000
    admission.spool = cast(Any, SimpleNamespace(free_bytes=lambda: free_bytes))
    first, second = (admission.reserve(_offer(90_000, job=job)) for job in (1, 2))
    assert admission.reason_against_copy(first, 60_000) == ""
    admission.reserve_copy(first, 60_000)
    assert "has no room there" in admission.reason_against_copy(second, 40_001)
    assert admission.reason_against_copy(second, 40_000) == ""
    admission.unreserve(first)
    assert admission.reason_against_copy(second, 100_000) == ""
    assert "has no room there" in admission.reason_against_copy(second, 100_001)
