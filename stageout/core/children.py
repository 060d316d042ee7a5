"""Child processes that run a module of the product."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[2])


def module_command(module: str, *arguments: str) -> list[str]:
    """Command line that runs ``module`` with this Python, from where this process has the product.

    ``python -m`` would look where Python is installed; the single file for pilots has its modules elsewhere.
    """
    code = f"import runpy, sys; sys.path.insert(0, {_ROOT!r}); runpy.run_module({module!r}, None, '__main__', True)"
    return [sys.executable, "-c", code, *arguments]
