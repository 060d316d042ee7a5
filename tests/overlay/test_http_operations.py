"""Operations as resources at a terminal: each request of docs/developer/requests.md, against a real router."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stageout.overlay.http import operations, signing
from stageout.overlay.http.operations import BLOCK_BYTES, FOLDER, place, to_json
from stageout.overlay.http.signing import thumbprint
from stageout.overlay.rules.operations import Kind, signed_owner
from tests.overlay.http_site import Site, site
from tests.overlay.operations_client import Answer, Sender, other

DATA = os.urandom(3 * BLOCK_BYTES + 12_345)


@pytest.fixture(scope="module")
def place_(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("operations")) as found:
        yield found


@pytest.fixture(params=[False, True], ids=["unsigned", "signed"])
def alice(place_: Site, request: pytest.FixtureRequest) -> Iterator[Sender]:
    with Sender(place_, signs=request.param) as found:
        yield found


@pytest.fixture
def plain(place_: Site) -> Iterator[Sender]:
    with Sender(place_) as found:
        yield found


def name(sender: Sender) -> str:
    return f"{sender.origin[:8]}/f"


def test_a_file_comes_whole(alice: Sender) -> None:
    fields, answer = alice.put(name(alice), DATA, mtime=1_234_567_890, mode=0o600)
    assert (answer.status, answer.state) == (200, "done"), answer
    found = alice.site.root / name(alice)
    assert found.read_bytes() == DATA
    assert (found.stat().st_mtime, found.stat().st_mode & 0o777, found.stat().st_nlink) == (1_234_567_890, 0o600, 1)
    assert alice.ask("GET", f"/{name(alice)}").headers["ETag"] == answer.facts["etag"]
    assert alice.state(fields).facts == answer.facts
    assert alice.begin(fields).facts == answer.facts and alice.begin(fields).status == 200
    assert alice.manifest(fields, DATA).facts == answer.facts
    assert alice.range(fields, DATA).status == 409
    assert not list((alice.site.root / ".stageout/operations").glob(f"{alice.origin}*"))


def test_an_empty_file(alice: Sender) -> None:
    assert alice.put(name(alice), b"")[1].state == "done"
    assert (alice.site.root / name(alice)).read_bytes() == b""


def test_ranges_by_two_connections_in_any_order(alice: Sender) -> None:
    fields = alice.fields(Kind.FILE, name(alice), size=len(DATA))
    assert alice.begin(fields).facts == {"state": "receiving"}
    with Sender(alice.site, signs=alice.signs, origin=alice.origin) as second:
        assert second.range(fields, DATA, 2, 3).status == 204
        assert alice.range(fields, DATA, 0, 0).status == 204
        early = alice.manifest(fields, DATA)
        assert (early.status, early.facts) == (202, {"state": "receiving", "have": [[0, 0], [2, 3]]})
        assert not (alice.site.root / name(alice)).exists()
        assert second.range(fields, DATA, 1, 1).status == 204
    assert alice.state(fields, Prefer="wait=20").state == "done"
    assert (alice.site.root / name(alice)).read_bytes() == DATA


def test_a_file_of_unknown_size(plain: Sender) -> None:
    fields = plain.fields(Kind.FILE, name(plain))
    assert plain.begin(fields).status == 201
    assert (
        plain.range(fields, DATA[: 2 * BLOCK_BYTES], 0, 1, Content_Range=f"bytes 0-{2 * BLOCK_BYTES - 1}/*").status
        == 204
    )
    assert plain.range(fields, DATA, 2).status == 204
    assert plain.range(fields, DATA + b"x", 3).status == 409
    assert plain.manifest(fields, DATA).state == "done"
    assert (plain.site.root / name(plain)).read_bytes() == DATA


@pytest.mark.parametrize(("block", "listed"), [("sha-256", "sha-256"), ("blake2b", "xxh3"), ("xxh3", "blake2b")])
def test_kinds_of_digests(plain: Sender, block: str, listed: str) -> None:
    _, answer = plain.put(name(plain), DATA, block_kind=block, digest_kind=listed)
    assert answer.state == "done"
    assert (plain.site.root / name(plain)).read_bytes() == DATA


def test_a_block_with_another_digest_is_not_written(plain: Sender) -> None:
    fields = plain.fields(Kind.FILE, name(plain), size=len(DATA))
    plain.begin(fields)
    changed = DATA[: BLOCK_BYTES + 5] + b"?" + DATA[BLOCK_BYTES + 6 :]
    told = operations.digests_text(
        [operations.digest_kinds()["xxh3"].of(DATA[at * BLOCK_BYTES :][:BLOCK_BYTES]) for at in range(4)]
    )
    answer = plain.range(fields, changed, Stageout_Blocks=told)
    assert (answer.status, answer.facts["blocks"]) == (422, [1])
    assert plain.manifest(fields, DATA).facts == {"state": "receiving", "have": [[0, 0], [2, 3]]}
    # the first digest stays
    answer = plain.range(fields, b"other" + DATA[5:], 0, 0)
    assert (answer.status, answer.facts["reason"]) == (409, "block-differs")
    answer = plain.range(fields, b"other" + DATA[5:], 0, 0, Stageout_Blocks="")
    assert (answer.status, answer.facts["blocks"]) == (409, [0])
    assert plain.range(fields, DATA, 1, 1).status == 204
    assert plain.state(fields, Prefer="wait=20").state == "done"


def test_the_list_clears_forged_blocks(plain: Sender) -> None:
    fields = plain.fields(Kind.FILE, name(plain), size=len(DATA))
    plain.begin(fields)
    assert plain.range(fields, b"forged" + DATA[6:]).status == 204
    answer = plain.manifest(fields, DATA)
    assert (answer.status, answer.facts["blocks"]) == (422, [0])
    assert plain.range(fields, DATA, 0, 0).status == 204
    assert plain.manifest(fields, DATA).state == "done"
    assert (plain.site.root / name(plain)).read_bytes() == DATA


def test_names(alice: Sender) -> None:
    base = alice.origin[:8]
    made = alice.begin(alice.fields(Kind.MKDIR, base))
    assert (made.status, made.state) == (200, "done")
    assert alice.begin(alice.fields(Kind.MKDIR, base)).state == "done"
    again = alice.begin(alice.fields(Kind.MKDIR, base, precondition="absent"))
    assert (again.status, again.facts["state"], again.facts["reason"]) == (200, "failed", "precondition")
    alice.put(f"{base}/f", b"1")
    assert alice.begin(alice.fields(Kind.RENAME, f"{base}/f", second=f"{base}/g")).state == "done"
    assert (alice.site.root / base / "g").read_bytes() == b"1"
    refused = alice.begin(alice.fields(Kind.DELETE, f"{base}/f"))
    assert (refused.status, refused.facts["reason"]) == (409, "conflict")
    deleted = alice.fields(Kind.DELETE, base)
    assert alice.begin(deleted).state == "done"
    assert not (alice.site.root / base).exists()
    alice.begin(alice.fields(Kind.MKDIR, base))
    assert alice.begin(deleted).state == "done", "a DELETE runs once"
    assert (alice.site.root / base).exists()


def test_a_refused_one_stores_nothing_and_may_come_again(plain: Sender) -> None:
    moved = plain.fields(Kind.RENAME, f"{name(plain)}1", second=f"{name(plain)}2")
    assert plain.begin(moved).status == 409
    assert plain.state(moved).status == 404
    with Sender(plain.site) as second:
        second.put(f"{name(plain)}1", b"1")
    assert plain.begin(moved).state == "done"


def test_preconditions(plain: Sender) -> None:
    _, first = plain.put(name(plain), b"1", precondition="absent")
    assert first.state == "done"
    assert plain.put(name(plain), b"2", precondition="absent")[1].facts["reason"] == "precondition"
    assert plain.put(name(plain), b"3", precondition=first.facts["etag"])[1].state == "done"
    assert plain.put(name(plain), b"4", precondition=first.facts["etag"])[1].state == "failed"
    assert (plain.site.root / name(plain)).read_bytes() == b"3"


def test_other_fields(alice: Sender) -> None:
    fields = alice.fields(Kind.FILE, name(alice), size=5)
    assert alice.begin(fields).status == 201
    answer = alice.begin(other(fields, size=6))
    assert (answer.status, answer.facts["reason"]) == (409, "operation-differs")
    assert alice.cancel(other(fields, mode=0o600)).status == 409
    assert alice.state(fields).state == "receiving"


def test_edges(alice: Sender) -> None:
    directory, base = alice.fields(Kind.MKDIR, alice.origin[:8]), alice.origin[:8]
    file = alice.fields(Kind.FILE, f"{base}/f", size=3)
    moved = alice.fields(Kind.RENAME, base, second=f"{base}2", all_below=3)
    gone = alice.fields(Kind.DELETE, f"{base}2", after=(3,))
    held = alice.begin(gone)
    assert (held.status, held.facts) == (202, {"state": "held", "missing": [3]})
    assert alice.begin(moved).status == 202
    assert alice.begin(directory).state == "done"
    alice.begin(file)
    alice.range(file, b"abc")
    assert alice.manifest(file, b"abc").state == "done"
    assert alice.state(gone).state == "done" and alice.state(moved).state == "done"
    assert not (alice.site.root / f"{base}2").exists() and not (alice.site.root / base).exists()


def test_a_dependent_of_a_failed_one_fails(plain: Sender) -> None:
    plain.put(name(plain), b"1")
    failed, _ = plain.put(name(plain), b"2", precondition="absent")
    answer = plain.begin(plain.fields(Kind.MKDIR, f"{plain.origin[:8]}d", after=(failed.seq,)))
    assert (answer.status, answer.facts["reason"]) == (200, "dependency")


def test_an_older_version_is_superseded(plain: Sender) -> None:
    old = plain.fields(Kind.FILE, name(plain), size=3)
    plain.begin(old)
    plain.range(old, b"old")
    assert plain.put(name(plain), b"new")[1].state == "done"
    assert plain.manifest(old, b"old").facts["state"] == "superseded"
    assert (plain.site.root / name(plain)).read_bytes() == b"new"


def test_cancel(alice: Sender) -> None:
    fields = alice.fields(Kind.FILE, name(alice), size=len(DATA))
    alice.begin(fields)
    alice.range(fields, DATA, 0, 1)
    answer = alice.cancel(fields)
    assert (answer.status, answer.state) == (200, "cancelled")
    assert alice.cancel(fields).status == 200
    for late in (alice.begin(fields), alice.range(fields, DATA), alice.manifest(fields, DATA)):
        assert (late.status, late.facts["reason"]) == (410, "cancelled")
    before = alice.fields(Kind.MKDIR, name(alice))
    assert alice.cancel(before).status == 200
    assert alice.begin(before).status == 410
    done, _ = alice.put(name(alice), b"1")
    answer = alice.cancel(done)
    assert (answer.status, answer.facts["state"]) == (409, "done")
    assert not list((alice.site.root / ".stageout/operations").glob(f"{alice.origin}*"))


def test_results_and_low(alice: Sender) -> None:
    for number in range(3):
        alice.put(f"{name(alice)}{number}", b"1")
    answer = alice.ask("GET", f"{place(alice.origin)}?until=done&from=1&to=3").facts
    assert answer["reached"] and {one["state"] for one in answer["operations"].values()} == {"done"}
    answer = alice.ask("GET", f"{place(alice.origin)}?from=2&to=5").facts
    assert not answer["reached"] and answer["operations"]["5"] == {"state": "unknown"}
    assert alice.ask("GET", place(alice.origin)).facts["reached"]
    assert alice.low(3).status == 204
    answer = alice.ask("GET", f"{place(alice.origin)}?from=1&to=3").facts["operations"]
    assert [answer[number]["state"] for number in "123"] == ["unknown", "unknown", "done"]
    late = other(alice.fields(Kind.MKDIR, "late"), seq=1)
    assert (alice.begin(late).status, alice.begin(late).facts["reason"]) == (410, "settled")
    assert alice.cancel(late).status == 410


def test_a_wait_ends_with_the_operation(plain: Sender) -> None:
    fields = plain.fields(Kind.FILE, name(plain), size=3)
    plain.begin(fields)
    waited: list[tuple[float, object]] = []

    def wait() -> None:
        with Sender(plain.site, origin=plain.origin) as second:
            began = time.monotonic()
            found = second.ask("GET", f"{place(plain.origin)}?from=1&to=1", Prefer="wait=30")
            waited.append((time.monotonic() - began, found.facts["reached"]))

    waiting = threading.Thread(target=wait)
    waiting.start()
    plain.range(fields, b"abc")
    assert plain.manifest(fields, b"abc").state == "done"
    waiting.join()
    assert waited[0][1] is True and waited[0][0] < 20


def test_what_is_kept_can_be_read(plain: Sender) -> None:
    fields = plain.fields(Kind.FILE, name(plain), size=len(DATA))
    plain.begin(fields)
    plain.range(fields, DATA, 0, 1)
    plain.manifest(fields, DATA)
    at = place(fields.origin, fields.seq)
    answer = plain.ask("GET", f"{at}/data", Range="bytes=10-19")
    assert (answer.status, answer.body) == (206, DATA[10:20])
    assert plain.ask("GET", f"{at}/data").status == 409
    assert plain.ask("GET", f"{at}/manifest").body == plain.listed(fields, DATA)


def batch(sender: Sender, *files: tuple[str, bytes], **changes: object) -> tuple[bytes, bytes]:
    """The line and the bytes of a batch."""
    digest, now = operations.digest_kinds()["sha-256"].of, int(time.time())
    listed = [
        {"path": f"/{path}", "size": len(data), "mode": 0o640, "mtime": 0, "digest": digest(data).hex()}
        for path, data in files
    ]
    facts = {"terminal": "localhost", "made": now, "expires": now + 3600, "digest_kind": "sha-256", "files": listed}
    return json.dumps({**facts, **changes}).encode(), b"".join(data for _, data in files)


def send(sender: Sender, first: int, last: int, line: bytes, data: bytes) -> Answer:
    told = {"Content_Type": operations.BATCH_TYPE}
    if sender.signs:
        told["Stageout_Signature"] = sender.jws(signing.BATCH, signing.batch_payload(line))
    return sender.ask("PUT", place(sender.origin, first, last), line + b"\n" + data, **told)


def test_a_batch(alice: Sender) -> None:
    base = alice.origin[:8]
    files = [(f"{base}/{at}/f", os.urandom(at * 1000)) for at in range(300)] + [(f"{base}/large", DATA)]
    line, data = batch(alice, *files)
    for _ in range(2):
        answer = send(alice, 5, 305, line, data)
        assert (answer.status, answer.body) == (200, b'{"done": 301}\n'), answer.body[:1000]
    assert all((alice.site.root / path).read_bytes() == content for path, content in files)
    assert (alice.site.root / base / "1/f").stat().st_mode & 0o777 == 0o640
    answer = alice.ask("GET", f"{place(alice.origin)}?from=5&to=305")
    assert answer.facts["reached"]


def test_a_batch_in_which_some_fail(place_: Site) -> None:
    with Sender(place_, "bob") as bob:
        files = [(f"bob/{bob.origin}/a", b"1"), ("alice/b", b"2"), (f"bob/{bob.origin}/a/below", b"3")]
        answer = send(bob, 1, 3, *batch(bob, *files))
        lines = [json.loads(one) for one in answer.body.splitlines()]
        assert [(one.get("seq"), one.get("state")) for one in lines] == [(2, "refused"), (3, "refused"), (None, None)]
        assert lines[-1] == {"done": 1} and not (place_.root / "alice/b").exists()


def test_batches_that_are_refused(alice: Sender) -> None:
    base = alice.origin[:8]
    line, data = batch(alice, (f"{base}/a", b"12"), (f"{base}/b", b"34"))
    assert send(alice, 1, 2, line, b"12x4").facts["files"] == [2]
    for answer in (
        send(alice, 1, 2, line, data + b"5"), send(alice, 1, 2, line, data[:-1]), send(alice, 1, 3, line, data),
        send(alice, 2, 1, line, data), send(alice, 1, 2, b"[" * 100_000, data), send(alice, 1, 2, b"{}", data),
        send(alice, 1, 2, line[:-1], data), send(alice, 1, 2, line.replace(b'"size": 2', b'"size": 9000000', 1), data),
        send(alice, 1, 2, *batch(alice, (f"{base}/a", b"1"), (".stageout/x", b"1"))),
    ):  # fmt: skip
        assert answer.status in (400, 403, 422), answer
    wrong = {"Content_Type": operations.BATCH_TYPE, "Stageout_Signature": alice.jws(signing.BATCH, b"{}")}
    assert alice.ask("PUT", place(alice.origin, 1, 2), line + b"\n" + data, **wrong).status == 403
    assert not (alice.site.root / base).exists()
    assert send(alice, 1, 2, line, data).facts == {"done": 2}


# --- who may what


def test_nobody_else_sees_or_cancels_it(place_: Site, alice: Sender) -> None:
    fields = alice.fields(Kind.FILE, name(alice), size=len(DATA))
    alice.begin(fields)
    with Sender(place_, "bob", origin=alice.origin) as bob, Sender(place_, "bob", True, origin=alice.origin) as signs:
        assert bob.state(fields).status == 403
        assert bob.range(fields, DATA).status == 403
        assert bob.manifest(fields, DATA).status == 403
        assert bob.ask("GET", f"{place(fields.origin, fields.seq)}/data").status == 403
        assert bob.ask("GET", f"{place(fields.origin)}?from=1&to=1").facts["operations"]["1"] == {"state": "unknown"}
        for stranger in (bob, signs):
            assert stranger.cancel(fields).status == 403
        assert bob.begin(fields).status == 403
        # the same numbers of another owner are others
        mine, answer = bob.put(f"bob/{alice.origin[:8]}", b"1")
        assert answer.state == "done" and mine.seq == fields.seq
        assert bob.low(2).status == 204
    assert alice.state(fields).state == "receiving"
    alice.range(fields, DATA)
    assert alice.manifest(fields, DATA).state == "done"


def test_one_number_signed_and_unsigned(place_: Site) -> None:
    """One user's two operations: a signature, or Stageout-Owner, tells which one is meant."""
    with Sender(place_, signs=True) as signed, Sender(place_, origin=signed.origin) as unsigned:
        mine = signed.fields(Kind.FILE, f"{name(signed)}1", size=3)
        plain = unsigned.fields(Kind.FILE, f"{name(signed)}2", size=5)
        key = {"Stageout_Owner": signed_owner(thumbprint(place_.keys["alice"].public))}
        assert unsigned.begin(plain).status == 201 and signed.begin(mine).status == 201
        assert signed.range(mine, b"abc", **key).status == 204
        done = signed.manifest(mine, b"abc")
        assert (done.status, done.facts.get("state")) == (200, "done"), done
        assert unsigned.state(plain).state == "receiving" and signed.state(mine, **key).state == "done"
        for headers, state in (({}, "receiving"), (key, "done")):
            answer = signed.ask("GET", f"{place(signed.origin)}?from=1&to=1", **headers)
            assert answer.facts["operations"]["1"]["state"] == state
        assert signed.cancel(mine).facts["state"] == "done"
        assert unsigned.range(plain, b"plain").status == 204
        assert unsigned.manifest(plain, b"plain").state == "done"
        assert (place_.root / f"{name(signed)}1").read_bytes() == b"abc"
        # a cancel that comes first is for the signed one only
        mine, plain = signed.fields(Kind.FILE, "x1", size=3), unsigned.fields(Kind.FILE, "x2", size=3)
        assert unsigned.begin(plain).status == 201
        assert signed.cancel(mine).status == 200
        assert signed.begin(mine).status == 410 and unsigned.state(plain).state == "receiving"


def test_a_holder_and_its_issuer(place_: Site, plain: Sender) -> None:
    token = place_.token(sub="pilot", scope="storage.modify:/run7")
    with Sender(place_, token=token, origin=plain.origin) as pilot:
        inside, outside = pilot.fields(Kind.FILE, "run7/f", size=3), pilot.fields(Kind.FILE, "run77/f", size=3)
        assert pilot.begin(outside).status == 403 and pilot.state(outside).status == 404
        assert pilot.begin(inside).status == 201
        # the user sees and cancels what its pilot left, and not the other way round
        assert plain.state(inside).state == "receiving"
        mine = plain.fields(Kind.FILE, "run7/mine", size=3)
        mine = other(mine, seq=9)
        plain.begin(mine)
        assert pilot.state(mine).status == 403 and pilot.cancel(mine).status == 403
        assert plain.cancel(inside).state == "cancelled"
        assert pilot.begin(inside).status == 410


def test_a_signature_is_for_one_use(place_: Site) -> None:
    with Sender(place_, signs=True) as alice:
        fields = alice.fields(Kind.MKDIR, name(alice))
        at, text = place(fields.origin, fields.seq), to_json(fields)
        media = {"Content_Type": operations.SIGNED_TYPE}
        put = alice.jws(signing.OPERATION, text).encode()
        assert alice.ask("DELETE", at, put, **media).status == 403
        assert alice.ask("PUT", at, alice.jws(signing.CANCEL, text).encode(), **media).status == 403
        forged = put[:-4] + (b"AAAA" if put[-4:] != b"AAAA" else b"BBBB")
        assert alice.ask("PUT", at, forged, **media).status == 403
        stranger = Sender(place_, "bob", True)
        assert alice.ask("PUT", at, stranger.jws(signing.OPERATION, text).encode(), **media).status == 403
        assert alice.ask("PUT", place(fields.origin, 5), put, **media).status == 400
        assert alice.state(fields).status == 404
        # bob brings what alice signed
        with Sender(place_, "bob") as bob:
            assert bob.ask("PUT", at, put, **media).status == 403
        elsewhere = other(fields, terminal="archive")
        assert alice.begin(elsewhere).status == 403 and alice.cancel(elsewhere).status == 403


def test_a_signed_one_is_cancelled_with_a_signature(place_: Site) -> None:
    with Sender(place_, signs=True) as alice:
        fields = alice.fields(Kind.FILE, name(alice), size=3)
        alice.begin(fields)
        for token in (alice.token, place_.token(scope="storage.read:/elsewhere")):
            with Sender(place_, token=token) as unsigned:
                assert unsigned.cancel(fields).status == 403
        assert alice.state(fields).state == "receiving"
        assert alice.cancel(fields).state == "cancelled"


def test_a_list_belongs_to_its_operation(place_: Site) -> None:
    with Sender(place_, signs=True) as alice:
        one, two = (alice.fields(Kind.FILE, f"{name(alice)}{at}", size=3) for at in range(2))
        for fields in (one, two):
            alice.begin(fields)
            alice.range(fields, b"abc")
        payload = signing.manifest_payload(
            signing.digest(alice.jws(signing.OPERATION, to_json(one))), 3, operations.root(alice.listed(one, b"abc"))
        )
        assert alice.manifest(two, b"abc", Stageout_Signature=alice.jws(signing.MANIFEST, payload)).status == 403
        assert alice.manifest(two, b"abc", Stageout_Signature="").status == 403
        assert alice.manifest(two, b"abc").state == "done"


# --- hostile requests


@pytest.mark.parametrize(
    "changes",
    [
        {"Content_Range": "bytes 1-3/3"}, {"Content_Range": "bytes 0-2/4"}, {"Content_Range": "bytes 0-3/3"},
        {"Content_Range": ""}, {"Content_Range": "bytes 0-99999999999999999999/*"}, {"Content_Range": "bytes 0-2/*"},
        {"Content_Range": "bytes 1048576-1048578/3"}, {"Stageout_Blocks": "zz"}, {"Stageout_Blocks": "00"},
        {"Stageout_Blocks": "00" * 16 + "," + "00" * 16}, {"Transfer_Encoding": "chunked"},
    ],
)  # fmt: skip
def test_ranges_that_are_refused(plain: Sender, changes: dict[str, str]) -> None:
    fields = plain.fields(Kind.FILE, name(plain), size=3)
    plain.begin(fields)
    assert plain.range(fields, b"abc", **changes).status in (400, 409)
    assert plain.range(fields, b"abc").status == 204
    assert plain.manifest(fields, b"abc").state == "done"


def test_bodies_and_places_that_are_refused(plain: Sender) -> None:
    fields = plain.fields(Kind.FILE, name(plain), size=3)
    at, text = place(fields.origin, fields.seq), to_json(fields)
    media = {"Content_Type": operations.FIELDS_TYPE}
    for body in (b"", b"[" * 60_000, b'{"a":' * 10_000, b"{}", text[:-1], text.replace(b"3", b"9" * 5_000), b"\xff"):
        assert plain.ask("PUT", at, body, **media).status == 400, body[:20]
    assert plain.ask("PUT", at, b" " * 70_000, **media).status == 413
    assert plain.ask("PUT", at, text).status == 415
    wrong = ["0", "1e3", str(2**63), "1/x", "1/data/x"]
    for path in ("/o", "/o/", f"/o/{'g' * 32}/1", "/lot", *(f"/o/{plain.origin}/{one}" for one in wrong)):
        assert plain.ask("GET", FOLDER + path).status in (400, 404), path
    assert plain.ask("POST", at).status == plain.ask("GET", f"{FOLDER}/lots").status == 405
    assert plain.ask("PUT", f"{place(plain.origin)}/low", b'{"below": -1}').status == 400
    assert plain.ask("GET", f"{place(plain.origin)}?from=1&to=9999999999").status == 413
    assert plain.ask("GET", f"{place(plain.origin)}?until=never").status == 400
    plain.begin(fields)
    assert plain.manifest(fields, b"abc", Stageout_Size="-3").status == 400
    assert plain.manifest(fields, b"abcd").status in (400, 409)
    assert plain.state(fields).state == "receiving"
    assert plain.ask("PUT", f"/.via/gw2{at}", text, **media).status == 403


def test_huge_numbers(plain: Sender) -> None:
    facts = json.loads(to_json(plain.fields(Kind.MKDIR, name(plain))))
    media = {"Content_Type": operations.FIELDS_TYPE}
    for name_, value in (
        ("seq", 2**63),
        ("all_below", 2**63),
        ("size", 2**64),
        ("after", [2**63 - 1]),
        ("expires", 2**62),
    ):
        body = json.dumps({**facts, name_: value}).encode()
        assert plain.ask("PUT", place(plain.origin, 1), body, **media).status == 400
    large = plain.fields(Kind.FILE, name(plain), size=2**62)
    assert plain.begin(large).status == 413
    assert plain.begin(plain.fields(Kind.FILE, name(plain), size=1 << 43)).status in (413, 507)
    assert plain.put(name(plain), b"1")[1].state == "done"


def test_a_cut_range_counts_up_to_its_last_whole_block(plain: Sender, place_: Site) -> None:
    fields = plain.fields(Kind.FILE, name(plain), size=len(DATA))
    plain.begin(fields)
    with Sender(place_, origin=plain.origin) as second:
        second.state(fields)
        connection = second._connection
        assert connection is not None
        connection.putrequest("PUT", f"{place(fields.origin, fields.seq)}/data")
        connection.putheader("Authorization", f"Bearer {second.token}")
        connection.putheader("Content-Length", str(len(DATA)))
        connection.putheader("Content-Range", f"bytes 0-{len(DATA) - 1}/{len(DATA)}")
        connection.endheaders(DATA[: 2 * BLOCK_BYTES + 1000])
    deadline = time.monotonic() + 20
    while plain.manifest(fields, DATA).facts.get("have") != [[0, 1]]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert plain.range(fields, DATA, 2).status == 204
    assert plain.state(fields, Prefer="wait=20").state == "done"


def test_the_tree_keeps_its_own_folder(place_: Site, plain: Sender) -> None:
    facts = json.loads(to_json(plain.fields(Kind.MKDIR, "x")))
    media = {"Content_Type": operations.FIELDS_TYPE}
    for path in ("/.stageout/operations/x", "/.STAGEOUT/x", "/.via/x"):
        body = json.dumps({**facts, "path": path}).encode()
        assert plain.ask("PUT", place(plain.origin, 1), body, **media).status == 403
    assert Path(place_.root / ".stageout/operations").is_dir()


# --- kills


@pytest.mark.parametrize("when", ["kill-before", "kill-after"])
@pytest.mark.parametrize(
    "label", ["operation-list", "operation-row", "operation-intent", "overlay-publish", "operation-end"]
)
def test_a_killed_router_goes_on(tmp_path: Path, label: str, when: str) -> None:
    """The sender asks again until it knows the end: one file, once."""
    armed = tmp_path / "armed"
    with site(tmp_path / "site", {"STAGEOUT_FAULTS": f"{label}={when}@{armed}"}) as here, Sender(here) as alice:
        armed.touch()
        fields = alice.fields(Kind.FILE, "d/f", size=len(DATA))
        killed = 0
        for _ in range(10):
            try:
                if alice.begin(fields).status == 201 and alice.manifest(fields, DATA).status == 202:
                    for number in set(range(4)) - alice.have(fields):
                        assert alice.range(fields, DATA, number, number).status == 204
                if alice.state(fields, Prefer="wait=20").state == "done":
                    break
            except (OSError, http.client.HTTPException):
                alice.close()
                here.router.wait_for_end()
                here.router.start()
                killed += 1
        assert killed == 1 and not armed.exists()
        assert (here.root / "d/f").read_bytes() == DATA
        assert list((here.root / ".stageout/operations").iterdir()) == []
        assert alice.begin(fields).status == 200


def test_power_fails_after_the_bytes_came(tmp_path: Path) -> None:
    """Blocks that were received and not synced are not there, and come again."""
    with site(tmp_path / "site") as here, Sender(here) as alice:
        fields = alice.fields(Kind.FILE, "f", size=len(DATA))
        alice.begin(fields)
        assert alice.range(fields, DATA, 0, 2).status == 204
        here.router.kill()
        alice.close()
        here.router.start()
        assert "have" not in alice.state(fields).facts
        # another version of a block that was never seen
        changed = DATA[:5] + b"!" + DATA[6:]
        assert alice.range(fields, changed).status == 204
        assert alice.manifest(fields, changed).state == "done"
        assert (here.root / "f").read_bytes() == changed
