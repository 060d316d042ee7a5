"""Receipts of deposits, which let other programs ask a custodian about the files of a pilot that has ended.

One call of a plugin deposits many files. Their names are one random seed and a number each, from 1 on, and from a much
higher number after a restart of the manager. So the receipts of a whole sandbox are a few short texts,
``HOST:PORT[,HOST:PORT] SEED FIRST-LAST EXPIRES``. Everybody can read them in reports, and anybody who knows an origin
could use it. Therefore the origin is derived with the key by which the custodian knows depositors.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stageout.wire.address import is_address

#: Seconds for which its sender and custodians retry an operation.
EXPIRES_AFTER_S = 24 * 3600
#: Routers reject operations that are to be retried for more than this number of seconds.
MOST_EXPIRES_AFTER_S = 7 * 24 * 3600
#: Larger files are sent one by one, smaller ones many in one frame.
MAX_PACKED_FILE_BYTES = 64 * 1024
_SEED_CHARS = 32
_NONCE_BYTES = 8
_MOST = 1_000_000
#: Deposits of one origin. A custodian has the terminal forget results when it has delivered 16,384 of an origin;
#: another custodian that has one of these would hear STALE of it.
_PER_ORIGIN = 8192


class BadReceipt(ValueError):
    """A text is not a receipt."""


@dataclass(frozen=True)
class Receipt:
    """Deposits with one custodian, or the same ones with several.

    :param custodian: their addresses, with commas between. :param last: number of the last deposit.
    :param expires: Unix time in seconds.
    """

    custodian: str
    seed: str
    first: int
    last: int
    expires: int

    def __str__(self) -> str:
        return f"{self.custodian} {self.seed} {self.first}-{self.last} {self.expires}"

    @property
    def places(self) -> tuple[str, ...]:
        """Return the address of each custodian."""
        return tuple(self.custodian.split(","))

    def is_of(self, given: Receipt) -> bool:
        """Tell whether a custodian may confirm ``given`` with this receipt: the same deposits and a common
        custodian.
        """
        same = (self.seed, self.first, self.last) == (given.seed, given.first, given.last)
        return same and set(self.places) <= set(given.places)

    def names(self) -> Iterator[str]:
        """Yield the name of each deposit, for :func:`operation_of`."""
        return (name_of(self.seed, number) for number in range(self.first, self.last + 1))


@dataclass(frozen=True)
class Holding:
    """Files of one sandbox that routers have in custody, and that may exist only there.

    :param custodians: as of a :class:`Receipt`: if there is one, it has the only copy. :param since: Unix time in
        seconds, of the first of the files.
    """

    custodians: str
    files: int
    size_bytes: int
    since: int

    def __str__(self) -> str:
        return f"{self.custodians} {self.files} {self.size_bytes} {self.since}"

    @property
    def is_single(self) -> bool:
        """Tell whether each file has one copy."""
        return "," not in self.custodians


def holdings_of(files: Iterable[tuple[str, int]]) -> tuple[Holding, ...]:
    """Return the custodians of files. :param files: receipts, sizes in bytes. :raises BadReceipt: a receipt is
    invalid.
    """
    found: dict[str, Holding] = {}
    for text, size_bytes in files:
        receipt = read_receipt(text)
        since = receipt.expires - EXPIRES_AFTER_S
        before = found.get(receipt.custodian, Holding(receipt.custodian, 0, 0, since))
        found[receipt.custodian] = Holding(
            receipt.custodian, before.files + 1, before.size_bytes + size_bytes, min(before.since, since)
        )
    return tuple(found.values())


def read_holdings(texts: Iterable[str]) -> tuple[Holding, ...]:
    """Parse written holdings. Leave out invalid texts."""
    words = (text.split(" ") for text in texts)
    return tuple(
        Holding(one[0], *map(int, one[1:]))
        for one in words
        if len(one) == 4 and all(word.isdecimal() and len(word) < 20 for word in one[1:])
    )


def new_seed(key: str) -> str:
    """Make a random seed that is valid only in reports of one manager. :param key: its public key.

    Everybody can read reports. Without the key in the seed, anybody could copy it and have the deposits cancelled.
    """
    nonce = os.urandom(_NONCE_BYTES).hex()
    return nonce + _mark(nonce, key)


def is_seed_of(seed: str, key: str) -> bool:
    """Tell whether :func:`new_seed` made it for that public key."""
    nonce = seed[: 2 * _NONCE_BYTES]
    return seed == nonce + _mark(nonce, key)


def _mark(nonce: str, key: str) -> str:
    return hashlib.sha256(f"{nonce} {key}".encode()).hexdigest()[: _SEED_CHARS - 2 * _NONCE_BYTES]


def name_of(seed: str, number: int) -> str:
    """Return the name of one deposit."""
    return f"{seed}/{number}"


def operation_of(name: str, secret: bytes) -> tuple[str, int]:
    """Return the identity of a deposit at a custodian: its origin, 32 hexadecimal digits, and its number there.

    Deposits of one seed with similar numbers have one origin, so that they can share a pack. Each has the same identity
    by itself and in any pack.

    :param name: of :func:`name_of`. :param secret: of the key.
    """
    seed, _, number = name.rpartition("/")
    place = f"{seed}/{int(number) // _PER_ORIGIN}"
    return hmac.new(secret, place.encode(), hashlib.sha256).hexdigest()[:32], int(number)


def earlier_operation_of(name: str, secret: bytes) -> tuple[str, int]:
    """Return the identity that pilots released before 22 November 2026 used: each deposit had its own origin."""
    return hmac.new(secret, name.encode(), hashlib.sha256).hexdigest()[:32], 1


def written_numbers(numbers: Iterable[int]) -> str:
    """Write numbers of deposits in their order: ``1-3,7,5``."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] + 1 == number:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in found)


def read_numbers(text: str) -> list[int]:
    """Parse the numbers in such a text. :raises BadReceipt: the text is invalid."""
    found: list[int] = []
    for word in filter(None, text.split(",")):
        first, _, last = word.partition("-")
        ends = first, last or first
        if not all(end.isdecimal() and len(end) < 16 for end in ends) or not 0 <= int(ends[1]) - int(first) < _MOST:
            raise BadReceipt(f"{text[:100]!r} are no numbers of deposits")
        found.extend(range(int(first), int(ends[1]) + 1))
    return found


def read_receipt(text: str) -> Receipt:
    """Parse a receipt. :raises BadReceipt: the text is invalid."""
    words = text.split(" ")
    numbers = words[2].split("-") if len(words) == 4 else []
    if len(numbers) != 2 or not all(word.isdecimal() and len(word) < 16 for word in (*numbers, words[3])):
        raise BadReceipt(f"{text[:100]!r} is not HOST:PORT[,HOST:PORT] SEED FIRST-LAST EXPIRES")
    found = Receipt(words[0], words[1], int(numbers[0]), int(numbers[1]), int(words[3]))
    hexadecimal = len(found.seed) == _SEED_CHARS and all(char in "0123456789abcdef" for char in found.seed)
    if not all(map(is_address, found.places)) or not hexadecimal or not 0 <= found.last - found.first < _MOST:
        raise BadReceipt(f"{text[:100]!r} is not a receipt of deposits")
    return found


def joined(receipts: Iterable[Receipt]) -> tuple[Receipt, ...]:
    """Join the same deposits in as few receipts as possible. Each is valid until the first of them expires."""
    found: list[Receipt] = []
    for one in sorted(receipts, key=lambda item: (item.custodian, item.seed, item.first)):
        before = found[-1] if found else None
        if before and (before.custodian, before.seed, before.last + 1) == (one.custodian, one.seed, one.first):
            expires = min(before.expires, one.expires)
            found[-1] = Receipt(one.custodian, one.seed, before.first, one.last, expires)
        else:
            found.append(one)
    return tuple(found)
