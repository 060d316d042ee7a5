"""HTCondor interrupts a run while, or just after, its plugin hands the output off: the last run's bytes win, once."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any, Callable

import pytest

pytestmark = pytest.mark.pool

Act = Callable[[Any, Any], None]

#: A starter writes it when it is asked to end its job in its own time.
_HEARD = "ShutdownGraceful all jobs."


def _vacate(site: Any, job: Any) -> None:
    """A transfer that ends before the starter has heard of it makes a job that has run once, and rightly so."""
    node, slot = _slot_of(site, job)
    told = node.log(f"StarterLog.{slot}").count(_HEARD)
    site.pool.vacate(job)
    site.pool.wait(
        lambda: node.log(f"StarterLog.{slot}").count(_HEARD) > told, timeout_s=60, what=f"the starter of {job} to hear"
    )


def _vacate_fast(site: Any, job: Any) -> None:
    site.pool.vacate(job, fast=True)


def _hold(site: Any, job: Any) -> None:
    site.pool.hold(job)


def _remove(site: Any, job: Any) -> None:
    site.pool.rm(job)


def _kill_shadow(site: Any, job: Any) -> None:
    ad = site.pool.q(job, ["ShadowBday", "ClusterId"])
    assert ad is not None
    killed = [p for p in site.pool.ap.processes() if p.is_named("shadow") and f"{job}" in " ".join(p.argv)]
    assert killed, f"no shadow of {job} among {[p.argv for p in site.pool.ap.processes()]}"
    for process in killed:
        with contextlib.suppress(ProcessLookupError):  # the first takes the others along
            os.kill(process.pid, signal.SIGKILL)


def _slot_of(site: Any, job: Any) -> tuple[Any, str]:
    """Return the execute point and the name of the slot that a job runs in."""
    name, _, host = str(site.pool.q(job, ["RemoteHost"])["RemoteHost"]).partition("@")
    return next(ep for ep in site.pool.eps if host.split(".")[0] == ep.name), name


def _kill_starter(site: Any, job: Any) -> None:
    node, name = _slot_of(site, job)
    slot = f"{name}@{node.name}"
    killed = [p for p in node.processes() if p.is_named("starter") and name in p.argv]
    assert killed, f"no starter of {slot} among {[p.argv for p in node.processes()]}"
    for process in killed:
        with contextlib.suppress(ProcessLookupError):  # the first takes the others along
            os.kill(process.pid, signal.SIGKILL)


ACTS: dict[str, Act] = {
    "vacate": _vacate,
    "vacate-fast": _vacate_fast,
    "hold": _hold,
    "rm": _remove,
    "shadow": _kill_shadow,
    "starter": _kill_starter,
}
WHERE = ("before", "after")
CASES = [(act, where) for act in ACTS for where in WHERE]


@pytest.fixture(scope="module")
def standing(main_pool: Any, destination: Any) -> Iterator[dict[tuple[str, str], Any]]:
    """One job per case, each with its plugin standing at its gate: submitted together, because a job takes seconds."""
    from tests.pool.conftest import Site

    pool, gates = main_pool
    site = Site(pool, destination, "interruptions", gates)
    jobs = {}
    for act, where in CASES:
        name = f"{act}-{where}"
        site.close_gate(name, where)
        jobs[act, where] = site.submit(place=f"gate-{name}")
    yield {"site": site, **jobs}  # type: ignore[dict-item]
    for act, where in CASES:
        site.open_gate(f"{act}-{where}", where)
    for job in site.jobs:
        if pool.q(job, ["JobStatus"]) is not None:
            pool.rm(job)


@pytest.mark.parametrize(("act", "where"), CASES)
def test_interrupted_run_is_never_sent(standing: Any, act: str, where: str) -> None:
    site, job, name = standing["site"], standing[act, where], f"{act}-{where}"
    site.pool.wait(lambda: site.at_gate(name, where), timeout_s=120, what=f"the plugin of {job} at its gate")
    place = f"gate-{name}"
    ACTS[act](site, job)
    if act in ("vacate-fast", "shadow", "starter"):
        site.pool.wait(
            lambda: site.pool.status(job) != "Running" or site.pool.q(job)["NumShadowStarts"] > 1,
            timeout_s=60,
            what=f"{job} to be interrupted",
        )
    site.open_gate(name, where)
    if act == "rm":
        history = site.wait_left(job, timeout_s=90)
        assert history["JobStatus"] == 3
        assert not site.puts(job, place) or where == "before"
        return
    if act == "hold":
        site.pool.wait_status(job, "Held", timeout_s=60)
        assert not site.puts(job, place) or where == "before"
        site.pool.release(job)
    history = site.wait_left(job, timeout_s=150)
    assert history["JobStatus"] == 4
    assert history["NumShadowStarts"] > 1, "the job was meant to run again"
    site.check_delivered(job, place)
    assert len(site.puts(job, place)) == 2, f"an older run was sent too: {site.puts(job, place)}"


def test_retries_end_with_the_last_runs_bytes(site: Any) -> None:
    """``max_retries = 2`` with a job that fails twice."""
    script = (
        "#!/bin/sh\n"
        'n=$(cat "$_CONDOR_JOB_AD" | sed -n "s/^NumShadowStarts = //p"); n=${n:-0}\n'
        'echo "run $n $(cat /proc/sys/kernel/random/uuid)" > out1\n'
        'echo "$(sha256sum < out1 | cut -d" " -f1) out1"\n'
        "[ -e /tmp/stageout-retry-$1.2 ] && exit 0\n"
        "[ -e /tmp/stageout-retry-$1.1 ] && : > /tmp/stageout-retry-$1.2 && exit 3\n"
        ": > /tmp/stageout-retry-$1.1; exit 3\n"
    )
    text = f"""
executable = job.sh
arguments = $(Cluster)
transfer_output_files = out1
output_destination = {site.url()}/$(Cluster).$(Process)
max_retries = 2
request_memory = 50
request_disk = 10M
requirements = Machine == "{site.pool.startd_ads()[0]["Machine"]}"
queue
"""
    job = site.pool.submit("alice", text, files={"job.sh": script})
    site.jobs.append(job)
    history = site.wait_left(job, timeout_s=120)
    assert history["JobStatus"] == 4
    assert history["ExitCode"] == 0
    assert history["NumShadowStarts"] == 3
    site.check_delivered(job)
    assert len(site.puts(job)) == 1
    site.pool.wait(site.spool_is_empty, timeout_s=20, what="the failed runs' bytes to be freed")
