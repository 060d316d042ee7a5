"""One call of a transfer plugin for files of a spool: checked, leased, run, and what it answered."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Union

from overlay_router.custodians.spool import Held
from overlay_router.delivery.guard import Guard
from overlay_router.delivery.lessee import Lessee, NotLeased
from stageout.core.errors import Advice, ErrorClass
from stageout.movers.mover import Equipment, PluginCall, StoppableMover, Stopped
from stageout.movers.plugins_table import Plugin
from stageout.movers.results import Delivered, Failure, InCustody, SentFile
from stageout.overlay.wire import frames
from stageout.overlay.wire.egress import Target
from stageout.overlay.wire.messages import BLOCK_BYTES


@dataclass(frozen=True)
class File:
    """One file of a call. :param path: of its data. :param digests: of its blocks, in order."""

    held: Held
    path: Path
    digests: tuple[bytes, ...]


@dataclass(frozen=True)
class Damaged:
    """Blocks of the spool that are not what came in."""

    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Again:
    """Not judged: it is to be tried again."""

    why: str


#: A failure that another node could avoid is, for the client that asks here, a fault of this one.
_OURS = {Advice.RETRY_ELSEWHERE: ErrorClass.SERVER_ERROR}
_REASON_CHARS = 500


def told(target: Target, failure: Failure) -> tuple[ErrorClass, str]:
    """Class and words of a plugin's failure for who has asked this gateway."""
    kind = _OURS.get(failure.kind.advice, failure.kind)
    return kind, f"{target.shown}: {failure.message}"[:_REASON_CHARS]


End = Union[Delivered, Failure, Damaged, Again]


@dataclass(frozen=True)
class Kit:
    """The inputs of a call beside its files.

    :param directory: to make, for its work. :param credentials: content by file name.
    """

    plugin: Plugin
    directory: Path
    lifetime_s: float
    credentials: Mapping[str, bytes] = field(repr=False)
    lessee: Lessee | None


class Call:
    """:meth:`run` blocks and belongs into a thread; :meth:`stop` may come from any other."""

    def __init__(self, target: Target, files: Sequence[File], kit: Kit) -> None:
        self.target, self.files, self._kit = target, tuple(files), kit
        self._mover = StoppableMover()

    def stop(self) -> None:
        """Kill the plugin; what it has verified by then counts."""
        self._mover.stop()

    def run(self) -> list[End]:
        """One end for each file, in their order. :raises OSError: the work directory cannot be made."""
        ends: dict[int, End] = {number: bad for number, file in enumerate(self.files) if (bad := _checked(file))}
        good = [number for number in range(len(self.files)) if number not in ends]
        if good:
            ends.update(zip(good, self._sent([self.files[number] for number in good])))
        return [ends[number] for number in range(len(self.files))]

    def _sent(self, files: list[File]) -> list[End]:
        cargo = tuple(
            SentFile(file.path, self.target.url_of(file.held.operation.path),
                  file.held.operation.path.rpartition("/")[2], file.held.operation.size_bytes)
            for file in files
        )  # fmt: skip
        try:
            with self._alone([item.url for item in cargo]) as may_begin:
                return self._delivered(cargo, may_begin)
        except NotLeased as problem:
            return [Again(str(problem))] * len(files)

    @contextlib.contextmanager
    def _alone(self, urls: list[str]) -> Iterator[Callable[[], bool]]:
        if self._kit.lessee is None:
            yield lambda: True
            return
        with Guard(self._kit.directory) as guard, self._kit.lessee.alone(urls, self.stop, guard.until) as holds:
            yield holds

    def _delivered(self, cargo: tuple[SentFile, ...], may_begin: Callable[[], bool]) -> list[End]:
        kit = self._kit
        call = PluginCall(
            kit.directory, kit.plugin, os.geteuid(), os.getegid(), cargo, kit.lifetime_s, Equipment(kit.credentials)
        )
        try:
            answers = self._mover.run(call, may_begin)
        except Stopped as stopped:
            found = [stopped.delivered.get(number) for number in range(len(cargo))]
            return [one if isinstance(one, Delivered) else Again("the plugin was stopped") for one in found]
        return [_final(answer) for answer in answers]


def _final(answer: Delivered | InCustody | Failure) -> End:
    if isinstance(answer, InCustody):  # it is not where it was to go
        return Failure(ErrorClass.NOT_VERIFIED, "the plugin gave the file to a custodian and does not know its end")
    return answer


def _checked(file: File) -> Damaged | Failure | None:
    """Blocks whose bytes are not what their digests say; all of a file that is not there; why it cannot be checked."""
    try:
        digest = frames.digest_of_kind(file.held.digest)
    except frames.NoDigest as problem:
        return Failure(ErrorClass.PLUGIN_BROKEN, str(problem))
    try:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return Damaged(tuple(range(len(file.digests))))
    try:
        size_bytes, left = os.fstat(descriptor).st_size, file.held.operation.size_bytes
        bad = [
            block
            for block, known in enumerate(file.digests)
            if digest(_read(descriptor, min(BLOCK_BYTES, left - block * BLOCK_BYTES), block * BLOCK_BYTES)) != known
        ]
    finally:
        os.close(descriptor)
    if size_bytes != left and not bad:
        return Damaged(tuple(range(len(file.digests))))
    return Damaged(tuple(bad)) if bad else None


def _read(descriptor: int, length: int, offset: int) -> bytes:
    try:
        return os.pread(descriptor, length, offset)
    except OSError:  # a block that the disk does not give back is a damaged one
        return b""
