"""The transfer plugin for a URL, from this machine's HTCondor configuration as the sandbox manager reads it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from stageout.cli.exits import CommandError
from stageout.condor.plugins import beside, of_the_node
from stageout.core import log
from stageout.movers.plugins_table import Plugin, PluginsTable
from stageout.movers.schemes import method_of

NAMED, CONFIGURED, INSTALLED = "--plugin", "FILETRANSFER_PLUGINS", "installed with this command"


class Chosen(NamedTuple):
    """The plugin for a URL. :param source: the list that names it."""

    plugin: Plugin
    source: str


def plugin_for(scheme: str, named: Sequence[str] = ()) -> Chosen:
    """Return the plugin for a URL scheme.

    FILETRANSFER_PLUGINS decides. Access points need not list stageout's plugins there; then the plugins that are
    installed with this command count as well, as on execute points.

    :param named: paths of plugins; if given, no others count. :raises CommandError: no plugin has the scheme.
    """
    log.open_log(logging.NullHandler())  # only daemons log plugins that do not answer
    table = PluginsTable(asks_as_itself=True)
    configured = [] if named else [str(path) for path in of_the_node()]
    table.load(list(named) or configured)
    installed: list[str] = []
    if not named and not any(plugin.several for plugin in table.plugins):
        installed = [str(path) for path in beside()]
        table.load([*configured, *installed])
    found = table.find("", scheme)
    if found is None:
        tried = ", ".join(sorted(plugin.path.name for plugin in table.plugins)) or "none answers"
        text = f"no transfer plugin moves {method_of(scheme)}:// URLs (plugins: {tried})"
        raise CommandError(f"{text}: correct the URL, add one to FILETRANSFER_PLUGINS, or name one with --plugin")
    return Chosen(found, _source(found.path, named, installed))


def _source(path: Path, named: Sequence[str], installed: Sequence[str]) -> str:
    if named:
        return NAMED
    return INSTALLED if str(path) in installed else CONFIGURED
