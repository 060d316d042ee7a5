"""The credmon of examples/ against the emulated Auth: tokens that the plugin can use, and nothing more in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.globus.conftest import ROOT, Bench
from tests.harness.globus import MAPPED, TRANSFER

CLIENT, SCOPE = "c0ffee00-0000-4000-8000-000000000000", "urn:globus:auth:scope:transfer.api.globus.org:all"


class Credmon:
    """A running credmon over a credential directory."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self.folder = folder / "oauth"
        (self.folder / "alice").mkdir(parents=True)
        (folder / "secret").write_text("s3cret\n")
        knobs = {
            "SEC_CREDENTIAL_DIRECTORY_OAUTH": self.folder, "GLOBUS_CREDMON_CLIENT_ID": CLIENT,
            "GLOBUS_CREDMON_CLIENT_SECRET_FILE": folder / "secret", "GLOBUS_CREDMON_INTERVAL": "0.1",
            "GLOBUS_CREDMON_TOKEN_URL": f"{bench.globus.address}/v2/oauth2/token", "SEC_CREDENTIAL_SWEEP_DELAY": "1",
        }  # fmt: skip
        tool = folder / "bin" / "condor_config_val"
        tool.parent.mkdir()
        cases = "".join(f"{name}) echo '{value}';;\n" for name, value in knobs.items())
        tool.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}*) exit 1;;\nesac\n')
        tool.chmod(0o755)
        self.log = folder / "credmon.log"
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, ROOT / "examples" / "globus-credmon" / "globus_credmon"],
                env={"PATH": f"{tool.parent}:{os.defpath}"}, stdout=output, stderr=output,
            )  # fmt: skip

    def store(self, name: str = "globus", **document: Any) -> None:
        """As the credd does."""
        (self.folder / "alice" / f"{name}.top").write_text(json.dumps(document))

    def token(self, name: str = "globus") -> dict[str, Any] | None:
        """The token that a job would get."""
        path = self.folder / "alice" / f"{name}.use"
        return json.loads(path.read_text()) if path.exists() else None


@pytest.fixture
def credmon(bench: Bench, tmp_path: Path) -> Iterator[Credmon]:
    bench.globus.client(CLIENT, "s3cret")
    found = Credmon(bench, tmp_path)
    yield found
    found.process.terminate()
    assert found.process.wait(20) == 0


def test_client_credentials_make_a_token_that_moves_files(bench: Bench, credmon: Credmon) -> None:
    bench.globus.change(bench.archive.id, kind=MAPPED)
    consent = f"[*https://auth.globus.org/scopes/{bench.archive.id}/data_access]"
    credmon.store(scopes=SCOPE + consent)
    token = bench.until("a token", credmon.token)
    assert set(token) == {"access_token", "expires_in", "expires_at", "token_type", "resource_server", "scope"}
    assert token["resource_server"] == TRANSFER
    assert (credmon.folder / "alice" / "globus.use").stat().st_mode & 0o777 == 0o600
    bench.creds = credmon.folder / "alice"
    assert bench.upload({"a": b"x"}).succeeded
    assert bench.globus.tasks[0].owner == CLIENT


def test_a_refresh_token_stays_on_the_access_point(bench: Bench, credmon: Credmon) -> None:
    secret = bench.globus.refresh_token("alice", SCOPE)
    credmon.store(scopes=SCOPE, refresh_token=secret)
    token = bench.until("a token", credmon.token)
    assert secret not in json.dumps(token)
    assert bench.globus.world.tokens[token["access_token"]].user == "alice"


def test_a_token_is_renewed_at_half_of_its_life(bench: Bench, credmon: Credmon) -> None:
    credmon.store(scopes=SCOPE)
    first = bench.until("a token", credmon.token)
    path = credmon.folder / "alice" / "globus.use"
    path.write_text(json.dumps({**first, "expires_at": time.time() + 1}))
    os.utime(path, (time.time() - 100,) * 2)
    bench.until("another token", lambda: (credmon.token() or first)["access_token"] != first["access_token"])


def test_two_resource_servers_in_one_login_are_refused(bench: Bench, credmon: Credmon) -> None:
    credmon.store("globus_both", scopes=f"{SCOPE} https://auth.globus.org/scopes/{bench.archive.id}/https")
    bench.until("a word about it", lambda: "one handle for each" in credmon.log.read_text())
    assert credmon.token("globus_both") is None


def test_what_the_credd_has_marked_is_removed(bench: Bench, credmon: Credmon) -> None:
    credmon.store(scopes=SCOPE)
    bench.until("a token", credmon.token)
    (credmon.folder / "alice.mark").touch()
    bench.until("it to be gone", lambda: not (credmon.folder / "alice").exists())


def test_logins_that_cannot_be_used_are_said_in_the_log(bench: Bench, credmon: Credmon) -> None:
    (credmon.folder / "alice" / "globus.top").write_text("no json")
    bench.until("a word about it", lambda: "the login must be JSON" in credmon.log.read_text())
    credmon.store("globus_x", scopes=SCOPE, refresh_token="no such token")
    bench.until("what Auth said", lambda: "invalid_grant" in credmon.log.read_text())
