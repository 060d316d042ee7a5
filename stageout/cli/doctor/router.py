"""Checks of a router of the overlay: is it fast, and can what it hands to transfer plugins be delivered?"""

from __future__ import annotations

import stat
from collections.abc import Iterator

from stageout.cli.doctor import config
from stageout.cli.doctor.findings import Finding, Machine, fail, ok, warn
from stageout.cli.doctor.leftovers import router_plugin_rest
from stageout.wire import frames
from stageout.wire.egress import BadEgress, Target, read_targets
from stageout.wire.route import BadRoute, address

_CREDENTIALS = "STAGEOUT_ROUTER_EGRESS_CREDENTIALS"


def egress(machine: Machine) -> Iterator[Finding]:
    """Has every URL of STAGEOUT_ROUTER_EGRESS a plugin, and what that needs?"""
    try:
        targets = read_targets(machine.settings.text("STAGEOUT_ROUTER_EGRESS"))
        lessor = machine.settings.text("STAGEOUT_ROUTER_EGRESS_LEASES")
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


def sums(machine: Machine) -> Iterator[Finding]:
    """Are the packages there that digest blocks fast? What a router lacks, all its senders must do without."""
    del machine
    lacking = sorted({"crc32c", "xxh3-32"} - set(frames.checksums()))
    if lacking:
        text = f"blocks are not checked with {' and '.join(lacking)}, so a GB takes several times the processor's time"
        yield warn("checksums", text, "pip install 'stageout[overlay]' where the router is installed")
    else:
        yield ok("checksums", "the fast ones are there")


#: Of a router with HTCondor or without.
WHEREVER = (sums, egress, router_plugin_rest)
ROUTER = (config.router_daemon, *WHEREVER)
