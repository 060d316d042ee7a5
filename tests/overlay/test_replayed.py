"""Signed operations that come once more, with another key: they are the same operations, and change nothing again."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from stageout.core.signing import load_or_make_key, new_key
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import give, put
from stageout.overlay.key_file import read_key
from stageout.overlay.wire.capability import Credential, issue
from stageout.overlay.wire.messages import (
    BLOCK_BYTES,
    Attach,
    Cancel,
    Low,
    Message,
    Open,
    Operation,
    Pack,
    Packed,
    Result,
    Status,
)
from stageout.overlay.wire.packs import manifest as manifest_of
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess, custodian_for

_DELIVERED_S = 60
#: Of the holder of the capability; of another router, which has seen all that the holder said.
_OWN, _FOREIGN, _RELAY = "site", "small", "carrier"


@dataclass(frozen=True)
class Place:
    """A terminal that takes capabilities for what is below ``vo``, and one of these."""

    terminal: RouterProcess
    credential: Credential

    def gateway(self, name: str, router: RouterProcess | None = None) -> Gateway:
        """A connection with a key, and without the capability; digests as signed operations need them."""
        router = router or self.terminal
        key = read_key(router.key_file(name))
        return Gateway("127.0.0.1", router.port, *key, timeout_s=20, digest="blake2b-128")

    def holder(self, name: str = _OWN, router: RouterProcess | None = None) -> Gateway:
        """The same, which signs."""
        return dataclasses.replace(self.gateway(name, router), credential=self.credential)

    def said(self, name: str, *messages: Message, router: RouterProcess | None = None) -> list[Message]:
        """Say messages with a key, one after the other. Return the answer to each."""
        with Channel(self.gateway(name, router)) as channel:
            answers = []
            for message in messages:
                channel.send(message)
                answers.append(channel.receive())
            return answers

    def ends(self, name: str, *messages: Message, router: RouterProcess | None = None) -> list[str]:
        """The outcomes of operations, or what else was answered."""
        answers = self.said(name, *messages, router=router)
        return [one.outcome if isinstance(one, Result) else type(one).__name__ for one in answers]


def order(seq: int, kind: str, path: str, origin: str, **more: object) -> Operation:
    return Operation(origin, seq, kind, path, int(time.time()) + 600, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    home = tmp_path_factory.mktemp("terminal")
    issuer, holder = load_or_make_key("capability-key", home / "issuer.key"), new_key()
    (home / "issuers").write_text(f"vo {issuer.public} /vo\n")
    with RouterProcess(home, {"STAGEOUT_ROUTER_ISSUERS": str(home / "issuers")}) as terminal:
        (terminal.root / "vo").mkdir()
        names, rights = (terminal.own_address,), ("write", "delete", "read")
        text = issue(issuer, holder.public, "vo", rights, int(time.time()) + 3600, terminals=names)
        yield Place(terminal, Credential(text, holder))


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("other", [_FOREIGN, _RELAY])
def test_a_relay_that_repeats_a_delete_removes_nothing(place: Place, other: str, restart: bool) -> None:
    file, origin = place.terminal.root / "vo/again", f"b{int(restart)}{other[0].encode().hex()}".ljust(32, "0")
    file.write_bytes(b"old")
    delete = place.credential.signed(order(1, "delete", "vo/again", origin))
    assert place.ends(_OWN, delete) == ["done"]
    file.write_bytes(b"made since")
    if restart:
        place.terminal.stop()
        place.terminal.start()
    assert place.ends(other, delete) == ["done"], "what became of it the first time"
    assert file.read_bytes() == b"made since"


def test_a_relay_that_repeats_a_put_brings_no_old_version_back(place: Place) -> None:
    """It has the OPEN, the blocks and the PUBLISH of the earlier one."""
    origin, path, old = "b2" * 16, "vo/versions", b"old" * 1000
    opening = Open(origin, 1, path, len(old), BLOCK_BYTES, int(time.time()) + 600)
    opening = place.credential.signed(opening)

    def whole(name: str) -> Message:
        with Channel(place.gateway(name)) as control:
            control.send(opening)
            opened = control.receive()
            if isinstance(opened, Result):
                return opened
            digests = [control.digest(old)]
            ask = order(1, "publish", path, origin, size_bytes=len(old), blocks=1, manifest=manifest_of(digests))
            with Channel(place.gateway(name)) as data:
                data.send(Attach(opened.tid))  # type: ignore[attr-defined]
                data.send_block(opened.tid, 0, old)  # type: ignore[attr-defined]
                control.send(place.credential.signed(dataclasses.replace(ask, expires=opening.expires)))
                while not isinstance(answer := control.receive(), Result):
                    pass
                return answer

    first = whole(_OWN)
    assert isinstance(first, Result) and first.outcome == "done", first
    (place.terminal.home / "new").write_bytes(b"new")
    put(place.holder(), place.terminal.home / "new", path)
    assert whole(_RELAY) == first
    assert (place.terminal.root / path).read_bytes() == b"new"


def test_a_relay_that_repeats_a_pack_brings_no_old_version_back(place: Place) -> None:
    origin, soon, data = "b3" * 16, int(time.time()) + 600, b"small and old"
    file = place.terminal.root / "vo/packed"

    def packed(name: str) -> Packed:
        with Channel(place.gateway(name)) as channel:
            digest = channel.digest(data)
            pack = Pack(origin, 1, soon, ("vo/packed",), (len(data),), (0o644,), manifest_of([digest]))
            channel.send(Low(origin, 0))
            channel.send_pack(place.credential.signed(pack), [digest], [data])
            answer = channel.receive()
            assert isinstance(answer, Packed), answer
            return answer

    first = packed(_OWN)
    assert file.read_bytes() == data
    file.write_bytes(b"made since")
    assert packed(_RELAY) == first
    assert file.read_bytes() == b"made since"


def test_custodian_and_owner_bring_one_order(place: Place, tmp_path: Path) -> None:
    """Without any attacker: the owner does not wait for the custodian any longer, and goes to the terminal himself."""
    origin, source = "b4" * 16, tmp_path / "source"
    source.write_bytes(b"of both")
    settings = {
        "STAGEOUT_ROUTER_ISSUERS": str(place.terminal.home / "issuers"),
        "STAGEOUT_ROUTER_KEY": str(place.terminal.key_file(_RELAY)),
    }
    by_custodian = order(1, "publish", "vo/both", origin, parents=True, release="custody", copies=1)
    with custodian_for(tmp_path / "custodian", [place.terminal], settings) as custodian:
        deposit = dataclasses.replace(by_custodian, terminal=place.terminal.address)
        give(place.holder(router=custodian), source, deposit)
        file = place.terminal.root / "vo/both"
        wait_until(file.exists, what="the custodian's delivery", timeout_s=_DELIVERED_S)

        def settled() -> bool:
            return place.ends(_OWN, Status(origin, 1), router=custodian) == ["done"]

        wait_until(settled, what="the end at the custodian", timeout_s=_DELIVERED_S)
        file.write_bytes(b"made since")
        again = give(place.holder(), source, by_custodian)
        assert file.read_bytes() == b"made since"
        assert again is not None


def test_the_same_number_of_two_holders_is_two_operations(place: Place) -> None:
    """Nobody blocks an operation by sending another one with its digits first."""
    origin, soon = "b5" * 16, int(time.time()) + 600
    issuer, other = load_or_make_key("capability-key", place.terminal.home / "issuer.key"), new_key()
    names = (place.terminal.own_address,)
    text = issue(issuer, other.public, "vo/other", ("write",), soon, terminals=names)
    first = Credential(text, other).signed(Operation(origin, 1, "mkdir", "vo/other", soon))
    mine = place.credential.signed(order(1, "mkdir", "vo/mine", origin))
    assert place.ends(_RELAY, first, mine) == ["done", "done"]
    assert (place.terminal.root / "vo/mine").is_dir()


def test_who_has_repeated_an_operation_neither_cancels_nor_settles_others(place: Place) -> None:
    """The key that brought the first operation of an origin may, as before, and hears the results by its digits."""
    origin = "b6" * 16
    made, later, last = (place.credential.signed(order(seq, "mkdir", f"vo/kept-{seq}", origin)) for seq in (1, 2, 3))
    assert place.ends(_OWN, made) == ["done"]
    assert place.ends(_FOREIGN, made, Status(origin, 1)) == ["done", "done"]
    with Channel(place.gateway(_FOREIGN)) as channel:
        channel.send(Cancel(origin, 2))
        channel.send(Low(origin, 2**40))
        channel.send(Status(origin, 1))
        while (answer := channel.receive()) != Result(origin, 1, "done", generation=1):
            assert isinstance(answer, Result) and answer.seq == 2, answer
    assert place.ends(_OWN, later) == ["done"]
    with Channel(place.gateway(_OWN)) as channel:
        channel.send(Cancel(origin, 3))
        channel.send(last)
        answer = channel.receive()
    assert isinstance(answer, Result) and answer.outcome == "cancelled", answer
    assert [(place.terminal.root / f"vo/kept-{seq}").is_dir() for seq in (1, 2, 3)] == [True, True, False]


def test_what_was_cancelled_before_it_came_is_not_done(place: Place) -> None:
    origin = "b7" * 16
    never = place.credential.signed(order(1, "mkdir", "vo/never", origin))
    with Channel(place.gateway(_OWN)) as channel:
        channel.send(Cancel(origin, 1))
        channel.send(never)
        answer = channel.receive()
    assert isinstance(answer, Result) and answer.outcome == "cancelled", answer
    assert not (place.terminal.root / "vo/never").exists()
    assert place.ends(_RELAY, never) == ["cancelled"]
