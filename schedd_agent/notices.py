"""The collector as the place where agents and managers leave each other messages. Blocking; one thread at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from stageout.core.errors import StageoutError
from stageout.wire.custody import MANAGER_AD

#: Generic ads are found only among all ads (the bindings' Generic type looks for ads of MyType "Generic"). Slots carry
#: the report of a manager whose token does not allow generic ads; the collector's own ad tells its age.
_WANTED = f'(StageOutPayload ?: "") != "" && (MyType == "{MANAGER_AD}" || MyType == "Machine") || MyType == "Collector"'
_PROJECTION = ["MyType", "Name", "StageOutManager", "StageOutPayload", "StageOutSignature", "MonitorSelfAge"]


class CollectorError(StageoutError):
    """The collector did not answer, or refused."""


class Look(NamedTuple):
    """One look at the collector.

    :param ads: of managers, whatever door they came through. :param collector_age_s: for how long it has been up.
    """

    ads: Sequence[Mapping[str, Any]]
    collector_age_s: float


class Directory(Protocol):
    """What the agent needs of a collector. All calls block and raise CollectorError."""

    def look(self) -> Look:
        """All ads of managers. :raises CollectorError: it does not answer."""

    def publish(self, ads: Sequence[Mapping[str, Any]]) -> None:
        """Publish generic ads, each in place of one with its MyType and Name. :raises CollectorError: it took none."""


class CondorDirectory:
    """The pool's collector."""

    def __init__(self) -> None:
        import classad2
        import htcondor2

        self._condor, self._classad = htcondor2, classad2
        own = getattr(htcondor2, "HTCondorException", None)
        self._errors: tuple[type[Exception], ...] = (OSError, RuntimeError, ValueError, *([own] if own else []))

    def look(self) -> Look:
        """All ads of managers. :raises CollectorError: it does not answer."""
        try:
            ads = self._condor.Collector().query(self._condor.AdType.Any, _WANTED, _PROJECTION)
        except self._errors as problem:
            raise CollectorError(f"the collector does not answer: {problem}") from None
        ages = [ad.get("MonitorSelfAge") for ad in ads if ad.get("MyType") == "Collector"]
        age_s = min((float(age) for age in ages if isinstance(age, (int, float))), default=0.0)
        return Look([ad for ad in ads if ad.get("MyType") != "Collector"], age_s)

    def publish(self, ads: Sequence[Mapping[str, Any]]) -> None:
        """Publish generic ads, each in place of one with its MyType and Name. :raises CollectorError: it took none."""
        try:
            made = [self._classad.ClassAd(dict(ad)) for ad in ads]
            self._condor.Collector().advertise(made, "UPDATE_AD_GENERIC")
        except self._errors as problem:
            raise CollectorError(f"the collector took no ad: {problem}") from None
