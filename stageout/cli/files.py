"""``stageout put`` and ``stageout get``: files to a router of the overlay and back.

What a plain put does not need is loaded where it is: a file may take less time than the modules.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit

from stageout.cli.bars import Bar, printable
from stageout.cli.exits import CommandError, Exit, UsageError
from stageout.cli.results import ending, item, tell
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay import outcomes
from stageout.overlay.arrivals import umask
from stageout.overlay.channel import Gateway
from stageout.overlay.client import Deposit, put
from stageout.overlay.key_file import gateway_of
from stageout.overlay.sending import Share, report
from stageout.overlay.settings import congestion_of, connections_of, custodian_of, routes_of
from stageout.wire.fields import MAX_PATH_BYTES, is_origin
from stageout.wire.overlay import Copying, Custody, Result
from stageout.wire.route import DEFAULT_PORT, BadRoute, Route, address, addresses, check, written

#: Of a file of which nothing is known.
_NOTHING_SENT: dict[str, Any] = {"size_bytes": 0, "sent_bytes": 0, "generation": 0, "routes": [], "custodians": []}
_NOTHING_FETCHED: dict[str, Any] = {"size_bytes": 0, "stale_from": "", "routes": []}
#: What is no part of a path in a URL, or is dropped from it in silence.
_LOST_IN_URLS = frozenset("?#\t\r\n")


def run(options: argparse.Namespace) -> int:
    """Move the files in order; the first that fails ends the command."""
    gateway, path = target(options.url, options.key)
    gateway = replace(gateway, congestion=congestion_of())
    if options.command == "ask":
        return _ask(gateway, options)
    if getattr(options, "custody", False) and not options.through:
        raise UsageError("--custody needs --through")
    if getattr(options, "update", False) and (options.through or not options.recursive):
        raise UsageError(
            "--update is for directories (-r), and compares them with the router's own: not with --through"
        )
    if options.command == "get":
        return _get(gateway, path, options)
    _check_copies(options)
    custodians = (options.through or "").split(";")
    first = through(gateway, custodians[0])[0] if custodians[0] else gateway
    routes = routes_of(options.routes, first)
    if options.recursive and (len(custodians) > 1 or "," in custodians[0] or options.copies > 1):
        raise UsageError("--recursive goes through one custodian")
    if options.lot and (options.recursive or options.through):
        raise UsageError("--lot is for single files that go to the router itself")
    if options.recursive:
        from stageout.cli.trees import send_trees

        terminal = through(gateway, options.through)[1] if options.through else ""
        return send_trees(gateway, path, options, routes, first, terminal)
    if "-" in options.files and (len(options.files) > 1 or is_directory(path, options.url)):
        raise UsageError("- (standard input) goes alone, to a URL with the file's name at its end")
    names = [name_there(path, options.url, file, len(options.files) > 1) for file in options.files]
    check_names(names)
    for file, name in zip(options.files, names):
        about = {"kind": "file", "local": file, "server": gateway.server, "path": name, **_NOTHING_SENT}
        with item(options.json, **about) as facts, _given(file) as local:
            _put(gateway, local, name, options, routes, facts)
    return int(Exit.OK)


def is_directory(path: str, url: str) -> bool:
    """Tell whether a URL means a directory: it ends with /, or has no path."""
    return not path or url.endswith("/")


def check_names(names: Sequence[str]) -> None:
    """:raises UsageError: two files would get the same name, and only the last would stay."""
    for name, times in Counter(names).items():
        if times > 1:
            raise UsageError(f"{times} of these would be {printable(name)} there: send them to different directories")


def name_there(path: str, url: str, local: str, into: bool = False) -> str:
    """The path of a file at the router. :param path: of the URL. :param into: it is a directory, however written."""
    if into or is_directory(path, url):
        return f"{path}/{Path(local).name}".lstrip("/")
    return path


def target(url: str, key: str) -> tuple[Gateway, str]:
    """Router and path of an overlay URL. :raises CommandError: it is none, or the key cannot be read."""
    if set(url) & _LOST_IN_URLS:
        raise UsageError(
            f"{printable(url)}: in a URL write %3F for ?, %23 for #, %0A for the end of a line, %09 for a tab"
        )
    try:
        parts = urlsplit(url)
    except ValueError as problem:
        raise UsageError(f"{printable(url)}: {problem}") from None
    path = os.fsdecode(unquote_to_bytes(os.fsencode(parts.path))).strip("/")
    if parts.scheme != "overlay" or not parts.hostname:
        raise UsageError(f"{url}: write overlay://HOST[:PORT]/path")
    if "@" in parts.netloc:
        raise UsageError(f"{url}: nobody is named in a URL: --key is the file that says who you are")
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise UsageError(f"{url[:100]}...: its path is longer than {MAX_PATH_BYTES} bytes")
    try:
        return gateway_of(parts.hostname, _port(parts), Path(key)), path
    except ValueError:
        raise UsageError(f"{url}: the port is not a number from 1 to 65535") from None
    except TransferFailure as failure:
        raise CommandError(f"{failure} (--key)", failure.kind) from None


def _port(parts: SplitResult) -> int:
    """:raises ValueError: it is none."""
    if parts.port == 0:
        raise ValueError
    return parts.port or DEFAULT_PORT


def named(url: str, path: str) -> str:
    """The path of a URL. :raises UsageError: it has none."""
    if not path:
        raise UsageError(f"{printable(url)}: this is all of the router: name what is meant in it")
    return path


def _put(
    gateway: Gateway,
    local: Path,
    path: str,
    options: argparse.Namespace,
    routes: Sequence[Route],
    facts: dict[str, Any],
) -> None:
    try:
        status = local.stat()
    except OSError as problem:
        raise CommandError(f"{local}: {problem.strerror}", ErrorClass.LOCAL_FILE) from None
    if local.is_dir():
        raise UsageError(f"{local} is a directory: put -r sends all that is below it")
    is_gathered = options.files == ["-"]
    mode = _mode_of_new_files() if is_gathered else status.st_mode & 0o777
    facts["size_bytes"] = status.st_size
    with Bar(path.rpartition("/")[2] if is_gathered else local.name, status.st_size, not options.json) as bar:
        facts.update(_send(gateway, local, path, options, routes, mode, bar))


def _mode_of_new_files() -> int:
    """Return the mode of a file sent from standard input: its temporary file is readable for nobody else."""
    return 0o666 & ~umask()


def _send(
    gateway: Gateway, local: Path, path: str, options: argparse.Namespace, routes: Sequence[Route], mode: int, bar: Bar
) -> dict[str, Any]:
    """Send it, and say what became of it; the same for programs."""
    terminal = ""
    first, most = connections_of(options.connections)
    deadline = deadline_of(options)
    if options.custody:
        from stageout.overlay.safekeeping import Custodian, deposit_copies

        custodians = [Custodian(*through(gateway, one)) for one in options.through.split(";")]
        given = deposit_copies(
            custodians, local, path, copies=options.copies, wait_s=options.wait, mode=mode,
            connections=first, most_connections=most, progress=bar, routes=routes, priority=options.priority,
            deadline=deadline,
        )  # fmt: skip
        bar.end(given[0].size_bytes)
        for one in given if not options.json else ():
            print(f"  in custody; what became of it: stageout ask overlay://{one.custodian} {one.origin}")
        return {"outcome": "custody", "custodians": [_custody(one) for one in given], "sent_bytes": _sent(given)}
    if options.through:
        gateway, terminal = through(gateway, options.through)
    done = put(
        gateway, local, path, mode=mode, connections=first, most_connections=most, progress=bar, terminal=terminal,
        routes=routes, lot=options.lot, priority=options.priority, deadline=deadline,
    )  # fmt: skip
    bar.end(done.size_bytes)
    if not options.json and (len(routes) > 1 or any(share.reason for share in done.shares)):
        print(f"  {report(done.shares)}")
    return {
        "size_bytes": done.size_bytes, "sent_bytes": done.sent_bytes, "generation": done.generation,
        "routes": _routes(done.shares),
    }  # fmt: skip


def _routes(shares: Sequence[Share]) -> list[dict[str, Any]]:
    return [
        {"by": list(one.route), "sent_bytes": one.sent_bytes, "connections": one.connections, "problem": one.problem}
        for one in shares
    ]


def _custody(given: Deposit) -> dict[str, Any]:
    """Return the operation for a later `ask`, and when it expires."""
    return {"custodian": given.custodian, "origin": given.origin, "number": given.seq, "expires": given.expires}


def _sent(given: Sequence[Deposit]) -> int:
    return sum(one.sent_bytes for one in given)


def deadline_of(options: argparse.Namespace) -> int:
    """Return the wished time of arrival as Unix time; 0 for no wish."""
    return int(time.time() + options.within) if options.within else 0


def _check_copies(options: argparse.Namespace) -> None:
    if options.copies > 1 and not options.custody:
        raise UsageError("--copies is for --custody: without it you keep the file until it has arrived")
    if options.through and ";" in options.through and not options.custody:
        raise UsageError("several custodians to choose from ('A; B') are for --custody; 'A,B' is the way through both")


def through(gateway: Gateway, custodian: str) -> tuple[Gateway, str]:
    """The first of the custodians, and what is behind it, the terminal last. :raises UsageError: an address is none."""
    first, *more = custodians_of(custodian)
    host, port = address(first)
    return replace(gateway, host=host, port=port), ",".join([*more, written(gateway.host, gateway.port)])


def custodians_of(text: str) -> tuple[str, ...]:
    """Custodians on one way, in their order. :raises UsageError: an address is none."""
    try:
        found = addresses(text)
        check(found)
    except BadRoute as problem:
        raise UsageError(f"--through: {problem}") from None
    if not found:
        raise UsageError("--through: name a custodian: HOST or HOST:PORT")
    return found


def ask_with(gateway: Gateway, origin: str) -> str:
    """The command that tells what became of a file."""
    return f"stageout ask overlay://{gateway.server} {origin}"


def _ask(gateway: Gateway, options: argparse.Namespace) -> int:
    from stageout.overlay.copying import state

    if not is_origin(options.origin):
        words = "write the 32 digits that put --custody or copy --background has printed"
        raise UsageError(f"{printable(options.origin)} is no ORIGIN: {words}")
    if options.files > 1:
        return _ask_all(gateway, options)
    answer = state(gateway, options.origin, options.cancel)
    if options.json:
        tell(_fate(gateway, options.origin, 1, answer))
    elif isinstance(answer, Custody):
        print(f"in custody of {printable(answer.router)}")
    elif isinstance(answer, Copying):
        problem = f": {printable(answer.problem)}" if answer.problem else ""
        print(f"{answer.moved_bytes} of {answer.size_bytes} bytes{problem}")
    else:
        print(f"{answer.outcome}{': ' if answer.reason else ''}{printable(answer.reason)}")
    if not isinstance(answer, Result):
        return int(Exit.TIMED_OUT)
    return int({"done": Exit.OK, "pending": Exit.TIMED_OUT}.get(answer.outcome, Exit.FAILED))


def _fate(gateway: Gateway, origin: str, seq: int, answer: Result | Custody | Copying) -> dict[str, Any]:
    """Return the outcome of a file, for programs."""
    about: dict[str, Any] = {
        "server": gateway.server, "origin": origin, "number": seq, "custodian": "", "moved_bytes": 0, "size_bytes": 0,
        "generation": 0,
    }  # fmt: skip
    if isinstance(answer, Custody):
        return {**about, **ending(outcome="custody"), "custodian": answer.router}
    if isinstance(answer, Copying):
        moved = {"moved_bytes": answer.moved_bytes, "size_bytes": answer.size_bytes}
        problem = TransferFailure(ErrorClass.from_code(answer.code), answer.problem) if answer.problem else None
        return {**about, **ending(problem, "copying"), **moved}
    over = answer.outcome not in ("done", "pending")
    problem = outcomes.failure(answer, f"file {seq}", gateway.server) if over else None
    return {**about, **ending(problem, answer.outcome), "generation": answer.generation}


def _ask_all(gateway: Gateway, options: argparse.Namespace) -> int:
    """Many files of one origin: those that will not arrive, and how many there are of each kind."""
    from stageout.overlay.copying import states

    if options.cancel:
        raise UsageError("--cancel is for one file: leave out --files")
    answers = states(gateway, options.origin, options.files)
    found = Counter("in custody" if isinstance(one, Custody) else one.outcome for one in answers)
    for seq, one in enumerate(answers, 1):
        if options.json:
            tell(_fate(gateway, options.origin, seq, one))
        elif isinstance(one, Result) and one.outcome not in ("done", "pending"):
            print(f"file {seq}: {one.outcome}{': ' if one.reason else ''}{printable(one.reason)}")
    if not options.json:
        print(", ".join(f"{count} {what}" for what, count in found.items()))
    if set(found) == {"done"}:
        return int(Exit.OK)
    return int(Exit.TIMED_OUT if set(found) <= {"done", "in custody", "pending"} else Exit.FAILED)


@contextlib.contextmanager
def _given(file: str) -> Iterator[Path]:
    """The file, or what standard input has, for ``-``: in a temporary file, since its size must be known."""
    if file != "-":
        yield Path(file)
        return
    import shutil
    import tempfile

    with tempfile.NamedTemporaryFile(prefix="stageout-") as gathered:
        try:
            shutil.copyfileobj(sys.stdin.buffer, gathered)
            gathered.flush()
        except OSError as problem:
            place = f"{tempfile.gettempdir()} (TMPDIR names another place)"
            words = f"standard input is gathered in {place}: {problem.strerror}"
            raise CommandError(words, ErrorClass.LOCAL_FILE) from None
        yield Path(gathered.name)


def _print(gateway: Gateway, path: str, options: argparse.Namespace) -> int:
    """All of a file to standard output, as it comes."""
    import shutil

    from stageout.overlay.opening import open_file

    if options.json:
        raise UsageError("--json prints on standard output, where the file would go: name one in place of -")
    if options.through or options.stale_ok:  # whoever reads has no way to see that it is another version
        raise UsageError("--through and --stale-ok are for files: name one in place of -")
    with open_file(gateway, path, routes=routes_of(options.routes, gateway)) as file:
        try:
            shutil.copyfileobj(file, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            raise
        except OSError as problem:
            raise CommandError(f"standard output: {problem.strerror}", ErrorClass.LOCAL_FILE) from None
    return int(Exit.OK)


def _get(gateway: Gateway, path: str, options: argparse.Namespace) -> int:
    if options.recursive:
        if options.file == "-" or options.through or options.stale_ok:
            raise UsageError("-r fetches from the router into a directory: leave out -, --through and --stale-ok")
        from stageout.cli.trees import fetch_tree

        return fetch_tree(gateway, path, options, routes_of(options.routes, gateway))
    if options.file == "-":
        return _print(gateway, path, options)
    local = _place_here(path, options.file)
    about = {"kind": "file", "local": str(local), "server": gateway.server, "path": path}
    with item(options.json, **about, **_NOTHING_FETCHED) as facts, Bar(local.name, 0, not options.json) as bar:
        facts.update(_fetch(gateway, path, local, options, bar))
    return int(Exit.OK)


def _place_here(path: str, file: str | None) -> Path:
    """Return the target path of a file. :param file: its name here, or a directory: one that exists, or ends with /."""
    name = Path(path).name
    if not name:
        raise UsageError("the URL names no file; get -r fetches a directory")
    place = Path(file or name)
    if file and (file.endswith("/") or stat.S_ISDIR(mode_here(place))):
        place = place / name
    if mode_here(place) and not stat.S_ISREG(mode_here(place)):  # a device, above all: its name would be a file's
        raise CommandError(f"{place} is no file that could be replaced", ErrorClass.LOCAL_FILE)
    return place


def mode_here(place: Path) -> int:
    """Kind and permissions of what has a name here; 0 where nothing has, or one may not look."""
    try:
        return place.stat().st_mode
    except OSError:
        return 0


def _fetch(gateway: Gateway, path: str, local: Path, options: argparse.Namespace, bar: Bar) -> dict[str, Any]:
    from stageout.overlay.finding import get_found

    received, shares = [0], list[Share]()
    first, most = connections_of(options.connections)

    def sized(size_bytes: int) -> None:
        received[0] = size_bytes
        bar.sized(size_bytes)

    custodians = [custodians_of(one) for one in options.through.split(";")] if options.through else [custodian_of()]
    kept = get_found(
        gateway, custodians, path, local,
        stale_ok=options.stale_ok, progress=bar, sized=sized, routes=routes_of(options.routes, gateway),
        priority=options.priority, deadline=deadline_of(options), connections=first, most_connections=most,
        ended=shares.extend,
    )  # fmt: skip
    bar.end(received[0])
    told = report(shares) if kept is None and (len(shares) > 1 or any(share.reason for share in shares)) else ""
    if told and not options.json:
        print(f"  {told}")
    if kept is not None and not options.json:
        print(f"  not from {gateway.server}: {kept}")
    stale_from = "" if kept is None else kept.custodian.server
    return {"size_bytes": received[0], "stale_from": stale_from, "routes": _routes(shares)}
