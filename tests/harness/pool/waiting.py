"""Waiting for a condition with a deadline: the only place of the harness that sleeps."""

from __future__ import annotations

import time
from typing import Callable, TypeVar

from tests.harness.pool.errors import PoolError, PoolTimeout

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T | None],
    *,
    timeout_s: float = 60.0,
    what: str = "the condition",
    interval_s: float = 0.1,
    describe: Callable[[], str] | None = None,
) -> T:
    """Call `condition` until it returns something true, and return that.

    An error of the pool (a daemon that is just restarting, say) counts as "not yet".

    :param timeout_s: seconds until it is given up.
    :param what: what is waited for, in words of a report: "job 1.0 running".
    :param interval_s: seconds between two calls.
    :param describe: called after a failure for further facts.
    :raises PoolTimeout: with `what`, the time waited and the last value or error.
    """
    start = time.monotonic()
    while True:
        last: object
        try:
            value = condition()
            if value:
                return value
            last = value
        except PoolError as error:
            last = error
        waited = time.monotonic() - start
        if waited >= timeout_s:
            more = f"\n{describe()}" if describe else ""
            raise PoolTimeout(f"Waited {waited:.1f} s in vain for {what}; the last value was: {last!s:.2000}{more}")
        time.sleep(min(interval_s, max(0.0, timeout_s - waited)))
