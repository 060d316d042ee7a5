"""The pages of the curl plugin have the tables of the code."""

from __future__ import annotations

import dataclasses
import errno
import re
from pathlib import Path

import pycurl

from stageout.core.errors import ErrorClass
from stageout.protocols.curl.failures import (
    CURL_CODES,
    FTP_REPLIES,
    HTTP_STATUSES,
    LOCAL_ERRNOS,
    REMOTE_ERRNOS,
    S3_CODES,
)
from stageout.protocols.curl.settings import Settings
from tests.curl.beside_cases import CASES

DOCS = Path(__file__).resolve().parents[2] / "docs"
DOC = (DOCS / "reference/curl.md").read_text()


def libcurl_names() -> dict[int, str]:
    """Number -> name without ``E_``; of several names the longest is the one in use today."""
    names = [name for name in dir(pycurl) if name.startswith("E_") and not name.startswith(("E_MULTI_", "E_TFTP_"))]
    return {getattr(pycurl, name): name[2:] for name in sorted(names, key=len)}


def error_table() -> str:
    """One line for each class that a table of this plugin leads to."""
    names = libcurl_names()
    lines = ["| class | HTTP | FTP | libcurl | files | S3 |", "|---|---|---|---|---|---|"]
    for kind in ErrorClass:
        cells = [
            ", ".join(str(code) for code, found in HTTP_STATUSES.items() if found is kind),
            ", ".join(str(code) for code, found in FTP_REPLIES.items() if found is kind),
            ", ".join(sorted(names[code] for code, found in CURL_CODES.items() if found is kind)),
            ", ".join(
                [errno.errorcode[code] for code, found in LOCAL_ERRNOS.items() if found is kind]
                + [f"{errno.errorcode[code]} (far end)" for code, found in REMOTE_ERRNOS.items() if found is kind]
            ),
            ", ".join(code for code, found in S3_CODES.items() if found is kind),
        ]
        if any(cells):
            lines.append(f"| `{kind.name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_error_table():
    assert error_table() in DOC, f"put this into docs/reference/curl.md:\n{error_table()}"


def test_knobs():
    """Each knob with its default."""
    for field in dataclasses.fields(Settings):
        default = getattr(field.default, "value", field.default)
        shown = f"{default:g}" if isinstance(default, float) else default
        pattern = rf"\| `STAGEOUT_{field.name.upper()}` \| {re.escape(str(shown))} \|"
        assert re.search(pattern, DOC), pattern


def test_schemes():
    from stageout.protocols.curl.abilities import METHODS

    for method in METHODS:
        assert f"| `{method}` |" in (DOCS / "plugin/curl.md").read_text()


def test_comparison():
    """The page shows every case of today, and none in which the plugin is worse."""
    page = (DOCS / "developer/curl-compared.md").read_text()
    page = page.partition("## Real servers")[0]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == [case.name for case in CASES], "run python -m tests.curl.beside_stock"
    assert {row[-1] for row in rows} == {"no"}
