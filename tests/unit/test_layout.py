"""The layout's promises: direction of imports, size of executables, knobs shown in the fragments."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from schedd_agent import decisions
from stageout.core.config import KNOBS
from stageout.core.errors import ErrorClass
from stageout.core.reasons import FAILURES, HOLD_SUBCODE_BASE

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs/_ext"))

import descriptions  # noqa: E402
import reference  # noqa: E402

_DAEMONS = {"sandbox_manager", "schedd_agent", "overlay_router", "policy_service", "stageout_web"}

#: part -> parts that it imports, and no others
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "condor": {"core"},
    "daemon": {"core", "condor"},
    "programs": {"daemon"},
    "tuning": {"core"},
    "wire": {"core"},
    "handoff": {"core", "wire"},
    "plugin": {"core", "wire", "handoff"},
    "overlay": {"core", "wire"},
    "movers": {"core", "wire"},
    "model": {"core", "wire", "movers"},
    "protocols": {"core", "wire", "plugin", "overlay"},
    "sampling": {"core", "condor", "tuning"},
    "cli": {"core", "condor", "wire", "handoff", "model", "movers", "overlay", "sampling"},
    "overlay.cli": {"core", "overlay", "cli"},
    "jobs": {"core", "wire", "cli"},
    "testing": {"core"},
    "sandbox_manager": {"core", "condor", "daemon", "wire", "movers", "model"},
    "overlay_router": {"core", "condor", "daemon", "wire", "overlay", "movers"},
    "schedd_agent": {"core", "condor", "daemon", "wire", "model", "overlay"},
    "policy_service": {"core", "condor", "daemon", "wire", "tuning"},
    "stageout_web": {"core", "condor", "daemon", "wire"},
    "tests": {"core", "overlay", "testing"},
}


#: Names at the top of the repository. A run of a daemon must never leave its files here.
_TOP = {
    ".ci", ".editorconfig", ".github", ".gitignore", ".pre-commit-config.yaml", "CHANGELOG.md", "CITATION.cff",
    "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "NOTICE", "README.md",
    "RELEASING.md", "SECURITY.md", "benchmarks", "condor_config.d", "docs", "examples", "overlay_router",
    "plugins", "policy_service", "pyproject.toml", "requirements", "sandbox_manager",
    "schedd_agent", "setup.cfg", "stageout", "stageout_web", "tests", "tools",
}  # fmt: skip


def test_the_top_of_the_repository_holds_these_names_only() -> None:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {name.split("/")[0] for name in listed.split("\0") if name} == _TOP


def _part(module: str) -> str:
    names = module.split(".")
    if names[0] == "stageout":
        # Commands of the overlay stand on those of the command line, which loads them by name.
        return "overlay.cli" if names[1:3] == ["overlay", "cli"] else names[1] if len(names) > 1 else ""
    return names[0]


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            if node.module == "stageout":
                yield from (f"stageout.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""


def _sources() -> list[Path]:
    tops = [ROOT / "stageout", *(ROOT / daemon for daemon in sorted(_DAEMONS))]
    return [path for top in tops for path in sorted(top.rglob("*.py"))]


def test_imports_follow_the_arrows() -> None:
    wrong = []
    used: dict[str, set[str]] = {part: set() for part in ALLOWED}
    for path in [*_sources(), *sorted((ROOT / "tests/harness").rglob("*.py"))]:
        part = _part(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for imported in _imports(path):
            other = _part(imported)
            ours = imported.split(".")[0] in {"stageout", "plugins", "tests", *_DAEMONS}
            if not ours or other in ("", "__version__", part):
                continue
            used[part].add(other)
            if other not in ALLOWED[part]:
                wrong.append(f"{path}: {part} must not import {imported}")
    assert wrong == []
    assert used == ALLOWED, "an arrow that nothing needs is no longer allowed"


def test_one_module_loads_the_bindings_of_htcondor() -> None:
    """Neither an import nor a name in a text (``import_module``, ``find_spec``) is allowed elsewhere."""
    importers = set()
    for path in _sources():
        names = set(_imports(path)) | {
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        if {name.split(".")[0] for name in names if " " not in name} & {"htcondor", "htcondor2", "classad", "classad2"}:
            importers.add(path.relative_to(ROOT).as_posix())
    assert importers == {"stageout/condor/bindings.py"}


def test_the_door_to_htcondor_opens_when_it_is_used() -> None:
    """A command that needs no bindings, and a router without HTCondor, must not wait for them."""
    names = [f"stageout.condor.{path.stem}" for path in sorted((ROOT / "stageout/condor").glob("*.py"))]
    code = f"import sys, stageout.daemon, {', '.join(names)}\nprint({{'htcondor2', 'classad2'}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("name", ["states.py"])
def test_tables_of_states_import_no_io(name: str) -> None:
    found = [path for path in _sources() if path.name == name]
    assert found
    for path in found:
        assert set(_imports(path)) <= {"__future__", "enum", "typing", "dataclasses"}, path


def test_the_oldest_python_can_make_all_classes() -> None:
    """Before 3.11 a named tuple has no second base: the import fails, and no other check says so."""
    tops = [*sorted(_DAEMONS), "stageout"]
    texts = {path: path.read_text() for top in tops for path in (ROOT / top).rglob("*.py")}
    assert [
        path
        for path, text in texts.items()
        if re.search(r"^class \w+\(.*NamedTuple,|^class .*, NamedTuple\)", text, re.M)
    ] == []


def test_folders_of_the_router_form_no_circle() -> None:
    top = ROOT / "overlay_router"
    folders = {path.name for path in top.iterdir() if (path / "__init__.py").exists()}
    needs = {
        folder: {
            name.split(".")[1]
            for path in (top / folder).glob("*.py")
            for name in _imports(path)
            if name.startswith("overlay_router.") and name.split(".")[1] in folders - {folder}
        }
        for folder in folders
    }
    while needs:
        ground = {folder for folder, others in needs.items() if not others}
        assert ground, needs
        needs = {folder: others - ground for folder, others in needs.items() if folder not in ground}


#: folder or module of the sandbox manager -> those that it may import
_MANAGER: dict[str, set[str]] = {
    "rules": set(),
    "custody": {"rules"},
    "scheduling": {"rules", "custody"},
    "delivery": {"rules", "custody", "scheduling"},
    "intake": {"rules", "custody", "scheduling"},
    "pipeline": {"rules", "custody", "scheduling", "delivery", "intake"},
    "report": {"rules", "custody", "scheduling", "delivery", "intake", "pipeline"},
    "daemon": {"rules", "custody", "scheduling", "delivery", "intake", "pipeline", "report"},
}


def test_folders_of_the_manager_follow_the_arrows() -> None:
    wrong = []
    for name, others in _module_graph().items():
        if name.startswith("sandbox_manager."):
            room = name.split(".")[1]
            allowed = {room, *_MANAGER[room]}
            needs = {other.split(".")[1] for other in others if other.startswith("sandbox_manager.")}
            wrong += [f"{name}: {room} must not import {other}" for other in sorted(needs - allowed)]
    assert wrong == []


def test_modules_form_no_circle() -> None:
    """Imports in functions and for type checkers count too. The overlay's inside gets a design of its own."""
    graph = {name: others for name, others in _module_graph().items() if not _is_of_overlay(name)}
    assert circles(graph) == []


def test_a_circle_of_modules_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a"}}
    assert circles(graph) == [{"b", "c"}]
    assert circles({**graph, "d": {"a"}}) == [{"a", "b", "c", "d"}]
    assert circles({**graph, "c": {"d"}}) == []


def _is_of_overlay(module: str) -> bool:
    commands = ("stageout.overlay.cli.files", "stageout.overlay.cli.trees")
    return module.startswith(("overlay_router", "stageout.overlay")) or module in commands


def _module_graph() -> dict[str, set[str]]:
    """Every module with the modules that it imports anywhere in its text."""
    names = {}
    for path in _sources():
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: _modules_in(path, set(names)) - {name} for name, path in names.items()}


def _modules_in(path: Path, known: set[str]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & known or {node.module}
    return found & known


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the modules that reach themselves, those of one circle together."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        waiting = list(graph[start])
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += graph.get(name, ())
        reach[start] = seen
    found: list[set[str]] = []
    for name in graph:
        circle = {other for other in reach[name] if name in reach.get(other, ())}
        if circle and circle not in found:
            found.append(circle)
    return found


def test_plugins_do_not_pay_for_signatures() -> None:
    """Every job waits for the plugin's start: what only daemons need is not loaded there."""
    code = (
        "import sys, stageout.plugin, stageout.handoff.client, stageout.wire.custody\n"
        "import stageout.protocols.curl.protocol\n"
        "print([name for name in sys.modules if name.startswith('cryptography')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


_PURE_BESIDE = ("stageout/core/eta.py", "stageout/core/streams.py", "sandbox_manager/scheduling/deadlines.py")
#: The client of the policy service, beside the algorithms.
_NOT_PURE = {"policy_client", "policy_grants"}


def test_tuning_is_pure() -> None:
    """No sockets, no files, no clock: what these modules import can do none of it."""
    needed = {"stageout.core.errors", "stageout.core.eta", "stageout.core.streams"}
    pure = {"__future__", "collections", "collections.abc", "dataclasses", "itertools", "math", "typing"}
    for name in ("stageout.tuning", "stageout.overlay.tuning"):
        paths = [path for path in (ROOT / name.replace(".", "/")).glob("*.py") if path.stem not in _NOT_PURE]
        assert len(paths) > 1
        for path in [*paths, *(ROOT / beside for beside in _PURE_BESIDE)]:
            for imported in _imports(path):
                ours = imported.startswith(name) or imported in needed
                assert ours or imported in pure, f"{path} imports {imported}"


_FRAGMENTS = [
    ("ep", "20-stageout-ep.conf"),
    ("pilot", "30-stageout-pilot.conf"),
    ("ap", "20-stageout-ap.conf"),
    ("policy", "20-stageout-policy.conf"),
    ("globus", "30-stageout-globus.conf"),
    ("router", "20-stageout-router.conf"),
    ("web", "20-stageout-web.conf"),
]


@pytest.mark.parametrize(("role", "fragment"), _FRAGMENTS)
def test_every_knob_is_shown_with_its_default(role: str, fragment: str) -> None:
    lines = (ROOT / "condor_config.d" / fragment).read_text().splitlines()
    shown = {line.lstrip("# ").split("=")[0].strip(): line.split("=", 1)[1] for line in lines if "=" in line}
    roles = (role,) if role in ("globus", "pilot") else (role, "both")  # these fragments start no daemon
    for knob in KNOBS.values():
        if knob.role in roles:
            assert knob.name in shown, f"{fragment} does not show {knob.name}"
            default = str(knob.default).lower() if isinstance(knob.default, bool) else str(knob.default)
            assert shown[knob.name].split("#")[0].strip() == default, knob.name


def test_sizes_for_people_come_from_one_function() -> None:
    """Units beside a number that code puts in are those of :mod:`stageout.core.units`: powers of 1000."""
    unit = re.compile(r" ?([kKMGT]i?B)\b")
    for path in _sources():
        if path.relative_to(ROOT).as_posix() == "stageout/core/units.py":
            continue
        for text in [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.JoinedStr)]:
            for before, part in zip(text.values, text.values[1:]):
                if isinstance(before, ast.FormattedValue) and isinstance(part, ast.Constant):
                    assert not unit.match(str(part.value)), f"{path}: {ast.unparse(text)}"


def test_labels_of_durable_steps_are_those_of_the_document() -> None:
    document = set(re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "docs/developer/durable-steps.md").read_text(), re.M))
    code = "\n".join(path.read_text() for path in _sources())
    assert not {label for label in document if f'"{label}"' not in code}
    names = "step|write_file|make_dir|link|rename|unlink|sync|commit"
    steps = set(re.findall(rf'durable\.(?:{names})\(\s*"([a-z-]+)"', code))
    assert len(steps) > 5
    assert steps <= document


def test_decisions_are_numbered_one_by_one() -> None:
    pages = sorted((ROOT / "docs/developer/decisions").glob("*.md"))
    assert [page.name[:5] for page in pages] == [f"{number:04}-" for number in range(1, len(pages) + 1)]
    for page in pages:
        assert page.read_text().startswith(f"# {page.name[:4]}. "), page.name


def test_rows_of_tables_have_all_cells() -> None:
    """A bar that is not escaped begins another cell, and what stands behind the last one is not shown."""
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for table in re.findall(r"(?:^\|.*\n)+", page.read_text(), re.M):
            cells = {row: len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
            assert len(set(cells.values())) == 1, f"{page}: {max(cells, key=lambda row: cells[row])}"


@pytest.mark.parametrize(
    ("folder", "page"), [("overlay_router", "overlay.md"), ("stageout/overlay", "overlay-client.md")]
)
def test_every_module_of_the_overlay_is_explained(folder: str, page: str) -> None:
    page = (ROOT / "docs/developer" / page).read_text()
    modules = {path.stem for path in (ROOT / folder).rglob("*.py")} - {"__init__"}
    assert not {name for name in modules if f"`{name}`" not in page}


@pytest.mark.parametrize("folder", ["docs", "docs/developer"])
def test_every_page_is_in_a_table_of_contents(folder: str) -> None:
    docs = ROOT / folder
    listed = set(re.findall(r"^- \[[^]]+\]\((.+)\.md\)$", (docs / "index.md").read_text(), re.M))
    pages = {path.relative_to(docs).with_suffix("").as_posix() for path in docs.rglob("*.md")}
    assert {name for name in pages if not name.startswith(("decisions/", "changes/", "developer/"))} - {
        "index"
    } <= listed


def test_every_event_is_in_the_reference_with_a_description() -> None:
    page = (ROOT / "docs/reference/events.md").read_text()
    described = {key.rpartition("/")[2] for key in descriptions.EVENTS}
    found = {name for section in reference.EVENT_SOURCES for name in reference.events_of(section)}
    assert not [name for name in found if f"</a>`{name}`" not in page]
    assert found == described, "describe new events in docs/_ext/descriptions.py, and remove those that are gone"


def test_every_attribute_and_class_of_errors_has_a_description() -> None:
    assert reference.attribute_names() == set(descriptions.ATTRIBUTES), "docs/_ext/descriptions.py describes them"
    assert set(FAILURES) == set(ErrorClass), "stageout/core/reasons.py describes them"


def test_messages_are_those_of_the_daemons() -> None:
    """Every phrase of the first columns stands in the code, as it is written there, and every event is one."""
    rows = re.findall(r"^\| (.*?) \|", (ROOT / "docs/administrator/messages.md").read_text(), re.M)
    rows += re.findall(r"^\| (`[a-z].*?) \|", (ROOT / "docs/administrator/operations.md").read_text(), re.M)
    seen = {word for row in rows for word in re.findall(r"`([^`]+)`", row)}
    code = "\n".join(path.read_text() for path in _sources())
    assert len(seen) > 25
    assert not {word for word in seen if (f'"{word}"' if re.fullmatch("[a-z]+(-[a-z]+)+", word) else word) not in code}


def test_events_that_advice_names_are_events() -> None:
    sources = [*(ROOT / "stageout").rglob("*.py"), *(ROOT / "docs" / "pilot").glob("*.md")]
    text = "\n".join(path.read_text() for path in sources)
    found = re.findall(r"Log\b[\w ]* \(([a-z-]+)\)|'([a-z-]+)' in \w+Log\b|log has `([a-z-]+)", text)
    named = {name for names in found for name in names if name}
    [shown] = re.findall(r"grep -E ' \((.*)\) '", (ROOT / "examples/glidein/pilot.sh").read_text())
    events = {name for section in reference.EVENT_SOURCES for name in reference.events_of(section)}
    assert len(named) > 4
    assert not {*named, *shown.split("|")} - events


def test_what_a_held_job_asks_for_is_said_of_every_class_of_errors() -> None:
    page = (ROOT / "docs/reference/hold-codes.md").read_text()
    rows = re.findall(r'^\| <a id="hold-(20\d{3})"></a>\*\*(20\d{3})\*\* \| (.+?) \| (.+?) \|$', page, re.M)
    assert sorted(int(code) for code, *_ in rows) == sorted(HOLD_SUBCODE_BASE + kind.code for kind in ErrorClass)
    assert all(code == anchor for code, anchor, *_ in rows), "hold reasons link to the anchors"
    assert all(text.endswith(".") for *_, happened, action in rows for text in (happened, action))
    assert decisions._HOLD_CODES_PAGE == "reference/hold-codes.html", "that page, as Sphinx names it"
    for other in set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs/reference/hold-codes.md"}:
        assert not re.search(r"^\| \**20\d{3}\b", other.read_text(), re.M), f"{other}: this table is in hold-codes.md"


#: Attributes of objects of a library that have no other way to be set.
_OF_LIBRARIES = {"text_factory", "minimum_version", "content_type", "charset"}


def _set_from_outside(path: Path) -> list[str]:
    """Return the attributes that a module sets on objects of other modules' classes.

    A module may fill the records that its own classes describe: their attributes are known by their names.
    """
    tree = ast.parse(path.read_text())
    own = {
        node.target.id
        for made in ast.walk(tree)
        if isinstance(made, ast.ClassDef)
        for node in made.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    found = []
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        for target in targets:
            parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
            for part in parts:
                if not isinstance(part, ast.Attribute) or part.attr in _OF_LIBRARIES:
                    continue
                base = part.value
                is_record = isinstance(base, (ast.Name, ast.Call)) and part.attr in own
                if not is_record and not (isinstance(base, ast.Name) and base.id == "self"):
                    found.append(f"{path.relative_to(ROOT)}: {ast.unparse(part)}")
    return found


@pytest.mark.parametrize("daemon", ["sandbox_manager", "schedd_agent", "policy_service", "stageout_web"])
def test_no_object_sets_attributes_of_another(daemon: str) -> None:
    """An object gets all that it needs by its constructor, and learns of changes by a method of its own."""
    found = [item for path in sorted((ROOT / daemon).rglob("*.py")) for item in _set_from_outside(path)]
    assert found == []


def test_an_attribute_that_is_set_from_outside_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "m.py"
    path.write_text("class Record:\n    size: int\n\nfile.size = 1\nself.name = 2\n")
    assert _set_from_outside(path) == []
    path.write_text("def wire(self, intake):\n    self.intake.hook = 1\n    intake.hook, intake.other = 1, 2\n")
    assert _set_from_outside(path) == ["m.py: self.intake.hook", "m.py: intake.hook", "m.py: intake.other"]


#: Changes of the ledger's tables.
_WRITES = re.compile(
    r"(UPDATE (sandboxes|tickets|files|fences|meta|orders_done) SET (\w|$)"
    r"|(INSERT (OR \w+ )?INTO|DELETE FROM) (sandboxes|tickets|files|fences|meta|orders_done)\b)"
)
#: Write ledgers of other versions, databases of routers, and the examples below.
_OTHER_TABLES = {"test_ledger_versions.py", "test_overlay_migrations.py", "test_layout.py"}


def _written_by_sql(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    damages = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "damage"]
    allowed = {id(node) for call in damages for node in ast.walk(call)}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [f"{path.name}:{node.lineno}" for node in texts if id(node) not in allowed and _WRITES.search(node.value)]


def test_tests_bring_about_states_by_the_ledgers_own_functions() -> None:
    """A state that the product cannot reach proves nothing. tests/unit/ledger_steps.py has the steps, and damage()."""
    paths = [path for name in ("unit", "pool") for path in sorted((ROOT / "tests" / name).glob("*.py"))]
    assert len(paths) > 300
    assert [found for path in paths if path.name not in _OTHER_TABLES for found in _written_by_sql(path)] == []


def test_a_state_that_is_set_by_sql_is_found(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    lines = [
        'execute("UPDATE files SET state = 1")',
        'damage(db, "UPDATE files SET state = 1")',
        'f"UPDATE files SET {x}"',
    ]
    path.write_text("\n".join([*lines, 'run("INSERT INTO tickets VALUES (1)")', 'run("SELECT state FROM files")']))
    assert _written_by_sql(path) == ["m.py:1", "m.py:3", "m.py:4"]
