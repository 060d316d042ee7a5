"""The conformance suite finds what it says it finds: a plugin with one known flaw breaks just the rules for it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stageout.testing.conformance import check, failures, main, table
from stageout.testing.conformance_rules import RULES
from stageout.testing.endpoints import Endpoint
from stageout.testing.examination import Examination
from stageout.testing.starter import installed

NAIVE = Path(__file__).with_name("naive_plugin")
FLAWS = {
    "no-methods": {"query-answers"},
    "slow-query": {"query-quick"},
    "warns": {"query-clean"},
    "dash-method": {"query-methods"},
    "odd-version": {"query-protocol"},
    "startd-ad": {"query-startd-attrs"},
    "reserved": {"query-reserved"},
    "cuts": {"download-works", "upload-works"},
    "stops": {"one-ad-per-file", "failure-goes-on", "upload-missing"},
    "float-times": {"literal-types"},
    "no-protocol": {"statistics"},
    "class": {"no-transfer-class"},
    "truncates": {"outfile-kept"},
    "replaces": {"outfile-kept"},
    "chats": {"silent"},
    "litters": {"clean-scratch"},
    "always-0": {"failure-status", "unknown-scheme", "upload-missing"},
    "no-url": {"failure-said"},
    "in-place": {"failure-no-rest"},
    "essay": {"failure-text"},
    "half-error": {"error-data"},
    "leaks": {"secrets"},
    "mute at-the-end": {"unknown-scheme"},
    "dies-on-infile": {"broken-infile"},
    "no-arguments-check": {"bad-arguments"},
    "line-by-line": {"classad-input"},
    "fixed-area": {"many-files"},
    "clobbers": {"same-name"},
    "needs-home": {"bare-environment"},
    "asks-own-name": {"nameless-node"},
    "needs-area": {"small-outfile"},
    "grows": {"full-disk"},
    "at-the-end": {"killed"},
    "no-repeat": {"upload-again"},
    "upload-no-url": {"upload-ads"},
    "raw-names": {"upload-odd-names"},
}


def naive(folder, flaw=""):
    """The plugin with this flaw, and its endpoint."""
    place = folder / "place"
    place.mkdir(exist_ok=True)
    plugin = installed(NAIVE, folder)
    plugin.write_text(plugin.read_text().replace('FLAWS = set("".split())', f"FLAWS = set({flaw!r}.split())"))
    return plugin, Endpoint(f"naive://host{place}", place)


def test_without_flaws_it_conforms(tmp_path):
    findings = check(*naive(tmp_path))
    assert failures(findings) == []
    assert {item.rule for item in findings if item.outcome == "n/a"} <= {"nameless-node"}


def test_every_rule_has_a_flaw():
    assert set().union(*FLAWS.values()) == {rule.name for rule in RULES}


@pytest.mark.parametrize("flaw", FLAWS)
def test_flaw_is_found(tmp_path, monkeypatch, flaw):
    monkeypatch.setattr(Examination, "python_start_s", 0.05)  # a busy machine starts Python slowly
    findings = check(*naive(tmp_path, flaw), only=sorted(FLAWS[flaw]))
    found = {item.rule for item in findings if item.outcome == "fail"}
    assert found == FLAWS[flaw] - {item.rule for item in findings if item.rule == "nameless-node" == item.outcome}
    assert all(item.detail and item.advice for item in findings)


def test_no_cut_off_bytecode_is_left(tmp_path):
    plugin, endpoint = naive(tmp_path)
    module = tmp_path / "large_module.py"
    module.write_text("\n".join(f"value_{number} = {number}" for number in range(2000)))
    head, _, rest = plugin.read_text().partition("FLAWS = ")
    plugin.write_text(f"{head}if '-infile' in sys.argv:\n    import large_module\nFLAWS = {rest}")
    assert failures(check(plugin, endpoint, only=["full-disk"])) == []
    code = f"import sys; sys.path[0] = {str(tmp_path)!r}; import large_module"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_plugin_without_an_endpoint_is_held_against_the_query_rules(tmp_path):
    findings = check(naive(tmp_path)[0])
    passed = {item.rule for item in findings if item.outcome == "pass"}
    of_the_query = {rule.name for rule in RULES if rule.name.startswith("query-")}
    assert passed | {"query-quick"} == of_the_query, "a busy machine may be slow"
    assert any("--url-base" in item.detail for item in findings)


def test_something_that_is_no_plugin(tmp_path):
    mute = tmp_path / "mute"
    mute.write_text("#!/bin/sh\n")
    mute.chmod(0o755)
    findings = check(mute)
    assert [item.rule for item in failures(findings, "must")] == ["query-answers"]
    assert "names no SupportedMethods" in table(findings)


@pytest.mark.parametrize(("start_s", "outcome"), [(0.05, "fail"), (0.5, "pass"), (2.0, "n/a")])
def test_limits_grow_on_a_slow_machine(tmp_path, monkeypatch, start_s, outcome):
    monkeypatch.setattr(Examination, "python_start_s", start_s)
    (finding,) = check(*naive(tmp_path, "slow-query"), only=["query-quick"])
    assert finding.outcome == outcome
    assert ("too slow to judge" in finding.detail) == (outcome == "n/a")


def test_an_interpreter_without_stageout_is_named(tmp_path):
    plugin = naive(tmp_path)[0]
    plugin.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'stageout'\"; exit 1\n")
    findings = check(plugin)
    (finding,) = [item for item in findings if item.rule == "query-answers"]
    assert "#!/bin/sh has no stageout" in finding.detail
    assert table(findings).count("names no SupportedMethods") == 1, "one reason is told once"


def test_command_line(tmp_path, capsys):
    def run(flaw, *more):
        plugin, endpoint = naive(tmp_path, flaw)
        where = ["--url-base", endpoint.url_base, "--folder", str(endpoint.folder)]
        status = main([str(plugin), *where, "--only", "one-ad-per-file", "same-name", *more])
        return status, capsys.readouterr().out

    status, told = run("")
    assert (status, "2 passed, 0 failed" in told) == (0, True)
    status, told = run("clobbers", "--json")
    assert (status, [item["outcome"] for item in json.loads(told)]) == (0, ["pass", "fail"])
    status, told = run("stops")
    assert (status, "do:   HTCondor compares nothing" in told) == (1, True)
    arguments = [sys.executable, "-m", "stageout.testing.conformance", "absent"]
    done = subprocess.run(arguments, capture_output=True, check=False)
    assert done.returncode == 2
    assert b"absent is not a file" in done.stderr
