"""The demonstration without HTCondor, with our own plugin and real files."""

from __future__ import annotations

from pathlib import Path

from stageout.testing.starter import PluginTable
from tests.harness.demo import report
from tests.harness.demo.embedded_run import EmbeddedRun, find_plugin
from tests.harness.demo.record import Record
from tests.harness.demo.workload import MB, Workload
from tests.harness.narrow_destination import NarrowDestination


def test_both_runs_deliver_and_only_data_slots_free_the_slot_first(tmp_path: Path) -> None:
    load = Workload(jobs=4, compute_s=1, files=2, file_bytes=3 * MB, input_bytes=MB)
    plugins = PluginTable([find_plugin(tmp_path)])
    assert not plugins.bad
    runs: list[Record] = []
    with NarrowDestination(tmp_path / "store", rate_mb_s=6) as destination:
        for name, data_slots in (("synchronous", False), ("stage-out", True)):
            place = tmp_path / name
            place.mkdir()
            runs.append(EmbeddedRun(load, destination, plugins, place, name, name, data_slots).run())
    synchronous, stage_out = runs
    assert report.shortfalls(synchronous, stage_out) == []
    assert (synchronous.verified, stage_out.verified) == (8, 8)
    assert synchronous.held_s > 1.0 > stage_out.held_s
    assert stage_out.slots_free_s < synchronous.slots_free_s
