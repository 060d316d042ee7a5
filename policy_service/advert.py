"""The service's ad in the pool's collector, for people. Nothing depends on it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from policy_service.model import Lease, RequestRefused
from policy_service.views import LeaseSnapshot
from stageout.condor.bindings import CondorError
from stageout.condor.collector_child import CollectorChild
from stageout.core import log
from stageout.wire.custody import LETTERS
from stageout.wire.services import (
    POLICY_AD,
    ROWS,
    ClientReport,
    GrantReport,
    PolicyReport,
    bounded,
    service_ad,
)

_INTERVAL_S = 60.0


def make_ad(url: str, snapshot: LeaseSnapshot) -> dict[str, Any]:
    """Return the service's ad. :param url: URL on which the service listens."""
    report = report_of(snapshot)
    return {
        **service_ad(POLICY_AD, f"policy@{url.partition('://')[2]}", report),
        "StageOutPolicyURL": url, "StageOutPolicyName": bounded(snapshot.policy),
        "StageOutPolicyMaxPair": snapshot.max_pair, "StageOutPolicyLeases": report.leases,
        "StageOutPolicyStreams": report.streams,
        "StageOutPolicyProblem": " ".join(map(bounded, snapshot.problems)),
    }  # fmt: skip


def report_of(snapshot: LeaseSnapshot) -> PolicyReport:
    """Return the figures, of the owners and clients with the most streams."""
    by_owner: dict[tuple[str, str, str], list[Lease]] = defaultdict(list)
    for lease, _ in snapshot.leases:
        by_owner[lease.source, lease.destination, lease.owner].append(lease)
    grants = sorted((_grant(*names, leases) for names, leases in by_owner.items()), key=lambda one: -one.streams)
    largest = sorted(snapshot.leases, key=lambda pair: -pair[0].counted)[:ROWS]
    return PolicyReport(
        int(time.time()), snapshot.policy, snapshot.max_pair, int(snapshot.policy_ok), int(snapshot.reconfig_ok),
        snapshot.problems, sum(lease.counted for lease, _ in snapshot.leases), len(snapshot.leases), len(grants),
        tuple(grants[:ROWS]),
        tuple(_client(lease, left_s) for lease, left_s in largest),
    )  # fmt: skip


def _grant(source: str, destination: str, owner: str, leases: Sequence[Lease]) -> GrantReport:
    holding = sum(lease.counted > 0 for lease in leases)
    return GrantReport(
        source, destination, owner, sum(lease.counted for lease in leases), sum(lease.in_use for lease in leases),
        holding, len(leases) - holding, sum(map(_rate, leases)),
    )  # fmt: skip


def _client(lease: Lease, left_s: float) -> ClientReport:
    return ClientReport(
        lease.client, lease.owner, lease.source, lease.destination, lease.counted, lease.in_use, _rate(lease),
        int(left_s),
    )  # fmt: skip


def _rate(lease: Lease) -> int:
    return int((lease.rate_mb_s or 0.0) * 1e6)


async def advertise(collector: CollectorChild, ad: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
    """Publish the service's ad every minute until cancelled. Log a collector that refuses it, and try again."""
    last: str | None = None
    try:
        while True:
            with contextlib.suppress(RequestRefused):  # the leases' disk fails, which is in the log already
                problem = await _problem(collector, await ad())
                if problem and problem != last:
                    log.warn("ad-publish-failed", problem=problem)
                elif problem != last:
                    log.event("ad-published")
                last = problem
            await asyncio.sleep(_INTERVAL_S)
    finally:
        await collector.close()


async def _problem(collector: CollectorChild, ad: Mapping[str, Any]) -> str:
    """Publish an ad. Return the reason why the collector does not have it, "" when it has."""
    try:
        await collector.publish(ad, LETTERS.update)
    except CondorError as problem:
        return str(problem)
    return ""
