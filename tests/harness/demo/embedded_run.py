"""The demonstration without HTCondor: two slots in this process, transfers by the embedded starter.

Real here: the plugin with its framework, the destination, the job, and that output is kept by hard links. Stood in
for: the sandbox manager and everything that a schedd has a part in, because both ask HTCondor's daemons who a job is.
"""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from stageout.core.errors import StageoutError
from stageout.testing.starter import EmbeddedStarter, PluginRun, PluginTable, Wanted, installed
from tests.harness.demo.record import JobRecord, Record, check_files, of_job
from tests.harness.demo.report import Progress, Teller
from tests.harness.demo.workload import INPUT_NAME, MB, SCRIPT, JobReport, Workload
from tests.harness.narrow_destination import NarrowDestination

_EXPLANATION = """
The same is shown with the embedded starter, which runs the plugin exactly as condor_starter does. Not exercised:
  - the sandbox manager's custody and its data slots (a thread per CPU slot stands in: hard links, then the plugin),
  - the schedd agent, the job queue and its truth, the receipt,
  - HTCondor itself: matchmaking, claims, users.
"""
TITLES = ("Synchronous (embedded starter)", "Data slots stood in for (embedded starter)")
_SLOTS = ("slot1_1", "slot1_2")


def both_runs(load: Workload, destination: NarrowDestination) -> tuple[Record, Record]:
    """Run the workload with synchronous transfer and with stand-ins for data slots.

    :raises StageoutError: the plugin is not installed, or a job or transfer failed.
    """
    print(_EXPLANATION)
    runs = []
    for name, title, data_slots in (("synchronous", TITLES[0], False), ("stage-out", TITLES[1], True)):
        print(f"{title}: 2 CPU slots", flush=True)
        with tempfile.TemporaryDirectory(prefix="stageout-embedded-") as place:
            plugins = PluginTable([find_plugin(Path(place))])
            runs.append(EmbeddedRun(load, destination, plugins, Path(place), name, title, data_slots).run())
    return runs[0], runs[1]


def find_plugin(place: Path) -> Path:
    """stageout_curl_plugin of the checkout, copied to `place` to run under this Python, or the one installed beside it.

    :raises StageoutError: there is neither.
    """
    source = Path(__file__).resolve().parents[3] / "plugins/stageout_curl_plugin"
    if source.is_file():
        return installed(source, place)
    beside = Path(sys.executable).with_name("stageout_curl_plugin")
    if beside.is_file():
        return beside
    raise StageoutError(f"There is no {beside}: install stageout into the environment of this Python.")


@dataclass
class EmbeddedRun:
    """One run; `data_slots` as in the pool's second run."""

    load: Workload
    destination: NarrowDestination
    plugins: PluginTable
    place: Path
    name: str
    title: str
    data_slots: bool
    records: dict[int, JobRecord] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def run(self) -> Record:
        """Run all jobs, then check every file."""
        root = self.destination.root / self.name
        root.mkdir()
        wanted = self.load.put_input(root)
        began_s = time.time()
        jobs: queue.Queue[int] = queue.Queue()
        for number in range(self.load.jobs):
            jobs.put(number)
        threads = [threading.Thread(target=self._guarded, args=(self._slot, slot, jobs)) for slot in _SLOTS]
        for thread in threads:
            thread.start()
        self._watch(threads, root, began_s)
        if self.failures:
            raise StageoutError("; ".join(self.failures))
        record = Record(self.title, began_s, [self.records[n] for n in sorted(self.records)], self.load.files)
        transfers = self.destination.transfers()
        for job in record.jobs:
            job.transfers = of_job(transfers, f"/{self.name}/{job.number}/")
            if job.report.input_digest == wanted:
                check_files(job, root / str(job.number))
        return record

    def _slot(self, slot: str, jobs: queue.Queue[int]) -> None:
        """A CPU slot: one job after the other; the data slot beside it ends with the last."""
        accepted: queue.Queue[int | None] = queue.Queue()
        data_slot = threading.Thread(target=self._guarded, args=(self._data_slot, accepted))
        data_slot.start()
        try:
            while not self.failures:
                number = jobs.get_nowait()
                self._job(slot, number)
                if self.data_slots:
                    accepted.put(number)
        except queue.Empty:
            pass
        finally:
            accepted.put(None)
            data_slot.join()

    def _job(self, slot: str, number: int) -> None:
        scratch = self.place / f"job-{number}"
        scratch.mkdir()
        starter = EmbeddedStarter(scratch, self.plugins, {"ClusterId": 1, "ProcId": number})
        if self.load.input_bytes:
            url = f"{self.destination.url}/{self.name}/{INPUT_NAME}"
            _require(starter.download([Wanted(url, INPUT_NAME)]))
        (scratch / "job.sh").write_text(SCRIPT)
        command = ["sh", "job.sh", *self.load.arguments()]
        text = subprocess.run(command, cwd=scratch, check=True, capture_output=True, text=True).stdout
        if self.data_slots:
            self._keep(scratch, number)
        else:
            self._send(scratch, number)
        self.records[number] = JobRecord(number, slot, JobReport.parse(text), time.time())

    def _keep(self, scratch: Path, number: int) -> None:
        """Hard links outside the scratch directory, which then goes: the slot is free."""
        kept = self.place / f"kept-{number}"
        kept.mkdir()
        for name in self.load.names():
            os.link(scratch / name, kept / name)
        shutil.rmtree(scratch)

    def _data_slot(self, accepted: queue.Queue[int | None]) -> None:
        while (number := accepted.get()) is not None:
            self._send(self.place / f"kept-{number}", number)

    def _send(self, directory: Path, number: int) -> None:
        url = f"{self.destination.url}/{self.name}/{number}"
        starter = EmbeddedStarter(directory, self.plugins, {"ClusterId": 1, "ProcId": number})
        _require(starter.upload([Wanted(f"{url}/{name}", name) for name in self.load.names()]))
        shutil.rmtree(directory)

    def _guarded(self, work: Callable[..., None], *arguments: object) -> None:
        """Run a thread's work; what goes wrong ends the run."""
        try:
            work(*arguments)
        except Exception as failed:
            self.failures.append(f"{type(failed).__name__}: {failed}")

    def _watch(self, threads: list[threading.Thread], root: Path, began_s: float) -> None:
        tell = Teller(self.title, self.load.jobs * self.load.job_bytes / MB)
        for thread in threads:
            while thread.is_alive():
                thread.join(1)
                tell(self._progress(root, began_s))

    def _progress(self, root: Path, began_s: float) -> Progress:
        sizes = {path: path.stat().st_size for path in root.glob("*/*.dat")}
        done = sum(len(list(path.glob("*.dat"))) == self.load.files for path in root.glob("[0-9]*"))
        ended, left = len(self.records), self.load.jobs - len(self.records)
        computing = min(len(_SLOTS), left)
        return Progress(
            time.time() - began_s, left - computing, computing, ended - done, done, sum(sizes.values()) / MB
        )


def _require(runs: list[PluginRun]) -> None:
    """:raises StageoutError: with the plugin's own words, when a transfer failed."""
    for run in runs:
        if not run.succeeded:
            words = [ad.text("TransferError") for ad in run.ads if ad.text("TransferError")]
            raise StageoutError(f"{run.plugin.name}: {'; '.join(words) or run.printed or run.result.name}")
