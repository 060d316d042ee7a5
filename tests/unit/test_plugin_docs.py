"""The pages for authors of plugins show what the template and the suite have."""

import os
import re
import runpy
from pathlib import Path

import pytest

from stageout.cli.plugin_new import write
from stageout.testing.conformance_rules import RULES

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "plugin/write.md").read_text()


@pytest.mark.parametrize("block", re.findall(r"^```python\n(.*?)^```$", PAGE, re.S | re.M))
def test_code_is_that_of_the_template(block, tmp_path):
    assert any(block in path.read_text() for path in write("tape", tmp_path))


def test_what_the_template_verifies_is_on_the_disk(tmp_path, monkeypatch):
    write("tape", tmp_path)
    copy = runpy.run_path(str(tmp_path / "tape_protocol.py"))["copy"]
    (tmp_path / "source").write_bytes(b"abc")
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_ino))
    assert copy(tmp_path / "source", tmp_path / "target").verified == "size"
    assert synced == [(tmp_path / "target").stat().st_ino]


def test_files_of_the_template_are_listed(tmp_path):
    listed = set(re.findall(r"^\| `(\S+)` \|", PAGE, re.M))
    assert {path.name for path in write("tape", tmp_path)} <= listed


def test_rules_are_listed():
    page = (DOCS / "reference/conformance.md").read_text()
    listed = dict(re.findall(r"^\| \S+ \S+</a>`([a-z0-9-]+)` \| (must|should) \|", page, re.M))
    assert listed == {rule.name: rule.level for rule in RULES}
