"""The renewal of front ends whose plugins have changed: until then a front end asks its plugin for each job."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from stageout.core import front_end, log
from stageout.movers.plugins_table import printed

_ADVICE = "until it is renewed it asks the plugin for each job: run 'stageout wrap' for it as root"


class FrontEnds:
    """The renewed answers, by the path of the plugin."""

    def __init__(self) -> None:
        self._signatures: dict[str, str] = {}

    def forget(self) -> None:
        """Ask all plugins again the next time: an answer may depend on more than the file."""
        self._signatures.clear()

    def renew(self, paths: Iterable[str]) -> None:
        """Renew those of FILETRANSFER_PLUGINS that are front ends, each once for a change of its plugin. Blocks."""
        for path in paths:
            try:
                self._renew(Path(path))
            except (OSError, subprocess.TimeoutExpired) as problem:
                log.warn("front-end-renewal-failed", front_end=path, problem=problem, advice=_ADVICE)

    def _renew(self, path: Path) -> None:
        plugin = front_end.plugin_of(path)
        if not plugin:
            return
        signature = front_end.signature(Path(plugin).stat())
        if self._signatures.get(str(path)) != signature:
            self._signatures[str(path)] = signature
            front_end.write(path.resolve(), plugin, _ask)


def _ask(plugin: str, environment: Mapping[str, str]) -> str:
    return printed(plugin, environment=environment)
