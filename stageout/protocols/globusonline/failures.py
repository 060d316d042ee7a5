"""Failures by the service's codes: refused requests, events of a task, the end of a task."""

from __future__ import annotations

import json
from typing import NamedTuple

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.extras import needs

with needs("globus"):
    from globus_sdk import GlobusAPIError, GlobusError, NetworkError

SERVER = "transfer.api.globus.org"
CANCELED = "CANCELED"
TOO_MANY = "TooManyPendingJobs"
#: Codes after which the same request may succeed a little later.
TRANSIENT_STATUSES = (429, 500, 503, 504)


class Fault(NamedTuple):
    """The meaning of a task's event. :param lasts: it is permanent, although the service keeps trying."""

    kind: ErrorClass
    lasts: bool


FAULTS: dict[str, Fault] = {
    "PERMISSION_DENIED": Fault(ErrorClass.PERMISSION_DENIED, True),
    "FILE_NOT_FOUND": Fault(ErrorClass.NOT_FOUND, True),
    "NOT_A_FILE": Fault(ErrorClass.CONFLICT, True),
    "IS_A_DIRECTORY": Fault(ErrorClass.CONFLICT, True),
    "NOT_A_DIRECTORY": Fault(ErrorClass.CONFLICT, True),
    "IS_A_FILE": Fault(ErrorClass.CONFLICT, True),
    "INVALID_PATH_NAME": Fault(ErrorClass.BAD_URL, True),
    "AMBIGUOUS_PATH": Fault(ErrorClass.BAD_URL, True),
    "INVALID_SYMLINK": Fault(ErrorClass.NOT_SUPPORTED, True),
    "NO_SPACE_LEFT": Fault(ErrorClass.NO_SPACE_REMOTE, True),
    "QUOTA_EXCEEDED": Fault(ErrorClass.QUOTA_EXCEEDED, True),
    "LIMIT_EXCEEDED": Fault(ErrorClass.QUOTA_EXCEEDED, True),
    "EXTERNAL_CHECKSUM_MISMATCH": Fault(ErrorClass.CONTENT_MISMATCH, True),
    "NO_CREDENTIALS": Fault(ErrorClass.CREDENTIAL_EXPIRED, True),
    "INVALID_SERVICE_CREDENTIAL": Fault(ErrorClass.CREDENTIAL_REFUSED, True),
    "GSI_DN_MISMATCH": Fault(ErrorClass.CREDENTIAL_REFUSED, True),
    "AUTH": Fault(ErrorClass.CREDENTIAL_REFUSED, True),
    "CONNECT_FAILED": Fault(ErrorClass.CONNECT_FAILED, False),
    "GC_NOT_CONNECTED": Fault(ErrorClass.CONNECT_FAILED, False),
    "CONNECTION_BROKEN": Fault(ErrorClass.CONNECTION_LOST, False),
    "CONNECTION_RESET": Fault(ErrorClass.CONNECTION_LOST, False),
    "TIMEOUT": Fault(ErrorClass.TIMED_OUT, False),
    "ENDPOINT_TOO_BUSY": Fault(ErrorClass.SERVER_BUSY, False),
    "ENDPOINT_ERROR": Fault(ErrorClass.SERVER_ERROR, False),
    "INTERNAL_ERROR": Fault(ErrorClass.SERVER_ERROR, False),
    "VERIFY_CHECKSUM": Fault(ErrorClass.CONTENT_MISMATCH, False),
    "FILE_SIZE_CHANGED": Fault(ErrorClass.SOURCE_CHANGED, False),
    "GC_PAUSED": Fault(ErrorClass.SERVER_BUSY, False),
    "PAUSED": Fault(ErrorClass.SERVER_BUSY, False),
    "EXPIRED": Fault(ErrorClass.DEADLINE, False),
}
_UNKNOWN = Fault(ErrorClass.UNKNOWN, False)

_WORDS: dict[ErrorClass, str] = {
    ErrorClass.PERMISSION_DENIED: "the collection does not allow it: check path and permissions",
    ErrorClass.NOT_FOUND: "there is no such file or directory: check the path",
    ErrorClass.CONFLICT: "a directory stands where a file should, or the other way round: check the path",
    ErrorClass.BAD_URL: "the collection cannot use this path",
    ErrorClass.QUOTA_EXCEEDED: "the quota at the destination is used up: make room there",
    ErrorClass.NO_SPACE_REMOTE: "the destination is full",
    ErrorClass.CREDENTIAL_EXPIRED: "the login for this collection has expired: log in again",
    ErrorClass.CREDENTIAL_REFUSED: "the collection does not accept the identity: log in again with one that it knows",
    ErrorClass.CONTENT_MISMATCH: "the checksums of source and destination differ",
    ErrorClass.CONNECT_FAILED: "the collection cannot be reached",
    ErrorClass.DEADLINE: "it was not finished in time",
}

CODES: dict[str, ErrorClass] = {
    "EndpointNotFound": ErrorClass.NOT_FOUND,
    "EndpointDeleted": ErrorClass.NOT_FOUND,
    "EndpointPermissionDenied": ErrorClass.PERMISSION_DENIED,
    "PermissionDenied": ErrorClass.PERMISSION_DENIED,
    "NotFound": ErrorClass.NOT_FOUND,
    "Exists": ErrorClass.CONFLICT,
    "NotDirectory": ErrorClass.CONFLICT,
    "IsDirectory": ErrorClass.CONFLICT,
    "GCDisconnected": ErrorClass.CONNECT_FAILED,
    "GCPaused": ErrorClass.SERVER_BUSY,
    "ConnectFailed": ErrorClass.CONNECT_FAILED,
    "LoginFailed": ErrorClass.CREDENTIAL_REFUSED,
    "NoCredException": ErrorClass.CREDENTIAL_EXPIRED,
    "TooManyPendingJobs": ErrorClass.THROTTLED,
    "Conflict": ErrorClass.SERVER_BUSY,
}
STATUSES: dict[int, ErrorClass] = {
    400: ErrorClass.BAD_REQUEST,
    401: ErrorClass.CREDENTIAL_REFUSED,
    403: ErrorClass.PERMISSION_DENIED,
    404: ErrorClass.NOT_FOUND,
    409: ErrorClass.SERVER_BUSY,
    413: ErrorClass.TOO_LARGE,
    429: ErrorClass.THROTTLED,
    503: ErrorClass.SERVER_BUSY,
    504: ErrorClass.TIMED_OUT,
}


def fault_of(code: str) -> Fault:
    """Return the meaning of an event or of a task's fatal error."""
    return FAULTS.get(code, _UNKNOWN)


def words_of(kind: ErrorClass) -> str:
    """Return an explanation for people; "" if the code explains itself."""
    return _WORDS.get(kind, "")


def retry_after_s(error: GlobusError) -> float | None:
    """Return the number of seconds that the service asked to wait."""
    if not isinstance(error, GlobusAPIError):
        return None
    text = error.headers.get("Retry-After", "")
    return float(text) if text.isdigit() else None


def request_failure(error: GlobusError, doing: str) -> TransferFailure:
    """Make the failure for a refused or unanswered request.

    :param doing: the operation, such as ``submitting the task``.
    """
    if isinstance(error, NetworkError):
        text = f"{doing}: the Globus service cannot be reached ({type(error).__name__}); check the node's network"
        return TransferFailure(ErrorClass.CONNECT_FAILED, text, SERVER)
    if not isinstance(error, GlobusAPIError):
        return TransferFailure(ErrorClass.UNKNOWN, f"{doing}: {type(error).__name__}: {error}", SERVER)
    wanted = _wanted_login(error)
    kind = ErrorClass.CREDENTIAL_REFUSED if wanted else _kind(error)
    said = wanted or f"{error.code}: {error.message or 'no message'}"
    text = f"{doing}: {said} [HTTP {error.http_status}, request {error.request_id or 'unknown'}]"
    return TransferFailure(kind, text, SERVER, retry_after_s(error), {"GlobusCode": error.code or ""})


def _kind(error: GlobusAPIError) -> ErrorClass:
    """Classify by the code, such as the service's ``ExternalError.DirListingFailed.PermissionDenied``."""
    parts = (error.code or "").split(".")
    if parts[-1] in CODES:
        return CODES[parts[-1]]
    if parts[0] in ("ExternalError", "EndpointError"):
        return ErrorClass.CONNECT_FAILED
    return STATUSES.get(error.http_status, ErrorClass.SERVER_ERROR if error.http_status >= 500 else ErrorClass.UNKNOWN)


def _wanted_login(error: GlobusAPIError) -> str:
    """Return the consent that a person must give; "" if none is missing."""
    consent = error.info.consent_required
    if consent:
        scopes = " ".join(consent.required_scopes or [])
        return (
            f"a consent is missing: log in once more with the scope {scopes} (globus_oauth_permissions_... = {scopes})"
        )
    session = error.info.authorization_parameters
    if session:
        policy = {
            name: value
            for name in ("session_required_identities", "session_required_single_domain", "session_required_policies")
            if (value := getattr(session, name, None))
        }
        return f"the collection wants a fresh login: {session.session_message or ''} {json.dumps(policy)}".strip()
    return ""
