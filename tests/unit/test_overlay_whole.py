"""The file under a name in the end is the one that was sent, whatever disks do and however late parts come."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import tracemalloc
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from overlay_router.custodians import carrier, spooled
from overlay_router.custodians.spooled import Growth, Spooled
from overlay_router.data.jobs import Report
from overlay_router.ends import Ends
from overlay_router.local import staging
from overlay_router.local.destination import Destination
from overlay_router.local.store import Store
from overlay_router.local.tree import Tree
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay import finding
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import Upload
from stageout.overlay.wire.blocks import PART_BYTES
from stageout.overlay.wire.frames import digests
from stageout.overlay.wire.messages import Cancel, Message, Open, Opened, Operation

GATEWAY = Gateway("host", 1, "key", b"secret")
ORDER = Operation("0a" * 16, 1, "publish", "f", 99)
BLAKE = digests()["blake2b-128"]


def _sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:16]


CHANNEL = cast(Channel, SimpleNamespace(digest_name="other", digest=_sha, store="new"))


def test_a_block_that_the_next_hop_has_already_gets_the_digest_that_it_wants(tmp_path: Path) -> None:
    """The file is open past the page cache, which takes no reading to just anywhere."""
    spool, data = tmp_path / "spool", os.urandom(5000)
    spool.write_bytes(data)
    order = Operation("0a" * 16, 1, "publish", "f", 99, size_bytes=len(data), blocks=1)
    growth = Growth({0: BLAKE(data)}, order, said="new")
    said = Spooled(GATEWAY, spool, order, growth, "blake2b-128", None, 1).publish(7, CHANNEL)
    assert said.manifest == hashlib.sha256(_sha(data)).hexdigest()


@pytest.mark.parametrize(
    ("said_to", "onward", "generation", "is_found"),
    [("old", "", 3, True), ("old", "", None, False), ("new", "", 3, False), ("old", "t:1", 3, False)],
)
def test_a_custodian_asks_a_terminal_with_other_records_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said_to: str, onward: str, generation: int | None, is_found: bool
) -> None:
    spool, asked, said = tmp_path / "spool", list[object](), list[Message]()
    spool.write_bytes(b"data")
    control = SimpleNamespace(store="new", send=said.append, receive=lambda: None)
    monkeypatch.setattr(spooled, "Channel", lambda *place: nullcontext(control))
    monkeypatch.setattr(finding, "generation_of", lambda *facts: asked.append(facts[2:]) or generation)
    order = Operation("0a" * 16, 5, "publish", "f", 99, size_bytes=4, blocks=1, terminal=onward)
    upload = Spooled(GATEWAY, spool, order, Growth({0: BLAKE(b"data")}, order), "blake2b-128", None, 1)
    found = upload.found_at(said_to)
    assert (found is not None) == is_found
    assert said == ([Cancel("0a" * 16, 5, data_only=True)] if is_found else []), "others of its origin go on"
    assert asked == ([("f", 4, "blake2b-128", [BLAKE(b"data")])] if said_to == "old" and not onward else [])


def test_a_file_that_is_there_is_not_called_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its terminal was asked to publish it, lost its records before it answered, and then the file was cancelled."""
    spool = tmp_path / "spool"
    spool.write_bytes(b"data")
    control = SimpleNamespace(store="new", send=lambda message: None, receive=lambda: None)
    monkeypatch.setattr(spooled, "Channel", lambda *place: nullcontext(control))
    monkeypatch.setattr(finding, "generation_of", lambda *facts: 3)
    order = Operation("0a" * 16, 5, "publish", "f", 99, size_bytes=4, blocks=1)
    wanted = carrier.Order(
        1, "t:1", "key", "00", json.dumps(asdict(order)), str(spool), "blake2b-128", cancel="all", said_to="old"
    )
    answer = carrier.deliver(wanted, Growth({0: BLAKE(b"data")}, order))
    assert (answer.outcome, answer.generation) == ("done", 3)


def test_a_block_that_cannot_be_read_again_is_a_matter_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    local = tmp_path / "file"
    local.write_bytes(b"sent by an earlier process")
    upload = Upload(GATEWAY, local, ORDER, 1, lambda sent_bytes: None)
    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(TransferFailure, match="Input/output") as failure:
        upload.publish(7, CHANNEL)
    assert failure.value.kind is ErrorClass.LOCAL_FILE


def test_a_part_over_a_block_that_is_there_already_is_seen(tmp_path: Path) -> None:
    """A signed manifest holds against forged blocks, also when they are forged late and in parts."""
    (tmp_path / "root").mkdir()
    good, evil = os.urandom(2 * PART_BYTES), b"e" * PART_BYTES
    store, tree = Store(tmp_path / "store"), Tree(tmp_path / "root")
    place = Destination(store, tree, lambda: 0)
    ends = Ends(place)
    try:
        opened = place.open(Open("0a" * 16, 1, "f", 2 * len(good), len(good), 99), "site").message
        assert isinstance(opened, Opened)

        def write(data: bytes, report: Report) -> Report:
            found = place.attach(opened.tid)
            assert found is not None
            os.pwrite(found.file, data, 0)
            os.close(found.file)
            return ends.record(report)[0]

        write(good, Report(opened.tid, ((0, BLAKE(good).hex()),)))
        told = write(evil, Report(opened.tid, (), ((0, len(evil)),), "blake2b-128"))
        mixed = BLAKE(evil + good[len(evil) :])
        assert told.blocks == ((0, mixed.hex()),)
        assert store.staged(opened.tid) == [(0, mixed)]
    finally:
        place.close()
        store.close()
        tree.close()


def test_the_digests_of_a_large_file_are_not_in_memory_at_once(tmp_path: Path) -> None:
    """One of some TiB would take a good part of what a router has, in the thread that all wait for."""
    known = [(block, BLAKE(block.to_bytes(4, "big"))) for block in range(20_000)]
    manifest = hashlib.sha256(b"".join(digest for _, digest in known)).hexdigest()
    order = replace(ORDER, size_bytes=20_000, blocks=20_000, manifest=manifest)
    with contextlib.closing(Store(tmp_path / "store")) as store:
        transfer = store.grant(Open(order.origin, 1, "f", 20_000, 1, 99), "site")
        store.stage(transfer.tid, [one for one in known if one[0] % 3])
        tree, passed = cast(Tree, SimpleNamespace(inode=lambda tid: 1)), {**dict(known[::3]), 1: b"not the one here"}
        assert staging.whole(store, tree, [transfer], order, lambda tid: dict(known[3::3])) == (None, [])
        assert staging.whole(store, tree, [transfer], order, lambda tid: passed) == (transfer, [])
        store.stage(transfer.tid, known)
        tracemalloc.start()
        try:
            assert staging.whole(store, tree, [transfer], order) == (transfer, [])
            assert tracemalloc.get_traced_memory()[1] < 500_000
        finally:
            tracemalloc.stop()
