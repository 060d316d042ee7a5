"""New mutations are drawn from the code: each kind is found, made at its place, and tried with tests that are near."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.draw import Nearness, draw, mutated, places

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
        ("statement left out", "a = 1", []),
        ("steps swapped", "g(a)\n    h(a)", ["h(a)\n    g(a)"]),
        ("steps swapped", "a.b.g()\n    a.c.h()", ["a.c.h()\n    a.b.g()"]),
        ("steps swapped", "await g(a)\n    await h(b)", ["await h(b)\n    await g(a)"]),
        ("steps swapped", "g(a)\n    h(b)", []),
        ("steps swapped", "os.g(a)\n    os.h(b)", []),
        ("steps swapped", "a.g()\n    a.notify_all()", []),
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
    near = Nearness().tests("sandbox_manager/scheduling/leases.py", "mark_read")
    assert near[0] == "tests/unit/test_leases.py"
    assert all(Path(name.partition("::")[0]).is_file() for name in near)
    assert "tests/overlay/test_relays.py" in Nearness().tests("stageout/overlay/channel.py", "_pass_relays")
    assert not any("test_golden" in name or "test_language" in name for name in near)
    assert Nearness().tests("nobody/imports/this.py", "x") == ()
