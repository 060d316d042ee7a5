"""How long a transfer may take: what is alive is waited for, what is hopeless ends soon, as with HTCondor's plugin."""

from __future__ import annotations

import socket
import threading

import pytest

from stageout.core.errors import ErrorClass as K
from stageout.testing.starter import Wanted
from tests.curl.interposer import Reply, changed, cut, paced, status
from tests.curl.plugin import KNOBS, NO_RETRY, RETRYING
from tests.curl.test_network import resolving, root_only

DEFAULTS = dict.fromkeys(KNOBS, "")
NAMELESS: dict[str, str | None] = {"ETag": None, "Last_Modified": None}
LARGE = bytes(1 << 20)
__all__ = ["resolving"]


def nameless(fault):
    """The same fault, in an answer that does not name the version of the file."""

    def both(asked, forward):
        return fault(asked, lambda: changed(**NAMELESS)(asked, forward))

    return both


# ---- slow but alive --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size_bytes", "pieces", "pause_s", "window_s"),
    [(600, 12, 0.5, "1.5"), (12, 12, 0.6, "3"), (2000, 2, 5.5, "3.5")],
    ids=["100 B/s", "35 bytes in 30 s", "a pause in the middle"],
)
def test_slow_download(plugin, door, nginx, size_bytes, pieces, pause_s, window_s):
    """Times are a tenth of the real ones. Nothing could be resumed, and nothing has to be."""
    nginx.file("slow").write_bytes(b"x" * size_bytes)
    door.always("GET", nameless(paced(pieces, pause_s)))
    result = plugin.get(door.url("slow"), env={"STAGEOUT_STALL_WINDOW_S": window_s})
    assert result.ok
    assert result.failures == []
    assert door.methods().count("GET") == 1


# ---- hopeless --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "code"), [("GET", 503), ("PUT", 500), ("PUT", 429)])
def test_error_that_stays(plugin, door, method, code):
    """HTCondor's plugin makes one attempt; a few more within seconds help where the trouble passes."""
    door.always(method, status(code))
    move = plugin.get if method == "GET" else plugin.put
    result = move(door.url("file"), env=DEFAULTS, job=RETRYING)
    assert 2 <= door.methods().count(method) <= 8
    assert result.run.duration_s < 15
    assert result.run.exit_code == 11


def test_wait_that_does_not_fit(plugin, door):
    door.always("GET", status(503, Retry_After="15"))
    result = plugin.get(door.url("file"), env=DEFAULTS)
    assert result.failures == [K.SERVER_BUSY]
    assert result.ad["TransferErrorData"][0]["Retryable"] == 15


@pytest.mark.parametrize("code", [423, 429, 500, 503, 507])
def test_large_upload_is_not_repeated_blindly(plugin, door, code):
    """The server has taken all of it and then refused: it comes again when HTCondor says so."""
    door.always("PUT", status(code))
    assert plugin.put(door.url("file"), LARGE, job=RETRYING).run.exit_code == 11
    assert door.methods() == ["PUT"]


def test_large_upload_that_broke_is_repeated(plugin, door, nginx):
    """A lost connection says nothing about the file."""
    door.next("PUT", cut(0))
    assert plugin.put(door.url("broke"), LARGE).ok
    assert nginx.file("broke").read_bytes() == LARGE


@root_only
def test_proxy_without_an_address(plugin, resolving):
    wrapper = resolving("no such name")
    env = {**DEFAULTS, "http_proxy": "http://proxy.example.org:3128"}
    result = plugin.get("http://127.0.0.1/file", env=env, executable=wrapper)
    assert result.failures == [K.NAME_NOT_RESOLVED]
    assert "proxy.example.org" in result.ad["TransferError"]
    assert result.run.duration_s < 15


def test_tls_to_a_plain_port(plugin, dav):
    result = plugin.get(f"https://127.0.0.1:{dav.port}/file", env=DEFAULTS)
    assert set(result.failures) == {K.CONNECT_FAILED}
    assert len(result.failures) <= 2
    assert result.run.duration_s < 10


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_no_answer(plugin, method):
    """A plugin that has waited once for the whole time does not wait again."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}/file"
        env = {"STAGEOUT_RESPONSE_TIMEOUT_S": "60", "STAGEOUT_RETRY_BUDGET_S": "1"}
        result = (plugin.get if method == "GET" else plugin.put)(url, env=env)
    assert result.failures == [K.STALLED]
    assert result.run.duration_s < 15


@pytest.mark.parametrize("silent", [True, False])
def test_upload_that_is_not_shown(plugin, door, nginx, silent):
    """The server has taken the file and said so; that it cannot show it now changes nothing."""

    def never(asked, forward):
        door.closing.wait(60)
        return forward()

    door.always("HEAD", never if silent else status(500))
    result = plugin.put(door.url(f"unseen{silent}"), b"data", env={"STAGEOUT_RESPONSE_TIMEOUT_S": "60"})
    assert result.ok
    assert result.verified == ""
    assert door.methods() == ["PUT", "HEAD", "HEAD"]  # with the wish for digests and without
    assert not plugin.put(door.url("unseen"), env={"STAGEOUT_CHECKSUM_POLICY": "required", **NO_RETRY}).ok


def test_answer_is_waited_for_in_a_data_slot(plugin, door, nginx):
    """A tape may have to be mounted, and no job waits."""
    nginx.file("tape").write_bytes(b"data")

    def late(asked, forward):
        door.closing.wait(4)
        return forward()

    door.always("GET", late)
    env = {"STAGEOUT_RESPONSE_TIMEOUT_S": "60"}
    assert plugin.get(door.url("tape"), env={**env, "STAGEOUT_MOVER": "1"}).ok
    assert plugin.get(door.url("tape"), env={**env, **NO_RETRY}).kind is K.STALLED
    env["STAGEOUT_RESPONSE_TIMEOUT_S"] = "1"
    assert plugin.get(door.url("tape"), env={**env, "STAGEOUT_MOVER": "1"}).kind is K.TIMED_OUT


@pytest.mark.parametrize(("named", "attempts"), [(True, 2), (False, 1)])
def test_hang_in_the_middle(plugin, door, nginx, named, attempts):
    """The plugin resumes a download once, and gives it up when that brings nothing."""
    nginx.file("hang").write_bytes(LARGE)

    def hang(asked, forward):
        fault = cut(0 if "range" in asked.headers else 100_000, "stall")
        return (fault if named else nameless(fault))(asked, forward)

    door.always("GET", hang)
    result = plugin.get(door.url("hang"), env={"STAGEOUT_RETRY_BUDGET_S": "1", "STAGEOUT_RESPONSE_TIMEOUT_S": "60"})
    assert len(result.failures) == attempts
    assert set(result.failures) == {K.STALLED}
    assert len(door.asked) == attempts


def test_lost_cause_ends_all_attempts(plugin, door, nginx):
    """One input is missing: the job cannot run, whatever the others do."""
    nginx.file("good").write_bytes(b"data")
    door.always("GET", lambda asked, forward: Reply(500) if asked.path.startswith("/bad") else forward())
    plugin.new_scratch()
    wanted = [Wanted(door.url(name), name) for name in ("bad1", "bad2", "good", "missing")]
    result = plugin.call(wanted, upload=False, env={"STAGEOUT_RETRY_BUDGET_S": "100"})
    assert [ad["TransferSuccess"] for ad in result.run.ads] == [False, False, True, False]
    assert result.run.exit_code == 1
    assert result.run.duration_s < 15


def test_lost_cause_ends_all_uploads(plugin, door):
    """The destination refuses one output for good: the others are not sent again and again."""
    door.always("PUT", lambda asked, forward: Reply(403 if asked.path == "/refused" else 500))
    scratch = plugin.new_scratch()
    wanted = [Wanted(door.url(name), name) for name in ("bad1", "bad2", "bad3", "refused")]
    for item in wanted:
        (scratch / item.name).write_bytes(b"data")
    result = plugin.call(wanted, upload=True, env={"STAGEOUT_RETRY_BUDGET_S": "100"})
    assert [ad["TransferSuccess"] for ad in result.run.ads] == [False] * 4
    assert result.run.exit_code == 1
    assert result.run.duration_s < 15
    assert len(door.asked) < 12


def test_every_file_has_one_attempt(plugin, door):
    """The owner sees all that is wrong with the list at once."""
    door.always("GET", status(404))
    plugin.new_scratch()
    wanted = [Wanted(door.url(f"missing{index}"), f"file{index}") for index in range(12)]
    plugin.call(wanted, upload=False)
    assert len(door.asked) == 12


# ---- what HTCondor's plugin waits for too ----------------------------------------------------------------------------


def test_server_that_comes_back(plugin):
    """No connection for some seconds: HTCondor's plugin goes on for 210 s."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]

        def come_back() -> None:
            taken.listen()
            peer, _ = taken.accept()
            peer.recv(10_000)
            peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\ndata")
            peer.close()

        timer = threading.Timer(5, come_back)
        timer.start()
        env = {"STAGEOUT_RETRY_BUDGET_S": "1", "STAGEOUT_RECONNECT_BUDGET_S": "60"}
        result = plugin.get(f"http://127.0.0.1:{port}/file", env=env)
        timer.join()
    assert result.ok
    assert set(result.failures) == {K.CONNECT_FAILED}
