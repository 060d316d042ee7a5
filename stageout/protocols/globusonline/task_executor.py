"""The tasks of one call: find running ones again, submit the rest, a few at a time, and judge their results."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stageout.core.errors import TransferFailure
from stageout.plugin.api import Outcome
from stageout.protocols.globusonline import outcomes, plan
from stageout.protocols.globusonline.journal import Entry, Journal
from stageout.protocols.globusonline.plan import Move, Pair
from stageout.protocols.globusonline.service import Service
from stageout.protocols.globusonline.settings import GlobusSettings
from stageout.protocols.globusonline.taskrun import Ended, TaskRun


@dataclass(frozen=True)
class Group:
    """Files that may go in one task. :param between: source and destination collection."""

    service: Service
    between: Pair
    moves: list[Move] = field(default_factory=list)


@dataclass(frozen=True)
class Work:
    """One task to submit, or to find again. :param entry: entry of an earlier call, None for a new task."""

    group: Group
    moves: list[Move]
    entry: Entry | None = None


class TaskExecutor:
    """Executor of tasks until every file of its groups has a result.

    :param jobs: the jobs of the files, for the tasks' labels.
    """

    def __init__(self, journal: Journal, settings: GlobusSettings, upload: bool, jobs: str) -> None:
        self._journal = journal
        self._settings = settings
        self._upload = upload
        self._jobs = jobs
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unfinished = 0
        self._problem: BaseException | None = None

    def run(self, groups: Iterable[Group]) -> None:
        """Run all groups. Every file is finished on return, unless the plugin has to end.

        :raises Stopped: the plugin has to end; running tasks are cancelled.
        """
        for group in groups:
            for work in self._works(group):
                self._add(work)
        if not self._unfinished:
            return
        workers = [threading.Thread(target=self._work, daemon=True) for _ in range(self._settings.tasks)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if self._problem is not None:
            raise self._problem

    def _works(self, group: Group) -> Iterable[Work]:
        """Yield first the tasks of earlier calls that move some of these files, then new ones for the rest."""
        left = {move.pair: move for move in group.moves}
        for entry in self._journal.entries():
            known = [move for pair, move in left.items() if entry.between == group.between and pair in entry.pairs]
            if known:
                left = {pair: move for pair, move in left.items() if pair not in entry.pairs}
                yield Work(group, known, entry)
        yield from self._new(group, list(left.values()))

    def _new(self, group: Group, moves: Sequence[Move]) -> Iterable[Work]:
        return (Work(group, part) for part in plan.split(moves, self._settings.task_files))

    # ---- the workers' queue ------------------------------------------------------------------------------------------

    def _add(self, work: Work) -> None:
        with self._lock:
            self._unfinished += 1
        self._queue.put(work)

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                if self._problem is None:
                    self._do(work)
            except BaseException as problem:
                self._problem = self._problem or problem
            with self._lock:
                self._unfinished -= 1
                if not self._unfinished:
                    for _ in range(self._settings.tasks):
                        self._queue.put(None)

    def _do(self, work: Work) -> None:
        try:
            entry, ended = self._run_task(work)
        except TransferFailure as failure:
            if work.entry is not None and not self._journal.is_open(work.entry):
                self._add(Work(work.group, work.moves))  # the service no longer knows the task of an earlier call
                return
            for move in work.moves:
                move.transfer.finish(failure)
            return
        left = self._judge(work, ended)
        self._journal.settle(entry, [move.pair for move in work.moves])
        if left:
            self._go_on(work, ended, left)

    def _run_task(self, work: Work) -> tuple[Entry, Ended]:
        run = TaskRun(work.group.service.twin(), self._journal, self._settings, work.moves[0].transfer.context.log)
        entry = work.entry
        if entry is None:
            pairs = [move.pair for move in work.moves]
            label = plan.label_of(self._jobs, self._upload, pairs)
            entry = run.submit(plan.document(work.moves, work.group.between, label, self._settings.sync))
        elif not entry.task:
            entry = run.submit_again(entry)
        return entry, run.finish(entry, sum(move.size_bytes for move in work.moves))

    # ---- results -----------------------------------------------------------------------------------------------------

    def _judge(self, work: Work, ended: Ended) -> list[Move]:
        """Finish each file with its result. Return the files that the task did not transfer."""
        left = []
        sizes = _Sizes(work.group)
        for move in work.moves:
            result = self._result(move, ended, sizes)
            if result is None:
                left.append(move)
            else:
                move.transfer.finish(result)
        return left

    def _result(self, move: Move, ended: Ended, sizes: _Sizes) -> Outcome | TransferFailure | None:
        try:
            return outcomes.uploaded(move, ended, sizes) if self._upload else outcomes.downloaded(move, ended)
        except TransferFailure as failure:
            return failure

    def _go_on(self, work: Work, ended: Ended, left: list[Move]) -> None:
        """Plan further tasks for the files that this task did not transfer.

        A permanent error may affect one directory only. Therefore each directory then gets a task of its own. The task
        of an earlier call may have ended for other reasons, so its files get one more attempt.
        """
        parts = plan.by_folder(left)
        if ended.lasting and len(parts) > 1:
            for part in parts:
                self._add(Work(work.group, part))
        elif work.entry is not None and not ended.lasting:
            for again in self._new(work.group, left):
                self._add(again)
        else:
            for move in left:
                assert ended.cause is not None
                move.transfer.finish(ended.cause)


class _Sizes:
    """Cache of the sizes of files in the destination's directories."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._known: dict[str, dict[str, int]] = {}

    def __call__(self, folder: str) -> dict[str, int]:
        if folder not in self._known:
            self._known[folder] = self._group.service.sizes(self._group.between[1], folder)
        return self._known[folder]
