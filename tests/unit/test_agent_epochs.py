"""Records of the epoch history: what a job's texts can and cannot make its reader believe."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from schedd_agent.epochs import NotARecord, next_record
from schedd_agent.receipts import Receipts

VICTIM = "ap#5.0#1700000000"


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
    "another line end": '[ E = "x\r' + raw(FORGED).replace("\n", "\r") + '" ]',
    "a huge text": f'[ E = "{"x" * 5_000_000}\n{raw(FORGED)}" ]',
}


def _write(path: Path, text: str) -> None:
    with open(path, "ab") as stream:
        stream.write(text.encode("utf-8", "surrogateescape"))


def _read(receipts: Receipts) -> None:
    """As often as it takes to be sure that nothing is just being written."""
    receipts.read_new()
    receipts.read_new()


def _tickets(receipts: Receipts, name: str, run: int = 1) -> list[str]:
    found = receipts.get(name, run)
    return [ticket.name for ticket in found.tickets] if found else []


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("kind", ["OUTPUT", "INPUT"])
def test_no_text_of_a_job_forges_a_record(tmp_path: Path, hostile: str, kind: str) -> None:
    path = tmp_path / "epoch_history"
    attack = record(9, hostile.replace("OUTPUT ClusterId=9", f"{kind} ClusterId=9"), kind=kind)
    receipts = Receipts(path)
    _write(path, record(3, receipt("before")) + attack + record(4, receipt("after")))
    _read(receipts)
    assert _tickets(receipts, VICTIM) == []
    assert _tickets(receipts, "ap#3.0#1700000000") == ["before"]
    assert _tickets(receipts, "ap#4.0#1700000000") == ["after"], "what follows is lost"
    _write(path, HONEST)
    _read(receipts)
    assert _tickets(receipts, VICTIM) == ["honest"]
    _write(path, attack)
    _read(receipts)
    assert _tickets(receipts, VICTIM) == ["honest"]


@pytest.mark.parametrize("hostile", [text for text in HOSTILE.values() if len(text) < 100_000])
def test_no_text_forges_a_record_while_it_is_written(tmp_path: Path, hostile: str) -> None:
    """A record is written at once, and may be seen in part."""
    path = tmp_path / "epoch_history"
    whole = record(9, hostile)
    for cut in range(1, len(whole), 7):
        path.unlink(missing_ok=True)
        receipts = Receipts(path)
        _write(path, whole[:cut])
        receipts.read_new()
        _write(path, whole[cut:] + record(4, receipt("after")))
        _read(receipts)
        assert _tickets(receipts, "ap#4.0#1700000000") == ["after"], cut


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_restarted_agent_loses_no_records_to_a_forger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hostile: str
) -> None:
    """It reads the whole file at once: without the ends of earlier readings, one text may hide the records of all."""
    monkeypatch.setattr("schedd_agent.receipts._PORTION_BYTES", 1)
    path, ends = tmp_path / "epoch_history", tmp_path / "ends"
    receipts = Receipts(path, ends)
    honest = range(20, 30)
    for number in honest:
        for text in (record(number, receipt(f"t{number}")), record(9, hostile, run=number)):
            _write(path, text)
            _read(receipts)
        if number == 21:
            _write(path, HONEST)
            _read(receipts)
    again = Receipts(path, ends)
    _read(again)
    for known in (receipts, again):
        assert [_tickets(known, f"ap#{number}.0#1700000000") for number in honest] == [[f"t{n}"] for n in honest]
        assert _tickets(known, VICTIM) == ["honest"]


def test_ends_of_another_file_with_the_same_inode_cut_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("schedd_agent.receipts._PORTION_BYTES", 1)
    path, ends = tmp_path / "epoch_history", tmp_path / "ends"
    _write(path, "".join(record(number, receipt(f"t{number}")) for number in range(20, 30)))
    ends.write_text("".join(f"{path.stat().st_ino} {offset}\n" for offset in range(100, 5000, 333)) + "garbage\n1\n")
    receipts = Receipts(path, ends)
    _read(receipts)
    assert [_tickets(receipts, f"ap#{n}.0#1700000000") for n in range(20, 30)] == [[f"t{n}"] for n in range(20, 30)]


def test_a_later_record_replaces_none_that_has_receipts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "epoch_history"
    receipts = Receipts(path)
    _write(path, HONEST)
    assert receipts.read_new() == 1
    _write(path, FORGED)
    assert receipts.read_new() == 0
    assert _tickets(receipts, VICTIM) == ["honest"]
    assert "record-repeated" in caplog.text


def test_a_number_that_a_restored_queue_uses_again_has_the_later_record(tmp_path: Path) -> None:
    path = tmp_path / "epoch_history"
    receipts = Receipts(path)
    again = record(5, receipt("again"), owner="alice").replace(
        "EpochWriteDate = 1700000000", "EpochWriteDate = 1700000500"
    )
    for text in (HONEST, again):
        _write(path, text)
        receipts.read_new()
    found = {since: receipts.get(VICTIM, 1, "alice", since) for since in (0, 1699999990, 1700000300, 1700000600)}
    assert [one.tickets[0].name for one in found.values() if one] == ["honest", "honest", "again", "honest"]


@pytest.mark.parametrize(
    ("there", "instead"),
    [
        ("ClusterId = 5", "ClusterId = 6"),
        ("ProcId = 0", "ProcId = 1"),
        ('Owner = "alice"', 'Owner = "bob"'),
        ('Owner = "alice"', 'Owner = "alice"\nowner = "alice"'),
        ("ap#5.0#", "ap#6.0#"),
        ("NumShadowStarts = 1", "NumShadowStarts = 2"),
        ('EpochAdType = "OUTPUT"', 'EpochAdType = "INPUT"'),
        ('EpochAdType = "OUTPUT"', 'EpochAdType = "OUTPUT"\nEpochAdType = "OUTPUT"'),
    ],
)
def test_a_record_that_disagrees_with_its_banner_is_none(there: str, instead: str) -> None:
    assert HONEST.count(there) == 1 and next_record(HONEST.encode(), 0)
    with pytest.raises(NotARecord):
        next_record(HONEST.replace(there, instead).encode(), 0)


def test_another_jobs_record_with_the_same_number_is_not_given(tmp_path: Path) -> None:
    """Numbers begin anew with a new queue."""
    path = tmp_path / "epoch_history"
    _write(path, HONEST)
    receipts = Receipts(path)
    receipts.read_new()
    assert receipts.get("ap#5.0#1800000000", 1) is None
    assert receipts.get(VICTIM, 1, "bob") is None
    assert receipts.get(VICTIM, 1, "alice") is not None


def test_two_lines_of_a_foreign_plugin_hide_no_receipt(tmp_path: Path) -> None:
    path = tmp_path / "epoch_history"
    foreign = '[ TransferError = "first line: \\"x\\" isn\'t there; {[\n*** second ]}\n\n" ]'
    _write(path, record(5, f"{foreign},{receipt('t1')}") + record(6, f"{receipt('t2')},{foreign}"))
    receipts = Receipts(path)
    receipts.read_new()
    assert (_tickets(receipts, VICTIM), _tickets(receipts, "ap#6.0#1700000000")) == (["t1"], ["t2"])


def test_records_of_an_older_release_are_read(tmp_path: Path) -> None:
    """23.9 writes neither GlobalJobId nor Owner, and other records between."""
    path = tmp_path / "epoch_history"
    banner = 'ClusterId=5 ProcId=0 RunInstanceId=0 Owner="alice" CurrentTime=1\n'
    starter = 'AddressV1 = "{[ p=\\"primary\\"; a=\\"::1\\"; noUDP=true; ]}"\nEpochWriteDate = 1\n*** STARTER '
    for cluster in (5, 6):
        _write(
            path,
            f"ClusterID = {cluster}\nNumShadowStarts = 1\nOutputPluginResultList = {{ {receipt('t1')} }}\nProcID = 0\n",
        )
        _write(path, f"EpochWriteDate = 1\n*** OUTPUT {banner}{starter}{banner}")
        banner = banner.replace("=5", "=6")
    receipts = Receipts(path)
    assert receipts.read_new() == 2
    assert _tickets(receipts, VICTIM) == ["t1"]


def test_a_record_that_a_full_disk_cut_costs_only_its_neighbours(tmp_path: Path) -> None:
    path = tmp_path / "epoch_history"
    receipts = Receipts(path)
    for cut in range(1, len(HONEST), 5):
        _write(path, HONEST[:cut] + record(7, receipt("next")))
        _read(receipts)
        _write(path, record(100 + cut, receipt("later")))
        _read(receipts)
        assert _tickets(receipts, f"ap#{100 + cut}.0#1700000000") == ["later"], HONEST[:cut][-60:]


def test_a_job_ad_with_odd_values_ends_where_it_ends() -> None:
    odd = [
        r'"a\nb\\"',
        r'"C:\dir\"',
        '""',
        "TARGET.'x y' =?= 1",
        '"it\'s"',
        r'"\""',
        'strcat("a","b") + { "c" }',
        r'"\\\""',
    ]
    text = "".join(f"X{at} = {value}\n" for at, value in enumerate(odd))
    epoch = f'ClusterId = 5\n{text}*** EPOCH ClusterId=5 ProcId=0 RunInstanceId=3 Owner="alice" CurrentTime=1\n'
    found = next_record(epoch.encode(), 0)
    assert found and found.end == len(epoch)


def test_random_texts_neither_stop_the_reader_nor_forge(tmp_path: Path) -> None:
    seeded = random.Random(5)
    pieces = [
        "\\",
        '"',
        "'",
        '\\"',
        "\n",
        " ]",
        " }",
        "; ",
        " = ",
        "A",
        BANNER + "\n",
        FORGED,
        raw(FORGED),
        OPEN,
        SHUT,
        "1",
    ]
    for round_ in range(300):
        path = tmp_path / f"epoch_history{round_}"
        texts = ["".join(seeded.choices(pieces, k=seeded.randint(1, 12))) for _ in range(3)]
        body = f'[ E = "{raw(texts[0])}"; \'{texts[1].replace(chr(39), "")}\' = 1; F = "{raw(texts[2])}" ]'
        _write(path, record(9, body) + record(4, receipt("after")))
        receipts = Receipts(path)
        _read(receipts)
        assert _tickets(receipts, VICTIM) == [], body
        assert _tickets(receipts, "ap#4.0#1700000000") == ["after"], body


def test_records_without_receipts_are_cheap(tmp_path: Path) -> None:
    """20 MB, as much as an epoch history holds before it is rotated, are read in a few seconds on any machine."""
    path = tmp_path / "epoch_history"
    ad = "".join(f'Attribute{at} = "some value of {at}"\n' for at in range(150))
    plain = f'ClusterId = 5\n{ad}*** EPOCH ClusterId=5 ProcId=0 RunInstanceId=3 Owner="alice" CurrentTime=1\n'
    _write(path, plain * (20_000_000 // len(plain)))
    receipts = Receipts(path)
    begun_s = time.process_time()
    receipts.read_new()
    assert time.process_time() - begun_s < 5.0
