"""A real HTCondor pool on one machine, for tests, demonstrations and benchmarks.

Read :mod:`tests.harness.pool.pool` first.
"""

from tests.harness.pool.errors import PoolError, PoolTimeout, PoolUnavailable
from tests.harness.pool.node import PILOT, Node, NodeSpec
from tests.harness.pool.pool import Pool
from tests.harness.pool.submission import Submission

__all__ = ["PILOT", "Node", "NodeSpec", "Pool", "PoolError", "PoolTimeout", "PoolUnavailable", "Submission"]
