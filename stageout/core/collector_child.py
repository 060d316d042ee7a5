"""Talks to the collector for a daemon: a question per line on stdin, an answer per line on stdout."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from stageout.core.config import Settings, condor_settings


def main() -> int:
    """Answer until stdin ends."""
    # The bindings may print; what they print must not look like an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = condor_settings(sys.argv[1] if len(sys.argv) > 1 else "")
    for line in sys.stdin:
        print(json.dumps(_answer(settings, json.loads(line))), file=answers, flush=True)
    return 0


def _answer(settings: Settings, question: dict[str, Any]) -> dict[str, Any]:
    try:
        hosts = [question["host"]] if question["host"] else _hosts(settings)
        if question["op"] == "query":
            return {"ads": _query(hosts, question)}
        _advertise(hosts, question["ad"], question["command"])
        return {}
    except Exception as problem:
        return {"error": str(problem) or type(problem).__name__}


def _query(hosts: list[str], question: dict[str, Any]) -> list[dict[str, Any]]:
    """Ads of all collectors; with several, one that answers is enough."""
    import htcondor2

    found, problems = [], []
    ad_type, attributes = getattr(htcondor2.AdType, question["ad_type"]), question["attributes"]
    for host in hosts:
        try:
            found += htcondor2.Collector(host).query(ad_type, question["constraint"], attributes)
        except Exception as problem:
            problems.append(problem)
    if problems and len(problems) == len(hosts):
        raise problems[0]
    return [{name: ad[name] for name in attributes if isinstance(ad.get(name), (str, int))} for ad in found]


def _advertise(hosts: list[str], facts: dict[str, Any], command: str) -> None:
    """Publish in all collectors; with several, one that takes it is enough."""
    import classad2
    import htcondor2

    ad = classad2.ClassAd(facts)
    problems = []
    for host in hosts:
        try:
            htcondor2.Collector(host).advertise([ad], command)
        except Exception as problem:
            problems.append(problem)
    if problems and len(problems) == len(hosts):
        raise problems[0]


def _hosts(settings: Settings) -> list[str]:
    return settings.condor("COLLECTOR_HOST").replace(",", " ").split()


if __name__ == "__main__":
    sys.exit(main())
