"""The plugin for a URL at a command line: the node's, or those installed beside this program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stageout.condor.bindings import BindingsMissing
from stageout.condor.configuration import condor_settings
from stageout.core.classad_parser import parse_old
from stageout.core.classads import decode
from stageout.core.config import Settings, environment_settings
from stageout.core.errors import StageoutError

_QUERY_S = 30.0


@dataclass(frozen=True)
class Plugin:
    """A transfer plugin.

    :param multi_stream_uploads: methods whose uploads heed STAGEOUT_PARALLELISM.
    :param multi_stream_downloads: the same for downloads, which can also fetch only the first bytes as a sample.
    """

    path: Path
    methods: tuple[str, ...]
    multi_stream_uploads: tuple[str, ...] = ()
    multi_stream_downloads: tuple[str, ...] = ()

    def multi_stream(self, method: str, upload: bool) -> bool:
        """Tell whether one file moves over several streams; otherwise several files move at once."""
        return method in (self.multi_stream_uploads if upload else self.multi_stream_downloads)


def ask(path: Path) -> Plugin | None:
    """Run a plugin with ``-classad``; None when it names no methods."""
    try:
        done = subprocess.run(
            [str(path), "-classad"], stdin=subprocess.DEVNULL, capture_output=True, timeout=_QUERY_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    ad = parse_old(decode(done.stdout))
    methods = _names(ad.text("SupportedMethods"))
    if not methods:
        return None
    return Plugin(path, methods, _names(ad.text("StageOutInParts")), _names(ad.text("StageOutSplitsDownloads")))


def find(method: str, candidates: Sequence[Path]) -> Plugin:
    """Find the plugin for a URL scheme; of several the later one, as in HTCondor.

    :raises StageoutError: there is none.
    """
    for path in reversed(candidates):
        plugin = ask(path)
        if plugin is not None and method in plugin.methods:
            return plugin
    tried = ", ".join(path.name for path in candidates) or "none is installed"
    raise StageoutError(f"no transfer plugin for {method}:// ({tried}); name one with --plugin")


def installed() -> list[Path]:
    """List the plugins of FILETRANSFER_PLUGINS where this machine has an HTCondor, else those beside this program."""
    return [path for path in of_the_node() if path.is_file()] or beside()


def beside() -> list[Path]:
    """List the plugins that are installed beside this program."""
    found = sorted(Path(sys.executable).parent.glob("*_plugin"))
    found.sort(key=lambda path: "curl" in path.name)  # stageout_curl_plugin last: it wins ftp
    return found


def of_the_node() -> list[Path]:
    """Return the paths in FILETRANSFER_PLUGINS, whether or not there are plugins."""
    return [Path(word) for word in node_settings().condor("FILETRANSFER_PLUGINS").replace(",", " ").split()]


def profiles_folder() -> Path:
    """Return the directory of profiles: STAGEOUT_PROFILES of HTCondor's configuration, or its default."""
    return Path(node_settings().text("STAGEOUT_PROFILES"))


def node_settings() -> Settings:
    """Read HTCondor's configuration where there is one, else ``_CONDOR_NAME`` of the environment."""
    try:
        settings = condor_settings()
        settings.condor("FILETRANSFER_PLUGINS")
    except (BindingsMissing, OSError, RuntimeError):
        return environment_settings()
    return settings


def _names(text: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in text.replace(",", " ").split())
