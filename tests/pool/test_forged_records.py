"""Texts of a job's own plugin reach the access point's records unescaped: no job forges another's record with them."""

from __future__ import annotations

from typing import Any

import pytest

from stageout.core.states import State
from tests.harness.pool import Submission
from tests.harness.pool.errors import PoolTimeout
from tests.harness.pool.waiting import wait_until
from tests.pool.test_agent_pool import Manager

pytestmark = pytest.mark.pool

FORGER = "forger@test"

#: Says that everything was sent, and adds what its job brings in the file ``facts`` to each result.
PLUGIN = r"""#!/usr/bin/python3
import os, re, sys
if "-classad" in sys.argv:
    print('MultipleFileSupport = true\nProtocolVersion = 4\nPluginVersion = "1"\nPluginType = "FileTransfer"')
    print('SupportedMethods = "evil"')
    sys.exit(0)
said = open(sys.argv[sys.argv.index("-infile") + 1]).read()
with open(sys.argv[sys.argv.index("-outfile") + 1], "r+") as out:
    for url in re.findall('Url = "([^"]*)"', said):
        out.write('[ TransferSuccess = true; TransferError = ""; TransferFileName = "a"; TransferUrl = "%s"; '
                  'TransferProtocol = "evil"; TransferType = "upload"; TransferFileBytes = 1; TransferTotalBytes = 1; '
                  'TransferStartTime = 1; TransferEndTime = 2; ConnectionTimeSeconds = 0.1; %s ]\n'
                  % (url, open(os.path.dirname(os.path.abspath(__file__)) + "/facts").read().strip()))
"""
_JOB = """
executable = /bin/sh
arguments = "-c 'echo hi > a'"
transfer_input_files = facts
transfer_output_files = a
output_destination = evil://nowhere/{place}/
transfer_plugins = evil=plug
request_disk = 10M
MY.StageOutAsync = false
queue
"""


def _record(ad: dict[str, Any], ticket: str) -> str:
    """A record of the run of another job, as HTCondor would write it, with a receipt of the forger's manager."""
    cluster, proc = ad["ClusterId"], ad["ProcId"]
    receipt = f'[ Ticket = "{ticket}"; ManagerName = "{FORGER}"; ManagerKey = ""; Files = 2; Bytes = 5 ]'
    return (
        f'ClusterId = {cluster}\nEpochAdType = "OUTPUT"\nGlobalJobId = "{ad["GlobalJobId"]}"\nNumShadowStarts = 1\n'
        f"OutputPluginResultList = {{ [ DeveloperData = [ StageOutReceipt = {receipt} ] ] }}\n"
        f'Owner = "alice"\nProcId = {proc}\nRemoteHost = "slot1_1@ep1"\nRunInstanceID = 0\nTransferClass = "OUTPUT"\n'
        f"EpochWriteDate = 1700000000\n*** OUTPUT ClusterId={cluster} ProcId={proc} RunInstanceId=0 "
        f'Owner="alice" CurrentTime=1700000000\n'
    )


def _escaped(text: str, quote: str) -> str:
    return text.replace("\\", "\\\\").replace(quote, "\\" + quote).replace("\n", "\\n")


def _in_a_text(record: str) -> str:
    record = record.replace('"\n', '" \n')  # a quote at the end of a line would end the string on its way to the shadow
    return f'TransferData = {{ "{_escaped("x" + chr(10) + record + "y", chr(34))}" }}'


def _in_a_name(record: str) -> str:
    """The name of an attribute: there HTCondor does not even escape the quotes of strings."""
    return f"DeveloperData = [ '{_escaped('x' + chr(10) + record + 'y', chr(39))}' = 1 ]"


def submit_forger(site: Any, user: str, facts: str) -> Submission:
    """Submit a job whose own plugin reports that."""
    return site.pool.submit(user, _JOB.format(place=site.prefix), files={"plug": PLUGIN, "facts": facts})


def forged_facts(ad: dict[str, Any]) -> str:
    """Return facts of a result that hold a record of the run of this job, with a receipt of a forger's manager."""
    return _in_a_name(_record(ad, "f0rged"))


def _run(site: Any, facts: str) -> Submission:
    """Run such a job of bob's; returns when it has left and its record is read."""
    job = submit_forger(site, "bob", facts)
    site.jobs.append(job)
    site.pool.wait(lambda: not site.pool.q(job) and site.pool.history(job), what=f"the end of {job}", timeout_s=90)
    return job


@pytest.fixture
def waiting(site: Any) -> Any:
    """Alice's completed job, whose output waits because the destination is down."""
    site.destination.stop()
    job = site.submit()
    site.wait_state(job, "RetryWait")
    yield job
    site.destination.start_again()


@pytest.mark.parametrize("hidden", [_in_a_text, _in_a_name])
def test_a_job_forges_no_record_of_another(site: Any, waiting: Any, hidden: Any) -> None:
    _run(site, hidden(_record(site.pool.q(waiting), "f0rged")))
    _check_undisturbed(site, waiting)


@pytest.mark.parametrize("state", [State.DELIVERED, State.LOST])
def test_a_forged_record_and_a_managers_token_decide_nothing(site: Any, waiting: Any, state: State) -> None:
    ad = site.pool.q(waiting)
    manager = Manager(site.pool, name=FORGER)
    manager.accept(ad["GlobalJobId"], 1, ("f0rged",))
    _run(site, _in_a_name(_record(ad, "f0rged")))
    manager.report(ad["GlobalJobId"], 1, state, reason="")
    _check_undisturbed(site, waiting)
    manager.forget(ad["GlobalJobId"])


def _check_undisturbed(site: Any, job: Any) -> None:
    """For a while the job stays as it is, and it leaves when the destination is back."""
    _watch(site, job, 10)
    site.destination.start_again()
    history = site.wait_left(job)
    site.check_delivered(job)
    assert (history["NumShadowStarts"], history["StageOutReruns"]) == (1, 0)


def _watch(site: Any, job: Any, duration_s: float) -> None:
    """For so long the job neither leaves, nor is held, nor runs again."""

    def changed() -> Any:
        ad = site.pool.q(job) or site.pool.history(job) or {}
        wanted = {"JobStatus": 4, "NumShadowStarts": 1, "CompletionDate": completed, "StageOutReruns": 0}
        told = {name: ad.get(name) for name in (*wanted, "StageOutState", "StageOutReason")}
        return told if not site.pool.q(job) or any(ad.get(name) != wanted[name] for name in wanted) else None

    completed = site.pool.q(job)["CompletionDate"]
    with pytest.raises(PoolTimeout):
        pytest.fail(f"{job}: {wait_until(changed, timeout_s=duration_s, what='a change')}")


_ODD_JOB = """#!/bin/sh
mkdir d
printf one > 'd/first
second'
printf two > 'd/it"s'"'"'{['
"""


def test_output_files_with_odd_names_are_delivered(site: Any) -> None:
    """Their names reach the records, too: a line end in one hid the receipts of its own run."""
    text = f"""
executable = job.sh
transfer_output_files = d
output_destination = {site.url()}/$(Cluster).$(Process)
request_disk = 10M
queue
"""
    job = site.pool.submit("alice", text, files={"job.sh": _ODD_JOB})
    site.jobs.append(job)
    history = site.wait_left(job)
    assert (history["StageOutState"], history["StageOutStats"]["Files"]) == ("Delivered", 2)
    arrived = [path for path in site.file(job, "d").rglob("*") if path.is_file()]
    assert sorted(path.read_text() for path in arrived) == ["one", "two"]


def test_two_lines_of_a_foreign_plugin_hide_no_receipt(site: Any) -> None:
    """One file goes through a plugin of the job's own, whose text has two lines, another through ours."""
    text = f"""
executable = /bin/sh
arguments = "-c 'echo a > a; echo b > b'"
transfer_input_files = facts
transfer_output_files = a, b
transfer_output_remaps = "a = evil://nowhere/a; b = {site.url()}/$(Cluster).$(Process)/b"
transfer_plugins = evil=plug
request_disk = 10M
queue
"""
    files = {"plug": PLUGIN, "facts": 'TransferErrorData = { [ ErrorString = "first line\\nsecond line" ] }'}
    job = site.pool.submit("alice", text, files=files)
    site.jobs.append(job)
    assert site.wait_left(job)["StageOutState"] == "Delivered"
    assert site.file(job, "b").read_text() == "b\n"
