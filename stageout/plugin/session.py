"""One call of a plugin: parse the request, write failure ads, hand off or move the files, report."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from stageout.core.classads import unparse_old
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.abilities import Abilities
from stageout.plugin.api import BatchProtocol, Outcome, TransferProtocol
from stageout.plugin.context import Deadline, PluginEnvironment, PluginLog
from stageout.plugin.outfile import OutFile
from stageout.plugin.quiet import Quiet
from stageout.plugin.requests import Call, Item, parse_arguments, read_items, refused_item
from stageout.plugin.results import (
    FAILED_STATUS,
    RETRYABLE_STATUS,
    Ad,
    AdWriter,
    Record,
    exit_status,
    fitted,
    least_bytes,
)
from stageout.plugin.text import Scrubber

if TYPE_CHECKING:
    from stageout.handoff.client import Carried

_LOG_CHARS = 12_000


def main(abilities: Abilities, protocol: str, argv: Sequence[str]) -> int:
    """Run one call. Return the exit status: 0, 1, or 11 when all failures are retryable.

    On return every request has its result ad in the output file.
    """
    with ExitStack() as stack:
        return Session(abilities, protocol, argv, stack).run()


class Session:
    """The state of one call."""

    def __init__(self, abilities: Abilities, protocol: str, argv: Sequence[str], stack: ExitStack) -> None:
        self._abilities = abilities
        self._protocol = protocol
        self._executable = os.path.join(os.getcwd(), argv[0])
        self._stack = stack
        self._quiet = Quiet()
        self._scrubber = Scrubber()
        self._log = PluginLog(self._scrubber)
        self._environment = PluginEnvironment(self._scrubber)
        self._deadline = Deadline()
        self._call = parse_arguments(list(argv[1:]))
        self._writer = AdWriter(self._call.upload, abilities.version, self._scrubber)
        self._report = Report(self._call, self._writer, self._quiet.to_stdout, stack)
        self._records: list[Record] = []

    def run(self) -> int:
        """Run the call, as :func:`main`."""
        try:
            return self._run()
        except Exception as error:  # a bug of the plugin: the failure ads stay, and the job may run elsewhere
            import traceback

            self._log.add("defect in the plugin framework", trace=traceback.format_exc(limit=-6))
            if not self._records:
                self._report.promise([Record(refused_item(f"{type(error).__name__} in the plugin: {error}"))])
            self._tell()
            return self._known_status(RETRYABLE_STATUS)

    def _run(self) -> int:
        if self._call.problem and not self._call.outfile:
            self._quiet.to_stderr(self._scrubber.message(self._call.problem) + "\n")
            return FAILED_STATUS
        self._records = [Record(item, item.refused or self._nothing_to_send(item)) for item in self._items()]
        if self._call.upload and any(record.item.method in self._abilities.proxy_methods for record in self._records):
            from stageout.plugin.proxy import name_proxy

            name_proxy(os.environ)
        try:
            self._report.promise(self._records)
        except OSError as error:
            self._quiet.to_stderr(f"cannot write the output file {self._call.outfile}: {error.strerror}\n")
            return FAILED_STATUS
        if self._handed_off():
            return 0
        self._move()
        return self._end()

    def _items(self) -> list[Item]:
        if self._call.problem:
            return [refused_item(self._call.problem)]
        items = read_items(self._call, self._abilities, self._environment.destination)
        for item in items:
            self._scrubber.learn_url(item.request.url)
        return items

    def _nothing_to_send(self, item: Item) -> Outcome | None:
        """Return the result of a directory: HTCondor before 24 lists a directory in addition to each of its files."""
        if self._call.upload and os.path.isdir(item.file_name):
            return Outcome(0, developer={"Directory": True})
        return None

    def _handed_off(self) -> bool:
        """Offer all files to the node's sandbox manager. A refusal's reason goes into every result ad."""
        if not self._call.upload or os.environ.get("STAGEOUT_MOVER"):
            return False
        code, reason = self._unfit() or self._offer()
        if not reason:
            return True
        self._log.add("synchronous", reason=reason)
        from stageout.core.synchronous import FAILED

        self._writer.facts["StageOutSynchronous"] = self._scrubber.message(reason)
        self._writer.facts["StageOutSynchronousCode"] = code or FAILED
        return False

    def _unfit(self) -> tuple[str, str] | None:
        """Return code and sentence of the reason why this batch cannot be offered; None if it can."""
        if any(record.failure for record in self._records if record.result is not None):
            return "Files", "a file of this batch cannot be uploaded at all"
        return None

    def _offer(self) -> tuple[str, str]:
        """Offer the batch and report success if the manager accepts it. Return code and sentence of a refusal,
        else "".
        """
        waiting = [record for record in self._records if record.result is None]
        if not waiting:
            return "Files", "there is no file to hand off"
        requests = [(record.item.request.encoded_url, record.item.request.local_path) for record in waiting]
        try:
            from stageout.handoff.client import offer

            sizes_bytes = [os.stat(path).st_size for _, path in requests]
            answer = offer(requests, self._executable, self._carried([record.item for record in waiting]))
        except TransferFailure as failure:
            return "Credential", failure.message
        except Exception as error:  # the transfer without a manager must always work
            return "", f"hand-off failed: {type(error).__name__}: {error}"
        if not answer.accepted:
            return answer.code, answer.reason or "no reason was given"
        self._report.taken_over(waiting, sizes_bytes, answer.receipt)
        self._report_known()
        return "", ""

    def _carried(self, items: list[Item]) -> Carried | None:
        """Collect the data for the manager that is deleted with the job."""
        abilities, has_proxy = self._abilities, "X509_USER_PROXY" in os.environ
        if not (abilities.job_attributes or abilities.credentials) and not any(
            item.given
            or "+" in item.request.url.partition("://")[0]
            or (has_proxy and item.method in abilities.proxy_methods)
            for item in items
        ):
            return None
        from stageout.plugin.carried import carried

        return carried(self._abilities, items, self._environment)

    def _move(self) -> None:
        gc.enable()
        from stageout.plugin.batch import Batch

        waiting = [record for record in self._records if record.result is None]
        machine = self._environment.ad("_CONDOR_MACHINE_AD").text("Machine")
        self._writer.facts["TransferLocalMachineName"] = machine or os.uname().nodename
        self._report_known()
        if waiting:
            batch = Batch(
                waiting,
                self._call,
                self._make_protocol,
                self._report.finished,
                self._environment,
                self._deadline,
                self._log,
            )
            batch.run(self._concurrency(waiting))

    def _concurrency(self, records: list[Record]) -> int:
        """Limit the files at once. Uploads to the same URL go one by one in HTCondor's order, so that the last file
        stays.
        """
        if self._call.upload and len({record.item.request.url for record in records}) < len(records):
            return 1
        return self._environment.count("CONCURRENCY", self._abilities.parallel)

    def _report_known(self) -> None:
        """Report results that are known without a transfer."""
        for record in self._records:
            if record.result is not None:
                self._report.finished(record)

    def _make_protocol(self) -> TransferProtocol | BatchProtocol:
        import importlib

        module, _, name = self._protocol.partition(":")
        made = getattr(importlib.import_module(module), name)()
        if not isinstance(made, (TransferProtocol, BatchProtocol)):
            raise TypeError(f"{self._protocol} is neither a TransferProtocol nor a BatchProtocol")
        return made

    def _end(self) -> int:
        status = self._known_status(exit_status([record.failure for record in self._records if record.failure]))
        if self._report.incomplete:
            self._log.add("the output file is not complete", error=self._report.incomplete)
            status = status or FAILED_STATUS
        if status:
            self._tell()
        return status

    def _known_status(self, status: int) -> int:
        """Map the exit status for the access point: policies for HTCondor's own plugin test only its status.

        ``StageOutRetryDelay`` shows that this access point retries the job after the status 11.
        """
        if status != RETRYABLE_STATUS or not self._abilities.one_status or os.environ.get("STAGEOUT_MOVER"):
            return status
        delay_s = self._environment.ad("_CONDOR_JOB_AD").get("StageOutRetryDelay")
        return status if isinstance(delay_s, int) and delay_s > 0 else FAILED_STATUS

    def _tell(self) -> None:
        """Write the log to stderr, for the starter."""
        printed = self._scrubber.scrub(self._quiet.printed())
        self._quiet.to_stderr((self._log.text() + printed)[-_LOG_CHARS:])


class Report:
    """The output of result ads: slots of the output file, or stdout in the single-file form.

    :param to_stdout: writes to HTCondor's end of stdout.
    """

    def __init__(self, call: Call, writer: AdWriter, to_stdout: Callable[[str], None], stack: ExitStack) -> None:
        self._call = call
        self._writer = writer
        self._to_stdout = to_stdout
        self._stack = stack
        self._file: OutFile | None = None
        self._widths: list[int] = []
        self.incomplete = ""  # why the file does not contain all results

    def promise(self, records: list[Record]) -> None:
        """Write a failure ad for every request, so that the file is correct at any later moment.

        Refuse requests for whose report the disk has no room: a transfer without a report must not happen.

        :raises OSError: the output file cannot be opened.
        """
        if not self._call.outfile:
            return
        self._file = self._stack.enter_context(OutFile(self._call.outfile))
        ads = [self._writer.ad(record) for record in records]
        texts = [fitted(ad, 1 << 30) for ad in ads]
        self._widths = self._file.lay_out([len(text) for text in texts], lambda: [least_bytes(ad) for ad in ads])
        for record in records[len(self._widths) :]:
            text = "the disk of the execute point is full, not even a report fits"
            record.result = TransferFailure(ErrorClass.NO_SPACE_LOCAL, text)
            self.incomplete = text
        for index, (ad, text) in enumerate(zip(ads, texts)):
            self._put(index, ad, text)

    def finished(self, record: Record) -> None:
        """Write the result of one file."""
        self._put(record.item.request.index, self._writer.ad(record))

    def taken_over(self, records: list[Record], sizes_bytes: list[int], receipt: Mapping[str, Any]) -> None:
        """Write success for these files: the receipt in the first ad, its ticket in the others."""
        now_s = time.time()
        ticket = {"Ticket": receipt.get("Ticket", "")}
        for number, (record, size_bytes) in enumerate(zip(records, sizes_bytes)):
            ad = self._writer.taken_over(record.item, size_bytes, ticket if number else receipt, now_s)
            self._put(record.item.request.index, ad)

    def withdraw(self) -> None:
        """Restore the output file, because another program reports."""
        if self._file is not None:
            self._file.restore()

    def _put(self, index: int, ad: Ad, text: str = "") -> None:
        """Write an ad.

        :param text: text of the ad if it exists already.
        """
        if self._file is None:
            self._to_stdout(unparse_old(ad))
            return
        if index >= len(self._widths):
            return
        try:
            if not text or len(text) > self._widths[index] - 1:
                text = fitted(ad, self._widths[index] - 1)
        except ValueError as problem:  # for a file in custody: then the failure ad stays
            self.incomplete = str(problem)
        else:
            if not self._file.write(index, text):
                self.incomplete = str(self._file.failed)
