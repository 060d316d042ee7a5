"""Small files to a router, many in one frame.

A :class:`Packer` is one origin, or a part of one. Files are read, packed and sent while earlier packs are executed;
a few packs are under way at once, and kept until their results are here. A lost connection costs nothing: packs without
results are said again under the same numbers, and each file is executed once. Through a custodian it is the same; it
can also be enough that the custodian has them.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar, Union

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.pauses import growing_s
from stageout.overlay import outcomes
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.helpers import MOST, Helpers, Parcel
from stageout.overlay.kept import Room
from stageout.overlay.pack_looking import NEWER, Files, look
from stageout.overlay.sources import AnyPath, open_source
from stageout.overlay.wire.fields import MAX_AFTER, MAX_PATH_BYTES
from stageout.overlay.wire.messages import Custody, Low, Message, NoSpace, Pack, Packed, Result, Status
from stageout.overlay.wire.packs import MAX_FILE_BYTES, MAX_FILES, MAX_PACK_BYTES, MAX_PATHS_BYTES, MAX_TAKEN_BYTES
from stageout.overlay.wire.route import Route
from stageout.wire.deposits import EXPIRES_AFTER_S

#: Packs, and bytes of files in them.
_UNDER_WAY, _UNDER_WAY_BYTES = 16, 32 * 1024 * 1024
#: To connect takes so long over a way that is worth more than one connection.
_FAR_S = 0.04
#: Of a router that is not reached, on each route.
RESUMES = 3
#: A router that was there is tried for so many times the silence that is allowed.
_PATIENT_TIMEOUTS = 2
#: A router that says nothing for so long is asked.
_ASK_EVERY_S = 10.0
#: Characters that JSON takes at most for one of ASCII; twice as many for others.
_ESCAPED = 6
#: Of the data of a pack, of one more file that may turn out not to fit, and of a byte that shows that one has grown.
_ROOM_BYTES = 2 * MAX_PACK_BYTES + 1
Key = TypeVar("Key")


class SmallPut(NamedTuple):
    """A small file that is at its destination; or that a custodian has, where that was enough.

    :param origin: in custody: what the custodian knows it by, with ``seq``. "" for a file that has arrived.
    :param router: what that custodian calls itself.
    """

    size_bytes: int
    digest_name: str
    digest: str
    generation: int
    origin: str = ""
    seq: int = 0
    router: str = ""


End = Union[SmallPut, TransferFailure]


@dataclass
class _Load(Generic[Key]):
    """Files of one pack, whose data lie in ``room`` one behind the other.

    :param keys: what the caller knows them by. :param head: while it is under way.
    :param in_custody: a custodian has it. :param after: first numbers of packs with earlier versions of some of them.
    :param digest_name: the kind of ``digests``. :param said_at: when it was sent first, by the router's clock.
    :param known: by place, files that a router which has lost its records has; or why they are not to be sent there.
    """

    first: int
    room: memoryview
    keys: list[Key] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    modes: list[int] = field(default_factory=list)
    sizes_bytes: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    data_bytes: int = 0
    paths_bytes: int = 0
    head: Pack | None = None
    in_custody: bool = False
    after: set[int] = field(default_factory=set)
    digest_name: str = ""
    said_at: int = 0
    known: dict[int, SmallPut | str] = field(default_factory=dict)

    @property
    def next(self) -> int:
        """The number of a file that is added."""
        return self.first + len(self.paths)

    def has_room(self, path_bytes: int) -> bool:
        """Tell whether there is one more path in it."""
        return len(self.paths) < MAX_FILES and self.paths_bytes + path_bytes <= MAX_PATHS_BYTES

    def may_follow(self, earlier: int) -> bool:
        """Tell whether it can say that it comes after a pack. :param earlier: number of that."""
        return earlier in self.after or len(self.after) < MAX_AFTER

    def add(self, key: Key, path: str, path_bytes: int, mode: int, size_bytes: int) -> None:
        """Take a file whose data lie behind those of the others already."""
        self.keys.append(key)
        self.paths.append(path)
        self.modes.append(mode)
        self.sizes_bytes.append(size_bytes)
        self.data_bytes += size_bytes
        self.paths_bytes += path_bytes

    def close(self, like: Pack) -> None:
        """It becomes a pack, to which no file is added any more. :param like: what is the same for all of an origin."""
        self.head = replace(
            like, seq=self.first, paths=tuple(self.paths), sizes_bytes=tuple(self.sizes_bytes),
            modes=tuple(self.modes), after=tuple(sorted(self.after)),
        )  # fmt: skip

    def put(self, channel: Channel, helpers: Helpers | None = None) -> None:
        """Send it, or have it sent, once it is closed. :raises TransferFailure: the connection is lost."""
        assert self.head is not None
        if not self.digests:
            ends = list(accumulate(self.sizes_bytes, initial=0))
            self.digests = [channel.digest(self.room[start:end]) for start, end in zip(ends, ends[1:])]
            self.digest_name, self.said_at = channel.digest_name, int(time.time()) + channel.ahead_s
        data = self.room[: self.data_bytes]
        if helpers is None or not helpers.send(Parcel(self.head, self.digests, bytes(data)), channel):
            channel.send_pack(self.head, self.digests, (data,))

    def look(self, gateway: Gateway, route: Route) -> None:
        """Find out which of its files need not, or must not, be sent. :raises TransferFailure: nobody can look now."""
        assert self.head is not None
        unknown = [place for place in range(len(self.paths)) if place not in self.known]
        seen = look(gateway, Files(self.head, self.digest_name, self.digests, self.said_at), unknown, route)
        for place, generation in seen.same.items():
            self.known[place] = SmallPut(
                self.sizes_bytes[place], self.digest_name, self.digests[place].hex(), generation
            )  # fmt: skip
        self.known.update(dict.fromkeys(seen.newer, NEWER.format(gateway.server)))
        self.head = replace(self.head, cancelled=tuple(self.first + place for place in sorted(self.known)))

    def ended(self, place: int, server: str) -> End | None:
        """The outcome of a file that was not to be sent, because it was looked for; None for any other."""
        known = self.known.get(place)
        if isinstance(known, str):
            return TransferFailure(ErrorClass.CONFLICT, f"{self.paths[place]}: {known}", server)
        return known


class Packer(Generic[Key]):
    """Small files of one origin. Use from one thread.

    :param ended: called with a file's key and what became of it. :param routes: ways to the router (relays in order,
        () is the direct one): the first that works, then the next.
    :param terminal: when ``gateway`` is a custodian on the way there. :param custody: it is enough that it has them.
        It is told which of them are later versions of one name; for that each name is remembered (some 100 bytes).
    :param expires_after_s: the time after which nobody tries to deliver them any more.
    :param most_connections: over a long way; else there is one.
    :param priority: :param deadline: in a custodian, as of :func:`~stageout.overlay.client.put`.
    :param origin: 32 hexadecimal digits, for whoever says the number of each file; "" for a random one.
    :param resumes: of a router that was not reached, on each route. One that was there is tried for longer: for twice
        ``timeout_s`` at least.
    """

    def __init__(
        self,
        gateway: Gateway,
        ended: Callable[[Key, End], None],
        routes: Sequence[Route] = ((),),
        *,
        terminal: str = "",
        custody: bool = False,
        expires_after_s: float = EXPIRES_AFTER_S,
        most_connections: int = 1,
        priority: int = 0,
        deadline: int = 0,
        origin: str = "",
        resumes: int = RESUMES,
    ) -> None:
        self._resumes = resumes
        self._most_connections = min(most_connections, MOST)
        self._helpers: Helpers | None = None
        self._was_helped, self._room = False, Room()
        self.gateway, self._ended, self._routes = gateway, ended, tuple(routes) or ((),)
        self._custody, self.origin = custody, origin or secrets.token_hex(16)
        self.expires = gateway.until(expires_after_s)
        self._like = Pack(
            self.origin, 0, self.expires, (), (), (), "", terminal=terminal, priority=priority, deadline=deadline,
            release="custody" if custody else "delivered",
        )  # fmt: skip
        self._channel: Channel | None = None
        self._store = ""
        self._rooms: list[memoryview] = []
        self._load: _Load[Key] = self._new(1)
        self._waiting: deque[_Load[Key]] = deque()
        self._names: set[str] = set()
        #: First number of the last pack in custody that has a name, by the name's hash.
        self._kept: dict[int, int] = {}
        self._attempts = self._unsettled = 0
        self._patient_until_s = 0.0

    def __enter__(self) -> Packer[Key]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connection. Files without a result may or may not arrive."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._helpers is not None:
            self._helpers.close()
            self._helpers = None

    def keys(self) -> list[Key]:
        """Files that have not ended."""
        return [key for load in (*self._waiting, self._load) for key in load.keys]

    @property
    def may_arrive(self) -> bool:
        """Tell whether a custodian has files that have not ended."""
        return any(load.in_custody for load in self._waiting)

    def add(self, key: Key, local: AnyPath, path: str, seq: int = 0) -> bool:
        """Send a file; it is read now. One whose name is under way waits until that has ended.

        :param key: ``ended`` is called with it, sooner or later. :param path: below the router's root.
        :param seq: its number, 0 for the next one. A pack has numbers without a gap: behind one, another pack begins.
        :returns: False for a file that is larger than those that the router takes in packs, which is not sent. Those
            in custody go on to routers that may be older: there it is one of more than 64 KiB.
        :raises TransferFailure: the router cannot be reached; no file that has not ended will.
        """
        path_bytes = len(path) * (_ESCAPED if path.isascii() else 2 * _ESCAPED) + 3
        if path in self._names:
            self.finish()
        if seq and seq != self._load.next:
            self.cut()
            self._load.first = seq
        earlier = self._kept.get(hash(path)) if self._kept else None
        if not self._load.has_room(path_bytes):
            self._send_full()
        elif earlier is not None and not self._load.may_follow(earlier):
            self._send()
        load = self._load
        try:
            found = _read(local, self._room_for)
            if found is None:
                return False
            if len(path) > MAX_PATH_BYTES // 4 and len(path.encode(errors="surrogateescape")) > MAX_PATH_BYTES:
                raise TransferFailure(ErrorClass.BAD_URL, f"{path[:100]}...: the path is too long")
        except _Unreached as problem:
            raise problem.failure from None
        except TransferFailure as failure:
            self._ended(key, failure)
            return True
        data, mode = found
        size_bytes = len(data)
        is_alone = size_bytes > MAX_PACK_BYTES
        if load.data_bytes + size_bytes > MAX_PACK_BYTES:
            if load.paths:
                self._send_full()
                load = self._load
            if is_alone:
                self._rooms.append(load.room)
                load.room = data
            else:
                load.room[:size_bytes] = data
        load.add(key, path, path_bytes, mode, size_bytes)
        if earlier is not None:
            load.after.add(earlier)
        self._names.add(path)
        if is_alone:
            self._send_full()
        return True

    def _room_for(self, size_bytes: int) -> memoryview | None:
        """Room for a file of that size, and a byte behind it; None where it may not be in a pack.

        :raises _Unreached: that cannot be asked.
        """
        if not self._takes(size_bytes):
            return None
        if size_bytes > MAX_PACK_BYTES:
            return memoryview(bytearray(size_bytes + 1))
        return self._load.room[self._load.data_bytes : self._load.data_bytes + size_bytes + 1]

    def _takes(self, size_bytes: int) -> bool:
        if size_bytes <= MAX_FILE_BYTES:
            return True
        if size_bytes > MAX_TAKEN_BYTES or self._like.terminal:
            return False
        while self._channel is None:
            try:
                self._trying(self._reach)
            except TransferFailure as failure:
                raise _Unreached(failure) from None
        return size_bytes <= self._channel.packed_bytes

    def has(self, path: str) -> bool:
        """Tell whether a file of that name is under way."""
        return path in self._names

    def cut(self) -> None:
        """The next file begins another pack. :raises TransferFailure: as :meth:`add`."""
        if self._load.paths:
            self._send()

    def finish(self) -> None:
        """Wait until every file so far has ended. :raises TransferFailure: as :meth:`add`."""
        if self._load.paths:
            self._send()
        while self._waiting:
            self._trying(self._take)

    def _new(self, first: int) -> _Load[Key]:
        return _Load(first, self._rooms.pop() if self._rooms else memoryview(bytearray(_ROOM_BYTES)))

    def _send_full(self) -> None:
        """There are more files than one pack takes."""
        if self._most_connections > 1:
            self._helpers = Helpers(self.gateway, self._routes[0], self.origin, self._most_connections)
            self._most_connections, self._was_helped = 1, True
        self._send()

    def _send(self) -> None:
        load = self._load
        while len(self._waiting) >= _UNDER_WAY or self._is_much(load):
            self._trying(self._take)
        load.close(self._like)
        self._load = self._new(load.next)
        self._trying(lambda: self._say(load))
        while self._waiting and self._channel is not None and self._channel.has_more(0):
            self._trying(self._take)

    def _is_much(self, load: _Load[Key]) -> bool:
        """Tell whether it has to wait until memory is free."""
        under_way_bytes = sum(one.data_bytes for one in self._waiting)
        return bool(under_way_bytes) and under_way_bytes + load.data_bytes > _UNDER_WAY_BYTES

    def _trying(self, step: Callable[[], None]) -> None:
        """One step with the router; a connection that was lost is made anew by the next one."""
        try:
            step()
            self._attempts = 0
            self._patient_until_s = time.monotonic() + _PATIENT_TIMEOUTS * self.gateway.timeout_s
        except TransferFailure as failure:
            # those who helped have taken its place, perhaps, or idle connections of this process
            is_busy = failure.kind is ErrorClass.SERVER_BUSY and (self._was_helped or self._room.made(failure))
            self.close()
            self._routes = (*self._routes[1:], self._routes[0])
            is_resumable = failure.kind in outcomes.RESUMABLE or is_busy
            if not is_resumable or (self._attempts >= self._most_attempts and not self._is_patient()):
                raise
            time.sleep(growing_s(0.25, 4.0, self._attempts // len(self._routes) + 1))
            self._attempts += 1

    @property
    def _most_attempts(self) -> int:
        return self._resumes * len(self._routes)

    def _is_patient(self) -> bool:
        """A router that was there may be starting again; a custodian will say what became of what it has."""
        if self.may_arrive:
            return time.time() < self.expires
        return time.monotonic() < self._patient_until_s

    def _say(self, load: _Load[Key]) -> None:
        self._waiting.append(load)
        if self._channel is None:
            self._connected()
        else:
            load.put(self._channel, self._helpers)

    def _connected(self) -> Channel:
        """The connection; on a new one everything that has no result is said again."""
        if self._channel is None:
            started_s = time.monotonic()
            self._channel = Channel(self.gateway, self._routes[0])
            if self._helpers is not None and time.monotonic() - started_s < _FAR_S:
                self._helpers.close()
                self._helpers = None
            self._meet(self._channel)
            self._channel.send(Low(self.origin, 0))
            for load in self._waiting:
                if load.in_custody:
                    self._channel.send(self._question(load))
                else:
                    load.put(self._channel, self._helpers)
        return self._channel

    def _reach(self) -> None:
        self._connected()

    def _meet(self, channel: Channel) -> None:
        """Packs that may have been executed by a router that has lost its records since then are looked for there."""
        is_lost = channel.store and self._store not in ("", channel.store)
        if is_lost and channel.cancels and not self._like.terminal:
            for load in (load for load in self._waiting if load.digests):
                load.look(self.gateway, self._routes[0])
        self._store = channel.store or self._store

    def _question(self, load: _Load[Key]) -> Status:
        return Status(self.origin, load.first, len(load.paths))

    def _take(self) -> None:
        """Hear something of one pack: its results, most of the time."""
        channel = self._connected()
        answer = self._heard(channel)
        load = next((load for load in self._waiting if load.first == answer.seq), None)
        if load is None:
            return
        if isinstance(answer, Packed) and len(answer.generations) != len(load.paths):
            text = f"it has answered for {len(answer.generations)} of {len(load.paths)} files"
            raise channel.failure(ErrorClass.NOT_SUPPORTED, text)
        if isinstance(answer, Result):
            if answer.outcome == "unknown":  # a custodian's copy was damaged, perhaps
                load.in_custody = False
                load.put(channel)
            return
        if isinstance(answer, Custody):
            load.in_custody = True
            if not self._custody:
                return
        if isinstance(answer, Packed) and not _answers(answer, load.keys):
            raise channel.failure(ErrorClass.NOT_SUPPORTED, "PACKED is not for as many files as were sent")
        self._waiting.remove(load)
        self._names.difference_update(load.paths)
        if isinstance(answer, NoSpace):
            self._no_space(load, answer)
        elif isinstance(answer, Custody):
            self._kept.update((hash(path), load.first) for path in load.paths)
            columns = zip(load.keys, load.sizes_bytes, load.digests)
            for seq, (key, size_bytes, digest) in enumerate(columns, load.first):
                given = SmallPut(size_bytes, channel.digest_name, digest.hex(), 0, self.origin, seq, answer.router)
                self._ended(key, given)
        else:
            self._tell(channel, load, answer)
            if not self._custody:
                self._settled(channel)
        if load.data_bytes <= MAX_PACK_BYTES:
            self._rooms.append(load.room)

    def _settled(self, channel: Channel) -> None:
        """A file known here need not be kept there. It costs the router a record: said for some packs at once."""
        self._unsettled += 1
        if not self._waiting or self._unsettled >= _UNDER_WAY // 2:
            self._unsettled = 0
            channel.send(Low(self.origin, (self._waiting[0] if self._waiting else self._load).first - 1))

    def _heard(self, channel: Channel) -> Packed | NoSpace | Custody | Result:
        """The next answer; the router is asked while it is silent."""
        silence_s = self.gateway.timeout_s
        while not channel.has_more(min(_ASK_EVERY_S, silence_s / 2)):
            channel.send(self._question(self._waiting[0]))
            if not channel.has_more(silence_s):
                raise channel.failure(ErrorClass.STALLED, f"silent for {silence_s:.0f} s")
        answer: Message = channel.receive()
        if not isinstance(answer, (Packed, NoSpace, Custody, Result)):
            raise channel.failure(ErrorClass.NOT_SUPPORTED, f"{type(answer).__name__} where PACKED was due")
        return answer

    def _no_space(self, load: _Load[Key], answer: NoSpace) -> None:
        server = self.gateway.server
        text = f"{server} has no room for {load.data_bytes} bytes"
        for key in load.keys:
            self._ended(key, TransferFailure(ErrorClass.NO_SPACE_REMOTE, text, server, float(answer.retry_after_s)))

    def _tell(self, channel: Channel, load: _Load[Key], answer: Packed) -> None:
        reasons, codes = dict(zip(answer.failed, answer.reasons)), dict(zip(answer.failed, answer.codes))
        bad = dict(zip(answer.failed, answer.outcomes))
        ended, digest_name = self._ended, channel.digest_name
        columns = zip(load.keys, load.sizes_bytes, load.digests, answer.generations)
        for position, (key, size_bytes, digest, generation) in enumerate(columns):
            end: End | None = None
            if bad and position in bad:
                why, code = reasons.get(position, ""), codes.get(position, 0)
                said = Result(self.origin, load.first + position, bad[position], why, code=code)
                end = load.ended(position, self.gateway.server)
                end = end or outcomes.failure(said, load.paths[position], self.gateway.server)
            ended(key, end or SmallPut(size_bytes, digest_name, digest.hex(), generation))


class _Unreached(Exception):
    """The router cannot be reached, which is no fault of the file that is to be sent next."""

    def __init__(self, failure: TransferFailure) -> None:
        super().__init__(failure)
        self.failure = failure


def _answers(answer: Packed, keys: Sequence[object]) -> bool:
    """Tell whether there is a result for each file: none may be forgotten, or count as arrived, for want of one."""
    return len(answer.generations) == len(keys) and len(answer.failed) == len(answer.outcomes)


def _read(local: AnyPath, room_for: Callable[[int], memoryview | None]) -> tuple[memoryview, int] | None:
    """The content of a whole small file, in its room, and its permissions; None for a larger one.

    :param room_for: gives a room for so many bytes and one more, or None. :raises TransferFailure: classified.
    """
    descriptor, before = open_source(local)
    try:
        view = room_for(before.st_size)
        if view is None:
            return None
        size_bytes = os.readv(descriptor, (view,))
        if size_bytes < before.st_size:
            size_bytes = _fill(descriptor, view, size_bytes)
        after = os.fstat(descriptor)
    except OSError as problem:
        raise TransferFailure(ErrorClass.LOCAL_FILE, f"{local}: {problem.strerror}") from None
    finally:
        os.close(descriptor)
    changed = (before.st_mtime_ns, before.st_ctime_ns) != (after.st_mtime_ns, after.st_ctime_ns)
    if changed or size_bytes != before.st_size:
        raise TransferFailure(ErrorClass.SOURCE_CHANGED, f"{local} was changed while it was sent")
    return view[:size_bytes], before.st_mode & 0o777


def _fill(descriptor: int, view: memoryview, filled: int) -> int:
    """Read up to the last byte but one, or beyond; how many there were. A network's filesystem may give less at once.

    :param filled: so many are there already. :raises OSError: it cannot be read.
    """
    while filled < len(view) - 1 and (more := os.readv(descriptor, (view[filled:],))):
        filled += more
    return filled
