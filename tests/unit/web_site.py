"""A page without a pool: synthetic reports, a collector that answers like the real one, and a job queue."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from schedd_agent.file_records import key_of
from stageout.condor.bindings import CondorError
from stageout.core.history import HistoryFile
from stageout.core.signing import SigningKey
from stageout.wire.custody import (
    AGENT_AD,
    AgentNotice,
    FileReport,
    Report,
    SandboxReport,
    ServerReport,
    notice_ad,
    report_ad,
)
from stageout.wire.services import (
    POLICY_AD,
    ROUTER_AD,
    ClientReport,
    CustodyReport,
    DeliveryProblem,
    GrantReport,
    LinkReport,
    PolicyReport,
    RouteReport,
    RouterReport,
    service_ad,
)
from stageout_web.queue import QueueError, RequestRefused
from stageout_web.records import Records
from stageout_web.ring import Ring
from stageout_web.state import PageState

KEY = SigningKey(b"k" * 32)
SCHEDD = "ap.example.org"
NOW = 1_800_000_000
SECRET_NAME, SECRET_PATH, SECRET_WORDS = "secret-name.root", "/secret/path", "secret words of the server"


def job_name(cluster: int) -> str:
    """GlobalJobId."""
    return f"{SCHEDD}#{cluster}.0#1700000000"


def sandbox(cluster: int, state: str = "Confirmed", **more: Any) -> SandboxReport:
    """A sandbox with one file. :param more: fields of the sandbox, or ``code`` of an error, or ``server``."""
    code, server = more.pop("code", 0), more.pop("server", "store.example.org")
    one = FileReport(
        SECRET_NAME, f"https://{server}{SECRET_PATH}/{cluster}", more.get("bytes_total", 1000), state,
        "stageout_curl_plugin", 1 if code else 0,
        code, SECRET_WORDS if code else "", 0, "",
    )  # fmt: skip
    facts: dict[str, Any] = {
        "job": job_name(cluster), "number": 1, "owner": "alice@example.org", "state": state, "change": 1,
        "reason": SECRET_WORDS if code else "", "error_code": code, "tickets": ("ab" * 16,), "files_total": 1,
        "files_left": 1, "bytes_total": 1000, "bytes_left": 1000, "attempts": 1 if code else 0, "attempts_limit": 20,
        "next_attempt_at": 0, "accepted_at": NOW - 60, "files": (one,), **more,
    }  # fmt: skip
    return SandboxReport(**facts)


def ad_of(
    node: int, *boxes: SandboxReport, number: int = 1, heard_at: int = NOW, servers: tuple[ServerReport, ...] = (),
    key: SigningKey | None = KEY, more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A manager's ad as the collector has it."""
    name = f"manager@ep{node}.example.org"
    at_risk = sum(box.bytes_left for box in boxes)
    report = Report(name, key.public if key else "", number, heard_at, {}, at_risk, boxes, servers)
    report = replace(report, **(more or {}))
    return {**report_ad(report, key), "LastHeardFrom": heard_at}


def file_record(cluster: int, **more: Any) -> dict[str, Any]:
    """The record of a file that was delivered 60 s after its hand-off. :param more: other attributes."""
    return {
        "MyType": "StageOutFile", "GlobalJobId": job_name(cluster), "ClusterId": cluster, "ProcId": 0,
        "NumShadowStarts": 1, "Owner": "alice@example.org", "StageOutManager": "manager@ep1.example.org",
        "StageOutAcceptedAt": NOW - 100, "StageOutFileNumber": 0, "StageOutFiles": 1, "StageOutState": "Delivered",
        "TransferFileBytes": 1000, "TransferFileName": SECRET_NAME,
        "TransferUrl": f"https://store.example.org{SECRET_PATH}/{cluster}", "TransferEndTime": NOW - 40,
        "StageOutPlugin": "stageout_curl_plugin", "StageOutBytesPerSecond": 1_000_000, "RecordWriteDate": NOW, **more,
    }  # fmt: skip


def agent_ad(schedd: str, heard_at: int = NOW) -> dict[str, Any]:
    """The notice of an agent."""
    return {"MyType": AGENT_AD, "StageOutSchedd": schedd, "LastHeardFrom": heard_at}


def notice_of(schedd: str, **extra: Any) -> dict[str, Any]:
    """The notice of an agent with these facts."""
    return {**notice_ad(AgentNotice("a", schedd, KEY.public, 1, NOW, extra=extra), KEY), "LastHeardFrom": NOW}


def router_ad(name: str, heard_at: int = NOW, **more: Any) -> dict[str, Any]:
    """The ad of a router with two links, of which one is down, a route and files in custody. :param more: fields."""
    facts: dict[str, Any] = {
        "links": (LinkReport("gw2.example.org:9620", 1, 110_000_000, 12_400, "probe"),
                  LinkReport("gw3.example.org:9620")),
        "routes": (RouteReport("archive.example.org:9620", ("gw2.example.org:9620", "archive.example.org:9620"),
                               90_000_000, "first found"), RouteReport("lost.example.org:9620", reason="none known")),
        "custody": (CustodyReport("custody", 12, 48_000_000_000, 3, 9_000_000_000, 0, 5400,
                                  (DeliveryProblem(f"https://dav.example.org{SECRET_PATH}", SECRET_WORDS),)),),
        "incoming": 2, **more,
    }  # fmt: skip
    return {**service_ad(ROUTER_AD, name, RouterReport(heard_at, **facts)), "LastHeardFrom": heard_at}


def policy_ad(name: str = "policy@ap.example.org:9620", heard_at: int = NOW, **more: Any) -> dict[str, Any]:
    """The ad of a policy service with two owners, a client that waits, and a policy that fails."""
    facts: dict[str, Any] = {
        "policy": "fair-share", "max_pair": 64, "is_policy_ok": 0, "problems": (SECRET_WORDS,), "streams": 48,
        "leases": 3, "owners": 2,
        "grants": (GrantReport("example.org", "store.example.org", "cms", 40, 36, 1, 1, 400_000_000),
                   GrantReport("example.org", f"https://dav.example.net{SECRET_PATH}", "atlas", 8, 8, 1, 0, 9_000_000)),
        "clients": (ClientReport("ep1", "cms", "example.org", "store.example.org", 40, 36, 400_000_000, 300),
                    ClientReport("ep2", "cms", "example.org", "store.example.org", 0, 0, 0, 200),
                    ClientReport("ep1", "atlas", "example.org", "store.example.org", 8, 8, 90_000_000, 100)),
        **more,
    }  # fmt: skip
    return {**service_ad(POLICY_AD, name, PolicyReport(heard_at, **facts)), "LastHeardFrom": heard_at}


class FakeCollector:
    """A collector with these ads. It understands the constraints of the reader only."""

    def __init__(self, *ads: Mapping[str, Any]) -> None:
        self.ads = {str(ad["Name"]): ad for ad in ads}
        self.slots: list[Mapping[str, Any]] = []
        self.agents: list[Mapping[str, Any]] = [agent_ad(SCHEDD)]
        self.services: list[Mapping[str, Any]] = []
        self.asked: list[str] = []
        self.sent = 0
        self.problem = ""

    def put(self, *ads: Mapping[str, Any]) -> None:
        """Receive ads."""
        self.ads.update({str(ad["Name"]): ad for ad in ads})

    async def query(self, constraint: str, attributes: Sequence[str], ad_type: str = "Any") -> list[Mapping[str, Any]]:
        """Answer."""
        if self.problem:
            raise CondorError(self.problem)
        self.asked.append(constraint)
        if ad_type != "License":
            return self.slots if ad_type == "Startd" else [*self.agents, *self.services]
        part = re.search(r"LastHeardFrom % (\d+) == (\d+)", constraint)
        since = re.search(r"LastHeardFrom >= (\d+)", constraint)
        lower = re.search(r'StageOutManager >= "([^"]*)"', constraint)
        upper = re.search(r'StageOutManager < "([^"]*)"', constraint)
        found = [
            ad for ad in self.ads.values()
            if (part is None or ad["LastHeardFrom"] % int(part[1]) == int(part[2]))
            and (since is None or ad["LastHeardFrom"] >= int(since[1]))
            and (lower is None or ad["StageOutManager"] >= lower[1])
            and (upper is None or ad["StageOutManager"] < upper[1])
        ]  # fmt: skip
        self.sent += len(found)
        return found


class FakeQueue:
    """A job queue with these jobs."""

    def __init__(self, **jobs: Mapping[str, Any]) -> None:
        self.jobs, self.problem = jobs, ""
        self.numbers = {"running": 10, "transferring": 3, "idle": 5, "held": 0}
        self.written: list[tuple[str, int, str, str, str]] = []
        self.refusal = ""

    async def counts(self) -> Mapping[str, int]:
        """Answer."""
        if self.problem:
            raise QueueError(self.problem)
        return self.numbers

    async def job(self, cluster: int, proc: int) -> Mapping[str, Any] | None:
        """Answer."""
        if self.problem:
            raise QueueError(self.problem)
        return self.jobs.get(f"job{cluster}_{proc}")

    async def request(self, cluster: int, proc: int, run: int, user: str, request: str, by: str) -> None:
        """Write, or refuse."""
        if self.refusal:
            raise RequestRefused(self.refusal)
        self.written.append((f"{cluster}.{proc}", run, user, request, by))
        job = self.jobs[f"job{cluster}_{proc}"]
        self.jobs[f"job{cluster}_{proc}"] = {**job, "StageOutRequest": request, "StageOutRequestBy": by}


class FakeClock:
    """A clock for both kinds of time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        """Seconds."""
        return self.now_s

    def wall_s(self) -> float:
        """Seconds since the epoch."""
        return NOW + self.now_s


class Site:
    """A state over a fake pool. Close its ring in the end."""

    def __init__(self, folder: Path, *ads: Mapping[str, Any]) -> None:
        self.collector, self.queue, self.clock = FakeCollector(*ads), FakeQueue(), FakeClock()
        self.ring = Ring(folder / "ring.sqlite")
        self.history = HistoryFile(folder / "stageout_history", key_of, self.clock.wall_s)
        self.records = Records(folder / "stageout_history", self.clock.wall_s)
        self.state = PageState(
            self.collector, self.queue, self.ring, self.records, self.clock.monotonic_s, self.clock.wall_s
        )  # fmt: skip

    async def tick(self, after_s: float = 5.0) -> None:
        """Read the pool some seconds later."""
        self.clock.now_s += after_s
        await self.state.tick()
