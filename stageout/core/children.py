"""Child processes that run a module of the product, and processes that are identified by their environment."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: Environment variable of a plugin's processes: the directory of the call, which exists as long as the call.
MOVER_MARK = "STAGEOUT_MOVER_DIR"
_ROOT = str(Path(__file__).resolve().parents[2])


def module_command(module: str, *arguments: str) -> list[str]:
    """Make the command line that runs ``module`` with this Python and this copy of the product.

    ``python -m`` would search Python's own directories; the single file for pilots has its modules elsewhere.
    """
    code = f"import runpy, sys; sys.path.insert(0, {_ROOT!r}); runpy.run_module({module!r}, None, '__main__', True)"
    return [sys.executable, "-c", code, *arguments]


def answer_lines(answer: Callable[[dict[str, Any]], object]) -> int:
    """Answer each line of stdin with a line of stdout, both JSON, until stdin ends. Return the exit status."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # HTCondor's bindings may print, and their output must not look like an answer
    for line in sys.stdin:
        try:
            found = answer(json.loads(line))
        except Exception as problem:
            found = {"error": str(problem) or type(problem).__name__}
        print(json.dumps(found), file=answers, flush=True)
    return 0


def having(variable: str, denied: Callable[[int], None] = lambda pid: None) -> Iterator[tuple[int, str]]:
    """Find other processes with an environment variable, as far as this user may read it: number and value.

    :param denied: called with the number of each process that this user may not examine.
    """
    mark = os.fsencode(f"{variable}=")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                items = (entry / "environ").read_bytes().split(b"\0")
            except PermissionError:
                denied(int(entry.name))
                continue
            except OSError:
                continue  # the process has ended in the meantime
            for item in items:
                if item.startswith(mark):
                    yield int(entry.name), os.fsdecode(item[len(mark) :])
