"""Small files back from a router, many for one question. No I/O; described in docs/developer/wire.md."""

from __future__ import annotations

from dataclasses import dataclass

#: Files that one question may be for, and bytes that their paths may take up as JSON: the rest is for its other fields.
MAX_ASKED = 256
MAX_ASKED_BYTES = 11 * 1024


@dataclass(frozen=True)
class GetPack:
    """First frame of a connection on which published small files come back: one FOUND_PACK. Another may follow.

    :param capability: and the signature of its holder over all paths, as of a GET.
    :param priority: and :param deadline: as of a GET.
    """

    paths: tuple[str, ...]
    capability: str = ""
    signature: str = ""
    priority: int = 0
    deadline: int = 0


@dataclass(frozen=True)
class FoundPack:
    """The files of a GET_PACK, one row each, in the order in which they were asked for; their data follow, likewise.

    :param sizes_bytes: 0 for a file that is not there. :param codes: 0, or the class of the failure
        (:class:`~stageout.core.errors.ErrorClass`): why it is not; TOO_LARGE: it is to be asked for by a GET.
    """

    sizes_bytes: tuple[int, ...]
    modes: tuple[int, ...]
    codes: tuple[int, ...]
