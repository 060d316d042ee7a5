"""Totals of transfers: whose failures they count."""

from __future__ import annotations

import pytest

from sandbox_manager.delivery.results import ServerTotals, TransferTotals
from stageout.core.errors import ErrorClass
from stageout.core.metrics import OTHER
from stageout.core.states import FileState
from stageout.model.batch import BatchOutcome
from stageout.model.file import StoredFile


@pytest.mark.parametrize(
    ("kind", "of_node", "result"),
    [
        (ErrorClass.UNKNOWN, False, "unknown"), (ErrorClass.UNKNOWN, True, "node_fault"),
        (ErrorClass.NOT_VERIFIED, True, "node_fault"), (ErrorClass.PLUGIN_BROKEN, True, "plugin_broken"),
        (ErrorClass.LOCAL_FILE, True, "local_file"), (ErrorClass.SERVER_BUSY, False, "server_busy"),
    ],
)  # fmt: skip
def test_faults_of_the_node_are_not_counted_as_a_server_s(kind: ErrorClass, of_node: bool, result: str) -> None:
    totals = TransferTotals()
    failed = StoredFile(0, "u", "f", 1, 0, 1, state=FileState.FAILED, error_code=kind.code, of_node=of_node)
    totals.add("/usr/libexec/copy_plugin", BatchOutcome(failed=[failed]), 1.0)
    assert {key: count for key, count in totals.attempts.items() if count} == {("copy_plugin", result): 1}


def failed(kind: ErrorClass, of_node: bool = False, state: FileState = FileState.WAITING) -> StoredFile:
    return StoredFile(0, "u", "f", 1, 0, 1, state=state, error_code=kind.code, of_node=of_node)


def test_results_of_a_server() -> None:
    servers = ServerTotals()
    outcome = BatchOutcome(
        delivered=[StoredFile(0, "u", "f", 1, 0, 1, state=FileState.DELIVERED)] * 3,
        waiting=[
            failed(ErrorClass.SERVER_BUSY), failed(ErrorClass.UNKNOWN, of_node=True), failed(ErrorClass.PLUGIN_BROKEN)
        ],
        failed=[failed(ErrorClass.SERVER_BUSY, state=FileState.FAILED)],
        delivered_bytes=30,
    )  # fmt: skip
    servers.begin("https://h.example:443", "alice@x", 0.0)
    assert not any(servers.attempts.values()), "zeros before the first event"
    before = {label for label, _ in servers.attempts}
    servers.add("https://H.example:443", "alice@x", outcome, 1.0)
    servers.add_part("https://h.example:443", "alice@x", [5, 6], 2.0)
    assert before == {label for label, _ in servers.attempts} == {"h.example:443", OTHER}
    found = {result: number for (label, result), number in servers.attempts.items() if label == "h.example:443"}
    assert found == {"delivered": 5, "handed_over": 0, "retried": 1, "failed": 1, "node_fault": 2}
    assert servers.delivered_bytes == {"h.example:443": 41, OTHER: 0}


def test_a_million_names_of_one_user_take_no_memory_and_nobody_s_label() -> None:
    servers, one = (
        ServerTotals(),
        BatchOutcome(delivered=[StoredFile(0, "u", "f", 1, 0, 1, state=FileState.DELIVERED)], delivered_bytes=1),
    )
    servers.add("https://first", "alice@x", one, 0.0)
    for number in range(1_000_000):
        servers.begin(f"https://{number}.evil", "mallory@x", 1.0)
    for owner, host in (("alice@x", "first"), ("bob@x", "second"), ("carol@x", "third"), ("bob@x", "fourth")):
        servers.add(f"https://{host}", owner, one, 2.0)
    for number in range(1000):
        servers.add(f"https://{number}.other.evil", "mallory@x", one, 3.0)
    assert len(servers.delivered_bytes) == 21
    assert len(servers.attempts) == 21 * 5
    assert {label: servers.delivered_bytes[label] for label in ("first", "second", "third", "fourth")} == {
        "first": 2, "second": 1, "third": 1, "fourth": 1,
    }  # fmt: skip
    assert servers.delivered_bytes[OTHER] == 1000


def test_a_label_of_one_user_becomes_that_of_a_user_with_fewer() -> None:
    """Mallory names the server of Bob first, and must not lose it for him."""
    servers = ServerTotals()
    for number in range(20):
        servers.begin(f"https://{number or 'bob'}", "mallory@x", 0.0)
    servers.begin("https://bob", "bob@x", 1.0)
    for number in range(9):
        servers.begin(f"https://carol{number}", "carol@x", 2.0)
    assert "bob" in servers.delivered_bytes
    assert len(servers.delivered_bytes) == 21


def test_a_label_without_events_for_a_day_is_free() -> None:
    servers = ServerTotals()
    for number in range(20):
        servers.begin(f"https://{number}", "alice@x", float(number))
    servers.begin("https://new", "alice@x", 86_000.0)
    assert "new" not in servers.delivered_bytes
    servers.begin("https://new", "alice@x", 86_400.0)
    assert "new" in servers.delivered_bytes and "0" not in servers.delivered_bytes
    assert ("0", "delivered") not in servers.attempts


def test_a_server_with_the_name_of_the_rest_takes_no_label() -> None:
    servers = ServerTotals()
    servers.begin("other://", "alice@x", 0.0)
    for number in range(20):
        servers.begin(f"https://{number}", "alice@x", 1.0)
    assert len(servers.delivered_bytes) == 21
