"""The meaning of a router's refusal: from the words of the protocol to the table of failures."""

from __future__ import annotations

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.wire.messages import Result

#: After these the same is asked for again: by another connection, or when the disk of the router is back or has room.
RESUMABLE = frozenset(
    {
        ErrorClass.CONNECTION_LOST,
        ErrorClass.STALLED,
        ErrorClass.CONNECT_FAILED,
        ErrorClass.SERVER_ERROR,
        ErrorClass.NO_SPACE_REMOTE,
    }
)
#: Words that a router's refusal begins with, as far as they are part of the protocol (docs/developer/wire.md).
_REASONS = {
    "precondition": ErrorClass.CONFLICT,
    "conflict": ErrorClass.CONFLICT,
    "dependency": ErrorClass.CONFLICT,
    "digest": ErrorClass.CONTENT_MISMATCH,
    "lot": ErrorClass.QUOTA_EXCEEDED,
    "source": ErrorClass.SOURCE_CHANGED,
    "unreachable": ErrorClass.CONNECT_FAILED,
    "unpacked": ErrorClass.NOT_SUPPORTED,
}
_WORDS = {
    "precondition": "there is a file already, or another version than the one that was named",
    "conflict": "it does not fit what is there: a directory is missing, or something is in the way",
    "dependency": "an operation before it failed, on which it depends",
    "digest": "the bytes that arrived are not those that were announced: send it again",
    "lot": "the lot is over, not yours, for other names, or has too little left: reserve another",
    "source": "the file was replaced or removed while it was copied",
    "unreachable": "the router knows no route to the other one",
    "space": "the router has no room for it now",
    "unrecorded": "the router has no room to record it: it may be there",
    "unpacked": "what is below this name takes no packs: send the file by itself",
}
_OUTCOMES = {"expired": ErrorClass.DEADLINE, "lost": ErrorClass.SERVER_ERROR}


def failure(answer: Result, path: str, server: str) -> TransferFailure | None:
    """Return why an operation did not happen; None when it did."""
    if answer.outcome == "done":
        return None
    word, _, detail = answer.reason.partition(": ")
    told = ErrorClass.from_code(answer.code) if answer.code else None
    kind = told or _OUTCOMES.get(answer.outcome) or _REASONS.get(word, ErrorClass.PERMISSION_DENIED)
    words = answer.reason if word not in _WORDS else detail or _WORDS[word]
    text = f"{path}: {answer.outcome}{': ' if words else ''}{words}"
    return TransferFailure(kind, text, server)
