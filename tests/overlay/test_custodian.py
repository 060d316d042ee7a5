"""Files by way of a custodian: never lost silently, whoever dies, whatever rots."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from schedd_agent.custodian_client import CustodianClient
from stageout.cli.main import main
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import Deposit, Put, put
from stageout.overlay.copying import state
from stageout.overlay.key_file import gateway_of as key_gateway_of
from stageout.overlay.key_file import read_key
from stageout.overlay.operations import Session
from stageout.overlay.wire.messages import (
    BLOCK_BYTES,
    Cancel,
    Custody,
    Open,
    Opened,
    Operation,
    Result,
    Staged,
    Stat,
    Status,
)
from stageout.overlay.wire.route import address
from stageout.wire.deposits import name_of, operation_of, read_receipt
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess, custodian_for
from tests.overlay.depositing import deposit
from tests.overlay.slow_sender import Slow

PLUGIN = Path(__file__).resolve().parents[2] / "plugins" / "overlay_router_plugin"
SIZE_BYTES = 2 * BLOCK_BYTES + 5


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
    path.write_bytes(os.urandom(SIZE_BYTES))
    return path


def gateway_of(router: RouterProcess, name: str = "site") -> Gateway:
    return Gateway("127.0.0.1", router.port, *read_key(router.key_file(name)), timeout_s=20)


def said(custodian: RouterProcess, given: Deposit) -> str:
    answer = state(gateway_of(custodian), given.origin)
    return answer.outcome if isinstance(answer, Result) else "custody"


def spool_is_empty(custodian: RouterProcess) -> bool:
    return not any((custodian.home / "records/spool/.stageout/staging").iterdir())


def spooled(custodian: RouterProcess) -> Path:
    (found,) = (custodian.home / "records/spool/.stageout/staging").iterdir()
    return found


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 4]), at)


class Sending(threading.Thread):
    """A put that waits for its result."""

    def __init__(self, custodian: RouterProcess, source: Path, terminal: RouterProcess) -> None:
        super().__init__()
        self._arguments = (gateway_of(custodian), source, "some/where", terminal.address)
        self.result: Put | Exception | None = None
        self.start()

    def run(self) -> None:
        gateway, source, path, terminal = self._arguments
        try:
            self.result = put(gateway, source, path, terminal=terminal)
        except Exception as problem:
            self.result = problem


def test_a_put_ends_when_the_terminal_has_the_file(
    terminal: RouterProcess, custodian: RouterProcess, source: Path
) -> None:
    done = put(gateway_of(custodian), source, "some/where", mode=0o640, terminal=terminal.address)
    assert (done.size_bytes, done.generation) == (SIZE_BYTES, 1)
    arrived = terminal.root / "some/where"
    assert arrived.read_bytes() == source.read_bytes()
    assert arrived.stat().st_mode & 0o777 == 0o640
    wait_until(lambda: spool_is_empty(custodian), what="the spool to be empty")
    assert not (custodian.root / "some").exists()


def test_an_access_point_is_answered_about_the_others_when_one_has_only_begun(
    terminal: RouterProcess, custodian: RouterProcess, source: Path
) -> None:
    gateway, secret = gateway_of(custodian), gateway_of(custodian).secret
    (origin, one), (_, two) = (operation_of(name_of("s", number), secret) for number in (1, 2))
    done = deposit(gateway, source, "some/where", terminal.address, origin=origin, seq=one)
    with Channel(gateway_of(custodian)) as channel:
        channel.send(Open(origin, two, "else/where", 1, BLOCK_BYTES, done.expires, terminal=terminal.address))
        assert isinstance(channel.receive(), Opened)
        found = CustodianClient(custodian.key_file("site"))(custodian.address, ["s/1", "s/2"], False)
    assert set(found) == {"s/1"}


def test_while_keys_change_the_access_point_asks_with_the_new_and_the_old_key(
    terminal: RouterProcess, custodian: RouterProcess, source: Path
) -> None:
    """Pilots that run have the old key, new ones have the new key, and what both left is asked for."""
    old, new, lines = custodian.key_file("site"), custodian.home / "next.key", custodian.home / "keys"
    new.write_text(f"next {'n' * 48}\n")
    lines.write_text(f"{lines.read_text()}next {'n' * 48} /\n")
    os.kill(custodian.pid, signal.SIGHUP)
    ask = CustodianClient(new, old)
    wait_until(lambda: ask(custodian.address, ["s/9"], False) == {"s/9": ("unknown", "")}, what="the new key")
    terminal.stop()

    def leave(number: int, key: Path) -> None:
        gateway = key_gateway_of(*address(custodian.address), key)
        origin, seq = operation_of(name_of("s", number), gateway.secret)
        deposit(gateway, source, f"some/{number}", terminal.address, origin=origin, seq=seq)

    for number, key in ((1, old), (2, new), (3, old)):
        leave(number, key)
    names = ["s/1", "s/2", "s/3"]
    assert ask(custodian.address, names, False) == dict.fromkeys(names, ("custody", ""))
    ask(custodian.address, ["s/1"], True)
    terminal.start()
    ends = {"s/1": ("cancelled", ""), "s/2": ("done", ""), "s/3": ("done", "")}
    wait_until(lambda: ask(custodian.address, names, False) == ends, what="the ends")
    terminal.stop()
    leave(4, old)
    lines.write_text("".join(line for line in lines.read_text().splitlines(True) if not line.startswith("site ")))
    os.kill(custodian.pid, signal.SIGHUP)
    wait_until(lambda: not _is_known(custodian, old), what="the old key's end")
    terminal.start()
    wait_until((terminal.root / "some" / "4").exists, what="what was left with the key that is gone")
    for first, second in ((new, old), (old, new)):
        assert CustodianClient(first, second)(custodian.address, ["s/2"], False) == {"s/2": ("done", "")}
    with pytest.raises(TransferFailure):
        CustodianClient(old)(custodian.address, ["s/3"], False)


def _is_known(custodian: RouterProcess, key: Path) -> bool:
    try:
        CustodianClient(key)(custodian.address, ["s/3"], False)
    except TransferFailure:
        return False
    return True


def test_a_custodian_without_a_tree_says_so_at_once(tmp_path: Path, terminal: RouterProcess) -> None:
    running = custodian_for(tmp_path / "custodian", [terminal], {"STAGEOUT_ROUTER_ROOT": ""})
    with running, Channel(gateway_of(running)) as channel:
        channel.send(Stat("name"))
        with pytest.raises(TransferFailure, match="keeps no files of its own"):
            channel.receive()


def test_a_deposit_may_be_freed_and_arrives_when_its_terminal_is_back(
    terminal: RouterProcess, custodian: RouterProcess, source: Path
) -> None:
    terminal.stop()
    given = deposit(gateway_of(custodian), source, "some/where", terminal.address)
    content = source.read_bytes()
    source.unlink()
    assert said(custodian, given) == "custody"
    shown = wait_until(lambda: _shown(custodian, "1 files"), what="the custodian's report")
    assert f"1 files, {SIZE_BYTES} bytes with this as their only copy" in shown
    wait_until(lambda: "Connection refused" in _shown(custodian, "1 files"), what="the reason in the report")
    custodian.kill()
    custodian.start()
    assert said(custodian, given) == "custody"
    terminal.start()
    wait_until(lambda: said(custodian, given) == "done", what="the delivery")
    assert (terminal.root / "some/where").read_bytes() == content
    wait_until(lambda: spool_is_empty(custodian), what="the spool to be empty")
    custodian.kill()
    custodian.start()
    assert said(custodian, given) == "done", "results are kept"


def _shown(custodian: RouterProcess, words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "overlay_router.daemon", "--alone", "--custody"],
        env={**os.environ, "STAGEOUT_ROUTER_DIR": str(custodian.home / "records")},
        capture_output=True,
        text=True,
    )
    return done.stdout if words in done.stdout else ""


_DEATHS = (
    "overlay-stage=kill-after",
    "custody-sync=kill-before",
    "custody-take=kill-before",
    "custody-take=kill-after",
    "custody-say=kill-before",
    "custody-say=kill-after",
    "custody-settle=kill-before",
    "custody-settle=kill-after",
    "overlay-discard=kill-before",
)


def test_killed_at_any_step_it_goes_on(tmp_path: Path, terminal: RouterProcess, source: Path) -> None:
    """One death after the other: every time a file comes through, whole, and the spool is empty again."""
    arming = {death: tmp_path / death for death in _DEATHS}
    faults = " ".join(f"{death}@{arming[death]}" for death in _DEATHS)
    with custodian_for(tmp_path / "custodian", [terminal], {"STAGEOUT_FAULTS": faults}) as custodian:
        for death, armed in arming.items():
            armed.touch()
            sending = Sending(custodian, source, terminal)
            wait_until(lambda arm=armed: not arm.exists(), what=death)  # type: ignore[misc]
            custodian.wait_for_end()
            custodian.start()
            sending.join()
            assert isinstance(sending.result, Put), sending.result
            assert (terminal.root / "some/where").read_bytes() == source.read_bytes()
            wait_until(lambda: spool_is_empty(custodian), what="the spool to be empty")
        assert "task-failed" not in custodian.log


@pytest.mark.parametrize("release", ["delivered", "custody"])
def test_blocks_go_on_while_others_still_come_in(
    terminal: RouterProcess, custodian: RouterProcess, source: Path, release: str
) -> None:
    slow = Slow(custodian, terminal, source, release)
    slow.send(0)
    wait_until(lambda: slow.is_at_terminal(1), what="the first block at the terminal")
    slow.control.send(Status(slow.origin, 1))
    assert isinstance(slow.control.receive(), Staged), "CUSTODY is said when all is here"
    slow.send(1)
    wait_until(lambda: slow.is_at_terminal(2), what="the second block at the terminal")
    slow.send(2)
    slow.publish()
    assert isinstance(slow.control.receive(), Custody)
    assert slow.control.receive() == Result(slow.origin, 1, "done", generation=1)
    assert (terminal.root / "slow").read_bytes() == slow.data
    assert custodian.log.count(" delivery-started ") == 1
    wait_until(lambda: spool_is_empty(custodian), what="the spool to be empty")
    assert " drop-requested " not in custodian.log


def test_what_was_sent_on_of_a_file_that_is_given_up_is_dropped(
    terminal: RouterProcess, custodian: RouterProcess, source: Path
) -> None:
    slow = Slow(custodian, terminal, source, "custody")
    slow.send(0, 1)
    wait_until(lambda: slow.is_at_terminal(2), what="two blocks at the terminal")
    terminal.stop()
    slow.control.send(Cancel(slow.origin, 1))
    assert slow.control.receive() == Result(slow.origin, 1, "cancelled")
    custodian.kill()
    custodian.start()
    terminal.start()
    wait_until(lambda: getattr(slow.at_terminal(), "outcome", "") == "unknown", what="the terminal to drop it")
    assert not any((terminal.root / ".stageout/staging").iterdir())
    wait_until(lambda: spool_is_empty(custodian), what="the spool to be empty")


def test_a_spool_that_rots_before_it_is_whole_is_asked_for_again(
    terminal: RouterProcess, custodian: RouterProcess, source: Path
) -> None:
    terminal.stop()
    slow = Slow(custodian, terminal, source, "custody")
    slow.send(0)
    flip(spooled(custodian), 7)
    terminal.start()
    slow.send(1)
    again = slow.control.receive()
    assert isinstance(again, Opened)
    assert 0 not in [block for first, end in again.staged for block in range(first, end)]
    slow.send(0, 2)
    slow.publish()
    assert isinstance(slow.control.receive(), Custody)
    assert slow.control.receive() == Result(slow.origin, 1, "done", generation=1)
    assert (terminal.root / "slow").read_bytes() == slow.data


@pytest.mark.parametrize("harm", ["flip", "gone"])
def test_damage_in_the_spool_is_found_and_asked_for_again(
    tmp_path: Path, terminal: RouterProcess, source: Path, harm: str
) -> None:
    """And when the custodian dies as soon as that is recorded."""
    armed = tmp_path / "armed"
    faults = {"STAGEOUT_FAULTS": f"custody-withdraw=kill-after@{armed}"}
    with custodian_for(tmp_path / "custodian", [terminal], faults) as custodian:
        terminal.stop()
        sending = Sending(custodian, source, terminal)
        wait_until(lambda: " custody-accepted " in custodian.log, what="custody")
        flip(spooled(custodian), BLOCK_BYTES + 3) if harm == "flip" else spooled(custodian).unlink()
        if harm == "flip":
            armed.touch()
        terminal.start()
        if harm == "flip":
            wait_until(lambda: not armed.exists(), what="the damage to be found")
            custodian.wait_for_end()
            custodian.start()
        sending.join()
        assert isinstance(sending.result, Put), sending.result
        assert sending.result.sent_bytes == SIZE_BYTES + (BLOCK_BYTES if harm == "flip" else SIZE_BYTES)
        assert (terminal.root / "some/where").read_bytes() == source.read_bytes()
        assert "custody-damaged" in custodian.log


def test_damage_of_the_only_copy_is_a_loss_and_said_so(
    terminal: RouterProcess, custodian: RouterProcess, source: Path
) -> None:
    terminal.stop()
    given = deposit(gateway_of(custodian), source, "some/where", terminal.address)
    flip(spooled(custodian), 0)
    terminal.start()
    wait_until(lambda: said(custodian, given) == "lost", what="the loss")
    assert not (terminal.root / "some/where").exists()
    assert re.search(r"ERROR custody-ended .*outcome=lost", custodian.log)
    assert spool_is_empty(custodian)
    staging = terminal.root / ".stageout/staging"
    wait_until(lambda: not any(staging.iterdir()), what="its other blocks to be dropped at the terminal")


def test_a_damaged_file_that_has_arrived_is_no_loss(tmp_path: Path, source: Path) -> None:
    armed = tmp_path / "armed"
    running = RouterProcess(tmp_path / "terminal", {"STAGEOUT_FAULTS": f"overlay-settle=kill-after@{armed}"})
    with running as terminal, custodian_for(tmp_path / "custodian", [terminal]) as custodian:
        armed.touch()
        given = deposit(gateway_of(custodian), source, "f", terminal.address)
        terminal.wait_for_end()
        custodian.kill()
        spooled(custodian).unlink()
        custodian.start()
        terminal.start()
        ends = ("done", "lost")
        assert wait_until(lambda: (end := said(custodian, given)) in ends and end, what="its end") == "done"
        assert "custody-damaged" in custodian.log
        assert spool_is_empty(custodian)


def test_a_lost_disk_costs_a_resend_or_is_a_loss_that_can_be_seen(
    terminal: RouterProcess, custodian: RouterProcess, source: Path
) -> None:
    terminal.stop()
    given = deposit(gateway_of(custodian), source, "deposited", terminal.address)
    sending = Sending(custodian, source, terminal)
    wait_until(lambda: custodian.log.count(" custody-accepted ") == 2, what="custody")
    custodian.kill()
    shutil.rmtree(custodian.home / "records")
    custodian.start()
    assert said(custodian, given) == "unknown"
    terminal.start()
    sending.join()
    assert isinstance(sending.result, Put), sending.result
    assert (terminal.root / "some/where").read_bytes() == source.read_bytes()
    assert not (terminal.root / "deposited").exists()


def _die_without_records(terminal: RouterProcess) -> None:
    """An answer that a terminal was about to give when it died is not known to the one that comes after it."""
    terminal.wait_for_end()
    for path in (terminal.home / "records").glob("*.sqlite*"):
        path.unlink()


def test_nothing_is_done_twice_at_a_terminal_that_has_lost_its_records(tmp_path: Path, source: Path) -> None:
    armed, faults = tmp_path / "armed", {"STAGEOUT_FAULTS": f"overlay-settle=kill-after@{tmp_path / 'armed'}"}
    running = RouterProcess(tmp_path / "terminal", faults)
    with running as terminal, custodian_for(tmp_path / "custodian", [terminal]) as custodian:
        armed.touch()
        given = deposit(gateway_of(custodian), source, "f", terminal.address)
        _die_without_records(terminal)
        inode = (terminal.root / "f").stat().st_ino
        terminal.start()
        wait_until(lambda: said(custodian, given) == "done", what="the file to be found")
        assert (terminal.root / "f").stat().st_ino == inode
        assert not any((terminal.root / ".stageout/staging").iterdir())
        with Session(gateway_of(terminal), through=gateway_of(custodian)) as session:
            armed.touch()
            session.delete("f")
            _die_without_records(terminal)
            (terminal.root / "f").write_bytes(b"of somebody else")
            terminal.start()
            with pytest.raises(TransferFailure, match="whether it has happened is not known"):
                session.push()
        assert (terminal.root / "f").read_bytes() == b"of somebody else"


def test_cancelled_in_custody(terminal: RouterProcess, custodian: RouterProcess, source: Path) -> None:
    terminal.stop()
    given = deposit(gateway_of(custodian), source, "f", terminal.address)
    with Channel(gateway_of(custodian, "small")) as other:
        other.send(Cancel(given.origin, given.seq))
        other.send(Status(given.origin, given.seq))
        assert other.receive() == Result(given.origin, given.seq, "unknown")
    with Channel(gateway_of(custodian)) as channel:
        channel.send(Cancel(given.origin, given.seq))
        terminal.start()
        answer = channel.receive()
    assert answer == Result(given.origin, given.seq, "cancelled")
    assert not (terminal.root / "f").exists()
    wait_until(lambda: spool_is_empty(custodian), what="the spool to be empty")


def test_who_may_deposit_for_whom(tmp_path: Path, terminal: RouterProcess, source: Path) -> None:
    allowed = {"STAGEOUT_ROUTER_TERMINALS": f"{terminal.address}=small"}
    with custodian_for(tmp_path / "custodian", [terminal], allowed) as custodian:
        for name, path, target, words in (
            ("site", "small/f", terminal.address, "may not deposit for"),
            ("small", "small/f", "127.0.0.1:1", "takes nothing into custody for 127.0.0.1:1"),
            ("small", "f", terminal.address, "only for what is below 'small'"),
            ("small", "small/../f", terminal.address, "below the root"),
        ):
            with pytest.raises(TransferFailure, match=words) as caught:
                put(gateway_of(custodian, name), source, path, terminal=target)
            assert caught.value.kind is ErrorClass.PERMISSION_DENIED
        put(gateway_of(custodian, "small"), source, "small/f", terminal=terminal.address)
    assert (terminal.root / "small/f").read_bytes() == source.read_bytes()
    with pytest.raises(TransferFailure, match="takes nothing into custody"):
        put(gateway_of(terminal), source, "f", terminal="127.0.0.1:1")


def test_a_full_spool_says_so_and_when_to_ask_again(tmp_path: Path, terminal: RouterProcess, source: Path) -> None:
    with custodian_for(tmp_path / "custodian", [terminal], {"STAGEOUT_ROUTER_SPOOL_MB": "5"}) as custodian:
        terminal.stop()
        gateway = gateway_of(custodian)
        deposit(gateway, source, "1", terminal.address)
        deposit(gateway, source, "2", terminal.address)
        with pytest.raises(TransferFailure) as caught:
            deposit(gateway, source, "3", terminal.address)
        assert (caught.value.kind, caught.value.retry_after_s) == (ErrorClass.NO_SPACE_REMOTE, 5.0)
        terminal.start()
        wait_until(lambda: spool_is_empty(custodian), what="the spool to be empty")
        deposit(gateway, source, "3", terminal.address)


def test_names_change_in_their_order_by_way_of_a_custodian(
    terminal: RouterProcess, custodian: RouterProcess, source: Path
) -> None:
    terminal.stop()
    given = deposit(gateway_of(custodian), source, "d/f", terminal.address)
    more = {"terminal": terminal.address, "release": "custody"}
    rename = Operation(given.origin, 2, "rename", "d/f", given.expires, target="d/g", after=(1,), **more)  # type: ignore[arg-type]
    delete = Operation(given.origin, 3, "delete", "d/g", given.expires, after=(2,), **more)  # type: ignore[arg-type]
    with Channel(gateway_of(custodian)) as channel:
        for operation in (delete, rename):
            channel.send(operation)
            answer = channel.receive()
            assert isinstance(answer, Custody)
        terminal.start()
        results = [channel.receive() for _ in range(3)]
    # the terminal keeps the order of the names; which answer is heard first is nobody's promise
    assert sorted((one.seq, one.outcome) for one in results if isinstance(one, Result)) == [
        (1, "done"),
        (2, "done"),
        (3, "done"),
    ]
    assert [path.name for path in (terminal.root / "d").iterdir()] == []


def kill_carrier(custodian: RouterProcess) -> None:
    (carrier,) = [pid for pid in custodian.workers() if b"carrier" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(carrier, signal.SIGKILL)


def test_a_carrier_that_dies_costs_a_moment(terminal: RouterProcess, custodian: RouterProcess, source: Path) -> None:
    terminal.stop()
    given = deposit(gateway_of(custodian), source, "f", terminal.address)
    kill_carrier(custodian)
    terminal.start()
    wait_until(lambda: said(custodian, given) == "done", what="the delivery")
    assert dataclasses.asdict(given)["size_bytes"] == SIZE_BYTES
    assert json.loads((custodian.home / "records/custody.json").read_text())["summary"]["files"] in (0, 1)


def test_a_block_in_parts_stays_when_others_that_left_unwritten_must_come_again(
    terminal: RouterProcess, custodian: RouterProcess, tmp_path: Path
) -> None:
    source = tmp_path / "long"
    source.write_bytes(os.urandom(8 * BLOCK_BYTES + 5))  # a shorter one is not sent on before its first block is there
    slow = wait_until(lambda: passed_unwritten(custodian, terminal, source), what="a block that leaves unwritten")
    half = BLOCK_BYTES // 2
    with slow.attached() as one, slow.attached() as other:
        one.send_part(slow.tid, BLOCK_BYTES, memoryview(slow.block(1))[:half])
        wait_until(lambda: spooled(custodian).read_bytes()[BLOCK_BYTES:][:half] == slow.block(1)[:half], what="a half")
        terminal.kill()
        shutil.rmtree(terminal.home / "records")
        shutil.rmtree(terminal.root / ".stageout")
        terminal.start()
        wait_until(lambda: slow.opened().staged == (), what="the word that the only copy of a block is lost")
        other.send_part(slow.tid, BLOCK_BYTES + half, memoryview(slow.block(1))[half:])
        assert slow.staged() == {1}, "the half that came before is there still"
    slow.send(0, *range(2, 9))
    slow.publish()
    assert isinstance(slow.control.receive(), Custody)
    assert slow.control.receive() == Result(slow.origin, 1, "done", generation=1)
    assert (terminal.root / "slow").read_bytes() == slow.data


def passed_unwritten(custodian: RouterProcess, terminal: RouterProcess, source: Path) -> Slow | None:
    """A sender whose first block is at the terminal only; None when the custodian was too busy, and has written it."""
    slow = Slow(custodian, terminal, source, "delivered")
    with slow.attached() as channel:
        wait_until(lambda: isinstance(slow.at_terminal(), Staged), what="the terminal to be told")
        channel.send_block(slow.tid, 0, slow.block(0))
        assert slow.staged() == {0}
    if slow.epoch:
        return slow
    slow.control.send(Cancel(slow.origin, 1))
    assert slow.control.receive() == Result(slow.origin, 1, "cancelled")
    return None


def test_the_command_and_the_plugin_go_through_a_custodian(
    terminal: RouterProcess, custodian: RouterProcess, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, url = ["--key", str(custodian.key_file("site"))], f"overlay://{terminal.address}"
    assert main(["put", str(source), f"{url}/1", *key, "--through", custodian.address]) == 0
    assert (terminal.root / "1").read_bytes() == source.read_bytes()
    terminal.stop()
    assert main(["put", str(source), f"{url}/2", *key, "--through", custodian.address, "--custody"]) == 0
    ask = capsys.readouterr().out.split("stageout ")[-1].split()
    assert main([*ask, *key]) == 2
    terminal.start()
    wait_until(lambda: main([*ask, *key]) == 0, what="the delivery")
    assert (terminal.root / "2").read_bytes() == source.read_bytes()
    assert main(["put", str(source), f"{url}/3", *key, "--custody"]) == 64
    given = {"STAGEOUT_OVERLAY_KEY": key[1], "STAGEOUT_OVERLAY_GATEWAY": custodian.address}
    outfile = _upload(source, f"{url}/4", tmp_path, given)
    assert "TransferSuccess = true" in outfile
    assert (terminal.root / "4").read_bytes() == source.read_bytes()
    assert custodian.log.count(" custody-accepted ") == 3


def _upload(source: Path, url: str, home: Path, environment: dict[str, str]) -> str:
    """The plugin's result ads."""
    return _upload_all([(source, url)], home, environment)


def _upload_all(files: list[tuple[Path, str]], home: Path, environment: dict[str, str]) -> str:
    """The plugin's result ads."""
    (home / "in").write_text("\n".join(f'[ Url = "{url}"; LocalFileName = "{local}" ]' for local, url in files))
    command = [str(PLUGIN), "-infile", str(home / "in"), "-outfile", str(home / "out"), "-upload"]
    root = str(PLUGIN.parents[1])
    subprocess.run([sys.executable, *command], env={**os.environ, "PYTHONPATH": root, **environment}, check=True)
    return (home / "out").read_text()


def test_a_pilots_plugin_leaves_receipts_that_the_access_point_asks_with(
    terminal: RouterProcess, custodian: RouterProcess, source: Path, tmp_path: Path
) -> None:
    """Small files go in packs; one that is given again, in another pack or by itself, is the same deposit."""
    terminal.stop()
    key, seed = custodian.key_file("site"), "0c" * 16
    given = {
        "STAGEOUT_OVERLAY_KEY": str(key),
        "STAGEOUT_OVERLAY_HANDOVER": custodian.address,
        "STAGEOUT_OVERLAY_SEED": seed,
        "STAGEOUT_OVERLAY_NUMBERS": "9,1-6",
    }
    names = [f"{'xyz'[place // 3]}/s{place}" for place in range(8)]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode() * 100)
    files = [(tmp_path / name, f"overlay://{terminal.address}/{name}") for name in names]
    outfile = _upload_all([(source, f"overlay://{terminal.address}/f"), *files[:6]], tmp_path, given)
    assert outfile.count('StageOutVerified = ""') == 7
    receipts = [read_receipt(text) for text in re.findall(r'StageOutCustody = "([^"]+)"', outfile)]
    assert {(one.custodian, one.seed) for one in receipts} == {(custodian.address, seed)}
    assert sorted(one.first for one in receipts) == sorted(one.last for one in receipts) == [1, 2, 3, 4, 5, 6, 9]
    assert re.findall(r"custody-accepted .*files=(\d)", custodian.log) == ["6"]
    # another call knows nothing of the first one: all of its files are in that pack, or only some
    for place, numbers in ((slice(1, 4), "2-4"), (slice(4, 8), "5-8")):
        outfile = _upload_all(files[place], tmp_path, {**given, "STAGEOUT_OVERLAY_NUMBERS": numbers})
        assert outfile.count("StageOutCustody") == len(files[place])
    assert re.findall(r"custody-accepted .*files=(\d)", custodian.log) == ["6"]
    assert custodian.log.count(" custody-accepted ") == 4, "the pack, the large one, and two by themselves"
    deposits = {number: name_of(seed, number) for number in range(1, 10)}
    ask = CustodianClient(key)
    said = ask(custodian.address, [*deposits.values(), "other/1"], False)
    assert said == {**dict.fromkeys(deposits.values(), ("custody", "")), "other/1": ("unknown", "")}
    for number in (2, 8, 9):
        assert ask(custodian.address, [deposits[number]], True)[deposits[number]][0] in ("custody", "cancelled")
    terminal.start()
    cancelled = {deposits[number]: ("cancelled", "") for number in (2, 8, 9)}
    expected = {**dict.fromkeys(deposits.values(), ("done", "")), **cancelled}
    wait_until(lambda: ask(custodian.address, [*expected], False) == expected, what="the end of all")
    there = {path.relative_to(terminal.root).as_posix() for path in terminal.root.glob("[xyz]/*")}
    assert there == {*names} - {names[1], names[7]}
    assert not (terminal.root / "f").exists()
