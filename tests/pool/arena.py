"""The victims of a hostile user: jobs whose output waits on a node, and all that must stay as it is."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sandbox_manager.custody.queries import STATE_OF
from stageout.core.states import ENDS, State
from tests.harness.destination import Destination
from tests.harness.pool.errors import PoolTimeout
from tests.harness.pool.pytest_plugin import keep_logs
from tests.pool.conftest import QUICK_AP, QUICK_EP, Site, open_directory, wait_until_acquainted
from tests.pool.hostile import PROJECTION, Victim

#: Seconds for which the victims are watched after the attacker's last step. Agent and manager look once a second.
_WATCH_S = 8.0
#: States of confirmed output: the manager tries only some of it while a server is away.
_CONFIRMED = 'stringListMember(StageOutState, "Confirmed,Leased,Moving,RetryWait")'
#: Attributes of a waiting job that no attempt to deliver it changes.
_STEADY = (
    "JobStatus", "GlobalJobId", "User", "Owner", "NumShadowStarts", "CompletionDate", "StageOutRun", "StageOutReruns",
    "StageOutManager", "StageOutKeys", "StageOutRequest", "StageOutRefused", "StageOutUserLeave", "StageOutStats",
    "StageOutKeptUntil", "StageOutUntold", "HoldReason", "RemoveReason", "OutputDestination", "LeaveJobInQueue",
)  # fmt: skip
#: Columns of a sandbox and its files that no attempt to deliver changes.
_ROWS = """
SELECT sandboxes.job, sandboxes.number, sandboxes.owner, sandboxes.user, sandboxes.uid, sandboxes.paused,
    sandboxes.named_tickets, sandboxes.fallback, sandboxes.refused, tickets.ticket, files.name, files.url, files.size,
    sandboxes.state
FROM sandboxes LEFT JOIN tickets ON tickets.sandbox = sandboxes.id LEFT JOIN files ON files.ticket = tickets.id
ORDER BY 1, 2, 10, 11
"""
#: Fields of `stageout status --json` that no attempt to deliver changes.
_SHOWN = (
    "job", "global_id", "owner", "job_status", "run", "synchronous", "synchronous_code", "files_total", "bytes_total",
    "paused", "fallback", "leaves_queue", "manager", "reruns",
)  # fmt: skip


@dataclass
class Arena:
    """A pool with one execute point, alice's server, and bob's."""

    site: Site
    loot: Destination

    @property
    def spool(self) -> Path:
        """The spool of the execute point."""
        return self.site.pool.eps[0].home / "stageout"

    def victims(self, count: int, procs: int = 1) -> list[Victim]:
        """Return jobs of alice's whose output waits, the last one of each cluster. The server is away."""
        pool = self.site.pool
        extra, queue = "output = job.$(Process).out", f"queue {procs}"
        jobs = [self.site.submit("alice", extra=extra, queue=queue) for _ in range(count)]
        where = " || ".join(f"ClusterId == {job.cluster} && ProcId == {procs - 1}" for job in jobs)
        waiting = f'({where}) && JobStatus == 4 && StageOutKeys != "" && {_CONFIRMED}'
        pool.wait(lambda: len(pool.jobs(waiting, PROJECTION)) == count, timeout_s=120, what="the victims to wait")
        return [Victim.of(ad) for ad in pool.jobs(waiting, PROJECTION)]

    def look(self, victims: Mapping[str, Victim]) -> dict[str, dict[str, Any]]:
        """Return for each victim all that must stay as it is: its ad, its rows in the ledger, its files on disk."""
        ads = {f"{ad['ClusterId']}.{ad['ProcId']}": ad for ad in self.site.pool.jobs('Owner == "alice"')}
        rows = self._rows()
        return {
            label: {
                **{name: ads.get(victim.job_id, {}).get(name) for name in _STEADY},
                "waits": _waits(ads.get(victim.job_id, {}).get("StageOutState")),
                **self._sandbox([row for row in rows if (row["job"], row["owner"]) == (victim.name, victim.user)]),
            }
            for label, victim in victims.items()
        }

    def _rows(self) -> list[dict[str, Any]]:
        path = self.spool / "ledger" / "ledger.sqlite"
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as db:
            db.row_factory = sqlite3.Row
            return [dict(row) for row in db.execute(_ROWS)]

    def _sandbox(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a sandbox's rows, and the digests of its files."""
        tickets = sorted({str(row["ticket"]) for row in rows})
        places = [place for ticket in tickets for place in (self.spool / "sandboxes" / ticket).glob("*")]
        found = {place.name: digest_of(place) for place in sorted(places) if place.is_file()}
        states = {"waits" if STATE_OF[row.pop("state")] not in ENDS else "ended" for row in rows}
        return {"sandbox": sorted(states), "rows": rows, "disk": found}

    def shown(self, victims: Mapping[str, Victim]) -> dict[str, Any]:
        """Return what the commands say to alice of each victim, without the figures of attempts."""
        ids = [one.job_id for one in victims.values()]

        def reported() -> list[Any] | None:
            """A report of the manager may be a moment behind the job's ad."""
            jobs = json.loads(self.site.stageout("status", "--json", *ids).stdout)["jobs"]
            return jobs if all(job["files"] and job["manager"] for job in jobs) else None

        told = self.site.pool.wait(reported, timeout_s=60, what="the report about the victims", interval_s=1)
        return {
            job["job"]: {
                **{name: job[name] for name in _SHOWN},
                "files": sorted((file["name"], file["url"], file["size_bytes"]) for file in job["files"]),
            }
            for job in told
        }

    def recorded(self, victims: Mapping[str, Victim]) -> dict[str, list[str]]:
        """Wait for the records of delivered files; return the URLs in them that are not those of alice's outputs."""
        ids = [one.job_id for one in victims.values()]
        wanted = {job: sorted(f"{self.site.url()}/{job}/{name}" for name in ("out1", "out2")) for job in ids}

        def found() -> dict[str, list[str]] | None:
            urls: dict[str, list[str]] = {job: [] for job in ids}
            for ad in self.site.file_records(*ids):
                urls[f"{ad['ClusterId']}.{ad['ProcId']}"].append(str(ad["TransferUrl"]))
            return urls if all(len(one) >= 2 for one in urls.values()) else None

        urls = self.site.pool.wait(found, timeout_s=60, what="the records of files", interval_s=1)
        return {job: sorted(one) for job, one in urls.items() if sorted(one) != wanted[job]}

    def stolen(self) -> list[str]:
        """Return the files of alice's jobs that are on bob's server."""
        alices = {
            line.split(" ", 1)[0]
            for out in (self.site.pool.dir / "jobs/alice").glob("*/job.*.out")
            for line in out.read_text().splitlines()
        }
        found = (path for path in (self.loot.home / "files").rglob("*") if path.is_file())
        return [str(path.relative_to(self.loot.home)) for path in found if digest_of(path) in alices]

    def watch(
        self, victims: Mapping[str, Victim], before: dict[str, Any], until: Callable[[], bool], timeout_s: float = 180
    ) -> dict[str, str]:
        """Look at the victims until the attacker's jobs have ended, and a while longer; returns the first changes."""
        changed: dict[str, str] = {}

        def look() -> None:
            for label, now in self.look(victims).items():
                old = before[label]
                if label not in changed and now != old:
                    parts = [
                        f"{name} {_short(old[name])} -> {_short(now[name])}" for name in old if now[name] != old[name]
                    ]
                    changed[label] = "; ".join(parts)

        deadline_s = time.monotonic() + timeout_s
        while not until() and time.monotonic() < deadline_s:
            look()
            time.sleep(0.3)
        over_s = time.monotonic() + _WATCH_S
        while time.monotonic() < over_s:
            look()
            time.sleep(0.3)
        return changed

    def ends(self, victims: Mapping[str, Victim], timeout_s: float = 120) -> dict[str, str]:
        """Wait for all; return how those ended that did not end by the delivery of what their only run wrote."""
        pool, clusters = (
            self.site.pool,
            " || ".join(f"ClusterId == {int(float(one.job_id))}" for one in victims.values()),
        )

        def have_left() -> bool:
            """A job is in the history a moment after it has left the queue."""
            return not pool.jobs(clusters, ["ProcId"]) and all(pool.history(one.job_id) for one in victims.values())

        with contextlib.suppress(PoolTimeout):
            pool.wait(have_left, timeout_s=timeout_s, what="the victims to leave")
        return {label: text for label, one in victims.items() if (text := self._end(one))}

    def _end(self, victim: Victim) -> str:
        site, place = self.site, self.site.file(victim.job_id, "")
        past = site.pool.history(victim.job_id)
        if past is None:
            ad = site.pool.q(victim.job_id) or {}
            return f"still there, JobStatus {ad.get('JobStatus')} {ad.get('HoldReason') or ''}"
        wanted = {"StageOutState": "Delivered", "NumShadowStarts": 1, "StageOutReruns": 0, "JobStatus": 4}
        wrong = [f"{name} {past.get(name)}" for name, value in wanted.items() if past.get(name) != value]
        wrote = (line.split(" ", 1) for line in (Path(str(past["Iwd"])) / str(past["Out"])).read_text().splitlines())
        wrong += [f"{name} is not at its destination" for digest, name in wrote if digest_of(place / name) != digest]
        puts = Counter(row["path"] for row in site.puts(victim.job_id))
        wrong += [f"{path} was sent {count} times" for path, count in puts.items() if count > 1]
        return ", ".join(wrong)


def _waits(state: Any) -> bool:
    return state in {str(one) for one in State if one not in ENDS}


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, or \"gone\"."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:  # it was deleted at this moment
        return "gone"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 60 else f"{text[:57]}..."


@contextlib.contextmanager
def open_arena(pools: Any, destination: Destination, version: str, wall: str) -> Iterator[Arena]:
    """Start a pool of a version, with a server of the hostile user. :param wall: settings of the access point."""
    with open_directory("hostile") as shared, open_directory("loot") as home, Destination(home) as loot:
        settings = {"version": version, "execute_points": 1, "cpus": 12, "binds": (shared,)}
        with pools(
            **settings, ap_config=f"{QUICK_AP}{wall}", ep_config=f"{QUICK_EP}STAGEOUT_DATA_SLOT_DEPTH = 100\n"
        ) as pool:
            yield Arena(Site(pool, destination, f"hostile-{version}", shared), loot)


def for_a_test(found: Arena, request: pytest.FixtureRequest) -> Iterator[Arena]:
    """Give a folder of its own for a test; afterwards the server is up, and no job is left."""
    site = found.site
    wait_until_acquainted(site.pool)
    yield Arena(Site(site.pool, site.destination, f"hostile-{time.monotonic_ns()}", site.gates), found.loot)
    site.destination.be_well()
    keep_logs(request, [site.pool])
    for options in (("-all",), ("-forcex", "-all")):
        site.pool.ap.run(["condor_rm", *options], check=False)
