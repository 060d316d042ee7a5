"""A test of a transfer plugin against the rules by which HTCondor treats plugins.

``python -m stageout.testing.conformance PLUGIN`` prints a table and what to do about each finding; from a test::

    findings = check(Path("my_plugin"), endpoint)
    assert not failures(findings)

Rules of level "must" are those whose breach loses data, jobs or explanations; "should" makes life harder. The plugin
is run by the embedded starter, never by HTCondor. The rules themselves: :mod:`stageout.testing.conformance_rules`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from stageout.testing.conformance_rules import RULES, Rule
from stageout.testing.endpoints import Endpoint, HttpEndpoint
from stageout.testing.examination import Examination, NotApplicable
from stageout.testing.starter import PluginError, listed, query

__all__ = ["Finding", "check", "failures", "local_endpoint", "table"]


_ABOUT = """
Hold a plugin executable against all rules. Give a place where files can be put and got with --url-base and --folder.
Without it a plugin for http or file gets one on this machine, and of any other plugin only the rules about its answer
to -classad (query-...) count. docs/plugin/bash.md shows how to test with storage that is not mounted.
"""


class Finding(NamedTuple):
    """The result for one rule.

    :param outcome: "pass", "fail" or "n/a". :param detail: what was seen, or why the rule does not apply.
    :param advice: what to do when it failed.
    """

    rule: str
    level: str
    title: str
    outcome: str
    detail: str
    advice: str


def check(
    plugin: Path,
    endpoint: Endpoint | None = None,
    environment: Mapping[str, str] | None = None,
    only: Sequence[str] | None = None,
) -> list[Finding]:
    """Hold a plugin executable against all rules.

    :param endpoint: where files can be put and got, of a method that the plugin supports. None: a local HTTP server or
        a directory, when it supports ``http`` or ``file``; otherwise the rules about transfers do not apply.
    :param environment: of the starter; this process's own when None.
    :param only: identifiers of the rules wanted; all when None.
    :returns: a finding per rule, in the order of the rules.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="conformance-")))
        if endpoint is None:
            endpoint = local_endpoint(plugin, folder, environment)
            if endpoint is not None:
                stack.callback(endpoint.close)
        examination = Examination(plugin.absolute(), endpoint, folder, environment)
        return [_apply(rule, examination) for rule in RULES if only is None or rule.name in only]


def local_endpoint(plugin: Path, folder: Path, environment: Mapping[str, str] | None = None) -> Endpoint | None:
    """Make a destination on this machine for the plugin, None when it supports neither ``http`` nor ``file``."""
    try:
        methods = listed(query(plugin.absolute(), environment).text("SupportedMethods").lower())
    except PluginError:
        return None
    place = folder / "endpoint"
    place.mkdir()
    if "http" in methods:
        return HttpEndpoint(place)
    return Endpoint(f"file://{place}", place) if "file" in methods else None


def _apply(rule: Rule, examination: Examination) -> Finding:
    try:
        problem = rule.test(examination)
    except (NotApplicable, PluginError) as reason:
        return Finding(rule.name, rule.level, rule.title, "n/a", str(reason), rule.advice)
    return Finding(rule.name, rule.level, rule.title, "fail" if problem else "pass", problem, rule.advice)


def failures(findings: Sequence[Finding], level: str = "should") -> list[Finding]:
    """Select the failed findings; with level "must" only those that lose something."""
    return [item for item in findings if item.outcome == "fail" and level in ("should", item.level)]


def table(findings: Sequence[Finding]) -> str:
    """Write findings as text for a person."""
    lines: list[str] = []
    told: set[str] = set()
    for item in findings:
        lines.append(f"{item.outcome:<5} {item.level:<7} {item.rule:<20} {item.title}")
        if item.outcome != "pass" and item.detail and item.detail not in told:
            lines.append(f"{'':34} seen: {item.detail}")
            told.add(item.detail)
        if item.outcome == "fail":
            lines.append(f"{'':34} do:   {item.advice}")
    count = {outcome: sum(item.outcome == outcome for item in findings) for outcome in ("pass", "fail", "n/a")}
    lines.append(f"{count['pass']} passed, {count['fail']} failed, {count['n/a']} not applicable")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; exit status 1 when a rule of level "must" failed, 2 when the plugin cannot be examined."""
    parser = argparse.ArgumentParser(prog="python -m stageout.testing.conformance", description=_ABOUT)
    parser.add_argument("plugin", type=Path, help="the plugin's executable")
    parser.add_argument("--url-base", help="URL below which files can be put and got (with --folder)")
    parser.add_argument("--folder", type=Path, help="the same place as a directory of this machine")
    parser.add_argument("--only", nargs="+", metavar="RULE", help="these rules only")
    parser.add_argument("--json", action="store_true", help="findings as JSON")
    given = parser.parse_args(arguments)
    if bool(given.url_base) != bool(given.folder):
        parser.error("--url-base and --folder belong together")
    if not given.plugin.is_file():
        parser.error(f"{given.plugin} is not a file")
    endpoint = Endpoint(given.url_base, given.folder.absolute()) if given.url_base else None
    findings = check(given.plugin, endpoint, only=given.only)
    print(json.dumps([item._asdict() for item in findings], indent=1) if given.json else table(findings))
    return 1 if failures(findings, "must") else 0


if __name__ == "__main__":
    sys.exit(main())
