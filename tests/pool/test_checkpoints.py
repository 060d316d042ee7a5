"""A job that was evicted gets back the checkpoint that it stored, whatever its files are called."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.pool

#: Without question marks: HTCondor ends the local name of what it fetches there.
NAMES = ("plain", "c", "c#1", "100%", "%41", "two words", "ü", "a+b", "a;b", "deeper/x#y")

#: Stores a checkpoint; goes on until it is evicted; where it finds a checkpoint and not its own mark it was restored.
_JOB = """#!/bin/sh
if [ ! -e state ]; then
    touch mark
    mkdir -p state/deeper
    {writes}
    exit 85
fi
[ -e mark ] && exec sleep 600
for name in {names}; do
    [ "$(cat "state/$name")" = "content of $name" ] || {{ echo "bad: $name"; status=1; }}
done
find state -type f | sort
exit ${{status:-0}}
"""


@pytest.mark.parametrize("below", ["", "/checkpoints"])
def test_restored_from_a_destination(site: Any, below: str) -> None:
    """The destination of checkpoints stands alone, or below that of the output."""
    quoted = " ".join(f"'{name}'" for name in NAMES)
    writes = f'for name in {quoted}; do echo "content of $name" > "state/$name"; done'
    destination = site.url("apart") if below else ""
    checkpoints = f"{site.url('apart')}{below}"
    extra = [
        "executable = check.sh",
        "transfer_output_files = ",
        "checkpoint_exit_code = 85",
        "transfer_checkpoint_files = state",
        f"checkpoint_destination = {checkpoints}",
    ]
    lines = ["should_transfer_files = YES", "request_cpus = 1", "request_memory = 50", "request_disk = 10M", *extra]
    lines += [f"output_destination = {destination}"] if destination else []
    script = _JOB.format(writes=writes, names=quoted)
    job = site.pool.submit("alice", "\n".join([*lines, "queue"]), files={"check.sh": script})
    site.jobs.append(job)
    site.pool.wait(
        lambda: site.pool.q(job).get("CheckpointNumber", -1) >= 0, timeout_s=120, what="a checkpoint to be stored"
    )
    stored = site.destination.file(f"{checkpoints.partition('//')[2].partition('/')[2]}")
    found = {str(path.relative_to(stored)).split("/", 2)[2] for path in stored.rglob("*") if path.is_file()}
    assert {name for name in found if name.startswith("state/")} == {f"state/{name}" for name in NAMES}
    site.pool.vacate(job, fast=True)
    history = site.wait_left(job, timeout_s=180)
    assert (history["JobStatus"], history.get("ExitCode")) == (4, 0), (job.dir / "job.out").read_text()
    assert history["NumShadowStarts"] >= 2
