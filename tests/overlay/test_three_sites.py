"""docs/overlay/three-sites.md: its commands connect three sites with TLS and tokens."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.harness.ports import free_ports
from tests.overlay.test_first_overlay import ROOT, programs, run

_PORTS = ("9631", "9632", "9633")
#: HTCondor's command where there is no HTCondor: a token as HTCondor makes it, of the signing key in the folder.
_TOKEN_CREATE = f"""#!{sys.executable}
import json, sys, time
from base64 import urlsafe_b64encode
from stageout.overlay.wire import token

identity = sys.argv[sys.argv.index("-identity") + 1]
parts = ({{"alg": "HS256", "kid": "overlay"}}, {{"sub": identity, "iss": "pool.example.org", "iat": int(time.time()),
    "exp": int(time.time()) + int(sys.argv[sys.argv.index("-lifetime") + 1])}})
text = ".".join(urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
print(f"{{text}}.{{token.secret(token.MARK + text, 'overlay', open('overlay', 'rb').read()).decode()}}")
"""

__all__ = ["programs"]


def test_the_commands_shown_connect_three_sites(tmp_path: Path, programs: str) -> None:
    create = Path(programs) / "condor_token_create"
    create.write_text(_TOKEN_CREATE)
    create.chmod(0o755)
    page = (ROOT / "docs/overlay/three-sites.md").read_text()
    ports = {shown: str(free) for shown, free in zip(_PORTS, free_ports(len(_PORTS)))}
    script = "".join(str(block) for block in re.findall(r"^```\n(.*?)^```$", page, re.S | re.M))
    said = run(re.sub("|".join(_PORTS), lambda found: ports[found[0]], script), tmp_path, programs)
    failed = [line for line in said.splitlines() if line.startswith("FAILED: ")]
    assert not failed, said
    assert "what became of it: stageout ask" in said
    content = (tmp_path / "sites/results.tar").read_bytes()
    for name in ("direct", "relayed", "kept"):
        assert (tmp_path / f"sites/archive/files/vo/alice/{name}.tar").read_bytes() == content
    logs = {site: (tmp_path / "sites" / site / "log").read_text() for site in ("archive", "custodian", "relay")}
    assert "token:overlay:alice@pool.example.org" in logs["custodian"], logs["custodian"]
