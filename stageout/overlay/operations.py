"""Names at a router: renamed, deleted, made and looked at.

A :class:`Session` is one origin: its operations have dense numbers, leave at once, and say themselves which earlier
ones must be final before (``after``), so nothing waits a round trip and the destination's tree is the one that the
calls describe, in their order. :meth:`Session.push` waits for the results. A lost connection costs nothing: what has
no result is said again under the same numbers, and executed once. Nothing is said again to a router that has lost its
records: it would execute what it has executed already.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.pauses import growing_s
from stageout.overlay import outcomes
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.kept import Room
from stageout.overlay.wire import graph
from stageout.overlay.wire.messages import Answer, Cancel, Custody, List, Low, Operation, Result, Stat
from stageout.overlay.wire.route import Route
from stageout.wire.deposits import EXPIRES_AFTER_S

_WINDOW = 256
_RESUMES = 3
_LOST = "whether it has happened is not known, for {} has lost its records: look before you do it again"


@dataclass(frozen=True)
class Entry:
    """The kind of a name.

    :param kind: "file", "directory", "link" or "other". :param modified: Unix time in seconds.
    :param generation: how often the name was changed by the overlay; 0 in listings. :param note: how the router knows,
        where that is not from the file itself. :param manifest: SHA-256 over the digests of its blocks when it was
        published, "" where that is not known, or it was changed since; in listings, too. :param digest: their kind.
    """

    name: str
    kind: str
    size_bytes: int
    mode: int
    modified: int
    generation: int = 0
    note: str = ""
    manifest: str = ""
    digest: str = ""


class Session:
    """Operations of one origin at one router. Use from one thread.

    :param gateway: the router. :param expires_after_s: an operation that was not executed by then never is.
    :param routes: ways there (relays in order, () is the direct one): the first that works, then the next.
    :param through: a custodian that is told the operations, reached by ``routes`` then, and passes them on; what is
        looked at is always asked of the router itself.
    """

    def __init__(
        self,
        gateway: Gateway,
        expires_after_s: int = EXPIRES_AFTER_S,
        routes: Sequence[Route] = ((),),
        through: Gateway | None = None,
    ) -> None:
        self.gateway, self._through = gateway, through
        self._routes = list(routes or ((),))
        self._looking: Channel | None = None
        self.origin = secrets.token_hex(16)
        self._expires = gateway.until(expires_after_s)
        self._channel: Channel | None = None
        self._unsettled: dict[int, Operation] = {}
        self._settled: dict[int, str] = {}
        self._cancelled: set[int] = set()
        self._failures: list[TransferFailure] = []
        self._low = self._seq = 0
        self._store = ""

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connections. An operation that was not pushed may or may not happen."""
        for channel in (self._channel, self._looking):
            if channel is not None:
                channel.close()
        self._channel = self._looking = None

    def rename(self, path: str, target: str, *, parents: bool = False) -> int:
        """Give a file or directory another name; a file of that name is replaced. Returns the operation's number."""
        return self._begin("rename", path, target=target, parents=parents)

    def delete(self, path: str) -> int:
        """Remove a file, or a directory with all that is in it."""
        return self._begin("delete", path)

    def mkdir(self, path: str, *, mode: int = 0o755, parents: bool = False, may_exist: bool = False) -> int:
        """Make a directory.

        :param parents: those above it, too, where they are missing. :param may_exist: one that is there stays as it is.
        """
        return self._begin("mkdir", path, mode=mode, parents=parents, may_exist=may_exist)

    def set_mode(self, path: str, mode: int) -> int:
        """Change the permissions of a file or directory."""
        return self._begin("setattr", path, mode=mode)

    def truncate(self, path: str, size_bytes: int) -> int:
        """Cut a file to so many bytes; one that is shorter already is left as it is, and that is a failure."""
        return self._begin("setattr", path, size_bytes=size_bytes, attributes=("size",))

    def cancel(self, number: int) -> None:
        """Ask that an operation which is not final never happens. Its failure says so at :meth:`push`."""
        if number in self._unsettled:
            self._cancelled.add(number)
            with contextlib.suppress(TransferFailure):  # said again when the results are waited for
                self._connected().send(Cancel(self.origin, number))

    def push(self) -> None:
        """Wait until every operation so far has been executed at the destination, and is on its disk.

        :raises TransferFailure: of the first that failed since the last push (others had their turn nevertheless), or
            the router cannot be reached: then what happened is not known, and another push finds it out.
        """
        self._settle(0)
        self._raise_low()
        failures, self._failures = self._failures, []
        if failures:
            raise failures[0]

    def stat(self, path: str) -> Entry:
        """The kind of a name, after all operations so far. :raises TransferFailure: NOT_FOUND, or as :meth:`push`."""
        found = self.look_up(path)
        _raise_refused(found, self.gateway)
        (entry,) = entries_of(found)
        return replace(
            entry, generation=found.generation, note=found.note, manifest=found.manifest, digest=found.digest
        )

    def look_up(self, path: str) -> Answer:
        """All that the router says of a name, after all operations so far. :raises TransferFailure: as :meth:`push`."""
        self.push()
        return self._asked(Stat(path))[1]

    def entries(self, path: str) -> Iterator[Entry]:
        """The entries of a directory ("" is the root), in no order, after all operations so far; read as it is used."""
        for page in self.pages(path):
            yield from entries_of(page)

    def pages(self, path: str) -> Iterator[Answer]:
        """As :meth:`entries`, as many at once as the router says at once, by columns."""
        self.push()
        channel, found = self._asked(List(path))
        try:
            while True:
                _raise_refused(found, self.gateway)
                yield found
                if not found.more:
                    return
                found = _answered(channel)
        except BaseException:
            self.close()  # the rest of the answer would be taken for another one
            raise

    def _asked(self, ask: Stat | List) -> tuple[Channel, Answer]:
        """The first answer to a question, and the connection that others may come on."""
        room = Room()
        while True:
            try:
                channel = self._connected() if self._through is None else self._looked()
                channel.send(ask)
                return channel, _answered(channel)
            except BaseException as problem:
                self.close()
                if not isinstance(problem, TransferFailure) or not room.made(problem):
                    raise

    def _begin(self, kind: str, path: str, target: str = "", **more: object) -> int:
        if len(self._unsettled) == _WINDOW:
            self._settle(_WINDOW - 1)
        with contextlib.suppress(TransferFailure):  # what is lost with the router's records is none of its edges
            self._connected()
        if self._through is not None:
            more["terminal"] = self.gateway.server
        wanted = Operation(self.origin, self._seq + 1, kind, path, self._expires, target, **more)  # type: ignore[arg-type]
        after = graph.edges(wanted, self._unsettled)
        if graph.must_wait(after):
            self._settle(0)
            after = ()
        return self._send(replace(wanted, after=after))

    def _send(self, operation: Operation) -> int:
        self._seq = operation.seq
        with contextlib.suppress(TransferFailure):  # said again when the results are waited for
            channel = self._connected()
            after = tuple(seq for seq in operation.after if seq in self._unsettled)  # others were lost just now
            operation = self._unsettled[operation.seq] = replace(operation, after=after)
            channel.send(operation)
        self._unsettled[operation.seq] = operation
        return operation.seq

    def _settle(self, unsettled: int) -> None:
        """Wait until at most so many operations have no result."""
        attempt, room = 0, Room()
        while len(self._unsettled) > unsettled:
            try:
                self._take()
            except TransferFailure as failure:
                if room.made(failure):
                    self.close()
                    continue
                if failure.kind not in outcomes.RESUMABLE or attempt == _RESUMES * len(self._routes):
                    raise
                if attempt % len(self._routes) == len(self._routes) - 1:
                    time.sleep(growing_s(0.25, 4.0, attempt // len(self._routes) + 1))
                attempt += 1
                self.close()

    def _take(self) -> None:
        """One message from the router."""
        channel = self._connected()
        if not self._unsettled:
            return
        answer = channel.receive()
        if isinstance(answer, Custody) and self._through is not None:
            return  # it is the custodian's now; its result comes when it was executed
        if not isinstance(answer, Result):
            raise channel.failure(ErrorClass.NOT_SUPPORTED, f"{type(answer).__name__} where RESULT was due")
        operation = self._unsettled.pop(answer.seq, None) if answer.origin == self.origin else None
        if operation is not None:
            self._settled[answer.seq] = answer.outcome
            failure = outcomes.failure(answer, operation.path, self.gateway.server)
            if failure:
                self._failures.append(failure)

    def _connected(self) -> Channel:
        """The connection; on a new one everything that has no result is said again."""
        if self._channel is None:
            self._channel = self._reached(self._through or self.gateway)
            if self._through is None:
                self._check_store(self._channel.store)
            for seq, operation in self._unsettled.items():
                self._channel.send(operation)
                if seq in self._cancelled:
                    self._channel.send(Cancel(self.origin, seq))
        return self._channel

    def _check_store(self, store: str) -> None:
        """If the router has other records than before: what has no result may have happened, and fails."""
        if store and self._store not in ("", store):
            for seq, operation in self._unsettled.items():
                text = f"{operation.path}: {_LOST.format(self.gateway.server)}"
                self._failures.append(TransferFailure(ErrorClass.CONFLICT, text, self.gateway.server))
                self._settled[seq] = "lost"
            self._unsettled.clear()
        self._store = store or self._store

    def _looked(self) -> Channel:
        """The connection for questions to a router whose operations go through a custodian."""
        if self._looking is None:
            self._looking = Channel(self.gateway)
        return self._looking

    def _reached(self, first: Gateway) -> Channel:
        """A connection by the first route that works; the next call begins with that one."""
        for left in reversed(range(len(self._routes))):
            try:
                return Channel(first, self._routes[0])
            except TransferFailure:
                if not left:
                    raise
                self._routes.append(self._routes.pop(0))
        raise AssertionError("unreachable")

    def _raise_low(self) -> None:
        """The router may forget operations that are settled."""
        low = graph.low_water(self._low, self._settled, self._unsettled)
        if low > self._low:
            self._settled = {seq: outcome for seq, outcome in self._settled.items() if seq > low}
            self._low = low
            self._connected().send(Low(self.origin, low))


def _answered(channel: Channel) -> Answer:
    found = channel.receive()
    if not isinstance(found, Answer):
        raise channel.failure(ErrorClass.NOT_SUPPORTED, f"{type(found).__name__} where ANSWER was due")
    return found


def _raise_refused(found: Answer, gateway: Gateway) -> None:
    if found.code:
        raise TransferFailure(ErrorClass.from_code(found.code), found.message, gateway.server)


def entries_of(found: Answer) -> list[Entry]:
    """The content of an answer."""
    columns = (found.names, found.kinds, found.sizes_bytes, found.modes, found.modified)
    return [Entry(*values) for values in zip(*columns)]
