"""Texts and links of the web page, for a pool with a bit of everything, also with the names that need a token.

``python -m tests.unit.golden_pages`` writes it anew.
"""

from __future__ import annotations

import html
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stageout_web.server import Server
from tests.unit.test_web_http import PAGES, TOKEN, serve
from tests.unit.web_site import NOW, ad_of, sandbox

FILE = Path(__file__).parent / "golden" / "pages.txt"
_MORE = ["/job?id=9.0", "/jobs?order=size", "/history?by=destination", "/destination?server=gone.example.org"]
#: States and troubles that the pool of the other tests does not have.
_ADS = (
    ad_of(3, sandbox(5, "Delivered", files_left=0, bytes_left=0), sandbox(6, "Lost"), more={"ends_in_s": 600}),
    ad_of(4, sandbox(7, "HandedOver", custody=("r1",)), sandbox(8, paused=1), heard_at=NOW - 900),
)


def pages(folder: Path) -> str:
    """Return the texts of all pages."""
    shown: list[str] = []

    async def look(client: Any, server: Server) -> None:
        for path in [*PAGES, *_MORE]:
            plain = _text(await (await client.get(path)).text())
            named = _text(await (await client.get(path, headers={"Authorization": f"Bearer {TOKEN}"})).text())
            shown.append(f"== {path}\n{plain}\n")
            if named != plain:
                shown.append(f"== {path} with names\n{named}\n")

    with _utc():
        serve(folder, look, ads=_ADS)
    return "\n".join(shown)


@contextmanager
def _utc() -> Iterator[None]:
    """Times are shown in the zone of the server."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = "UTC"
    time.tzset()
    try:
        yield
    finally:
        os.environ.pop("TZ") if before is None else os.environ.update(TZ=before)
        time.tzset()


def _text(page: str) -> str:
    """Return a page's own part as lines: cells with a bar behind each, links with their addresses."""
    found = re.search(r"(?s)<main.*?</main>", page)
    assert found, page
    text = re.sub(r'<a\b[^>]*?href="([^"]*)"[^>]*>(.*?)</a>', r"\2 &lt;\1&gt;", found[0])
    text = re.sub(r"</t[dh]>", " | ", text)
    text = re.sub(r"</(tr|h\d|p|li|caption|form|dt|dd|div|label|option|button)>", "\n", text)
    lines = (" ".join(html.unescape(re.sub(r"<[^>]*>", "", line)).split()) for line in text.splitlines())
    return "\n".join(filter(None, lines))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        FILE.write_text(pages(Path(directory)))
