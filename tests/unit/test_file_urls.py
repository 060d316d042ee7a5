"""``file`` URLs name paths of the node: its owner is told where the first output of each node is."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sandbox_manager.custody import queries, redirects, updates
from sandbox_manager.custody.ledger import Ledger
from sandbox_manager.custody.redirects import FallbackRules, PluginChoice
from sandbox_manager.delivery.results import update_state
from sandbox_manager.report.reporter import file_report, sandbox_report
from schedd_agent.file_records import _file_attributes
from stageout.core.states import FileState, State
from stageout.core.synchronous import NO_REASON
from stageout.model.file import StoredFile
from stageout.model.run import RunFacts
from stageout.model.sandbox import Sandbox, SlotKey
from stageout.movers.schemes import is_node_path
from stageout.wire.custody import Run
from tests.unit.ledger_steps import attempt

_NODE = "delivered to the filesystem of the node ep7.example.org: a file URL names a path of the node that runs the job"


@pytest.fixture
def db(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(Ledger(tmp_path / "ledger")) as ledger:
        yield ledger._connection


def _delivered(db: sqlite3.Connection, job: str, *urls: str, owner: str = "a@d", fallback: str = "") -> Sandbox:
    new = RunFacts(Run(f"ap#{job}#1", 1, owner), "a", 1, 1, SlotKey("ep", 1, 1), "slot1_1@ep7.example.org")
    files = [StoredFile(at, url, str(at), 5, 1, 1) for at, url in enumerate(urls)]
    box = updates.add_ticket(db, new, f"t{job}", "/p", files, "boot", 1)
    for state in (State.CONFIRMED, State.LEASED, State.MOVING):
        updates.set_state(db, box, state, 10)
    if fallback:
        updates.offer_fallback(db, box, fallback, "")
        redirects.fall_back(db, box, fallback, lambda path, scheme: PluginChoice("/p2", NO_REASON))
        updates.keep_fallback_reason(db, box, "403")
    attempt(db, FileState.DELIVERED)
    rules = FallbackRules(lambda path, scheme: PluginChoice("/p", NO_REASON), 0, lambda destination: "")
    update_state(db, box, lambda destination: True, rules, 20)
    found = queries.sandbox(db, box)
    assert found is not None and found.state is State.DELIVERED
    return found


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("file:///d/a", True), ("FILE:///d/a", True), ("tok+file:///d/a", True), ("https://file/a", False),
        ("file", False), ("profile://h/a", False),
    ],
)  # fmt: skip
def test_which_urls_name_a_path_of_the_node(url: str, expected: bool) -> None:
    assert is_node_path(url) is expected


def test_the_first_delivery_of_each_owner_names_the_node(db: sqlite3.Connection) -> None:
    assert _delivered(db, "1.0", "https://h/a").reason == ""
    assert _delivered(db, "2.0", "file:///d/a", "file:///d/b", "https://h/c").reason == f"2 files {_NODE}"
    assert _delivered(db, "3.0", "file:///d/a").reason == ""
    assert _delivered(db, "4.0", "file:///d/a", owner="b@d").reason == f"1 file {_NODE}"


def test_a_fallback_on_the_node_is_named_too(db: sqlite3.Connection) -> None:
    box = _delivered(db, "1.0", "https://h/a", fallback="file:///d/")
    fallback = "1 file delivered to the fallback file:///d/ because the destination failed: 403"
    assert box.reason == f"{fallback}; 1 file {_NODE}"


def test_the_records_of_files_on_the_node_have_the_reason(db: sqlite3.Connection) -> None:
    found = _delivered(db, "1.0", "file:///d/a", "https://h/b")
    box = sandbox_report(found, 0, [file_report(row, found, {}) for row in queries.all_files(db, found.id)])
    reasons = {file.url: _file_attributes(file, box).get("StageOutReason") for file in box.files}
    assert reasons == {"file:///d/a": f"1 file {_NODE}", "https://h/b": None}
