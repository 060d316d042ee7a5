"""Statements for SQLite 3.34.1, which Enterprise Linux 9 has: there a newer one would end the daemon at its start."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_PRODUCT = ("stageout", "sandbox_manager", "schedd_agent", "policy_service", "overlay_router", "stageout_web")
#: Clauses of 3.35 and later.
_NEWER = re.compile(
    r"ON CONFLICT\s+DO UPDATE|\bRETURNING\b|\bDROP COLUMN\b|\)\s*STRICT\b|\bunixepoch\(|\bAS (NOT )?MATERIALIZED\b"
    r"|\bRIGHT JOIN\b|\bFULL JOIN\b|\bIS (NOT )?DISTINCT FROM\b"
)


def newer(text: str) -> list[str]:
    return [found[0] for found in _NEWER.finditer(text)]


def test_no_statement_needs_a_newer_sqlite() -> None:
    pages = [path for name in _PRODUCT for path in (ROOT / name).rglob("*.py")]
    assert pages
    assert {str(path.relative_to(ROOT)): found for path in pages if (found := newer(path.read_text()))} == {}


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO a VALUES (1) ON CONFLICT DO UPDATE SET b = 1",
        "DELETE FROM a RETURNING b",
        "CREATE TABLE a (b) STRICT",
    ],
)
def test_newer_statements_are_found(statement: str) -> None:
    assert newer(statement)
    assert not newer("INSERT INTO a VALUES (1) ON CONFLICT (b) DO UPDATE SET b = 1; ON CONFLICT DO NOTHING")
