"""The staging directories of a custodian, and the file of its routers and subjects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from overlay_router.operations.custody_table import CustodyTable, Listed, read_custody
from overlay_router.operations.receiving import Receiving
from overlay_router.operations.spool import CustodySpool, Digests, Kept
from overlay_router.operations.table import Table
from overlay_router.peers.keys import BadKeys
from stageout.core import durable
from stageout.overlay.http.claims import Issuer, share_name
from stageout.overlay.rules.operations import Fields, Hop, Identity, Kind
from stageout.overlay.rules.rights import Entry

_ORIGIN = "ab" * 16
_DIGESTS = Digests(3, b"\0\n" * 16, "d.e.f", b"\1\n" * 8)


@pytest.fixture
def receiving(tmp_path: Path) -> Iterator[Receiving]:
    table = Table(tmp_path / "operations.sqlite")
    found = Receiving(table, tmp_path / "spool")
    yield found
    found.close()
    table.close()


@pytest.fixture
def spool(tmp_path: Path, receiving: Receiving) -> CustodySpool:
    return CustodySpool(tmp_path / "spool", receiving, 1000)


def _kept(seq: int = 1) -> Kept:
    fields = Fields(_ORIGIN, seq, Kind.FILE, f"a/f{seq}\udcff", "archive", 1000, 2000, size=3, mtime=-5)
    identity, hop = Identity("key:x", _ORIGIN, seq), Hop("", 7, seq, 1500)
    return Kept(identity, fields, ("gw2", "archive"), "http:alice", proof="a.b.c", token="t", hop=hop)


def _written(spool: CustodySpool, receiving: Receiving, kept: Kept) -> Kept:
    receiving.path(kept.identity).write_bytes(b"abc")
    spool.write(kept, _DIGESTS)
    return kept


def test_an_operation_is_read_back(spool: CustodySpool, receiving: Receiving) -> None:
    kept = _written(spool, receiving, _kept())
    assert spool.read(kept.identity) == (kept, _DIGESTS)
    spool.write(kept, None)
    assert spool.read(kept.identity) == (kept, None)
    assert list(spool.all()) == [kept]


def test_what_cannot_be_read_stays(spool: CustodySpool, receiving: Receiving) -> None:
    first, second, third = (_written(spool, receiving, _kept(seq)) for seq in (1, 2, 3))
    spool.file(first.identity).write_text("{")
    spool.file(second.identity).rename(spool.file(second.identity).with_name("other.operation"))
    assert list(spool.all()) == [third]
    assert receiving.path(first.identity).exists() and receiving.path(second.identity).exists()


def test_a_death_while_it_is_removed_leaves_its_name(
    spool: CustodySpool, receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = _written(spool, receiving, _kept())
    with monkeypatch.context() as patched:
        real = durable.unlink
        patched.setattr(
            durable, "unlink", lambda label, path: _die() if path.suffix == ".operation" else real(label, path)
        )
        with pytest.raises(InterruptedError):
            spool.drop(kept.identity)
    assert list(spool.all()) == [kept] and not receiving.path(kept.identity).exists()
    spool.drop(kept.identity)
    assert not list(spool.all())


def _die() -> None:
    raise InterruptedError


def test_a_part_of_the_spool_is_kept_free(tmp_path: Path, spool: CustodySpool, receiving: Receiving) -> None:
    assert spool.has_room(900, 50) and not spool.has_room(900, 51)
    wide = CustodySpool(tmp_path / "spool", receiving, 1 << 62)
    assert not wide.has_room(0, 1 << 60), "the disk is smaller"


def test_epochs(spool: CustodySpool) -> None:
    assert spool.epoch() == 0
    spool.set_epoch(17)
    assert spool.epoch() == 17 and not list(spool.all())


def _table(tmp_path: Path, text: str) -> CustodyTable:
    (tmp_path / "custody").write_text(text)
    return read_custody(tmp_path / "custody", {"alice": "print-of-alice"})


def test_the_table(tmp_path: Path) -> None:
    table = _table(
        tmp_path,
        "# routers\nrouter Archive archive.example.org:9630 ca.pem\nrouter gw2 gw2.example.org:1\n"
        "router near 127.0.0.1:2 plain\n"
        "custody alice * archive /alice\ncustody alice pilot7 archive -\ncustody https://i s gw2 -  # and more\n",
    )
    assert table.routers["archive"] == Listed("archive", "archive.example.org:9630", str(tmp_path / "ca.pem"))
    assert table.routers["gw2"].ca == "" and not table.routers["gw2"].plain
    assert table.routers["near"] == Listed("near", "127.0.0.1:2", plain=True)
    assert table.entry("print-of-alice", "anybody", "archive") == Entry("/alice")
    pilot = share_name(Issuer("alice", "", is_own=True), "pilot7")
    assert table.entry("print-of-alice", pilot, "archive") == Entry(None)
    assert table.entry("https://i", share_name(Issuer("https://i", ""), "s"), "gw2") == Entry(None)
    assert table.entry("https://i", "t", "gw2") is None and table.entry("print-of-alice", "alice", "gw2") is None


@pytest.mark.parametrize(
    "text",
    [
        "router archive\n", "router a host:1 ca more\n", "router a host:port\n", "custody a * t /\n", "other\n",
        "router t h:1\ncustody a t /\n",
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_used(tmp_path: Path, text: str) -> None:
    with pytest.raises(BadKeys, match="custody"):
        _table(tmp_path, text)
