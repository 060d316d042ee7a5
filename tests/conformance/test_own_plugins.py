"""Our own plugins, and the example, keep every rule."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stageout.core.errors import ErrorClass
from stageout.testing.conformance import check, failures, local_endpoint, table
from stageout.testing.conformance_rules import RULES
from stageout.testing.endpoints import Endpoint, HttpEndpoint
from stageout.testing.examination import NotApplicable
from stageout.testing.starter import EmbeddedStarter, PluginTable, Wanted, installed

ROOT = Path(__file__).resolve().parents[2]
#: Executable of an example for mounted storage -> the file that its top directory has.
MARKERS = {"mounted_plugin": ".mounted", "bash/depot_plugin": ".depot"}


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / "place"
    folder.mkdir()
    for marker in MARKERS.values():
        (folder / marker).touch()
    return folder


def _example(name, folder):
    """An example with all that it needs, and with the mount points of these tests."""
    plugin = installed(ROOT / "examples" / name, folder)
    if name == "mounted_plugin":
        text = plugin.read_text()
        assert text.count('"/mount/project")') == 1
        plugin.write_text(text.replace('"/mount/project")', f'"{folder}/place")'))
    else:
        shutil.copy(ROOT / "examples" / "bash" / "depot.sh", folder)
        (folder / "depot.tops").write_text(f"/mount/project\n{folder}/place\n")
    return plugin


def test_the_example(tmp_path, place):
    plugin = _example("mounted_plugin", tmp_path)
    findings = check(plugin, Endpoint(f"mounted://{place}", place))
    assert failures(findings) == [], table(findings)
    assert {item.rule for item in findings if item.outcome == "n/a"} <= {"killed", "nameless-node"}


def test_the_example_in_bash(tmp_path, place):
    plugin = _example("bash/depot_plugin", tmp_path)
    findings = check(plugin, Endpoint(f"depot://{place}", place))
    assert failures(findings) == [], table(findings)
    assert {item.rule for item in findings if item.outcome == "n/a"} <= {"nameless-node"}
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if _is_there(path)]
    assert not [line for line in lines if str(tmp_path).encode() in line], "the script ends with its plugin"


def test_the_page_shows_an_endpoint_of_storage_that_is_not_mounted(tmp_path, place):
    """The program of the page, with a command that reaches the storage; the suite has no folder of it."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/plugin/bash.md").read_text(), re.S | re.M)
    _example("bash/depot_plugin", tmp_path)
    client = tmp_path / "store-client"
    client.write_text(
        '#!/bin/bash\npath=${2#depot://}\nmkdir -p "${path%/*}"\n[ $1 = put ] && exec cat > "$path"\ncat "$path"\n'
    )
    client.chmod(0o755)
    code = code.replace("depot://store.example.org/test", f"depot://{place}")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.findall("^fail .*$", done.stdout, re.M)
    assert set(re.findall(r"^n/a +\w+ +(\S+)", done.stdout, re.M)) <= {"killed", "nameless-node"}


def test_without_a_place_only_rules_about_the_answer_count(tmp_path):
    findings = check(_example("bash/depot_plugin", tmp_path))
    counted = {item.rule for item in findings if item.outcome != "n/a"}
    assert counted == {rule.name for rule in RULES if rule.name.startswith("query-")}
    page = " ".join((ROOT / "docs/plugin/bash.md").read_text().split())
    assert len(counted) == 7 and "only the seven rules `query-...` count" in page


def _is_there(path: Path) -> bool:
    try:
        return bool(path.read_bytes())
    except OSError:
        return False


def test_the_example_in_bash_believes_only_what_is_stored(tmp_path, place):
    """A script that stores other bytes, one that says nothing, and one that says why it fails."""
    plugin = _example("bash/depot_plugin", tmp_path)
    script = tmp_path / "depot.sh"
    (tmp_path / "file").write_text("12345")
    for body, told in (
        ('echo "5 0000"', "the depot has other bytes: 5 0000"),
        ("true", "the depot has other bytes"),
        ("echo 'project is locked' >&2; exit 77", "project is locked"),
    ):
        script.write_text(f"#!/bin/bash\n{body}\n")
        script.chmod(0o755)
        starter = EmbeddedStarter(tmp_path, PluginTable([plugin]))
        run = starter.upload([Wanted(f"depot://{place}/file", "file")])[0]
        assert told in run.ads[0].text("TransferError")


@pytest.mark.parametrize("example", MARKERS)
def test_a_storage_that_is_not_mounted_gets_and_gives_nothing(example, tmp_path, place):
    """The directory is there, but the storage is not: what arrives would be on the node's own disk."""
    plugin = _example(example, tmp_path)
    scheme = plugin.name.partition("_")[0]
    (place / "old").write_text("old")
    (tmp_path / "file").write_text("12345")
    starter = EmbeddedStarter(tmp_path, PluginTable([plugin]))
    up, down = Wanted(f"{scheme}://{place}/new/file", "file"), Wanted(f"{scheme}://{place}/old", "got")
    (place / MARKERS[example]).rename(tmp_path / MARKERS[example])  # above the mount point it counts for nothing
    for run in (starter.upload([up])[0], starter.download([down])[0]):
        assert "mounted" in run.ads[0].text("TransferError")
        (error,) = run.ads[0]["TransferErrorData"]
        assert error["ErrorCode"] == ErrorClass.CONNECT_FAILED.code, "counts as no attempt"
    assert [path.name for path in place.rglob("*") if path.name not in MARKERS.values()] == ["old"]
    (tmp_path / MARKERS[example]).rename(place / MARKERS[example])
    assert starter.upload([up])[0].succeeded
    assert (place / "new" / "file").read_text() == "12345"
    outside = starter.upload([Wanted(f"{scheme}://{place}/../outside", "file")])[0]
    assert "below none of the mount points" in outside.ads[0].text("TransferError")
    assert not (tmp_path / "outside").exists()


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_curl_plugin(tmp_path, place, scheme):
    plugin = installed(ROOT / "plugins" / "stageout_curl_plugin", tmp_path)
    endpoint = HttpEndpoint(place) if scheme == "http" else Endpoint(f"file://{place}", place)
    try:
        findings = check(plugin, endpoint)
    finally:
        endpoint.close()
    assert failures(findings) == [], table(findings)


def test_without_a_place_only_the_rules_of_the_query_count(tmp_path):
    plugin = _example("mounted_plugin", tmp_path)
    counted = {item.rule for item in check(plugin) if item.outcome != "n/a"}
    assert counted == {rule.name for rule in RULES if rule.name.startswith("query-")}


class _Elsewhere(Endpoint):
    """A place that is no directory of this machine for the suite: put and get do all."""

    def __init__(self, url_base, folder):
        super().__init__(url_base, Path("/nonexistent"))
        self._storage = Endpoint(url_base, folder)

    def put(self, name, data):
        self._storage.put(name, data)

    def get(self, name):
        return self._storage.get(name)

    def stall(self):
        raise NotApplicable("no file of this storage stalls")


def test_an_endpoint_of_ones_own_needs_no_directory(tmp_path, place):
    plugin = _example("mounted_plugin", tmp_path)
    findings = check(plugin, _Elsewhere(f"mounted://{place}", place))
    assert failures(findings) == [], table(findings)
    assert {item.rule for item in findings if item.outcome == "n/a"} <= {"killed", "nameless-node"}


def test_local_endpoints(tmp_path):
    plugin = tmp_path / "plugin"
    for methods, kind in (("ftp,http", HttpEndpoint), ("ftp file", Endpoint), ("ftp", type(None))):
        plugin.write_text(f"#!/bin/sh\necho 'SupportedMethods = \"{methods}\"'\n")
        plugin.chmod(0o755)
        folder = tmp_path / methods
        folder.mkdir()
        endpoint = local_endpoint(plugin, folder)
        assert type(endpoint) is kind
        if endpoint:
            endpoint.close()
