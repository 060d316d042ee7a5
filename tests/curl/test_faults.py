"""Faults between the plugin and a web server: each is one error class, and a fault that can pass does pass."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from stageout.core.errors import ErrorClass as K
from stageout.protocols.curl.failures import server_words
from stageout.testing.starter import Wanted
from tests.curl.interposer import Drop, Early, Hold, Interposer, Reply, changed, cut, paced, status
from tests.curl.plugin import NO_RETRY, RETRYING

BIG = os.urandom(256 * 1024)
SINGLE_STATUS = [
    (400, K.REQUEST_REJECTED),
    (403, K.PERMISSION_DENIED),
    (404, K.NOT_FOUND),
    (410, K.NOT_FOUND),
    (412, K.CONFLICT),
    (413, K.TOO_LARGE),
    (414, K.BAD_URL),
    (418, K.REQUEST_REJECTED),
    (423, K.SERVER_BUSY),
    (429, K.THROTTLED),
    (451, K.PERMISSION_DENIED),
    (500, K.SERVER_ERROR),
    (501, K.NOT_SUPPORTED),
    (502, K.SERVER_ERROR),
    (503, K.SERVER_BUSY),
    (507, K.NO_SPACE_REMOTE),
    (509, K.THROTTLED),
    (599, K.SERVER_ERROR),
]


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_status(plugin, door, method):
    """Each status is one class; the server's own words reach the owner."""
    door.always(method, lambda asked, forward: Reply(int(asked.path[1:]), {}, b"the <b>server's own</b> words"))
    plugin.new_scratch()
    wanted = [Wanted(door.url(str(code)), f"file{code}") for code, _ in SINGLE_STATUS]
    for item in wanted:
        if method == "PUT":
            (plugin.scratch / item.name).write_text("data")
    result = plugin.call(wanted, upload=method == "PUT", env=NO_RETRY)
    assert not result.ok
    assert result.run.exit_code == 1
    assert plugin.leftovers() == (sorted(item.name for item in wanted) if method == "PUT" else [])
    for ad, (code, kind) in zip(result.run.ads, SINGLE_STATUS):
        assert [error["ErrorCode"] for error in ad["TransferErrorData"]] == [kind.code], code
        assert "the server's own words" in ad["TransferError"]


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (b"<html><head><title>Error response</title></head><body><h1>Error response</h1><p>too busy</p></body></html>",
         "Error response too busy"),
        (b"<html><HEAD><title>503 Service Unavailable</title></HEAD><h1>503 Service Unavailable</h1>nginx</html>",
         "nginx"),
        (b"503 Service Unavailable", ""),
        (b"503 Service Unavailable.\nno more streams", "no more streams"),
        (b"<title>gone for a while</title>", "gone for a while"),
        (b"<style>h1 {color: red}</style><script>again()</script>full", "full"),
        (b"<title>never closed <p>full", "never closed full"),
        (b"<h1>Service Unavailable</h1><p>Full.</p><hr><address>Apache/2.4 Server at x Port 80</address>", "Full."),
        (b"<center><h1>503 Service Unavailable</h1></center><hr><center>nginx/1.22.1</center>", ""),
        (b"<hr><b>Message</b> too many\nstreams <hr class=line><h3>Apache Tomcat/9</h3>", "Message too many streams"),
        (b"<p>Short one. " + b"A long one " * 40 + b"ends.</p>", "Short one."),
        (b"x" * 1000, ""),
        (b"<p>The server encountered an internal error or\nmisconfiguration and was unable to complete\nyour request."
         b"</p>\n<p>Please contact the server administrator at \n [no address given] to inform them.</p>\n"
         b"<p>More information about this error may be available\nin the server error log.</p>", ""),
    ],
)  # fmt: skip
def test_a_page_says_nothing_twice(page, words):
    assert server_words(page, "503 Service Unavailable") == words


@pytest.mark.parametrize(
    ("code", "job", "exit_code"),
    [
        (503, RETRYING, 11),
        (507, RETRYING, 11),
        (403, RETRYING, 1),
        (503, {}, 1),
        (503, {"StageOutRetryDelay": 0}, 1),
        (503, {"StageOutRetryDelay": "soon"}, 1),
    ],
)
def test_exit_status(plugin, door, code, job, exit_code):
    """11 says that all of it may be tried again, to access points that retry; else 1, as HTCondor's own plugin."""
    door.always("PUT", status(code))
    assert plugin.put(door.url("file"), env=NO_RETRY, job=job).run.exit_code == exit_code


def test_upload_conflict(plugin, door):
    door.always("PUT", status(409))
    result = plugin.put(door.url("file"), env=NO_RETRY)
    assert result.failures == [K.CONFLICT]
    assert "directory" not in result.ad["TransferError"]


def test_upload_into_a_missing_directory(plugin, apache):
    """A new user meets this first: the message names the directory and the scheme that makes it."""
    host = f"127.0.0.1:{apache.port}"
    result = plugin.put(f"http://{host}/run%207/1234/file", env=NO_RETRY)
    assert result.failures == [K.CONFLICT]
    assert result.ad["TransferError"].endswith(
        f"{host} answered 409 Conflict to the upload of file: the directory /run 7/1234/ does not exist there; "
        "make it, or write dav:// instead of http://, which makes directories"
    )
    assert plugin.put(f"dav://{host}/run%207/1234/file", env=NO_RETRY).ok


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_unauthorised(plugin, door, method, tmp_path):
    """Without a credential, and with one that is refused."""
    door.always(method, status(401))
    credentials = tmp_path / "creds"
    credentials.mkdir()
    (credentials / "site.use").write_text("some-token")
    move = plugin.get if method == "GET" else plugin.put
    assert move(door.url("file")).failures == [K.CREDENTIAL_MISSING]
    result = move(door.url("file").replace("http:", "site+http:"), credentials=credentials)
    assert result.failures == [K.CREDENTIAL_REFUSED]
    assert result.ad["TransferErrorData"][0]["ShouldRefresh"] is True


@pytest.mark.parametrize("method", ["GET", "PUT"])
@pytest.mark.parametrize(("code", "kind"), [(503, K.SERVER_BUSY), (500, K.SERVER_ERROR), (429, K.THROTTLED)])
def test_passing_trouble(plugin, door, nginx, method, code, kind):
    nginx.file("passing").write_bytes(BIG)
    door.next(method, status(code))
    if method == "GET":
        result = plugin.get(door.url("passing"))
        assert plugin.got() == BIG
    else:
        result = plugin.put(door.url("passing2"), BIG)
        assert nginx.file("passing2").read_bytes() == BIG
    assert result.ok
    assert result.failures == [kind]
    assert result.ad["DeveloperData"]["StageOutAttempts"] == 2


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_retry_after(plugin, door, nginx, method):
    nginx.file("later").write_bytes(b"data")
    door.next(method, status(429, Retry_After="2"))
    result = plugin.get(door.url("later")) if method == "GET" else plugin.put(door.url("later2"))
    assert result.ok
    assert result.failures == [K.THROTTLED]
    assert result.ad["TransferErrorData"][0]["Retryable"] == 2
    assert result.run.duration_s >= 2


def test_retry_after_longer_than_the_budget(plugin, door):
    """The slot is not held for it: HTCondor, or the manager, is told when to come again.

    A plugin that waited, for that or for the end of the budget, would not be back before this call is given up.
    """
    door.always("PUT", status(503, Retry_After="3600"))
    result = plugin.put(door.url("file"), env={"STAGEOUT_RETRY_BUDGET_S": "3500"})
    assert result.failures == [K.SERVER_BUSY]
    assert result.ad["TransferErrorData"][0]["Retryable"] == 3600
    assert door.methods().count("PUT") == 1


def test_retry_after_as_a_date(plugin, door):
    """Counted from the server's own clock, not from ours."""
    later = {"Date": "Tue, 01 Jan 2019 00:00:00 GMT", "Retry_After": "Tue, 01 Jan 2019 00:10:00 GMT"}
    door.always("GET", status(429, **later))
    result = plugin.get(door.url("file"))
    assert result.ad["TransferErrorData"][0]["Retryable"] == 600


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_one_attempt_under_the_manager(plugin, door, method):
    """The manager has a retry schedule of its own, and other files to move meanwhile."""
    door.always(method, status(503))
    move = plugin.get if method == "GET" else plugin.put
    result = move(door.url("file"), env={"STAGEOUT_MOVER": "1"})
    assert result.failures == [K.SERVER_BUSY]
    assert door.methods().count(method) == 1


def test_budget_ends_retries(plugin, door):
    door.always("GET", status(503))
    result = plugin.get(door.url("file"), env={"STAGEOUT_RETRY_BUDGET_S": "2"})
    assert set(result.failures) == {K.SERVER_BUSY}
    assert len(result.failures) >= 2
    assert result.run.duration_s < 15


# ---- connections that break ------------------------------------------------------------------------------------------


def test_reset_during_upload(plugin, door, nginx):
    door.next("PUT", Drop(100_000))
    result = plugin.put(door.url("reset-up"), BIG * 16)
    assert result.ok
    assert result.failures == [K.CONNECTION_LOST]
    assert nginx.file("reset-up").read_bytes() == BIG * 16
    assert result.ad["TransferTotalBytes"] > len(BIG) * 16


def test_reset_before_the_answer(plugin, door, nginx):
    door.next("PUT", cut(0, "reset"))
    door.next("GET", cut(0, "end"))
    nginx.file("cut").write_bytes(BIG)
    assert plugin.get(door.url("cut")).failures == [K.CONNECTION_LOST]
    assert plugin.put(door.url("small"), b"x").ok


def test_connection_refused(plugin):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/file"
        for result in (plugin.get(url, env=NO_RETRY), plugin.put(url, env=NO_RETRY)):
            assert result.failures == [K.CONNECT_FAILED]
            assert str(taken.getsockname()[1]) in result.ad["TransferErrorData"][0]["FailedServer"]


def test_server_that_accepts_and_says_nothing(plugin):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}/file"
        assert plugin.get(url, env=NO_RETRY).failures == [K.STALLED]
        assert plugin.put(url, env=NO_RETRY).failures == [K.STALLED]


def test_server_that_speaks_no_http(plugin):
    with socket.create_server(("127.0.0.1", 0)) as odd:

        def greet() -> None:
            peer, _ = odd.accept()
            peer.sendall(b"220 mail.example.org ready\r\n")
            peer.recv(1000)
            peer.close()

        threading.Thread(target=greet, daemon=True).start()
        result = plugin.get(f"http://127.0.0.1:{odd.getsockname()[1]}/file", env=NO_RETRY)
    assert not result.ok
    assert result.kind in (K.NOT_SUPPORTED, K.SERVER_ERROR)


# ---- stalls ----------------------------------------------------------------------------------------------------------


def test_download_stalls_at_the_end(plugin, door, nginx):
    nginx.file("stalls").write_bytes(BIG)
    door.next("GET", cut(len(BIG) * 99 // 100, "stall"))
    result = plugin.get(door.url("stalls"))
    assert result.ok
    assert result.failures == [K.STALLED]
    assert plugin.got() == BIG


def test_upload_stalls(plugin, door, nginx):
    """Half of it taken: the rate is gone."""
    big = BIG * 128
    door.next("PUT", Hold(len(big) // 2))
    result = plugin.put(door.url("stalls-up"), big)
    assert result.ok
    assert result.failures == [K.STALLED]
    assert nginx.file("stalls-up").read_bytes() == big


def test_upload_stalls_at_the_end(plugin, door):
    """The kernel has taken the last hundredth: seen from here the answer does not come."""
    door.always("PUT", Hold(len(BIG) * 99 // 100))
    assert plugin.put(door.url("stalls-up2"), BIG, env=NO_RETRY).failures == [K.STALLED]


def test_slow_but_steady_is_no_stall(plugin, door, nginx):
    """A stall is judged by rate: a connection that trickles above the limit goes on, one below it does not."""
    nginx.file("slow").write_bytes(b"x" * 5000)
    door.always("GET", paced(pieces=25, pause_s=0.12))
    assert plugin.get(door.url("slow"), env={"STAGEOUT_STALL_BYTES_PER_S": "300"}).ok
    result = plugin.get(door.url("slow"), env={"STAGEOUT_STALL_BYTES_PER_S": "30000", **NO_RETRY})
    assert result.failures == [K.STALLED]


# ---- answers that are not what they should be ------------------------------------------------------------------------


def test_server_sends_less(plugin, door, nginx):
    nginx.file("short").write_bytes(BIG)
    door.always("GET", cut(1000, "end"))
    result = plugin.get(door.url("short"), env=NO_RETRY)
    assert result.failures == [K.CONNECTION_LOST]
    assert plugin.leftovers() == []


def test_server_stores_less(plugin, door):
    """The PUT is answered with 201 and half of it is there."""

    def truncating(asked, forward):
        asked.body = asked.body[: len(asked.body) // 2]
        asked.headers["content-length"] = str(len(asked.body))
        return forward()

    door.always("PUT", truncating)
    result = plugin.put(door.url("half"), BIG, env=NO_RETRY)
    assert result.failures == [K.SIZE_MISMATCH]


def test_server_stores_less_once(plugin, door, nginx):
    def truncating(asked, forward):
        asked.body = asked.body[:10]
        asked.headers["content-length"] = "10"
        return forward()

    door.next("PUT", truncating)
    result = plugin.put(door.url("half-once"), BIG)
    assert result.ok
    assert result.failures == [K.SIZE_MISMATCH]
    assert result.verified == "size"
    assert nginx.file("half-once").read_bytes() == BIG


def test_refused_before_the_body_is_read(plugin, door):
    """The reason is read although the connection breaks while the rest is being sent."""
    door.always("PUT", Early(413, "at most 1 MB here"))
    result = plugin.put(door.url("file"), BIG * 40, env=NO_RETRY)
    assert result.failures == [K.TOO_LARGE]
    assert "at most 1 MB here" in result.ad["TransferError"]


@pytest.mark.parametrize("size_bytes", [0, 1, 100_000, 1_500_000])
def test_server_that_never_says_100(plugin, nginx, size_bytes):
    """Small files must not wait a second each for a permission that does not come, and do not ask for it.

    XRootD (5.5.3) answers 100 to an empty upload that asks, and then nothing.
    """
    door = Interposer(nginx.port, continues=False)
    result = plugin.put(door.url(f"no100-{size_bytes}"), os.urandom(size_bytes))
    assert result.ok
    assert len(nginx.file(f"no100-{size_bytes}").read_bytes()) == size_bytes
    assert ("expect" in door.asked[0].headers) is (size_bytes > 1_000_000)
    door.close()


def test_empty_files(plugin, nginx):
    nginx.file("empty").write_bytes(b"")
    assert plugin.get(nginx.url("empty")).ok
    assert plugin.got() == b""
    result = plugin.put(nginx.url("empty-up"), b"")
    assert result.ok
    assert nginx.file("empty-up").read_bytes() == b""
    assert result.verified == "size"


@pytest.mark.parametrize("env", [{}, {"STAGEOUT_PARALLELISM": "4"}])
def test_no_content(plugin, door, env):
    """204: there is a file, and nothing in it."""
    door.always("GET", status(204))
    assert plugin.get(door.url("nothing"), env=env).ok
    assert plugin.got() == b""


def test_no_length_announced(plugin, door, nginx):
    """Nothing to verify by, and it is said so."""
    nginx.file("chunked").write_bytes(BIG)

    def chunked(asked, forward):
        reply = forward()
        reply.chunked = True
        return reply

    door.always("GET", chunked)
    result = plugin.get(door.url("chunked"))
    assert result.ok
    assert plugin.got() == BIG
    assert result.verified == ""
    required = plugin.get(door.url("chunked"), env={"STAGEOUT_CHECKSUM_POLICY": "required"})
    assert required.failures == [K.NOT_VERIFIED]


def test_broken_chunks(plugin, door, nginx):
    nginx.file("chunked").write_bytes(BIG)

    def broken(asked, forward):
        reply = cut(50_000, "end")(asked, forward)
        reply.headers["Transfer-Encoding"] = "chunked"
        reply.announced_bytes = None
        return reply

    door.always("GET", broken)
    assert not plugin.get(door.url("chunked"), env=NO_RETRY).ok
    assert plugin.leftovers() == []


def test_file_that_is_compressed_itself(plugin, door, nginx):
    """Content-Encoding names what the file is: it is stored as it came, and its length holds."""
    nginx.file("data.gz").write_bytes(BIG)
    door.always("GET", changed(Content_Encoding="gzip"))
    result = plugin.get(door.url("data.gz"))
    assert result.ok
    assert plugin.got() == BIG
    assert all("accept-encoding" not in asked.headers for asked in door.asked)


def test_unasked_partial_content(plugin, door, nginx):
    nginx.file("part").write_bytes(BIG)

    def partial(asked, forward):
        reply = forward()
        reply.status = 206
        return reply

    door.always("GET", partial)
    assert not plugin.get(door.url("part"), env=NO_RETRY).ok
    assert plugin.leftovers() == []


def test_error_page_is_cut_and_has_no_secrets(plugin, door):
    page = "<html><body>denied: Bearer abc-secret-abc " + "x" * 100_000
    door.always("GET", status(403, page))
    result = plugin.get(door.url("file?token=abc-secret-abc"))
    assert len(result.ad["TransferError"]) < 2000
    assert "abc-secret-abc" not in result.everything


def test_answers_that_mean_stored(plugin, door, nginx):
    for code in (200, 201, 204):
        door.next("PUT", _as_status(code))
        assert plugin.put(door.url(f"as-{code}"), BIG).ok
        assert nginx.file(f"as-{code}").read_bytes() == BIG


def test_accepted_for_later(plugin, door):
    """202 is compared like any other success where the server shows the file."""
    door.next("PUT", _as_status(202))
    result = plugin.put(door.url("as-202"), BIG)
    assert result.ok
    assert result.verified == "size"


@pytest.mark.parametrize("policy", ["if-available", "off"])
@pytest.mark.parametrize("hidden", [404, 410])
@pytest.mark.parametrize("code", [200, 201, 202, 204])
def test_drop_box(plugin, door, nginx, code, hidden, policy):
    """An ingest service takes files and shows none: its answer counts, and nothing is sent twice."""
    door.always("PUT", _as_status(code))
    door.always("HEAD", status(hidden))
    result = plugin.put(door.url("drop"), BIG, env={"STAGEOUT_CHECKSUM_POLICY": policy})
    assert result.ok
    assert result.failures == []
    assert result.verified == ""
    assert door.methods().count("PUT") == 1
    assert nginx.file("drop").read_bytes() == BIG


def test_drop_box_where_a_digest_is_required(plugin, door):
    door.always("HEAD", status(404))
    result = plugin.put(door.url("drop"), BIG, env={"STAGEOUT_CHECKSUM_POLICY": "required"})
    assert result.failures == [K.NOT_VERIFIED]
    assert door.methods().count("PUT") == 1


def _as_status(code):
    def fault(asked, forward):
        reply = forward()
        reply.status = code
        return reply

    return fault
