"""A plugin's result ads: which of their words count."""

from __future__ import annotations

import pytest

from stageout.core.errors import ErrorClass
from stageout.movers.results import PLUGINS_WORD, Delivered, Ending, Failure, SentFile, read_answers

SENT = SentFile("f", "https://h/f", 5)


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


def test_word_of_a_plugin_that_verifies_nothing_counts_with_its_status() -> None:
    assert _answer("TransferFileBytes = 5;") == Delivered(PLUGINS_WORD)
    assert _kind(_answer("TransferFileBytes = 5;", status=1)) is ErrorClass.UNKNOWN
    assert _kind(_answer("")) is ErrorClass.NOT_VERIFIED
