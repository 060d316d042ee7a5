"""Promises of a custodian: one operation never stops others, and the only copy of a file stays."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from stageout.core.signing import new_key
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import Deposit, put
from stageout.overlay.copying import state, states
from stageout.overlay.fetch import get
from stageout.overlay.finding import find
from stageout.overlay.key_file import read_key
from stageout.overlay.packs import End, Packer
from stageout.overlay.wire.capability import Credential, issue
from stageout.overlay.wire.fields import MAX_NUMBER
from stageout.overlay.wire.messages import Cancel, Custody, Low, Operation, Pack, Packed, Result, Status
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess, custodian_for
from tests.overlay.depositing import deposit

ORIGIN = "ab" * 16


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[RouterProcess]:
    with RouterProcess(tmp_path / "terminal") as running:
        yield running


@pytest.fixture
def custodian(tmp_path: Path, terminal: RouterProcess) -> Iterator[RouterProcess]:
    with custodian_for(tmp_path / "custodian", [terminal]) as running:
        yield running


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(os.urandom(5000))
    return path


def gateway_of(router: RouterProcess, name: str = "site") -> Gateway:
    return Gateway("127.0.0.1", router.port, *read_key(router.key_file(name)), timeout_s=20)


def make_dir(seq: int, path: str, terminal: RouterProcess, **more: object) -> Operation:
    expires = int(time.time()) + 3600
    return Operation(ORIGIN, seq, "mkdir", path, expires, terminal=terminal.address, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("seq", "after", "answer"), [(1, MAX_NUMBER, Result), (MAX_NUMBER, MAX_NUMBER - 1, Custody)])
def test_an_operation_behind_the_highest_number_stops_nobody(
    terminal: RouterProcess, custodian: RouterProcess, source: Path, seq: int, after: int, answer: type
) -> None:
    with Channel(gateway_of(custodian)) as channel:
        channel.send(make_dir(seq, "d", terminal, after=(after,)))
        assert isinstance(channel.receive(), answer)
    deposit(gateway_of(custodian), source, "first", terminal.address)
    wait_until((terminal.root / "first").exists, what="a file of somebody else", timeout_s=20)
    custodian.kill()
    custodian.start()
    deposit(gateway_of(custodian), source, "second", terminal.address)
    wait_until((terminal.root / "second").exists, what="a file after the restart", timeout_s=20)
    assert "custody-read-failed" not in custodian.log


def test_a_low_of_a_huge_number_stops_nobody(
    terminal: RouterProcess, custodian: RouterProcess, source: Path, tmp_path: Path
) -> None:
    """The terminal refuses the capability: it has no issuers."""
    issuer, holder = new_key(), new_key()
    (tmp_path / "issuers").write_text(f"all {issuer.public} /\n")
    custodian.stop()
    custodian.environment["STAGEOUT_ROUTER_ISSUERS"] = str(tmp_path / "issuers")
    custodian.start()
    until = int(time.time()) + 7200
    credential = Credential(issue(issuer, holder.public, "", ("write",), until, terminals=("t:1",)), holder)
    with Channel(gateway_of(custodian)) as channel:
        for number, after in ((1, ()), (2**62 + 1, (2**62,))):
            channel.send(credential.signed(make_dir(number, "d", terminal, after=after)))
            assert isinstance(channel.receive(), Custody)
            if not after:
                assert isinstance(channel.receive(), Result)
            channel.send(Low(ORIGIN, 2**62))
    deposit(gateway_of(custodian), source, "f", terminal.address)
    wait_until((terminal.root / "f").exists, what="a file of somebody else", timeout_s=20)


def end_of(custodian: RouterProcess, given: Deposit) -> str:
    answer = state(gateway_of(custodian), given.origin)
    return answer.outcome if isinstance(answer, Result) else ""


def spooled(custodian: RouterProcess) -> list[Path]:
    spool = custodian.home / "records/spool/.stageout"
    return [*(spool / "staging").iterdir(), *(spool / "packs").iterdir()]


def fetched(custodian: RouterProcess, terminal: RouterProcess, path: str, place: Path) -> bytes:
    """Return what the custodian has of a file."""
    get(gateway_of(custodian), path, place, terminal=terminal.address)
    return place.read_bytes()


def in_the_way(terminal: RouterProcess) -> dict[str, str]:
    (terminal.root / "f").mkdir()
    return {}


def wrong_prefix(terminal: RouterProcess) -> dict[str, str]:
    return {"STAGEOUT_ROUTER_KEY": str(terminal.key_file("small"))}


def not_allowed(terminal: RouterProcess) -> dict[str, str]:
    terminal.stop()
    terminal.environment["STAGEOUT_FAULTS"] = "overlay-publish=EACCES"
    terminal.start()
    return {}


@pytest.mark.parametrize("why", [in_the_way, wrong_prefix, not_allowed])
def test_the_only_copy_stays_when_the_terminal_refuses_it_until_its_owner_cancels_it(
    tmp_path: Path, terminal: RouterProcess, source: Path, why: Callable[[RouterProcess], dict[str, str]]
) -> None:
    with custodian_for(tmp_path / "custodian", [terminal], why(terminal)) as custodian:
        given = deposit(gateway_of(custodian), source, "f", terminal.address)
        assert wait_until(lambda: end_of(custodian, given), what="its end") == "failed"
        assert fetched(custodian, terminal, "f", tmp_path / "back") == source.read_bytes()
        custodian.kill()
        custodian.start()
        assert end_of(custodian, given) == "failed"
        assert fetched(custodian, terminal, "f", tmp_path / "again") == source.read_bytes()
        kept = custodian.run("--custody").stdout
        assert "failed: " in kept, kept
        state(gateway_of(custodian, "small"), given.origin, stop=True)
        assert spooled(custodian)
        assert state(gateway_of(custodian), given.origin, stop=True) == state(gateway_of(custodian), given.origin)
        wait_until(lambda: not spooled(custodian), what="the spool to be empty")
        assert find(gateway_of(custodian), terminal.address, "f") is None


@pytest.mark.parametrize("fault", ["overlay-publish=EIO", "overlay-finish=EIO"])
def test_a_disk_that_fails_for_a_moment_is_no_end(tmp_path: Path, source: Path, fault: str) -> None:
    armed = tmp_path / "armed"
    running = RouterProcess(tmp_path / "terminal", {"STAGEOUT_FAULTS": f"{fault}@{armed}"})
    with running as terminal, custodian_for(tmp_path / "custodian", [terminal]) as custodian:
        armed.touch()
        given = deposit(gateway_of(custodian), source, "f", terminal.address)
        assert wait_until(lambda: end_of(custodian, given), what="its end") == "done"
        assert not armed.exists()
        assert (terminal.root / "f").read_bytes() == source.read_bytes()


def test_an_operation_expires_no_later_than_its_capability(tmp_path: Path, source: Path) -> None:
    issuer, holder = new_key(), new_key()
    (issuers := tmp_path / "issuers").write_text(f"vo {issuer.public} /\n")
    until = int(time.time()) + 3600
    running = RouterProcess(tmp_path / "terminal", {"STAGEOUT_ROUTER_ISSUERS": str(issuers)})
    with running as terminal, custodian_for(tmp_path / "custodian", [terminal]) as custodian:
        text = issue(issuer, holder.public, "", ("write",), until, terminals=(terminal.own_address,))
        credential = Credential(text, holder)
        there = dataclasses.replace(gateway_of(custodian), credential=credential)
        given = deposit(there, source, "f", terminal.address, expires_after_s=86400)
        assert given.expires == until
        assert wait_until(lambda: end_of(custodian, given), what="its end") == "done"
        late = credential.signed(dataclasses.replace(make_dir(1, "d", terminal), expires=until + 1))
        with Channel(gateway_of(custodian)) as channel:
            channel.send(late)
            answer = channel.receive()
        assert isinstance(answer, Result)
        assert "expires after its capability" in answer.reason


def test_the_only_copy_of_small_files_stays_when_the_terminal_refuses_one(
    tmp_path: Path, terminal: RouterProcess, custodian: RouterProcess
) -> None:
    (terminal.root / "d/f1").mkdir(parents=True)
    ends: list[End] = []
    with Packer(
        gateway_of(custodian), lambda key, end: ends.append(end), terminal=terminal.address, custody=True
    ) as packer:
        for name in ("f1", "f2"):
            (tmp_path / name).write_bytes(name.encode())
            packer.add(name, tmp_path / name, f"d/{name}")
        packer.finish()
    wait_until((terminal.root / "d/f2").exists, what="the other file")
    asked = lambda: states(gateway_of(custodian), packer.origin, 2)  # noqa: E731
    wait_until(lambda: all(isinstance(one, Result) and one.outcome != "pending" for one in asked()), what="the ends")
    assert [one.outcome for one in asked() if isinstance(one, Result)] == ["failed", "done"]
    assert fetched(custodian, terminal, "d/f1", tmp_path / "back") == b"f1"
    custodian.kill()
    custodian.start()
    assert [one.outcome for one in asked() if isinstance(one, Result)] == ["failed", "done"]
    assert fetched(custodian, terminal, "d/f1", tmp_path / "again") == b"f1"
    with Channel(gateway_of(custodian)) as channel:
        channel.send(Cancel(packer.origin, 1))
        assert isinstance(channel.receive(), Result)
    wait_until(lambda: not spooled(custodian), what="the spool to be empty")


def test_what_its_terminal_has_refused_goes_when_it_expires(
    terminal: RouterProcess, custodian: RouterProcess, source: Path
) -> None:
    (terminal.root / "f").mkdir()
    given = deposit(gateway_of(custodian), source, "f", terminal.address, expires_after_s=8)
    assert wait_until(lambda: end_of(custodian, given), what="its end") == "failed"
    assert spooled(custodian)
    wait_until(lambda: time.time() > given.expires + 1, what="its expiry")
    custodian.stop()
    custodian.start()
    wait_until(lambda: not spooled(custodian), what="the spool to be empty")


def give_file(
    custodian: RouterProcess, terminal: RouterProcess, path: str, data: bytes, place: Path, urgent: int
) -> None:
    place.write_bytes(data)
    deposit(gateway_of(custodian), place, path, terminal.address, priority=urgent)


def give_pack(
    custodian: RouterProcess, terminal: RouterProcess, path: str, data: bytes, place: Path, urgent: int
) -> None:
    with Channel(gateway_of(custodian)) as channel:
        expires = int(time.time()) + 3600
        pack = Pack(os.urandom(16).hex(), 1, expires, (path,), (len(data),), (0o644,), "", terminal=terminal.address,
                    release="custody", priority=urgent)  # fmt: skip
        channel.send(Low(pack.origin, 0))
        channel.send_pack(pack, [channel.digest(data)], [data])
        assert isinstance(channel.receive(), Custody)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(
    "ways", [(give_file, give_file), (give_pack, give_pack), (give_file, give_pack), (give_pack, give_file)]
)
def test_versions_of_one_name_arrive_in_the_order_in_which_custody_was_granted(
    tmp_path: Path, terminal: RouterProcess, ways: Sequence[Callable[..., None]], restarts: bool
) -> None:
    with custodian_for(tmp_path / "custodian", [terminal], {"STAGEOUT_ROUTER_DELIVERIES": "1"}) as custodian:
        terminal.stop()
        for number, give in enumerate(ways):
            give(custodian, terminal, "f", f"version {number}".encode(), tmp_path / "source", 10 * number)
        if restarts:
            custodian.kill()
            custodian.start()
        terminal.start()
        wait_until(lambda: not spooled(custodian), what="the spool to be empty", describe=lambda: custodian.log)
        assert (terminal.root / "f").read_bytes() == b"version 1"


def test_a_cancel_that_comes_before_its_pack_counts(terminal: RouterProcess, custodian: RouterProcess) -> None:
    data = [b"one", b"two"]
    pack = Pack(ORIGIN, 1, int(time.time()) + 3600, ("f1", "f2"), (3, 3), (0o644,) * 2, "", terminal=terminal.address)
    with Channel(gateway_of(custodian, "small")) as other:
        other.send(Cancel(ORIGIN, 2))  # of somebody else, who does not own it
    with Channel(gateway_of(custodian)) as channel:
        channel.send(Cancel(ORIGIN, 1))
        channel.send_pack(pack, [channel.digest(one) for one in data], data)
        channel.send(Cancel(ORIGIN, 3))
        channel.send(make_dir(3, "d", terminal))
        heard = [channel.receive() for _ in range(3)]
        while not any(isinstance(one, Packed) for one in heard):
            heard.append(channel.receive())
    assert Result(ORIGIN, 3, "cancelled") in heard, heard
    (packed,) = (one for one in heard if isinstance(one, Packed))
    assert (packed.failed, packed.outcomes) == ((0,), ("cancelled",))
    assert (terminal.root / "f2").read_bytes() == b"two"
    assert not (terminal.root / "f1").exists()
    assert not (terminal.root / "d").exists()


def resident_bytes(router: RouterProcess) -> int:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{router.pid}/status").read_text())
    assert found
    return int(found.group(1)) * 1024


@pytest.mark.parametrize("of_custodian", [False, True])
def test_operations_without_data_take_no_more_than_the_share_of_their_key(
    terminal: RouterProcess, custodian: RouterProcess, source: Path, of_custodian: bool
) -> None:
    router, name = (custodian, terminal.address) if of_custodian else (terminal, "")
    expires, wide = int(time.time()) + 6 * 86400, "w" * 4000
    before_bytes = resident_bytes(router)
    with Channel(gateway_of(router)) as channel:
        for seq in range(1, 8001):
            wanted = Operation(ORIGIN, seq, "publish", f"{seq}{wide}", expires, f"{seq}{wide}", terminal=name)
            channel.send(dataclasses.replace(wanted, manifest=f"{seq}{wide}", size_bytes=1, blocks=1))
        channel.send(Status("cd" * 16, 1))  # answered when all of these are decided
        assert channel.receive() == Result("cd" * 16, 1, "unknown")
    assert resident_bytes(router) - before_bytes < 48 * 1024 * 1024
    assert router.log.count(" limit-reached ") == 1
    put(gateway_of(router, "small"), source, "small/f", terminal=name)
    assert (terminal.root / "small/f").read_bytes() == source.read_bytes()


def test_operations_that_wait_for_each_other_fail_at_once(terminal: RouterProcess, custodian: RouterProcess) -> None:
    """They would wait until they expire, at the custodian as at the terminal."""
    for router, name in ((terminal, ""), (custodian, terminal.address)):
        with Channel(gateway_of(router)) as channel:
            for seq, after in ((1, 2), (2, 1)):
                channel.send(dataclasses.replace(make_dir(seq, f"d{seq}", terminal, after=(after,)), terminal=name))
            said = channel.receive()
        assert isinstance(said, Result), said
        assert (said.seq, said.outcome) == (1, "failed"), said
