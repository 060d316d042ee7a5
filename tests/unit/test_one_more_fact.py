"""A newcomer's change: one more fact of a delivery, from the plugin's result to ``stageout history``."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import fields
from pathlib import Path

from sandbox_manager.custody import schema
from sandbox_manager.custody.queries import FILE_COLUMNS
from stageout.movers.results import TransferFacts
from stageout.wire.custody import FileReport

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("stageout", "sandbox_manager", "schedd_agent")
MOST_FILES = 6
#: The whole change: file -> lines of it, and those that the change puts before them.
CHANGE = {
    "stageout/movers/results.py": (
        ('    route: str = ""\n\n\nNO_FACTS', '    route: str = ""\n    checksum_ms: int = 0\n\n\nNO_FACTS'),
        ('_count(developer, "Streams"), route)', '_count(developer, "Streams"), route, _count(developer, "SumMs"))'),
    ),
    "sandbox_manager/custody/schema.py": (
        ("of_node INTEGER NOT NULL DEFAULT 0,\n",
         "of_node INTEGER NOT NULL DEFAULT 0, checksum_ms INTEGER NOT NULL DEFAULT 0,\n"),
    ),
    "stageout/wire/custody.py": (("    of_node: int = 0\n", "    of_node: int = 0\n    checksum_ms: int = 0\n"),),
    "schedd_agent/file_records.py": (
        ('"StageOutRoute": file.route,', '"StageOutRoute": file.route, "StageOutChecksumMs": file.checksum_ms,'),
    ),
}  # fmt: skip
#: From a plugin's ad to the command, each step with the product's own function.
STORY = """
import sqlite3, sys
from pathlib import Path

from sandbox_manager.custody import queries, schema, updates
from stageout.model.file import StoredFile
from sandbox_manager.report.reporter import file_report, sandbox_report
from stageout.model.run import RunFacts
from stageout.model.sandbox import SlotKey
from sandbox_manager.delivery.batch import delivered_result
from schedd_agent.file_records import key_of, records_of
from schedd_agent.model import ReportedSandbox
from stageout.cli import file_history
from stageout.cli.main import main
from stageout.core.config import mapping_settings
from stageout.core.history import FILE_NAME, HistoryFile
from stageout.movers.results import Ending, SentFile, read_answers
from stageout.wire.custody import Report, Run, payload_of, read_report, report_ad

spool = Path(sys.argv[1])
db = sqlite3.connect(spool / "ledger", isolation_level=None)
schema.make(db)
new = RunFacts(Run("ap#1.0#1", 1, "alice@x"), "alice", 5, 5, SlotKey("ep", 1, 1), "slot1_1@ep")
box = updates.add_ticket(db, new, "t", "/p", [StoredFile(0, "https://h/f", "f", 5, 1, 1)], "boot", 100)
(file,) = updates.claim_files(db, box, 1, 1000, 10, 100)
ad = '[ TransferSuccess = true; TransferFileName = "f"; TransferUrl = "https://h/f"; TransferFileBytes = 5; '
ad += 'DeveloperData = [ StageOutVerified = "size"; Streams = 4; SumMs = 321 ] ]'
(answer,) = read_answers([SentFile(Path("/f"), "https://h/f", "f", 5)], ad, Ending(0))
updates.record_results(db, [delivered_result(file, answer, 1060.0)])
(file,) = queries.all_files(db, box)
sandbox = queries.sandbox(db, box)
shown = sandbox_report(sandbox, 20, [file_report(file, sandbox, queries.destinations(db))])
(told,) = read_report(payload_of(report_ad(Report("ep", "", 1, 1100, {}, 0, (shown,))))).sandboxes
ads = records_of(ReportedSandbox("ep", "", told), "alice", 1100)
HistoryFile(spool / FILE_NAME, key_of, lambda: 1100.0).append(ads)
file_history.condor_settings = lambda: mapping_settings({"SPOOL": str(spool)})
main(["history", "-files", "--all", "--json"])
"""


def told(product: Path, spool: Path) -> dict[str, object]:
    """Return the record of a delivered file that this product prints with ``stageout history --json``."""
    spool.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(product)}
    command = [sys.executable, "-c", STORY, str(spool)]
    done = subprocess.run(command, cwd=product, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (file,) = json.loads(done.stdout)["files"]
    assert isinstance(file, dict)
    return file


def test_one_more_fact_of_a_delivery_is_a_change_of_few_files(tmp_path: Path) -> None:
    product = tmp_path / "product"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, product / name, ignore=shutil.ignore_patterns("__pycache__"))
    before = told(product, tmp_path / "before")
    for name, places in CHANGE.items():
        text = (product / name).read_text()
        for old, new in places:
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        (product / name).write_text(text)
    assert told(product, tmp_path / "after") == {**before, "StageOutChecksumMs": 321}
    assert before["StageOutStreams"] == 4
    assert len(CHANGE) <= MOST_FILES


def test_the_facts_of_a_delivery_are_columns_and_fields_of_reports() -> None:
    with closing(sqlite3.connect(":memory:")) as db:
        schema.make(db)
        columns = {row[1] for row in db.execute("PRAGMA table_info (files)")}
    read = {name.partition(".")[2] for name in FILE_COLUMNS.split(", ") if name.startswith("f.")}
    assert read == columns
    shown = {item.name: item.default for item in fields(FileReport)}
    facts = {item.name: item.default for item in fields(TransferFacts)}
    assert facts.items() <= shown.items()


def test_the_tables_of_a_version_stay_as_they_are() -> None:
    with closing(sqlite3.connect(":memory:")) as db:
        schema.make(db)
        rows = db.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()
    assert {schema.VERSION: digest} == {1: "5891a240145cce4ddb238f03c41ec2a0935a940c16cb14c2b16df8c213ba45c1"}, (
        "ledgers of this version have other tables: raise VERSION"
    )
