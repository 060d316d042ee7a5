"""Pictures of all views for the documentation: ``python -m tests.web.screenshots``."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from PIL import Image

from tests.polling import wait_for
from tests.web.browser import Browser, browser
from tests.web.page_server import serve
from tests.web.test_browser import VIEWS

_PLACE = Path(__file__).resolve().parents[2] / "docs/web"
_COLOURS = 64


#: Name of a picture's end -> theme and width.
_KINDS = {"": ("light", 1200), "-dark": ("dark", 1200), "-narrow": ("light", 400)}


def main() -> None:
    """Write small PNGs of each view: light and dark, and 400 pixels wide."""
    _PLACE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, serve(Path(name), 3600) as (url, _), browser(Path(name)) as opened:
        for end, (theme, width) in _KINDS.items():
            opened.theme(theme)
            for view, path in VIEWS.items():
                _picture(opened, url + path, width, _PLACE / f"{view}{end}.png", view in ("now", "destination"))


def _picture(opened: Browser, url: str, width: int, target: Path, has_charts: bool) -> None:
    opened.size(width, 900)
    opened.open(url)
    if has_charts:
        wait_for(lambda: opened.run("return document.querySelectorAll('.u-wrap canvas').length") == 2, "charts")
    height = opened.run("return document.documentElement.scrollHeight")
    opened.size(width, min(1400, height))
    image = Image.open(io.BytesIO(opened.screenshot())).convert("RGB").quantize(_COLOURS)
    image.save(target, optimize=True)


if __name__ == "__main__":
    main()
