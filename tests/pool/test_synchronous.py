"""When a sandbox cannot be taken over the plugin uploads at once, says so, and the job leaves the queue at once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.pool.conftest import QUICK_AP, QUICK_EP, Site, wait_until_acquainted

pytestmark = pytest.mark.pool


def _synchronous(site: Any, job: Any, place: str = "") -> str:
    """Check that the job was delivered by its own run and left; why it was, in the plugin's words."""
    history = site.wait_left(job, timeout_s=90)
    assert history["JobStatus"] == 4
    assert history.get("TransferOutputStats", {}).get("STAGEOUTFilesCountLastRun", 0) == 0
    site.check_delivered(job, place)
    results = site.epoch_results(job)
    assert results, "no OUTPUT record"
    reasons = {str(result.get("DeveloperData", {}).get("StageOutSynchronous", "")) for result in results[-1:]}
    return reasons.pop()


def test_no_url_output_leaves_as_without_stageout(site: Any) -> None:
    job = site.submit(destination="")
    history = site.wait_left(job)
    assert history["JobStatus"] == 4
    assert "StageOutGuard" not in history or history["StageOutGuard"] is False
    assert (job.dir / "out1").exists()


def test_owner_says_no(site: Any) -> None:
    job = site.submit(extra="MY.StageOutAsync = false")
    assert "consent" in _synchronous(site, job)


def test_no_manager(site: Any) -> None:
    for ep in site.pool.eps:
        ep.run(["condor_off", "-subsystem", "SANDBOX_MANAGER"])
        site.pool.wait(lambda ep=ep: not ep.pids("sandbox-manager"), what="the manager to stop")
    try:
        job = site.submit()
        _synchronous(site, job)
    finally:
        for ep in site.pool.eps:
            ep.run(["condor_on", "-subsystem", "SANDBOX_MANAGER"])
        wait_until_acquainted(site.pool)


def test_a_manager_that_says_nothing(site: Any) -> None:
    for ep in site.pool.eps:
        ep.kill("sandbox-manager", signal.SIGSTOP)
    try:
        job = site.submit()
        assert "2" in _synchronous(site, job)
    finally:
        for ep in site.pool.eps:
            ep.kill("sandbox-manager", signal.SIGCONT)


def test_second_run_is_synchronous_after_a_first_that_was_handed_off(site: Any) -> None:
    site.close_gate("second-run", "after")
    job = site.submit(place="gate-second-run")
    site.pool.wait(lambda: site.at_gate("second-run", "after"), timeout_s=60, what="the first run to be handed off")
    for ep in site.pool.eps:
        ep.kill("sandbox-manager", signal.SIGSTOP)
    try:
        site.pool.vacate(job, fast=True)
        site.pool.wait(lambda: site.pool.q(job)["NumShadowStarts"] == 2, timeout_s=60, what="the second run")
        site.open_gate("second-run", "after")
        _synchronous(site, job, "gate-second-run")
    finally:
        site.open_gate("second-run", "after")
        for ep in site.pool.eps:
            ep.kill("sandbox-manager", signal.SIGCONT)
    assert len(site.puts(job, "gate-second-run")) == 2
    site.pool.wait(site.spool_is_empty, timeout_s=60, what="the first run's bytes to be freed")


def test_job_that_forges_its_consent(site: Any) -> None:
    """``StageOutGuard`` in the submit file is replaced by the transform; the job that opted out stays out."""
    job = site.submit(extra='MY.StageOutAsync = false\nMY.StageOutGuard = true\nMY.StageOutState = "Delivered"')
    _synchronous(site, job)


def test_job_that_rewrites_its_ad(site: Any) -> None:
    """The manager believes the startd, not ``.job.ad``."""
    site.destination.pause()
    script = (
        "#!/bin/sh\n"
        "echo data > out1\n"
        'echo "$(sha256sum < out1 | cut -d" " -f1) out1"\n'
        'sed -i \'s/^GlobalJobId.*/GlobalJobId = "ap#999.0#1"/; s/^NumShadowStarts.*/NumShadowStarts = 77/; '
        's/^StageOutGuard.*/StageOutGuard = false/\' "$_CONDOR_JOB_AD"\n'
    )
    text = f"""
executable = job.sh
transfer_output_files = out1
output_destination = {site.url()}/$(Cluster).$(Process)
request_memory = 50
request_disk = 10M
queue
"""
    job = site.pool.submit("alice", text, files={"job.sh": script})
    site.jobs.append(job)
    site.pool.wait_status(job, "Completed", timeout_s=60)
    site.destination.resume()
    history = site.wait_left(job)
    assert history["StageOutState"] == "Delivered"
    assert history["StageOutRun"] == 1
    site.check_delivered(job)


class TestWithoutAgent:
    """A pool whose access point has no agent, and nodes with HTCondor's own curl_plugin."""

    @pytest.fixture(scope="class")
    def bare(self, stageout_pools: Any, destination: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:

        with stageout_pools(
            version="25.14", execute_points=1, agent=False, base_config="", ap_config=QUICK_AP, ep_config=QUICK_EP
        ) as pool:
            yield Site(pool, destination, "without-agent", tmp_path_factory.mktemp("no-gates"))

    def test_no_agent(self, bare: Any) -> None:
        assert "agent" in _synchronous(bare, bare.submit())

    def test_stock_plugin_on_the_node(self, bare: Any) -> None:
        stock = bare.pool.eps[0].config_val("LIBEXEC") + "/curl_plugin"
        bare.pool.eps[0].configure(f"FILETRANSFER_PLUGINS = $(FILETRANSFER_PLUGINS), {stock}")
        job = bare.submit()
        history = bare.wait_left(job)
        assert "STAGEOUTFilesCountLastRun" not in history["TransferOutputStats"]
        bare.check_delivered(job)

    def test_other_plugins_beside_ours_still_work(self, bare: Any) -> None:
        """HTCondor's own are advertised, and a third-party one (protocol 1) serves its scheme."""
        plugin = bare.pool.dir / "words_plugin"
        plugin.write_text(_WORDS_PLUGIN)
        plugin.chmod(0o755)
        node = bare.pool.eps[0]
        node.configure(f"FILETRANSFER_PLUGINS = $(FILETRANSFER_PLUGINS), {plugin}", reconfig=False)
        node.restart()
        bare.pool.wait(
            lambda: {"words", "data", "box", "gdrive", "onedrive", "http", "https", "dav"} <= _methods(bare.pool),
            what="all plugins to be advertised",
        )
        bare.destination.file(bare.prefix).mkdir(exist_ok=True)
        bare.destination.file(bare.prefix).chmod(0o777)
        bare.destination.file(f"{bare.prefix}/hello").write_text("hello from the server\n")
        script = '#!/bin/sh\ncat hello greeting > out1\necho "$(sha256sum < out1 | cut -d" " -f1) out1"\n'
        text = f"""
executable = job.sh
transfer_input_files = words://any/greeting, {bare.url()}/hello
transfer_output_files = out1
output_destination = {bare.url()}/$(Cluster).$(Process)
request_memory = 50
request_disk = 10M
queue
"""
        job = bare.pool.submit("alice", text, files={"job.sh": script})
        bare.jobs.append(job)
        bare.wait_left(job)
        bare.check_delivered(job)
        assert bare.file(job, "out1").read_text() == "hello from the server\nwords of another plugin\n"


_WORDS_PLUGIN = """#!/bin/sh
if [ "$1" = -classad ]; then
    echo 'PluginVersion = "1"'; echo 'PluginType = "FileTransfer"'; echo 'SupportedMethods = "words"'
else
    echo words of another plugin > "$2"
fi
"""


def _methods(pool: Any) -> set[str]:
    ads = pool.startd_ads("true", ["HasFileTransferPluginMethods"])
    return set(str(ads[0]["HasFileTransferPluginMethods"]).split(",")) if ads else set()
