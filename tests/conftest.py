"""For all tests: none sees the log of another."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _log_as_at_the_start() -> Iterator[None]:
    """Daemons that run inside a test open the log, for the whole process."""
    logger = logging.getLogger("stageout")
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers, logger.propagate = [], True
    yield
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])
