"""Fields and states of operations in JSON: one form goes there and back, and nothing else is taken."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from stageout.overlay.http import operations
from stageout.overlay.http.heads import Refused
from stageout.overlay.http.operations import BLOCK_BYTES, Status, content_range, digests_of, from_json, to_json
from stageout.overlay.rules.operations import Fields, Kind

FILE = Fields(
    "0" * 32, 7, Kind.FILE, "alice/a b\udcff", "gw", 1_000_000, 1_000_600, size=5, after=(1, 6), precondition="absent",
    mtime=-3,
)  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        FILE, replace(FILE, size=None, precondition='"1-2"'), replace(FILE, kind=Kind.DELETE, size=None, all_below=7),
        replace(FILE, kind=Kind.RENAME, size=None, second="alice/é"),
    ],
)  # fmt: skip
def test_there_and_back(fields: Fields) -> None:
    assert from_json(to_json(fields)) == fields
    assert json.loads(to_json(fields))["path"] == "/alice/a%20b%FF"


@pytest.mark.parametrize(
    "changes",
    [
        {"more": 1}, {"seq": 0}, {"seq": 2**63}, {"seq": "7"}, {"seq": True}, {"seq": 7.0}, {"origin": "0" * 31},
        {"origin": "A" * 32}, {"origin": 5}, {"kind": "copy"}, {"kind": None}, {"kind": []}, {"path": "alice/f"},
        {"path": "/../f"}, {"path": "/"}, {"path": 3}, {"second": "/alice/g"}, {"after": [7]}, {"after": [0]},
        {"after": [1] * 9}, {"after": 1}, {"after": [None]}, {"all_below": 8}, {"size": -1}, {"size": 2**63},
        {"made": 0}, {"expires": 999_999}, {"expires": 1_000_000 + 8 * 86400}, {"mode": 0o10000}, {"mode": -1},
        {"precondition": "none"}, {"precondition": '"\r\n"'}, {"block_kind": "crc"}, {"digest_kind": ["sha-256"]},
        {"terminal": ""}, {"terminal": "a/b"}, {"kind": "rename"}, {"kind": "delete"},
    ],
)  # fmt: skip
def test_fields_that_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(Refused) as why:
        from_json(json.dumps({**json.loads(to_json(FILE)), **changes}).encode())
    assert why.value.status == 400


def test_missing_members_and_reserved_names() -> None:
    facts = json.loads(to_json(FILE))
    for name in facts:
        with pytest.raises(Refused):
            from_json(json.dumps({key: value for key, value in facts.items() if key != name}).encode())
    with pytest.raises(Refused) as why:
        from_json(json.dumps({**facts, "path": "/.StageOut/x"}).encode())
    assert why.value.status == 403


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"{", b"\xff", b"[" * 60_000, b'{"a":' * 9_000, b'{"a":1,"a":2}', b'{"a":NaN}',
        b'{"a":' + b"9" * 5_000 + b"}",
    ],
)  # fmt: skip
def test_bodies_that_are_no_objects(body: bytes) -> None:
    with pytest.raises(Refused) as why:
        operations.json_object(body, 1 << 16)
    assert why.value.status == 400


def test_a_body_that_is_too_long() -> None:
    with pytest.raises(Refused) as why:
        operations.json_object(b" " * 11, 10)
    assert why.value.status == 413


def test_a_state_leaves_out_what_is_empty() -> None:
    status = Status("receiving", have=((0, 3), (5, 5)), epoch=9, missing=(2,), custodians=("gw2",))
    assert Status("done").facts() == {"state": "done"}
    assert operations.status_of(json.loads(json.dumps(status.facts()))) == status
    for wrong in ({}, {"state": "Done"}, {"state": "done", "have": [1]}, {"state": "done", "have": 3}):
        with pytest.raises(ValueError):
            operations.status_of(wrong)


def test_ranges_and_places() -> None:
    assert operations.ranges([0, 1, 2, 5, 7, 8]) == ((0, 2), (5, 5), (7, 8))
    assert operations.place("ab", 3) == "/.stageout/v1/o/ab/3"
    assert operations.place("ab", 3, 9) == "/.stageout/v1/o/ab/3-9"
    assert operations.seq_of("9223372036854775807") == 2**63 - 1
    for text in ("0", "01", "-1", "9223372036854775808", "1e3", "", "١"):
        with pytest.raises(Refused):
            operations.seq_of(text)


def test_parts_of_a_file() -> None:
    size = 3 * BLOCK_BYTES + 1
    assert content_range(f"bytes {BLOCK_BYTES}-{size - 1}/{size}", size) == (BLOCK_BYTES, size)
    assert content_range("bytes 0-9/*", None) == (0, 10)
    wrong = [
        "",
        "bytes 1-5/*",
        f"bytes 0-{size}/{size}",
        "bytes 5-4/*",
        "bytes 0-9/10, 0-9/10",
        "bytes 0-9999999999999999999/*",
    ]
    for text in wrong:
        with pytest.raises(Refused) as why:
            content_range(text, size)
        assert why.value.status in (400, 409)


def test_digests_of_blocks() -> None:
    kinds = operations.digest_kinds()
    for kind in kinds.values():
        digests = [kind.of(b"a"), kind.of(memoryview(b"b"))]
        assert digests_of(operations.digests_text(digests), kind.size_bytes) == digests
        for wrong in ("zz", "ab", f"{digests[0].hex()},", ","):
            with pytest.raises(Refused):
                digests_of(wrong, kind.size_bytes)
