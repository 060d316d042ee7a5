"""ClassAds as dictionaries whose names ignore case, as ClassAds do: releases differ (ProcID, ProcId)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Ad(dict[str, Any]):
    """A dictionary that finds ``ClusterId`` under ``clusterid`` too; iteration gives the names as they were spelt."""

    def __init__(self, pairs: Iterable[tuple[str, Any]] = ()) -> None:
        super().__init__(pairs)
        self._spelt = {name.lower(): name for name in self}

    def __missing__(self, name: str) -> Any:
        return super().__getitem__(self._spelt[name.lower()])

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._spelt

    def get(self, name: str, default: Any = None) -> Any:
        """Value under that name in any spelling, else the default."""
        spelt = self._spelt.get(name.lower())
        return default if spelt is None else super().__getitem__(spelt)
