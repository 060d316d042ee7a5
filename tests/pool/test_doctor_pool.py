"""The doctor on an execute point that refuses hand-offs: exit status and message, while it is so and after the mend."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stageout.core.signing import SigningKey
from tests.harness.pool import PILOT, Node
from tests.harness.pool.waiting import wait_until
from tests.pool.conftest import QUICK_AP, QUICK_EP

pytestmark = pytest.mark.pool

#: Well above the time between two notices of the agent and two looks of the manager: silence means a stopped agent.
_FRESH_S = 30


def doctor(ep: Node, user: str = "root") -> tuple[int, dict[str, tuple[str, str]]]:
    """Exit status, and what stands first of each check: the worst level."""
    done = ep.run(["/opt/stageout/bin/stageout", "doctor", "--json"], user=user, cwd="/", check=False)
    order = ("fail", "warn", "unchecked", "ok")
    checks = sorted(json.loads(done.stdout)["checks"], key=lambda item: order.index(item["level"]), reverse=True)
    return done.returncode, {item["name"]: (item["level"], item["text"]) for item in checks}


def until(ep: Node, name: str, level: str, user: str = "root") -> tuple[int, str]:
    """Ask again until a check has this level; exit status and text."""

    def look() -> tuple[int, str] | None:
        status, checks = doctor(ep, user)
        return (status, checks[name][1]) if checks[name][0] == level else None

    found = wait_until(
        look, timeout_s=60, what=f"{name} to be {level}", describe=lambda: str(doctor(ep, user)[1][name])
    )
    assert found
    print(found)
    return found


def check_clean(ep: Node) -> None:
    """The probe has left nothing."""
    for place in ("stageout/intake", "stageout/sandboxes"):
        assert list((ep.home / place).iterdir()) == []
    assert list((ep.home / "execute").glob("stageout-doctor-*")) == []


@pytest.fixture
def ep(site: Any) -> Iterator[Node]:
    found: Node = site.pool.eps[0]
    yield found
    found.configure("")


def test_a_probe_goes_all_the_way_and_leaves_nothing(site: Any, ep: Node) -> None:
    status, text = until(ep, "handoff", "ok")
    assert "a probe for ap went through" in text
    assert status == 0
    check_clean(ep)


def test_a_wrong_key_on_the_node_is_an_error_until_it_is_mended(site: Any, ep: Node) -> None:
    ep.configure(f"STAGEOUT_AGENT_KEYS = ap={SigningKey(b'w' * 32).public}\nSTAGEOUT_AGENT_TIMEOUT = {_FRESH_S}\n")
    status, text = until(ep, "agent-keys", "fail")
    assert status == 1 and "another key than the agent of ap" in text
    status, text = until(ep, "handoff", "fail")
    assert status == 1 and "no stageout agent of schedd ap was heard of lately" in text
    ep.configure("")
    assert until(ep, "handoff", "ok")[0] == 0
    assert doctor(ep)[1]["agent-keys"][0] != "fail"
    assert doctor(ep)[1]["refused-orders"][0] == "ok"


def test_a_stopped_agent_is_seen_on_the_node_with_what_it_refused(site: Any, ep: Node) -> None:
    for node in site.pool.eps:
        node.configure(f"STAGEOUT_AGENT_TIMEOUT = {_FRESH_S}\n")
    ep.kill("sandbox-manager")  # it counts the hand-offs of an hour, also those of other tests
    until(ep, "handoff", "ok")
    (agent,) = site.pool.ap.pids("schedd-agent")
    os.kill(agent, signal.SIGSTOP)
    try:
        status, text = until(ep, "handoff", "fail")
        assert status == 1 and "output of jobs of ap is not taken over: no stageout agent" in text
        machine = next(ad["Machine"] for ad in site.pool.startd_ads() if ep.name in ad["Machine"])
        job = site.submit(outputs=("out1",), extra=f'requirements = Machine == "{machine}"')
        site.wait_left(job, timeout_s=120)
        _, text = until(ep, "handoffs-lately", "warn")
        assert "1 times: no stageout agent of schedd ap was heard of lately" in text
    finally:
        os.kill(agent, signal.SIGCONT)
        for node in site.pool.eps:
            node.configure("")
    assert until(ep, "handoff", "ok")[0] == 0


def test_an_installation_that_jobs_cannot_run_is_an_error(site: Any, ep: Node) -> None:
    """As after an installation with umask 077."""
    ep.run(["sh", "-c", "umask 077; mkdir -p /root/bin; cp -P /opt/stageout/bin/* /root/bin/"], user="root", cwd="/")
    ep.configure(
        "STAGEOUT_BIN = /root/bin\nFILETRANSFER_PLUGINS = /root/bin/stageout_curl_plugin\n"
        "SANDBOX_MANAGER = /root/bin/stageout-sandbox-manager\n"
        "STARTD_CRON_STAGEOUT_EXECUTABLE = /root/bin/stageout-startd-cron\n"
    )
    for name in ("plugins-for-jobs", "manager-daemon", "startd-cron"):
        status, text = until(ep, name, "fail")
        assert status == 1 and "Permission denied" in text
    ep.configure("")
    assert until(ep, "plugins-for-jobs", "ok")[0] == 0


def test_a_pilot_probes_as_its_own_user(stageout_pools: Any) -> None:
    fragment = (Path(__file__).resolve().parents[2] / "condor_config.d" / "20-stageout-ep.conf").read_text()
    pilot = dataclasses.replace(PILOT, config=f"{fragment}\n{QUICK_EP}")
    with stageout_pools(version="25.14", execute_points=[pilot], ap_config=QUICK_AP) as pool:
        (ep,) = pool.eps
        _, text = until(ep, "handoff", "ok", user=ep.spec.user)
        assert "a probe for ap went through" in text
        check_clean(ep)
