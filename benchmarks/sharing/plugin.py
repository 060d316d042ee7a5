"""Our plugins, started as a benchmark wants them."""

from __future__ import annotations

import shlex
from pathlib import Path

from stageout.condor.plugins import Plugin, ask
from stageout.core.errors import StageoutError
from stageout.testing.starter import installed

_PLUGINS = Path(__file__).resolve().parents[2] / "plugins"


def wrapped(folder: Path, name: str, *prefix: str) -> Plugin:
    """A plugin behind a command prefix.

    :param folder: where it is put. :raises StageoutError: it does not answer.
    """
    plain = folder / name
    if not plain.exists():
        installed(_PLUGINS / name, folder)
    script = folder / f"{name}.sh"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(prefix)} {plain} "$@"\n')
    script.chmod(0o755)
    plugin = ask(script)
    if plugin is None:
        raise StageoutError(f"{name} does not answer; tools/install installs what it needs")
    return plugin
