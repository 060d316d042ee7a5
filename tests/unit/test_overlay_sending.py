"""The common decisions of several routes, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay import client
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.links import Claim
from stageout.overlay.sending import RecordsLost, Sending
from stageout.overlay.way import Way
from stageout.overlay.wire.messages import Cancel, Message, Open, Opened, Operation, Result, Staged

GATEWAY = Gateway("host", 1, "key", b"secret")


class _Cargo:
    """A file of blocks that are nowhere."""

    gateway = GATEWAY
    connections = most_connections = 2
    claim = Claim()

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks

    def ask(self) -> Open:
        return Open("0" * 32, 1, "f", self.blocks, 1, 99)

    def take(self, block: int, file: int, buffer: memoryview, channel: Any) -> memoryview:
        return buffer

    def publish(self, tid: int, channel: Any) -> Operation:
        return Operation("0" * 32, 1, "publish", "f", 99, tid=tid)

    def count(self, size_bytes: int) -> None:
        return


class _Control:
    """Remembers what was said."""

    def __init__(self) -> None:
        self.said: list[Message] = []

    def send(self, message: Message) -> None:
        self.said.append(message)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    with (tmp_path / "file").open("wb") as opened:
        yield opened.fileno()


def test_a_route_that_was_silent_for_hours_does_not_end_the_others(file: int) -> None:
    way = Sending(_Cargo(1), file, [(), ("r:1",)], 60).ways[1]
    way._silent = 5000
    assert way._silence_s([0.1]) == GATEWAY.timeout_s


def _up(way: Way) -> _Control:
    control = _Control()
    way.control = cast(Channel, control)
    return control


def _sending(file: int, blocks: int, routes: int) -> tuple[Sending, list[_Control]]:
    sending = Sending(_Cargo(blocks), file, [(f"r{number}:1",) for number in range(routes)], 60)
    sending.hear(sending.ways[0], Opened(7, "epoch"))
    return sending, [_up(way) for way in sending.ways]


def _sends(sending: Sending, way: Way, carrier: int) -> int | None:
    part = sending.take(way, carrier)
    if part is None:
        return None
    sending.read(part.block, -1, memoryview(b""), cast(Channel, None))
    return part.block


def test_a_file_that_grows_is_sent_as_it_comes_and_published_when_it_is_whole(file: int) -> None:
    sending = Sending(_Cargo(3), file, [()], 60, grows=True)
    (way,) = sending.ways
    sending.hear(way, Opened(7, "epoch", ((2, 3),)))
    control = _up(way)
    sending.ready.wait = lambda timeout=None: True  # type: ignore[method-assign, assignment]
    assert _sends(sending, way, 1) is None
    sending.arrived([1, 2])
    assert _sends(sending, way, 1) == 1
    assert _sends(sending, way, 1) is None, "the router has the third already"
    sending.lost(1, TransferFailure(ErrorClass.CONNECTION_LOST, "reset"))
    sending.hear(way, Opened(8, "epoch"))
    assert [_sends(sending, way, 2) for _ in range(3)] == [1, 2, None], "the first block is still to come"
    assert not _published(control)
    sending.arrived([0])
    assert _sends(sending, way, 2) == 0
    assert not _published(control)
    sending.complete()
    assert _published(control)


@pytest.mark.parametrize("ranges", [(), ((1, 2),), ((0, 1), (2, 3))])
def test_blocks_that_a_router_has_lost_go_again(file: int, ranges: tuple[tuple[int, int], ...]) -> None:
    """Its staging files were lost, its records were not: the same epoch, the same number, and fewer blocks."""
    sending, (control,) = _sending(file, 3, 1)
    (way,) = sending.ways
    assert [_sends(sending, way, 1) for _ in range(3)] == [0, 1, 2]
    sending.hear(way, Staged(7, ((0, 3),)))
    assert _published(control)
    way.control = None
    sending.down(way, True)
    way.had = sending.had()
    sending.hear(way, Opened(7, "epoch", ranges))
    lost = sorted({0, 1, 2} - {block for first, end in ranges for block in range(first, end)})
    control = _up(way)
    sending.repeat(way)
    assert not _published(control), "not all of it is there"
    assert [_sends(sending, way, 2) for _ in lost] == lost
    assert _published(control)


@pytest.mark.parametrize(("epoch", "again"), [("earlier", [0, 1]), ("epoch", []), ("", [])])
def test_blocks_of_an_earlier_epoch_go_again(file: int, epoch: str, again: list[int]) -> None:
    """A custodian that has lost blocks begins another epoch; what it said before may come late, by another route."""
    sending, _ = _sending(file, 2, 1)
    (way,) = sending.ways
    sending.ready.wait = lambda timeout=None: True  # type: ignore[method-assign, assignment]
    assert [_sends(sending, way, 1) for _ in range(2)] == [0, 1]
    sending.hear(way, Staged(7, ((0, 2),), epoch))
    sending.lost(1, TransferFailure(ErrorClass.CONNECTION_LOST, "reset"))
    assert [block for block in (_sends(sending, way, 2) for _ in range(2)) if block is not None] == again


def test_blocks_that_were_staged_while_a_route_was_asking_do_not_go_again(file: int) -> None:
    sending, _ = _sending(file, 2, 2)
    one, two = sending.ways
    assert [_sends(sending, one, 1) for _ in range(2)] == [0, 1]
    sending.hear(one, Staged(7, ((0, 1),)))
    two.had = sending.had()
    sending.hear(one, Staged(7, ((1, 2),)))
    sending.hear(two, Opened(7, "epoch", ((0, 1),)))
    assert not sending.is_waiting(1)
    assert sending._order is not None


def _published(control: _Control) -> bool:
    return any(isinstance(message, Operation) for message in control.said)


def test_publish_leaves_by_all_routes_when_the_last_block_was_read(file: int) -> None:
    sending, controls = _sending(file, 2, 2)
    one, two = (sending.carrier(way) for way in sending.ways)
    assert _sends(sending, sending.ways[0], one) == 0
    assert not any(_published(control) for control in controls)
    assert _sends(sending, sending.ways[1], two) == 1
    assert all(_published(control) for control in controls)


def test_publish_leaves_also_when_the_last_block_turns_out_to_be_there(file: int) -> None:
    """A route that died gave its block back, and then STAGED came for it: nobody reads a block any more."""
    sending, controls = _sending(file, 1, 1)
    carrier = sending.carrier(sending.ways[0])
    block = sending.take(sending.ways[0], carrier)
    sending.lost(carrier, TransferFailure(ErrorClass.CONNECTION_LOST, "gone"))
    assert block is not None
    sending.read(block, -1, memoryview(b""), cast(Channel, None))
    assert not _published(controls[0])
    sending.hear(sending.ways[0], Staged(7, ((0, 1),)))
    assert _published(controls[0])


def test_what_a_dead_route_had_goes_by_the_other(file: int) -> None:
    sending, _ = _sending(file, 3, 2)
    one, two = (sending.carrier(way) for way in sending.ways)
    assert [_sends(sending, sending.ways[0], one), _sends(sending, sending.ways[0], one)] == [0, 1]
    sending.hear(sending.ways[1], Staged(7, ((0, 1),)))
    sending.down(sending.ways[0], was_up=True)
    assert [_sends(sending, sending.ways[1], two) for _ in range(2)] == [2, 1]


def test_a_fast_route_takes_over_what_a_slow_one_has_and_equal_ones_wait(file: int) -> None:
    sending, _ = _sending(file, 8, 2)
    fast, slow = sending.ways
    one, two = sending.carrier(fast), sending.carrier(slow)
    assert _sends(sending, slow, two) == 0
    assert [_sends(sending, fast, one) for _ in range(7)] == [1, 2, 3, 4, 5, 6, 7]
    assert _sends(sending, fast, one) is None, "nothing is known of their rates, and its own are under way"
    sending.hear(fast, Staged(7, ((1, 5),)))
    assert _sends(sending, fast, one) == 0
    assert _sends(sending, slow, two) is None, "a slow one takes over nothing while its own is under way"
    sending.hear(fast, Staged(7, ((0, 1), (5, 7))))
    assert _sends(sending, slow, two) == 7, "an idle one does"


@pytest.mark.parametrize("message", [Staged(7, ((0, 2**62),)), Opened(7, "epoch", ((5, 9),))])
def test_blocks_that_the_file_does_not_have_are_refused(file: int, message: Message) -> None:
    sending, _ = _sending(file, 3, 1)
    with pytest.raises(TransferFailure, match="does not have"):
        sending.hear(sending.ways[0], message)


def test_the_first_final_answer_counts(file: int) -> None:
    sending, _ = _sending(file, 0, 1)
    sending.hear(sending.ways[0], Result("0" * 32, 1, "pending"))
    assert sending._answer is None
    done = Result("0" * 32, 1, "done")
    sending.hear(sending.ways[0], done)
    sending.hear(sending.ways[0], Result("0" * 32, 1, "failed"))
    assert sending._answer == done


def test_an_answer_to_another_operation_of_the_same_origin_is_none(file: int) -> None:
    """It was under way on a connection that had served it."""
    sending, _ = _sending(file, 1, 1)
    sending.hear(sending.ways[0], Result("0" * 32, 2, "done"))
    sending.hear(sending.ways[0], Result("1" * 32, 1, "done"))
    assert sending._answer is None


def test_a_file_does_not_fail_as_idle_connections_are_too_many(file: int) -> None:
    (way,) = Sending(_Cargo(1), file, [()], 60).ways
    closed = TransferFailure(ErrorClass.CONNECTION_LOST, "closed")
    assert not way._has_made_room(TransferFailure(ErrorClass.CONNECT_FAILED, "nobody is there"))
    assert [way._has_made_room(closed) for _ in range(3)] == [True, True, False]


def test_a_connection_that_is_one_too_many_is_not_tried_again(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router refuses it, as it does beyond its limit, and meanwhile the controller has gone back."""
    sending, _ = _sending(file, 8, 1)
    (way,) = sending.ways
    control, tried = way.control, []
    assert control is not None

    def refused(*arguments: object, **more: object) -> None:
        tried.append(1)
        way.sockets._climber.now = 1
        way.control = None if len(tried) > 1 else control  # else this test would never end
        raise TransferFailure(ErrorClass.SERVER_BUSY, "enough connections")

    monkeypatch.setattr("stageout.overlay.way.Channel", refused)
    monkeypatch.setattr(way, "_pause", lambda seconds: None)
    way._manned = {0, 1}
    way._carry(control, 1)
    assert len(tried) == 1
    assert way._manned == {0}


def test_nothing_is_published_again_where_the_records_were_lost(file: int) -> None:
    """Not even an empty file, of which nothing has to come again."""
    sending, (first, second) = _sending(file, 0, routes=2)
    sending._checks = True
    sending.publish()
    for way in sending.ways:
        sending.hear(way, Opened(7, "another epoch"))
        sending.repeat(way)
    assert isinstance(sending._failure, RecordsLost)
    assert [len(control.said) for control in (first, second)] == [1, 1]


@pytest.mark.parametrize("ranges", [(), ((0, 1),), ((0, 2),)])
def test_the_late_word_of_a_router_that_has_died_counts_no_longer_than_its_route(
    file: int, ranges: tuple[tuple[int, int], ...]
) -> None:
    """It lost its records; one route heard of it, and then another one what it had said before."""
    sending, (_, control) = _sending(file, 2, 2)
    late, live = sending.ways
    sending.hear(live, Opened(9, "new"))
    sending.hear(late, Opened(7, "epoch", ranges))
    sending.down(late, was_up=True)
    control.said.clear()
    carrier = sending.carrier(live)
    assert [_sends(sending, live, carrier) for _ in range(2)] == [0, 1]
    assert [one.tid for one in control.said if isinstance(one, Operation)] == [9]


def test_an_empty_file_is_published_where_the_last_word_counted_no_longer(file: int) -> None:
    sending, (_, control) = _sending(file, 0, 2)
    late, live = sending.ways
    sending.hear(live, Opened(9, "new"))
    sending.hear(late, Opened(7, "epoch"))
    sending.down(late, was_up=True)
    assert [one.tid for one in control.said if isinstance(one, Operation)][-1] == 9


def test_a_file_that_was_found_there_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The OPEN that told of the loss of the records would count for the key until it expires."""
    (tmp_path / "f").write_bytes(b"")
    said = list[Message]()

    class Connection(_Control):
        def __init__(self, gateway: Gateway, route: object) -> None:
            self.said = said

        def __enter__(self) -> Connection:
            return self

        def __exit__(self, *failure: object) -> None:
            return

    def lost(sending: Sending) -> None:
        raise RecordsLost(ErrorClass.SERVER_ERROR, "lost")

    monkeypatch.setattr(Sending, "run", lost)
    monkeypatch.setattr("stageout.overlay.client.Channel", Connection)
    monkeypatch.setattr("stageout.overlay.finding.generation_of", lambda *facts: 4)
    order = Operation("0" * 32, 1, "publish", "f", 99)
    answer = client.Upload(GATEWAY, tmp_path / "f", order, 1, lambda sent_bytes: None).run()
    assert (answer, said) == (Result("0" * 32, 1, "done", generation=4), [Cancel("0" * 32, 1, data_only=True)])


def test_no_connection_is_made_ahead_when_all_is_over(file: int) -> None:
    sending, _ = _sending(file, 2, 1)
    sending.over = True
    (way,) = sending.ways
    way._make_ahead(2)
    assert not way._coming


class _Leaving:
    """A connection that is one too many: its end closes it at the second look, when what it sent turned out wrong."""

    def __init__(self) -> None:
        self.looks = 0

    def has_more(self, within_s: float) -> bool:
        self.looks += 1
        return self.looks == 2

    def receive(self) -> Message:
        raise TransferFailure(ErrorClass.CONNECTION_LOST, "reset")


def test_a_connection_that_is_one_too_many_stays_until_its_blocks_are_staged(file: int) -> None:
    sending, (control,) = _sending(file, 2, 1)
    (way,) = sending.ways
    for number in (1, 2):
        assert sending.carrier(way) == number
    assert [_sends(sending, way, 1), _sends(sending, way, 2)] == [0, 1]
    with pytest.raises(TransferFailure, match="reset"):
        way._await_staged(cast(Channel, control), cast(Channel, _Leaving()), 1)
    sending.hear(way, Staged(7, ((0, 1),)))
    unheard = _Leaving()
    way._await_staged(cast(Channel, control), cast(Channel, unheard), 1)
    assert unheard.looks == 0
