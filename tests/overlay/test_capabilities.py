"""Capabilities at a real router: what their holder may write; whoever passes a message on may write nothing."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stageout.cli.main import main
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.signing import load_or_make_key, new_key
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import put
from stageout.overlay.fetch import get
from stageout.overlay.key_file import read_credential, read_key
from stageout.overlay.operations import Session
from stageout.overlay.packs import End, Packer, SmallPut
from stageout.overlay.wire.capability import Credential, issue
from stageout.overlay.wire.messages import (
    BLOCK_BYTES,
    Answer,
    Attach,
    Cancel,
    Custody,
    Get,
    GetPack,
    NoSpace,
    Open,
    Opened,
    Operation,
    Pack,
    Packed,
    Result,
    Stat,
)
from tests.harness.router import RouterProcess, custodian_for


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    """One that insists on capabilities, and trusts an issuer for what is below vo."""
    home = tmp_path_factory.mktemp("capabilities")
    issuer = load_or_make_key("capability-key", home / "issuer.key")
    (home / "issuers").write_text(f"# who\nvo {issuer.public} /vo\n")
    settings = {"STAGEOUT_ROUTER_ISSUERS": str(home / "issuers"), "STAGEOUT_ROUTER_CAPABILITIES": "true"}
    with RouterProcess(home, settings) as running:
        yield running


@pytest.fixture
def gateway(router: RouterProcess) -> Gateway:
    """With the key of a custodian, which may write nothing by itself."""
    return Gateway("127.0.0.1", router.port, *read_key(router.key_file("hop")), timeout_s=20)


def granted(router: RouterProcess, gateway: Gateway, prefix: str = "vo/alice", **limits: object) -> Gateway:
    issuer = load_or_make_key("capability-key", router.home / "issuer.key")
    holder = new_key()
    facts = {"rights": ("write",), "expires": int(time.time()) + 600, "terminals": (router.own_address,), **limits}
    text = issue(issuer, holder.public, prefix, **facts)  # type: ignore[arg-type]
    return dataclasses.replace(gateway, credential=Credential(text, holder))


def refused(words: str, gateway: Gateway, source: Path, path: str) -> None:
    with pytest.raises(TransferFailure, match=words) as caught:
        put(gateway, source, path)
    assert caught.value.kind is ErrorClass.PERMISSION_DENIED


def test_a_holder_writes_below_the_prefix_and_nowhere_else(
    router: RouterProcess, gateway: Gateway, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"x" * (BLOCK_BYTES + 5))
    alice = granted(router, gateway)
    done = put(alice, source, "vo/alice/d/f")
    assert done.digest_name == "blake2b-128"
    assert (router.root / "vo/alice/d/f").read_bytes() == source.read_bytes()
    refused("takes nothing without a capability", gateway, source, "vo/alice/g")
    refused("the capability is for 'vo/alice'", alice, source, "vo/bob/f")
    refused("does not take capabilities of", granted(router, gateway, "other"), source, "other/f")
    refused("expired", granted(router, gateway, expires=int(time.time()) - 5), source, "vo/alice/g")
    refused("lacks the right to write", granted(router, gateway, rights=("delete",)), source, "vo/alice/g")
    refused("bytes at once", granted(router, gateway, lot_bytes=BLOCK_BYTES), source, "vo/alice/g")
    with Session(alice) as session, pytest.raises(TransferFailure, match="lacks the right to delete"):
        session.delete("vo/alice/d/f")
        session.push()
    with Session(granted(router, gateway, rights=("write", "delete"))) as session:
        session.rename("vo/alice/d/f", "vo/alice/h")
        session.push()
    assert (router.root / "vo/alice/h").exists()
    assert not (router.root / "vo/alice/g").exists()


def _heard(gateway: Gateway, message: Open | Operation | Stat) -> object:
    with Channel(gateway) as channel:
        channel.send(message)
        return channel.receive()


def test_a_custodian_can_send_what_it_was_given_and_nothing_else(router: RouterProcess, gateway: Gateway) -> None:
    alice = granted(router, gateway, rights=("write", "delete"))
    assert alice.credential is not None
    soon = int(time.time()) + 600
    given = alice.credential.signed(Operation("0b" * 16, 1, "mkdir", "vo/alice/made", soon, parents=True))
    assert isinstance(given, Operation)
    for changes in (
        {"path": "vo/alice/other"},
        {"kind": "delete"},
        {"seq": 2},
        {"mode": 0o777},
        {"priority": 1},
        {"expires": soon + 1},
        {"signature": ""},
    ):
        answer = _heard(gateway, dataclasses.replace(given, **changes))  # type: ignore[arg-type]
        assert isinstance(answer, Result), answer
        assert (answer.outcome, "not signed by the holder" in answer.reason) == ("failed", True), changes
    answer = _heard(gateway, given)
    assert isinstance(answer, Result), answer
    assert answer.outcome == "done"
    assert (router.root / "vo/alice/made").is_dir()
    assert not (router.root / "vo/alice/other").exists()


def test_what_was_signed_for_one_router_is_not_done_at_another(
    router: RouterProcess, gateway: Gateway, tmp_path: Path
) -> None:
    """Both trust the same issuer; somebody has overheard a DELETE at one, and says it at the other."""
    trusting = {name: value for name, value in router.environment.items() if "ISSUERS" in name}
    with RouterProcess(tmp_path / "other", trusting) as other:
        for one in (router, other):
            (one.root / "vo/frank").mkdir(parents=True)
            (one.root / "vo/frank/f").write_bytes(b"x")
        there = Gateway("127.0.0.1", other.port, *read_key(other.key_file("hop")), timeout_s=20)
        frank = granted(router, gateway, "vo/frank", rights=("write", "delete", "read"))
        assert frank.credential is not None
        delete = Operation("1a" * 16, 1, "delete", "vo/frank/f", int(time.time()) + 600)
        signed = frank.credential.signed(delete)
        answers = [_heard(one, signed) for one in (there, gateway)]
        told = [(one.outcome, one.reason) for one in answers if isinstance(one, Result)]
        assert told[0] == ("failed", f"the capability is for {router.own_address}, not for {other.own_address}")
        assert told[1][0] == "done"
        assert [(one.root / "vo/frank/f").exists() for one in (router, other)] == [False, True]
        looked = _heard(dataclasses.replace(there, credential=frank.credential), Stat("vo/frank/f"))
        assert isinstance(looked, Answer) and f"not for {other.own_address}" in looked.message
        older = granted(router, gateway, "vo/frank", terminals=())
        refused("older stageout has issued it: its issuer has to upgrade", older, Path(__file__), "vo/frank/g")


def test_signed_bytes_come_with_a_digest_that_nobody_can_forge(router: RouterProcess, gateway: Gateway) -> None:
    """Else a custodian inverts the faster one, and other bytes fit the manifest that was signed."""
    alice, soon = granted(router, gateway), int(time.time()) + 600
    assert alice.credential is not None
    ask = alice.credential.signed(Open("0e" * 16, 1, "vo/alice/forged", BLOCK_BYTES, BLOCK_BYTES, soon))
    with Channel(gateway) as plain, Channel(alice) as control, Channel(gateway) as data:
        assert (plain.digest_name, control.digest_name) == ("xxh3-128", "blake2b-128")
        plain.send(ask)
        answer = plain.receive()
        assert isinstance(answer, Result), answer
        assert (answer.outcome, "demands the digest blake2b-128" in answer.reason) == ("failed", True)
        pack = Pack("0f" * 16, 1, soon, ("vo/alice/p",), (1,), (0o644,), "")
        plain.send_pack(alice.credential.signed(pack), [plain.digest(b"x")], [b"x"])
        packed = plain.receive()
        assert isinstance(packed, Packed), packed
        assert "demands the digest blake2b-128" in packed.reasons[0]
        control.send(ask)
        opened = control.receive()
        assert isinstance(opened, Opened), opened
        data.send(Attach(opened.tid))
        with pytest.raises(TransferFailure, match="come with blake2b-128"):
            data.receive()
    assert not (router.root / "vo/alice/p").exists()


def test_reading_needs_the_right_to_read(router: RouterProcess, gateway: Gateway, tmp_path: Path) -> None:
    """The key of this connection is for no name at all."""
    (router.root / "vo/erin").mkdir(parents=True, exist_ok=True)
    (router.root / "vo/erin/f").write_bytes(b"12345")
    erin = granted(router, gateway, "vo/erin", rights=("read",))
    with Session(erin) as session:
        assert session.stat("vo/erin/f").size_bytes == 5
        assert [entry.name for entry in session.entries("vo/erin")] == ["f"]
    assert get(erin, "vo/erin/f", tmp_path / "f", priority=7) == 5, "with as much as is allowed"
    with Channel(erin) as channel, pytest.raises(TransferFailure, match="no higher priority than 0"):
        channel.send(Get("vo/erin/f", priority=1))
        channel.receive()
    for who, path, words in (
        (erin, "vo/alice", "the capability is for 'vo/erin'"),
        (granted(router, gateway, "vo/erin"), "vo/erin/f", "is not for"),
        (granted(router, gateway, "vo/erin", rights=("read",), expires=5), "vo/erin/f", "expired"),
    ):
        with Session(who) as session, pytest.raises(TransferFailure, match=words) as caught:
            session.stat(path)
        assert caught.value.kind is ErrorClass.PERMISSION_DENIED
        with pytest.raises(TransferFailure, match=words):
            get(who, path, tmp_path / "g")
    with Channel(erin) as channel:
        channel.send(GetPack(("vo/erin/f", "vo/erin/g")))
        assert [bytes(data) for data in channel.receive_pack(2)[1]] == [b"12345", b""]
        channel.send(GetPack(("vo/erin/f", "vo/alice/f")))
        with pytest.raises(TransferFailure, match="the capability is for 'vo/erin'"):
            channel.receive_pack(2)
    with Session(erin) as session, pytest.raises(TransferFailure, match="lacks the right to write"):
        session.mkdir("vo/erin/d")
        session.push()


def test_a_question_holds_on_its_own_connection_only(router: RouterProcess, gateway: Gateway) -> None:
    """A peer that has heard it cannot ask again."""
    erin = granted(router, gateway, "vo", rights=("read",))
    assert erin.credential is not None
    answer = _heard(gateway, erin.credential.signed(Stat("vo"), "0f" * 16))
    assert isinstance(answer, Answer)
    assert "not signed by the holder" in answer.message


def test_a_lot_bounds_what_is_under_way_at_once(router: RouterProcess, gateway: Gateway) -> None:
    alice = granted(router, gateway, lot_bytes=10 * BLOCK_BYTES)
    opens = [
        Open(f"{n:032x}", 1, f"vo/alice/{n}", 4 * BLOCK_BYTES, BLOCK_BYTES, int(time.time()) + 60) for n in (1, 2, 3)
    ]
    assert [type(_heard(alice, ask)) for ask in opens] == [Opened, Opened, NoSpace]
    assert type(_heard(alice, opens[0])) is Opened, "the same once more"


def test_the_command_makes_one(
    router: RouterProcess, gateway: Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    issuer, key = str(router.home / "issuer.key"), router.home / "alice.key"
    assert main(["capability", issuer, "--public"]) == 0
    assert capsys.readouterr().out.strip() in (router.home / "issuers").read_text()
    assert main(["capability", issuer, "--prefix", "/vo/carol"]) == 64
    assert "--terminal is missing" in capsys.readouterr().err
    made = ["capability", issuer, "--prefix", "/vo/carol", "--lot", "1G", "--days", "1", "--terminal"]
    assert main([*made, router.own_address.upper()]) == 0
    key.write_text(router.key_file("hop").read_text() + capsys.readouterr().out)
    source = tmp_path / "source"
    source.write_bytes(b"from carol")
    assert main(["put", "--key", str(key), str(source), f"overlay://127.0.0.1:{router.port}/vo/carol/f"]) == 0
    assert (router.root / "vo/carol/f").read_bytes() == b"from carol"
    key.write_text("hop secret\ncapability broken\n")
    with pytest.raises(TransferFailure, match="its capability"):
        read_credential(key)


def test_a_real_custodian_delivers_with_the_rights_of_the_origin(
    router: RouterProcess, gateway: Gateway, tmp_path: Path
) -> None:
    """Its own key may write nothing at the terminal; what has no capability ends there."""
    source = tmp_path / "source"
    source.write_bytes(b"y" * (2 * BLOCK_BYTES + 1))
    with custodian_for(tmp_path / "custodian", [router]) as custodian:
        there = dataclasses.replace(granted(router, gateway), port=custodian.port)
        put(there, source, "vo/alice/by-custodian", terminal=router.address)
        assert (router.root / "vo/alice/by-custodian").read_bytes() == source.read_bytes()
        site = Gateway("127.0.0.1", custodian.port, *read_key(custodian.key_file("site")), timeout_s=20)
        with pytest.raises(TransferFailure, match="takes nothing without a capability"):
            put(site, source, "vo/alice/by-itself", terminal=router.address)
        (tmp_path / "small").write_bytes(b"small")
        ends: list[End] = []
        for gave in (there, site):
            with Packer(gave, lambda key, end: ends.append(end), terminal=router.address) as packer:
                packer.add("small", tmp_path / "small", "vo/alice/packed")
                packer.finish()
        signed, unsigned = ends
        assert isinstance(signed, SmallPut), signed
        assert signed.generation == 1
        assert isinstance(unsigned, TransferFailure)
        assert "takes nothing without a capability" in unsigned.message
        assert (router.root / "vo/alice/packed").read_bytes() == b"small"
    assert not (router.root / "vo/alice/by-itself").exists()


def test_a_signed_operation_does_not_wait_for_what_ended_at_its_custodian_alone(
    router: RouterProcess, gateway: Gateway, tmp_path: Path
) -> None:
    """Its sender gave up while the data came: the terminal has never heard of that, and the edge is signed."""
    alice = granted(router, gateway, rights=("write", "delete"))
    assert alice.credential is not None
    soon, origin, by_way = int(time.time()) + 600, "0c" * 16, router.address
    with custodian_for(tmp_path / "custodian", [router], {"STAGEOUT_ROUTER_KEY": str(router.key_file("hop"))}) as by:
        site = read_key(by.key_file("site"))
        through = Gateway("127.0.0.1", by.port, *site, timeout_s=20, digest="blake2b-128")
        opening = Open(origin, 1, "vo/alice/never", 5, BLOCK_BYTES, soon, router.address)
        later = Operation(origin, 2, "mkdir", "vo/alice/behind", soon, parents=True, after=(1,), terminal=by_way)
        with Channel(through) as channel:
            channel.send(alice.credential.signed(opening))
            assert isinstance(channel.receive(), Opened)
            channel.send(Cancel(origin, 1))
            ended = channel.receive()
            assert isinstance(ended, Result)
            assert ended.outcome == "cancelled"
            channel.send(alice.credential.signed(later))
            assert isinstance(channel.receive(), Custody)
            done = channel.receive()
        assert isinstance(done, Result)
        assert (done.seq, done.outcome) == (2, "done")
    assert (router.root / "vo/alice/behind").is_dir()
