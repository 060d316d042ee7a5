"""WebDAV: to the final name, collections as needed, and questions that never make it worse."""

from __future__ import annotations

import os

import pytest

from stageout.core.errors import ErrorClass as K
from stageout.testing.starter import Wanted
from tests.curl.interposer import Drop, Hold, Reply, status
from tests.curl.plugin import NO_RETRY
from tests.polling import wait_for

DATA = os.urandom(100_000)


def url(server, path):
    return f"dav://127.0.0.1:{server.port}/{path}"


def test_there_and_back(plugin, dav):
    assert plugin.put(url(dav, "file"), DATA).ok
    assert dav.names() == ["file"]
    assert (dav.root / "file").read_bytes() == DATA
    assert plugin.get(url(dav, "file")).ok
    assert plugin.got() == DATA


def test_no_other_name_and_no_other_step(plugin, dav, dav_door):
    """Servers, tokens and proxies that allow a PUT may refuse all else: other names, OPTIONS, MOVE, DELETE."""
    for method in ("OPTIONS", "MOVE", "COPY", "DELETE", "MKCOL", "LOCK"):
        dav_door.always(method, status(403))
    dav_door.next("PUT", Drop(50_000))
    result = plugin.put(url(dav_door, "file"), DATA)
    assert result.ok
    assert result.failures == [K.CONNECTION_LOST]
    assert [(asked.method, asked.path) for asked in dav_door.asked] == [("PUT", "/file")] * 2 + [("HEAD", "/file")] + [
        ("PROPFIND", "/file")
    ] * (dav_door.methods().count("PROPFIND"))
    assert dav.names() == ["file"]


@pytest.mark.parametrize("query", ["?authz=abc/def", "?token=x"])
def test_query_of_a_token(plugin, dav, dav_door, query):
    """The token stays behind the path, in the making of collections as well."""
    result = plugin.put(url(dav_door, f"new/f{query}"), DATA)
    assert result.ok
    base = url(dav_door, f"run/7{query}")
    plugin.new_scratch()
    (plugin.scratch / "f").write_bytes(DATA)
    assert plugin.call([Wanted(f"{base}/f", "f")], upload=True, job={"OutputDestination": base}).ok
    assert dav.names() == ["new/f", "run/7/f"]
    assert {asked.path.partition("?")[2] for asked in dav_door.asked} == {query[1:]}


def test_missing_collections(plugin, dav):
    result = plugin.put(url(dav, "a/b/c%20d/file"), DATA)
    assert result.ok
    assert result.failures == []
    assert dav.names() == ["a/b/c d/file"]
    dav.forget()
    assert plugin.put(url(dav, "a/b/c%20d/file2"), DATA).ok
    assert "MKCOL" not in dav.methods()


def test_collection_that_cannot_be_made(plugin, dav, dav_door):
    dav_door.always("MKCOL", status(403, "not here"))
    result = plugin.put(url(dav_door, "a/file"), DATA, env=NO_RETRY)
    assert result.failures == [K.PERMISSION_DENIED]
    assert "not here" in result.ad["TransferError"]


@pytest.mark.parametrize("code", [201, 403, 405, 409, 423, 500])
def test_collection_made_by_another_job_meanwhile(plugin, dav, dav_door, code):
    """The loser of the race hears 405 (WsgiDAV, nginx), 403 (Apache), 500 (dCache), 201 (rclone): the collection is
    there, and that counts."""

    def raced(asked, forward):
        reply = forward()
        return Reply(code) if reply.status == 201 else reply

    dav_door.always("MKCOL", raced)
    result = plugin.put(url(dav_door, "a/b/file"), DATA)
    assert result.ok
    assert result.failures == []
    assert dav.names() == ["a/b/file"]


@pytest.mark.parametrize("server", ["apache", "dav", "nginx"])
def test_several_files_into_new_collections(plugin, request, server):
    """None of them finds the directory, so all of them make it at once."""
    port = request.getfixturevalue(server).port
    names = [f"file{number}" for number in range(8)]
    once = {"STAGEOUT_CONCURRENCY": "8", "STAGEOUT_RESPONSE_TIMEOUT_S": "60", **NO_RETRY}
    for job in range(20):
        plugin.new_scratch()
        for name in names:
            (plugin.scratch / name).write_bytes(os.fsencode(name))
        wanted = [Wanted(f"dav://127.0.0.1:{port}/race/{job}/deep/{name}", name) for name in names]
        result = plugin.call(wanted, upload=True, env=once)
        assert result.ok, result.run.ads
        back = [Wanted(item.url, f"{item.name}.back") for item in wanted]
        assert plugin.call(back, upload=False, env=once).ok
        assert [(plugin.scratch / item.name).read_bytes() for item in back] == [os.fsencode(name) for name in names]


def test_server_without_webdav(plugin, nginx, door):
    """dav to a plain web server with PUT."""
    door.always("MKCOL", status(405))
    door.always("PROPFIND", status(405))
    assert plugin.put(f"dav://127.0.0.1:{door.port}/plain-dav", DATA).ok
    assert nginx.file("plain-dav").read_bytes() == DATA


def test_nginx_as_webdav(plugin, nginx):
    """nginx wants collections to exist, or makes them."""
    result = plugin.put(f"dav://127.0.0.1:{nginx.port}/deep/er/file", DATA)
    assert result.ok
    assert nginx.file("deep/er/file").read_bytes() == DATA
    assert [path.name for path in nginx.file("deep/er").iterdir()] == ["file"]


@pytest.mark.parametrize(("code", "kind"), [(507, K.NO_SPACE_REMOTE), (413, K.TOO_LARGE), (403, K.PERMISSION_DENIED)])
def test_refused(plugin, dav, dav_door, code, kind):
    dav_door.always("PUT", status(code))
    assert plugin.put(url(dav_door, "file"), DATA, env=NO_RETRY).failures == [kind]
    assert dav.names() == []


def test_conflict_that_stays(plugin, dav, dav_door):
    dav_door.always("PUT", status(409))
    assert plugin.put(url(dav_door, "file"), DATA, env=NO_RETRY).failures == [K.CONFLICT]


def test_stall_leaves_nothing(plugin, dav, dav_door):
    dav_door.always("PUT", Hold(10_000_000))
    result = plugin.put(url(dav_door, "file"), DATA * 300, env=NO_RETRY)
    assert result.failures == [K.STALLED]
    assert dav.names() == []


def test_stored_short(plugin, dav, dav_door):
    def truncating(asked, forward):
        asked.body = asked.body[:100]
        asked.headers["content-length"] = "100"
        return forward()

    dav_door.always("PUT", truncating)
    assert plugin.put(url(dav_door, "file"), DATA, env=NO_RETRY).failures == [K.SIZE_MISMATCH]


def test_size_only_by_propfind(plugin, dav, dav_door):
    """A server that refuses HEAD still tells the size; nothing is believed blindly."""
    dav_door.always("HEAD", status(405))
    result = plugin.put(url(dav_door, "file"), DATA)
    assert result.ok
    assert result.verified == "size"


def test_drop_box(plugin, dav, dav_door):
    """A server that shows nothing: its answer counts."""
    dav_door.always("HEAD", status(404))
    dav_door.always("PROPFIND", status(405))
    result = plugin.put(url(dav_door, "file"), DATA)
    assert result.ok
    assert result.failures == []
    assert result.verified == ""
    assert dav_door.methods().count("PUT") == 1
    assert dav.names() == ["file"]


def test_lost_by_the_server(plugin, dav, dav_door):
    """A WebDAV server that shows its collections and not the file has lost it."""

    def losing(asked, forward):
        reply = forward()
        (dav.root / asked.path[1:]).unlink()
        return reply

    dav_door.next("PUT", losing)
    result = plugin.put(url(dav_door, "file"), DATA)
    assert result.ok
    assert result.failures == [K.SIZE_MISMATCH]
    assert (dav.root / "file").read_bytes() == DATA


def test_longest_name(plugin, dav):
    """As long as the server's file system takes."""
    for name in ("x" * 255, "ü" * 127):
        assert plugin.put(url(dav, name), DATA).ok
    assert sorted(len(os.fsencode(name)) for name in dav.names()) == [254, 255]


def test_stopped(plugin, dav, dav_door, executable, plugin_table):
    """SIGTERM in the middle of an upload: the result says so."""
    import signal
    import subprocess

    from stageout.core.classads import unparse_ad
    from stageout.testing.starter import read_results

    dav_door.always("PUT", Hold(1_000_000))
    scratch = plugin.new_scratch()
    (scratch / "file").write_bytes(DATA * 300)
    (scratch / "in").write_text(unparse_ad({"Url": url(dav_door, "file"), "LocalFileName": str(scratch / "file")}))
    (scratch / "out").write_text(" " * 5000)
    command = [str(executable), "-infile", "in", "-outfile", "out", "-upload"]
    process = subprocess.Popen(
        command,
        cwd=scratch,
        env=plugin.environment({"STAGEOUT_STALL_WINDOW_S": "60"}),
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: "PUT" in dav_door.methods(), "the upload")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 1
    ads, _ = read_results((scratch / "out").read_text())
    assert K.from_code(ads[0]["TransferErrorData"][-1]["ErrorCode"]) is K.NOT_ATTEMPTED
    assert dav.names() == []
