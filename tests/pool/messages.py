"""Messages of managers and agents, read and written in a pool's collector as the daemons do, with any node's rights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stageout.wire.custody import LETTERS, MANAGER_AD, ORDERS_AD, REPORT_ADDRESS, REPORTS, bucket_of, sheets_for
from tests.harness.pool import Pool
from tests.harness.pool.node import Node

_ADVERTISE = """
import json, sys, classad2, htcondor2
for command, ad in json.load(sys.stdin):
    htcondor2.Collector().advertise([classad2.ClassAd(ad)], command)
"""


def write_messages(node: Node, ads: Sequence[Mapping[str, Any]], user: str = "") -> None:
    """Write messages into the collector with the rights of a node's daemons."""
    updates = [_update(ad) for ad in ads]
    node.run(["python3", "-c", _ADVERTISE], user=user or node.spec.user, cwd="/", stdin=json.dumps(updates))


def _update(ad: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if ad["MyType"] == "Machine":
        return "UPDATE_STARTD_AD", dict(ad)
    if ad["MyType"] == MANAGER_AD:
        return REPORTS.update, {**ad, **REPORT_ADDRESS}
    addressed = {"StageOutBucket": bucket_of(ad["StageOutManager"])} if ad["MyType"] == ORDERS_AD else {}
    return LETTERS.update, {**ad, **addressed}


def order_ads(pool: Pool, manager: str) -> list[dict[str, Any]]:
    """The agents' order ads for a manager, out of their buckets."""
    buckets = pool.collector_query(f"StageOutBucket == {bucket_of(manager)}", LETTERS.ad_type)
    return [sheet for ad in buckets for sheet in sheets_for(manager, ad)]
