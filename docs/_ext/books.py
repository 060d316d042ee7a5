"""The two books: one for users, and one for developers, each with its own pages, navigation and search.

``python docs/_ext/books.py OUT [DOCTREES]`` builds both, strictly. All pages lie below ``docs/``: those below
``docs/developer/`` are the developers' book, the others are the users'. The site has the same folders, so that a link
from one book to the other is the same in the repository, on the site and in the packages.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parents[1]


class Book(NamedTuple):
    """A book: the folder of its pages below ``docs/``, and its title. Folders of other books are no part of it."""

    name: str
    folder: str
    title: str


USERS = Book("users", "", "stageout")
DEVELOPERS = Book("developers", "developer", "stageout for developers")
#: In the order of building: the last one checks the links of the whole site.
BOOKS = (DEVELOPERS, USERS)


def book_of(page: Path, docs: Path) -> Book:
    """Return the book that has a page below the documents."""
    return DEVELOPERS if docs / DEVELOPERS.folder in page.parents else USERS


def build(out: Path, doctrees: Path, builder: str = "html", docs: Path = DOCS) -> Iterator[str]:
    """Build both books into a folder, and yield the warnings of each; a book without warnings yields nothing."""
    shutil.rmtree(out / "files", ignore_errors=True)
    for book in BOOKS:
        command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", builder, "-c", str(docs)]
        command += ["-d", str(doctrees / book.name), str(docs / book.folder), str(out / book.folder)]
        done = subprocess.run(command, cwd=docs.parent, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            yield f"{book.title}:\n{done.stderr}"


def main() -> int:
    """Build both books; the exit status is 1 if there are warnings."""
    with tempfile.TemporaryDirectory() as scratch:
        doctrees = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(scratch)
        warnings = list(build(Path(sys.argv[1]).resolve(), doctrees.resolve()))
    print(*warnings, file=sys.stderr, sep="\n", end="")
    return bool(warnings)


if __name__ == "__main__":
    sys.exit(main())
