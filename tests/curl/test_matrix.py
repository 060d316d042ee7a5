"""Every request of the plugin goes wrong in every way: it is never worse than HTCondor's own. See tests.curl.matrix."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.curl.matrix import EVERY_EXTRA, Matrix, rows
from tests.curl.matrix_worlds import WORLDS

pytestmark = pytest.mark.pool
PAGE = Path(__file__).resolve().parents[2] / "docs/developer/curl-compared.md"


@pytest.fixture(scope="module")
def matrix(stock: Path, executable: Path) -> Matrix:
    """All cells, once for all tests."""
    found = Matrix(stock, executable)
    found.run()
    return found


def test_never_worse(matrix):
    """It arrives wherever the other arrives, soon, without more bytes and without files that stay behind."""
    worse = [f"{verdict.cell}: {'; '.join(verdict.worse)}" for verdict in matrix.verdicts if verdict.worse]
    assert not worse, f"worse in {len(worse)} cells:\n" + "\n".join(worse[:40])


def test_every_request_has_a_name(matrix):
    """A request that is new needs a step in tests/curl/matrix_worlds.py: only then it is broken too."""
    assert matrix.unknown == set()


def test_each_extra_request_was_broken(matrix):
    """The honest transfers show what the plugin asks; all of it was met with faults, one by one and together."""
    broken = {(verdict.cell.world.name, verdict.cell.step) for verdict in matrix.verdicts}
    for verdict in matrix.verdicts:
        if not verdict.cell.step:
            extra = {step for step in verdict.ours.steps if not step.startswith("QUIT")} - verdict.cell.plain_steps
            wanted = {(verdict.cell.world.name, step) for step in (*extra, *([EVERY_EXTRA] if extra else []))}
            assert wanted <= broken
    assert len(matrix.verdicts) > 400
    assert {verdict.cell.world for verdict in matrix.verdicts} == set(WORLDS)


def test_the_other_arrives(matrix):
    """The cells tell something: in most of them HTCondor's own plugin arrives."""
    arrived = sum(verdict.stock.arrived for verdict in matrix.verdicts)
    assert arrived > len(matrix.verdicts) / 2


def test_page(matrix):
    """The page has the rows of today."""
    page = PAGE.read_text()
    names = [row.split(" | ")[:2] for row in rows(matrix.verdicts)]
    missing = [name for name in names if f"{name[0]} | {name[1]} | " not in page]
    assert not missing, f"run python -m tests.curl.beside_stock > {PAGE}"
