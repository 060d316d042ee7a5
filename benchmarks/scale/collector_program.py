"""Runs on the central manager of a pool: ``NODES SECONDS``. Prints the parts of a core that its collector needs.

Reports are measured three times: while jobs end all the time, and for nodes where nothing changes, without output that
waits and with it.

The collector holds 32 slots for each node, and the product's own code sends it what the managers of all nodes and one
agent send in so many seconds while each slot runs jobs of an hour. It does so as fast as it can: what counts is the
processor time of the collector and of the processes that it forks.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from sandbox_manager.report.collector import CollectorProcess
from schedd_agent.collector import CondorCollectorClient
from stageout.core.signing import SigningKey
from stageout.wire.custody import (
    BUSY_REPORT_INTERVAL_S,
    Action,
    AgentNotice,
    FileReport,
    FlowReport,
    Order,
    OrderSheet,
    Report,
    SandboxReport,
    notice_ad,
    orders_ad,
    report_ad,
)

SCHEDD = "schedd.example.org"
KEY = SigningKey(b"k" * 32)
SLOTS = 32
_SLOT_ATTRIBUTES = 150
_JOB_S = 3600
_REPORTS_PER_JOB = 4
_SHEETS_PER_JOB = 2
_WAITING_S = 10
_POLL_S = 5
_LOOK_S, _REST_LOOK_S = 5, 30
_REPORT_S, _BUSY_REPORT_S = 300, BUSY_REPORT_INTERVAL_S
_NOTICE_S = 60
_BOXES = 3


class Watch:
    """The processor time of a process and of its children that have ended."""

    def __init__(self, name: str) -> None:
        found = subprocess.run(["pgrep", "-x", name], capture_output=True, text=True, check=True)
        self._stat = Path("/proc") / found.stdout.split()[0] / "stat"

    def used_s(self) -> float:
        """Seconds until now."""
        fields = self._stat.read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def manager_of(node: int) -> str:
    """Name of a node's manager."""
    return f"manager@ep{node}.example.org"


def advertise(ads: list[dict[str, object]], command: str) -> None:
    """Put ads into the collector; it may be busy with those before."""
    import classad2
    import htcondor2

    made = [classad2.ClassAd(ad) for ad in ads]
    for pause_s in (0.5, 1, 2, 4):
        try:
            htcondor2.Collector().advertise(made, command)
            return
        except htcondor2.HTCondorException:
            time.sleep(pause_s)
    raise SystemExit("the collector takes no slots")


def fill(nodes: int) -> None:
    """The slots of all nodes, as large as a startd's."""
    more = {f"Attribute{number}": f"value {number}" for number in range(_SLOT_ATTRIBUTES)}
    for node in range(nodes):
        address = f"<10.{node // 250}.{node % 250}.1:9618>"
        own = {"Machine": f"ep{node}.example.org", "MyAddress": address, "StartdIpAddr": address}
        slots = [
            {**more, **own, "MyType": "Machine", "Name": f"slot1_{slot}@ep{node}.example.org", "SlotID": slot + 1,
             "State": "Claimed", "Activity": "Busy", "StageOutManager": manager_of(node), "ClassAdLifetime": 86400}
            for slot in range(SLOTS)
        ]  # fmt: skip
        advertise(slots, "UPDATE_STARTD_AD")


def file(node: int, number: int, state: str) -> FileReport:
    """A file with all figures that it has in a state."""
    url = f"https://store.example.org/alice/run7/{node}.{number}/out.dat"
    one = FileReport("out.dat", url, 4096, state, "stageout_curl_plugin", began_at=1_700_000_030)
    if state != "Released":
        return one
    digest = f"sha256:{number:064x}"
    return replace(
        one, state="Delivered", attempts=1, verified="size sha256", ended_at=1_700_000_090, digest=digest, streams=4,
        transfer_ms=59_123,
    )  # fmt: skip


def box(node: int, number: int) -> SandboxReport:
    """One sandbox in three has been delivered, the others move."""
    state, left = ("Released", 0) if number % 3 == 0 else ("Moving", 1)
    return SandboxReport(
        job=f"{SCHEDD}#{node}.{number}#1700000000", number=1, owner="alice@example.org", state=state, change=1,
        reason="", error_code=0, tickets=(f"{number:032x}",), files_total=1, files_left=left, bytes_total=4096,
        bytes_left=4096 * left, attempts=0, attempts_limit=20, next_attempt_at=0, accepted_at=1_700_000_000,
        data_slot=f"slot1_{number}@ep{node}.example.org", files=(file(node, number, state),), group="group_physics",
        confirmed_at=1_700_000_010, ended_at=1_700_000_090 * (1 - left),
    )  # fmt: skip


def report(node: int) -> dict[str, object]:
    """A report about a few sandboxes and their server."""
    flow = FlowReport("https://store.example.org", 10**8, 10**8, 0.312, 8, 4, "kept", 2, 8192, 2, 8192)
    boxes = tuple(box(node, number) for number in range(_BOXES))
    now_ms = int(time.time() * 1000)
    whole = Report(
        manager_of(node), KEY.public, now_ms, now_ms // 1000, {}, 4096 * _BOXES, boxes, flows=(flow,), cpu_slots=SLOTS,
        data_slots=3 * SLOTS, spool_bytes=10**10, spool_limit_bytes=10**12,
    )  # fmt: skip
    return report_ad(whole, KEY)


def sheet(node: int) -> dict[str, object]:
    """A sheet with one order."""
    job, owner = f"{SCHEDD}#{node}.0#1700000000", "alice@example.org"
    order = Order(1, Action.CONFIRM, job, 1, (f"{node:032x}",), 1, owner=owner)
    return orders_ad(OrderSheet(SCHEDD, manager_of(node), int(time.time()), (order,), KEY.public), KEY)


class Clock:
    """The time of the pool that is played: it goes on by itself, and jumps over what is not waited for."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def now_s(self) -> float:
        """Seconds."""
        return time.monotonic() + self.skipped_s


async def play(nodes: int, seconds: int) -> list[dict[str, float]]:
    """Send everything, one kind of message after the other.

    :returns: the parts of a core that each kind needs while jobs run, and those for reports of nodes where nothing
        changes.
    """
    watch, clock = Watch("condor_collecto"), Clock()
    collector, directory = CollectorProcess(), CondorCollectorClient(SCHEDD, clock.now_s)
    ends = nodes * SLOTS * seconds / _JOB_S
    waiting = min(nodes, ends / seconds * _WAITING_S)
    looks = seconds * (waiting / _LOOK_S + (nodes - waiting) / _REST_LOOK_S)
    notice = notice_ad(AgentNotice(SCHEDD, SCHEDD, KEY.public, 1, int(time.time())), KEY)
    sheets_each = max(1, round(_SHEETS_PER_JOB * ends * _POLL_S / seconds))

    async def repeat(times: float, work: Callable[[int], Awaitable[object]]) -> float:
        await asyncio.sleep(1)  # what was sent before is read
        before_s = watch.used_s()
        for number in range(round(times)):
            await work(number)
        await asyncio.sleep(1)
        return (watch.used_s() - before_s) / seconds

    async def look(number: int) -> None:
        clock.skipped_s += _POLL_S
        found = directory.query_reports()
        if len(found.ads) != nodes:
            raise SystemExit(f"the agent sees {len(found.ads)} reports of {nodes}")

    async def order(number: int) -> None:
        directory.publish([sheet((number * sheets_each + item) % nodes) for item in range(sheets_each)])

    async def messages(number: int) -> None:
        if len(await collector.messages(manager_of(number % nodes))) != 2:
            raise SystemExit(f"{manager_of(number % nodes)} does not find its sheet and the notice")

    async def publish(number: int) -> None:
        await collector.advertise(report(number % nodes))

    async def notify(number: int) -> None:
        directory.publish([notice])

    try:
        directory.publish([notice, *map(sheet, range(nodes))])
        for node in range(nodes):
            await publish(node)
        usual = {
            "reports of the managers": await repeat(ends * _REPORTS_PER_JOB + nodes * seconds / _REPORT_S, publish),
            "their looks for orders": await repeat(looks, messages),
            "orders of the agent": await repeat(seconds / _POLL_S, order),
            "notices of the agent": await repeat(seconds / _NOTICE_S, notify),
            "looks of the agent": await repeat(seconds / _POLL_S, look),
        }
        unchanged = {
            f"reports, output waits nowhere ({_REPORT_S} s)": await repeat(nodes * seconds / _REPORT_S, publish),
            f"reports, output waits at all nodes ({_BUSY_REPORT_S:.0f} s)": await repeat(
                nodes * seconds / _BUSY_REPORT_S, publish
            ),
        }
        return [usual, unchanged]
    finally:
        await collector.close()


def main() -> None:
    """The program."""
    nodes, seconds = map(int, sys.argv[1:])
    fill(nodes)
    print(json.dumps(asyncio.run(play(nodes, seconds))))


if __name__ == "__main__":
    main()
