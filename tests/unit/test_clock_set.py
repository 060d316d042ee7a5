"""A node whose wall clock is set while output waits there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from manager_site import Site, made, run
from test_drain import handed_off

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
    """By a month: more than STAGEOUT_GIVE_UP and STAGEOUT_RETENTION."""
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
                    await node.pipeline.keep_house()
            await node.pipeline.keep_house()
            boxes = list(node.pipeline.book.registry.by_id.values())
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
