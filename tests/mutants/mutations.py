"""Read the list of mutations, ``mutations.txt``."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Mutation(NamedTuple):
    """One changed place.

    :param before: lines that stand once in ``file``. :param after: their replacement. :param tests: to run, for pytest.
    """

    name: str
    file: str
    tests: tuple[str, ...]
    before: str
    after: str


def read_mutations() -> list[Mutation]:
    """Return all mutations of the list."""
    text = Path(__file__).with_name("mutations.txt").read_text()
    return [_mutation(block) for block in text.split("\n== ")[1:]]


def _mutation(block: str) -> Mutation:
    name, file, tests, *changed = block.splitlines()
    before, after = ("".join(f"{line[1:]}\n" for line in changed if line.startswith(sign)) for sign in "-+")
    return Mutation(name, file.split(maxsplit=1)[1], tuple(tests.split()[1:]), before, after)
