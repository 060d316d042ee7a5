"""The JSON bodies of requests and answers: pydantic models that check and describe them."""

from __future__ import annotations

from typing import Annotated, TypeVar, Union

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from policy_service.model import RequestRefused

MOST_STREAMS = 100_000
_MOST_MB_S = 1e9

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@/+-]{0,254}$")]
Streams = Annotated[int, Field(ge=0, le=MOST_STREAMS)]
Rate = Annotated[float, Field(ge=0, le=_MOST_MB_S)]
_SomeStreams = Union[Streams, None]  # pydantic evaluates annotations, also in Python 3.9
_SomeRate = Union[Rate, None]
B = TypeVar("B", bound="Body")


class Body(BaseModel):
    """The body of a request. An unknown member is an error: it may be a misspelt one."""

    model_config = ConfigDict(extra="forbid", strict=True)


class LeaseRequest(Body):
    """A client's request for streams between two sites."""

    client: Name = Field(description="the client's name, unique for its owner and pair of sites")
    source: Name = Field(description="the site or host that data comes from")
    destination: Name = Field(description="the site or host that data goes to")
    wanted: Streams = Field(MOST_STREAMS, description="streams that the client can use at most")


class Renewal(Body):
    """A client's request for another term."""

    wanted: _SomeStreams = Field(None, description="streams that the client can use at most; as before by default")
    in_use: _SomeStreams = Field(None, description="streams that the client uses now; all granted by default")


class Report(Body):
    """A client's report of its use."""

    in_use: Streams = Field(description="streams that the client uses now")
    rate_mb_s: _SomeRate = Field(None, description="rate in MB/s that all its streams together reach")


class LeaseAnswer(BaseModel):
    """A lease as its client sees it."""

    lease: str = Field(description="its name in paths")
    client: str = Field(description="as requested")
    source: str = Field(description="in lower case")
    destination: str = Field(description="in lower case")
    streams: int = Field(description="streams that may be used")
    in_use: int = Field(description="streams last reported as used")
    wanted: int = Field(description="streams wanted")
    ends_in_s: float = Field(description="seconds until the lease ends")
    renew_in_s: float = Field(description="seconds after which to renew")
    reason: str = Field(description="one sentence for people")


class LeasesAnswer(BaseModel):
    """The leases of one owner."""

    leases: list[LeaseAnswer]


class Failure(BaseModel):
    """The answer to a request that was refused."""

    error: str = Field(description="one sentence that says what to do")


def read_body(data: bytes, model: type[B]) -> B:
    """Check a JSON body against its model. An empty body is an empty object.

    :raises RequestRefused: it is no JSON, or a member is missing, unknown or out of bounds.
    """
    try:
        return model.model_validate_json(data.strip() or b"{}")
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_input=False)[0]
    name = str(first["loc"][0])[:50] if first["loc"] else "body"
    field = model.model_fields.get(name)
    meaning = f" ({field.description})" if field else f" (known are {', '.join(model.model_fields)})"
    raise RequestRefused(400, f"{name}: {first['msg']}{meaning}; see /openapi.json")
