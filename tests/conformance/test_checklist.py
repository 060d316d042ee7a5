"""Mistakes of plugin authors with HTCondor, point by point, and the guards against them here.

A guard is a rule of the conformance suite or a test (``file::name``); the points that no plugin can meet by itself name
who does. The numbers are those of the reference on HTCondor's file transfer.
"""

import ast
from pathlib import Path

import pytest

from stageout.plugin.context import PluginEnvironment
from stageout.plugin.text import Scrubber
from stageout.testing.conformance_rules import RULES

TESTS = Path(__file__).resolve().parents[1]
SESSION = "unit/test_plugin_session.py"
OUTFILE = "unit/test_plugin_outfile.py"
QUERY = "unit/test_plugin_query.py"
TEXTS = "unit/test_plugin_texts.py"
HERE = "conformance/test_checklist.py"

POINTS: dict[int, tuple[str, list[str]]] = {
    1: ("exit 0 although a file failed", ["failure-status", f"{SESSION}::test_exit_status"]),
    2: ("fewer ads than requests", ["one-ad-per-file", "many-files", f"{OUTFILE}::test_a_thousand_files"]),
    3: ("failure without TransferUrl or TransferFileName", ["failure-said", "upload-ads"]),
    4: ("no TransferProtocol, no TransferTotalBytes", ["statistics", f"{SESSION}::test_success_ad"]),
    5: (
        "output file truncated, or written at the end only",
        ["outfile-kept", "killed", "full-disk", f"{OUTFILE}::test_sigkill_at_any_moment_leaves_whole_ads"],
    ),
    6: ("a partial or empty ad", ["killed", f"{OUTFILE}::test_any_result_fits_a_slot_made_for_its_promise"]),
    7: ("wrong literal types", ["literal-types", f"{SESSION}::test_every_error_class_becomes_a_complete_ad"]),
    8: (
        "input not read as ClassAds",
        ["classad-input", f"{SESSION}::test_plugin_data_applies_to_later_files_only", "broken-infile"],
    ),
    9: ("newlines, separators, essays in TransferError", ["failure-text", f"{SESSION}::test_messages_are_clean"]),
    10: ("secrets in results", ["secrets", f"{SESSION}::test_no_secrets_anywhere", f"{SESSION}::test_credentials"]),
    11: ("progress on stdout", ["silent", f"{SESSION}::test_noise_never_reaches_stdout"]),
    12: ("a child that holds the pipe", [f"{SESSION}::test_a_child_does_not_hold_the_transfer"]),
    13: ("goes on when the starter is gone", [f"{SESSION}::test_ends_when_its_parent_is_gone"]),
    14: ("no deadline of its own", [f"{SESSION}::test_own_deadline", f"{SESSION}::test_sigterm"]),
    15: ("counts on the job's environment", ["bare-environment", f"{SESSION}::test_surroundings_reach_the_protocol"]),
    16: ("writes state into the sandbox", ["clean-scratch"]),
    17: ("slow or noisy -classad", ["query-quick", "query-clean", f"{QUERY}::test_what_the_query_loads"]),
    18: ("methods that HTCondor cuts", ["query-methods", f"{QUERY}::test_methods_that_condor_cannot_find_are_refused"]),
    19: ("reads the token once", [f"{HERE}::test_tokens_are_read_anew"]),
    20: ("uploads that cannot be repeated", ["upload-again"]),
    21: ("half files under the final name", ["failure-no-rest"]),
    22: ("nothing verified", [f"{SESSION}::test_success_ad"]),
    23: ("believes that Retryable retries", [f"{SESSION}::test_exit_status"]),
    24: ("retries without end", [f"{SESSION}::test_own_deadline"]),
    25: ("exit codes like a shell's", ["failure-status", "bad-arguments", f"{SESSION}::test_exit_status"]),
    26: ("names not encoded in upload URLs", ["upload-odd-names", f"{TEXTS}::test_encoding_of_upload_urls"]),
    27: ("several schemes in one call", [f"{SESSION}::test_methods_ignore_case_and_prefixes"]),
    28: ("two URLs with one name", ["same-name", f"{SESSION}::test_two_files_of_one_name"]),
    29: ("job-supplied plugin by absolute path", []),
    30: ("takes output slots of the access point for free", []),
    31: ("relies on automatic requirements", []),
    32: ("resume keyed on the sandbox's path", []),
    33: ("failures told by text only", ["error-data", f"{SESSION}::test_every_error_class_becomes_a_complete_ad"]),
    34: ("deletes or renames the files of the call", ["outfile-kept"]),
    35: ("uses TransferClass", ["no-transfer-class"]),
}
ELSEWHERE = {
    29: "the job's owner: docs/plugin/write.md",
    30: "the administrator",
    31: "the administrator",
    32: "each protocol: resume belongs to a source, never to a path",
}


def test_the_list_is_whole():
    assert list(POINTS) == list(range(1, 36))
    assert {number for number, (_, guards) in POINTS.items() if not guards} == set(ELSEWHERE)


@pytest.mark.parametrize("number", [number for number in POINTS if number not in ELSEWHERE])
def test_guards_exist(number):
    rules = {rule.name for rule in RULES}
    for guard in POINTS[number][1]:
        file, found, name = guard.partition("::")
        if not found:
            assert guard in rules
            continue
        functions = [node for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)]
        assert name in {function.name for function in functions}


def test_tokens_are_read_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("_CONDOR_CREDS", str(tmp_path))
    scrubber = Scrubber()
    environment = PluginEnvironment(scrubber)
    for token in ("first-token-1", "second-token-2"):
        (tmp_path / "svc.use").write_text(token)
        assert environment.credential("svc", "") == token
    assert scrubber.message("first-token-1 then second-token-2") == "*** then ***"
