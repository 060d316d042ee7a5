"""A pilot's way out: a router of the overlay that takes into custody what the pilot cannot deliver in time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sandbox_manager.sandbox import Destination
from stageout.movers.schemes import method_of
from stageout.wire.deposits import EXPIRES_AFTER_S, Receipt, new_seed

METHOD = "overlay"


@dataclass(frozen=True)
class HandOver:
    """:param router: ``HOST:PORT`` of the custodian. :param key: public key that reports are signed with."""

    router: str
    key: str
    _begun: dict[int, list[str]] = field(default_factory=dict)

    def takes(self, destination: Destination) -> bool:
        """Whether files for that destination can go this way: only what the overlay's plugin moves."""
        return method_of(destination.scheme) == METHOD

    def begin(self, sandboxes: Iterable[int], files: int, now: int) -> dict[str, str]:
        """Settings for a plugin that hands over files of these sandboxes."""
        seed = new_seed(self.key)
        receipt = str(Receipt(self.router, seed, 1, files, now + EXPIRES_AFTER_S))
        for sandbox in set(sandboxes):
            self._begun.setdefault(sandbox, []).append(receipt)
        return {"STAGEOUT_OVERLAY_HANDOVER": self.router, "STAGEOUT_OVERLAY_SEED": seed}

    def begun(self, sandbox: int) -> tuple[str, ...]:
        """All that may have been given to the custodian of a sandbox: its plugin may have died before it could say so.

        Whoever runs the job again must have this cancelled, or old output could come after the new.
        """
        return tuple(self._begun.get(sandbox, ()))
