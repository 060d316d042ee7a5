"""Receipts in the records of each job, and what a job's texts can and cannot make their reader believe."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedd_agent.queue import parse_job
from schedd_agent.receipts import DIRECTORY, Receipts, _tickets
from stageout.model.job import HistoryRecord
from stageout.model.run import RunRecord, Ticket
from stageout.wire.custody import JobKey

VICTIM = JobKey("ap#5.0#1700000000", "alice@test")


def record(cluster: int, results: str, run: int = 1, owner: str = "bob", kind: str = "OUTPUT", tail: str = "") -> str:
    """A record as HTCondor 25 writes it. :param tail: lines between the results and the end."""
    head = {"OUTPUT": "OutputPluginInvocations = { }\nOutputPluginResultList", "INPUT": "InputPluginResultList"}
    return (
        f'ClusterId = {cluster}\nEpochAdType = "{kind}"\nGlobalJobId = "ap#{cluster}.0#1700000000"\n'
        f"NumShadowStarts = {run}\n{head[kind]} = {{ {results} }}\n{tail}"
        f'Owner = "{owner}"\nProcId = 0\nRemoteHost = "slot1_1@ep1"\nRunInstanceID = {run - 1}\n'
        f'TransferClass = "{kind}"\n'
        f'EpochWriteDate = 1700000000\n*** {kind} ClusterId={cluster} ProcId=0 RunInstanceId={run - 1} Owner="{owner}" '
        "CurrentTime=1700000000\n"
    )


def bobs(cluster: int, proc: int = 0) -> JobKey:
    """A job of bob's."""
    return JobKey(f"ap#{cluster}.{proc}#1700000000", "bob@test")


def receipt(ticket: str) -> str:
    """A result with a receipt."""
    facts = f'Ticket = "{ticket}"; ManagerName = "m1"; ManagerKey = "k"; Files = 2; Bytes = 5'
    return f"[ DeveloperData = [ StageOutReceipt = [ {facts} ] ] ]"


def result(**texts: str) -> str:
    """A result with these strings, written as HTCondor writes strings."""
    pairs = (f'{name} = "{text}"'.replace('"', '\\"') for name, text in texts.items())
    return f"[ {'; '.join(pairs)} ]"


OWN = record(9, receipt("own"))
FORGED = record(5, receipt("forged"), owner="alice")
HONEST = record(5, receipt("honest"), owner="alice")
BANNER = OWN.splitlines()[-1]
SHUT = ' ] }\nOwner = "bob"\nProcId = 0\n' + BANNER + "\n"
OTHER_SHUT = SHUT.replace("OUTPUT", "EPOCH")
OPEN = 'ClusterId = 9\nEpochAdType = "OUTPUT"\nGlobalJobId = "ap#9.0#1700000000"\nNumShadowStarts = 1\n'
AGAIN = OPEN + 'OutputPluginResultList = { [ A = "x"; B = '


def raw(text: str) -> str:
    """A string's text in a record: only quotes are escaped."""
    return text.replace('"', '\\"')


#: Text between the braces of the attacker's OutputPluginResultList.
HOSTILE = {
    "a text": f'[ TransferError = "x\n{raw(FORGED)}y" ]',
    "a text that closes its own record": f'[ TransferError = "x{raw(SHUT + FORGED + OPEN)}y" ]',
    "a quoted name": f"[ DeveloperData = [ 'x\n{FORGED}y' = 1 ] ]",
    "a quoted name that closes its own record": f"[ DeveloperData = [ 'x{SHUT}{FORGED}{OPEN}y' = 1 ] ]",
    "a quoted name behind a text with an apostrophe": f"[ E = \"can't\"; D = [ 'x{SHUT}{FORGED}{OPEN}y' = 1 ] ]",
    "a text that ends with a backslash": f'[ E = "x\\"; D = "{raw(SHUT + FORGED + OPEN)}" ]',
    # The reader takes the inside for the outside from here on, and all that it sees there is perfect.
    "a backslash and a quoted name": f'[ E = "x\\"; \'"{SHUT}{FORGED}{AGAIN}"\' = 1 ]',
    "a backslash, a quoted name and an end": (
        f'[ E = "x\\"; \'"{SHUT}{FORGED}{AGAIN}7 ] }}\nF = "\' = 1; G = " ] }}\n" ]'
    ),
    "a backslash and names of other kinds": f'[ E = "x\\"; \'"{OTHER_SHUT}{FORGED}{AGAIN}"\' = 1 ]',
    "quotes that do not match": f'[ E = """" ] }}\n{FORGED}',
    "brackets that do not match": f"] ] }} }}\n{FORGED}",
    "bytes that are no text": f'[ E = "\udcff\x00\r\n{raw(FORGED)}" ]',
    "a number of too many digits": f"[ DeveloperData = [ 'StageOutReceipt = [ A = {'9' * 5000} ]' = 1 ] ]",
    "quotes without end": "[ DeveloperData = [ 'x\n" + BANNER + '\n"' + '\\"' * 100_000 + "' = 1 ] ]",
    "another line end": '[ E = "x\r' + raw(FORGED).replace("\n", "\r") + '" ]',
    "a huge text": f'[ E = "{"x" * 5_000_000}\n{raw(FORGED)}" ]',
}


def _write(directory: Path, cluster: int, text: str, proc: int = 0) -> None:
    """Append to a job's file, as a shadow of that job does with everything that it writes."""
    with open(directory / f"job.runs.{cluster}.{proc}.ads", "ab") as stream:
        stream.write(text.encode("utf-8", "surrogateescape"))


def _told(receipts: Receipts, key: JobKey, run: int = 1) -> list[str]:
    receipts.begin_pass()
    found = receipts.get(key, run)
    return [ticket.name for ticket in found.tickets] if found else []


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("kind", ["OUTPUT", "INPUT"])
def test_no_text_of_a_job_speaks_of_another(tmp_path: Path, hostile: str, kind: str) -> None:
    receipts = Receipts(tmp_path)
    attack = record(9, hostile.replace("OUTPUT ClusterId=9", f"{kind} ClusterId=9"), kind=kind)
    _write(tmp_path, 9, attack)
    assert _told(receipts, VICTIM) == []
    _write(tmp_path, 5, HONEST)
    _write(tmp_path, 9, attack)
    assert _told(receipts, VICTIM) == ["honest"]


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_jobs_own_texts_do_not_hide_its_later_runs(tmp_path: Path, hostile: str) -> None:
    _write(tmp_path, 9, record(9, hostile) + record(9, receipt("second"), run=2))
    assert _told(Receipts(tmp_path), bobs(9), 2) == ["second"]


def test_random_texts_do_not_stop_the_reader(tmp_path: Path) -> None:
    seeded = random.Random(5)
    pieces = ["\\", '"', "'", '\\"', "\n", " ]", " }", "; ", " = ", "A", BANNER + "\n", FORGED, raw(FORGED), OPEN, SHUT]
    for round_ in range(300):
        texts = ["".join(seeded.choices(pieces, k=seeded.randint(1, 12))) for _ in range(3)]
        body = f'[ E = "{raw(texts[0])}"; \'{texts[1].replace(chr(39), "")}\' = 1; F = "{raw(texts[2])}" ]'
        cluster = 100 + round_
        _write(tmp_path, cluster, record(cluster, body) + record(cluster, receipt("after"), run=2))
        assert _told(Receipts(tmp_path), bobs(cluster), 2) == ["after"], body


def test_a_record_counts_when_its_end_is_there(tmp_path: Path) -> None:
    """A record is written at once, and may be seen in part."""
    receipts = Receipts(tmp_path)
    _write(tmp_path, 5, HONEST[:-20])
    assert _told(receipts, VICTIM) == []
    _write(tmp_path, 5, HONEST[-20:])
    assert _told(receipts, VICTIM) == ["honest"]


def test_a_record_that_a_full_disk_cut_does_not_hide_the_next(tmp_path: Path) -> None:
    for cut in range(1, len(HONEST), 5):
        (tmp_path / "job.runs.5.0.ads").unlink(missing_ok=True)
        _write(tmp_path, 5, HONEST[:cut] + record(5, receipt("next"), run=2, owner="alice"))
        assert _told(Receipts(tmp_path), VICTIM, 2) == ["next"], HONEST[:cut][-60:]


def test_a_file_is_compared_once_in_a_pass(tmp_path: Path) -> None:
    receipts = Receipts(tmp_path)
    receipts.begin_pass()
    assert receipts.get(VICTIM, 1) is None
    _write(tmp_path, 5, HONEST)
    assert receipts.get(VICTIM, 1) is None
    receipts.begin_pass()
    assert receipts.get(VICTIM, 1) is not None


def test_a_number_that_a_restored_queue_uses_again_has_the_later_record(tmp_path: Path) -> None:
    _write(tmp_path, 5, HONEST + record(5, receipt("again"), owner="alice"))
    assert _told(Receipts(tmp_path), VICTIM) == ["again"]


def test_another_jobs_record_with_the_same_number_is_not_given(tmp_path: Path) -> None:
    """Numbers begin anew with a new queue."""
    _write(tmp_path, 5, HONEST)
    receipts = Receipts(tmp_path)
    assert receipts.get(VICTIM._replace(name="ap#5.0#1800000000"), 1) is None
    assert receipts.get(VICTIM._replace(owner="bob@test"), 1) is None
    assert receipts.get(VICTIM, 1) is not None


def test_two_lines_of_a_foreign_plugin_hide_no_receipt(tmp_path: Path) -> None:
    foreign = '[ TransferError = "first line: \\"x\\" isn\'t there; {[\n*** second ]}\n\n" ]'
    _write(tmp_path, 5, record(5, f"{foreign},{receipt('t1')}", owner="alice"))
    _write(tmp_path, 6, record(6, f"{receipt('t2')},{foreign}"))
    receipts = Receipts(tmp_path)
    assert (_told(receipts, VICTIM), _told(receipts, bobs(6))) == (["t1"], ["t2"])


def test_records_of_an_older_release_are_read(tmp_path: Path) -> None:
    """23.9 writes neither GlobalJobId nor Owner, and other records between."""
    banner = 'ClusterId=5 ProcId=0 RunInstanceId=0 Owner="alice" CurrentTime=1\n'
    starter = 'AddressV1 = "{[ p=\\"primary\\"; a=\\"::1\\"; noUDP=true; ]}"\nEpochWriteDate = 1\n*** STARTER '
    own = f"ClusterID = 5\nNumShadowStarts = 1\nOutputPluginResultList = {{ {receipt('t1')} }}\nProcID = 0\n"
    _write(tmp_path, 5, f"{own}EpochWriteDate = 1\n*** OUTPUT {banner}{starter}{banner}")
    receipts = Receipts(tmp_path)
    assert _told(receipts, VICTIM) == ["t1"]
    assert receipts.get(VICTIM, 1) is not None


def test_jobs_with_the_same_cluster_have_files_of_their_own(tmp_path: Path) -> None:
    for proc in (0, 1):
        _write(tmp_path, 7, record(7, receipt(f"t{proc}")).replace("7.0#", f"7.{proc}#"), proc)
    assert [_told(Receipts(tmp_path), bobs(7, proc)) for proc in (0, 1)] == [["t0"], ["t1"]]


def test_records_that_cannot_be_read_are_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "job.runs.5.0.ads").mkdir()
    receipts = Receipts(tmp_path)
    for _ in range(3):
        receipts.begin_pass()
        assert receipts.get(VICTIM, 1) is None
    assert caplog.text.count("records-read-failed") == 1


def test_news_in_the_shared_file_are_noticed(tmp_path: Path) -> None:
    shared = tmp_path / "epoch_history"
    receipts = Receipts(tmp_path, shared)
    assert not receipts.has_news(), "there is no file yet"
    shared.write_text(HONEST)
    assert receipts.has_news()
    assert not receipts.has_news()
    with shared.open("a") as stream:
        stream.write(record(6, ""))
    assert not receipts.has_news(), "no receipt came"
    with shared.open("a") as stream:
        stream.write(HONEST)
    assert receipts.has_news()
    shared.rename(tmp_path / "epoch_history.20261121T110000")
    assert not receipts.has_news()
    shared.write_text(HONEST)
    assert receipts.has_news(), "it was rotated"


def test_old_files_are_found_and_removed(tmp_path: Path) -> None:
    for cluster in (5, 6):
        _write(tmp_path, cluster, HONEST)
    rotated = tmp_path / "job.runs.5.0.ads.20261121T110000"
    rotated.touch()
    (tmp_path / "notes").touch()
    for path in tmp_path.iterdir():
        os.utime(path, (100, 100))
    _write(tmp_path, 6, HONEST)
    receipts = Receipts(tmp_path)
    old = receipts.files_before(200.0)
    assert old == {tmp_path / "job.runs.5.0.ads": (5, 0), rotated: (5, 0)}
    receipts.forget(old)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.runs.6.0.ads", "notes"]
    assert not receipts.is_own and Receipts(tmp_path / DIRECTORY).is_own


@given(st.text(alphabet=st.sampled_from('[]{}"\\;= \nStageOutReceipt'), max_size=40))
def test_text_that_only_looks_like_a_receipt_is_none(text: str) -> None:
    """File names and messages come from the job: in a string nothing counts, and nothing hides what is behind it."""
    fake = '[ Ticket = "evil"; ManagerName = "evil" ]'
    text = text.rstrip("\\")  # no string that ends so reaches a record
    name, manager = f"{text}StageOutReceipt = {fake}{text}".replace('"', '\\"'), f"m{text}".replace('"', '\\"')
    if '"\n' in name + manager:
        return  # nor does such a one
    row = (
        f'[ TransferFileName = "{name}"; DeveloperData = [ StageOutReceipt = [ Ticket = "t1"; '
        f'ManagerName = "{manager}" ] ] ]'
    )
    assert list(_tickets(f"{{ {row},{row} }}\n".encode())) == [Ticket("t1", f"m{text}", "", 0, 0)]


FIRST = record(1, receipt("t1"), run=5, owner="alice").replace("EpochWriteDate = 1700000000", "EpochWriteDate = 1000")
_KEY = JobKey("ap#1.0#1700000000", "alice@test")
_AD: dict[str, Any] = {
    "GlobalJobId": _KEY.name, "User": _KEY.owner, "ClusterId": 1, "ProcId": 0, "JobStatus": 4, "NumShadowStarts": 6,
}  # fmt: skip


@pytest.mark.parametrize(
    ("told", "number"),
    [
        ({}, 0),
        ({"TransferOutFinished": 999}, 5),
        ({"TransferOutFinished": 1002}, 5),
        ({"TransferOutFinished": 1003}, 0),
        ({"JobCurrentFinishTransferOutputDate": 1000}, 5),
        ({"TransferOutFinished": 900, "JobCurrentFinishTransferOutputDate": 1003}, 0),
        ({"TransferOutFinished": 1000, "JobCurrentStartExecutingDate": 1000}, 5),
        ({"TransferOutFinished": 1000, "JobCurrentStartExecutingDate": 1001}, 0),
    ],
    ids=str,
)
def test_a_run_that_an_ap_restart_numbered_anew_keeps_its_record(
    tmp_path: Path, told: dict[str, int], number: int
) -> None:
    """Seen when a schedd was killed just after the shadow of a job had ended, and after a reconnect of it."""
    _write(tmp_path, 1, record(1, receipt("t0"), run=4, owner="alice") + FIRST)
    receipts, ad = Receipts(tmp_path), {**_AD, **told}
    job = parse_job(ad, True)
    assert receipts.last_transfer(_KEY, job) == number
    assert receipts.last_transfer(_KEY, HistoryRecord(4, 6, job.executing_since, job.transferred_at)) == number
    assert receipts.last_transfer(_KEY, parse_job({**ad, "NumShadowStarts": 5}, True)) == 5
    assert receipts.last_transfer(_KEY, parse_job({**ad, "NumShadowStarts": 3}, True)) == 0


@pytest.mark.parametrize(
    ("there", "instead"), [('Owner="alice"', 'Owner="mallory"'), ("#1700000000", "#1600000000")], ids=["owner", "queue"]
)
def test_a_record_of_another_job_does_not_hide_the_run_before_it(tmp_path: Path, there: str, instead: str) -> None:
    """The next shadow only said that the job is done; in its place stands a record of a job with the same number."""
    other = record(1, receipt("t6"), run=6, owner="alice").replace(there, instead)
    _write(tmp_path, 1, FIRST + other)
    receipts = Receipts(tmp_path)
    job = parse_job({**_AD, "Owner": "alice", "TransferOutFinished": 1000}, True)
    assert receipts.last_transfer(_KEY, job) == 5
    assert receipts.get(_KEY, 5) == RunRecord((Ticket("t1", "m1", "k", 2, 5),))


@pytest.mark.parametrize(
    "results",
    [
        "{ broken StageOutReceipt",
        '{ [ DeveloperData = [ StageOutReceipt = "x" ] ] }',
        '{ [ DeveloperData = [ StageOutReceipt = [ Ticket = 7; ManagerName = "m1" ] ] ] }',
        '{ 5, [ DeveloperData = "StageOutReceipt" ] }',
    ],
)
def test_receipts_that_are_none(tmp_path: Path, results: str) -> None:
    _write(tmp_path, 9, f"NumShadowStarts = 1\nOutputPluginResultList = {results}\n{BANNER}\n")
    found = Receipts(tmp_path).get(bobs(9), 1)
    assert found is not None and found.tickets == ()


def test_without_a_directory_there_are_no_records_and_no_complaints(caplog: pytest.LogCaptureFixture) -> None:
    assert Receipts(Path(os.devnull)).get(VICTIM, 1) is None
    assert "records-read-failed" not in caplog.text


def test_a_directory_of_the_agent_that_was_removed_comes_back(tmp_path: Path) -> None:
    for name in (DIRECTORY, "of-the-administrator"):
        Receipts(tmp_path / name).begin_pass()
    assert [path.name for path in tmp_path.iterdir()] == [DIRECTORY]


def test_one_job_more_than_are_kept_does_not_read_all_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedd_agent.receipts._MOST_JOBS", 3)
    receipts, read = Receipts(tmp_path), list[str]()
    for cluster in range(1, 5):
        _write(tmp_path, cluster, record(cluster, receipt(f"t{cluster}")))
    for _ in range(2):
        receipts.begin_pass()
        for cluster in range(1, 5):
            assert receipts.get(bobs(cluster), 1) is not None
        monkeypatch.setattr(receipts, "_read", lambda *ids: read.append(str(ids)) or b"")
    assert read == []
