"""Refusals of hand-offs, each with the code of its row in the table of reasons (:mod:`stageout.core.reasons`).

A code goes with its sentence from the place where the reason arises: in the manager's answer to the plugin, in the
result ads of the plugin, or in the job's ad. It is counted on its node. Sentences may change, and nothing is found by
their words.
"""

from __future__ import annotations

#: The reason of a third-party plugin, which has no place for one in its reports.
NOT_SAID = "NotSaid"
#: The reason for which there is no other code, and that of a plugin or manager that sends no codes.
FAILED = "Failed"


class Reason(str):
    """A sentence that says why, with its code; empty where nothing speaks against the hand-off."""

    code: str

    def __new__(cls, code: str, sentence: str) -> Reason:
        """Make one out of a code of the table and a sentence."""
        made = super().__new__(cls, sentence)
        made.code = code
        return made


NO_REASON = Reason("", "")


class NotTaken(Exception):
    """The manager does not take a hand-off. Each subclass has the code of most of its reasons.

    :param sentence: for the job's owner. :param code: another one than that of the class.
    """

    code = FAILED

    def __init__(self, sentence: str, code: str = "") -> None:
        super().__init__(sentence)
        self.code = code or (sentence.code if isinstance(sentence, Reason) else self.code)
