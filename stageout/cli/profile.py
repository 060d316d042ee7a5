"""``stageout profile``: measure a server and store the result for the estimator and the sandbox manager."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from stageout.cli.arguments import add_measuring, seconds, size
from stageout.cli.exits import CommandError, Exit, UsageError
from stageout.cli.servers import PORTS
from stageout.condor.plugins import Plugin, find, installed, profiles_folder
from stageout.core import profiles
from stageout.core.profiles import Measurement
from stageout.sampling.carrier import Carrier
from stageout.sampling.estimate import memory_folder
from stageout.sampling.processes import listener_on
from stageout.sampling.profiler import Limits, Outcome, Profiler, writer
from stageout.sampling.report import row, table, write_plot

DESCRIPTION = """\
Measure a server: write samples into one of its directories and read them again. Block size, streams, number of files
and file size vary. The command shows rate, CPU and memory, also of a server on this machine. It stores the profile for
'stageout estimate' and for the sandbox manager. Samples stay at the server as empty files named .stageout-sample-N.

exit status: 0 measured, 1 not measured or not stored, 64 the URL cannot be used"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    command.add_argument("url", metavar="URL", help="directory on the server, writable, with / at its end")
    command.add_argument(
        "--max-time", metavar="S", type=seconds, default=120.0, help="seconds to measure at most (default: 120)"
    )
    command.add_argument(
        "--max-bytes", metavar="SIZE", type=size, default=4 * 10**9, help="bytes to transfer at most (default: 4G)"
    )
    command.add_argument("--json", action="store_true", help="print JSON (its fields: docs/user/estimate.md)")
    command.add_argument("--plot", metavar="FILE", help="write plots to FILE.png, or to FILE.html with the table")
    command.add_argument("--write-only", action="store_true", help="do not measure downloads")
    command.add_argument("--no-store", action="store_true", help="do not store the profile")
    command.add_argument("--local", metavar="DIR", help="directory of the local files (default: in memory)")
    command.add_argument(
        "--server-pid",
        metavar="PID",
        type=int,
        help="process of a server on this machine (default: the process that listens on the URL's port)",
    )
    add_measuring(command)


def run(options: argparse.Namespace) -> int:
    """Measure, print and store."""
    parts = urlsplit(options.url)
    if not parts.scheme or "://" not in options.url:
        raise UsageError(f"{options.url} is not a URL: write scheme://host/directory/")
    plugin = find(parts.scheme.lower(), [Path(path) for path in options.plugin] or installed())
    outcome = _measure(options, plugin)
    profile = outcome.profile
    if options.json:
        print(json.dumps(profile.as_json(), indent=1))
    else:
        print(table(profile))
    if outcome.left_out:
        print(f"stageout: {outcome.left_out} measurements were left out: {outcome.why}", file=sys.stderr)
    if options.plot:
        write_plot(profile, Path(options.plot))
    if not options.no_store:
        try:
            folder = Path(options.profiles or profiles_folder())
            path = profiles.save(folder, profile)
        except OSError as problem:
            text = f"cannot keep the profile in {folder} ({problem.strerror})"
            raise CommandError(f"{text}: name another place with --profiles, or --no-store") from None
        print(f"stageout: kept in {path}", file=sys.stderr)
    return Exit.OK


def _measure(options: argparse.Namespace, plugin: Plugin) -> Outcome:
    folder = Path(options.local) if options.local else memory_folder()
    if not folder.is_dir():
        raise UsageError(f"--local {folder}: there is no such directory")
    with tempfile.TemporaryDirectory(prefix=".stageout-profile-", dir=folder) as name:
        carrier = Carrier(plugin, options.url, True, Path(name), max(10.0, options.max_time), _server(options))
        upload = writer(carrier)
        blocks = "gsiftp" in plugin.methods
        limits = Limits(options.max_time, options.max_bytes)

        def reader(url: str) -> Carrier:
            return replace(upload, url=url, upload=False, moved_bytes=0, spent_s=0.0)

        return Profiler(upload, None if options.write_only else reader, blocks, limits, _progress).run()


def _server(options: argparse.Namespace) -> int:
    """Find the pid of the server if it runs on this machine."""
    parts = urlsplit(options.url)
    if options.server_pid or parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        return int(options.server_pid or 0)
    return listener_on(parts.port or PORTS.get(parts.scheme.lower(), 0))


def _progress(run: Measurement) -> None:
    if sys.stderr.isatty():
        print("  ".join(row(run)), file=sys.stderr)
