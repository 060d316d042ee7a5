"""Real workflow managers on a real pool: by default a step that needs a file starts when it is at its URL.

They are installed by network into an environment of their own, so they run only on request: ``make workflow``. A job
that asks shows why the default is what it is: the manager goes on before the file is there, or removes the job and so
cancels the delivery.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.harness.destination import Destination
from tests.harness.pool.image import find_image, image_account
from tests.harness.pool.install import pip_files
from tests.harness.pool.submission import prepare_directory
from tests.pool.conftest import QUICK_AP, QUICK_EP, VERSION, Site, open_directory

pytestmark = [
    pytest.mark.pool,
    pytest.mark.skipif(not os.environ.get("STAGEOUT_WORKFLOW_MANAGERS"), reason="it installs packages: make workflow"),
]

_HERE = Path(__file__).parent / "workflow"
#: Longer than two looks of any of the managers at its job.
_HELD_S = 8.0
_BOOTSTRAP = """#!/bin/sh
export PATH={venv}/bin:$PATH PYTHONPATH={place} LAW_CONFIG_FILE={place}/law.cfg TEST_URL={url} HOME=$PWD
"""
_LAW = "import sys; from law.cli.cli import run; sys.argv = ['law', 'run', 'law_tasks.Use', '--local-scheduler']; run()"


@dataclass
class Bench:
    """A pool whose nodes all see the environment of the managers."""

    site: Site
    venv: Path
    runs: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def python(self, place: Path, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment on the access point to its end."""
        env = {"PATH": f"{self.venv}/bin:/usr/bin:/bin", **env}
        python = f"{self.venv}/bin/python"
        return self.site.pool.ap.run([python, *argv], user="alice", cwd=place, check=False, timeout_s=480, env=env)

    def place(self, **files: str) -> Path:
        """Make a directory of alice's that all nodes see."""
        account = image_account(find_image(VERSION), "alice")
        return prepare_directory(self.site.pool.dir / "jobs" / "alice", account, files)

    def url(self, name: str) -> str:
        """Make a directory at the destination, and return its address."""
        place = self.site.destination.file(f"{self.site.prefix}/{name}")
        place.mkdir(parents=True)
        place.chmod(0o777)
        return self.site.url(name)

    def arrived(self, name: str) -> bool:
        """Return whether the file of that run is at its URL."""
        return self.site.destination.file(f"{self.site.prefix}/{name}/big").exists()

    def job(self) -> dict[str, Any]:
        """Wait for the manager's job, and return its ad."""
        found = self.site.pool.wait(lambda: self.site.pool.jobs("true", []), timeout_s=60, what="the manager's job")
        assert len(found) == 1
        return dict(found[0])


@pytest.fixture(scope="module")
def bench(stageout_pools: Any, destination: Destination, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A pool of one node."""
    with open_directory("managers") as venv:
        _install(venv)
        settings = {"ap_config": QUICK_AP, "ep_config": QUICK_EP, "binds": (venv,)}
        with stageout_pools(version=VERSION, execute_points=1, cpus=4, **settings) as pool:
            yield Bench(Site(pool, destination, "managers", tmp_path_factory.mktemp("no-gates")), venv)


def _install(venv: Path) -> None:
    """Install the pinned packages for the Python of the pool's root, at the path where the nodes see them."""
    image = find_image(VERSION)
    inside = image.root / str(venv).lstrip("/")
    inside.mkdir(parents=True)
    try:
        binds = {venv: str(venv), _HERE: "/mnt", **pip_files(image)}
        image.run(["python3", "-m", "venv", "--system-site-packages", str(venv)], binds=binds)
        pip = [f"{venv}/bin/python", "-m", "pip", "install", "-q", "--no-deps"]
        image.run([*pip, "-r", "/mnt/requirements.txt"], binds=binds)
        # There is no wheel for the newest Python, and no compiler: that of another Python works without its C part.
        (packages,) = venv.glob("lib/python3*/site-packages")
        other = ["--python-version", "3.13", "--only-binary", ":all:", "--target", str(packages)]
        image.run([*pip, *other, "immutables==0.21"], binds=binds)
    finally:
        inside.rmdir()


@pytest.fixture(autouse=True)
def _empty(bench: Bench) -> Iterator[None]:
    yield
    bench.site.destination.be_well()
    for ad in bench.site.pool.jobs("true", ["ClusterId"]):
        bench.site.pool.rm(str(ad["ClusterId"]))
    bench.site.pool.wait(lambda: not bench.site.pool.jobs("true", ["ClusterId"]), timeout_s=60, what="an empty queue")


def _snakemake(bench: Bench, url: str, *, asks: bool = False) -> tuple[Path, subprocess.CompletedProcess[str]]:
    place = bench.place(Snakefile=(_HERE / "Snakefile").read_text())
    ask = ["ask=1"] if asks else []
    options = ["--executor", "htcondor", "--htcondor-jobdir", ".snakemake/htcondor", "--jobs", "2"]
    options += ["--latency-wait", "5", "--seconds-between-status-checks", "2"]
    options += ["--default-resources", "mem_mb=100", "disk_mb=100", "--config", f"url={url}", *ask]
    return place, bench.python(place, "-m", "snakemake", *options)


def _law(bench: Bench, url: str, *, asks: bool = False) -> tuple[Path, subprocess.CompletedProcess[str]]:
    config = "[modules]\nlaw_tasks\n[job]\njob_file_dir: jobfiles\n"
    place = bench.place(**{"law_tasks.py": (_HERE / "law_tasks.py").read_text(), "law.cfg": config})
    bootstrap = _BOOTSTRAP.format(venv=bench.venv, place=place, url=url)
    (place / "bootstrap.sh").write_text(bootstrap)
    (place / "bootstrap.sh").chmod(0o755)
    env = {"PYTHONPATH": str(place), "LAW_CONFIG_FILE": f"{place}/law.cfg", "TEST_URL": url}
    return place, bench.python(place, "-c", _LAW, **env, **({"TEST_ASK": "1"} if asks else {}))


def _parsl(bench: Bench, url: str, *, asks: bool = False) -> tuple[Path, subprocess.CompletedProcess[str]]:
    place = bench.place(**{"run.py": (_HERE / "parsl_run.py").read_text()})
    return place, bench.python(place, "run.py", url, *(["MY.StageOutAsync = true"] if asks else []))


def _dask(bench: Bench, url: str, *, asks: bool = False) -> tuple[Path, subprocess.CompletedProcess[str]]:
    place = bench.place(**{"run.py": (_HERE / "dask_run.py").read_text()})
    return place, bench.python(place, "run.py", url, *(["MY.StageOutAsync=true"] if asks else []))


_MANAGERS = {"snakemake": _snakemake, "law": _law, "parsl": _parsl, "dask": _dask}


@pytest.mark.parametrize("manager", ["snakemake", "law", "parsl"])
def test_by_default_the_next_step_finds_the_file(bench: Bench, manager: str) -> None:
    url = bench.url(f"{manager}-default")
    bench.site.destination.pause()
    run = bench.runs.submit(_MANAGERS[manager], bench, url)
    ad = bench.job()
    assert (ad["StageOutWorkflow"], ad["StageOutGuard"], ad["StageOutSynchronousCode"]) == (True, False, "WorkflowJob")
    job = f"{ad['ClusterId']}.{ad['ProcId']}"
    bench.site.pool.wait(
        lambda: (bench.site.pool.q(job, ["TransferringOutput"]) or {}).get("TransferringOutput"),
        timeout_s=180,
        what="the transfer of its output",
    )
    time.sleep(_HELD_S)
    assert not run.done(), "it went on while the file was on its way"
    bench.site.destination.resume()
    place, done = run.result(timeout=480)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    fetched = "fetched data" in said if manager == "parsl" else (place / "used").read_text() == "data\n"
    assert fetched, said
    for file in place.glob("parsl/*/submit_scripts/*.submit"):
        told = json.loads(bench.site.stageout("explain", "--json", str(file), check=False).stdout)
        assert (told["delivery"], told["code"]) == ("synchronous", "WorkflowJob")


@pytest.mark.parametrize("manager", ["snakemake", "law"])
def test_a_job_that_asks_is_done_for_its_manager_before_the_file_is_there(bench: Bench, manager: str) -> None:
    url = bench.url(f"{manager}-asks")
    bench.site.destination.refuse("later", 503)
    place, done = _MANAGERS[manager](bench, url, asks=True)
    assert done.returncode != 0 and not (place / "used").exists(), done.stdout + done.stderr
    (ad,) = bench.site.pool.jobs("true", ["ClusterId", "JobStatus", "StageOutGuard"])
    assert (ad["JobStatus"], ad["StageOutGuard"]) == (4, True)
    bench.site.destination.accept()
    assert bench.site.wait_left(str(ad["ClusterId"]), timeout_s=120)["StageOutState"] == "Delivered"
    assert bench.arrived(f"{manager}-asks")


@pytest.mark.parametrize(("manager", "says"), [("parsl", "COMPLETED\nnot there 503"), ("dask", " 4\n")])
def test_managers_that_remove_a_completed_job_cancel_its_delivery(bench: Bench, manager: str, says: str) -> None:
    url = bench.url(f"{manager}-asks")
    bench.site.destination.refuse("later", 503)
    run = bench.runs.submit(_MANAGERS[manager], bench, url, asks=True)
    job = f"{bench.job()['ClusterId']}.0"
    _, done = run.result(timeout=480)
    assert says in done.stdout, done.stdout + done.stderr
    assert bench.site.wait_left(job, timeout_s=60)["JobStatus"] == 3
    bench.site.pool.wait(bench.site.spool_is_empty, timeout_s=60, what="the output to be deleted")
    bench.site.destination.accept()
    assert not bench.arrived(f"{manager}-asks")


def test_dask_removes_a_worker_whose_output_is_on_its_way(bench: Bench) -> None:
    """With or without stageout: Dask takes a worker that has left its scheduler for dead."""
    url = bench.url("dask-default")
    bench.site.destination.pause()
    run = bench.runs.submit(_dask, bench, url)
    ad = bench.job()
    assert ad["StageOutSynchronousCode"] == "WorkflowJob"
    job = f"{ad['ClusterId']}.0"
    bench.site.pool.wait(
        lambda: (bench.site.pool.q(job, ["JobStatus"]) or {}).get("JobStatus") == 3, timeout_s=180, what="its removal"
    )
    bench.site.destination.resume()
    run.result(timeout=480)
    assert bench.site.wait_left(job, timeout_s=60)["JobStatus"] == 3
