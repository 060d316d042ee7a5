"""``stageout check`` on the machines of a real pool, with the plugins of their configuration."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.pool.conftest import Site

pytestmark = pytest.mark.pool


def _check(site: Site, *words: str) -> tuple[int, dict[str, Any]]:
    done = site.stageout("check", "--json", *words, check=False)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


def test_a_check_says_the_same_as_a_job(site: Site) -> None:
    job = site.submit()
    site.wait_left(job)
    status, found = _check(site, site.url())
    assert (status, [step["outcome"] for step in found["steps"]]) == (0, ["ok", "ok", "ok"])
    assert found["plugin"] == "/opt/stageout/bin/stageout_curl_plugin"
    assert list(site.destination.file(site.prefix).glob("stageout-check-*")) == []
    assert len(site.destination.requests("DELETE", site.prefix)) == 1
    site.check_delivered(job)


def test_a_refusal_is_known_before_jobs_run(site: Site) -> None:
    site.destination.refuse("quota exceeded")
    try:
        status, found = _check(site, site.url())
    finally:
        site.destination.accept()
    assert (status, found["error_class"], found["left_behind"]) == (1, "PERMISSION_DENIED", False)
    assert "quota exceeded" in found["steps"][0]["reason"]


def test_an_execute_point_checks_with_its_own_plugins(site: Site) -> None:
    ep = site.pool.eps[0]
    done = ep.run(["/opt/stageout/bin/stageout", "check", "--json", site.url()], user="alice", check=False)
    found = json.loads(done.stdout)
    assert (done.returncode, found["plugin_source"]) == (0, "FILETRANSFER_PLUGINS"), done.stderr
    assert found["plugin"].endswith("gated_plugin") or found["plugin"].endswith("stageout_curl_plugin")
