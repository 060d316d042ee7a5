"""Ads of routers and of policy services, with figures for people.

The ads lie in the table of letters (:data:`stageout.wire.custody.LETTERS`). Any daemon of the pool can write such an
ad, so it proves nothing. The figures are one string, ``StageOutPayload`` (JSON, ASCII), because readers of ads drop
lists. Writers and readers bound them (:func:`bounded`): an ad stays small, and no ad can fill a page.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from stageout import __version__
from stageout.wire.custody import (
    AD_LIFETIME_S,
    AGENT_AD,
    AgentNotice,
    BadPayload,
    json_object,
    payload_of,
    read_notice,
)
from stageout.wire.typed import MOST_NUMBER, IllTyped, WallClock, built

ROUTER_AD = "StageOutRouter"
POLICY_AD = "StageOutPolicy"
#: Condition of the ads for :class:`Letters`, and their attributes.
LETTERS_WANTED = f'MyType == "{AGENT_AD}" || MyType == "{ROUTER_AD}" || MyType == "{POLICY_AD}"'
LETTER_ATTRIBUTES = ("MyType", "Name", "StageOutSchedd", "StageOutVersion", "StageOutPayload", "LastHeardFrom")
#: Maximum numbers of routers, and of policy services, that readers accept.
SERVICES = 300
#: Bounds of a report: items of each list, and characters of each text.
ROWS = 200
TEXT_CHARS = 200
#: Longest payload that is read. The bounds keep what a daemon writes below it.
PAYLOAD_CHARS = 1 << 20
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class LinkReport:
    """The link of a router to a neighbour.

    :param is_up: 1 while the router is connected to the neighbour. :param rate_bytes_per_s: 0 before the first
        measurement. :param source: of the rate: "probe", "transfer" or "none". :param round_trip_us: 0: not known.
    """

    to: str
    is_up: int = 0
    rate_bytes_per_s: int = 0
    round_trip_us: int = 0
    source: str = ""


@dataclass(frozen=True)
class RouteReport:
    """A route that a router has in use.

    :param hops: routers after this one, the terminal last; empty while no route is known. :param reason: of the choice.
    """

    terminal: str
    hops: tuple[str, ...] = ()
    rate_bytes_per_s: int = 0
    reason: str = ""


@dataclass(frozen=True)
class DeliveryProblem:
    """A destination to which deliveries fail now."""

    to: str
    reason: str


@dataclass(frozen=True)
class CustodyReport:
    """The files that one spool of a router holds.

    :param spool: "custody", or "egress" for files that plugins deliver. :param single: files without another copy.
    :param damaged: files that wait for their data. :param oldest_s: seconds since the first was taken.
    """

    spool: str
    files: int = 0
    size_bytes: int = 0
    single: int = 0
    single_bytes: int = 0
    damaged: int = 0
    oldest_s: int = 0
    problems: tuple[DeliveryProblem, ...] = ()


@dataclass(frozen=True)
class RouterReport:
    """Figures of a router. :param incoming: connections of other routers to this one."""

    sent_at: WallClock
    links: tuple[LinkReport, ...] = ()
    routes: tuple[RouteReport, ...] = ()
    custody: tuple[CustodyReport, ...] = ()
    incoming: int = 0


@dataclass(frozen=True)
class GrantReport:
    """Streams between two sites of all clients of an owner.

    :param streams: granted, or still in use after a smaller grant. :param clients: with streams.
    :param waiting: clients without streams.
    """

    source: str
    destination: str
    owner: str
    streams: int = 0
    in_use: int = 0
    clients: int = 0
    waiting: int = 0
    rate_bytes_per_s: int = 0


@dataclass(frozen=True)
class ClientReport:
    """The lease of one client. :param streams: granted, or still in use after a smaller grant."""

    client: str
    owner: str
    source: str
    destination: str
    streams: int = 0
    in_use: int = 0
    rate_bytes_per_s: int = 0
    ends_in_s: int = 0


@dataclass(frozen=True)
class PolicyReport:
    """Figures of a policy service.

    :param max_pair: most streams between two sites. :param is_policy_ok: 0 while the greedy policy stands in for the
        configured one. :param is_reconfig_ok: 0 if the last reconfiguration was refused.
    :param streams: granted to all clients. :param leases: their number; ``clients`` has those with the most streams.
    :param owners: number of owners, counted for each pair; ``grants`` has those with the most streams.
    """

    sent_at: WallClock
    policy: str
    max_pair: int
    is_policy_ok: int = 1
    is_reconfig_ok: int = 1
    problems: tuple[str, ...] = ()
    streams: int = 0
    leases: int = 0
    owners: int = 0
    grants: tuple[GrantReport, ...] = ()
    clients: tuple[ClientReport, ...] = ()


@dataclass(frozen=True)
class Service(Generic[R]):
    """The newest ad of a router or of a policy service. :param heard_at: by the collector's clock, in seconds."""

    name: str
    version: str
    heard_at: int
    report: R


class Letters:
    """The notices of agents, and the figures of routers and policy services, out of their ads.

    :ivar agents: by schedd, the time of the agent's newest notice, by the collector's clock. :ivar notices: these.
    """

    def __init__(self) -> None:
        self.agents: dict[str, int] = {}
        self.notices: dict[str, AgentNotice] = {}
        self.routers: dict[str, Service[RouterReport]] = {}
        self.policies: dict[str, Service[PolicyReport]] = {}

    def take(self, ad: Mapping[str, Any]) -> None:
        """Add one ad of :data:`LETTERS_WANTED`. :raises BadPayload: it is invalid, and was ignored."""
        my_type, heard_at = ad.get("MyType"), heard_at_of(ad)
        if my_type == ROUTER_AD:
            _add(self.routers, RouterReport, ad)
        elif my_type == POLICY_AD:
            _add(self.policies, PolicyReport, ad)
        elif my_type == AGENT_AD:
            schedd = str(ad.get("StageOutSchedd"))
            if heard_at < self.agents.get(schedd, 0):
                return
            self.agents[schedd] = heard_at
            self.notices[schedd] = read_notice(payload_of(ad))

    def ahead_s(self, schedd: str) -> int:
        """Return how many seconds the clock of a schedd's machine is ahead of the collector's; 0 without a notice."""
        notice = self.notices.get(schedd)
        return notice.sent_at - self.agents[schedd] if notice else 0


def _add(known: dict[str, Service[T]], cls: type[T], ad: Mapping[str, Any]) -> None:
    if len(known) >= SERVICES:
        raise BadPayload(f"more than {SERVICES} of them")
    name = bounded(str(ad.get("Name")))
    known[name] = Service(name, bounded(str(ad.get("StageOutVersion", ""))), heard_at_of(ad), read_service(cls, ad))


def heard_at_of(ad: Mapping[str, Any]) -> int:
    """Return when the collector received an ad, by its clock; 0 if the ad does not contain it."""
    value = ad.get("LastHeardFrom")
    return value if isinstance(value, int) else 0


def bounded(value: Any) -> Any:
    """Return a value of a report within the bounds: short lists and plain texts, numbers that can be read."""
    if isinstance(value, str):
        plain = "".join(char if char.isprintable() else " " for char in value[: 2 * TEXT_CHARS])
        return " ".join(plain.split())[:TEXT_CHARS].rstrip()
    if isinstance(value, int):
        return min(max(0, value), MOST_NUMBER)
    if isinstance(value, tuple):
        return tuple(map(bounded, value[:ROWS]))
    return type(value)(**{name: bounded(inner) for name, inner in vars(value).items()})


def service_ad(my_type: str, name: str, report: RouterReport | PolicyReport) -> dict[str, Any]:
    """Return the ad of a daemon. :param my_type: :data:`ROUTER_AD` or :data:`POLICY_AD`."""
    return {
        "MyType": my_type, "Name": name, "StageOutVersion": __version__, "ClassAdLifetime": AD_LIFETIME_S,
        "StageOutPayload": json.dumps(dataclasses.asdict(bounded(report)), separators=(",", ":")),
    }  # fmt: skip


def read_service(cls: type[T], ad: Mapping[str, Any]) -> T:
    """Read the report in an ad, within the bounds. :raises BadPayload: there is none."""
    text = payload_of(ad)
    if len(text) > PAYLOAD_CHARS:
        raise BadPayload(f"the payload has more than {PAYLOAD_CHARS} characters")
    try:
        found: T = bounded(built(cls, json_object(text)))
    except IllTyped as problem:
        raise BadPayload(f"not a {cls.__name__}: {problem}") from None
    return found
