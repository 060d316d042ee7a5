"""Our own plugins, and the example, keep every rule."""

from pathlib import Path

import pytest

from stageout.testing.conformance import check, failures, local_endpoint, table
from stageout.testing.endpoints import Endpoint, HttpEndpoint
from stageout.testing.starter import installed

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
