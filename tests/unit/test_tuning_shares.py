"""Shares of a link, on a link that is a few lines of arithmetic."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stageout.overlay.tuning.shares import LEAST_RATE, MOST_PRIORITY, Flow, Shares, fill, turn, weights

_STEP_S = 0.1
_MEASURED = 5
LINK = 12.5e6


@dataclass
class _Sender:
    """A flow of so many connections. :param end: bytes a second that its own end takes."""

    key: str
    priority: int = 0
    connections: int = 2
    end: float = float("inf")
    owner: str = ""
    deadline: int = 0
    begun_s: float = 0.0
    rate: float = 0.0
    done: float = 0.0
    lately: deque[float] = field(default_factory=lambda: deque(maxlen=_MEASURED))

    def measured(self, unrest: float) -> float:
        """Its rate, as somebody sees it who counts bytes over half a second."""
        self.lately.append(self.rate * unrest)
        return sum(self.lately) / len(self.lately)


@dataclass
class _Link:
    """Shared as TCP does: by connections, within the limits; rates move towards their new values within a second.

    :param unrest: by so much at most, as a part of it, what is counted differs from the rate.
    """

    senders: list[_Sender]
    rate: float = LINK
    now_s: float = 0.0
    unrest: float = 0.0
    noise: random.Random = field(default_factory=lambda: random.Random(4711))
    shares: Shares = field(default_factory=Shares)

    def run(self, seconds: float) -> dict[str, float]:
        before = {sender.key: sender.done for sender in self.senders}
        for _ in range(round(seconds / _STEP_S)):
            self.now_s += _STEP_S
            flows = [
                Flow(one.key, one.owner, one.priority, one.deadline, one.measured(self._unrest()), one.begun_s)
                for one in self.senders
            ]
            limits = self.shares.limits(flows, self.now_s, 1000 + self.now_s)
            wants = {one.key: min(one.end, limits.get(one.key, float("inf"))) for one in self.senders}
            total = sum(one.connections for one in self.senders)
            goal = fill({one.key: one.connections / total for one in self.senders}, wants, self.rate)
            for one in self.senders:
                one.rate = min(goal[one.key], one.rate + 0.2 * self.rate) if goal[one.key] > one.rate else goal[one.key]
                one.done += one.rate * _STEP_S
        return {one.key: (one.done - before.get(one.key, 0.0)) / seconds for one in self.senders}

    def _unrest(self) -> float:
        return self.noise.uniform(1 - self.unrest, 1 + self.unrest)


def test_equal_flows_are_left_alone() -> None:
    link = _Link([_Sender("a"), _Sender("b", connections=8)])
    link.run(5)
    flows = [Flow(one.key, "", 0, 0, one.rate, 0.0) for one in link.senders]
    assert link.shares.limits(flows, link.now_s, 0) == {}


@pytest.mark.parametrize("unrest", [0.0, 0.1])
@pytest.mark.parametrize("many", [1, 2, 8])
def test_weights_of_four_to_one(many: int, unrest: float) -> None:
    link = _Link([_Sender("more", priority=2), _Sender("less", connections=many)], unrest=unrest)
    link.run(25)
    rates = link.run(60)
    assert rates["more"] / LINK == pytest.approx(0.8, rel=0.1)
    assert rates["less"] / LINK == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize("unrest", [0.0, 0.1])
@pytest.mark.parametrize("later_s", [0.1, 0.3, 10.0])
def test_weights_count_after_five_seconds_and_the_link_is_full(later_s: float, unrest: float) -> None:
    link = _Link([_Sender("less", connections=4)], unrest=unrest)
    link.run(later_s)
    link.senders.append(_Sender("more", priority=2, connections=4, begun_s=later_s))
    link.run(5)
    windows = [link.run(5) for _ in range(8)]
    for rates in windows:
        assert rates["more"] / sum(rates.values()) == pytest.approx(0.8, rel=0.1)
        assert sum(rates.values()) > 0.95 * LINK
    assert sum(rates["less"] for rates in windows) / 8 / LINK == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize("unrest", [0.0, 0.2])
def test_what_one_cannot_use_the_others_have(unrest: float) -> None:
    link = _Link([_Sender("bulk")], unrest=unrest)
    link.run(5)
    link.senders.append(_Sender("stuck", priority=10, end=0.05 * LINK, begun_s=link.now_s))
    link.run(10)
    rates = link.run(60)
    assert sum(rates.values()) > 0.95 * LINK
    link.senders[1].end = float("inf")  # and it gets its part when it can use it
    link.run(90)
    assert link.run(5)["stuck"] > 0.8 * LINK


def test_a_link_is_used_although_it_was_never_seen_full() -> None:
    link = _Link([_Sender("more", priority=2, end=0.4 * LINK), _Sender("less", connections=4)])
    link.run(40)
    rates = link.run(30)
    assert sum(rates.values()) > 0.8 * LINK
    assert rates["more"] > 0.35 * LINK


def test_a_link_that_changes_its_rate_is_used() -> None:
    link = _Link([_Sender("more", priority=2), _Sender("less")])
    link.run(10)
    for rate in (0.3 * LINK, 2 * LINK):
        link.rate = rate
        link.run(15)
        rates = link.run(10)
        assert sum(rates.values()) > 0.95 * rate
        assert rates["more"] / rate == pytest.approx(0.8, rel=0.1)


def test_a_link_that_was_away_is_used_again() -> None:
    link = _Link([_Sender("more", priority=2), _Sender("less")])
    link.run(60)
    link.rate = 0.001 * LINK
    link.run(10)
    link.rate = LINK
    link.run(20)
    assert sum(link.run(5).values()) > 0.9 * LINK


def test_an_urgent_flow_has_nearly_everything_at_once_and_nobody_starves() -> None:
    link = _Link([_Sender("bulk", connections=16)])
    link.run(5)
    link.senders.append(_Sender("urgent", priority=10, begun_s=link.now_s))
    link.run(1)
    rates = link.run(5)
    assert rates["urgent"] > 0.95 * LINK
    assert rates["bulk"] > 0.01 * LINK
    del link.senders[1]
    assert link.run(1)["bulk"] > 0.6 * LINK


def test_the_earliest_deadline_goes_first_until_it_has_passed() -> None:
    late, soon = _Sender("late", deadline=5000), _Sender("soon", deadline=1030)
    link = _Link([late, soon, _Sender("none")])
    link.run(5)
    rates = link.run(20)
    assert rates["soon"] > 0.8 * LINK
    assert min(rates.values()) > 0.01 * LINK
    link.run(10)
    rates = link.run(20)
    assert rates["late"] > 0.8 * LINK


def test_owners_have_equal_parts() -> None:
    link = _Link([_Sender(f"a{number}", owner="a", priority=10) for number in range(8)] + [_Sender("b", owner="b")])
    link.run(25)
    assert link.run(20)["b"] / LINK == pytest.approx(0.5, rel=0.1)


def test_files_that_wait_have_their_turn() -> None:
    now = 100_000.0
    files = {
        "low": turn(0, 0, now - 60, now),
        "lower": turn(0, 0, now - 50, now),
        "high": turn(1 << 40, 0, now - 10, now),
        "higher than any": turn(MOST_PRIORITY, 0, now - 20, now),
        "by noon": turn(0, int(now) + 50, now, now),
        "too late": turn(0, int(now) - 1, now - 55, now),
        "has waited": turn(0, 0, now - (MOST_PRIORITY + 2) * 1800, now),
    }
    order = ["has waited", "higher than any", "high", "by noon", "low", "too late", "lower"]
    assert sorted(files, key=files.__getitem__) == order


_FLOWS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 2**40), st.integers(0, 3000), st.floats(0, 1e9)), min_size=1
)


@given(_FLOWS)
@example([("a", 0, 0, 0.0), ("a", 1, 0, 1.0)])
def test_parts_are_of_one_whole_and_no_flow_is_stopped(rows: list[tuple[str, int, int, float]]) -> None:
    flows = [Flow(str(number), *row, begun_s=0.0) for number, row in enumerate(rows)]
    parts = weights(flows, 1000)
    assert sum(parts.values()) == pytest.approx(1)
    assert min(parts.values()) >= min(0.02, 0.2 / len(flows)) / 1.25
    limits = Shares().limits(flows, 50.0, 1000)
    assert all(limit >= LEAST_RATE for limit in limits.values())
    assert not limits or sum(limits.values()) >= sum(flow.rate for flow in flows)
