"""``stageout ls``, ``stat``, ``rm``, ``mv``, ``mkdir`` and ``copy``: names at routers of the overlay."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from stageout.cli.exits import Exit, UsageError
from stageout.cli.files import Bar, target
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Gateway
from stageout.overlay.copying import copy
from stageout.overlay.operations import Entry, Session

_KINDS = {"file": "-", "directory": "d", "link": "l", "other": "?"}


def run(options: argparse.Namespace) -> int:
    """Do it. The first failure ends the command."""
    try:
        _COMMANDS[options.command](options)
    except TransferFailure as failure:
        print(f"stageout: {failure}", file=sys.stderr)
        return int(Exit.FAILED)
    return int(Exit.OK)


def line(entry: Entry, long: bool) -> str:
    """One entry as ``ls`` shows it."""
    name = printable(entry.name) + ("/" if entry.kind == "directory" else "")
    if not long:
        return name
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.modified))
    return f"{_KINDS[entry.kind]} {entry.mode:03o} {entry.size_bytes:>14} {when} {name}"


def printable(text: str) -> str:
    """A name as a terminal can show it: what would steer the terminal, or is no character, is written out."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _ls(options: argparse.Namespace) -> None:
    gateway, path = target(options.url, options.key)
    with Session(gateway) as session:
        entry = session.stat(path)
        entries = session.entries(path) if entry.kind == "directory" else iter([entry])
        for one in sorted(entries, key=lambda one: one.name):
            print(line(one, options.long))


def _stat(options: argparse.Namespace) -> None:
    gateway, path = target(options.url, options.key)
    with Session(gateway) as session:
        entry = session.stat(path)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.modified))
    for name, value in (
        ("name", printable(path) or "/"), ("kind", entry.kind), ("size", f"{entry.size_bytes} bytes"),
        ("mode", f"{entry.mode:03o}"), ("modified", when), ("generation", entry.generation),
    ):  # fmt: skip
        print(f"{name + ':':<12}{value}")


def _rm(options: argparse.Namespace) -> None:
    for url in options.urls:
        gateway, path = target(url, options.key)
        with Session(gateway) as session:
            if not options.recursive and session.stat(path).kind == "directory":
                raise TransferFailure(ErrorClass.CONFLICT, f"{path} is a directory: rm -r removes it with all in it")
            session.delete(path)
            session.push()


def _mv(options: argparse.Namespace) -> None:
    gateway, path = target(options.url, options.key)
    other, new = target(options.to, options.key)
    if other.server != gateway.server:
        raise UsageError("mv renames at one router; use copy, then rm")
    with Session(gateway) as session:
        session.rename(path, new, parents=options.parents)
        session.push()


def _mkdir(options: argparse.Namespace) -> None:
    for url in options.urls:
        gateway, path = target(url, options.key)
        with Session(gateway) as session:
            session.mkdir(path, parents=options.parents)
            session.push()


def _copy(options: argparse.Namespace) -> None:
    source, path = target(options.url, options.key)
    to, new = target(options.to, options.to_key or options.key)
    if options.to.endswith("/"):
        new = f"{new}/{path.rpartition('/')[2]}".lstrip("/")
    bar = Bar(printable(path.rpartition("/")[2]), _size_bytes(source, path))
    bar.end(copy(source, path, to, new, progress=bar).size_bytes)


def _size_bytes(gateway: Gateway, path: str) -> int:
    with Session(gateway) as session:
        return session.stat(path).size_bytes


_COMMANDS: dict[str, Callable[[argparse.Namespace], None]] = {
    "ls": _ls,
    "stat": _stat,
    "rm": _rm,
    "mv": _mv,
    "mkdir": _mkdir,
    "copy": _copy,
}
