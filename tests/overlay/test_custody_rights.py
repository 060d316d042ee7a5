"""The rights of who deposits at a custodian: checked before anything is taken, and nobody waits for a stranger."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stageout.core.signing import SigningKey, load_or_make_key, new_key
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import give
from stageout.overlay.key_file import read_key
from stageout.overlay.wire.capability import Credential, issue
from stageout.overlay.wire.messages import BLOCK_BYTES, Low, Message, Open, Opened, Operation, Pack, Packed, Result
from stageout.overlay.wire.packs import manifest as manifest_of
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess, custodian_for

#: A version that waits for a stranger's waits for ten minutes.
_DELIVERED_S = 60


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> SigningKey:
    return load_or_make_key("capability-key", tmp_path_factory.mktemp("issuer") / "issuer.key")


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory, issuer: SigningKey) -> Iterator[RouterProcess]:
    home = tmp_path_factory.mktemp("terminal")
    (home / "issuers").write_text(f"vo {issuer.public} /vo\n")
    with RouterProcess(home, {"STAGEOUT_ROUTER_ISSUERS": str(home / "issuers")}) as running:
        yield running


@pytest.fixture(scope="module")
def custodian(tmp_path_factory: pytest.TempPathFactory, terminal: RouterProcess) -> Iterator[RouterProcess]:
    with custodian_for(tmp_path_factory.mktemp("custodian"), [terminal]) as running:
        yield running


def gateway_of(router: RouterProcess, name: str = "site") -> Gateway:
    key = read_key(router.key_file(name))
    return Gateway("127.0.0.1", router.port, *key, timeout_s=20, digest="blake2b-128")


def capability_of(issuer: SigningKey, terminal: RouterProcess, prefix: str = "vo", **more: object) -> Credential:
    facts = {"rights": ("write",), "expires": int(time.time()) + 900, "terminals": (terminal.own_address,), **more}
    holder = new_key()
    return Credential(issue(issuer, holder.public, prefix, **facts), holder)  # type: ignore[arg-type]


def answers(router: RouterProcess, *asked: Message) -> list[Message]:
    with Channel(gateway_of(router)) as channel:
        found = []
        for message in asked:
            channel.send(message)
            found.append(channel.receive())
        return found


def opening(terminal: RouterProcess, path: str) -> Open:
    soon = int(time.time()) + 600
    return Open("c0" * 16, 1, path, 5, BLOCK_BYTES, soon, terminal=terminal.address)


def test_nothing_is_taken_into_custody_that_its_terminal_would_refuse(
    issuer: SigningKey, terminal: RouterProcess, custodian: RouterProcess
) -> None:
    """A stranger's capability, a path outside of it, another right, another signature: no byte is spooled for these."""
    mine, ask = capability_of(issuer, terminal), opening(terminal, "vo/f")
    soon = ask.expires
    made = Operation(ask.origin, 2, "mkdir", "vo/d", soon, terminal=terminal.address)
    outside = dataclasses.replace(ask, path="vo/other/f")
    for credential, asked, words in (
        (capability_of(new_key(), terminal), ask, "does not take capabilities of"),
        (capability_of(issuer, terminal, ""), ask, "does not take capabilities of"),
        (capability_of(issuer, terminal, "vo/mine"), outside, "the capability is for 'vo/mine'"),
        (capability_of(issuer, terminal, rights=("delete",)), ask, "lacks the right to write"),
        (capability_of(issuer, terminal, expires=int(time.time()) - 5), ask, "expired"),
        (capability_of(new_key(), terminal), made, "does not take capabilities of"),
    ):
        [answer] = answers(custodian, credential.signed(asked))
        assert isinstance(answer, Result), answer
        assert answer.outcome == "failed" and words in answer.reason, answer
    forged = dataclasses.replace(mine.signed(ask), path="vo/g")
    [answer] = answers(custodian, forged)
    assert isinstance(answer, Result) and "not signed by the holder" in answer.reason, answer
    with Channel(gateway_of(custodian)) as channel:
        channel.send(Low(ask.origin, 0))
        digest = channel.digest(b"small")
        pack = Pack(
            ask.origin, 3, soon, ("vo/p",), (5,), (0o644,), manifest_of([digest]), terminal=terminal.address
        )  # fmt: skip
        channel.send_pack(capability_of(new_key(), terminal).signed(pack), [digest], [b"small"])
        packed = channel.receive()
    assert isinstance(packed, Packed), packed
    assert "does not take capabilities of" in packed.reasons[0]
    assert "custody-accepted" not in custodian.log
    assert [type(one) for one in answers(custodian, mine.signed(ask))] == [Opened]


def test_a_custodian_without_issuers_says_what_it_lacks(
    issuer: SigningKey, terminal: RouterProcess, tmp_path: Path
) -> None:
    with custodian_for(tmp_path / "bare", [terminal], {"STAGEOUT_ROUTER_ISSUERS": ""}) as bare:
        [answer] = answers(bare, capability_of(issuer, terminal).signed(opening(terminal, "vo/f")))
    assert isinstance(answer, Result), answer
    assert "its administrator can name them in STAGEOUT_ROUTER_ISSUERS" in answer.reason


@pytest.mark.parametrize("signed", [False, True])
def test_a_version_waits_for_no_stranger(
    issuer: SigningKey, terminal: RouterProcess, custodian: RouterProcess, tmp_path: Path, signed: bool
) -> None:
    """Somebody has the same name in custody, for ten minutes; the file of another owner does not wait for that."""
    path = f"vo/small-{signed}" if signed else "small/f"
    (tmp_path / "theirs").write_bytes(b"theirs")
    (tmp_path / "mine").write_bytes(b"mine")
    theirs, mine = gateway_of(custodian, "small"), gateway_of(custodian)
    if signed:  # with one key, and capabilities of two holders
        theirs, mine = (
            dataclasses.replace(gateway_of(custodian), credential=capability_of(issuer, terminal)) for _ in range(2)
        )
    soon = int(time.time()) + 600
    order = Operation(
        "", 1, "publish", path, soon, parents=True, release="custody", terminal=terminal.address, copies=2
    )  # fmt: skip
    give(theirs, tmp_path / "theirs", dataclasses.replace(order, origin=f"c{1 + signed}" * 16, standby_s=600))
    give(mine, tmp_path / "mine", dataclasses.replace(order, origin=f"c{3 + signed}" * 16))
    file = terminal.root / path
    wait_until(file.exists, what="the file of the other owner", timeout_s=_DELIVERED_S)
    assert file.read_bytes() == b"mine"
    give(theirs, tmp_path / "mine", dataclasses.replace(order, origin=f"c{5 + signed}" * 16, path=f"{path}-last"))
    wait_until(Path(f"{file}-last").exists, what="another name of the first owner", timeout_s=_DELIVERED_S)


def test_versions_of_one_owner_keep_their_order(
    terminal: RouterProcess, custodian: RouterProcess, tmp_path: Path
) -> None:
    (tmp_path / "first").write_bytes(b"first")
    (tmp_path / "second").write_bytes(b"second")
    soon = int(time.time()) + 600
    order = Operation(
        "c7" * 16, 1, "publish", "small/g", soon, parents=True, release="custody", terminal=terminal.address, copies=2
    )  # fmt: skip
    small = gateway_of(custodian, "small")
    give(small, tmp_path / "first", dataclasses.replace(order, standby_s=600))
    give(small, tmp_path / "second", dataclasses.replace(order, origin="c8" * 16))
    give(small, tmp_path / "second", dataclasses.replace(order, origin="c9" * 16, path="small/h"))
    wait_until((terminal.root / "small/h").exists, what="a file that waits for nothing", timeout_s=_DELIVERED_S)
    assert not (terminal.root / "small/g").exists()
