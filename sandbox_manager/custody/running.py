"""The batches whose plugins run now: they read files in custody, so custody must be able to stop them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from stageout.model.batch import Batch
from stageout.movers.mover import StoppableMover
from stageout.wire.custody import JobKey


class RunningBatch:
    """One batch whose plugin runs, or is about to.

    :param batch: with its files. :param jobs: sandbox by job.
    :ivar sandboxes: whose files it sends.
    :ivar began_s: monotonic time of its start. :ivar answered: its server has answered another batch since then.
    """

    def __init__(self, batch: Batch, jobs: Mapping[JobKey, int]) -> None:
        self.batch, self.jobs = batch, jobs
        self.sandboxes = frozenset(item.sandbox for item in batch.files)
        self.began_s = 0.0
        self.answered = False
        self._mover = StoppableMover()

    def begin(self, now_s: float) -> None:
        """Note when it began. :param now_s: monotonic."""
        self.began_s = now_s

    def note_answer(self) -> None:
        """Note that its server has answered another batch."""
        self.answered = True

    def stop(self) -> None:
        """End the plugin. From any thread."""
        self._mover.stop()


class RunningBatches:
    """All batches that run now."""

    def __init__(self) -> None:
        self._batches: dict[int, RunningBatch] = {}

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[RunningBatch]:
        return iter(list(self._batches.values()))

    def add(self, batch: RunningBatch) -> None:
        """List a batch that begins."""
        self._batches[id(batch)] = batch

    def remove(self, batch: RunningBatch) -> None:
        """Forget a batch that has ended."""
        del self._batches[id(batch)]

    def stop_all(self) -> None:
        """Stop every plugin."""
        for batch in self:
            batch.stop()

    def stop_of(self, sandboxes: Collection[int]) -> None:
        """Stop the plugins that send files of these sandboxes."""
        for batch in self:
            if not batch.sandboxes.isdisjoint(sandboxes):
                batch.stop()

    def sends_other_run(self, job: JobKey, sandbox: int) -> bool:
        """Tell whether a plugin still sends output of another run of a job.

        :param sandbox: of the run that is asked for.
        """
        return any(batch.jobs.get(job, sandbox) != sandbox for batch in self._batches.values())

    def is_silent(self, server: str, before_s: float) -> bool:
        """Tell whether a server has answered no batch since one began before this monotonic time."""
        running = (one for one in self._batches.values() if one.batch.server == server)
        return any(one.began_s < before_s and not one.answered for one in running)

    def answered(self, server: str) -> None:
        """Record that a server has answered: its silence towards other batches says nothing about it."""
        for running in self._batches.values():
            if running.batch.server == server:
                running.note_answer()
