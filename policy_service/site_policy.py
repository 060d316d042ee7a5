"""The policy in force: one that comes with stageout, or a site's own Python module.

A site's module has one function::

    def grant(asker, grants, limits):
        return streams

with the types of :mod:`stageout.tuning.policies`, which it may import. The module runs in a process of its own, so one
that hangs, exits or prints does no harm. The service first tries the module on :func:`trial_cases`. It refuses a module
that is slow, raises, or gives an answer that breaks the limits, then or later.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from stageout.core import log
from stageout.core.errors import StageoutError
from stageout.core.sockets import readable
from stageout.tuning.policies import BUILT_IN, Grant, Limits, Policy, greedy

_START_S = 10.0
_ANSWER_S = 1.0
_MOST_BYTES = 65_536


class PolicyError(StageoutError):
    """A policy cannot be used; the text says why."""


class ActivePolicy(Protocol):
    """The policy in force."""

    name: str
    #: Reason why the greedy policy decides instead; "" while the configured one does.
    problem: str

    def decide(self, asker: Grant, grants: Sequence[Grant], limits: Limits) -> int:
        """Return the asker's new number of streams, which always keeps the limits."""

    def close(self) -> None:
        """Release the policy's resources."""


class BuiltInPolicy:
    """A policy that comes with stageout.

    :param problem: reason why it stands in for the configured one, "" when it is that.
    :raises PolicyError: no policy has this name.
    """

    def __init__(self, name: str, problem: str = "") -> None:
        if name not in BUILT_IN:
            raise PolicyError(
                f"no policy {name!r}: choose one of {', '.join(BUILT_IN)}, or the absolute path of a Python module"
            )
        self.name = name
        self.problem = problem
        self._policy: Policy = BUILT_IN[name]

    def decide(self, asker: Grant, grants: Sequence[Grant], limits: Limits) -> int:
        """See :class:`ActivePolicy`."""
        return self._policy(asker, grants, limits)

    def close(self) -> None:
        """Do nothing: a built-in policy has no process."""


def find_fault(asker: Grant, grants: Sequence[Grant], limits: Limits, streams: object) -> str:
    """Return the reason why an answer breaks the limits; "" when it keeps them."""
    if isinstance(streams, bool) or not isinstance(streams, int):
        return f"it returned {streams!r}, not a whole number"
    most = max(0, min(limits.max_client, asker.wanted))
    if not 0 <= streams <= most:
        return f"it returned {streams}, outside 0 to {most} (the least of max_client and wanted)"
    room = asker.streams + max(0, limits.max_pair - sum(grant.streams for grant in grants))
    if streams > room:
        return f"it returned {streams}, but only {room} are within max_pair"
    return ""


def trial_cases() -> Iterator[tuple[Grant, list[Grant], Limits]]:
    """Make the situations on which a site's module is tried: empty, shared, full, over-full, unwanted, waiting."""
    limits = Limits(initial=4, increment=4, max_pair=16, max_client=8, reserved={"a": 4})
    for held in ([], [4], [8, 8], [8, 8, 8], [1, 0, 5, 0]):
        others = [Grant(f"a/{place}", streams, 8, "a", place, place) for place, streams in enumerate(held)]
        for streams, wanted in ((0, 8), (0, 0), (4, 8), (4, 2), (8, 1_000)):
            asker = Grant("b/me", streams, wanted, "b", 1, 9)
            yield asker, [asker, *others], limits


class SitePolicy:
    """A site's own policy, in a process of its own.

    When it misbehaves it is ended, the fault is kept in ``problem``, and the greedy policy decides from then on.

    :param path: of the module. :raises PolicyError: it cannot be loaded, or fails its trial.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.problem = ""
        self._child = subprocess.Popen(
            [sys.executable, "-m", "policy_service.site_child", str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        try:
            self._answer(_START_S)
            for asker, grants, limits in trial_cases():
                self._ask(asker, grants, limits)
        except PolicyError as problem:
            self.close()
            raise PolicyError(f"policy {path} is refused: {problem}") from None

    def decide(self, asker: Grant, grants: Sequence[Grant], limits: Limits) -> int:
        """See :class:`ActivePolicy`."""
        if not self.problem:
            try:
                return self._ask(asker, grants, limits)
            except PolicyError as problem:
                self.close()
                self.problem = f"{self.name} is out of use until the next reconfig: {problem}"
                log.error("policy-failed", problem=self.problem, instead="greedy")
        return greedy(asker, grants, limits)

    def close(self) -> None:
        """End the module's process."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe:
                pipe.close()

    def _ask(self, asker: Grant, grants: Sequence[Grant], limits: Limits) -> int:
        question = {"asker": list(grants).index(asker), "grants": list(map(asdict, grants)), "limits": asdict(limits)}
        assert self._child.stdin
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(json.dumps(question).encode() + b"\n")
        streams = self._answer(_ANSWER_S)
        found = find_fault(asker, grants, limits, streams)
        if found:
            raise PolicyError(f"{found} (asker {asker}, {len(grants)} grants)")
        assert isinstance(streams, int)
        return streams

    def _answer(self, limit_s: float) -> Any:
        assert self._child.stdout
        end, line = time.monotonic() + limit_s, b""
        while not line.endswith(b"\n"):
            if not readable([self._child.stdout.fileno()], max(0.0, end - time.monotonic())):
                raise PolicyError(f"no answer within {limit_s:g} s")
            part = os.read(self._child.stdout.fileno(), _MOST_BYTES)
            line += part
            if not part or len(line) > _MOST_BYTES:
                raise PolicyError("its process ended")
        answer = json.loads(line)
        if "problem" in answer:
            raise PolicyError(answer["problem"])
        return answer["streams"]


def open_policy(name: str) -> ActivePolicy:
    """Open the policy of a setting. :param name: a built-in name, or the absolute path of a module.

    :raises PolicyError: it cannot be used.
    """
    return SitePolicy(Path(name)) if name.startswith("/") else BuiltInPolicy(name)
