"""Packs in custody on a real spool: no step that fails, or is the last, loses a file or keeps its space."""

from __future__ import annotations

import asyncio
import errno
import queue
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from overlay_router import lots
from overlay_router.destination import Reply
from overlay_router.pack_carrier import Answer, Gone, Order, Way, load
from overlay_router.pack_forwarder import PackForwarder
from overlay_router.report import Reporting, shown
from overlay_router.small_files import Arrived
from overlay_router.states import Outcome, Result
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Gateway
from stageout.overlay.packs import Packer
from stageout.wire import overlay
from stageout.wire.overlay import Custody, NoSpace, Packed, Status
from tests.unit.test_overlay_custodian import TERMINAL, Spooling, _Death, _faulty
from tests.unit.test_overlay_destination import EXPIRES, ORIGIN, PEER
from tests.unit.test_overlay_packs import arrived, digest

LABELS = re.findall(
    r"^\| `(spool-pack-[a-z-]+)` \|", (Path(__file__).resolve().parents[2] / "docs/ORDERING.md").read_text(), re.M
)
FILES = {"a": b"first", "b/c": b"second", "empty": b""}
DONE = [Result(Outcome.DONE, generation=1)] * len(FILES)


@pytest.fixture
def spooling() -> Iterator[Spooling]:
    with tempfile.TemporaryDirectory() as place:
        made = Spooling(Path(place), 10_000)
        yield made
        made.close()


def pack(seq: int = 1, release: str = "delivered", **more: object) -> Arrived:
    one = arrived(seq, FILES)
    return one._replace(pack=replace(one.pack, terminal=TERMINAL, release=release, **more))  # type: ignore[arg-type]


def spooled(spooling: Spooling) -> list[Path]:
    return sorted((spooling.home / ".stageout/packs").iterdir())


def order(spooling: Spooling) -> Order:
    (held,) = spooling.one.packs.held()
    return Order(1, TERMINAL, "k", "", **spooling.one.packs.order(held))  # type: ignore[arg-type]


def _mended(spooling: Spooling) -> None:
    """Two packs are taken; one rots, comes again, and both are delivered."""
    packs = spooling.one.packs
    if not spooling.one.packed(Status(ORIGIN, 1, 3)):
        packs.take([pack(1), pack(11)])
        rotten = next((held for held in packs.held() if held.seq == 11), None)
        if rotten is not None and not spooling.store.record(ORIGIN).results:
            packs.damaged(rotten)
            packs.take([pack(11)])
        for held in packs.held():
            packs.settle([(held, DONE)])
    if not spooling.one.packed(Status(ORIGIN, 11, 3)):
        packs.take([pack(11)])
        packs.settle([(held, DONE) for held in packs.held()])


@pytest.mark.parametrize("what", ["kill-before", "kill-after", "EIO"])
@pytest.mark.parametrize("label", LABELS)
def test_no_step_that_fails_or_is_the_last_loses_anything(spooling: Spooling, label: str, what: str) -> None:
    fault = OSError(errno.EIO, "planned") if what == "EIO" else _Death()
    with _faulty(label, fault, what == "kill-after") as passed:
        try:
            _mended(spooling)
        except OSError:
            _mended(spooling)
        except _Death:
            spooling.restart()
            _mended(spooling)
    assert label in passed, f"nobody passes {label}"
    spooling.restart()
    assert (spooled(spooling), lots.reserved_bytes(spooling.spool), spooling.one.packs.held()) == ([], 0, [])
    for seq in (1, 11):
        assert spooling.one.packed(Status(ORIGIN, seq, 3)) == Packed(ORIGIN, seq, (1, 1, 1))


def test_taken_once_kept_over_a_restart_and_sent_as_it_came(spooling: Spooling) -> None:
    one = pack(release="custody")
    assert spooling.one.packs.take([one, one]) == [Reply(PEER, Custody(ORIGIN, 1, "me:1"))]
    spooling.one.low(overlay.Low(ORIGIN, 2))
    assert spooling.store.record(ORIGIN).low == 0, "what is in custody stays"
    assert spooling.one.cancel(overlay.Cancel(ORIGIN, 2), PEER) == [Reply(PEER, Custody(ORIGIN, 2, "me:1"))]
    before = lots.reserved_bytes(spooling.spool)
    spooling.restart()
    assert lots.reserved_bytes(spooling.spool) == before > 0
    summary = spooling.one.summary()
    assert (summary.files, summary.single, summary.single_bytes) == (3, 3, summary.size_bytes)
    loaded = load(order(spooling))
    assert (loaded.pack, loaded.data, loaded.damaged) == (one.pack, list(FILES.values()), [])
    assert order(spooling).cancelled == [2]
    assert spooling.one.packs.take([one]) == [Reply(PEER, Custody(ORIGIN, 1, "me:1"))]
    [reply] = spooling.one.packs.take([one._replace(peer="other/x")])
    assert isinstance(reply.message, Packed)
    assert set(reply.message.reasons) == {"it was deposited with another key"}


def test_what_is_damaged_is_known_file_by_file(spooling: Spooling) -> None:
    spooling.one.packs.take([pack(release="custody")])
    (path,) = spooled(spooling)
    content = path.read_bytes()
    path.write_bytes(content[:-6] + b"SECOND")
    assert load(order(spooling)).damaged == [1]
    path.write_bytes(b"?" + content[1:])
    with pytest.raises(Gone):
        load(order(spooling))
    path.write_bytes(content[:-1])
    with pytest.raises(Gone):
        load(order(spooling))


def test_a_full_spool_and_what_is_too_late_are_said(spooling: Spooling) -> None:
    spooling.spool.size_bytes = 100
    taken, full = (reply.message for reply in spooling.one.packs.take([pack(1), pack(11)]))
    assert isinstance(taken, NoSpace)
    assert isinstance(full, Custody)
    spooling.clock.now_s = EXPIRES + 1.0
    [reply] = spooling.one.packs.take([pack(21)])
    assert isinstance(reply.message, Packed)
    assert reply.message.outcomes == ("expired",) * 3
    [reply] = spooling.one.expire(())
    assert isinstance(reply.message, Packed)
    assert reply.message.outcomes == ("expired",) * 3
    assert (spooled(spooling), lots.reserved_bytes(spooling.spool)) == ([], 0)


def test_whatever_fails_while_a_pack_is_taken_no_space_stays_reserved(spooling: Spooling) -> None:
    one = pack()
    beyond = one._replace(pack=replace(one.pack, seq=2**63 - 2))
    with pytest.raises(OverflowError):
        spooling.one.packs.take([beyond])
    assert (spooled(spooling), lots.reserved_bytes(spooling.spool), spooling.one.packs.held()) == ([], 0, [])


def test_a_pack_that_has_ended_meanwhile_is_not_ordered(spooling: Spooling) -> None:
    spooling.one.packs.take([pack()])
    (held,) = spooling.one.packs.held()
    spooling.one.packs.settle([(held, DONE)])
    assert spooling.one.packs.order(held) is None


def test_an_order_that_cannot_be_read_is_answered(spooling: Spooling) -> None:
    spooling.one.packs.take([pack()])
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    way = Way(Gateway("localhost", 1, "k", b""), answers.put)
    way.take(replace(order(spooling), digest="of another installation"))
    answer = answers.get(timeout=20)
    assert (answer.number, answer.damaged, answer.code) == (1, [], ErrorClass.UNKNOWN.code)


class _Terse:
    """A connection to a router that answers for one file, whatever it was sent."""

    digest_name, gateway = "blake2b-128", Gateway("terse", 1, "k", b"")

    def __init__(self, origin: str) -> None:
        self.origin = origin

    digest = staticmethod(digest)

    def send(self, *message: object) -> None:
        pass

    send_pack = send

    def has_more(self, within_s: float) -> bool:
        return True

    def receive(self) -> Packed:
        return Packed(self.origin, 1, (1,))

    def failure(self, kind: ErrorClass, text: str) -> TransferFailure:
        return TransferFailure(kind, text)

    def close(self) -> None:
        pass


def test_who_answers_for_fewer_files_than_it_was_sent_has_failed(spooling: Spooling, tmp_path: Path) -> None:
    spooling.one.packs.take([pack()])
    answers: list[Answer] = []
    way = Way(_Terse.gateway, answers.append)
    loaded = load(order(spooling))
    way._sent[ORIGIN, 1] = loaded
    way._hear(Packed(ORIGIN, 1, (1,)))
    assert [(one.results, one.failure) for one in answers] == [([], "terse:1 has answered for 1 of 3 files")]
    ended: list[object] = []
    packer: Packer[str] = Packer(_Terse.gateway, lambda key, end: ended.append(key))
    packer._channel = _Terse(packer.origin)  # type: ignore[assignment]
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"x")
        packer.add(name, tmp_path / name, name)
    with pytest.raises(TransferFailure, match="1 of 2 files"):
        packer.finish()
    assert not ended


def test_what_was_freed_is_lost_at_its_end(spooling: Spooling) -> None:
    spooling.one.packs.take([pack(release="custody")])
    spooling.clock.now_s = EXPIRES + 1.0
    [reply] = spooling.one.expire(())
    assert isinstance(reply.message, Packed)
    assert reply.message.outcomes == ("lost",) * 3


def test_one_damaged_file_is_lost_and_the_others_are_what_the_terminal_says(spooling: Spooling) -> None:
    told: list[Reply] = []

    async def run() -> None:
        async def on_disk(work):  # type: ignore[no-untyped-def]
            return work()

        forwarder = PackForwarder(spooling.one.packs, on_disk, told.extend, ("k", b""), spooling.clock)
        spooling.one.packs.take([pack(release="custody")])
        (held,) = spooling.one.packs.held()
        forwarder._orders[1] = held
        said = [("done", "", 1, 0), ("failed", "digest", 0, 0), ("stale", "", 0, 0)]
        forwarder._answers.append(Answer(1, said, damaged=[1]))
        await forwarder._settle()

    asyncio.run(run())
    [reply] = told
    assert isinstance(reply.message, Packed)
    assert (reply.message.generations, reply.message.outcomes) == ((1, 0, 0), ("lost", "failed"))


def test_a_pack_is_shown_with_why_it_is_not_there(spooling: Spooling, tmp_path: Path) -> None:
    async def run() -> str:
        async def on_disk(work):  # type: ignore[no-untyped-def]
            return work()

        forwarder = PackForwarder(spooling.one.packs, on_disk, lambda replies: None, ("k", b""), spooling.clock)
        spooling.one.packs.take([pack(release="custody")])
        (held,) = spooling.one.packs.held()
        forwarder._failed(held, Answer(1, failure="nobody listens", code=ErrorClass.CONNECT_FAILED.code))
        reporting = Reporting(tmp_path / "custody.json", spooling.one, [forwarder], on_disk)
        reporting._write(reporting._facts())
        return shown(tmp_path / "custody.json", held.taken_at + 7)

    summary, problem, row = asyncio.run(run()).splitlines()
    assert summary.startswith("3 files,")
    assert problem == f"{TERMINAL}: nobody listens"
    assert row.split()[0] == "7"
    assert row.endswith(f"{TERMINAL} a and 2 more  (only copy)")


def test_a_process_that_is_not_understood_is_replaced(spooling: Spooling) -> None:
    async def run() -> int:
        async def on_disk(work):  # type: ignore[no-untyped-def]
            return work()

        forwarder = PackForwarder(spooling.one.packs, on_disk, lambda replies: None, ("k", b""), spooling.clock)
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", 'echo "{}"; exec sleep 600', stdout=asyncio.subprocess.PIPE
        )
        await asyncio.wait_for(forwarder._listen(process), 60)
        assert forwarder.wake.is_set()
        assert process.returncode is not None
        return process.returncode

    assert asyncio.run(run()) < 0
