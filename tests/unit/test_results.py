"""A plugin's result ads: which of their words count."""

from __future__ import annotations

from pathlib import Path

import pytest

from stageout.core.errors import ErrorClass
from stageout.movers import results
from stageout.movers.results import (
    NO_FACTS,
    PLUGINS_WORD,
    Delivered,
    Ending,
    Failure,
    SentFile,
    TransferFacts,
    read_answers,
    read_single,
)

SENT = SentFile(Path("f"), "https://h/f", "f", 5)


def _answer(facts: str, sent: SentFile = SENT, status: int = 0) -> object:
    ad = f'[ TransferFileName = "f"; TransferUrl = "https://h/f"; TransferSuccess = true; {facts} ]'
    (answer,) = read_answers([sent], ad, Ending(status))
    return answer


def _kind(answer: object) -> ErrorClass | None:
    return answer.kind if isinstance(answer, Failure) else None


VERIFIED = 'DeveloperData = [ StageOutVerified = "size digest"; StageOutDigests = "sha256:00" ];'


def test_what_the_destination_confirmed_counts_whatever_the_status() -> None:
    for status in (0, 1, -9):
        answer = _answer(VERIFIED + "TransferFileBytes = 5;", status=status)
        assert answer == Delivered("size digest", "sha256:00")


@pytest.mark.parametrize("told", [4, 6, 0])
@pytest.mark.parametrize("word", [VERIFIED, ""])
def test_another_size_than_the_file_s_is_a_failure(word: str, told: int) -> None:
    assert _kind(_answer(f"{word} TransferFileBytes = {told};")) is ErrorClass.SIZE_MISMATCH


def test_bytes_that_are_no_text_do_not_get_past_the_reader() -> None:
    words = r'DeveloperData = [ StageOutVerified = "size\377"; StageOutDigests = "a:\3770" ]; TransferFileBytes = 5;'
    answer = _answer(words)
    assert answer == Delivered("size", "a: 0")


@pytest.mark.parametrize("digits", [400, 5000])
def test_numbers_of_any_length_are_read(digits: int) -> None:
    number = "9" * digits
    ad = f'[ TransferFileName = "f"; TransferSuccess = false; TransferErrorData = {{ [ Retryable = {number} ] }} ]'
    (answer,) = read_answers([SENT], ad, Ending(1))
    assert isinstance(answer, Failure)
    assert answer.retry_after_s < 1 << 41
    assert _kind(read_single(SENT, f"TransferFileBytes = {number}", Ending(0))) in (ErrorClass.SIZE_MISMATCH, None)


def test_an_error_of_the_reader_is_a_failed_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> object:
        raise RuntimeError("odd")

    monkeypatch.setattr(results, "_facts", fail)
    assert _kind(_answer("TransferFileBytes = 5;")) is ErrorClass.PLUGIN_BROKEN
    assert _kind(read_single(SENT, "", Ending(0))) is ErrorClass.PLUGIN_BROKEN


def test_word_of_a_plugin_that_verifies_nothing_counts_with_its_status() -> None:
    assert _answer("TransferFileBytes = 5;") == Delivered(PLUGINS_WORD)
    assert _kind(_answer("TransferFileBytes = 5;", status=1)) is ErrorClass.UNKNOWN
    assert _kind(_answer("")) is ErrorClass.NOT_VERIFIED


def _facts(text: str) -> TransferFacts:
    answer = _answer(f"TransferFileBytes = 5; {text}")
    assert isinstance(answer, Delivered)
    return answer.facts


def test_figures_of_a_transfer_are_those_that_its_plugin_reports() -> None:
    times = "TransferStartTime = 1800000000; TransferEndTime = 1800000007; ConnectionTimeSeconds = 6.5;"
    own = 'DeveloperData = [ StageOutSeconds = 6.25; Streams = 4; Routes = "a:1: 5.0 MB" ];'
    assert _facts(times + own) == TransferFacts(1_800_000_000, 1_800_000_007, 6250, 4, "a:1: 5.0 MB")
    assert _facts(times).transfer_ms == 6500
    assert _facts("TransferStartTime = 1800000000; TransferEndTime = 1800000007;").transfer_ms == 7000
    assert _facts("") == NO_FACTS


@pytest.mark.parametrize("value", ["-1", "1.0E300", '"x"', "true", "undefined", "9223372036854775807", "{ 1 }"])
def test_figures_that_cannot_be_are_left_out(value: str) -> None:
    names = ("TransferStartTime", "TransferEndTime", "ConnectionTimeSeconds")
    ad = " ".join(f"{name} = {value};" for name in names)
    developer = " ".join(f"{name} = {value};" for name in ("StageOutSeconds", "Streams"))
    assert _facts(f"{ad} DeveloperData = [ {developer} ];") == NO_FACTS


def test_a_plugin_of_one_file_has_figures_too() -> None:
    answer = read_single(SENT, "TransferFileBytes = 5\nConnectionTimeSeconds = 2.0\n", Ending(0))
    assert answer == Delivered(PLUGINS_WORD, facts=TransferFacts(transfer_ms=2000))
