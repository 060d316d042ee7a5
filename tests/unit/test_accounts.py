"""Output of jobs whose account is not their owner's: it becomes an account's that has output of one owner at a time."""

from __future__ import annotations

import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from handoff_site import ALICE, Child, needs_root, write_files
from handoff_site import Site as HandoffSite
from manager_site import Site, made, run

from sandbox_manager.custody.spool import NotClaimed, Spool
from sandbox_manager.intake.acceptance import Refusal
from sandbox_manager.intake.admission import choose_account
from sandbox_manager.report.control import _may_see
from sandbox_manager.rules import read_accounts
from stageout.core import durable
from stageout.core.config import ConfigError
from stageout.core.states import State
from stageout.model.file import StoredFile
from stageout.model.run import Account
from stageout.wire.custody import Action
from stageout.wire.handoff import OfferedFile
from tests.polling import until

FIRST, SECOND = Account("first", 64101, 64101), Account("second", 64102, 64102)
TICKET = "0123456789abcdef" * 2


# ---- which account ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("holders", "in_use", "account"),
    [
        pytest.param([], (), FIRST, id="all are free"),
        pytest.param([(FIRST.uid, "bob")], (), SECOND, id="one has output of another owner"),
        pytest.param([(FIRST.uid, "bob"), (SECOND.uid, "alice")], (), SECOND, id="one has output of this owner"),
        pytest.param([(SECOND.uid, "alice")], (), SECOND, id="that one before a free one"),
        pytest.param([(FIRST.uid, "bob"), (SECOND.uid, "carol")], (), None, id="both have output of others"),
        pytest.param([(FIRST.uid, "bob"), (FIRST.uid, "alice")], (), SECOND, id="never one of several owners"),
        pytest.param([], (FIRST.uid,), SECOND, id="plugins' state of somebody is still there"),
        pytest.param([(FIRST.uid, "alice")], (FIRST.uid,), FIRST, id="plugins' state of this owner"),
        pytest.param([(7, "alice")], (), FIRST, id="other accounts do not count"),
    ],
)
def test_an_account_has_output_of_one_owner(holders: Any, in_use: Any, account: Account | None) -> None:
    assert choose_account("alice", [FIRST, SECOND], holders, in_use) == account


@needs_root
def test_names_are_looked_up() -> None:
    nobody = pwd.getpwnam("nobody")
    assert read_accounts(" nobody ,") == (Account("nobody", nobody.pw_uid, nobody.pw_gid),)
    assert read_accounts("") == ()


@needs_root
@pytest.mark.parametrize(("name", "words"), [("no-such-account", "no account no-such-account"), ("root", "is root")])
def test_accounts_that_cannot_be_used_are_named(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_accounts(f"nobody, {name}")


def test_a_manager_that_is_not_root_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1)
    assert read_accounts("no-such-account") == ()


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def spool() -> Iterator[Spool]:
    with tempfile.TemporaryDirectory(prefix="stageout-accounts-") as name:
        place = Path(name)
        place.chmod(0o755)
        (place / "execute").mkdir()
        opened = Spool(place / "stageout", place / "execute")
        opened.open({})
        yield opened
        opened.close()


def scratch_of(spool: Spool, data: bytes = b"output") -> Path:
    """A job's directory, with a file that it has written."""
    scratch = spool.execute / "dir_1"
    scratch.mkdir(mode=0o700)
    os.chown(scratch, ALICE, ALICE)
    write_files(scratch, ALICE, {"out": data})
    return scratch


def claim(spool: Spool, scratch: Path, names: int = 1, account: Account | None = FIRST) -> list[StoredFile]:
    place = spool.prepare_intake(TICKET, ALICE, ALICE)
    for number in range(names):
        os.link(scratch / "out", place / str(number))
    size_bytes = (scratch / "out").stat().st_size
    offered = [OfferedFile(f"s://h/{number}", str(scratch / "out"), size_bytes) for number in range(names)]
    return spool.claim(TICKET, offered, ALICE, ALICE, (), account)


def as_the_job(work: Any) -> Any:
    """Run by a process of the job's account."""

    def attempt() -> Any:
        try:
            return work()
        except PermissionError:
            return "denied"

    return Child(attempt, ALICE).result()


@needs_root
def test_files_become_the_accounts(spool: Spool) -> None:
    scratch = scratch_of(spool)
    held = claim(spool, scratch, names=2)
    assert [item.size_bytes for item in held] == [6, 6] and all(spool.unchanged(item) for item in held)
    for number in range(2):
        found = spool.path(TICKET, number).stat()
        assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (FIRST.uid, ALICE, 0o440)
    place = spool.path(TICKET, 0).parent.stat()
    assert (place.st_uid, place.st_gid) == (0, spool.group_of(FIRST.uid, FIRST.gid))


@needs_root
def test_a_later_job_neither_reads_nor_changes_them(spool: Spool) -> None:
    scratch = scratch_of(spool)
    claim(spool, scratch)
    path = spool.path(TICKET, 0)
    assert as_the_job(path.read_bytes) == "denied"
    assert as_the_job(lambda: path.write_bytes(b"forged")) == "denied"
    assert as_the_job(lambda: path.chmod(0o666)) == "denied"
    assert as_the_job(lambda: list(path.parent.iterdir())) == "denied"
    assert as_the_job(lambda: (scratch / "out").write_bytes(b"forged")) == "denied"
    assert as_the_job(lambda: (scratch / "out").chmod(0o666)) == "denied"
    assert as_the_job((scratch / "out").read_bytes) == b"output", "the plugin may have to upload it itself"


@needs_root
def test_a_write_through_an_open_descriptor_shows_and_cannot_be_hidden(spool: Spool) -> None:
    scratch = scratch_of(spool)
    held: list[StoredFile] = []

    def change() -> Any:
        before = (scratch / "out").stat()
        with open(scratch / "out", "r+b", buffering=0) as stream:
            (scratch / "opened").touch()
            while not (scratch / "claimed").exists():
                pass
            # Clocks of filesystems are coarse: write until the kernel's has moved on.
            while os.fstat(stream.fileno()).st_mtime_ns == before.st_mtime_ns:
                os.pwrite(stream.fileno(), b"forged", 0)
            try:
                os.utime(stream.fileno(), ns=(before.st_atime_ns, before.st_mtime_ns))
            except PermissionError:
                return "denied"
        return "set back"

    child = Child(change, ALICE)
    while not (scratch / "opened").exists():
        assert not child.has_ended()
    held += claim(spool, scratch)
    (scratch / "claimed").touch()
    assert child.result() == "denied"
    assert spool.path(TICKET, 0).read_bytes() == b"forged"
    assert not spool.unchanged(held[0])


@needs_root
def test_a_file_of_the_accounts_own_is_nobodys_output(spool: Spool) -> None:
    scratch = scratch_of(spool)
    os.chown(scratch / "out", FIRST.uid, FIRST.gid)
    with pytest.raises(NotClaimed, match=f"belongs to uid {FIRST.uid}"):
        claim(spool, scratch)


@needs_root
def test_a_disk_that_does_not_change_owners_means_no_hand_off(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = scratch_of(spool)
    monkeypatch.setattr(durable, "_faults", durable.parse_faults("intake-account=EPERM"))
    with pytest.raises(NotClaimed, match="intake-account"):
        claim(spool, scratch)
    assert list((spool.root / "intake").iterdir()) == spool.directories() == []
    assert as_the_job((scratch / "out").read_bytes) == b"output"


@needs_root
@pytest.mark.parametrize("when", ["kill-before", "kill-after"])
def test_after_a_death_the_plugin_uploads_or_offers_again(when: str) -> None:
    site = HandoffSite(one_user=False)
    try:
        site.tell(account=FIRST)
        site.start(faults=f"intake-account={when}")
        scratch = site.scratch()
        write_files(scratch, ALICE, {"out": b"output"})
        assert not site.offer(scratch, ["out"]).accepted
        site.wait_killed()
        found = (scratch / "out").stat()
        assert (found.st_uid, found.st_nlink) == ((ALICE, 2) if when == "kill-before" else (FIRST.uid, 2))
        assert as_the_job((scratch / "out").read_bytes) == b"output"
        site.start()
        assert (scratch / "out").stat().st_nlink == 1
        answer = site.offer(scratch, ["out"])
        assert answer.accepted, answer.reason
        held = site.spool / "sandboxes" / str(answer.receipt["Ticket"]) / "0"
        assert held.read_bytes() == b"output" and held.stat().st_uid == FIRST.uid
        assert site.notes("accepted")[0]["uid"] == FIRST.uid and site.is_clean()
    finally:
        site.close()


@needs_root
def test_an_upload_that_htcondor_repeats_is_taken_again() -> None:
    site = HandoffSite(one_user=False)
    try:
        site.tell(account=FIRST)
        site.start()
        scratch = site.scratch()
        write_files(scratch, ALICE, {"out": b"output"})
        for _ in range(2):
            answer = site.offer(scratch, ["out"])
            assert answer.accepted, answer.reason
            held = site.spool / "sandboxes" / str(answer.receipt["Ticket"]) / "0"
            assert held.read_bytes() == b"output" and held.stat().st_uid == FIRST.uid
    finally:
        site.close()


# ---- the way of a sandbox --------------------------------------------------------------------------------------------


def _some_accounts() -> list[str]:
    """Accounts of this machine that are no user's."""
    return [found.pw_name for found in pwd.getpwall() if 0 < found.pw_uid < 1000][:2]


@pytest.fixture
def site() -> Iterator[Site]:
    with made({"STAGEOUT_ACCOUNTS": ", ".join(_some_accounts())}) as found:
        yield found


def foreign(node: Any, job: str, owner: str = "alice@test") -> Any:
    """A run under a slot user."""
    return node.facts(job, owner=owner, user="slot1", foreign_account=True)


@needs_root
def test_plugins_send_as_the_account(site: Site) -> None:
    async def story() -> None:
        async with site.manager() as node:
            facts = foreign(node, "1.0")
            receipt = await node.hand_off({"copy://h/ok/a": b"output"}, facts, credentials={"team": b"secret"})
            account = read_accounts(site.knobs["STAGEOUT_ACCOUNTS"])[0]
            assert (node.box(facts).user, node.box(facts).uid, node.box(facts).gid) == account
            own = node.facts("2.0", owner="bob@test", user="bob", uid=ALICE)
            await node.hand_off({"copy://h/ok/b": b"his"}, own)
            seen = {
                uid: [box.run for box in map(node.box, (facts, own)) if _may_see(uid, box)]
                for uid in (0, account.uid, ALICE)
            }
            assert seen == {0: [facts.run, own.run], account.uid: [], ALICE: [own.run]}
            await node.confirm(receipt, facts=facts)
            await node.until_state(State.RELEASED, facts)
            (call,) = site.calls()
            assert call["uid"] == account.uid and call["tokens"]["team.use"][0] == "secret"
            assert (site.base / "dest" / "a").read_bytes() == b"output"

    run(story())


@needs_root
def test_owners_share_no_account(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            both = read_accounts(site.knobs["STAGEOUT_ACCOUNTS"])
            jobs = [foreign(node, f"{number}.0", f"u{number}@test") for number in range(3)]
            receipts = [await node.hand_off({"copy://h/ok/a": b"output"}, facts) for facts in jobs[:2]]
            assert [node.box(facts).uid for facts in jobs[:2]] == [account.uid for account in both]
            more = foreign(node, "7.0", "u1@test")
            await node.hand_off({"copy://h/ok/b": b"more"}, more)
            assert node.box(more).uid == both[1].uid
            refused = node.offer(jobs[2], ["copy://h/ok/c"])
            assert isinstance(refused, Refusal) and "keep output of other owners" in refused.reason
            assert refused.reason.code == "SlotUser"
        async with site.manager() as node:
            assert isinstance(node.offer(jobs[2], ["copy://h/ok/c"]), Refusal), "and after a restart"
            await node.confirm(receipts[0], facts=jobs[0])
            await node.until_state(State.RELEASED, jobs[0])
            state = node.spool.root / "state" / str(both[0].uid)
            await until(lambda: not state.exists() and both[0].uid not in node.pipeline.admission.state_bytes)
            await node.hand_off({"copy://h/ok/c": b"output"}, jobs[2])
            assert node.box(jobs[2]).uid == both[0].uid

    run(story())


@needs_root
def test_what_is_promised_has_its_account(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            promised = [node.offer(foreign(node, f"{n}.0", f"u{n}@test"), ["copy://h/ok/a"]) for n in range(2)]
            assert len({item.account for item in promised}) == 2
            third = foreign(node, "3.0", "u3@test")
            assert isinstance(node.offer(third, ["copy://h/ok/a"]), Refusal)
            node.pipeline.acceptance.unreserve(promised[0])
            assert node.offer(third, ["copy://h/ok/a"]).account == promised[0].account

    run(story())


@needs_root
def test_a_run_stays_with_its_account_when_the_list_changes(site: Site) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            facts = foreign(node, "1.0")
            await node.hand_off({"copy://h/ok/a": b"output"}, facts)
            site.knobs["STAGEOUT_ACCOUNTS"] = _some_accounts()[1]
            node.pipeline.new_rules(site.rules)
            again = node.offer(facts, ["copy://h/ok/b"])
            assert again.account.uid == node.box(facts).uid != site.rules.accounts[0].uid
            await node.order(Action.CANCEL, facts)
            await until(lambda: node.box(facts) is None or node.box(facts).freed)

    run(story())


@needs_root
@pytest.mark.parametrize(
    ("knob", "changes", "words"),
    [
        ("", {"foreign_account": True}, "STAGEOUT_ACCOUNTS of the node are not set"),
        ("nobody", {"uid": 65534, "user": "nobody"}, "reserves for the sandbox manager"),
    ],
)
def test_without_an_account_the_plugin_uploads(site: Site, knob: str, changes: Any, words: str) -> None:
    async def story() -> None:
        async with site.manager(moving=False) as node:
            refused = node.offer(node.facts(**changes), ["copy://h/ok/a"])
            assert isinstance(refused, Refusal) and words in refused.reason
            assert refused.reason.code == "SlotUser"

    site.knobs["STAGEOUT_ACCOUNTS"] = knob
    run(story())
