"""Building what a daemon builds in its loop, for tests that drive it step by step."""

from __future__ import annotations

import asyncio
from typing import Callable, TypeVar

T = TypeVar("T")


def in_loop(build: Callable[[], T]) -> T:
    """The result of ``build``, called in a loop: before Python 3.10 asyncio's locks and events want one when built."""

    async def built() -> T:
        return build()

    return asyncio.run(built())
