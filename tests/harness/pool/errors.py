"""Errors of the pool harness; each text says what to do."""

from __future__ import annotations

from stageout.core.errors import StageoutError


class PoolUnavailable(StageoutError):
    """No pool can be made on this machine, and why: not root, no network, no HTCondor."""


class PoolError(StageoutError):
    """A running pool did not do what was asked: a command failed, a daemon did not answer."""


class PoolTimeout(PoolError, AssertionError):
    """A condition did not become true in time. An AssertionError too, so that a test reports it as a failed claim."""
