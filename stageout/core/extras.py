"""Python packages that only some users install: ``pip install 'stageout[EXTRA]'``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from stageout.core.errors import StageoutError

#: Packages of each extra, as they are imported.
MODULES = {
    "globus": ("globus_sdk",),
    "web": ("aiohttp",),
    "policy": ("aiohttp", "prometheus_client", "pydantic"),
}


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Import what needs an extra. :raises StageoutError: it is not installed; the text says what to do."""
    try:
        yield
    except ModuleNotFoundError as problem:
        if (problem.name or "").partition(".")[0] not in MODULES[extra]:
            raise
        raise StageoutError(
            f"the Python package {problem.name} is not installed: pip install 'stageout[{extra}]'"
        ) from None
