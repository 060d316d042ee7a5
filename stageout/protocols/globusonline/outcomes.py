"""Convert the end of a task to one result per file: arrived, confirmed by the destination, or failed with a reason."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.api import Outcome
from stageout.protocols.globusonline import failures
from stageout.protocols.globusonline.plan import Move, Pair, belongs
from stageout.protocols.globusonline.taskrun import Ended

_NAMED = 3

Sizes = Callable[[str], Mapping[str, int]]


def uploaded(move: Move, ended: Ended, sizes: Sizes) -> Outcome | TransferFailure | None:
    """Return the outcome of one uploaded file; None if the task has no result for it.

    The service lists no file that already existed at the destination (sync level). Then, as for a file without a
    checksum, the plugin queries the destination for its size.

    :param sizes: sizes of the files in a directory of the destination.
    """
    if move.pair in ended.skipped:
        return _skipped([(move.pair, ended.skipped[move.pair])], ended)
    row = ended.arrived.get(move.pair)
    if row is None and ended.cause is not None:
        return None
    digests = _digests(row or {})
    moved_bytes = move.size_bytes if row else 0
    if digests:
        return Outcome(
            move.size_bytes, moved_bytes, verified=next(iter(digests)), digests=digests, developer=ended.facts
        )
    found = sizes(move.destination_folder).get(move.pair[1].rpartition("/")[2])
    if found != move.size_bytes:
        what = "no such file" if found is None else f"{found} bytes"
        text = f"the task calls {move.pair[1]} done, but the destination has {what} where {move.size_bytes} were sent"
        return TransferFailure(ErrorClass.SIZE_MISMATCH, text, failures.SERVER, developer=ended.facts)
    return Outcome(move.size_bytes, moved_bytes, verified="size", developer=ended.facts)


def downloaded(move: Move, ended: Ended) -> Outcome | TransferFailure | None:
    """Return the outcome of one download, which is renamed on arrival; None if the task has no result for it."""
    skipped = [(pair, code) for pair, code in ended.skipped.items() if belongs(pair, move.pair)]
    if skipped:
        return _skipped(skipped, ended)
    rows = [row for pair, row in ended.arrived.items() if belongs(pair, move.pair)] if move.address.is_folder else []
    row = ended.arrived.get(move.pair)
    if ended.cause is not None and (row is None or move.address.is_folder):
        return None
    try:
        size_bytes = _put_in_place(move.here, Path(move.transfer.request.local_path), move.address.is_folder)
    except OSError as error:
        text = f"{move.address.shown} arrived and cannot be put in its place: {error.strerror}"
        return TransferFailure(ErrorClass.LOCAL_FILE, text, developer=ended.facts)
    digests = _digests(row or {})
    verified = next(iter(digests or _digests(rows[0] if rows else {})), "")
    return Outcome(size_bytes, size_bytes, verified=verified, digests=digests, developer=ended.facts)


def _skipped(found: list[tuple[Pair, str]], ended: Ended) -> TransferFailure:
    code = found[0][1]
    kind = failures.fault_of(code).kind
    names = ", ".join(pair[0] for pair, _ in found[:_NAMED])
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    text = f"{code}: {names}{more}: {failures.words_of(kind) or 'the source cannot be read'} [task {ended.task}]"
    return TransferFailure(kind, text, failures.SERVER, developer=ended.facts)


def _digests(row: Mapping[str, Any]) -> dict[str, str]:
    name = str(row.get("checksum_algorithm") or "").lower().replace("-", "")
    value = str(row.get("checksum") or "")
    return {name: value} if name and value else {}


def _put_in_place(here: Path, there: Path, is_folder: bool) -> int:
    if not is_folder:
        size_bytes = here.stat().st_size
        here.replace(there)
        return size_bytes
    here.mkdir(parents=True, exist_ok=True)
    total = sum(path.stat().st_size for path in _files(here))
    if there.is_dir():
        for child in here.iterdir():
            child.replace(there / child.name)
    else:
        here.replace(there)
    return total


def _files(folder: Path) -> Iterable[Path]:
    for top, _, names in os.walk(folder):
        yield from (Path(top, name) for name in names)
