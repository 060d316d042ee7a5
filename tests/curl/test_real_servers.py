"""HTCondor's own plugin and ours at real servers: ours is never worse."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.curl.real_servers import SERVERS, NotInstalled
from tests.curl.real_table import TRANSFERS, compare, line

pytestmark = pytest.mark.pool
PAGE = Path(__file__).resolve().parents[2] / "docs/developer/curl-compared.md"


@pytest.mark.parametrize("server", SERVERS)
def test_never_worse(server: str, stock: Path, executable: Path) -> None:
    """All transfers; the page of the comparison has their rows."""
    try:
        rows = compare(server, stock, executable)
    except NotInstalled as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))
    assert [line(row) for row in rows if row.worse] == []
    assert any(row.stock.arrived for row in rows)
    assert len(rows) == len(TRANSFERS)
    page = PAGE.read_text()
    assert [line(row) for row in rows if line(row) not in page] == [], "run python -m tests.curl.beside_stock"
