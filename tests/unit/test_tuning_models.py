"""Stream model, sampling, CPU line and flow model; the LONI case of the talk."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stageout.core.errors import StageoutError
from stageout.tuning.flow import Capacities, CpuLine, cpu_line, opt_b
from stageout.tuning.streams import NoModelError, StreamModel, best_streams, fit, solve
from tests.as_printed import next_level

LONI = {1: 903.41, 2: 954.84, 4: 990.91, 8: 953.43}


def _sample(rate: object, most: int = 64) -> dict[int, float]:
    samples: dict[int, float] = {}
    while (streams := next_level(samples, most)) is not None:
        samples[streams] = rate(streams)  # type: ignore[operator]
    return samples


def test_sampling_stops_where_the_rate_falls() -> None:
    assert _sample(LONI.__getitem__) == LONI


def test_sampling_stops_where_the_rate_hardly_rises_and_at_the_limit() -> None:
    assert list(_sample(lambda n: min(n, 4) * 100 + n)) == [1, 2, 4, 8]
    assert list(_sample(lambda n: 10.0 * n, most=20)) == [1, 2, 4, 8, 16]
    assert list(_sample(lambda n: 10.0, most=0)) == []


@given(
    a=st.floats(1e-7, 1e-3),
    b=st.floats(1e-7, 1e-2),
    c=st.floats(0.3, 4),
    levels=st.sampled_from([(1, 2, 4), (1, 4, 16), (2, 4, 8), (1, 3, 10)]),
)
def test_solving_three_samples_gives_the_curve_back(a: float, b: float, c: float, levels: tuple[int, ...]) -> None:
    true = StreamModel(a, b, c)
    (y1, y2) = ((n / true.rate(n)) ** 2 for n in levels[:2])
    assume(y2 - y1 > 1e-3 * y1)  # else the samples hardly differ from a straight line
    found = solve({n: true.rate(n) for n in levels})
    assert found.c == pytest.approx(c, rel=1e-3, abs=1e-3)
    assert found.rate(6) == pytest.approx(true.rate(6), rel=1e-3)


def test_the_peak_is_where_the_derivative_is_zero() -> None:
    model = StreamModel(a=1e-6, b=4e-5, c=2.6)
    top = (2 * model.b / (model.a * (model.c - 2))) ** (1 / model.c)
    assert model.rate(top) > max(model.rate(top * 0.98), model.rate(top * 1.02))
    assert best_streams(model, 64) in (math.floor(top), math.ceil(top))


def test_samples_that_no_curve_goes_through_are_refused() -> None:
    with pytest.raises(NoModelError, match="sample more"):
        solve({1: 10.0, 2: 20.0, 4: 40.0})
    with pytest.raises(NoModelError, match="above 0"):
        solve({1: 10.0, 2: 0.0, 4: 40.0})
    with pytest.raises(NoModelError, match="three levels"):
        fit({1: 10.0, 2: 12.0})


def test_loni_the_nearest_curve_goes_through_1_2_and_8() -> None:
    model = fit(LONI)
    assert model.points == (1, 2, 8)
    distances = {
        points: sum(abs(solve({n: LONI[n] for n in points}).rate(n) - LONI[n]) for n in LONI)
        for points in ((1, 2, 4), (1, 2, 8), (1, 4, 8), (2, 4, 8))
    }
    assert min(distances, key=lambda points: distances[points]) == (1, 2, 8)
    assert model.rate(4) == pytest.approx(960, abs=2)
    assert max((number / 100 for number in range(100, 1000)), key=model.rate) == pytest.approx(3.34, abs=0.01)


def test_loni_two_streams_four_stripes_two_nodes() -> None:
    plan = opt_b(LONI, Capacities(nic=10_000, nodes=2), most_stripes=4)
    assert (plan.streams, plan.stripes, plan.nodes) == (2, 4, 2)
    assert plan.bound_by == "stripes"


@pytest.mark.parametrize(
    ("capacities", "stripes", "nodes", "rate", "bound"),
    [
        (Capacities(nic=1000, nodes=2), 2, 2, 2000, "nic"),
        (Capacities(nic=10_000, nodes=2, cpu_rate=1500), 2, 2, 3000, "cpu"),
        (Capacities(nic=10_000, nodes=4, network=3000), 4, 1, 3000, "network"),
        (Capacities(nic=10_000, nodes=4, disk=500), 1, 1, 500, "disk"),
    ],
)
def test_the_least_capacity_bounds_the_flow(
    capacities: Capacities, stripes: int, nodes: int, rate: float, bound: str
) -> None:
    plan = opt_b(LONI, capacities, most_stripes=4)
    assert (plan.stripes, plan.nodes, plan.rate, plan.bound_by) == (stripes, nodes, pytest.approx(rate), bound)


@given(
    nic=st.floats(10, 1e5),
    nodes=st.integers(1, 16),
    cpu=st.floats(10, 1e5),
    network=st.floats(10, 1e5),
    disk=st.floats(10, 1e5),
    most=st.integers(1, 16),
)
def test_a_plan_carries_its_flow_with_as_few_as_possible(
    nic: float, nodes: int, cpu: float, network: float, disk: float, most: int
) -> None:
    plan = opt_b(LONI, Capacities(nic, nodes, cpu, network, disk), most)
    stripe = fit(LONI).rate(plan.streams)

    def carries(count: int, stripes: int) -> float:
        return min(count * min(nic, cpu, stripes * stripe), network, disk)

    assert 1 <= plan.nodes <= nodes
    assert 1 <= plan.stripes <= most
    assert plan.rate == pytest.approx(carries(nodes, most))
    assert carries(plan.nodes, plan.stripes) == pytest.approx(plan.rate)
    if plan.nodes > 1:
        assert carries(plan.nodes - 1, most) < plan.rate * (1 + 1e-6)


def test_cpu_line_is_least_squares() -> None:
    line = cpu_line([(100, 12), (200, 21), (300, 32)])
    assert line.b == pytest.approx(0.1)
    assert line.a == pytest.approx(5 / 3)
    assert line.percent(400) == pytest.approx(41.667, abs=1e-3)
    assert line.rate_at(100) == pytest.approx(983.33, abs=0.01)
    assert CpuLine(5, 0).rate_at(100) == math.inf
    with pytest.raises(StageoutError, match="two different rates"):
        cpu_line([(100, 12), (100, 13)])
