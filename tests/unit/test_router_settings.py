"""The messages for a router without HTCondor about its settings."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from overlay_router.daemon import _tree, home_of, listen, main, place_of
from stageout.core.config import ConfigError, file_settings, mapping_settings, misspelt


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "router.env"
    path.write_text(text)
    return path


def test_a_file_of_settings_is_read_as_systemd_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEOUT_ROUTER_PORT", "1")
    monkeypatch.setenv("STAGEOUT_ROUTER_HOST", "::1")
    text = '# a comment\n; another\n\nSTAGEOUT_ROUTER_PORT = 2\nSTAGEOUT_ROUTER_ROOT="/with a blank"\n'
    settings = file_settings(_file(tmp_path, text))
    assert settings.count("STAGEOUT_ROUTER_PORT") == 2
    assert settings.text("STAGEOUT_ROUTER_ROOT") == "/with a blank"
    assert settings.text("STAGEOUT_ROUTER_HOST") == "::1", "what is not in the file is the environment's"
    for bad in ("PORT", "two words=1", "=1"):
        with pytest.raises(ConfigError, match="line 1: write NAME=VALUE"):
            file_settings(_file(tmp_path, bad))
    with pytest.raises(ConfigError, match="No such file"):
        file_settings(tmp_path / "none")


def test_a_misspelt_name_is_said(tmp_path: Path) -> None:
    settings = file_settings(_file(tmp_path, "STAGEOUT_ROUTER_NEIGBOURS=1\nSTAGEOUT_ROUTER_PORT=1\nELSE=1\n"))
    assert misspelt(settings) == ["there is no setting STAGEOUT_ROUTER_NEIGBOURS: is it STAGEOUT_ROUTER_NEIGHBOURS?"]
    assert misspelt(mapping_settings({"STAGEOUT_ROUTER_NEIGBOURS": "1"})) == [], "nobody knows which names are set"


@pytest.mark.parametrize(
    ("root", "words"),
    [
        ("", "is not set: name the directory"),
        ("in", "write an absolute path"),
        ("/nowhere/at/all", "make it, or mount"),
    ],
)
def test_a_root_that_is_none_is_said_with_what_to_do(root: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        place_of(mapping_settings({"STAGEOUT_ROUTER_ROOT": root}))


def test_without_htcondor_the_directory_of_the_records_must_be_named() -> None:
    with pytest.raises(ConfigError, match=r"STAGEOUT_ROUTER_DIR .* SPOOL is not set: write an absolute"):
        home_of(mapping_settings({}))


def test_what_cannot_be_used_ends_the_router_for_good(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "root").mkdir()
    (tmp_path / "keys").touch(0o600)
    (tmp_path / "keys").write_text(f"site {'0' * 24} /\n")
    lines = [f"STAGEOUT_ROUTER_KEYS={tmp_path}/keys", f"STAGEOUT_ROUTER_ROOT={tmp_path}/root"]
    lines += [f"STAGEOUT_ROUTER_DIR={tmp_path}/home", "STAGEOUT_ROUTER_HOST=127.0.0.1"]
    for bad, words in (
        (f"STAGEOUT_ROUTER_DIR={tmp_path}/file", "file: File exists; make it"),
        (f"STAGEOUT_ROUTER_DIR={tmp_path}/file/x", "Not a directory; make it"),
        ("STAGEOUT_ROUTER_ROOT=/proc", "let this router's user write there"),
        ("STAGEOUT_ROUTER_PORT=70000", "must be at most 65535"),
        ("STAGEOUT_ROUTER_UPLINK_MB_S=nan", "STAGEOUT_ROUTER_UPLINK_MB_S = nan: write a number"),
        ("STAGEOUT_ROUTER_INTERVAL=inf", "STAGEOUT_ROUTER_INTERVAL = inf: write a number"),
    ):
        assert main(["--settings", str(_file(tmp_path, "\n".join([*lines, "STAGEOUT_ROUTER_PORT=0", bad])))]) == 99
        assert words in capsys.readouterr().err


def test_a_spool_that_cannot_be_written_to_is_said(tmp_path: Path) -> None:
    (tmp_path / ".stageout").touch()
    words = f"STAGEOUT_ROUTER_DIR = {tmp_path}: {tmp_path}/.stageout/staging: Not a directory; let this router's user"
    with contextlib.ExitStack() as stack, pytest.raises(ConfigError, match=re.escape(words)):
        _tree(tmp_path, "STAGEOUT_ROUTER_DIR", stack)


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        settings = mapping_settings({"STAGEOUT_ROUTER_HOST": "127.0.0.1", "STAGEOUT_ROUTER_PORT": port})
        with pytest.raises(ConfigError, match=f"another program listens there.*sport = :{port}"):
            listen(settings)


@pytest.mark.parametrize("lacks", ["sockets", "addresses", "both kinds at once"])
def test_a_machine_without_ipv6_has_a_router_by_ipv4(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    make = socket.create_server

    def none_of_ipv6(place: tuple[str, int], **more: object) -> socket.socket:
        if more.get("family") == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT if lacks == "sockets" else errno.EADDRNOTAVAIL, "no IPv6")
        return make(place, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "create_server", none_of_ipv6)
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: lacks != "both kinds at once")
    with listen(mapping_settings({"STAGEOUT_ROUTER_PORT": "0"})) as listening:
        assert listening.family == socket.AF_INET
        socket.create_connection(("127.0.0.1", listening.getsockname()[1])).close()


def test_a_port_that_is_taken_by_ipv6_is_not_taken_by_ipv4_instead() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        settings = mapping_settings({"STAGEOUT_ROUTER_PORT": str(taken.getsockname()[1])})
        with pytest.raises(ConfigError, match="another program listens there"):
            listen(settings)


def test_a_name_is_listened_on_by_ipv4_first_and_a_literal_may_have_brackets() -> None:
    for host, family in (("localhost", socket.AF_INET), ("127.0.0.1", socket.AF_INET), ("[::1]", socket.AF_INET6)):
        try:
            with listen(mapping_settings({"STAGEOUT_ROUTER_HOST": host, "STAGEOUT_ROUTER_PORT": "0"})) as listening:
                assert listening.family == family
        except ConfigError:
            assert family == socket.AF_INET6 and not socket.has_dualstack_ipv6()


def test_a_key_is_made_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--settings", str(_file(tmp_path, f"STAGEOUT_ROUTER_KEYS={tmp_path}/keys"))]
    assert main([*settings, "--new-key", "alice", "/vo/alice"]) == 0
    line = capsys.readouterr().out
    assert re.fullmatch(r"alice [0-9a-f]{48}\n", line)
    assert (tmp_path / "keys").read_text() == f"{line.strip()} /vo/alice\n"
    assert main([*settings, "--new-key", "alice", "/"]) == 99
    assert "has a key of the name alice" in capsys.readouterr().err


_SIGNALLED_AT_ONCE = """
import os, signal, sys
from overlay_router import daemon
from stageout.core import log
say, answers = log.event, {"daemon-started": signal.SIGHUP, "configuration-reloaded": signal.SIGTERM}
def event(name, *more, **facts):
    say(name, *more, **facts)
    if name in answers:
        os.kill(os.getpid(), answers[name])
log.event = event
sys.exit(daemon.main(["--alone"]))
"""


def test_whoever_reads_that_it_has_started_may_have_it_read_its_keys_again(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"site {'0' * 24} /\n")
    (tmp_path / "keys").chmod(0o600)
    (tmp_path / "root").mkdir()
    settings = {"ROOT": tmp_path / "root", "DIR": tmp_path / "home", "HOST": "127.0.0.1", "PORT": 0,
                "KEYS": tmp_path / "keys"}  # fmt: skip
    environment = {**os.environ, **{f"STAGEOUT_ROUTER_{name}": str(value) for name, value in settings.items()}}
    command = [sys.executable, "-c", _SIGNALLED_AT_ONCE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(" daemon-started .* configuration-reloaded.* daemon-stopped", done.stderr, re.DOTALL)
