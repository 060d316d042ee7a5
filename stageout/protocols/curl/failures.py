"""Error classes of failures of libcurl, HTTP, FTP and the local system. These tables alone decide."""

from __future__ import annotations

import errno
import re

import pycurl

from stageout.core.errors import ErrorClass, TransferFailure

_K = ErrorClass
_WORDS_CHARS = 200
_TAGS = re.compile(r"<[^<>]*>")
_BLOCKS = re.compile(r"</?(?:p|br|h\d|li|div|tr|td|center|pre)\b[^<>]*>", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n")
#: Elements of a page that messages leave out: a title repeats the text, and a footer names the software.
_UNSEEN = re.compile(
    r"<(head|title|style|script|address)\b.*?</\1\s*>|<!--.*?-->|<hr\b(?!.*<hr\b).*", re.IGNORECASE | re.DOTALL
)
# Sentences that Apache writes below most errors, and that explain nothing.
_BOILERPLATE = (
    "The server encountered an internal error or misconfiguration",
    "Please contact the server administrator",
    "More information about this error may be available",
    "Your browser sent a request that this server could not understand",
    "Additionally, a ",
)

CURL_CODES: dict[int, ErrorClass] = {
    pycurl.E_UNSUPPORTED_PROTOCOL: _K.NOT_SUPPORTED,
    pycurl.E_FAILED_INIT: _K.PLUGIN_BROKEN,
    pycurl.E_URL_MALFORMAT: _K.BAD_REQUEST,
    pycurl.E_NOT_BUILT_IN: _K.PLUGIN_BROKEN,
    pycurl.E_COULDNT_RESOLVE_PROXY: _K.NAME_LOOKUP_FAILED,
    pycurl.E_COULDNT_RESOLVE_HOST: _K.NAME_LOOKUP_FAILED,
    pycurl.E_COULDNT_CONNECT: _K.CONNECT_FAILED,
    pycurl.E_FTP_WEIRD_SERVER_REPLY: _K.SERVER_ERROR,
    pycurl.E_REMOTE_ACCESS_DENIED: _K.PERMISSION_DENIED,
    pycurl.E_FTP_ACCEPT_FAILED: _K.CONNECTION_LOST,
    pycurl.E_FTP_WEIRD_PASS_REPLY: _K.SERVER_ERROR,
    pycurl.E_FTP_ACCEPT_TIMEOUT: _K.TIMED_OUT,
    pycurl.E_FTP_WEIRD_PASV_REPLY: _K.SERVER_ERROR,
    pycurl.E_FTP_WEIRD_227_FORMAT: _K.SERVER_ERROR,
    pycurl.E_FTP_CANT_GET_HOST: _K.SERVER_ERROR,
    pycurl.E_HTTP2: _K.CONNECTION_LOST,
    pycurl.E_FTP_COULDNT_SET_TYPE: _K.NOT_SUPPORTED,
    pycurl.E_PARTIAL_FILE: _K.CONNECTION_LOST,
    pycurl.E_FTP_COULDNT_RETR_FILE: _K.NOT_FOUND,
    pycurl.E_QUOTE_ERROR: _K.SERVER_ERROR,
    pycurl.E_UPLOAD_FAILED: _K.PERMISSION_DENIED,
    pycurl.E_OUT_OF_MEMORY: _K.PLUGIN_BROKEN,
    pycurl.E_OPERATION_TIMEDOUT: _K.TIMED_OUT,
    pycurl.E_FTP_PORT_FAILED: _K.CONNECT_FAILED,
    pycurl.E_SSL_CONNECT_ERROR: _K.CONNECT_FAILED,
    pycurl.E_TOO_MANY_REDIRECTS: _K.BAD_URL,
    pycurl.E_GOT_NOTHING: _K.CONNECTION_LOST,
    pycurl.E_SEND_ERROR: _K.CONNECTION_LOST,
    pycurl.E_RECV_ERROR: _K.CONNECTION_LOST,
    pycurl.E_SSL_CERTPROBLEM: _K.CREDENTIAL_REFUSED,
    pycurl.E_SSL_CIPHER: _K.NOT_SUPPORTED,
    pycurl.E_PEER_FAILED_VERIFICATION: _K.TLS_UNTRUSTED,
    pycurl.E_USE_SSL_FAILED: _K.CONNECT_FAILED,
    pycurl.E_SEND_FAIL_REWIND: _K.CONNECTION_LOST,
    pycurl.E_LOGIN_DENIED: _K.CREDENTIAL_REFUSED,
    pycurl.E_REMOTE_DISK_FULL: _K.NO_SPACE_REMOTE,
    pycurl.E_REMOTE_FILE_EXISTS: _K.CONFLICT,
    pycurl.E_SSL_CACERT_BADFILE: _K.PLUGIN_BROKEN,
    pycurl.E_REMOTE_FILE_NOT_FOUND: _K.NOT_FOUND,
    pycurl.E_SSL_SHUTDOWN_FAILED: _K.CONNECTION_LOST,
    pycurl.E_SSL_CRL_BADFILE: _K.PLUGIN_BROKEN,
    pycurl.E_SSL_ISSUER_ERROR: _K.TLS_UNTRUSTED,
    pycurl.E_SSL_PINNEDPUBKEYNOTMATCH: _K.TLS_UNTRUSTED,
    pycurl.E_SSL_INVALIDCERTSTATUS: _K.TLS_UNTRUSTED,
}

# No connection, or a broken one. HTCondor's own plugin retries as well, 20 times with pauses of 1, 2, ... 20 s.
RECONNECTS = frozenset(
    {
        pycurl.E_COULDNT_CONNECT,
        pycurl.E_PARTIAL_FILE,
        pycurl.E_SEND_ERROR,
        pycurl.E_RECV_ERROR,
        pycurl.E_GOT_NOTHING,
    }
)
# Usually a wrong port. But an overloaded server may break off a TLS handshake, so one retry is useful.
HANDSHAKES = frozenset({pycurl.E_SSL_CONNECT_ERROR})

HTTP_STATUSES: dict[int, ErrorClass] = {
    400: _K.REQUEST_REJECTED,
    401: _K.CREDENTIAL_REFUSED,
    403: _K.PERMISSION_DENIED,
    404: _K.NOT_FOUND,
    405: _K.NOT_SUPPORTED,
    406: _K.NOT_SUPPORTED,
    407: _K.PERMISSION_DENIED,
    408: _K.TIMED_OUT,
    409: _K.CONFLICT,
    410: _K.NOT_FOUND,
    411: _K.NOT_SUPPORTED,
    412: _K.CONFLICT,
    413: _K.TOO_LARGE,
    414: _K.BAD_URL,
    415: _K.NOT_SUPPORTED,
    416: _K.SIZE_MISMATCH,
    421: _K.SERVER_ERROR,
    423: _K.SERVER_BUSY,
    424: _K.CONFLICT,
    425: _K.SERVER_BUSY,
    426: _K.NOT_SUPPORTED,
    428: _K.CONFLICT,
    429: _K.THROTTLED,
    451: _K.PERMISSION_DENIED,
    500: _K.SERVER_ERROR,
    501: _K.NOT_SUPPORTED,
    502: _K.SERVER_ERROR,
    503: _K.SERVER_BUSY,
    504: _K.TIMED_OUT,
    505: _K.NOT_SUPPORTED,
    507: _K.NO_SPACE_REMOTE,
    508: _K.CONFLICT,
    509: _K.THROTTLED,
    511: _K.PERMISSION_DENIED,
}
_HTTP_HUNDREDS = {3: _K.BAD_URL, 4: _K.REQUEST_REJECTED, 5: _K.SERVER_ERROR}

# Codes in the error answers of S3 that are more specific than the status (400, 403, 409).
S3_CODES: dict[str, ErrorClass] = {
    "ExpiredToken": _K.CREDENTIAL_EXPIRED,
    "OperationAborted": _K.SERVER_BUSY,
    "RequestTimeout": _K.TIMED_OUT,
    "SlowDown": _K.THROTTLED,
}
_S3_CODE = re.compile(rb"<Error>.{0,2000}?<Code>(\w{1,80})</Code>", re.DOTALL)

FTP_REPLIES: dict[int, ErrorClass] = {
    421: _K.SERVER_BUSY,
    425: _K.CONNECTION_LOST,
    426: _K.CONNECTION_LOST,
    430: _K.CREDENTIAL_REFUSED,
    450: _K.SERVER_BUSY,
    451: _K.SERVER_ERROR,
    452: _K.NO_SPACE_REMOTE,
    502: _K.NOT_SUPPORTED,
    530: _K.CREDENTIAL_REFUSED,
    532: _K.CREDENTIAL_MISSING,
    552: _K.QUOTA_EXCEEDED,
    553: _K.PERMISSION_DENIED,
}
# Codes of libcurl that only mean "the server refused". Then the FTP reply decides if it is more specific than 550.
_FTP_REFUSALS = frozenset(
    {
        pycurl.E_REMOTE_ACCESS_DENIED,
        pycurl.E_FTP_COULDNT_RETR_FILE,
        pycurl.E_QUOTE_ERROR,
        pycurl.E_UPLOAD_FAILED,
        pycurl.E_LOGIN_DENIED,
        pycurl.E_PARTIAL_FILE,
        pycurl.E_FTP_WEIRD_SERVER_REPLY,
        pycurl.E_REMOTE_FILE_NOT_FOUND,
    }
)

# Errors of this machine, which has the job's sandbox.
LOCAL_ERRNOS: dict[int, ErrorClass] = {
    errno.ENOSPC: _K.NO_SPACE_LOCAL,
    errno.EDQUOT: _K.NO_SPACE_LOCAL,
    errno.EFBIG: _K.NO_SPACE_LOCAL,
    errno.EIO: _K.PLUGIN_BROKEN,
    errno.EROFS: _K.PLUGIN_BROKEN,
    errno.EMFILE: _K.PLUGIN_BROKEN,
    errno.ENFILE: _K.PLUGIN_BROKEN,
    errno.ENOMEM: _K.PLUGIN_BROKEN,
}
# Errors of the far end of a ``file`` URL.
REMOTE_ERRNOS: dict[int, ErrorClass] = {
    errno.ENOENT: _K.NOT_FOUND,
    errno.ENOTDIR: _K.NOT_FOUND,
    errno.EACCES: _K.PERMISSION_DENIED,
    errno.EPERM: _K.PERMISSION_DENIED,
    errno.EROFS: _K.PERMISSION_DENIED,
    errno.EISDIR: _K.CONFLICT,
    errno.EEXIST: _K.CONFLICT,
    errno.ENAMETOOLONG: _K.BAD_URL,
    errno.EINVAL: _K.BAD_URL,
    errno.ENOSPC: _K.NO_SPACE_REMOTE,
    errno.EDQUOT: _K.QUOTA_EXCEEDED,
    errno.EFBIG: _K.TOO_LARGE,
    errno.ETIMEDOUT: _K.TIMED_OUT,
}


def of_status(status: int, body: bytes = b"") -> ErrorClass:
    """Classify an HTTP error status. A status that is not in the table counts as its class (4xx, 5xx).

    :param body: its S3 code takes precedence if it is more specific.
    """
    known = S3_CODES.get(s3_code(body)) or HTTP_STATUSES.get(status)
    return known or _HTTP_HUNDREDS.get(status // 100, _K.SERVER_ERROR)


def of_curl(code: int, ftp_reply: int = 0) -> ErrorClass:
    """Classify an error code of libcurl.

    :param ftp_reply: last reply of an FTP server, 0 when there was none.
    """
    if code in _FTP_REFUSALS and ftp_reply in FTP_REPLIES:
        return FTP_REPLIES[ftp_reply]
    return CURL_CODES.get(code, _K.UNKNOWN)


def s3_code(body: bytes) -> str:
    """Return the code in an error answer of S3; "" without a code."""
    found = _S3_CODE.search(body)
    return found[1].decode() if found else ""


def ftp_words(lines: list[str]) -> str:
    """Return the last reply of an FTP dialogue as the server wrote it if it is a refusal; otherwise ""."""
    last = next((line for line in reversed(lines) if line), "")
    return server_words(last.encode("utf-8", "surrogateescape")) if last[:1] in ("4", "5") else ""


def local_failure(error: OSError, name: str) -> TransferFailure:
    """Make the failure of a file of the sandbox that could not be read or written.

    :param name: name of the file, without its directory.
    """
    kind = LOCAL_ERRNOS.get(error.errno or 0, _K.LOCAL_FILE)
    hint = "; ask for more with request_disk" if kind is _K.NO_SPACE_LOCAL else ""
    return TransferFailure(kind, f"{name} in the sandbox: {error.strerror or error}{hint}")


def remote_failure(error: OSError, path: str) -> TransferFailure:
    """Make the failure of a file behind a ``file`` URL that could not be read or written."""
    kind = REMOTE_ERRNOS.get(error.errno or 0, _K.SERVER_ERROR)
    return TransferFailure(kind, f"{path}: {error.strerror or error}")


def server_words(body: bytes, reason: str = "") -> str:
    """Extract the first complete sentences of an error page that add information.

    :param reason: reason in the status line, which the message already contains.
    """
    page = body.decode("utf-8", "replace")
    known = {_bare(text) for text in (reason, reason.partition(" ")[2], "")}
    said = [text for text in _sentences(_UNSEEN.sub(" ", page)) or _sentences(page) if _bare(text) not in known]
    words = ""
    for sentence in said:
        if sentence.startswith(_BOILERPLATE):
            continue
        longer = f"{words} {sentence}".strip()
        if len(longer) > _WORDS_CHARS:
            break
        words = longer
    return words


def _sentences(page: str) -> list[str]:
    """Extract the visible text of a page. If it has no tags, lines count as sentences."""
    if _TAGS.search(page):
        page = _TAGS.sub(" ", _BLOCKS.sub("\0", " ".join(page.split()))).replace("\0", "\n")
    pieces = ("".join(char if char.isprintable() else " " for char in text) for text in _SENTENCE_END.split(page))
    return [found for found in (" ".join(piece.split()) for piece in pieces) if found]


def _bare(text: str) -> str:
    return text.strip(" .:,;-").lower()


def certificate_problem(verify_result: int) -> str | None:
    """Explain OpenSSL's verification code of a server's certificate; None if the certificate is accepted."""
    return _VERIFY_RESULTS.get(verify_result, f"its certificate is not accepted (OpenSSL code {verify_result})")


_VERIFY_RESULTS: dict[int, str | None] = {
    0: None,
    1: None,  # the chain is valid, but the certificate lacks the name: libcurl itself compares names
    9: "its certificate is not valid yet: check both clocks",
    10: "its certificate has expired",
    18: "its certificate is signed by itself and not trusted here",
    19: "its certificate authority is not trusted here",
    20: "its certificate authority is not known here",
    21: "its certificate authority is not known here",
    23: "its certificate has been revoked",
    62: "its certificate is for another name",
}
