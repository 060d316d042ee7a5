"""A user's jobs that name a DAG of another user: DAGManJobId is an attribute that owners write."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.pool.conftest import JOB, QUICK_AP, QUICK_EP, VERSION, Site, open_directory

pytestmark = pytest.mark.pool

#: The administrator's program: one file for each message.
_NOTIFIER = """#!/bin/sh
name=$(date +%s%N).$$
cat > MAILBOX/.$name
mv MAILBOX/.$name MAILBOX/note-$name
"""
_MAIL = "STAGEOUT_NOTIFY_COMMAND = {}\nSTAGEOUT_MAIL_INTERVAL = 0\n"
#: The node starts when the test makes the file `go` in the DAG's directory.
_HELD_BACK = "#!/bin/sh\nuntil [ -e go ]; do sleep 0.2; done\n"
_SCRIPTS = """SCRIPT PRE A ./held-back.sh
SCRIPT DEFER 75 2 POST A /opt/stageout/bin/stageout_dag_post $DAGID $NODE $JOBID $JOB_COUNT $RETURN
"""
#: Nothing answers there, and the node tries again.
_NOWHERE = "http://127.0.0.1:9/nothing"
_ALICE, _BOB = "alice-of-the-dag@example.org", "bob-beside-it@example.org"


@pytest.fixture(scope="module")
def site(stageout_pools: Any, destination: Any) -> Iterator[Site]:
    """A pool with a program for messages."""
    with open_directory("two-users") as shared:
        (shared / "mailbox").mkdir()
        (shared / "mailbox").chmod(0o1777)
        notifier = shared / "notifier"
        notifier.write_text(_NOTIFIER.replace("MAILBOX", str(shared / "mailbox")))
        notifier.chmod(0o755)
        settings = {"ap_config": QUICK_AP + _MAIL.format(notifier), "ep_config": QUICK_EP, "binds": (shared,)}
        with stageout_pools(version=VERSION, execute_points=1, cpus=8, **settings) as pool:
            yield Site(pool, destination, "two-users", shared)


def _notes(site: Site) -> list[tuple[str, str]]:
    """Return the messages as address and text, oldest first."""
    found = (json.loads(path.read_text()) for path in sorted((site.gates / "mailbox").glob("note-*")))
    return [(to, message["text"]) for message in found for to in message["to"]]


def _submit_dag(site: Site) -> Any:
    node = f"""executable = job.sh
arguments = out1
transfer_output_files = out1
output_destination = {site.url()}/a
request_memory = 50
request_disk = 10M
MY.StageOutAsync = true
log = a.log
queue
"""
    files = {"job.sh": JOB, "held-back.sh": _HELD_BACK, "a.sub": node}
    options = ("-notification", "always", "-append", f"notify_user={_ALICE}")
    return site.pool.submit_dag("alice", f"JOB A a.sub\n{_SCRIPTS}", files=files, options=options)


def _submit_beside(site: Site, dag: Any, **more: Any) -> Any:
    extra = f"MY.DAGManJobId = {dag}\nMY.StageOutAsync = true\nnotification = Always\nnotify_user = {_BOB}"
    return site.submit("bob", ("out1",), extra=extra, **more)


def test_jobs_of_another_user_that_name_the_dag_change_nothing_for_it(site: Site) -> None:
    dag = _submit_dag(site)
    waits = _submit_beside(site, dag.cluster, destination=_NOWHERE)
    done = _submit_beside(site, dag.cluster)
    assert site.wait_left(done)["StageOutState"] == "Delivered"
    site.wait_state(waits, "RetryWait")
    (dag.dir / "go").touch()
    ended = site.pool.wait(lambda: site.pool.history(dag), timeout_s=120, what="the DAG to end")
    assert ended["ExitCode"] == 0
    site.pool.wait(lambda: [to for to, _ in _notes(site) if to == _ALICE], timeout_s=60, what="the message")
    alices = [text for to, text in _notes(site) if to == _ALICE]
    assert [text.partition("\n")[0] for text in alices] == [f"[Condor] Condor DAG {dag.cluster} all output delivered"]
    assert "The output of 1 job is delivered: 1 file" in alices[0]
    # HTCondor 23.9 removes it with the DAG that it names.
    site.pool.ap.run(["condor_rm", str(waits)], user="bob", check=False)
    site.wait_left(waits)

    def bobs() -> list[str]:
        return [text for to, text in _notes(site) if to == _BOB and "output delivered for some" in text]

    (text,) = site.pool.wait(bobs, timeout_s=60, what="the message for the other user")
    assert "The output of 1 of 2 jobs is delivered, 1 removed" in text


def test_a_removed_dag_that_names_itself_stops_nobody(site: Site) -> None:
    root = site.submit("bob", extra="hold = true")
    site.pool.qedit(root, user="bob", DAGManJobId=str(root.cluster))
    site.pool.ap.run(["condor_rm", "-reason", "DAG Removed", str(root.cluster)], user="bob")
    assert site.pool.wait(lambda: site.pool.history(root), what="the job to leave")["RemoveReason"].startswith("DAG")
    removed = site.wait_left(_submit_beside(site, root.cluster, destination=_NOWHERE), timeout_s=90)
    assert removed["RemoveReason"].startswith("its DAG was removed")
    honest = site.submit(outputs=("out1",))
    assert site.wait_left(honest)["StageOutState"] == "Delivered"
    assert site.pool.ap.log("ScheddAgentLog").count(" daemon-started ") == 1
