"""The jobs of :mod:`tests.pool.storm`, and their owners, who decide what becomes of held ones."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.harness.pool import Submission
from tests.harness.pool.errors import PoolError
from tests.pool.conftest import Site

#: A startd or schedd that died is given up after this many seconds instead of HTCondor's 40 minutes.
JOB_LEASE_S = 40
#: Sub-codes of holds above this one are deliveries that failed after the job's end.
_LATE = 20000

#: Writes the named files, and into $RECORD a line for each, at a place that outlives the node: job, run, digest and
#: name. A disk may be full for a while.
_JOB = """#!/bin/sh
fact() { sed -n "s/^$1 = //p" "$_CONDOR_JOB_AD" | tr -d '"'; }
content() { echo "run $(cat /proc/sys/kernel/random/uuid)" && head -c "$SIZE" /dev/urandom; }
[ ! -e "$MENDED" ] || set -- "$@" nothere
for name in "$@"; do
    until content > "$name"; do sleep 1; done
    line="$(sha256sum < "$name" | cut -d' ' -f1) $name"
    echo "$(fact GlobalJobId) $(fact NumShadowStarts) $line" >> "$RECORD"
    until echo "$line"; do sleep 1; done
done
sleep "$SLEEP"
"""
#: Refuses a URL until a file of its name is there.
_PLUGIN = """#!/bin/sh
if [ "$1" = -classad ]; then
    echo 'MultipleFileSupport = true'; echo 'PluginVersion = "1"'
    echo 'PluginType = "FileTransfer"'; echo 'SupportedMethods = "refused"'
    exit 0
fi
name=$(sed -n 's,.*Url = "refused://host/\\([a-z0-9-]*\\)".*,\\1,p' "$2" | head -n 1)
good=false
[ ! -e "{records}/$name" ] || good=true
echo "[ TransferSuccess = $good; TransferError = \\"refused by its plugin\\"; TransferFileName = \\"$name\\";" \\
    "TransferUrl = \\"refused://host/$name\\"; TransferProtocol = \\"refused\\" ]" > "$4"
[ "$good" = true ]
"""
#: Only the copy of a job may run, which the JobRouter makes of it.
_WANT_ROUTE = "MY.WantRoute = true\nrequirements = MY.WantRoute =?= false"
ROUTE = """
DAEMON_LIST = $(DAEMON_LIST), JOB_ROUTER
JOB_ROUTER_POLLING_PERIOD = 1
JOB_ROUTER_ROUTE_NAMES = here
JOB_ROUTER_ROUTE_here @=end
  UNIVERSE vanilla
  REQUIREMENTS WantRoute =?= true
  SET WantRoute false
@end
"""


class Kind(NamedTuple):
    """A kind of jobs.

    :param weight: how many there are, against the others. :param fails: a part of the output transfer fails until the
        owner mends that. :param lines: further lines of the submit file.
    """

    name: str
    weight: float
    fails: bool = False
    lines: str = ""


PLAIN = Kind("plain", 55)
ROUTED = Kind("routed", 15, lines=_WANT_ROUTE)
_MISSING = "transfer_output_files = {outputs}, nothere"
#: HTCondor itself sends that file, or the plugin does.
MISSING = Kind("a file is missing", 10, True, f'{_MISSING}\ntransfer_output_remaps = "{{remaps}}"')
MISSING_UPLOAD = Kind("a file of the plugin's is missing", 5, True, _MISSING)
REFUSED = Kind(
    "stdout is refused", 15, True, 'transfer_output_remaps = "{remaps};_condor_stdout=refused://host/{mark}"'
)
KINDS = (PLAIN, ROUTED, MISSING, MISSING_UPLOAD, REFUSED)


@dataclass
class StormJob:
    """A job that the storm has submitted.

    :ivar asked: all that its owner has done: "rm", "redirect", or "leave" for one who lets it be held.
    """

    submission: Submission
    kind: Kind
    outputs: tuple[str, ...]
    mark: Path
    asked: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        return str(self.submission)


class Run(NamedTuple):
    """A file that a run has written. :param job: GlobalJobId of the job or of the copy that ran."""

    job: str
    number: int
    digest: str
    name: str


@dataclass
class Workload:
    """All jobs of a storm.

    :ivar records: directory, seen by all nodes, where the runs write down what they wrote.
    """

    site: Site
    random: random.Random
    kinds: Sequence[Kind] = (PLAIN,)
    jobs: list[StormJob] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.records = self.site.gates.parent / "records"
        self.records.mkdir(exist_ok=True)
        self.records.chmod(0o1777)

    def submit(self) -> None:
        """Submit a job of some kind. The schedd may be down: it is tried again in a moment."""
        (kind,) = self.random.choices(self.kinds, [one.weight for one in self.kinds])
        outputs = tuple(f"out{n}" for n in range(1, self.random.randint(1, 3) + 1))
        mark = self.records / f"mended-{self.random.randrange(1 << 48):x}"
        size, sleep = self.random.choice((10, 20_000, 3_000_000)), self.random.randint(0, 4)
        remaps = ";".join(f"{name}={self.site.url()}/$(Cluster).$(Process)/{name}" for name in outputs)
        mended = mark if _MISSING in kind.lines else ""
        lines = kind.lines.format(outputs=", ".join(outputs), remaps=remaps, mark=mark.name)
        with contextlib.suppress(PoolError):
            job = self.site.submit(
                self.random.choice(("alice", "bob")), outputs, extra=f"{lines}\njob_lease_duration = {JOB_LEASE_S}",
                env=f"SIZE={size} SLEEP={sleep} RECORD={self.records}/$(Cluster).$(Process) MENDED={mended}",
                destination="" if "remaps" in kind.lines else None, script=_JOB,
            )  # fmt: skip
            self.jobs.append(StormJob(job, kind, outputs, mark))

    def runs(self, job: StormJob) -> list[Run]:
        """Return what the runs of a job have written, the first run first."""
        path = self.records / str(job)
        rows = (line.split(" ", 3) for line in path.read_text().splitlines()) if path.exists() else ()
        return [Run(row[0], int(row[1]), row[2], row[3]) for row in rows if len(row) == 4 and row[1].isdigit()]

    def digests(self) -> set[str]:
        """Return the digests of all that honest jobs have written."""
        return {run.digest for job in self.jobs for run in self.runs(job)}


def write_plugin(directory: Path) -> Path:
    """Write the plugin that refuses standard output. :param directory: that of the pool's settings."""
    path = directory / "refusing_plugin"
    path.write_text(_PLUGIN.replace("{records}", str(directory / "records")))
    path.chmod(0o755)
    return path


@dataclass
class Owners:
    """The owners look at their held jobs from time to time, and do something about some of them.

    :ivar acts: how often they did what.
    """

    workload: Workload
    random: random.Random
    acts: Counter[str] = field(default_factory=Counter)

    def elsewhere(self, job: StormJob) -> str:
        """Return the place below the destination's files to which an owner redirects the output of a job."""
        return f"{self.workload.site.prefix}-elsewhere/{job}"

    def look(self, held: Sequence[Mapping[str, Any]], share: float) -> None:
        """Decide about held jobs. :param share: of the jobs, about which owners do something now."""
        known = {str(job): job for job in self.workload.jobs}
        for ad in held:
            job = known.get(f"{ad['ClusterId']}.{ad['ProcId']}")
            if (job is not None and "leave" in job.asked) or self.random.random() > share:
                continue
            with contextlib.suppress(PoolError):  # a daemon may be down: they look again
                if job is None:  # a copy of the JobRouter, or a job whose submission was never answered
                    self.workload.site.pool.release(f"{ad['ClusterId']}.{ad['ProcId']}")
                    self.acts["release"] += 1
                else:
                    self._decide(job, ad)

    def _decide(self, job: StormJob, ad: Mapping[str, Any]) -> None:
        if ad.get("HoldReasonCode") == 12 and ad.get("HoldReasonSubCode", 0) > _LATE:
            acts, weights = ("release", "retry", "redirect", "rm"), (4, 3, 2, 1)
        elif job.kind.fails and not job.mark.exists() and ad.get("HoldReasonCode") == 12:
            acts, weights = ("mend and release", "release", "redirect", "rm", "leave"), (4, 1, 1, 2, 2)
        else:
            acts, weights = ("release",), (1,)
        (act,) = self.random.choices(acts, weights)
        self._act(act, job)
        self.acts[act] += 1

    def _act(self, act: str, job: StormJob) -> None:
        site, user = self.workload.site, job.submission.user
        job.asked.add(act)  # also when the answer does not come
        if act == "rm":
            site.pool.rm(job.submission, user=user)
        elif act == "retry":
            site.stageout("retry", str(job), user=user, check=False)
        elif act == "redirect":
            url = site.destination.url(self.elsewhere(job))
            site.stageout("redirect", str(job), f"{url}/", user=user, check=False)
        elif act != "leave":
            if act == "mend and release":
                job.mark.touch()
            site.pool.release(job.submission, user=user)
