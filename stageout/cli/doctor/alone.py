"""Checks of a router on a machine without HTCondor. Its settings are in a file or in the environment."""

from __future__ import annotations

import stat
from collections.abc import Iterator

from stageout.cli.doctor import config
from stageout.cli.doctor.findings import Check, Finding, Machine, fail, ok, warn
from stageout.cli.doctor.router import WHEREVER
from stageout.core.units import size

_ROOT, _DIR, _KEYS = "STAGEOUT_ROUTER_ROOT", "STAGEOUT_ROUTER_DIR", "STAGEOUT_ROUTER_KEYS"
_WITHOUT_ROOT = ("STAGEOUT_ROUTER_NEIGHBOURS", "STAGEOUT_ROUTER_TERMINALS", "STAGEOUT_ROUTER_EGRESS")
_LEAST_FREE = 0.05


def router_places(machine: Machine) -> Iterator[Finding]:
    """Check that the directories for files and records exist and have room."""
    root, home = machine.settings.text(_ROOT), machine.settings.text(_DIR)
    if root:
        yield _directory(machine, _ROOT, root, "make it, or mount it")
    elif not any(machine.settings.text(name) for name in _WITHOUT_ROOT):
        yield fail("router-places", f"{_ROOT} is not set", f"name the directory for files, or set {_WITHOUT_ROOT[0]}")
    if home.startswith("$("):
        yield fail("router-places", f"{_DIR} is not set", "name a directory for the router's records, on a local disk")
    else:
        yield _directory(machine, _DIR, home, "the router makes it when it starts: has it ever been started?")


def _directory(machine: Machine, name: str, path: str, remedy: str) -> Finding:
    try:
        is_directory = stat.S_ISDIR(machine.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        is_directory = False
    if not is_directory or not path.startswith("/"):
        return fail("router-places", f"{name} = {path}: there is no such directory", remedy)
    size_bytes, free_bytes = machine.free_bytes(path)
    words = f"{name} = {path}: {size(free_bytes)} of {size(size_bytes)} are free"
    if free_bytes < _LEAST_FREE * size_bytes:
        return warn("router-places", words, "make room: files that find none are refused")
    return ok("router-places", words)


def router_keys(machine: Machine) -> Iterator[Finding]:
    """Check that a file of keys exists that other users cannot read."""
    path = machine.settings.text(_KEYS)
    try:
        mode = machine.stat(path).st_mode
    except FileNotFoundError:
        remedy = "'stageout-router --settings FILE --new-key NAME PREFIX' makes it"
        yield fail("router-keys", f"{_KEYS} = {path} does not exist", remedy)
        return
    if mode & 0o007:
        yield fail("router-keys", f"{path} is open to all users", f"chmod o= {path}")
    else:
        yield ok("router-keys", f"they are in {path}")


def router_port(machine: Machine) -> Iterator[Finding]:
    """Check that a router listens at its address."""
    host, port = machine.settings.text("STAGEOUT_ROUTER_HOST"), machine.settings.count("STAGEOUT_ROUTER_PORT")
    host = host.strip("[]")
    here = "127.0.0.1" if host in ("*", "0.0.0.0") else "::1" if host == "::" else host
    if machine.listens(here, port):
        yield ok("router-port", f"something listens on port {port}; whether others reach it cannot be seen from here")
    else:
        remedy = (
            "start it (systemctl start stageout-router); its log says why it does not (journalctl -u stageout-router)"
        )
        yield fail("router-port", f"nothing listens on port {port} of {here}", remedy)


CHECKS: tuple[Check, ...] = (config.settings, router_places, router_keys, router_port, *WHEREVER)
