"""Tokens of jobs whose output is delivered after their end: taken over, used, renewed, and gone."""

from __future__ import annotations

import base64
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness.destination import Destination
from tests.harness.pool.image import find_image, image_account
from tests.harness.pool.pytest_plugin import keep_logs
from tests.pool.conftest import Site, open_directory, pool_settings, wait_until_acquainted

pytestmark = pytest.mark.pool


def jwt(who: str, ends_in_s: float) -> str:
    """A token that says whose it is and when it ends."""
    claims = {"sub": who, "exp": int(time.time() + ends_in_s), "jti": os.urandom(8).hex()}
    text = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"eyJhbGciOiJub25lIn0.{text}.{os.urandom(12).hex()}"


class Credmon:
    """SEC_CREDENTIAL_DIRECTORY_OAUTH, filled by hand as a credmon does it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._condor = image_account(find_image("25.14"), "condor")
        directory.mkdir()
        os.chown(directory, 0, self._condor[1])
        directory.chmod(0o2770)
        self.given: list[str] = []

    def put(self, user: str, token: str, service: str = "team") -> None:
        """A fresh token of a user."""
        place = self.directory / user
        place.mkdir(exist_ok=True)
        os.chown(place, *self._condor)
        place.chmod(0o2750)
        aside = place / f"{service}.new"
        aside.write_text(json.dumps({"access_token": token, "expires_in": 600}))
        aside.chmod(0o600)  # root's, as HTCondor wants it
        aside.rename(place / f"{service}.use")
        (place / f"{service}.top").write_text("refresh")
        self.given.append(token)


@pytest.fixture(scope="module")
def setting(stageout_pools: Any) -> Iterator[tuple[Any, Credmon]]:
    """A pool with a directory of credentials."""
    with open_directory("tokens") as shared:
        credmon = Credmon(shared / "oauth")
        options = pool_settings(shared)
        options["ap_config"] += (
            f"SEC_CREDENTIAL_DIRECTORY_OAUTH = {credmon.directory}\n"
            f"STAGEOUT_CREDENTIAL_PORT = {free_port()}\nSCHEDD_AGENT_USERID =\n"
        )
        options["ep_config"] += "STAGEOUT_URGENT_WINDOW = 120\n"
        with stageout_pools(version="25.14", execute_points=1, cpus=4, binds=(shared,), **options) as pool:
            yield pool, credmon


@pytest.fixture
def site(setting: Any, destination: Destination, request: pytest.FixtureRequest) -> Iterator[Site]:
    pool, _ = setting
    made = Site(pool, destination, request.node.name.replace("_", "-")[:40], Path("/nonexistent"))
    wait_until_acquainted(pool)
    yield made
    destination.resume()
    destination.accept()
    keep_logs(request, [pool])
    for job in made.jobs:
        if pool.q(job, ["JobStatus"]) is not None:
            pool.rm(job)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def holding(places: Sequence[Path], secrets: Sequence[str]) -> list[str]:
    """Files below these directories in which a secret stands."""
    return [
        str(path)
        for place in places
        for path in place.rglob("*")
        if path.is_file() and not path.is_symlink()
        for content in [path.read_bytes()]
        if any(secret.encode() in content for secret in secrets)
    ]


def check_private(site: Site, tokens: dict[str, str]) -> None:
    """No user finds the token of another one anywhere on the execute point."""
    (ep,) = site.pool.eps
    for user in tokens:
        others = "|".join(token for name, token in tokens.items() if name != user)
        found = ep.run(["grep", "-rlE", others, str(ep.home)], user=user, check=False)
        assert found.stdout == "" and found.returncode in (1, 2), f"{user} can read {found.stdout}"


def submit(site: Site, user: str) -> Any:
    """A job that delivers with the token of "team"."""
    address = site.url().replace("http://", "team+http://") + "/$(Cluster).$(Process)"
    return site.submit(user, destination=address, extra='MY.OAuthServicesNeeded = "team"')


def test_output_goes_out_with_the_owners_token(site: Site, setting: Any) -> None:
    pool, credmon = setting
    tokens = {user: jwt(user, 600) for user in ("alice", "bob")}
    for user, token in tokens.items():
        credmon.put(user, token)
    site.destination.require(list(tokens.values()))
    site.destination.pause()
    jobs = {user: submit(site, user) for user in tokens}
    for job in jobs.values():
        pool.wait_status(job, "Completed", timeout_s=60)
        site.wait_state(job, "Moving")
    (ep,) = pool.eps
    held = holding([ep.home / "stageout" / "sandboxes"], list(tokens.values()))
    assert len(held) == 2
    check_private(site, tokens)
    site.destination.resume()
    for job in jobs.values():
        history = site.wait_left(job)
        assert history["TransferOutputStats"]["STAGEOUTFilesCountLastRun"] == 2
        site.check_delivered(job)
    pool.wait(site.spool_is_empty, timeout_s=30, what="the spool to be empty")
    assert holding([ep.home, pool.ap.home], list(tokens.values())) == []


def test_a_token_that_ends_while_the_destination_is_down_is_renewed(site: Site, setting: Any) -> None:
    pool, credmon = setting
    old, new, others = jwt("alice", 20), jwt("alice", 600), jwt("bob", 600)
    credmon.put("alice", old)
    credmon.put("bob", others)
    site.destination.require([new, others])
    site.destination.stop()
    try:
        job, other = submit(site, "alice"), submit(site, "bob")
        for item in (job, other):
            pool.wait_status(item, "Completed", timeout_s=60)
        pool.wait(
            lambda: "no newer one on the access point" in (pool.q(job) or {}).get("StageOutReason", ""),
            timeout_s=120,
            what="the job to say what it needs, and why there is none",
        )
        check_private(site, {"alice": old, "bob": others})
    finally:
        site.destination.start()
    reason = pool.q(job)["StageOutReason"]
    assert reason.startswith("needs credential: the token of team ended at 20")
    assert "needs credential" in site.stageout("status", str(job)).stdout
    site.wait_left(other)
    assert site.state(job) == "RetryWait"
    credmon.put("alice", new)
    history = site.wait_left(job, timeout_s=90)
    assert history["StageOutState"] == "Delivered"
    for item in (job, other):
        site.check_delivered(item)
    pool.wait(site.spool_is_empty, timeout_s=30, what="the spool to be empty")
    (ep,) = pool.eps
    assert holding([ep.home, pool.ap.home], [old, new, others]) == []
    assert ep.log("SandboxManagerLog").count("credential-renewed") == 1


def test_the_agent_is_not_root_though_it_reads_what_is_roots(setting: Any) -> None:
    pool, _ = setting
    parents = {}
    for pid in pool.ap.pids("schedd-agent"):
        facts = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
        parents[pid] = (int(facts["PPid"]), set(facts["Uid"].split()))
    agents = [pid for pid, (parent, _) in parents.items() if parent not in parents]
    assert len(parents) == 2 and len(agents) == 1, parents
    assert "0" not in parents.pop(agents[0])[1]
    assert parents.popitem()[1] == (agents[0], {"0"})
