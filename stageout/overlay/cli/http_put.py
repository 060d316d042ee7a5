"""``stageout put`` by HTTP."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stageout.cli.bars import Bar, printable
from stageout.cli.exits import CommandError, Exit, UsageError
from stageout.cli.results import item
from stageout.core.errors import ErrorClass
from stageout.core.units import size
from stageout.overlay.arrivals import umask
from stageout.overlay.cli.arguments import deadline_of
from stageout.overlay.cli.choosing import Target, check_path, target
from stageout.overlay.cli.places import given
from stageout.overlay.transfer.crew import Share
from stageout.overlay.transfer.upload import put

#: Of a file of which nothing is known.
_NOTHING_SENT: dict[str, Any] = {"size_bytes": 0, "sent_bytes": 0, "generation": 0, "routes": [], "custodians": []}


def run(options: argparse.Namespace) -> int:
    """Send the files in order; the first that fails ends the command."""
    to = target(options.url, options)
    if options.update and not options.recursive:
        raise UsageError("--update is for directories (-r)")
    if options.custody and not options.through:
        raise UsageError("--custody goes with --through")
    if options.through and (options.recursive or options.copies > 1 or options.wait):
        raise UsageError("with https:// --through takes single files, and --copies and --wait are for overlay:// URLs")
    if options.recursive:
        from stageout.overlay.cli.http_trees import send_trees

        return send_trees(to, options)
    is_into = len(options.files) > 1 or not to.path or options.url.endswith("/")
    if "-" in options.files and is_into:
        raise UsageError("- (standard input) goes alone, to a URL with the file's name at its end")
    names = [f"{to.path}/{Path(file).name}".lstrip("/") if is_into else to.path for file in options.files]
    for name, times in Counter(names).items():
        check_path(name)
        if times > 1:
            raise UsageError(f"{times} of these would be {printable(name)} there: send them to different directories")
    for file, name in zip(options.files, names):
        about = {"kind": "file", "local": file, "server": to.server, "path": name, **_NOTHING_SENT}
        with item(options.json, **about) as facts, given(file) as local:
            _put(to, local, name, options, facts)
    return int(Exit.OK)


def _put(to: Target, local: Path, path: str, options: argparse.Namespace, facts: dict[str, Any]) -> None:
    try:
        status = local.stat()
    except OSError as problem:
        raise CommandError(f"{local}: {problem.strerror}", ErrorClass.LOCAL_FILE) from None
    if local.is_dir():
        raise UsageError(f"{local} is a directory: put -r sends all that is below it")
    is_gathered = options.files == ["-"]
    mode = 0o666 & ~umask() if is_gathered else status.st_mode & 0o777
    facts["size_bytes"] = status.st_size
    with Bar(path.rpartition("/")[2] if is_gathered else local.name, status.st_size, not options.json) as bar:
        sent = put(
            to.place, to.identity, local, path, routes=to.routes, mode=mode, first=to.first, most=to.most,
            hop=hop_of(options), progress=bar, until="custody" if options.custody else "done",
        )  # fmt: skip
        bar.end(sent.size_bytes)
    show_routes(sent.shares, options)
    facts.update(size_bytes=sent.size_bytes, sent_bytes=sent.sent_bytes, routes=as_json(sent.shares))
    if options.through:
        number = f"{sent.fields.origin}/{sent.fields.seq}"
        facts.update(custodians=list(sent.state.custodians), operation=number, state=sent.state.state)
        if options.custody and not options.json:
            print(f"  {sent.state.state} at {', '.join(sent.state.custodians) or sent.fields.terminal}: {number}")


def hop_of(options: argparse.Namespace) -> dict[str, str]:
    """Return the fields of an operation that are for its next hop."""
    said = {
        "Stageout-Release": "custody" if options.custody else "",
        "Stageout-Lot": options.lot,
        "Stageout-Priority": options.priority,
        "Stageout-Deadline": deadline_of(options),
    }
    return {name: str(value) for name, value in said.items() if value}


def show_routes(shares: Sequence[Share], options: argparse.Namespace) -> None:
    """Print what each route did, if there is something to say."""
    if options.json or not (len(shares) > 1 or any(share.problem for share in shares)):
        return
    told = []
    for share in shares:
        problem = f" ({share.problem})" if share.problem else ""
        told.append(f"{', '.join(share.route) or 'direct'}: {size(share.sent_bytes)}{problem}")
    print(f"  {'; '.join(told)}")


def as_json(shares: Sequence[Share]) -> list[dict[str, Any]]:
    """Return one object for each route."""
    return [
        {"by": list(one.route), "sent_bytes": one.sent_bytes, "connections": one.connections, "problem": one.problem}
        for one in shares
    ]
