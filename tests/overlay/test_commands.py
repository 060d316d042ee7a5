"""The commands as scripts see them: JSON, exit statuses, and files that are left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from stageout.cli.bars import Bar
from stageout.cli.main import main
from stageout.overlay import sameness
from stageout.overlay.sending import Sending
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess, custodian_for

_WORDS = set(
    re.findall(r"`(\w+)`", (Path(__file__).resolve().parents[2] / "docs/reference/json-overlay.md").read_text())
)
_ENDING = {"schema", "outcome", "reason", "error_class", "error_code", "retryable"}
_FILE = {*_ENDING, "kind", "local", "server", "path", "size_bytes", "seconds"}


class _Commands:
    """Commands for one router. :ivar err: what the last one said to people."""

    def __init__(self, router: RouterProcess, capsys: pytest.CaptureFixture[str]) -> None:
        self._router, self._capsys, self.err = router, capsys, ""
        self.key = ["--key", str(router.key_file("site"))]

    def url(self, path: str) -> str:
        return f"overlay://{self._router.address}/{path}"

    def __call__(self, *words: str, status: int = 0) -> list[dict[str, Any]]:
        """Run one; returns its objects."""
        assert main([words[0], *self.key, *words[1:], "--json"]) == status
        said = self._capsys.readouterr()
        self.err = said.err
        found = [json.loads(line) for line in said.out.splitlines()]
        assert all(one["schema"] == 1 for one in found)
        assert [name for one in found for name in one if name not in _WORDS] == []
        return found


@pytest.fixture
def run(router: RouterProcess, capsys: pytest.CaptureFixture[str]) -> _Commands:
    return _Commands(router, capsys)


def test_files_are_told_to_programs(run: _Commands, router: RouterProcess, tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(os.urandom(3_000_000))
    (put,) = run("put", str(file), run.url("d/"))
    assert set(put) == {*_FILE, "sent_bytes", "generation", "routes", "custodians"}
    assert (put["local"], put["server"], put["path"]) == (str(file), router.address, "d/a")
    assert (put["outcome"], put["reason"], put["error_class"], put["generation"]) == ("done", "", "", 1)
    assert put["size_bytes"] == put["sent_bytes"] == 3_000_000 and put["seconds"] > 0
    assert [(route["by"], route["sent_bytes"]) for route in put["routes"]] == [([], 3_000_000)]
    (got,) = run("get", run.url("d/a"), str(tmp_path / "back"))
    assert set(got) == {*_FILE, "stale_from", "routes"}
    assert (got["outcome"], got["size_bytes"], got["local"]) == ("done", 3_000_000, str(tmp_path / "back"))
    good, bad = run("put", str(file), str(tmp_path / "none"), run.url("e"), status=1)
    assert good["outcome"] == "done" and set(bad) == set(put)
    assert (bad["outcome"], bad["error_class"], bad["error_code"]) == ("failed", "LOCAL_FILE", 44)
    assert "No such file" in bad["reason"] and run.err == f"stageout: {bad['reason']}\n"
    (missing,) = run("get", run.url("none"), str(tmp_path / "back"), status=1)
    assert (missing["error_class"], missing["retryable"]) == ("NOT_FOUND", False)
    (copied,) = run("copy", run.url("d/a"), run.url("copied"))
    assert (copied["outcome"], copied["to"], copied["size_bytes"]) == ("done", "copied", 3_000_000)


def test_directories_are_told_file_by_file(run: _Commands, router: RouterProcess, tmp_path: Path) -> None:
    (tmp_path / "tree/sub").mkdir(parents=True)
    for name, size_bytes in (("small", 10), ("sub/large", 300_000)):
        (tmp_path / "tree" / name).write_bytes(bytes(size_bytes))
    (tmp_path / "tree/link").symlink_to("small")
    for words, here in (
        (["put", "-r", str(tmp_path / "tree"), run.url("t")], tmp_path / "tree"),
        (["get", "-r", run.url("t"), str(tmp_path / "back")], tmp_path / "back"),
    ):
        if here == tmp_path / "back":
            (router.root / "t/link").symlink_to("small")
        *files, total = run(*words, status=1)
        assert (total["kind"], total["files"], total["failed"], total["size_bytes"]) == ("total", 2, 1, 300_010)
        assert all(set(one) >= _FILE for one in files)
        found = {one["path"]: (one["local"], one["outcome"], one["size_bytes"]) for one in files}
        assert found == {
            f"t/{name}": (str(here / name), outcome, size_bytes)
            for name, outcome, size_bytes in (
                ("small", "done", 10),
                ("sub/large", "done", 300_000),
                ("link", "failed", 0),
            )
        }
        assert "is not a file" in run.err


def test_names_and_lots_are_told(run: _Commands, router: RouterProcess, tmp_path: Path) -> None:
    first, second = run("mkdir", run.url("a"), run.url("b"))
    assert (first["path"], second["outcome"]) == ("a", "done")
    (made,) = run("mkdir", run.url("a"), status=1)
    assert (made["outcome"], made["error_class"]) == ("failed", "CONFLICT")
    (moved,) = run("mv", run.url("a"), run.url("c"))
    assert (moved["path"], moved["to"], moved["outcome"]) == ("a", "c", "done")
    removed, missing = run("rm", "-r", run.url("c"), run.url("none"), status=1)
    assert (removed["outcome"], missing["outcome"]) == ("done", "failed")
    for words in (["ls", run.url("none")], ["stat", run.url("none")]):
        (failed,) = run(*words, status=1)
        assert set(failed) == _ENDING and failed["error_class"] == "NOT_FOUND"
    (lot,) = run("lot", "reserve", run.url("b"), "--size", "1M")
    assert (lot["outcome"], lot["left_bytes"]) == ("done", 10**6) and lot["expires"] > 0
    (released,) = run("lot", "release", run.url(""), "--lot", lot["lot"])
    assert released["outcome"] == "done"
    (refused,) = run("lot", "reserve", run.url("b"), status=64)
    assert refused["error_class"] == "BAD_REQUEST"
    (unread,) = run("ls", run.url(""), "--key", str(tmp_path / "none"), status=1)
    assert unread["error_class"] == "CREDENTIAL_MISSING"
    (binary,) = run("get", run.url("b"), "-", status=64)
    assert "standard output" in binary["reason"]


def test_custody_and_what_became_of_it(run: _Commands, router: RouterProcess, tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(bytes(100))
    with custodian_for(tmp_path / "custodian", [router]) as custodian:
        (given,) = run("put", str(file), run.url("kept/f"), "--through", custodian.address, "--custody")
        assert given["outcome"] == "custody"
        (one,) = given["custodians"]
        assert (one["custodian"], one["number"]) == (custodian.address, 1) and one["expires"] > 0
        wait_until(lambda: (router.root / "kept/f").exists(), what="the delivery")
        ask = ["ask", f"overlay://{custodian.address}", one["origin"]]

        def delivered() -> bool:
            return main([*ask, *run.key]) == 0

        wait_until(delivered, what="the custodian to know")
        run._capsys.readouterr()
        (fate,) = run(*ask)
        assert (fate["outcome"], fate["number"], fate["generation"]) == ("done", 1, 1)
        first, second = run(*ask, "--files", "2", status=1)
        assert (first["outcome"], second["number"], second["outcome"]) == ("done", 2, "unknown")


def test_what_cannot_be_meant_is_said_in_one_line(run: _Commands, router: RouterProcess, tmp_path: Path) -> None:
    (router.root / "d").mkdir()
    file = tmp_path / "f"
    file.write_text("data")
    place, port = str(tmp_path / "new"), router.port
    for words, status, said in (
        (["put", str(file), f"overlay://me:secret@127.0.0.1:{port}/f"], 64, "--key is the file that says who you are"),
        (["put", str(file), "overlay://127.0.0.1:0/f"], 64, "not a number from 1 to 65535"),
        (["put", str(file), "overlay://127.0.0.1:65536/f"], 64, "not a number from 1 to 65535"),
        (["put", str(file), run.url("n/" * 3000)], 64, "longer than 4096 bytes"),
        (["put", str(file), run.url("n" * 256)], 1, "File name too long"),
        (["rm", "-r", run.url("")], 64, "this is all of the router"),
        (["mkdir", run.url("")], 64, "this is all of the router"),
        (["mv", run.url(""), run.url("d")], 64, "this is all of the router"),
        (["ask", run.url(""), "zzz"], 64, "zzz is no ORIGIN"),
        (["get", "-r", run.url("d"), str(file)], 1, "is there, and no directory"),
        (["get", "-r", run.url("none"), place], 1, "No such file"),
        (["get", "-r", run.url("d/none"), place], 1, "No such file"),
    ):
        run(*words, status=status)
        assert run.err.count("\n") == 1 and said in run.err, run.err
    assert not Path(place).exists() and file.read_text() == "data"


def test_an_output_that_is_full_or_closed_is_one_line(router: RouterProcess, tmp_path: Path) -> None:
    for number in range(3000):
        (router.root / f"n{number:04}").touch()
    (router.root / "ünï").touch()
    key = ["--key", str(router.key_file("site"))]
    command = [sys.executable, "-m", "stageout.cli.main", "ls", f"overlay://{router.address}/", *key]
    with open("/dev/full", "wb") as full:
        told = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert (told.returncode, told.stderr) == (1, b"stageout: standard output: No space left on device\n")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as listing:
        assert listing.stdout is not None and listing.stderr is not None
        listing.stdout.close()
        assert listing.stderr.read() == b""
    assert listing.returncode == 141
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    told = subprocess.run(command, capture_output=True, timeout=60, env=plain)
    assert told.stdout.splitlines()[-1] == rb"\xfcn\xef" and not told.stderr


def test_the_same_command_again_transfers_the_rest(
    run: _Commands, router: RouterProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sameness, "MARGIN_S", -1_000_000)
    tree, back = tmp_path / "tree", tmp_path / "back"
    (tree / "sub").mkdir(parents=True)
    for number in range(150):
        (tree / f"sub/f{number:03}").write_bytes(b"%d" % number)
    (tree / "large").write_bytes(os.urandom(2_000_000))

    def moved(*words: str) -> tuple[set[str], int]:
        *files, total = run(*words, "--update")
        done = {one["path"][len("t/") :] for one in files if one["outcome"] == "done"}
        assert total["files"] == len(done) and total["unchanged"] == len(files) - len(done)
        return done, total["unchanged"]

    put, get = ["put", "-r", str(tree), run.url("t")], ["get", "-r", run.url("t"), str(back)]
    everything = {f"sub/f{number:03}" for number in range(150)} | {"large"}
    for words in (put, get):
        assert moved(*words) == (everything, 0)
        assert moved(*words) == (set(), 151)
    (tree / "sub/f007").write_bytes(b"longer")
    (tree / "sub/f008").chmod(0o700)
    (tree / "new").touch()
    (router.root / "t/sub/f009").unlink()
    assert moved(*put) == ({"sub/f007", "sub/f008", "sub/f009", "new"}, 148)
    (back / "large").unlink()
    assert moved(*get) == ({"sub/f007", "new", "large"}, 149)
    assert _below(back) == _below(tree)
    run("put", str(tree / "large"), run.url("t/large"), "--update", status=64)
    run(*put, "--update", "--through", router.address, status=64)


def _below(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def _staging_is_empty(router: RouterProcess) -> bool:
    return not any((router.root / ".stageout/staging").iterdir())


def test_what_is_interrupted_takes_no_space(
    run: _Commands, router: RouterProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (router.root / "large").write_bytes(bytes(8 << 20))
    (tmp_path / "f").write_bytes(bytes(8 << 20))
    armed = threading.Event()

    def interrupt(*told: object) -> None:
        if armed.is_set():
            armed.clear()
            os.kill(os.getpid(), signal.SIGTERM)

    def interrupted(*words: str) -> None:
        armed.set()
        with pytest.raises(SystemExit):
            main([*words, *run.key])
        wait_until(lambda: _staging_is_empty(router), what="what came of it to be dropped")
        assert [path.name for path in tmp_path.rglob(".*.part")] == []

    with monkeypatch.context() as patched:
        patched.setattr(Bar, "__call__", interrupt)
        interrupted("copy", "--carry", run.url("large"), run.url("copied"))
        interrupted("get", run.url("large"), str(tmp_path / "back"))
    with monkeypatch.context() as patched:  # the router has opened it, and that is not known here yet
        patched.setattr(Sending, "hear", interrupt)
        interrupted("put", str(tmp_path / "f"), run.url("sent"))
    assert sorted(path.name for path in router.root.iterdir()) == [".stageout", "large"]
    assert not (tmp_path / "back").exists()
