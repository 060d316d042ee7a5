"""The meaning of FTP and GridFTP answers: reply codes, the server's own codes, errno. Texts do not count."""

from __future__ import annotations

import errno
import os

from stageout.core.errors import ErrorClass

_K = ErrorClass

REPLY_CODES: dict[int, ErrorClass] = {
    421: _K.SERVER_BUSY,
    425: _K.CONNECTION_LOST,
    426: _K.CONNECTION_LOST,
    430: _K.CREDENTIAL_REFUSED,
    450: _K.SERVER_BUSY,
    451: _K.SERVER_ERROR,
    452: _K.NO_SPACE_REMOTE,
    501: _K.BAD_REQUEST,
    502: _K.NOT_SUPPORTED,
    504: _K.NOT_SUPPORTED,
    530: _K.CREDENTIAL_REFUSED,
    532: _K.CREDENTIAL_MISSING,
    535: _K.CREDENTIAL_REFUSED,
    550: _K.NOT_FOUND,
    552: _K.QUOTA_EXCEEDED,
    553: _K.PERMISSION_DENIED,
}

#: Codes after ``c=`` of a GlobusError line.
GLOBUS_CODES: dict[str, ErrorClass] = {
    "PATH_NOT_FOUND": _K.NOT_FOUND,
    "PATH_EXISTS": _K.CONFLICT,
    "IS_A_DIRECTORY": _K.CONFLICT,
    "NOT_A_DIRECTORY": _K.CONFLICT,
    "PERMISSION_DENIED": _K.PERMISSION_DENIED,
    "NO_SPACE_LEFT": _K.NO_SPACE_REMOTE,
    "QUOTA_EXCEEDED": _K.QUOTA_EXCEEDED,
    "LOGIN_DENIED": _K.CREDENTIAL_REFUSED,
    "NAME_TOO_LONG": _K.BAD_URL,
}

ERRNOS: dict[int, ErrorClass] = {
    errno.ENOENT: _K.NOT_FOUND,
    errno.ENOTDIR: _K.CONFLICT,
    errno.EISDIR: _K.CONFLICT,
    errno.EEXIST: _K.CONFLICT,
    errno.EACCES: _K.PERMISSION_DENIED,
    errno.EPERM: _K.PERMISSION_DENIED,
    errno.EROFS: _K.PERMISSION_DENIED,
    errno.ENOSPC: _K.NO_SPACE_REMOTE,
    errno.EDQUOT: _K.QUOTA_EXCEEDED,
    errno.EFBIG: _K.TOO_LARGE,
    errno.ENAMETOOLONG: _K.BAD_URL,
}

#: Sometimes the server sends only the C library's text of an errno, which identifies the code as well.
ERRNO_WORDS = {os.strerror(number): number for number in ERRNOS}


def class_of(code: int, globus: str = "", number: int = 0) -> ErrorClass:
    """Classify a negative answer by its most specific code."""
    found = GLOBUS_CODES.get(globus) or ERRNOS.get(number) or REPLY_CODES.get(code)
    if found is None:
        found = _K.SERVER_ERROR if code < 600 else _K.UNKNOWN
    return found
