"""``stageout ls``, ``stat``, ``rm``, ``mv``, ``mkdir`` and ``copy``: names at routers of the overlay."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from stageout.cli.bars import Bar, printable
from stageout.cli.exits import Exit, UsageError
from stageout.cli.files import ask_with, name_there, named, target, through
from stageout.cli.results import SCHEMA, item
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Gateway
from stageout.overlay.copying import carry, command, copy
from stageout.overlay.operations import Entry, Session
from stageout.overlay.settings import routes_of

#: Names that are sorted together.
_SORTED = 100_000
_KINDS = {"file": "-", "directory": "d", "link": "l", "other": "?"}


def run(options: argparse.Namespace) -> int:
    """Do it. The first failure ends the command."""
    _COMMANDS[options.command](options)
    return int(Exit.OK)


def line(entry: Entry, long: bool) -> str:
    """One entry as ``ls`` shows it."""
    name = printable(entry.name) + ("/" if entry.kind == "directory" else "")
    if not long:
        return name
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.modified))
    return f"{_KINDS[entry.kind]} {entry.mode:03o} {entry.size_bytes:>14} {when} {name}"


def as_json(entry: Entry) -> dict[str, object]:
    """The same for programs (docs/COMMANDS.md)."""
    fields = ("name", "kind", "size_bytes", "mode", "modified")
    return {name: getattr(entry, name) for name in fields}


def _session(gateway: Gateway, options: argparse.Namespace) -> Session:
    custodian = through(gateway, options.through)[0] if getattr(options, "through", None) else None
    return Session(gateway, routes=routes_of(options.routes, custodian or gateway), through=custodian)


def _ls(options: argparse.Namespace) -> None:
    gateway, path = target(options.url, options.key)
    with _session(gateway, options) as session:
        entry = session.stat(path)
        parts = _sorted(session.entries(path) if entry.kind == "directory" else iter([entry]))
        shown = (one for part in parts for one in part)
        if options.json:
            _print_json(shown)
            return
        for one in shown:
            print(line(one, options.long))


def _sorted(entries: Iterator[Entry]) -> Iterator[list[Entry]]:
    """By name; of very many one part after the other, so that they need not all be held."""
    while part := sorted(islice(entries, _SORTED), key=lambda one: one.name):
        yield part


def _print_json(entries: Iterator[Entry]) -> None:
    """One object, as it comes."""
    first = next(entries, None)
    print(f'{{"schema": {SCHEMA}, "entries": [', end="")
    if first is not None:
        print("\n " + json.dumps(as_json(first)), end="")
    for one in entries:
        print(",\n " + json.dumps(as_json(one)), end="")
    print("\n]}")


def _stat(options: argparse.Namespace) -> None:
    gateway, path = target(options.url, options.key)
    with _session(gateway, options) as session:
        entry = session.stat(path)
    if options.json:
        more = {"generation": entry.generation, "known": entry.note, "digest": entry.digest, "manifest": entry.manifest}
        print(json.dumps({"schema": SCHEMA, **as_json(entry), **more}, indent=1))
        return
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.modified))
    for name, value in (
        ("name", printable(path) or "/"), ("kind", entry.kind), ("size", f"{entry.size_bytes} bytes"),
        ("mode", f"{entry.mode:03o}"), ("modified", when), ("generation", entry.generation),
        ("digest", printable(f"{entry.digest} {entry.manifest}") if entry.manifest else "-"),
    ):  # fmt: skip
        print(f"{name + ':':<12}{value}")
    if entry.note:
        print(f"{'known:':<12}{printable(entry.note)}")


def _rm(options: argparse.Namespace) -> None:
    for url in options.urls:
        gateway, path = target(url, options.key)
        named(url, path)
        with item(options.json, server=gateway.server, path=path), _session(gateway, options) as session:
            if not options.recursive and session.stat(path).kind == "directory":
                raise TransferFailure(ErrorClass.CONFLICT, f"{path} is a directory: rm -r removes it with all in it")
            session.delete(path)
            session.push()


def _mv(options: argparse.Namespace) -> None:
    gateway, path = target(options.url, options.key)
    named(options.url, path)
    other, new = target(options.to, options.key)
    new = name_there(new, options.to, path)
    if other.server != gateway.server:
        raise UsageError("mv renames at one router; use copy, then rm")
    about = {"server": gateway.server, "path": path, "to": new}
    with item(options.json, **about), _session(gateway, options) as session:
        session.rename(path, new, parents=options.parents)
        session.push()


def _mkdir(options: argparse.Namespace) -> None:
    for url in options.urls:
        gateway, path = target(url, options.key)
        named(url, path)
        with item(options.json, server=gateway.server, path=path), _session(gateway, options) as session:
            session.mkdir(path, parents=options.parents)
            session.push()


def _copy(options: argparse.Namespace) -> None:
    source, path = target(options.url, options.key)
    named(options.url, path)
    to, new = target(options.to, options.to_key or options.key)
    new = name_there(new, options.to, path)
    routes, to_routes = routes_of(options.routes, source), routes_of(options.to_routes or options.routes, to)
    about: dict[str, Any] = {"server": source.server, "path": path, "to_server": to.server, "to": new}
    with item(options.json, **about, size_bytes=0, generation=0, origin="", carried="") as facts:
        if options.background:
            given = command(source, path, to, new, routes=routes, target_routes=to_routes)
            facts.update(outcome="copying", size_bytes=given.size_bytes, origin=given.origin)
            if not options.json:
                print(f"{source.server} copies it; what became of it: {ask_with(source, given.origin)}")
            return
        move = carry if options.carry else copy
        with Bar(path.rpartition("/")[2], 0, not options.json) as bar:
            done = move(source, path, to, new, progress=bar, sized=bar.sized, routes=routes, target_routes=to_routes)
            bar.end(done.size_bytes)
        facts.update(size_bytes=done.size_bytes, generation=done.generation, carried=done.carried)
        if done.carried and not options.json:
            print(f"  carried through this machine: {done.carried}")


_COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "ls": _ls,
    "stat": _stat,
    "rm": _rm,
    "mv": _mv,
    "mkdir": _mkdir,
    "copy": _copy,
}
