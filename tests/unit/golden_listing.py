"""The golden listing: all that people and programs outside see of the product, in one text file.

It is read from the syntax of the code and from its tables, and names no file or function of the product. So code that
only moves, or is formatted anew, leaves it as it is. ``make reference`` writes it anew; a test compares it.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LISTING = ROOT / "tests/unit/golden/listing.txt"
sys.path.insert(0, str(ROOT / "docs/_ext"))

import reference  # noqa: E402
from programs import Command, command, parser_of, parsers_of_commands  # noqa: E402

from stageout.cli.exits import Exit  # noqa: E402
from stageout.core.config import KNOBS  # noqa: E402
from stageout.core.errors import ErrorClass  # noqa: E402
from stageout.core.metrics import METRICS  # noqa: E402
from stageout.core.reasons import REFUSALS  # noqa: E402
from stageout.core.states import MOVES, PLAIN, State  # noqa: E402
from stageout.wire.custody import Action  # noqa: E402

FOLDERS = ("stageout", "sandbox_manager", "schedd_agent", "policy_service", "overlay_router", "stageout_web", "plugins")
_PROGRAMS = re.compile(r"^<!-- reference: program (\S+) -->$", re.M)
_LABEL = re.compile(r"^\| `([a-z-]+)` \|", re.M)
_KEY = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_WORD = re.compile(r"[A-Za-z][a-z']*")
_SQL = re.compile(
    r"\s*(SELECT|INSERT|UPDATE|DELETE|CREATE|ALTER|DROP|PRAGMA|BEGIN|WITH|WHERE|FROM|JOIN|AND|ORDER|SET)\b"
)
#: Functions whose texts nobody reads as sentences.
_NO_SENTENCES = {"compile", "match", "fullmatch", "search", "sub", "findall", "finditer", "cast"}
_LEAST_WORDS = 3


def listing() -> str:
    """Return the listing as the code is now."""
    trees = list(syntax())
    sections = {
        "events: name, levels, facts": events(trees),
        "messages": messages(trees),
        "keys of JSON and of messages between programs": keys(trees),
        "keys of --json that the reference shows": json_keys(),
        "programs: name, arguments": programs(),
        "exit statuses": (f"{int(code)} {code.name}" for code in Exit),
        "attributes": sorted(reference.attribute_names()),
        "metrics: part, name, type, labels": (
            " ".join([one.part, one.name, one.kind.value, *one.labels]) for one in METRICS.values()
        ),
        "durable labels, in their order": labels(trees),
        "knobs: role, name, default": sorted(f"{one.role} {one.name} {one.default!r}" for one in KNOBS.values()),
        "errors: code, name, types, advice": (
            f"{one.code} {one.name} {one.value.error_type} {one.value.failure_type or '-'} {one.advice.name}"
            for one in ErrorClass
        ),
        "reasons": (f"{code}: {cause.happened}" for code, cause in REFUSALS.items()),
        "states: name, word, moves": (
            f"{one}, {PLAIN.get(one, '-')}: {' '.join(sorted(MOVES.get(one, ())))}" for one in State
        ),
        "orders": (one.value for one in Action),
    }
    return "\n".join(f"# {name}\n" + "".join(f"{line}\n" for line in lines) for name, lines in sections.items())


def syntax() -> Iterator[ast.Module]:
    """Yield the syntax of each module and each plugin."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix == ".py" or (folder == "plugins" and _is_python(path)):
                yield ast.parse(path.read_text())


def _is_python(path: Path) -> bool:
    return path.is_file() and b"python" in path.read_bytes().partition(b"\n")[0]


def events(trees: Iterable[ast.Module]) -> list[str]:
    """Return each log event with the levels and facts of all places that write it."""
    found: dict[str, reference.Event] = {}
    for tree in trees:
        for name, level, facts in reference.events_in(tree):
            found.setdefault(name, reference.Event(name)).merge(level, facts)
    return [" ".join([name, *sorted(one.levels), *sorted(one.facts)]) for name, one in sorted(found.items())]


def messages(trees: Iterable[ast.Module]) -> list[str]:
    """Return each sentence; what is filled in is ``{}``."""
    texts = {text for tree in trees for text in sentences(tree)}
    return sorted(json.dumps(text, ensure_ascii=False)[1:-1] for text in texts)


def sentences(tree: ast.Module) -> Iterator[str]:
    """Yield the texts of a module that have words enough, without docstrings, SQL and patterns."""
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            skipped.add(id(node.value))  # docstrings
        elif isinstance(node, ast.Call) and _called(node) in _NO_SENTENCES:
            skipped.update(map(id, node.args[:1]))
        elif isinstance(node, ast.JoinedStr):
            skipped.update(map(id, node.values))
        if id(node) not in skipped and (text := _text(node)) and _is_sentence(text):
            yield text


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _is_sentence(text: str) -> bool:
    return len(_WORD.findall(text)) >= _LEAST_WORDS and " " in text.strip() and not _SQL.match(text)


def keys(trees: Iterable[ast.Module]) -> list[str]:
    """Return the keys with which dictionaries are made."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Dict):
            found |= {_text(key) for key in node.keys if key is not None}
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            found.add(_text(node.slice))
    return sorted(filter(_KEY.fullmatch, found))


def json_keys() -> list[str]:
    """Return the keys of the examples in the reference, which other tests hold against the commands."""
    found: set[str] = set()
    for page in sorted((ROOT / "docs/reference").glob("json*.md")):
        for block in re.findall(r"^```json\n(.*?)^```$", page.read_text(), re.M | re.S):
            found |= set(re.findall(r'"(\w+)":', block))
    return sorted(found)


def programs() -> Iterator[str]:
    """Yield each program and command with its arguments."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    for name in sorted({name for page in pages for name in _PROGRAMS.findall(page.read_text())}):
        parser = parser_of(name)
        for shown in map(command, [parser, *parsers_of_commands(parser).values()]):
            yield _usage(shown)


def _usage(shown: Command) -> str:
    return " ".join([shown.name, *(f"{'|'.join(one.names)} {one.value}".strip() for one in shown.arguments)])


def labels(trees: Iterable[ast.Module]) -> Iterator[str]:
    """Yield the labels of the table of durable steps; the code must have each."""
    texts = {_text(node) for tree in trees for node in ast.walk(tree)}
    for label in _LABEL.findall((ROOT / "docs/developer/durable-steps.md").read_text()):
        yield label if label in texts or _is_made(label, texts) else f"{label} (not in the code)"


def _is_made(label: str, texts: set[str]) -> bool:
    """Is a label put together, of a beginning and the rest?"""
    return any(text.endswith("-{}") and label.startswith(text[:-2]) for text in texts)


if __name__ == "__main__":
    LISTING.parent.mkdir(exist_ok=True)
    LISTING.write_text(listing())
