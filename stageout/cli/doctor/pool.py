"""Checks of the collector's ads about this machine. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial

from stageout.cli.clocks import collector_ahead_s
from stageout.cli.doctor.findings import Finding, Machine, Unseen, fail, ok, reports_as, unchecked, warn, words
from stageout.core.classads import ClassAd, quote
from stageout.core.config import flocked_to
from stageout.core.history import FILE_NAME
from stageout.core.units import count
from stageout.wire.clocks import ahead_of_collector_s
from stageout.wire.custody import (
    AGENT_AD,
    MANAGER_AD,
    BadPayload,
    Report,
    check_signature,
    payload_of,
    read_notice,
    read_report,
)
from stageout.wire.matters import NodeFacts, PoolFacts, matters
from stageout.wire.services import LETTERS_WANTED, Letters, heard_at_of

_SKEW_WARN_S = 30
_SKEW_BAD_S = 120
_NODE_SKEW_S = 60
_NAMED, _MATTERS_NAMED = 5, 20
_HEARTBEAT_S = 900
_REPORTS = f'(MyType == "{MANAGER_AD}" || MyType == "Machine") && (StageOutPayload ?: "") != ""'
_CONDOR_VERSION = re.compile(r"CondorVersion: (\d+\.\d+\.\d+)")


def collector(machine: Machine) -> Iterator[Finding]:
    """Check that the collector answers."""
    try:
        found = machine.ads('MyType == "Collector"')
    except Unseen as reason:
        text, _, remedy = str(reason).partition(". ")
        yield fail("collector", text, remedy)
        return
    yield ok("collector", f"{', '.join(ad.text('Name') for ad in found) or 'it'} answers")


def clock(machine: Machine) -> Iterator[Finding]:
    """Check that this machine's clock agrees with the collector's. The collector itself compares them."""
    if not machine.ads('MyType == "Collector"'):
        raise Unseen("the collector has no ad of its own, by which its clock is asked for: try again in a minute")
    skew_s = -_collector_ahead_s(machine)
    if abs(skew_s) <= _SKEW_WARN_S:
        yield ok("clock", f"within {_SKEW_WARN_S} s of the collector's")
        return
    text = f"this clock is {abs(skew_s)} s {'ahead of' if skew_s > 0 else 'behind'} the collector's"
    remedy = "let both machines keep time by NTP: credentials, certificates and routers are judged by this clock"
    yield (fail if abs(skew_s) >= _SKEW_BAD_S else warn)("clock", text, remedy)


def _collector_ahead_s(machine: Machine) -> int:
    return collector_ahead_s(
        lambda by_s: bool(machine.ads(f'MyType == "Collector" && time() >= {int(machine.now()) + by_s}'))
    )


def node_clocks(machine: Machine) -> Iterator[Finding]:
    """Check that the clocks of reporting nodes agree with the collector's."""
    ads = machine.ads(_REPORTS)
    ahead_s = {ad.text("StageOutManager"): ahead_of_collector_s(ad) for ad in ads}
    off = [f"{name} {skew_s:+d} s" for name, skew_s in sorted(ahead_s.items()) if abs(skew_s) > _NODE_SKEW_S]
    if not off:
        yield ok("node-clocks", f"those of {len(ahead_s)} managers are within {_NODE_SKEW_S} s of the collector's")
        return
    more = f" and {len(off) - _NAMED} others" if len(off) > _NAMED else ""
    remedy = "let these nodes keep time by NTP: credentials and certificates are judged by their clocks there"
    yield warn("node-clocks", f"clocks differ from the collector's: {', '.join(off[:_NAMED])}{more}", remedy)


def agent_notice(machine: Machine) -> Iterator[Finding]:
    """Check that managers see a fresh notice of this schedd's agent."""
    schedds = _local_schedds(machine)
    if not schedds:
        remedy = "is condor_schedd running, and is COLLECTOR_HOST right?"
        yield fail("agent-notice", "the collector knows no schedd of this machine", remedy)
        return
    for name in schedds:
        yield from _notice_of(machine, name)


def _local_schedds(machine: Machine) -> list[str]:
    host = machine.settings.condor("FULL_HOSTNAME")
    ads = machine.ads(f'MyType == "Scheduler" && Machine == {quote(host)}')
    return sorted(ad.text("Name") for ad in ads)


def _notice_of(machine: Machine, schedd: str) -> Iterator[Finding]:
    fresh_s = machine.settings.count("STAGEOUT_AGENT_TIMEOUT")
    remedy = "is the agent running (condor_who -daemons)? Its log is in the LOG directory"
    ads = machine.ads(f'MyType == "{AGENT_AD}" && StageOutSchedd == {quote(schedd)}')
    if not ads:
        text = f"no agent answers for {schedd}: nothing is handed off, every transfer is synchronous"
        yield fail("agent-notice", text, remedy)
        return
    try:
        for ad in ads:
            read_notice(payload_of(ad))
    except BadPayload as problem:
        yield fail(
            "agent-notice", f"the agent's notice cannot be read: {problem}", "install the same version everywhere"
        )
        return
    age_s = int(machine.now()) + _collector_ahead_s(machine) - max(ad.integer("LastHeardFrom") for ad in ads)
    if age_s > fresh_s:
        yield fail("agent-notice", f"the agent of {schedd} was last heard of {age_s} s ago", remedy)
    else:
        yield ok("agent-notice", f"the agent of {schedd} was heard of {max(age_s, 0)} s ago")


def file_history(machine: Machine) -> Iterator[Finding]:
    """Check that condor_preen does not remove the history of files, and that this schedd's agent can append to it."""
    name, path = "file-history", f"{machine.settings.condor('SPOOL')}/{FILE_NAME}"
    patterns = words(machine.settings.condor("VALID_SPOOL_FILES"))
    names = (FILE_NAME, f"{FILE_NAME}.20260101T000000")
    if not all(any(fnmatch(one, pattern) for pattern in patterns) for one in names):
        remedy = f"add {FILE_NAME}* to VALID_SPOOL_FILES (install condor_config.d/20-stageout-ap.conf)"
        yield fail(name, f"condor_preen removes {path} or its rotated parts", remedy)
        return
    schedds = _local_schedds(machine)
    problems = dict(filter(None, map(_history_problem, machine.ads(f'MyType == "{AGENT_AD}"'))))
    mine = sorted(problems[schedd] for schedd in schedds if problems.get(schedd))
    if mine:
        remedy = "make room in SPOOL, and let the agent's user write the file; until then managers keep the records"
        yield fail(name, f"the agent cannot append to {path}: {mine[0]}", remedy)
    else:
        yield ok(name, f"records of delivered files: {path}")


def _history_problem(ad: ClassAd) -> tuple[str, str] | None:
    try:
        notice = read_notice(payload_of(ad))
    except BadPayload:
        return None
    return notice.schedd, str(notice.extra.get("history_problem", ""))


def flocking(machine: Machine) -> Iterator[Finding]:
    """Check that the collectors of the pools to which jobs flock have a notice of this schedd's agent."""
    pools = flocked_to(machine.settings)
    if not pools:
        yield ok("flocking", "FLOCK_TO names no pool")
    for pool in pools:
        for schedd in _local_schedds(machine):
            try:
                found = machine.ads(f'MyType == "{AGENT_AD}" && StageOutSchedd == {quote(schedd)}', pool)
            except Unseen as reason:
                yield warn("flocking", f"{pool}: {str(reason).partition('. ')[0]}", "is FLOCK_TO right, and is it up?")
                break
            if found:
                yield ok("flocking", f"the collector {pool} has the notice of the agent of {schedd}")
                continue
            text = f"the collector {pool} has no notice of the agent of {schedd}: jobs that flock there are synchronous"
            remedy = "see flock-notice-refused in ScheddAgentLog; its administrator must let the agent write there "
            yield warn("flocking", text, remedy + "(docs/administrator/access-point.md#flocking)")


def agents_seen(machine: Machine) -> Iterator[Finding]:
    """Check that an agent exists whose jobs this node accepts."""
    ads = machine.ads(f'MyType == "{AGENT_AD}"')
    schedds = sorted({ad.text("StageOutSchedd") for ad in ads} - {""})
    if schedds:
        yield ok("agents-seen", f"agents of {', '.join(schedds[:5])}{' and others' if len(schedds) > 5 else ''}")
    else:
        remedy = "install the agent on the access points (stageout doctor --role ap, there)"
        yield fail("agents-seen", "the collector knows no schedd agent: every transfer is synchronous", remedy)


def leave_limits(machine: Machine) -> Iterator[Finding]:
    """Check that no job leaves the queue before this node gives up its output while the agent is stopped."""
    give_up_s = machine.settings.count("STAGEOUT_DELIVERY_TIMEOUT")
    limits_s = dict(filter(None, map(_leave_limit, machine.ads(f'MyType == "{AGENT_AD}"'))))
    short = [f"{schedd} ({limit_s:.0f} s)" for schedd, limit_s in sorted(limits_s.items()) if limit_s <= give_up_s]
    if short:
        text = f"output is tried for {give_up_s} s here, but jobs leave sooner while their agent is stopped: "
        remedy = "set STAGEOUT_LEAVE_LIMIT on these access points above STAGEOUT_DELIVERY_TIMEOUT here"
        yield warn("leave-limits", text + ", ".join(short[:_NAMED]), remedy)
    else:
        yield ok("leave-limits", f"jobs of {len(limits_s)} agents wait for their output longer than this node tries")


def _leave_limit(ad: ClassAd) -> tuple[str, float] | None:
    try:
        notice = read_notice(payload_of(ad))
    except BadPayload:
        return None
    limit_s = notice.extra.get("leave_limit_s")
    return (notice.schedd, float(limit_s)) if isinstance(limit_s, (int, float)) else None


def reporting_door(machine: Machine) -> Iterator[Finding]:
    """Check that this node's reports reach the collector."""
    try:
        name = machine.manager_answer().text("Manager")
    except OSError:
        raise Unseen("no sandbox manager answers") from None
    if machine.ads(f'MyType == "{MANAGER_AD}" && StageOutManager == {quote(name)}'):
        yield ok("reporting-door", "generic: the manager's own ad is in the collector")
    elif machine.ads(f'MyType == "Machine" && StageOutManager == {quote(name)} && (StageOutPayload ?: "") != ""'):
        yield ok("reporting-door", "startd: reports travel in the slot ads (generic ads are refused from here)")
    elif machine.accepts_generic():
        remedy = (
            "it reports when it starts and on every change; SandboxManagerLog (report-route-changed) says what failed"
        )
        yield warn("reporting-door", "generic ads from here are accepted, but the manager has sent none", remedy)
    else:
        remedy = "see startd-cron; or give this node a token with DAEMON authorisation at the collector"
        yield fail("reporting-door", "generic ads are refused and no slot ad has a report: nobody hears it", remedy)


def slot_attributes(machine: Machine) -> Iterator[Finding]:
    """Check that the slots publish fresh figures of the spool."""
    name, host = "slot-attributes", quote(machine.settings.condor("FULL_HOSTNAME"))
    slots = machine.ads(f'MyType == "Machine" && Machine == {host}')
    if not slots:
        yield unchecked(name, "the collector knows no slot of this machine")
    elif not any("StageOutAccept" in ad for ad in slots):
        yield fail(name, "no slot ad has StageOutAccept: no back-pressure", "see startd-cron")
    elif machine.now() - max(ad.integer("StageOutHeartbeat") for ad in slots) > _HEARTBEAT_S:
        yield fail(name, "the manager's figures in the slot ads are old", "see manager, and startd-cron")
    else:
        refusing = sum(ad.get("StageOutAccept") is False for ad in slots)
        text = f"{refusing} slots take no new work until the spool is emptier" if refusing else "all slots take work"
        yield ok(name, text)


def versions(machine: Machine) -> Iterator[Finding]:
    """Count the nodes of the pool by version of stageout and of HTCondor. Warn about several versions of stageout."""
    ours: Counter[str] = Counter()
    for ad in machine.ads(_REPORTS):
        with suppress(BadPayload):
            ours[read_report(payload_of(ad)).version or "an earlier version"] += 1
    condor = dict[str, str]()
    for ad in machine.ads('MyType == "Machine" && DynamicSlot =!= true'):
        found = _CONDOR_VERSION.search(ad.text("CondorVersion"))
        condor[ad.text("Machine")] = found[1] if found else "an unknown version"
    both = (("stageout", ours), ("HTCondor", Counter(condor.values())))
    parts = [f"{what} {_counted(counts)}" for what, counts in both if counts]
    yield ok("versions", "; ".join(parts) or "the pool has no nodes")


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{version} on {count(number, 'node')}" for version, number in counts.most_common(_NAMED))


@reports_as("matters")
def matters_of_pool(machine: Machine) -> Iterator[Finding]:
    """Check that nothing in the pool needs an administrator, by the list that the web page, metrics and alerts
    share.
    """
    name, letters, nodes = "matters", Letters(), list[NodeFacts]()
    for ad in machine.ads(LETTERS_WANTED):
        with suppress(BadPayload):
            letters.take(ad)
    for ad in machine.ads(_REPORTS):
        with suppress(BadPayload):  # see trust
            report = read_report(payload_of(ad))
            check_signature(MANAGER_AD, ad, report.key)
            nodes.append(NodeFacts(report, heard_at_of(ad), report.sandboxes, partial(_itself, report)))
    knows_clock = bool(machine.ads('MyType == "Collector"'))
    now_at = int(machine.now()) + (_collector_ahead_s(machine) if knows_clock else 0)
    found = matters(PoolFacts(now_at, nodes, letters))
    for one in found[:_MATTERS_NAMED]:
        yield warn(name, f"{one.kind}: {one.title} {one.whose(now_at)}", one.action)
    if len(found) > _MATTERS_NAMED:
        more = len(found) - _MATTERS_NAMED
        yield warn(name, f"{more} more", "the web page has all of them (matters.json)")
    if not found:
        yield ok(name, f"nothing in the pool of {count(len(nodes), 'node')} needs a person")


def _itself(report: Report) -> Report:
    return report


COMMON = (collector, clock, versions, matters_of_pool)
ACCESS_POINT = (agent_notice, file_history, flocking, node_clocks)
EXECUTE_POINT = (agents_seen, leave_limits, reporting_door, slot_attributes)
