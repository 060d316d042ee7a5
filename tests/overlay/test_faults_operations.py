"""Faults of operations at a terminal, by requests over HTTP that anybody can send."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.overlay.http_site import Site, site
from tests.overlay.requesting import BLOCK_BYTES, Origin

_MIB = 1 << 20
_HIGHEST = 2**63 - 1


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    users = {"alice": "/", "bob": "/bob", "gw": "/ router"}
    with site(tmp_path_factory.mktemp("site"), users=users) as found:
        (found.root / "bob").mkdir()
        yield found


def _reset(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("signs", [False, True])
def test_an_operation_behind_the_highest_number_stops_nobody(here: Site, signs: bool) -> None:
    """Fault 1."""
    first = Origin(here, signs=signs)
    assert first.begin(first.fields(1, "mkdir", "/never", after=[_HIGHEST])).status_code == 400
    assert first.begin(first.fields(_HIGHEST, "mkdir", "/never", after=[_HIGHEST - 1])).status_code == 202
    for restarts in (False, True):
        if restarts:
            here.router.kill()
            here.router.start()
        other = Origin(here, "bob", signs)
        assert other.put(1, f"/bob/f{signs}{restarts}", b"x").status_code == 200
        assert first.state(_HIGHEST)["state"] == "held"
    assert not (here.root / "never").exists()
    assert " task-failed " not in here.router.log


def test_numbers_outside_their_range_are_refused(here: Site) -> None:
    """Fault 1: whatever JSON allows."""
    origin = Origin(here)
    for wrong in (
        {"after": [_HIGHEST + 1]}, {"after": [-1]}, {"after": [1.5]}, {"after": [True]}, {"after": list(range(1, 20))},
        {"size": -1}, {"size": 2**70}, {"mtime": 2**64}, {"mode": -1}, {"expires": 2**63}, {"all_below": -5},
        {"made": "now"}, {"seq": 0}, {"path": "no-slash"}, {"path": "/../f"}, {"path": "/\ud800"}, {"kind": "publish"},
        {"origin": "ab" * 16}, {"more": 1},
    ):  # fmt: skip
        facts = {**origin.fields(1, "file", "/wrong", size=1), **wrong}
        answer = origin.ask("PUT", "/1", json.dumps(facts).encode(), Content_Type="application/json")
        assert answer.status_code in (400, 413), (wrong, answer.text)
    for text in ('{"seq": 1e400}', '{"seq": NaN}', "[" * 50_000, "\ud800", '{"a": 1, "a": 2}', ""):
        body = text.encode("utf-8", "surrogatepass")
        assert origin.ask("PUT", "/1", body, Content_Type="application/json").status_code == 400, text[:20]
    for place in ("/0", f"/{_HIGHEST + 1}", "/-1", "/1e3", "/%31"):
        assert origin.begin({**origin.fields(1, "mkdir", "/x"), "seq": place[1:]}).status_code in (400, 404), place
    assert " http-request-failed " not in here.router.log and " task-failed " not in here.router.log
    assert origin.state(1) in ({}, {"state": "unknown"})


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("by", ["alice", "bob", "gw"])
def test_a_signed_delete_that_is_repeated_removes_nothing(here: Site, by: str, restarts: bool) -> None:
    """Fault 16: the token of the owner, of somebody else or of a router, and the operation of before."""
    file = _reset(here.root / "again", b"old")
    owner = Origin(here, signs=True)
    delete = owner.fields(1, "delete", "/again")
    assert owner.begin(delete).status_code in (200, 201) and not file.exists()
    file.write_bytes(b"made since")
    if restarts:
        here.router.kill()
        here.router.start()
    repeated = Origin(here, signs=True, by=by, name=owner.name, made=owner.made)
    repeated.begin(delete)
    assert file.read_bytes() == b"made since"
    assert owner.state(1)["state"] == "done"


@pytest.mark.parametrize("by", ["alice", "bob", "gw"])
def test_an_old_version_that_is_repeated_replaces_nothing(here: Site, by: str) -> None:
    """Fault 16."""
    owner = Origin(here, signs=True)
    assert owner.put(1, "/version", b"old").status_code == 200
    assert owner.put(2, "/version", b"new").status_code == 200
    repeated = Origin(here, signs=True, by=by, name=owner.name, made=owner.made)
    repeated.put(1, "/version", b"old")
    facts = repeated.fields(1, "file", "/version", size=3)
    repeated.data(1, b"old")
    repeated.manifest(facts, b"old")
    assert (here.root / "version").read_bytes() == b"new"


def test_what_is_signed_for_one_router_is_not_done_at_another(here: Site) -> None:
    """Fault 10: one user, one key, two terminals."""
    file = _reset(here.root / "here", b"x")
    elsewhere = Origin(here, signs=True, terminal="other.example.org")
    for kind in ("delete", "file"):
        answer = elsewhere.begin(elsewhere.fields(1, kind, "/here", size=1 if kind == "file" else None))
        assert answer.status_code == 403, answer.text
    # nor with the other name in its place under the same signature
    signed = elsewhere.sign("stageout-operation", elsewhere.fields(1, "delete", "/here"))
    head, _, signature = signed.split(".")
    mine = Origin(here, signs=True, name=elsewhere.name).sign(
        "stageout-operation", elsewhere.fields(1, "delete", "/here")
    )
    forged = f"{head}.{mine.split('.')[1][:-4]}AAAA.{signature}"
    assert elsewhere.ask("PUT", "/1", forged.encode(), Content_Type="application/jose").status_code in (400, 403)
    assert file.read_bytes() == b"x"


def test_a_signature_of_one_use_is_none_of_another(here: Site) -> None:
    """A PUT that was overheard is no cancel, nor the other way round."""
    owner = Origin(here, signs=True)
    facts = owner.fields(1, "mkdir", "/use")
    for method, use in (("DELETE", "stageout-operation"), ("PUT", "stageout-cancel"), ("PUT", "JWT")):
        body = owner.sign(use, facts).encode()
        assert owner.ask(method, "/1", body, Content_Type="application/jose").status_code in (400, 403), use
    assert owner.begin(facts).status_code in (200, 201)


@pytest.mark.parametrize("signs", [False, True])
def test_strangers_neither_see_nor_cancel_nor_settle(here: Site, signs: bool) -> None:
    """Fault 11: they know origin and number."""
    owner = Origin(here, signs=signs)
    done, waits = owner.fields(1, "mkdir", f"/mine{signs}"), owner.fields(20, "mkdir", f"/waits-for{signs}", after=[7])
    assert owner.begin(done).status_code in (200, 201)
    assert owner.begin(waits).status_code == 202
    stranger = Origin(here, "bob", signs, name=owner.name, made=owner.made)
    assert stranger.state(1).get("state", "unknown") == "unknown"
    assert stranger.cancel({**waits, "path": "/bob/x"}).status_code in (200, 202, 403, 404, 409)
    assert stranger.begin(stranger.fields(7, "mkdir", f"/bob/seven{signs}")).status_code in (200, 201), "its own number"
    settled = stranger.ask("PUT", "/low", b'{"below": 30}', Content_Type="application/json")
    assert settled.status_code in (204, 403, 404)
    found = stranger.ask("GET", "?from=1&to=20")
    states = found.json().get("operations", {}) if found.status_code == 200 else {}
    assert {states[seq]["state"] for seq in states.keys() - {"7"}} <= {"unknown", "cancelled", "settled"}
    assert owner.state(1)["state"] == "done" and owner.state(20)["state"] == "held"
    assert owner.begin(owner.fields(7, "mkdir", f"/seven{signs}")).status_code in (200, 201)
    assert owner.state(20, wait_s=20)["state"] == "done"


@pytest.mark.parametrize("signs", [False, True])
def test_every_cancel_is_answered_and_counts_before_its_operation(here: Site, signs: bool) -> None:
    """Faults 15 and 19."""
    owner = Origin(here, signs=signs)
    never = owner.fields(1, "file", f"/never{signs}", size=1)
    assert owner.cancel(never).status_code == 200
    assert owner.begin(never).status_code == 410
    begun = owner.fields(2, "file", f"/begun{signs}", size=BLOCK_BYTES)
    assert owner.begin(begun).status_code == 201
    assert owner.cancel(begun).status_code == 200
    assert owner.data(2, bytes(BLOCK_BYTES)).status_code == 410
    assert owner.manifest(begun, bytes(BLOCK_BYTES)).status_code == 410
    waits = owner.fields(30, "mkdir", f"/waits{signs}", after=[9])
    assert owner.begin(waits).status_code == 202
    assert owner.cancel(waits).status_code == 200
    here.router.kill()
    here.router.start()
    assert owner.begin(never).status_code == 410 and owner.begin(waits).status_code == 410
    assert owner.put(4, f"/done{signs}", b"x").status_code == 200
    assert owner.cancel(owner.fields(4, "file", f"/done{signs}", size=1)).status_code == 409
    for name in ("never", "begun", "waits"):
        assert not (here.root / f"{name}{signs}").exists()
    assert not [*(here.root / ".stageout/staging").iterdir()]


def test_forged_blocks_are_not_published_under_a_signed_list(here: Site) -> None:
    """Fault 8: the digests of blocks on the way are right for the forged bytes."""
    owner = Origin(here, signs=True)
    right, forged = os.urandom(3 * BLOCK_BYTES), os.urandom(3 * BLOCK_BYTES)
    facts = owner.fields(1, "file", "/signed", size=len(right))
    assert owner.begin(facts).status_code == 201
    assert owner.begin({**facts, "digest_kind": "xxh3"}).status_code == 409
    assert owner.data(1, forged).status_code == 204
    answer = owner.manifest(facts, right)
    assert answer.status_code == 422 and not (here.root / "signed").exists(), answer.text
    assert owner.data(1, right).status_code == 204
    assert owner.manifest(facts, right).status_code == 200
    assert (here.root / "signed").read_bytes() == right


def test_an_operation_of_other_fields_is_another_one(here: Site) -> None:
    owner = Origin(here, signs=True)
    assert owner.put(1, "/fields", b"x").status_code == 200
    for changes in (
        {"path": "/fields2"},
        {"kind": "delete", "size": None},
        {"mode": 0o777},
        {"digest_kind": "blake2b"},
    ):
        answer = owner.begin({**owner.fields(1, "file", "/fields", size=1), **changes})
        assert answer.status_code == 409, (changes, answer.text)
    assert (here.root / "fields").read_bytes() == b"x" and not (here.root / "fields2").exists()


def _resident_bytes(here: Site) -> int:
    found = 0
    for pid in (here.router.pid, *here.router.workers()):
        rows = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        assert rows
        found += int(rows[1]) * 1024
    return found


def test_operations_without_data_take_the_share_of_their_subject_alone(tmp_path: Path) -> None:
    """Faults 6 and 18."""
    wide = "w" * 200
    with site(tmp_path) as here, ExitStack() as stack:
        (here.root / "bob").mkdir()
        origin = Origin(here)
        stack.callback(origin.close)
        for seq in range(10_001, 10_101):
            origin.begin(origin.fields(seq, "file", f"/{seq}", size=10))
        before = _resident_bytes(here)
        statuses = [
            origin.begin(origin.fields(seq, "file", f"/{wide}/{wide}/{seq}", size=10)).status_code
            for seq in range(1, 1001)
        ]
        held = [
            origin.begin(origin.fields(seq, "mkdir", f"/{wide}/{seq}", after=[1])).status_code
            for seq in range(1001, 2001)
        ]
        grown, logged = _resident_bytes(here) - before, len(here.router.log)
        counted = {status: (statuses + held).count(status) for status in {*statuses, *held}}
        print(f"2000 operations without data: {counted}; {grown >> 20} MiB of memory, {logged} bytes of log")
        assert set(counted) <= {201, 202, 429, 507}
        assert grown < 48 * _MIB and logged < 100_000, "frames took 395 MB for 6000"
        other = Origin(here, "bob")
        assert other.put(1, "/bob/f", b"x").status_code == 200
        assert here.curl("/bob/g", "--request", "PUT", "--data", "x", token=here.token("bob"))[0] == 201


@pytest.mark.pool
@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk needs root")
def test_where_there_is_no_room_everybody_hears_so_at_once(tmp_path: Path) -> None:
    """Fault 18: one has reserved it all, and brings nothing; smaller files find room, and a cancel gives it back."""
    home = tmp_path / "site"
    home.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "small", str(home)], check=True)
    try:
        with site(home) as here:
            (here.root / "bob").mkdir()
            first, other = Origin(here), Origin(here, "bob")
            large = first.fields(1, "file", "/large", size=40 * _MIB)
            assert first.begin(large).status_code == 201
            began_s = time.monotonic()
            answer = other.put(1, "/bob/f", bytes(30 * _MIB))
            assert answer.status_code == 507 and "Retry-After" in answer.headers
            assert time.monotonic() - began_s < 10
            assert other.put(2, "/bob/f", bytes(_MIB)).status_code == 200
            assert first.cancel(large).status_code == 200
            assert other.put(3, "/bob/f", bytes(30 * _MIB)).status_code == 200
    finally:
        subprocess.run(["umount", "-l", str(home)], check=True)


def test_operations_without_a_right_leave_nothing(here: Site) -> None:
    """Faults 17, 18 and 24: nothing stays, and nobody else waits for the name."""
    stranger = Origin(here, "bob", signs=True)
    unsigned = Origin(here, "bob")
    before, log = _resident_bytes(here), len(here.router.log)
    for seq in range(1, 1001):
        for one in (stranger, unsigned):
            answer = one.begin(one.fields(seq, "file", "/alices", size=10))
            assert answer.status_code == 403, answer.text
    assert _resident_bytes(here) - before < 32 * _MIB
    assert len(here.router.log) - log < 20_000
    assert not [*(here.root / ".stageout/staging").iterdir()]
    assert stranger.state(1) in ({}, {"state": "unknown"})
    owner = Origin(here, signs=True)
    assert owner.put(1, "/alices", b"x").status_code == 200
