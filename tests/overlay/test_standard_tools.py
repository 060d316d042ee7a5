"""docs/overlay/standard-tools.md: a router sends standard tools to this page, and its commands work."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from stageout.testing.starter import installed
from tests.harness.ports import free_ports
from tests.harness.router import RouterProcess, relay

_ROOT = Path(__file__).resolve().parents[2]
_PROGRAMS = {"stageout": "stageout.cli.main", "stageout-router": "overlay_router.daemon"}
_PORT = "9631"
_PATIENCE_S = 150
_DOC = "docs/overlay/standard-tools.md"


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    """With a certificate, and without TLS_ONLY."""
    home = tmp_path_factory.mktemp("router")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(home / "ca.pem"))
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(home / "cert.pem"))
    with RouterProcess(home, {"STAGEOUT_ROUTER_CERT": str(home / "cert.pem")}) as running:
        yield running


def _curl(*options: str) -> str:
    """Return the output of curl: status and body."""
    command = ["curl", "--silent", "--show-error", "--max-time", "5", "--write-out", "%{http_code} ", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _is_told(answer: str, status: str = "400") -> None:
    assert status in answer
    assert "stageout router" in answer and _DOC in answer, answer
    assert (_ROOT / _DOC).is_file()


def test_curl_without_tls_is_told_what_this_port_is(router: RouterProcess, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(bytes(3 << 20))
    url = f"http://{router.address}/alice/f"
    for options in ([], ["--request", "PROPFIND"], ["--upload-file", str(large)]):
        _is_told(_curl(*options, url))
    assert _curl("--cacert", str(router.home / "ca.pem"), f"https://{router.address}/alice/f").startswith("{")
    assert list(router.root.glob("alice*")) == []


def test_the_shortest_request_is_answered_at_once(router: RouterProcess) -> None:
    with socket.create_connection(("127.0.0.1", router.port), timeout=5) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b"".join(iter(lambda: sock.recv(65536), b"")).decode()
    head, body = answer.split("\r\n\r\n")
    _is_told(answer)
    assert body.count(".") - body.count(_DOC) == 1, "one sentence"
    assert f"Content-Length: {len(body)}" in head


def test_a_relay_says_the_same(router: RouterProcess, tmp_path: Path) -> None:
    with relay(tmp_path / "relay", [router]) as between:
        _is_told(_curl(f"http://{between.address}/"))


def _script() -> str:
    """Return the commands of the page, with a free port."""
    (free,) = free_ports(1)
    return "".join(re.findall(r"^```\n(.*?)^```$", (_ROOT / _DOC).read_text(), re.S | re.M)).replace(_PORT, str(free))


def _programs(folder: Path) -> Path:
    """A directory with the commands that the page calls, as an installation has them."""
    folder.mkdir()
    for name, module in _PROGRAMS.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (folder / name).chmod(0o755)
    installed(_ROOT / "plugins" / "stageout_curl_plugin", folder)
    return folder


def _run(script: str, folder: Path) -> str:
    """Return the output of the commands, with a line for each that fails. Processes that they leave running are
    killed."""
    path = f"{_programs(folder / 'bin')}:{os.environ['PATH']}"
    started = subprocess.Popen(
        ["bash", "-c", f"trap 'echo \"FAILED: $BASH_COMMAND\"' ERR\n{script}"],
        cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(_ROOT)},
    )  # fmt: skip
    try:
        return started.communicate(timeout=_PATIENCE_S)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def test_the_commands_of_the_page_work(tmp_path: Path) -> None:
    said = _run(_script(), tmp_path)
    assert "FAILED: " not in said, said
    tools = tmp_path / "tools"
    content = (tools / "results.tar").read_bytes()
    for name in ("files/run7/results.tar", "whole.tar", "part.tar", "copy/results.tar"):
        assert (tools / name).read_bytes() == content
    assert '"name": "run7/results.tar", "kind": "file", "size": 5242880' in (tools / "list.json").read_text()
    assert f"adler32={zlib.adler32(content):08x}" in said
