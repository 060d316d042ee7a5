"""The doctor beside a real web page: tokens that are open, a port that is another daemon's, a program that is slow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.pool import Node
from tests.harness.pool.install import find_checkout, fragments
from tests.harness.pool.waiting import wait_until
from tests.harness.ports import free_ports
from tests.pool.conftest import QUICK_AP, QUICK_EP, VERSION

pytestmark = pytest.mark.pool

_TOKEN = "reader-token-0123456789"


@pytest.fixture(scope="module")
def web_ap(stageout_pools: Any) -> Iterator[tuple[Node, int]]:
    """An access point with the page, and the port of the page."""
    [fragment] = [path for path in fragments(find_checkout(), "web") if "-web" in path.stem]
    (port,) = free_ports(1)
    ap_config = f"{QUICK_AP}\nSTAGEOUT_BIN = /opt/stageout/bin\nSTAGEOUT_WEB_PORT = {port}\n{fragment.read_text()}"
    with stageout_pools(version=VERSION, execute_points=1, ap_config=ap_config, ep_config=QUICK_EP) as pool:
        yield pool.ap, port


def doctor(ap: Node) -> dict[str, tuple[str, str]]:
    """Return level and text of each check, the worst finding of a name."""
    command = ["/opt/stageout/bin/stageout", "doctor", "--role", "ap", "--json"]
    checks = json.loads(ap.run(command, user="root", cwd="/", check=False, timeout_s=180).stdout)["checks"]
    order = ("fail", "warn", "unchecked", "ok")
    checks.sort(key=lambda item: order.index(item["level"]), reverse=True)
    return {item["name"]: (item["level"], item["text"]) for item in checks}


def until(ap: Node, name: str, level: str, words: str) -> None:
    """Ask again until a check has this level and says so."""

    def look() -> bool:
        found = doctor(ap)[name]
        return found[0] == level and words in found[1]

    wait_until(look, timeout_s=90, what=f"{name} to be {level}: {words}", describe=lambda: str(doctor(ap)[name]))
    print(name, *doctor(ap)[name], sep=" | ")


def test_the_doctor_sees_what_is_wrong_with_the_page(web_ap: tuple[Node, int]) -> None:
    ap, port = web_ap
    until(ap, "web-page", "ok", "")
    until(ap, "ports", "ok", f"STAGEOUT_WEB_PORT {port}")
    until(ap, "versions", "ok", "stageout ")

    tokens = ap.home / "web.tokens"
    ap.run(["sh", "-c", f"umask 022; echo 'ops {_TOKEN}' > {tokens}"])
    ap.configure(f"STAGEOUT_WEB_TOKENS = {tokens}\n")
    until(ap, "web-page", "fail", "is open to all users: chmod o= it")
    ap.run(["chmod", "600", str(tokens)])
    until(ap, "web-page", "fail", f"as whom the page runs, cannot read {tokens}")
    ap.run(["chown", "condor", str(tokens)])
    until(ap, "web-page", "ok", "")

    ap.configure(f"STAGEOUT_AGENT_METRICS_PORT = {port}\n")
    until(ap, "ports", "fail", f"STAGEOUT_AGENT_METRICS_PORT and STAGEOUT_WEB_PORT are both {port}")
    ap.configure("STAGEOUT_WEB_HOST = 0.0.0.0\n")
    until(ap, "web-page", "fail", "tokens would be sent in clear")
    ap.configure("")
    ap.run(["condor_off", "-daemon", "STAGEOUT_WEB"])
    until(ap, "web-page", "fail", "nothing answers at")


def test_a_program_that_is_slow_is_unchecked(web_ap: tuple[Node, int]) -> None:
    ap, _ = web_ap
    slow = ap.home / "stageout-schedd-agent"
    ap.run(["sh", "-c", f"printf '#!/bin/sh\\nsleep 25\\n' > {slow}; chmod 755 {slow}"])
    names = [word for word in ap.config_val("DAEMON_LIST").replace(",", " ").split() if "AGENT" in word]
    ap.configure(f"{names[0]} = {slow}\n")
    until(ap, "agent-daemon", "unchecked", "has not ended within 20 s")
    ap.configure("")
