"""Many files, large files, and what they cost."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
import zlib
from types import SimpleNamespace

import pycurl
import pytest

from stageout.core.errors import ErrorClass as K
from stageout.core.errors import TransferFailure
from stageout.protocols.curl.settings import Settings
from stageout.protocols.curl.transport import Query, Transport
from stageout.testing.starter import Wanted
from tests.curl.interposer import Interposer, cut, status
from tests.curl.plugin import RETRYING

GIB = 1 << 30


def test_many_small_files(plugin, dav, nginx):
    """2,000 files in one call: all right, in order, over a handful of connections."""
    names = [f"f{index:04}" for index in range(2000)]
    scratch = plugin.new_scratch()
    for name in names:
        (scratch / name).write_bytes(name.encode() * 50)
    wanted = [Wanted(nginx.url(f"many/{name}"), name) for name in names]
    result = plugin.call(wanted, upload=True)
    assert result.ok
    assert [ad["TransferFileName"].rpartition("/")[2] for ad in result.run.ads] == names
    assert all(ad["DeveloperData"]["StageOutVerified"] == "size" for ad in result.run.ads)
    assert all(nginx.file(f"many/{name}").read_bytes() == name.encode() * 50 for name in names)
    plugin.new_scratch()
    assert plugin.call(wanted, upload=False).ok
    assert all(plugin.got(name) == name.encode() * 50 for name in names)


def test_connections_are_used_again(plugin, dav):
    """One for each file that moves at the same time, not one for each request."""
    scratch = plugin.new_scratch()
    names = [f"f{index}" for index in range(60)]
    for name in names:
        (scratch / name).write_bytes(name.encode())
    url = f"dav://127.0.0.1:{dav.port}"
    result = plugin.call([Wanted(f"{url}/{name}", name) for name in names], upload=True)
    assert result.ok
    assert dav.names() == sorted(names)
    assert dav.connections <= 4
    assert len(dav.asked) >= 120


def test_parallel(plugin, nginx):
    """Four at a time by default; the knob says otherwise."""
    for parallel, env in ((4, {}), (1, {"STAGEOUT_CONCURRENCY": "1"}), (7, {"STAGEOUT_CONCURRENCY": "7"})):
        door = Interposer(nginx.port)
        counter = Counter(most=parallel)
        door.always("GET", counter)
        nginx.file("p").write_bytes(b"data")
        plugin.new_scratch()
        wanted = [Wanted(door.url("p"), f"f{index}") for index in range(parallel * 2)]
        assert plugin.call(wanted, upload=False, env=env).ok
        assert counter.seen == parallel
        door.close()


class Counter:
    """How many requests are open at once; each waits a moment for ``most`` of them."""

    def __init__(self, most):
        self._most, self._now, self.seen = most, 0, 0
        self._changed = threading.Condition()

    def __call__(self, asked, forward):
        with self._changed:
            self._now += 1
            self.seen = max(self.seen, self._now)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.seen >= self._most, timeout=5)
        reply = forward()
        with self._changed:
            self._now -= 1
        return reply


def test_one_bad_file_does_not_spoil_the_others(plugin, door, nginx):
    nginx.file("good").write_bytes(b"data")
    plugin.new_scratch()
    wanted = [Wanted(door.url("good" if index % 2 else "missing"), f"f{index}") for index in range(8)]
    result = plugin.call(wanted, upload=False)
    assert result.run.exit_code == 1
    assert [ad["TransferSuccess"] for ad in result.run.ads] == [False, True] * 4


def test_deadline(plugin, door, nginx):
    """The plugin ends before HTCondor's limit, and says which file was not finished."""
    door.always("GET", status(503, Retry_After="30"))
    env = {"STAGEOUT_PLUGIN_LIFETIME_S": "4", "STAGEOUT_RETRY_BUDGET_S": "3600"}
    began = time.monotonic()
    result = plugin.get(door.url("x"), env=env, job=RETRYING)
    assert time.monotonic() - began < 25, "not as long as the server says"
    assert result.kind in (K.SERVER_BUSY, K.DEADLINE)
    assert result.run.exit_code == 11


@pytest.fixture
def large(tmp_path):
    """1 GiB that takes no room: all zero but for its ends."""
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.write(b"begin")
        file.truncate(GIB - 3)
        file.seek(GIB - 3)
        file.write(b"end")
    return path


def test_large_file(plugin, nginx, large, executable):
    """Up and down with little memory. Digests of both ends agree."""
    wrapper = plugin.folder / "stageout_curl_plugin"
    scratch = plugin.new_scratch()
    large.rename(scratch / "large")
    meter = scratch / "memory"
    wrapper.write_text(
        "#!/usr/bin/env python3\n"
        "import resource, subprocess, sys\n"
        f"status = subprocess.call([{str(executable)!r}, *sys.argv[1:]])\n"
        f"print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=open({str(meter)!r}, 'w'))\n"
        "sys.exit(status)\n"
    )
    wrapper.chmod(0o755)
    result = plugin.call([Wanted(nginx.url("large"), "large")], upload=True, executable=wrapper)
    assert result.ok
    assert int(meter.read_text()) < 150_000
    stored = nginx.file("large")
    assert stored.stat().st_size == GIB
    (scratch / "large").unlink()
    result = plugin.call([Wanted(nginx.url("large"), "large")], upload=False, executable=wrapper)
    assert result.ok
    assert int(meter.read_text()) < 150_000
    with (scratch / "large").open("rb") as file:
        assert file.read(5) == b"begin"
        file.seek(-3, os.SEEK_END)
        assert file.read() == b"end"
    digests = dict(item.split(":") for item in result.ad["DeveloperData"]["StageOutDigests"].split())
    with stored.open("rb") as file:
        digest = 1
        while piece := file.read(1 << 20):
            digest = zlib.adler32(piece, digest)
    assert digests["adler32"] == f"{digest:08x}"
    stored.unlink()


def test_nothing_heavy_is_loaded():
    """Modules that only some transfers need are loaded by those: each of these costs every job 5 to 60 ms."""
    code = "import sys, stageout.protocols.curl.protocol; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    heavy = {"tenacity", "asyncio", "requests", "ssl", "xml.etree.ElementTree", "email.utils", "stageout.cli"}
    assert not heavy & set(loaded)
    assert "pycurl" in loaded


@pytest.mark.parametrize("sent_bytes", [3_000_000, 1_500_000])
def test_data_comes_in_large_blocks(door, nginx, sent_bytes):
    """libcurl hands over 16 KiB at a time. Nothing is missing when the connection breaks."""
    nginx.file("blocks").write_bytes(os.urandom(3_000_000))
    door.next("GET", cut(sent_bytes) if sent_bytes < 3_000_000 else None)
    blocks = []
    receiver = SimpleNamespace(begin=lambda reply: None, write=blocks.append)
    meter = SimpleNamespace(moved=lambda request_bytes: None, connected=lambda seconds: None)
    context = SimpleNamespace(machine_attribute=lambda name: None)
    query = Query("GET", door.url("blocks"), receiver=receiver, options={pycurl.PROXY: ""})
    with pytest.raises(TransferFailure) if sent_bytes < 3_000_000 else contextlib.nullcontext():
        Transport().perform(query, context, Settings(), meter)
    assert b"".join(blocks) == nginx.file("blocks").read_bytes()[:sent_bytes]
    assert len(blocks) <= 3
