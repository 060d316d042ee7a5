"""The schedds whose agent is alive: only their jobs' output is accepted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from stageout.core import log
from stageout.core.clock import Clock
from stageout.core.synchronous import NO_REASON, Reason
from stageout.wire.custody import AgentNotice


@dataclass
class _LastNotice:
    sent_at: int
    number: int
    at_s: float
    credential_port: tuple[str, str]


@dataclass
class AgentTable:
    """The time of the last new notice of each schedd's agent.

    The age of an agent begins when a *new* notice is seen here, by the monotonic clock: clocks of access point and
    execute point need not agree. Only for the first notice its age in the collector is believed.

    :param timeout_s: after which an agent counts as gone.
    :param objection: why a job that brings this key of its schedd cannot be taken.
    """

    clock: Clock
    timeout_s: float
    objection: Callable[[str, str], Reason] = lambda schedd, key: NO_REASON
    _notices: dict[str, _LastNotice] = field(default_factory=dict)

    def record_notice(self, notice: AgentNotice, age_s: float) -> None:
        """Record that an agent's notice is in the collector. :param age_s: seconds since the collector received it."""
        last = self._notices.get(notice.schedd)
        if last is not None and (last.sent_at, last.number) == (notice.sent_at, notice.number):
            return
        if not self.is_fresh(notice.schedd):
            log.event("agent-found", schedd=notice.schedd, agent=notice.agent)
        at_s = self.clock.monotonic_s() - (max(0.0, age_s) if last is None else 0.0)
        self._notices[notice.schedd] = _LastNotice(
            notice.sent_at, notice.number, at_s, (notice.renewal_url, notice.renewal_certificate)
        )

    def set_timeout(self, timeout_s: float) -> None:
        """Count an agent as gone after this time from now on."""
        self.timeout_s = timeout_s

    def forget_all(self) -> None:
        """Forget all notices, after a change of keys: an agent is alive when a notice with its key is found again."""
        self._notices.clear()

    def is_fresh(self, schedd: str) -> bool:
        """Tell whether this schedd's agent sent an ad lately."""
        last = self._notices.get(schedd)
        return last is not None and self.clock.monotonic_s() - last.at_s <= self.timeout_s

    def credential_port(self, schedd: str) -> tuple[str, str]:
        """Return the URL of the port for renewed credentials and SHA-256 of its certificate; empty texts if unknown."""
        last = self._notices.get(schedd)
        return last.credential_port if last is not None else ("", "")

    @property
    def fresh(self) -> list[str]:
        """Schedds whose agents are alive."""
        return sorted(schedd for schedd in self._notices if self.is_fresh(schedd))
