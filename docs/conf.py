"""Configuration of Sphinx: ``make docs`` builds the site and the man pages into ``out/docs``."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE / "_ext"), str(_HERE.parent)]

from stageout import __version__

project = "stageout"
author = "the stageout developers"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.intersphinx", "stageout_docs"]
exclude_patterns = ["_ext", "changes"]
nitpicky = True
highlight_language = "text"

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4


def _manual_inventory() -> str:
    """Write the inventory of HTCondor's manual from ``htcondor-manual.txt``: no build needs a network.

    :returns: name of the file, in the folder of outputs.
    """
    lines = (_HERE / "htcondor-manual.txt").read_text().splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    entries = "".join(f"{name} {kind} 1 {uri} -\n" for kind, name, uri in rows)
    head = "# Sphinx inventory version 2\n# Project: HTCondor\n# Version: latest\n"
    head += "# The remainder of this file is compressed using zlib.\n"
    path = _HERE.parent / "out" / "docs" / "htcondor.inv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head.encode() + zlib.compress(entries.encode()))
    return str(path)


intersphinx_mapping = {"htcondor": ("https://htcondor.readthedocs.io/en/latest/", _manual_inventory())}

html_theme = "furo"
html_title = f"stageout {release}"
html_static_path: list[str] = []
html_copy_source = False

man_pages = [
    ("reference/stageout", "stageout", "show and control the delivery of job output", author, 1),
    ("reference/stageout-sandbox-manager", "stageout-sandbox-manager", "keep and deliver job output", author, 8),
    ("reference/stageout-schedd-agent", "stageout-schedd-agent", "track stage-out for the jobs of a schedd", author, 8),
    ("reference/stageout-router", "stageout-router", "store and forward files of the overlay", author, 8),
    ("reference/stageout-policy-service", "stageout-policy-service", "grant transfer streams to sites", author, 8),
    ("reference/stageout-web", "stageout-web", "show the stage-out of a pool on a web page", author, 8),
]
man_make_section_directory = False
