"""Lots over HTTP, and the share of the disk that one subject may reserve."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stageout.overlay.http.operations import FOLDER
from stageout.overlay.rules.operations import Kind
from tests.overlay.http_site import Site, site
from tests.overlay.operations_client import Answer, Sender

LOTS = f"{FOLDER}/lots"
MIB = 1 << 20


@pytest.fixture(name="place_", scope="module")
def _place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("lots")) as found:
        yield found


@pytest.fixture
def alice(place_: Site) -> Iterator[Sender]:
    with Sender(place_) as found:
        yield found


@pytest.fixture
def bob(place_: Site) -> Iterator[Sender]:
    with Sender(place_, user="bob") as found:
        yield found


def reserve(sender: Sender, size: int, below: str = "/", **more: object) -> Answer:
    body = json.dumps({"bytes": size, "seconds": 600, "below": below, **more}).encode()
    return sender.ask("POST", LOTS, body)


def held(root: Path, lot: str) -> int:
    return (root / ".stageout/lots" / lot).stat().st_blocks * 512


def test_a_lot_has_its_space_until_it_is_released(alice: Sender) -> None:
    made = reserve(alice, 2 * MIB, "/run%207/")
    assert made.status == 201, made
    lot = made.facts["id"]
    assert made.headers["Location"] == f"{LOTS}/{lot}"
    assert held(alice.site.root, lot) >= 2 * MIB
    told = alice.ask("GET", made.headers["Location"])
    assert (told.status, told.facts["bytes"], told.facts["below"]) == (200, 2 * MIB, "/run%207")
    assert alice.ask("DELETE", made.headers["Location"]).status == 204
    assert alice.ask("GET", made.headers["Location"]).status == 404
    assert alice.ask("DELETE", made.headers["Location"]).status == 404
    assert not (alice.site.root / ".stageout/lots" / lot).exists()


def test_a_put_takes_from_its_lot_and_gives_back_what_it_did_not_use(alice: Sender) -> None:
    where = reserve(alice, 3 * MIB, "/run8").headers["Location"]
    lot = where.rpartition("/")[2]

    def left() -> int:
        return int(alice.ask("GET", where).facts["bytes"])

    data = os.urandom(MIB)
    fields = alice.fields(Kind.FILE, "run8/f", size=MIB)
    assert alice.begin(fields, Stageout_Lot=lot).status == 201
    assert alice.begin(fields, Stageout_Lot=lot).status == 201
    assert left() == 2 * MIB
    assert alice.range(fields, data).status == 204
    assert alice.manifest(fields, data).state == "done"
    assert left() == 2 * MIB
    given_up = alice.fields(Kind.FILE, "run8/g", size=2 * MIB)
    assert alice.begin(given_up, Stageout_Lot=lot).status == 201
    assert left() == 0
    assert alice.cancel(given_up).status == 200
    assert left() == 2 * MIB and held(alice.site.root, lot) >= 2 * MIB
    for path, size in (("run8/h", 2 * MIB + 1), ("run9/h", 1)):
        refused = alice.begin(alice.fields(Kind.FILE, path, size=size), Stageout_Lot=lot)
        assert (refused.status, refused.facts["reason"]) == (413, "lot"), refused
    assert left() == 2 * MIB
    assert alice.ask("DELETE", where).status == 204


def test_a_lot_and_its_parts_outlive_the_router(tmp_path: Path) -> None:
    with site(tmp_path / "router") as running, Sender(running) as alice:
        where = reserve(alice, 3 * MIB).headers["Location"]
        lot = where.rpartition("/")[2]
        fields, data = alice.fields(Kind.FILE, "f", size=MIB), os.urandom(MIB)
        assert alice.begin(fields, Stageout_Lot=lot).status == 201
        alice.close()
        running.router.kill()
        running.router.start()
        assert alice.ask("GET", where).facts["bytes"] == 2 * MIB
        assert alice.range(fields, data).status == 204
        assert alice.manifest(fields, data).state == "done"
        alice.close()
        running.router.kill()
        running.router.start()
        assert alice.ask("GET", where).facts["bytes"] == 2 * MIB


def test_a_lot_belongs_to_its_owner(alice: Sender, bob: Sender) -> None:
    where = reserve(alice, MIB, "/bob").headers["Location"]
    assert bob.ask("GET", where).status == 404
    assert bob.ask("DELETE", where).status == 404
    lot = where.rpartition("/")[2]
    assert bob.begin(bob.fields(Kind.FILE, "bob/f", size=1), Stageout_Lot=lot).facts["reason"] == "lot"
    assert reserve(bob, MIB, "/alice").status == 403
    assert alice.ask("GET", where).facts["bytes"] == MIB
    assert alice.ask("DELETE", where).status == 204


def test_what_is_no_lot(alice: Sender) -> None:
    for body in (b"", b"[]", b'{"bytes": 1}', b'{"bytes": 0, "seconds": 1}', b'{"bytes": 1, "seconds": -1}'):
        assert alice.ask("POST", LOTS, body).status == 400
    assert reserve(alice, 1, "/../x").status == 400
    assert reserve(alice, 1, more=1).status == 400
    assert alice.ask("GET", LOTS).status == 405
    assert alice.ask("POST", f"{LOTS}/{'0' * 32}").status == 405
    assert alice.ask("GET", f"{LOTS}/x").status == 404
    assert alice.begin(alice.fields(Kind.FILE, "f", size=1), Stageout_Lot="no lot").status == 413
