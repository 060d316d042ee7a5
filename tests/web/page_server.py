"""A page over a synthetic pool with a past, served from a thread: for browsers and for screenshots."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiohttp import web

from stageout.core.tokens import TokenTable
from stageout.wire.custody import FlowReport, SandboxReport, ServerReport
from stageout.wire.services import ClientReport, GrantReport, LinkReport, RouteReport
from stageout_web.readers import Readers, Rights
from stageout_web.server import Server
from tests.unit.web_site import NOW, SCHEDD, Site, ad_of, file_record, job_name, policy_ad, router_ad, sandbox

TOKEN = "reader-token-0123456789"
#: Another name of the page, under which a browser does not take http for safe.
NAME = "page.example.org"
NODES, EACH = 48, 6
_SERVERS = ("se1.cern.example:1094", "store.example.org", "s3.example.net", "dcache.example.edu:2880")
_OWNERS = ("alice@example.org", "bob@example.org", "carol@example.edu")
_STATES = ("Moving", "Confirmed", "Confirmed", "RetryWait", "Moving", "Accepted", "HandedOver", "Leased")
_ROUTERS = tuple(f"{name}.example.org:9620" for name in ("gw1", "gw2", "gw3", "archive"))
_TUNING = ("raised", "kept", "lowered")
_AWAY = ServerReport("https://s3.example.net", "open", "connection refused", 4, NOW - 1500, NOW + 240)


def _box(node: int, number: int) -> SandboxReport:
    cluster = 4000 + node * EACH + number
    state, code = _STATES[cluster % len(_STATES)], 0
    if cluster % 41 == 0:
        state, code = "Failed", 72 if cluster % 2 else 33
    elif state == "RetryWait":
        code = 20
    server = _SERVERS[2] if code == 20 else _SERVERS[cluster % 2] if code else _SERVERS[cluster % len(_SERVERS)]
    total = (1 + cluster % 7) * 700_000_000
    return sandbox(
        cluster, state, code=code, server=server, owner=_OWNERS[cluster % len(_OWNERS)], bytes_total=total,
        bytes_left=total // 2 if state == "Moving" else total, accepted_at=NOW - 60 - 37 * (cluster % 90),
        group=("", "group_a", "group_b")[cluster % 3],
        next_attempt_at=NOW + 40 + cluster % 300 if code == 20 else 0,
    )  # fmt: skip


def _flow(node: int, server: str, boxes: list[SandboxReport]) -> FlowReport:
    waiting = [box.bytes_left for box in boxes if box.files[0].url.split("/")[2] == server]
    rate = 4_000_000 + node * 104_729
    return FlowReport(
        f"https://{server}", rate, rate, 0.2, streams=8, limit=4 + node % 5, tuning=_TUNING[node % 3],
        files_waiting=len(waiting), bytes_waiting=sum(waiting),
    )  # fmt: skip


def fill(site: Site) -> None:
    """Put nodes into the collector, their figures into the slots, and an hour and a month into the ring."""
    for node in range(NODES):
        boxes = [_box(node, number) for number in range(EACH if node % 6 else 0)]
        servers = (_AWAY,) if any(box.error_code == 20 for box in boxes) else ()
        heard_at = NOW - 1200 if node == 17 else NOW - node % 30
        used = 9 * node % 100
        flows = tuple(_flow(node, server, boxes)
                      for server in sorted({box.files[0].url.split("/")[2] for box in boxes}))  # fmt: skip
        more = {"flows": flows, "spool_bytes": used * 5 << 30, "spool_limit_bytes": 500 << 30,
                "ends_in_s": 300 if node == 5 else 0}  # fmt: skip
        site.collector.put(ad_of(node, *boxes, servers=servers, heard_at=heard_at, more=more))
        site.collector.slots.append({
            "StageOutManager": f"manager@ep{node}.example.org", "StageOutDataSlots": 24,
            "StageOutDataSlotsFree": 24 - len(boxes),
            "StageOutAccept": used < 90,
        })  # fmt: skip
    site.collector.services += [*map(_router, range(len(_ROUTERS))), _policy(), policy_ad("policy@vo.example.org:9620")]
    site.ring.add_deliveries("2027-01-15", 1284, 3_400_000_000_000)
    for at in range(NOW - 3600, NOW, 5):
        site.ring.add(at, _past(at))
    site.history.append(_delivered(number) for number in range(3000))


def _router(number: int) -> dict[str, Any]:
    """Return the ad of a router with links to all others. The first has files in custody, and has lost the last one."""
    others = [(other, name) for other, name in enumerate(_ROUTERS) if other != number]
    links = tuple(
        LinkReport(name, 1, 30_000_000 * (1 + number + other), 9_000 * (1 + other), "probe")
        if number or other < len(_ROUTERS) - 1 else LinkReport(name)
        for other, name in others
    )  # fmt: skip
    terminal = _ROUTERS[-1]
    routes = (RouteReport(terminal, (_ROUTERS[1], terminal), 60_000_000, "first found"),)
    more = {} if number == 0 else {"custody": (), "routes": () if number == len(_ROUTERS) - 1 else routes}
    return router_ad(_ROUTERS[number], NOW - 7 * number, links=links, **more)


def _policy() -> dict[str, Any]:
    """Return the ad of a policy service whose policy is in order."""
    grants = tuple(
        GrantReport("example.org", server, owner, 24 - 4 * number, 20 - 4 * number, 6 - number, number,
                    (24 - 4 * number) * 9_000_000)
        for server in _SERVERS[:2] for number, owner in enumerate(("cms", "atlas", "lhcb"))
    )  # fmt: skip
    clients = tuple(
        ClientReport(f"ep{number}", "cms", "example.org", _SERVERS[0], 4, 4 - number % 2, 36_000_000, 60 + 17 * number)
        for number in range(6)
    )
    return policy_ad(
        policy="fair-share", is_policy_ok=1, streams=120, leases=36, owners=6, grants=grants, clients=clients
    )


def _delivered(number: int) -> dict[str, Any]:
    """Return the record of a file of the last two weeks, the oldest first."""
    server, ended_at = _SERVERS[number * number % 7 % len(_SERVERS)], NOW - (3000 - number) * 400
    return file_record(
        number, Owner=_OWNERS[number % len(_OWNERS)], TransferUrl=f"https://{server}/{number}",
        TransferEndTime=ended_at, RecordWriteDate=ended_at + 60, StageOutAcceptedAt=ended_at - 20 - number * 7919 % 900,
        TransferFileBytes=(1 + number % 7) * 700_000_000, StageOutState="Delivered" if number % 97 else "Failed",
        StageOutBytesPerSecond=20_000_000 + number * 104_729 % 90_000_000,
    )  # fmt: skip


def _past(at: int) -> dict[str, float]:
    """Figures of a busy pool: data slots fill when jobs end together, and CPU slots do not wait for them."""
    wave = max(0.0, math.cos((NOW - at) / 420))
    computing = 388 + 6 * math.sin((NOW - at) / 90)
    return {
        "computing": computing, "transferring": 400 - computing, "waiting": 30 + 150 * wave, "moving": 24 + 30 * wave,
        "trouble": 6, "bytes_left": 5e11 * (1 + wave), "rate": 4e8 * (1 + wave), "delivered": 1284,
        **{f"{kind} {server}": value * (0.5 + wave) for server in _SERVERS
           for kind, value in (("rate", 2e8), ("open", 60), ("trouble", 2))},
    }  # fmt: skip


@contextlib.contextmanager
def serve(folder: Path, interval_s: float = 0.5) -> Iterator[tuple[str, Site]]:
    """Serve the page from a thread. Give its address and the pool behind it."""
    tokens = folder / "tokens"
    tokens.write_text(f"ops {TOKEN}\n")
    tokens.chmod(0o600)
    ready, addresses = threading.Event(), list[Any]()
    loop = asyncio.new_event_loop()
    holder: list[Site] = []

    async def work() -> None:
        site = Site(folder)
        holder.append(site)
        fill(site)
        site.queue.jobs[f"job{4031}_0"] = {
            "ClusterId": 4031, "ProcId": 0, "GlobalJobId": job_name(4031), "QDate": NOW - 9000, "StageOutGuard": True,
            "JobCurrentStartExecutingDate": NOW - 8000, "CompletionDate": NOW - 400,
        }  # fmt: skip
        for cluster in (4018, 4060):
            site.queue.jobs[f"job{cluster}_0"] = {
                "ClusterId": cluster, "ProcId": 0, "GlobalJobId": job_name(cluster), "StageOutGuard": True,
                "User": _OWNERS[cluster % len(_OWNERS)], "NumShadowStarts": 1,
            }  # fmt: skip
        site.queue.numbers = {"running": 400, "transferring": 12}
        await site.tick(0)
        server = Server(site.state, Readers(TokenTable(tokens), Rights(frozenset({"ops"}))), pool=SCHEDD, names=[NAME])
        runner = web.AppRunner(server.application(), access_log=None, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        addresses.append(runner.addresses[0])
        ready.set()
        try:
            while True:
                await asyncio.sleep(interval_s)
                await site.tick(interval_s)
                server.tick()
        finally:
            server.close()
            await runner.cleanup()
            site.ring.close()

    def run() -> None:
        asyncio.set_event_loop(loop)
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.close()

    task = loop.create_task(work())
    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(30), "the page is served"
        yield f"http://127.0.0.1:{addresses[0][1]}", holder[0]
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
