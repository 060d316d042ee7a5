"""Stream policies: the printed one with the printed tables, and what must hold for all of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageout.tuning.policies import BUILT_IN, Grant, Limits, fair_share, greedy
from tests.as_printed import provision_as_printed

UNBOUNDED = 10**6


@dataclass
class Pair:
    """The grants of one pair of sites, as a service keeps them."""

    limits: Limits
    policy: str = "greedy"
    grants: dict[str, Grant] = field(default_factory=dict)
    turns: int = 0

    def ask(self, client: str, wanted: int = UNBOUNDED, owner: str = "", priority: int = 0) -> int:
        before = self.grants.get(client) or Grant(client, 0, wanted, owner, priority, self._turn())
        asker = replace(before, wanted=wanted)
        self.grants[client] = asker
        streams = BUILT_IN[self.policy](asker, list(self.grants.values()), self.limits)
        changed = bool(streams) != bool(asker.streams)
        self.grants[client] = replace(asker, streams=streams, turn=self._turn() if changed else asker.turn)
        return streams

    def _turn(self) -> int:
        self.turns += 1
        return self.turns

    @property
    def total(self) -> int:
        return sum(grant.streams for grant in self.grants.values())


CLIENTS = [f"c{number}" for number in range(1, 9)]


def test_client_side_tables_first_four_take_all() -> None:
    """Initial 32 of 128 for 8 clients: the first four hold it all, the others an honest zero."""
    pair = Pair(Limits(32, 0, 128, 32))
    assert [pair.ask(client) for client in CLIENTS] == [32, 32, 32, 32, 0, 0, 0, 0]
    pair.grants["c2"] = replace(pair.grants["c2"], streams=0)
    assert pair.ask("c5") == 32


def test_slow_increase_table() -> None:
    """Initial 4, increment 4: four at a time up to 16 for each of 8 clients, then nothing is left."""
    pair = Pair(Limits(4, 4, 128, 32))
    rounds = [[pair.ask(client) for client in CLIENTS] for _ in range(5)]
    assert rounds == [[4] * 8, [8] * 8, [12] * 8, [16] * 8, [16] * 8]


def test_fast_increase_table_makes_the_last_three_wait() -> None:
    """Initial 16, increment 4: clients reach 20, 28 and 32, and the last three wait until those have finished."""
    pair = Pair(Limits(16, 4, 128, 32))
    for client, updates in zip(CLIENTS, (4, 3, 3, 1, 1)):
        for _ in range(1 + updates):
            held = pair.ask(client)
        assert held == 16 + 4 * updates
    assert [grant.streams for grant in pair.grants.values()] == [32, 28, 28, 20, 20]
    assert [pair.ask(client) for client in CLIENTS[5:]] == [0, 0, 0]
    del pair.grants["c1"]
    assert [pair.ask(client) for client in CLIENTS[5:]] == [16, 16, 0]


@given(
    streams=st.integers(0, 40),
    others=st.integers(0, 150),
    limits=st.builds(Limits, st.integers(0, 40), st.integers(0, 10), st.integers(1, 150), st.integers(1, 40)),
)
def test_the_running_greedy_policy_is_the_printed_one_where_that_is_sound(
    streams: int, others: int, limits: Limits
) -> None:
    asker = Grant("me", streams, UNBOUNDED)
    mine = greedy(asker, [asker, Grant("they", others, UNBOUNDED)], limits)
    printed, total = provision_as_printed(streams, streams + others, limits)
    assert total - printed == others
    if streams <= limits.max_client and streams + others <= limits.max_pair:
        assert mine == printed
    else:
        assert 0 <= mine <= streams


def test_the_printed_policy_goes_below_zero_when_a_maximum_is_lowered() -> None:
    lowered = Limits(4, 4, 64, 32)
    assert provision_as_printed(4, 128, lowered) == (-60, 64)
    asker = Grant("me", 4, UNBOUNDED)
    assert greedy(asker, [asker, Grant("they", 124, UNBOUNDED)], lowered) == 2


def test_a_lowered_maximum_is_reached_by_renewals_and_everybody_keeps_some() -> None:
    pair = Pair(Limits(16, 4, 128, 32))
    for client in CLIENTS:
        pair.ask(client)
    pair.limits = replace(pair.limits, max_pair=64)
    for _ in range(8):
        for client in CLIENTS:
            pair.ask(client)
    assert pair.total == 64
    assert min(grant.streams for grant in pair.grants.values()) >= 4


def test_fair_share_gives_all_the_same_and_the_unwanted_to_others() -> None:
    pair = Pair(Limits(4, 4, 100, 60), "fair-share")
    assert pair.ask("a") == 60
    assert pair.ask("b", wanted=10) == 10
    assert pair.ask("c") == 30
    for _ in range(3):
        shares = {client: pair.ask(client, wanted=10 if client == "b" else UNBOUNDED) for client in "abc"}
    assert shares == {"a": 45, "b": 10, "c": 45}


def test_priority_serves_the_highest_first() -> None:
    pair = Pair(Limits(4, 4, 40, 32), "priority")
    assert pair.ask("low") == 32
    assert pair.ask("high", priority=5) == 8
    assert pair.ask("low") == 8
    assert pair.ask("high", priority=5) == 32


def test_reserved_streams_are_kept_free_for_their_owner() -> None:
    pair = Pair(Limits(4, 4, 40, 32, {"cms": 16}), "reserved")
    assert pair.ask("x", owner="atlas") == 24
    assert pair.ask("y", owner="cms") == 16
    assert pair.ask("x", owner="atlas") == 12
    assert pair.ask("y", owner="cms") == 28


ASKS = st.lists(
    st.tuples(st.sampled_from(CLIENTS), st.integers(0, 50), st.sampled_from(["ask", "ask", "ask", "release"])),
    max_size=60,
)
LIMITS = st.builds(
    Limits,
    st.integers(0, 40),
    st.integers(0, 10),
    st.integers(0, 60),
    st.integers(0, 40),
    st.dictionaries(st.sampled_from(["o1", "o2"]), st.integers(0, 50)),
)


@settings(deadline=None)
@given(policy=st.sampled_from(sorted(BUILT_IN)), limits=LIMITS, lower=st.integers(0, 60), asks=ASKS, more=ASKS)
def test_never_above_a_maximum_never_negative_no_leak(
    policy: str,
    limits: Limits,
    lower: int,
    asks: list[tuple[str, int, str]],
    more: list[tuple[str, int, str]],
) -> None:
    pair = Pair(limits, policy)

    def play(steps: list[tuple[str, int, str]]) -> None:
        for client, wanted, what in steps:
            before = pair.total
            if what == "release":
                pair.grants.pop(client, None)
                continue
            owner, rank = f"o{int(client[1:]) % 3}", int(client[1:]) % 2
            streams = pair.ask(client, wanted, owner, rank)
            assert 0 <= streams <= min(wanted, pair.limits.max_client)
            assert pair.total <= max(before, pair.limits.max_pair)

    play(asks)
    assert pair.total <= limits.max_pair
    pair.limits = replace(limits, max_pair=min(lower, limits.max_pair))
    play(more)
    pair.grants.clear()
    fresh = pair.ask("fresh", wanted=3, owner="o9")
    spoken_for = sum(limits.reserved.values()) if policy == "reserved" else 0
    room = min(3, pair.limits.max_client, max(0, pair.limits.max_pair - spoken_for))
    assert fresh == (min(room, limits.initial) if policy == "greedy" else room), "streams leaked"


@settings(deadline=None)
@given(count=st.integers(1, 12), most=st.integers(1, 20), order=st.randoms(use_true_random=True))
def test_nobody_starves_under_fair_share(count: int, most: int, order: object) -> None:
    """A client that goes on asking gets streams within a bounded number of rounds, again and again."""
    pair = Pair(Limits(4, 4, most, most), "fair-share")
    clients = [f"c{number}" for number in range(count)]
    waited = dict.fromkeys(clients, 0)
    for _ in range(60):
        order.shuffle(clients)  # type: ignore[attr-defined]
        for client in clients:
            waited[client] = 0 if pair.ask(client) else waited[client] + 1
            assert pair.total <= most
            assert waited[client] <= 3 * count, f"{client} starves"


@pytest.mark.parametrize("policy", sorted(BUILT_IN))
def test_asking_for_nothing_gives_everything_back(policy: str) -> None:
    pair = Pair(Limits(8, 4, 32, 16), policy)
    assert pair.ask("a") > 0
    assert pair.ask("a", wanted=0) == 0


def test_fair_share_is_even_after_two_rounds() -> None:
    grants = [Grant(client, 0, UNBOUNDED, turn=number) for number, client in enumerate(CLIENTS)]
    assert [fair_share(grant, grants, Limits(1, 1, 20, 20)) for grant in grants] == [3, 3, 3, 3, 2, 2, 2, 2]
