"""WebDAV: under a temporary name first, verified, then moved; collections as needed; nothing left behind."""

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


def test_never_half_a_file_under_the_name(plugin, dav, dav_door):
    """While it is sent, and when that fails, the older file stays."""
    (dav.root / "file").write_bytes(b"older")
    dav_door.always("PUT", Drop(50_000))
    result = plugin.put(url(dav_door, "file"), DATA, env=NO_RETRY)
    assert result.failures == [K.CONNECTION_LOST]
    dav_door.always("PUT", None)
    assert dav.names() == ["file"]
    assert (dav.root / "file").read_bytes() == b"older"
    assert plugin.put(url(dav_door, "file"), DATA).ok
    assert (dav.root / "file").read_bytes() == DATA
    puts = [asked.path for asked in dav_door.asked if asked.method == "PUT"]
    assert "/file" not in puts


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


@pytest.mark.parametrize("code", [405, 501])
def test_server_without_move(plugin, dav, dav_door, code):
    dav_door.always("MOVE", status(code))
    assert plugin.put(url(dav_door, "file"), DATA).ok
    assert dav.names() == ["file"]


def test_server_without_webdav(plugin, nginx, door):
    """dav to a plain web server with PUT: there is nothing to rename with."""
    door.always("OPTIONS", status(405))
    door.always("MOVE", status(405))
    door.always("MKCOL", status(405))
    assert plugin.put(f"dav://127.0.0.1:{door.port}/plain-dav", DATA).ok
    assert nginx.file("plain-dav").read_bytes() == DATA


def test_nginx_as_webdav(plugin, nginx):
    """nginx has MOVE and wants collections to exist, or makes them."""
    result = plugin.put(f"dav://127.0.0.1:{nginx.port}/deep/er/file", DATA)
    assert result.ok
    assert nginx.file("deep/er/file").read_bytes() == DATA
    assert [path.name for path in nginx.file("deep/er").iterdir()] == ["file"]


def test_move_fails_once(plugin, dav, dav_door):
    """The bytes are there and checked: they are not sent again."""
    dav_door.next("MOVE", status(503))
    result = plugin.put(url(dav_door, "file"), DATA)
    assert result.ok
    assert result.failures == [K.SERVER_BUSY]
    assert dav_door.methods().count("PUT") == 1
    assert dav.names() == ["file"]


def test_answer_to_move_is_lost(plugin, dav, dav_door):
    def lost(asked, forward):
        reply = forward()
        reply.cut_after, reply.body, reply.announced_bytes = 0, b"", 10
        return reply

    dav_door.next("MOVE", lost)
    assert plugin.put(url(dav_door, "file"), DATA).ok
    assert dav.names() == ["file"]
    assert (dav.root / "file").read_bytes() == DATA


def test_move_refused_leaves_nothing(plugin, dav, dav_door):
    (dav.root / "file").write_bytes(b"older")
    dav_door.always("MOVE", status(403))
    assert plugin.put(url(dav_door, "file"), DATA, env=NO_RETRY).failures == [K.PERMISSION_DENIED]
    assert dav.names() == ["file"]
    assert (dav.root / "file").read_bytes() == b"older"


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


def test_stored_short_is_never_published(plugin, dav, dav_door):
    def truncating(asked, forward):
        asked.body = asked.body[:100]
        asked.headers["content-length"] = "100"
        return forward()

    dav_door.always("PUT", truncating)
    assert plugin.put(url(dav_door, "file"), DATA, env=NO_RETRY).failures == [K.SIZE_MISMATCH]
    assert dav.names() == []


def test_size_only_by_propfind(plugin, dav, dav_door):
    """A server that refuses HEAD still tells the size; nothing is believed blindly."""
    dav_door.always("HEAD", status(405))
    result = plugin.put(url(dav_door, "file"), DATA)
    assert result.ok
    assert result.verified == "size"


def test_drop_box(plugin, dav, dav_door):
    """A server without MOVE that shows nothing: its answer counts."""
    dav_door.always("OPTIONS", lambda asked, forward: Reply(405, {"Allow": "PUT"}))
    dav_door.always("HEAD", status(404))
    dav_door.always("PROPFIND", status(405))
    result = plugin.put(url(dav_door, "file"), DATA)
    assert result.ok
    assert result.failures == []
    assert result.verified == ""
    assert dav_door.methods().count("PUT") == 1
    assert dav.names() == ["file"]


def test_lost_before_the_rename(plugin, dav, dav_door):
    """A WebDAV server shows what it has: a temporary file that is not there is lost."""

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
    """A temporary name must not be longer than what the server's file system takes."""
    for name in ("x" * 255, "ü" * 127):
        assert plugin.put(url(dav, name), DATA).ok
    assert sorted(len(os.fsencode(name)) for name in dav.names()) == [254, 255]


def test_stopped(plugin, dav, dav_door, executable, plugin_table):
    """SIGTERM in the middle of an upload: the temporary file goes, the result says so."""
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
    assert process.wait(60) == 11
    ads, _ = read_results((scratch / "out").read_text())
    assert K.from_code(ads[0]["TransferErrorData"][-1]["ErrorCode"]) is K.NOT_ATTEMPTED
    assert dav.names() == []


def test_rename_to_another_place(plugin, dav, dav_door):
    """A proxy that maps paths but not Destination: the rename succeeds, and the file is not where it should be."""

    def elsewhere(asked, forward):
        asked.headers["destination"] = asked.headers["destination"].replace("/in/", "/else/")
        return forward()

    (dav.root / "in").mkdir()
    (dav.root / "else").mkdir()
    dav_door.always("MOVE", elsewhere)
    assert plugin.put(url(dav_door, "in/file"), DATA).ok
    assert "in/file" in dav.names()
    assert (dav.root / "in" / "file").read_bytes() == DATA
