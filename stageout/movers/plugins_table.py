"""The table of transfer plugins, built as HTCondor does: from FILETRANSFER_PLUGINS and each plugin's ``-classad``."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stageout.core import log
from stageout.core.classad_parser import parse_old
from stageout.core.classads import decode
from stageout.movers.schemes import method_of

PLUGIN_LIFETIME_S = 72000.0
"""HTCondor's default of MAX_FILE_TRANSFER_PLUGIN_LIFETIME."""
_QUERY_TIMEOUT_S = 20.0
_LAUNCH = Path(__file__).with_name("launch.py")


@dataclass(frozen=True)
class Plugin:
    """One registered plugin.

    :param protocol: 1, 2 or 4, the form of its calls. :param verifies: it reports what the destination confirmed.
    :param batch_files: preferred number of files in one call, 0 without a preference.
    :param several: it supports STAGEOUT_CONCURRENCY.
    :param multi_stream_methods: methods whose uploads support STAGEOUT_PARALLELISM.
    :param deletes: methods for which it deletes files.
    """

    path: Path
    methods: tuple[str, ...]
    protocol: int
    verifies: bool = False
    version: str = ""
    batch_files: int = 0
    several: bool = False
    multi_stream_methods: tuple[str, ...] = ()
    deletes: tuple[str, ...] = ()


class PluginsTable:
    """The plugin for each URL scheme. Call :meth:`load` before use, and again on a reconfiguration.

    :param asks_as_itself: query plugins as the user of this process, who also runs them; else, below root, as an
        unprivileged user.
    """

    def __init__(self, asks_as_itself: bool = False) -> None:
        self._asks_as_itself = asks_as_itself
        self._known: dict[tuple[str, int, int], Plugin | None] = {}
        self._missing: set[str] = set()
        self._by_path: dict[str, Plugin] = {}
        self._by_method: dict[str, Plugin] = {}

    def load(self, paths: Sequence[str]) -> None:
        """Query the plugins of FILETRANSFER_PLUGINS, except those that have not changed since the last call. Blocks."""
        by_path: dict[str, Plugin] = {}
        by_method: dict[str, Plugin] = {}
        for path in paths:
            plugin = self._ask_once(path)
            if plugin is not None:
                by_path[path] = by_path[os.path.realpath(path)] = plugin
                by_method.update(dict.fromkeys(plugin.methods, plugin))  # a later plugin wins a method
        self._by_path, self._by_method = by_path, by_method

    def registered(self, path: str) -> Plugin | None:
        """Return the registered plugin at this path, None when the administrator has not listed it."""
        return self._by_path.get(path) or self._by_path.get(os.path.realpath(path))

    def find(self, path: str, scheme: str) -> Plugin | None:
        """Find the plugin for a scheme: the starter's choice at ``path`` if it is registered, otherwise the table's."""
        method = method_of(scheme)
        first = self.registered(path)
        return first if first is not None and method in first.methods else self._by_method.get(method)

    def batch_files(self, path: str, scheme: str) -> int:
        """Return the preferred number of files in one call for a scheme, 0 without a preference."""
        plugin = self.find(path, scheme)
        return plugin.batch_files if plugin is not None else 0

    @property
    def plugins(self) -> Iterable[Plugin]:
        """Return all working plugins."""
        return set(self._by_path.values())

    def _ask_once(self, path: str) -> Plugin | None:
        try:
            facts = Path(path).stat()
        except OSError as problem:
            if path not in self._missing:
                log.warn("plugin-not-found", plugin=path, problem=problem)
            self._missing.add(path)
            return None
        self._missing.discard(path)
        key = (path, facts.st_mtime_ns, facts.st_size)
        if key not in self._known:
            self._known[key] = ask(path, self._asks_as_itself)
        return self._known[key]


def ask(path: str, as_itself: bool = False) -> Plugin | None:
    """Run a plugin with ``-classad``. Return None, and log a line, if it reports no methods. Blocks up to 20 s.

    :param as_itself: run it as this process's user.
    """
    try:
        return read_abilities(path, printed(path, as_itself))
    except (OSError, subprocess.TimeoutExpired) as problem:
        log.warn("plugin-query-failed", plugin=path, problem=problem)
        return None


def printed(
    path: str,
    as_itself: bool = False,
    environment: Mapping[str, str] = os.environ,
    arguments: Sequence[str] = ("-classad",),
) -> str:
    """Return the plugin's output for ``-classad``. Blocks up to 20 s.

    :param as_itself: run it as this process's user. :param environment: its environment, except HTCondor's variables.
    :param arguments: other arguments for the plugin.
    :raises OSError: it cannot be started. :raises subprocess.TimeoutExpired: it does not end.
    """
    uid, gid = (os.geteuid(), os.getegid()) if as_itself else _unprivileged()
    shim = [sys.executable, "-I", "-S", str(_LAUNCH), str(os.getpid()), str(uid), str(gid), str(gid), "0", "-1", "/"]
    passed = {name: value for name, value in environment.items() if not name.startswith("CONDOR_")}
    if "CONDOR_CONFIG" in environment:
        passed["CONDOR_CONFIG"] = environment["CONDOR_CONFIG"]
    done = subprocess.run(
        [*shim, path, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=passed,
        timeout=_QUERY_TIMEOUT_S,
        check=False,
    )
    return decode(done.stdout)


def read_abilities(path: str, output: str) -> Plugin | None:
    """Parse a plugin's ``-classad`` output as HTCondor does."""
    ad = parse_old(output)
    methods = _names(ad.text("SupportedMethods"))
    if not methods:
        log.warn("plugin-query-failed", plugin=path, problem="it names no SupportedMethods", output=output[-500:])
        return None
    several = ad.get("MultipleFileSupport") is True
    version = ad.integer("ProtocolVersion", 2 if several else 1)
    protocol = version if several else 1
    verifies, batch_files = ad.get("StageOutVerifies") is True, max(0, ad.integer("StageOutBatchFiles", 0))
    at_once, multi_stream_methods = ad.get("StageOutConcurrency") is True, _names(ad.text("StageOutInParts"))
    plugin = Plugin(
        Path(path), methods, protocol, verifies, ad.text("PluginVersion"), batch_files, at_once, multi_stream_methods
    )
    return replace(plugin, deletes=_names(ad.text("StageOutDeletes")))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.lower() for name in text.replace(",", " ").split())


def _unprivileged() -> tuple[int, int]:
    """Return the account for queries: condor below a root manager, as in the startd, or nobody if it is missing."""
    if os.geteuid() != 0:
        return os.geteuid(), os.getegid()
    for name in ("condor", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return entry.pw_uid, entry.pw_gid
    return 65534, 65534
