"""Error classes: one table has the meaning of each failure, its attributes for HTCondor and the next step.

Every failure of a transfer is put into exactly one :class:`ErrorClass` where it happens. Everything later
(exit status, ``TransferErrorData``, the manager's retries, the hold reason) is read from the table, never from
the text of a message. The shape of ``TransferErrorData`` is HTCondor's (manual: *File transfer plugins*,
"Transfer error data").
"""

from __future__ import annotations

import enum
import errno

TYPE_CHECKING = False  # known to type checkers by its name; typing itself is not worth its import time here
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


class Advice(enum.Enum):
    """A class of failures, and who can help. The manager's ``scheduling/retry.py`` has exceptions of single classes."""

    RETRY_HERE = "retry here"
    RETRY_ELSEWHERE = "retry elsewhere"
    NEEDS_CREDENTIAL = "needs credential"
    NEEDS_PERSON = "needs a person"


class Row:
    """One line of the table: HTCondor's ErrorType and FailureType, a stable number, and the advice."""

    __slots__ = ("advice", "code", "error_type", "failure_type")

    def __init__(self, code: int, error_type: str, failure_type: str | None, advice: Advice) -> None:
        self.code = code
        self.error_type = error_type
        self.failure_type = failure_type
        self.advice = advice


class ErrorClass(enum.Enum):
    """All the ways in which a transfer fails. ``code`` is stable: it is shown to users as ErrorCode."""

    PLUGIN_BROKEN = Row(1, "Parameter", None, Advice.RETRY_ELSEWHERE)
    BAD_REQUEST = Row(2, "Parameter", None, Advice.NEEDS_PERSON)
    BAD_URL = Row(3, "Specification", None, Advice.NEEDS_PERSON)
    NOT_ATTEMPTED = Row(4, "Parameter", None, Advice.RETRY_HERE)
    NAME_NOT_RESOLVED = Row(10, "Resolution", "Definitive", Advice.RETRY_ELSEWHERE)
    NAME_LOOKUP_FAILED = Row(11, "Resolution", "PreContact", Advice.RETRY_HERE)
    CONNECT_FAILED = Row(20, "Contact", None, Advice.RETRY_HERE)
    TLS_UNTRUSTED = Row(21, "Authorization", "Authentication", Advice.NEEDS_PERSON)
    CREDENTIAL_MISSING = Row(30, "Authorization", "Authentication", Advice.NEEDS_CREDENTIAL)
    CREDENTIAL_REFUSED = Row(31, "Authorization", "Authentication", Advice.NEEDS_CREDENTIAL)
    CREDENTIAL_EXPIRED = Row(32, "Authorization", "Authentication", Advice.NEEDS_CREDENTIAL)
    PERMISSION_DENIED = Row(33, "Authorization", "Authorization", Advice.NEEDS_PERSON)
    NOT_FOUND = Row(40, "Specification", None, Advice.NEEDS_PERSON)
    CONFLICT = Row(41, "Specification", None, Advice.NEEDS_PERSON)
    TOO_LARGE = Row(42, "Specification", None, Advice.NEEDS_PERSON)
    NOT_SUPPORTED = Row(43, "Specification", None, Advice.NEEDS_PERSON)
    LOCAL_FILE = Row(44, "Specification", None, Advice.NEEDS_PERSON)
    SOURCE_CHANGED = Row(45, "Specification", None, Advice.NEEDS_PERSON)
    REQUEST_REJECTED = Row(46, "Specification", None, Advice.NEEDS_PERSON)
    THROTTLED = Row(50, "Transfer", "TooSlow", Advice.RETRY_HERE)
    SERVER_BUSY = Row(51, "Transfer", "TimedOut", Advice.RETRY_HERE)
    SERVER_ERROR = Row(52, "Transfer", "TimedOut", Advice.RETRY_HERE)
    STALLED = Row(53, "Transfer", "TooSlow", Advice.RETRY_HERE)
    TIMED_OUT = Row(54, "Transfer", "TimedOut", Advice.RETRY_HERE)
    CONNECTION_LOST = Row(55, "Transfer", "TimedOut", Advice.RETRY_HERE)
    SIZE_MISMATCH = Row(60, "Transfer", "TimedOut", Advice.RETRY_HERE)
    CONTENT_MISMATCH = Row(61, "Transfer", "TimedOut", Advice.RETRY_HERE)
    NOT_VERIFIED = Row(62, "Transfer", "TimedOut", Advice.NEEDS_PERSON)
    NO_SPACE_LOCAL = Row(70, "Transfer", "NoSpace", Advice.RETRY_ELSEWHERE)
    NO_SPACE_REMOTE = Row(71, "Transfer", "NoSpace", Advice.RETRY_HERE)
    QUOTA_EXCEEDED = Row(72, "Transfer", "Quota", Advice.NEEDS_PERSON)
    DEADLINE = Row(80, "Transfer", "TimedOut", Advice.RETRY_HERE)
    UNKNOWN = Row(99, "Transfer", "TimedOut", Advice.RETRY_HERE)

    @property
    def code(self) -> int:
        """Stable number of the class (ErrorCode in TransferErrorData)."""
        return self.value.code

    @property
    def advice(self) -> Advice:
        """Return the advice for this class of failures."""
        return self.value.advice

    @property
    def retryable(self) -> bool:
        """True when the same transfer may succeed later without a change by a person."""
        return self.advice in (Advice.RETRY_HERE, Advice.RETRY_ELSEWHERE)

    @classmethod
    def from_code(cls, code: int) -> ErrorClass:
        """Return the class with this number, UNKNOWN for a number that is not in the table."""
        return _BY_CODE.get(code, cls.UNKNOWN)


_BY_CODE = {member.value.code: member for member in ErrorClass}

# Error classes for the error ads of plugins that are not ours (ErrorType, FailureType): their codes are their own.
_FOREIGN: dict[tuple[str, str | None], ErrorClass] = {
    ("Parameter", None): ErrorClass.PLUGIN_BROKEN,
    ("Resolution", "Definitive"): ErrorClass.NAME_NOT_RESOLVED,
    ("Resolution", None): ErrorClass.NAME_LOOKUP_FAILED,
    ("Contact", None): ErrorClass.CONNECT_FAILED,
    ("Authorization", "Authentication"): ErrorClass.CREDENTIAL_REFUSED,
    ("Authorization", None): ErrorClass.PERMISSION_DENIED,
    ("Specification", None): ErrorClass.NOT_FOUND,
    ("Transfer", "TooSlow"): ErrorClass.STALLED,
    ("Transfer", "NoSpace"): ErrorClass.NO_SPACE_REMOTE,
    ("Transfer", "Quota"): ErrorClass.QUOTA_EXCEEDED,
    ("Transfer", None): ErrorClass.UNKNOWN,
}


def classify_foreign(error_type: str | None, failure_type: str | None, retryable: int | None) -> ErrorClass:
    """Classify a failure that a plugin reports which is not built on this framework.

    :param error_type: ``ErrorType`` of its newest TransferErrorData element, None when it gave none.
    :param failure_type: ``FailureType`` of the same element.
    :param retryable: its ``Retryable`` (-1 never, k >= 0 seconds), None when it said nothing.
    :returns: a class whose advice agrees with ``Retryable`` when that was given.
    """
    found = _FOREIGN.get((error_type or "", failure_type)) or _FOREIGN.get((error_type or "", None))
    found = found or ErrorClass.UNKNOWN
    if retryable is not None and retryable < 0 and found.retryable:
        return ErrorClass.BAD_REQUEST
    if retryable is not None and retryable >= 0 and not found.retryable:
        return ErrorClass.UNKNOWN
    return found


#: The server was not reached, or it takes nothing now: no file's fault.
UNREACHABLE = frozenset(
    {
        ErrorClass.NAME_NOT_RESOLVED,
        ErrorClass.NAME_LOOKUP_FAILED,
        ErrorClass.CONNECT_FAILED,
        ErrorClass.SERVER_BUSY,
        ErrorClass.THROTTLED,
    }
)
#: The file, the disk or the plugin of the node that sends failed: no server is to blame.
OF_NODE = frozenset(
    {
        ErrorClass.PLUGIN_BROKEN,
        ErrorClass.NOT_ATTEMPTED,
        ErrorClass.LOCAL_FILE,
        ErrorClass.SOURCE_CHANGED,
        ErrorClass.NO_SPACE_LOCAL,
    }
)
#: The server said nothing for so long that the file was given up. It is away when it answered nobody meanwhile; else
#: the fault may be the file's, so each attempt counts.
SILENT = UNREACHABLE | {ErrorClass.TIMED_OUT, ErrorClass.STALLED, ErrorClass.DEADLINE}


class TransferFailure(Exception):
    """A transfer failed, and why. Raised by protocols, turned into result ads by the plugin framework.

    :param kind: row of the table.
    :param message: one sentence for the job's owner, without secrets; says what to do where that is known.
    :param server: host (and port) that was talked to, "" when none was.
    :param retry_after_s: wait that the server asked for, in seconds.
    :param developer: further facts for DeveloperData (scalars only).
    :param intermediate: ``server`` is a proxy or a cache: "Connection" when it could not be reached, "PostConnection"
        when it failed afterwards; "" when it is the server that the URL names.
    :param connection_s: as in :class:`stageout.plugin.api.Outcome`.
    """

    def __init__(
        self,
        kind: ErrorClass,
        message: str,
        server: str = "",
        retry_after_s: float | None = None,
        developer: Mapping[str, Any] | None = None,
        intermediate: str = "",
        connection_s: float = 0.0,
    ) -> None:
        self.kind = kind
        self.message = message
        self.server = server
        self.retry_after_s = retry_after_s
        self.developer = dict(developer or {})
        self.intermediate = intermediate
        self.connection_s = connection_s

    def __str__(self) -> str:
        return self.message


def is_disk_full(problem: BaseException) -> bool:
    """Tell whether a disk or a quota is full. That passes when somebody else makes room."""
    return isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT)


class StageoutError(Exception):
    """Base of errors that are shown to a person; the text says what to do."""

    #: Another attempt may succeed although nobody has done anything.
    is_temporary = False

    def __init__(self, *words: object, is_temporary: bool | None = None) -> None:
        super().__init__(*words)
        if is_temporary is not None:
            self.is_temporary = is_temporary
