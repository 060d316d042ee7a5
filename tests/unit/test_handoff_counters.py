"""Hand-offs of the last hour, counted by reason."""

from __future__ import annotations

from sandbox_manager.intake.counters import WINDOW_S, HandoffCounters

NO_COPIES = {"HandoffsCopied": 0, "HandoffBytesCopied": 0, "HandoffCopyMs": 0}


def test_reasons_are_counted_and_those_that_differ_in_numbers_only_are_one() -> None:
    counters = HandoffCounters()
    counters.accepted(0.0)
    for number in range(3):
        counters.refused(1.0, f"the spool would hold {number} MB of 20.5 MB", "SpoolFull")
    counters.refused(2.0, "the sandbox manager is stopping", "Stopping")
    assert counters.facts(3.0) == {
        "HandoffsTried": 5,
        "HandoffsRefused": 4,
        "HandoffRefusals": [
            {"Reason": "the spool would hold N MB of N MB", "Count": 3},
            {"Reason": "the sandbox manager is stopping", "Count": 1},
        ],
        **NO_COPIES,
    }


def test_what_is_older_than_an_hour_no_longer_counts() -> None:
    counters = HandoffCounters()
    counters.refused(0.0, "no", "Failed")
    counters.accepted(10.0)
    assert counters.facts(WINDOW_S + 1.0) == {
        "HandoffsTried": 1,
        "HandoffsRefused": 0,
        "HandoffRefusals": [],
        **NO_COPIES,
    }


def test_copies_of_the_last_hour_are_added_up() -> None:
    counters = HandoffCounters()
    for at_s, size_bytes in ((0.0, 7), (10.0, 100), (20.0, 200)):
        counters.copied(at_s, size_bytes, 0.25)
    facts = counters.facts(WINDOW_S + 5.0)
    assert (facts["HandoffsCopied"], facts["HandoffBytesCopied"], facts["HandoffCopyMs"]) == (2, 300, 500)


def test_the_slots_show_counts_by_code() -> None:
    counters = HandoffCounters()
    counters.accepted(1.0)
    for _ in range(2):
        counters.refused(1.0, "the job of alice@x runs as nobody, an account that other owners may share", "SlotUser")
    counters.refused(0.0, "something new", "Failed")
    assert counters.figures(2.0) == {"StageOutHandoffs": 4, "StageOutSynchronous": {"SlotUser": 2, "Failed": 1}}
    assert counters.figures(WINDOW_S + 5.0) == {"StageOutHandoffs": 0, "StageOutSynchronous": {}}
