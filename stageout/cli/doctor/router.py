"""Checks of a router of the overlay: its speed, and the delivery by its transfer plugins."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from stageout.cli.doctor import config
from stageout.cli.doctor.findings import Finding, Machine, fail, ok, reports_as, warn, words
from stageout.cli.doctor.leftovers import router_plugin_rest
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.wire import frames
from stageout.overlay.wire.egress import BadEgress, Target, read_targets
from stageout.overlay.wire.messages import CLOCKS_APART
from stageout.overlay.wire.route import BadRoute, address

_NEIGHBOURS, _TERMINALS = "STAGEOUT_ROUTER_NEIGHBOURS", "STAGEOUT_ROUTER_TERMINALS"
_LESSOR = "STAGEOUT_ROUTER_EGRESS_LEASES"
_OTHERS = (_NEIGHBOURS, _TERMINALS, _LESSOR)
#: The neighbour name that stands for routers found through the collector.
_FOUND = "collector"
_AT_ONCE = 8
#: Routers refuse a handshake when their clocks differ by ten minutes.
_CLOCKS_S = 60
_SET = "set the wrong one (NTP)"
_REACH = "is the router there up, and its port open to this machine? Until then what is for it waits here"
_REMEDIES = {
    ErrorClass.CREDENTIAL_REFUSED: "let NAME and SECRET in STAGEOUT_ROUTER_KEY be those of a line in its keys file",
    ErrorClass.PERMISSION_DENIED: "add 'NAME SECRET PREFIX router' to its keys file, and let it read that (SIGHUP)",
    ErrorClass.CREDENTIAL_MISSING: "write the NAME SECRET that this router shows to others there: STAGEOUT_ROUTER_KEY",
}
_CREDENTIALS = "STAGEOUT_ROUTER_EGRESS_CREDENTIALS"


def egress(machine: Machine) -> Iterator[Finding]:
    """Check that every URL of STAGEOUT_ROUTER_EGRESS has a plugin that supports it."""
    try:
        targets = read_targets(machine.settings.text("STAGEOUT_ROUTER_EGRESS"))
        lessor = machine.settings.text(_LESSOR)
        if lessor:
            address(lessor)
    except (BadEgress, BadRoute) as problem:
        yield fail("egress", f"the router does not start: {problem}", "correct STAGEOUT_ROUTER_EGRESS and ..._LEASES")
        return
    if not targets:
        yield ok("egress", "no name is delivered by a plugin")
        return
    owners: dict[str, str] = {}
    yield from config.registered(machine, owners)
    for target in targets.known:
        yield from _target(machine, target, owners)


def _target(machine: Machine, target: Target, owners: dict[str, str]) -> Iterator[Finding]:
    name = f"egress /{target.prefix}"
    service, _, method = target.scheme.rpartition("+")
    owner = owners.get(method)
    if owner is None:
        yield fail(name, f"no plugin takes {method}", f"let FILETRANSFER_PLUGINS name one: {target.shown} waits for it")
        return
    if service:
        place = machine.settings.text(_CREDENTIALS)
        token = f"{place}/{service}.use"
        if not place:
            yield fail(name, f"{target.shown} needs the token of {service}", f"set {_CREDENTIALS}, a directory with it")
            return
        try:
            is_open = machine.stat(token).st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        except FileNotFoundError:
            yield fail(name, f"{token} does not exist", f"put the token of {service} there")
            return
        if is_open:
            yield fail(name, f"{token} is open to other users", f"chmod 600 {token}")
            return
    yield ok(name, f"goes to {target.shown} by {owner}")


@reports_as("checksums")
def sums(machine: Machine) -> Iterator[Finding]:
    """Check that the packages for fast digests are installed: senders can use only the digests that their router
    has.
    """
    del machine
    lacking = sorted({"crc32c", "xxh3-32"} - set(frames.checksums()))
    if lacking:
        text = f"blocks are not checked with {' and '.join(lacking)}, so a GB takes several times the processor's time"
        yield warn("checksums", text, "pip install crc32c xxhash where the router is installed")
    else:
        yield ok("checksums", "the fast ones are there")


@reports_as("router-others")
def others(machine: Machine) -> Iterator[Finding]:
    """Check that the neighbours of this router answer, accept its key, and agree with its clock."""
    setting = machine.settings.text
    terminals = (word.partition("=")[0] for word in setting(_TERMINALS).split())  # there commas separate keys
    named = {*terminals, *words(setting(_NEIGHBOURS)), *words(setting(_LESSOR))} - {_FOUND}
    if not named:
        yield ok("router-others", "it connects to no router that its settings name")
        return
    with ThreadPoolExecutor(_AT_ONCE) as threads:  # an unreachable one uses up its whole time limit
        yield from threads.map(lambda place: _other(machine, place, setting("STAGEOUT_ROUTER_KEY")), sorted(named))


def _other(machine: Machine, place: str, key: str) -> Finding:
    try:
        ahead_s = machine.greet(*address(place), key)
    except BadRoute as problem:
        return fail("router-others", str(problem), f"write HOST:PORT in {', '.join(_OTHERS)}")
    except TransferFailure as problem:
        text = str(problem) if place in str(problem) else f"{place}: {problem}"
        remedy = _SET if CLOCKS_APART in text else _REMEDIES.get(problem.kind, _REACH)
        return fail("router-others", text, remedy)
    if abs(ahead_s) > _CLOCKS_S:
        return warn("router-others", f"the clock of {place} is {ahead_s:+.0f} s from ours", _SET)
    return ok("router-others", f"{place} takes the key in {key}")


#: Checks of a router, with or without HTCondor.
WHEREVER = (sums, others, egress, router_plugin_rest)
ROUTER = (config.router_daemon, *WHEREVER)
