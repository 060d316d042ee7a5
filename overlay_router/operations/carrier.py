"""A process that carries operations to the next router: orders come as lines of JSON, and so do their ends go.

Each order says where to, and names the files of the operation: the process keeps nothing. It reads the spool, compares
what it reads with the cheap digests, and passes on the owner's signatures as they came.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import ssl
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlay_router.operations.spool import UNSIGNED, Digests, read_kept
from stageout.overlay.http.operations import (
    BLOCK_BYTES,
    FIELDS_TYPE,
    SIGNED_TYPE,
    UNKNOWN,
    Status,
    blocks_of,
    digest_kinds,
    digests_text,
    place,
    ranges,
    status_of,
    to_json,
)
from stageout.overlay.rules.operations import Kind
from stageout.overlay.rules.states import State

_WAITS_S, _CONNECTS_S = 120.0, 10.0
#: Blocks in one request.
_MOST_BLOCKS = 8
#: Times that a block is sent again because the other side found it wrong.
_AGAIN = 2
_ANSWER_BYTES = 8 << 20
#: Answers that tell nothing about the operation: the same attempt may succeed later.
_LATER = frozenset({401, 408, 421, 425, 429, 500, 502, 503, 504})


@dataclass(frozen=True)
class Answer:
    """The end of an attempt. :param status: of the operation; None: nothing was learned. :param reason: why not.

    :param away: the router could not be reached. :param rotten: blocks that differ in this spool.
    """

    status: Status | None = None
    reason: str = ""
    away: bool = False
    rotten: tuple[int, ...] = ()

    def facts(self) -> dict[str, Any]:
        """Return it as JSON."""
        told = self.status.facts() if self.status else None
        return {"status": told, "reason": self.reason, "away": self.away, "rotten": list(self.rotten)}


class Later(Exception):
    """Nothing was learned."""


class AskFirst(Exception):
    """The records of the terminal are older than the operation: it may have run. :ivar epoch: of the terminal."""

    def __init__(self, epoch: int) -> None:
        super().__init__("ask-first")
        self.epoch = epoch


class Rotten(Exception):
    """Blocks of the spool have changed."""


class Carrying:
    """One attempt with one operation. :param order: as the daemon writes it."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._order = order
        self._kept, self._digests = read_kept(Path(order["operation"]))
        self._connection: http.client.HTTPConnection | None = None
        self._known_epoch = 0

    def run(self) -> Answer:
        """Carry out the order."""
        try:
            return Answer(getattr(self, f"_{self._order['what']}")())
        except Later as why:
            return Answer(None, str(why))
        except Rotten as why:
            return Answer(None, "blocks of the spool have changed", rotten=why.args[0])
        except ssl.SSLCertVerificationError as problem:
            return Answer(None, f"the certificate of the router is not trusted: {problem.verify_message}", away=True)
        except (OSError, http.client.HTTPException) as problem:
            return Answer(None, str(problem) or type(problem).__name__, away=True)
        finally:
            self._close()

    @property
    def _place(self) -> str:
        identity = self._kept.identity
        return f"{self._order['prefix']}{place(identity.origin, identity.seq)}"

    def _deliver(self) -> Status:
        kept = self._kept
        status = self._offer()
        if kept.fields.kind is not Kind.FILE or _is_over(status):
            return status
        digests = self._digests
        if digests is None:
            raise Later("the block list is missing")
        count = blocks_of(digests.size)
        have = {number for first, last in status.have for number in range(first, last + 1)}
        missing = [number for number in range(count) if number not in have]
        with open(self._order["data"], "rb", buffering=0) as data:
            for tried in range(_AGAIN + 1):
                self._send(data.fileno(), missing, digests)
                status, missing = self._finish(digests)
                if not missing or _is_over(status):
                    return status
                if tried:
                    log_line(path=kept.fields.path, blocks=len(missing))
        return Status(State.REFUSED.value, f"{len(missing)} blocks are not those of the signed list")

    def _offer(self) -> Status:
        """Bring the fields. A file that may have run is brought again: the same bytes come under its name.

        It is not if a later version of the same name was delivered: the terminal may have forgotten that one.
        """
        try:
            return self._put_fields()
        except AskFirst as why:
            if self._kept.fields.kind not in (Kind.FILE, Kind.MKDIR):
                return Status(State.REFUSED.value, str(why), epoch=why.epoch)
            if self._order.get("is_older"):
                return Status(State.SUPERSEDED.value, str(why), epoch=why.epoch)
            self._known_epoch = why.epoch
            return self._put_fields()

    def _put_fields(self) -> Status:
        kept = self._kept
        body, kind = (kept.proof.encode(), SIGNED_TYPE) if kept.proof else (to_json(kept.fields), FIELDS_TYPE)
        return self._told("PUT", self._place, body, {"Content-Type": kind, **self._hop()})

    def _hop(self) -> dict[str, str]:
        kept, order = self._kept, self._order
        hop = kept.hop
        fields = {
            "Stageout-Release": "custody" if order["prefix"] else "delivered",
            "Stageout-Custodian": f"{order['name']} {hop.epoch} {hop.order} {hop.received}",
        }
        if kept.token:
            fields["Stageout-Token"] = kept.token
        if kept.priority:
            fields["Stageout-Priority"] = str(kept.priority)
        if kept.deadline:
            fields["Stageout-Deadline"] = str(kept.deadline)
        if self._known_epoch:
            fields["Stageout-Known-Epoch"] = str(self._known_epoch)
        return fields

    def _send(self, data: int, missing: list[int], digests: Digests) -> None:
        """Send blocks. :raises Rotten: some are not what came."""
        kind = digest_kinds()[self._kept.fields.block_kind]
        step = kind.size_bytes
        for first, last in ranges(missing):
            for begin in range(first, last + 1, _MOST_BLOCKS):
                end = min(begin + _MOST_BLOCKS, last + 1)
                start, stop = begin * BLOCK_BYTES, min(end * BLOCK_BYTES, digests.size)
                body = _read(data, start, stop)
                found = [kind.of(body[at : at + BLOCK_BYTES]) for at in range(0, len(body), BLOCK_BYTES)]
                kept = [digests.blocks[number * step : (number + 1) * step] for number in range(begin, end)]
                pairs = zip(range(begin, end), kept, [*found, *[b""] * len(kept)])
                wrong = tuple(number for number, was, now in pairs if was != now)
                if wrong:
                    raise Rotten(wrong)
                size = "*" if self._kept.fields.size is None else digests.size
                fields = {
                    "Content-Range": f"bytes {start}-{stop - 1}/{size}",
                    "Content-Type": "application/octet-stream", "Stageout-Blocks": digests_text(found),
                }  # fmt: skip
                status, answer = self._asked("PUT", f"{self._place}/data", body, fields)
                if status not in (200, 204, 409, 422):  # the manifest tells more than these
                    self._judge(status, answer)

    def _finish(self, digests: Digests) -> tuple[Status, list[int]]:
        """Send the block list; the state, and blocks to send again."""
        fields = {"Stageout-Size": str(digests.size), "Content-Type": "application/octet-stream"}
        if digests.signature:
            fields["Stageout-Signature"] = digests.signature
        if self._kept.token:
            fields["Stageout-Token"] = self._kept.token
        status, answer = self._asked("PUT", f"{self._place}/manifest", digests.signed, fields)
        if status == 422:
            return Status(State.RECEIVING.value), sorted(set(map(int, json.loads(answer).get("blocks", ()))))
        found = self._judge(status, answer)
        if status == 202 and found.state == State.RECEIVING.value:
            have = {number for first, last in found.have for number in range(first, last + 1)}
            return found, [number for number in range(blocks_of(digests.size)) if number not in have]
        return found, []

    def _ask(self) -> Status:
        """Learn the state of an expired operation. One that never came is offered, and so ends there, too."""
        found = self._told("GET", self._place, b"", {})
        return self._offer() if found.state == UNKNOWN.state else found

    def _cancel(self) -> Status:
        """Ask for the end. A signed operation needs its owner's signature."""
        kept = self._kept
        is_signed = kept.cancel != UNSIGNED
        body, kind = (kept.cancel.encode(), SIGNED_TYPE) if is_signed else (to_json(kept.fields), FIELDS_TYPE)
        return self._told("DELETE", self._place, body, {"Content-Type": kind, **self._hop()})

    def _told(self, method: str, path: str, body: bytes, fields: Mapping[str, str]) -> Status:
        return self._judge(*self._asked(method, path, body, fields))

    def _judge(self, status: int, answer: bytes) -> Status:
        """Read an answer. A refusal is a state, too. :raises Later: it tells nothing."""
        facts = _facts(answer)
        if "state" in facts:
            return status_of(facts)
        reason = str(facts.get("detail") or facts.get("reason") or f"the router answers {status}")
        if status in _LATER:
            raise Later(reason)
        if status == 409 and facts.get("reason") == "ask-first":
            raise AskFirst(int(facts.get("epoch", 0)))
        if status == 410:
            is_certain = facts.get("reason") == State.EXPIRED.value
            return Status((State.EXPIRED if is_certain else State.EXPIRED_UNKNOWN).value, reason)
        if status == 404 and self._order["what"] == "ask":
            return UNKNOWN
        return Status(State.REFUSED.value, reason, epoch=int(facts.get("epoch", 0)))

    def _asked(self, method: str, path: str, body: bytes, fields: Mapping[str, str]) -> tuple[int, bytes]:
        """Ask once more on a new connection if the old one had ended."""
        is_new = self._connection is None
        try:
            return self._request(method, path, body, fields)
        except (http.client.RemoteDisconnected, ConnectionError, http.client.CannotSendRequest):
            self._close()
            if is_new:
                raise
            return self._request(method, path, body, fields)

    def _request(self, method: str, path: str, body: bytes, fields: Mapping[str, str]) -> tuple[int, bytes]:
        connection = self._connection = self._connection or self._connected()
        connection.putrequest(method, path, skip_accept_encoding=True)
        own = {"Authorization": f"Bearer {self._order['token']}"}
        if self._kept.proof:  # two owners may have used one number
            own["Stageout-Owner"] = self._kept.identity.owner
        if method != "GET":
            own["Content-Length"] = str(len(body))
        for name, value in {**fields, **own}.items():
            connection.putheader(name, value)
        connection.endheaders()
        if body:
            connection.send(body)
        answer = connection.getresponse()
        return answer.status, answer.read(_ANSWER_BYTES)

    def _connected(self) -> http.client.HTTPConnection:
        host, _, port = self._order["address"].rpartition(":")
        host = host.strip("[]")
        if self._order["plain"]:
            connection = http.client.HTTPConnection(host, int(port), timeout=_CONNECTS_S)
        else:
            context = ssl.create_default_context(cafile=self._order["ca"] or None)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            connection = http.client.HTTPSConnection(host, int(port), timeout=_CONNECTS_S, context=context)
        connection.connect()
        assert connection.sock is not None
        connection.sock.settimeout(_WAITS_S)
        return connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def _is_over(status: Status) -> bool:
    """Tell whether no bytes are wanted any more."""
    return status.state not in (State.RECEIVING.value, State.COMPLETE.value, State.HELD.value) or (
        status.state != State.RECEIVING.value and not status.have
    )


def _facts(answer: bytes) -> dict[str, Any]:
    try:
        found = json.loads(answer)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _read(data: int, start: int, stop: int) -> bytes:
    parts = []
    while start < stop and (part := os.pread(data, stop - start, start)):
        parts.append(part)
        start += len(part)
    return b"".join(parts)


_writing = threading.Lock()


def log_line(**facts: object) -> None:
    """Tell the daemon something."""
    with _writing, contextlib.suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()


def _run(order: dict[str, Any]) -> None:
    try:
        found = Carrying(order).run().facts()
    except Exception as problem:  # one operation fails, with its traceback; all others go on
        found = {**Answer(None, repr(problem)).facts(), "traceback": traceback.format_exc()}
    log_line(id=order["id"], **found)


def main() -> int:
    """Carry out orders until the daemon has ended."""
    threading.stack_size(1 << 20)
    for line in sys.stdin:
        threading.Thread(target=_run, args=(json.loads(line),), daemon=True).start()
    return 0


if __name__ == "__main__":
    sys.exit(main())
