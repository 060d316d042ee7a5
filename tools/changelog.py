#!/usr/bin/env python3
"""Check the fragments of the change log, or put them into CHANGELOG.md as the section of a release.

Usage: tools/changelog.py [release VERSION]. docs/changes/README.md describes fragments.
"""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("added", "changed", "fixed", "removed", "security")
MOST_WORDS = 60


def fragments(root: Path) -> dict[str, str]:
    """Return the text of each fragment by its file's name."""
    paths = sorted((root / "docs/changes").iterdir())
    return {path.name: path.read_text().strip() for path in paths if path.name != "README.md"}


def faults(found: Mapping[str, str]) -> list[str]:
    """Return a sentence for each fragment that no release can use."""
    wrong = []
    for name, text in found.items():
        if not re.fullmatch(rf"[a-z0-9-]+\.({'|'.join(KINDS)})\.md", name):
            wrong.append(f"docs/changes/{name}: name it CHANGE.KIND.md with one of the kinds {', '.join(KINDS)}")
        if "\n\n" in text or not text.endswith(".") or len(text.split()) > MOST_WORDS:
            wrong.append(f"docs/changes/{name}: write one paragraph of whole sentences with at most {MOST_WORDS} words")
    return wrong


def section(version: str, date: str, found: Mapping[str, str]) -> str:
    """Return the fragments as the section of a release."""
    lines = [f"## {version} ({date})", ""]
    for kind in KINDS:
        texts = [" ".join(text.split()) for name, text in found.items() if name.endswith(f".{kind}.md")]
        lines += [f"### {kind.capitalize()}", "", *(f"- {text}" for text in texts), ""] if texts else []
    return "\n".join(lines)


def release(root: Path, version: str, date: str) -> None:
    """Move all fragments into CHANGELOG.md, above the last release.

    :raises SystemExit: a fragment cannot be used, there is none, or CHANGELOG.md has this release.
    """
    found, log = fragments(root), root / "CHANGELOG.md"
    head, mark, rest = log.read_text().partition("\n## ")
    if faults(found) or not found or f"\n## {version} " in f"{mark}{rest}":
        sys.exit("\n".join(faults(found)) or f"there is no fragment, or CHANGELOG.md already has {version}")
    log.write_text(f"{head}\n{section(version, date, found)}{mark}{rest}")
    for name in found:
        (root / "docs/changes" / name).unlink()


def main(words: Sequence[str]) -> None:
    """Run the command. :raises SystemExit: the command line, or a fragment, is wrong."""
    if len(words) == 2 and words[0] == "release":
        release(ROOT, words[1], datetime.date.today().isoformat())
    elif words:
        sys.exit(__doc__)
    elif wrong := faults(fragments(ROOT)):
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main(sys.argv[1:])
