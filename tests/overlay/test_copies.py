"""Copies between two real routers, commanded from elsewhere: with his right who commands, and never half a file."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stageout.cli.main import main
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.signing import new_key
from stageout.overlay import copying
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import put
from stageout.overlay.copying import Commanded, Unreached, cancel, command, copy, follow, state
from stageout.overlay.key_file import read_key
from stageout.overlay.operations import Session
from stageout.overlay.wire import messages, warrant
from stageout.overlay.wire.capability import Credential, issue
from stageout.overlay.wire.messages import BLOCK_BYTES, Copying, Open, Operation, Result
from stageout.overlay.wire.warrant import Warrant
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess, relay

SIZE_BYTES = 3 * BLOCK_BYTES + 7


class Place:
    """Two routers with trees, the first of which has the second as its neighbour, and shows it a key for no names."""

    def __init__(self, home: Path, more: dict[str, str]) -> None:
        self.second = RouterProcess(home / "second", {"STAGEOUT_ROUTER_WORKERS": "1"})
        self._home, self._more = home, more

    def __enter__(self) -> Place:
        self.issuer = new_key()
        (self._home / "issuers").write_text(f"cert {self.issuer.public} /certified\n")
        self.second.environment["STAGEOUT_ROUTER_ISSUERS"] = str(self._home / "issuers")
        self.second.__enter__()
        certified = self._home / "first/root/certified"
        certified.mkdir(parents=True)
        (certified / "f").write_bytes(b"read with a capability")
        settings = {
            "STAGEOUT_ROUTER_NEIGHBOURS": self.second.address,
            "STAGEOUT_ROUTER_KEY": str(self._home / "first/hop.key"),
            "STAGEOUT_ROUTER_WORKERS": "1",
            "STAGEOUT_ROUTER_ISSUERS": str(self._home / "issuers"),
            **self._more,
        }
        self.first = RouterProcess(self._home / "first", settings)
        self.first.__enter__()
        (self.first.root / "f").write_bytes(os.urandom(SIZE_BYTES))
        (self.first.root / "f").chmod(0o640)
        return self

    def __exit__(self, *exception: object) -> None:
        self.first.stop()
        self.second.stop()

    def copied(self, path: str = "new/f") -> bool:
        return (self.second.root / path).read_bytes() == (self.first.root / "f").read_bytes()


def gateway_of(router: RouterProcess, name: str = "site") -> Gateway:
    return Gateway("127.0.0.1", router.port, *read_key(router.key_file(name)), timeout_s=20)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    home = tmp_path_factory.mktemp("copies")
    armed = " ".join(f"{death}@{home / death}" for death in DEATHS)
    with Place(home, {"STAGEOUT_FAULTS": armed, "STAGEOUT_ROUTER_DELIVERIES": "2"}) as place:
        yield place


@pytest.fixture
def place(shared: Place) -> Place:
    for router in (shared.first, shared.second):
        if not router.pid:
            router.start()
    return shared


def commanded(place: Place, path: str = "new/f", name: str = "site") -> Commanded:
    return command(gateway_of(place.first, name), "f", gateway_of(place.second, name), path)


def ended(place: Place, given: Commanded) -> str:
    answer = state(gateway_of(place.first), given.origin)
    return answer.outcome if isinstance(answer, Result) else ""


def _refused(kind: ErrorClass, words: str, call: Callable[[], object]) -> None:
    with pytest.raises(TransferFailure, match=words) as caught:
        call()
    assert caught.value.kind is kind


def test_the_bytes_go_from_router_to_router(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "carry", None)
    seen: list[int] = []
    done = copy(gateway_of(place.first), "f", gateway_of(place.second), "new/f", progress=seen.append)
    assert (done.size_bytes, done.generation, done.carried) == (SIZE_BYTES, 1, "")
    assert place.copied()
    assert (place.second.root / "new/f").stat().st_mode & 0o777 == 0o640


def test_who_went_away_asks_later_and_a_dead_first_router_goes_on(place: Place) -> None:
    given = _waiting(place)
    assert isinstance(state(gateway_of(place.first), given.origin), Copying)
    place.first.kill()
    place.first.start()
    place.second.start()
    wait_until(lambda: ended(place, given) == "done", what="the copy")
    assert place.copied("later/f")
    place.first.kill()
    place.first.start()
    assert ended(place, given) == "done", "results are kept"


def _waiting(place: Place) -> Commanded:
    """A copy that was commanded before its target went down: its warrant has that store's epoch."""
    given = _prepared(place, "later/f")
    place.second.stop()
    answer = _told(place, given)
    assert isinstance(answer, messages.Custody)
    return Commanded(gateway_of(place.first), ((),), given.origin, given.path, given.size_bytes, given.expires)


def _prepared(place: Place, to: str, **more: object) -> messages.Copy:
    with Session(gateway_of(place.first)) as session:
        found = session.look_up("f")
    with Session(gateway_of(place.second)) as session:
        store = session.look_up(to).store
    wanted = Warrant("site", "hop", store, secrets.token_hex(16), 1, to, SIZE_BYTES, int(time.time()) + 60, 0o640)
    wanted = dataclasses.replace(wanted, **more)  # type: ignore[arg-type]
    text = warrant.write(wanted, gateway_of(place.second).secret)
    return messages.Copy(
        wanted.origin, 1, "f", found.generation, place.second.address, to, SIZE_BYTES, 0o640, wanted.expires, text
    )


def _told(place: Place, message: messages.Copy) -> messages.Message:
    with Channel(gateway_of(place.first)) as channel:
        channel.send(message)
        return channel.receive()


DEATHS = ("copy-take=kill-before", "copy-take=kill-after", "copy-settle=kill-before", "copy-settle=kill-after")


def test_killed_at_any_step_the_copy_is_made_once_and_whole(place: Place) -> None:
    for number, death in enumerate(DEATHS):
        (place.first.home.parent / death).touch()
        ask = _prepared(place, f"dead/{number}")
        with contextlib.suppress(TransferFailure):
            _told(place, ask)
        place.first.wait_for_end()
        place.first.start()
        given = Commanded(gateway_of(place.first), ((),), ask.origin, ask.path, SIZE_BYTES, ask.expires)
        if death == "copy-take=kill-before":
            assert ended(place, given) == "unknown"
            _told(place, ask)
        assert follow(given).generation == 1
        assert place.copied(f"dead/{number}")


def test_cancelled_in_the_middle_nothing_is_to_be_seen(place: Place) -> None:
    given = _waiting(place)
    assert cancel(given).outcome == "cancelled", "the second router never heard of it"
    place.second.start()
    other = _prepared(place, "stopped/f")
    _told(place, other)
    given = Commanded(gateway_of(place.first), ((),), other.origin, other.path, SIZE_BYTES, other.expires)
    outcome = cancel(given).outcome
    assert outcome in ("cancelled", "done")
    assert (place.second.root / "stopped/f").exists() == (outcome == "done")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"path": "elsewhere"}, "is for another path"),
        ({"size_bytes": 5}, "is for another size_bytes"),
        ({"bearer": "carrier"}, "is for the router 'carrier', not for 'hop'"),
        ({"store": "0" * 32}, "is for another router"),
        ({"mode": 0o777}, "is for another mode"),
        ({"key": "small"}, "only for what is below 'small'"),
        ({"key": "nobody"}, "was not signed with a key 'nobody'"),
    ],
)
def test_a_warrant_is_for_nothing_else(place: Place, changes: dict[str, object], words: str) -> None:
    ask = _prepared(place, "small-not/f", **changes)
    given = Commanded(gateway_of(place.first), ((),), ask.origin, ask.path, SIZE_BYTES, ask.expires)
    assert isinstance(_told(place, ask), messages.Custody)
    _refused(ErrorClass.PERMISSION_DENIED, words, lambda: follow(given))
    assert not (place.second.root / "small-not").exists()


def test_a_warrant_signs_no_other_operation_and_no_forger_helps(place: Place) -> None:
    ask = _prepared(place, "w/f")
    forged = warrant.write(dataclasses.replace(warrant.read(ask.warrant)[0], path="w/g"), b"another secret key")
    for message in (
        Operation(ask.origin, 1, "delete", "new/f", ask.expires, warrant=ask.warrant),
        Operation(ask.origin, 1, "rename", "w/f", ask.expires, target="x", warrant=ask.warrant),
        Open(ask.origin, 1, "w/g", SIZE_BYTES, BLOCK_BYTES, ask.expires, warrant=forged),
        Open(ask.origin, 1, "w/f", SIZE_BYTES, BLOCK_BYTES, ask.expires),
    ):
        with Channel(gateway_of(place.second, "hop")) as channel:
            channel.send(message)
            answer = channel.receive()
        assert isinstance(answer, Result), answer
        assert answer.outcome == "failed"


def test_who_may_read_here_and_write_there(place: Place) -> None:
    _refused(ErrorClass.PERMISSION_DENIED, "only for what is below 'small'", lambda: commanded(place, name="small"))
    ask = _prepared(place, "r/f")
    with Channel(gateway_of(place.first, "small")) as channel:
        channel.send(ask)
        answer = channel.receive()
    assert isinstance(answer, Result)
    assert "only for what is below 'small'" in answer.reason
    _refused(
        ErrorClass.PERMISSION_DENIED,
        "only for what is below 'small'",
        lambda: copy(gateway_of(place.first), "f", gateway_of(place.second, "small"), "other/f"),
    )
    holder = new_key()
    both = place.first.own_address, place.second.own_address
    text = issue(place.issuer, holder.public, "certified", ("write", "read"), int(time.time()) + 60, terminals=both)
    second = dataclasses.replace(gateway_of(place.second, "hop"), credential=Credential(text, holder))
    assert copy(gateway_of(place.first), "f", second, "certified/f").carried == ""
    assert place.copied("certified/f")
    first = dataclasses.replace(gateway_of(place.first, "hop"), credential=second.credential)
    copy(first, "certified/f", second, "certified/g")
    assert (place.second.root / "certified/g").read_bytes() == b"read with a capability"
    _refused(
        ErrorClass.PERMISSION_DENIED, "the capability is for 'certified'", lambda: command(first, "f", second, "f")
    )
    _refused(
        ErrorClass.PERMISSION_DENIED, "the capability is for 'certified'",
        lambda: copy(gateway_of(place.first), "f", second, "other/f"),
    )  # fmt: skip


def test_a_first_router_without_a_way_has_the_bytes_carried(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = ["--key", str(place.first.key_file("site"))]
    first, second = f"overlay://{place.first.address}", f"overlay://{place.second.address}"
    with RouterProcess(tmp_path / "third") as third:
        done = copy(gateway_of(place.first), "f", gateway_of(third), "f")
        assert done.carried == f"{place.first.address} knows no route to {third.address}"
        assert (third.root / "f").stat().st_size == SIZE_BYTES
        with relay(tmp_path / "between", [place.first, place.second, third]) as between:
            by = ["--routes", between.address]
            assert main(["copy", f"overlay://{third.address}/f", f"{second}/by/", *key, *by]) == 0
            assert "carried through this machine" in capsys.readouterr().out
            for command_line in (
                ["mkdir", f"{second}/made"], ["ls", f"{second}/made"], ["stat", f"{second}/by/f"],
                ["mv", f"{second}/by/f", f"{second}/made/g"], ["rm", f"{second}/made/g"],
            ):  # fmt: skip
                assert main([*command_line, *key, *by]) == 0
    assert main(["copy", f"{first}/f", f"{second}/carried", *key, "--carry"]) == 0
    assert place.copied("carried")
    capsys.readouterr()
    assert main(["copy", f"{first}/f", f"{second}/b/", *key, "--background"]) == 0
    ask = capsys.readouterr().out.split("stageout ")[-1].split()
    wait_until(lambda: main([*ask, *key]) == 0, what="the copy")
    assert place.copied("b/f")
    assert main([*ask, *key, "--cancel"]) == 0


def test_a_router_that_lets_the_first_not_in_has_the_bytes_carried(place: Place) -> None:
    keys = place.second.home / "keys"
    known = keys.read_text()
    try:
        keys.write_text(known.replace("hop ", "somebody-else "))
        place.second.stop()
        place.second.start()
        with pytest.raises(Unreached, match="no key of the name 'hop'"):
            follow(commanded(place, "let/f"))
        assert (
            "no key of the name 'hop'" in copy(gateway_of(place.first), "f", gateway_of(place.second), "let/g").carried
        )
        assert not (place.second.root / "let/f").exists()
        assert place.copied("let/g")
    finally:
        keys.write_text(known)
        place.second.stop()


def test_a_replaced_source_is_not_copied(place: Place, tmp_path: Path) -> None:
    (tmp_path / "v").write_bytes(b"one")
    put(gateway_of(place.first), tmp_path / "v", "v")
    ask = dataclasses.replace(_prepared(place, "v"), source="v", source_generation=7, size_bytes=3)
    answer = _told(place, ask)
    assert isinstance(answer, Result)
    assert "replaced" in answer.reason


def test_an_interrupted_call_gives_the_copy_up(place: Place) -> None:
    given = commanded(place, "interrupted/f")

    def progress(moved_bytes: int) -> None:
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        follow(given, progress)
    wait_until(lambda: ended(place, given) in ("cancelled", "done", "stale"), what="the end of the copy")
