"""The rules of language that a program can check: openings, length of sentences, names of events, project words.

Each rule is a function of a text, and has tests that plant violations. Inside the overlay only the openings of
sentences are checked.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from stageout.core.config import KNOBS
from stageout.core.reasons import FAILURES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "_ext"))

import descriptions  # noqa: E402
import programs  # noqa: E402
import reference  # noqa: E402

_FOLDERS = ("policy_service", "sandbox_manager", "schedd_agent", "stageout", "stageout_web", "tests/harness")
_ALL_FOLDERS = (
    "benchmarks",
    "docs",
    "overlay_router",
    "policy_service",
    "sandbox_manager",
    "schedd_agent",
    "stageout",
    "tests",
    "tools",
)
#: The inside of the overlay gets its words with its second design.
_OVERLAY = re.compile(r"stageout/(?:overlay/(?!cli/|tuning/)|protocols/overlay/)")

#: Words of one clause: a full stop, a question mark, a colon or a semicolon ends it.
MOST_WORDS = 30

#: A docstring that begins with one of these words names neither an action nor a thing, or hides its subject.
_HEADLESS = re.compile(
    r"(What|Who|Whose|Whom|Whoever|Whatever|Where|When|Which|That|Those|How|Why|Whether|If|Is|Are|Does|May|Has|Can|It|"
    r"They|There|This|These|Its|Their|"
    r"Asks|Brings|Carries|Chooses|Fetches|Follows|Gives|Holds|Judges|Keeps|Lets|Listens|Makes|Publishes|Puts|Reads|"
    r"Receives|Remembers|Renews|Says|Sends|Shows|Takes|Talks|Tells|Writes)\b"
)
#: Openings of a sentence without a subject. "Where ..., ..." and "That job ..." have one.
_BARE = re.compile(
    r"(?:Who|Whom|Whose|Whoever|What|Whatever|Those (?:that|who|which)|"
    r"That (?:which|is|was|are|were|may|must|can|has|have|came|come|carry|wait|of|it))\b|Where\b[^,]*$"
)
_PASSED_ON = re.compile(r"\b(?:is|are|was|were|be|been|being) (?:\w+ )?(?:said|told|heard)\b")

#: Phrases that hide a number, an actor or a noun.
_DIALECT = re.compile(
    r"\b(?:so (?:many|much of)|one of which|is (?:heard|taken for)|whoever|whomever|whatever is)\b"
    r"|\b(?:it|text) is none\b(?! of)|\bof these, only\b|:param \w+: likewise\b"
    r"|(?:^|[.:;] )(?:(?:By|After|For|Of) so (?:much|many|long)|That wait)\b",
    re.I,
)

_Documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)


# ---- rules -----------------------------------------------------------------------------------------------------------


def docstrings(source: str) -> list[str]:
    """Return all docstrings of a module."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, _Documented))
    return [text for node in nodes if (text := ast.get_docstring(node))]


def comments(source: str) -> list[str]:
    """Return all comments of a module; lines of comment that follow each other are one comment."""
    found: list[str] = []
    last = (0, -1)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        text, (line, column) = token.string.lstrip("#:").strip(), token.start
        if last == (line - 1, column):
            found[-1] += f" {text}"
        else:
            found.append(text)
        last = (line, column) if not token.line[:column].strip() else (0, -1)
    return found


def bare_openings(text: str) -> list[str]:
    """Return the sentences of a docstring or of a comment that begin without a subject; questions may."""
    text = re.sub(r":(?:param|raises|returns?|ivar)\b[^:\n]*:", "\n\n", text)
    blocks = (" ".join(block.split()) for block in re.split(r"\n\s*\n|\n\s*[-*] ", text))
    found = (sentence for block in blocks for sentence in re.split(r"(?<=[.!?])\s+", block))
    return [sentence for sentence in found if _BARE.match(sentence) and not sentence.endswith("?")]


def headless(text: str) -> bool:
    """Tell whether a docstring begins without a verb in the imperative or a noun, or asks a question."""
    return bool(_HEADLESS.match(text)) or re.split(r"(?<=[.!?])\s", text)[0].endswith("?")


def clauses(text: str) -> Iterator[str]:
    """Yield the clauses of plain text or of a docstring; program text counts as one word."""
    text = re.sub(r":(?:param|raises|returns?|ivar)\b[^:\n]*:", ". ", text)
    text = re.sub(r"``[^`]*``|:\w+:`[^`]*`|`[^`]*`", "x", text)
    for paragraph in re.split(r"\n\s*\n|\n\s*[-*] ", text):
        yield from re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split()))


def long_clauses(text: str) -> list[str]:
    """Return the clauses that have too many words."""
    return [clause for clause in clauses(text) if len(clause.split()) > MOST_WORDS]


def passed_on(text: str) -> list[str]:
    """Return the clauses with "is said", "is told" or "is heard": they do not name the actor."""
    return [clause for clause in clauses(text) if _PASSED_ON.search(clause)]


def dialect(text: str) -> list[str]:
    """Return the phrases of a docstring or of a comment that readers outside the project do not understand."""
    return [found.group() for found in _DIALECT.finditer(" ".join(text.split()))]


def sentences(page: str) -> Iterator[str]:
    """Yield the sentences of a page, those of lists and cells of tables, too, but no headings."""
    page = re.sub(r"^ *(?:```|:::).*?^ *(?:```|:::)$|<!--.*?-->|^#.*?$", "", page, flags=re.S | re.M)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=\|)", page):
        cells = re.split(r"(?<!\\)\|", block) if block.lstrip().startswith("|") else [block]
        for cell in cells:
            text = re.sub(r"^\s*(?:[-*]|\d+\.) +", "", cell.strip())
            text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "`x`", " ".join(text.split())))
            yield from (found.lstrip("*_(") for found in re.split(r"(?<=[.!?])\**\s+", text) if found)


def bare(page: str) -> list[str]:
    """Return the sentences of a page that begin without a subject; questions may."""
    return [found for found in sentences(page) if _BARE.match(found) and not found.rstrip("*_ ").endswith("?")]


def wrong_event(name: str) -> bool:
    """Tell whether the name of an event is not ``noun-verb-ed``."""
    return not re.fullmatch(r"(?:[a-z]+-)+(?:[a-z]+ed|lost|found|sent|forgotten|withdrawn)", name)


def wrong_knob(doc: str) -> bool:
    """Tell whether the text of a knob is no phrase with a capital letter, or abbreviates a unit."""
    return not re.match(r"true: [a-z]|[A-Z]", doc) or bool(re.search(r"\bs (?:that|after|before|of|between)\b", doc))


def wrong_help(text: str) -> bool:
    """Tell whether the help of a command does not begin with a verb in the imperative."""
    return not text or text.split()[0].lower().strip(".,:").endswith("s") or bool(_HEADLESS.match(text.capitalize()))


# ---- the code --------------------------------------------------------------------------------------------------------


def _modules(folder: str) -> list[Path]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    return [path for path in paths if not _OVERLAY.match(path.relative_to(ROOT).as_posix())]


@pytest.mark.parametrize("folder", _FOLDERS)
def test_docstrings_are_plain(folder: str) -> None:
    paths = _modules(folder)
    assert paths
    texts = [(path, text) for path in paths for text in docstrings(path.read_text())]
    assert [(str(path), text.splitlines()[0]) for path, text in texts if headless(text)] == []
    assert [(str(path), clause) for path, text in texts for clause in long_clauses(text)] == []
    assert [(str(path), clause) for path, text in texts for clause in passed_on(text)] == []


@pytest.mark.parametrize("folder", _FOLDERS)
def test_comments_are_plain(folder: str) -> None:
    texts = [(path, text) for path in _modules(folder) for text in comments(path.read_text())]
    assert [(str(path), clause) for path, text in texts for clause in long_clauses(text) + passed_on(text)] == []


@pytest.mark.parametrize("folder", _ALL_FOLDERS)
def test_sentences_of_the_code_have_a_subject(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    sources = [(path, path.read_text()) for path in paths]
    texts = [(path, text) for path, source in sources for text in [*docstrings(source), *comments(source)]]
    assert [(str(path), sentence) for path, text in texts for sentence in bare_openings(text)] == []


@pytest.mark.parametrize("folder", ("policy_service", "sandbox_manager", "schedd_agent", "stageout", "stageout_web"))
def test_phrases_of_the_code_are_plain(folder: str) -> None:
    sources = [(path, path.read_text()) for path in _modules(folder) if "overlay" not in path.parts]
    texts = [(path, text) for path, source in sources for text in [*docstrings(source), *comments(source)]]
    assert [(str(path), phrase, text) for path, text in texts for phrase in dialect(text)] == []


def test_knobs_are_described_by_phrases() -> None:
    assert [knob.name for knob in KNOBS.values() if wrong_knob(knob.doc)] == []
    assert [knob.name for knob in KNOBS.values() if long_clauses(knob.doc) or passed_on(knob.doc)] == []


@pytest.mark.parametrize("name", KNOBS)
def test_each_knob_says_who_sets_it_and_when(name: str) -> None:
    """A knob that nobody sets is a constant."""
    who = KNOBS[name].who
    setter = r"(?:Administrators|The operators?|The script|The fragment) .*(?:sets?|raises?|lowers?|changes?) .+"
    assert re.fullmatch(setter, who), who
    assert not (long_clauses(who) or passed_on(who) or who.endswith("."))


@pytest.mark.parametrize("program", programs.PROGRAMS)
def test_help_is_in_the_imperative(program: str) -> None:
    parser = programs.parser_of(program)
    actions = [item for item in parser._actions if isinstance(item, argparse._SubParsersAction)]
    short = [choice.help or "" for item in actions for choice in item._choices_actions]
    parsers = [parser, *programs.parsers_of_commands(parser).values()]
    about = [each.description or "" for each in parsers]
    options = [item.help or "" for each in parsers for item in each._actions if item.help != argparse.SUPPRESS]
    assert [text for text in [*short, *about] if wrong_help(text)] == []
    prose = [re.sub(r"^  .*$|^exit status:[^\n]*(?:\n\S[^\n]*)?", "", text, flags=re.M) for text in about]
    assert [clause for text in [*prose, *short, *options] for clause in long_clauses(text) + passed_on(text)] == []
    assert [text for text in options if _BARE.match(text.capitalize())] == []


def test_names_of_events_have_one_form() -> None:
    found = {name for section in reference.EVENT_SOURCES for name in reference.events_of(section)}
    assert sorted(name for name in found if wrong_event(name)) == []


def test_descriptions_are_plain() -> None:
    texts = [text for _, _, text in descriptions.ATTRIBUTES.values()]
    texts += [
        *descriptions.EVENTS.values(),
        *(text for one in FAILURES.values() for text in (one.happened, one.action)),
    ]
    texts += [text for _, _, text in descriptions.EXTRA_KNOBS.values()]
    assert [clause for text in texts for clause in [*long_clauses(text), *passed_on(text), *bare(text)]] == []
    assert [text for text in texts if not text.endswith(".")] == []


#: Private words, for which there are standard terms.
_PRIVATE = frozenset(
    (  # noqa: SIM905
        "AgentBook Crew Guests HandOver No Strays Talk Tally _obey book carry_out fresh_s give_up_s hurry "
        "in_parts judged keep_house lacks lane lanes mileage scene strays surroundings urgent_s way_out"
    ).split()
)


def private_names(source: str) -> set[str]:
    """Return the names of attributes, functions and classes that have a standard term."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
    return {name for name in found if name.lstrip("_") in _PRIVATE or name in _PRIVATE}


@pytest.mark.parametrize("folder", ("plugins", "policy_service", "sandbox_manager", "schedd_agent", "stageout"))
def test_names_are_standard_terms(folder: str) -> None:
    found = {str(path): private_names(path.read_text()) for path in _modules(folder) if "overlay" not in path.parts}
    assert {path: names for path, names in found.items() if names} == {}


# ---- the documents ---------------------------------------------------------------------------------------------------

_PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


@pytest.mark.parametrize("page", _PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_of_pages_have_a_subject(page: Path) -> None:
    text = page.read_text()
    assert bare(text) == []
    assert [sentence for sentence in sentences(text) if _PASSED_ON.search(sentence)] == []


#: Names that are no knobs: an example, the environment of plugins, and parameters of condor_master.
_NO_KNOBS = re.compile(
    r"STAGEOUT_(?:FAULTS|JOBS|MOVER\w*|STATE_DIR|UPLINK|VERSION|TAPE_POOL|PLUGIN_LIFETIME_S|POOL_\w+|PILOT_CACHE|"
    r"GSIFTP_\w+|PARALLELISM|CONCURRENCY|OVERLAY_(?:COPIES|HANDOVER|NUMBERS|SEED)|(?:POLICY_SERVICE|ROUTER|WEB)(?:_LOG|_USERID|_DEBUG)?)"
)


def unknown_knobs(text: str) -> set[str]:
    """Return names in a page that look like knobs and are none."""
    known = {*KNOBS, *descriptions.EXTRA_KNOBS}
    known |= {f"STAGEOUT_{name.upper()}" for name in reference.curl.Settings.__dataclass_fields__}
    names = set(re.findall(r"\bSTAGEOUT_[A-Z][A-Z0-9_]*[A-Z0-9](?![A-Z0-9_*])", text))
    return {name for name in names - known if not _NO_KNOBS.fullmatch(name)}


def test_documents_name_knobs_that_exist() -> None:
    # fragments, and the decision about it, name knobs that are gone
    pages = [path for path in _PAGES if path.parent.name != "changes" and path.name != "0058-fewer-knobs.md"]
    pages += [*(ROOT / "condor_config.d").glob("*.conf"), *DOCS.glob("_ext/*.py")]
    assert {str(page): names for page in pages if (names := unknown_knobs(page.read_text()))} == {}


#: Words of the project. The glossary defines each that a page uses.
_WORDS = {
    "access point", "agent", "batch", "capability", "circuit breaker", "confirmation", "custodian", "custody",
    "data slot", "drain", "epoch history", "execute point", "fragment", "front end", "gateway", "grant", "hand-off",
    "lease", "ledger", "lost", "lot", "mover", "notice", "order", "overlay", "pack", "passed block", "pilot",
    "plugin", "policy service", "probe", "profile", "receipt", "relay", "report", "router", "run", "sandbox",
    "sandbox manager", "spool", "synchronous", "terminal", "ticket", "unconfirmed", "warrant",
}  # fmt: skip
_SITE = ("start", "user", "administrator", "pilot", "overlay", "explanation", "reference")


def missing_words(texts: list[str], glossary: str) -> set[str]:
    """Return the project words that texts use and the glossary does not define."""
    defined = set(re.findall(r"^## ([a-z][a-z -]*)$", glossary, re.M))
    prose = "\n".join(re.sub(r"`[^`]*`|```.*?```", "", text, flags=re.S) for text in texts).lower()
    return {word for word in _WORDS - defined if re.search(rf"\b{word}s?\b", prose)}


def test_the_glossary_has_the_project_words() -> None:
    pages = [path.read_text() for folder in _SITE for path in (DOCS / folder).glob("*.md")]
    glossary = (DOCS / "glossary.md").read_text()
    assert missing_words([*pages, *descriptions.EVENTS.values()], glossary) == set()


#: Other words for "third-party plugin", the one for which readers search.
_OTHER_PLUGINS = re.compile(
    r"\b(?:an)?other makers?\b|\bmakers' plugin|\b(?:foreign|custom|external) (?:transfer )?plugin"
    r"|\bplugins? of others\b",
    re.I,
)
_PRODUCT = (
    "condor_config.d", "examples", "plugins", "policy_service", "sandbox_manager", "schedd_agent",
    "stageout", "stageout_web",
)  # fmt: skip


def test_third_party_plugins_have_one_name() -> None:
    texts = [path for path in _PAGES if path.parent.name != "changes"]
    texts += [
        path for folder in _PRODUCT for path in (ROOT / folder).rglob("*") if path.suffix in (".conf", ".md", ".py")
    ]
    found = {str(path): _OTHER_PLUGINS.findall(" ".join(path.read_text().split())) for path in texts}
    assert {path: words for path, words in found.items() if words} == {}
    assert "## third-party plugin\n" in (DOCS / "glossary.md").read_text()


def test_other_names_of_third_party_plugins_are_found() -> None:
    for text in ("plugins of other makers", "another maker's plugin", "a custom transfer plugin", "Foreign plugins"):
        assert _OTHER_PLUGINS.search(text)
    assert not _OTHER_PLUGINS.search("a third-party plugin, and HTCondor's own plugin")


def test_a_custodian_is_a_router_and_no_manager() -> None:
    entry = (DOCS / "glossary.md").read_text().partition("## custodian\n\n")[2]
    assert entry.startswith("[Router](#router)")
    texts = [path.read_text() for path in (ROOT / "sandbox_manager").rglob("*.py")]
    assert not [text for text in texts if re.search(r"\b(?:an)?other custodian", text)], "a manager is none itself"
    details = (ROOT / "stageout/cli/render.py").read_text()
    assert '("manager", clean(row.manager))' in details


# ---- planted violations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        '"""What every part needs."""',
        'def size():\n    """How many bytes there are."""',
        'class Row:\n    """Who has which lease."""',
        'class Row:\n    async def end(self):\n        """Is it over?"""',
        'class Row:\n    """Keeps the rows."""',
        'class Row:\n    """This is a row."""',
        'def check():\n    """Do the clocks agree? They should."""',
    ],
)
def test_headless_docstrings_are_found(source: str) -> None:
    assert [headless(text) for text in docstrings(source)] == [True]


@pytest.mark.parametrize(
    "source",
    [
        "#: What a breaker can become.\nSTATES = 1",
        "# The first.\n# Whoever comes next waits.\n",
        "size = 1  # of bytes. That is all",
        "#: That wait for a place.\nMOST = 1",
        "def size():\n    # Where the bytes are\n    return 1",
        '"""Module.\n\nText. What counts is the end.\n"""',
        'def size():\n    """Return the size. :param of: What is measured."""',
    ],
)
def test_sentences_of_code_without_a_subject_are_found(source: str) -> None:
    assert [bare_openings(text) for text in [*docstrings(source), *comments(source)] if bare_openings(text)]


@pytest.mark.parametrize(
    "source",
    [
        "# The rest waits, that is\n# What the tests do.\nsize = 1",
        "size = 1  # bytes of\nWhat = 2  # more",
        'text = "# What is left"',
        "# Where no agent runs, nothing is sent.\n# What is custody?\n",
        '"""The size. That file stays."""',
    ],
)
def test_other_sentences_of_code_are_not_found(source: str) -> None:
    assert [bare_openings(text) for text in [*docstrings(source), *comments(source)] if bare_openings(text)] == []


def test_lines_of_comment_are_read_together() -> None:
    assert comments("#: One\n#: two.\nx = 1  # three\n# four\n") == ["One two.", "three", "four"]


@pytest.mark.parametrize(
    "text",
    [
        "Wait for so many seconds.",
        "By so much since the last call.",
        "A slow file is taken for\nan idle one.",
        "The agent, whoever runs it.",
        "Read a number. :raises ValueError: it is none.",
        "Times. :param ended_at: likewise, of the end.",
    ],
)
def test_phrases_of_insiders_are_found(text: str) -> None:
    assert len(dialect(text)) == 1
    assert dialect("There are so few files that nothing is taken. Likewise for directories.") == []


@pytest.mark.parametrize("text", ["Return the size in bytes.", "The size of a file.", "Whatsit of a file.", "Item."])
def test_other_docstrings_are_not_found(text: str) -> None:
    assert not headless(text)


def test_long_clauses_are_found() -> None:
    words = " ".join(["word"] * MOST_WORDS)
    assert long_clauses(f"{words} more.") == [f"{words} more."]
    assert long_clauses(f"{words}. And {words.replace('word ', '', 1)}; more: {words}.") == []
    assert long_clauses(f"Text.\n\n:param first_s: {words} more.") == [f"{words} more."]
    assert long_clauses(f"Text ``{words} {words}``.") == []


def test_private_names_are_found() -> None:
    source = "class Talk:\n    def _lane(self, fresh_s):\n        self._book = self.pipeline.book"
    assert private_names(source) == {"Talk", "_lane", "fresh_s", "_book", "book"}
    assert private_names("store.orphans.collect(timeout_s=1)") == set()


@pytest.mark.parametrize("text", ["The path is told.", "Nothing was ever said of it.", "A: the agent is not heard."])
def test_actors_that_are_not_named_are_found(text: str) -> None:
    assert passed_on(text)
    assert not passed_on("The agent tells the manager.")


@pytest.mark.parametrize(
    "page",
    [
        "Text. What is left is deleted.",
        "- Whoever has the key may write.",
        "# Heading\n\n1. Those that wait are sent.",
        "| `x` | Who is asked |",
        "Text (a).\n\n**That which fails** is tried again.",
        "That is the rule.",
        "Where the output is: below.",
    ],
)
def test_sentences_without_a_subject_are_found(page: str) -> None:
    assert len(bare(page)) == 1


@pytest.mark.parametrize(
    "page",
    [
        "What is custody?",
        "Where no agent runs, nothing is sent.",
        "That job runs again.",
        "```\nWhat is it.\n```",
        "# What it is",
    ],
)
def test_other_sentences_are_not_found(page: str) -> None:
    assert bare(page) == []


@pytest.mark.parametrize("name", ["breaker", "plugin-broken-now", "at-risk", "no-space", "Key-lost", "lost", "ended"])
def test_wrong_names_of_events_are_found(name: str) -> None:
    assert wrong_event(name)
    assert not wrong_event("sandbox-accepted")
    assert not wrong_event("route-lost")


@pytest.mark.parametrize("doc", ["s after which it ends", "most MB of one owner", "Seconds, or s that it waits"])
def test_wrong_texts_of_knobs_are_found(doc: str) -> None:
    assert wrong_knob(doc)
    assert not wrong_knob("Seconds to wait for an answer before the plugin ends")
    assert not wrong_knob("true: the log has more")


@pytest.mark.parametrize("text", ["", "Shows the jobs.", "what is delivered", "Lists: names"])
def test_wrong_help_is_found(text: str) -> None:
    assert wrong_help(text)
    assert not wrong_help("Show the jobs.")


def test_knobs_that_do_not_exist_are_found() -> None:
    text = "`STAGEOUT_LEASE`, `STAGEOUT_LEASES`, `STAGEOUT_SPOOL`, `STAGEOUT_ROUTER_LOG`, `STAGEOUT_GLOBUS_*`"
    assert unknown_knobs(text) == {"STAGEOUT_LEASES"}


def test_words_that_the_glossary_lacks_are_found() -> None:
    assert missing_words(["The spools of a `ticket`."], "## ticket\n\nName.\n") == {"spool"}
