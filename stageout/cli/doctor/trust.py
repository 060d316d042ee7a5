"""Checks of signatures on reports, notices and orders: which keys sign them, and what was refused. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stageout.cli.condor import REPORTS
from stageout.cli.doctor.findings import Finding, Machine, Unseen, fail, ok, reports_as, unchecked, warn
from stageout.core.classads import ClassAd
from stageout.wire.custody import (
    AGENT_AD,
    MANAGER_AD,
    AgentNotice,
    BadPayload,
    Report,
    check_signature,
    payload_of,
    read_notice,
    read_report,
)

_SHOWN = 3
_SAME_VERSION = "install the same version of stageout everywhere"


@reports_as("trust")
def reports(machine: Machine) -> Iterator[Finding]:
    """Check that one key signs all reports of each manager."""
    name, ads = "trust", machine.ads(REPORTS)
    if not ads:
        yield unchecked(name, "no manager reports yet")
        return
    good: list[Report] = []
    for ad in ads:
        try:
            good.append(_checked(ad))
        except BadPayload as problem:
            yield warn(name, f"the report of {ad.text('Name')} is not believed: {problem}", _SAME_VERSION)
    unsigned = sorted({report.manager for report in good if not report.key})
    if unsigned:
        text = (
            f"{len(unsigned)} of {len(ads)} managers report unsigned, such as {unsigned[0]}: nothing vouches for them"
        )
        yield warn(name, text, f"{_SAME_VERSION}; only output that they took over themselves depends on it")
    yield from _disputed(good)
    if good and not unsigned and len(good) == len(ads):
        yield ok(name, f"{len(good)} managers report, all signed")


def _checked(ad: ClassAd) -> Report:
    report = read_report(payload_of(ad))
    if report.key or ad.text("StageOutSignature"):
        check_signature(MANAGER_AD, ad, report.key)
    return report


def _disputed(good: list[Report]) -> Iterator[Finding]:
    keys: dict[str, set[str]] = {}
    for report in good:
        keys.setdefault(report.manager, set()).add(report.key)
    for manager, found in sorted(keys.items()):
        if len(found) > 1:
            text = f"{len(found)} keys speak as {manager}: one of them is not it; its output is never taken for lost"
            yield fail("trust", text, "look who may advertise (ALLOW_DAEMON), and at ScheddAgentLog (report-refused)")


@reports_as("refused-reports")
def refused_by_agent(machine: Machine) -> Iterator[Finding]:
    """Check the reports that the agents rejected."""
    found = [(ad.text("Name"), text) for ad in machine.ads(f'MyType == "{AGENT_AD}"') for text in _refused_of(ad)]
    yield from _refusals("refused-reports", found, "ScheddAgentLog (report-refused) names all")


def agent_key(machine: Machine) -> Iterator[Finding]:
    """Check that jobs bring the key of this access point's agent to the nodes."""
    told = machine.settings.text("STAGEOUT_AGENT_KEY")
    keys = {notice.key for notice in map(_notice, machine.ads(f'MyType == "{AGENT_AD}"')) if notice}
    if not told:
        remedy = "set STAGEOUT_AGENT_KEY to what stageout-schedd-agent --key prints, and condor_reconfig"
        yield warn("agent-key", "jobs bring no key: nodes believe the first notice in this access point's name", remedy)
    elif told not in keys:
        remedy = "set it to what stageout-schedd-agent --key prints, and condor_reconfig"
        yield fail(
            "agent-key", "STAGEOUT_AGENT_KEY is no agent's key: nodes take nothing over from jobs of here", remedy
        )
    else:
        yield ok("agent-key", "jobs bring the agent's key to the nodes")


def _notice(ad: ClassAd) -> AgentNotice | None:
    try:
        return read_notice(payload_of(ad))
    except BadPayload:
        return None


def _refused_of(ad: ClassAd) -> list[str]:
    notice = _notice(ad)
    return _texts(notice, "refused") if notice else []


def _texts(notice: AgentNotice, name: str) -> list[str]:
    told = notice.extra.get(name)
    return [str(text) for text in told] if isinstance(told, list) else []


@reports_as("agent-keys", "refused-orders")
def refused_by_manager(machine: Machine) -> Iterator[Finding]:
    """Check the agents whose orders this node's manager applies, and the orders that it refused."""
    try:
        said = machine.manager_answer()
    except OSError:
        raise Unseen("no sandbox manager answers") from None
    keys = [item for item in said.get("AgentKeys") or [] if isinstance(item, Mapping)]
    first = sorted(str(item.get("Schedd")) for item in keys if item.get("Learnt") == "first")
    wrong = _listed_wrongly(machine, keys)
    if wrong:
        remedy = "set it to what stageout-schedd-agent --key prints on the access point, and condor_reconfig"
        yield fail("agent-keys", f"STAGEOUT_AGENT_KEYS has another key than the agent of {', '.join(wrong)}", remedy)
    elif first:
        text = f"the keys of {', '.join(first[:_SHOWN])} are believed because they came first"
        yield warn("agent-keys", text, "set STAGEOUT_AGENT_KEY on the access point, or STAGEOUT_AGENT_KEYS here")
    else:
        yield ok("agent-keys", f"keys of {len(keys)} access points, from their jobs or from the configuration")
    found = [(str(item.get("Ad")), str(item.get("Problem"))) for item in said.get("Refused") or []]
    yield from _refusals("refused-orders", found, "SandboxManagerLog (message-refused) names all")


def _listed_wrongly(machine: Machine, keys: list[Mapping[str, object]]) -> list[str]:
    """Find the schedds whose agents use another key than the configuration lists."""
    listed = {item.get("Schedd"): item.get("Key") for item in keys if item.get("Learnt") == "listed"}
    notices = [notice for notice in map(_notice, machine.ads(f'MyType == "{AGENT_AD}"')) if notice]
    return sorted({one.schedd for one in notices if listed.get(one.schedd, one.key) != one.key})


def _refusals(name: str, found: list[tuple[str, str]], where: str) -> Iterator[Finding]:
    for ad, problem in found[-_SHOWN:]:
        yield warn(name, f"{ad}: {problem}", f"{where}; docs/administrator/security.md says what each means")
    if not found:
        yield ok(name, "nothing was refused")


ACCESS_POINT = (agent_key, reports, refused_by_agent)
EXECUTE_POINT = (refused_by_manager,)
