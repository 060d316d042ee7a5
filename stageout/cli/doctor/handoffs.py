"""Checks of hand-offs at an execute point: a trial hand-off, and the refusals of the last hour. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stageout.cli.doctor.config import is_ours
from stageout.cli.doctor.findings import Finding, Machine, Unseen, fail, ok, unchecked, warn, words
from stageout.wire.custody import AGENT_AD
from stageout.wire.matters import USUAL_SHARE

_SCHEDDS_TRIED = 10
_REASONS_SHOWN = 3


def handoff(machine: Machine) -> Iterator[Finding]:
    """Check that the manager would take over output of a job now. A probe file tests it, and is removed again."""
    plugins = [path for path in words(machine.settings.condor("FILETRANSFER_PLUGINS")) if is_ours(machine, path)]
    schedds = sorted({ad.text("StageOutSchedd") for ad in machine.ads(f'MyType == "{AGENT_AD}"')} - {""})
    if not plugins or not schedds:
        yield unchecked("handoff", "there is no plugin of ours, or no agent: see plugins and agents-seen")
        return
    tried = {schedd: machine.try_handoff(schedd, plugins[-1]) for schedd in schedds[:_SCHEDDS_TRIED]}
    refused = {schedd: reason for schedd, reason in tried.items() if reason}
    remedy = "every upload holds its slot until it is done; mend what the reason names, then run the doctor again"
    for schedd, reason in refused.items():
        say = fail if len(refused) == len(tried) else warn
        yield say("handoff", f"output of jobs of {schedd} is not taken over: {reason}", remedy)
    if not refused:
        yield ok("handoff", f"a probe for {', '.join(tried)} went through socket, admission and spool; nothing is left")


def handoffs_lately(machine: Machine) -> Iterator[Finding]:
    """Check the rate of hand-offs refused within the last hour, by reason."""
    try:
        said = machine.manager_answer()
    except (FileNotFoundError, ConnectionRefusedError):
        raise Unseen("no sandbox manager answers") from None
    tried, refused = said.integer("HandoffsTried"), said.integer("HandoffsRefused")
    if refused <= USUAL_SHARE * tried:
        yield ok("handoffs-lately", f"{refused} of {tried} hand-offs of the last hour refused")
        return
    reasons = [item for item in said.get("HandoffRefusals") or [] if isinstance(item, Mapping)]
    named = "; ".join(f"{item.get('Count')} times: {item.get('Reason')}" for item in reasons[:_REASONS_SHOWN])
    remedy = "see handoff for whether it is so now; SandboxManagerLog (handoff-refused) names the jobs"
    yield warn("handoffs-lately", f"{refused} of {tried} hand-offs of the last hour refused. {named}", remedy)


EXECUTE_POINT = (handoff, handoffs_lately)
