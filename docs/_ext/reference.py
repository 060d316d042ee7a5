"""Reference tables in Markdown, read from the code: knobs, attributes, log events, codes, programs.

The table of decisions is read from their pages.

A line ``<!-- reference: NAME ARGUMENT -->`` in a page begins a table, and the line :data:`END` ends it. The command
``make reference`` prints all tables anew, and a test compares them with the code.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from descriptions import ATTRIBUTES, EVENTS, EXTRA_KNOBS, FILE_RECORD, STATE_MEANINGS
from programs import Argument, Command, command, parser_of, parsers_of_commands, sentence

from stageout.cli.exits import Exit
from stageout.cli.verdict import UNREPORTED
from stageout.core.config import KNOBS, Knob, PathKnob
from stageout.core.errors import Advice, ErrorClass
from stageout.core.metrics import METRICS
from stageout.core.reasons import FAILURES, HOLD_SUBCODE_BASE, REFUSALS
from stageout.core.states import PLAIN, State
from stageout.core.trust import SOURCES, AtSubmission
from stageout.protocols.curl import settings as curl
from stageout.testing.conformance_rules import RULES

ROOT = Path(__file__).resolve().parents[2]

#: Line that ends a table in a page.
END = "<!-- end of reference -->"
_TABLE = re.compile(rf"^(<!-- reference: (\S+)(?: (\S+))? -->)\n.*?^{END}$", re.M | re.S)
_ATTRIBUTE = re.compile(r"\bStageOut[A-Z]\w*")
#: Names that begin like an attribute: transforms of the access point, types of ads, and a probe of the doctor.
_NO_ATTRIBUTES = frozenset({
    "StageOutDefault_", "StageOutDefault_in", "StageOutDefault_out", "StageOutInit", "StageOutRetry", "StageOutWhy",
    "StageOutFactory", "StageOutFile", "StageOutPolicy", "StageOutRouter",
    "StageOutAgent", "StageOutOrders", "StageOutOrderBucket", "StageOutProbe", "StageOutRenewal", "StageOutSuccessor",
})  # fmt: skip

#: Section of the events -> folders whose code writes them.
EVENT_SOURCES: dict[str, tuple[str, ...]] = {
    "sandbox-manager": ("sandbox_manager", "stageout/tuning"),
    "schedd-agent": ("schedd_agent",),
    "router": ("overlay_router",),
    "policy-service": ("policy_service",),
    "web": ("stageout_web",),
    "shared": (
        "stageout/core",
        "stageout/condor",
        "stageout/daemon.py",
        "stageout/movers",
        "stageout/overlay",
        "stageout/wire",
        "stageout/sampling",
    ),
}
_SAID = ("INFO", "ERROR")
_LEVELS = {"event": "INFO", "warn": "WARNING", "error": "ERROR"}
#: Functions that write an event whose name they are given -> ends that they add to the name.
_INDIRECT = {"ThrottledLog": ("", "-repeated"), "_try": ("",)}

EXIT_MEANINGS = {
    Exit.OK: "The command did what was asked: output delivered, request carried out, installation healthy.",
    Exit.FAILED: "The command failed, a delivery failed or was cancelled, a request was refused, or a check failed.",
    Exit.TIMED_OUT: "The time limit passed before an answer or the delivery.",
    Exit.UNKNOWN_JOB: "The job is neither in the queue nor in the history.",
    Exit.USAGE: "The command line is wrong.",
    Exit.UNAVAILABLE: "A daemon does not answer. The same command may work later.",
}
_ADVICE = {
    Advice.RETRY_HERE: "stageout tries again",
    Advice.RETRY_ELSEWHERE: "stageout tries again; another node may succeed",
    Advice.NEEDS_CREDENTIAL: "renew the credential",
    Advice.NEEDS_PERSON: "a person must act",
}


@dataclasses.dataclass
class Event:
    """One log event: the levels and facts of all places that write it."""

    name: str
    levels: set[str] = dataclasses.field(default_factory=set)
    facts: list[str] = dataclasses.field(default_factory=list)

    def merge(self, level: str, facts: Iterable[str]) -> None:
        """Add one place that writes the event."""
        self.levels.add(level)
        self.facts += [fact for fact in facts if fact not in self.facts]


def fill(text: str) -> str:
    """Return a page with its tables as the code is now.

    :raises KeyError: for a name that :data:`TABLES` does not have.
    """
    return _TABLE.sub(lambda found: f"{found[1]}\n\n{TABLES[found[2]](found[3] or '')}\n\n{END}", text)


def written(text: str) -> str:
    """Return a page without its tables."""
    return _TABLE.sub("", text)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _literal(text: object) -> str:
    """Program text for a page, without anything that Markdown would take for markup."""
    return re.sub(r"([*_<>\[\]{}$`~])", r"\\\1", str(text))


# ---- knobs -----------------------------------------------------------------------------------------------------------


def knobs(role: str) -> str:
    """Return the knobs of one role: "ep", "pilot", "ap", "policy", "router", "globus", "web" or "both"."""
    rows = [[_anchor(f"`{knob.name}`", knob.name), _default(knob.default), _kind(knob),
             f"{_sentence(knob.doc)} {_sentence(knob.who)}"]
            for knob in KNOBS.values() if knob.role == role]  # fmt: skip
    rows += [[_anchor(f"`{name}`", name), _default(default), "text", doc]
             for name, (where, default, doc) in EXTRA_KNOBS.items() if where == role]  # fmt: skip
    return _table(["knob", "default", "kind and bounds", "description"], rows)


def curl_knobs(_: str) -> str:
    """Return the knobs of the curl plugin, which are fields of a class and no part of HTCondor's configuration."""
    docs = dict(re.findall(r":param (\w+): (.+?)(?=\n\s*:param|\s*\Z)", inspect.getdoc(curl.Settings) or "", re.S))
    rows = []
    for item in dataclasses.fields(curl.Settings):
        default = getattr(item.default, "value", item.default)
        name = f"STAGEOUT_{item.name.upper()}"
        rows.append([_anchor(f"`{name}`", name), _default(default), _sentence(docs[item.name])])
    return _table(["knob", "default", "description"], rows)


def _default(value: object) -> str:
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`" if value != "" else "(empty)"


def _kind(knob: Knob) -> str:
    if knob.choices:
        return "one of " + ", ".join(f"`{word}`" for word in knob.choices)
    if isinstance(knob, PathKnob):
        return "absolute path"
    if isinstance(knob.default, bool):
        return "`true` or `false`"
    if isinstance(knob.default, str):
        return "text"
    bounds = [f"at least {knob.least:g}"] if knob.least is not None else []
    bounds += [f"at most {knob.most:g}"] if knob.most is not None else []
    return ", ".join(["integer" if isinstance(knob.default, int) else "number", *bounds])


def _sentence(text: str) -> str:
    return _literal(sentence(text))


def _anchor(shown: str, name: str) -> str:
    """Text with an anchor before it, which Sphinx (``stageout_docs.py``) and code hosts understand."""
    return f'<a id="{name.lower().replace("_", "-")}"></a>{shown}'


# ---- ClassAd attributes ----------------------------------------------------------------------------------------------


def attribute_names() -> set[str]:
    """All attributes that product code or a configuration fragment names."""
    folders = ["stageout", "sandbox_manager", "schedd_agent"]
    texts = [path.read_text() for name in folders for path in (ROOT / name).rglob("*.py")]
    texts += [path.read_text() for path in (ROOT / "condor_config.d").glob("*.conf")]
    return {name for text in texts for name in _ATTRIBUTE.findall(text)} - _NO_ATTRIBUTES


def attributes(ad: str) -> str:
    """Return the attributes of one kind of ad: "job", "slot", "report", "plugin" or "result"."""
    known = attribute_names()
    rows = [[_anchor(f"`{name}`", name), kind, text] for name, (where, kind, text) in sorted(ATTRIBUTES.items())
            if where == ad and name in known]  # fmt: skip
    if ad == "job":  # an attribute that nobody has described yet must not be missing from the reference
        rows += [[f"`{name}`", "", "(not described yet)"] for name in sorted(known - set(ATTRIBUTES))]
    return _table(["attribute", "type", "description"], rows)


def trust(kind: str) -> str:
    """Return what the product reads at one place: a value of :class:`stageout.core.trust.Kind`."""
    sources = [source for source in SOURCES if source.kind.value == kind]
    rows = [
        [", ".join(f"`{name}`" for name in source.names), ", ".join(part.value for part in source.readers),
         source.writers, source.when_false]
        for source in sources
    ]  # fmt: skip
    header = ["read", "by", "may be written by", "if it is false"]
    if any(source.at_submission is not AtSubmission.OTHERS for source in sources):
        header.append("in a submit file")
        ours = [source.at_submission is not AtSubmission.OTHERS for source in sources]
        rows = [[*row, source.at_submission.value if one else ""] for row, source, one in zip(rows, sources, ours)]
    return _table(header, rows)


def file_record(_: str) -> str:
    """Return the attributes of a file's record on the access point."""
    rows = {name: [f"`{name}`", *text] for name, text in FILE_RECORD.items()}
    for name, (where, kind, text) in ATTRIBUTES.items():
        if where == "history":
            rows[name] = [_anchor(f"`{name}`", name), kind, text]
    return _table(["attribute", "type", "description"], [row for _, row in sorted(rows.items())])


# ---- log events ------------------------------------------------------------------------------------------------------


def events_in(tree: ast.Module) -> Iterator[tuple[str, str, list[str]]]:
    """Yield name, level and facts of each log event that a module writes."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name in _LEVELS and call.args:
            level = ast.unparse(call.args[1]).rpartition(".")[2] if len(call.args) > 1 else _LEVELS[name]
            facts = [word.arg for word in call.keywords if word.arg]
            for found in _names_of(call.args[0], tree):
                yield found, level, facts
        elif name == "say" and call.args and call.keywords:  # log.event or log.error, as the end is
            for found in _constants(call.args[0]):
                yield from ((found, level, [word.arg for word in call.keywords if word.arg]) for level in _SAID)
        elif name in _INDIRECT:
            for argument in call.args:
                for found in _constants(argument):
                    yield from (
                        (found + end, "WARNING" if "failed" in found else "INFO", []) for end in _INDIRECT[name]
                    )


def _names_of(argument: ast.expr, tree: ast.Module) -> list[str]:
    """Names of an event: written there, chosen there, or chosen by an assignment in the same module."""
    if not isinstance(argument, ast.Name):
        return _constants(argument)
    chosen = (node.value for node in ast.walk(tree) if isinstance(node, ast.Assign)
              if any(isinstance(target, ast.Name) and target.id == argument.id for target in node.targets))  # fmt: skip
    return [name for value in chosen if isinstance(value, ast.IfExp) for name in _constants(value)]


def _constants(node: ast.expr) -> list[str]:
    if isinstance(node, ast.IfExp):
        return [*_constants(node.body), *_constants(node.orelse)]
    is_name = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return [node.value] if is_name and re.fullmatch(r"[a-z]+(-[a-z]+)*", node.value) else []  # type: ignore[attr-defined]


def events_of(section: str) -> dict[str, Event]:
    """All log events of one section, by name."""
    found: dict[str, Event] = defaultdict(lambda: Event(""))
    tops = [ROOT / name for name in EVENT_SOURCES[section]]
    paths = [path for top in tops for path in ([top] if top.is_file() else sorted(top.rglob("*.py")))]
    for path in paths:
        for name, level, facts in events_in(ast.parse(path.read_text())):
            found[name].name = name
            found[name].merge(level, facts)
    return dict(sorted(found.items()))


def events(section: str) -> str:
    """Return the table of events of one section of :data:`EVENT_SOURCES`."""
    rows = []
    for event in events_of(section).values():
        levels = ", ".join(level for level in ("INFO", "WARNING", "ERROR") if level in event.levels)
        facts = ", ".join(f"`{fact}`" for fact in event.facts)
        text = EVENTS.get(f"{section}/{event.name}") or EVENTS.get(event.name, "(not described yet)")
        rows.append([_anchor(f"`{event.name}`", f"{section}-event-{event.name}"), levels, text, facts])
    return _table(["event", "level", "meaning and action", "facts in the line"], rows)


# ---- errors, reasons, exit statuses ----------------------------------------------------------------------------------


def hold_codes(_: str) -> str:
    """Return the sub-codes of holds that stageout causes."""
    rows = []
    for kind in ErrorClass:
        code = HOLD_SUBCODE_BASE + kind.code
        explanation = FAILURES[kind]
        rows.append([_anchor(f"**{code}**", f"hold-{code}"), explanation.happened, explanation.action])
    return _table(["sub-code", "what happened", "what to do"], rows)


def refusals(_: str) -> str:
    """Return the codes of refused hand-offs."""
    rows = [
        [f"`{code}`", cause.happened, cause.actor.value, _with_links(cause.steps)] for code, cause in REFUSALS.items()
    ]
    return _table(["code", "meaning", "who can act", "what to do"], rows)


def error_codes(_: str) -> str:
    """Return the classes of errors with what HTCondor is told."""
    rows = []
    for kind in ErrorClass:
        hold = HOLD_SUBCODE_BASE + kind.code
        types = [kind.value.error_type, kind.value.failure_type or ""]
        rows.append(
            [str(kind.code), f"`{kind.name}`", *types, _ADVICE[kind.advice], f"[{hold}](hold-codes.md#hold-{hold})"]
        )
    return _table(["code", "name", "`ErrorType`", "`FailureType`", "next step", "hold sub-code"], rows)


def states(_: str) -> str:
    """Return the words for the states of output: those for job owners, and those of the ledger."""
    ledger: dict[str, list[State]] = {}
    for state, word in PLAIN.items():
        ledger.setdefault(word, []).append(state)
    rows = [[UNREPORTED, "`None`", STATE_MEANINGS[UNREPORTED]]]
    rows += [[word, ", ".join(f"`{state}`" for state in known), STATE_MEANINGS[word]] for word, known in ledger.items()]
    rows.append(["waiting for the server", "`Confirmed`, `RetryWait`", STATE_MEANINGS["waiting for the server"]])
    rows += [[word, "any state before the end", STATE_MEANINGS[word]] for word in ("paused", "node silent")]
    return _table(["`stageout status`", "ledger, `--json`, `--node`", "meaning"], rows)


def exit_statuses(_: str) -> str:
    """Return the exit statuses of the ``stageout`` command."""
    return _table(["status", "meaning"], [[str(int(code)), EXIT_MEANINGS[code]] for code in Exit])


def conformance_rules(_: str) -> str:
    """Return the rules of the conformance suite for transfer plugins."""
    rows = [[_anchor(f"`{rule.name}`", f"rule-{rule.name}"), rule.level, _sentence(rule.title), _sentence(rule.advice)]
            for rule in RULES]  # fmt: skip
    return _table(["rule", "level", "requirement", "remedy"], rows)


# ---- metrics ---------------------------------------------------------------------------------------------------------


def metrics(part: str) -> str:
    """Return the metrics of one part: "manager", "agent", "pool", "policy", "web", "router" or "all"."""
    rows = [
        [f"`{one.name}`", one.kind.value, ", ".join(f"`{label}`" for label in one.labels), _literal(one.help)]
        for one in METRICS.values()
        if one.part == part
    ]
    return _table(["metric", "type", "labels", "meaning"], rows)


# ---- policy service --------------------------------------------------------------------------------------------------


def operations(_: str) -> str:
    """Return the operations of the policy service's REST interface."""
    from policy_service.operations import OPERATIONS

    rows = [[f"`{item.method}`", f"`{item.path}`", _sentence(item.summary), "no" if item.open_to_all else "yes"]
            for item in OPERATIONS]  # fmt: skip
    return _table(["method", "path", "effect", "token needed"], rows)


# ---- decisions -------------------------------------------------------------------------------------------------------


def decisions(_: str) -> str:
    """Return number, title, status and date of each decision, for the page beside their folder."""
    rows = []
    for page in sorted((ROOT / "docs/developer/decisions").glob("*.md")):
        head = re.match(r"# (\d{4})\. (.+)\n\nStatus: (.+)\nDate: (\d{4}-\d\d-\d\d)\n\n", page.read_text())
        if not head:
            raise ValueError(f"{page}: begin with '# NNNN. Title', 'Status: accepted' and 'Date: YYYY-MM-DD'")
        rows.append([f"[{head[1]}](decisions/{page.name})", *head.groups()[1:]])
    return _table(["number", "title", "status", "date"], rows)


# ---- Python ----------------------------------------------------------------------------------------------------------


def python(module: str) -> str:
    """Return signature and docstring of all that a module offers."""
    loaded = importlib.import_module(module)
    names = getattr(loaded, "__all__", None) or [
        name for name, item in vars(loaded).items()
        if inspect.isclass(item) and item.__module__ == module and not name.startswith("_")
    ]  # fmt: skip
    return "\n\n".join(_documented(name, getattr(loaded, name)) for name in names)


def _documented(name: str, item: Any) -> str:
    methods = [each for key, each in vars(item).items() if inspect.isfunction(each) and not key.startswith("_")] if (
        inspect.isclass(item)) else []  # fmt: skip
    parts = [f"### `{name}`", _signed(name, item), *(_signed(f"{name}.{each.__name__}", each) for each in methods)]
    return "\n\n".join(parts)


def _signed(name: str, item: Any) -> str:
    """Signature and docstring as they stand in the code: docstrings are not written in Markdown."""
    try:
        plain = re.sub(r"(: |-> )'([^']+)'", r"\1\2", str(inspect.signature(item)))  # annotations are kept as texts
        plain = re.sub(r"<\S+ (?:[^<>]|<\w+>)*at 0x[0-9a-f]+>", "...", plain)  # default values without a text
        plain = plain.replace(repr(sys.executable), "sys.executable")
        shown = textwrap.fill(name + plain, 110, subsequent_indent="    ", break_long_words=False)
    except ValueError:
        shown = name
    if inspect.isclass(item) and issubclass(item, enum.Enum):
        shown = f"{name}: " + ", ".join(item.__members__)
    return f"```text\n{shown}\n\n{inspect.getdoc(item) or ''}\n```"


# ---- programs --------------------------------------------------------------------------------------------------------


def program(name: str) -> str:
    """Return usage, description and options of a program and of all its commands."""
    parser = parser_of(name)
    parts = [_command(command(parser))]
    parts += [f"## {word}\n\n{_command(command(each))}" for word, each in parsers_of_commands(parser).items()]
    return "\n\n".join(parts)


def _command(shown: Command) -> str:
    parts = ["```text\n" + _wrapped_usage(shown) + "\n```"]
    parts += [f"```text\n{text}\n```" if is_program else _linked(text) for text, is_program in shown.description]
    parts.append("\n".join(map(_argument, shown.arguments)))
    if shown.statuses:
        parts.append(_table(["status", "meaning"], [[code, _sentence(meaning)] for code, meaning in shown.statuses]))
    return "\n\n".join(part for part in parts if part)


def _wrapped_usage(shown: Command) -> str:
    """Usage in lines of at most 100 letters; an option and its value stay on one line."""
    words = " ".join(word.replace(" ", "\0") for word in (shown.name, *shown.usage))
    lines = textwrap.wrap(words, 100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def _argument(argument: Argument) -> str:
    value = f" {argument.value}" if argument.value else ""
    return f"- {', '.join(f'`{name}{value}`' for name in argument.names)}: {_linked(argument.text)}"


def _linked(text: str) -> str:
    """Program text for a page of the reference, with links to the pages and fragments that it names."""
    return _with_links(_literal(text))


def _with_links(text: str) -> str:
    text = re.sub(r"\bdocs/(\w+/([\w-]+\.md))\b", r"[\2](../\1)", text)
    return re.sub(r"\bcondor\\?_config\.d/([\w.-]+\.conf)\b", r"[\1](../../condor_config.d/\1)", text)


TABLES: dict[str, Callable[[str], str]] = {
    "knobs": knobs,
    "curl-knobs": curl_knobs,
    "attributes": attributes,
    "file-record": file_record,
    "trust": trust,
    "events": events,
    "hold-codes": hold_codes,
    "error-codes": error_codes,
    "refusals": refusals,
    "states": states,
    "exit-statuses": exit_statuses,
    "conformance-rules": conformance_rules,
    "metrics": metrics,
    "operations": operations,
    "decisions": decisions,
    "program": program,
    "python": python,
}


def main() -> None:
    """Print the tables of all pages again."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text()
        if (new := fill(text)) != text:
            page.write_text(new)
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
