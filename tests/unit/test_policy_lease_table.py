"""The table of leases: what holds whatever clients, clocks and restarts do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policy_service.lease_store import LeaseStore, LeaseStoreError
from policy_service.lease_table import LeaseRules, LeaseTable
from policy_service.model import Lease, RequestRefused
from policy_service.site_policy import BuiltInPolicy
from stageout.tuning.policies import BUILT_IN, Limits

LEASE_S = 100.0
_MEMORY = Path("/dev/shm")


class Hands:
    """A clock that tests turn. :param wall: may jump."""

    def __init__(self) -> None:
        self.mono, self.wall = 1000.0, 1_700_000_000.0

    def monotonic_s(self) -> float:
        return self.mono

    def wall_s(self) -> float:
        return self.wall

    def go_on(self, seconds: float) -> None:
        self.mono += seconds
        self.wall += seconds


def _table(path: Path, clock: Hands, policy: str = "greedy", limits: Limits | None = None) -> LeaseTable:
    rules = LeaseRules(limits or Limits(4, 4, 16, 8), LEASE_S, {"a": 2})
    return LeaseTable(LeaseStore(path), clock, rules, BuiltInPolicy(policy))


@contextmanager
def _restarted(table: LeaseTable, path: Path, clock: Hands) -> Iterator[LeaseTable]:
    table.close()
    again = _table(path, clock)
    yield again
    again.close()


def test_a_lease_ends_by_the_monotonic_clock_however_the_wall_clock_jumps(tmp_path: Path) -> None:
    clock = Hands()
    table = _table(tmp_path / "db", clock)
    lease = table.request("a", "m", "x", "y", 8)
    clock.wall += 10_000
    assert table.renew("a", lease.id, None, None).streams == 8
    clock.wall -= 50_000
    clock.mono += LEASE_S - 1
    assert table.leases() != []
    clock.mono += 2
    assert table.leases() == []
    with pytest.raises(RequestRefused, match="stop using"):
        table.renew("a", lease.id, None, None)
    table.close()


def test_over_a_restart_the_wall_clock_tells_what_is_left(tmp_path: Path) -> None:
    clock, path = Hands(), tmp_path / "db"
    table = _table(path, clock)
    lease = table.request("a", "m", "x", "y", 8)
    clock.wall += 60
    clock.mono = 5.0  # another boot
    with _restarted(table, path, clock) as table:
        [kept] = table.leases()
        assert kept == replace(lease, deadline_s=kept.deadline_s)
        assert table.left_s(kept) == pytest.approx(40)


def test_a_wall_clock_that_was_set_back_does_not_lengthen_a_lease(tmp_path: Path) -> None:
    clock, path = Hands(), tmp_path / "db"
    table = _table(path, clock)
    table.request("a", "m", "x", "y", 8)
    clock.wall -= 1_000_000
    with _restarted(table, path, clock) as table:
        [kept] = table.leases()
        assert table.left_s(kept) == pytest.approx(LEASE_S)


def test_a_client_that_was_restarted_while_it_shrank_still_counts_with_what_it_used(tmp_path: Path) -> None:
    table = _table(tmp_path / "db", Hands(), "fair-share", Limits(4, 4, 8, 8))
    first = table.request("a", "m", "x", "y", 8)
    table.request("a", "n", "x", "y", 8)
    assert table.renew("a", first.id, None, 8).streams == 4
    again = table.request("a", "m", "x", "y", 8)
    assert (again.streams, again.counted) == (4, 8)
    assert table.request("a", "n", "x", "y", 8).streams == 0
    table.close()


def test_turns_go_on_over_a_restart(tmp_path: Path) -> None:
    clock, path = Hands(), tmp_path / "db"
    table = _table(path, clock)
    first = table.request("a", "m", "x", "y", 8)
    with _restarted(table, path, clock) as table:
        assert table.request("a", "n", "x", "y", 8).turn > first.turn


def test_a_damaged_or_newer_database_is_said(tmp_path: Path) -> None:
    path = tmp_path / "db"
    path.write_bytes(b"not a database, but long enough to be looked at" * 50)
    with pytest.raises(LeaseStoreError, match="a damaged file may be removed"):
        LeaseStore(path)
    import sqlite3

    newer = tmp_path / "newer"
    connection = sqlite3.connect(newer)
    connection.execute("PRAGMA user_version=7")
    connection.close()
    with pytest.raises(LeaseStoreError, match="version 7"):
        LeaseStore(newer)


def test_a_database_whose_leases_are_damaged_or_not_ours_is_said(tmp_path: Path) -> None:
    import sqlite3

    damaged = tmp_path / "damaged"
    table = _table(damaged, Hands())
    lease = table.request("a", "m", "x", "y", 8)
    table.close()
    with closing(LeaseStore(damaged)) as store:
        store.save([(replace(lease, id=f"{number:020}"), 0.0) for number in range(2000)], [])
    data = damaged.read_bytes()
    damaged.write_bytes(data[:8192] + b"\xff" * (len(data) - 8192))
    with closing(LeaseStore(damaged)) as store, pytest.raises(LeaseStoreError, match="a damaged file may be removed"):
        store.load(0.0, 0.0, 1.0)
    foreign = tmp_path / "foreign"
    with closing(sqlite3.connect(foreign)) as connection:
        connection.execute("CREATE TABLE others (name TEXT)")
    before = foreign.read_bytes()
    with pytest.raises(
        LeaseStoreError, match=r"another program, which was not touched: move it away, and put ours back$"
    ):
        LeaseStore(foreign)
    assert foreign.read_bytes() == before


class Clients(RuleBasedStateMachine):
    """Well-behaved clients, dead ones, reconfigs, and restarts of the service at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None)
        self.path = Path(self.folder.name) / "db"
        self.clock = Hands()
        self.using: dict[str, int] = {}

    @initialize(policy=st.sampled_from(sorted(BUILT_IN)), most=st.integers(0, 24), client=st.integers(0, 12))
    def begin(self, policy: str, most: int, client: int) -> None:
        self.policy, self.limits = policy, Limits(4, 4, most, client, {"a": 5})
        self.allowed = most
        self.table = _table(self.path, self.clock, policy, self.limits)

    @rule(owner=st.sampled_from("ab"), name=st.sampled_from("mno"), wanted=st.integers(0, 20))
    def request(self, owner: str, name: str, wanted: int) -> None:
        known = {lease.id for lease in self.table.leases()}
        lease = self.table.request(owner, name, "x", "y", wanted)
        if lease.id in known:
            self.using[lease.id] = min(self.using[lease.id], lease.counted)
        else:
            self.using[lease.id] = 0
        assert lease.streams <= min(wanted, self.limits.max_client)

    @precondition(lambda self: self.using)
    @rule(choice=st.integers(0, 100), full=st.booleans(), less=st.integers(0, 3))
    def renew(self, choice: int, full: bool, less: int) -> None:
        lease = self._one(choice)
        if lease is not None:
            in_use = max(0, self.using[lease.id] - less)
            self.using[lease.id] = in_use
            lease = self.table.renew(lease.owner, lease.id, None, in_use)
            if full:
                self.using[lease.id] = max(in_use, lease.streams)

    @precondition(lambda self: self.using)
    @rule(choice=st.integers(0, 100))
    def release(self, choice: int) -> None:
        lease = self._one(choice)
        if lease is not None:
            self.table.release(lease.owner, lease.id)
            del self.using[lease.id]

    @rule(seconds=st.sampled_from([1, 30, 99, 101]))
    def time_passes(self, seconds: int) -> None:
        self.clock.go_on(seconds)

    @rule(most=st.integers(0, 24))
    def reconfig(self, most: int) -> None:
        self.limits = replace(self.limits, max_pair=most)
        self.allowed = max(self.allowed, most)
        self.table.rules = replace(self.table.rules, limits=self.limits)

    @rule(seconds=st.sampled_from([0, 50, 200]))
    def restart(self, seconds: int) -> None:
        self.table.close()
        self.clock.go_on(seconds)
        self.clock.mono = 7.0
        self.table = _table(self.path, self.clock, self.policy, self.limits)

    def _one(self, choice: int) -> Lease | None:
        leases = self.table.leases()
        return leases[choice % len(leases)] if leases else None

    @invariant()
    def never_above_the_maximum(self) -> None:
        if not hasattr(self, "table"):
            return
        leases = self.table.leases()
        alive = {lease.id for lease in leases}
        self.using = {name: number for name, number in self.using.items() if name in alive}
        assert all(lease.streams >= 0 for lease in leases)
        assert sum(lease.counted for lease in leases) <= self.allowed
        assert sum(self.using.values()) <= self.allowed, "clients use more than was ever allowed"

    def teardown(self) -> None:
        if hasattr(self, "table"):
            self.clock.go_on(2 * LEASE_S)
            assert self.table.leases() == [], "streams leaked"
            self.table.close()
        self.folder.cleanup()


TestClients = Clients.TestCase
TestClients.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
