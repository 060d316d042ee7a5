"""The single file: what it becomes by its name, and that a cold start is safe however it goes."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from stageout import __version__
from stageout.core import stored_answer
from tests.polling import wait_for

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pyz(built: Path, tmp_path: Path) -> Path:
    """The file in a directory of its own: nothing is unpacked yet."""
    (tmp_path / "pilot").mkdir()
    return Path(shutil.copy(built, tmp_path / "pilot" / built.name))


def start(command: Sequence[object], **environment: str) -> subprocess.Popen[str]:
    # No PYTHONPATH: nothing of this checkout may be found.
    env = {"PATH": f"{Path(sys.executable).parent}:{os.defpath}", **environment}
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd="/",
    )


def call(command: Sequence[object], **environment: str) -> subprocess.CompletedProcess[str]:
    child = start(command, **environment)
    out, err = child.communicate(timeout=120)
    return subprocess.CompletedProcess(list(map(str, command)), child.returncode, out, err)


def unpacked(pyz: Path) -> list[Path]:
    return [path for path in (pyz.parent / ".stageout-pilot").iterdir() if path.is_dir()]


def test_it_is_what_it_is_called(pyz: Path, tmp_path: Path) -> None:
    first = call([pyz, "stageout_curl_plugin", "-classad"])
    assert (first.returncode, first.stderr) == (0, "")
    assert 'PluginType = "FileTransfer"' in first.stdout
    bin_dir = tmp_path / "bin"
    assert call([pyz, "links", bin_dir]).returncode == 0
    assert {path.name for path in bin_dir.iterdir()} >= {
        "stageout_curl_plugin", "stageout", "stageout-sandbox-manager", "stageout-startd-cron",
    }  # fmt: skip
    assert call([bin_dir / "stageout_curl_plugin", "-classad"]).stdout == first.stdout
    for program in bin_dir.iterdir():
        assert call([program, "--version"]).stdout == f"{program.name} {__version__}\n"
    assert "usage: stageout-startd-cron SPOOL" in call([bin_dir / "stageout-startd-cron"]).stderr
    assert call([bin_dir / "stageout-sandbox-manager", "--help"]).returncode == 0
    for wrong in ([], ["nothing"], ["../etc/passwd"], [".."]):
        refused = call([pyz, *wrong])
        assert (refused.returncode, "PROGRAM" in refused.stderr) == (2, True), wrong


def test_a_link_prints_the_stored_answer_without_python(pyz: Path, tmp_path: Path) -> None:
    links = tmp_path / "bin"
    assert call([pyz, "links", links]).returncode == 0
    plugin = links / "stageout_curl_plugin"
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.defpath}"}

    def ask(path: str, arguments: Sequence[str], variables: Mapping[str, str]) -> str:
        return subprocess.run([path, *arguments], env=variables, capture_output=True, text=True, check=True).stdout

    python = ask(str(plugin), ["-classad"], environment)
    assert python == call([plugin, "-classad"]).stdout != ""
    stored_answer.write(plugin, environment, ask)
    answer = stored_answer.path_of(plugin)
    answer.write_text(answer.read_text().replace('Version = "', 'Version = "stored'))
    assert ask(str(plugin), ["-classad"], environment) == python.replace('Version = "', 'Version = "stored')
    (module,) = unpacked(pyz)[0].rglob("stageout/plugin/query.py")
    os.utime(module)
    assert ask(str(plugin), ["-classad"], environment) == python


def test_the_plugin_in_it_moves_files(pyz: Path, tmp_path: Path) -> None:
    """With what is compiled in it, and by a link, as condor_starter calls it."""
    call([pyz, "links", tmp_path / "bin"])
    (tmp_path / "source").write_bytes(os.urandom(100_000))
    received: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            received[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(201, 0)

        def do_HEAD(self) -> None:
            self._answer(200 if self.path in received else 404, len(received.get(self.path, b"")))

        def _answer(self, status: int, size_bytes: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(size_bytes))
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/target"
        (tmp_path / "in").write_text(f'[ Url = "{url}"; LocalFileName = "{tmp_path}/source" ]')
        arguments = ["-infile", tmp_path / "in", "-outfile", tmp_path / "out", "-upload"]
        done = call([tmp_path / "bin" / "stageout_curl_plugin", *arguments])
        server.shutdown()
    assert done.returncode == 0, done.stderr
    assert received["/target"] == (tmp_path / "source").read_bytes()


def test_several_cold_starts_at_once(pyz: Path) -> None:
    children = [start([pyz, "stageout_curl_plugin", "-classad"]) for _ in range(8)]
    answers = {child.communicate(timeout=300) for child in children}
    assert {child.returncode for child in children} == {0}
    assert len(answers) == 1 and "FileTransfer" in next(iter(answers))[0]
    assert len(unpacked(pyz)) == 1


def test_a_killed_cold_start_leaves_nothing_wrong(pyz: Path) -> None:
    child = start([pyz, "stageout_curl_plugin", "-classad"])
    cache = pyz.parent / ".stageout-pilot"
    wait_for(lambda: child.poll() is not None or any(cache.glob("half-*/*")), "the first file", every_s=0.001)
    assert child.poll() is None
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=60)
    assert [path.name[:5] for path in unpacked(pyz)] == ["half-"]
    assert call([pyz, "stageout_curl_plugin", "-classad"]).returncode == 0
    (ready,) = unpacked(pyz)
    assert not ready.name.startswith("half-")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
@pytest.mark.parametrize("short_bytes", [40_960, 400_000])
def test_a_disk_that_becomes_full_leaves_nothing_that_is_cut_off(pyz: Path, tmp_path: Path, short_bytes: int) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "small", disk], check=True)
    try:
        command, cache = [pyz, "stageout_curl_plugin", "-classad"], disk / "cache"
        assert call(command, STAGEOUT_PILOT_CACHE=str(cache)).returncode == 0
        shape = os.statvfs(disk)
        needed_bytes = (shape.f_blocks - shape.f_bfree) * shape.f_frsize
        shutil.rmtree(cache)
        subprocess.run(["mount", "-o", f"remount,size={needed_bytes - short_bytes}", disk], check=True)
        refused = call(command, STAGEOUT_PILOT_CACHE=str(cache))
        assert (refused.returncode, "No space left" in refused.stderr) == (1, True), refused.stderr
        assert [path.name for path in cache.iterdir()] == ["lock"]
        subprocess.run(["mount", "-o", "remount,size=1g", disk], check=True)
        assert call(command, STAGEOUT_PILOT_CACHE=str(cache)).returncode == 0
    finally:
        subprocess.run(["umount", disk], check=True)


def test_where_others_may_write_nothing_is_run(pyz: Path, tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    refused = call([pyz, "stageout_curl_plugin", "-classad"], STAGEOUT_PILOT_CACHE=str(open_to_all))
    assert refused.returncode == 1
    assert "others may write there" in refused.stderr and "STAGEOUT_PILOT_CACHE" in refused.stderr
    assert list(open_to_all.iterdir()) == []
    own = call([pyz, "stageout_curl_plugin", "-classad"], STAGEOUT_PILOT_CACHE=str(tmp_path / "own"))
    assert own.returncode == 0 and (tmp_path / "own").is_dir()


def test_a_file_for_another_python_says_so(tmp_path: Path) -> None:
    made = tmp_path / "other.pyz"
    build()._write(
        made,
        "x86_64",
        {"3.1": {"programs/stageout_curl_plugin": b""}, "3.2": {"programs/stageout_curl_plugin": b""}},
        b"",
    )
    refused = call([made, "stageout_curl_plugin"])
    assert refused.returncode == 1
    assert "made for Python 3.1, 3.2, and this is 3." in refused.stderr


def test_the_same_content_makes_the_same_file_on_another_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(500_000)
    one, two = tmp_path / "one", tmp_path / "two"
    build()._write(one, "x86_64", {"3.9": {"a": data, "b": data}, "3.10": {"a": data}}, b"")
    later_s = time.time() + 10 * 86_400
    monkeypatch.setattr(time, "time", lambda: later_s)
    build()._write(two, "x86_64", {"3.9": {"a": data, "b": data}, "3.10": {"a": data}}, b"")
    assert one.read_bytes() == two.read_bytes()
    assert len(data) < one.stat().st_size < 1.1 * len(data)


def build() -> Any:
    spec = importlib.util.spec_from_file_location("pilot_build", ROOT / "tools/pilot/build.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_scripts_for_pilots_are_clean() -> None:
    scripts: list[Path] = sorted((ROOT / "examples" / "glidein").glob("*.sh"))
    assert len(scripts) == 2
    checked = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), "--severity=style", *scripts], capture_output=True, text=True
    )
    assert (checked.returncode, checked.stdout) == (0, "")
