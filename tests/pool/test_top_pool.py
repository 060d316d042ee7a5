"""``stageout top`` on a real pool: once without a terminal, live on one."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess

import pytest

from stageout.core.sockets import readable
from tests.polling import wait_for
from tests.pool.conftest import Site

pytestmark = pytest.mark.pool


def test_waiting_output_is_shown_by_cluster_and_server(site: Site) -> None:
    site.destination.refuse("later", 503)
    try:
        job = site.submit()
        site.wait_state(job, "RetryWait")
        (group,) = json.loads(site.stageout("top", "--json").stdout)["groups"]
        text = site.stageout("top").stdout
    finally:
        site.destination.accept()
    host = site.url().split("/")[2]
    assert (group["cluster"], group["server"], group["files_left"]) == (job.cluster, host, 2)
    assert group["waiting"] + group["retry"] + group["moving"] == 1  # by the moment: it is tried again and again
    assert text.startswith("1 job in 1 cluster; 2 files")
    assert host in text
    site.wait_left(job)
    assert json.loads(site.stageout("top", "--json").stdout)["groups"] == []


def test_a_terminal_is_redrawn(site: Site) -> None:
    argv, env = site.pool.ap.command(["/opt/stageout/bin/stageout", "top", "-d", "2"], user="alice")
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        argv, env={**env, "TERM": "xterm"}, stdin=follower, stdout=follower, stderr=follower, start_new_session=True
    )
    os.close(follower)
    seen = bytearray()

    def redrawn() -> bool:
        if readable([leader], 0.2):
            seen.extend(os.read(leader, 65536))
        return seen.count(b"\x1b[J") >= 2

    wait_for(redrawn, "two redraws")
    assert seen.count(b"still to deliver") >= 3
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
    os.close(leader)
