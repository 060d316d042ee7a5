"""docs/overlay/three-sites-https.md: its commands connect three sites by HTTPS, and custody outlives the archive."""

from __future__ import annotations

import re
from pathlib import Path

from tests.harness.ports import free_ports
from tests.overlay.test_first_overlay import ROOT, programs, run

_PORTS = ("9641", "9642", "9643")

__all__ = ["programs"]


def test_the_commands_shown_connect_three_sites(tmp_path: Path, programs: str) -> None:
    page = (ROOT / "docs/overlay/three-sites-https.md").read_text()
    ports = {shown: str(free) for shown, free in zip(_PORTS, free_ports(len(_PORTS)))}
    script = "".join(str(block) for block in re.findall(r"^```\n(.*?)^```$", page, re.S | re.M))
    said = run(re.sub("|".join(_PORTS), lambda found: ports[found[0]], script), tmp_path, programs)
    failed = [line for line in said.splitlines() if line.startswith("FAILED: ") and "wait" not in line]
    logs = {site: (tmp_path / "sites" / site / "log").read_text() for site in ("archive", "custodian", "relay")}
    assert not failed, (said, logs)
    assert "custody at 127.0.0.2" in said
    content = (tmp_path / "sites/results.tar").read_bytes()
    for name in ("direct", "relayed", "delivered", "kept"):
        assert (tmp_path / f"sites/archive/files/vo/alice/{name}.tar").read_bytes() == content
