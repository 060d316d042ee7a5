"""The renewal of stored answers of our own plugins: until then they start Python for each job to answer HTCondor."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from stageout.core import log, stored_answer
from stageout.movers.plugins_table import printed

_ADVICE = "until it is stored HTCondor's question costs the start of Python for each job"


class StoredAnswers:
    """The stored answers of registered plugins."""

    def __init__(self) -> None:
        self._refused = set[str]()

    def renew(self, paths: Iterable[str]) -> None:
        """Store the answers that are not those of today's plugins. Blocks while plugins are asked.

        A plugin whose answer cannot be stored is tried again after :meth:`forget` only.
        """
        for path in paths:
            plugin = Path(path)
            try:
                if path not in self._refused and stored_answer.is_asked(plugin):
                    self._renew(plugin)
            except FileNotFoundError:
                continue  # the table of plugins says so
            except (OSError, subprocess.TimeoutExpired, stored_answer.CannotStore) as problem:
                self._refused.add(path)
                log.warn("plugin-answer-not-stored", plugin=path, problem=problem, advice=_ADVICE)

    def forget(self) -> None:
        """Try again, also where an answer could not be stored."""
        self._refused.clear()

    def _renew(self, plugin: Path) -> None:
        if not stored_answer.is_fresh(plugin, os.environ):
            stored_answer.write(plugin, os.environ, _ask)


def _ask(plugin: str, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    return printed(plugin, arguments=arguments, environment=environment)
