"""Policy: the streams that policy services grant, by pair of sites, owner and client."""

from __future__ import annotations

from collections.abc import Mapping

from stageout.wire.matters import SERVICE_SILENT_S
from stageout.wire.services import ClientReport, GrantReport, PolicyReport, Service
from stageout_web.format import count, duration, rate
from stageout_web.html import Content, Markup, join, moment, tag, with_code
from stageout_web.model import Pool, site_of
from stageout_web.state import PageState
from stageout_web.views.listing import Column, Listing
from stageout_web.views.page import PageContext

_NONE = (
    "Without one each node keeps its own limits. A service that condor_master starts appears here after a minute: copy "
    "`20-stageout-policy.conf` to its host. Services without HTCondor (`--alone`) do not appear."
)

Policy = Service[PolicyReport]
Pair = tuple[str, str]
_ROWS = 200


def policy(context: PageContext, state: PageState, query: Mapping[str, str]) -> Markup:
    """Return one section for each policy service."""
    found = sorted(state.pool.policies.values(), key=lambda one: one.name)
    if not found:
        shown = join(tag("p", "No policy service in this pool."), tag("p", with_code(_NONE), class_="action"))
    else:
        shown = join(_service(context, state, one, query, number) for number, one in enumerate(found))
    return tag("div", shown, data_live="policy", id="policy")


def _service(context: PageContext, state: PageState, service: Policy, query: Mapping[str, str], number: int) -> Markup:
    """Return the section of a service. :param number: its place, which the lists have in their parameters."""
    report = service.report
    values = (
        ("Policy", report.policy), ("Most streams of a pair", f"{report.max_pair:,}"),
        ("Streams granted", f"{report.streams:,}"), ("Clients", f"{report.leases:,}"), ("Version", service.version),
        ("Report", join(moment(service.heard_at), _silence(state.pool, service))),
    )  # fmt: skip
    facts = tag("dl", (tag("div", tag("dt", key), tag("dd", value)) for key, value in values if value))
    tables = (
        join(_pairs(context, state, service, query, f"pairs{number}-"),
             _owners(context, service, query, f"owners{number}-"),
             _clients(context, service, query, f"clients{number}-"))
        if report.grants else tag("p", "No client has streams, and none waits.")
    )  # fmt: skip
    return tag("section", tag("h2", service.name), _problems(context, report), facts, tables)


def _silence(pool: Pool, service: Policy) -> Markup | None:
    silent_s = pool.silent_s(service.heard_at)
    return tag("span", f" ({duration(silent_s)} ago)", class_="state trouble") if silent_s > SERVICE_SILENT_S else None


def _problems(context: PageContext, report: PolicyReport) -> Markup | None:
    """Return what is wrong with the service. Only readers with a token see its own words."""
    found = [
        text for is_ok, text in (
            (report.is_policy_ok, "The configured policy fails. The greedy policy decides."),
            (report.is_reconfig_ok, "The last reconfiguration was refused. The settings before it count."),
        ) if not is_ok
    ]  # fmt: skip
    if not found:
        return None
    reasons = report.problems if context.sees_names else ("The log of the service (`StageoutPolicyLog`) says why.",)
    return tag("div", (tag("p", text) for text in found), (tag("p", with_code(text)) for text in reasons),
               class_="problems")  # fmt: skip


def _pair(one: GrantReport) -> tuple[str, str]:
    return site_of(one.source), site_of(one.destination)


def _pairs(context: PageContext, state: PageState, service: Policy, query: Mapping[str, str], prefix: str) -> Markup:
    """Return the sums of each pair of sites, those with the most streams first."""
    pairs: dict[Pair, list[GrantReport]] = {}
    for grant in service.report.grants:
        pairs.setdefault(_pair(grant), []).append(grant)

    def total(pair: Pair, name: str) -> int:
        return sum(getattr(one, name) for one in pairs[pair])

    columns: list[Column[Pair]] = [
        Column("destination", "Destination", lambda pair: pair[1], lambda pair: _destination(context, state, pair[1])),
        Column("source", "Source", lambda pair: pair[0]),
        Column("streams", "Streams", lambda pair: total(pair, "streams"),
               lambda pair: f"{total(pair, 'streams'):,} of {service.report.max_pair:,}", is_number=True),
        Column("in_use", "In use", lambda pair: total(pair, "in_use"), is_number=True),
        Column("clients", "Clients", lambda pair: total(pair, "clients"), is_number=True),
        Column("waiting", "Waiting", lambda pair: total(pair, "waiting"), is_number=True),
        Column("rate", "Rate", lambda pair: total(pair, "rate_bytes_per_s"),
               lambda pair: rate(total(pair, "rate_bytes_per_s")), is_number=True),
        Column("reason", "Reason", lambda pair: _waits(total(pair, "streams"), total(pair, "waiting"), service)),
    ]  # fmt: skip
    found = Listing("policy", "pair", columns, pairs, query, lambda pair: (-total(pair, "streams"), pair),
                    prefix=prefix, about=f" of sites at {service.name}")  # fmt: skip
    return found.table(context)


def _waits(streams: int, waiting: int, service: Policy) -> str:
    """Return why clients of a pair wait, "" if none does."""
    if not waiting:
        return ""
    return "All streams of the pair are granted." if streams >= service.report.max_pair else "The policy grants none."


def _destination(context: PageContext, state: PageState, name: str) -> Content:
    return tag("a", name, href=context.link("destination", server=name)) if name in state.by_server else name


def _owners(context: PageContext, service: Policy, query: Mapping[str, str], prefix: str) -> Markup:
    report = service.report
    columns: list[Column[GrantReport]] = [
        Column("owner", "Owner", lambda one: one.owner),
        Column("destination", "Destination", lambda one: site_of(one.destination)),
        Column("source", "Source", lambda one: site_of(one.source)),
        Column("streams", "Streams", lambda one: one.streams, is_number=True),
        Column("in_use", "In use", lambda one: one.in_use, is_number=True),
        Column("clients", "Clients", lambda one: one.clients, is_number=True),
        Column("waiting", "Waiting", lambda one: one.waiting, is_number=True),
        Column("rate", "Rate", lambda one: one.rate_bytes_per_s, lambda one: rate(one.rate_bytes_per_s),
               is_number=True),
    ]  # fmt: skip
    place = {id(one): at for at, one in enumerate(report.grants)}
    found = Listing(
        view="policy",
        noun="row",
        columns=columns,
        found=report.grants,
        query=query,
        order=lambda one: place[id(one)],
        rows=_ROWS,
        prefix=prefix,
        about=f" of owners with streams at {service.name}",
    )
    return join(found.table(context), _more(report.owners - len(report.grants), "row"))


def _clients(context: PageContext, service: Policy, query: Mapping[str, str], prefix: str) -> Markup:
    report = service.report
    columns: list[Column[ClientReport]] = [
        Column("client", "Client", lambda one: one.client),
        Column("owner", "Owner", lambda one: one.owner),
        Column("destination", "Destination", lambda one: site_of(one.destination)),
        Column("streams", "Streams", lambda one: one.streams,
               lambda one: f"{one.streams:,}" if one.streams else "waits", is_number=True),
        Column("in_use", "In use", lambda one: one.in_use, is_number=True),
        Column("rate", "Rate", lambda one: one.rate_bytes_per_s, lambda one: rate(one.rate_bytes_per_s),
               is_number=True),
        Column("ends_in_s", "Lease ends", lambda one: one.ends_in_s, lambda one: f"in {duration(one.ends_in_s)}"),
    ]  # fmt: skip
    place = {id(one): at for at, one in enumerate(report.clients)}
    found = Listing(
        view="policy",
        noun="client",
        columns=columns,
        found=report.clients,
        query=query,
        order=lambda one: place[id(one)],
        rows=_ROWS,
        prefix=prefix,
        about=f" of {service.name}",
    )
    return join(found.table(context), _more(report.leases - len(report.clients), "client"))


def _more(number: int, noun: str) -> Markup | None:
    if number <= 0:
        return None
    return tag("p", f"{count(number, f'more {noun}')} with fewer streams: the service's own page has all.")
