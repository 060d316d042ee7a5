"""A pilot's way out: a router of the overlay that takes into custody what the pilot cannot deliver in time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sandbox_manager.lookups import FileRow
from sandbox_manager.sandbox import Destination
from stageout.movers.schemes import method_of
from stageout.wire.deposits import EXPIRES_AFTER_S, Receipt, joined, new_seed, read_numbers, written_numbers
from stageout.wire.packs import MAX_FILE_BYTES

METHOD = "overlay"
#: In one call of the plugin: many small files take no longer than a few. Their numbers travel in its environment.
BATCH_FILES = 5000
_NUMBERS = "STAGEOUT_OVERLAY_NUMBERS"


class HandOver:
    """One drain's. A file has one number however often it is given away: a custodian that has it says so, and whoever
    gives the job up finds every deposit that there may be.

    :param router: ``HOST:PORT`` of the custodian, or of several, with commas between. :param key: public key that
        reports are signed with. :param copies: custodians that must have a file.
    """

    def __init__(self, router: str, key: str, copies: int = 1) -> None:
        self.router, self._seed, self._copies = router, new_seed(key), copies
        self._numbers: dict[tuple[int, int], int] = {}
        self._begun: dict[int, dict[int, Receipt]] = {}

    def takes(self, destination: Destination) -> bool:
        """Whether files for that destination can go this way: only what the overlay's plugin moves."""
        return method_of(destination.scheme) == METHOD

    def begin(self, files: Iterable[FileRow], now: int) -> dict[str, str]:
        """Settings for a plugin that hands over these files, in the order in which it is told of them."""
        listed, numbers = list(files), []
        for file in sorted(listed, key=lambda one: one.size_bytes > MAX_FILE_BYTES):  # a pack has numbers without a gap
            self._numbers.setdefault((file.ticket_id, file.position), len(self._numbers) + 1)
        for file in listed:
            number = self._numbers[file.ticket_id, file.position]
            receipt = Receipt(self.router, self._seed, number, number, now + EXPIRES_AFTER_S)
            self._begun.setdefault(file.sandbox, {})[number] = receipt
            numbers.append(number)
        return {
            "STAGEOUT_OVERLAY_HANDOVER": self.router,
            "STAGEOUT_OVERLAY_SEED": self._seed,
            _NUMBERS: written_numbers(numbers),
            "STAGEOUT_OVERLAY_COPIES": str(self._copies),
        }

    def begun(self, sandbox: int) -> tuple[str, ...]:
        """All that may have been given to the custodian of a sandbox: its plugin may have died before it could say so.

        Whoever runs the job again must have this cancelled, or old output could come after the new.
        """
        return tuple(map(str, joined(self._begun.get(sandbox, {}).values())))


def for_these(settings: Mapping[str, str], indices: Sequence[int]) -> dict[str, str]:
    """Settings for a plugin that is told of some of its files only: each keeps its own number.

    :param settings: of :meth:`HandOver.begin`, or others. :param indices: of these files, among all.
    """
    if _NUMBERS not in settings:
        return dict(settings)
    numbers = read_numbers(settings[_NUMBERS])
    return {**settings, _NUMBERS: written_numbers(numbers[index] for index in indices)}
