"""Which error class each libcurl code, HTTP status and FTP reply belongs to: tables, no text is ever matched.

Numbers are libcurl's (libcurl-errors(3)) and HTTP's (RFC 9110, RFC 4918 for WebDAV), FTP's are of RFC 959.
"""

from __future__ import annotations

from stageout.core.errors import ErrorClass

LIBCURL: dict[int, ErrorClass] = {
    1: ErrorClass.NOT_SUPPORTED,  # protocol
    3: ErrorClass.BAD_URL,
    4: ErrorClass.NOT_SUPPORTED,  # feature not built in
    5: ErrorClass.NAME_LOOKUP_FAILED,  # proxy
    6: ErrorClass.NAME_NOT_RESOLVED,
    7: ErrorClass.CONNECT_FAILED,
    8: ErrorClass.SERVER_ERROR,  # weird server reply
    9: ErrorClass.PERMISSION_DENIED,  # FTP directory
    16: ErrorClass.CONNECTION_LOST,  # HTTP/2 framing
    18: ErrorClass.CONNECTION_LOST,  # partial file
    21: ErrorClass.CONFLICT,  # FTP quote command
    23: ErrorClass.LOCAL_FILE,  # write callback
    25: ErrorClass.PERMISSION_DENIED,  # FTP STOR refused
    26: ErrorClass.LOCAL_FILE,  # read callback
    27: ErrorClass.PLUGIN_BROKEN,  # out of memory
    28: ErrorClass.TIMED_OUT,
    30: ErrorClass.CONNECT_FAILED,  # FTP PORT
    33: ErrorClass.NOT_SUPPORTED,  # range
    35: ErrorClass.TLS_UNTRUSTED,
    36: ErrorClass.NOT_SUPPORTED,  # resume
    37: ErrorClass.NOT_FOUND,  # file://
    47: ErrorClass.SERVER_ERROR,  # too many redirects
    51: ErrorClass.TLS_UNTRUSTED,
    52: ErrorClass.CONNECTION_LOST,  # nothing came back
    53: ErrorClass.TLS_UNTRUSTED,
    54: ErrorClass.TLS_UNTRUSTED,
    55: ErrorClass.CONNECTION_LOST,
    56: ErrorClass.CONNECTION_LOST,
    58: ErrorClass.CREDENTIAL_REFUSED,  # client certificate
    60: ErrorClass.TLS_UNTRUSTED,
    61: ErrorClass.SERVER_ERROR,  # content encoding
    63: ErrorClass.TOO_LARGE,
    64: ErrorClass.TLS_UNTRUSTED,
    65: ErrorClass.CONNECTION_LOST,  # rewind failed
    67: ErrorClass.CREDENTIAL_REFUSED,
    70: ErrorClass.NO_SPACE_REMOTE,
    73: ErrorClass.CONFLICT,
    77: ErrorClass.TLS_UNTRUSTED,  # CA file
    78: ErrorClass.NOT_FOUND,
    79: ErrorClass.CONNECTION_LOST,
    92: ErrorClass.CONNECTION_LOST,  # HTTP/2 stream
    95: ErrorClass.CONNECTION_LOST,
    97: ErrorClass.CONNECT_FAILED,  # proxy handshake
}

HTTP: dict[int, ErrorClass] = {
    400: ErrorClass.BAD_REQUEST,
    401: ErrorClass.CREDENTIAL_REFUSED,
    402: ErrorClass.QUOTA_EXCEEDED,
    403: ErrorClass.PERMISSION_DENIED,
    404: ErrorClass.NOT_FOUND,
    405: ErrorClass.NOT_SUPPORTED,
    407: ErrorClass.CREDENTIAL_REFUSED,
    408: ErrorClass.TIMED_OUT,
    409: ErrorClass.CONFLICT,
    410: ErrorClass.NOT_FOUND,
    411: ErrorClass.NOT_SUPPORTED,
    412: ErrorClass.CONFLICT,
    413: ErrorClass.TOO_LARGE,
    414: ErrorClass.BAD_URL,
    416: ErrorClass.CONFLICT,
    421: ErrorClass.CONNECT_FAILED,
    423: ErrorClass.SERVER_BUSY,  # locked
    425: ErrorClass.SERVER_BUSY,
    429: ErrorClass.THROTTLED,
    500: ErrorClass.SERVER_ERROR,
    501: ErrorClass.NOT_SUPPORTED,
    502: ErrorClass.SERVER_ERROR,
    503: ErrorClass.SERVER_BUSY,
    504: ErrorClass.SERVER_ERROR,
    505: ErrorClass.NOT_SUPPORTED,
    507: ErrorClass.NO_SPACE_REMOTE,
    509: ErrorClass.THROTTLED,
    511: ErrorClass.PERMISSION_DENIED,
}

FTP: dict[int, ErrorClass] = {
    421: ErrorClass.SERVER_BUSY,
    425: ErrorClass.CONNECT_FAILED,
    426: ErrorClass.CONNECTION_LOST,
    430: ErrorClass.CREDENTIAL_REFUSED,
    450: ErrorClass.SERVER_BUSY,
    451: ErrorClass.SERVER_ERROR,
    452: ErrorClass.NO_SPACE_REMOTE,
    501: ErrorClass.BAD_REQUEST,
    502: ErrorClass.NOT_SUPPORTED,
    530: ErrorClass.CREDENTIAL_REFUSED,
    532: ErrorClass.CREDENTIAL_REFUSED,
    550: ErrorClass.PERMISSION_DENIED,
    552: ErrorClass.QUOTA_EXCEEDED,
    553: ErrorClass.PERMISSION_DENIED,
}


def of_status(status: int) -> ErrorClass | None:
    """Class of an HTTP status, None for one that is no error."""
    if status < 400:
        return None
    return HTTP.get(status, ErrorClass.SERVER_ERROR if status >= 500 else ErrorClass.BAD_REQUEST)


def of_libcurl(code: int, reply: int, ftp: bool, download: bool) -> ErrorClass:
    """Class of a failed transfer.

    :param code: libcurl's. :param reply: last status or reply code of the server, 0 when there was none.
    :param ftp: the reply is FTP's. :param download: a file that an FTP server does not give is missing, most often.
    """
    if ftp and code in (9, 19, 21, 25, 67, 70, 78) and reply in FTP:
        found = FTP[reply]
        return ErrorClass.NOT_FOUND if download and reply == 550 else found
    return LIBCURL.get(code, ErrorClass.UNKNOWN)
