"""The difference between the clocks of a node and of the collector, by an ad.

The collector notes by its own clock when an ad came in, and the ad says when it was made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stageout.wire.custody import MANAGER_AD

#: Seconds that an ad may take to arrive. A smaller difference is not due to the clocks.
ON_ITS_WAY_S = 30


def ahead_of_collector_s(ad: Mapping[str, Any]) -> int:
    """Compute how far the node's clock is ahead of the collector's, from an ad of manager or slot; 0 if the difference
    is small.

    A slot's ad has the time when the startd sent it; the manager's report in it may be older.
    """
    made = _time(ad.get("StageOutSentAt" if ad.get("MyType") == MANAGER_AD else "MyCurrentTime"))
    came = _time(ad.get("LastHeardFrom"))
    ahead_s = made - came if made and came else 0
    return ahead_s if abs(ahead_s) > ON_ITS_WAY_S else 0


def _time(value: object) -> int:
    return value if isinstance(value, int) else 0
