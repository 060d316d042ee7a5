"""Policy: the streams that policy services grant, by pair of sites, owner and client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stageout.wire.matters import SERVICE_SILENT_S
from stageout.wire.services import GrantReport, PolicyReport, Service
from stageout_web.format import count, duration, rate
from stageout_web.html import Markup, join, moment, table, tag, with_code
from stageout_web.model import Pool, site_of
from stageout_web.state import PageState
from stageout_web.views.page import PageContext

_NONE = (
    "Without one each node keeps its own limits. A service that condor_master starts appears here after a minute: copy "
    "`20-stageout-policy.conf` to its host. Services without HTCondor (`--alone`) do not appear."
)

Policy = Service[PolicyReport]


def policy(context: PageContext, state: PageState) -> Markup:
    """Return one section for each policy service."""
    found = sorted(state.pool.policies.values(), key=lambda one: one.name)
    if not found:
        shown = join(tag("p", "No policy service in this pool."), tag("p", with_code(_NONE), class_="action"))
    else:
        shown = join([_service(context, state, one) for one in found])
    return tag("div", shown, data_live="policy", id="policy")


def _service(context: PageContext, state: PageState, service: Policy) -> Markup:
    report = service.report
    values = (
        ("Policy", report.policy), ("Most streams of a pair", f"{report.max_pair:,}"),
        ("Streams granted", f"{report.streams:,}"), ("Clients", f"{report.leases:,}"), ("Version", service.version),
        ("Report", join(moment(service.heard_at), _silence(state.pool, service))),
    )  # fmt: skip
    facts = tag("dl", (tag("div", tag("dt", key), tag("dd", value)) for key, value in values if value))
    tables = (
        join(_pairs(context, state, service), _owners(service), _clients(service))
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


def _pairs(context: PageContext, state: PageState, service: Policy) -> Markup:
    """Return the sums of each pair of sites, those with the most streams first."""
    pairs: dict[tuple[str, str], list[GrantReport]] = {}
    for grant in service.report.grants:
        pairs.setdefault(_pair(grant), []).append(grant)
    order = sorted(pairs.items(), key=lambda item: (-sum(one.streams for one in item[1]), item[0]))
    rows = [_pair_row(context, state, service, *pair, grants) for pair, grants in order]
    header = ("Destination", "Source", "Streams", "In use", "Clients", "Waiting", "Rate")
    return table(f"{count(len(rows), 'pair')} of sites at {service.name}", header, rows, (2, 3, 4, 5, 6))


def _pair_row(
    context: PageContext, state: PageState, service: Policy, source: str, destination: str, grants: list[GrantReport]
) -> Iterator[Any]:
    known = destination in state.by_server
    yield tag("a", destination, href=context.link("destination", server=destination)) if known else destination
    yield source
    yield f"{sum(one.streams for one in grants):,} of {service.report.max_pair:,}"
    yield f"{sum(one.in_use for one in grants):,}"
    yield f"{sum(one.clients for one in grants):,}"
    yield f"{sum(one.waiting for one in grants):,}"
    yield rate(sum(one.rate_bytes_per_s for one in grants))


def _owners(service: Policy) -> Markup:
    report = service.report
    rows = [
        (one.owner, site_of(one.destination), site_of(one.source), f"{one.streams:,}", f"{one.in_use:,}",
         f"{one.clients:,}", f"{one.waiting:,}", rate(one.rate_bytes_per_s))
        for one in report.grants
    ]  # fmt: skip
    header = ("Owner", "Destination", "Source", "Streams", "In use", "Clients", "Waiting", "Rate")
    shown = table(f"Owners of streams at {service.name}", header, rows, (3, 4, 5, 6, 7))
    return join(shown, _more(report.owners - len(rows), "row"))


def _clients(service: Policy) -> Markup:
    report = service.report
    rows = [
        (one.client, one.owner, site_of(one.destination), f"{one.streams:,}" if one.streams else "waits",
         f"{one.in_use:,}", rate(one.rate_bytes_per_s), f"in {duration(one.ends_in_s)}")
        for one in report.clients
    ]  # fmt: skip
    header = ("Client", "Owner", "Destination", "Streams", "In use", "Rate", "Lease ends")
    shown = table(f"Clients of {service.name}", header, rows, (3, 4, 5))
    return join(shown, _more(report.leases - len(rows), "client"))


def _more(number: int, noun: str) -> Markup | None:
    if number <= 0:
        return None
    return tag("p", f"{count(number, f'more {noun}')} with fewer streams: the service's own page has all.")
