"""Jobs whose output goes to a router of the overlay, which dies meanwhile."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.router import RouterProcess, relay
from tests.pool.conftest import Site

pytestmark = pytest.mark.pool

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_PLUGIN = "FILETRANSFER_PLUGINS = $(FILETRANSFER_PLUGINS), /opt/stageout/bin/overlay_router_plugin\n"


@pytest.fixture
def gateway(site: Site, tmp_path: Path) -> Iterator[RouterProcess]:
    """A router, its key on every node, and the plugin for overlay:// there."""
    with RouterProcess(tmp_path / "router") as router:
        key = router.key_file("site").read_text()
        for ep in site.pool.eps:
            path = ep.root / "etc/condor/stageout-overlay.key"
            path.write_text(key)
            path.chmod(0o644)
            ep.configure(_PLUGIN)
        site.pool.wait(
            lambda: all("overlay" in str(ad.get("HasFileTransferPluginMethods")) for ad in site.pool.startd_ads()),
            timeout_s=60,
            what="the nodes to advertise overlay",
        )
        yield router
        for ep in site.pool.eps:
            ep.configure("\n")


def test_output_and_input_through_a_router_that_is_killed(site: Site, gateway: RouterProcess) -> None:
    base = f"overlay://127.0.0.1:{gateway.port}"
    gateway.kill()
    job = site.submit(
        outputs=("out1", "d/out2"), destination=f"{base}/$(Cluster)", extra="transfer_output_files = out1, d"
    )
    site.wait_state(job, "RetryWait", timeout_s=90)
    gateway.start()
    history = site.wait_left(job, timeout_s=120)
    assert history["StageOutState"] == "Delivered"
    assert history["NumShadowStarts"] == 1
    arrived = gateway.root / str(job.cluster)
    for name, digest in site.wrote(job).items():
        assert _sha256(arrived / name) == digest
    reader = _reads_back(site, f"{base}/{job.cluster}/out1")
    assert site.wait_left(reader, timeout_s=90)["JobStatus"] == 4
    assert (reader.dir / "job.out").read_text().split()[0] == site.wrote(job)["out1"]


def test_output_by_two_gateways_of_which_one_is_killed(site: Site, gateway: RouterProcess, tmp_path: Path) -> None:
    with relay(tmp_path / "gw1", [gateway]) as one, relay(tmp_path / "gw2", [gateway]) as two:
        for ep in site.pool.eps:
            ep.configure(f"{_PLUGIN}STAGEOUT_OVERLAY_ROUTES = {one.address}; {two.address}\n")
        jobs = _submit(site, gateway, "first", 4)
        with _nothing_written(gateway):  # so that files are on their way by both when one of them dies
            site.pool.wait(
                lambda: _connections(one) and _connections(two),
                timeout_s=90,
                what="files on their way by both gateways",
            )
            one.kill()
        _arrive(site, gateway, "first", jobs)
        one.start()
        two.kill()
        _arrive(site, gateway, "second", _submit(site, gateway, "second", 1))
    site.pool.wait(
        lambda: not any((gateway.root / ".stageout/staging").iterdir()), what="nothing left of what was on its way"
    )


def test_the_example_runs_as_it_is(site: Site, gateway: RouterProcess) -> None:
    (gateway.root / "alice").mkdir()
    (gateway.root / "alice/events.dat").write_bytes(b"event\n" * 200_000)
    destination = f"DESTINATION = overlay://127.0.0.1:{gateway.port}/alice"
    job = site.pool.submit(
        "alice",
        (_EXAMPLES / "overlay.sub").read_text(),
        files={"analyse.sh": (_EXAMPLES / "analyse.sh").read_bytes()},
        options=["-append", destination],
    )
    site.jobs.append(job)
    for one in job.ids:
        assert site.wait_left(one, timeout_s=90)["StageOutState"] == "Delivered"
    arrived = sorted(path.name for path in gateway.root.glob(f"alice/{job.cluster}.*/*"))
    assert arrived == sorted(4 * ["histograms.dat", "selected.dat", "summary.txt"])


def _submit(site: Site, gateway: RouterProcess, name: str, count: int) -> list[Any]:
    base = f"overlay://127.0.0.1:{gateway.port}/{name}"
    return [
        site.submit(outputs=("out1", "out2"), destination=f"{base}/{number}", env="SIZE=5000000")
        for number in range(count)
    ]


def _arrive(site: Site, gateway: RouterProcess, name: str, jobs: list[Any]) -> None:
    for number, job in enumerate(jobs):
        history = site.wait_left(job, timeout_s=120)
        assert history["StageOutState"] == "Delivered"
        assert history["NumShadowStarts"] == 1
        for output, digest in site.wrote(job).items():
            assert _sha256(gateway.root / name / str(number) / output) == digest


@contextlib.contextmanager
def _nothing_written(router: RouterProcess) -> Iterator[None]:
    """Its workers stand still; the daemon answers."""
    workers = router.workers()
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGCONT)


def _connections(router: RouterProcess) -> int:
    """Established connections to a router."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{router.port:04X}") and row[3] == "01" for row in rows)


def _reads_back(site: Site, url: str) -> Any:
    text = f"""
executable = job.sh
transfer_input_files = {url}
output = job.out
should_transfer_files = YES
request_memory = 50
request_disk = 10M
queue
"""
    job = site.pool.submit("alice", text, files={"job.sh": "#!/bin/sh\nsha256sum out1\n"})
    site.jobs.append(job)
    return job


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
