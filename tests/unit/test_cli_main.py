"""The command line itself: help, exit statuses, what is loaded, and that no traceback reaches a person."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stageout.cli import status as status_module
from stageout.cli.exits import CommandError, UsageError
from stageout.cli.main import COMMANDS as MODULES
from stageout.cli.main import build_parser, main
from stageout.overlay.cli.places import place_here
from stageout.overlay.cli.targets import name_there, target

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("status", "wait", "retry", "cancel", "pause", "resume", "history", "doctor", "help")
NO_POOL = {"CONDOR_CONFIG": "/dev/null", "PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONPATH": str(ROOT)}


def run(*arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """The command on a machine without HTCondor's daemons."""
    argv = [sys.executable, "-m", "stageout.cli.main", *arguments]
    return subprocess.run(argv, env=NO_POOL, capture_output=True, text=True, timeout=timeout_s, check=False)


def _key(tmp_path: Path) -> Path:
    key = tmp_path / "key"
    key.write_text("site secret\n")
    key.chmod(0o600)
    return key


@pytest.mark.parametrize("option", [("--stale-ok",), ("--through", "gw1.example.org")])
def test_no_older_version_goes_into_a_pipe_unseen(
    option: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["get", "overlay://127.0.0.1:1/f", "-", "--key", str(_key(tmp_path)), *option]) == 64
    assert "for files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "local", "there"),
    [
        ("overlay://h", "d/f", "f"),
        ("overlay://h/", "f", "f"),
        ("overlay://h/a/", "f", "a/f"),
        ("overlay://h/a", "f", "a"),
    ],
)
def test_a_file_goes_into_a_directory_or_gets_the_name(url: str, local: str, there: str, tmp_path: Path) -> None:
    _, path = target(url, str(_key(tmp_path)))
    assert name_there(path, url, local) == there


def test_nothing_of_a_url_is_dropped_in_silence(tmp_path: Path) -> None:
    for part in ("a?b", "a#b", "a\nb", "a\tb"):
        with pytest.raises(UsageError, match="%3F"):
            target(f"overlay://h/{part}", str(_key(tmp_path)))
    assert target("overlay://h/a%3Fb%23c%0Ad e\udcff", str(_key(tmp_path)))[1] == "a?b#c\nd e\udcff"


def test_names_that_would_end_elsewhere_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = ["--key", str(_key(tmp_path))]
    for words, said in (
        (["put", "a/f", "b/f", "overlay://127.0.0.1:1/d/"], "2 of these would be d/f there"),
        (["put", "-", "overlay://127.0.0.1:1"], "with the file's name at its end"),
        (["get", "overlay://127.0.0.1:1/"], "the URL names no file"),
        (["get", "overlay://[::1/f"], "Invalid IPv6 URL"),
    ):
        assert main([*words, *key]) == 64
        assert said in capsys.readouterr().err


def test_a_file_comes_into_a_directory_or_gets_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("is").mkdir()
    for file, place in ((None, "f"), ("g", "g"), ("is", "is/f"), ("is/", "is/f"), ("none/", "none/f")):
        assert place_here("a/f", file) == Path(place)
    for file in ("/dev/null", "/dev/full"):
        with pytest.raises(CommandError, match="no file that could be replaced"):
            place_here("a/f", file)


def test_a_file_that_cannot_be_read_is_told_to_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: object) -> None:
        (tmp_path / "none").read_text()

    monkeypatch.setattr("stageout.cli.check.run", fail)
    assert main(["check", "http://h", "--json"]) == 1
    told = capsys.readouterr()
    assert f"{tmp_path}/none: No such file" in json.loads(told.out)["reason"]
    assert f"{tmp_path}/none: No such file" in told.err


def test_without_a_key_it_says_whom_to_ask(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"No such file.*administrator.*--key"):
        target("overlay://h/a", str(tmp_path / "none"))


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {command} " in text for command in COMMANDS)
    assert main(["help"]) == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["help", command])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: stageout {command}")
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    "arguments",
    [["wait"], ["wait", "--timeout", "soon", "1"], ["wait", "--timeout", "-1", "1"], ["check"], ["nope"],
     ["status", "--nope"], ["doctor", "--role", "x"], ["help", "nope"], ["wait", "--timeout", "nan", "1"]],
)  # fmt: skip
def test_wrong_use_is_64_and_never_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 64
    assert "usage: stageout" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["wait", "status", "retry", "history"])
def test_something_that_is_no_job_is_64(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "alice"]) == 64
    assert capsys.readouterr().err.startswith("stageout: 'alice' is not a job: write a cluster (1234)")


def test_negative_job_ids_of_dagman_are_read_as_jobs() -> None:
    from stageout.cli.main import _protect_job_ids

    options = build_parser().parse_args(_protect_job_ids(["wait", "--return", "-9", "-1.-1", "--timeout", "3"]))
    assert (options.jobs, options.returned, options.timeout) == ([" -1.-1"], -9, 3.0)


def test_no_schedd_is_a_sentence_that_says_what_to_do() -> None:
    for arguments in (["status"], ["retry", "1"], ["history"], ["status", "1.0"]):
        done = run(*arguments)
        assert done.returncode == 69, done.stderr
        assert "no schedd can be found here" in done.stderr and "--name" in done.stderr
        assert "Traceback" not in done.stderr and not done.stdout


def test_a_pool_without_a_collector_is_named() -> None:
    for arguments in (["status"], ["status", "--all"], ["history"]):
        done = run(*arguments, "-pool", "127.0.0.1:1")
        assert done.returncode == 69, done.stderr
        assert "the collector 127.0.0.1:1 does not answer" in done.stderr
        assert "condor_status -pool 127.0.0.1:1 -collector" in done.stderr


def test_waiting_without_a_schedd_times_out() -> None:
    done = run("wait", "--timeout", "0.2", "12")
    assert done.returncode == 2
    assert done.stderr.count("Trying again.") == 1
    assert "timed out" in done.stderr and "Traceback" not in done.stderr


def test_doctor_on_a_bare_machine_fails_with_remedies() -> None:
    done = run("doctor", "--role", "ap", "--role", "ep")
    assert done.returncode == 1
    assert "->" in done.stdout and "Traceback" not in done.stdout + done.stderr
    done = run("doctor")
    assert done.returncode == 1
    assert "neither SCHEDD nor STARTD" in done.stderr


def test_a_closed_pipe_is_no_error() -> None:
    script = f"{sys.executable} -m stageout.cli.main help wait | true"
    done = subprocess.run(["sh", "-c", script], env=NO_POOL, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr


def test_each_command_has_a_module_of_its_own_and_loads_no_other() -> None:
    modules = [module for module, _ in MODULES.values()]
    assert len(set(modules)) == len(modules)
    script = "import sys; from stageout.cli.main import build_parser; build_parser('wait'); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], env=NO_POOL, capture_output=True, text=True, check=True)
    assert set(modules) & set(done.stdout.split()) == {"stageout.cli.wait"}


def test_version_loads_nothing_heavy() -> None:
    script = "import sys; from stageout.cli.main import build_parser; build_parser(''); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], env=NO_POOL, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"htcondor2", "classad2", "json", "subprocess", "stageout.cli.status", "asyncio", "logging"}


def test_an_account_without_a_name_is_told_what_to_do(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000_000 - 1)
    with pytest.raises(CommandError, match="--all"):
        status_module.whose_jobs()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["statsu"], "statsu: no such command (did you mean status?); 'stageout help' lists all"),
        (["xyzzy"], "xyzzy: no such command; 'stageout help' lists all"),
        (["status", "--jsno"], "--jsno: no such option here (did you mean --json?)"),
        (["wait", "1", "--time-out=5"], "--time-out=5: no such option here (did you mean --timeout?)"),
        (["history", "--xyzzy"], "--xyzzy: no such option here"),
    ],
)
def test_an_unknown_command_or_option_names_what_may_be_meant(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 64
    assert capsys.readouterr().err.splitlines()[-1].endswith(f": {text}")


def test_every_command_prints_json() -> None:
    (choices,) = [item.choices for item in build_parser()._actions if isinstance(item, argparse._SubParsersAction)]
    without = {name for name, parser in choices.items() if "--json" not in parser._option_string_actions}
    assert without == {"completion", "help"}


def test_json_of_commands_that_make_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugin", "new", "box", "--directory", str(tmp_path / "box"), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["schema"], made["name"], len(made["files"])) == (1, "box", 4)

    issuer = str(tmp_path / "issuer")
    assert main(["capability", issuer, "--public", "--json"]) == 0
    public = json.loads(capsys.readouterr().out)["public"]
    assert main(["capability", issuer, "--prefix", "/a", "--terminal", "gw1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["public"] == public and told["line"].startswith("capability ")

    asked = tmp_path / "asked"
    asked.write_text('[ dap_type = "Estimation"; dap_id = 7; src_url = "box://a/b"; dest_url = "file:///x/"; ]')
    assert main(["estimate", str(asked), "--json", "--plugin", "/nonexistent"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["schema"], told["status"], told["dap_id"]) == (1, "request_failed", 7)

    plugin = tmp_path / "their_plugin"
    plugin.write_text("#!/bin/sh\necho 'SupportedMethods = \"box\"'\n")
    plugin.chmod(0o755)
    assert main(["wrap", str(plugin), "--directory", str(tmp_path / "ends"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    front = str(tmp_path / "ends" / "their_plugin")
    assert told["front_ends"] == [{"plugin": str(plugin), "path": front}] and front in told["setting"]


def test_only_a_missing_part_of_stageout_is_told_as_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = ["stageout.cli.check", "aiohttp"]

    def load(name: str) -> None:
        raise ModuleNotFoundError(name=missing[0])

    monkeypatch.setattr("stageout.cli.main.importlib.import_module", load)
    assert main(["check", "x"]) == 1
    assert "needs the Python module stageout.cli.check, which is not installed" in capsys.readouterr().err
    del missing[0]
    with pytest.raises(ModuleNotFoundError):
        main(["check", "x"])
