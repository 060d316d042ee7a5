"""The plugin's files survive a power loss: the order of its system calls, seen from outside."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from stageout.testing.starter import Wanted
from tests.curl.hall import Door, Hall, open_ftp
from tests.curl.matrix_worlds import DATA, World, plain_store

pytestmark = pytest.mark.skipif(
    not shutil.which("strace") and not os.environ.get("CI"), reason="watches system calls with strace"
)
_CALLS = "fsync,fdatasync,syncfs,sync,rename,renameat,renameat2,link,linkat,write,pwrite64,copy_file_range,ftruncate"
_RETURNED = re.compile(r"^\d+ +(\w+)\((.*)\) += (\d+)$")
_PATH = re.compile(r'\d+<([^>]*)>|"([^"]*)"')
_SYNCS = ("fsync", "fdatasync", "syncfs")
_WRITES = ("write", "pwrite64", "copy_file_range", "ftruncate")


class Call(NamedTuple):
    """A system call without an error, and the paths in it."""

    name: str
    paths: tuple[str, ...]


@pytest.fixture
def traced(plugin, executable, tmp_path):
    """Run one transfer under strace; returns its calls in the order of their ends."""
    trace = tmp_path / "trace"
    wrapper = tmp_path / "traced" / executable.name
    wrapper.parent.mkdir()
    options = f"-f -y -q -q -s 0 -o {trace} -e trace={_CALLS} --seccomp-bpf"
    wrapper.write_text(f'#!/bin/sh\nexec strace {options} {executable} "$@"\n')
    wrapper.chmod(0o755)

    def move(url: str, upload: bool, **more) -> list[Call]:
        if not upload:
            plugin.new_scratch()
        trace.unlink(missing_ok=True)
        assert plugin.call([Wanted(url, "file")], upload=upload, executable=wrapper, **more).ok
        return _calls(trace)

    return move


def _calls(trace: Path) -> list[Call]:
    begun: dict[str, str] = {}
    calls = []
    for line in trace.read_text(errors="replace").splitlines():
        thread = line.split(maxsplit=1)[0]
        if line.endswith("<unfinished ...>"):
            begun[thread] = line.removesuffix("<unfinished ...>").rstrip()
            continue
        resumed = re.match(r"^\d+ +<\.\.\. \w+ resumed>(.*)$", line)
        found = _RETURNED.match(begun.pop(thread) + resumed[1] if resumed else line)
        if found:
            calls.append(Call(found[1], tuple(a or b for a, b in _PATH.findall(found[2]))))
    return calls


def check(calls: list[Call], final: Path, result: str = ".out") -> None:
    """Data are synced before they get their name, and the name is synced before the result says that it is there."""
    renamed = [at for at, call in enumerate(calls) if call.name.startswith("rename") and _is(call.paths[-1], final)]
    assert len(renamed) == 1, calls
    part = Path(calls[renamed[0]].paths[-2]).name if len(calls[renamed[0]].paths) > 1 else ""
    written = [at for at, call in enumerate(calls) if call.name in _WRITES and any(part in path for path in call.paths)]
    synced = [at for at, call in enumerate(calls) if call.name in _SYNCS and any(part in path for path in call.paths)]
    assert written and synced, calls
    assert max(written) < max(synced) < renamed[0]
    named = [at for at, call in enumerate(calls) if call.name in _SYNCS and _is(call.paths[0], final.parent)]
    told = [at for at, call in enumerate(calls) if call.name in _WRITES and call.paths[0].endswith(result)]
    assert told, calls
    assert any(renamed[0] < at < max(told) for at in named), f"{final.parent} is not synced behind the rename: {calls}"


def _is(path: str, final: Path) -> bool:
    return path == str(final) or path == final.name


GET = World("get", False, answer=plain_store)
FTP = World("get by ftp", False, scheme="ftp")


@pytest.mark.parametrize("world", [GET, FTP], ids=["http", "ftp"])
def test_download(plugin, traced, world):
    with Hall() as hall:
        door = world.door()
        hall.open(door) if isinstance(door, Door) else open_ftp(hall, door)
        calls = traced(world.url(door), upload=False)
    assert plugin.got() == DATA
    check(calls, plugin.scratch / "file")


def test_download_in_parts(plugin, traced):
    with Hall() as hall:
        door = GET.door()
        hall.open(door)
        env = {"STAGEOUT_PARALLELISM": "3", "STAGEOUT_SPLIT_BYTES": "2000"}
        calls = traced(GET.url(door), upload=False, env=env)
    assert any("range" in request.headers for request in door.requests)
    check(calls, plugin.scratch / "file")


@pytest.mark.parametrize("size_bytes", [0, 3_000_000])
def test_download_of_a_file_url(plugin, traced, tmp_path, size_bytes):
    (tmp_path / "source").write_bytes(b"x" * size_bytes)
    calls = traced(f"file://{tmp_path}/source", upload=False)
    check(calls, plugin.scratch / "file")


@pytest.mark.parametrize("older", [False, True])
def test_upload_to_a_file_url(plugin, traced, tmp_path, older):
    target = tmp_path / "target"
    target.mkdir()
    if older:
        (target / "file").write_bytes(b"older")
    (plugin.new_scratch() / "file").write_bytes(DATA)
    calls = traced(f"file://{target}/file", upload=True)
    assert (target / "file").read_bytes() == DATA
    check(calls, target / "file")
