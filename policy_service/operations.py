"""The table of the REST interface's operations: routes, their bodies and their answers."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel

from policy_service.bodies import Body, LeaseAnswer, LeaseRequest, LeasesAnswer, Renewal, Report


@dataclass(frozen=True)
class Operation:
    """One route.

    :param name: method of :class:`policy_service.api.Api`, without its underscore. :param status: HTTP, on success.
    :param answer: model, or media type of another answer; "" for none. :param open_to_all: needs no token.
    """

    method: str
    path: str
    name: str
    summary: str
    answer: type[BaseModel] | str
    body: type[Body] = Body
    status: int = 200
    open_to_all: bool = False


OPERATIONS = (
    Operation(
        "POST", "/v1/leases", "request", "Request streams. The same client gets the same lease again.",
        LeaseAnswer, LeaseRequest, 201,
    ),
    Operation("GET", "/v1/leases", "list_own", "List the caller's own leases.", LeasesAnswer),
    Operation(
        "POST", "/v1/leases/{lease}/renew", "renew", "Get another term, and the streams granted from now on.",
        LeaseAnswer, Renewal,
    ),
    Operation(
        "POST", "/v1/leases/{lease}/report", "report", "Report use and rate without a renewal.", LeaseAnswer, Report
    ),
    Operation("DELETE", "/v1/leases/{lease}", "release", "Give the streams back.", "", status=204),
    Operation("GET", "/metrics", "metrics", "Get the metrics for Prometheus.", "text/plain", open_to_all=True),
    Operation("GET", "/openapi.json", "describe", "Get this description.", "application/json", open_to_all=True),
    Operation("GET", "/", "page", "Show all leases to people.", "text/html", open_to_all=True),
)  # fmt: skip
