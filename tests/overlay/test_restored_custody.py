"""A custodian whose database is put back from a backup: what was deposited since then is not deleted."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from stageout.overlay.channel import Gateway
from stageout.overlay.copying import state
from stageout.overlay.key_file import read_key
from stageout.overlay.packs import End, Packer
from stageout.overlay.wire.messages import BLOCK_BYTES, Result
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess, custodian_for
from tests.overlay.depositing import deposit


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[RouterProcess]:
    with RouterProcess(tmp_path / "terminal") as running:
        yield running


@pytest.fixture
def custodian(tmp_path: Path, terminal: RouterProcess) -> Iterator[RouterProcess]:
    with custodian_for(tmp_path / "custodian", [terminal]) as running:
        yield running


def gateway_of(router: RouterProcess) -> Gateway:
    return Gateway("127.0.0.1", router.port, *read_key(router.key_file("site")), timeout_s=20)


def give(custodian: RouterProcess, terminal: RouterProcess, name: str) -> bytes:
    """Deposit a file, of which the custodian has the only copy then."""
    data = os.urandom(BLOCK_BYTES + 5)
    local = custodian.home / "local"
    local.write_bytes(data)
    deposit(gateway_of(custodian), local, name, terminal.address)
    local.unlink()
    return data


def give_small(custodian: RouterProcess, terminal: RouterProcess, names: list[str]) -> dict[str, bytes]:
    """The same with small files."""
    ends: dict[str, End] = {}
    with Packer(gateway_of(custodian), ends.__setitem__, terminal=terminal.address, custody=True) as packer:
        for name in names:
            (custodian.home / name).write_bytes(name.encode() * 9)
            packer.add(name, custodian.home / name, name)
        packer.finish()
    assert sorted(ends) == sorted(names)
    return {name: name.encode() * 9 for name in names}


def backup(custodian: RouterProcess, name: str) -> Path:
    custodian.stop()
    target = custodian.home / name
    shutil.copy(custodian.home / "records/custody.sqlite", target)
    custodian.start()
    return target


def put_back(custodian: RouterProcess, copy: Path) -> None:
    """As docs/administrator/messages.md says."""
    custodian.stop()
    for path in (custodian.home / "records").glob("custody.sqlite*"):
        path.unlink()
    shutil.copy(copy, custodian.home / "records/custody.sqlite")
    custodian.start()


def unknown(custodian: RouterProcess) -> list[bytes]:
    place = custodian.home / "records/spool/unknown"
    return [path.read_bytes() for path in place.iterdir()] if place.exists() else []


def holds(custodian: RouterProcess, data: bytes) -> bool:
    """Tell whether the custodian's spool has the data still: it learns of a delivery after the terminal has it."""
    for path in (custodian.home / "records/spool").rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file() and path.read_bytes() == data:
                return True
    return False


def arrived(terminal: RouterProcess, expected: dict[str, bytes]) -> None:
    def there() -> bool:
        return all((terminal.root / name).exists() for name in expected)

    wait_until(there, timeout_s=120, what=f"{sorted(expected)} at the terminal")
    assert {name: (terminal.root / name).read_bytes() for name in expected} == expected


def test_deposits_that_an_older_database_does_not_know_are_kept_and_delivered_with_the_newest(
    terminal: RouterProcess, custodian: RouterProcess
) -> None:
    terminal.stop()
    first = give(custodian, terminal, "first")
    older = backup(custodian, "older")
    second, small = give(custodian, terminal, "second"), give_small(custodian, terminal, ["s1", "s2"])
    newest = backup(custodian, "newest")

    put_back(custodian, older)
    kept = unknown(custodian)
    assert second in kept, "the only copy of the second file"
    assert any(all(data in one for data in small.values()) for one in kept), "the only copy of the small files"
    said = re.findall(r"ERROR.* unknown-custody-found .*directory=(\S+) .*advice=", custodian.log)
    assert set(said) == {str(custodian.home / "records/spool/unknown")}
    third = give(custodian, terminal, "third")
    assert holds(custodian, third)
    terminal.start()
    arrived(terminal, {"first": first, "third": third})
    assert not (terminal.root / "second").exists()

    wait_until(lambda: not holds(custodian, third), what="the end of its custody")
    put_back(custodian, newest)
    arrived(terminal, {"first": first, "second": second, "third": third, **small})
    assert unknown(custodian) == []


def test_what_is_deposited_meanwhile_is_kept_too(terminal: RouterProcess, custodian: RouterProcess) -> None:
    terminal.stop()
    older = backup(custodian, "older")
    second = give(custodian, terminal, "second")
    newest = backup(custodian, "newest")
    put_back(custodian, older)
    third = give(custodian, terminal, "third")
    put_back(custodian, newest)
    assert unknown(custodian) == [third]
    terminal.start()
    arrived(terminal, {"second": second})


def test_what_was_delivered_since_the_backup_is_no_loss(terminal: RouterProcess, custodian: RouterProcess) -> None:
    terminal.stop()
    data = os.urandom(BLOCK_BYTES + 5)
    (custodian.home / "local").write_bytes(data)
    given = deposit(gateway_of(custodian), custodian.home / "local", "f", terminal.address)
    older = backup(custodian, "older")
    terminal.start()
    arrived(terminal, {"f": data})
    wait_until(lambda: " custody-ended " in custodian.log, what="the end of its custody")
    put_back(custodian, older)

    def end() -> str:
        answer = state(gateway_of(custodian), given.origin)
        return answer.outcome if isinstance(answer, Result) else ""

    assert wait_until(end, timeout_s=60, what="its end", describe=lambda: custodian.log[-2000:]) == "done"


def test_a_spool_whose_records_are_right_sets_nothing_aside(terminal: RouterProcess, custodian: RouterProcess) -> None:
    terminal.stop()
    first, small = give(custodian, terminal, "first"), give_small(custodian, terminal, ["s1", "s2"])
    custodian.kill()
    custodian.start()
    terminal.start()
    arrived(terminal, {"first": first, **small})
    custodian.kill()
    custodian.start()
    assert unknown(custodian) == []
    assert "unknown-custody-found" not in custodian.log
