"""Totals of transfers: whose failures they count."""

from __future__ import annotations

import pytest

from sandbox_manager.file import StoredFile
from sandbox_manager.scheduling.retry import BatchOutcome
from sandbox_manager.transfer.totals import TransferTotals
from stageout.core.errors import ErrorClass
from stageout.core.states import FileState


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
