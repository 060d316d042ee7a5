"""The collector and other daemons that answer queries for ads, asked directly. The calls block.

The bindings hold the interpreter while they wait. A process with an event loop uses
:class:`stageout.condor.collector_child.CollectorChild`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stageout.condor import bindings


class Collector:
    """A daemon that answers queries for ads.

    :param place: address of a collector, or location ad of a startd; None for the configured collector.
    """

    def __init__(self, place: Any = None) -> None:
        self._place = () if place is None else (place,)

    def query(self, ad_type: str, constraint: str = "", projection: Sequence[str] = ()) -> list[Any]:
        """Return the bindings' ads that match.

        :param ad_type: name of an htcondor2.AdType. :param projection: attributes; none for whole ads.
        :raises CondorError: the daemon does not answer.
        """
        with bindings.faults():
            kind = getattr(bindings.htcondor().AdType, ad_type)
            return list(self._daemon().query(kind, constraint, list(projection)))

    def advertise(self, ads: Iterable[Mapping[str, Any]], command: str) -> None:
        """Publish ads. :raises CondorError: the collector refuses them or does not answer."""
        with bindings.faults():
            made = [bindings.classad().ClassAd(dict(ad)) for ad in ads]
            self._daemon().advertise(made, command)

    def locate(self, kind: str, name: str | None = None) -> Any:
        """Return the location ad of a daemon, None where the collector has none of this name.

        :param kind: name of an htcondor2.DaemonType. :param name: None for the daemon of this machine.
        :raises CondorError: the daemon cannot be found.
        """
        with bindings.faults():
            return self._daemon().locate(getattr(bindings.htcondor().DaemonType, kind), name)

    def _daemon(self) -> Any:
        return bindings.htcondor().Collector(*self._place)
