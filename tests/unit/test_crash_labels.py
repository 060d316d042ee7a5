"""Each step of docs/developer/durable-steps.md has a test that lets a process die there, or a reason here."""

from __future__ import annotations

import re
from pathlib import Path

from tests.crash.walk import ELSEWHERE, labels_of_the_table
from tests.unit import (
    test_overlay_custodian,
    test_overlay_custody_steps,
    test_overlay_destination,
    test_overlay_pack_custody,
    test_overlay_packs,
)

ROOT = Path(__file__).resolve().parents[2]
#: Steps with tests of their own, by the file of these; a process dies there, or is said to.
_BY_THEMSELVES = {
    "brought-forget": "tests/unit/test_overlay_brought.py",
    "brought-make": "tests/unit/test_overlay_brought.py",
    "brought-write": "tests/unit/test_overlay_brought.py",
    "copy-settle": "tests/overlay/test_copies.py",
    "copy-take": "tests/overlay/test_copies.py",
    "custody-keep": "tests/unit/test_handover_restart.py",
    "egress-note": "tests/unit/test_overlay_egress_packs.py",
    "egress-unpack": "tests/unit/test_overlay_egress_packs.py",
    **dict.fromkeys(
        (
            f"operation-{step}"
            for step in (
                "adopt",
                "blocks",
                "discard",
                "end",
                "forget",
                "high-water",
                "intent",
                "low",
                "name",
                "reserve",
                "row",
            )
        ),
        "tests/unit/test_operations_terminal.py",
    ),
    "operation-list": "tests/overlay/test_http_operations.py",
    "edit-factory": "tests/unit/test_factories.py",
    "failure-record": "tests/unit/test_agent_failures.py",
    "globus-over": "tests/globus/test_tasks.py",
    "globus-settled": "tests/globus/test_tasks.py",
    "globus-submission": "tests/globus/test_tasks.py",
    "globus-task": "tests/globus/test_tasks.py",
    "overlay-follow": "tests/unit/test_overlay_contents.py",
    "handoff-credential": "tests/unit/test_credentials.py",
    "intake-account": "tests/unit/test_accounts.py",
    **dict.fromkeys(
        (f"overlay-lot-{step}" for step in ("allocate", "free", "record", "refill", "trim")),
        "tests/unit/test_overlay_lots.py",
    ),
    **dict.fromkeys(
        (f"kept-{step}" for step in ("cancel", "drop", "end", "epoch", "file", "forget", "recover", "row", "take")),
        "tests/unit/test_custody_steps.py",
    ),
    "ledger-repair": "tests/unit/test_damaged_ledger.py",
    "overlay-migrate": "tests/unit/test_overlay_migrations.py",
    "overlay-recover-sync": "tests/unit/test_overlay_packs.py",
    "policy-record": "tests/unit/test_policy_service.py",
    "watched-record": "tests/unit/test_output_watch.py",
    "record-unknown": "tests/unit/test_unknown_output.py",
    "spool-aside": "tests/unit/test_unknown_output.py",
    "spool-take-back": "tests/unit/test_unknown_output.py",
    "record-handed-over": "tests/pool/test_handover_pool.py",
    "record-renewed": "tests/unit/test_renewal.py",
    "report-last": "tests/unit/test_drain.py",
    "router-aside": "tests/unit/test_overlay_unknown.py",
    "router-incarnation": "tests/unit/test_overlay_keys.py",
    "router-key": "tests/unit/test_overlay_keys.py",
    "router-place": "tests/unit/test_overlay_place.py",
    "router-take-back": "tests/unit/test_overlay_unknown.py",
}
_DEATH = re.compile(r"kill-(?:before|after)|Death|_dying|Crash")
#: One file that is replaced as a whole (``durable.write_file``, tests/unit/test_durable.py), and nothing that must
#: stand in an order to it: a death leaves the old one or the new one, and each is right.
_REPLACED_AS_A_WHOLE = {
    "agent-certificate", "capability-key", "credential-replace", "front-end", "overlay-lessor",
    "plugin-answer", "profile-store", "router-issuer-keys", "router-own-key",
}  # fmt: skip


def _walked() -> set[str]:
    modules = (test_overlay_custodian, test_overlay_pack_custody, test_overlay_destination, test_overlay_packs)
    found = {label for label in labels_of_the_table() if not ELSEWHERE.match(label)}
    return found.union(test_overlay_custody_steps.BESIDE, *(module.LABELS for module in modules))


def test_at_each_durable_step_a_test_lets_a_process_die() -> None:
    walked, table = _walked(), set(labels_of_the_table())
    named = (set(_BY_THEMSELVES), _REPLACED_AS_A_WHOLE)
    assert table - walked.union(*named) == set(), "nobody dies there: let a test do so"
    for some in named:
        assert some <= table, "no steps of docs/developer/durable-steps.md"
        assert some & walked == set(), "they are walked"


def test_what_has_tests_of_its_own_is_named_there_by_one_that_dies() -> None:
    for label, file in _BY_THEMSELVES.items():
        text = (ROOT / file).read_text()
        assert f"{label}" in text and _DEATH.search(text), f"{file}: {label}"


def test_what_is_replaced_as_a_whole_goes_by_the_one_helper() -> None:
    parts = ("stageout", "overlay_router", "sandbox_manager", "schedd_agent", "policy_service", "stageout_web")
    code = "\n".join(path.read_text() for part in parts for path in (ROOT / part).rglob("*.py"))
    for label in _REPLACED_AS_A_WHOLE:
        found = re.findall(rf'(\w+)\(\s*"{label}"', code)
        assert found and set(found) <= {"write_file", "load_or_make_key"}, f"{label}: {found}"
