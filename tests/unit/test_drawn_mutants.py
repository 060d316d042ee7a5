"""New mutations are drawn from the code: each kind is found, made at its place, and tried with tests that are near."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.draw import Judge, Nearness, chosen, draw, mutated, places
from tests.mutants.reached import Caller, Reached
from tests.mutants.run import HUNG, Verdict

_HEAD = "def f(a, b):\n"


@pytest.mark.parametrize(
    ("kind", "line", "after"),
    [
        ("condition dropped", "if a: g()", ["if True: g()", "if False: g()"]),
        ("condition dropped", "return a.b and b", ["return ((b))", "return ((a.b))"]),
        ("comparison inverted", "return 'ü' + a < b", ["return (('ü' + a) >= (b))"]),
        ("comparison inverted", "return a not in b", ["return ((a) in (b))"]),
        ("comparison inverted", "return 1 < a < b", []),
        ("statement left out", "a.b = 1", ["pass"]),
        ("statement left out", "await g(b)", ["pass"]),
        ("statement left out", "log.warn('not-done')", []),
        ("statement left out", "a._log('done', b)", []),
        ("statement left out", "a.catalog(b)", ["pass"]),
        ("statement left out", "a = 1", []),
        ("steps swapped", "g(a)\n    h(a)", ["h(a)\n    g(a)"]),
        ("steps swapped", "a.b.g()\n    a.c.h()", ["a.c.h()\n    a.b.g()"]),
        ("steps swapped", "await g(a)\n    await h(b)", ["await h(b)\n    await g(a)"]),
        ("steps swapped", "g(a)\n    h(b)", []),
        ("steps swapped", "os.g(a)\n    os.h(b)", []),
        ("steps swapped", "a.g()\n    a.notify_all()", []),
        ("steps swapped", "a.g()\n    b.h(a.c)", ["b.h(a.c)\n    a.g()"]),
        ("steps swapped", "a.g.update(b.g)\n    f.h.update(b.h)", []),
        ("steps swapped", "a.put('x', 1)\n    a.put('y', 2)", []),
        ("steps swapped", "a.put('x', 1)\n    a.put('x', 2)", ["a.put('x', 2)\n    a.put('x', 1)"]),
        ("steps swapped", "a.g(b)\n    a.log(b)", []),
        ("steps swapped", "f.g.add(b)\n    f.h.append(b)", []),
        ("steps swapped", "f.g.pop(b, None)\n    f.h.discard(b)", []),
        ("steps swapped", "f.g.pop(b)\n    f.h.add(f.g)", ["f.h.add(f.g)\n    f.g.pop(b)"]),
        ("steps swapped", "f.add(b)\n    f.add(a)", ["f.add(a)\n    f.add(b)"]),
    ],
)  # fmt: skip
def test_each_kind_is_made_at_its_place(kind: str, line: str, after: list[str]) -> None:
    source = f"import os\n\n\nasync {_HEAD}    {line}\n\n\ndone = 1\n"
    found = sorted(mutated(source, one) for one in places(source) if one.kind == kind)
    assert found == sorted(source.replace(line, text) for text in after)


def test_neighbouring_steps_are_swapped_in_a_block() -> None:
    source = f"{_HEAD}    if a:\n        g(a)\n        h(\n            a)\n    return 1\n"
    (one,) = [one for one in places(source) if one.kind == "steps swapped"]
    assert mutated(source, one) == source.replace(
        "g(a)\n        h(\n            a)", "h(\n            a)\n        g(a)"
    )


def test_durable_steps_are_swapped() -> None:
    first, second = (f"    with durable.step('{name}'):\n        {name}()\n" for name in "gh")
    (one,) = [one for one in places(f"{_HEAD}{first}{second}") if one.kind == "steps swapped"]
    assert mutated(f"{_HEAD}{first}{second}", one) == f"{_HEAD}{second}{first}"


def test_a_draw_depends_on_its_seed_and_can_be_made() -> None:
    first, again, other = (draw(12, seed, words=("sandbox_manager/scheduling",)) for seed in (5, 5, 6))
    assert first == again != other
    assert len(set(first)) == 12 and len({one.kind for _, one in first}) == 4
    for file, one in first:
        source = Path(file).read_text()
        assert ast.dump(ast.parse(mutated(source, one))) != ast.dump(ast.parse(source))


def test_only_changed_lines_are_drawn_from() -> None:
    assert draw(3, 1, since="HEAD", words=("no file of this name",)) == []


def test_the_nearest_tests_are_those_that_import_the_module() -> None:
    nearness = Nearness()
    near = nearness.files("sandbox_manager/scheduling/leases.py", "mark_read")
    assert near[0] == "tests/unit/test_leases.py"
    assert all(Path(name).is_file() for name in near)
    assert not any("test_golden" in name or "test_language" in name for name in near)
    assert set(nearness.files("nobody/imports/this.py", "x")) == set(near), "the order is another one"


def test_some_tests_of_each_file_run_the_shortest_first_while_there_is_time() -> None:
    many = [Caller(f"many::{number:02}", 1.0) for number in range(30)]
    by_file = {"far": [Caller("far::a", 0.1)], "near": many, "long": [Caller("long::a", 1.0), Caller("long::b", 200.0)]}
    names = [test.name for test in chosen(by_file, ["near", "long", "far"])]
    assert names == [*(test.name for test in many[:12]), "long::a", "far::a", *(test.name for test in many[12:])]


_TESTS = """
import os, subprocess, sys
import pytest
from product.a import one, three

@pytest.fixture(scope="module")
def shared():
    return three()

def test_here(shared):
    assert one() == 1

def test_in_a_program():
    environment = {"PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", "import os; from product.a import two; two(); os._exit(0)"]
    subprocess.run(command, env=environment, check=True)
"""


def test_the_tests_that_call_a_function_are_seen_also_in_programs(tmp_path: Path) -> None:
    place, kept = tmp_path / "place", tmp_path / "kept"
    (place / "product").mkdir(parents=True)
    (place / "product/a.py").write_text("".join(f"def {name}():\n    return 1\n" for name in ("one", "two", "three")))
    (place / "test_a.py").write_text(_TESTS)

    def tests(reached: Reached, function: str) -> list[str]:
        reached.look(["test_a.py"])
        found = reached.tests("product/a.py", function, ["test_a.py"])
        return sorted(test.name.partition("::")[2] for test in found.get("test_a.py", []))

    reached = Reached(place, kept, ["product"])
    assert tests(reached, "one") == ["test_here"]
    assert tests(reached, "two") == ["test_in_a_program"]
    assert tests(reached, "three") == ["test_here", "test_in_a_program"], "what is shared may be used by each"
    assert tests(reached, "four") == []
    (kept_file,) = kept.iterdir()
    before = kept_file.stat().st_mtime_ns
    assert tests(Reached(place, kept, ["product"]), "one") == ["test_here"]
    assert kept_file.stat().st_mtime_ns == before, "nothing ran again"
    source = (place / "product/a.py").read_text().replace("def one():\n", "def one():\n    four()\n")
    (place / "product/a.py").write_text(f"{source}def four():\n    pass\n")
    later = Reached(place, kept, ["product"])
    assert tests(later, "four") == []
    later.look_again(["test_a.py"])
    assert tests(later, "four") == ["test_here"]
    (place / "test_a.py").write_text(_TESTS.replace("one() == 1", "True"))
    assert tests(Reached(place, kept, ["product"]), "one") == []


def test_a_test_that_fails_without_the_mutation_finds_nothing(tmp_path: Path) -> None:
    place, nobody = tmp_path / "place", "no test calls it that passes without it"
    (place / "stageout").mkdir(parents=True)
    (place / "tests/unit").mkdir(parents=True)
    source = "def double(a):\n    if a:\n        return 2 * a\n    return 0\n"
    (place / "stageout/numbers.py").write_text(source)
    never, always = sorted(places(source), key=lambda one: one.text)
    broken, zero, one = (
        f"def test_{name}():\n    assert double({number}) == {result}\n\n\n"
        for name, number, result in (("broken", 1, 3), ("zero", 0, 0), ("one", 1, 2))
    )
    for tests, outcomes in (
        (broken, [nobody, nobody]),
        (broken + zero + one, ["caught", "survived"]),
    ):
        (place / "tests/unit/test_numbers.py").write_text(f"from stageout.numbers import double\n\n\n{tests}")
        judge = Judge(place, tmp_path / "kept", _Order())
        assert [judge.verdict("x", "stageout/numbers.py", change) for change in (never, always)] == outcomes


@pytest.mark.parametrize(
    ("without", "outcome"), [("survived", "caught"), (HUNG, "its tests take too long without it, too")]
)
def test_a_hang_counts_where_the_tests_end_without_the_mutation(
    without: str, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [HUNG, without]
    monkeypatch.setattr("tests.mutants.draw.run_tests", lambda *_: Verdict(words.pop(0)))
    monkeypatch.setattr(Reached, "tests", lambda *_: {"tests/unit/test_numbers.py": [Caller("x", 1.0)]})
    monkeypatch.setattr(Reached, "look", lambda *_: None)
    (tmp_path / "product.py").write_text("def f(a):\n    g(a)\n")
    (change,) = places((tmp_path / "product.py").read_text())
    assert Judge(tmp_path, tmp_path / "kept", _Order()).verdict("x", "product.py", change) == outcome
    assert not words


class _Order(Nearness):
    def __init__(self) -> None:
        pass

    def files(self, file: str, function: str) -> tuple[str, ...]:
        return ("tests/unit/test_numbers.py",)
