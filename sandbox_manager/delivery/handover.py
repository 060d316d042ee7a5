"""A pilot's way out: a router of the overlay that takes into custody what the pilot cannot deliver in time."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence

from stageout.model.file import StoredFile
from stageout.model.sandbox import Destination
from stageout.movers.schemes import method_of
from stageout.wire.deposits import (
    EXPIRES_AFTER_S,
    MAX_PACKED_FILE_BYTES,
    BadReceipt,
    Receipt,
    is_seed_of,
    joined,
    new_seed,
    read_numbers,
    read_receipt,
    written_numbers,
)

METHOD = "overlay"
#: In one call of the plugin: many small files take no longer than a few. Their numbers travel in its environment.
BATCH_FILES = 5000
_NUMBERS = "STAGEOUT_OVERLAY_NUMBERS"
#: After a restart numbers go on from somewhere below.
_GO_ON_BELOW = 10**14


class DrainTarget:
    """The custodian to which one drain hands files over.

    A file keeps its number when it is handed over again. So a custodian that already has the file reports it, and the
    agent that gives the job up finds every deposit that may exist. The ledger has the numbers before the plugin
    begins, so a manager that crashed continues with the same numbers.

    :param router: ``HOST:PORT`` of the custodian, or of several, with commas between. :param key: public key that
        reports are signed with. :param copies: custodians that must have a file.
    """

    def __init__(self, router: str, key: str, copies: int = 1) -> None:
        self.router, self._key, self._seed, self._copies = router, key, new_seed(key), copies
        self._numbers: dict[tuple[int, int], int] = {}
        self._last = 0
        self._begun: dict[int, dict[int, Receipt]] = {}

    def remember(self, begun: Iterable[StoredFile]) -> None:
        """Go on with what an earlier start has begun, before anything is begun here.

        The ledger may have forgotten files since then (of jobs that were removed), and their numbers. A custodian would
        mistake a file with such a number for the forgotten one, so no file gets such a number.

        :param begun: files whose receipts :meth:`receipts` gave; those of another key count for nothing any more. A
            file that a custodian may have gets another number here: then both deposits can be found.
        """
        for file in begun:
            try:
                receipt = read_receipt(file.proof)
            except BadReceipt:
                continue  # a digest, in the format of the plugin that delivered the file
            if is_seed_of(receipt.seed, self._key) and (not self._last or receipt.seed == self._seed):
                self._seed, self._last = receipt.seed, max(self._last, receipt.last)
                self._begun.setdefault(file.sandbox, {})[receipt.last] = receipt
                if receipt.custodian == self.router:
                    self._numbers[file.ticket_id, file.position] = receipt.last
        if self._last:
            self._last = max(self._last, secrets.randbelow(_GO_ON_BELOW))

    def accepts(self, destination: Destination) -> bool:
        """Tell whether files for that destination can go this way: the overlay's plugin must move them."""
        return method_of(destination.scheme) == METHOD

    def begin(self, files: Iterable[StoredFile], now: int) -> dict[str, str]:
        """Return the settings for a plugin that hands over these files, in the order of its list."""
        listed, numbers = list(files), []
        # A pack has numbers without a gap.
        for file in sorted(listed, key=lambda one: one.size_bytes > MAX_PACKED_FILE_BYTES):
            if (file.ticket_id, file.position) not in self._numbers:
                self._last += 1
                self._numbers[file.ticket_id, file.position] = self._last
        for file in listed:
            number = self._numbers[file.ticket_id, file.position]
            receipt = Receipt(
                custodian=self.router, seed=self._seed, first=number, last=number, expires=now + EXPIRES_AFTER_S
            )
            self._begun.setdefault(file.sandbox, {})[number] = receipt
            numbers.append(number)
        return {
            "STAGEOUT_OVERLAY_HANDOVER": self.router,
            "STAGEOUT_OVERLAY_SEED": self._seed,
            _NUMBERS: written_numbers(numbers),
            "STAGEOUT_OVERLAY_COPIES": str(self._copies),
        }

    def receipts(self, files: Iterable[StoredFile]) -> list[tuple[str, int, int]]:
        """Return receipt, ticket and position of each file that is handed over, for the ledger."""
        return [
            (str(self._begun[one.sandbox][self._numbers[one.ticket_id, one.position]]), one.ticket_id, one.position)
            for one in files
        ]

    def only_here(self, files: Iterable[tuple[int, int]], begun: Collection[int]) -> int:
        """Count the files that no receipt names. :param files: ticket and position of each.

        :param begun: numbers of the receipts. More may be begun while somebody writes down what they say.
        """
        return sum(self._numbers.get(one, 0) not in begun for one in files)

    def begun(self, sandbox: int) -> Mapping[int, Receipt]:
        """All that may have been given to the custodian of a sandbox, by number, as it is now: its plugin may have died
        before it could say so.

        The access point must have this deposit cancelled before it runs the job again, or old output could come after
        the new.
        """
        return self._begun.get(sandbox, {}).copy()


def written(begun: Mapping[int, Receipt]) -> tuple[str, ...]:
    """Receipts of a sandbox, as few as say the same."""
    return tuple(map(str, joined(begun.values())))


def deposits_of(settings: Mapping[str, str], files: int) -> Sequence[Receipt | None]:
    """Return the deposit that a plugin with these settings may make for each file; None: no custodian.

    :param settings: of :meth:`DrainTarget.begin`, or others. :param files: number of files in its list.
    """
    if _NUMBERS not in settings:
        return [None] * files
    router, seed = settings["STAGEOUT_OVERLAY_HANDOVER"], settings["STAGEOUT_OVERLAY_SEED"]
    return [
        Receipt(custodian=router, seed=seed, first=number, last=number, expires=0)
        for number in read_numbers(settings[_NUMBERS])
    ]


def for_these(settings: Mapping[str, str], indices: Sequence[int]) -> dict[str, str]:
    """Return the settings for a plugin that gets only some of the files: each keeps its own number.

    :param settings: of :meth:`DrainTarget.begin`, or others.
    :param indices: positions of these files in the list of all.
    """
    if _NUMBERS not in settings:
        return dict(settings)
    numbers = read_numbers(settings[_NUMBERS])
    return {**settings, _NUMBERS: written_numbers(numbers[index] for index in indices)}
