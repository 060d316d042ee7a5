"""Faults of custody, by requests over HTTP: a custodian ``gw`` that delivers to ``archive``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from stageout.core.signing import new_key
from tests.harness.pool.waiting import wait_until
from tests.overlay.http_site import Site, site
from tests.overlay.requesting import BLOCK_BYTES, Origin

_HIGHEST = 2**63 - 1
_USERS = {"alice": "/", "bob": "/bob", "carol": "/carol"}
_DELIVERED_S = 60


@dataclass
class _Overlay:
    archive: Site
    gw: Site

    def origin(self, user: str = "alice", signs: bool = True, **more: str) -> Origin:
        """Operations that go through the custodian."""
        return Origin(self.gw, user, signs, via="/.via/archive", terminal="archive", router="gw", **more)

    def reload(self, prefixes: dict[str, str]) -> None:
        """Give users other prefixes at the terminal."""
        keys = Path(self.archive.router.environment["STAGEOUT_ROUTER_KEYS"])
        lines = [line.split() for line in keys.read_text().splitlines()]
        lines = [[words[0], words[1], prefixes.get(words[0], words[2]), *words[3:]] for words in lines]
        keys.write_text("".join(" ".join(words) + "\n" for words in lines))
        self.archive.router.reload()


@contextmanager
def _overlay(home: Path) -> Iterator[_Overlay]:
    authority, keys = trustme.CA(), {name: new_key() for name in (*_USERS, "gw")}
    users = {**_USERS, "gw": "/ router"}
    with ExitStack() as stack:
        own = {"STAGEOUT_ROUTER_ADDRESS": "archive", "STAGEOUT_ROUTER_INTERVAL": "3600"}
        archive = stack.enter_context(site(home / "archive", own, users, authority, keys))
        place = home / "gw"
        place.mkdir()
        keys["gw"].store("router-own-key", place / "own.key")
        (place / "custody").write_text(
            f"router archive localhost:{archive.router.port} ../archive/ca.pem\n"
            "custody alice * archive /\ncustody bob * archive -\n"
        )
        own = {
            "STAGEOUT_ROUTER_ADDRESS": "gw", "STAGEOUT_ROUTER_INTERVAL": "3600", "STAGEOUT_ROUTER_ROOT": "",
            "STAGEOUT_ROUTER_CUSTODY": str(place / "custody"), "STAGEOUT_ROUTER_OWN_KEY": str(place / "own.key"),
        }  # fmt: skip
        yield _Overlay(archive, stack.enter_context(site(place, own, users, authority, keys)))


@pytest.fixture
def both(tmp_path: Path) -> Iterator[_Overlay]:
    with _overlay(tmp_path) as found:
        yield found


def _give(origin: Origin, seq: int, path: str, data: bytes, **more: object) -> None:
    """Have a file taken into custody."""
    answer = origin.put(seq, path, data, Stageout_Release="custody", **more)
    assert answer.status_code == 200 and answer.json()["state"] in ("custody", "delivering", "done"), answer.text


def _reaches(origin: Origin, seq: int, *states: str) -> str:
    """Wait for one of these states."""
    told = lambda: origin.state(seq).get("state", "")  # noqa: E731
    wait_until(lambda: told() in states, timeout_s=_DELIVERED_S, what=f"{states}", describe=told, interval_s=0.2)
    return told()


def _kept(both: _Overlay, data: bytes) -> bool:
    """Whether the custodian has these bytes on its disk."""
    files = [path for path in (both.gw.router.home / "records").rglob("*") if path.is_file()]
    return any(path.stat().st_size >= len(data) and data in path.read_bytes() for path in files)


def test_an_operation_behind_the_highest_number_stops_nobody(both: _Overlay) -> None:
    """Fault 1."""
    first = both.origin()
    waits = first.fields(_HIGHEST, "mkdir", "/never", after=[_HIGHEST - 1])
    assert first.begin(waits, Stageout_Release="custody").status_code in (200, 201, 202)
    for restarts in (False, True):
        if restarts:
            both.gw.router.kill()
            both.gw.router.start()
        other = both.origin()
        _give(other, 1, f"/f{restarts}", b"x")
        _reaches(other, 1, "done")
        assert (both.archive.root / f"f{restarts}").read_bytes() == b"x"
    assert not (both.archive.root / "never").exists()


@pytest.mark.parametrize("why", ["in the way", "prefix"])
def test_the_only_copy_stays_and_is_tried_again(both: _Overlay, why: str) -> None:
    """Faults 2 and 22: refused by the terminal; the owner fetches it; when rights or the tree change it arrives."""
    data = os.urandom(BLOCK_BYTES + 5)
    if why == "in the way":
        (both.archive.root / "d").write_bytes(b"a file where a directory is due")
    else:
        both.reload({"alice": "/elsewhere"})
    origin = both.origin()
    _give(origin, 1, "/d/f", data)
    assert _reaches(origin, 1, "refused", "failed") == "refused"
    for restarts in (False, True):
        if restarts:
            both.gw.router.kill()
            both.gw.router.start()
        assert _kept(both, data)
        back = origin.ask("GET", "/1/data")
        assert back.status_code == 200 and back.content == data
    if why == "in the way":
        (both.archive.root / "d").unlink()
    else:
        both.reload({"alice": "/"})
    both.gw.router.reload()
    _reaches(origin, 1, "done")
    assert (both.archive.root / "d/f").read_bytes() == data


def test_the_end_of_an_only_copy_is_an_error_that_names_the_file(both: _Overlay) -> None:
    """Fault 22: the terminal has not taken it, and says so."""
    (both.archive.root / "d").write_bytes(b"a file where a directory is due")
    origin = both.origin()
    _give(origin, 1, "/d/lost-at-its-end", b"only copy", expires=int(time.time()) + 10)
    _reaches(origin, 1, "refused")
    wait_until(lambda: time.time() > origin.made + 12, what="its expiry", timeout_s=20)
    for _ in range(2):  # ended, and then dropped: at each start, and every minute
        both.gw.router.stop()
        both.gw.router.start()
        _reaches(origin, 1, "expired")
    errors = [
        line for line in both.gw.router.log.splitlines() if " ERROR " in line and "path=d/lost-at-its-end" in line
    ]
    assert len(errors) == 1 and not _kept(both, b"only copy")


def test_versions_of_one_name_keep_their_order(both: _Overlay) -> None:
    """Fault 4: the later one wins, although the terminal was away when both came, and the custodian was killed."""
    both.archive.router.stop()
    origins = [both.origin() for _ in range(5)]
    for number, origin in enumerate(origins):
        _give(origin, 1, "/version", f"version {number}".encode())
    both.gw.router.kill()
    both.gw.router.start()
    both.archive.router.start()
    ends = [_reaches(origin, 1, "done", "superseded") for origin in origins]
    assert ends[-1] == "done"
    assert (both.archive.root / "version").read_bytes() == b"version 4"


@pytest.mark.parametrize("what", ["restored", "lost"])
def test_a_restored_database_loses_no_deposit(both: _Overlay, what: str) -> None:
    """Fault 5: those made after the backup arrive, too."""
    both.archive.router.stop()
    origin, data = both.origin(), {name: os.urandom(BLOCK_BYTES + 9) for name in ("before", "since")}
    _give(origin, 1, "/before", data["before"])
    records = both.gw.router.home / "records"
    both.gw.router.stop()
    saved = {path: path.read_bytes() for path in records.rglob("*.sqlite*")}
    both.gw.router.start()
    _give(origin, 2, "/since", data["since"])
    both.gw.router.kill()
    for path in records.rglob("*.sqlite*"):
        path.unlink()
    if what == "restored":
        for path, content in saved.items():
            path.write_bytes(content)
    both.gw.router.start()
    both.archive.router.start()
    for name, content in data.items():
        wait_until((both.archive.root / name).exists, what=f"{name} at the terminal", timeout_s=_DELIVERED_S)
        assert (both.archive.root / name).read_bytes() == content


def test_a_key_without_rights_stops_no_name(both: _Overlay) -> None:
    """Fault 17: nothing is kept of a key that may not give anything into custody, and the owner waits for no other."""
    both.archive.router.stop()
    nobody, stranger = both.origin("carol"), both.origin("bob")
    answer = nobody.begin(nobody.fields(1, "mkdir", "/wanted"), Stageout_Release="custody")
    assert answer.status_code == 403, answer.text
    assert nobody.state(1).get("state", "unknown") == "unknown"
    stranger.begin(stranger.fields(1, "mkdir", "/wanted"), Stageout_Release="custody")
    owner = both.origin()
    _give(owner, 1, "/wanted", b"x")
    both.archive.router.start()
    _reaches(owner, 1, "done")
    assert (both.archive.root / "wanted").read_bytes() == b"x"
    assert stranger.state(1).get("state") != "done"


def test_every_cancel_is_answered_and_counts_before_its_operation(both: _Overlay) -> None:
    """Faults 15 and 19, at a custodian; also when its terminal is away."""
    both.archive.router.stop()
    owner = both.origin()
    never = owner.fields(1, "file", "/never", size=1)
    assert owner.cancel(never).status_code in (200, 202)
    late = owner.begin(never, Stageout_Release="custody")
    assert late.status_code in (200, 410) and late.json().get("state", "cancelled") in ("cancelling", "cancelled")
    begun = owner.fields(2, "file", "/begun", size=BLOCK_BYTES)
    assert owner.begin(begun, Stageout_Release="custody").status_code == 201
    assert owner.cancel(begun).status_code in (200, 202)
    assert owner.data(2, bytes(BLOCK_BYTES)).status_code in (409, 410)
    kept = owner.fields(3, "file", "/kept", size=4)
    _give(owner, 3, "/kept", b"kept")
    assert owner.cancel(kept).status_code in (200, 202)
    both.gw.router.kill()
    both.gw.router.start()
    both.archive.router.start()
    assert _reaches(owner, 3, "cancelled", "done") == "cancelled"
    assert [_reaches(owner, seq, "cancelled", "done") for seq in (1, 2)] == ["cancelled"] * 2
    late = owner.begin(never, Stageout_Release="custody")
    assert late.status_code == 410 or late.json()["state"] == "cancelled"
    assert not any((both.archive.root / name).exists() for name in ("never", "begun", "kept"))


def test_an_operation_by_two_routes_is_one(both: _Overlay) -> None:
    """Fault 16: custodian and owner bring it, and the file made since stays."""
    owner, data = both.origin(), b"by both"
    _give(owner, 1, "/both", data)
    _reaches(owner, 1, "done")
    file = both.archive.root / "both"
    file.write_bytes(b"made since")
    direct = Origin(both.archive, "alice", True, terminal="archive", router="archive", name=owner.name, made=owner.made)
    again = direct.begin(owner.fields(1, "file", "/both", size=len(data)))
    assert again.status_code in (200, 201) and direct.state(1)["state"] == "done"
    assert file.read_bytes() == b"made since"


def test_strangers_neither_see_nor_cancel_nor_settle(both: _Overlay) -> None:
    """Fault 11."""
    both.archive.router.stop()
    owner, data = both.origin(), b"mine alone"
    _give(owner, 1, "/mine", data)
    stranger = both.origin("bob", name=owner.name)
    stranger.made = owner.made
    assert stranger.state(1).get("state", "unknown") == "unknown"
    assert stranger.ask("GET", "/1/data").status_code in (403, 404)
    stranger.cancel(owner.fields(1, "file", "/mine", size=len(data)))
    stranger.ask("PUT", "/low", b'{"below": 9}', Content_Type="application/json")
    assert owner.state(1)["state"] in ("custody", "delivering")
    both.archive.router.start()
    _reaches(owner, 1, "done")
    assert (both.archive.root / "mine").read_bytes() == data


def test_a_custodian_forges_nothing(both: _Overlay) -> None:
    """Fault 8: what its spool holds is changed, with the digests of the blocks in its records as they were."""
    both.archive.router.stop()
    owner, data = both.origin(), os.urandom(BLOCK_BYTES)
    _give(owner, 1, "/signed", data)
    both.gw.router.stop()
    files = [path for path in (both.gw.router.home / "records").rglob("*") if path.is_file()]
    changed = [path for path in files if data in path.read_bytes()]
    assert changed
    for path in changed:
        path.write_bytes(path.read_bytes().replace(data, os.urandom(BLOCK_BYTES)))
    both.gw.router.start()
    both.archive.router.start()
    _reaches(owner, 1, "lost", "refused", "failed", "custody", "delivering")
    assert not (both.archive.root / "signed").exists()
    assert _reaches(owner, 1, "lost") == "lost"
