"""Several hops: what Kangaroo's and DiskRouter's authors measured, and what they left open. Needs root.

Five hops put and get, by relays and from custodian to custodian; eighteen writers that rename their files; a custodian
that is away while its files arrive by another; a custodian between two links whose rates change independently.

Each hop is a wide-area link of its own between network namespaces (:mod:`tests.harness.wide_area`). Files are as
long as those of Kangaroo's measurements. Everything is digested and synced at each end.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import secrets
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import Figure, main_in_parts
from routers.chain import Chain, changing, cpu_s
from routers.iperf import iperf
from routers.net import Net, writers

from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess
from tests.harness.wide_area import Link, WideArea

#: Of each file in Kangaroo's measurements.
FILE_BYTES = 8_642_560
HOPS = 5
WRITERS = 18
_RATE = 4e6
_FAST = 25e6
_HOP_S = 0.01
#: Ten minutes of Kangaroo's measurement are so many seconds here.
_AWAY_S = 30.0
#: Files that only the custodian has that stops, and the beginning of their names.
_ONE_ROUTE, _WAITS = 4, "waits"


def _link(rate: float = _RATE, round_trip_s: float = _HOP_S) -> Link:
    return Link(rate, round_trip_s, congestion="bbr")


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hops", dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


# ---- five hops -------------------------------------------------------------------------------------------------------


def five_hops(quick: bool) -> list[Figure]:
    """Ten files, one after the other, five hops away and one hop away; likewise one long file, unless it is quick."""
    count = 3 if quick else 10
    lengths = [] if quick else [("a long file", 1, count * FILE_BYTES)]
    lengths.append((f"{count} files", count, FILE_BYTES))
    figures: list[Figure] = []
    with _folder() as folder, Chain(folder, [_link()] * HOPS) as chain:
        for verb in ("put", "get"):
            for what, number, size_bytes in lengths:
                before = cpu_s(chain.routers[2])
                far = _in_turn(chain, verb, number, size_bytes, chain.last)
                cpu = (cpu_s(chain.routers[2]) - before) / (number * size_bytes / 1e9)
                near = _in_turn(chain, verb, number, size_bytes, 1)
                figures.append(Figure(f"{verb}, relays, {HOPS} hops, {what}", far, "MB/s", "one hop", near))
                figures.append(Figure(f"{verb}, {HOPS} hops of one, {what}", far / near, "ratio", goal=0.9, more=True))
                if number == 1:
                    figures.append(Figure(f"{verb}: a relay's processor time", cpu, "s/GB"))
    return figures


def _in_turn(chain: Chain, verb: str, count: int, size_bytes: int, station: int) -> float:
    """MB/s of files to or from the router at a station, one after the other."""
    files = [
        {"do": verb, "end": chain.address(station), "path": f"{size_bytes}-{number}", "size_bytes": size_bytes,
         "routes": ",".join(chain.relays(station))}
        for number in range(count)
    ]  # fmt: skip
    told = chain.ask({"files": files})["files"]
    return count * size_bytes / 1e6 / float(told[-1]["there_s"])


# ---- computing while files move --------------------------------------------------------------------------------------


def overlap(quick: bool) -> list[Figure]:
    """A program that computes as long as a hop takes to carry its output, again and again."""
    count = 3 if quick else 10
    compute_s = FILE_BYTES / _RATE
    with _folder() as folder, Chain(folder, [_link()] * HOPS, local=True) as chain:
        common = {"size_bytes": FILE_BYTES, "compute_s": compute_s}
        waiting = chain.ask(
            {
                "files": [
                    {"do": "put", "end": chain.address(chain.last), "path": f"w{number}",
                     "routes": ",".join(chain.relays()), **common}
                    for number in range(count)
                ]
            }
        )["files"]  # fmt: skip
        way = ",".join(chain.address(station) for station in range(1, chain.last + 1))
        before = cpu_s(chain.routers[2])
        given = chain.ask(
            {
                "files": [
                    {"do": "deposit", "end": chain.address(0), "path": f"d{number}", "terminal": way, **common}
                    for number in range(count)
                ]
            }
        )["files"]
        cpu = (cpu_s(chain.routers[2]) - before) / (count * FILE_BYTES / 1e9)
    there_s = max(file["there_s"] for file in given)
    each_s = compute_s + FILE_BYTES / _RATE
    return [
        Figure("custodians: the writer is free", given[-1]["free_s"], "s", "computing alone", count * compute_s),
        Figure("custodians: everything is delivered", there_s, "s", "relays, and the writer waits",
               waiting[-1]["there_s"]),
        Figure("custodians: least possible, pipelined by whole files", count * compute_s + HOPS * FILE_BYTES / _RATE,
               "s", "waiting, least possible", count * each_s),
        Figure("custodians: a custodian's processor time", cpu, "s/GB"),
    ]  # fmt: skip


# ---- eighteen writers ------------------------------------------------------------------------------------------------


def eighteen(quick: bool) -> list[Figure]:
    """All write by two routes at once and rename at the end; then one of them to an end that has stopped.

    One queue for all stands beside: one route, and no rename before the last file's last byte.
    """
    size_bytes = FILE_BYTES // 4 if quick else FILE_BYTES
    with _folder() as folder, Net(folder, [_link(), _link()], terminals=2) as net:
        late = [one["named_s"] - one["there_s"] for one in _write(net, size_bytes, WRITERS, 0)]
        queue = _one_queue(net, size_bytes)
        alone_s, beside_s = list[float](), list[float]()
        for _ in range(1 if quick else 3):
            alone_s.append(max(one["named_s"] for one in _write(net, size_bytes, WRITERS - 1, 0)))
            with _stopped(net.terminals[1], 1.0):
                beside_s.append(max(one["named_s"] for one in _write(net, size_bytes, WRITERS - 1, 1)))
    rate = (WRITERS - 1) * size_bytes / 1e6 / _median(alone_s)
    later = _median([beside / alone - 1 for beside, alone in zip(beside_s, alone_s)])
    return [
        Figure(f"{WRITERS - 1} writers, relays, two routes", rate, "MB/s", "both links", 2 * _RATE / 1e6),
        Figure("a rename after the last byte, others still write: median", _median(late), "s"),
        Figure("a rename after the last byte, others still write: longest", max(late), "s"),
        Figure("another flow's end stops for ever: later by", max(0.0, later), "share", goal=0.05),
        *queue,
    ]  # fmt: skip


def _one_queue(net: Net, size_bytes: int) -> list[Figure]:
    """All files, and then all renames, one after the other."""
    common = {"end": net.ends[0], "size_bytes": size_bytes, "routes": net.routes([0])}
    puts = [{**common, "do": "put", "path": f"q{n}"} for n in range(WRITERS)]
    renames = [{**common, "do": "rename", "path": f"q{n}", "target": f"r{n}"} for n in range(WRITERS)]
    told = _told(net, [*puts, *renames], 1)
    there, named = told[:WRITERS], told[WRITERS:]
    late = [name["named_s"] - file["there_s"] for file, name in zip(there, named)]
    first_to_last_s = named[-1]["named_s"] - named[0]["named_s"]
    return [
        Figure("one queue for all: renames, first to last", first_to_last_s, "s"),
        Figure("one queue for all: a rename after the last byte: median", _median(late), "s"),
    ]


def _write(net: Net, size_bytes: int, count: int, stopped: int) -> list[dict[str, Any]]:
    """:param stopped: writers to the second terminal, for which nobody waits."""
    common = {"do": "put", "size_bytes": size_bytes, "routes": net.routes([0, 1])}
    files = [{**common, "end": net.ends[0], "path": f"p{n}", "target": f"n{n}"} for n in range(count)]
    files = [
        *({**common, "end": net.ends[1], "path": f"s{n}", "size_bytes": 8 * FILE_BYTES, "optional": True}
          for n in range(stopped)),
        *files,
    ]  # fmt: skip
    return _told(net, files, len(files))[stopped:]


def _told(net: Net, files: list[dict[str, Any]], at_once: int) -> list[dict[str, Any]]:
    """Run ``writers.py`` beside the terminals; what it says of each file."""
    job = {"folder": str(net.folder), "key": str(net.terminals[0].key_file("site")), "files": files}
    return list(writers(net.inside, {**job, "at_once": at_once})["files"])


@contextlib.contextmanager
def _stopped(router: RouterProcess, after_s: float) -> Iterator[None]:
    """A router, with its workers, stands still from so many seconds on."""
    timer = threading.Timer(after_s, os.killpg, (router.pid, signal.SIGSTOP))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        os.killpg(router.pid, signal.SIGCONT)


# ---- a custodian that is away ----------------------------------------------------------------------------------------


def away(quick: bool) -> list[Figure]:
    """Files that one of two custodians had when it stopped arrive by the other, and get other names meanwhile.

    Some files have only the one that stops, and wait for it.
    """
    count, away_s = (4, 10.0) if quick else (10, _AWAY_S)
    with _folder() as folder, Chain(folder, [_link(_FAST), _link()]) as chain:
        home, terminal = folder / "other", chain.routers[2]
        settings = {
            "STAGEOUT_ROUTER_HOST": "0.0.0.0",
            "STAGEOUT_ROUTER_ADDRESS": f"{chain.areas[0].far_address}:9622",
            "STAGEOUT_ROUTER_TERMINALS": chain.address(2),
            "STAGEOUT_ROUTER_KEY": str(home / "carrier.key"),
        }
        stops = chain.routers[1]
        with RouterProcess(home, settings, 9622, wrapper=chain.inside(1)):
            origins = [secrets.token_hex(16) for _ in range(count)]
            given = [
                {"do": "deposit", "path": f"a{number}", "origin": origin, "terminal": chain.address(2),
                 "size_bytes": FILE_BYTES}
                for number, origin in enumerate(origins)
            ]  # fmt: skip
            waiting = [
                {**given[0], "path": f"{_WAITS}{number}", "origin": secrets.token_hex(16)}
                for number in range(_ONE_ROUTE)
            ]
            chain.ask({"files": [{**one, "end": chain.address(1), "leave": True} for one in (*given, *waiting)]})
            wait_until(lambda: _names(terminal), timeout_s=120, what="the first file by the one that will stop")
            os.killpg(stops.pid, signal.SIGSTOP)
            stopped_s, had, early = time.monotonic(), len(_names(terminal)), _waited(terminal)
            try:
                chain.ask({"files": [{**one, "end": f"{chain.areas[0].far_address}:9622"} for one in given]})
                arrived_s = time.monotonic() - stopped_s
                _change(chain, count)
                tree = _tree(terminal)
                time.sleep(max(0.0, away_s - (time.monotonic() - stopped_s)))
            finally:
                os.killpg(stops.pid, signal.SIGCONT)
            back_s, stood_s = time.monotonic(), time.monotonic() - stopped_s
            wait_until(lambda: _waited(terminal) == _ONE_ROUTE, timeout_s=300, what="the files of one route")
            late_s = time.monotonic() - stopped_s
            wait_until(lambda: not _spooled(stops), timeout_s=300, what="its spool to be empty")
            empty_s = time.monotonic() - back_s
            differ = set(tree.items()) ^ set(_tree(terminal).items())
    return [
        Figure(f"a custodian stands still: ten minutes, 1:{600 / away_s:.0f}", stood_s, "s"),
        Figure(f"files that arrived meanwhile by the other, of {count - had}", float(count - had), "files"),
        Figure("all files there after", arrived_s, "s"),
        Figure("files of one route that waited", float(_ONE_ROUTE - early), "files"),
        Figure("the last file of one route there after", late_s, "s"),
        Figure("it is back: its spool is empty after", empty_s, "s", goal=60.0),
        Figure("it is back: names or contents that changed", float(len(differ)), "files", goal=0.0),
    ]


def _change(chain: Chain, count: int) -> None:
    """A third of the files get another name, a third are deleted, and half of these made anew, with another content."""
    end = chain.address(chain.last)
    third = count // 3
    common = {"end": end, "size_bytes": FILE_BYTES}
    files = [{"do": "rename", "path": f"a{n}", "target": f"renamed{n}", **common} for n in range(third)]
    files += [{"do": "delete", "path": f"a{n}", **common} for n in range(third, 2 * third)]
    chain.ask({"files": files})
    again = range(0, 2 * third, 2)
    chain.ask({"files": [{"do": "put", "end": end, "path": f"a{n}", "size_bytes": 1000 + n} for n in again]})


def _names(router: RouterProcess) -> list[str]:
    """Return the files that both custodians had."""
    return [path.name for path in router.root.iterdir() if not path.name.startswith((".stageout", _WAITS))]


def _waited(router: RouterProcess) -> int:
    return len(list(router.root.glob(f"{_WAITS}*")))


def _tree(router: RouterProcess) -> dict[str, tuple[int, int]]:
    """Name -> inode and size: a file that was written again has another inode."""
    found = {name: (router.root / name).stat() for name in _names(router)}
    return {name: (status.st_ino, status.st_size) for name, status in found.items()}


def _spooled(router: RouterProcess) -> list[Path]:
    return list((router.home / "records/spool/.stageout/staging").iterdir())


# ---- a buffer in the middle ------------------------------------------------------------------------------------------


def middle(quick: bool) -> list[Figure]:
    """Two links whose rates change at random and independently: with and without somewhere to keep files in between."""
    count = 6 if quick else 24
    size_bytes = count * FILE_BYTES
    figures: list[Figure] = []
    took: dict[str, float] = {}
    one, two = (_schedule(seed) for seed in (1, 2))
    without, within = _ideal(one, two, size_bytes)
    ideals = {"direct": without, "relay": without, "custodian": within}
    with _folder() as folder, Chain(folder, [_link(), _link()], settings={"STAGEOUT_ROUTER_DELIVERIES": "5"}) as chain:
        end, first = chain.address(2), chain.address(1)
        ways: dict[str, dict[str, str]] = {
            "direct": {"do": "put", "end": end},
            "relay": {"do": "put", "end": end, "routes": first},
            "custodian": {"do": "deposit", "end": first, "terminal": end},
        }
        for name, way in ways.items():
            common = {"size_bytes": FILE_BYTES, **way}
            files = [{**common, "path": f"{name}{number}"} for number in range(count)]
            before = cpu_s(chain.routers[1])
            with changing(chain.areas[0], one), changing(chain.areas[1], two):
                told = chain.ask({"files": files, "at_once": 4})["files"]
            took[name] = max(file["there_s"] for file in told)
            cpu = (cpu_s(chain.routers[1]) - before) / (size_bytes / 1e9)
            what = f"{name}, beside links that are always full"
            figures.append(Figure(what, size_bytes / 1e6 / took[name], "MB/s", "ideal", ideals[name] / 1e6))
            if name != "direct":
                figures.append(Figure(f"the {name} in the middle: its processor time", cpu, "s/GB"))
        if not quick:
            plain = min(_plain(area, schedule) for area, schedule in zip(chain.areas, (one, two)))
            figures.append(Figure("plain TCP over one half, of what that carries: the worse", plain, "ratio"))
    return [
        *figures,
        Figure("gain of a custodian in the middle over a relay", took["relay"] / took["custodian"], "ratio",
               "of the ideal ones", within / without),
        Figure("gain of a custodian in the middle over no router", took["direct"] / took["custodian"], "ratio"),
    ]  # fmt: skip


def _plain(area: WideArea, schedule: Sequence[tuple[float, float]]) -> float:
    """The share of a fluctuating link that plain TCP reaches: it has to find the rate again after each change."""
    size_bytes = 6 * FILE_BYTES
    with changing(area, schedule):
        return iperf(area, 4, size_bytes) * 1e6 / _ideal(schedule, schedule, size_bytes)[0]


def _schedule(seed: int) -> list[tuple[float, float]]:
    """Seconds at a rate: half of the time at a good one, half at a bad one."""
    dice = random.Random(seed)
    return [(dice.uniform(2.0, 5.0), dice.choice((8e6, 1e6))) for _ in range(200)]


def _ideal(
    one: Sequence[tuple[float, float]], two: Sequence[tuple[float, float]], size_bytes: int
) -> tuple[float, float]:
    """Bytes/s at which so many bytes get through both halves, one behind the other, if these are always full: without a
    buffer, when the narrower half counts at each moment; and with one without limits, which is empty at first.
    """
    step_s, now_s = 0.01, 0.0
    through, middle_bytes, far_bytes = 0.0, 0.0, 0.0
    ended: dict[str, float] = {}
    for rate, next_rate in zip(_rates(one, step_s), _rates(two, step_s)):
        now_s += step_s
        through += min(rate, next_rate) * step_s
        middle_bytes = min(size_bytes, middle_bytes + rate * step_s)
        far_bytes = min(middle_bytes, far_bytes + next_rate * step_s)
        for name, passed in (("without", through), ("within", far_bytes)):
            if passed >= size_bytes:
                ended.setdefault(name, now_s)
        if len(ended) == 2:
            break
    return size_bytes / ended["without"], size_bytes / ended["within"]


def _rates(schedule: Sequence[tuple[float, float]], step_s: float) -> Iterator[float]:
    for lasts_s, rate in itertools.cycle(schedule):
        yield from itertools.repeat(rate, round(lasts_s / step_s))


CASES: dict[str, Callable[[bool], list[Figure]]] = {
    "five_hops": five_hops,
    "overlap": overlap,
    "eighteen": eighteen,
    "away": away,
    "middle": middle,
}


def measure(parts: Sequence[str], quick: bool) -> list[Figure]:
    """Some of the cases."""
    figures: list[Figure] = []
    for part in parts:
        found = [replace(figure, what=f"{part}: {figure.what}") for figure in CASES[part](quick)]
        print("\n".join(f"{figure.what}: {figure.value:.3g} {figure.unit}" for figure in found), flush=True)
        figures += found
    return figures


if __name__ == "__main__":
    sys.exit(main_in_parts("overlay_hops", list(CASES), measure))
