"""Several connections for one file: their combined progress, and an end for all when one fails."""

from __future__ import annotations

import threading

from stageout.plugin.api import Context
from stageout.protocols.curl.task import FileProgress


class SharedProgress(FileProgress):
    """Bytes of one file over several connections at once."""

    def __init__(self, context: Context, total: FileProgress) -> None:
        super().__init__(context)
        self._total = total
        self._lock = threading.Lock()
        self.stop: BaseException | None = None

    def add(self, gain_bytes: int) -> None:
        """Report progress to the framework.

        :raises TransferFailure: the plugin has to end, or another connection of this file failed.
        """
        if self.stop is not None:
            raise self.stop
        with self._lock:
            self._total.begin()
            self._total.moved(gain_bytes)


class StreamProgress(FileProgress):
    """The progress of one connection."""

    def __init__(self, context: Context, shared: SharedProgress) -> None:
        super().__init__(context)
        self._shared = shared
        self._reported_bytes = 0

    def begin(self) -> None:
        """Prepare for a request."""
        self._reported_bytes = 0

    def moved(self, request_bytes: int) -> None:
        """Record the transferred bytes of the current request."""
        gain_bytes, self._reported_bytes = request_bytes - self._reported_bytes, request_bytes
        self._shared.add(gain_bytes)
