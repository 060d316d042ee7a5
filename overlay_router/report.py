"""The files in custody, for an administrator: the output of ``stageout-router --custody``, and a line in the log."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from overlay_router.custodians.custodian import Custodian
from overlay_router.custodians.forwarder import OnDisk
from overlay_router.custodians.pack_records import HeldPack
from overlay_router.custodians.spool import Held
from overlay_router.peers.origins import said_as
from overlay_router.rules.states import Release
from stageout.core import log
from stageout.core.errors import StageoutError
from stageout.core.metrics import Readings
from stageout.wire.services import CustodyReport
from stageout.wire.typed import built

NAME = "custody.json"
#: Of what plugins deliver.
EGRESS_NAME = "egress.json"
_LOOK_S = 2.0
_LOG_S = 60.0
_NAMED = 200
#: Metric -> field of a summary.
_METRICS = {
    "custody_files": "files",
    "custody_bytes": "size_bytes",
    "custody_single_files": "single",
    "custody_damaged_files": "damaged",
    "custody_oldest_age_seconds": "oldest_s",
}


@dataclass(frozen=True)
class Summary:
    """The files in custody.

    :param single: files whose only copy is here. :param oldest_s: since the first was taken.
    """

    files: int
    size_bytes: int
    single: int
    single_bytes: int
    damaged: int
    oldest_s: int


def summary(files: Collection[Held], packs: Collection[HeldPack], now: float) -> Summary:
    """Of all that a custodian has."""
    single = [one.operation.size_bytes for one in files if one.release is Release.CUSTODY and one.operation.copies < 2]
    freed = [pack for pack in packs if pack.is_single]
    taken_at = [*(one.taken_at for one in files), *(pack.taken_at for pack in packs)]
    return Summary(
        len(files) + sum(pack.files for pack in packs),
        sum(one.operation.size_bytes for one in files) + sum(pack.size_bytes for pack in packs),
        len(single) + sum(pack.files for pack in freed),
        sum(single) + sum(pack.size_bytes for pack in freed),
        sum(one.damaged for one in files),
        max(0, int(now) - min(taken_at, default=int(now))),
    )


class Deliveries(Protocol):
    """Knows why deliveries fail now."""

    @property
    def problems(self) -> dict[str, str]:
        """By destination."""


class Reporting:
    """Writes the file whenever something has changed. :param deliveries: know why they fail."""

    def __init__(self, path: Path, custodian: Custodian, deliveries: Sequence[Deliveries], on_disk: OnDisk) -> None:
        self._path, self._custodian, self._deliveries, self._on_disk = path, custodian, deliveries, on_disk

    async def run(self) -> None:
        """Until cancelled."""
        last: dict[str, Any] = {}
        logged_s = float("-inf")
        while True:
            facts = await self._on_disk(self._facts)
            if facts != last:
                try:
                    await self._on_disk(lambda said=facts: self._write(said))  # type: ignore[misc]
                    last = facts
                except OSError as problem:
                    log.error("report-write-failed", path=self._path, problem=problem)
            known = facts["summary"]
            if known["files"] and time.monotonic() - logged_s >= _LOG_S:
                logged_s = time.monotonic()
                log.event("custody-reported", **known)
            await asyncio.sleep(_LOOK_S)

    def _facts(self) -> dict[str, Any]:
        files, packs = self._custodian.held(), self._custodian.packs.held()
        everything: list[Held | HeldPack] = [*files, *packs]
        oldest = heapq.nsmallest(_NAMED, everything, key=lambda one: one.taken_at)
        return {
            "summary": asdict(summary(files, packs, time.time())),
            "problems": {place: why for one in self._deliveries for place, why in one.problems.items()},
            "oldest": [{**_row(one), "refusal": self._custodian.why_refused(one.key)} for one in oldest],
        }

    def _write(self, facts: dict[str, Any]) -> None:
        part = self._path.with_suffix(".new")
        part.write_text(json.dumps({"time": int(time.time()), **facts}, indent=1))
        part.replace(self._path)


def _row(one: Held | HeldPack) -> dict[str, Any]:
    """A file, or a pack by its first."""
    what = one.operation if isinstance(one, Held) else one
    return {
        "origin": said_as(one.sender),
        "seq": what.seq,
        "path": what.path,
        "files": 1 if isinstance(one, Held) else one.files,
        "terminal": what.terminal,
        "bytes": what.size_bytes,
        "release": what.release,
        "since": one.taken_at,
        "damaged": isinstance(one, Held) and one.damaged,
    }


def all_shown(home: Path, now: float) -> str:
    """The reports of a router for a person. :param home: of its records. :raises StageoutError: there is none."""
    found = [home / name for name in (NAME, EGRESS_NAME) if (home / name).exists()]
    return "\n".join(shown(path, now) for path in found or [home / NAME])


def _known(home: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name of each spool with its report, without those that cannot be read. :param home: of the records."""
    for spool, name in (("custody", NAME), ("egress", EGRESS_NAME)):
        with contextlib.suppress(OSError, ValueError):
            yield spool, json.loads((home / name).read_text())


def custody_reports(home: Path) -> tuple[CustodyReport, ...]:
    """Return the sums for the router's ad, which lists no files. :param home: of the records."""
    return tuple(_custody_report(spool, facts) for spool, facts in _known(home))


def _custody_report(spool: str, facts: dict[str, Any]) -> CustodyReport:
    problems = [{"to": to, "reason": why} for to, why in sorted(facts["problems"].items())]
    return built(CustodyReport, {**facts["summary"], "spool": spool, "problems": problems})


def readings(home: Path) -> Readings:
    """Return the metrics of a router's reports, without those that cannot be read. :param home: of its records."""
    found = Readings()
    for spool, facts in _known(home):
        for metric, key in _METRICS.items():
            found.put(f"stageout_router_{metric}", facts["summary"][key], spool)
        found.put("stageout_router_delivery_problems", len(facts["problems"]), spool)
    return found


def shown(path: Path, now: float) -> str:
    """One report for a person. :raises StageoutError: it cannot be read."""
    try:
        facts = json.loads(path.read_text())
    except (OSError, ValueError) as problem:
        raise StageoutError(
            f"{path}: {problem}. Does a router with STAGEOUT_ROUTER_TERMINALS or _EGRESS run here?"
        ) from None
    known = facts["summary"]
    lines = [
        f"{known['files']} files, {known['size_bytes']} bytes in custody; of these {known['single']} files,"
        f" {known['single_bytes']} bytes with this as their only copy; {known['damaged']} wait for their data"
    ]
    for terminal, why in facts["problems"].items():
        lines.append(why if why.startswith(f"{terminal}: ") else f"{terminal}: {why}")
    for row in facts["oldest"]:
        only = "only copy" if row["release"] == "custody" else "sender has it"
        state = "damaged, " if row["damaged"] else ""
        state += f"failed: {row['refusal']}, " if row.get("refusal") else ""
        more = f" and {row['files'] - 1} more" if row["files"] > 1 else ""
        age_s = max(0, int(now) - row["since"])
        lines.append(f"{age_s:>8} s {row['bytes']:>14} bytes  {row['terminal']} {row['path']}{more}  ({state}{only})")
    return "\n".join(lines)
