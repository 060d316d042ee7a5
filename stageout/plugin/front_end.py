"""Hand off the uploads of a third-party plugin, or turn into that plugin.

A front end (:mod:`stageout.core.front_end`) runs this file for an upload, with Python's ``-I``: the working directory
is the job's. Arguments: the plugin, the front end's own path, "set" where LC_CTYPE is set, the plugin's arguments.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

_CANNOT_RUN = 127


def main(arguments: Sequence[str]) -> NoReturn:
    """Exit with 0 after a hand-off; otherwise exec the plugin."""
    plugin, front_end, locale_set, *rest = arguments
    if _handed_off(front_end, rest):
        sys.stdout.flush()
        os._exit(0)
    if not locale_set:
        os.environ.pop("LC_CTYPE", None)  # set by Python (PEP 538)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and an ignored signal stays ignored in the plugin
    try:
        os.execv(plugin, [plugin, *rest])
    except OSError as problem:
        print(f"{front_end}: cannot run {plugin}: {problem.strerror}", file=sys.stderr, flush=True)
        os._exit(_CANNOT_RUN)


def _handed_off(front_end: str, arguments: list[str]) -> bool:
    try:
        from stageout.plugin.foreign import handed_off

        return handed_off(front_end, arguments)
    except Exception as problem:  # the transfer without a manager must always work, even with a damaged library
        print(f"{front_end}: no hand-off: {type(problem).__name__}: {problem}", file=sys.stderr, flush=True)
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
