"""Frames and messages of the overlay: what was sent comes out, anything else is refused."""

from __future__ import annotations

import itertools
import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageout.overlay.wire import frames, messages
from stageout.overlay.wire.fields import KnownRow, LinkRow, ShareRow
from stageout.overlay.wire.frames import BadFrame, Decoder, Type

_DOCUMENT = Path(__file__).parents[2] / "docs/developer/wire.md"
_SUMS = list(frames.checksums().values())
sums = st.sampled_from(_SUMS)
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=40)
numbers = st.integers(0, messages.MAX_NUMBER)
addresses = st.builds(
    "{}:{}".format, st.from_regex(r"[a-z0-9]{1,9}(\.[a-z]{1,5})?", fullmatch=True), st.integers(1, 65535)
)


def _ranges(points: set[int]) -> tuple[tuple[int, int], ...]:
    ordered = sorted(points)
    return tuple(zip(ordered[::2], ordered[1::2]))


_KINDS: dict[Any, st.SearchStrategy[Any]] = {
    int: numbers,
    bool: st.booleans(),
    str: texts,
    tuple[str, ...]: st.lists(texts, max_size=4).map(tuple),
    tuple[int, ...]: st.lists(numbers, max_size=8).map(tuple),
    tuple[tuple[int, int], ...]: st.sets(numbers, max_size=12).map(_ranges),
    tuple[tuple[str, ...], ...]: st.lists(st.lists(addresses, max_size=4).map(tuple), max_size=4).map(tuple),
    tuple[LinkRow, ...]: st.lists(st.tuples(addresses, numbers, numbers), max_size=4).map(tuple),
    tuple[KnownRow, ...]: st.lists(st.tuples(addresses, addresses, numbers, numbers, numbers), max_size=4).map(tuple),
    tuple[ShareRow, ...]: st.lists(st.tuples(texts, texts, *[numbers] * 4), max_size=4).map(tuple),
}
_WORDS = {
    "kind": st.just("rename"),
    "outcome": st.sampled_from(("done", "stale", "unknown")),
    "release": st.sampled_from(("delivered", "custody")),
}
_WORDS["attributes"] = st.just(("mode", "size"))
_WORDS["outcomes"] = st.lists(st.sampled_from(("failed", "stale", "pending")), max_size=4).map(tuple)
_WORDS["action"] = st.sampled_from(("reserve", "release"))
_WORDS["block_bytes"] = st.just(messages.BLOCK_BYTES)
_WORDS["kinds"] = st.lists(st.sampled_from(("file", "link")), max_size=4).map(tuple)


def _messages(cls: Any) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls)
    return st.builds(cls, **{name: _WORDS.get(name, _KINDS[hint]) for name, hint in hints.items()})


any_message = st.one_of([_messages(cls) for cls in messages.TYPES])


def _encoded(message: Any, checksum: frames.Checksum, number: int = 0) -> bytes:
    payload = frames.encode_meta(messages.to_meta(message))
    return frames.encode_header(messages.TYPES[type(message)], payload, checksum, number) + payload


@given(st.lists(any_message, max_size=5), sums, st.integers(1, 50))
def test_messages_come_out_as_they_went_in_however_the_bytes_are_cut(sent: Any, checksum: Any, cut: int) -> None:
    data = b"".join(_encoded(message, checksum) for message in sent)
    decoder, got = Decoder(checksum), []
    for start in range(0, len(data), cut):
        decoder.feed(data[start : start + cut])
        for frame in decoder.frames():
            meta, tail = frames.decode_meta(frame.payload)
            assert not tail
            got.append(messages.from_meta(frame.header.type, meta))
    assert got == sent


@given(any_message, sums, st.data())
def test_no_flipped_bit_goes_unseen(message: Any, checksum: Any, data: Any) -> None:
    whole = bytearray(_encoded(message, checksum))
    bit = data.draw(st.integers(0, len(whole) * 8 - 1))
    whole[bit // 8] ^= 1 << bit % 8
    decoder = Decoder(checksum)
    decoder.feed(whole)
    with pytest.raises(BadFrame):
        assert list(decoder.frames())
        raise AssertionError("a damaged frame came out")


@settings(max_examples=200)
@given(st.binary(max_size=200), st.sampled_from(list(Type)), sums)
def test_any_payload_is_read_or_refused(payload: bytes, kind: Type, checksum: Any) -> None:
    decoder = Decoder(checksum)
    decoder.feed(frames.encode_header(kind, payload, checksum) + payload)
    (frame,) = decoder.frames()
    assert frame.payload == payload
    try:
        meta, _ = frames.decode_meta(frame.payload)
        messages.from_meta(kind, meta)
    except BadFrame:
        pass


@given(st.binary(min_size=frames.HEADER_BYTES, max_size=300))
def test_noise_is_refused(data: bytes) -> None:
    decoder = Decoder()
    decoder.feed(data)
    with pytest.raises(BadFrame):
        list(decoder.frames())


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=200)
@given(any_message, st.data())
def test_a_field_of_another_kind_is_refused_or_is_allowed(message: Any, data: Any) -> None:
    meta = json.loads(json.dumps(messages.to_meta(message)))
    name = data.draw(st.sampled_from(sorted(meta)))
    meta[name] = data.draw(json_values)
    try:
        read = messages.from_meta(messages.TYPES[type(message)], meta)
    except BadFrame as error:
        assert name in str(error)
        return
    assert json.loads(json.dumps(messages.to_meta(read)))[name] == meta[name]


def _header(**changes: Any) -> bytes:
    values = {"version": 1, "kind": Type.LOW, "flags": 0, "length": 0}
    values.update(changes)
    start = frames._CHECKED.pack(values["version"], values["kind"], values["flags"], values["length"], 0, 0, 0)
    return start + zlib.crc32(start).to_bytes(4, "big")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "version 2"),
        ({"kind": 200}, "unknown type of frame 200"),
        ({"flags": 1}, "unknown flags"),
        ({"length": frames.MAX_META_BYTES + 1}, "LOW of 262145 bytes"),
        ({"kind": Type.HELLO, "length": frames.MAX_GREETING_BYTES + 1}, "HELLO of"),
        ({"kind": Type.BLOCK, "length": 2**32 - 1}, "BLOCK of"),
    ],
)
def test_headers_that_are_refused_before_any_payload(changes: dict[str, Any], words: str) -> None:
    decoder = Decoder()
    decoder.feed(_header(**changes))
    with pytest.raises(BadFrame, match=words):
        list(decoder.frames())


@settings(max_examples=20)
@given(
    st.lists(st.integers(1, 300_000), min_size=1), st.lists(st.sampled_from([0, 40, 128 * 1024, 400_000]), max_size=5)
)
def test_large_frames_come_out_as_they_went_in(cuts: list[int], sizes: list[int]) -> None:
    """Whether their bytes are fed, or put where they stay."""
    decoder, payloads = Decoder(), [os.urandom(size) for size in sizes]
    data = b"".join(frames.encode_header(Type.PACK, one, decoder.checksum) + one for one in payloads)
    found, cut = [], itertools.cycle(cuts)
    while data:
        length = next(cut)
        room = decoder.room()[:length] if length % 2 else memoryview(b"")
        if room:
            room = room[: len(data)]
            room[:] = data[: len(room)]
            decoder.filled(len(room))
        else:
            decoder.feed(data[:length])
        data = data[len(room) or length :]
        found += [bytes(frame.payload) for frame in decoder.frames()]
    assert found == payloads


def test_a_large_frame_takes_memory_when_its_payload_may_come() -> None:
    decoder, payload = Decoder(), os.urandom(400_000)
    decoder.feed(frames.encode_header(Type.PACK, payload, decoder.checksum) + payload[:100])
    assert list(decoder.frames()) == []
    assert (decoder.due_bytes, decoder.has_more) == (400_000, False)
    assert len(decoder.room()) == 399_900
    assert decoder.due_bytes == 0
    decoder.feed(payload[100:])
    assert [frame.payload for frame in decoder.frames()] == [payload]


def test_a_frame_that_comes_byte_by_byte_is_no_list_of_bytes() -> None:
    sent = messages.Refuse("x" * 4000)
    decoder = Decoder()
    found = []
    for byte in messages.encode(sent, decoder.checksum):
        decoder.feed(bytes([byte]))
        assert len(decoder._parts) < 300
        found += [messages.decode(frame) for frame in decoder.frames()]
    assert found == [sent]


@pytest.mark.parametrize("ranges", [[[3, 2]], [[0, 2], [2, 4]], [[0, 2], [1, 4]], [[1]], [["0", 1]], {}, [[-1, 2]]])
def test_ranges_must_be_in_order_and_apart(ranges: list[Any] | dict[str, Any]) -> None:
    with pytest.raises(BadFrame, match="staged"):
        messages.from_meta(Type.STAGED, {"tid": 1, "staged": ranges})


@pytest.mark.parametrize("block_bytes", [0, 1, messages.BLOCK_BYTES - 1, 2 * messages.BLOCK_BYTES, 2**62])
def test_blocks_of_another_size_are_refused_before_anything_is_made_for_them(block_bytes: int) -> None:
    ask = messages.Open("1" * 32, 1, "f", 100, block_bytes, 5)
    with pytest.raises(BadFrame, match="blocks have 1048576 bytes"):
        messages.from_meta(Type.OPEN, messages.to_meta(ask))


def test_half_a_character_is_refused() -> None:
    with pytest.raises(BadFrame, match="path is not a text"):
        messages.from_meta(Type.STAT, {"path": "\ud800"})


def test_a_missing_field_is_named() -> None:
    with pytest.raises(BadFrame, match="STAGED lacks one of epoch, staged"):
        messages.from_meta(Type.STAGED, {"tid": 1})


def test_proofs_are_bound_to_side_nonces_and_choice() -> None:
    hello = messages.Hello("a", "1" * 32, ("crc32",), ("crc32",), 5, "k")
    welcome = messages.Welcome("b", "2" * 32, "crc32", "crc32", 5)
    other = messages.Welcome("b", "3" * 32, "crc32", "crc32", 5)
    made = {
        messages.proof(key, side, hello, w)
        for key in (b"x", b"y")
        for side in ("hello", "welcome")
        for w in (welcome, other)
    }
    assert len(made) == 8


def test_crc32c_is_what_its_standard_says() -> None:
    assert frames.checksums()["crc32c"](b"123456789") == 0xE3069283


def test_the_fast_checksum_is_the_beginning_of_the_digest_that_its_authors_publish() -> None:
    assert frames.checksums()["xxh3-32"](b"123456789") == 0x33119477
    assert frames.checksums()["xxh3-32"](b"") == 0x99AA06D3  # of the published 99aa06d3014798d86001c324468d497f


@given(st.binary(max_size=5000), st.sampled_from(sorted(frames.checksums())), st.sampled_from(sorted(frames.digests())))
def test_checksum_and_digest_in_one_pass_are_those_of_two(data: bytes, checksum: str, digest: str) -> None:
    found = frames.sums(checksum, digest)(memoryview(bytearray(data)))
    assert found == (frames.checksums()[checksum](data), frames.digests()[digest](data))


def test_a_party_without_the_package_of_the_fast_checksum_has_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    assert list(frames.checksums()) == ["crc32c", "crc32"]
    assert list(frames.digests()) == ["blake2b-128"]


def test_the_document_has_every_message_with_its_fields() -> None:
    rows = [line.split("|") for line in _DOCUMENT.read_text().splitlines() if line.startswith("| ")]
    table = {row[1].strip(): (row[2].strip(), row[3]) for row in rows if row[2].strip().isdigit()}
    for cls, kind in messages.TYPES.items():
        number, words = table[kind.name]
        assert int(number) == kind
        names = [word.split("=")[0].split("(")[0].strip() for word in words.split(", ")]
        assert names == list(cls.__dataclass_fields__)


def test_a_gateway_asks_for_as_many_places_as_a_call_of_a_plugin_has_files() -> None:
    places = tuple(f"{number:064x}" for number in range(100))
    for message in (messages.Lease("h", places, 120), messages.Leased(tuple(range(100)))):
        assert messages.from_meta(messages.TYPES[type(message)], json.loads(json.dumps(vars(message)))) == message
