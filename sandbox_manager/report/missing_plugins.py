"""URL schemes that files wait for and no plugin of this node moves. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from stageout.core import log
from stageout.core.states import FREED
from stageout.model.sandbox import Destination, Sandbox
from stageout.movers.schemes import method_of

_ADVICE = "name a plugin for it in FILETRANSFER_PLUGINS, last the one that shall move it, then condor_reconfig"


def missing_methods(
    finds: Callable[[str, str], object | None],
    sandboxes: Iterable[Sandbox],
    destinations: Mapping[int, Destination],
    drain_method: str = "",
) -> dict[str, str]:
    """Find what waits for a plugin that moves a method, by method.

    :param finds: the table's :meth:`~stageout.movers.plugins_table.PluginsTable.find`.
    :param sandboxes: all sandboxes that the node holds.
    :param drain_method: method by which a pilot hands over what it cannot deliver, "" without.
    """
    waiting: Counter[str] = Counter()
    for sandbox in sandboxes:
        wanted = {destinations[part.destination] for part in sandbox.waiting} if sandbox.state not in FREED else set()
        waiting.update(
            {
                method_of(destination.scheme)
                for destination in wanted
                if finds(destination.plugin, destination.scheme) is None
            }
        )
    found = {method: f"output of {jobs} jobs" for method, jobs in waiting.items()}
    if drain_method and finds("", drain_method) is None:
        found[drain_method] = "at the end of this pilot all that STAGEOUT_PILOT_ROUTER is for; without it that is lost"
    return found


class MissingPluginAlert:
    """Names each method in the log, once as long as it is missing."""

    def __init__(self) -> None:
        self._reported: frozenset[str] = frozenset()

    def tell(self, missing: Mapping[str, str]) -> None:
        """Say what is missing now."""
        for method in sorted(missing.keys() - self._reported):
            log.error("method-unsupported", method=method, waits=missing[method], advice=_ADVICE)
        self._reported = frozenset(missing)

    def facts(self) -> Mapping[str, str]:
        """Return the missing methods for the control socket."""
        return {"MissingPlugins": " ".join(sorted(self._reported))}
