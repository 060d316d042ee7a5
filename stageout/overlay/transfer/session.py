"""Operations of one origin at a router: numbers, states and cancel."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.http import operations, signing
from stageout.overlay.http.operations import Status, status_of
from stageout.overlay.rules.operations import LONGEST_S, Fields, Kind
from stageout.overlay.transfer.connection import Answer, Connection, Place, Route
from stageout.overlay.transfer.identity import Identity

if TYPE_CHECKING:
    from collections.abc import Mapping

_WAIT_S, _GIVES_UP_S = 30, 5.0
#: An operation is made so long (seconds) before the time of the router, whose clock is known to seconds.
_MARGIN_S = 1


def new_origin() -> str:
    """Return a random origin."""
    return secrets.token_hex(16)


def state_of(connection: Connection, answer: Answer, body: bytes, what: str) -> Status:
    """Read the state in an answer. :raises Refusal: it is a refusal. :raises TransferFailure: it is no state."""
    if answer.status >= 300:
        raise connection.refused(answer, body, what)
    try:
        return status_of(json.loads(body))
    except ValueError:
        words = f"{what}: the answer of {connection.place.url} is no state of an operation"
        raise TransferFailure(ErrorClass.SERVER_ERROR, words, connection.place.url) from None


class Session:
    """Operations of one origin. Not for several threads at once.

    :param place: router that the operations are for, or that takes them into custody. :param routes: to it: the first
        one that works is used.
    """

    def __init__(self, place: Place, identity: Identity, routes: Sequence[Route] = ((),)) -> None:
        self.place, self.identity, self._routes = place, identity, tuple(routes) or ((),)
        self.origin, self._seq = new_origin(), 0
        self._connection: Connection | None = None

    def fields(self, kind: Kind, path: str, lasts_s: int = LONGEST_S, **more: object) -> Fields:
        """Return a new operation with the next number."""
        self._seq += 1
        made = int(self.identity.now) - _MARGIN_S
        terminal = self.place.via[-1] if self.place.via else self.identity.router
        return Fields(
            self.origin, self._seq, kind, path, terminal, made, made + min(lasts_s, LONGEST_S), **more  # type: ignore[arg-type]
        )  # fmt: skip

    def connection(self) -> Connection:
        """Return a connection that can be used. :raises TransferFailure: no route works."""
        if self._connection is not None and not self._connection.is_ended:
            return self._connection
        self._connection = connected(self.place, self._routes)
        return self._connection

    def keep(self, connection: Connection | None) -> None:
        """Use another connection from now on."""
        if self._connection is not None and self._connection is not connection:
            self._connection.close()
        self._connection = connection

    def give(self) -> Connection | None:
        """Hand the connection over; None without one."""
        found, self._connection = self._connection, None
        return found

    def ask(self, method: str, target: str, fields: Mapping[str, str], body: bytes, what: str) -> Status:
        """Send a request about an operation. :raises TransferFailure: it is refused, or the connection is lost."""
        for _ in range(2):
            connection = self.connection()
            answer, data = connection.ask(method, target, fields, body)
            if answer.status != 401 or not self.identity.refused():
                break
        return state_of(connection, answer, data, what)

    def begin(self, fields: Fields, signed: str, hop: Mapping[str, str]) -> Status:
        """Bring an operation. :param signed: its signature; "" for none."""
        body = signed.encode() if signed else operations.to_json(fields)
        kind = operations.SIGNED_TYPE if signed else operations.FIELDS_TYPE
        place = operations.place(fields.origin, fields.seq)
        return self.ask("PUT", place, {"Content-Type": kind, **hop}, body, f"/{fields.path}")

    def state(self, fields: Fields, until: str = "done") -> Status:
        """Wait for an operation, at most half a minute."""
        place = operations.place(fields.origin, fields.seq)
        wait = {"Prefer": f"wait={_WAIT_S}"}
        return self.ask("GET", f"{place}?until={until}", wait, b"", f"/{fields.path}")

    def cancel(self, fields: Fields) -> Status | None:
        """Give an operation up; its state, None if no answer came in time."""
        said = operations.to_json(fields)
        signed = self.identity.sign(signing.CANCEL, said)
        kind = operations.SIGNED_TYPE if signed else operations.FIELDS_TYPE
        place, until = operations.place(fields.origin, fields.seq), time.monotonic() + _GIVES_UP_S
        while time.monotonic() < until:
            try:
                connection = connected(self.place, self._routes, _GIVES_UP_S)
            except TransferFailure:
                return None
            try:
                body = signed.encode() or said
                answer, data = connection.ask("DELETE", place, {"Content-Type": kind}, body, _GIVES_UP_S)
                facts = json.loads(data)
                if answer.status in (200, 409) and "state" in facts:
                    return status_of(facts)
                if answer.status != 202:
                    return None
                time.sleep(0.2)
            except (TransferFailure, ValueError, TypeError):
                return None
            finally:
                connection.close()
        return None

    def close(self) -> None:
        """Close its connection."""
        self.keep(None)


def connected(place: Place, routes: Sequence[Route], timeout_s: float = 10.0) -> Connection:
    """Connect by the first route that works. :raises TransferFailure: none does; that of the first one."""
    first: TransferFailure | None = None
    for route in routes:
        try:
            return Connection(place, route, timeout_s)
        except TransferFailure as failure:
            first = first or failure
    assert first is not None
    raise first
