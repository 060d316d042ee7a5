"""Files of a pack that its terminal may have had before it lost its records (rule 18)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.finding import generation_of
from stageout.overlay.wire import frames
from stageout.overlay.wire.frames import Buffer
from stageout.overlay.wire.messages import Answer, GetPack, Pack, Stat
from stageout.overlay.wire.pack_gets import MAX_ASKED, MAX_ASKED_BYTES
from stageout.overlay.wire.route import Route

#: Names that are asked about at once.
_TOGETHER = 64
NEWER = "{} has lost its records, and a file that is newer has this name: look before you do it again"
"""What the owner of a file is told that must not be sent; with the name of the router."""


@dataclass(frozen=True)
class Files:
    """Small files as who sends them has them, by their place in the pack. :param digest: the kind of ``digests``.

    :param taken_at: Unix time in seconds from which on a file of another content is newer than these.
    """

    pack: Pack
    digest: str
    digests: Sequence[bytes]
    taken_at: int


class Seen(NamedTuple):
    """The files found there, by place.

    :param same: generations of files that are there. :param newer: others have their names.

    Those were changed after these had been taken, or sent first.
    """

    same: dict[int, int]
    newer: set[int]


def look(gateway: Gateway, files: Files, places: Iterable[int], route: Route = ()) -> Seen:
    """Look for files at their terminal. A file that may not be looked at counts as not there.

    :param route: by which it is reached. :raises TransferFailure: it is not.
    """
    entries = _entries(gateway, route, files.pack, list(places))
    candidates = [
        place for place, entry in entries.items()
        if entry.kinds == ("file",) and entry.sizes_bytes == (files.pack.sizes_bytes[place],)
    ]  # fmt: skip
    same = {place: entries[place].generation for place in _same(gateway, route, files, candidates)}
    newer = {
        place for place, entry in entries.items()
        if place not in same and entry.kinds == ("file",) and entry.modified[0] > files.taken_at
    }  # fmt: skip
    return Seen(same, newer)


def _entries(gateway: Gateway, route: Route, pack: Pack, places: list[int]) -> dict[int, Answer]:
    found: dict[int, Answer] = {}
    with Channel(gateway, route) as channel:
        for start in range(0, len(places), _TOGETHER):
            some = places[start : start + _TOGETHER]
            for place in some:
                channel.send(Stat(pack.paths[place]))
            for place in some:
                answer = channel.receive()
                if not isinstance(answer, Answer):
                    raise channel.failure(ErrorClass.NOT_SUPPORTED, f"{type(answer).__name__} where ANSWER was due")
                found[place] = answer
    return found


def _same(gateway: Gateway, route: Route, files: Files, places: list[int]) -> Iterator[int]:
    """Those of which just these data are there."""
    digest, alone = frames.digest_of_kind(files.digest), list[int]()
    for some in _questions(files.pack, places):
        codes, data = _fetched(gateway, route, files.pack, some)
        for place, code, content in zip(some, codes, data):
            if code:
                alone.append(place)
            elif digest(content) == files.digests[place]:
                yield place
    for place in alone:
        path, size_bytes = files.pack.paths[place], files.pack.sizes_bytes[place]
        digests = [files.digests[place]] if size_bytes else []
        if generation_of(gateway, (route,), path, size_bytes, files.digest, digests) is not None:
            yield place


def _fetched(gateway: Gateway, route: Route, pack: Pack, places: list[int]) -> tuple[Sequence[int], Sequence[Buffer]]:
    """The content of files, with the class of the failure of those that are to be fetched by themselves."""
    alone = [ErrorClass.NOT_SUPPORTED.code] * len(places), [b""] * len(places)
    with Channel(gateway, route) as channel:
        if not channel.packs:
            return alone
        channel.send(GetPack(tuple(pack.paths[place] for place in places)))
        try:
            found, data = channel.receive_pack(len(places))
        except TransferFailure as failure:
            if failure.kind.retryable:
                raise
            return alone  # a plugin fetches some, or not all may be read
    return found.codes, data


def _questions(pack: Pack, places: Iterable[int]) -> Iterator[list[int]]:
    """As many files for one question as it takes."""
    some: list[int] = []
    paths_bytes = 2
    for place in places:
        path_bytes = len(json.dumps(pack.paths[place])) + 2
        if some and (len(some) == MAX_ASKED or paths_bytes + path_bytes > MAX_ASKED_BYTES):
            yield some
            some, paths_bytes = [], 2
        some.append(place)
        paths_bytes += path_bytes
    if some:
        yield some
