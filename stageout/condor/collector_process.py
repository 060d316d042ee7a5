"""The process that queries the collector for a daemon: a request per line on stdin, an answer per line on stdout."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from stageout.condor.ads import decoded
from stageout.condor.collector import Collector
from stageout.condor.configuration import condor_settings
from stageout.core.children import answer_lines
from stageout.core.config import Settings

_SKIPPED_MAX = 100


def main() -> int:
    """Answer until stdin ends."""
    settings = cache(condor_settings)  # read behind answer_lines' redirection: the bindings may print at their import
    local_name = sys.argv[1] if len(sys.argv) > 1 else ""
    return answer_lines(lambda question: _answer(settings(local_name), question))


def _answer(settings: Settings, question: dict[str, Any]) -> dict[str, Any]:
    hosts = [question["host"]] if question["host"] else _hosts(settings)
    if question["op"] == "query":
        return _query(hosts, question)
    _advertise(hosts, question["ad"], question["command"])
    return {}


def _query(hosts: list[str], question: dict[str, Any]) -> dict[str, Any]:
    """Return the ads of all collectors; with several, one that answers is enough.

    Attributes that cannot be decoded are left out and named.
    """
    found, problems = [], []
    skipped: list[tuple[str, str]] = []
    attributes = question["attributes"]
    for host in hosts:
        try:
            found += Collector(host).query(question["ad_type"], question["constraint"], attributes)
        except Exception as problem:
            problems.append(problem)
    if problems and len(problems) == len(hosts):
        raise problems[0]
    ads = [decoded(ad, attributes, lambda *fault: skipped.append(fault)) for ad in found]
    plain = [{name: value for name, value in ad.items() if isinstance(value, (str, int))} for ad in ads]
    return {"ads": plain, "skipped": skipped[:_SKIPPED_MAX]}


def _advertise(hosts: list[str], facts: dict[str, Any], command: str) -> None:
    """Publish in all collectors; with several, one that accepts the ad is enough."""
    problems = []
    for host in hosts:
        try:
            Collector(host).advertise([facts], command)
        except Exception as problem:
            problems.append(problem)
    if problems and len(problems) == len(hosts):
        raise problems[0]


def _hosts(settings: Settings) -> list[str]:
    return settings.condor("COLLECTOR_HOST").replace(",", " ").split()


if __name__ == "__main__":
    sys.exit(main())
