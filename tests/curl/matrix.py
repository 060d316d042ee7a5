"""The matrix: every request that stageout_curl_plugin makes goes wrong in every way, beside HTCondor's own plugin.

An extra request may make the outcome better known; it never makes it worse than the plain transfer. A cell is a server
(a world), a step that the plugin makes there, and a fault. Steps come from what the plugin does, so a step that is new
is broken too; one that has no name in :data:`~tests.curl.matrix_worlds.HTTP_STEPS` is reported.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from stageout.core.classads import ClassAd
from stageout.testing.starter import EmbeddedStarter, PluginTable, Wanted
from tests.curl.beside import clean_environment
from tests.curl.hall import Door, FtpDoor, Hall, open_ftp
from tests.curl.matrix_worlds import (
    DATA,
    FTP_PLAIN,
    FTP_STEPS,
    HTTP_STEPS,
    OLDER,
    PLAIN,
    SLOW,
    WORLDS,
    World,
    ftp_faults,
    http_faults,
)

EVERY_EXTRA = "every extra step"
_ALWAYS, _ONCE = "always", "once"
#: An extra request that hangs costs seconds, not minutes.
EXTRA_S = 15.0
_STOCK_LIFETIME_S = 25.0
_LIFETIME_S = 240.0
#: So many cells that look worse are run again alone; more need no second look.
_MOST_DOUBTS = 24
#: libcurl says goodbye when a connection is closed, which is sometimes behind the end of the call.
_FAREWELL = frozenset({"QUIT", "QUIT after"})
_BATCH = 120
_AT_ONCE = 24
#: A plain request that goes wrong for ever fails in both plugins. These few worlds show it.
_PLAIN_WORLDS = frozenset({"put", "get", "get that breaks", "get in parts", "put by dav", "put by ftp", "get by ftp"})
#: HTCondor's own plugin waits for minutes.
_PATIENT = frozenset({*SLOW, "reset", "stored and reset", "short", "garbage", "long", "421", "425", "426"})
#: The second fault of a pair: the first one leads the plugin to the step.
_SECOND = frozenset(
    {
        "400",
        "403",
        "404",
        "405",
        "409",
        "423",
        "429",
        "500",
        "501",
        "503",
        "550",
        "502",
        "553",
        "hang",
        "reset",
        "endless",
    }
)


@dataclass(frozen=True)
class Cell:
    """One broken step.

    :param times: how often the fault comes. :param before: another step and its fault, which lead to this step.
    """

    world: World
    step: str
    fault: str
    times: str = _ALWAYS
    before: tuple[str, str] | None = None

    def __str__(self) -> str:
        led = f"{self.before[0]}: {self.before[1]}; then " if self.before else ""
        return f"{self.world.name} / {led}{self.step}: {self.fault}{' once' if self.times == _ONCE else ''}"

    @property
    def plain_steps(self) -> frozenset[str]:
        """Steps of a plain transfer."""
        return FTP_PLAIN if self.world.answer is None else PLAIN

    def door(self) -> Door | FtpDoor:
        """A new server with the fault."""
        door: Any = self.world.door()
        faults_of: Any = ftp_faults if self.world.answer is None else http_faults
        if self.step == EVERY_EXTRA:
            door.extra = faults_of("")[self.fault]
        elif self.step:
            door.faults[self.step] = faults_of(self.step)[self.fault]
        if self.before:
            door.faults[self.before[0]] = faults_of(self.before[0])[self.before[1]]
        if self.times == _ONCE:
            door.most_fires = 1
        return door


@dataclass
class Outcome:
    """The end of a cell with one plugin.

    :param arrived: it reports success, and the content is right. :param claimed: it reports success.
    :param left: files that are there besides the one that was to arrive.
    :param unread: what it left in the sandbox.
    """

    claimed: bool
    arrived: bool
    left: frozenset[str]
    taken_bytes: int
    tries: int
    seconds: float
    kind: str
    message: str
    steps: tuple[str, ...]
    fired: int

    @property
    def attempts(self) -> int:
        return max(1, self.tries)


@dataclass
class Verdict:
    """A cell with both outcomes."""

    cell: Cell
    stock: Outcome
    ours: Outcome
    worse: list[str] = field(default_factory=list)


class Matrix:
    """All cells with both plugins.

    :param stock: HTCondor's own plugin, and :param ours: with their tables.
    :ivar verdicts: of the cells whose fault was met. :ivar unknown: steps without a name, and where they were made.
    """

    def __init__(self, stock: Path, ours: Path, words: Sequence[str] = ()) -> None:
        self._stock, self._ours = stock, ours
        self._tables = {stock: PluginTable([stock]), ours: PluginTable([ours])}
        self._words = words
        self._honest: dict[str, Outcome] = {}
        self._steps: dict[str, set[str]] = {}  # world -> steps that ours makes
        self._leads: dict[tuple[str, str], tuple[str, str]] = {}
        self.verdicts: list[Verdict] = []
        self.unknown: set[str] = set()

    def run(self) -> None:
        """Break every step."""
        worlds = [world for world in WORLDS if not self._words or any(word in world.name for word in self._words)]
        self._run([Cell(world, "", "") for world in worlds])
        first = [cell for world in worlds for cell in self._cells(world, self._steps[world.name])]
        self._run(first)
        for _ in range(2):  # a step that only a refusal of another leads to, and those behind it
            new = {key: lead for key, lead in self._leads.items() if key[1] not in self._steps[key[0]] | _FAREWELL}
            for name, step in new:
                self._steps[name].add(step)
            by_name = {world.name: world for world in worlds}
            self._run([cell for key, lead in sorted(new.items()) for cell in _second(by_name[key[0]], key[1], lead)])

    def _cells(self, world: World, steps: Iterable[str]) -> list[Cell]:
        faults_of: Any = ftp_faults if world.answer is None else http_faults
        plain = FTP_PLAIN if world.answer is None else PLAIN
        cells = []
        for step in sorted(steps - _FAREWELL):
            if step.removesuffix(" after") in plain and not step.endswith(" after"):
                cells += _plain_cells(world, step, faults_of(step))
            else:
                cells += [Cell(world, step, name) for name in faults_of(step)]
        return cells + [Cell(world, EVERY_EXTRA, name) for name in faults_of("") if steps - plain]

    def _run(self, cells: Sequence[Cell]) -> None:
        """Run cells with both plugins and judge them. A cell that looks worse in a batch is run again alone."""
        stock = self._stock_outcomes(cells)
        arriving = [cell for cell in cells if stock[cell].arrived]
        failing = [cell for cell in cells if not stock[cell].arrived]
        ours = {**self._in_batches(arriving), **self._in_batches(failing)}
        doubtful = [cell for cell in cells if judge(cell, stock[cell], ours[cell])][:_MOST_DOUBTS]
        with ThreadPoolExecutor(4) as pool:
            ours.update(zip(doubtful, pool.map(self._alone, doubtful)))
        for cell in cells:
            outcome = ours[cell]
            known = FTP_STEPS if cell.world.answer is None else HTTP_STEPS
            self.unknown.update(f"{step} ({cell})" for step in outcome.steps if step not in known)
            made = self._steps.setdefault(cell.world.name, set())
            if not cell.step:
                made.update(step for step in outcome.steps if step in known)
            elif cell.step != EVERY_EXTRA and cell.before is None and cell.times == _ALWAYS:
                for step in outcome.steps:
                    if step not in made and step in known:
                        self._leads.setdefault((cell.world.name, step), (cell.step, cell.fault))
            if outcome.fired or not cell.step:
                self.verdicts.append(Verdict(cell, stock[cell], outcome, judge(cell, stock[cell], outcome)))

    def _stock_outcomes(self, cells: Sequence[Cell]) -> dict[Cell, Outcome]:
        """Run HTCondor's plugin where it makes the step; elsewhere the fault changes nothing for it."""
        found: dict[Cell, Outcome] = {}
        todo = []
        for cell in cells:
            honest = self._honest.get(cell.world.name)
            steps = {cell.step, cell.before[0] if cell.before else cell.step}
            if honest is None or steps & set(honest.steps):
                todo.append(cell)
            else:
                found[cell] = honest
        with ThreadPoolExecutor(6) as pool:
            for cell, outcome in zip(todo, pool.map(lambda cell: self._call(self._stock, [cell])[0], todo)):
                found[cell] = outcome
                if not cell.step:
                    self._honest[cell.world.name] = outcome
        return found

    def _in_batches(self, cells: Sequence[Cell]) -> dict[Cell, Outcome]:
        """Many cells in one call of our plugin: each has a server of its own."""

        def key(cell: Cell) -> tuple[bool, str, bool]:
            return cell.world.upload, str(cell.world.env), cell.fault in SLOW

        calls = []
        for _, group in groupby(sorted(cells, key=key), key):
            same = list(group)
            size = 12 if same[0].world.env else _BATCH
            calls += [same[start : start + size] for start in range(0, len(same), size)]
        found: dict[Cell, Outcome] = {}
        with ThreadPoolExecutor(2) as pool:
            for call, outcomes in zip(calls, pool.map(lambda call: self._call(self._ours, call), calls)):
                found.update(zip(call, outcomes))
        return found

    def _alone(self, cell: Cell) -> Outcome:
        return self._call(self._ours, [cell])[0]

    def _call(self, plugin: Path, cells: Sequence[Cell]) -> list[Outcome]:
        """One process."""
        home = Path(tempfile.mkdtemp(prefix="stageout-matrix-"))
        is_ours, world = plugin == self._ours, cells[0].world
        doors = [cell.door() for cell in cells]
        names = [f"f{number}" for number in range(len(cells))]
        try:
            with Hall() as hall:
                for door in doors:
                    hall.open(door) if isinstance(door, Door) else open_ftp(hall, door)
                if world.upload:
                    for name in names:
                        (home / name).write_bytes(DATA)
                starter = EmbeddedStarter(
                    home,
                    self._tables[plugin],
                    job_ad=world.job,
                    environment={**clean_environment(), "STAGEOUT_CONCURRENCY": str(_AT_ONCE), **world.env},
                    lifetime_s=_LIFETIME_S if is_ours else _STOCK_LIFETIME_S,
                )
                wanted = [Wanted(cell.world.url(door), name) for cell, door, name in zip(cells, doors, names)]
                run = starter.run(plugin, starter.input_text(plugin, wanted), world.upload)
            ads = [run.ads[number] if number < len(run.ads) else ClassAd() for number in range(len(cells))]
            return [
                _outcome(cell, door, ad, home, name, run.duration_s if len(cells) == 1 else None)
                for cell, door, ad, name in zip(cells, doors, ads, names)
            ]
        finally:
            shutil.rmtree(home, ignore_errors=True)


def _plain_cells(world: World, step: str, faults: Iterable[str]) -> list[Cell]:
    """Break a step of the plain transfer: once, and for ever where that does not take minutes."""
    if world.name not in _PLAIN_WORLDS:
        return []
    cells = [Cell(world, step, name, _ONCE) for name in faults if name not in SLOW]
    return cells + [Cell(world, step, name) for name in faults if name not in _PATIENT]


def _second(world: World, step: str, lead: tuple[str, str]) -> list[Cell]:
    faults_of: Callable[[str], Any] = ftp_faults if world.answer is None else http_faults
    plain = FTP_PLAIN if world.answer is None else PLAIN
    names = [name for name in faults_of(step) if name in _SECOND]
    if step in plain:
        return [Cell(world, step, "403" if world.answer else "550", before=lead)]
    return [Cell(world, step, name, before=lead) for name in names]


def _outcome(cell: Cell, door: Door | FtpDoor, ad: ClassAd, home: Path, name: str, duration_s: float | None) -> Outcome:
    world = cell.world
    claimed = ad.get("TransferSuccess") is True
    facts = ad.get("DeveloperData")
    facts = facts if isinstance(facts, ClassAd) else ClassAd()
    if world.upload:
        right = door.files.get(world.path) == DATA
        older = {world.path: OLDER} if world.older else {}
        left = frozenset(path for path, data in door.files.items() if path != world.path and older.get(path) != data)
    else:
        path = home / name
        right = path.is_file() and path.read_bytes() == DATA
        left = frozenset(entry.name for entry in home.iterdir() if f".{name}." in entry.name)
    errors = ad.get("TransferErrorData")
    newest = errors[-1] if isinstance(errors, list) and errors else ClassAd()
    seconds = facts.get("StageOutSeconds", duration_s)
    if seconds is None:
        seconds = float(ad.get("TransferEndTime", 0)) - float(ad.get("TransferStartTime", 0))
    return Outcome(
        claimed=claimed,
        arrived=claimed and right,
        left=left,
        taken_bytes=door.taken_bytes,
        tries=int(facts.get("TransferTries", 1) or 1),
        seconds=float(seconds),
        kind=str(newest.get("ErrorType", "")),
        message=str(ad.get("TransferError", "no result ad" if not ad else "")),
        steps=tuple(dict.fromkeys(door.steps)),
        fired=door.fired,
    )


def judge(cell: Cell, stock: Outcome, ours: Outcome) -> list[str]:
    """Say in which respects ours is worse."""
    found = []
    if stock.arrived and not ours.arrived:
        found.append(f"does not arrive: {ours.message or 'success without the file'}")
    if ours.claimed and not ours.arrived and not stock.claimed:
        found.append("reports success for a file that is not there")
    allowed = max(2 * len(DATA) * ours.attempts, stock.taken_bytes)
    if ours.taken_bytes > allowed:
        found.append(f"sends {ours.taken_bytes} bytes in {ours.attempts} attempts for a file of {len(DATA)}")
    left = ours.left - stock.left
    if left and stock.arrived:
        found.append(f"leaves {', '.join(sorted(_shown(name) for name in left))}")
    if stock.arrived and ours.seconds > stock.seconds + EXTRA_S:
        found.append(f"takes {ours.seconds:.0f} s")
    if not stock.claimed and cell.world.missing and ours.kind != stock.kind:
        found.append(f"calls it {ours.kind}, the other {stock.kind}: {ours.message}")
    return found


def _shown(name: str) -> str:
    return "a hidden file" if name.rpartition("/")[2].startswith(".") else name


HEADER = """\
| server and transfer | step that goes wrong | faults | HTCondor's arrives | ours arrives | worse in |
|---|---|---|---|---|---|"""


def rows(verdicts: Sequence[Verdict]) -> list[str]:
    """Lines of the table, one for each step in each world."""

    def key(verdict: Verdict) -> tuple[int, str]:
        return WORLDS.index(verdict.cell.world), verdict.cell.step

    lines = []
    for (_, step), group in groupby(sorted(verdicts, key=key), key):
        if not step:
            continue
        same = list(group)
        arrived = [sum(getattr(one, side).arrived for one in same) for side in ("stock", "ours")]
        worse = sum(bool(one.worse) for one in same)
        lines.append(f"| {same[0].cell.world.name} | {step} | {len(same)} | {arrived[0]} | {arrived[1]} | {worse} |")
    return lines
