"""``stageout check`` with real plugins: what is left at the destination, and what a person reads."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stageout.cli.check import probe_url
from stageout.testing.starter import installed
from tests.polling import wait_for

ROOT = Path(__file__).resolve().parents[2]

#: A third-party plugin: scheme ``mem``, files in a directory. FAIL, SPOIL and WAIT are files that change it.
_FOREIGN = """#!{python}
import os, re, sys, time
if "-classad" in sys.argv:
    print('PluginType = "FileTransfer"\\nMultipleFileSupport = true\\nProtocolVersion = 2\\nSupportedMethods = "mem"')
    sys.exit(0)
names = dict(zip(sys.argv[1::2], sys.argv[2::2]))
upload = "-upload" in sys.argv
url, path = re.search(r'LocalFileName = "([^"]*)"', open(names["-infile"]).read()), None
text = open(names["-infile"]).read()
url = re.search(r'Url = "([^"]*)"', text).group(1)
path = re.search(r'LocalFileName = "([^"]*)"', text).group(1)
there = os.path.join("{folder}", url.rpartition("/")[2])
while os.path.exists("{folder}/WAIT"):
    open("{folder}/WAITING", "w").close()
    time.sleep(0.05)
fails = os.path.exists("{folder}/FAIL")
if not fails:
    data = open(path if upload else there, "rb").read()
    open(there if upload else path, "wb").write(b"x" * len(data) if os.path.exists("{folder}/SPOIL") else data)
    size = len(data)
with open(names["-outfile"], "w") as out:
    if fails:
        out.write('[ TransferSuccess = false; TransferUrl = "%s"; TransferError = "the tape robot is on fire"; '
                  'TransferErrorData = {{ [ ErrorType = "Authorization"; FailureType = "Authorization"; '
                  'ErrorString = "no"; Retryable = -1 ] }} ]' % url)
    else:
        out.write('[ TransferSuccess = true; TransferUrl = "%s"; TransferFileName = "%s"; TransferFileBytes = %d; '
                  'TransferTotalBytes = %d ]' % (url, path, size, size))
sys.exit(1 if fails else 0)
"""


class Desk:
    """Calls of the command with one plugin."""

    def __init__(self, tmp_path: Path) -> None:
        self.place = tmp_path / "place"
        self.place.mkdir()
        self.foreign = tmp_path / "mem_plugin"
        self.foreign.write_text(_FOREIGN.format(python=sys.executable, folder=self.place))
        self.foreign.chmod(0o755)
        self.environment = {
            "CONDOR_CONFIG": "/dev/null", "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path),
        }  # fmt: skip

    def start(self, *words: str, **more: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "stageout.cli.main", "check", *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, env={**self.environment, **more}, stdout=pipe, stderr=pipe, text=True)

    def run(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*words, **more)
        out, err = process.communicate(timeout=60)
        assert "Traceback" not in out + err
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def json(self, *words: str, **more: str) -> tuple[int, dict[str, Any]]:
        done = self.run(*words, "--json", **more)
        found: dict[str, Any] = json.loads(done.stdout)
        return done.returncode, found


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.fixture
def curl(tmp_path: Path) -> str:
    return str(installed(ROOT / "plugins" / "stageout_curl_plugin", tmp_path))


def outcomes(found: dict[str, Any]) -> list[str]:
    return [step["outcome"] for step in found["steps"]]


def test_a_file_is_written_read_and_deleted(desk: Desk, curl: str) -> None:
    (desk.place / "other").write_text("stays")
    status, found = desk.json(f"file://{desk.place}", "--plugin", curl)
    assert (status, outcomes(found), found["outcome"]) == (0, ["ok", "ok", "ok"], "done")
    assert [step["step"] for step in found["steps"]] == ["write", "read", "delete"]
    assert all(0 < step["milliseconds"] < 60_000 for step in found["steps"])
    assert [path.name for path in desk.place.iterdir()] == ["other"]
    assert not found["left_behind"]


def test_a_plugin_that_cannot_delete_says_so_and_the_file_is_named(desk: Desk) -> None:
    done = desk.run("mem://host/dir/", "--plugin", str(desk.foreign))
    (left,) = desk.place.iterdir()
    assert done.returncode == 0
    assert "mem_plugin cannot delete mem URLs" in done.stdout
    assert f"mem://host/dir/{left.name}" in done.stderr


def test_a_file_url_names_a_path_of_the_node(desk: Desk, curl: str) -> None:
    words = "a file URL names a path of the node that runs the job; this check tries the path on this machine"
    done = desk.run(f"file://{desk.place}", "--plugin", curl)
    assert (done.returncode, words in done.stdout) == (0, True)
    assert "path of the node" not in desk.run("mem://host/d", "--plugin", str(desk.foreign)).stdout


def test_other_content_is_a_failure(desk: Desk) -> None:
    (desk.place / "SPOIL").touch()
    status, found = desk.json("mem://host/dir", "--plugin", str(desk.foreign))
    assert (status, outcomes(found)) == (1, ["ok", "failed", "not supported"])
    assert found["error_class"] == "CONTENT_MISMATCH"


def test_a_refused_write_has_reason_and_remedy_and_leaves_nothing(desk: Desk) -> None:
    (desk.place / "FAIL").touch()
    done = desk.run("mem://host/dir", "--plugin", str(desk.foreign))
    assert done.returncode == 1
    assert "the tape robot is on fire" in done.stdout
    assert done.stdout.count("not tried") == 2
    assert "PERMISSION_DENIED, error 33" in done.stderr
    assert "ask the server's administrator" in done.stderr
    assert "delete it yourself" not in done.stderr


def test_an_interruption_deletes_the_file(desk: Desk, curl: str, tmp_path: Path) -> None:
    """The read waits, so that the file is there when the signal comes."""
    slow = tmp_path / "slow_plugin"
    wait = f'case " $* " in *-upload*|*-delete*|*-classad*) ;; *) touch {tmp_path}/reading; sleep 60 ;; esac'
    slow.write_text(f'#!/bin/sh\n{wait}\nexec {curl} "$@"\n')
    slow.chmod(0o755)
    process = desk.start(f"file://{desk.place}", "--plugin", str(slow))
    wait_for(lambda: (tmp_path / "reading").exists())
    assert len(list(desk.place.iterdir())) == 1
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (143, "")
    assert list(desk.place.iterdir()) == []


def test_a_step_ends_in_time(desk: Desk) -> None:
    (desk.place / "WAIT").touch()
    started_s = time.monotonic()
    status, found = desk.json("mem://host/dir", "--plugin", str(desk.foreign), "--timeout", "1")
    assert time.monotonic() - started_s < 30
    assert (status, found["error_class"]) == (1, "DEADLINE")
    assert found["left_behind"]
    assert found["steps"][0]["reason"] == "not finished within 1 s (--timeout)"


def test_a_server_that_accepts_connections_and_never_answers(desk: Desk, curl: str) -> None:
    """The reason names the option that sets the limit, and no setting of plugins, which the user has not made."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/dir"
        done = desk.run(url, "--plugin", curl, "--timeout", "2")
    assert done.returncode == 1
    assert "not finished within 2 s (--timeout)" in done.stdout
    assert "a larger --timeout" in done.stderr
    assert "STAGEOUT_" not in done.stdout + done.stderr


def test_no_secret_is_printed(desk: Desk) -> None:
    (desk.place / "FAIL").touch()
    done = desk.run("mem://user:geheim@host/dir?sig=verborgen", "--plugin", str(desk.foreign))
    assert "geheim" not in done.stdout + done.stderr
    assert "verborgen" not in done.stdout + done.stderr


def _token(ends_at: int) -> str:
    claims = base64.urlsafe_b64encode(json.dumps({"exp": ends_at}).encode()).decode().rstrip("=")
    return f"e30.{claims}.c2ln"


def test_the_token_that_the_url_names_is_found_and_its_end_is_told(desk: Desk, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(_token(int(time.time()) + 7200))
    words = ("cms+mem://host/dir", "--plugin", str(desk.foreign), "--json")
    for more, options in (({"BEARER_TOKEN_FILE": str(token)}, ()), ({}, ("--token", str(token)))):
        _, found = desk.json(*words, *options, **more)
        assert (found["credential"], found["credential_source"]) == ("the token of cms", str(token))
        assert 7100 < found["credential_expires_at"] - time.time() <= 7200
    _, found = desk.json(*words, BEARER_TOKEN=_token(1))
    assert found["credential_source"] == "BEARER_TOKEN"
    missing = desk.run(*words[:3], XDG_RUNTIME_DIR=str(tmp_path), BEARER_TOKEN_FILE=str(tmp_path / "none"))
    assert missing.returncode == 1
    assert "--token FILE" in missing.stderr
    assert "Errno" not in missing.stderr


def test_a_proxy_that_cannot_be_used_is_left_out(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "no_proxy").write_text("garbage")
    for name in ("none", "no_proxy"):
        path = str(tmp_path / name)
        done = desk.run("mem://host/dir", "--plugin", str(desk.foreign), X509_USER_PROXY=path)
        assert (done.returncode, "no credential" in done.stdout) == (0, True)
        assert "the X.509 proxy is left out" in done.stderr and path in done.stderr


def test_a_scheme_without_a_plugin_and_words_that_are_no_url(desk: Desk) -> None:
    unknown = desk.run("nosuch://host/dir", "--plugin", str(desk.foreign))
    assert unknown.returncode == 1
    assert "no transfer plugin moves nosuch:// URLs (plugins: mem_plugin)" in unknown.stderr
    assert desk.run("/just/a/path", "--plugin", str(desk.foreign)).returncode == 64


def test_a_fragment_is_refused_and_the_file_before_it_stays(desk: Desk, curl: str) -> None:
    kept = desk.place / "data.root"
    kept.write_text("kept")
    done = desk.run(f"file://{kept}#events", "--plugin", curl)
    assert (done.returncode, kept.read_text()) == (64, "kept")
    assert "write %23 for #" in done.stderr


def test_names_are_new_and_a_query_stays_at_the_end() -> None:
    names = {probe_url("https://h/d/?sig=1") for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith("https://h/d/stageout-check-") and name.endswith("?sig=1") for name in names)
