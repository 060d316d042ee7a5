"""Cases in which servers, networks or names misbehave."""

from __future__ import annotations

import socket
from collections.abc import Callable
from urllib.parse import unquote

from tests.curl.beside import Ask, Case, Stage
from tests.curl.interposer import Asked, Drop, Early, Hold, Reply, cut, paced, status

DATA = bytes(range(256)) * 400
_NO_VERSION = {"ETag": None, "Last-Modified": None}
#: Temporary failures are retried for seconds: too long for the suite.
_PASSING = frozenset({408, 423, 425, 429, 500, 502, 503, 504, 507, 509})
_GET_STATUSES = (400, 401, 403, 405, 406, 408, 409, 410, 412, 413, 414, 415, 416, 418, 423, 425, 429, 451)
_SERVER_STATUSES = (500, 501, 502, 503, 504, 505, 507, 509, 511)
_PUT_STATUSES = (400, 401, 403, 404, 405, 409, 411, 412, 413, 415, 423, 429, 500, 501, 502, 503, 504, 507)


def _always(method: str, fault: object, ranges: bool = True, version: bool = True) -> Callable[[Stage], Ask]:
    """All requests with this method get a fault; the file is downloaded for GET, else uploaded."""

    def arrange(stage: Stage) -> Ask:
        stage.store.ranges = ranges
        stage.store.headers.update({} if version else _NO_VERSION)
        stage.store.always(method, fault)
        return stage.get_from_store(DATA) if method == "GET" else stage.put_to_store(DATA)

    return arrange


def _once(method: str, fault: object, ranges: bool = True, version: bool = True) -> Callable[[Stage], Ask]:
    """The first request with this method gets a fault."""

    def arrange(stage: Stage) -> Ask:
        ask = _always(method, None, ranges, version)(stage)
        stage.store.next(method, fault)
        return ask

    return arrange


def _redirects(code: int, hops: int = 1, method: str = "GET") -> Callable[[Stage], Ask]:
    """So many redirects before the right place."""

    def arrange(stage: Stage) -> Ask:
        ask = stage.get_from_store(DATA) if method == "GET" else stage.put_to_store(DATA)
        stage.store.next(method, *(status(code, Location=f"/file?{hop}") for hop in range(hops)))
        return ask

    return arrange


def _put_without_head(code: int) -> Callable[[Stage], Ask]:
    """A drop box: takes files and shows none."""

    def arrange(stage: Stage) -> Ask:
        stage.store.always("HEAD", status(code))
        return stage.put_to_store(DATA)

    return arrange


def _answered(code: int) -> Callable[[Asked, Callable[[], Reply]], Reply]:
    """Do what is asked and say so with another status."""

    def fault(asked: Asked, forward: Callable[[], Reply]) -> Reply:
        reply = forward()
        reply.status = code
        return reply

    return fault


def _chunked(asked: Asked, forward: Callable[[], Reply]) -> Reply:
    reply = forward()
    reply.chunked = True
    return reply


def _no_content(stage: Stage) -> Ask:
    """The file is empty."""
    stage.store.always("GET", status(204))
    return stage.get(stage.store.url("file"), b"")


def _job_with_one_missing(stage: Stage) -> Ask:
    """Two files fail in a way that passes, one is fine, one decides the outcome."""
    store = stage.store

    def answer(asked: Asked, forward: Callable[[], Reply]) -> Reply:
        return Reply(500) if asked.path.startswith("/broken") else forward()

    store.always("GET", answer)
    store.files.update(broken1=DATA, broken2=DATA, good=DATA)
    return Ask([stage.wanted(store.url(name), DATA, name) for name in ("broken1", "broken2", "good", "missing")])


def _unknown_host(stage: Stage) -> Ask:
    return stage.get("http://no-such-host.invalid/file", DATA)


def _unknown_proxy(stage: Stage) -> Ask:
    return stage.get_from_store(DATA, env={"http_proxy": "http://no-such-proxy.invalid:3128"})


def _tls_to_a_plain_port(stage: Stage) -> Ask:
    return stage.get(stage.store.url("file").replace("http:", "https:"), DATA)


def _silent_port(stage: Stage) -> Ask:
    """Connections are made and nothing is answered."""
    server = socket.create_server(("127.0.0.1", 0))
    stage.on_exit(server.close)
    stage.name_port(server.getsockname()[1], "SILENT")
    return stage.get(f"http://127.0.0.1:{server.getsockname()[1]}/file", DATA)


def _alive(size_bytes: int, pieces: int, pause_s: float) -> Callable[[Stage], Ask]:
    """A source that sends so slowly, without ranges and versions."""

    def arrange(stage: Stage) -> Ask:
        stage.store.ranges = False
        stage.store.headers.update(_NO_VERSION)
        stage.store.always("GET", paced(pieces, pause_s))
        return stage.get_from_store(DATA[:size_bytes])

    return arrange


def _get_names(*names: str) -> Callable[[Stage], Ask]:
    """URLs as persons write them."""

    def arrange(stage: Stage) -> Ask:
        stage.store.files.update(dict.fromkeys(map(unquote, names), DATA))
        return Ask([stage.wanted(stage.store.url(name), DATA, f"file{i}") for i, name in enumerate(names)])

    return arrange


def _put_local_missing(stage: Stage) -> Ask:
    ask = stage.put_to_store(DATA)
    (stage.scratch / "file").unlink()
    return ask


def _with_password(stage: Stage) -> Ask:
    url = stage.get_from_store(DATA).files[0].url
    return stage.get(url.replace("http://", "http://user:pass-word@"), DATA)


#: HTCondor's own begins anew, or goes on behind a byte of its own question whether it may: then the content is wrong.
_RESUMED = frozenset({"DeveloperData.TransferHTTPStatusCode"})
#: HTCondor's own calls silence TooSlow.
_SILENT = frozenset({"TransferErrorData.FailureType"})
#: HTCondor's own shows the password.
_PASSWORD = frozenset({"DeveloperData.TransferHostName"})

FAULTS = [
    *(
        Case(f"get-{code}", _always("GET", status(code, "no")), slow=code in _PASSING)
        for code in (*_GET_STATUSES, *_SERVER_STATUSES)
    ),
    *(Case(f"put-{code}", _always("PUT", status(code, "no")), slow=code in _PASSING) for code in _PUT_STATUSES),
    *(Case(f"put-answered-{code}", _once("PUT", _answered(code))) for code in (200, 202, 204)),
    *(Case(f"put-head-{code}", _put_without_head(code)) for code in (401, 403, 404, 405, 501)),
    *(Case(f"get-redirect-{code}", _redirects(code)) for code in (301, 302, 303, 307, 308)),
    Case("put-redirect-307", _redirects(307, method="PUT")),
    Case("get-redirect-nowhere", _always("GET", status(302))),
    Case("get-204", _no_content),
    Case("get-chunked", _always("GET", _chunked)),
    Case("get-without-version", _once("GET", None, version=False)),
    Case("get-cut-once", _once("GET", cut(30_000)), other=_RESUMED),
    Case("get-cut-once-no-ranges", _once("GET", cut(30_000), ranges=False)),
    Case("get-cut-once-no-version", _once("GET", cut(30_000), version=False)),
    Case("get-ended-once", _once("GET", cut(30_000, "end")), other=_RESUMED | {"TransferFileBytes"}),
    Case("get-cut-at-once", _once("GET", cut(0))),
    Case("put-dropped-once", _once("PUT", Drop(30_000))),
    Case("put-refused-early", _always("PUT", Early(403, "no"))),
    Case("get-one-of-four-missing", _job_with_one_missing, failure_slack_s=10),
    Case("unknown-host", _unknown_host, failure_slack_s=10),
    Case("unknown-proxy", _unknown_proxy, failure_slack_s=10),
    Case("https-to-a-plain-port", _tls_to_a_plain_port, other=frozenset({"TransferErrorData.FailedServer"})),
    Case("get-names", _get_names("a%20b", "plus+sign", "percent%25", "k%C3%A4se")),
    Case("get-password", _with_password, other=_PASSWORD),
    Case("put-local-missing", _put_local_missing),
    Case("get-35-bytes-in-30-s", _alive(35, 35, 0.9), slow=True),
    Case("get-100-bytes-per-s", _alive(6000, 60, 1.0), slow=True),
    Case("get-pause-of-40-s", _alive(2000, 2, 40.0), slow=True),
    Case("get-hangs-in-the-middle", _always("GET", cut(30_000, "stall")), slow=True),
    Case("get-hangs-no-ranges", _always("GET", cut(30_000, "stall"), ranges=False, version=False), slow=True),
    Case("get-no-answer", _silent_port, slow=True, other=_SILENT),
    Case("put-no-answer", _always("PUT", Hold(len(DATA))), slow=True, other=_SILENT),
    Case("put-hangs-in-the-middle", _always("PUT", Hold(30_000)), slow=True, other=_SILENT),
]
