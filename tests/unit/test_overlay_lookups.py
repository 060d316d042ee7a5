"""A router lists all names of a directory, but not its own directory below the root."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from overlay_router.local.lookups import pages
from overlay_router.local.tree import OWN, Tree


def _names(tree: Tree, path: str) -> list[str]:
    return sorted(name for page in pages(tree, path) for name in page.names)


def test_the_routers_own_directory_is_listed_nowhere(tmp_path: Path) -> None:
    with closing(Tree(tmp_path)) as tree:
        (tmp_path / "d" / OWN).mkdir(parents=True)
        (tmp_path / "f").touch()
        assert _names(tree, "") == ["d", "f"]
        assert _names(tree, "d") == [OWN], "only at the root it is the router's"
