"""docs/plugin/gsiftp.md shows the tables that decide."""

from __future__ import annotations

import errno
import re
from pathlib import Path

from stageout.core.errors import ErrorClass
from stageout.protocols.gsiftp.replies import ERRNOS, GLOBUS_CODES, REPLY_CODES, class_of

TEXT = (Path(__file__).resolve().parents[2] / "docs/plugin/gsiftp.md").read_text().partition("## Errors")[2]


def test_the_table_of_classes_is_the_real_one() -> None:
    shown: dict[str, list[set[str]]] = {}
    for line in re.findall(r"^\| `[A-Z_]+` \|.*$", TEXT, re.M):
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        shown[name.strip("`")] = [set(re.findall(r"[A-Z_]{2,}|\d{3}", cell)) for cell in cells]
    real: dict[str, list[set[str]]] = {}
    for column, table in enumerate((GLOBUS_CODES, ERRNOS, REPLY_CODES)):
        for key, kind in table.items():
            row = real.setdefault(kind.name, [set(), set(), set()])
            row[column].add(errno.errorcode[key] if column == 1 else str(key))  # type: ignore[index]
    assert shown == real


def test_the_most_exact_code_decides() -> None:
    assert class_of(500, "PERMISSION_DENIED", errno.ENOENT) is ErrorClass.PERMISSION_DENIED
    assert class_of(550, "", errno.EDQUOT) is ErrorClass.QUOTA_EXCEEDED
    assert class_of(552) is ErrorClass.QUOTA_EXCEEDED
    assert class_of(599) is ErrorClass.SERVER_ERROR
