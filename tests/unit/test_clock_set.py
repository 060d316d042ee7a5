"""A node whose wall clock is set while output waits there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from manager_site import Site, made, run
from test_drain import handed_off

from sandbox_manager.custody.clock_jumps import ClockReading, read_clock
from stageout.core import durable
from stageout.core.clock import SystemClock
from stageout.core.states import State
from tests.polling import until


class SetClock(SystemClock):
    """The machine's, but that the wall clock can be set. :ivar ahead_s: by so much."""

    ahead_s = 0.0

    def wall_s(self) -> float:
        return super().wall_s() + self.ahead_s


@pytest.fixture
def site() -> Iterator[Site]:
    with made() as found:
        yield found


@pytest.mark.parametrize("jump_s", [30 * 86_400.0, -3600.0])
def test_nothing_is_given_up_or_deleted_for_a_clock_that_is_set(
    site: Site, jump_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a month: more than STAGEOUT_DELIVERY_TIMEOUT and STAGEOUT_RETENTION."""
    clock = SetClock()
    monkeypatch.setattr("manager_site.LaterClock", lambda: clock)

    async def story() -> None:
        async with site.manager(moving=False) as node:
            await node.hand_off({"copy://h/ok/a": b"x"})
            await handed_off(node, "2.0", {"copy://h/ok/b": b"x"})
            clock.ahead_s = jump_s
            with monkeypatch.context() as patch:
                patch.setattr(durable, "_faults", durable.parse_faults("record-retry=EIO"))
                with pytest.raises(OSError, match="Input/output error"):
                    await node.pipeline.run_housekeeping()
            await node.pipeline.run_housekeeping()
            boxes = list(node.pipeline.store.registry.by_id.values())
            assert [(box.state, box.reason) for box in boxes] == [(State.ACCEPTED, ""), (State.CONFIRMED, "")]
            assert node.clock is clock
            assert all(0 <= clock.wall_s() - box.accepted_at < 600 for box in boxes)

    run(story())


def test_an_attempt_that_fails_before_the_house_is_kept_is_not_the_last(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SetClock()
    monkeypatch.setattr("manager_site.LaterClock", lambda: clock)

    async def story() -> None:
        site.flag("hold")
        async with site.manager() as node:
            await handed_off(node, "2.0", {"copy://h/wait/a": b"x", "copy://h/nothing/b": b"x"})
            await until(lambda: (site.base / "waiting").exists(), "the plugin")
            clock.ahead_s = 30 * 86_400.0
            site.flag("hold", False)
            facts = node.facts("2.0", dslot_id=2)
            await until(lambda: (node.box(facts) or site).attempts, "the answer")  # type: ignore[union-attr]
            assert node.state(facts) is not State.FAILED

    run(story())


@pytest.mark.parametrize("jump_s", [400 * 86_400.0, -3600.0, -400 * 86_400.0])
def test_nothing_is_given_up_or_kept_for_ever_for_a_clock_that_is_set_while_the_manager_is_down(
    site: Site, jump_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SetClock()
    monkeypatch.setattr("manager_site.LaterClock", lambda: clock)

    async def story() -> None:
        async with site.manager(moving=False) as node:
            await node.hand_off({"copy://h/ok/a": b"x"})
            await handed_off(node, "2.0", {"copy://h/ok/b": b"x"})
        clock.ahead_s = jump_s
        for _ in range(2):  # the next start minds nothing again
            async with site.manager(moving=False) as node:
                await node.pipeline.run_housekeeping()
                boxes = list(node.pipeline.store.registry.by_id.values())
                assert [(box.state, box.reason) for box in boxes] == [(State.ACCEPTED, ""), (State.CONFIRMED, "")]
                assert all(0 <= clock.wall_s() - box.accepted_at < 600 for box in boxes)

    run(story())


def test_what_has_passed_while_the_manager_was_down_counts(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            await node.hand_off({"copy://h/ok/a": b"x"})
        monkeypatch.setattr("manager_site.LaterClock.ahead_s", 40 * 86_400.0)
        async with site.manager(moving=False) as node:
            await node.pipeline.run_housekeeping()
            (box,) = node.pipeline.store.registry.by_id.values()
            assert (box.state, box.reason[:15]) == (State.LOST, "never confirmed")

    run(story())


DAY_S = 86_400


@pytest.mark.parametrize(
    ("before", "now", "jump_s"),
    [
        (ClockReading("b", 100, 1000), ClockReading("b", 100, 900_000), 0),
        (ClockReading("b", 100, 1000), ClockReading("b", 140, 2000), 0),
        (ClockReading("b", 100, 1000), ClockReading("b", 100 + 365 * DAY_S, 365 * DAY_S), 365 * DAY_S),
        (ClockReading("b", 100, 9000), ClockReading("b", -7100, 2000), -7200),
        (ClockReading("b", 100, 1000), ClockReading("c", 900, 1000 + DAY_S), 0),
        (ClockReading("b", 100, 1000), ClockReading("c", 900, 1000 + 8 * DAY_S), 7 * DAY_S),
        (ClockReading("b", 100, 9000), ClockReading("c", 900, 2000), -7000),
        (ClockReading("", 100, 1000), ClockReading("", 900, 5000), 0),
    ],
)
def test_by_how_much_a_clock_was_set(before: ClockReading, now: ClockReading, jump_s: int) -> None:
    """Over a start of the machine a day is believed."""
    kept = read_clock(str(before))
    assert kept is not None
    assert kept.jump_s(now) == jump_s


@pytest.mark.parametrize("text", ["", "b", "b 1", "b x 2"])
def test_a_ledger_that_has_kept_no_clock(text: str) -> None:
    assert read_clock(text) is None
