"""Checks of renewed credentials: the access point must offer them, and this node must fetch them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from stageout.cli.doctor.findings import Finding, Machine, Unseen, ok, reports_as, unchecked, warn
from stageout.wire.custody import AGENT_AD, BadPayload, payload_of, read_notice

_NAME = "credentials"
_MORE = "docs/user/credentials.md"


@reports_as(_NAME)
def port(machine: Machine) -> Iterator[Finding]:
    """Check that managers can fetch fresh credentials for this access point's jobs."""
    settings = machine.settings
    tokens, number = settings.condor("SEC_CREDENTIAL_DIRECTORY_OAUTH"), settings.count("STAGEOUT_CREDENTIAL_PORT")
    if not number:
        if tokens:
            text = "jobs have tokens here, and none is renewed after the job's end: STAGEOUT_CREDENTIAL_PORT is 0"
            yield warn(
                _NAME, text, f"set it to a port that nodes can reach, if tokens end before deliveries do; {_MORE}"
            )
        else:
            yield ok(_NAME, "no SEC_CREDENTIAL_DIRECTORY_OAUTH and no port: nothing is renewed after a job's end")
        return
    user = settings.condor("SCHEDD_AGENT_USERID")
    if user:
        text = f"the agent runs as {user} and cannot read what a credmon writes for root"
        yield warn(_NAME, text, "set SCHEDD_AGENT_USERID to nothing: the agent then becomes condor by itself")
    offered = [url for url in map(_offered, _notices(machine)) if url]
    if offered:
        yield ok(_NAME, f"renewed at {', '.join(sorted(offered))}; nodes must be able to reach it")
    else:
        text = f"STAGEOUT_CREDENTIAL_PORT = {number}, but no agent offers it"
        yield warn(_NAME, text, "look for credential-port-failed in ScheddAgentLog; restart the agent after a change")


def _notices(machine: Machine) -> list[str]:
    found = []
    for ad in machine.ads(f'MyType == "{AGENT_AD}"'):
        try:
            found.append(payload_of(ad))
        except BadPayload:
            continue
    return found


def _offered(payload: str) -> str:
    try:
        return read_notice(payload).renewal_url
    except BadPayload:
        return ""


@reports_as(_NAME)
def sources(machine: Machine) -> Iterator[Finding]:
    """Check that this node has the renewed credentials that it requested."""
    try:
        told = machine.manager_answer().get("CredentialSources") or []
    except OSError:
        raise Unseen("no sandbox manager answers") from None
    for item in told:
        if item.get("Problem"):
            yield warn(_NAME, f"{item.get('Schedd')}: {item.get('Problem')}", f"open the way, or see {_MORE}")
        else:
            yield ok(_NAME, f"{item.get('Schedd')} renews them")
    if not told:
        yield unchecked(_NAME, "no credential had to be renewed since the manager started")


ACCESS_POINT = (port,)
EXECUTE_POINT = (sources,)
