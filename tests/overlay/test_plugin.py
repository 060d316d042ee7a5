"""overlay:// URLs: the plugin as HTCondor and the sandbox manager run it, and the two commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stageout.cli import bars
from stageout.cli.main import main
from stageout.overlay.arrivals import umask
from stageout.overlay.cli import tally
from stageout.testing.conformance import check, failures, table
from stageout.testing.endpoints import Endpoint
from stageout.testing.starter import EmbeddedStarter, PluginTable, Wanted, installed
from tests.harness.router import RouterProcess, relay

PLUGIN = Path(__file__).resolve().parents[2] / "plugins" / "overlay_router_plugin"


def test_it_keeps_the_rules(router: RouterProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEOUT_OVERLAY_KEY", str(router.key_file("site")))
    place = router.root / "rules"
    place.mkdir()
    findings = check(installed(PLUGIN, tmp_path), Endpoint(f"overlay://127.0.0.1:{router.port}/rules", place))
    wrong = failures(findings)
    # Without its environment the plugin knows only the usual place of its key, where this machine has none.
    assert [item.rule for item in wrong] == ["bare-environment"], table(findings)
    assert "/etc/condor/stageout-overlay.key" in wrong[0].detail, table(findings)
    assert {item.rule for item in findings if item.outcome == "n/a"} <= {"killed", "nameless-node"}


def _url(router: RouterProcess, path: str) -> str:
    return f"overlay://127.0.0.1:{router.port}/{path}"


def test_put_and_get(router: RouterProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = ["--key", str(router.key_file("site"))]
    files = [tmp_path / "a", tmp_path / "b c"]
    for file in files:
        file.write_bytes(os.urandom(3_000_000))
    files[1].chmod(0o750)
    assert main(["put", *map(str, files), _url(router, "some/where"), *key]) == 0
    assert (router.root / "some/where/b c").read_bytes() == files[1].read_bytes()
    assert main(["put", str(files[0]), _url(router, "one"), *key]) == 0
    assert main(["get", _url(router, "some/where/b%20c"), str(tmp_path / "back"), *key]) == 0
    assert (tmp_path / "back").read_bytes() == files[1].read_bytes()
    assert (tmp_path / "back").stat().st_mode & 0o777 == 0o750 & ~umask()
    printed = capsys.readouterr().out.splitlines()
    # what a controller of connections says of itself depends on the machine
    assert [line.split(" in ")[0] for line in printed if not line.startswith("  ")] == [
        "a: 3.0 MB",
        "b c: 3.0 MB",
        "a: 3.0 MB",
        "back: 3.0 MB",
    ]
    command = [sys.executable, "-m", "stageout.cli.main"]
    assert not subprocess.run([*command, "put", "-", _url(router, "piped"), *key], input=b"data", timeout=60).returncode
    assert (router.root / "piped").read_bytes() == b"data"
    told = subprocess.run([*command, "get", _url(router, "piped"), "-", *key], capture_output=True, timeout=60)
    assert (told.returncode, told.stdout) == (0, b"data")
    with open("/dev/full", "wb") as full:
        told = subprocess.run(
            [*command, "get", _url(router, "piped"), "-", *key], stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert told.returncode != 0
    assert told.stderr == b"stageout: standard output: No space left on device\n"


def test_a_probe_of_check_leaves_nothing_at_a_router(
    router: RouterProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STAGEOUT_OVERLAY_KEY", str(router.key_file("site")))
    monkeypatch.setenv("CONDOR_CONFIG", "/dev/null")
    place = router.root / "checked"
    place.mkdir()
    assert main(["check", _url(router, "checked"), "--plugin", str(installed(PLUGIN, tmp_path)), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [step["outcome"] for step in told["steps"]] == ["ok", "ok", "ok"]
    assert list(place.iterdir()) == []


def test_what_the_commands_refuse(router: RouterProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = ["--key", str(router.key_file("site"))]
    file = tmp_path / "a"
    file.write_text("data")
    for arguments, status, words in (
        (["put", "-", _url(router, "into/"), *key], 64, "with the file's name at its end"),
        (["get", _url(router, "none"), "-", *key], 1, "No such file"),
        (["put", str(file), "http://h/p", *key], 64, "without TLS: write https://"),
        (["put", str(file), "ftp://h/p", *key], 64, "write overlay://HOST"),
        (["put", str(file), "overlay://h:port/p", *key], 64, "the port is not a number"),
        (["put", str(tmp_path / "none"), _url(router, "f"), *key], 1, "No such file"),
        (["put", str(file), _url(router, "f"), "--key", str(tmp_path / "none")], 1, "--key"),
        (["put", str(file), _url(router, "f"), "--key", str(router.key_file("small"))], 1, "only for what is below"),
        (["get", _url(router, "none"), str(tmp_path / "back"), *key], 1, "No such file"),
    ):
        assert main(arguments) == status
        assert words in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


def _below(place: Path) -> dict[str, tuple[bytes, int] | None]:
    found = {str(path.relative_to(place)): path for path in place.rglob("*")}
    return {name: (path.read_bytes(), path.stat().st_mode) if path.is_file() else None for name, path in found.items()}


def test_a_directory_there_and_back(
    router: RouterProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, tree = ["--key", str(router.key_file("site"))], tmp_path / "tree"
    for name, size_bytes in (("a/b/c", 10), ("a/large", 3 << 20), ("two\nlines", 0), ("ünï", 1)):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(os.urandom(size_bytes))
        (tree / name).chmod(0o700)
    (tree / "empty").mkdir()
    assert main(["put", "-r", str(tree), _url(router, "d/"), *key]) == 0
    (router.root / "d/tree/link").symlink_to("a/b/c")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    back = str(tmp_path / "back")
    for into, there in (([back], "back"), ([back], "back/tree"), ([], "here/tree")):
        assert main(["get", "-r", _url(router, "d/tree"), *into, *key]) == 1
        assert "d/tree/link: is not a file" in capsys.readouterr().err
        assert _below(tmp_path / there) == _below(tree)
    assert main(["get", "-r", _url(router, "d/none"), *key]) == 1
    assert main(["get", "-r", _url(router, "d/tree"), "-", *key]) == 64
    capsys.readouterr()
    assert main(["ls", "--json", _url(router, "d/tree"), *key]) == 0
    entries = {one["name"]: one for one in json.loads(capsys.readouterr().out)["entries"]}
    assert set(entries) == {"a", "empty", "link", "two\nlines", "ünï"}
    assert main(["stat", "--json", _url(router, "d/tree/ünï"), *key]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {**facts, **entries["ünï"]} == facts
    assert (facts["schema"], facts["generation"], facts["known"]) == (1, 1, "")


def test_put_and_get_by_several_routes(
    router: RouterProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = ["--key", str(router.key_file("site"))]
    file = tmp_path / "a"
    file.write_bytes(os.urandom(5_000_000))
    with relay(tmp_path / "relay", [router]) as between:
        ways = ["--routes", f"{between.address}; 127.0.0.1:1; direct"]
        assert main(["put", str(file), _url(router, "f"), *key, *ways]) == 0
        assert main(["get", _url(router, "f"), str(tmp_path / "back"), *key, "--routes", between.address]) == 0
    assert (tmp_path / "back").read_bytes() == file.read_bytes()
    printed = capsys.readouterr().out
    assert f"  {between.address}: " in printed
    assert (
        "127.0.0.1:1: 0 B, 127.0.0.1:1: Connection refused: does a router run there, at that port?; direct: " in printed
    )
    assert main(["put", str(file), _url(router, "f"), *key, "--routes", "a b/c"]) == 1
    assert "write HOST or HOST:PORT" in capsys.readouterr().err


def test_put_a_whole_tree(router: RouterProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = ["--key", str(router.key_file("site"))]
    files = {"a/b/small": b"small", "a/empty": b"", "large": os.urandom(300_000), "a/b/big": bytes(65536)}
    for name, data in files.items():
        (tmp_path / "run7" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run7" / name).write_bytes(data)
    (tmp_path / "run7/nothing/inside").mkdir(parents=True)
    for _ in range(2):
        assert main(["put", "-r", str(tmp_path / "run7"), _url(router, "to/"), *key]) == 0
        there = router.root / "to/run7"
        assert {name: (there / name).read_bytes() for name in files} == files
        assert (there / "nothing/inside").is_dir()
        assert "run7: 4 files, 366 kB in " in capsys.readouterr().out
    (tmp_path / "run7/link").symlink_to("large")
    (router.root / "other/large").mkdir(parents=True)
    assert main(["put", "-r", str(tmp_path / "run7"), _url(router, "other"), *key]) == 1
    printed = capsys.readouterr()
    assert "link is not a file" in printed.err
    assert "large: other/large: failed: it does not fit what is there" in printed.err
    assert "run7: 3 files" in printed.out
    assert (router.root / "other/a/b/small").read_bytes() == b"small"
    router.stop()
    assert main(["put", "-r", str(tmp_path / "run7"), _url(router, "to/"), *key]) == 1


def test_names_by_commands(router: RouterProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = ["--key", str(router.key_file("site"))]

    def run(*words: str) -> list[str]:
        assert main([*words, *key]) == 0
        return capsys.readouterr().out.splitlines()

    content = os.urandom(3_000_001)
    (router.root / "a").mkdir()
    (router.root / "a/f").write_bytes(content)
    (router.root / "a/f").chmod(0o640)
    (router.root / "a" / os.fsdecode(b"x\xe9\033[1m")).touch()
    assert run("ls", _url(router, "a")) == ["f", "x\\udce9\\x1b[1m"]
    assert run("ls", _url(router, "")) == ["a/"]
    assert run("ls", "-l", _url(router, "a/f"))[0].startswith("- 640   3.0 MB 20")
    assert run("stat", _url(router, "a/f"))[:4] == [
        "name:       a/f",
        "kind:       file",
        "size:       3.0 MB (3000001 bytes)",
        "mode:       640",
    ]
    run("mkdir", "-p", _url(router, "b/c"))
    assert run("copy", _url(router, "a/f"), _url(router, "b/c/"))[0].startswith("f: 3.0 MB in ")
    assert (router.root / "b/c/f").read_bytes() == content
    assert (router.root / "b/c/f").stat().st_mode & 0o777 == 0o640
    run("mv", "-p", _url(router, "b/c/f"), _url(router, "new/g"))
    assert (router.root / "new/g").read_bytes() == content
    run("rm", "-r", _url(router, "b"), _url(router, "new/g"))
    assert sorted(path.name for path in router.root.iterdir()) == [".stageout", "a", "new"]
    for words, status, said in (
        (["rm", _url(router, "a")], 1, "rm -r removes it"),
        (["rm", _url(router, "none")], 1, "No such file"),
        (["ls", _url(router, "none")], 1, "No such file"),
        (["mkdir", _url(router, "no/d")], 1, "there is no directory 'no': make it first"),
        (["mv", _url(router, "a/f"), "overlay://other/f"], 64, "use copy, then rm"),
        (["copy", _url(router, "a"), _url(router, "z")], 1, "not a file"),
        (["copy", _url(router, "a/f"), _url(router, "z"), "--to-key", str(router.key_file("small"))], 1, "only for"),
    ):
        assert main([*words, *key]) == status
        assert said in capsys.readouterr().err
    assert not (router.root / "z").exists()


def test_small_files_of_a_job_travel_together(
    router: RouterProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGEOUT_OVERLAY_KEY", str(router.key_file("site")))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    contents = {f"f{number}": os.urandom(100 * number) for number in range(40)} | {"large": os.urandom(5_000_000)}
    for name, data in contents.items():
        (scratch / name).write_bytes(data)
    starter = EmbeddedStarter(scratch, PluginTable([installed(PLUGIN, tmp_path)]))
    (run,) = starter.upload([Wanted(_url(router, f"to/{name}"), name) for name in contents])
    assert run.succeeded
    assert {name: (router.root / "to" / name).read_bytes() for name in contents} == contents
    packed = [Path(ad["TransferFileName"]).name for ad in run.ads if ad["DeveloperData"].get("Packed")]
    assert sorted(packed) == sorted(set(contents) - {"large"})
    (scratch / "bad").write_text("bad")
    (router.root / "to/bad").mkdir()
    (run,) = starter.upload([Wanted(_url(router, f"to/{name}"), name) for name in ("bad", "f1")])
    assert {Path(ad["TransferFileName"]).name: ad["TransferSuccess"] for ad in run.ads} == {"bad": False, "f1": True}


def test_an_input_of_a_job_can_be_run_if_it_can_be_there(
    router: RouterProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGEOUT_OVERLAY_KEY", str(router.key_file("site")))
    (router.root / "tool").write_text("#!/bin/sh\n")
    (router.root / "tool").chmod(0o755)
    (tmp_path / "scratch").mkdir()
    starter = EmbeddedStarter(tmp_path / "scratch", PluginTable([installed(PLUGIN, tmp_path)]))
    (run,) = starter.download([Wanted(_url(router, "tool"), "tool")])
    assert run.succeeded
    assert os.access(tmp_path / "scratch/tool", os.X_OK)


def test_a_lot_by_commands(router: RouterProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = ["--key", str(router.key_file("site"))]
    file = tmp_path / "f"
    file.write_bytes(os.urandom(2_000_000))
    assert main(["lot", "reserve", _url(router, "a"), "--size", "3M", *key]) == 0
    _, number, left, unit = capsys.readouterr().out.split()[:4]
    assert (left, unit) == ("3.0", "MB")
    lot = ["--lot", number.rstrip(":")]
    assert main(["put", *lot, str(file), _url(router, "a/f"), *key]) == 0
    assert (router.root / "a/f").read_bytes() == file.read_bytes()
    capsys.readouterr()
    assert main(["lot", "renew", _url(router, ""), *lot, "--hours", "1", *key]) == 0
    assert " 1.0 MB until " in capsys.readouterr().out
    for path in ("a/g", "elsewhere"):
        assert main(["put", *lot, str(file), _url(router, path), *key]) == 1
        assert "reserve another" in capsys.readouterr().err
    small = ["--key", str(router.key_file("small"))]
    assert main(["lot", "reserve", _url(router, "a"), "--size", "3M", *small]) == 1
    assert main(["lot", "release", _url(router, ""), *lot, *key]) == 0
    assert list((router.root / ".stageout/lots").iterdir()) == []
    assert main(["lot", "reserve", _url(router, "a"), *key]) == 64


def test_progress_is_shown_on_a_terminal_only(
    router: RouterProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bars, "_SHOW_EVERY_S", 0)
    monkeypatch.setattr(tally, "SHOW_EVERY_S", 0)
    key = ["--key", str(router.key_file("site"))]
    (tmp_path / "d").mkdir()
    (tmp_path / "d/f").write_bytes(bytes(2 << 20))
    calls = (
        ["put", str(tmp_path / "d/f"), _url(router, "f")],
        ["get", _url(router, "f"), str(tmp_path / "back")],
        ["put", "-r", str(tmp_path / "d"), _url(router, "d")],
    )
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda shown=terminal: shown)
        for call in calls:
            assert main([*call, *key]) == 0
            shown = capsys.readouterr().err
            assert ("% of 2.1 MB, " in shown or "1 file, 2.1 MB of " in shown) is terminal
