"""``stageout profile``: measures a server and keeps what was found for the estimator and the sandbox manager."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from stageout.cli.exits import CommandError, Exit, UsageError
from stageout.core import profiles
from stageout.core.profiles import Run
from stageout.sampling.carrier import Carrier
from stageout.sampling.estimate import memory_folder
from stageout.sampling.plugins import Plugin, find, installed, profiles_folder
from stageout.sampling.processes import listener_on
from stageout.sampling.profiler import Limits, Outcome, Profiler, writer
from stageout.sampling.report import row, table, write_plot

_PORTS = {"http": 80, "https": 443, "dav": 80, "davs": 443, "ftp": 21, "gsiftp": 2811, "root": 1094, "overlay": 9621}


def run(options: argparse.Namespace) -> int:
    """Measure, print, keep."""
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
    """Pid of the server when it runs on this machine."""
    parts = urlsplit(options.url)
    if options.server_pid or parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        return int(options.server_pid or 0)
    return listener_on(parts.port or _PORTS.get(parts.scheme.lower(), 0))


def _progress(run: Run) -> None:
    if sys.stderr.isatty():
        print("  ".join(row(run)), file=sys.stderr)
