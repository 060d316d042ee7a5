"""The five daemons start, reload, log and end alike: each test runs every one of them as condor_master would."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import importlib
import json
import logging
import logging.handlers
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stageout import __version__, daemon
from stageout.core import log
from stageout.core.config import ConfigError, Settings, mapping_settings
from stageout.core.rotation import LogSettings, log_settings
from tests.harness.ports import free_ports
from tests.polling import wait_for

ROOT_DIR = Path(__file__).resolve().parents[2]
MODULES = ["sandbox_manager", "schedd_agent", "overlay_router", "policy_service", "stageout_web"]
_LIMIT_S = 60.0


@dataclass
class Node:
    """A configuration for one daemon. :param module: its package. :param base: all its files are below it."""

    module: str
    base: Path

    def __post_init__(self) -> None:
        for name in ("execute", "log", "spool", "root"):
            (self.base / name).mkdir()
        (self.base / "keys").write_text(f"site {'0' * 24} /\n")
        (self.base / "tokens").write_text(f"cms {'t' * 40}\n")
        for name in ("keys", "tokens"):
            (self.base / name).chmod(0o600)
        self.configure()

    @property
    def program(self) -> daemon.Program:
        found = importlib.import_module(f"{self.module}.daemon").PROGRAM
        assert isinstance(found, daemon.Program)
        return found

    @property
    def log_file(self) -> Path:
        return self.base / "log" / self.program.log_file

    @property
    def text(self) -> str:
        """The log."""
        return self.log_file.read_text() if self.log_file.exists() else ""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", f"{self.module}.daemon"]

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if "_CONDOR_" not in name}
        return {**kept, "CONDOR_CONFIG": str(self.base / "condor_config")}

    def configure(self, **more: object) -> None:
        """Write HTCondor's configuration. :param more: names may have SUBSYS in them."""
        settings = {
            "EXECUTE": self.base / "execute", "LOG": self.base / "log", "SPOOL": self.base / "spool",
            "COLLECTOR_HOST": "127.0.0.1:9", "STAGEOUT_SPOOL": self.base / "stageout",
            "STAGEOUT_ROUTER_ROOT": self.base / "root", "STAGEOUT_ROUTER_DIR": self.base / "router",
            "STAGEOUT_ROUTER_KEYS": self.base / "keys", "STAGEOUT_ROUTER_HOST": "127.0.0.1", "STAGEOUT_ROUTER_PORT": 0,
            "STAGEOUT_POLICY_TOKENS": self.base / "tokens", "STAGEOUT_POLICY_DIR": self.base / "policy",
            "STAGEOUT_POLICY_PORT": 0, "STAGEOUT_WEB_PORT": 0, **more,
        }  # fmt: skip
        lines = [f"{name.replace('SUBSYS', self.program.subsystem)} = {value}\n" for name, value in settings.items()]
        (self.base / "condor_config").write_text("".join(lines))

    @contextlib.contextmanager
    def running(self, *command: str, **more: Any) -> Iterator[subprocess.Popen[str]]:
        """The daemon, or another command, until the test ends."""
        argv = list(command) or [*self.command, "-f"]
        with subprocess.Popen(argv, env=self.environment, cwd=ROOT_DIR, text=True, **more) as process:
            try:
                yield process
            finally:
                process.kill()


@pytest.fixture(params=MODULES)
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Node:
    return Node(request.param, tmp_path)


def _main(node: Node, *arguments: str) -> int:
    """The exit status of the program with options that do not start the daemon."""
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"{node.module}.daemon").main(list(arguments))
    return int(ended.value.code or 0)


def test_help_version_and_wrong_options(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(node, "--version") == 0
    assert capsys.readouterr().out == f"{node.program.name} {__version__}\n"
    assert _main(node, "--help") == 0
    text = capsys.readouterr().out
    assert node.program.about in text
    assert {"-f", "-t", "-local-name", "--version"} <= set(re.findall(r"^  (?:-h, )?(--?[a-z-]+)", text, re.M))
    assert ("--alone" in text, "--settings" in text) == (node.program.runs_alone,) * 2
    assert "exit status: 0 stopped as requested" in text
    assert _main(node, "--nonsense") == 2
    assert "--nonsense" in capsys.readouterr().err


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGQUIT])
def test_signals_reload_and_end_it(node: Node, how: int) -> None:
    with node.running() as process:
        wait_for(lambda: f" daemon-started pid={process.pid} version={__version__}" in node.text, "the start")
        node.configure(MAX_SUBSYS_LOG="2 hours ago")
        process.send_signal(signal.SIGHUP)
        refused = f'configuration-refused problem="MAX_{node.program.subsystem}_LOG = 2 hours ago'
        wait_for(lambda: refused in node.text, "the refusal")
        node.configure(MAX_SUBSYS_LOG="100 B")
        process.send_signal(signal.SIGHUP)
        old = node.log_file.with_name(f"{node.log_file.name}.old")
        wait_for(lambda: old.exists() and " configuration-reloaded" in f"{old.read_text()}{node.text}", "the reload")
        process.send_signal(how)
        assert process.wait(_LIMIT_S) == 0
    assert " daemon-stopped" in f"{old.read_text()}{node.text}"
    assert sorted(path.name for path in node.log_file.parent.glob(f"{node.log_file.name}*")) == [
        node.log_file.name, old.name
    ]  # fmt: skip


def test_on_a_terminal_and_the_end_of_condor_master(node: Node, tmp_path: Path) -> None:
    master = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(600)"
    said = tmp_path / "terminal"
    argv = [sys.executable, "-c", master, *node.command, "-t"]
    with said.open("w") as terminal, node.running(*argv, stderr=terminal) as process:
        start = wait_for(lambda: re.search(r" daemon-started pid=(\d+)", said.read_text()), "the start")
    # Leaving the context has killed the master.
    try:
        wait_for(lambda: f"master-lost parent={process.pid}\n" in said.read_text(), "that it is missed")
        wait_for(lambda: " daemon-stopped" in said.read_text(), "the end")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(start[1]), signal.SIGKILL)
    assert not node.text


def test_a_master_that_cannot_be_told_is_logged_and_the_daemon_works(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONDOR_INHERIT", "1 <127.0.0.1:9>")
    with node.running() as process:
        wait_for(lambda: " master-tell-failed problem=" in node.text, "the warning")
        process.send_signal(signal.SIGTERM)
        assert process.wait(_LIMIT_S) == 0
    assert " daemon-stopped" in node.text and " daemon-started" in node.text


def test_a_wrong_setting_ends_it_for_good(node: Node) -> None:
    node.configure(MAX_NUM_SUBSYS_LOG="few")
    done = subprocess.run(
        node.command, env=node.environment, cwd=ROOT_DIR, capture_output=True, text=True, timeout=_LIMIT_S
    )
    assert done.returncode == 99
    words = f"MAX_NUM_{node.program.subsystem}_LOG = few: write the number of old log files to keep"
    assert done.stderr == f"{node.program.name}: {words}\n"
    assert f'ERROR daemon-failed problem="{words}" status=99\n' in node.text


def scrape(port: int) -> str:
    """Return the metrics, "" while nobody listens."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())
    return ""


def test_a_reconfiguration_opens_and_closes_the_port_of_its_metrics(node: Node) -> None:
    [port] = free_ports(1)
    with node.running() as process:
        wait_for(lambda: f" daemon-started pid={process.pid}" in node.text, "the start")
        node.configure(**{f"{node.program.metrics}_PORT": port})
        process.send_signal(signal.SIGHUP)
        text = wait_for(lambda: scrape(port), "the port")
        assert f'stageout_build_info{{daemon="{node.program.name}",version="{__version__}"}} 1.0' in text
        assert "process_resident_memory_bytes" in text
        assert f" metrics-opened host=127.0.0.1 port={port}" in node.text
        node.configure(**{f"{node.program.metrics}_PORT": "none"})
        process.send_signal(signal.SIGHUP)
        wait_for(
            lambda: f'configuration-refused problem="{node.program.metrics}_PORT = none' in node.text, "the refusal"
        )
        assert scrape(port), "the old settings stay"
        node.configure()
        process.send_signal(signal.SIGHUP)
        wait_for(lambda: not scrape(port), "the end of the port")
        process.send_signal(signal.SIGTERM)
        assert process.wait(_LIMIT_S) == 0


# ---- the parts -------------------------------------------------------------------------------------------------------

PROGRAM = daemon.Program("stageout-x", "X", "XLog", "Do nothing.", "STAGEOUT_ROUTER_METRICS", runs_alone=True)


class Work:
    """A service that does what a test wants."""

    def __init__(self, serve: Callable[[], Any]) -> None:
        self._serve = serve

    async def serve(self, started: Callable[..., None]) -> None:
        started()
        await asyncio.sleep(0)
        self._serve()

    def stop(self, fast: bool) -> None:
        pytest.fail("nobody asked")

    async def reload(self) -> Settings:
        return pytest.fail("nobody asked")


def fail_to_prepare(*_: object) -> Callable[[], daemon.Service]:
    raise ConfigError("there is no user condor")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[int, str]]]:
    """Run a service with settings; its exit status and its log."""

    def one(serve: Callable[[], Any], *arguments: str, **settings: str) -> tuple[int, str]:
        values = {"LOG": str(tmp_path), **settings}
        monkeypatch.setattr(daemon, "reader_of", lambda *_: lambda: mapping_settings(values))
        options = daemon.command_line(PROGRAM).parse_args(arguments)
        status = daemon.run(PROGRAM, options, lambda settings, load: lambda: Work(serve))
        logs = sorted(tmp_path.glob("*Log"))
        return status, logs[0].read_text() if logs else ""

    loggers = [logging.getLogger(name) for name in ("stageout", "asyncio", "aiohttp")]
    before = [(one.handlers[:], one.level, one.propagate) for one in loggers]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT)}
    yield one
    for logger, (found, level, propagate) in zip(loggers, before):
        for handler in logger.handlers:
            handler.close()
        logger.handlers[:], logger.propagate = found, propagate
        logger.setLevel(level)
    for number, action in handlers.items():
        signal.signal(number, action)


def test_the_reason_of_a_crash_is_in_the_log(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(lambda: [][0])
    assert status == 1
    assert re.search(r"ERROR daemon-crashed trace=\"Traceback.*IndexError: list index out of range", text)
    status, text = run(Path("/nonexistent").read_text)
    assert status == 1
    assert re.search(r"ERROR daemon-failed problem=.*No such file.* status=1\n", text)
    assert "stageout-x: [Errno 2] No such file" in capsys.readouterr().err


def test_what_libraries_report_is_in_the_log(run: Any) -> None:
    def forget_a_fault() -> None:
        context = {"message": "Task exception was never retrieved", "exception": ValueError("lost")}
        asyncio.get_running_loop().call_exception_handler(context)

    status, text = run(forget_a_fault)
    assert status == 0
    assert re.search(r'ERROR library-logged library=asyncio text="Task exception.* trace="ValueError: lost', text)


def test_debug_messages_tell_of_steps_that_hold_up_the_loop(run: Any) -> None:
    def work() -> None:
        time.sleep(0.2)

    assert "library=asyncio" not in run(work)[1]
    status, text = run(work, X_DEBUG="D_FULLDEBUG")
    assert status == 0
    assert re.search(r"WARNING library-logged library=asyncio text=.*took 0\.\d+ seconds", text)


def test_a_daemon_with_a_local_name_has_a_log_of_its_own(run: Any, tmp_path: Path) -> None:
    run(lambda: None, "-local-name", "big_node", X_LOG=str(tmp_path / "shared"))
    assert (tmp_path / "BigNodeXLog").exists()  # BigNodeLog is that of the startd with this name
    assert not (tmp_path / "BigNodeLog").exists()
    assert not (tmp_path / "shared").exists()
    run(lambda: None, "-local-name", "EP2", **{"EP2.X_LOG": str(tmp_path / "own")})
    assert (tmp_path / "own").exists()


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (errno.ENOSPC, 1), (errno.EMFILE, 1), (errno.EIO, 1), (errno.EACCES, 99), (errno.ENOENT, 99),
        (errno.ENOTDIR, 99), (errno.EISDIR, 99),
    ],
)  # fmt: skip
def test_a_log_that_cannot_be_opened_ends_a_daemon_for_good_only_when_another_start_changes_nothing(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, status: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(LogSettings, "handler", fail)
    assert run(lambda: pytest.fail("it has no log"))[0] == status
    assert f"XLog: {os.strerror(number)}" in capsys.readouterr().err


def test_before_a_daemon_has_its_user_it_makes_no_log(run: Any, tmp_path: Path) -> None:
    run(lambda: None)
    options = daemon.command_line(PROGRAM).parse_args([])
    assert daemon.run(PROGRAM, options, fail_to_prepare) == 99
    [file] = tmp_path.glob("*Log")
    assert file.read_text().endswith(' ERROR daemon-failed problem="there is no user condor" status=99\n')
    file.unlink()
    assert daemon.run(PROGRAM, options, fail_to_prepare) == 99
    assert not file.exists()


def test_without_htcondor_both_forms_of_names_count(monkeypatch: pytest.MonkeyPatch) -> None:
    read = daemon.reader_of(PROGRAM, argparse.Namespace(alone=True, settings=None))
    monkeypatch.setenv("_CONDOR_STAGEOUT_ROUTER_PORT", "1")
    assert read().count("STAGEOUT_ROUTER_PORT") == 1
    monkeypatch.setenv("STAGEOUT_ROUTER_PORT", "2")
    assert read().count("STAGEOUT_ROUTER_PORT") == 2


def test_without_htcondor_s_module_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    options = daemon.command_line(PROGRAM).parse_args([])
    with pytest.raises(ConfigError, match="htcondor2 is not installed here: give --alone or --settings"):
        daemon.reader_of(PROGRAM, options)


MB = 2**20


@pytest.mark.parametrize(
    ("text", "size_bytes", "age_s"),
    [
        ("", 10 * MB, 0), ("0", 0, 0), ("1000", 1000, 0), ("5 Kb", 5120, 0), ("3M", 3 * MB, 0), ("3 Mb", 3 * MB, 0),
        ("3mb", 3 * MB, 0), ("3MiB", 3 * MB, 0), ("2 Gb", 2048 * MB, 0), ("3m", 0, 180), ("3 Min", 0, 180),
        ("12 Hr", 0, 43200), ("1 day", 0, 86400), ("2 Weeks", 0, 1209600), ("30 S", 0, 30),
    ],
)  # fmt: skip
def test_limits_of_logs_are_written_as_for_htcondor(text: str, size_bytes: int, age_s: int) -> None:
    found = log_settings(mapping_settings({"MAX_X_LOG": text}), "X")
    assert found == LogSettings(size_bytes, age_s, 1, False)
    default = log_settings(mapping_settings({"MAX_DEFAULT_LOG": text, "MAX_NUM_X_LOG": "4"}), "X")
    assert default == LogSettings(size_bytes, age_s, 4, False)


@pytest.mark.parametrize("text", ["much", "-1", "10 * 1024", "10 Pb", "1.5 Mb"])
def test_other_limits_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"MAX_X_LOG = .*: write a number with a unit"):
        log_settings(mapping_settings({"MAX_X_LOG": text}), "X")


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, False), ({"X_DEBUG": "D_PID, D_CAT"}, False), ({"X_DEBUG": "D_PID|D_FULLDEBUG"}, True),
        ({"X_DEBUG": "d_always:2"}, True), ({"DEFAULT_DEBUG": "D_ALL:2"}, True), ({"X_DEBUG": "D_ALL"}, False),
        ({"ALL_DEBUG": "D_FULLDEBUG", "X_DEBUG": "D_CAT"}, True),
        ({"ALL_DEBUG": "D_FULLDEBUG", "X_DEBUG": "-D_FULLDEBUG"}, False),
        ({"DEFAULT_DEBUG": "D_FULLDEBUG", "X_DEBUG": "D_CAT"}, False), ({"X_DEBUG": "D_FULLDEBUG:0"}, False),
    ],
)  # fmt: skip
def test_categories_that_ask_for_debug_messages(settings: dict[str, str], wanted: bool) -> None:
    assert log_settings(mapping_settings(settings), "X").is_debug == wanted


@pytest.mark.parametrize("old_files", [1, 3])
def test_old_files_of_a_log(old_files: int, tmp_path: Path) -> None:
    handler = LogSettings(40, 0, old_files, False).handler(tmp_path / "Log")
    for number in range(20):
        handler.handle(logging.makeLogRecord({"msg": f"message number {number:02}"}))
    handler.close()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == ({"Log", "Log.old"} if old_files == 1 else {"Log", "Log.1", "Log.2", "Log.3"})
    assert "message number 19" in (tmp_path / "Log").read_text()
    assert all(path.stat().st_size <= 40 for path in tmp_path.iterdir())


def test_a_log_of_a_limited_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = LogSettings(0, 3600, 2, False).handler(tmp_path / "Log")
    handler.handle(logging.makeLogRecord({"msg": "before"}))
    monkeypatch.setattr(logging.handlers, "time", SimpleNamespace(**{**vars(time), "time": lambda: 2e9 + 7200}))
    monkeypatch.setattr(handler, "rolloverAt", 2e9)
    handler.handle(logging.makeLogRecord({"msg": "after"}))
    handler.close()
    [old] = tmp_path.glob("Log.*")
    assert old.read_text() == "before\n"
    assert (tmp_path / "Log").read_text() == "after\n"


def test_opening_a_log_again_begins_no_new_period(tmp_path: Path) -> None:
    for written_at in (2_000_000_000, 2_000_003_000):
        (tmp_path / "Log").touch()
        os.utime(tmp_path / "Log", (written_at, written_at))
        handler = LogSettings(0, 3600, 2, False).handler(tmp_path / "Log")
        assert isinstance(handler, logging.handlers.TimedRotatingFileHandler)
        handler.close()
        assert handler.rolloverAt == (written_at // 3600 + 1) * 3600


@pytest.mark.parametrize("wanted", [LogSettings(10, 0, 1, False), LogSettings(0, 3600, 1, False)])
def test_a_log_that_cannot_be_put_aside_grows_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: LogSettings
) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / "Log").touch()
    os.utime(tmp_path / "Log", (1_000_000_000, 1_000_000_000))
    handler = wanted.handler(tmp_path / "Log")
    monkeypatch.setattr(os, "rename", fail)
    for number in range(3):
        handler.handle(logging.makeLogRecord({"msg": f"message number {number}"}))
    handler.close()
    assert (tmp_path / "Log").read_text() == "".join(f"message number {number}\n" for number in range(3))


def test_reopening_a_log_closes_the_file_before(tmp_path: Path, run: Any) -> None:
    first = logging.FileHandler(tmp_path / "first")
    log.open_log(first)
    log.event("one")
    log.open_log(logging.FileHandler(tmp_path / "second"))
    log.event("two")
    assert first.stream is None
    assert (tmp_path / "first").read_text().endswith(" INFO one\n")
    assert (tmp_path / "second").read_text().endswith(" INFO two\n")


def test_a_line_has_the_offset_of_its_zone(tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for zone, offset in (("UTC", "+00:00"), ("<+0530>-5:30", "+05:30"), ("<-0330>3:30", "-03:30")):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        before_at = time.time()
        log.open_log(logging.FileHandler(tmp_path / "Log", "w"))
        log.event("one", number=1)
        stamp, rest = (tmp_path / "Log").read_text().split(" ", 1)
        assert rest == "INFO one number=1\n"
        assert stamp.endswith(offset)
        assert 0 <= datetime.fromisoformat(stamp).timestamp() - before_at + 0.001 < 5
    monkeypatch.undo()
    time.tzset()


def test_json_lines_have_the_facts_as_they_are(tmp_path: Path, run: Any) -> None:
    settings = mapping_settings({"STAGEOUT_LOG_FORMAT": "JSON"})
    log.open_log(logging.FileHandler(tmp_path / "Log"), is_json=log_settings(settings, "X").is_json)
    log.warn("odd-file", path=tmp_path, number=3, word='a "b"\n', time="of the file", is_whole=True)
    log.event("two")
    first, second = map(json.loads, (tmp_path / "Log").read_text().splitlines())
    assert first == {
        "path": str(tmp_path), "number": 3, "word": 'a "b"\n', "is_whole": True, "time": first["time"],
        "level": "WARNING", "event": "odd-file",
    }  # fmt: skip
    assert datetime.fromisoformat(first["time"]).tzinfo is not None
    assert (second["level"], second["event"]) == ("INFO", "two")
    with pytest.raises(ConfigError, match="STAGEOUT_LOG_FORMAT = xml: write one of text, json"):
        log_settings(mapping_settings({"STAGEOUT_LOG_FORMAT": "xml"}), "X")
