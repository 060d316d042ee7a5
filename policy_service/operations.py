"""The table of the REST interface's operations: routes, what they take and what they answer."""

from __future__ import annotations

from dataclasses import dataclass

from policy_service import fields
from policy_service.fields import Field


@dataclass(frozen=True)
class Operation:
    """One route. :param name: of the method of :class:`Api` that does it. :param open_to_all: no token needed."""

    method: str
    path: str
    name: str
    summary: str
    answer: str
    body: tuple[Field, ...] = ()
    open_to_all: bool = False


OPERATIONS = (
    Operation(
        "POST", "/v1/leases", "request", "Request streams; the same client asking again gets the same lease.", "lease",
        (fields.CLIENT, fields.SOURCE, fields.DESTINATION, fields.WANTED),
    ),
    Operation("GET", "/v1/leases", "list_own", "The caller's own leases.", "leases"),
    Operation(
        "POST", "/v1/leases/{lease}/renew", "renew", "Another term, and the streams that are granted from now on.",
        "lease", (fields.WANTED, fields.IN_USE),
    ),
    Operation(
        "POST", "/v1/leases/{lease}/report", "report", "Say what is used and reached. Does not renew.", "lease",
        (fields.REPORTED_IN_USE, fields.RATE),
    ),
    Operation("DELETE", "/v1/leases/{lease}", "release", "Give the streams back.", "nothing"),
    Operation("GET", "/metrics", "metrics", "Figures for Prometheus.", "text", open_to_all=True),
    Operation("GET", "/openapi.json", "describe", "This description.", "description", open_to_all=True),
    Operation("GET", "/", "page", "Who has what, for people.", "html", open_to_all=True),
)  # fmt: skip
