"""The owner of output: the process tree above the peer and the startd's word, with a job that lies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable

import pytest
from handoff_site import ROOT, needs_root

from sandbox_manager.intake import peers
from sandbox_manager.intake.identity import Identity, accounting_group, run_of
from sandbox_manager.intake.peers import Families, Lineage, NotIdentified, Peer, Process, ancestors, lineage
from sandbox_manager.intake.startd import SlotTable, startd_timeout_s
from stageout.core.clock import boot_clock_s
from stageout.core.config import mapping_settings
from stageout.model.run import RunFacts
from stageout.model.sandbox import SlotKey
from stageout.wire.custody import Run
from tests import at_once
from tests.polling import until, wait_for

NOBODY = 65534 if ROOT else os.geteuid()
SLOT = {
    "Name": "slot1_1@ep1",
    "SlotID": 1,
    "DSlotId": 1,
    "RemoteUser": "nobody@pool",
    "RemoteScheddName": "ap",
    "JobId": "7.3",
    "GlobalJobId": "ap#7.3#1700000000",
    "NumShadowStarts": 2,
    "StageOutGuard": True,
    "StageOutAsync": True,
    "OutputDestination": "https://store/out",
    "JobPrio": 5,
}

# ---- the chain of processes, from a table ----------------------------------------------------------------------------

MASTER = 10


def process(pid: int, parent: int, program: str, uid: int = 0, started: int = 0, *argv: str) -> Process:
    return Process(pid, parent, started or pid, uid, argv or (program,), program)


STARTD = process(20, MASTER, "condor_startd")
STARTER = process(30, 20, "condor_starter", 0, 0, "condor_starter", "-f", "-local-name", "x", "-a", "slot1_1", "ip")
CHILD = process(31, 30, "condor_starter", 0, 0, "condor_starter", "-f", "-a", "slot1_1", "ip")
PLUGIN = process(40, 31, "python3", 1000)


def test_starter_with_and_without_a_transfer_child() -> None:
    assert lineage([PLUGIN, CHILD, STARTER, STARTD], MASTER, 0) == Lineage(STARTD, STARTER, CHILD)
    direct = PLUGIN._replace(parent=30)
    assert lineage([direct, STARTER, STARTD], MASTER, 0).slot == "slot1_1"


def test_slots_of_a_second_startd() -> None:
    second = STARTD._replace(argv=("condor_startd", "-f", "-local-name", "STARTD2"))
    assert lineage([PLUGIN, CHILD, STARTER, second], MASTER, 0).local_name == "STARTD2"
    assert lineage([PLUGIN, CHILD, STARTER, STARTD], MASTER, 0).local_name == ""


@pytest.mark.parametrize(
    ("chain", "reason"),
    [
        pytest.param([PLUGIN], "does not descend", id="an orphan"),
        pytest.param([PLUGIN, CHILD, STARTER, STARTD._replace(parent=1)], "does not descend", id="another master"),
        pytest.param([STARTER, STARTD], "does not descend", id="the starter itself"),
        pytest.param([STARTD], "does not descend", id="the startd itself"),
        pytest.param(
            [PLUGIN, CHILD, STARTER._replace(program="python3"), STARTD], "expected", id="a cron job of the startd"
        ),
        pytest.param([PLUGIN, CHILD, STARTER, STARTD._replace(program="condor_schedd")], "expected", id="a schedd"),
        pytest.param([PLUGIN, CHILD, STARTER._replace(real_uid=1000), STARTD], "uid 1000", id="a starter of a user"),
        pytest.param([PLUGIN, CHILD, STARTER, STARTD._replace(real_uid=1000)], "uid 1000", id="a startd of a user"),
        pytest.param([PLUGIN, CHILD, STARTER._replace(argv=("condor_starter",)), STARTD], "which slot", id="no slot"),
        pytest.param([PLUGIN, CHILD, STARTER._replace(argv=("x", "-a")), STARTD], "which slot", id="cut off"),
    ],
)
def test_no_other_process_counts_as_a_starter(chain: list[Process], reason: str) -> None:
    with pytest.raises(NotIdentified, match=reason):
        lineage(chain, MASTER, 0)


def test_a_starter_that_a_job_started_is_not_the_one() -> None:
    fake = process(50, 40, "condor_starter", 1000, 0, "condor_starter", "-f", "-a", "slot1_9", "ip")
    inner = process(60, 50, "python3", 1000)
    assert lineage([inner, fake, PLUGIN, CHILD, STARTER, STARTD], MASTER, 0).slot == "slot1_1"


def test_used_pids_are_noticed() -> None:
    table = {40: PLUGIN, 31: CHILD._replace(started_ticks=99)}
    with pytest.raises(NotIdentified, match="younger than its child"):
        ancestors(40, 1, lambda pid: table[pid])


def test_the_chain_ends() -> None:
    assert len(ancestors(5, 1, lambda pid: process(pid, pid, "loop"))) == 64
    real = ancestors(os.getpid(), 0)
    assert real[0].pid == os.getpid() and real[0].parent == os.getppid() == real[1].pid
    assert real[0].real_uid == os.getuid() and real[0].argv
    assert 0 < real[0].started_s <= boot_clock_s()
    with pytest.raises(NotIdentified, match="has ended"):
        ancestors(2**22 + 1, 1)


def test_a_startd_is_remembered_for_as_long_as_it_is_the_same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {40: PLUGIN, 30: STARTER._replace(parent=20), 20: STARTD}
    table[40] = PLUGIN._replace(parent=30)
    looked: list[int] = []

    def described(known: Process) -> Process:
        looked.append(known.pid)
        return table[known.pid]

    monkeypatch.setattr(peers, "read_kinship", lambda pid: table[pid]._replace(argv=(), program=""))
    monkeypatch.setattr(peers, "described", described)
    families = Families()
    for _ in range(3):
        assert lineage(families.of(40, MASTER), MASTER, 0) == Lineage(
            STARTD, table[30], table[40]._replace(argv=(), program="")
        )
    assert looked == [30, 20, 30, 30]
    table[20] = STARTD._replace(started_ticks=25, argv=("condor_startd", "-local-name", "again"))
    assert lineage(families.of(40, MASTER), MASTER, 0).local_name == "again"
    for pid in (20, 30):
        assert families.of(pid, MASTER)[-1] == table[20]


# ---- real processes and a real socket --------------------------------------------------------------------------------


class Tree:
    """condor_startd and condor_starter by name only (copies of a shell), with a plugin below that connects."""

    def __init__(self, base: Path) -> None:
        self.base = base
        for name in ("condor_startd", "condor_starter"):
            shutil.copy(os.path.realpath("/bin/sh"), base / name)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(base / "sock"))
        (base / "sock").chmod(0o777)
        self.listener.listen()
        self.listener.settimeout(20)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[socket.socket] = []
        self.peers: list[Peer] = []

    def connect(self, user: int = NOBODY, slot: str = "slot1_1", startd_options: str = "") -> Peer:
        """Start a tree; the peer at the end of it."""
        script = self.base / "plugin.py"
        script.write_text(
            "import os, socket, sys\n"
            + (f"os.setgid({user}); os.setuid({user})\n" if os.geteuid() != user else "")
            + "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.recv(1)\n"
        )
        plugin = f"{sys.executable} {script} {self.base}/sock; true"
        starter = f"{self.base}/condor_starter -c '{plugin}' -f -a {slot} 127.0.0.1; true"
        command = [str(self.base / "condor_startd"), "-c", starter, *startd_options.split()]
        self.processes.append(subprocess.Popen(command, start_new_session=True))
        connection, _ = self.listener.accept()
        self.connections.append(connection)
        self.peers.append(peers.peer_of(connection))
        return self.peers[-1]

    def close(self) -> None:
        for process in self.processes:
            os.killpg(process.pid, 9)
            process.wait()
        for connection in [*self.connections, self.listener]:
            connection.close()
        for peer in self.peers:
            peer.close()


@pytest.fixture
def tree() -> Iterator[Tree]:
    with tempfile.TemporaryDirectory(prefix="stageout-identity-") as name:
        Path(name).chmod(0o755)
        made = Tree(Path(name))
        try:
            yield made
        finally:
            made.close()


class Startd:
    """Answers like a startd; counts questions."""

    def __init__(self, *slots: dict[str, Any]) -> None:
        self.slots = list(slots)
        self.asked = 0
        self.may_answer = threading.Event()
        self.may_answer.set()

    def __call__(self) -> Sequence[dict[str, Any]]:
        self.asked += 1
        self.may_answer.wait(20)
        return [dict(slot) for slot in self.slots]


def identify(peer: Peer, startd: Startd, timeout_s: float = 5.0, local_name: str = "", **options: Any) -> RunFacts:
    async def ask() -> RunFacts:
        table = SlotTable(startd, timeout_s)
        try:
            return await Identity(table, local_name, options.get("master", os.getpid)).identify(peer)
        finally:
            startd.may_answer.set()
            table.close()

    return asyncio.run(ask())


def test_a_plugin_of_a_real_tree(tree: Tree) -> None:
    peer = tree.connect()
    facts = identify(peer, Startd({"Name": "slot1@ep1", "SlotID": 1}, {**SLOT, "RemoteUser": _owner()}))
    assert (facts.run.job, facts.run.number, facts.run.job_id) == ("ap#7.3#1700000000", 2, "7.3")
    assert (facts.uid, facts.user, facts.owner) == (NOBODY, _owner().split("@")[0], _owner())
    assert (facts.slot_name, facts.slot) == ("slot1_1@ep1", SlotKey("ep1", 1, 1))
    assert facts.guard and facts.async_wish and facts.output_destination == "https://store/out"
    assert facts.priority == 5 and facts.shared_uid is not ROOT and not facts.foreign_account


def _owner() -> str:
    try:
        return f"{pwd.getpwuid(NOBODY).pw_name}@pool"
    except KeyError:
        return f"uid {NOBODY}@pool"


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"StageOutGuard": "true"}, lambda facts: not facts.guard),
        ({"StageOutGuard": 1}, lambda facts: not facts.guard),
        ({"StageOutGuard": None}, lambda facts: not facts.guard),
        ({"StageOutAsync": False}, lambda facts: not facts.async_wish),
        ({"DSlotId": None}, lambda facts: facts.slot.dslot_id == 0),
        ({"JobPrio": "x"}, lambda facts: facts.priority == 0),
        ({"OutputDestination": None}, lambda facts: facts.output_destination == ""),
        ({"EncryptExecuteDirectory": True}, lambda facts: facts.encrypted),
    ],
)
def test_attributes_of_odd_types(tree: Tree, change: dict[str, Any], check: Callable[[RunFacts], bool]) -> None:
    assert check(identify(tree.connect(), Startd({**SLOT, "RemoteUser": _owner(), **change})))


@pytest.mark.parametrize("name", ["GlobalJobId", "NumShadowStarts", "RemoteUser", "JobId"])
def test_a_startd_that_does_not_say_enough(tree: Tree, name: str) -> None:
    slot = {**SLOT, "RemoteUser": _owner()}
    del slot[name]
    with pytest.raises(NotIdentified, match="STARTD_JOB_ATTRS"):
        identify(tree.connect(), Startd(slot))


_OTHER_NAMES = [
    "ap#8.0#1700000000", "ap#7.30#1700000000", "ap2#7.3#1700000000", "ap#7.3#1700000000#1", "ap#7.3#x",
    "#7.3#1700000000", "7.3", "ap#7.3#", "AP#7.3#1700000000", "ap#07.3#1700000000", " ap#7.3#1700000000",
]  # fmt: skip


@pytest.mark.parametrize("name", _OTHER_NAMES)
def test_an_owner_who_writes_another_name_into_his_job_hands_nothing_off(name: str) -> None:
    with pytest.raises(NotIdentified, match="GlobalJobId says") as refusal:
        run_of({**SLOT, "GlobalJobId": name})
    assert refusal.value.code == "Identity"


def test_a_name_without_a_time_is_that_of_the_job() -> None:
    """GLOBAL_JOB_ID_WITH_TIME = false."""
    assert run_of({**SLOT, "GlobalJobId": "ap#7.3"}) == Run("ap#7.3", 2, "nobody@pool")


def test_a_slot_without_its_schedd_is_no_proof() -> None:
    """condor_now puts slots together, and the startd forgets whose they were."""
    with pytest.raises(NotIdentified, match="RemoteScheddName"):
        run_of({name: value for name, value in SLOT.items() if name != "RemoteScheddName"})


@pytest.mark.parametrize(("attribute", "value"), [("JobId", "7.4"), ("RemoteScheddName", "ap3")])
def test_the_startds_word_decides(attribute: str, value: str) -> None:
    with pytest.raises(NotIdentified, match="GlobalJobId says"):
        run_of({**SLOT, attribute: value})


def test_an_unknown_slot(tree: Tree) -> None:
    with pytest.raises(NotIdentified, match="has no slot slot1_2"):
        identify(tree.connect(slot="slot1_2"), Startd(SLOT))


def test_another_master(tree: Tree) -> None:
    with pytest.raises(NotIdentified, match="DAEMON_LIST"):
        identify(tree.connect(), Startd(SLOT), master=lambda: 2**22)


def test_the_startd_of_another_manager(tree: Tree) -> None:
    peer = tree.connect(startd_options="-local-name STARTD2")
    slot = {**SLOT, "RemoteUser": _owner()}
    with pytest.raises(NotIdentified, match="'STARTD2'"):
        identify(peer, Startd(slot))
    assert identify(peer, Startd(slot), local_name="STARTD2").run.number == 2


@needs_root
def test_an_account_that_is_not_the_owners_is_told(tree: Tree) -> None:
    facts = identify(tree.connect(), Startd({**SLOT, "RemoteUser": "alice@pool"}))
    assert (facts.foreign_account, facts.owner, facts.uid) == (True, "alice@pool", NOBODY)


@pytest.mark.parametrize(
    ("submitter", "group"),
    [("", ""), ("alice@pool", ""), ("physics.alice@pool", "physics"), ("physics.cms.alice@pool", "physics.cms"),
     ("physics.john.doe@pool", "physics"), ("physics.shared@pool", "physics"), ("physics.alice", "physics"),
     (f"{'x' * 201}.alice@pool", ""), ("phy\nsics.alice@pool", ""), ("ph\u00fdsics.alice@pool", "")],
)  # fmt: skip
def test_the_accounting_group_is_the_part_before_the_user(submitter: str, group: str) -> None:
    assert accounting_group(submitter, "john.doe" if "doe" in submitter else "alice") == group


@needs_root
def test_root_is_nobodys_job(tree: Tree) -> None:
    with pytest.raises(NotIdentified, match="does not run as root"):
        identify(tree.connect(user=0), Startd(SLOT))


@needs_root
def test_a_manager_that_could_not_read_the_files(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = tree.connect()
    monkeypatch.setattr(os, "geteuid", lambda: 1)
    with pytest.raises(NotIdentified, match="start it as root, or as the user of all jobs"):
        identify(peer, Startd(SLOT))


def test_a_peer_that_ended_meanwhile(tree: Tree) -> None:
    peer = tree.connect()
    startd = Startd({**SLOT, "RemoteUser": _owner()})
    startd.may_answer.clear()

    def end() -> None:
        wait_for(lambda: startd.asked, "the question")
        tree.connections[0].close()
        wait_for(lambda: not peer.is_alive(), "the plugin's end")
        startd.may_answer.set()

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(NotIdentified, match="ended"):
        identify(peer, startd)
    thread.join()


def test_the_process_behind_a_socket() -> None:
    _ours, theirs = socket.socketpair()
    peer = peers.peer_of(theirs)
    assert (peer.pid, peer.uid, peer.gid) == (os.getpid(), os.geteuid(), os.getegid())
    assert peer.is_alive()
    peer.close()
    assert Peer(os.getpid(), 0, 0).is_alive() and not Peer(2**22 + 1, 0, 0).is_alive()


# ---- asking the startd -----------------------------------------------------------------------------------------------


async def _slot(table: SlotTable, since_s: float | None = None) -> Any:
    return await table.slot("slot1_1", boot_clock_s() - 60 if since_s is None else since_s)


def test_one_question_serves_all_for_a_second() -> None:
    startd = Startd(SLOT)

    async def ask() -> None:
        table = SlotTable(startd, 5)
        found = await asyncio.gather(*(_slot(table) for _ in range(50)))
        assert all(slot == SLOT for slot in found) and startd.asked == 1
        await _slot(table)
        assert startd.asked == 1
        table.close()

    asyncio.run(ask())


@pytest.mark.parametrize("is_broken", [False, True])
def test_an_answer_that_is_there_at_once_serves_all_too(is_broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``run_in_executor`` returns a future that is done where the thread was quicker than the loop (Python 3.14)."""
    startd = Startd(SLOT)
    at_once.patch(monkeypatch)

    def question() -> Any:
        slots = startd()
        if is_broken:
            raise FileNotFoundError("no .startd_address")
        return slots

    async def ask() -> None:
        table = SlotTable(question, 5)
        found = await asyncio.gather(*(_slot(table) for _ in range(50)), return_exceptions=True)
        assert startd.asked == 1
        assert all(isinstance(slot, NotIdentified) if is_broken else slot == SLOT for slot in found)
        with contextlib.suppress(NotIdentified):
            await _slot(table)
        assert startd.asked == (2 if is_broken else 1)
        table.close()

    asyncio.run(ask())


def test_an_answer_older_than_the_starter_is_about_another_job() -> None:
    startd = Startd({**SLOT, "NumShadowStarts": 1})

    async def ask() -> None:
        table = SlotTable(startd, 5)
        assert (await _slot(table))["NumShadowStarts"] == 1
        startd.slots = [{**SLOT, "NumShadowStarts": 2}]
        assert (await _slot(table, boot_clock_s()))["NumShadowStarts"] == 2
        table.close()

    asyncio.run(ask())


def test_a_slot_that_the_answer_lacks_is_asked_for_again() -> None:
    startd = Startd()

    async def ask() -> None:
        table = SlotTable(startd, 5)
        assert await _slot(table) is None
        startd.slots = [SLOT]
        assert await _slot(table) == SLOT
        table.close()

    asyncio.run(ask())


def test_a_startd_that_hangs_is_not_waited_for() -> None:
    startd = Startd(SLOT)
    startd.may_answer.clear()

    async def ask() -> None:
        table = SlotTable(startd, 0.1)
        for _ in range(2):
            with pytest.raises(NotIdentified, match=r"did not answer within 0\.1 s"):
                await _slot(table, boot_clock_s())
        table._timeout_s = 3600  # who waits for the startd gets no answer
        for _ in range(20):
            with pytest.raises(NotIdentified, match="earlier questions"):
                await asyncio.wait_for(_slot(table, boot_clock_s()), 60)
        assert startd.asked == 2
        startd.may_answer.set()

        async def slot() -> Any:
            with contextlib.suppress(NotIdentified):
                return await _slot(table)

        assert await until(slot, "an answer: the startd is back") == SLOT
        table.close()

    asyncio.run(ask())


def test_the_default_patience_is_for_a_startd_that_runs_the_commands_of_lvm() -> None:
    """It runs vgs about five times at each end of a job, and answers nothing meanwhile."""
    settings = mapping_settings({})
    startd_s, plugin_s = startd_timeout_s(settings), settings.number("STAGEOUT_HANDOFF_TIMEOUT")
    assert startd_s >= 1.0
    assert startd_s <= plugin_s - 0.5, "the plugin hears the reason before it gives up"


def test_a_startd_that_cannot_be_asked() -> None:
    def ask() -> Sequence[dict[str, Any]]:
        raise FileNotFoundError("no .startd_address")

    async def run() -> None:
        table = SlotTable(ask, 5)
        with pytest.raises(NotIdentified, match=r"cannot be asked: no \.startd_address"):
            await _slot(table)
        table.close()

    asyncio.run(run())
