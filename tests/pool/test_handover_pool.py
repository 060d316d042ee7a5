"""A pilot that ends with output which its destination does not take: a router gets it, and the job is delivered."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from stageout.wire.deposits import read_holdings
from tests.harness.pool.node import PILOT, Node
from tests.harness.router import RouterProcess, custodian_for
from tests.pool.conftest import Site, open_directory, pool_settings

pytestmark = pytest.mark.pool

_OUTPUTS = 40
_PILOT = """
FILETRANSFER_PLUGINS = $(FILETRANSFER_PLUGINS), /opt/stageout/bin/overlay_router_plugin
STAGEOUT_PILOT_GRACE = 24
MachineMaxVacateTime = 6
STAGEOUT_PILOT_ROUTER = {router}
SANDBOX_MANAGER_ENVIRONMENT = "STAGEOUT_FAULTS='record-handed-over=kill-before@{armed}'"
"""


def _give_key(node: Node, router: RouterProcess) -> None:
    path = node.root / "etc/condor/stageout-overlay.key"
    path.write_text(router.key_file("site").read_text())
    path.chmod(0o644)


@dataclasses.dataclass
class Way:
    """A pilot whose output waits, a custodian, and the destination's router, which is down."""

    site: Site
    pilot: Node
    custodian: RouterProcess
    terminal: RouterProcess
    job: Any
    armed: Path

    def end(self) -> str:
        """Have the pilot end. Returns its manager's log."""
        self.pilot.kill("condor_master", signal.SIGTERM)
        self.site.pool.wait(lambda: not self.pilot.pids("condor_master"), timeout_s=90, what="the pilot's end")
        return str(self.pilot.log("SandboxManagerLog"))

    def check_arrived(self) -> None:
        """Every file is at the destination, with the right content."""
        wrote = self.site.wrote(self.job)
        assert len(wrote) == _OUTPUTS
        for name, digest in wrote.items():
            assert hashlib.sha256((self.terminal.root / "there" / name).read_bytes()).hexdigest() == digest


@pytest.fixture
def way(stageout_pools: Any, destination: Any, tmp_path: Path) -> Iterator[Way]:
    with ExitStack() as stack:
        home = stack.enter_context(open_directory("handover"))
        terminal = stack.enter_context(RouterProcess(tmp_path / "terminal"))
        custodian = stack.enter_context(custodian_for(tmp_path / "custodian", [terminal]))
        terminal.kill()
        armed = home / "faults/handed-over"
        spec = dataclasses.replace(PILOT, config=_PILOT.format(router=custodian.address, armed=armed))
        settings = pool_settings(home)
        settings["ap_config"] += f"STAGEOUT_CUSTODIANS = {custodian.address}\n"
        options = {"execute_points": [spec], "cpus": 2, "binds": (home,), **settings}
        pool = stack.enter_context(stageout_pools(version="25.14", **options))
        site = Site(pool, destination, "handover", home / "gates")
        (pilot,) = pool.eps
        for node in (pilot, pool.ap):
            _give_key(node, custodian)
        outputs = tuple(f"out{number}" for number in range(1, _OUTPUTS + 1))
        job = site.submit(outputs=outputs, destination=f"overlay://{terminal.address}/there")
        site.wait_state(job, "RetryWait", timeout_s=90)
        yield Way(site, pilot, custodian, terminal, job, armed)


def test_a_pilot_hands_over_to_a_router_and_the_job_leaves_as_delivered(way: Way) -> None:
    site, job, custodian = way.site, way.job, way.custodian
    log = way.end()
    assert " handover-started " in log, log
    assert "handed_over=1" in log, log
    site.wait_state(job, "HandedOver", timeout_s=60)
    (held,) = read_holdings([str((site.pool.q(job, ["StageOutCustody"]) or {}).get("StageOutCustody", ""))])
    assert (held.custodians, held.files, held.is_single) == (custodian.address, _OUTPUTS, True)
    packs = [int(files) for files in re.findall(r"custody-accepted .*files=(\d+)", custodian.log)]
    assert sum(packs) == _OUTPUTS
    assert len(packs) < _OUTPUTS / 4, "small files go together"
    custodian.kill()
    custodian.start()
    way.terminal.start()
    history = site.wait_left(job, timeout_s=120)
    assert (history["StageOutState"], history["NumShadowStarts"]) == ("Delivered", 1)
    way.check_arrived()


def test_a_pilot_whose_manager_dies_between_deposit_and_receipt_has_handed_over(way: Way) -> None:
    """It has said before what may be there: the job does not run again, and does not wait for a lease."""
    way.armed.touch()
    log = way.end()
    assert not way.armed.exists(), log
    assert " handover-started " in log and "handed_over=" not in log, log
    way.site.wait_state(way.job, "HandedOver", timeout_s=120)
    way.terminal.start()
    history = way.site.wait_left(way.job, timeout_s=120)
    assert (history["StageOutState"], history["NumShadowStarts"]) == ("Delivered", 1)
    way.check_arrived()
