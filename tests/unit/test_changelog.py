"""Fragments of the change log: each is usable, and a release moves all of them into CHANGELOG.md."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_SPEC = importlib.util.spec_from_file_location("changelog", ROOT / "tools/changelog.py")
assert _SPEC is not None
assert _SPEC.loader is not None
changelog = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(changelog)


def test_the_fragments_can_be_used() -> None:
    assert changelog.faults(changelog.fragments(ROOT)) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pause.new.md", "Owners can pause."),
        ("pause.added.txt", "Owners can pause."),
        ("Pause it.added.md", "Owners can pause."),
        ("pause.added.md", "owners can pause"),
        ("pause.added.md", "Owners can pause.\n\nThey can resume."),
        ("pause.added.md", "Owners can pause. " * 21),
        ("pause.added.md", ""),
    ],
)
def test_a_fragment_that_no_release_can_use_is_found(name: str, text: str) -> None:
    (wrong,) = changelog.faults({name: text.strip()})
    assert wrong.startswith(f"docs/changes/{name}: ")


def test_a_release_moves_the_fragments_into_the_change_log(tmp_path: Path) -> None:
    changes = tmp_path / "docs/changes"
    changes.mkdir(parents=True)
    for name in ("b.fixed.md", "a.fixed.md", "pause.added.md"):
        (changes / name).write_text(f"Text of\n{name[0]}.\n")
    (changes / "README.md").write_text("# Fragments\n")
    log = tmp_path / "CHANGELOG.md"
    log.write_text("# Changes\n\nIntroduction.\n\n## 0.1.0 (2026-11-30)\n\n- First.\n")
    changelog.release(tmp_path, "0.2.0", "2027-01-31")
    assert log.read_text() == (
        "# Changes\n\nIntroduction.\n\n## 0.2.0 (2027-01-31)\n\n### Added\n\n- Text of p.\n\n"
        "### Fixed\n\n- Text of a.\n- Text of b.\n\n## 0.1.0 (2026-11-30)\n\n- First.\n"
    )
    assert [path.name for path in changes.iterdir()] == ["README.md"]
    with pytest.raises(SystemExit, match="no fragment"):
        changelog.release(tmp_path, "0.3.0", "2027-02-01")
    (changes / "c.fixed.md").write_text("Text.\n")
    with pytest.raises(SystemExit, match=r"already has 0\.2\.0"):
        changelog.release(tmp_path, "0.2.0", "2027-02-01")
