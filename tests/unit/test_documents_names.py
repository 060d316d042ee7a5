"""Names and numbers that pages repeat are those of the code: events, checks, states, alerts, settings of plugins."""

from __future__ import annotations

import re
import sys

import pytest
import yaml

from stageout.cli.doctor import report
from stageout.cli.doctor.findings import Role
from stageout.testing.conformance_rules import RULES
from stageout.wire.matters import Kind
from tests.unit.test_cli_doctor import Fake
from tests.unit.test_documents import DOCS, PAGES, ROOT

sys.path.insert(0, str(DOCS / "_ext"))

from descriptions import STATE_MEANINGS

_NAME = re.compile(r"(?<!`)`([a-z][a-z0-9]*(?:-[a-z0-9]+)+)`(?!`)")
_CHECK = re.compile(r"\bdoctor`?[^.|`(]{0,40}\(`([a-z][a-z-]+)`(?:, `([a-z][a-z-]+)`)*\)")
_NUMBERS = ("eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen")
_ALERTS = re.compile(rf"\b({'|'.join(_NUMBERS)}|\d+) alerts\b")
#: A whole name: not the beginning of several (``STAGEOUT_CURL_...``), nor that of an example (``tape``).
_SETTING = re.compile(r"\bSTAGEOUT_(?!TAPE_)[A-Z0-9_]*[A-Z0-9]\b(?!_)")
#: Pages for people who work on the code, and the list of durable steps, which are no events.
_OWN_NAMES = {*(DOCS / "developer").glob("*.md"), DOCS / "reference/durable-steps.md", DOCS / "explanation/crash.md"}
#: Names that are neither events nor checks, matters or rules.
_OTHERS = {
    "access-point", "execute-point",  # targets of the Containerfile
    "blake2b-128", "sha-256", "sha-512", "xxh3-32",  # digests
    "fair-share",  # policies
    # names of others
    "gfal-cat", "globus-gass-copy-progs", "globus-url-copy", "libgcc-s1", "python3-pycurl", "python3-venv",
    "store-client", "x-goog-stored-content-encoding", "xrootd-client-http-plugins",
    "half-open", "hand-off", "no-grant",  # values in reports
    "if-available", "opt-in", "opt-out",  # values of knobs
    "stageout-policy-service", "stageout-router", "stageout-sandbox-manager", "stageout-schedd-agent",
    "stageout-startd-cron", "stageout-web",  # programs
}  # fmt: skip


def _events() -> set[str]:
    page = (DOCS / "reference/events.md").read_text()
    return set(re.findall(r"</a>`([a-z0-9-]+)` \|", page))


def _checks() -> set[str]:
    listed = set(re.findall(r"`([a-z][a-z0-9-]+)`", (DOCS / "administrator/doctor.md").read_text()))
    return listed | {item.name for item in report.examine(Fake(), list(Role))}


def unknown_names(text: str, known: set[str]) -> set[str]:
    """Return quoted names with a hyphen, the form of events and checks, that nothing has."""
    return set(_NAME.findall(text)) - known


def unknown_checks(text: str, checks: set[str]) -> set[str]:
    """Return what a text calls a check of the doctor, as in "``doctor`` (`trust`)", and is none."""
    return {name for found in _CHECK.findall(text) for name in found if name} - checks


def wrong_numbers(text: str, number: int) -> set[str]:
    """Return numbers of alerts in a text that are not that number."""
    right = {str(number), *_NUMBERS[number - 8 : number - 7]}
    return set(_ALERTS.findall(text)) - right


def test_quoted_names_exist() -> None:
    known = _events() | _checks() | {kind.value for kind in Kind} | {rule.name for rule in RULES} | _OTHERS
    pages = [page for page in PAGES if page not in _OWN_NAMES]
    assert {str(page): names for page in pages if (names := unknown_names(page.read_text(), known))} == {}


def test_checks_that_pages_name_exist() -> None:
    checks = _checks()
    assert {str(page): names for page in PAGES if (names := unknown_checks(page.read_text(), checks))} == {}


def test_pages_count_the_alerts_as_they_are() -> None:
    groups = yaml.safe_load((ROOT / "examples/monitoring/alerts.yml").read_text())["groups"]
    number = sum(len(group["rules"]) for group in groups)
    pages = [*PAGES, *ROOT.glob("examples/**/*.md")]
    assert {str(page): found for page in pages if (found := wrong_numbers(page.read_text(), number))} == {}


def test_the_page_about_state_c_has_the_words_of_the_command() -> None:
    page = (DOCS / "user/state-c.md").read_text()
    cells = re.findall(r"^\| (`[^|]+) \|", page.partition("| STATE |")[2].partition("\n\n")[0], re.M)
    words = {word for cell in cells for word in re.findall(r"`([^`]+)`", cell)}
    assert words == set(STATE_MEANINGS) - {"being handed off"}, "that one is in the ledger only"


def test_settings_that_users_read_of_are_in_the_reference() -> None:
    """Each name is in the page of all knobs or in that of the curl plugin."""
    listed = "".join((DOCS / "reference" / name).read_text() for name in ("knobs.md", "curl.md"))
    pages = [
        page for page in PAGES if page.parent.name in ("start", "user", "administrator", "pilot", "plugin", "overlay")
    ]
    names = {name: page for page in pages for name in _SETTING.findall(page.read_text())}
    assert {name: str(page) for name, page in names.items() if name not in listed} == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`stageout doctor` on the access point (`silent-nodes`)", {"silent-nodes"}),
        ("`stageout doctor` (`trust`)", set()),
        ("`stageout doctor` (`trust`, `other-one`)", {"other-one"}),
    ],
)
def test_checks_that_do_not_exist_are_found(text: str, found: set[str]) -> None:
    assert unknown_checks(text, {"trust"}) == found


def test_names_and_numbers_that_are_wrong_are_found() -> None:
    assert unknown_names("The event `custody-settle`, not `custody-taken`, nor ``a-b``.", {"custody-taken"}) == {
        "custody-settle"
    }
    assert wrong_numbers("twelve alerts, ten alerts and 11 alerts", 10) == {"twelve", "11"}
