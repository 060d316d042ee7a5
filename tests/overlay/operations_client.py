"""A client of operations over HTTP for tests: each request by itself, with nothing clever."""

from __future__ import annotations

import http.client
import json
import secrets
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from stageout.overlay.http import operations, signing
from stageout.overlay.http.operations import BLOCK_BYTES, digest_kinds, place, to_json
from stageout.overlay.rules.operations import Fields, Kind
from tests.overlay.http_site import NAME, Site


class Answer(NamedTuple):
    """An answer. :param facts: of a JSON body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def facts(self) -> Any:
        return json.loads(self.body)

    @property
    def state(self) -> str:
        return str(self.facts["state"])


@dataclass
class Sender:
    """A user at a router. :param user: of the token. :param signs: with the user's key."""

    site: Site
    user: str = "alice"
    signs: bool = False
    origin: str = field(default_factory=lambda: secrets.token_hex(16))
    token: str = ""

    def __post_init__(self) -> None:
        self.token = self.token or self.site.token(self.user)
        self._connection: http.client.HTTPSConnection | None = None
        self._seq = 0

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        """One request on the kept connection."""
        if self._connection is None:
            context = ssl.create_default_context(cafile=str(self.site.ca))
            self._connection = http.client.HTTPSConnection(
                "localhost", self.site.router.port, timeout=60, context=context
            )
        told = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request(method, path, body, {"Authorization": f"Bearer {self.token}", **told})
        found = self._connection.getresponse()
        answer = Answer(found.status, dict(found.headers), found.read())
        if found.will_close:
            self.close()
        return answer

    def fields(self, kind: Kind, path: str, **more: Any) -> Fields:
        """The fields of the next operation."""
        self._seq += 1
        now = int(time.time())
        return Fields(self.origin, self._seq, kind, path, NAME, now, now + 3600, **more)

    def _body(self, kind: str, payload: bytes) -> tuple[bytes, dict[str, str]]:
        if self.signs:
            return self.jws(kind, payload).encode(), {"Content_Type": operations.SIGNED_TYPE}
        return payload, {"Content_Type": operations.FIELDS_TYPE}

    def jws(self, kind: str, payload: bytes) -> str:
        return signing.sign(kind, payload, self.site.keys[self.user])

    def begin(self, fields: Fields, **headers: str) -> Answer:
        body, media = self._body(signing.OPERATION, to_json(fields))
        return self.ask("PUT", place(fields.origin, fields.seq), body, **media, **headers)

    def cancel(self, fields: Fields) -> Answer:
        body, media = self._body(signing.CANCEL, to_json(fields))
        return self.ask("DELETE", place(fields.origin, fields.seq), body, **media)

    def low(self, below: int) -> Answer:
        payload = signing.low_payload(self.origin, below) if self.signs else json.dumps({"below": below}).encode()
        body, media = self._body(signing.LOW, payload)
        return self.ask("PUT", f"{place(self.origin)}/low", body, **media)

    def state(self, fields: Fields, query: str = "", **headers: str) -> Answer:
        return self.ask("GET", place(fields.origin, fields.seq) + query, **headers)

    def have(self, fields: Fields) -> set[int]:
        """Numbers of durable blocks."""
        return {at for first, last in self.state(fields).facts.get("have", []) for at in range(first, last + 1)}

    def range(self, fields: Fields, data: bytes, first: int = 0, last: int | None = None, **headers: str) -> Answer:
        """Blocks ``first`` to ``last`` of a file."""
        start = first * BLOCK_BYTES
        end = len(data) if last is None else min(len(data), (last + 1) * BLOCK_BYTES)
        kind = digest_kinds()[fields.block_kind]
        blocks = [kind.of(data[at : min(at + BLOCK_BYTES, end)]) for at in range(start, end, BLOCK_BYTES)]
        told = {
            "Content_Range": f"bytes {start}-{end - 1}/{len(data)}",
            "Stageout_Blocks": operations.digests_text(blocks), **headers,
        }  # fmt: skip
        return self.ask("PUT", f"{place(fields.origin, fields.seq)}/data", data[start:end], **told)

    def listed(self, fields: Fields, data: bytes) -> bytes:
        kind = digest_kinds()[fields.digest_kind]
        return b"".join(kind.of(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES))

    def manifest(self, fields: Fields, data: bytes, **headers: str) -> Answer:
        listed = self.listed(fields, data)
        told = {"Stageout_Size": str(len(data))}
        if self.signs:
            operation = signing.digest(self.jws(signing.OPERATION, to_json(fields)))
            payload = signing.manifest_payload(operation, len(data), operations.root(listed))
            told["Stageout_Signature"] = self.jws(signing.MANIFEST, payload)
        return self.ask("PUT", f"{place(fields.origin, fields.seq)}/manifest", listed, **{**told, **headers})

    def put(self, path: str, data: bytes, **more: Any) -> tuple[Fields, Answer]:
        """A whole file."""
        fields = self.fields(Kind.FILE, path, size=len(data), **more)
        answer = self.begin(fields)
        if answer.status == 200:  # it has its end before any byte
            return fields, answer
        assert answer.status == 201, answer
        if data:
            answer = self.range(fields, data)
            assert answer.status == 204, answer
        return fields, self.manifest(fields, data)


def other(fields: Fields, **changes: Any) -> Fields:
    """The same operation with other fields."""
    return replace(fields, **changes)
