"""Pages of the documents in a window of 400 pixels: no table is wider than the page."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.test_markdown import DOCS, site
from tests.web.browser import browser, missing

_LONG = "STAGEOUT_OVERLAY_CONNECTIONS_OF_ROUTERS"
_WIDEST = """return Math.max(document.documentElement.scrollWidth - document.documentElement.clientWidth,
    ...[...document.querySelectorAll('.table-wrapper')].map((one) => one.scrollWidth - one.clientWidth))"""


def test_tables_fit_narrow_windows(tmp_path: Path) -> None:
    if missing() and not os.environ.get("CI"):
        pytest.skip(f"{missing()} is not installed")
    events = (DOCS / "reference/events.md").read_text().replace("../administrator/", "https://example.org/")
    two = f"# Two\n\n| knob | text |\n|---|---|\n| `{_LONG}` | `{_LONG}` or `condor_config_val {_LONG}` |\n"
    index = "# Index\n\n## Pages\n\n- [Events](events.md)\n- [Two](two.md)\n"
    assert site(tmp_path, {"index.md": index, "events.md": events, "two.md": two}) == ""
    with browser(tmp_path) as opened:
        opened.size(400, 800)
        for name in ("events", "two"):
            opened.open((tmp_path / f"out/{name}.html").as_uri())
            assert opened.run(_WIDEST) <= 0, name
            opened.run("document.querySelector('link[href*=narrow]').disabled = true")
            assert opened.run(_WIDEST) > 100, "this table tests nothing"
        opened.open((tmp_path / "out/events.html").as_uri())
        head = "return getComputedStyle(document.querySelector('.column-head')).display"
        assert opened.run(head) == "inline"
        opened.size(1200, 800)
        assert opened.run(head) == "none"
