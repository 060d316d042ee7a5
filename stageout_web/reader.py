"""Reading of reports from the collector: only what is new, and a bounded number in each reading.

A full answer of a large pool is 100 MB. The first reading therefore comes in parts. Each later reading asks for the ads
that the collector has received since. In a large and busy pool these are most ads, so the nodes take turns: each
reading asks for a range of names, and a cycle of readings for all of them.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from stageout.core import log
from stageout.core.classads import quote
from stageout.wire.custody import (
    LETTERS,
    MANAGER_AD,
    REPORTS,
    BadPayload,
    check_signature,
    payload_of,
    read_report,
)
from stageout.wire.services import LETTER_ATTRIBUTES, LETTERS_WANTED, Letters, bounded, heard_at_of
from stageout_web.model import Delivery, Node, Pool, figures_of, node_of

FIRST_PARTS = 64
#: Target for the number of ads in one reading. Bounds of a cycle: its readings, and the time that they take.
_READING_ADS = 350
_MOST_TURNS, _CYCLE_S = 30, 150.0
_AT_ONCE = 8
_CHECKSUMS_SPARE = 1000
_REPORT = ("MyType", "Name", "StageOutManager", "StageOutPayload", "StageOutSignature", "LastHeardFrom")
_FIGURES = (
    "StageOutDataSlots", "StageOutDataSlotsFree", "StageOutAccept", "StageOutDraining",
)  # fmt: skip
#: One slot of each node. It has the figures of the manager, and its report where the collector takes no other ad.
_SLOTS = "SlotID == 1 && (DSlotID ?: 0) == 0 && StageOutManager isnt undefined"
_LETTERS_INTERVAL_S = 30.0
#: Seconds without an answer of the collector that do not count as a daemon's silence.
_OUTAGE_S = 60.0
#: Largest share of the time that scans of the slots may take, and bounds of the pause between two.
_SCAN_SHARE = 0.005
_SCAN_LEAST_S, _SCAN_MOST_S = 30.0, 600.0


class Queries(Protocol):
    """The collector, as :class:`stageout.condor.collector_child.CollectorChild` queries it."""

    async def query(self, constraint: str, attributes: Sequence[str], ad_type: str = "Any") -> list[Mapping[str, Any]]:
        """Return the ads that match. :raises CondorError: there is no answer."""


class Reader:
    """Reader of all reports, letters and figures of a pool.

    :param clock_s: a monotonic clock.
    """

    def __init__(self, collector: Queries, pool: Pool, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._collector, self._pool, self._clock_s = collector, pool, clock_s
        self._since: int | None = None
        self._ranges: list[str] = []
        self._newest = self._begun_at = self._count = 0
        self._checksums: dict[tuple[str, str], int] = {}
        self._refused: set[tuple[str, str]] = set()
        self._scan_s = self._letters_s = float("-inf")
        self._read_s, self._failed = clock_s(), False
        self._interval_s = 5.0

    def set_interval(self, interval_s: float) -> None:
        """Tell how often :meth:`read` is called, in seconds."""
        self._interval_s = interval_s

    async def read(self) -> list[Delivery]:
        """Bring the pool up to date. Return what was sent since the reading before.

        :raises CondorError: the collector does not answer.
        """
        now_s, failed, self._failed = self._clock_s(), self._failed, True
        now_at = self._pool.now_at + int(now_s) - int(self._read_s)
        found = await self._read_all() if self._since is None else await self._read_new(self._since)
        if now_s - self._letters_s >= _LETTERS_INTERVAL_S:
            await self._read_letters()
        if now_s >= self._scan_s:
            found += await self._scan()
        self._pool.reach(now_at, after_outage=failed and now_s - self._read_s > _OUTAGE_S)
        self._read_s, self._failed = now_s, False
        self._pool.drop_silent()
        if len(self._checksums) > 2 * len(self._pool.nodes) + _CHECKSUMS_SPARE:
            self._checksums.clear()  # of pilots that have gone; others are read once more
        return found

    async def _read_all(self) -> list[Delivery]:
        """Read all reports. Those that arrive meanwhile are not older than the newest of the first part."""
        for part in range(FIRST_PARTS):
            ads = await self._query(f"LastHeardFrom % {FIRST_PARTS} == {part}")
            if part == 0:
                self._newest = max(map(heard_at_of, ads), default=0)
            await self._update_nodes(ads)
        self._begin_cycle(len(self._pool.nodes), self._newest)
        return []

    def _begin_cycle(self, count: int, since: int) -> None:
        """Plan the next readings. :param count: ads that they probably bring. :param since: they are not older."""
        turns = max(1, min(_MOST_TURNS, int(_CYCLE_S // self._interval_s), -(-count // _READING_ADS)))
        names = sorted((node.name for node in self._pool.nodes.values()), key=str.lower)
        limits = [quote(names[len(names) * turn // turns]) for turn in range(1, turns)] if names else []
        lower = ["", *(f" && StageOutManager >= {limit}" for limit in limits)]
        upper = [*(f" && StageOutManager < {limit}" for limit in limits), ""]
        self._ranges = [low + high for low, high in zip(lower, upper)]
        self._since, self._begun_at, self._count = since, self._newest, 0

    async def _read_new(self, since: int) -> list[Delivery]:
        """Read the new reports of the nodes whose turn it is."""
        ads = await self._query(f"LastHeardFrom >= {since}{self._ranges[0]}")
        del self._ranges[0]
        self._newest = max(self._newest, max(map(heard_at_of, ads), default=0))
        self._count += len(ads)
        found = await self._update_nodes(ads)
        if not self._ranges:
            is_whole = self._count == len(ads)
            self._begin_cycle(self._count, self._newest if is_whole else self._begun_at)
        return found

    async def _query(self, heard: str) -> list[Mapping[str, Any]]:
        """Return a part of the ads. :param heard: a cheap condition, which is false for most of them."""
        return await self._collector.query(f'{heard} && MyType == "{MANAGER_AD}"', _REPORT, REPORTS.ad_type)

    async def _update_nodes(self, ads: Sequence[Mapping[str, Any]]) -> list[Delivery]:
        found: list[Delivery] = []
        for number, ad in enumerate(ads):
            node = self._node(ad)
            if node is not None:
                found += self._pool.put(node)
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
        return found

    def _node(self, ad: Mapping[str, Any]) -> Node | None:
        """Return the report in an ad; None for one that is known, empty or not valid."""
        place = str(ad.get("MyType")), str(ad.get("Name"))
        try:
            text = payload_of(ad)
            checksum = zlib.crc32(text.encode("utf-8", "replace"))
            text.encode("utf-8")
            if not text or self._checksums.get(place) == checksum:
                return None
            report = read_report(text)
            check_signature(MANAGER_AD, ad, report.key)
            if ad.get("MyType") == MANAGER_AD and ad.get("Name") != report.manager:
                raise BadPayload(f"it speaks for {report.manager}")
        except (BadPayload, UnicodeEncodeError) as problem:
            self._refuse(place, str(problem))
            return None
        self._checksums[place] = checksum
        return node_of(report, text, heard_at_of(ad))

    def _refuse(self, place: tuple[str, str], problem: str) -> None:
        if place not in self._refused and len(self._refused) < 100:
            self._refused.add(place)
            log.warn("report-refused", ad=place[1], problem=problem)

    async def _read_letters(self) -> None:
        """Read the notices of agents, and the figures of routers and policy services."""
        letters = Letters()
        for ad in await self._collector.query(LETTERS_WANTED, LETTER_ATTRIBUTES, LETTERS.ad_type):
            self._pool.reach(heard_at_of(ad))
            try:
                letters.take(ad)
            except BadPayload as problem:
                self._refuse((str(ad.get("MyType")), bounded(str(ad.get("Name")))), str(problem))
            await asyncio.sleep(0)  # the largest payload takes a third of a second
        self._pool.set_letters(letters)
        self._letters_s = self._clock_s()

    async def _scan(self) -> list[Delivery]:
        """Read the figures in the slot ads, and reports that are only there."""
        start_s = self._clock_s()
        ads = await self._collector.query(_SLOTS, (*_REPORT, *_FIGURES), "Startd")
        took_s = self._clock_s() - start_s
        self._scan_s = start_s + min(_SCAN_MOST_S, max(_SCAN_LEAST_S, took_s / _SCAN_SHARE))
        self._pool.set_figures({str(ad.get("StageOutManager")): figures_of(ad) for ad in ads})
        return await self._update_nodes([ad for ad in ads if ad.get("StageOutPayload")])
