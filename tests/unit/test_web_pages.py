"""The text and the links of each page. A change of what people see has a diff in ``golden/pages.txt``."""

from __future__ import annotations

from pathlib import Path

from tests.unit.golden_pages import FILE, pages


def test_the_pages_show_what_the_listing_has(tmp_path: Path) -> None:
    assert pages(tmp_path) == FILE.read_text(), "make reference writes it anew"
