"""A custodian's rows: what it takes, answers, keeps and drops. A table in memory, a spool on the disk, no network."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from overlay_router.operations.custodian import Custodian, Far
from overlay_router.operations.custody_table import CustodyTable, Listed
from overlay_router.operations.receiving import Block, Receiving
from overlay_router.operations.side import Bringing, Caller, Refusal
from overlay_router.operations.spool import CustodySpool
from overlay_router.operations.table import Stored, Table
from stageout.core import durable
from stageout.overlay.http.operations import Status
from stageout.overlay.rules.limits import Share
from stageout.overlay.rules.operations import Fields, Identity, Kind, Row
from stageout.overlay.rules.rights import Entry
from stageout.overlay.rules.states import State

_ORIGIN = "ab" * 16
_DATA = b"some bytes"
_BLOCK = hashlib.sha256(_DATA).digest()
_SHARE = Share(1000, 1000, 1000, 10_000)
_TABLE = CustodyTable(
    {"t": Listed("t", "t:1"), "gw2": Listed("gw2", "gw2:1")},
    {("alice", "*", "t"): Entry("/alice"), ("alice", "*", "gw2"): Entry(None), ("bob", "*", "t"): Entry(None)},
)


def _caller(user: str = "alice", issuer: str = "") -> Caller:
    owner = f"key:{user}"
    return Caller(owner, (owner,), issuer, f"http:{user}", authority=(user, "/"))


_ALICE, _BOB = _caller(), _caller("bob")


@dataclass(frozen=True)
class Ask:
    """An operation of a user."""

    caller: Caller
    bringing: Bringing
    via: tuple[str, ...]

    @property
    def identity(self) -> Identity:
        return Identity(self.caller.owner, self.bringing.fields.origin, self.bringing.fields.seq)


class Site:
    """A custodian that can be started again."""

    def __init__(self, place: Path, share: Share = _SHARE) -> None:
        self.place, self.share, self.now = place, share, 10_000
        self.spool = place / "spool"
        self.far: Callable[[Listed], Far] = lambda listed: Far(f"{listed.name}:1", "", "token")
        self.wake: Callable[[Identity], None] = lambda identity: None
        self.start()

    def start(self) -> None:
        self.table = Table(self.place / "operations.sqlite")
        self.receiving = Receiving(self.table, self.spool)
        spool = CustodySpool(self.spool, self.receiving, 1_000_000)
        self.custodian = Custodian(
            self.table, self.receiving, spool, _TABLE, "gw", lambda listed: self.far(listed), lambda: self.now,
            wake=lambda identity: self.wake(identity), share=self.share,
        )  # fmt: skip

    def stop(self) -> None:
        self.receiving.close()
        self.table.close()

    def start_again(self, without_database: bool = False) -> None:
        self.stop()
        if without_database:
            for path in self.place.glob("operations.sqlite*"):
                path.unlink()
        self.start()

    def asks(
        self, seq: int = 1, user: str = "alice", via: tuple[str, ...] = ("t",), jws: str = "jws", issuer: str = "",
        **more: object,
    ) -> Ask:  # fmt: skip
        """An operation of a user, signed."""
        values: dict[str, object] = {
            "path": f"alice/f{seq}", "kind": Kind.FILE, "size": len(_DATA), "terminal": "t", "expires": 20_000, **more,
        }  # fmt: skip
        fields = Fields(
            origin=_ORIGIN, seq=seq, made=9_000, block_kind="sha-256", digest_kind="sha-256",
            **values,  # type: ignore[arg-type]
        )  # fmt: skip
        return Ask(_caller(user, issuer), Bringing(fields, jws, token="t", release="custody"), via)

    def begin(self, ask: Ask) -> str:
        return self.custodian.behind(ask.via).begin(ask.caller, ask.bringing).state.state

    def cancel(self, ask: Ask, caller: Caller | None = None) -> str:
        side = self.custodian.behind(ask.via)
        return side.cancel(caller or ask.caller, ask.bringing.fields, "jws").state.state

    def stored(self, ask: Ask) -> Stored:
        found = self.table.find(ask.identity)
        assert found is not None
        return found

    def bring(self, ask: Ask) -> None:
        """As the desk does."""
        self.begin(ask)
        stored = self.stored(ask)
        if stored.row.state not in (State.RECEIVING, State.LOST):
            return
        staging = self.receiving.staging(stored)
        self.receiving.claim(staging, self, 0, 1, [_BLOCK])
        os.pwrite(staging.file, _DATA, 0)
        self.receiving.received(staging, self, 0, 1, [Block(0, _BLOCK, _BLOCK)])
        file, blocks = self.receiving.begin_sync(staging)
        os.close(file)
        self.receiving.synced(staging, blocks)

    def complete(self, ask: Ask) -> str:
        stored = self.stored(ask)
        if stored.row.state in (State.RECEIVING, State.LOST):
            self.receiving.staging(stored).due = len(_DATA), _BLOCK, "sig"
        return self.custodian.complete(stored).state.state

    def take(self, seq: int = 1, **more: object) -> Ask:
        """An operation that is in custody."""
        ask = self.asks(seq, **more)  # type: ignore[arg-type]
        self.bring(ask)
        assert self.complete(ask) == "custody"
        return ask

    def try_once(self, ask: Ask, state: str | None, reason: str = "") -> Row | None:
        """An attempt, and its end."""
        work = self.custodian.work(ask.identity)
        assert work is not None and self.custodian.start(ask.identity, work.what)
        return self.custodian.answered(ask.identity, Status(state, reason) if state else None, ())

    def state(self, ask: Ask) -> str:
        return self.custodian.state(self.stored(ask)).state

    def has_bytes(self, ask: Ask) -> bool:
        return self.receiving.path(ask.identity).exists()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    found = Site(tmp_path)
    yield found
    found.stop()


def _refused(status: int, call: object, *arguments: object) -> Refusal:
    with pytest.raises(Refusal) as found:
        call(*arguments)  # type: ignore[operator]
    assert found.value.status == status
    return found.value


def test_custody_and_delivery(site: Site) -> None:
    ask = site.take()
    assert site.custodian.state(site.stored(ask)).custodians == ("gw",)
    work = site.custodian.work(ask.identity)
    assert work and work.what == "deliver" and work.row.hop == "t" and work.row.names == ("alice/f1",)
    order = site.custodian.start(ask.identity, "deliver")
    assert order and order["address"] == "t:1" and order["prefix"] == "" and order["name"] == "gw"
    assert site.state(ask) == "delivering"
    after = site.custodian.answered(ask.identity, Status("done", etag='"1-2"'), ())
    assert after and after.state is State.DONE and after.etag == '"1-2"'
    assert not site.has_bytes(ask) and site.custodian.work(ask.identity) is None
    assert site.begin(ask) == "done"


def test_names_only(site: Site) -> None:
    ask = site.asks(kind=Kind.DELETE, size=None)
    assert site.begin(ask) == "custody"
    site.start_again()
    assert site.state(ask) == "custody"
    assert site.custodian.open() == [ask.identity]


def test_the_same_number_with_other_fields(site: Site) -> None:
    ask = site.take()
    other = replace(ask, bringing=replace(ask.bringing, fields=replace(ask.bringing.fields, path="alice/other")))
    assert _refused(409, site.begin, other).word == "operation-differs"
    _refused(409, site.cancel, other)
    assert site.state(ask) == "custody"


def test_nothing_is_stored_before_rights(site: Site) -> None:
    for status, ask in (
        (403, site.asks(user="mallory")),
        (403, site.asks(user="bob", jws="")),
        (403, site.asks(jws="", path="bob/f")),
        (403, site.asks(jws="", path="alice2/f")),
        (403, site.asks(jws="", kind=Kind.RENAME, size=None, second="bob/f")),
        (403, site.asks(jws="", via=("gw2", "t"))),
        (403, site.asks(via=("elsewhere",), terminal="elsewhere")),
        (403, site.asks(jws="", expires=10_000 + 86_401)),
        (400, site.asks(terminal="other")),
        (400, site.asks(via=("gw2", "gw2", "t"))),
        (400, site.asks(via=("gw", "t"))),
        (400, site.asks(via=("gw2", "a", "b", "c", "t"))),
        (410, site.asks(expires=9_999)),
    ):
        _refused(status, site.begin, ask)
    _refused(403, site.cancel, site.asks(user="mallory"))
    assert not site.table.named(_ORIGIN, 1) and [path.name for path in site.spool.iterdir()] == ["epoch"]
    assert site.begin(site.asks(jws="")) == "receiving"
    assert site.begin(site.asks(2, via=("gw2", "t"))) == "receiving"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Site]:
    found = Site(tmp_path, Share(3, 3, 3, 25))
    yield found
    found.stop()


def test_a_subject_has_its_share(small: Site) -> None:
    for seq in (1, 2):
        small.begin(small.asks(seq))
    assert _refused(429, small.begin, small.asks(3)).again_s
    small.begin(small.asks(3, size=0))
    _refused(429, small.begin, small.asks(4, size=0))
    assert small.begin(small.asks(1, "bob")) == "receiving", "others have theirs"
    small.start_again()
    _refused(429, small.begin, small.asks(4, size=0))
    assert not small.table.named(_ORIGIN, 4)


@pytest.fixture
def wide(tmp_path: Path) -> Iterator[Site]:
    found = Site(tmp_path, Share(9, 9, 9, 1 << 60))
    yield found
    found.stop()


def test_a_full_spool(wide: Site) -> None:
    assert _refused(507, wide.begin, wide.asks(size=960_000)).again_s
    wide.begin(wide.asks(size=900_000))
    _refused(507, wide.begin, wide.asks(2, user="bob", size=60_000))


def test_refused_failed_and_expired_bytes_stay_until_the_end(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    refused, failed = site.take(1), site.take(2)
    row = site.try_once(refused, "refused", "no right")
    assert row and row.state is State.REFUSED and site.custodian.work(refused.identity)
    site.try_once(failed, "failed", "precondition")
    assert site.state(failed) == "failed" and site.has_bytes(failed)
    site.now = 20_001
    site.custodian.expire()
    assert not site.has_bytes(failed) and site.has_bytes(refused), "the terminal is asked first"
    work = site.custodian.work(refused.identity)
    assert work and work.what == "ask"
    site.try_once(refused, None)
    assert site.state(refused) == "refused"
    site.now += 600
    site.try_once(refused, None)
    assert site.state(refused) == "expired, outcome unknown" and not site.has_bytes(refused)
    assert caplog.text.count("custody-dropped") == 2 and "alice/f1" in caplog.text and "alice/f2" in caplog.text


def test_expired_here_and_done_there(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    ask = site.take()
    site.now = 20_300
    site.custodian.expire()
    site.try_once(ask, "done")
    assert site.state(ask) == "done" and "custody-dropped" not in caplog.text


def test_the_terminal_is_away(site: Site) -> None:
    ask = site.take()
    row = site.try_once(ask, None)
    assert row and row.state is State.CUSTODY and site.has_bytes(ask)


def test_cancel(site: Site) -> None:
    ask = site.take()
    _refused(403, site.cancel, ask, _BOB)
    assert site.cancel(ask) == "cancelling"
    site.start_again()
    work = site.custodian.work(ask.identity)
    assert work and work.what == "cancel" and site.custodian.start(ask.identity, "deliver") is None
    site.try_once(ask, None)
    assert site.state(ask) == "cancelling"
    site.try_once(ask, "done")
    assert site.state(ask) == "done" and site.cancel(ask) == "done"


def test_cancel_during_delivery(site: Site) -> None:
    ask = site.take()
    site.custodian.start(ask.identity, "deliver")
    site.cancel(ask)
    site.custodian.answered(ask.identity, Status("refused"), ())
    assert site.state(ask) == "cancelling"
    site.try_once(ask, "cancelled")
    assert site.state(ask) == "cancelled" and not site.has_bytes(ask)


def test_cancel_of_what_never_came(site: Site) -> None:
    ask = site.asks()
    assert site.cancel(ask) == "cancelling"
    assert site.begin(ask) == "cancelling"
    site.try_once(ask, "cancelled")
    assert site.begin(ask) == "cancelled"


def test_cancel_by_who_issued_the_token(site: Site) -> None:
    ask = site.take(issuer="key:bob")
    assert site.cancel(ask, _BOB) == "cancelling"


def test_a_lost_database(site: Site) -> None:
    asks = [site.take(seq) for seq in (3, 1, 2)]
    site.cancel(asks[2])
    before = {ask.identity: site.stored(ask).row.hop for ask in asks}
    site.now += 5
    site.start_again(without_database=True)
    assert {ask.identity: site.stored(ask).row.hop for ask in asks} == before
    assert [site.state(ask) for ask in asks] == ["custody", "custody", "cancelling"]
    assert all(map(site.has_bytes, asks))
    newer = site.take(4)
    assert site.stored(newer).row.hop[1:3] > max(hop[1:3] for hop in before.values())


def test_a_restored_database(site: Site) -> None:
    old = site.take(1)
    site.stop()
    backup = (site.place / "operations.sqlite").read_bytes()
    site.start()
    new = site.take(2)
    site.try_once(old, "done")
    site.stop()
    (site.place / "operations.sqlite").write_bytes(backup)
    site.start()
    assert site.state(new) == "custody" and site.has_bytes(new)
    work = site.custodian.work(old.identity)
    assert work is not None, "nobody knows here any more that it was delivered"
    assert site.custodian.start(old.identity, work.what)
    newer = site.take(3)
    assert site.stored(newer).row.hop[1:3] > site.stored(new).row.hop[1:3]


@pytest.mark.parametrize("label", ["kept-file", "kept-take"])
def test_a_death_before_each_step_of_custody(site: Site, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = site.asks()
    site.bring(ask)
    with monkeypatch.context() as patched:
        patched.setattr(durable, "_faults", durable.parse_faults(f"{label}=EIO"))
        with pytest.raises(OSError, match=label):
            site.complete(ask)
    site.start_again()
    assert site.state(ask) == ("custody" if label == "kept-take" else "receiving")
    assert site.complete(ask) == "custody"


def test_blocks_that_rotted(site: Site) -> None:
    ask = site.take()
    site.custodian.start(ask.identity, "deliver")
    site.custodian.answered(ask.identity, None, (0,))
    status = site.custodian.state(site.stored(ask))
    assert status.state == "lost" and not status.have
    site.bring(ask)
    assert site.complete(ask) == "custody"


def test_the_newest_version(site: Site) -> None:
    site.take(1, path="alice/f")
    second = site.take(2, path="alice/f")
    site.begin(site.asks(3, path="alice/f"))
    found = site.custodian.newest(_ALICE, "t", "alice/f")
    assert found and found.row.identity == second.identity
    assert site.custodian.newest(_BOB, "t", "alice/f") is None
    assert site.custodian.newest(_ALICE, "gw2", "alice/f") is None


def test_waits(site: Site) -> None:
    first, second = site.take(1), site.take(2)
    side = site.custodian.behind(("t",))
    assert side.results(_ALICE, _ORIGIN, 1, 2, "custody").reached
    assert not side.results(_ALICE, _ORIGIN, 1, 2, "done").reached
    everything = side.results(_ALICE, _ORIGIN, 1, 0, "custody")
    assert everything.reached and list(everything.states) == [1, 2]
    assert not side.results(_ALICE, "cd" * 16, 1, 0, "custody").reached
    assert side.results(_BOB, _ORIGIN, 1, 0, "custody").states == {}, "nor how many there are"
    with pytest.raises(Refusal):
        side.results(_ALICE, _ORIGIN, 1, 9_999_999_999, "custody")
    three = side.results(_ALICE, _ORIGIN, 1, 3, "custody")
    assert not three.reached and three.states[3].state == "unknown"
    site.try_once(first, "done")
    site.try_once(second, "superseded")
    assert side.results(_ALICE, _ORIGIN, 1, 2, "done").reached


def test_low(site: Site) -> None:
    first, second = site.take(1), site.take(2)
    side = site.custodian.behind(("t",))
    site.try_once(first, "done")
    _refused(409, side.low, _ALICE, _ORIGIN, 3, "")
    side.low(_BOB, _ORIGIN, 3, "")
    side.low(_ALICE, _ORIGIN, 2, "")
    assert site.table.find(first.identity) is None and site.state(second) == "custody"


def test_results_are_forgotten_late(site: Site) -> None:
    ask = site.take()
    site.try_once(ask, "done")
    site.now = 20_000 + 3_600
    site.custodian.expire()
    assert site.state(ask) == "done"
    site.now += 1
    site.custodian.expire()
    assert site.table.find(ask.identity) is None


def test_data_without_an_operation_go_late(site: Site) -> None:
    stray = site.spool / "stray"
    stray.write_bytes(b"")
    os.utime(stray, (site.now, site.now))
    site.now += 7 * 86_400
    site.custodian.expire()
    assert stray.exists()
    site.now += 1
    site.custodian.expire()
    assert not stray.exists()
