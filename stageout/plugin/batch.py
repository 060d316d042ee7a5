"""The parallel transfer of the files of one call. Every file gets a result in any case."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Union

from stageout.core.errors import ErrorClass, StageoutError, TransferFailure
from stageout.plugin.api import BatchProtocol, Context, Outcome, Request, Transfer, TransferProtocol
from stageout.plugin.context import MOST_STREAMS, Deadline, FileContext, PluginEnvironment, PluginLog
from stageout.plugin.requests import Call
from stageout.plugin.results import Record

_LOOK_INTERVAL_S = 1.0  # checks of deadline and parent
AnyProtocol = Union[TransferProtocol, BatchProtocol]

_STOP_GRACE_S = 2.0  # for running transfers to remove their temporary files


class Batch:
    """The transfers of one call.

    :param call: its direction.
    :param make_protocol: builds the protocol object; called once, in the first worker that needs it.
    :param finished: called in this thread with each record as its file ends.
    """

    def __init__(
        self,
        records: Sequence[Record],
        call: Call,
        make_protocol: Callable[[], AnyProtocol],
        finished: Callable[[Record], None],
        environment: PluginEnvironment,
        deadline: Deadline,
        log: PluginLog,
    ) -> None:
        self._records = records
        self._call = call
        self._make_protocol = make_protocol
        self._finished = finished
        self._environment = environment
        self._deadline = deadline
        self._log = log
        self._protocol: AnyProtocol | TransferFailure | None = None
        self._lock = threading.Lock()
        self._done: queue.SimpleQueue[tuple[Record, Outcome | TransferFailure] | None] = queue.SimpleQueue()
        self._parent = os.getppid()
        self._left = 0

    def run(self, concurrency: int) -> None:
        """Move all files. On return every record has a result, unless the plugin had to end."""
        turn = iter(self._records)
        self._left = len(self._records)
        former = signal.signal(signal.SIGTERM, self._on_signal)
        try:
            concurrency = min(max(1, concurrency), MOST_STREAMS)
            workers = [
                threading.Thread(target=self._work, args=(turn, concurrency), daemon=True)
                for _ in range(min(self._left, concurrency))
            ]
            for worker in workers:
                worker.start()
            self._collect()
            self._let_end(workers)
        finally:
            signal.signal(signal.SIGTERM, former)
        self._close()

    def _collect(self) -> None:
        stop_at_s = float("inf")
        while self._left and time.monotonic() < stop_at_s:
            self._next(min(_LOOK_INTERVAL_S, max(self._deadline.remaining_s, 0.05)))
            self._look()
            if self._deadline.stopped:
                stop_at_s = min(stop_at_s, time.monotonic() + _STOP_GRACE_S)
        if self._left and self._deadline.stopped:
            for record in self._records:
                if record.result is None:
                    self._end(record, self._deadline.stopped)

    def _let_end(self, workers: Sequence[threading.Thread]) -> None:
        """Let a protocol that moves all files together clean up after the last file."""
        if isinstance(self._protocol, BatchProtocol) and not self._deadline.stopped:
            end_s = time.monotonic() + _STOP_GRACE_S
            for worker in workers:
                worker.join(max(0.0, end_s - time.monotonic()))

    def _next(self, timeout_s: float) -> None:
        try:
            message = self._done.get(timeout=timeout_s)
        except queue.Empty:
            return
        if message is not None:
            self._end(*message)

    def _end(self, record: Record, result: Outcome | TransferFailure) -> None:
        stopped = self._deadline.stopped
        record.result = stopped if stopped and isinstance(result, TransferFailure) else result
        self._deadline.decided = self._deadline.decided or isinstance(result, TransferFailure)
        record.end_s = time.time()
        self._left -= 1
        self._log.add("finished", file=record.item.shown_url, error=record.failure or "none")
        self._finished(record)

    def _look(self) -> None:
        """Stop when time is up, or when the parent process has ended.

        This polls the parent instead of using PR_SET_PDEATHSIG, whose signal comes when the *thread* that started the
        plugin ends. In a daemon that may be long before the daemon's end.
        """
        if self._deadline.stopped:
            return
        if self._deadline.remaining_s <= 0:
            text = "the transfer was not finished within the time that a plugin has (STAGEOUT_PLUGIN_LIFETIME_S)"
            self._deadline.stop(TransferFailure(ErrorClass.DEADLINE, text))
        elif os.getppid() != self._parent:
            self._deadline.stop(TransferFailure(ErrorClass.NOT_ATTEMPTED, "the starter of this plugin is gone"))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        text = f"the plugin was stopped by signal {number} before this file was finished"
        self._deadline.stop(TransferFailure(ErrorClass.NOT_ATTEMPTED, text))
        self._done.put(None)

    def _work(self, turn: Iterator[Record], concurrency: int) -> None:
        with contextlib.suppress(TransferFailure):  # the loop below reports it file by file
            protocol = self._one_protocol()
            if isinstance(protocol, BatchProtocol):
                with self._lock:
                    rest = list(turn)
                if rest:
                    self._move_all(protocol, rest, concurrency)
                return
        while not self._deadline.stopped:
            with self._lock:
                record = next(turn, None)
            if record is None:
                return
            record.start_s = time.time()
            self._done.put((record, self._move(record)))

    def _move(self, record: Record) -> Outcome | TransferFailure:
        try:
            protocol = self._one_protocol()
            assert isinstance(protocol, TransferProtocol)
            context: Context = FileContext(record, self._environment, self._deadline, self._log)
            outcome: object = self._method(protocol)(record.item.request, context)
        except BaseException as error:
            return self._failure(error)
        if isinstance(outcome, Outcome):
            return outcome
        text = f"the plugin's protocol class returned {type(outcome).__name__}, not an Outcome"
        return TransferFailure(ErrorClass.PLUGIN_BROKEN, text)

    def _method(self, protocol: TransferProtocol) -> Callable[[Request, Context], Outcome]:
        if self._call.delete:
            return protocol.delete
        return protocol.upload if self._call.upload else protocol.download

    def _failure(self, error: BaseException) -> TransferFailure:
        """Convert a protocol's exception to a result: HTCondor reruns a job forever whose plugin ends without an ad."""
        if isinstance(error, TransferFailure):
            return error
        self._log.add("exception in the protocol", trace="".join(traceback.format_tb(error.__traceback__, limit=-6)))
        return TransferFailure(ErrorClass.PLUGIN_BROKEN, f"{type(error).__name__} in the plugin: {error}")

    def _move_all(self, protocol: BatchProtocol, records: list[Record], concurrency: int) -> None:
        """Give all files to a protocol that moves them together. Files without a result count as failed."""
        waiting = {record.item.request.index: record for record in records}

        def finish(record: Record, result: Outcome | TransferFailure) -> None:
            if waiting.pop(record.item.request.index, None) is not None:
                self._done.put((record, result))

        transfers = []
        for record in records:
            record.start_s = time.time()
            context: Context = FileContext(record, self._environment, self._deadline, self._log)
            transfers.append(Transfer(record.item.request, context, functools.partial(finish, record)))
        failure = TransferFailure(ErrorClass.PLUGIN_BROKEN, "the plugin's protocol class said nothing about this file")
        try:
            if self._call.delete:
                protocol.delete(transfers)
            else:
                protocol.move(transfers, self._call.upload, concurrency)
        except BaseException as error:
            failure = self._failure(error)
        for record in list(waiting.values()):
            finish(record, failure)

    def _one_protocol(self) -> AnyProtocol:
        with self._lock:
            if self._protocol is None:
                try:
                    self._protocol = self._make_protocol()
                except BaseException as error:  # a missing library, for example: reported for each file
                    what = str(error) if isinstance(error, StageoutError) else f"{type(error).__name__}: {error}"
                    text = f"the plugin cannot be loaded: {what}"
                    self._log.add("cannot load", trace=traceback.format_exc(limit=-6))
                    self._protocol = TransferFailure(ErrorClass.PLUGIN_BROKEN, text)
            if isinstance(self._protocol, TransferFailure):
                raise self._protocol
            return self._protocol

    def _close(self) -> None:
        if isinstance(self._protocol, TransferProtocol) and not self._deadline.stopped:
            try:
                self._protocol.close()
            except Exception as error:
                self._log.add("exception in close", error=repr(error))
