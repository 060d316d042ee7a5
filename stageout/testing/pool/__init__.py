"""A real HTCondor pool on one machine, for tests, demonstrations and benchmarks.

Read :mod:`stageout.testing.pool.pool` first.
"""

from stageout.testing.pool.errors import PoolError, PoolTimeout, PoolUnavailable
from stageout.testing.pool.node import PILOT, Node, NodeSpec
from stageout.testing.pool.pool import Pool
from stageout.testing.pool.submission import Submission

__all__ = ["PILOT", "Node", "NodeSpec", "Pool", "PoolError", "PoolTimeout", "PoolUnavailable", "Submission"]
