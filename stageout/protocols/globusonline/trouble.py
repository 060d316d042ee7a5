"""The decision to give up a task that the service keeps trying. Pure: times come from outside."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from stageout.core.errors import ErrorClass
from stageout.protocols.globusonline.failures import Fault, fault_of
from stageout.protocols.globusonline.settings import GlobusSettings

_UNSEEN_POLLS = 4  # a longer time without a query says nothing about the task: the service was unreachable


class Look(NamedTuple):
    """An observation of a task.

    :param at_s: monotonic clock. :param progress: changes when something was moved.
    :param codes: codes of errors since the last query, newest first.
    """

    at_s: float
    progress: tuple[int, ...]
    is_queued: bool
    is_paused: bool
    is_suspended: bool
    codes: tuple[str, ...] = ()


class GiveUp(NamedTuple):
    """The reason to give up. :param code: the service's code, "" for none. :param waited_s: seconds without
    progress.
    """

    fault: Fault
    code: str
    waited_s: float


@dataclass
class Trouble:
    """The patience with one task. :param settings: its limits."""

    settings: GlobusSettings
    _progress: tuple[int, ...] | None = None
    _looked_at_s: float = 0.0
    _waited_s: float = 0.0
    _codes: dict[str, None] = field(default_factory=dict)

    def see(self, look: Look) -> GiveUp | None:
        """Record one observation. Return a reason to end the task now, or None."""
        if look.is_suspended:
            return GiveUp(Fault(ErrorClass.CREDENTIAL_EXPIRED, True), "INACTIVE", 0.0)
        between_s, self._looked_at_s = look.at_s - self._looked_at_s, look.at_s
        if look.progress != self._progress or look.is_queued:
            self._progress, self._waited_s = look.progress, 0.0
            self._codes.clear()
        else:
            self._waited_s += min(between_s, _UNSEEN_POLLS * self.settings.poll_s)
        self._note(look.codes)
        waited_s = self._waited_s
        if look.is_paused:
            return self._after(waited_s, self.settings.pause_s, "PAUSED")
        lasting = next((code for code in self._codes if fault_of(code).lasts), "")
        if lasting:
            return self._after(waited_s, self.settings.fault_patience_s, lasting)
        return self._after(waited_s, self.settings.stall_s, next(iter(self._codes), ""))

    def _note(self, codes: Iterable[str]) -> None:
        newest = dict.fromkeys(codes)
        self._codes = {**newest, **{code: None for code in self._codes if code not in newest}}

    @staticmethod
    def _after(waited_s: float, limit_s: float, code: str) -> GiveUp | None:
        if waited_s < limit_s:
            return None
        return GiveUp(fault_of(code) if code else Fault(ErrorClass.STALLED, False), code, waited_s)
