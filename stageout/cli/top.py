"""``stageout top``: show a live table of deliveries by cluster and destination."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from stageout.cli import render
from stageout.cli.arguments import add_json, add_schedd
from stageout.cli.exits import Exit, Unavailable
from stageout.cli.outputs import outputs_of
from stageout.cli.overview import Rates, as_json, groups_of, lines
from stageout.cli.results import tell
from stageout.cli.rows import Row
from stageout.cli.servers import server_of
from stageout.cli.status import reported
from stageout.cli.whose import whose_jobs
from stageout.core.classads import ClassAd

if TYPE_CHECKING:
    from stageout.cli.condor import Pool, Queue

DESCRIPTION = """\
Show what is being delivered, by cluster and server. Refresh the table until Ctrl-C; without a terminal, print it once.
Each refresh asks the schedd one question, and the collector at most three. If the answers are slow, the command
refreshes less often.

exit status: 0 shown, 69 the schedd does not answer"""

#: The minimum pause between queries, as a multiple of the duration of the last queries.
_REST = 10


class Look(NamedTuple):
    """The state at one time. :param servers: servers of jobs, by ``cluster.proc``. :param notes: about gaps."""

    rows: list[Row]
    servers: dict[str, str]
    notes: list[str]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    command.add_argument(
        "-d", "--delay", metavar="S", type=_delay, default=3.0,
        help="seconds between refreshes, 2 to 60 (default: 3)",
    )  # fmt: skip
    command.add_argument("-a", "--all", dest="all_users", action="store_true", help="show the jobs of all users")
    add_json(command)
    add_schedd(command)


def _delay(text: str) -> float:
    """Parse a delay. :raises ValueError: it is not between 2 and 60."""
    value = float(text)
    if not 2 <= value <= 60:
        raise ValueError
    return value


_delay.__name__ = "number of seconds (2 to 60)"


def run(options: argparse.Namespace) -> int:
    """Show the table once, or repeatedly on a terminal."""
    from stageout.cli.condor import Pool, Queue

    queue, pool = Queue(options.name, options.pool), Pool(options.pool)
    owner = None if options.all_users else whose_jobs()
    if sys.stdout.isatty() and not options.json:
        return _live(lambda: look(queue, pool, owner), options.delay)
    seen = look(queue, pool, owner)
    groups = groups_of(seen.rows, seen.servers)
    if options.json:
        tell({"at": int(time.time()), "groups": [as_json(group) for group in groups], "notes": seen.notes})
    else:
        print("\n".join(lines(groups, seen.rows, seen.notes)))
    return int(Exit.OK)


def look(queue: Queue, pool: Pool, owner: str | None) -> Look:
    """Query the schedd and the collector.

    :param owner: owner of the jobs; None for all owners. :raises Unavailable: the schedd does not answer.
    """
    found = [(job, ad) for job, ad in queue.jobs_with_outputs(owner) if job.in_stage_out or job.delivered]
    jobs = [job for job, _ in found]
    servers = {str(job.id): server_text(ad) for job, ad in found}
    seen = reported(jobs, queue, pool)
    return Look(seen.rows, servers, seen.notes)


def server_text(ad: ClassAd) -> str:
    """Return the destination server of a job's output, "several" for more than one."""
    found = {str(server_of(output.url)) for output in outputs_of(ad)} - {""}
    return "several" if len(found) > 1 else next(iter(found), "")


def _live(ask: Callable[[], Look], delay_s: float) -> int:
    """Redraw until Ctrl-C."""
    rates, drawn = Rates(), 0
    try:
        while True:
            started_s = time.monotonic()
            shown = _frame(ask, rates, time.monotonic)
            took_s = time.monotonic() - started_s
            terminal = shutil.get_terminal_size()
            shown = render.fit(shown, terminal.columns, terminal.lines)
            sys.stdout.write((f"\x1b[{drawn}F\x1b[J" if drawn else "") + "\n".join(shown) + "\n")
            sys.stdout.flush()
            drawn = len(shown)
            time.sleep(rest_s(delay_s, took_s))
    except KeyboardInterrupt:
        return int(Exit.OK)


def rest_s(delay_s: float, took_s: float) -> float:
    """Return the seconds until the next query. Slow daemons are queried less often."""
    return max(delay_s, _REST * took_s)


def _frame(ask: Callable[[], Look], rates: Rates, clock: Callable[[], float]) -> list[str]:
    try:
        seen = ask()
    except Unavailable as problem:  # a restart of a daemon does not end the watch
        return [f"stageout: {problem}"]
    groups = groups_of(seen.rows, seen.servers)
    rates.take(clock(), seen.rows, seen.servers, groups)
    return [time.strftime("%H:%M:%S"), *lines(groups, seen.rows, seen.notes)]
