"""Draw new mutations of the product and try them: ``make mutants DRAWN=30 SEED=7 SINCE=v1.0 MINUTES=60``.

The list in ``mutations.txt`` has bugs that somebody thought of. Drawn ones show what the tests see of the others: a
condition that is dropped, a comparison that is inverted, a statement that is left out, two neighbouring steps that are
swapped. The tests run that call the function, the nearest first, by import. The last lines have the share that they
found, folder by folder.
"""

from __future__ import annotations

import ast
import difflib
import random
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from tests.mutants.mutations import Mutation
from tests.mutants.reached import Caller, Reached
from tests.mutants.run import HUNG, ROOT, copy_checkout, made, run_tests

FOLDERS = ("stageout", "sandbox_manager", "schedd_agent", "policy_service", "overlay_router", "stageout_web")
#: Of 100 drawn mutations, these must be found.
LEAST_SHARE = 0.97
_TESTS = ("tests/unit", "tests/curl", "tests/globus", "tests/gsiftp", "tests/sampling", "tests/conformance")
#: At most so many tests for one mutation, which took at most so long; from each file some at once.
_MOST_TESTS, _MOST_SECONDS, _AT_ONCE = 200, 60.0, 12
#: Files of tests that run again for a function that none of them called: it may be new, or have moved.
_NEAREST = 12
#: A mutation that hangs is waited for: seconds for the start, and times what the tests took.
_START_S, _SLOWER = 30.0, 3.0
_TIMEOUT_S = 1200.0
#: Steps of imports to a test that imports nothing of a module.
_FAR = 9
_CRASHES = (
    "tests/crash/test_simulation.py::test_each_order_meets_runs_in_each_state",
    "tests/crash/test_simulation.py::test_schedules_break_no_promise",
)
#: All daemons and programs of an access point and a node, for one job.
_POOL = ("tests/pool/test_main_job.py::test_output_is_delivered_and_the_job_leaves_as_completed",)
_COMMANDS = ("tests/pool/test_cli_pool.py",)
#: Tests that take long and see much: part of the product -> those that drive it.
_DRIVEN = {
    "sandbox_manager": (*_POOL, *_CRASHES),
    "schedd_agent": (*_POOL, *_CRASHES),
    "stageout/core": (*_POOL, *_CRASHES),
    "stageout/wire": (*_POOL, *_CRASHES),
    "stageout/cli/condor.py": _COMMANDS,
    "stageout/cli/explain": ("tests/pool/test_explain_pool.py",),
    "stageout/cli/node.py": _COMMANDS,
    "stageout/cli/wait.py": _COMMANDS,
    "stageout/cli/watcher.py": _COMMANDS,
    "stageout/condor": _POOL,
    "stageout/daemon.py": _POOL,
    "stageout/handoff": _POOL,
    "stageout/movers": _POOL,
    "stageout/plugin": _POOL,
    "overlay_router": ("tests/overlay/test_first_overlay.py", "tests/overlay/test_copies.py"),
    "stageout/overlay": ("tests/overlay/test_first_overlay.py", "tests/overlay/test_relays.py"),
    "stageout/protocols/curl": ("tests/curl/test_local.py", "tests/curl/test_s3.py", "tests/curl/test_webdav.py"),
    "stageout/protocols/gsiftp": ("tests/gsiftp/test_gsiftp.py",),
}
#: Tests that read the text of the code would notice the change, and no fault.
_READERS = {
    "test_documents", "test_golden", "test_language", "test_layout", "test_mutants", "test_trust_table",
    # of tools
    "test_changelog", "test_drawn_mutants", "test_figures", "test_figures_schedule", "test_run_tests", "test_seams",
}  # fmt: skip
_INVERTED: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=", ast.NotEq: "==", ast.Lt: ">=", ast.GtE: "<", ast.Gt: "<=", ast.LtE: ">",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
#: Statements whose absence is no fault of what the product does: lines of the log, and when memory is collected.
_TALK = re.compile(r"(await )?((\w+\.)*_?log(\.\w+)?\(|(logging|warnings|gc)\.)")
_NOTIFIES = re.compile(r"\.notify(_all)?\(\)$")
#: Options, settings and metrics have names: two of different names stand in any order.
_NAMES = re.compile(r"((\w+\.)+(add_argument|put|put_all|put_each|set_?\w+)\([^,()]*|add_\w+)")

#: Two collections are two things, wherever what they get comes from.
_FILLS = re.compile(r"([\w.]+)\.(?:add|append|clear|discard|extend|pop|remove|update)\(")

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


class Drawn(NamedTuple):
    """A place that may be changed: lines and columns as in the syntax tree, and the text that comes there."""

    kind: str
    function: str
    begin: tuple[int, int]
    end: tuple[int, int]
    text: str


def places(source: str) -> list[Drawn]:
    """Return all mutations of a module."""
    found: list[Drawn] = []
    for function in (node for node in ast.walk(ast.parse(source)) if isinstance(node, _Function)):
        for node in (function, *_own(function)):
            for kind, change in _KINDS.items():
                found += [Drawn(kind, function.name, *one) for one in change(node, source)]
    return found


def _own(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions in it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, _Function):
            yield child
            yield from _own(child)


_Change = tuple[tuple[int, int], tuple[int, int], str]


def _span(node: ast.AST) -> tuple[tuple[int, int], tuple[int, int]]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]


def _code(node: ast.AST, source: str) -> str:
    (first, begin), (last, end) = _span(node)
    lines = _lines(source)[first - 1 : last]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return b"".join(lines).decode()


@lru_cache(maxsize=1)
def _lines(source: str) -> list[bytes]:
    """Return the lines of a module as bytes: the syntax tree counts these."""
    return [line.encode() for line in source.splitlines(keepends=True)]


def _dropped(node: ast.AST, source: str) -> Iterator[_Change]:
    """A condition is dropped: it holds always, or never, or without one of its parts."""
    if isinstance(node, ast.BoolOp):
        word = " and " if isinstance(node.op, ast.And) else " or "
        for left_out in node.values:
            rest = [f"({_code(one, source)})" for one in node.values if one is not left_out]
            yield (*_span(node), f"({word.join(rest)})")
    elif isinstance(node, ast.If) and not isinstance(node.test, ast.BoolOp):
        yield (*_span(node.test), "True")
        yield (*_span(node.test), "False")


def _inverted(node: ast.AST, source: str) -> Iterator[_Change]:
    """A comparison is inverted."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = _code(node.left, source), _code(node.comparators[0], source)
        yield (*_span(node), f"(({left}) {_INVERTED[type(node.ops[0])]} ({right}))")


def _left_out(node: ast.AST, source: str) -> Iterator[_Change]:
    """A statement is left out that does something: a call, a change of an attribute or of an item."""
    if _does_something(node, source):
        yield (*_span(node), "pass")


def _does_something(node: ast.AST, source: str) -> bool:
    if isinstance(node, ast.Expr):
        is_call = isinstance(node.value, (ast.Call, ast.Await))
        return is_call and not _TALK.match(_code(node, source))
    if isinstance(node, ast.Assign):
        return all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets)
    return isinstance(node, (ast.AugAssign, ast.Delete))


def _swapped(node: ast.AST, source: str) -> Iterator[_Change]:
    """Two neighbouring steps are swapped whose order may count: both wait, or change the disk, or have to do with the
    same thing.

    Not drawn are those that could as well stand the other way round: steps with different things, lines of the log, who
    is told while the lock is held, two options, settings or metrics of different names, and changes of two collections.
    """
    for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
        for first, second in zip(body, body[1:]) if isinstance(body, list) else ():
            if _is_step(first, source) and _is_step(second, source) and _belong_together(first, second, source):
                space = " " * first.col_offset
                text = f"{_code(second, source)}\n{space}{_code(first, source)}"
                yield _span(first)[0], _span(second)[1], text


def _is_step(node: ast.AST, source: str) -> bool:
    return _is_durable(node, source) or (isinstance(node, ast.Expr) and _does_something(node, source))


def _is_durable(node: ast.AST, source: str) -> bool:
    return isinstance(node, ast.With) and "durable.step(" in _code(node.items[0].context_expr, source)


def _belong_together(first: ast.AST, second: ast.AST, source: str) -> bool:
    texts = [_code(one, source) for one in (first, second)]
    if any(_NOTIFIES.search(text) for text in texts):
        return False  # who is told looks when the lock is free
    names = [_NAMES.match(text) for text in texts]
    if names[0] and names[1] and names[0][0] != names[1][0]:
        return False
    filled = [_FILLS.match(text) for text in texts]
    if filled[0] and filled[1] and filled[0][1] not in texts[1] and filled[1][1] not in texts[0]:
        return False
    for is_of_kind in (_is_durable, _waits):
        if all(is_of_kind(one, source) for one in (first, second)):
            return True
    pairs = ((one, other) for one in _things(first) for other in _things(second) if _same(one, other))
    return any(one.partition(".")[0] not in _modules(source) for one, _ in pairs)


def _same(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def _waits(node: ast.AST, source: str) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Await)


def _things(node: ast.AST) -> set[str]:
    """Return the variables that a statement names: with an attribute where it reads that, or where it is the object."""
    called = {id(one.func) for one in ast.walk(node) if isinstance(one, ast.Call)}
    found, parts = set(), set()
    for one in ast.walk(node):  # from the outside to the inside
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name):
            if one.value.id == "self" or (id(one) not in called and id(one) not in parts):
                found.add(f"{one.value.id}.{one.attr}")
                parts.add(id(one.value))
        elif isinstance(one, ast.Attribute) and (id(one) in called or id(one) in parts):
            parts.add(id(one.value))
        elif isinstance(one, ast.Name) and id(one) not in parts:
            found.add(one.id)
    return found - {"self"}


@lru_cache(maxsize=1)
def _modules(source: str) -> frozenset[str]:
    """Return the names that a module imports, other than that of durable steps."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {(one.asname or one.name).partition(".")[0] for node in nodes for one in node.names}
    return frozenset(names - {"durable"})


_KINDS: dict[str, Callable[[ast.AST, str], Iterable[_Change]]] = {
    "condition dropped": _dropped,
    "comparison inverted": _inverted,
    "statement left out": _left_out,
    "steps swapped": _swapped,
}


def mutated(source: str, drawn: Drawn) -> str:
    """Return the module with the change."""
    lines = _lines(source)
    (first, begin), (last, end) = drawn.begin, drawn.end
    head, tail = lines[first - 1][:begin], lines[last - 1][end:]
    return b"".join([*lines[: first - 1], head, drawn.text.encode(), tail, *lines[last:]]).decode()


# ---- what is drawn ---------------------------------------------------------------------------------------------------


def changed_lines(since: str) -> dict[str, set[int]]:
    """Return the lines of each product file that differ from a commit."""
    found: dict[str, set[int]] = {}
    diff = subprocess.run(
        ["git", "diff", "-U0", since, "--", *FOLDERS], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    name = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            name = line[6:]
        elif header := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            begin, count = int(header[1]), int(header[2] or 1)
            found.setdefault(name, set()).update(range(begin, begin + count))
    return found


def draw(number: int, seed: int, since: str = "", words: Sequence[str] = ()) -> list[tuple[str, Drawn]]:
    """Draw places of the product, each kind as often as the others.

    :param words: only files with one of these in their paths.
    """
    lines = changed_lines(since) if since else None
    by_kind: dict[str, list[tuple[str, Drawn]]] = {kind: [] for kind in _KINDS}
    for path in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        name = str(path.relative_to(ROOT))
        if (lines is None or name in lines) and (not words or any(word in name for word in words)):
            source = path.read_text()
            for one in places(source):
                if lines is None or not lines[name].isdisjoint(range(one.begin[0], one.end[0] + 1)):
                    by_kind[one.kind].append((name, one))
    chance = random.Random(seed)
    kinds = [kind for kind in by_kind if by_kind[kind]]
    found: dict[tuple[str, Drawn], None] = {}
    for at in range(20 * number):
        if kinds and len(found) < number:
            found[chance.choice(by_kind[kinds[at % len(kinds)]])] = None
    return list(found)


# ---- tests that are near ---------------------------------------------------------------------------------------------


def imports(source: str) -> set[str]:
    """Return the modules that a module names in its imports; a name that is imported may be a module, too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
    return found


class Nearness:
    """The tests near a module: those that import it, then those that import a module that does."""

    def __init__(self) -> None:
        product = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
        tests = [path for folder in _TESTS for path in (ROOT / folder).glob("*.py") if path.stem not in _READERS]
        self._imports = {_module(path): imports(path.read_text()) for path in [*product, *tests]}
        self._texts = {_module(path): path.read_text() for path in tests if path.stem.startswith("test_")}

    def files(self, file: str, function: str) -> tuple[str, ...]:
        """Return test files, the nearest first, then those that import nothing of it."""
        reached = {_module(ROOT / file): 0}
        for distance in range(1, 4):
            known = set(reached)
            for name, named in self._imports.items():
                if name not in reached and known & named:
                    reached[name] = distance
        words = {function.strip("_"), *Path(file).stem.split("_")}

        def key(name: str) -> tuple[bool, int, int, str]:
            distance = reached.get(name, _FAR)
            return distance > 1, -sum(word in self._texts[name] for word in words), distance, name

        return tuple(f"{name.replace('.', '/')}.py" for name in sorted(self._texts, key=key))


def chosen(by_file: dict[str, list[Caller]], order: Sequence[str]) -> list[Caller]:
    """Return the tests to run: in turns some of each file, the nearest file first, while there is time."""
    turns = sorted(
        (number // _AT_ONCE, order.index(file), number, test)
        for file, tests in by_file.items()
        for number, test in enumerate(tests)
    )
    found: list[Caller] = []
    left_s = _MOST_SECONDS
    for *_, test in turns:
        if test.seconds <= left_s and len(found) < _MOST_TESTS:
            left_s -= test.seconds
            found.append(test)
    return found


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


# ---- the run ---------------------------------------------------------------------------------------------------------


_NO_TEST = "no test calls it that passes without it"


class Judge:
    """Tries mutations in a copy of the checkout.

    :param kept: where it is kept which tests call what.
    """

    def __init__(self, place: Path, kept: Path, near: Nearness) -> None:
        self._place = place
        self._near = near
        self._reached = Reached(place, kept, FOLDERS)
        self._sound: dict[str, bool] = {}

    def verdict(self, name: str, file: str, one: Drawn) -> str:
        """Return "caught", "survived", or what went wrong."""
        source = (self._place / file).read_text()
        mutation = Mutation(name, file, (), source, mutated(source, one))
        order = self._near.files(file, one.function)
        self._reached.look(order)
        tests = chosen(self._reached.tests(file, one.function, order), order)
        if not tests:
            self._reached.look_again(order[:_NEAREST])
            tests = chosen(self._reached.tests(file, one.function, order), order)
        timeout_s = _START_S + _SLOWER * sum(test.seconds for test in tests)
        driving = [name for place, names in _DRIVEN.items() if file.startswith(place) for name in names]
        outcome = _NO_TEST
        for names, limit_s in (([test.name for test in tests], timeout_s), (driving, _TIMEOUT_S)):
            names = [name for name in names if self._sound.get(name, True)]
            while names:
                with made(self._place, mutation):
                    word, failed = run_tests(self._place, names, limit_s)
                if word == HUNG:
                    in_time = run_tests(self._place, names, limit_s).word == "survived"
                    outcome = "caught" if in_time else "its tests take too long without it, too"
                    break
                if all(self._is_sound(test) for test in failed):
                    outcome = word
                    break
                print(f"fails without a mutation: {', '.join(failed)}", flush=True)
                names = [name for name in names if self._sound.get(name, True)]
            if outcome == "caught":
                break
        return outcome

    def _is_sound(self, test: str) -> bool:
        """Look whether a test passes without any mutation: else its failure says nothing."""
        if test not in self._sound:
            self._sound[test] = run_tests(self._place, [test], _TIMEOUT_S).word == "survived"
        return self._sound[test]


def try_drawn(number: int, seed: int, since: str = "", minutes: float = 0.0, words: Sequence[str] = ()) -> int:
    """Draw and try. Returns 1 when fewer than :data:`LEAST_SHARE` are found. :param minutes: 0: until all are tried."""
    begin_s = time.monotonic()
    tried: Counter[str] = Counter()
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="stageout-drawn-") as directory:
        place = Path(directory)
        place.chmod(0o755)  # programs of tests may be other users
        copy_checkout(place)
        judge = Judge(place, ROOT / "out/reached", Nearness())
        for file, one in draw(number, seed, since, words):
            if minutes and time.monotonic() - begin_s > 60 * minutes:
                break
            source = (place / file).read_text()
            after = mutated(source, one)
            try:
                ast.parse(after)
            except SyntaxError:
                continue
            name = f"{file}:{one.begin[0]} {one.function}, {one.kind}"
            one_begin_s = time.monotonic()
            outcome = judge.verdict(name, file, one)
            folder = str(Path(file).parent)
            tried[folder] += 1
            found[folder] += outcome == "caught"
            print(f"{outcome}: {name} ({time.monotonic() - one_begin_s:.0f} s)", flush=True)
            if outcome != "caught":
                diff = difflib.unified_diff(source.splitlines(), after.splitlines(), lineterm="", n=1)
                print("\n".join(f"    {line}" for line in list(diff)[2:]), flush=True)
    for folder in sorted(tried):
        print(f"{folder}: {found[folder]} of {tried[folder]}")
    print(f"drawn: {sum(found.values())} of {sum(tried.values())} found with seed {seed}")
    return int(sum(found.values()) < LEAST_SHARE * sum(tried.values()))
