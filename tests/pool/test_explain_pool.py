"""``stageout explain`` says before the submission what HTCondor's own transforms and the nodes then do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.pool.conftest import Site

pytestmark = pytest.mark.pool

_FILE = """
executable = /bin/sh
transfer_executable = false
should_transfer_files = YES
transfer_output_files = out1, out2
output_destination = {url}/$(ClusterId).$(ProcId)
{extra}
queue 3
"""


def _explain(site: Site, what: str) -> tuple[int, dict[str, Any]]:
    done = site.stageout("explain", "--json", what, check=False)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


def _file(site: Site, extra: str = "", url: str = "") -> str:
    path = site.gates.parent / f"{site.prefix}.sub"
    path.write_text(_FILE.format(url=url or site.url(), extra=extra))
    path.chmod(0o644)
    return str(path)


def _levels(found: dict[str, Any]) -> dict[str, str]:
    return {line["name"]: line["level"] for line in found["lines"]}


def test_a_submit_file_is_explained_and_nothing_is_submitted(site: Site) -> None:
    path = _file(site)
    before = site.pool.jobs("true", ["ClusterId"])
    status, found = _explain(site, path)
    assert (status, found["delivery"], found["code"]) == (0, "hand-off", ""), found["lines"]
    assert [output["url"] for output in found["outputs"]] == [site.url() + "/1.0/out1", site.url() + "/1.0/out2"]
    levels = _levels(found)
    assert {levels[name] for name in ("delivery", "plugin", "agent", "server")} == {"ok"}
    assert levels["streams"] in ("ok", "unknown")
    assert site.pool.jobs("true", ["ClusterId"]) == before
    assert site.destination.requests("", site.prefix) == []


@pytest.mark.parametrize(
    ("extra", "code"),
    [
        ("MY.StageOutAsync = false", "NotAsked"),
        ("MY.IsToilJob = true", "WorkflowJob"),
        ("cron_minute = 0", "MayRunAgain"),
        ("on_exit_remove = ExitCode == 3", "MayRunAgain"),
        ("universe = scheduler", "Universe"),
    ],
)
def test_synchronous_jobs_have_the_code_that_the_schedd_gives_them(site: Site, extra: str, code: str) -> None:
    status, found = _explain(site, _file(site, extra))
    assert (status, found["delivery"], found["code"]) == (0, "synchronous", code), found["lines"]
    if code != "Universe":
        job = site.submit(extra=f"{extra}\nhold = true")
        ad: dict[str, Any] = site.pool.q(job, ["StageOutSynchronousCode"]) or {}
        assert ad["StageOutSynchronousCode"] == code
        assert _explain(site, str(job))[1]["code"] == code


def test_obstacles_are_found(site: Site) -> None:
    status, found = _explain(site, _file(site, url="davs://127.0.0.1:1/x"))
    assert (status, _levels(found)["server"]) == (1, "problem")
    status, found = _explain(site, _file(site, url="tape://host/x"))
    assert (status, _levels(found)["plugin"]) == (1, "problem")
    status, found = _explain(site, _file(site, url="cms+" + site.url()))
    assert (status, _levels(found)["credential"]) == (1, "problem")


def test_a_job_in_the_queue_and_jobs_before_it(site: Site) -> None:
    for _ in range(3):
        site.wait_left(site.submit())
    job = site.submit(extra="hold = true")
    status, found = _explain(site, str(job))
    assert (status, found["delivery"], _levels(found)["time"]) == (0, "hand-off", "ok"), str(found)
    assert found["outputs"][0]["url"] == f"{site.url()}/{job}/out1"
    assert site.stageout("explain", "999999.0", check=False).returncode == 3
    assert site.stageout("explain", "none.sub", check=False).returncode == 64
