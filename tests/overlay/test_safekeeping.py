"""Files in the custody of two real routers: the loss of one's disk costs nothing, and each file is written once."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from stageout.cli.bars import Bar
from stageout.cli.main import main
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay import client, safekeeping
from stageout.overlay.channel import Gateway
from stageout.overlay.copying import state, states
from stageout.overlay.finding import find
from stageout.overlay.key_file import read_key
from stageout.overlay.operations import Session
from stageout.overlay.safekeeping import Custodian, deposit_copies
from stageout.overlay.small_deposits import Small, deposit_small
from stageout.overlay.wire.messages import BLOCK_BYTES, Result
from stageout.overlay.wire.packs import MAX_FILE_BYTES
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess, custodian_for
from tests.overlay.depositing import deposit


@pytest.fixture(scope="module")
def routers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RouterProcess]]:
    home = tmp_path_factory.mktemp("safekeeping")
    less = {"STAGEOUT_ROUTER_WORKERS": "1"}
    with contextlib.ExitStack() as stack:
        terminal = stack.enter_context(RouterProcess(home / "terminal", less))
        both = [stack.enter_context(custodian_for(home / name, [terminal], less)) for name in ("1", "2")]
        yield [terminal, *both]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(os.urandom(2 * BLOCK_BYTES + 5))
    return path


def gateway_of(router: RouterProcess) -> Gateway:
    return Gateway("127.0.0.1", router.port, *read_key(router.key_file("site")), timeout_s=20)


def said(router: RouterProcess, origin: str) -> str:
    answer = state(gateway_of(router), origin)
    return answer.outcome if isinstance(answer, Result) else "custody"


def is_empty(router: RouterProcess) -> bool:
    return not any((router.home / "records/spool/.stageout/staging").iterdir())


def test_a_lost_disk_costs_nothing(routers: list[RouterProcess], source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, one, two = routers
    monkeypatch.setattr(safekeeping, "STANDBY_S", 1)
    terminal.stop()
    places = [Custodian(gateway_of(router), terminal.address) for router in (one, two)]
    given = deposit_copies(places, source, "lost/f", copies=2)
    content = source.read_bytes()
    source.unlink()
    assert {item.router.rpartition(":")[2] for item in given} == {str(one.port), str(two.port)}
    one.kill()
    shutil.rmtree(one.home / "records")
    terminal.start()
    wait_until(lambda: said(two, given[0].origin) == "done", what="the delivery by the second")
    assert (terminal.root / "lost/f").read_bytes() == content
    assert is_empty(two)
    one.start()
    assert said(one, given[0].origin) == "unknown"


def test_one_delivers_the_other_hears_of_it(routers: list[RouterProcess], source: Path) -> None:
    terminal, one, two = routers
    key = ["--key", str(terminal.key_file("site"))]
    through = ["--through", f"127.0.0.1:1; {one.address}; {two.address}", "--custody", "--copies", "2"]
    assert main(["put", str(source), f"overlay://{terminal.address}/once/f", *key, *through]) == 0
    wait_until(lambda: (terminal.root / "once/f").exists(), what="the delivery")
    wait_until(lambda: is_empty(one) and is_empty(two), what="both spools to be empty")
    with Session(gateway_of(terminal)) as session:
        assert session.stat("once/f").generation == 1
    assert (terminal.root / "once/f").read_bytes() == source.read_bytes()


def test_a_destination_that_is_away_and_what_custodians_have(
    routers: list[RouterProcess], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal, one, two = routers
    terminal.stop()
    deposit(gateway_of(two), source, "away/f", terminal.address)
    url, key = f"overlay://{terminal.address}/away/f", ["--key", str(terminal.key_file("site"))]
    back, through = str(tmp_path / "back"), ["--through", f"{one.address};{two.address}"]
    assert main(["get", url, back, *key, *through]) == 1
    said_so = capsys.readouterr().err
    assert f"{two.address} has a version of {source.stat().st_size} bytes on its way there" in said_so
    assert "--stale-ok" in said_so
    assert not Path(back).exists()
    assert main(["get", url, back, *key, *through, "--stale-ok"]) == 0
    assert Path(back).read_bytes() == source.read_bytes()
    assert f"not from {terminal.address}" in capsys.readouterr().out
    assert main(["get", url, back, *key, "--through", one.address, "--stale-ok"]) == 1
    assert f"nothing of it at {one.address}" in capsys.readouterr().err
    with pytest.raises(TransferFailure, match="only for what is below 'small'"):
        find(Gateway("127.0.0.1", two.port, *read_key(two.key_file("small"))), terminal.address, "away/f")
    (spooled,) = (two.home / "records/spool/.stageout/staging").iterdir()
    with spooled.open("r+b") as file:
        first = os.pread(file.fileno(), 1, 0)[0]
        os.pwrite(file.fileno(), bytes([first ^ 1]), 0)
    assert main(["get", url, back, *key, *through, "--stale-ok"]) == 1
    assert "is damaged" in capsys.readouterr().err
    terminal.start()
    wait_until(lambda: is_empty(two), what="the end of the deposit")


def test_two_that_deliver_at_once_write_it_once(
    routers: list[RouterProcess], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, one, two = routers
    monkeypatch.setattr(safekeeping, "STANDBY_S", 0)
    places = [Custodian(gateway_of(router), terminal.address) for router in (one, two)]
    given = deposit_copies(places, source, "both/f", copies=2)
    wait_until(lambda: all(said(router, given[0].origin) == "done" for router in (one, two)), what="both ends")
    with Session(gateway_of(terminal)) as session:
        assert session.stat("both/f").generation == 1
    assert is_empty(one)
    assert is_empty(two)


def test_small_files_go_to_two_custodians_in_packs_and_are_made_once(
    routers: list[RouterProcess], tmp_path: Path
) -> None:
    terminal, one, two = routers
    nobody = replace(gateway_of(one), port=1)
    places = [Custodian(gateway, terminal.address) for gateway in (nobody, *map(gateway_of, (one, one, two)))]
    places[2] = Custodian(replace(gateway_of(one), host="localhost"), terminal.address)
    origin, ends = os.urandom(16).hex(), list[tuple[int, TransferFailure | None]]()
    for number in range(1, 7):
        (tmp_path / f"s{number}").write_bytes(b"%d" % number)
    (tmp_path / "s6").write_bytes(bytes(MAX_FILE_BYTES + 1))
    paths = {number: f"small/{number // 4}/s{number}" for number in range(1, 8)}
    files = [Small(number, tmp_path / f"s{number}", path, origin, number) for number, path in paths.items()]
    deposit_small(places, files, lambda file, failure: ends.append((file.key, failure)), copies=2)
    assert sorted(key for key, _ in ends) == [1, 2, 3, 4, 5, 6, 7]
    failed = {key: failure.kind for key, failure in ends if failure is not None}
    assert failed == {6: ErrorClass.NOT_SUPPORTED, 7: ErrorClass.LOCAL_FILE}, "by itself; nothing there"
    for file in files[:5]:
        assert [kept.custodian for kept in file.kept] == [one.address, two.address]

    def ended() -> bool:
        answers = [answer for router in (one, two) for answer in states(gateway_of(router), origin, 5)]
        return all(isinstance(answer, Result) and answer.outcome == "done" for answer in answers)

    wait_until(ended, what="both ends")
    with Session(gateway_of(terminal)) as session:
        assert {session.stat(paths[number]).generation for number in range(1, 6)} == {1}
    assert (terminal.root / paths[3]).read_bytes() == b"3"


def test_too_few_custodians_keep_nothing(
    routers: list[RouterProcess], source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal, one, _ = routers
    terminal.stop()
    away_since_s, origin = time.monotonic(), "0f" * 16
    same = Custodian(gateway_of(one), terminal.address)
    nobody = Custodian(Gateway("127.0.0.1", 1, "site", b"x"), terminal.address)
    with pytest.raises(TransferFailure, match=r"1 of 2 custodians could be had.*Connection refused") as caught:
        deposit_copies([same, nobody], source, "few/f", copies=2, origin=origin, wait_s=1)
    assert said(one, origin) == "custody", "who says the same again finds it"
    assert caught.value.kind is ErrorClass.CONNECT_FAILED
    with pytest.raises(TransferFailure, match="is the same router"):
        deposit_copies([same, same], source, "few/g", copies=2)
    terminal.start()
    away_s = time.monotonic() - away_since_s
    # Pauses double, so the last one is as long as all before it.
    wait_until(lambda: said(one, origin) == "done", what="the delivery", timeout_s=60 + away_s)
    wait_until(lambda: is_empty(one), what="the first to give the other up", describe=lambda: one.log[-5000:])
    assert not (terminal.root / "few/g").exists()
    key = ["--key", str(terminal.key_file("site"))]
    for words in (["--copies", "2"], ["--copies", "2", "--through", one.address]):
        assert main(["put", str(source), f"overlay://{terminal.address}/f", *key, *words]) == 64
    assert "--copies is for --custody" in capsys.readouterr().err


@pytest.mark.parametrize("copies", [1, 2])
def test_a_deposit_that_is_interrupted_or_fails_keeps_no_space(
    routers: list[RouterProcess], tmp_path: Path, copies: int
) -> None:
    terminal, one, two = routers
    source = tmp_path / "source"
    source.write_bytes(os.urandom(16 * BLOCK_BYTES))
    places = [Custodian(gateway_of(router), terminal.address) for router in (one, two)]
    once = ["now"]  # to take one out is atomic: several threads send

    def interrupt(sent_bytes: int) -> None:
        with contextlib.suppress(IndexError):
            once.pop()
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        deposit_copies(places, source, f"stopped/{copies}", copies=copies, progress=interrupt)
    wait_until(lambda: is_empty(one) and is_empty(two), what="what came of it to be dropped")

    def fail(sent_bytes: int) -> None:
        raise TransferFailure(ErrorClass.SOURCE_CHANGED, "it has changed")

    with pytest.raises(TransferFailure, match="it has changed"):
        deposit_copies(places, source, f"failed/{copies}", copies=copies, progress=fail)
    with pytest.raises(TransferFailure, match="it has changed"):
        client.deposit(gateway_of(one), source, f"failed/{copies}", terminal=terminal.address, progress=fail)
    wait_until(lambda: is_empty(one) and is_empty(two), what="what came of those to be dropped")
    assert not (terminal.root / "stopped").exists() and not (terminal.root / "failed").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_told_to_end_takes_back_what_it_has_sent(
    routers: list[RouterProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    terminal, one, _ = routers
    source = tmp_path / "source"
    source.write_bytes(os.urandom(16 * BLOCK_BYTES))
    once = list[str]()  # to take one out is atomic: several threads send

    def end(bar: Bar, moved_bytes: int) -> None:
        with contextlib.suppress(IndexError):
            once.pop()
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Bar, "__call__", end)
    key = ["--key", str(terminal.key_file("site"))]
    before = signal.getsignal(number)
    for through, place in (["--through", one.address, "--custody"], one), ([], terminal):
        staging = next(place.home.glob("**/.stageout/staging"))
        once.append("now")
        with pytest.raises(SystemExit) as ended:
            main(["put", str(source), f"overlay://{terminal.address}/told/f", *key, *through])
        assert ended.value.code == 128 + number
        wait_until(lambda staging=staging: not any(staging.iterdir()), what="what came of it to be dropped")
    assert signal.getsignal(number) == before
    assert not (terminal.root / "told/f").exists()
