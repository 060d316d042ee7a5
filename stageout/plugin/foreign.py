"""The hand-off for a third-party plugin: offer all files of an upload under HTCondor's names for them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from stageout.handoff.client import offer
from stageout.plugin.abilities import Abilities
from stageout.plugin.carried import ALL, carried
from stageout.plugin.context import PluginEnvironment
from stageout.plugin.requests import Call, Item, parse_arguments, read_items
from stageout.plugin.results import AdWriter, Record
from stageout.plugin.session import Report
from stageout.plugin.text import Scrubber

#: Any method, and all of the job's credentials. Pelican's plugin reads one attribute of the job's ad.
_ABILITIES = Abilities((), "", credentials=(ALL,), job_attributes=("ProjectName",))
#: Variables of the machine, not of the job, that plugins do not read.
_HARMLESS = frozenset({"CURL_CA_BUNDLE"})


def handed_off(front_end: str, arguments: list[str]) -> bool:
    """Offer the files of this call. Return whether the node's sandbox manager has taken over all of them.

    :param front_end: path of the front end in HTCondor's configuration. :param arguments: arguments of the plugin.
    """
    call = parse_arguments(arguments)
    if call.problem or not call.upload:
        return False
    items = read_items(call, _ABILITIES, lambda url, upload: "")
    if any(item.refused for item in items) or _has_variables(front_end, items):
        return False
    with ExitStack() as stack:
        return _offered(front_end, call, items, stack)


def _has_variables(front_end: str, items: Sequence[Item]) -> bool:
    """Tell whether the job has set environment variables for the plugin, which do not outlive the job."""
    name = Path(front_end).name
    names = [name.partition("_plugin")[0] if "_plugin" in name else Path(name).stem]
    if any(item.method in ("pelican", "osdf", "stash") for item in items):
        names.append("pelican")  # HTCondor's name for all of Pelican's plugins
    variables = os.environ.keys() - _HARMLESS
    return any(variable.lower().startswith(f"{one.lower()}_") for variable in variables for one in names)


def _offered(front_end: str, call: Call, items: list[Item], stack: ExitStack) -> bool:
    """Write failure ads, offer the files, and report success. If no manager accepts, restore the output file."""
    scrubber = Scrubber()
    report = Report(call, AdWriter(True, "", scrubber), lambda text: print(text, end=""), stack)
    records = [Record(item) for item in items]
    report.promise(records)
    taken = False
    try:
        if report.incomplete:
            return False
        sizes_bytes = [Path(item.request.local_path).stat().st_size for item in items]
        requests = [(item.request.url, item.request.local_path) for item in items]  # the text that the plugin would get
        answer = offer(requests, front_end, carried(_ABILITIES, items, PluginEnvironment(scrubber)))
        if answer.accepted:
            report.taken_over(records, sizes_bytes, answer.receipt)
        taken = answer.accepted
        return taken
    finally:
        if not taken:
            report.withdraw()
