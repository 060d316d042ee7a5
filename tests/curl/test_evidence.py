"""A question never makes an upload worse: which answers count, which say nothing, and what the asking costs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from email.utils import formatdate

import pytest

from stageout.core.errors import ErrorClass as K
from stageout.protocols.curl.evidence import Sent, Verdict, witness_of
from stageout.protocols.curl.http import QUESTION_S
from stageout.protocols.curl.transport import Reply as Answer
from stageout.testing.starter import Wanted
from tests.curl.beside import Store
from tests.curl.interposer import Asked, Hold, Reply, status
from tests.curl.plugin import NO_RETRY

SIZE, NOW_S = 1000, 1_700_000_000
SENT = Sent(SIZE, formatdate(NOW_S + 5, usegmt=True), took_s=5.0)
DATA = os.urandom(50_000)
PAGE = b"<!DOCTYPE html><html>Please log in</html>"
HTML = {"Content-Type": "text/html"}


def head(code: int = 200, size: int | None = 7, redirected: bool = False, **more: str) -> Answer:
    """An answer of which the length is another one than was sent."""
    headers = {name.replace("_", "-"): value for name, value in more.items()}
    if size is not None:
        headers["content-length"] = str(size)
    return Answer(code, headers, redirected=redirected)


AGREES, DOUBTS, NOTHING = "agrees", "doubts", "nothing"


@pytest.mark.parametrize(
    ("answer", "sent", "says"),
    [
        (head(size=SIZE), SENT, AGREES),
        (head(size=SIZE, age="300"), SENT, AGREES),
        (head(size=SIZE, redirected=True), SENT, AGREES),
        (head(206, size=1, content_range=f"bytes 0-0/{SIZE}"), SENT, AGREES),
        (head(), SENT, DOUBTS),
        (head(size=0), SENT, DOUBTS),
        (head(206, size=1, content_range="bytes 0-0/7"), SENT, DOUBTS),
        (head(416, size=None, content_range="bytes */7"), SENT, DOUBTS),
        (head(last_modified=formatdate(NOW_S, usegmt=True)), SENT, DOUBTS),
        (head(age="0", x_cache="MISS"), SENT, DOUBTS),
        (head(last_modified=formatdate(0, usegmt=True)), Sent(SIZE), DOUBTS),
        (head(last_modified="no date"), SENT, DOUBTS),
        (head(content_encoding="identity"), SENT, DOUBTS),
        (head(404, size=None), Sent(SIZE, shows=True), DOUBTS),
        (head(content_type="text/html"), Sent(SIZE, page=True), DOUBTS),
        (head(redirected=True, content_type="text/html"), Sent(SIZE, page=True), DOUBTS),
        (head(size=None), SENT, NOTHING),
        (head(transfer_encoding="chunked"), SENT, NOTHING),
        (head(size=10**30), SENT, NOTHING),
        (head(), Sent(SIZE, accepted=True), NOTHING),
        (head(404), SENT, NOTHING),
        (head(410), SENT, NOTHING),
        (head(404), Sent(SIZE, page=True), NOTHING),
        *((head(code), SENT, NOTHING) for code in (204, 301, 304, 400, 401, 403, 405, 416, 429, 500, 501, 503)),
        (head(redirected=True), SENT, NOTHING),
        (head(content_type="text/html; charset=utf-8"), SENT, NOTHING),
        (head(content_encoding="gzip"), SENT, NOTHING),
        (head(size=SIZE, content_encoding="gzip"), SENT, NOTHING),
        (head(age="300"), SENT, NOTHING),
        (head(x_cache="HIT from proxy"), SENT, NOTHING),
        (head(x_cache_status="STALE"), SENT, NOTHING),
        (head(last_modified=formatdate(NOW_S - 60, usegmt=True)), SENT, NOTHING),
    ],
    ids=str,
)
def test_rules_of_evidence(answer: Answer, sent: Sent, says: str) -> None:
    """One rule after the other; a second answer of the same kind contradicts only where the first one was a doubt."""
    verdict, begun = Verdict(sent), int(sent.page)
    verdict.hear(witness_of("HEAD", answer, sent))
    assert verdict.confirmed is (says == AGREES)
    assert verdict.doubtful is (says != AGREES and begun + (says == DOUBTS) == 1)
    verdict.hear(witness_of("GET", answer, sent))
    assert verdict.contradicted is (says == DOUBTS)


def test_one_that_agrees_settles_it() -> None:
    verdict = Verdict(SENT)
    for size in (7, SIZE, 7):
        verdict.hear(witness_of("HEAD", head(size=size), SENT))
    assert verdict.confirmed
    assert not verdict.contradicted


# ---- against servers


@pytest.fixture
def store() -> Iterator[Store]:
    server = Store()
    yield server
    server.close()


def says(code: int = 200, **headers: str) -> Callable[..., Reply]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda asked, forward: Reply(code, named)


HEADS = {
    "length 0": (says(Content_Length="0"), "size"),
    "a page": (says(Content_Length="777", Content_Type="text/html"), ""),
    "an older version": (says(Content_Length="777", Age="300"), ""),
    "gzip": (says(Content_Length="777", Content_Encoding="gzip"), ""),
    "another length": (says(Content_Length="777"), "size"),
    "not found": (says(404), ""),
    "refused": (says(403), ""),
}


@pytest.mark.parametrize("name", HEADS)
def test_doubtful_head(plugin, store, name):
    """The file is there: HEAD alone never makes it be sent again."""
    fault, verified = HEADS[name]
    store.always("HEAD", fault)
    result = plugin.put(store.url("file"), DATA)
    assert result.ok
    assert result.verified == verified
    assert store.methods().count("PUT") == 1
    assert store.files == {"file": DATA}


def test_login_page(plugin, store):
    """Everything is answered 200 with a page, and nothing is stored."""
    for method in ("PUT", "HEAD", "GET"):
        store.always(method, lambda asked, forward: Reply(200, HTML, PAGE))
    result = plugin.put(store.url("file"), DATA)
    assert result.kind is K.SIZE_MISMATCH
    assert "web page" in result.ad["TransferError"]


def test_wrong_copies_are_sent_twice_at_most(plugin, store):
    def shortened(asked: Asked, forward: Callable[[], Reply]) -> Reply:
        asked.body = asked.body[:-5]
        return forward()

    store.always("PUT", shortened)
    result = plugin.put(store.url("file"), DATA)
    assert set(result.failures) == {K.SIZE_MISMATCH}
    assert store.methods().count("PUT") == 2


def test_file_that_shows_later(plugin, store):
    """An answer 201 may come before the file is there for all; a second look comes before a second sending."""
    store.next("HEAD", says(Content_Length="10"))
    store.next("GET", says(206, Content_Range="bytes 0-0/10"))
    result = plugin.put(store.url("file"), DATA)
    assert result.ok
    assert result.failures == []
    assert store.methods() == ["PUT", "HEAD", "GET", "HEAD"]


STATUSES = (*range(400, 418), 421, 422, 423, 424, 425, 426, 428, 429, 431, 451, *range(500, 506), 507, 508, 509, 511)


def test_every_status_of_every_question(plugin, dav, dav_door):
    """Every file arrives, and its bytes are sent once; twice where its collection was missing."""
    steps = ("HEAD", "PROPFIND", "all")

    def refusing(asked: Asked, forward: Callable[[], Reply]) -> Reply:
        step, code = asked.path.strip("/").split("-")
        return Reply(int(code)) if step in (asked.method, "all") else forward()

    for method in ("HEAD", "PROPFIND", "GET"):
        dav_door.always(method, refusing)
    plugin.new_scratch()
    wanted = [
        Wanted(f"{scheme}://127.0.0.1:{dav_door.port}/{step}-{code}", f"{scheme}{step}{code}")
        for scheme, step, code in [(("dav", "http")[code % 2], step, code) for step in steps for code in STATUSES]
    ]
    for item in wanted:
        (plugin.scratch / item.name).write_bytes(b"data")
    result = plugin.call(wanted, upload=True, lifetime_s=300)
    assert [ad["TransferError"] for ad in result.run.ads if not ad["TransferSuccess"]] == []
    assert dav_door.methods().count("PUT") == len(wanted)
    assert len(dav.names()) == len(wanted)


@pytest.mark.parametrize("code", [401, 403, 404, 405, 409, 500, 503])
def test_every_status_of_a_collection(plugin, dav, dav_door, code):
    """The file cannot arrive: a few requests say so."""
    dav_door.always("MKCOL", status(code))
    result = plugin.put(f"dav://127.0.0.1:{dav_door.port}/{'/'.join('abc')}/file", DATA)
    assert not result.ok
    assert len(dav_door.asked) < 60
    assert dav_door.methods().count("PUT") <= 2 * result.ad["DeveloperData"]["StageOutAttempts"]


@pytest.mark.parametrize("scheme", ["http", "dav"])
def test_question_without_answer_costs_seconds(plugin, dav, dav_door, scheme):
    """None for the file, and none for the next one."""
    for method in ("HEAD", "PROPFIND", "GET"):
        dav_door.always(method, Hold(0))
    plugin.new_scratch()
    wanted = [Wanted(f"{scheme}://127.0.0.1:{dav_door.port}/f{number}", f"f{number}") for number in range(3)]
    for item in wanted:
        (plugin.scratch / item.name).write_bytes(DATA)
    patient = {"STAGEOUT_STALL_WINDOW_S": "60", "STAGEOUT_RESPONSE_TIMEOUT_S": "300", "STAGEOUT_CONCURRENCY": "1"}
    result = plugin.call(wanted, upload=True, env=patient)
    assert result.ok
    assert result.run.duration_s < 20
    assert dav_door.methods().count("PUT") == 3
    assert dav_door.methods().count("HEAD") == 2


def test_required_digest_has_time(plugin, store):
    """A server that reads a large file to compute its digest; HEAD is part of the transfer where it is required."""
    digest = hashlib.sha256(DATA).hexdigest()

    def slow(asked: Asked, forward: Callable[[], Reply]) -> Reply:
        store.closing.wait(QUESTION_S + 1.5)
        reply = forward()
        reply.headers["X-Checksum-Sha256"] = digest
        return reply

    store.always("HEAD", slow)
    env = {"STAGEOUT_CHECKSUM_POLICY": "required", "STAGEOUT_RESPONSE_TIMEOUT_S": "60", "STAGEOUT_STALL_WINDOW_S": "60"}
    result = plugin.put(store.url("file"), DATA, env=env)
    assert result.ok, result.everything
    assert result.verified == "sha256"
    assert store.methods() == ["PUT", "HEAD"]


def test_head_of_the_answer_is_enough(plugin, store):
    """Behind a good answer to the PUT a body without end; the file is there, and nobody waits for the rest."""

    def endless(asked: Asked, forward: Callable[[], Reply]) -> Reply:
        reply = forward()
        reply.body, reply.announced_bytes, reply.cut_after, reply.cut = b"x", 1 << 40, 1, "stall"
        return reply

    store.always("PUT", endless)
    result = plugin.put(store.url("file"), DATA, env={"STAGEOUT_STALL_WINDOW_S": "60"})
    assert result.ok
    assert store.methods().count("PUT") == 1
    assert result.run.duration_s < 15


# ---- statuses with more behind them


def s3_error(code: int, word: str) -> Callable[..., Reply]:
    body = f"<?xml version='1.0'?><Error><Code>{word}</Code><Message>No.</Message></Error>".encode()
    return lambda asked, forward: Reply(code, {"Content-Type": "application/xml"}, body)


@pytest.mark.parametrize(
    ("code", "word", "kind"),
    [(400, "RequestTimeout", K.TIMED_OUT), (409, "OperationAborted", K.SERVER_BUSY), (503, "SlowDown", K.THROTTLED)],
)
def test_s3_codes_that_pass(plugin, store, code, word, kind):
    store.next("PUT", s3_error(code, word))
    result = plugin.put(store.url("file"), DATA * 40)
    assert result.ok
    assert result.failures == [kind]


@pytest.mark.parametrize(
    ("query", "code", "word", "advice"),
    [
        ("X-Amz-SignedHeaders=content-type%3Bhost", 403, "SignatureDoesNotMatch", "signed for the header content-type"),
        ("x-amz-checksum-crc32=AAAAAA%3D%3D", 400, "BadDigest", "signed for one content only"),
        ("X-Amz-SignedHeaders=host", 403, "RequestTimeTooSkewed", "check the clock"),
    ],
)
def test_signed_url_that_cannot_work(plugin, store, query, code, word, advice):
    store.always("PUT", s3_error(code, word))
    result = plugin.put(store.url(f"file?X-Amz-Signature=0123456789&{query}"), DATA, env=NO_RETRY)
    assert not result.ok
    assert advice in result.ad["TransferError"]


@pytest.mark.parametrize("size", [2_000_000, 2_500_001])
def test_expectation_that_fails(plugin, store, size):
    """417 to ``Expect``: the same without it."""

    def strict(asked: Asked, forward: Callable[[], Reply]) -> Reply:
        return Reply(417) if "expect" in asked.headers else forward()

    store.always("PUT", strict)
    result = plugin.put(store.url("file"), os.urandom(size))
    assert result.ok
    assert result.failures == []


def test_redirects_send_the_file_twice_at_most(plugin, store):
    """A server that sends it from place to place gets it for as long as the attempt's bytes last."""

    def elsewhere(asked: Asked, forward: Callable[[], Reply]) -> Reply:
        return Reply(307, {"Location": f"/{asked.path.strip('/')}x"})

    store.always("PUT", elsewhere)
    result = plugin.put(store.url("file"), DATA, env=NO_RETRY)
    assert not result.ok
    taken = sum(len(asked.body) for asked in store.asked)
    assert taken <= 2 * len(DATA)
