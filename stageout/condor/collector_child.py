"""The collector, asked from a child process: the bindings hold the interpreter while they wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stageout.condor.ads import SkippedAttributes
from stageout.condor.bindings import CondorError
from stageout.condor.limits import COLLECTOR_S
from stageout.condor.query_child import QueryChild
from stageout.core.children import module_command

_MAX_LINE_BYTES = 256 * 1024 * 1024


class CollectorChild(QueryChild):
    """The collector(s) of the HTCondor configuration, through a child process that is started when needed.

    :param local_name: as of the daemon. :param timeout_s: for one question, then the child is replaced.
    :param host: collector of another pool, asked in place of these.
    """

    def __init__(self, local_name: str = "", timeout_s: float = COLLECTOR_S, host: str = "") -> None:
        argv = module_command("stageout.condor.collector_process", local_name)
        super().__init__(argv, "collector", CondorError, timeout_s, _MAX_LINE_BYTES)
        self._host = host
        self._skipped = SkippedAttributes()

    async def query(
        self, constraint: str, attributes: Sequence[str], ad_type: str = "Any"
    ) -> list[Mapping[str, Any]]:  # fmt: skip
        """Return the ads that match, without attributes that are not UTF-8.

        :param constraint: a ClassAd expression. :param ad_type: name of an htcondor2.AdType. "Any" scans every ad of
            the pool, and "Generic" finds only ads whose MyType is "Generic". :raises CondorError: no answer.
        """
        question = {"op": "query", "constraint": constraint, "attributes": list(attributes), "ad_type": ad_type}
        answer = await self._ask({**question, "host": self._host})
        for name, attribute in answer["skipped"]:
            self._skipped.add(name, attribute)
        ads: list[Mapping[str, Any]] = answer["ads"]
        return ads

    async def publish(self, ad: Mapping[str, Any], command: str = "UPDATE_AD_GENERIC") -> None:
        """Publish an ad in the table of the update command; an ad of the same key is replaced.

        :raises CondorError: refused, or no answer.
        """
        await self._ask({"op": "advertise", "ad": ad, "command": command, "host": self._host})
