"""Priorities on one link, and the number of connections of a put: shares of 4 to 1, an urgent file, lost packets.

12.5 MB/s and 67 ms (:mod:`tests.harness.wide_area`), packets of 1500 bytes. Each put is a process of its own, so
nobody knows of the others but through the links they share: at the senders' machine (they connect to the far router),
or in a relay there (they connect to it, the far router is its next hop). Gets meet at the far router, which sends. With
0.1 % of all packets lost: CUBIC and BBR by the knob of a put's connections, of which there are two at first. The far
router writes to memory.

At the place "line" the link is faster, and the far router is told that its uplink carries 12.5 MB/s: two machines (a
second address on each side) get from it at once, one of them with the larger weight, or an urgent file. The bytes that
leave are counted at the router's interface, twenty times a second, with the headers of packets. Needs root.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Figure, main_in_parts

from stageout.core.errors import StageoutError
from tests.harness.router import RouterProcess, relay
from tests.harness.wide_area import Link, WideArea

ROOT = Path(__file__).resolve().parents[1]
_FLOW = Path(__file__).resolve().parent / "routers" / "flow.py"
MIB = 1 << 20
LINK = Link(12.5e6, 0.067, congestion="bbr", mtu_bytes=1500)
LOSSY = Link(12.5e6, 0.067, congestion="bbr", mtu_bytes=1500, loss=0.001)
#: Congestion control, and the most connections that it may need.
_LOSSES = {"cubic": 24, "bbr": 4}
_PLACES = ("sender", "relay", "back")
#: Of the part "line": the setting of the router, and a link that has room for more.
_UPLINK_MB_S = 12.5
_WIDE = Link(50e6, 0.067, congestion="bbr")
_OTHER_NEAR, _OTHER_FAR = "10.201.0.3", "10.201.0.4"
_COUNTER = """
import time, pathlib
count = pathlib.Path("/sys/class/net/wan0/statistics/tx_bytes")
while True:
    print(time.monotonic(), int(count.read_text()), flush=True)
    time.sleep(0.05)
"""
#: More than leaves while it is looked at; the urgent file cannot see how much is behind that.
_BULK_BYTES = 1_000_000_000
_SETTLE_S = 5.0


@dataclass
class Site:
    """The far router, a relay at the senders' side, and the senders' files."""

    area: WideArea
    router: RouterProcess
    relay: RouterProcess
    folder: Path
    fetched: Path

    def move(
        self,
        name: str,
        size_bytes: int,
        place: str,
        connections: str,
        priority: int,
        congestion: str = "",
        address: str = "",
    ) -> subprocess.Popen[str]:
        """Start a put, or at the place "back" a get, of a file that is a hole.

        :param connections: as "4", or "2-24" for a controller. :param address: of the far router.
        """
        fetches = place in ("back", "line")
        source = (self.router.root if fetches else self.folder) / name
        with source.open("wb") as file:
            file.truncate(size_bytes)
        end = f"{address or self.area.far_address}:{self.router.port}"
        way = f"{self.area.near_address}:{self.relay.port}" if place == "relay" else "direct"
        verb, local = ("get", self.fetched / name) if fetches else ("put", source)
        words = [verb, str(local), name, end, str(self.router.key_file("site")), way, connections, str(priority)]
        return subprocess.Popen(
            [*self.area.near, sys.executable, str(_FLOW), *words], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "CONGESTION": congestion},
        )  # fmt: skip


@contextlib.contextmanager
def site(link: Link, **settings: str) -> Iterator[Site]:
    """All of it, running. :param settings: of the far router."""
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prio", dir="/dev/shm")))
        fetched = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prio")))
        area = stack.enter_context(WideArea(link))
        with RouterProcess(
            home / "far", {"STAGEOUT_ROUTER_HOST": area.far_address, **settings}, wrapper=area.far
        ) as router:
            end = f"{area.far_address}:{router.port}"
            with relay(home / "relay", [end], wrapper=area.near, host=area.near_address) as middle:
                yield Site(area, router, middle, home, fetched)


def _stop(*puts: subprocess.Popen[str]) -> None:
    for one in puts:
        one.kill()
        one.wait()
        if one.stdout is not None:
            one.stdout.close()


def _rate(put: subprocess.Popen[str], from_s: float, until_s: float) -> float:
    """MB/s between two times, of a put that has been stopped."""
    assert put.stdout is not None
    rows = [json.loads(line) for line in put.stdout.read().splitlines() if line.endswith("}")]
    inside = [row for row in rows if "at_s" in row and from_s <= row["at_s"] <= until_s]
    if len(inside) < 2:
        raise StageoutError("a put has not moved")
    first, last = inside[0], inside[-1]
    return float(last["moved_bytes"] - first["moved_bytes"]) / (last["at_s"] - first["at_s"]) / 1e6


def shares(at: Site, place: str, seconds: float) -> tuple[float, float]:
    """MB/s of weight 4 and of weight 1, four connections each."""
    puts = [at.move("less", _BULK_BYTES, place, "4", 0), at.move("more", _BULK_BYTES, place, "4", 2)]
    time.sleep(_SETTLE_S)
    from_s = time.monotonic()
    time.sleep(seconds)
    until_s = time.monotonic()
    for one in puts:
        one.kill()
    less, more = (_rate(one, from_s, until_s) for one in puts)
    _stop(*puts)
    return more, less


def ended(put: subprocess.Popen[str]) -> dict[str, Any]:
    """The last line of a put."""
    output, _ = put.communicate(timeout=300)
    if put.returncode:
        raise StageoutError(f"a put ended with {put.returncode}")
    return dict(json.loads(output.splitlines()[-1]))


def took_s(put: subprocess.Popen[str]) -> float:
    """Seconds of a put, with its connections."""
    return float(ended(put)["took_s"])


def losses(at: Site, congestion: str, size_bytes: int) -> list[Figure]:
    """A put whose number of connections is found, on a link that loses packets."""
    link = LOSSY.rate_bytes_per_s / 1e6
    end = ended(at.move(congestion, size_bytes, "sender", "2-24", 0, congestion))
    print(f"{congestion}: {end['shares']}")
    rate, connections = size_bytes / end["took_s"] / 1e6, max(end["connections"])
    return [
        Figure(f"{congestion}: one file, 0.1 % loss", rate, "MB/s", "the link", link, 0.85 * link, more=True),
        Figure(f"{congestion}: connections at the end", connections, "", goal=_LOSSES[congestion]),
    ]


def urgent(at: Site, place: str, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of 1 MiB alone, and while a large file of another put is on the link."""
    alone = [took_s(at.move("urgent", MIB, place, "2", 10)) for _ in range(rounds)]
    bulk = at.move("bulk", _BULK_BYTES, place, "4", 0)
    time.sleep(_SETTLE_S)
    behind = []
    for _ in range(rounds):
        behind.append(took_s(at.move("urgent", MIB, place, "2", 10)))
        time.sleep(_SETTLE_S / 2)
    _stop(bulk)
    return alone, behind


def first(place: str, seconds: float, rounds: int) -> list[Figure]:
    """Priorities where flows meet: at the sender, in a relay, or at the router that files come back from."""
    with site(LINK) as at:
        more, less = shares(at, place, seconds)
        alone, behind = urgent(at, place, rounds)
    share, middle = more / (more + less), statistics.median(alone)
    late = statistics.median(behind)
    return [
        Figure(f"{place}: share of weight 4 beside weight 1", share, "of 1", goal=0.72, more=True),
        Figure(f"{place}: share of weight 1", 1 - share, "of 1", goal=0.18, more=True),
        Figure(f"{place}: both together", more + less, "MB/s", "the link", LINK.rate_bytes_per_s / 1e6),
        Figure(f"{place}: 1 MiB urgent behind a large file", late, "s", "alone", middle),
        Figure(f"{place}: so much later than alone", late - middle, "s", goal=0.5),
        Figure(f"{place}: the worst of {rounds}", max(behind) - middle, "s"),
    ]


@contextlib.contextmanager
def _two_machines() -> Iterator[Site]:
    """A router with an uplink; from the second far address on the near side is another machine to it."""
    settings = {"STAGEOUT_ROUTER_UPLINK_MB_S": str(_UPLINK_MB_S), "STAGEOUT_ROUTER_HOST": "0.0.0.0"}
    with site(_WIDE, **settings) as at:
        for command in (
            (*at.area.near, "ip", "addr", "add", _OTHER_NEAR, "dev", "wan0"),
            (*at.area.far, "ip", "addr", "add", _OTHER_FAR, "dev", "wan0"),
            (*at.area.near, "ip", "route", "add", _OTHER_FAR, "dev", "wan0", "src", _OTHER_NEAR),
            (*at.area.far, "ip", "route", "add", _OTHER_NEAR, "dev", "wan0", "src", _OTHER_FAR),
        ):
            subprocess.run(command, check=True)
        yield at


def _uplink_shares(at: Site, seconds: float) -> tuple[float, float, float, float]:
    """MB/s of weight 4 and of weight 1, and of what left: on average, and the most in any second."""
    counter = subprocess.Popen([*at.area.far, sys.executable, "-c", _COUNTER], stdout=subprocess.PIPE, text=True)
    gets = [
        at.move("less", _BULK_BYTES, "line", "1", 0),
        at.move("more", _BULK_BYTES, "line", "1", 2, address=_OTHER_FAR),
    ]
    time.sleep(_SETTLE_S)
    from_s = time.monotonic()
    time.sleep(seconds)
    until_s = time.monotonic()
    for one in (*gets, counter):
        one.kill()
    less, more = (_rate(one, from_s, until_s) for one in gets)
    assert counter.stdout is not None
    rows = [(float(at_s), int(count)) for at_s, count in map(str.split, counter.stdout)]
    rows = [row for row in rows if from_s <= row[0] <= until_s]
    mean = (rows[-1][1] - rows[0][1]) / (rows[-1][0] - rows[0][0])
    most = max(
        (count - before) / (at_s - before_s)
        for number, (before_s, before) in enumerate(rows)
        for at_s, count in [next((row for row in rows[number:] if row[0] >= before_s + 1), (0.0, 0))]
        if at_s
    )
    _stop(*gets, counter)
    return more, less, mean / 1e6, most / 1e6


def _urgent_elsewhere(at: Site, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of 1 MiB to one machine: alone, and while the other one gets a large file."""
    alone = [took_s(at.move("urgent", MIB, "line", "1", 10, address=_OTHER_FAR)) for _ in range(rounds)]
    bulk = at.move("bulk", _BULK_BYTES, "line", "1", 0)
    time.sleep(_SETTLE_S)
    behind = []
    for _ in range(rounds):
        behind.append(took_s(at.move("urgent", MIB, "line", "1", 10, address=_OTHER_FAR)))
        time.sleep(_SETTLE_S / 2)
    _stop(bulk)
    return alone, behind


def line(seconds: float, rounds: int) -> list[Figure]:
    """Two machines that get from one router over its own line."""
    with _two_machines() as at:
        more, less, mean, most = _uplink_shares(at, seconds)
        alone, behind = _urgent_elsewhere(at, rounds)
    middle, late = statistics.median(alone), statistics.median(behind)
    return [
        Figure(
            "line: share of weight 4 at another machine than weight 1",
            more / (more + less),
            "of 1",
            goal=0.72,
            more=True,
        ),
        Figure("line: share of weight 1", less / (more + less), "of 1", goal=0.18, more=True),
        Figure("line: both together", more + less, "MB/s", "the uplink", _UPLINK_MB_S, 0.95 * _UPLINK_MB_S, more=True),
        Figure("line: what leaves, with headers", mean, "MB/s", "the uplink", _UPLINK_MB_S),
        Figure("line: the most of it in any second", most, "MB/s", "the uplink", _UPLINK_MB_S, 1.04 * _UPLINK_MB_S),
        Figure("line: 1 MiB urgent behind a large file to another machine", late, "s", "alone", middle),
        Figure("line: so much later than alone", late - middle, "s", goal=0.5),
        Figure(f"line: the worst of {rounds}", max(behind) - middle, "s"),
    ]


def measure(wanted: Sequence[str], quick: bool) -> list[Figure]:
    """All places, then both kinds of congestion control."""
    rounds, seconds = (2, 8.0) if quick else (5, 20.0)
    figures = [figure for place in _PLACES if place in wanted for figure in first(place, seconds, rounds)]
    figures += line(seconds, rounds) if "line" in wanted else []
    lossy = [congestion for congestion in _LOSSES if congestion in wanted]
    if lossy:
        with site(LOSSY) as at:
            for congestion in lossy:
                figures += losses(at, congestion, (64 if quick else 256) * MIB)
    return figures


if __name__ == "__main__":
    sys.exit(main_in_parts("overlay_priority", [*_PLACES, "line", *_LOSSES], measure))
