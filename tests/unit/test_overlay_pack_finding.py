"""Small files that a custodian has in packs, for who cannot reach their terminal."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from overlay_router.custodians.finding import Finding
from overlay_router.local.replies import Published
from overlay_router.peers.deposits import read_terminals
from overlay_router.peers.keys import Key
from stageout.core.errors import ErrorClass
from stageout.overlay.wire.messages import Answer, Cancel, Get, Stat
from tests.unit.test_overlay_custodian import TERMINAL, Spooling
from tests.unit.test_overlay_destination import EXPIRES, ORIGIN, PEER
from tests.unit.test_overlay_pack_custody import DONE, FILES, pack, spooled, spooling
from tests.unit.test_overlay_packs import arrived

__all__ = ["spooling"]
KEY = Key("site", b"", "")


def finding(spooling: Spooling) -> Finding:
    async def on_disk(work: Any) -> Any:
        return work()

    return Finding(spooling.one, on_disk)


def look(spooling: Spooling, path: str, terminal: str = TERMINAL) -> Answer:
    found = asyncio.run(finding(spooling).entry(KEY, Stat(path, terminal=terminal)))
    assert isinstance(found, Answer)
    return found


def fetch(spooling: Spooling, path: str) -> bytes | Answer:
    found = asyncio.run(finding(spooling).file(KEY, Get(path, terminal=TERMINAL)))
    if isinstance(found, Answer):
        return found
    assert isinstance(found, Published)
    with open(found.file, "rb") as file:
        data = file.read()
    assert found.size_bytes == len(data)
    assert found.mode == 0o644
    return data


def later(seq: int, files: dict[str, bytes]) -> Any:
    one = arrived(seq, files)
    return one._replace(pack=replace(one.pack, terminal=TERMINAL))


def test_the_newest_file_of_a_name_is_found_and_checked(spooling: Spooling) -> None:
    spooling.one.packs.take([pack(1)])
    assert {path: fetch(spooling, path) for path in FILES} == FILES
    spooling.clock.now_s = 50
    spooling.one.packs.take([later(11, {"a": b"newer", "d": b""})])
    spooling.restart()
    assert fetch(spooling, "a") == b"newer"
    assert look(spooling, "a") == Answer(("a",), ("file",), (5,), (0o644,), (50,))
    spooling.one.cancel(Cancel(ORIGIN, 11), PEER)
    assert fetch(spooling, "a") == b"first", "nobody wants the newer one any more"
    assert look(spooling, "c").code == ErrorClass.NOT_FOUND.code
    assert look(spooling, "a", "t:2").code == ErrorClass.NOT_FOUND.code
    spooling.one.packs.settle([(held, DONE[: held.files]) for held in spooling.one.packs.held()])
    assert look(spooling, "a").code == ErrorClass.NOT_FOUND.code


def test_what_goes_by_a_further_custodian_is_for_those_who_may_deposit_for_that_one(spooling: Spooling) -> None:
    one = later(1, {"far": b"away"})
    spooling.one.packs.take([one._replace(pack=replace(one.pack, terminal=f"{TERMINAL},t:2"))])
    assert look(spooling, "far", "t:2").sizes_bytes == (4,)
    assert look(spooling, "far").code == ErrorClass.NOT_FOUND.code
    spooling.one.terminals = read_terminals(f"{TERMINAL}=other")
    assert look(spooling, "far", "t:2").code == ErrorClass.PERMISSION_DENIED.code
    assert look(spooling, "far").code == ErrorClass.PERMISSION_DENIED.code


def test_a_damaged_file_is_not_given(spooling: Spooling) -> None:
    spooling.one.packs.take([pack(1)])
    (path,) = spooled(spooling)
    content = path.read_bytes()
    path.write_bytes(content[:-6] + b"SECOND")
    refused = fetch(spooling, "b/c")
    assert isinstance(refused, Answer) and "damaged" in refused.message
    assert fetch(spooling, "a") == b"first"
    path.write_bytes(b"?" + content[1:])
    assert isinstance(fetch(spooling, "empty"), Answer), "a digest that is not what it was says nothing"
    path.unlink()
    refused = fetch(spooling, "a")
    assert isinstance(refused, Answer) and refused.code == ErrorClass.SERVER_ERROR.code


def test_of_a_pack_and_a_file_of_its_own_the_newer_is_found(spooling: Spooling) -> None:
    spooling.take(5)
    spooling.clock.now_s = 50
    spooling.one.packs.take([later(11, {"f5": b"newer"})])
    assert look(spooling, "f5").modified == (50,)
    spooling.clock.now_s = EXPIRES / 2
    spooling.one.packs.settle([(held, DONE[:1]) for held in spooling.one.packs.held()])
    assert look(spooling, "f5").modified == (0,)
