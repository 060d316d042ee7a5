"""Messages about whole clusters and DAGs: each once, and never a wrong "all delivered"."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import classad2
import pytest

from schedd_agent import output_watch
from schedd_agent.decisions import failed_attempt
from schedd_agent.mail import MailKind, MailQueue
from schedd_agent.model import DagEnd, DagRoot, FailedAttempt
from schedd_agent.outcomes import JobOutcome, OutputEnd, read_outcome, totals_of
from schedd_agent.output_watch import FILE_NAME, OutputWatch, Watched, attempt_text, read_watched
from schedd_agent.queue import CondorJobQueue, QueueError
from stageout.core import durable
from stageout.core.states import State
from stageout.model.job import Job, JobAdState, MailRecipient, Status
from stageout.wire.custody import FileReport
from tests.unit.test_agent_daemon import JOB, MemoryClock, Site
from tests.unit.test_agent_decisions import job as decided_job
from tests.unit.test_agent_decisions import seen, situation
from tests.unit.test_agent_mail import MemoryMailer

NOW = 1_700_000_000
ATTEMPT = FailedAttempt("out.dat", "dest.example.org", "507 the disk is full", 20, NOW + 3600)
NEVER, ALWAYS, COMPLETE, ERROR, START = range(5)
ALICE, BOB = "alice@test", "bob@test"


def ad(proc: int, end: str = "Delivered", status: int = Status.COMPLETED, **more: Any) -> dict[str, Any]:
    """A job's ad, in the queue or in the history."""
    run = 0 if end == "None" else 1
    stats = {"Files": 2, "Bytes": 1024, "Hosts": "dest.example.org", "DeliveredAt": NOW + 600 + proc}
    return {
        "ClusterId": 7, "ProcId": proc, "JobStatus": int(status), "JobUniverse": 5, "NumShadowStarts": 1, "QDate": NOW,
        "TransferOutputStats": {"STAGEOUTFilesCountLastRun": 2 * run}, "CompletionDate": NOW + proc, "User": ALICE,
        "StageOutState": end, "StageOutRun": run, **({"StageOutStats": stats} if end == "Delivered" else {}), **more,
    }  # fmt: skip


class AdQueue(CondorJobQueue):
    """A schedd's queue and history as lists of ads. The constraints are those for HTCondor."""

    def __init__(self) -> None:
        self.here: list[dict[str, Any]] = []
        self.gone: list[dict[str, Any]] = []
        self.queries = 0
        self.is_down = False
        super().__init__()

    def _query_raw(self, constraint: str, wanted: list[str], **options: Any) -> list[Any]:
        self.queries += 1
        if self.is_down:
            raise QueueError("the schedd does not answer")
        return [found for found in map(classad2.ClassAd, self.here) if _matches(found, constraint)]

    def _history_ads(self, constraint: str, wanted: list[str], most: int) -> Iterator[dict[str, Any]]:
        found = [one for one in reversed(self.gone) if _matches(classad2.ClassAd(one), constraint)]
        return iter(found if most < 0 else found[:most])

    def leave(self, proc: int, **changes: Any) -> None:
        """Move a job into the history."""
        (one,) = [found for found in self.here if found["ProcId"] == proc]
        self.here.remove(one)
        self.gone.append({**one, **changes})


def _matches(found: Any, constraint: str) -> bool:
    return classad2.ExprTree(constraint).eval(found) is True


def job(proc: int = 0, notification: int = ALWAYS, **more: Any) -> Job:
    """A job whose output is handed off."""
    user = more.pop("user", ALICE)
    mail = MailRecipient(notification, user.partition("@")[0], "example.org")
    facts: dict[str, Any] = {"handed_off": 2, "mail": mail, "submitted_at": NOW, "cluster_jobs": 3, **more}
    return Job(f"ap#7.{proc}#{NOW}", facts.pop("cluster", 7), proc, Status.COMPLETED, 1, user, **facts)


class Desk:
    """A watch, its queue, and the mails that owners get."""

    def __init__(self, path: Path) -> None:
        self.path = path / FILE_NAME
        self.queue, self.clock = AdQueue(), MemoryClock()
        self.start()

    def start(self) -> None:
        """A new process."""
        self.mailer = MemoryMailer()
        self.mail_queue = MailQueue(self.mailer, 0.0)
        self.watch = OutputWatch(self.path, self.queue, self.mail_queue, self.clock, 60.0)

    def ends(self, *jobs: Job) -> list[str]:
        """Texts of the messages that the owner gets a minute later."""
        self.clock.now_s += 61
        self.watch.post_ends(jobs)
        return self.mails()

    def mails(self) -> list[str]:
        self.mailer.mails.clear()
        self.mail_queue.send(self.clock.now_s)
        return [f"{subject}\n{body}" for _, subject, body in self.mailer.mails]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


# ---- the end of a cluster --------------------------------------------------------------------------------------------


def test_one_message_says_that_all_output_of_a_cluster_is_delivered(desk: Desk) -> None:
    desk.queue.here = [ad(0), ad(1, "Moving"), ad(2, "Moving")]
    desk.watch.follow([job(0)], [])
    assert desk.ends() == []
    desk.queue.leave(0)
    desk.queue.here = [ad(1), ad(2)]
    (mail,) = desk.ends()
    assert mail.startswith("[Condor] Condor Cluster 7 all output delivered\n")
    assert (
        "The output of all 3 jobs is delivered: 6 files, 3.1 kB to dest.example.org. The last file arrived 10m02s "
        in mail
    )
    assert desk.ends() == []
    assert read_watched(desk.path) == {}


def test_jobs_that_left_count_and_a_job_in_both_places_counts_once(desk: Desk) -> None:
    desk.queue.here, desk.queue.gone = [ad(2)], [ad(0), ad(1), ad(2)]
    desk.watch.follow([job(2)], [])
    assert "all 3 jobs is delivered: 6 files" in desk.ends()[0]


@pytest.mark.parametrize(
    ("left", "words"),
    [
        ([ad(0), ad(1), ad(2, "Moving", Status.REMOVED)], "2 of 3 jobs is delivered, 1 removed: 4 files"),
        (
            [ad(0), ad(1, "None", Status.REMOVED), ad(2, "Cancelled")],
            "1 of 3 jobs is delivered, 1 removed, 1 cancelled",
        ),
        ([ad(0), ad(1, "Failed"), ad(2, "Lost")], "1 of 3 jobs is delivered, 1 failed, 1 lost"),
        ([ad(0), ad(1), ad(2, "Moving")], "2 of 3 jobs is delivered, 1 left the queue before its output arrived"),
        ([ad(0), ad(1, StageOutRun=0), ad(2)], "2 of 3 jobs is delivered, 1 left the queue before its output arrived"),
        ([ad(0)], "1 of 3 jobs is delivered, 2 no longer in the access point's history"),
    ],
    ids=["half removed", "removed and cancelled", "failed and lost", "on its way", "another run", "history rotated"],
)
def test_a_cluster_without_all_its_output_is_never_called_delivered(
    desk: Desk, left: list[dict[str, Any]], words: str
) -> None:
    desk.watch.follow([job(0)], [])
    desk.queue.gone = left
    (mail,) = desk.ends()
    assert mail.startswith("[Condor] Condor Cluster 7 output delivered for some jobs only\n")
    assert words in mail
    assert "all output" not in mail


def test_jobs_that_handed_nothing_off_do_not_spoil_the_whole(desk: Desk) -> None:
    desk.watch.follow([job(0)], [])
    desk.queue.gone = [ad(0), ad(1, "None"), ad(2)]
    (mail,) = desk.ends()
    assert mail.startswith("[Condor] Condor Cluster 7 all output delivered\n")
    assert "2 of 3 jobs is delivered, 1 without output to deliver after its end" in mail


@pytest.mark.parametrize(
    "waits",
    [
        ad(2, "None", Status.IDLE), ad(2, "None", Status.RUNNING), ad(2, "Moving"), ad(2, "Delivered", StageOutRun=0),
        ad(2, "Failed", Status.HELD), ad(2, "None", Status.HELD), ad(2, "Moving", Status.REMOVED), ad(2, "Lost"),
        ad(2, "Moving", TransferOutputStats="spoilt"),
    ],
    ids=["idle", "running", "moving", "another run", "failed", "held", "being removed", "lost", "spoilt"],
)  # fmt: skip
def test_nothing_is_posted_while_a_job_may_still_deliver(desk: Desk, waits: dict[str, Any]) -> None:
    desk.watch.follow([job(0)], [])
    desk.queue.here = [ad(0), ad(1), waits]
    assert desk.ends() == []
    desk.queue.here[2] = ad(2)
    assert len(desk.ends()) == 1


@pytest.mark.parametrize(("made", "total", "ends"), [(3, 3, True), (3, 9, False), (3, None, False), (3, 0, False)])
def test_a_factory_that_makes_more_jobs_has_not_ended(desk: Desk, made: int, total: int | None, ends: bool) -> None:
    factory = {"ClusterId": 7, "User": ALICE, "JobMaterializeNextProcId": made}
    if total is not None:
        factory["TotalSubmitProcs"] = total
    desk.queue.here, desk.queue.gone = [factory], [ad(0), ad(1), ad(2)]
    desk.watch.follow([job(0)], [])
    assert len(desk.ends()) == ends
    desk.queue.here = []
    assert len(desk.ends()) == (not ends)


def test_the_total_of_a_factory_grows(desk: Desk) -> None:
    desk.queue.gone = [ad(proc) for proc in range(5)]
    desk.watch.follow([job(0, cluster_jobs=0)], [])
    desk.watch.follow([job(4, cluster_jobs=5)], [])
    assert "all 5 jobs" in desk.ends()[0]


def test_a_cluster_without_any_delivery_has_no_message_about_its_end(desk: Desk) -> None:
    desk.watch.follow([job(0)], [])
    desk.queue.gone = [ad(0, "Moving", Status.REMOVED), ad(1, "None", Status.REMOVED), ad(2, "Cancelled")]
    assert desk.ends() == []
    assert read_watched(desk.path) == {}


def test_jobs_of_an_earlier_queue_with_the_same_number_do_not_count(desk: Desk) -> None:
    desk.queue.gone = [ad(proc, QDate=NOW - 9) for proc in range(3)] + [ad(0), ad(1, "None", Status.REMOVED), ad(2)]
    desk.watch.follow([job(0, cluster_jobs=0)], [])
    assert "2 of 3 jobs is delivered, 1 removed" in desk.ends()[0]


def test_a_known_cluster_of_an_earlier_queue_is_another_one(desk: Desk) -> None:
    desk.watch.follow([], [(job(0), ATTEMPT)])
    assert len(desk.mails()) == 1
    desk.watch.follow([], [(job(0, submitted_at=NOW + 5), ATTEMPT)])
    assert len(desk.mails()) == 1


def test_the_queue_has_few_queries(desk: Desk) -> None:
    many = [job(0, cluster=number) for number in range(1, 101)]
    desk.queue.here = [ad(0, "None", Status.RUNNING, ClusterId=number) for number in range(1, 101)]
    desk.watch.follow(many, [])
    assert desk.ends(*many) == []
    assert desk.queue.queries == 0, "the agent sees that their output is on its way"
    for _ in range(5):
        desk.watch.post_ends([])
    assert desk.queue.queries == 100
    desk.watch.post_ends([])
    assert desk.queue.queries == 100


def test_orders_do_not_wait_for_the_histories_of_many_clusters(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_history(constraint: str, wanted: list[str], most: int) -> Iterator[dict[str, Any]]:
        desk.clock.now_s += 3
        return AdQueue._history_ads(desk.queue, constraint, wanted, most)

    monkeypatch.setattr(desk.queue, "_history_ads", slow_history)
    clusters = [job(cluster=number, cluster_jobs=1) for number in (8, 9)]
    desk.queue.gone = [ad(0, ClusterId=one.cluster) for one in clusters]
    desk.watch.follow(clusters, [])
    desk.watch.post_ends([])
    first = desk.mails()
    desk.watch.post_ends([])
    assert [text.split()[2] for text in first + desk.mails()] == ["Cluster", "Cluster"] and len(first) == 1


def test_a_schedd_that_does_not_answer_is_asked_again(desk: Desk) -> None:
    desk.queue.gone = [ad(0), ad(1), ad(2)]
    desk.watch.follow([job(0)], [])
    desk.queue.is_down = True
    assert desk.ends() == []
    desk.queue.is_down = False
    assert len(desk.ends()) == 1


# ---- notification, the first failed attempt --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("notification", "wanted"),
    [
        (NEVER, []), (ALWAYS, ["delivery attempt failed, retries go on", "all output delivered"]),
        (COMPLETE, ["all output delivered"]), (ERROR, ["delivery attempt failed, retries go on"]), (START, []),
    ],
)  # fmt: skip
def test_the_notification_of_the_job_decides(desk: Desk, notification: int, wanted: list[str]) -> None:
    jobs = [job(proc, notification) for proc in range(3)]
    desk.watch.follow([], [(one, ATTEMPT) for one in jobs])
    mails = desk.mails()
    desk.watch.follow(jobs, [])
    desk.queue.gone = [ad(0), ad(1), ad(2)]
    mails += desk.ends()
    assert [mail.partition("\n")[0] for mail in mails] == [f"[Condor] Condor Cluster 7 {words}" for words in wanted]
    assert desk.ends() == []
    assert read_watched(desk.path) == {}


def test_one_message_for_the_first_failed_attempt_of_a_cluster(desk: Desk) -> None:
    for _ in range(3):
        desk.watch.follow([], [(job(2), ATTEMPT), (job(1), ATTEMPT)])
    (mail,) = desk.mails()
    assert (
        "out.dat of job 7.2 did not reach dest.example.org: 507 the disk is full. Its node tries again until " in mail
    )
    assert "until 2023-11-14 23:13 UTC, with at most 20 attempts for each file. There is no message about later" in mail
    desk.watch.follow([], [(job(0, cluster=8), ATTEMPT)])
    assert len(desk.mails()) == 1, "another cluster has its own message"


def test_texts_of_jobs_and_servers_are_bounded_and_printable(desk: Desk) -> None:
    hostile = FailedAttempt("a\nb" * 999, "unknown", "\x1b[31m\r\nSubject: x" * 999, 0, 0)
    desk.watch.follow([], [(job(0), hostile)])
    (mail,) = desk.mails()
    assert "\x1b" not in mail and "\nSubject" not in mail and "a\nb" not in mail
    assert len(mail) < 1000
    assert attempt_text(job(0), hostile).endswith("if the node gives up, you get one.")


def test_a_fault_of_the_node_is_not_the_host_s() -> None:
    text = attempt_text(job(0), replace(ATTEMPT, error="the spool cannot be read", of_node=True))
    assert "did not reach dest.example.org, for a fault of its node: the spool cannot be read. Its node tries" in text
    assert "with at most" not in text, "such attempts do not count"


@pytest.mark.parametrize("of_node", [False, True])
def test_the_attempt_is_that_of_the_final_run(of_node: bool) -> None:
    file = FileReport(
        "a", "https://dest.example.org/x/a", 5, "RetryWait", attempts=1, error="507", of_node=int(of_node)
    )
    waits = {"files": (file,), "attempts_limit": 20, "gives_up_at": NOW}
    found = failed_attempt(situation(decided_job(), seen(State.RETRY_WAIT, **waits)))
    assert found == FailedAttempt("a", "dest.example.org", "507", 20, NOW, of_node=of_node)
    assert failed_attempt(situation(decided_job(), seen(State.RETRY_WAIT, paused=1, **waits))) is None
    assert failed_attempt(situation(decided_job(), seen(State.FAILED, **waits))) is None
    assert failed_attempt(situation(decided_job(), seen(State.RETRY_WAIT, tickets=("other",), **waits))) is None
    assert failed_attempt(situation(decided_job(Status.RUNNING), seen(State.RETRY_WAIT, **waits))) is None
    for harmless in (replace(file, attempts=0), replace(file, error=""), replace(file, state="Failed")):
        waits["files"] = (harmless,)
        assert failed_attempt(situation(decided_job(), seen(State.RETRY_WAIT, **waits))) is None


# ---- DAGs ------------------------------------------------------------------------------------------------------------


def node(
    cluster: int, end: str = "Delivered", status: int = Status.COMPLETED, dag: int = 5, **more: Any
) -> dict[str, Any]:
    return ad(0, end, status, ClusterId=cluster, DAGManJobId=dag, **more)


def dagman(cluster: int, notification: int, status: int = Status.RUNNING, **more: Any) -> dict[str, Any]:
    return {
        "ClusterId": cluster, "ProcId": 0, "JobStatus": int(status), "JobUniverse": 7, "QDate": NOW - 5,
        "User": ALICE, "Owner": "alice", "UidDomain": "example.org", "JobNotification": notification, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("of_root", "of_nodes", "mails"), [(COMPLETE, NEVER, 1), (NEVER, COMPLETE, 1), (NEVER, NEVER, 0), (ERROR, NEVER, 0)]
)
def test_one_message_when_the_root_job_of_a_dag_has_ended(desk: Desk, of_root: int, of_nodes: int, mails: int) -> None:
    sub_dag = dagman(6, NEVER, DAGManJobId=5)
    desk.queue.here = [dagman(5, of_root), sub_dag]
    desk.watch.follow([job(0, of_nodes, cluster=8, dag=5), job(0, of_nodes, cluster=9, dag=6)], [])
    desk.queue.gone = [node(8), node(9, dag=6), {**sub_dag, "JobStatus": 4}]
    assert desk.ends() == [], "the DAG may start more nodes"
    desk.queue.here = []
    found = desk.ends()
    assert len(found) == mails
    for mail in found:
        assert mail.startswith("[Condor] Condor DAG 5 all output delivered\n")
        assert "all 2 jobs is delivered: 4 files" in mail


def test_a_failed_node_does_not_delay_the_message_of_its_dag_and_causes_no_second_one(desk: Desk) -> None:
    desk.queue.here = [node(8), node(9, "Failed")]
    desk.queue.gone = [dagman(5, COMPLETE, Status.COMPLETED)]
    nodes = [job(0, NEVER, cluster=number, dag=5) for number in (8, 9)]
    failed = replace(nodes[1], ad_state=JobAdState("Failed", 1))
    desk.watch.follow([nodes[0]], [])
    (mail,) = desk.ends(failed)
    assert "1 of 2 jobs is delivered, 1 failed" in mail
    desk.start()
    desk.watch.follow([nodes[1]], [])
    desk.queue.here = [node(8), node(9)]
    assert desk.ends() == []


def test_a_dag_that_nobody_knows_any_more_counts_by_itself(desk: Desk) -> None:
    desk.queue.here = [node(8)]
    desk.watch.follow([job(0, COMPLETE, cluster=8, dag=5)], [])
    queries = desk.queue.queries
    desk.watch.follow([job(0, COMPLETE, cluster=8, dag=5)], [])
    assert desk.queue.queries == queries, "it is not asked for again"
    assert desk.ends()[0].startswith("[Condor] Condor DAG 5 all output delivered\n")


def test_the_root_is_above_all_sub_dags(desk: Desk) -> None:
    desk.queue.here = [dagman(5, ERROR), dagman(6, NEVER, DAGManJobId=5)]
    desk.queue.gone = [dagman(7, NEVER, Status.COMPLETED, DAGManJobId=6)]
    root = DagRoot(5, MailRecipient(ERROR, "alice", "example.org"), NOW - 5)
    assert [desk.queue.dag_root(number, ALICE) for number in (5, 6, 7, 99)] == [root, root, root, None]
    assert [desk.queue.dag_root(number, BOB) for number in (5, 6, 7, 99)] == [None] * 4
    desk.queue.here[1]["User"] = BOB
    below = replace(root, cluster=7, mail=MailRecipient(NEVER, "alice", "example.org"))
    assert desk.queue.dag_root(7, ALICE) == below


# ---- jobs of another user that name the DAG --------------------------------------------------------------------------


def test_a_job_of_another_user_is_no_node_of_the_dag(desk: Desk) -> None:
    desk.queue.here = [dagman(5, COMPLETE), node(8), node(9, "Moving", User=BOB)]
    desk.watch.follow([job(0, cluster=8, dag=5)], [])
    desk.queue.here = [node(9, "Moving", User=BOB)]
    desk.queue.gone = [dagman(5, COMPLETE, Status.COMPLETED), node(8), node(10, User=BOB)]
    bobs = job(0, cluster=9, dag=5, user=BOB)
    (mail,) = desk.ends(bobs)
    assert "The output of 1 job is delivered: 2 files" in mail


def test_nobody_gets_mail_about_jobs_of_another_user(desk: Desk) -> None:
    """The named jobs are a DAG, ordinary clusters, and one that nobody knows any more."""
    desk.queue.here = [
        dagman(5, ALWAYS),
        *(ad(0, ClusterId=number, JobNotification=ALWAYS) for number in range(20, 40)),
    ]
    desk.watch.follow([], [(job(0, cluster=30, cluster_jobs=1), ATTEMPT)])
    desk.mails()
    watched = read_watched(desk.path)
    named = [5, *range(20, 41)]
    bobs = [job(0, NEVER, cluster=100 + number, dag=number, user=BOB) for number in named]
    desk.watch.follow(bobs, [(one, ATTEMPT) for one in bobs])
    assert desk.mails() == []
    assert read_watched(desk.path) == watched


def test_sums_of_a_dag_of_another_user_are_in_no_mail(desk: Desk) -> None:
    desk.queue.gone = [dagman(5, NEVER, Status.COMPLETED), node(8), node(9, User=BOB)]
    desk.watch.follow([job(0, COMPLETE, cluster=9, dag=5, user=BOB)], [])
    (mail,) = desk.ends()
    assert [to for (to, *_), _, _ in desk.mailer.mails] == ["bob@example.org"]
    assert "The output of 1 job is delivered: 2 files" in mail


def test_a_group_that_another_user_names_keeps_its_message(desk: Desk) -> None:
    desk.queue.gone = [dagman(5, COMPLETE, Status.COMPLETED), node(8)]
    desk.watch.follow([job(0, cluster=8, dag=5)], [])
    desk.queue.gone = [node(8)]
    desk.start()
    desk.watch.follow([job(0, cluster=9, dag=5, user=BOB)], [])
    desk.queue.gone += [node(9, User=BOB)]
    assert sorted(mail.count("The output of 1 job is delivered") for mail in desk.ends()) == [1, 1]
    assert sorted(to for (to, *_), _, _ in desk.mailer.mails) == ["alice@example.org", "bob@example.org"]


def test_the_dags_of_one_user_take_little_time(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The history is read to its end for a number that no job has."""
    read: list[str] = []

    def slow_history(constraint: str, wanted: list[str], most: int) -> Iterator[dict[str, Any]]:
        read.append(constraint)
        desk.clock.now_s += 1
        return iter(())

    monkeypatch.setattr(desk.queue, "_history_ads", slow_history)
    desk.queue.here = [dagman(5, COMPLETE)]
    bobs = [job(0, cluster=100 + number, dag=1000 + number, user=BOB) for number in range(50)]
    desk.watch.follow([*bobs, job(0, cluster=8, dag=5)], [])
    assert len(read) == 3
    assert (5, ALICE) in read_watched(desk.path), "another user's DAG is looked up"
    desk.watch.follow(bobs, [])
    assert len(read) == 6, "the next pass goes on"


@pytest.mark.parametrize("parents", [{5: 5}, {5: 6, 6: 5}, {number: number + 1 for number in range(5, 900)}])
def test_removed_dags_that_name_each_other_have_an_end(desk: Desk, parents: dict[int, int]) -> None:
    reason = "DAG Removed: mine (by user bob)"
    desk.queue.gone = [
        dagman(number, NEVER, Status.REMOVED, DAGManJobId=above, RemoveReason=reason, User=BOB)
        for number, above in parents.items()
    ]
    assert desk.queue.dags({5}) == {5: DagEnd.REMOVED}
    assert desk.queue.queries <= 20


def test_a_row_of_an_earlier_version_is_that_of_the_same_dag(desk: Desk) -> None:
    row = asdict(Watched(5, COMPLETE, "alice", "example.org", NOW - 5, 0, (5,), is_attempt_told=True))
    del row["user"]
    desk.path.write_text(json.dumps([row]))
    desk.start()
    desk.queue.here = [dagman(5, COMPLETE)]
    assert desk.ends(job(0, cluster=8, dag=5)) == []
    assert desk.queue.queries == 0, "the agent sees that the output of a node is on its way"
    alices, bobs = job(0, cluster=8, dag=5), job(0, NEVER, cluster=9, dag=5, user=BOB)
    desk.watch.follow([bobs], [(bobs, ATTEMPT)])
    assert [one.user for one in read_watched(desk.path).values()] == [""]
    desk.watch.follow([alices], [(alices, ATTEMPT)])
    assert desk.mails() == [], "the owner got that message from the earlier version"
    (one,) = read_watched(desk.path).values()
    assert (one.user, one.is_attempt_told) == (ALICE, True)


def test_a_row_of_an_earlier_version_has_its_message(desk: Desk) -> None:
    row = asdict(Watched(5, COMPLETE, "alice", "example.org", NOW - 5, 0, (5,)))
    del row["user"]
    desk.path.write_text(json.dumps([row]))
    desk.start()
    desk.queue.gone = [dagman(5, COMPLETE, Status.COMPLETED), node(8)]
    assert len(desk.ends()) == 1
    assert desk.ends() == []


# ---- restarts, faults, bounds ----------------------------------------------------------------------------------------


def test_a_restart_loses_nothing_and_repeats_nothing(desk: Desk) -> None:
    desk.watch.follow([job(0)], [(job(1), ATTEMPT)])
    assert len(desk.mails()) == 1
    desk.start()
    desk.watch.follow([], [(job(1), ATTEMPT)])
    assert desk.mails() == []
    desk.queue.gone = [ad(0), ad(1), ad(2)]
    assert len(desk.ends()) == 1
    desk.start()
    assert desk.ends() == []


class _Death(BaseException):
    """The process ends here."""


@pytest.mark.parametrize(("when", "messages"), [("kill-before", 1), ("kill-after", 0)])
@pytest.mark.parametrize("step", ["attempt", "end"])
def test_a_death_at_the_record_repeats_no_message(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, when: str, messages: int, step: str
) -> None:
    def die() -> None:
        raise _Death

    def act() -> None:
        if step == "attempt":
            desk.watch.follow([], [(job(1), ATTEMPT)])
        else:
            desk.ends()

    if step == "end":
        desk.watch.follow([job(0)], [])
        desk.queue.gone = [ad(0), ad(1), ad(2)]
    monkeypatch.setattr(durable, "die", die)
    monkeypatch.setitem(durable._faults, "watched-record", [durable.Fault(when, None)])
    with pytest.raises(_Death):
        act()
    assert desk.mails() == []
    monkeypatch.setitem(durable._faults, "watched-record", [])
    desk.start()
    mails: list[str] = []
    monkeypatch.setattr(desk.mail_queue, "post", lambda *message: mails.append(message[2]))
    act()
    assert len(mails) == messages


def test_nothing_is_posted_that_cannot_be_stored(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    full, empty = [durable.Fault("ENOSPC", None)], list[durable.Fault]()
    monkeypatch.setitem(durable._faults, "watched-record", full)
    desk.watch.follow([job(0)], [(job(1), ATTEMPT)])
    assert desk.mails() == []
    monkeypatch.setitem(durable._faults, "watched-record", empty)
    desk.watch.follow([], [(job(1), ATTEMPT)])
    assert len(desk.mails()) == 1
    desk.queue.gone = [ad(0), ad(1), ad(2)]
    monkeypatch.setitem(durable._faults, "watched-record", full)
    assert desk.ends() == []
    monkeypatch.setitem(durable._faults, "watched-record", empty)
    assert len(desk.ends()) == 1, "the cluster was not forgotten"


def test_a_cluster_that_could_not_be_stored_has_its_message(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(durable._faults, "watched-record", [durable.Fault("ENOSPC", None)])
    desk.watch.follow([job(0)], [])
    desk.queue.gone = [ad(0), ad(1), ad(2)]
    assert len(desk.ends()) == 1


@pytest.mark.parametrize("text", ["", "[", "{}", "[1]", '[{"cluster": 1}]', '[{"cluster": 1, "dags": 3}]', '"\\ud800"'])
def test_a_damaged_file_does_not_stop_the_agent(desk: Desk, text: str) -> None:
    desk.path.write_text(text)
    desk.start()
    desk.watch.follow([job(0)], [])
    desk.start()
    assert list(read_watched(desk.path)) == [(7, ALICE)]


def test_the_number_of_watched_clusters_is_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_watch, "MOST", 5)
    told = Watched(50, 1, "a", "b", dags=(50,), is_end_told=True)
    desk.watch._watched = {one.key: one for one in (Watched(1, 1, "a", "b"), Watched(2, 1, "a", "b"), told)}
    desk.watch.follow([job(0, cluster=number) for number in (60, 61, 62)], [])
    assert [one.cluster for one in read_watched(desk.path).values()] == [1, 2, 60, 61, 62], (
        "those go first whose end is known"
    )
    desk.watch.follow([job(0, cluster=63)], [])
    assert [one.cluster for one in read_watched(desk.path).values()] == [2, 60, 61, 62, 63]


def test_others_cannot_read_the_addresses(desk: Desk) -> None:
    desk.watch.follow([job(0)], [])
    assert desk.path.stat().st_mode & 0o077 == 0


# ---- outcomes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({}, OutputEnd.DELIVERED),
        ({"JobStatus": 3}, OutputEnd.DELIVERED),
        ({"StageOutRun": 2}, OutputEnd.LEFT),
        ({"StageOutState": 5}, OutputEnd.LEFT),
        ({"TransferOutputStats": "x", "StageOutState": "None"}, OutputEnd.NOTHING),
        ({"StageOutStats": "spoilt"}, OutputEnd.DELIVERED),
    ],
)
def test_an_ad_with_odd_values_is_read(changes: dict[str, Any], end: OutputEnd) -> None:
    found = read_outcome({**ad(0), **changes})
    assert found is not None
    assert found.end is end


def test_sums_name_few_hosts_and_no_times_that_are_unknown() -> None:
    many = [
        JobOutcome(7, proc, OutputEnd.DELIVERED, 1, 10, (f"h{proc}",), NOW if proc else 0, 0) for proc in range(9)
    ]  # fmt: skip
    assert totals_of(many).text() == (
        "The output of all 9 jobs is delivered: 9 files, 90 B to h0, h1, h2, h3, h4 and others."
    )
    assert totals_of(many[:1]).text() == "The output of 1 job is delivered: 1 file, 10 B to h0."


# ---- the agent -------------------------------------------------------------------------------------------------------


class Watching(Site):
    """A site whose agent watches clusters."""

    def start(self, name: str = "ap") -> Any:
        agent = super().start(name)
        self.ads = getattr(self, "ads", None) or AdQueue()
        self.mailer = MemoryMailer()
        agent.mail_queue = MailQueue(self.mailer, 0.0)
        agent.output_watch = OutputWatch(self.path / FILE_NAME, self.ads, agent.mail_queue, self.clock, 1.0)
        return agent

    @property
    def subjects(self) -> list[str]:
        return [subject for _, subject, _ in self.mailer.mails]


@pytest.mark.parametrize(
    ("alone", "subjects"),
    [
        (True, ["[Condor] Condor Cluster 7 all output delivered"]),
        (
            False,
            [
                "[Condor] Condor Job 7.0 output delivered",
                "[Condor] Condor Cluster 7 output delivered for some jobs only",
            ],
        ),
    ],
)  # fmt: skip
def test_a_pass_watches_the_cluster_before_its_job_can_leave(tmp_path: Path, alone: bool, subjects: list[str]) -> None:
    site = Watching(tmp_path)
    site.complete()
    facts = {"mail": job().mail, "submitted_at": NOW, "cluster_jobs": 1 if alone else 2}
    site.queue.found[JOB] = replace(site.job, **facts)
    site.ads.gone = [ad(0)]
    site.report(State.DELIVERED)
    watched: list[bool] = []
    apply: Callable[[Any], None] = site.queue.apply

    def applied(edit: Any) -> None:
        watched.append((7, ALICE) in read_watched(site.path / FILE_NAME))
        apply(edit)

    site.queue.apply = applied  # type: ignore[method-assign]
    site.passes()
    assert watched and all(watched)
    site.passes(3)
    assert site.subjects == subjects


def test_kinds_of_messages_have_words_of_their_own() -> None:
    assert len({kind.value for kind in MailKind}) == len(MailKind)
