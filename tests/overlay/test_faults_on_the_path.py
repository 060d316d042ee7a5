"""Faults 9 and 14: what somebody on the path, or a relay, can do and learns. On both protocols where they differ."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from tests.harness.router import RouterProcess, relay
from tests.overlay.between import Between
from tests.overlay.forging import Forger
from tests.overlay.http_site import NAME, Site, site

_CONTENT = os.urandom(2 * 1024 * 1024)
_OLD = "protocol of frames: without TLS, somebody on the path replaces bytes, and put reports success"
_SECRETS = "protocol of frames: relays have the secrets of their senders, and can act for them"


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path / "terminal") as found:
        yield found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(_CONTENT)
    return path


def _command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stageout.cli.main", *words], capture_output=True, text=True, check=False
    )


@pytest.mark.xfail(strict=True, reason=_OLD)
def test_bytes_that_are_replaced_on_the_path_are_not_stored_by_frames(here: Site, source: Path) -> None:
    victim = here.root / "victim"
    victim.write_bytes(b"kept")
    with Forger(here.router.port, bytes(len(_CONTENT)), victim.name) as man:
        url, key = f"overlay://127.0.0.1:{man.port}/f", str(here.router.key_file("site"))
        _command("put", "--key", key, "--connections", "1", str(source), url)
    assert not (here.root / "f").exists() or (here.root / "f").read_bytes() == _CONTENT


def test_bytes_that_are_replaced_on_the_path_are_not_stored(here: Site, source: Path) -> None:
    """Fault 9: the client hears that it failed, and nothing is under the name."""
    with Between(here.router.port, flips=1) as man:
        to = ("--connect-to", f"localhost:{here.router.port}:127.0.0.1:{man.port}")
        token = here.token()
        status, text = here.curl("/f", *to, "--upload-file", str(source), token=token)
        assert man.flipped == 1 and status != 201, text
        assert not (here.root / "f").exists()
        assert here.curl("/f", *to, "--upload-file", str(source), token=token)[0] == 201
    assert (here.root / "f").read_bytes() == _CONTENT
    assert _CONTENT[:64] not in man.heard and token.encode() not in man.heard


def test_a_router_takes_nothing_in_plain_http(here: Site, source: Path) -> None:
    """Fault 9: whatever the request, and whoever's token: the answer is a sentence."""
    for method in ("GET", "PUT", "DELETE", "MKCOL", "MOVE", "COPY", "PROPFIND", "OPTIONS"):
        headers = {"Authorization": f"Bearer {here.token()}", "Destination": "/g", "Depth": "0"}
        data = _CONTENT[:100] if method == "PUT" else b""
        url = f"http://127.0.0.1:{here.router.port}/f"
        answer = requests.request(method, url, data=data, headers=headers, timeout=30)
        assert answer.status_code == 400 and "https://" in answer.text, method
    assert [path.name for path in here.root.iterdir()] == [".stageout"]


def _kept_by(router: RouterProcess) -> bytes:
    """All that a router has on its disk."""
    return b"".join(path.read_bytes() for path in sorted(router.home.rglob("*")) if path.is_file())


@pytest.mark.xfail(strict=True, reason=_SECRETS)
def test_a_relay_has_no_secret_of_its_senders_by_frames(here: Site, source: Path, tmp_path: Path) -> None:
    """Fault 14. The sender's own key file is elsewhere."""
    with relay(tmp_path / "relay", [here.router]) as between:
        for name in ("hop", "site", "small", "carrier"):
            (between.home / f"{name}.key").rename(tmp_path / f"{name}.key")
        key = str(tmp_path / "site.key")
        done = _command("put", "--key", key, "--routes", between.address, str(source),
                        f"overlay://{here.router.address}/f")  # fmt: skip
        assert done.returncode == 0, done.stderr
        secret = (tmp_path / "site.key").read_text().split()[1]
        kept = _kept_by(between)
    assert secret.encode() not in kept


def test_a_relay_has_no_secret_of_its_senders(here: Site, source: Path, tmp_path: Path) -> None:
    """Fault 14: neither key, nor token for the terminal, nor file. Its own token counts once."""
    (tmp_path / "relay").mkdir()
    settings = {
        "STAGEOUT_ROUTER_ROOT": "", "STAGEOUT_ROUTER_NEIGHBOURS": f"localhost:{here.router.port}",
        "STAGEOUT_ROUTER_KEY": str(tmp_path / "relay/hop.key"), "STAGEOUT_ROUTER_INTERVAL": "3600",
    }  # fmt: skip
    with site(tmp_path / "relay", settings, {"alice": "-"}) as between, Between(between.router.port) as spy:
        between.keys["alice"].store("token-key", tmp_path / "alice.key")
        to, key = f"localhost:{here.router.port}", str(tmp_path / "alice.key")
        made = _command("token", key, "--user", "alice", "--router", NAME, "--relay-to", to).stdout.strip()
        token, secret = here.token(), between.keys["alice"].private.encode()
        command = ["curl", "--silent", "--show-error", "--cacert", str(here.ca), "--upload-file", str(source),
                   "--proxy", f"http://127.0.0.1:{spy.port}", "--proxy-header", f"Proxy-Authorization: Bearer {made}",
                   "--header", f"Authorization: Bearer {token}", f"{here.url}/f"]  # fmt: skip
        subprocess.run(command, check=True)
        assert (here.root / "f").read_bytes() == _CONTENT
        heard, kept = bytes(spy.heard), _kept_by(between.router)
        found = re.search(rb"Proxy-Authorization: Bearer (\S+)", heard)
        assert found and found[1].decode() == made
        for place in (heard, kept):
            assert secret not in place and _CONTENT[:64] not in place and token.encode() not in place
            assert here.keys["alice"].private.encode() not in place
        again = subprocess.run([*command, "--max-time", "30"], capture_output=True, text=True, check=False)
        assert again.returncode and "407" in again.stderr
    assert here.curl("/f", token=made)[0] in (401, 403), "nor is it a token for the terminal"
