"""Custody by HTTP with real routers: what a custodian answered holds, whatever happens to it and to the terminal."""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import jwt
import pytest

from overlay_router.operations.spool import read_kept
from stageout.core.signing import SigningKey, new_key
from stageout.overlay.http import signing
from stageout.overlay.http.operations import BLOCK_BYTES, digest_kinds, place
from stageout.overlay.rules.operations import Kind
from tests.overlay.custody_site import Overlay, Through, content, expires_in, overlay
from tests.overlay.http_site import private_of


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Overlay]:
    """A terminal and a custodian."""
    with overlay(tmp_path_factory.mktemp("custody")) as found:
        found.add("archive")
        found.custodian("gw", "archive")
        yield found


@pytest.mark.parametrize("signs", [True, False])
def test_custody_and_delivery(both: Overlay, signs: bool) -> None:
    data, sender = content(), both.sender("gw", signs=signs)
    fields, answer = sender.put(f"a/{signs}", data)
    assert (answer.status, answer.state) == (200, "custody")
    sender.until(fields, "done")
    assert (both.sites["archive"].root / f"a/{signs}").read_bytes() == data


def test_names_in_their_order(both: Overlay) -> None:
    sender, root = both.sender("gw"), both.sites["archive"].root
    made = sender.fields(Kind.MKDIR, "names")
    assert sender.begin(made).status == 202
    put, _ = sender.put("names/f", b"1", after=(made.seq,))
    moved = sender.fields(Kind.RENAME, "names/f", second="names/g", after=(put.seq,))
    assert sender.begin(moved).status == 202
    sender.until(moved, "done")
    assert (root / "names/g").read_bytes() == b"1"
    gone = sender.fields(Kind.DELETE, "names", all_below=moved.seq + 1)
    sender.begin(gone)
    sender.until(gone, "done")
    assert not (root / "names").exists()
    query = f"{place(sender.origin)}?until=done&from=1&to={gone.seq}"
    assert sender.ask("GET", query).facts["reached"] is True
    assert sender.ask("GET", f"{query}9").facts["reached"] is False


def test_nothing_is_taken_without_an_entry(both: Overlay) -> None:
    bob = both.sender("gw", "bob", signs=False)
    assert bob.begin(bob.fields(Kind.FILE, "bob/f", size=1)).status == 403
    alice = both.sender("gw", via=("elsewhere",))
    assert alice.begin(alice.fields(Kind.FILE, "f", size=1)).status == 403
    circle = both.sender("gw", via=("gw", "archive"))
    assert circle.begin(circle.fields(Kind.FILE, "f", size=1)).status == 400
    assert both.sender("archive", via=("gw",)).begin(alice.fields(Kind.FILE, "f", size=1, terminal="gw")).status == 403


@dataclass
class _Pilot(Through):
    """It has a key of its own, and a token of alice that is bound to it."""

    key: SigningKey = field(default_factory=new_key)

    def bound(self, names: list[str], **claims: object) -> str:
        jwk = {"kty": "OKP", "crv": "Ed25519", "x": self.key.public.partition(":")[2]}
        said = {
            "sub": "pilot7",
            "aud": names,
            "scope": "storage.create:/run7 storage.modify:/run7",
            "cnf": {"jwk": jwk},
        }
        return self.site.token("alice", **{**said, **claims})

    def shows(self, delegated: str, name: str, key: SigningKey | None = None) -> None:
        now = int(time.time())
        said = {"aud": name, "iat": now, "nbf": now, "exp": now + 600, "delegated": delegated}
        self.token = jwt.encode(said, private_of(key or self.key), "EdDSA")

    def jws(self, kind: str, payload: bytes) -> str:
        return signing.sign(kind, payload, self.key)


def test_a_pilot_hands_over_with_its_own_key_and_goes(tmp_path: Path) -> None:
    with overlay(tmp_path) as found:
        archive = found.add("archive")
        gateway = found.custodian("gw", "archive")
        archive.router.stop()
        with _Pilot(gateway, "alice", True) as pilot:
            delegated = pilot.bound(["gw", "archive"])
            pilot.token = delegated
            assert pilot.begin(pilot.fields(Kind.FILE, "run7/g", size=1)).status == 401, "it is bound to a key"
            pilot.shows(delegated, "gw", new_key())
            assert pilot.begin(pilot.fields(Kind.FILE, "run7/g", size=1)).status == 401, "of another one"
            pilot.shows(delegated, "gw")
            data = content()
            fields, answer = pilot.put("run7/f", data)
            assert answer.state == "custody"
            outside, answer = pilot.put("other/f", data)
            assert answer.state == "custody", "the terminal decides about names"
        user = found.sender("gw")
        assert user.state(fields).state in ("custody", "delivering")
        assert found.sender("gw", "bob").state(fields).status == 403
        archive.router.start()
        user.until(fields, "done")
        assert (archive.root / "run7/f").read_bytes() == data
        user.until(outside, "refused")
        assert "no right" in user.state(outside).facts["reason"] and not (archive.root / "other").exists()
        assert user.cancel(outside).status == 202
        user.until(outside, "cancelled")


def test_the_origin_of_somebody_else(both: Overlay) -> None:
    alice, bob = both.sender("gw"), both.sender("gw", "bob")
    bob.origin = alice.origin
    hers, _ = alice.put("bob/hers", b"hers")
    his, answer = bob.put("bob/his", b"his")
    assert answer.state == "custody", "they are two operations"
    for sender, fields in ((alice, hers), (bob, his)):
        sender.until(fields, "done")
    assert bob.cancel(hers).status == 409
    one = place(alice.origin)
    assert alice.cancel(alice.fields(Kind.MKDIR, "bob/second")).status == 202
    assert list(bob.ask("GET", f"{one}?from=1&to=2").facts["operations"].values())[1] == {"state": "unknown"}
    assert bob.low(3).status == 204, "the numbers of others do not count"
    assert alice.state(hers).state == "done" and bob.state(his).status != 200
    alice.signs = False
    assert alice.cancel(hers).status == 403, "a signed operation is cancelled with a signature"
    stranger = both.sender("gw", "bob")
    assert stranger.ask("GET", place(alice.origin, 99)).status == 404


def test_a_terminal_that_was_away(tmp_path: Path) -> None:
    with overlay(tmp_path) as found:
        archive = found.add("archive")
        found.custodian("gw", "archive")
        archive.router.stop()
        sender = found.sender("gw")
        first, _ = sender.put("f", b"first")
        second, _ = sender.put("f", b"second")
        cancelled, _ = sender.put("g", b"not this one")
        answer = sender.cancel(cancelled)
        assert (answer.status, answer.state) == (202, "cancelling")
        never = sender.fields(Kind.FILE, "never", size=1)
        assert sender.cancel(never).status == 202
        soon, _ = sender.put("late", b"late", **expires_in(4))
        time.sleep(5)
        assert sender.state(soon).state == "custody", "nobody has asked the terminal"
        archive.router.start()
        for fields, state in ((first, "done"), (second, "done"), (cancelled, "cancelled"), (never, "cancelled")):
            sender.until(fields, state)
        sender.until(soon, "expired")
        assert (archive.root / "f").read_bytes() == b"second"
        assert not (archive.root / "g").exists() and not (archive.root / "late").exists()
        assert sender.cancel(first).status == 409
        assert "custody-dropped" in found.sites["gw"].router.log and "late" in found.sites["gw"].router.log


def test_names_of_what_is_in_custody(tmp_path: Path) -> None:
    with overlay(tmp_path) as found:
        archive = found.add("archive")
        found.custodian("gw", "archive")
        archive.router.stop()
        sender, bob, data = found.sender("gw"), found.sender("gw", "bob"), content(1.5)
        sender.put("d/f", b"older")
        sender.put("d/f", data)
        answer = sender.ask("GET", "/d/f", Range="bytes=1-5")
        assert answer.status == 206 and answer.body == data[1:6]
        assert answer.headers["Stageout-State"] == "custody" and answer.headers["ETag"] == f'"{sender.origin}-2"'
        assert sender.ask("HEAD", "/d/f").headers["Content-Length"] == str(len(data))
        for one, path in ((bob, "/d/f"), (sender, "/d/g")):
            answer = one.ask("GET", path)
            assert answer.status == 404 and answer.headers["Link"] == f'<https://archive{path}>; rel="canonical"'
        assert sender.ask("PUT", "/d/f", b"x").status == 405
        assert found.sender("gw", via=("elsewhere",)).ask("GET", "/d/f").status == 404


def test_refused_and_then_allowed(tmp_path: Path) -> None:
    with overlay(tmp_path) as found:
        archive = found.add("archive")
        gateway = found.custodian("gw", "archive")
        bob = found.sender("gw", "bob")
        fields, answer = bob.put("other/f", b"data")
        assert answer.state == "custody"
        bob.until(fields, "refused")
        assert bob.ask("GET", f"{place(fields.origin, fields.seq)}/data").body == b"data", "its owner can have it back"
        keys = Path(archive.router.environment["STAGEOUT_ROUTER_KEYS"])
        keys.write_text(keys.read_text().replace(" /bob\n", " /\n"))
        archive.router.reload()
        gateway.router.reload()
        bob.until(fields, "done")
        assert (archive.root / "other/f").read_bytes() == b"data"


def test_a_terminal_that_was_full(tmp_path: Path) -> None:
    with overlay(tmp_path) as found:
        arm = tmp_path / "arm"
        archive = found.add("archive", STAGEOUT_FAULTS=f"operation-reserve=ENOSPC@{arm}")
        found.custodian("gw", "archive")
        arm.touch()
        sender = found.sender("gw")
        fields, _ = sender.put("f", b"data")
        sender.until(fields, "done")
        assert not arm.exists() and (archive.root / "f").read_bytes() == b"data"


_STEPS = ("kept-row", "kept-file", "kept-take", "kept-end", "kept-drop")


def test_a_custodian_that_dies_at_each_step(tmp_path: Path) -> None:
    with overlay(tmp_path) as found:
        archive = found.add("archive")
        faults = " ".join(f"{label}=kill-after@{tmp_path / label}" for label in _STEPS)
        gateway = found.custodian("gw", "archive", STAGEOUT_FAULTS=faults)
        for label in _STEPS:
            (tmp_path / label).touch()
            sender, data = found.sender("gw"), content(1.5)
            times = expires_in(3600)
            with contextlib.suppress(OSError, http.client.HTTPException):
                sender.put(label, data, **times)
            gateway.router.wait_for_end()
            assert not (tmp_path / label).exists()
            gateway.router.start()
            sender.close()
            sender._seq = 0
            fields, _ = sender.put(label, data, **times)
            sender.until(fields, "done")
            assert (archive.root / label).read_bytes() == data


@pytest.mark.parametrize("what", ["lost", "restored"])
def test_a_custodian_whose_database_is_gone(tmp_path: Path, what: str) -> None:
    with overlay(tmp_path) as found:
        archive = found.add("archive")
        gateway = found.custodian("gw", "archive")
        sender = found.sender("gw")
        delivered, _ = sender.put("delivered", b"0")
        sender.until(delivered, "done")
        archive.router.stop()
        early, _ = sender.put("f", b"1")
        database = gateway.router.home / "records/custody-operations.sqlite"
        gateway.router.stop()
        backup = database.read_bytes()
        gateway.router.start()
        sender.close()
        later, _ = sender.put("f", b"2")
        other, _ = sender.put("g", b"3")
        gateway.router.stop()
        for path in database.parent.glob("custody-operations.sqlite*"):
            path.unlink()
        if what == "restored":
            database.write_bytes(backup)
        gateway.router.start()
        archive.router.start()
        sender.close()
        newest, _ = sender.put("f", b"4")
        for fields in (early, later, other, newest):
            sender.until(fields, "done")
        assert (archive.root / "f").read_bytes() == b"4" and (archive.root / "g").read_bytes() == b"3"


def test_two_custodians_and_a_chain(tmp_path: Path) -> None:
    with overlay(tmp_path) as found:
        archive = found.add("archive")
        found.custodian("gw2", "archive")
        found.custodian("gw", "archive", "gw2")
        first, second = found.sender("gw"), found.sender("gw2")
        second.origin = first.origin
        times = expires_in(3600)
        fields, _ = first.put("both", b"data", **times)
        again, answer = second.put("both", b"data", **times)
        assert fields == again and answer.status == 200
        for sender in (first, second):
            sender.until(fields, "done")
        tag = first.state(fields).facts["etag"]
        assert tag and tag == second.state(fields).facts["etag"], "it was executed once"
        far, data = found.sender("gw", via=("gw2", "archive")), content()
        chained, answer = far.put("chain", data)
        assert answer.state == "custody"
        far.until(chained, "done")
        assert (archive.root / "chain").read_bytes() == data
        bare = found.sender("gw", via=("gw2", "archive"), signs=False)
        assert bare.put("bare", b"")[1].state == "custody"


def test_a_carrier_that_forges_blocks(tmp_path: Path) -> None:
    """It has changed bytes, and the cheap digests with them; the signed list decides."""
    with overlay(tmp_path) as found:
        archive = found.add("archive")
        gateway = found.custodian("gw", "archive")
        archive.router.stop()
        sender, data = found.sender("gw"), content(2)
        fields, _ = sender.put("f", data)
        gateway.router.stop()
        (file,) = (gateway.router.home / "records/custody").glob("*.operation")
        _, digests = read_kept(file)
        forged = b"x" * len(data)
        kind = digest_kinds()[fields.block_kind]
        cheap = b"".join(kind.of(forged[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES))
        assert digests is not None
        file.write_bytes(file.read_bytes().replace(digests.blocks, cheap))
        file.with_name(file.name[: -len(".operation")]).write_bytes(forged)
        archive.router.start()
        gateway.router.start()
        sender.close()
        sender.until(fields, "refused")
        assert not (archive.root / "f").exists()
        honest = found.sender("archive", via=())
        honest.origin = sender.origin
        assert honest.begin(fields, Stageout_Release="delivered").status == 201
        assert honest.range(fields, data).status == 204
        assert honest.manifest(fields, data).state == "done"
        gateway.router.reload()
        sender.until(fields, "done")
        assert (archive.root / "f").read_bytes() == data
