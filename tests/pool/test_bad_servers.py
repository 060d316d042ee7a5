"""Servers that never answer, or that want a credential which nobody has: only their own output is concerned."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.pool.conftest import QUICK_AP, QUICK_EP, Site, wait_until_acquainted

pytestmark = pytest.mark.pool

#: Longer than a job takes from its submission to its delivery, shorter than a test.
_PATIENCE = 'SANDBOX_MANAGER_ENVIRONMENT = "STAGEOUT_RESPONSE_TIMEOUT_S=60"\n'
_QUICK_S = 45.0


@pytest.fixture(scope="module")
def narrow(stageout_pools: Any, destination: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A pool with one CPU slot, and so with one data slot."""
    with stageout_pools(
        version="25.14", execute_points=1, cpus=1, ap_config=QUICK_AP, ep_config=QUICK_EP + _PATIENCE
    ) as pool:
        wait_until_acquainted(pool)
        yield Site(pool, destination, "narrow", tmp_path_factory.mktemp("no-gates"))


@contextmanager
def _silent_server() -> Iterator[str]:
    """Takes every connection, reads nothing, says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


class _Unauthorized(BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *words: Any) -> None:
        return None


def test_a_server_that_never_answers_holds_up_only_its_own_output(narrow: Site) -> None:
    with _silent_server() as silent:
        stuck = [narrow.submit(outputs=("out1",), env="SIZE=4", destination=f"{silent}/0")]
        narrow.wait_state(stuck[0], "Moving")
        healthy = narrow.submit(outputs=("out1",), env="SIZE=4")
        since_s = time.monotonic()
        history = narrow.wait_left(healthy)
        print(f"delivered {time.monotonic() - since_s:.1f} s after its submission")
        assert history["StageOutState"] == "Delivered"
        assert narrow.state(stuck[0]) == "Moving", "nothing was shown: the first had given up"
        narrow.check_delivered(healthy)
        shown = narrow.stageout("status", str(stuck[0])).stdout
        assert re.search(r"reason +sending to 127\.0\.0\.1:\d+ for \S+, nothing confirmed yet", shown), shown
        (node,) = narrow.pool.eps
        narrow.pool.wait(
            lambda: "breaker-opened" in node.log("SandboxManagerLog"),
            timeout_s=120, what="the breaker of the silent server to open",
        )  # fmt: skip
        for number in range(1, 6):  # more than the data slot's places, and quicker than their agent confirms
            stuck.append(narrow.submit(outputs=("out1",), env="SIZE=4", destination=f"{silent}/{number}"))
        for job in stuck:
            narrow.pool.wait(lambda job=job: narrow.state(job) not in ("", "Offered"), timeout_s=60, what="a hand-off")
        narrow.pool.wait(
            lambda: "waiting for the server" in narrow.stageout("status", str(stuck[-1])).stdout,
            timeout_s=60, what="output that waits for the server",
        )  # fmt: skip
        assert "handoff-refused" not in node.log("SandboxManagerLog")
        last = narrow.submit(outputs=("out1",), env="SIZE=4")
        assert narrow.wait_left(last)["StageOutState"] == "Delivered"
        for job in stuck:
            narrow.pool.rm(job)
        narrow.pool.wait(narrow.spool_is_empty, timeout_s=120, what="the removed output to give back its places")


def test_a_401_without_a_credential_holds_the_job_in_seconds(narrow: Site) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Unauthorized)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        job = narrow.submit(outputs=("out1",), env="SIZE=4", destination=f"http://127.0.0.1:{server.server_port}/x")
        since_s = time.monotonic()
        narrow.pool.wait_status(job, "Held", timeout_s=_QUICK_S)
        print(f"held {time.monotonic() - since_s:.1f} s after its submission")
        ad = narrow.pool.q(job, ["HoldReason", "StageOutState"])
        assert ad["StageOutState"] == "Failed"
        assert "401" in ad["HoldReason"]
        narrow.pool.rm(job)
    finally:
        server.shutdown()
        server.server_close()
