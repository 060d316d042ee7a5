"""``stageout routes``: the links that a router of the overlay knows of, and the routes that it takes, with reasons."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from stageout.cli.arguments import add_json
from stageout.cli.bars import printable
from stageout.cli.exits import Exit, UsageError
from stageout.cli.render import table
from stageout.core.units import duration
from stageout.core.units import rate as rate_text
from stageout.overlay.cli.arguments import add_key
from stageout.overlay.key_file import gateway_of
from stageout.overlay.routes import ask_links, ask_routes, ask_uplink
from stageout.overlay.wire.fields import KnownRow
from stageout.overlay.wire.messages import Known, Routed
from stageout.overlay.wire.route import BadRoute, address

_MOST_TERMINALS = 32

DESCRIPTION = """\
Show the links that a router of the overlay knows, with measured rates and round trips. Show also its routes to
TERMINAL, or to every router that it knows, with the reason for each route.

exit status: 0 shown, 1 the router does not answer or refuses, 64 an address cannot be read"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add what this command takes."""
    command.add_argument("router", metavar="ROUTER", help="HOST[:PORT] of the router to ask")
    command.add_argument("terminals", metavar="TERMINAL", nargs="*", help="HOST[:PORT]")
    add_json(command)
    add_key(command)


def run(options: argparse.Namespace) -> int:
    """Ask, and show."""
    try:
        gateway = gateway_of(*address(options.router), Path(options.key))
        links, said = ask_links(gateway).links, ask_uplink(gateway)
        ends = options.terminals or _ends(gateway.server, links)
        routes = [ask_routes(gateway, end) for end in ends]
    except BadRoute as problem:
        raise UsageError(str(problem)) from None
    if options.json:
        print(json.dumps(as_json(links, routes, said), indent=1))
    else:
        print("\n".join(map(printable, [*as_text(gateway.server, links, routes), *uplink_text(said)])))
    return int(Exit.OK)


def _ends(here: str, links: Sequence[KnownRow]) -> list[str]:
    return sorted({end for row in links for end in row[:2]} - {here})[:_MOST_TERMINALS]


def as_text(here: str, links: Sequence[KnownRow], routes: Sequence[Routed]) -> list[str]:
    """Both tables, for people."""
    rows = [(a, b, _rate(rate), _round_trip(rtt), duration(age_ms / 1000)) for a, b, rate, rtt, age_ms in links]
    if not rows and not routes:
        return [f"{here} has no link to another router: see neighbour-connect-failed in its log, and its neighbours."]
    lines = [f"Links known to {here}:", *table(("FROM", "TO", "RATE", "RTT", "AGE"), rows), "", f"Routes from {here}:"]
    return lines + table(("TO", "USED", "BY", "WHY"), [row for one in routes for row in _routes(one)])


def uplink_text(said: Known) -> list[str]:
    """Print the load of the router's uplink and its senders, where it has one."""
    if not said.uplink:
        return []
    rows = [
        (to, owner or "(itself)", str(priority), str(flows), f"{share / 10:.1f} %", rate_text(rate))
        for to, owner, priority, flows, share, rate in said.sharers
    ]
    head = f"Uplink: {rate_text(said.used)} of {rate_text(said.uplink)} used"
    return ["", head, *(table(("TO", "KEY", "PRIORITY", "TRANSFERS", "SHARE", "RATE"), rows) if rows else [])]


def as_json(links: Sequence[KnownRow], routes: Sequence[Routed], said: Known) -> dict[str, object]:
    """The same for programs (docs/reference/json-overlay.md)."""
    names = ("from", "to", "rate_bytes_s", "round_trip_us", "age_ms")
    sharers = ("to", "key", "priority", "transfers", "share_permille", "rate_bytes_s")
    return {
        "schema": 1,
        "links": [dict(zip(names, row)) for row in links],
        "routes": [
            {"to": one.terminal, "used": used, "by": list(route[:-1]), "reason": why, "choice": one.reason}
            for one in routes
            for route, used, why in _each(one)
        ],
        "uplink": {
            "rate_bytes_s": said.uplink,
            "used_bytes_s": said.used,
            "sharers": [dict(zip(sharers, row)) for row in said.sharers],
        },
    }


def _each(one: Routed) -> list[tuple[tuple[str, ...], bool, str]]:
    reasons = [*one.reasons, *[""] * len(one.routes + one.others)]
    used = [True] * len(one.routes) + [False] * len(one.others)
    return list(zip(one.routes + one.others, used, reasons))


def _routes(one: Routed) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for route, used, why in _each(one):
        reason = f"{why} ({one.reason})" if used and one.reason else why
        rows.append((one.terminal, "yes" if used else "no", " > ".join(route[:-1]) or "direct", reason))
    return rows or [(one.terminal, "none", "", one.reason)]


def _rate(bytes_s: int) -> str:
    return rate_text(bytes_s) if bytes_s else "not yet"


def _round_trip(rtt_us: int) -> str:
    return f"{rtt_us / 1e3:.3g} ms" if rtt_us else "not yet"
