"""The output file: one slot per request, filled with a failure ad first and updated in place.

HTCondor pre-allocates the file so that a full disk cannot stop the report, and kills a plugin without a warning.
Therefore the plugin never truncates the file, and every request has an ad from the start. An update is one write into a
slot within one page of the page cache, which a SIGKILL cannot interrupt. A slot never grows, because ads are shortened
to fit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import TracebackType

PAGE_BYTES = 4096
_FEW = 1000  # maximum number of requests with wide slots
_WIDE_BYTES, _NARROW_BYTES = PAGE_BYTES, 1024
_ROOM_BYTES = 512  # additional bytes of a result compared to the provisional ad
_CHUNK_BYTES = 1 << 20


class Slot:
    """A range of bytes in the file."""

    __slots__ = ("offset", "width")

    def __init__(self, offset: int, width: int) -> None:
        self.offset = offset
        self.width = width


class OutFile:
    """The open output file.

    :raises OSError: it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._found_bytes = os.fstat(self._descriptor).st_size
        self._slots: list[Slot] = []
        self.failed: OSError | None = None

    def __enter__(self) -> OutFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def lay_out(self, ad_bytes: Sequence[int], least_bytes: Callable[[], Sequence[int]]) -> list[int]:
        """Assign a slot to each request and fill the file with blanks.

        :param ad_bytes: length of each provisional ad.
        :param least_bytes: lengths of the shortest useful ads, for a full disk.
        :returns: width of each slot, in bytes; fewer slots than requests when the disk is full.
        """
        size = os.fstat(self._descriptor).st_size
        slots, end = roomy_slots(ad_bytes)
        if end > size:
            try:
                self._blank(size, end)
            except OSError:
                self._shrink(size)
                slots = tight_slots(least_bytes(), size)
        self._blank(0, size)
        self._slots = slots
        return [slot.width for slot in slots]

    def write(self, index: int, ad: str) -> bool:
        """Write an ad (ASCII) into its slot. Return False when the write failed; the former ad then stays.

        :raises ValueError: it is longer than the slot.
        """
        slot = self._slots[index]
        data = ad.encode("ascii")
        if len(data) > slot.width - 1:
            raise ValueError(f"ad of {len(data)} bytes for a slot of {slot.width}")
        try:
            os.pwrite(self._descriptor, data.ljust(slot.width - 1) + b"\n", slot.offset)
        except OSError as error:
            self.failed = error
            return False
        return True

    def restore(self) -> None:
        """Fill the file with blanks and restore its original size."""
        self._shrink(self._found_bytes)
        self._blank(0, self._found_bytes)

    def _blank(self, start: int, end: int) -> None:
        while start < end:
            start += os.pwrite(self._descriptor, b" " * min(_CHUNK_BYTES, end - start), start)

    def _shrink(self, size: int) -> None:
        """Truncate the file after a failed extension, but never below the size that HTCondor made."""
        os.ftruncate(self._descriptor, size)


def roomy_slots(ad_bytes: Sequence[int]) -> tuple[list[Slot], int]:
    """Compute slots with room for error data. A slot of up to a page in width crosses no page. Return also the last
    end.
    """
    least = _WIDE_BYTES if len(ad_bytes) <= _FEW else _NARROW_BYTES
    slots: list[Slot] = []
    end = 0
    for length in ad_bytes:
        width = least
        while width < length + _ROOM_BYTES:
            width *= 2
        align = min(width, PAGE_BYTES)
        slots.append(Slot(-(-end // align) * align, width))
        end = slots[-1].offset + width
    return slots, end


def tight_slots(least_bytes: Sequence[int], size: int) -> list[Slot]:
    """Compute as many slots as ``size`` bytes can hold, and share the rest among them."""
    needs: list[int] = []
    for length in least_bytes:
        if sum(needs) + length + 1 > size:
            break
        needs.append(length + 1)
    share = (size - sum(needs)) // len(needs) if needs else 0
    slots: list[Slot] = []
    end = 0
    for need in needs:
        slots.append(Slot(end, need + share))
        end += need + share
    return slots
