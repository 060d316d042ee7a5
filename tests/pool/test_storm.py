"""A short storm: all may happen at any moment, and all that was computed arrives, right and once.

A hostile user attacks the jobs of the others meanwhile.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.pool

_ROOT = Path(__file__).resolve().parents[2]
#: Misfortunes of whatever kind that a storm of this seed has in its 45 seconds, at least, besides dead daemons.
_OTHERS = ("power cut", "node vanished", "link cut", "disk", "destination down", "destination refuses")


def test_a_short_storm(stageout_pools: Any) -> None:
    """It runs as a process of its own, because it gives itself a network."""
    command = [sys.executable, "-m", "tests.pool.storm", "--minutes", "0.75", "--jobs", "20", "--calm", "3"]
    done = subprocess.run([*command, "--seed", "20"], cwd=_ROOT, capture_output=True, text=True, timeout=600)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    found = re.findall(r"^ *\d+ event: (.*)$", done.stdout, re.M)
    assert sum(any(name.startswith(kind) for name in found) for kind in _OTHERS) >= 4, found
    assert done.stdout.rstrip().endswith(": 0 wrong")
