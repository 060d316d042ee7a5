"""The schedd agent on a real queue: transforms, guard, records, orders and edits, with a manager made of messages.

The plugin of these jobs reports a hand-off with a receipt and moves nothing; the manager is this test.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from stageout.core.states import State
from stageout.wire.custody import Action, FileReport, Order, Report, SandboxReport, read_notice, read_orders, report_ad
from tests.harness.pool import Pool, Submission
from tests.harness.pool.config import DOMAIN
from tests.harness.pool.errors import PoolError, PoolUnavailable
from tests.harness.pool.pytest_plugin import keep_logs
from tests.pool.conftest import LEAN
from tests.pool.messages import order_ads, write_messages

pytestmark = pytest.mark.pool

_COLUMNS = "/opt/stageout/share/stageout/stageout.cpf"
MANAGER = "ep1@test"
_HELD, _RELEASED = 12, 13
_LEAVE_LIMIT_S = 600

_PLUGIN = """#!/usr/bin/python3
import os, re, sys, time, uuid
if "-classad" in sys.argv:
    print('MultipleFileSupport = true\\nProtocolVersion = 4\\nPluginVersion = "1"\\nPluginType = "FileTransfer"')
    print('SupportedMethods = "fake"')
    sys.exit(0)
text = open(sys.argv[sys.argv.index("-infile") + 1]).read()
rows = [(re.search('Url = "([^"]*)"', ad).group(1), re.search('LocalFileName = "([^"]*)"', ad).group(1))
        for ad in re.findall(r"\\[(.*?)\\]", text, re.S) if "LocalFileName" in ad]
ticket, sizes = uuid.uuid4().hex, [os.path.getsize(path) for _, path in rows]
failing = "/later/" in rows[0][0]
with open(sys.argv[sys.argv.index("-outfile") + 1], "r+") as out:
    for (url, path), size in zip(rows, sizes):
        receipt = "" if "/sync/" in url else (
            '; DeveloperData = [ StageOutReceipt = [ Ticket = "%s"; ManagerName = "%s"; ManagerKey = ""; '
            'Files = %d; Bytes = %d ] ]' % (ticket, url.split("/")[2], len(rows), sum(sizes)))
        out.write('[ TransferSuccess = %s; TransferError = "later"; TransferFileName = "%s"; TransferUrl = "%s"; '
                  'TransferProtocol = "%s"; TransferType = "upload"; TransferFileBytes = %d; TransferTotalBytes = %d; '
                  'TransferStartTime = 1; TransferEndTime = 2; ConnectionTimeSeconds = 0.1%s ]\\n'
                  % ("false" if failing else "true", path, url, "stageout" if receipt else "fake", size, size, receipt))
slow = re.search("/sleep([0-9]+)/", rows[0][0])
time.sleep(int(slow.group(1)) if slow else 0)
sys.exit(11 if failing else 0)
"""


#: HTCondor's mailer: one file for each mail, first its arguments.
_MAILER = """#!/bin/sh
name=$(date +%s%N).$$
{ printf '<%s>' "$@"; echo; cat; } > MAILBOX/.$name
mv MAILBOX/.$name MAILBOX/$name
"""
#: The administrator's program beside it: one file for each message.
_NOTIFIER = """#!/bin/sh
name=$(date +%s%N).$$
cat > MAILBOX/.note-$name
mv MAILBOX/.note-$name MAILBOX/note-$name
"""


@dataclass
class Manager:
    """A sandbox manager as the agent sees one: an ad with reports, and orders that it reads."""

    pool: Pool
    name: str = MANAGER
    number: int = field(default_factory=lambda: int(time.time() * 1000))
    acknowledged: dict[str, int] = field(default_factory=dict)
    numberings: set[str] = field(default_factory=set)
    boxes: dict[tuple[str, int], SandboxReport] = field(default_factory=dict)
    passed: list[Order] = field(default_factory=list)

    def publish(self) -> None:
        """Send the report."""
        self.number += 1
        boxes = tuple(self.boxes.values())
        report = Report(self.name, "", self.number, int(time.time()), self.acknowledged, 0, boxes)
        write_messages(self.pool.ap, [report_ad(report)], user="condor")

    def accept(self, job: str, run: int, tickets: tuple[str, ...], files: int = 2) -> None:
        """Report a sandbox as accepted."""
        left = {"files_left": files, "bytes_left": 5, "files_total": files, "bytes_total": 5}
        self.boxes[job, run] = SandboxReport(
            job, run, f"alice@{DOMAIN}", State.ACCEPTED.value, 1, "waits for confirmation", 0, tickets,
            attempts=0, attempts_limit=0, next_attempt_at=0, accepted_at=int(time.time()), **left,
        )  # fmt: skip
        self.publish()

    def report(self, job: str, run: int, state: State, **changes: Any) -> None:
        """Report a change."""
        old = self.boxes[job, run]
        if state is State.DELIVERED:
            row = FileReport("a", "fake://x/a", 3, state.value, verified="size")
            changes = {"files_left": 0, "bytes_left": 0, "files": (row,), "attempts": 1, **changes}
        self.boxes[job, run] = replace(old, state=state.value, change=old.change + 1, **changes)
        self.publish()

    def forget(self, job: str) -> None:
        """Drop the records of a job."""
        self.boxes = {key: box for key, box in self.boxes.items() if key[0] != job}
        self.publish()

    def orders(self, job: str) -> list[Order]:
        """Open orders about a job."""
        return [order for order in self._all_orders() if order.job == job]

    def _all_orders(self) -> list[Order]:
        sheets = [read_orders(ad["StageOutPayload"]) for ad in order_ads(self.pool, self.name)]
        self.numberings.update(sheet.numbering for sheet in sheets)
        return [order for sheet in sheets for order in sheet.orders]

    def wait_order(self, job: str, action: Action, run: int = 1, timeout_s: float = 30) -> Order:
        """Wait for an order about a run and acknowledge it. That acknowledges all earlier ones, too."""

        def find() -> tuple[Order, list[Order]] | None:
            orders = self._all_orders()
            passed = [
                order for order in self.passed if (order.job, order.action, order.run_number) == (job, action, run)
            ]
            found = [order for order in orders if (order.job, order.action, order.run_number) == (job, action, run)]
            return ((passed or found)[0], orders) if passed or found else None

        both = self.pool.wait(find, timeout_s=timeout_s, what=f"{action.value} of run {run} of {job}")
        assert both is not None
        found, orders = both
        self.passed = [order for order in self.passed if order != found]
        self.passed += [order for order in orders if order.number < found.number and order not in self.passed]
        for name in self.numberings:
            self.acknowledged[name] = max(found.number, self.acknowledged.get(name, 0))
        self.publish()
        return found


@dataclass
class Desk:
    """A pool with an agent, and a manager played by the test."""

    pool: Pool
    manager: Manager
    mailbox: Path

    def mails(self, address: str) -> list[str]:
        """Subjects of the mails to an address, oldest first."""
        texts = [path.read_text() for path in sorted(self.mailbox.glob("[0-9]*"))]
        return [text.split("><")[1] for text in texts if f"<{address}>" in text.partition("\n")[0]]

    def notes(self, address: str) -> list[str]:
        """Subjects of the messages that the administrator's program got for an address, oldest first."""
        return [text.partition("\n")[0] for text in self.note_texts(address)]

    def note_texts(self, address: str) -> list[str]:
        """Return these messages with their subjects."""
        found = [json.loads(path.read_text()) for path in sorted(self.mailbox.glob("note-*"))]
        return [message["text"] for message in found if message["to"] == [address]]

    def submit(self, extra: str = "", place: str = "x", queue: str = "queue") -> Submission:
        """Submit a job with two output files that go below ``fake://MANAGER/PLACE/``."""
        text = f"""executable = /bin/sh
arguments = "-c 'echo hi > a; echo b > b; $(script)'"
transfer_output_files = a, b
output_destination = fake://{MANAGER}/{place}/
request_disk = 10M
{extra}
{queue}"""
        return self.pool.submit("alice", text if "script" in extra else f"script = true\n{text}")

    def ad(self, job: Any) -> dict[str, Any]:
        """The job's ad in the queue."""
        found = self.pool.q(job)
        assert found is not None, f"{job} is not in the queue"
        return found

    def tickets(self, job: Any, run: int) -> tuple[str, ...]:
        """Tickets in the AP's record of a run."""

        def find() -> tuple[str, ...]:
            records = [ad for ad in self.pool.epoch(job, "OUTPUT") if ad.get("NumShadowStarts") == run]
            results = [row for ad in records[-1:] for row in ad["OutputPluginResultList"]]
            return tuple(dict.fromkeys(row["DeveloperData"]["StageOutReceipt"]["Ticket"] for row in results))

        return self.pool.wait(find, what=f"record of run {run} of {job}")

    def completed(self, job: Any, run: int = 1, manager_run: int | None = None) -> str:
        """Wait for the end of a run, accept its output and have it confirmed; returns the GlobalJobId."""
        self.pool.wait_status(job, "Completed")
        name = str(self.ad(job)["GlobalJobId"])
        tickets = self.tickets(job, run)
        self.manager.accept(name, manager_run or run, tickets)
        wanted = manager_run or run
        order = self.manager.wait_order(name, Action.CONFIRM, wanted)
        assert (order.tickets, order.files) == (tickets, 2)
        self.manager.report(name, wanted, State.CONFIRMED, reason="waits for a data slot")
        return name

    def completed_all(self, made: Submission) -> dict[str, str]:
        """Do the same for all jobs of a cluster. An order is acknowledged together with all earlier ones."""
        names, numbers = {}, {}
        for job in made.ids:
            self.pool.wait_status(job, "Completed")
            names[job] = str(self.ad(job)["GlobalJobId"])
            (order, *_) = self.pool.wait(lambda name=names[job]: self.manager.orders(name), what="the order")  # type: ignore[misc]
            numbers[job] = order.number
        for job in sorted(made.ids, key=numbers.__getitem__):
            self.completed(job)
        return names

    def deliver(self, job: Any, name: str, run: int = 1) -> dict[str, Any]:
        """Report the delivery and return the ad that the job leaves behind."""
        self.manager.report(name, run, State.DELIVERED, reason="")
        past = self.pool.wait(lambda: not self.pool.q(job) and self.pool.history(job), what=f"{job} to leave the queue")
        assert past
        assert past["JobStatus"] == 4
        assert past["StageOutState"] == "Delivered"
        self.manager.wait_order(name, Action.FORGET, run)
        self.manager.forget(name)
        return past

    def fail(self, job: Any, name: str, run: int = 1) -> dict[str, Any]:
        """Report a failure and return the ad of the held job."""
        self.manager.report(name, run, State.FAILED, reason='dest says "quota"', error_code=72, attempts=3)
        self.pool.wait_status(job, "Held", timeout_s=30)
        self.pool.wait(lambda: self.ad(job).get("StageOutUntold", 0) == 0, what=f"the hold of {job} to be told")
        return self.ad(job)

    def hold_events(self, job: Any) -> list[str]:
        """Reasons of the holds in the job's log."""
        return [event["HoldReason"] for event in self.pool.events(job) if event["Type"] == _HELD]

    def wait_state(self, job: Any, state: str) -> None:
        """Wait for a StageOutState."""
        self.pool.wait(lambda: self.ad(job)["StageOutState"] == state, what=f"{job} to be {state}")


@pytest.fixture(scope="module")
def desk_of_version(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """A pool with the agent only."""
    shared = tmp_path_factory.mktemp("agent")
    for folder in (shared, *shared.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    plugin = shared / "fake_plugin"
    plugin.write_text(_PLUGIN)
    plugin.chmod(0o755)
    mailbox, mailer, notifier = shared / "mailbox", shared / "mailer", shared / "notifier"
    mailbox.mkdir()
    mailbox.chmod(0o1777)
    for program, text in ((mailer, _MAILER), (notifier, _NOTIFIER)):
        program.write_text(text.replace("MAILBOX", str(mailbox)))
        program.chmod(0o755)
    quick = {"POLL_INTERVAL": 1, "NOTICE_INTERVAL": 5, "EDIT_INTERVAL": 0, "MAX_RERUNS": 1, "MAIL_INTERVAL": 0}
    quick["LEAVE_LIMIT"] = _LEAVE_LIMIT_S
    ap = "".join(f"STAGEOUT_{name} = {value}\n" for name, value in quick.items())
    ap += f"MAIL = {mailer}\nSENDMAIL =\nSTAGEOUT_NOTIFY_COMMAND = {notifier}\n"
    ep = f"FILETRANSFER_PLUGINS = $(FILETRANSFER_PLUGINS), {plugin}\n"
    settings = {"base_config": LEAN, "ap_config": ap, "ep_config": ep, "binds": (shared,)}
    pool = Pool(version=request.param, execute_points=1, cpus=4, manager=False, **settings)
    try:
        pool.start()
    except PoolUnavailable as reason:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(reason))
    desk = Desk(pool, Manager(pool), mailbox)
    desk.manager.publish()
    yield desk
    pool.close()


@pytest.fixture
def desk(desk_of_version: Desk, request: pytest.FixtureRequest) -> Iterator[Desk]:
    """The pool; jobs that a test leaves are removed."""
    yield desk_of_version
    keep_logs(request, [desk_of_version.pool])
    for ad in desk_of_version.pool.jobs("true", ["ClusterId", "ProcId"]):
        desk_of_version.pool.rm(f"{ad['ClusterId']}.{ad['ProcId']}")


def test_an_agent_says_that_it_is_alive(desk: Desk) -> None:
    ads = desk.pool.wait(lambda: desk.pool.collector_query('MyType == "StageOutAgent"', "Any"), what="the notice")
    notice = read_notice(ads[0]["StageOutPayload"])
    assert (notice.agent, notice.schedd) == ("ap", "ap")
    first = notice.number
    desk.pool.wait(
        lambda: (
            read_notice(desk.pool.collector_query('MyType == "StageOutAgent"', "Any")[0]["StageOutPayload"]).number
            > first
        ),
        what="the next notice",
    )


@pytest.mark.oldest_condor_too
def test_a_delivered_job_leaves_with_the_truth_in_its_ad(desk: Desk) -> None:
    job = desk.submit()
    name = desk.completed(job)
    desk.manager.report(name, 1, State.MOVING, reason="moving a", attempts=1)
    desk.wait_state(job, "Moving")
    ad = desk.ad(job)
    assert (ad["StageOutBytesLeft"], ad["StageOutFilesLeft"], ad["StageOutRun"]) == (5, 2, 1)
    assert (ad["StageOutReason"], ad["StageOutManager"]) == ("moving a; 2 files, 5 B left", MANAGER)
    desk.manager.report(name, 1, State.RETRY_WAIT, reason="server busy", attempts=1, next_attempt_at=1900000000)
    desk.pool.wait(lambda: desk.ad(job).get("StageOutNextAttempt") == 1900000000, what="the next attempt in the ad")
    past = desk.deliver(job, name)
    assert past["StageOutStats"]["Bytes"] == 5
    assert past["StageOutStats"]["VerifiedBy"] == "size"
    assert past["StageOutFilesLeft"] == past["StageOutNextAttempt"] == 0
    updates = [event for event in desk.pool.events(job) if event["Type"] == 33]
    changed = [event["Attribute"] for event in updates]
    assert set(changed) == {"StageOutState", "StageOutReason"}
    assert [event["Value"].strip('"') for event in updates if event["Attribute"] == "StageOutState"][-1] == "Delivered"


@pytest.mark.oldest_condor_too
def test_a_failure_holds_the_job_and_retry_delivers(desk: Desk) -> None:
    job = desk.submit()
    name = desk.completed(job)
    held = desk.fail(job, name)
    assert held["HoldReason"].startswith('Stage-out failed: dest says "quota"; when there is room, `stageout retry`')
    assert (held["HoldReasonCode"], held["HoldReasonSubCode"]) == (12, 20072)
    assert (held["NumHolds"], held["NumHoldsByReason"]) == (1, {"TransferOutputError": 1})
    assert [text.split(" (by")[0] for text in desk.hold_events(job)] == [held["HoldReason"]]
    codes = [event for event in desk.pool.events(job) if event.get("Attribute") == "HoldReasonCode"]
    assert [event["Value"] for event in codes] == ["12"], "event 033 corrects the code 1 of event 012"
    shown = desk.pool.ap.run(["condor_q", "-allusers", str(job), "-pr", _COLUMNS], user="alice").stdout
    (line,) = [line for line in shown.splitlines() if line.startswith(f"{job} ")]
    assert line.split()[1:7] == ["alice", "H", "failed", "2", "5", "B"]
    assert 'dest says "quota"' in line
    assert "undef" not in shown
    assert held["StageOutState"] == "Failed"
    assert isinstance(held["EnteredCurrentStatus"], int)
    assert "stageout retry" in held["StageOutReason"]
    desk.pool.qedit(job, user="alice", StageOutRequest='"retry"')
    desk.manager.wait_order(name, Action.RETRY)
    desk.pool.wait(lambda: desk.ad(job).get("StageOutRequest") is None, what="the request to be cleared")
    desk.manager.report(name, 1, State.CONFIRMED, reason="waits for a data slot")
    desk.wait_state(job, "Confirmed")
    assert desk.pool.status(job) == "Held"
    past = desk.deliver(job, name)
    releases = [event["Reason"] for event in desk.pool.events(job) if event["Type"] == _RELEASED]
    assert [text.split(";")[0] for text in releases] == ["Stage-out has delivered the output"]
    assert past.get("HoldReason") is None
    assert past["NumJobCompletions"] == 1
    assert past["CompletionDate"] > 0
    assert past["NumShadowStarts"] == 1


@pytest.mark.oldest_condor_too
def test_a_released_job_runs_again_and_the_old_output_is_superseded(desk: Desk) -> None:
    job = desk.submit()
    name = desk.completed(job)
    desk.fail(job, name)
    desk.pool.release(job, user="alice")
    desk.manager.wait_order(name, Action.SUPERSEDE)
    desk.manager.report(name, 1, State.SUPERSEDED)
    desk.pool.wait(lambda: desk.ad(job)["NumShadowStarts"] == 2, what="the second run")
    desk.completed(job, run=2)
    assert desk.deliver(job, name, run=2)["StageOutRun"] == 2


@pytest.mark.oldest_condor_too
def test_a_job_whose_output_was_lost_runs_again_but_not_for_ever(desk: Desk) -> None:
    job = desk.submit()
    name = desk.completed(job)
    desk.manager.report(name, 1, State.LOST, reason="the machine lost power")
    desk.pool.wait(lambda: desk.ad(job)["NumShadowStarts"] == 2, what="the second run")
    assert desk.ad(job)["StageOutReruns"] == 1
    desk.completed(job, run=2)
    assert desk.ad(job)["NumJobCompletions"] == 1
    desk.manager.report(name, 2, State.LOST, reason="the machine lost power")
    desk.pool.wait_status(job, "Held", timeout_s=30)
    desk.pool.wait(lambda: desk.ad(job).get("StageOutUntold", 0) == 0, what="the hold to be told")
    held = desk.ad(job)
    assert held["HoldReason"].startswith(f"Stage-out failed: output lost at {MANAGER}: the machine lost power")
    assert "STAGEOUT_MAX_RERUNS" in held["HoldReason"]
    assert len(desk.hold_events(job)) == 1


@pytest.mark.parametrize("when", ["Error", "Always", "Complete", "Never"])
def test_owners_are_mailed_by_the_notification_of_the_job(desk: Desk, when: str) -> None:
    """The first mail of Always and Complete is HTCondor's, at the hand-off."""
    address = f"{when.lower()}@example.org"
    job = desk.submit(f"notification = {when}\nnotify_user = {address}")
    name = desk.completed(job)
    desk.fail(job, name)
    desk.pool.qedit(job, user="alice", StageOutRequest='"retry"')
    desk.manager.wait_order(name, Action.RETRY)
    desk.deliver(job, name)
    ended, held = "", f" Condor Job {job} put on hold"
    everything = [ended, held, f" Condor Cluster {job.cluster} all output delivered"]
    wanted = {"Always": everything, "Complete": everything, "Error": [held], "Never": []}[when]
    desk.pool.wait(lambda: len(desk.mails(address)) >= len(wanted), what=f"{len(wanted)} mails to {address}")
    assert [subject.endswith(end) for subject, end in zip(desk.mails(address), wanted)] == [True] * len(wanted)
    assert len(desk.mails(address)) == len(wanted)
    of_the_agent = [f"[Condor]{subject}" for subject in wanted if subject]
    desk.pool.wait(lambda: desk.notes(address) == of_the_agent, what=f"the messages {of_the_agent}")


_RETRY = FileReport("a", "fake://dest.example.org/a", 3, "RetryWait", attempts=1, error="507 the disk is full")


@pytest.mark.oldest_condor_too
def test_one_message_each_for_the_first_failed_attempt_and_the_end_of_a_cluster(desk: Desk) -> None:
    """One of three jobs is removed, and the agent dies in between."""
    address = "cluster@example.org"
    made = desk.submit(f"notification = Always\nnotify_user = {address}", queue="queue 3")
    cluster = f"[Condor] Condor Cluster {made.cluster}"
    names = desk.completed_all(made)
    tried = f"{cluster} delivery attempt failed, retries go on"
    for job in made.ids:
        waits = {"files": (_RETRY,), "attempts": 1, "attempts_limit": 20, "gives_up_at": int(time.time()) + 3600}
        desk.manager.report(names[job], 1, State.RETRY_WAIT, reason="507 the disk is full", **waits)
        desk.wait_state(job, "RetryWait")
    desk.pool.wait(lambda: desk.notes(address), what="the message about the attempt")
    assert "a of job " in desk.note_texts(address)[0]
    assert (
        " did not reach dest.example.org: 507 the disk is full. Its node tries again until "
        in desk.note_texts(address)[0]
    )
    assert " UTC, with at most 20 attempts for each file" in desk.note_texts(address)[0]
    first, second, last = made.ids
    desk.deliver(first, names[first])
    desk.pool.ap.kill("schedd-agent")
    desk.manager.publish()
    desk.manager.report(names[second], 1, State.DELIVERED, reason="")
    desk.pool.wait(lambda: desk.pool.history(second), timeout_s=90, what=f"{second} to leave the queue")
    desk.manager.wait_order(names[second], Action.FORGET)
    desk.manager.forget(names[second])
    assert not [subject for subject in desk.notes(address) if "all output" in subject]
    desk.pool.rm(last, user="alice")
    desk.manager.wait_order(names[last], Action.CANCEL)
    desk.manager.report(names[last], 1, State.CANCELLED)
    desk.manager.wait_order(names[last], Action.FORGET)
    ended = f"{cluster} output delivered for some jobs only"
    desk.pool.wait(lambda: ended in desk.notes(address), timeout_s=60, what="the message about the end")
    each = [f"[Condor] Condor Job {job} output delivered" for job in (first, second)]
    assert desk.notes(address) == [tried, *each, ended]
    words = "The output of 2 of 3 jobs is delivered, 1 removed: 4 files, 10 B to x. The last file arrived "
    assert words in desk.note_texts(address)[-1]


@pytest.mark.oldest_condor_too
def test_a_factory_has_its_message_when_it_has_made_all_its_jobs(desk: Desk) -> None:
    address = "factory@example.org"
    made = desk.submit(f"notification = Complete\nnotify_user = {address}\nmax_materialize = 1", queue="queue 2")
    for job in (f"{made.cluster}.0", f"{made.cluster}.1"):
        desk.pool.wait(lambda job=job: desk.pool.q(job), timeout_s=60, what=f"{job} to be made")  # type: ignore[misc]
        assert desk.notes(address) == []
        desk.deliver(job, desk.completed(job))
    desk.pool.wait(lambda: desk.notes(address), timeout_s=60, what="the message about the end")
    assert desk.notes(address) == [f"[Condor] Condor Cluster {made.cluster} all output delivered"]
    assert "The output of all 2 jobs is delivered: 4 files" in desk.note_texts(address)[0]


@pytest.mark.oldest_condor_too
def test_a_dag_has_one_message_when_its_root_job_has_ended(desk: Desk) -> None:
    address = "dag@example.org"
    node = f"""executable = /bin/sh
arguments = "-c 'echo hi > a; echo b > b'"
transfer_output_files = a, b
output_destination = fake://{MANAGER}/dag/
request_disk = 10M
MY.StageOutAsync = true
log = node.log
queue
"""
    text = "JOB A a.sub\nJOB B a.sub\nPARENT A CHILD B\n"
    text += "".join(f"SCRIPT POST {name} /opt/stageout/bin/stageout wait --return $RETURN $JOBID\n" for name in "AB")
    options = ("-notification", "complete", "-append", f"notify_user={address}")
    dag = desk.pool.submit_dag("alice", text, files={"a.sub": node}, options=options)
    known: set[str] = set()
    for _ in range(2):
        wanted = f"DAGManJobId == {dag.cluster} && JobStatus == 4"

        def ended() -> set[str]:
            return {f"{ad['ClusterId']}.{ad['ProcId']}" for ad in desk.pool.jobs(wanted)} - known  # noqa: B023

        (job,) = desk.pool.wait(ended, timeout_s=90, what="the node's end")
        known.add(job)
        name = desk.completed(job)
        desk.manager.report(name, 1, State.DELIVERED, reason="")
        # The schedd may remove the last node together with the root job.
        past = desk.pool.wait(lambda job=job: desk.pool.history(job), what=f"{job} to leave the queue")  # type: ignore[misc]
        assert past["StageOutState"] == "Delivered"
        desk.manager.wait_order(name, Action.FORGET)
        desk.manager.forget(name)
    desk.pool.wait(lambda: desk.notes(address), timeout_s=90, what="the message about the end")
    assert desk.pool.history(dag), "the root job has ended"
    assert desk.notes(address) == [f"[Condor] Condor DAG {dag.cluster} all output delivered"]
    assert "The output of all 2 jobs is delivered: 4 files" in desk.note_texts(address)[0]


@pytest.mark.parametrize("end", [State.FAILED, State.LOST])
def test_the_owner_hears_of_a_failure_after_the_job_has_left(desk: Desk, end: State) -> None:
    address = f"{end.value.lower()}-late@example.org"
    job = desk.submit(f"notification = Error\nnotify_user = {address}")
    name = desk.completed(job)
    desk.pool.qedit(job, user="condor", LeaveJobInQueue="false")
    desk.pool.wait(lambda: not desk.pool.q(job) and desk.pool.history(job), what=f"{job} to leave the queue")
    desk.manager.report(name, 1, end, reason="the disk has died", error_code=99)
    desk.pool.wait(lambda: desk.mails(address), timeout_s=90, what="the mail")  # the history is asked now and then
    assert [subject.split(" Job ")[1] for subject in desk.mails(address)] == [f"{job} stage-out failed"]
    shown = desk.pool.ap.run(["/opt/stageout/bin/stageout", "history", str(job)], user="alice").stdout
    assert f"Job {job} of alice: {end.value.lower()}," in shown
    assert "after the job had left the queue: the disk has died" in shown


def test_a_job_is_kept_beyond_the_leave_limit_while_its_output_is_on_its_way(desk: Desk) -> None:
    slow, quick = desk.submit(), desk.submit()
    desk.completed(slow)
    name = desk.completed(quick)
    desk.pool.qedit(slow, user="condor", EnteredCurrentStatus=str(int(time.time()) - _LEAVE_LIMIT_S + 100))
    desk.pool.wait(lambda: desk.ad(slow).get("StageOutKeptUntil", 0) > time.time() + 300, what="a longer stay")
    desk.pool.qedit(slow, user="condor", EnteredCurrentStatus=str(int(time.time()) - 2 * _LEAVE_LIMIT_S))
    desk.deliver(quick, name)  # the schedd has looked at the whole queue when this one has left
    assert desk.ad(slow)["JobStatus"] == 4
    desk.deliver(slow, str(desk.ad(slow)["GlobalJobId"]))


def test_removal_cancels(desk: Desk) -> None:
    job = desk.submit()
    name = desk.completed(job)
    desk.pool.rm(job, user="alice")
    desk.manager.wait_order(name, Action.CANCEL)
    desk.manager.report(name, 1, State.CANCELLED)
    desk.manager.wait_order(name, Action.FORGET)


def test_the_owner_can_give_up_and_pause(desk: Desk) -> None:
    job = desk.submit()
    name = desk.completed(job)
    for action in (Action.PAUSE, Action.RESUME):
        desk.pool.qedit(job, user="alice", StageOutRequest=f'"{action.value}"')
        desk.manager.wait_order(name, action)
        desk.pool.wait(lambda: desk.ad(job).get("StageOutRequest") is None, what="the request to be cleared")
    desk.pool.qedit(job, user="alice", StageOutRequest='"cancel"')
    desk.manager.wait_order(name, Action.CANCEL)
    desk.manager.report(name, 1, State.CANCELLED)
    past = desk.pool.wait(lambda: not desk.pool.q(job) and desk.pool.history(job), what="the job to leave")
    assert past
    assert (past["JobStatus"], past["StageOutState"]) == (4, "Cancelled")


def test_a_vacated_run_is_never_confirmed(desk: Desk) -> None:
    job = desk.submit(place="sleep4")
    desk.pool.wait_status(job, "Running")
    desk.pool.wait(lambda: desk.ad(job).get("TransferringOutput"), what="the hand-off", interval_s=0.05)
    name = desk.ad(job)["GlobalJobId"]
    desk.manager.accept(name, 1, ("0" * 32,))
    desk.pool.vacate(job)
    desk.manager.wait_order(name, Action.SUPERSEDE, timeout_s=60)
    assert not [order for order in desk.manager.orders(name) if order.action is Action.CONFIRM]
    desk.manager.report(name, 1, State.SUPERSEDED)
    desk.pool.wait(lambda: desk.ad(job)["NumShadowStarts"] == 2, what="the second run")
    desk.completed(job, run=2)
    desk.deliver(job, name, run=2)


@pytest.mark.oldest_condor_too
def test_a_run_that_goes_on_after_a_crash_of_the_schedd_is_confirmed_by_its_tickets(desk: Desk) -> None:
    job = desk.submit("script = sleep 8")
    desk.pool.wait_status(job, "Running")
    desk.pool.wait(lambda: desk.ad(job).get("NumJobStarts") == 1, what="the start")
    desk.pool.ap.kill("schedd", signal.SIGKILL)

    def back() -> bool:
        try:
            return bool(desk.ad(job).get("NumJobReconnects"))
        except (PoolError, AssertionError):
            return False

    desk.pool.wait(back, what="the reconnect", timeout_s=60)
    assert desk.ad(job)["NumShadowStarts"] == 2
    desk.completed(job, run=2, manager_run=1)
    name = desk.ad(job)["GlobalJobId"]
    assert not [order for order in desk.manager.orders(name) if order.action is Action.SUPERSEDE]
    desk.manager.report(name, 1, State.DELIVERED, reason="")
    desk.pool.wait(lambda: not desk.pool.q(job), what="the job to leave")
    past = desk.pool.history(job)
    assert past
    assert (past["StageOutState"], past["StageOutRun"]) == ("Delivered", 2)


@pytest.mark.oldest_condor_too
def test_a_job_held_by_its_own_exit_policy_is_delivered(desk: Desk) -> None:
    job = desk.submit("on_exit_hold = true")
    desk.pool.wait_status(job, "Held", timeout_s=30)
    name = desk.ad(job)["GlobalJobId"]
    desk.manager.accept(name, 1, desk.tickets(job, 1))
    desk.manager.wait_order(name, Action.CONFIRM)
    desk.manager.report(name, 1, State.DELIVERED, reason="")
    desk.wait_state(job, "Delivered")
    assert desk.pool.status(job) == "Held"
    assert desk.ad(job)["HoldReasonCode"] == 3


def test_a_job_that_hands_nothing_off_leaves_at_once(desk: Desk) -> None:
    job = desk.submit(place="sync/x")
    desk.pool.wait(lambda: not desk.pool.q(job) and desk.pool.history(job), what="the job to leave", timeout_s=30)


@pytest.mark.oldest_condor_too
def test_the_owner_cannot_forge_the_state(desk: Desk) -> None:
    job = desk.submit(
        'MY.StageOutState = "Delivered"\nMY.StageOutRun = 1\nMY.StageOutReruns = -9\nMY.StageOutGuard = false'
    )
    desk.pool.wait_status(job, "Completed")
    ad = desk.ad(job)
    assert (ad["StageOutGuard"], ad["StageOutReruns"]) == (True, 0)
    assert ad["StageOutState"] != "Delivered"
    for name, value in [
        ("StageOutState", '"Delivered"'),
        ("StageOutReruns", "-9"),
        ("StageOutStats", "1"),
    ]:
        with pytest.raises(PoolError):
            desk.pool.qedit(job, user="alice", **{name: value})


@pytest.mark.oldest_condor_too
def test_which_jobs_are_covered(desk: Desk) -> None:
    def guard(extra: str, place: str = "x", queue: str = "queue") -> Any:
        job = desk.submit(extra + "\nrequirements = false", place, queue)
        return desk.ad(job).get("StageOutGuard")

    assert guard("") is True
    assert guard("MY.StageOutAsync = false\nMY.StageOutGuard = true") is False
    assert guard("MY.DAGManJobId = 77") is False
    assert guard("MY.DAGManJobId = 77\nMY.StageOutAsync = true") is True
    assert guard("max_materialize = 1", queue="queue 2") is True
    assert guard("max_idle = 1", queue="queue 2") is True
    assert guard("max_retries = 3\nsuccess_exit_code = 4\nretry_until = ExitCode == 7") is True
    assert guard("max_retries = 3\non_exit_remove = ExitBySignal") is True
    assert guard("on_exit_remove = true") is True
    assert guard("on_exit_remove = false\nMY.StageOutAsync = true") is False
    assert guard("on_exit_remove = (ExitBySignal == false) && (ExitCode == 0)") is False
    assert guard("on_exit_remove = NumJobCompletions > JobMaxRetries") is False
    for key in ("minute", "hour", "day_of_month", "month", "day_of_week"):
        assert guard(f"cron_{key} = 1\nMY.StageOutAsync = true") is False
    assert guard("universe = java\narguments = Main") is True
    assert guard("universe = parallel\nmachine_count = 1\nMY.StageOutAsync = true") is False
    plain = desk.pool.submit("alice", "executable = /bin/true\nrequirements = false\nqueue")
    assert desk.ad(plain).get("StageOutGuard") is False


@pytest.mark.oldest_condor_too
def test_a_plugin_that_says_later_does_not_hold_the_job(desk: Desk) -> None:
    job = desk.submit(place="later/x")
    desk.pool.wait_status(job, "Held", timeout_s=30)
    if desk.pool.version == "23.9":
        # It does not tell the exit statuses of an output plugin apart, so the policy has nothing to go by.
        assert desk.ad(job)["HoldReasonSubCode"] == 1
        return
    assert desk.ad(job)["HoldReasonSubCode"] == 2816
    desk.pool.ap.configure("STAGEOUT_RETRY_METHODS = http,fake\n")
    try:
        again = desk.submit(place="later/x")
        desk.pool.wait(lambda: desk.ad(again).get("NumJobCoolDowns") == 1, what="the cool-down")
        assert desk.pool.status(again) == "Idle"
    finally:
        desk.pool.ap.configure("")


@pytest.mark.oldest_condor_too
def test_removal_of_a_dag_cancels_its_nodes(desk: Desk) -> None:
    node = f"""executable = /bin/sh
arguments = "-c 'echo hi > a; echo b > b'"
transfer_output_files = a, b
output_destination = fake://{MANAGER}/dag/
request_disk = 10M
MY.StageOutAsync = true
log = node.log
queue
"""
    wait = node.replace("output_destination", "#").replace("echo b > b", "sleep 600")
    dag = desk.pool.submit_dag("alice", "JOB A a.sub\nJOB B b.sub\n", files={"a.sub": node, "b.sub": wait})
    wanted = f"DAGManJobId == {dag.cluster} && JobStatus == 4"
    found = desk.pool.wait(lambda: desk.pool.jobs(wanted), timeout_s=60, what="the node's end")
    job = f"{found[0]['ClusterId']}.{found[0]['ProcId']}"
    name = desk.completed(job)
    desk.manager.report(name, 1, State.FAILED, reason="refused", error_code=33)
    desk.wait_state(job, "Failed")
    assert desk.pool.status(job) == "Completed"
    desk.pool.rm(dag, user="alice")
    # The agent asks the history now and then.
    desk.manager.wait_order(name, Action.CANCEL, timeout_s=120)
    past = desk.pool.wait(lambda: desk.pool.history(job), timeout_s=90, what="the node to leave the queue")
    assert past
    assert past["JobStatus"] == 3


def test_time_from_the_end_of_a_job_to_its_confirmation(desk: Desk, record_property: Any) -> None:
    """Most of it is the poll interval: 1 s here."""
    waits = []
    for _ in range(5):
        job = desk.submit()
        desk.pool.wait_status(job, "Completed")
        ended = time.monotonic()
        name = desk.ad(job)["GlobalJobId"]
        desk.pool.wait(lambda name=name: desk.manager.orders(name), what="the order", interval_s=0.05)  # type: ignore[misc]
        waits.append(time.monotonic() - ended)
    record_property("end_to_confirm_s", sorted(waits)[len(waits) // 2])
    assert sorted(waits)[len(waits) // 2] < 3.0
