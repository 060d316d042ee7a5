"""Our own plugins, and the example, keep every rule."""

import shutil
from pathlib import Path

import pytest

from stageout.testing.conformance import check, failures, local_endpoint, table
from stageout.testing.endpoints import Endpoint, HttpEndpoint
from stageout.testing.starter import EmbeddedStarter, PluginTable, Wanted, installed

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def place(tmp_path):
    folder = tmp_path / "place"
    folder.mkdir()
    return folder


def test_the_example(tmp_path, place):
    plugin = installed(ROOT / "examples" / "mounted_plugin", tmp_path)
    findings = check(plugin, Endpoint(f"mounted://{place}", place))
    assert failures(findings) == [], table(findings)
    assert {item.rule for item in findings if item.outcome == "n/a"} <= {"killed", "nameless-node"}


def test_the_example_in_bash(tmp_path, place):
    plugin = installed(ROOT / "examples" / "bash" / "depot_plugin", tmp_path)
    shutil.copy(ROOT / "examples" / "bash" / "depot.sh", tmp_path)
    findings = check(plugin, Endpoint(f"depot://{place}", place))
    assert failures(findings) == [], table(findings)
    assert {item.rule for item in findings if item.outcome == "n/a"} <= {"nameless-node"}
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if _is_there(path)]
    assert not [line for line in lines if str(tmp_path).encode() in line], "the script ends with its plugin"


def _is_there(path: Path) -> bool:
    try:
        return bool(path.read_bytes())
    except OSError:
        return False


def test_the_example_in_bash_believes_only_what_is_stored(tmp_path, place):
    """A script that stores other bytes, one that says nothing, and one that says why it fails."""
    plugin = installed(ROOT / "examples" / "bash" / "depot_plugin", tmp_path)
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


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_curl_plugin(tmp_path, place, scheme):
    plugin = installed(ROOT / "plugins" / "stageout_curl_plugin", tmp_path)
    endpoint = HttpEndpoint(place) if scheme == "http" else Endpoint(f"file://{place}", place)
    try:
        findings = check(plugin, endpoint)
    finally:
        endpoint.close()
    assert failures(findings) == [], table(findings)


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
