"""The plugin keeps every rule of HTCondor's that can be held against it without the public service."""

from __future__ import annotations

import subprocess
import sys

from stageout.testing.conformance import check, failures, table
from stageout.testing.conformance_rules import RULES
from stageout.testing.endpoints import Endpoint
from stageout.testing.starter import query
from tests.globus.conftest import ROOT, Bench

#: Here the plugin is given nothing but PATH, and so would ask the public service.
_ELSEWHERE = {"bare-environment", "nameless-node", "killed"}


def test_every_rule(bench: Bench) -> None:
    place = Endpoint(f"globus://{bench.archive.id}", bench.at(""))
    bench.set(LOCAL=f"{bench.node.id} /=/")
    bench.globus.change(bench.node.id, root="/")
    environment = {**bench.environment, "_CONDOR_CREDS": str(bench.creds)}
    rules = [rule.name for rule in RULES if rule.name not in _ELSEWHERE]
    findings = check(bench.plugin, place, environment, rules)
    assert failures(findings) == [], table(findings)
    assert sum(item.outcome == "pass" for item in findings) > len(rules) - 4, table(findings)


def test_the_query_loads_no_library_of_the_service(bench: Bench) -> None:
    code = f"import sys; sys.argv = ['p', '-classad']; sys.path.insert(0, {str(ROOT)!r}); import os; " \
           "os._exit = lambda status: (print(*sys.modules, file=sys.stderr), sys.exit(status)); " \
           f"exec(open({str(bench.plugin)!r}).read())"  # fmt: skip
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert "stageout.protocols.globusonline.abilities" in loaded
    assert not loaded & {"globus_sdk", "requests", "ssl", "json", "dataclasses", "typing", "subprocess", "pathlib"}
    answer = query(bench.plugin, bench.environment)
    assert answer["SupportedMethods"] == "globusonline,globus"
    assert answer["StageOutBatchFiles"] == 10000
