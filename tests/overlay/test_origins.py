"""Operations belong to a key and an origin together: a peer with another key can do nothing about them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from stageout.core.signing import load_or_make_key, new_key
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import give
from stageout.overlay.copying import state
from stageout.overlay.key_file import read_key
from stageout.overlay.packs import End, Packer
from stageout.overlay.wire.capability import Credential, issue
from stageout.overlay.wire.messages import Cancel, Custody, Low, Message, Operation, Result, Status
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess, custodian_for
from tests.overlay.depositing import deposit

ORIGIN = "a0" * 16
#: Any file of these tests is delivered in this time.
_DELIVERED_S = 60


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    """A terminal that also takes capabilities for what is below ``vo``."""
    home = tmp_path_factory.mktemp("terminal")
    issuer = load_or_make_key("capability-key", home / "issuer.key")
    (home / "issuers").write_text(f"vo {issuer.public} /vo\n")
    with RouterProcess(home, {"STAGEOUT_ROUTER_ISSUERS": str(home / "issuers")}) as running:
        yield running


@pytest.fixture(scope="module")
def custodians(tmp_path_factory: pytest.TempPathFactory, terminal: RouterProcess) -> Iterator[list[RouterProcess]]:
    """Two custodians, whose key at the terminal is marked as a router's."""
    with ExitStack() as stack:
        homes = [tmp_path_factory.mktemp(name) for name in ("one", "two")]
        key = {"STAGEOUT_ROUTER_KEY": str(terminal.key_file("carrier"))}
        yield [stack.enter_context(custodian_for(home, [terminal], key)) for home in homes]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(os.urandom(5000))
    return path


def gateway_of(router: RouterProcess, name: str) -> Gateway:
    return Gateway("127.0.0.1", router.port, *read_key(router.key_file(name)), timeout_s=20)


def make_dir(seq: int, path: str, origin: str = ORIGIN, terminal: str = "", after: tuple[int, ...] = ()) -> Operation:
    expires = int(time.time()) + 3600
    return Operation(origin, seq, "mkdir", path, expires, terminal=terminal, after=after, parents=True)


def heard(router: RouterProcess, name: str, *messages: Message) -> list[str]:
    """Say messages with one key; return the outcomes that the router answers, up to that of the last message."""
    last = Status("ef" * 16, 1)
    with Channel(gateway_of(router, name)) as channel:
        for message in (*messages, last):
            channel.send(message)
        found: list[str] = []
        while True:
            answer = channel.receive()
            if isinstance(answer, Result) and answer.origin == last.origin:
                return found
            found.append(answer.outcome if isinstance(answer, Result) else type(answer).__name__)


def test_another_key_can_neither_read_nor_cancel_nor_settle_nor_forestall(terminal: RouterProcess) -> None:
    assert heard(terminal, "site", make_dir(1, "mine/1")) == ["done"]
    assert heard(terminal, "small", Status(ORIGIN, 1)) == ["unknown"]
    heard(terminal, "small", Cancel(ORIGIN, 2), make_dir(3, "small/another"), Low(ORIGIN, 2**62))
    mine = [make_dir(seq, f"mine/{seq}") for seq in (2, 3, 4)]
    assert heard(terminal, "site", *mine) == ["done"] * 3
    assert sorted(path.name for path in (terminal.root / "mine").iterdir()) == ["1", "2", "3", "4"]
    assert heard(terminal, "site", Status(ORIGIN, 1)) == ["done"]


def test_another_key_can_do_nothing_about_a_deposit(
    terminal: RouterProcess, custodians: list[RouterProcess], source: Path
) -> None:
    custodian, origin = custodians[0], "a1" * 16
    small = gateway_of(custodian, "small")
    terminal.stop()
    try:
        deposit(gateway_of(custodian, "site"), source, "kept", terminal.address, origin=origin)
        assert heard(custodian, "small", Status(origin, 1)) == ["unknown"]
        deposit(small, source, "small/kept", terminal.address, origin=origin)
        assert isinstance(state(small, origin, stop=True), Custody)
    finally:
        terminal.start()
    wait_until((terminal.root / "kept").exists, what="the file of the owner", timeout_s=_DELIVERED_S)

    def end_for(name: str) -> str:
        answer = state(gateway_of(custodian, name), origin)
        return answer.outcome if isinstance(answer, Result) else ""

    assert wait_until(lambda: end_for("site"), what="the end of the owner's file", timeout_s=_DELIVERED_S) == "done"
    assert wait_until(lambda: end_for("small"), what="that of the other", timeout_s=_DELIVERED_S) == "cancelled"
    assert heard(terminal, "small", Status(origin, 1)) == ["cancelled"], "its own operation, whichever way it came"
    assert heard(custodian, "small", Low(origin, 2**62), Status(origin, 1)) == ["stale"]
    assert end_for("site") == "done"


def test_nobody_forestalls_others_by_way_of_their_custodian(
    terminal: RouterProcess, custodians: list[RouterProcess], source: Path
) -> None:
    """The other key is first, with an origin that it has learned: a file, and small files in a pack."""
    custodian, origin = custodians[0], "a2" * 16
    for name, folder in (("small", "small/forestalled"), ("site", "forestalled")):
        ends: list[End] = []
        key = gateway_of(custodian, name)
        deposit(key, source, f"{folder}/file", terminal.address, origin=origin)
        packs = "a3" * 16
        said = lambda _, end, ends=ends: ends.append(end)  # type: ignore[misc]  # noqa: E731
        with Packer(key, said, terminal=terminal.address, origin=packs) as packer:
            packer.add("packed", source, f"{folder}/packed")
            packer.finish()
        assert not isinstance(ends[0], Exception), ends
        for path in ("file", "packed"):
            there = terminal.root / folder / path
            wait_until(there.exists, what=f"{folder}/{path}", timeout_s=_DELIVERED_S)
            assert there.read_bytes() == source.read_bytes()


@pytest.mark.parametrize("signed", [False, True])
def test_what_comes_by_two_custodians_is_one_operation(
    terminal: RouterProcess, custodians: list[RouterProcess], source: Path, signed: bool
) -> None:
    """The first delivers; the other one hears so from the terminal, although it was deposited with an ordinary key."""
    path, origin = f"vo/twice-{signed}", f"a{4 + signed}" * 16
    expires = int(time.time()) + 600
    order = Operation(origin, 1, "publish", path, expires, parents=True, release="custody", terminal=terminal.address)
    order = replace(order, copies=2)
    credential = None
    if signed:
        issuer, holder = load_or_make_key("capability-key", terminal.home / "issuer.key"), new_key()
        names = (terminal.own_address,)
        credential = Credential(issue(issuer, holder.public, "vo", ("write",), expires, terminals=names), holder)
    for custodian, standby_s in zip(custodians, (0, 600)):
        key = replace(gateway_of(custodian, "site"), credential=credential)
        give(key, source, replace(order, standby_s=standby_s))

    def ends() -> list[object]:
        answers = [state(gateway_of(custodian, "site"), origin) for custodian in custodians]
        return [answer for answer in answers if isinstance(answer, Result)]

    found = wait_until(lambda: ends() if len(ends()) == 2 else [], what="both ends", timeout_s=_DELIVERED_S)
    assert found == [Result(origin, 1, "done", generation=1)] * 2
    assert (terminal.root / path).read_bytes() == source.read_bytes()
