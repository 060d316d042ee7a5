"""``<SCHEME>_TEST_URL`` of HTCondor: ``condor_starter -classad``, for which every job waits, tries the URL out."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytestmark = pytest.mark.pool

_TRY_S = 5.0
_MORE_S = 5.0  # the starter's own start varies with the load of the machine
_PORT = 8123
_MUTE = f"""
import socket, time
with socket.create_server(("127.0.0.1", {_PORT})):
    print("listens", flush=True)
    time.sleep(600)
"""


@contextmanager
def _mute_server(node: Any) -> Iterator[None]:
    """A server on the node that takes connections and never says a word."""
    command, env = node.command(["python3", "-c", _MUTE])
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, start_new_session=True) as server:
        assert server.stdout is not None and server.stdout.readline().strip() == b"listens"
        try:
            yield
        finally:
            server.send_signal(signal.SIGKILL)


def _asked(node: Any) -> tuple[float, str]:
    """Seconds of ``condor_starter -classad``, and what it printed."""
    starter = node.config_val("STARTER")
    start_s = time.monotonic()
    done = node.run([starter, "-classad"], timeout_s=180)
    return time.monotonic() - start_s, done.stdout


@pytest.mark.parametrize("version", ["25.14", "23.9"])
def test_a_url_that_does_not_work_costs_one_try(stageout_pools: Any, version: str) -> None:
    """The starter lets each plugin of a scheme try. HTCondor's own one waits for 30 s, so ours stands alone."""
    with stageout_pools(version=version, execute_points=1) as pool:
        node = pool.eps[0]
        every = node.config_val("FILETRANSFER_PLUGINS").replace(",", " ").split()
        (ours,) = (path for path in every if path.endswith("stageout_curl_plugin"))
        _configure(node, ours)
        plain_s, plain = _asked(node)
        assert {"http", "https", "dav"} <= _methods(plain)
        with _mute_server(node):
            for place, least_s in (("no-such-host.invalid", 0.0), (f"127.0.0.1:{_PORT}", _TRY_S)):
                _configure(node, ours, f"http://{place}/file")
                tried_s, tried = _asked(node)
                print(f"HTCondor {version}: {plain_s:.1f} s without a test URL, {tried_s:.1f} s with one at {place}")
                assert {"https", "dav"} <= _methods(tried)
                assert "http" not in _methods(tried), "the URL was not tried"
                assert least_s <= tried_s < plain_s + _TRY_S + _MORE_S


def _configure(node: Any, plugin: str, url: str = "") -> None:
    node.configure(f"FILETRANSFER_PLUGINS = {plugin}\nHTTP_TEST_URL = {url}\n", reconfig=False)


def _methods(text: str) -> set[str]:
    line = next(line for line in text.splitlines() if line.startswith("HasFileTransferPluginMethods"))
    return set(line.partition('"')[2].rstrip('"').split(","))
