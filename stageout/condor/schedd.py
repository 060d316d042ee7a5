"""The schedd, asked directly: its queue, its histories, and edits of its jobs. The calls block.

The bindings hold the interpreter while they wait. A process with an event loop asks from a child process
(:class:`stageout.condor.query_child.QueryChild`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stageout.condor import bindings

#: SetAttribute_PostSubmitClusterChange: an edit of the cluster's ad. The bindings have no name for it.
_CLUSTER_CHANGE = 1 << 7


class Schedd:
    """A schedd. Each call finds it anew, so that a restart between two calls does not matter.

    :param location: its location ad; None for the schedd of this machine.
    """

    def __init__(self, location: Any = None) -> None:
        self._location = () if location is None else (location,)

    def query(
        self, constraint: str, projection: Sequence[str], limit: int | None = None, with_clusters: bool = False
    ) -> list[Any]:
        """Return the bindings' ads of jobs in the queue.

        :param with_clusters: also the ads of clusters. :raises CondorError: the schedd does not answer.
        """
        with bindings.faults():
            more: dict[str, Any] = {} if limit is None else {"limit": limit}
            if with_clusters:
                more["opts"] = bindings.htcondor().QueryOpt.IncludeClusterAd
            return list(self._daemon().query(constraint, list(projection), **more))

    def summary(self, constraint: str) -> Mapping[str, Any]:
        """Return the schedd's counts of jobs in each status. :raises CondorError: the schedd does not answer."""
        with bindings.faults():
            found = self._daemon().query(constraint, [], opts=bindings.htcondor().QueryOpt.SummaryOnly)
            return found[0] if found else {}

    def history(
        self, constraint: str, projection: Sequence[str], most: int, since: str | None = None
    ) -> Iterator[Any]:  # fmt: skip
        """Yield the bindings' ads of jobs that have left the queue, the newest first.

        :param most: number of ads, -1 without a limit. :param since: the search ends at a job for which this is true.
        :raises CondorError: the history cannot be read.
        """
        with bindings.faults():
            # The bindings of HTCondor 23 want an expression, no text.
            end = () if since is None else (bindings.classad().ExprTree(since),)
            yield from self._daemon().history(constraint, list(projection), most, *end)

    def epochs(self, constraint: str, ad_type: str) -> list[Any]:
        """Return the whole ads of a type in the history of runs. :raises CondorError: it cannot be read."""
        with bindings.faults():
            return list(self._daemon().jobEpochHistory(constraint, [], ad_type=ad_type))

    def edit(
        self, jobs: Sequence[str] | str, name: str, value: str, is_logged: bool = False, is_of_cluster: bool = False
    ) -> int:
        """Set an attribute in one transaction. Return the number of changed jobs.

        :param jobs: job ids, or one constraint. :param is_logged: also write an event into the log of each job.
        :param is_of_cluster: change the ad of a cluster. :raises CondorError: the schedd changed no job.
        """
        with bindings.faults():
            more = {}
            if is_logged:
                more["flags"] = bindings.htcondor().TransactionFlag.ShouldLog
            elif is_of_cluster:
                more["flags"] = int.__new__(bindings.htcondor().TransactionFlag, _CLUSTER_CHANGE)
            which = jobs if isinstance(jobs, str) else list(jobs)
            return int(self._daemon().edit(which, name, value, **more))

    def remove(self, job: str, reason: str) -> None:
        """Remove a job, as condor_rm does. :raises CondorError: the job stays."""
        with bindings.faults():
            # The bindings lose a reason without a code.
            self._daemon().act(bindings.htcondor().JobAction.Remove, job, reason=(reason, 0))

    def _daemon(self) -> Any:
        return bindings.htcondor().Schedd(*self._location)
