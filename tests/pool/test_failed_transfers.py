"""A part of a job's output transfer fails after another part was handed off: the owner has what HTCondor would leave.

Each case is a pair of jobs, one of them synchronous (``MY.StageOutAsync = false``), as HTCondor's own curl_plugin is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.harness.pool import Pool, Submission
from tests.harness.pool.pytest_plugin import keep_logs
from tests.pool.conftest import LEAN, Site, open_directory, pool_settings
from tests.pool.test_interruptions import ACTS

pytestmark = pytest.mark.pool

#: Fails, or succeeds for code 0, with the status that stands for the host in the URL.
_PLUGIN = """#!/bin/sh
if [ "$1" = -classad ]; then
    echo 'MultipleFileSupport = true'; echo 'PluginVersion = "1"'
    echo 'PluginType = "FileTransfer"'; echo 'SupportedMethods = "refused"'
    exit 0
fi
code=$(sed -n 's,.*Url = "refused://\\([0-9]*\\)/.*,\\1,p' "$2" | head -n 1)
echo '[ TransferSuccess = false; TransferError = "refused by its plugin"; TransferUrl = "refused://host/b";' \
    'TransferFileName = "b"; TransferProtocol = "refused" ]' > "$4"
exit "$code"
"""
#: Writes the named files. Checkpoints first, if it shall.
_JOB = """#!/bin/sh
if [ -n "$CHECKPOINT" ] && [ ! -e state ]; then
    echo state > state
    exit 85
fi
for name in "$@"; do
    { echo "run $(cat /proc/sys/kernel/random/uuid)"; head -c ${SIZE:-20000} /dev/urandom; } > "$name"
    echo "$(sha256sum < "$name" | cut -d' ' -f1) $name"
done
# The release of the job mends what had failed.
[ -z "$MENDED" ] || [ ! -e "$MENDED" ] || echo mended > nothere
"""
#: A filesystem of the access point that is full.
_FULL = "/mnt/full"
_COOL_DOWN_S = 5


@dataclass(frozen=True)
class Case:
    """A way to fail.

    :param wrote: files that the job writes; ``a`` is handed off. :param listed: transfer_output_files.
    :param remaps: of the other files. :param code: HoldReasonCode. :param subcode: HoldReasonSubCode, None for any.
    :param extra: further lines of the submit file. :param runs: NumShadowStarts in the end.
    :param names_last_plugin: HTCondor 23.9 records only the results of the last plugin.
    :param is_rare: only on the newest HTCondor.
    """

    wrote: str = "a o"
    listed: str = "a, o"
    remaps: str = ""
    code: int = 12
    subcode: int | None = None
    extra: str = ""
    runs: int = 1
    names_last_plugin: bool = False
    is_rare: bool = False


CASES = {
    "missing": Case("a", "a, nothere", subcode=2),
    "missing-first": Case("a", "nothere, a", subcode=2, is_rare=True),
    "no-directory": Case(remaps="o=/nowhere/at/all/o", subcode=2),
    "disk-full": Case(remaps=f"o={_FULL}/o", subcode=28),
    "other-plugin": Case(remaps="o=refused://1/o", names_last_plugin=True),
    "stdout": Case("a", "a", "_condor_stdout=refused://1/out", names_last_plugin=True, is_rare=True),
    "stderr": Case("a", "a", "_condor_stderr=refused://1/err", names_last_plugin=True, is_rare=True),
    "too-large": Case(code=33, extra='max_transfer_output_mb = 1\nenvironment = "SIZE=3000000"'),
    "exit-policy": Case("a", "a, nothere", subcode=2, extra="on_exit_hold = true", is_rare=True),
    "checkpoint": Case(
        "a", "a, nothere", subcode=2, is_rare=True,
        extra='checkpoint_exit_code = 85\ntransfer_checkpoint_files = state\nenvironment = "CHECKPOINT=1"',
    ),
    "try-later": Case(remaps="o=refused://11/o", runs=2, is_rare=True),
}  # fmt: skip
_OFTEN = [name for name, case in CASES.items() if not (case.is_rare or case.names_last_plugin)]
_RARE = [name for name, case in CASES.items() if case.is_rare]
WAYS = ("sent-later", "synchronous")
#: Interruptions while the plugin has done its work and not yet returned.
_INTERRUPTIONS = ("shadow", "hold", "rm", "vacate", "vacate-fast")


@dataclass
class Desk:
    """The pool with the pairs of jobs. :param site: of the module."""

    site: Site
    pairs: dict[tuple[str, str], Submission]
    is_old: bool

    @property
    def pool(self) -> Pool:
        return self.site.pool

    def submit(self, name: str, way: str, case: Case, extra: str = "") -> Submission:
        url = self.site.url(f"{name}/{way}")
        text = f"""
executable = job.sh
arguments = {case.wrote}
should_transfer_files = YES
when_to_transfer_output = ON_EXIT
transfer_output_files = {case.listed}
transfer_output_remaps = "{";".join(filter(None, (f"a={url}/a", case.remaps)))}"
request_memory = 50
request_disk = 10M
{"MY.StageOutAsync = false" if way == "synchronous" else ""}
{case.extra}
{extra}
queue
"""
        job = self.pool.submit("alice", text, files={"job.sh": _JOB}, reschedule=False)
        self.site.jobs.append(job)
        return job

    def arrived(self, name: str, way: str) -> bytes | None:
        """Return the handed-off file at its destination, None before that."""
        path = self.site.destination.file(f"{self.site.prefix}/{name}/{way}/a")
        return path.read_bytes() if path.exists() else None

    def puts(self, name: str, way: str) -> int:
        found = self.site.destination.requests("PUT", f"{self.site.prefix}/{name}/{way}")
        return sum(row["status"] < 300 for row in found)

    def spooled_files(self) -> int:
        """Return the number of files in the spools of all nodes."""
        return sum(len(list((ep.home / "stageout" / "sandboxes").glob("*/*"))) for ep in self.pool.eps)

    def status_row(self, job: Submission) -> dict[str, Any]:
        """Return what `stageout status` shows of the job."""
        (row,) = json.loads(self.site.stageout("status", "--json", str(job)).stdout)["jobs"]
        return dict(row)


@pytest.fixture(scope="module")
def failing_desk(stageout_pools: Any, destination: Any, request: pytest.FixtureRequest) -> Iterator[Desk]:
    version = request.param
    with open_directory("failing") as shared:
        plugin = shared / "refusing_plugin"
        plugin.write_text(_PLUGIN)
        plugin.chmod(0o755)
        shared.chmod(0o777)
        later = "VacateReasonCode =?= 12 && VacateReasonSubCode =?= 2816 && (NumJobCoolDowns ?: 0) < 1"
        settings = {"execute_points": 1, "cpus": 40, "base_config": LEAN, **pool_settings(shared / "site")}
        settings["ap_config"] += f"SYSTEM_ON_VACATE_COOL_DOWN = ({later}) ? {_COOL_DOWN_S} : 0\n"
        settings["ep_config"] += f"FILETRANSFER_PLUGINS = $(FILETRANSFER_PLUGINS), {plugin}\n"
        with stageout_pools(version=version, binds=(shared,), **settings) as pool:
            pool.ap.run(["mkdir", "-p", _FULL])
            pool.ap.run(["mount", "-t", "tmpfs", "-o", "size=8k,mode=1777", "tmpfs", _FULL])
            site = Site(pool, destination, f"failing-{version.replace('.', '-')}", shared / "site/gates")
            desk = Desk(site, {}, version.startswith("23."))
            for name, case in CASES.items():
                for way in WAYS if not (desk.is_old and case.is_rare) else ():
                    desk.pairs[name, way] = desk.submit(name, way, case)
            for act in _INTERRUPTIONS if not desk.is_old else ():
                for way in WAYS:
                    site.close_gate(f"{act}-{way}", "after")
                    desk.pairs[act, way] = desk.submit(f"gate-{act}-{way}", way, Case("a", "a"))
            pool.reschedule()
            yield desk
            keep_logs(request, [pool])


def _check_pair(desk: Desk, name: str) -> None:
    case = CASES[name]
    ads = {}
    for way in WAYS:
        job = desk.pairs[name, way]
        desk.pool.wait_status(job, "Held", timeout_s=120)
        ads[way] = desk.pool.q(job)
        assert ads[way]["HoldReasonCode"] == case.code, ads[way]["HoldReason"]
        assert case.subcode in (None, ads[way]["HoldReasonSubCode"]), ads[way]["HoldReason"]
        assert ads[way]["NumShadowStarts"] >= case.runs
    assert desk.arrived(name, "synchronous") is not None, "HTCondor itself delivers such a file"
    job, reason = desk.pairs[name, "sent-later"], ads["sent-later"]["HoldReason"]
    if desk.is_old and case.names_last_plugin:
        desk.site.wait_state(job, "Accepted")
        assert "no record" in desk.pool.q(job)["StageOutReason"]
        desk.site.stageout("retry", str(job))
    desk.site.wait_state(job, "Delivered")
    ad = desk.pool.q(job)
    assert (ad["JobStatus"], ad["HoldReason"], ad["HoldReasonCode"]) == (5, reason, case.code)
    assert "the job stays held: `condor_release` runs it again" in ad["StageOutReason"]
    data = desk.arrived(name, "sent-later")
    assert data is not None
    wrote = job.dir / "job.out"
    if wrote.exists() and wrote.read_text():
        assert hashlib.sha256(data).hexdigest() == wrote.read_text().split()[0]
    assert desk.puts(name, "sent-later") == 1, "output of an interrupted run was sent, too"
    row = desk.status_row(job)
    assert (row["state"], row["job_status"]) == ("Delivered", "Held")
    if not (desk.is_old and case.names_last_plugin):  # without receipts no file is recorded
        (file,) = desk.site.wait_recorded(job, 1)
        assert (file["TransferFileName"], file["TransferSuccess"]) == ("a", True)


@pytest.mark.oldest_condor_too
@pytest.mark.parametrize("name", _OFTEN)
def test_the_other_part_is_delivered(failing_desk: Desk, name: str) -> None:
    _check_pair(failing_desk, name)


@pytest.mark.parametrize("name", _RARE)
def test_the_other_part_is_delivered_on_the_newest(failing_desk: Desk, name: str) -> None:
    _check_pair(failing_desk, name)


@pytest.mark.oldest_condor_too
def test_owners_decide_while_the_destination_is_busy(failing_desk: Desk) -> None:
    """A job is released, and the next run is sent alone; others are retried, cancelled, held again, removed."""
    desk, case, ends = failing_desk, CASES["missing"], ("release", "retry", "cancel", "hold", "rm")
    mended, kept = desk.site.gates / "mended", desk.spooled_files()
    desk.site.destination.refuse("busy", 503)
    try:
        jobs = {end: desk.submit(end, "sent-later", case, f'environment = "MENDED={mended}-{end}"') for end in ends}
        desk.pool.reschedule()
        for job in jobs.values():
            desk.pool.wait_status(job, "Held", timeout_s=60)
        for job in jobs.values():
            # After the first refusals, the manager sends no more to that server for a while.
            waits = lambda job=job: desk.site.state(job) in ("RetryWait", "Confirmed")  # noqa: E731
            desk.pool.wait(waits, timeout_s=60, what=f"the output of {job} to wait")
            assert "the job stays held" in desk.pool.q(job)["StageOutReason"]
        (desk.site.gates / "mended-release").touch()
        desk.pool.release(jobs["release"])
        desk.pool.hold(jobs["hold"], user="alice")
        desk.pool.rm(jobs["rm"], user="alice")
        for end in ("retry", "cancel"):
            desk.site.stageout(end, str(jobs[end]))
        desk.site.wait_state(jobs["cancel"], "Cancelled")
        assert desk.site.wait_left(jobs["rm"])["JobStatus"] == 3
        desk.pool.wait_status(jobs["release"], "Completed", timeout_s=60)
        what = "output that is not wanted to be deleted"
        desk.pool.wait(
            lambda: desk.spooled_files() == kept + len(("release", "retry", "hold")), timeout_s=60, what=what
        )
    finally:
        desk.site.destination.accept()
    history = desk.site.wait_left(jobs["release"], timeout_s=120)
    assert (history["JobStatus"], history["StageOutState"], history["NumShadowStarts"]) == (4, "Delivered", 2)
    data = desk.arrived("release", "sent-later")
    assert data is not None
    assert hashlib.sha256(data).hexdigest() == (jobs["release"].dir / "job.out").read_text().split()[0]
    for end in ("retry", "hold"):
        desk.site.wait_state(jobs[end], "Delivered")
    assert {end: desk.puts(end, "sent-later") for end in ends} == {
        "release": 1, "retry": 1, "cancel": 0, "hold": 1, "rm": 0,
    }  # fmt: skip
    assert {desk.pool.status(jobs[end]) for end in ("retry", "cancel", "hold")} == {"Held"}


@pytest.mark.oldest_condor_too
def test_of_two_plugins_one_fails(failing_desk: Desk) -> None:
    _check_pair(failing_desk, "other-plugin")


def test_interrupted_runs_end_as_without_stageout(failing_desk: Desk) -> None:
    """The next run is delivered. Output that an interrupted run has handed off is not sent."""
    desk = failing_desk
    pairs = [(act, way, desk.pairs[act, way]) for act in _INTERRUPTIONS for way in WAYS]
    for act, way, job in pairs:
        gate = f"{act}-{way}"
        desk.pool.wait(lambda gate=gate: desk.site.at_gate(gate, "after"), timeout_s=60, what=f"the plugin of {gate}")
        ACTS[act](desk.site, job)
    for act, way, job in pairs:
        if act in ("shadow", "vacate-fast"):
            desk.pool.wait(
                lambda job=job: desk.pool.status(job) != "Running" or desk.pool.q(job)["NumShadowStarts"] > 1,
                timeout_s=60,
                what=f"{job} to be interrupted",
            )
        desk.site.open_gate(f"{act}-{way}", "after")
    for _, _, job in [one for one in pairs if one[0] == "hold"]:
        desk.pool.wait_status(job, "Held", timeout_s=60)
        assert desk.pool.q(job)["HoldReasonCode"] == 1
        desk.pool.release(job)
    for act, way, job in pairs:
        history = desk.site.wait_left(job, timeout_s=150)
        if act == "rm":
            assert history["JobStatus"] == 3, way
            continue
        assert (history["JobStatus"], history["NumShadowStarts"] > 1) == (4, True), (act, way)
        data = desk.arrived(f"gate-{act}-{way}", way)
        assert data is not None, (act, way)
        assert hashlib.sha256(data).hexdigest() == (job.dir / "job.out").read_text().split()[0], (act, way)
        if way == "sent-later":
            assert desk.puts(f"gate-{act}-{way}", way) == 1, act


def test_nothing_is_left_in_the_spool(failing_desk: Desk) -> None:
    desk = failing_desk
    desk.pool.wait(desk.site.spool_is_empty, timeout_s=60, what="all output to be delivered or deleted")
