"""The local end: full disks, files that change or cannot be read; and ``file`` URLs."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import subprocess
from pathlib import Path

import pytest

from stageout.core.errors import ErrorClass as K
from stageout.protocols.curl.localfile import PartFile, SourceFile
from stageout.testing.starter import Wanted
from tests.curl.interposer import Reply
from tests.curl.plugin import NO_RETRY

DATA = os.urandom(300_000)
root_only = pytest.mark.skipif(os.getuid() != 0, reason="mounting a small file system needs root")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "small", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@root_only
@pytest.mark.parametrize("scheme", ["http", "file"])
def test_full_disk(plugin, nginx, small_disk, tmp_path, scheme):
    """The job may go where there is more room; what was written stays, as HTCondor wants to see who filled the disk."""
    big = DATA * 10
    nginx.file("big").write_bytes(big)
    (tmp_path / "big").write_bytes(big)
    plugin.scratch = small_disk
    url = nginx.url("big") if scheme == "http" else f"file://{tmp_path}/big"
    result = plugin.call([Wanted(url, "big")], upload=False)
    assert result.failures == [K.NO_SPACE_LOCAL]
    assert "request_disk" in result.ad["TransferError"]
    left = [path for path in small_disk.iterdir() if "big" in path.name]
    assert [path.name == "big" for path in left] == [False]
    assert left[0].stat().st_size > 100_000


@root_only
def test_full_disk_at_the_far_end(plugin, small_disk):
    result = plugin.put(f"file://{small_disk}/big", DATA * 10, env=NO_RETRY)
    assert result.failures == [K.NO_SPACE_REMOTE]
    assert list(small_disk.iterdir()) == []


@pytest.mark.parametrize("change", ["grown", "shrunk", "rewritten", "replaced"])
def test_source_changes(plugin, door, change):
    """The bytes read would be no version of the file that ever existed; a file put in its place does no harm."""

    def change_it(asked, forward):
        path = plugin.scratch / "file"
        if change == "grown":
            with path.open("ab") as file:
                file.write(b"more")
        elif change == "shrunk":
            os.truncate(path, 10)
        elif change == "rewritten":
            path.write_bytes(DATA[::-1])
        else:
            path.with_name("new").write_bytes(b"new")
            path.with_name("new").replace(path)
        return forward()

    door.next("PUT", change_it)
    result = plugin.put(door.url(f"change-{change}"), DATA)
    if change == "replaced":
        assert result.ok
    else:
        assert result.failures == [K.SOURCE_CHANGED]


def test_unreadable_source(plugin, nginx):
    if os.getuid() == 0:
        plugin.new_scratch()
        os.mkfifo(plugin.scratch / "pipe")
        result = plugin.call([Wanted(nginx.url("x"), "pipe")], upload=True)
    else:
        plugin.new_scratch()
        (plugin.scratch / "closed").touch(0)
        result = plugin.call([Wanted(nginx.url("x"), "closed")], upload=True)
    assert result.failures == [K.LOCAL_FILE]


def test_folder_of_the_target_is_missing(plugin, nginx):
    nginx.file("x").write_bytes(DATA)
    assert plugin.get(nginx.url("x"), name="no/such/folder/x").failures == [K.LOCAL_FILE]


def test_older_file_stays_until_the_new_one_is_whole(plugin, door, nginx):
    nginx.file("x").write_bytes(DATA)
    seen = []

    def look(asked, forward):
        seen.append((plugin.scratch / "file").read_bytes())
        return forward()

    door.always("GET", look)
    plugin.new_scratch()
    (plugin.scratch / "file").write_bytes(b"older")
    assert plugin.call([Wanted(door.url("x"), "file")], upload=False).ok
    assert seen == [b"older"]
    assert plugin.got() == DATA
    door.always("GET", lambda asked, forward: Reply(404))
    (plugin.scratch / "file").write_bytes(b"older")
    assert not plugin.call([Wanted(door.url("x"), "file")], upload=False).ok
    assert plugin.got() == b"older"


# ---- file URLs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["", "localhost"])
@pytest.mark.parametrize("name", ["plain", "a b", "100%", "a#b", "ü", "\udcff", "x" * 255])
def test_there_and_back(plugin, tmp_path, host, name):
    destination = f"file://{host}{tmp_path}/new/place"
    plugin.new_scratch()
    (plugin.scratch / name).write_bytes(DATA)
    result = plugin.call([Wanted(f"{destination}/{name}", name)], upload=True, job={"OutputDestination": destination})
    assert result.ok
    assert result.verified == "size"
    assert [path.name for path in (tmp_path / "new" / "place").iterdir()] == [name]
    assert (tmp_path / "new" / "place" / name).read_bytes() == DATA
    assert plugin.get(result.ad["TransferUrl"]).ok
    assert plugin.got() == DATA


@pytest.mark.parametrize("stated", [False, True])
@pytest.mark.parametrize("size_bytes", [0, 1, 40_000_000])
def test_any_size(plugin, tmp_path, size_bytes, stated):
    """The kernel copies, or, where a digest wants to see the bytes, the plugin."""
    data = os.urandom(size_bytes)
    job = {"PluginData": {"checksum": "md5:" + hashlib.md5(data).hexdigest()}} if stated else {}
    result = plugin.put(f"file://{tmp_path}/there", data, job=job)
    assert result.ok
    assert (tmp_path / "there").read_bytes() == data
    assert result.ad["TransferTotalBytes"] == size_bytes
    assert plugin.get(f"file://{tmp_path}/there", job=job).ok
    assert plugin.got() == data


def test_kernel_that_cannot_copy(tmp_path, monkeypatch):
    def refused(*args, **named):
        raise OSError(errno.EXDEV, "another file system")

    monkeypatch.setattr(os, "copy_file_range", refused)
    (tmp_path / "file").write_bytes(DATA)
    source = SourceFile(tmp_path / "file", ())
    with (tmp_path / "copy").open("wb", buffering=0) as copy:
        assert source.copy(copy.fileno(), 1 << 20) == 0
    assert source.read(1 << 20) == DATA
    source.close()
    part = PartFile(tmp_path / "part")
    part.restart(())
    with (tmp_path / "file").open("rb") as file:
        assert part.copy(file.fileno(), 1 << 20) == 0
    part.discard()


def test_read_back_where_a_digest_is_required(plugin, tmp_path):
    result = plugin.put(f"file://{tmp_path}/there", DATA, env={"STAGEOUT_CHECKSUM_POLICY": "required"})
    assert result.ok
    assert result.verified == "md5"


def test_other_host(plugin):
    assert plugin.get("file://elsewhere.example.org/x").failures == [K.BAD_URL]
    assert plugin.put("file://elsewhere.example.org/x").failures == [K.BAD_URL]


def test_what_is_not_there(plugin, tmp_path):
    assert plugin.get(f"file://{tmp_path}/missing").failures == [K.NOT_FOUND]
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    assert plugin.get(f"file://{tmp_path}/pipe").kind is K.NOT_SUPPORTED
    assert plugin.leftovers() == []
    assert plugin.put(f"file://{tmp_path}/folder", env=NO_RETRY).failures == [K.CONFLICT]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["folder", *_scratches(plugin)]


def test_list_of_a_folder(plugin, tmp_path):
    """As libcurl gives it: one name in a line, none that is hidden."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("b", "a b", ".hidden"):
        (folder / name).write_bytes(DATA)
    for url in (f"file://{folder}", f"file://{folder}/"):
        assert plugin.get(url).ok
        assert plugin.got() == b"a b\nb\n"


def test_files_of_the_kernel(plugin):
    """The null device, and files whose length is only known when they are read."""
    assert plugin.get("file:///dev/null").ok
    assert plugin.got() == b""
    assert plugin.get("file:///proc/version").ok
    assert plugin.got() == Path("/proc/version").read_bytes()


@root_only
def test_upload_to_the_null_device(plugin, tmp_path):
    """It swallows the file and is not replaced by it."""
    null = tmp_path / "null"
    os.mknod(null, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    result = plugin.put(f"file://{null}", DATA)
    assert result.ok
    assert result.verified == ""
    assert null.is_char_device()
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")] == []


def _scratches(plugin):
    return sorted(path.name for path in plugin.folder.iterdir() if path.name.startswith("scratch"))


def test_owner_states_a_digest(plugin, tmp_path):
    (tmp_path / "x").write_bytes(DATA)
    right = {"PluginData": {"checksum": "sha1:" + hashlib.sha1(DATA).hexdigest()}}
    wrong = {"PluginData": {"checksum": "sha1:" + hashlib.sha1(b"").hexdigest()}}
    assert plugin.get(f"file://{tmp_path}/x", job=right).verified == "sha1"
    assert plugin.get(f"file://{tmp_path}/x", job=wrong, env=NO_RETRY).failures == [K.CONTENT_MISMATCH]
    assert plugin.put(f"file://{tmp_path}/y", DATA, job=wrong, env=NO_RETRY).failures == [K.SOURCE_CHANGED]
    assert not (tmp_path / "y").exists()


def test_permissions_are_those_of_a_new_file(plugin, nginx, tmp_path):
    """As the umask says: a file that only its owner could read would break jobs that change user."""
    nginx.file("x").write_bytes(DATA)
    former = os.umask(0o022)
    try:
        assert plugin.get(nginx.url("x")).ok
        assert (plugin.scratch / "file").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(former)
