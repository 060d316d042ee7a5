"""The answer to -classad: right, and cheap."""

import re
import subprocess
import sys
from pathlib import Path

import classad2
import pytest

from stageout.plugin.abilities import Abilities
from stageout.plugin.query import query_ad
from stageout.testing.starter import PluginError, PluginTable, installed, query

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
OURS = {"stageout", "stageout.core", "stageout.core.classads", "stageout.plugin", "stageout.plugin.abilities",
        "stageout.plugin.query"}  # fmt: skip
#: Of the standard library; which of them an interpreter loads by itself depends on its site-packages.
STANDARD = {
    "__future__", "_collections", "_collections_abc", "_operator", "_stat", "collections", "collections.abc",
    "genericpath", "itertools", "keyword", "operator", "os", "os.path", "posixpath", "reprlib", "stat",
}  # fmt: skip
DECLARE = "from stageout.plugin import Abilities, run; import sys; sys.argv[1:] = ['-classad']; "


def modules_of(code: str) -> set[str]:
    """Modules loaded in an isolated interpreter without site-packages of its own accord."""
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
    done = subprocess.run([sys.executable, "-I", "-S", "-c", start + code], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_what_the_query_loads():
    code = DECLARE + "import os; os._exit = lambda status: (sys.stderr.write(' '.join(sys.modules)), sys.exit(0)); "
    loaded = modules_of(code + "run(Abilities(('demo',), '1'), 'no.such:Thing')")
    bare = modules_of("sys.stderr.write(' '.join(sys.modules))")
    assert loaded - bare - STANDARD == OURS, "in every job's way: an addition has to be worth its time"


def test_query_answer_is_what_condor_reads(tmp_path):
    plugin = installed(TESTS / "scripted_plugin", tmp_path)
    printed = subprocess.run([plugin, "-classad"], capture_output=True, check=True)
    assert printed.stderr == b""
    (ad,) = classad2.parseAds(printed.stdout.decode(), classad2.ParserType.Old)
    assert dict(ad) == {
        "MultipleFileSupport": True,
        "ProtocolVersion": 4,
        "PluginType": "FileTransfer",
        "PluginVersion": "7.1",
        "SupportedMethods": "script,other",
        "StageOutConcurrency": True,
        "StartdAttrs": "ScriptedLevel",
        "ScriptedLevel": 3,
    }
    assert query(plugin)["ScriptedLevel"] == 3


def test_the_sandbox_manager_is_told_how_large_batches_may_be():
    assert query_ad(Abilities(("demo",), "1", batch_files=500))["StageOutBatchFiles"] == 500
    assert "StageOutBatchFiles" not in query_ad(Abilities(("demo",), "1"))


def test_no_startd_attrs_when_there_are_none():
    assert "StartdAttrs" not in query_ad(Abilities(("demo",), "1"))


@pytest.mark.parametrize("method", ["my-store", "a.b", "a+b", "", "9p", "caf\u00e9"])
def test_methods_that_condor_cannot_find_are_refused(method):
    with pytest.raises(ValueError, match="letters and digits"):
        Abilities((method,) if method else ("", "x"), "1")


@pytest.mark.parametrize("attributes", [{"a": {"b": 1}}, {"a": [1]}, {"a b": 1}, {"a": None}])
def test_startd_attributes_that_break_the_slot_are_refused(attributes):
    with pytest.raises(ValueError, match="startd attribute"):
        Abilities(("demo",), "1", startd_attributes=attributes)


def test_a_later_plugin_wins_a_method(tmp_path):
    plugins = []
    for name, methods in (("first", "a,b"), ("second", "B,c"), ("mute", "")):
        plugin = tmp_path / name
        plugin.write_text(f"#!/bin/sh\necho 'SupportedMethods = \"{methods}\"'\n")
        plugin.chmod(0o755)
        plugins.append(plugin)
    table = PluginTable([*plugins, tmp_path / "absent"])
    assert table.methods == ["a", "b", "c"]
    assert [table.find(f"{scheme}://h/p").name for scheme in ("a", "b", "x+y-B", "1.c")[:3]] == [
        "first",
        "second",
        "second",
    ]
    assert set(table.bad) == {plugins[2], tmp_path / "absent"}
    with pytest.raises(PluginError, match="no plugin for z"):
        table.find("z://h/p")
    with pytest.raises(PluginError, match="not a URL"):
        table.find("/z")


def test_executables_are_short():
    for plugin in [*(ROOT / "plugins").glob("*_plugin"), *(ROOT / "examples").glob("*_plugin")]:
        head, _, body = plugin.read_text().rpartition("\n'''\n\n")  # of ours; tests/unit/test_stored_answer.py has it
        lines = body.rstrip().split("\n")
        assert (head or body).startswith("#!")
        assert len(lines) <= (60 if plugin.parent.name == "examples" else 10)
        assert not re.search(r"^import (pycurl|ssl|requests)", plugin.read_text(), re.M)
