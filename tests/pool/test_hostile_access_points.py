"""A second access point whose users carry ids of the first one: its own name, the same name, another user domain.

Both schedds send jobs to the execute point of the first pool; the second one flocks there. The attackers are its users,
not its administrators.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from stageout.core.signing import SigningKey
from tests.harness.destination import Destination
from tests.harness.pool import Pool
from tests.harness.pool.pytest_plugin import keep_logs
from tests.pool.arena import Arena
from tests.pool.conftest import QUICK_AP, QUICK_EP, Site, open_directory
from tests.pool.hostile import NO_WALL, Attacker, submit_procs
from tests.pool.test_trust_pool import lines_of

pytestmark = pytest.mark.pool

_FORGERIES = ("GlobalJobId", "NumShadowStarts, newer", "JobStatus, completed", "StageOutRequest, redirect")
_KEY = SigningKey(b"2" * 32).public
#: The collector takes the other schedd's ads, and its managers hear the other agent.
_HOST = "TRUST_DOMAIN = first.test\nALLOW_ADVERTISE_SCHEDD = $(ALLOW_DAEMON), second@home.test\n"
_TRUSTED = "ALLOW_DAEMON_COLLECTOR = $(ALLOW_DAEMON), second@home.test\n"


@contextlib.contextmanager
def _first(pools: Any, destination: Destination, version: str, trusted: str) -> Iterator[Arena]:
    with open_directory("loot") as home, Destination(home) as loot:
        ep, ap = f"{QUICK_EP}STAGEOUT_DATA_SLOT_DEPTH = 100\n", f"{QUICK_AP}{NO_WALL}{trusted}"
        with pools(version=version, cpus=8, config=_HOST, ep_config=ep, ap_config=ap) as pool:
            yield Arena(Site(pool, destination, f"first-{version}-{time.monotonic_ns()}", home), loot)


@contextlib.contextmanager
def _second(pools: Any, first: Pool, prefix: str, more: str) -> Iterator[Pool]:
    """Run the other access point.

    :param prefix: of its name; "" gives both the same name. :param more: settings.
    """
    flocks = f"FLOCK_TO = 127.0.0.1:{first.port}\nSEC_TOKEN_DIRECTORY =\n{NO_WALL}{more}"
    with pools(version=first.version, execute_points=0, prefix=prefix, ap_config=f"{QUICK_AP}{flocks}") as pool:
        token = first.ap.run(["condor_token_create", "-identity", "second@home.test"]).stdout
        for user, place in (("root", pool.ap.home / "secrets/tokens.d"), ("condor", "~condor/.condor/tokens.d")):
            script = f"umask 077; mkdir -p {place} && cat > {place}/first"
            pool.ap.run(["sh", "-c", script], user=user, cwd="/", stdin=token)
        pool.ap.reconfig()
        yield pool


def _bring_key(pool: Pool) -> None:
    """Let jobs bring the key of their agent to the nodes, as the documentation recommends."""
    agent = ["/opt/stageout/bin/stageout-schedd-agent", "--key"]
    key = pool.ap.run(agent, user="condor", cwd="/").stdout.strip()
    pool.ap.configure(f"STAGEOUT_AGENT_KEY = {key}\n", name="96-key.conf")
    ask = ["condor_config_val", "-schedd", "STAGEOUT_AGENT_KEY"]
    pool.wait(lambda: pool.ap.run(ask, check=False).stdout.strip() == key, what="the schedd to know the key")


@pytest.mark.parametrize("version", ["25.14", "23.9"])
@pytest.mark.parametrize(("prefix", "user", "trusted", "more", "brings_key"), [
    ("far-", "bob", _TRUSTED, f"STAGEOUT_AGENT_KEY = {_KEY}\n", False),
    ("", "bob", "", f"STAGEOUT_AGENT_KEY = {_KEY}\n", True),
    ("", "bob", "", "", False),
    ("", "alice", "", "UID_DOMAIN = second.test\n", False),
], ids=["another name", "one name, another key", "one name", "one name, another user domain"])  # fmt: skip
def test_jobs_of_another_access_point_take_nothing_over(
    stageout_pools: Any, destination: Destination, request: pytest.FixtureRequest,
    version: str, prefix: str, user: str, trusted: str, more: str, brings_key: bool,
) -> None:  # fmt: skip
    """Where both have one name, the second one is not trusted to speak to the nodes, and comes later.

    A node that has learnt the key of a name from the first notice only would take the second one's key: schedds of one
    name need STAGEOUT_AGENT_KEY.
    """
    with _first(stageout_pools, destination, version, trusted) as arena:
        site = arena.site
        if brings_key:
            _bring_key(site.pool)
        destination.stop()
        try:
            # Second jobs of clusters: on a schedd of the same name the attacker's own ids are the same.
            victims = dict(zip(_FORGERIES, arena.victims(len(_FORGERIES), procs=2)))
            before, shown = arena.look(victims), arena.shown(victims)
            with _second(stageout_pools, site.pool, prefix, more) as pool:
                other = Site(pool, destination, f"second-{version}", site.gates)
                jobs = submit_procs(Attacker(other, arena.loot, user), victims)
                ids = [job for label in jobs for job in jobs[label] if not label.startswith("JobStatus")]
                mine = " || ".join("ClusterId == {} && ProcId == {}".format(*job.split(".")) for job in ids)
                changed = arena.watch(
                    victims, before, lambda: not pool.jobs(f"JobStatus < 3 && ({mine})"), timeout_s=150
                )
                hosts = [str((pool.q(job) or pool.history(job) or {}).get("LastRemoteHost")) for job in ids]
                keep_logs(request, [pool])
            after = arena.shown(victims) if not changed else shown
            requests = [site.stageout(verb, *(one.job_id for one in victims.values()), check=False, timeout_s=90)
                        for verb in ("pause", "resume")]  # fmt: skip
        finally:
            destination.start_again()
            keep_logs(request, [site.pool])
        ends = arena.ends(victims)
        learnt = lines_of(site.pool.eps[0], "SandboxManagerLog", "agent-key-learned", "schedd=ap ")
        print(f"\n{version}: changed {changed}; ends {ends}; keys {learnt}; stolen {arena.stolen()}; ran on {hosts}")
        assert all("ep1" in host for host in hosts), "the attacker's jobs ran on the victims' node"
        assert not changed and not ends and after == shown
        assert [done.returncode for done in requests] == [0, 0], "the node obeys the first access point"
        assert not [line for line in learnt if _KEY in line], "the node keeps the key of the first access point"
        assert not arena.stolen()
