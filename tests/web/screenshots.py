"""Pictures of all views for the documentation: ``python -m tests.web.screenshots``."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from PIL import Image

from tests.polling import wait_for
from tests.web.browser import browser
from tests.web.page_server import serve
from tests.web.test_browser import VIEWS

_PLACE = Path(__file__).resolve().parents[2] / "docs/web"
_COLOURS = 64


def main() -> None:
    """Write one small PNG for each view: light theme, 1200 pixels wide."""
    _PLACE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, serve(Path(name), 3600) as (url, _), browser(Path(name)) as opened:
        opened.theme("light")
        for view, path in VIEWS.items():
            opened.size(1200, 900)
            opened.open(url + path)
            if view in ("now", "destination"):
                wait_for(lambda: opened.run("return document.querySelectorAll('.u-wrap canvas').length") == 2, "charts")
            height = opened.run("return document.documentElement.scrollHeight")
            opened.size(1200, min(1400, height))
            image = Image.open(io.BytesIO(opened.screenshot())).convert("RGB").quantize(_COLOURS)
            image.save(_PLACE / f"{view}.png", optimize=True)


if __name__ == "__main__":
    main()
