"""The meaning of each error class for people: what happened, and what to do, the cheapest step first.

Hold reasons, the web page and the reference have their advice from here.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from stageout.core.errors import ErrorClass

RERUN_ADVICE = "`condor_release` runs the job again"


class Way(enum.Enum):
    """The cheapest step that can help. The values are advice to the owner of output that waits on its node."""

    RETRY = f"`stageout retry` sends it again, `stageout redirect` to another URL; {RERUN_ADVICE}"
    REDIRECT = (
        "`stageout redirect` sends it to another URL, `stageout retry` to the same one; for a new run set "
        f"OutputDestination with `condor_qedit`, then {RERUN_ADVICE}"
    )
    RELEASE = RERUN_ADVICE


class Explanation(NamedTuple):
    """A failed delivery. :param happened: a sentence. :param way: that helps. :param when: it can help; "" for now."""

    happened: str
    way: Way
    when: str = ""

    @property
    def advice(self) -> str:
        """The next steps of the owner, the cheapest first, as the end of a sentence."""
        return f"{self.when}, {self.way.value}" if self.when else self.way.value

    @property
    def action(self) -> str:
        """The advice as a sentence."""
        return f"{self.advice[:1].upper()}{self.advice[1:]}."

    @property
    def action_while_tried(self) -> str:
        """The next step for output that the node still tries to send. The first one costs nothing."""
        when = f" {self.when}," if self.when else ""
        return (
            f"The node tries again by itself.{when[:2].upper()}{when[2:]} `stageout retry` tries at once, and "
            "`stageout redirect` sends it to another URL."
        )


EXPLANATIONS: dict[ErrorClass, Explanation] = {
    ErrorClass.PLUGIN_BROKEN: Explanation(
        "The transfer plugin does not work on that node.",
        Way.RETRY,
        "when the administrator of the node has mended that",
    ),
    ErrorClass.BAD_REQUEST: Explanation("The plugin cannot do what the URL or an option asks for.", Way.REDIRECT),
    ErrorClass.BAD_URL: Explanation("The URL is wrong.", Way.REDIRECT),
    ErrorClass.NOT_ATTEMPTED: Explanation("The plugin was stopped before it reached this file.", Way.RETRY),
    ErrorClass.NAME_NOT_RESOLVED: Explanation("No host has the name in the URL.", Way.REDIRECT),
    ErrorClass.NAME_LOOKUP_FAILED: Explanation(
        "The name server did not answer, in any attempt.",
        Way.RETRY,
        "when the name server answers again",
    ),
    ErrorClass.CONNECT_FAILED: Explanation(
        "No connection to the server was possible, in any attempt.",
        Way.RETRY,
        "when the server is up",
    ),
    ErrorClass.TLS_UNTRUSTED: Explanation(
        "The server's certificate is not trusted, or has expired.",
        Way.RETRY,
        "when that certificate is in order",
    ),
    ErrorClass.CREDENTIAL_MISSING: Explanation(
        "The upload needs a credential, and the job has none.",
        Way.RETRY,
        "when the job has the credential",
    ),
    ErrorClass.CREDENTIAL_REFUSED: Explanation(
        "The server refused the credential.",
        Way.RETRY,
        "when the credential is a good one",
    ),
    ErrorClass.CREDENTIAL_EXPIRED: Explanation(
        "The credential has expired.",
        Way.RETRY,
        "when the credential is renewed (one in the URL itself cannot be)",
    ),
    ErrorClass.PERMISSION_DENIED: Explanation(
        "You may not write to that place.",
        Way.RETRY,
        "when you may write there",
    ),
    ErrorClass.NOT_FOUND: Explanation(
        "A directory in the URL does not exist.",
        Way.RETRY,
        "when the directory is there",
    ),
    ErrorClass.CONFLICT: Explanation(
        "The name is taken by a directory, or by a file that must not be replaced.",
        Way.RETRY,
        "when the name is free",
    ),
    ErrorClass.TOO_LARGE: Explanation("The server does not accept files of that size.", Way.REDIRECT),
    ErrorClass.NOT_SUPPORTED: Explanation("Plugin or server does not support what the URL asks for.", Way.REDIRECT),
    ErrorClass.LOCAL_FILE: Explanation(
        "An output file is missing on the node, or cannot be read.",
        Way.RELEASE,
        "when `transfer_output_files` is right",
    ),
    ErrorClass.SOURCE_CHANGED: Explanation(
        "A file changed after the job had ended.",
        Way.RELEASE,
        "when no other program writes to the file any more",
    ),
    ErrorClass.REQUEST_REJECTED: Explanation("The server rejected the request.", Way.REDIRECT),
    ErrorClass.THROTTLED: Explanation("The server asked for fewer requests, in every attempt.", Way.RETRY, "later"),
    ErrorClass.SERVER_BUSY: Explanation("The server was busy, in every attempt.", Way.RETRY, "later"),
    ErrorClass.SERVER_ERROR: Explanation(
        "The server reported a failure of its own, in every attempt.",
        Way.RETRY,
        "when the administrator of the server has mended that",
    ),
    ErrorClass.STALLED: Explanation("The transfer made no progress, in every attempt.", Way.RETRY),
    ErrorClass.TIMED_OUT: Explanation("The transfer took too long, in every attempt.", Way.RETRY),
    ErrorClass.CONNECTION_LOST: Explanation("The connection broke, in every attempt.", Way.RETRY),
    ErrorClass.SIZE_MISMATCH: Explanation(
        "The file at the destination has another size than the file that was sent.",
        Way.RETRY,
        "when the administrator of the server knows the cause",
    ),
    ErrorClass.CONTENT_MISMATCH: Explanation(
        "The file at the destination has another digest than the file that was sent.",
        Way.RETRY,
        "when the administrator of the server knows the cause",
    ),
    ErrorClass.NOT_VERIFIED: Explanation(
        "The server does not confirm what it stored, and the pool requires that.",
        Way.REDIRECT,
    ),
    ErrorClass.NO_SPACE_LOCAL: Explanation("The node has no space.", Way.RETRY, "when the node has room"),
    ErrorClass.NO_SPACE_REMOTE: Explanation("The destination has no space.", Way.RETRY, "when there is room"),
    ErrorClass.QUOTA_EXCEEDED: Explanation(
        "Your quota at the destination is used up.",
        Way.RETRY,
        "when there is room",
    ),
    ErrorClass.DEADLINE: Explanation("The transfer did not finish within the time that a plugin has.", Way.RETRY),
    ErrorClass.UNKNOWN: Explanation(
        "Another failure, which the hold reason describes. Also: output that was lost in several runs "
        "(`STAGEOUT_MAX_RERUNS`).",
        Way.RETRY,
    ),
}
