"""The honest servers of the matrix, and the ways in which one of their steps can go wrong."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.curl.hall import Answer, Door, Fault, FtpDoor, Header, Request, is_hidden

DATA = bytes(range(256)) * 40
OLDER = b"an older version of the file " * 20
_PAGE = b"<!DOCTYPE html><html><body><form action='/login'>Please log in</form></body></html>"
_LARGEST = 1 << 62

#: Requests that a plain transfer makes; all others are extra.
PLAIN = frozenset({"PUT", "PUT elsewhere", "GET", "GET of a range"})
#: Steps that the matrix knows how to break. A plugin that makes another one fails the test, which names it.
HTTP_STEPS = (
    "OPTIONS",
    "hidden PUT",
    "PUT",
    "PUT elsewhere",
    "HEAD",
    "HEAD with Want-*",
    "hidden HEAD",
    "HEAD before",
    "HEAD of the directory",
    "PROPFIND",
    "hidden PROPFIND",
    "PROPFIND before",
    "PROPFIND of the directory",
    "MOVE",
    "MKCOL",
    "DELETE",
    "hidden DELETE",
    "GET",
    "GET with Want-*",
    "GET of a range",
    "GET as a witness",
)
_FTP_COMMANDS = ("USER", "PASS", "PWD", "CWD", "MKD", "EPSV", "PASV", "TYPE", "SIZE", "REST", "RETR", "STOR", "QUIT")
_FTP_EXTRA = ("HASH", "MLST", "MDTM", "FEAT", "SYST", "OPTS", "NOOP", "RNFR", "RNTO", "DELE", "SITE", "LIST", "NLST")
_FTP_HIDDEN = ("hidden SIZE", "hidden HASH", "hidden STOR", "hidden MLST", "hidden MDTM")
FTP_STEPS = tuple(f"{name}{when}" for name in (*_FTP_COMMANDS, *_FTP_EXTRA, *_FTP_HIDDEN) for when in ("", " after"))
#: Commands of a plain transfer by FTP.
FTP_PLAIN = frozenset(("USER", "PASS", "PWD", "CWD", "EPSV", "PASV", "TYPE", "STOR", "RETR", "SIZE", "QUIT"))


@dataclass(frozen=True, eq=False)
class World:
    """A server that does its duty, and one transfer.

    :param path: of the file, and ``written`` as the URL has it. :param older: the file exists with other content.
    :param folders: directories that exist. :param answer: of the server; None: FTP. :param breaks: the first GET ends
        in the middle. :param env: of the plugin.
    """

    name: str
    upload: bool
    scheme: str = "http"
    path: str = "dir/file"
    query: str = ""
    older: bool = False
    missing: bool = False
    breaks: bool = False
    folders: tuple[str, ...] = ("", "dir")
    answer: Callable[[Door, Request], Answer] | None = None
    env: dict[str, str] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)

    def door(self) -> Door | FtpDoor:
        """A new server."""
        door = FtpDoor() if self.answer is None else Door(self._step, self.answer)
        door.folders = set(self.folders)
        door.plain = FTP_PLAIN if self.answer is None else PLAIN
        if self.older:
            door.files[self.path] = OLDER
        if not self.upload and not self.missing:
            door.files[self.path] = DATA
        return door

    def url(self, door: Door | FtpDoor) -> str:
        """URL of the file."""
        return f"{self.scheme}://127.0.0.1:{door.port}/{self.path}{self.query}"

    def _step(self, door: Door, request: Request) -> str:
        """Name a request of HTTP."""
        method, path = request.method, request.path
        hidden = "hidden " if is_hidden(path) else ""
        if method == "GET":
            if self.upload:
                return "GET as a witness"
            wants = any(name.startswith("want-") for name in request.headers)
            return "GET of a range" if "range" in request.headers else "GET with Want-*" if wants else "GET"
        if method == "PUT" and not hidden and path != self.path:
            return "PUT elsewhere"
        if method in ("HEAD", "PROPFIND") and not door.stored and self.upload:
            return f"{method} of the directory" if request.path.endswith("/") else f"{method} before"
        if method in ("HEAD", "PROPFIND") and request.path.endswith("/"):
            return f"{method} of the directory"
        if method == "HEAD" and not hidden and any(name.startswith("want-") for name in request.headers):
            return "HEAD with Want-*"
        return f"{hidden}{method}"


# --- honest answers


def _file_headers(data: bytes) -> list[Header]:
    return [("ETag", f'"{hashlib.sha256(data).hexdigest()[:20]}"'), ("Last-Modified", formatdate(0, usegmt=True))]


def plain_store(door: Door, request: Request) -> Answer:
    """PUT, GET and HEAD; directories need not exist."""
    path = request.path
    if request.method == "PUT":
        is_new = path not in door.files
        door.files[path] = request.body
        door.stored = True
        return Answer(201 if is_new else 204)
    if request.method not in ("GET", "HEAD"):
        return Answer(405, [("Allow", "GET, HEAD, PUT")], b"not here")
    if path.endswith("/"):
        return Answer(200 if path.rstrip("/") in door.folders else 404)
    if path not in door.files:
        return Answer(404, [], b"no such file")
    return _content(request, door.files[path])


def _content(request: Request, data: bytes) -> Answer:
    headers = _file_headers(data)
    first, _, last = request.headers.get("range", "").partition("=")[2].partition("-")
    if request.method == "GET" and first.isdigit() and int(first) < len(data):
        end = min(int(last) if last.isdigit() else len(data) - 1, len(data) - 1)
        headers.append(("Content-Range", f"bytes {first}-{end}/{len(data)}"))
        return Answer(206, headers, data[int(first) : end + 1])
    return Answer(200, headers, data)


def grid_store(door: Door, request: Request) -> Answer:
    """Grid storage: states Adler-32 when it is asked for."""
    answer = dav_store(door, request)
    data = door.files.get(request.path, b"")
    if answer.status == 200 and request.method in ("GET", "HEAD") and "want-digest" in request.headers:
        answer.headers.append(("Digest", f"adler32={zlib.adler32(data):08x}"))
    return answer


def dav_store(door: Door, request: Request) -> Answer:
    """WebDAV; directories have to exist."""
    method, path = request.method, request.path
    folder = path.rstrip("/").rpartition("/")[0]
    if method == "OPTIONS":
        allowed = "OPTIONS, GET, HEAD, PUT, DELETE, MOVE, MKCOL, PROPFIND"
        return Answer(200, [("DAV", "1, 2"), ("Allow", allowed)])
    if method == "PUT" and folder not in door.folders:
        return Answer(409, [], b"no such collection")
    if method == "MKCOL":
        made = path.rstrip("/")
        status = 405 if made in door.folders else 201 if folder in door.folders else 409
        door.folders.update({made} if status == 201 else ())
        return Answer(status)
    if method == "DELETE":
        return Answer(204 if door.files.pop(path, None) is not None else 404)
    if method == "PROPFIND":
        return _properties(door, path) if path in door.files or path.rstrip("/") in door.folders else Answer(404)
    if method == "MOVE":
        return _moved(door, request)
    return plain_store(door, request)


def _properties(door: Door, path: str, size: str | None = None) -> Answer:
    size = str(len(door.files.get(path, b""))) if size is None else size
    body = (
        f'<?xml version="1.0"?><D:multistatus xmlns:D="DAV:"><D:response><D:href>/{path}</D:href><D:propstat><D:prop>'
        f"<D:getcontentlength>{size}</D:getcontentlength></D:prop><D:status>HTTP/1.1 200 OK</D:status></D:propstat>"
        "</D:response></D:multistatus>"
    )
    return Answer(207, [("Content-Type", "application/xml")], body.encode())


def _moved(door: Door, request: Request) -> Answer:
    target = urlsplit(request.headers.get("destination", ""))
    if target.query:
        return Answer(400, [], b"Destination with a query")
    path = unquote(target.path).lstrip("/")
    if request.path not in door.files:
        return Answer(404)
    is_new = path not in door.files
    door.files[path] = door.files.pop(request.path)
    return Answer(201 if is_new else 204)


def with_token(door: Door, request: Request) -> Answer:
    """WebDAV that admits only URLs with a token in their query."""
    if "authz=" not in request.target:
        return Answer(403, [], b"no token")
    return dav_store(door, request)


def redirecting(door: Door, request: Request) -> Answer:
    """A door that sends PUT, HEAD and GET elsewhere, as dCache does."""
    if request.path.startswith("pool/"):
        request.path = request.path.partition("/")[2]
        return plain_store(door, request)
    if request.method in ("PUT", "GET", "HEAD"):
        return Answer(307, [("Location", f"http://127.0.0.1:{door.port}/pool/{request.path}")])
    return dav_store(door, request)


def breaking(door: Door, request: Request) -> Answer:
    """The first GET ends in the middle."""
    answer = plain_store(door, request)
    if request.method == "GET" and sum(step.startswith("GET") for step in door.steps) == 1:
        answer.how = "half"
    return answer


WORLDS = (
    World("put", True, answer=plain_store),
    World("put over an older file", True, older=True, answer=plain_store),
    World("put, redirected", True, answer=redirecting),
    World("put by dav", True, scheme="dav", answer=dav_store),
    World("put by dav over an older file", True, scheme="dav", older=True, answer=dav_store),
    World("put by dav with a token in the query", True, scheme="dav", query="?authz=abc/def", answer=with_token),
    World("put by dav into a new directory", True, scheme="dav", path="new/deep/file", answer=dav_store),
    World("put by dav to grid storage", True, scheme="dav", answer=grid_store),
    World("put by dav to a server without WebDAV", True, scheme="dav", answer=plain_store),
    World("get", False, answer=plain_store),
    World("get of a missing file", False, missing=True, answer=plain_store),
    World("get from grid storage", False, answer=grid_store),
    World("get that breaks", False, answer=breaking),
    World("get in parts", False, answer=plain_store, env={"STAGEOUT_PARALLELISM": "4", "STAGEOUT_SPLIT_BYTES": "3000"}),
    World("put by ftp", True, scheme="ftp"),
    World("put by ftp over an older file", True, scheme="ftp", older=True),
    World("put by ftp into a new directory", True, scheme="ftp", path="new/deep/file"),
    World("get by ftp", False, scheme="ftp"),
)


# --- faults

STATUSES = (
    *(400, 401, 402, 403, 404, 405, 406, 407, 408, 409, 410, 411, 412, 413, 414, 415, 416, 417),
    *(421, 422, 423, 424, 425, 426, 428, 429, 431, 451),
    *(500, 501, 502, 503, 504, 505, 507, 508, 509, 511),
)
#: Faults for which the other side has to wait.
SLOW = ("hang", "stall", "endless", "endless-head")
_BROKEN = ("short", "long", "reset", "garbage")


def status(code: int) -> Fault:
    """Refuse: nothing is done."""
    return lambda door, request, forward: Answer(code, [("Content-Type", "text/plain")], b"the script says no")


def broken(how: str) -> Fault:
    """Do what is asked, unless nothing can come of it, and spoil the answer."""

    def fault(door: Door, request: Request, forward: Callable[[], Answer]) -> Answer:
        answer = Answer(200, [], b"some body") if how in ("hang", "reset", "garbage") else forward()
        answer.how = how
        return answer

    return fault


def said(code: int, body: bytes = b"", **headers: str | bytes) -> Fault:
    """Do nothing and say this."""
    named: list[Header] = [(name.replace("_", "-"), value) for name, value in headers.items()]
    return lambda door, request, forward: Answer(code, named, body)


def done_but(fault: Fault) -> Fault:
    """Do what is asked, then answer as the fault does."""

    def both(door: Door, request: Request, forward: Callable[[], Answer]) -> Answer:
        forward()
        return fault(door, request, forward)

    return both


def _with(**headers: str | bytes | None) -> Fault:
    """Do what is asked and add headers."""

    def fault(door: Door, request: Request, forward: Callable[[], Answer]) -> Answer:
        answer = forward()
        names = {name.replace("_", "-").lower() for name in headers}
        answer.headers = [pair for pair in answer.headers if pair[0].lower() not in names]
        answer.headers += [(name.replace("_", "-"), value) for name, value in headers.items() if value is not None]
        return answer

    return fault


def _packed(door: Door, request: Request, forward: Callable[[], Answer]) -> Answer:
    """The length of the packed form."""
    packed = gzip.compress(DATA)
    return Answer(200, [("Content-Encoding", "gzip"), ("Vary", "Accept-Encoding"), ("ETag", '"packed"')], packed)


def _properties_of(size: str) -> Fault:
    return lambda door, request, forward: _properties(door, request.path, size)


def _to_login(door: Door, request: Request, forward: Callable[[], Answer]) -> Answer:
    if request.path == "login":
        return Answer(200, [("Content-Type", "text/html")], _PAGE)
    return Answer(302, [("Location", "/login")])


def _moved_elsewhere(door: Door, request: Request, forward: Callable[[], Answer]) -> Answer:
    """A proxy strips the first part of the path."""
    if request.path in door.files:
        path = unquote(urlsplit(request.headers.get("destination", "")).path).lstrip("/").partition("/")[2]
        door.files[path] = door.files.pop(request.path)
    return Answer(204)


_OTHER_MD5 = hashlib.md5(gzip.compress(DATA)).digest()
_HEAD_LIES: dict[str, Fault] = {
    "length 0": said(200),
    "no length": said(200, Transfer_Encoding="chunked"),
    "a page": said(200, _PAGE, Content_Type="text/html"),
    "a login page behind a redirect": _to_login,
    "an older version with Age": said(200, OLDER, Age="300", ETag='"older"'),
    "an older version": said(200, OLDER, ETag='"older"'),
    "the packed form": _packed,
    "the packed form's digest": _with(
        x_goog_hash=f"md5={b64encode(_OTHER_MD5).decode()}", x_goog_stored_content_encoding="gzip"
    ),
    "an ETag that is no digest": _with(
        ETag=f'"{_OTHER_MD5.hex()}"', x_amz_server_side_encryption="aws:kms", x_amz_request_id="1"
    ),
    "an ETag of parts": _with(ETag=f'"{_OTHER_MD5.hex()}-2"', x_amz_request_id="1"),
    "a huge length": said(200, Content_Length=str(_LARGEST)),
    "bytes above 127": _with(X_Owner="Käse \xff".encode("latin-1"), ETag='"k\xe4se"'.encode("latin-1")),
    "204": said(204),
    "206": said(206, b"x", Content_Range="bytes 0-0/1"),
    "304": said(304),
    "202": said(202),
}
LIES: dict[str, dict[str, Fault]] = {
    "HEAD": _HEAD_LIES,
    "HEAD with Want-*": _HEAD_LIES,
    "hidden HEAD": _HEAD_LIES,
    "HEAD before": _HEAD_LIES,
    "OPTIONS": {
        "nothing": said(200),
        "a page": said(200, _PAGE, Content_Type="text/html"),
        "no DAV": said(200, Allow="GET, HEAD, PUT"),
        "a login page behind a redirect": _to_login,
    },
    "MOVE": {
        "201 without moving": said(201),
        "204 without moving": said(204),
        "207 without moving": said(207, b"<multistatus/>"),
        "200 with a page": said(200, _PAGE, Content_Type="text/html"),
        "202": said(202),
        "moved elsewhere": _moved_elsewhere,
        "a login page behind a redirect": _to_login,
        **{f"moved and {code}": done_but(status(code)) for code in (404, 409, 500, 502, 503)},
        "moved and reset": done_but(broken("reset")),
        "moved and hang": done_but(broken("hang")),
    },
    "MKCOL": {"201 without making": said(201), "a page": said(200, _PAGE), "made and 500": done_but(status(500))},
    "DELETE": {"204 without deleting": said(204), "207": said(207, b"<multistatus/>")},
    "PROPFIND": {
        "length 0": _properties_of("0"),
        "another length": _properties_of("77"),
        "no length": _properties_of(""),
        "no number": _properties_of("many"),
        "a page": said(207, _PAGE),
        "200 with a page": said(200, _PAGE),
        "cut off": said(207, b"<?xml version='1.0'?><multistatus"),
        "nothing": said(207),
    },
    "PUT": {
        "200": done_but(said(200, b"thanks")),
        "202": done_but(said(202)),
        "the answer's own digest": done_but(
            said(201, b"made", Content_MD5=b64encode(_OTHER_MD5).decode(), ETag=f'"{_OTHER_MD5.hex()}"')
        ),
        "the answer's own Repr-Digest": done_but(
            said(201, b"made", Repr_Digest=f"md5=:{b64encode(_OTHER_MD5).decode()}:")
        ),
        "bytes above 127": _with(Location="/d\xefr".encode("latin-1"), X_Name=b"\xe4\xff"),
        **{f"stored and {code}": done_but(status(code)) for code in (500, 502, 503, 504)},
        "stored and reset": done_but(broken("reset")),
    },
    "GET": {
        "the packed form's digest": _with(
            x_goog_hash=f"md5={b64encode(_OTHER_MD5).decode()}", x_goog_stored_content_encoding="gzip"
        ),
        "an ETag that is no digest": _HEAD_LIES["an ETag that is no digest"],
        "an ETag of parts": _HEAD_LIES["an ETag of parts"],
        "bytes above 127": _HEAD_LIES["bytes above 127"],
        "no length": _with(Content_Length=None, Transfer_Encoding=None),
        "203": lambda door, request, forward: Answer(203, [], forward().body),
    },
}
LIES["hidden PROPFIND"] = LIES["PROPFIND before"] = LIES["PROPFIND of the directory"] = LIES["PROPFIND"]
LIES["hidden DELETE"] = LIES["DELETE"]
LIES["hidden PUT"] = LIES["PUT elsewhere"] = LIES["PUT"]
LIES["GET with Want-*"] = LIES["GET"]
LIES["GET as a witness"] = {
    "200 with a page": said(200, _PAGE, Content_Type="text/html"),
    "the whole file": lambda door, request, forward: Answer(200, [], door.files.get(request.path, b"")),
    "length 0": said(200),
    "a login page behind a redirect": _to_login,
    "an older version": said(206, OLDER[:1], Content_Range=f"bytes 0-0/{len(OLDER)}", ETag='"older"'),
}
LIES["GET of a range"] = {
    "the whole file": lambda door, request, forward: Answer(200, _file_headers(DATA), DATA),
    "another range": said(206, DATA[5:], Content_Range=f"bytes 5-{len(DATA) - 1}/{len(DATA)}"),
    "no Content-Range": lambda door, request, forward: Answer(206, [], forward().body),
}


def http_faults(step: str) -> dict[str, Fault]:
    """All ways in which a step of HTTP can go wrong, by name."""
    faults = {str(code): status(code) for code in STATUSES}
    faults.update({how: broken(how) for how in (*SLOW, *_BROKEN)})
    faults.update(LIES.get(step, {}))
    return faults


FTP_REPLIES = (
    "421 Closing.",
    "425 No data connection.",
    "426 Broken.",
    "430 Who?",
    "450 Busy.",
    "451 Error here.",
    "452 No space.",
    "500 What?",
    "501 How?",
    "502 Not implemented.",
    "503 Not now.",
    "504 Not so.",
    "530 Log in.",
    "532 Account?",
    "534 No.",
    "550 No.",
    "551 No page.",
    "552 Quota.",
    "553 Not this name.",
)
_FTP_LIES = {
    "SIZE": {"213 0": "213 0", "213 77": "213 77", "213 nothing": "213 ", "200": "200 fine", "213 text": "213 many"},
    "HASH": {"213 text": "213 many", "200": "200 fine"},
    "RNTO": {"200 without renaming": "250 done"},
    "DELE": {"250 without deleting": "250 done"},
    "MLST": {"250 nothing": "250 done"},
}


def ftp_faults(step: str) -> dict[str, str]:
    """All ways in which an FTP command can go wrong, by name."""
    name = step.replace("hidden ", "").replace(" after", "")
    faults = {reply[:3]: reply for reply in FTP_REPLIES}
    faults.update({how: how for how in ("hang", "endless", "reset")})
    faults.update(_FTP_LIES.get(name, {}))
    return faults
