"""Attributes and variables that product code reads, found in its text: in look-ups, projections and expressions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from stageout.core.trust import Part

ROOT = Path(__file__).resolve().parents[2]

#: Folders of the product -> the part to which their code belongs; None: code that several parts use.
FOLDERS: dict[str, Part | None] = {
    "schedd_agent": Part.AGENT,
    "sandbox_manager": Part.MANAGER,
    "stageout_web": Part.PAGE,
    "stageout/cli": Part.COMMAND,
    "stageout/sampling": Part.COMMAND,
    "stageout/jobs.py": Part.COMMAND,
    "stageout/movers": Part.MANAGER,
    "stageout/handoff": Part.PLUGIN,
    "stageout/plugin": Part.PLUGIN,
    "stageout/protocols": Part.PLUGIN,
    "stageout/overlay": Part.PLUGIN,
    "plugins": Part.PLUGIN,
    "stageout/core": None,
    "stageout/wire": None,
    "stageout/tuning": None,
}
_NAME = re.compile(r"(?:[A-Z][A-Za-z0-9]*[a-z]|x509)[A-Za-z0-9]*\Z")
#: Names in a row of which one has a capital letter inside are a projection; others are titles of a table.
_INNER = re.compile(r"[A-Z]\w*[A-Z]|x509")
_READERS = frozenset({
    "get", "text", "integer", "number", "real", "boolean", "lookup", "eval", "pop", "value_of", "job_attribute",
    "machine_attribute", "_optional", "_number", "_text", "_count",
})  # fmt: skip
_EXPRESSION = re.compile(r"=\?=|=!=|==|!=|&&|\|\||\?:|\bisnt\b|\bis undefined\b|>=|<=")
_IN_EXPRESSION = re.compile(r"(?<![\w$])(?:[A-Z]|x509)\w+")
_VARIABLE = re.compile(r"[A-Za-z_]+\Z")


class Read(NamedTuple):
    """A name that a file reads. :param part: whose code it is, None for code of several parts."""

    name: str
    part: Part | None
    place: str


def attributes_in(text: str) -> Iterator[tuple[str, int]]:
    """Yield name and line of each attribute that a module reads."""
    tree = ast.parse(text)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and _texts(node.value)}
    prose |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Assign) and _is_interface(node)}
    for node in ast.walk(tree):
        if id(node) not in prose:
            yield from ((name, getattr(node, "lineno", 0)) for name in _read_by(node) if _NAME.match(name))


def _is_interface(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)


def _read_by(node: ast.AST) -> list[str]:
    """Return the texts in one node that may be names of attributes."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        return _texts(node.slice)
    if isinstance(node, ast.Call) and _name_of(node.func) in _READERS:
        return [text for argument in node.args for text in _texts(argument)]
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        return _texts(node.left)
    if isinstance(node, (ast.Tuple, ast.List, ast.Set, ast.Dict)):
        items = _values(node) if isinstance(node, ast.Dict) else node.elts
        found = [text for item in items for text in _texts(item) if text]
        return found if all(map(_NAME.match, found)) and any(map(_INNER.match, found)) else []
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and _EXPRESSION.search(node.value):
        return _IN_EXPRESSION.findall(re.sub(r'"[^"]*"', "", node.value))
    return []


def _values(node: ast.Dict) -> list[ast.expr]:
    """Return the values of a dictionary that has texts for keys."""
    return node.values if all(key is not None and _texts(key) for key in node.keys) else []


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _texts(node: ast.expr) -> list[str]:
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body), *_texts(node.orelse)]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def variables_in(text: str) -> Iterator[tuple[str, int]]:
    """Yield name and line of each variable of the environment that a module reads."""
    for node in ast.walk(ast.parse(text)):
        found: list[str] = []
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and _is_environment(node.value):
            found = _texts(node.slice)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "ad" or (node.func.attr in ("get", "pop") and _is_environment(node.func.value)):
                found = [text for argument in node.args[:1] for text in _texts(argument)]
        elif isinstance(node, ast.Compare) and _is_environment(node.comparators[0]):
            found = _texts(node.left)
        yield from ((name, getattr(node, "lineno", 0)) for name in found if _VARIABLE.match(name))


def _is_environment(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "environ"


def product() -> Iterator[tuple[Path, Part | None]]:
    """Yield the product's modules, each with its part."""
    for folder, part in FOLDERS.items():
        place = ROOT / folder
        for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
            yield path, part


def all_reads() -> list[Read]:
    """Return all attributes that the product reads."""
    return [Read(name, part, f"{path.relative_to(ROOT)}:{line}")
            for path, part in product() for name, line in attributes_in(path.read_text())]  # fmt: skip
