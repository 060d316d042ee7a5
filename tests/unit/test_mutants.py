"""The list of mutations fits the code: a mutation that cannot be made any more would be counted as caught."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.mutations import Mutation, read_mutations
from tests.mutants.run import try_mutation

ROOT = Path(__file__).resolve().parents[2]
_PRODUCT = "def double(number):\n    return 2 * number\n"
_TEST = "from product import double\n\n\ndef test_double():\n    assert double({}) == {}\n"


def test_names_differ_and_there_are_enough() -> None:
    names = [one.name for one in read_mutations()]
    assert len(names) >= 60
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("mutation", read_mutations(), ids=lambda one: one.name)
def test_each_can_be_made(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.before) == 1
    assert mutation.after != mutation.before
    assert mutation.tests and all((ROOT / name.partition("::")[0]).is_file() for name in mutation.tests)


@pytest.mark.parametrize(
    ("number", "verdict"), [(3, "caught"), (2, "survived"), (0, "survived")], ids=["good-test", "weak-test", "no-test"]
)
def test_a_weak_test_is_found_out(tmp_path: Path, number: int, verdict: str) -> None:
    (tmp_path / "product.py").write_text(_PRODUCT)
    (tmp_path / "test_product.py").write_text(_TEST.format(number, 2 * number))
    change = Mutation(
        "square", "product.py", ("test_product.py",), "    return 2 * number\n", "    return number * number\n"
    )
    assert try_mutation(tmp_path, change) == verdict
    assert (tmp_path / "product.py").read_text() == _PRODUCT, "taken back"
    gone = change._replace(before="not there")
    assert try_mutation(tmp_path, gone) == "product.py has 0 places for it"
    broken = change._replace(tests=("test_missing.py",))
    assert try_mutation(tmp_path, broken).startswith("pytest ended with status 4")
