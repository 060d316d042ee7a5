"""The one place that loads the part of streams: the chooser that adapts, and what asks the policy service.

``stageout/core/streams.py`` has the contract. With STAGEOUT_TUNING = fixed and without STAGEOUT_POLICY_URL nothing of
the part is loaded, and an installation can leave it out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from sandbox_manager.rules import TuningRules, adaptive_part
from stageout.core.clock import Clock
from stageout.core.config import ConfigError, Settings
from stageout.core.streams import FIXED, FixedStreams, Streams, Supervise

#: The client of the policy service.
_CLIENT = "stageout.tuning.policy_grants"

#: From the rules, and what returns the files at once that were good for a server earlier; 0: not known.
MakeStreams = Callable[[TuningRules, Callable[[str], int]], Streams]
#: From the name of this node, its clock, what is called when something else may be used than before, and what keeps
#: the grants. The result is for :func:`make_streams` only.
MakeGrants = Callable[[str, Clock, Callable[[], None], Supervise], Any]


def make_streams(rules: TuningRules, start: Callable[[str], int], grants: Any = None) -> Streams:
    """Return the chooser of these rules. :param grants: of the policy service; None: there is none."""
    if rules.controller == FIXED and grants is None:
        return FixedStreams(rules.knobs)
    streams: Streams = adaptive_part(rules.controller).AdaptiveStreams(rules.controller, rules.knobs, start, grants)
    return streams


def grants_of(settings: Settings) -> MakeGrants | None:
    """Return what asks the policy service of the configuration for streams; None when there is none.

    :raises ConfigError: it cannot be used.
    """
    if not settings.text("STAGEOUT_POLICY_URL").rstrip("/"):
        return None
    try:
        client = importlib.import_module(_CLIENT)
    except ModuleNotFoundError as problem:
        if problem.name not in (_CLIENT, _CLIENT.rpartition(".")[0]):
            raise
        raise ConfigError(
            f"STAGEOUT_POLICY_URL: the Python module {_CLIENT} is not installed; remove STAGEOUT_POLICY_URL, "
            "or install all of stageout"
        ) from None
    make: MakeGrants = client.maker(settings)
    return make
