"""Names that do not exist: when that is the matter of the job's owner."""

from __future__ import annotations

import pytest

from sandbox_manager.scheduling.retry import MOST, NameRecord, is_owners_matter
from stageout.core.errors import ErrorClass
from stageout.core.states import State
from stageout.model.run import RunFacts
from stageout.movers.results import Answer, Delivered, Failure
from tests.polling import until
from tests.unit.manager_site import Node, Site, made, run

_DENIED = Failure(ErrorClass.NAME_NOT_RESOLVED, "there is no such host")
_BROKEN = Failure(ErrorClass.NAME_LOOKUP_FAILED, "SERVFAIL")
_SENT = Delivered("size")


@pytest.mark.parametrize(
    ("denied", "found", "expected"),
    [
        ({"typo": 10}, {"other": 11}, True),
        ({"typo": 10}, {"other": 10}, False),
        ({"typo": 10}, {"other": 9}, False),
        ({"typo": 10}, {}, False),
        ({}, {"other": 11}, False),
        ({"else": 10}, {"other": 11}, False),
        ({"typo": 10}, {"typo": 9, "other": 11}, False),
        ({"typo": 10, "else": 5}, {"third": 11, "other": 1}, True),
    ],
)
def test_a_denial_counts_if_another_name_was_found_since(
    denied: dict[str, float], found: dict[str, float], expected: bool
) -> None:
    assert is_owners_matter("typo", denied, found) is expected


@pytest.mark.parametrize(
    ("place", "answer", "counts"),
    [
        ("other.org:443", _SENT, True),
        ("other.org", Failure(ErrorClass.PERMISSION_DENIED, "403"), True),
        ("other.org", Failure(ErrorClass.SERVER_BUSY, "503"), True),
        ("other.org", Failure(ErrorClass.PERMISSION_DENIED, "by the manager", of_node=True), False),
        ("other.org", Failure(ErrorClass.BAD_URL, "nobody was asked"), False),
        ("other.org", Failure(ErrorClass.CONNECT_FAILED, "by a proxy perhaps"), False),
        ("other.org", Failure(ErrorClass.PLUGIN_BROKEN, "it crashed"), False),
        ("other.org", _DENIED, False),
        ("other.org", _BROKEN, False),
        ("192.0.2.7:8080", _SENT, False),
        ("[2001:db8::7]:8080", _SENT, False),
        ("localhost:8080", _SENT, False),
        ("", _SENT, False),
        ("typo.org", _SENT, False),
    ],
)
def test_only_a_server_that_was_found_by_name_shows_that_names_resolve(
    place: str, answer: Answer, counts: bool
) -> None:
    record = NameRecord()
    assert not record.record_answers("typo.org:443", [_DENIED], 0, 1), "nothing is known yet"
    record.record_answers(place, [answer], 2, 3)
    assert record.record_answers("TYPO.org.:443", [_DENIED], 4, 5) is counts


def test_a_call_that_began_before_the_denial_shows_nothing() -> None:
    """Its name was resolved when the resolver still answered."""
    record = NameRecord()
    record.record_answers("typo.org", [_DENIED], 10, 11)
    record.record_answers("other.org", [_SENT], 5, 20)
    assert not record.record_answers("typo.org", [_DENIED], 21, 22)


def test_a_name_that_has_resolved_is_the_site_s_matter() -> None:
    record = NameRecord()
    record.record_answers("here.org", [_SENT], 0, 1)
    record.record_answers("here.org", [_DENIED], 2, 3)
    record.record_answers("other.org", [_SENT], 4, 5)
    assert not record.record_answers("here.org", [_DENIED], 6, 7)


def test_an_outage_that_denies_all_names_holds_nobody() -> None:
    record = NameRecord()
    record.record_answers("other.org", [_SENT], 0, 1)
    for at in range(2, 100):
        assert not record.record_answers(f"{at % 7}.org", [_DENIED], at, at + 0.5)


def test_names_are_bounded() -> None:
    record = NameRecord()
    for at in range(2 * MOST):
        record.record_answers(f"a{at}.org", [_DENIED], at, at)
        record.record_answers(f"b{at}.org", [_SENT], at, at)
    assert len(record._denied) == len(record._found) == MOST


async def _confirmed(node: Node, facts: RunFacts, url: str) -> None:
    receipt = await node.hand_off({url: b"x"}, facts)
    await node.confirm(receipt, facts=facts)


def test_output_to_a_name_that_nobody_has_fails_while_others_are_delivered() -> None:
    """It waited for STAGEOUT_DELIVERY_TIMEOUT, three days: the job was held only then."""

    async def work(site: Site) -> None:
        async with site.manager() as node:
            wrong, right = node.facts("1.0"), node.facts("2.0")
            await _confirmed(node, wrong, "copy://typo.org/nowhere/a")
            await node.until_state(State.RETRY_WAIT, wrong)
            await _confirmed(node, right, "copy://here.org/ok/b")
            await node.until_state(State.RELEASED, right)
            assert node.state(wrong) is State.RETRY_WAIT
            for attempt in range(3):
                node.clock.ahead_s += 100
                await until(lambda: len(site.calls()) > 2 + attempt, lambda: "an attempt")  # noqa: B023
                await until(lambda: node.state(wrong) in (State.RETRY_WAIT, State.FAILED), lambda: "its end")
            box = await node.until_state(State.FAILED, wrong)
        assert "other names resolve on this node; gave up after 3 attempts" in box.reason
        assert len(site.calls()) == 5, "one without evidence, three that count, and the other's"

    with made() as site:
        run(work(site))
