"""The fields of request bodies: one table that both checks them and describes them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policy_service.model import Refused

MOST_STREAMS = 100_000
_NAME = r"[A-Za-z0-9][A-Za-z0-9._:@/+-]{0,254}"


@dataclass(frozen=True)
class Field:
    """One member of a JSON body. :param kind: "string", "integer" or "number". :param most: largest number."""

    name: str
    kind: str
    doc: str
    required: bool = False
    most: float = MOST_STREAMS

    def schema(self) -> dict[str, Any]:
        """As OpenAPI describes it."""
        bounds = {"pattern": f"^{_NAME}$"} if self.kind == "string" else {"minimum": 0, "maximum": self.most}
        return {"type": self.kind, "description": self.doc, **bounds}

    def check(self, value: object) -> object:
        """The value. :raises Refused: it is not of this kind, or out of bounds."""
        if self.kind == "string":
            if isinstance(value, str) and re.fullmatch(_NAME, value):
                return value
            raise Refused(400, f"{self.name}: write a name of letters, digits and ._:@/+- ({self.doc})")
        good = isinstance(value, int) or (self.kind == "number" and isinstance(value, float) and math.isfinite(value))
        if isinstance(value, bool) or not good or not 0 <= value <= self.most:  # type: ignore[operator]
            whole = "a whole number" if self.kind == "integer" else "a number"
            raise Refused(400, f"{self.name}: write {whole} from 0 to {self.most:g} ({self.doc})")
        return value


CLIENT = Field("client", "string", "the client's name, unique for its owner and pair of sites", True)
SOURCE = Field("source", "string", "the site or host that data comes from", True)
DESTINATION = Field("destination", "string", "the site or host that data goes to", True)
WANTED = Field("wanted", "integer", "streams that the client can use at most; as many as allowed when left out")
IN_USE = Field("in_use", "integer", "streams that the client uses now; as many as granted when left out")
REPORTED_IN_USE = Field("in_use", "integer", "streams that the client uses now", True)
RATE = Field("rate_mb_s", "number", "rate in MB/s that all its streams together reach", most=1e9)


def read_body(data: bytes, fields: Sequence[Field]) -> dict[str, Any]:
    """The members of a JSON object, checked. An empty body is an empty object.

    :raises Refused: it is none, lacks a member, has an unknown one, or one that is out of bounds.
    """
    try:
        body = json.loads(data) if data.strip() else {}
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not JSON: send an object, see /openapi.json") from None
    if not isinstance(body, Mapping):
        raise Refused(400, "the body is not a JSON object: see /openapi.json")
    known = {field.name: field for field in fields}
    unknown = sorted(set(body) - set(known))
    if unknown:
        raise Refused(400, f"unknown member {unknown[0][:50]!r}: known are {', '.join(known) or 'none'}")
    missing = [field.name for field in fields if field.required and field.name not in body]
    if missing:
        raise Refused(400, f"{missing[0]} is missing ({known[missing[0]].doc})")
    return {name: known[name].check(value) for name, value in body.items()}
