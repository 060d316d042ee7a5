"""The result of one origin's operations, executed one after the other: nested dictionaries, no protocol."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from overlay_router.rules.states import Kind, Op, Outcome

Directory = dict[str, Any]


def _find(root: Directory, path: str) -> tuple[Directory | None, str]:
    *above, last = path.split("/")
    here: Any = root
    for part in above:
        here = here.get(part) if isinstance(here, dict) else None
    return (here if isinstance(here, dict) else None), last


def _execute(root: Directory, op: Op) -> bool:
    home, name = _find(root, op.path)
    if home is None or (op.absent and name in home):
        return False
    if op.kind is Kind.MKDIR:
        return name not in home and home.setdefault(name, {}) is not None
    if op.kind is Kind.PUBLISH:
        if isinstance(home.get(name), dict):
            return False
        home[name] = ((op.origin, op.seq), 0)
        return True
    if name not in home:
        return False
    if op.kind is Kind.DELETE:
        del home[name]
    elif op.kind is Kind.RENAME:
        return _rename(root, home, name, op)
    elif isinstance(home[name], tuple):
        home[name] = (home[name][0], op.seq)
    return True


def _rename(root: Directory, home: Directory, name: str, op: Op) -> bool:
    there, target = _find(root, op.target)
    if there is None or op.target == op.path or op.target.startswith(op.path + "/"):
        return False
    if target in there and (isinstance(home[name], dict) or isinstance(there[target], dict)):
        return False
    there[target] = home.pop(name)
    return True


def _flat(here: Directory, above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in here.items():
        found[above + name] = None if isinstance(value, dict) else value
        if isinstance(value, dict):
            found.update(_flat(value, above + name + "/"))
    return found


def run(ops: Iterable[Op], given: Mapping[int, Outcome]) -> tuple[dict[str, Any], dict[int, Outcome]]:
    """Execute in order of number. ``given`` names the operations that were CANCELLED or EXPIRED: left out.

    Returns path -> (content, attributes), None for a directory; and number -> outcome.
    """
    root: Directory = {}
    outcomes: dict[int, Outcome] = {}
    generations: dict[str, int] = {}
    for op in ops:
        if given.get(op.seq) in (Outcome.CANCELLED, Outcome.EXPIRED):
            outcomes[op.seq] = given[op.seq]
            continue
        possible = op.generation in (-1, generations.get(op.path, 0))
        possible = possible and all(outcomes[seq] is not Outcome.FAILED for seq in op.after)
        outcomes[op.seq] = Outcome.DONE if possible and _execute(root, op) else Outcome.FAILED
        if outcomes[op.seq] is Outcome.DONE:
            for path in {op.path, op.target or op.path}:
                generations[path] = generations.get(path, 0) + 1
    return _flat(root), outcomes
