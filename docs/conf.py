"""Configuration of Sphinx for both books (``_ext/books.py``): ``make docs`` builds them into ``out/docs/html``."""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE / "_ext"), str(_HERE.parent)]

from books import DEVELOPERS
from stageout_docs import SCHEME

from stageout import __version__

project = "stageout"
author = "the stageout developers"
copyright = author
version = release = __version__

extensions = ["myst_parser", "stageout_docs"]
exclude_patterns = ["_ext", "changes", DEVELOPERS.folder]
nitpicky = True
highlight_language = "text"

myst_enable_extensions = ["attrs_inline"]  # stageout_docs makes anchors with it
myst_heading_anchors = 4
myst_url_schemes = ["http", "https", "mailto", SCHEME]
smartquotes = False  # an option begins with two hyphens


html_theme = "furo"
html_static_path = [str(_HERE / "_static")]
html_copy_source = False
