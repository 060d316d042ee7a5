"""Every decoder of messages that a stranger can reach, valid messages for each, and what strangers make of these.

``python -m tests.unit.hostile_messages --examples 1000000`` tries many more of them than the tests do, in all cores.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import json
import os
import random
import sys
import time
import tracemalloc
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple, get_type_hints

from overlay_router.peers import keys as peer_keys
from overlay_router.routing import book as link_book
from stageout.core.signing import SigningKey
from stageout.core.states import State
from stageout.overlay.wire import capability, egress, frames, greeting, messages, packs, route, token, warrant
from stageout.overlay.wire.frames import BadFrame, Frame, Header, Type
from stageout.wire import address, custody, deposits, handoff, renewal

#: Values that stand for themselves in a decoded message, of whatever class.
_PLAIN = (str, int, float, bool, bytes, type(None))
#: A message may take so much memory more than it is long, and so much for each of its bytes.
_MEMORY_BYTES, _MEMORY_PER_BYTE = 2 * 1024 * 1024, 64
_SIGNER, _OTHER = SigningKey(b"1" * 32), SigningKey(b"2" * 32)
_ORIGIN, _EPOCH = "0123456789abcdef" * 2, "fedcba9876543210" * 2


class Decoder(NamedTuple):
    """One decoder.

    :param samples: valid messages. :param read: takes one, returns what it means.
    :param refuses: what it may raise, as its docstring says.
    """

    samples: Sequence[bytes]
    read: Callable[[bytes], object]
    refuses: type[Exception] | tuple[type[Exception], ...]


# ---- what strangers do -----------------------------------------------------------------------------------------------

_ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e308, float("inf"),
    float("nan"), "", " ", "0", "-1", "x" * 5000, "\0", "\udc80", "\ud800", "\u0663", "..", "/", "a/../b", "/" * 4096,
    "\n", "é", "[", "token:", "127.0.0.1:1", "[::1]:65535", "http://[", [], {}, [[]], [{}], [None], ["\ud800"],
    [0, 0], [[0, 2**63 - 1]], {"": ""}, {"op": "x"}, [["a", "b", "c"]], [1] * 1100, ["a"] * 1100, [[0, 1]] * 4100,
)  # fmt: skip


def _nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of the parts of a value out of JSON."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _nodes(inner, (*path, key))


def _changed(value: Any, dice: random.Random) -> Any:
    """A value out of JSON of which one part is another."""
    path = dice.choice(list(_nodes(value)))
    if not path:
        return dice.choice(_ODD)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    what = dice.randrange(8)
    if what == 0:
        del holder[path[-1]]
    elif what == 1 and isinstance(holder, list):
        holder.insert(path[-1], holder[path[-1]])
    elif what == 2 and isinstance(holder, dict):
        holder[dice.choice(("", "x", "\ud800", "self", "cls", path[-1] + "s"))] = dice.choice(_ODD)
    elif what == 3 and isinstance(holder[path[-1]], int):
        holder[path[-1]] += dice.choice((-1, 1, 2**31, -(2**31), 2**62))
    elif what == 4 and isinstance(holder[path[-1]], str):
        holder[path[-1]] = _torn(holder[path[-1]].encode("utf-8", "surrogatepass"), dice).decode("latin-1")
    else:
        holder[path[-1]] = dice.choice(_ODD)
    return value


def _torn(data: bytes, dice: random.Random) -> bytes:
    """Bytes of which some are others, are there twice, or are missing."""
    at, end = sorted(dice.randrange(len(data) + 1) for _ in range(2))
    made = (
        data[:at] + bytes([dice.randrange(256)]) + data[at + 1 :],
        data[:at] + data[end:],
        data[:end] + data[at:],
        data[:at] + dice.choice((b"[", b"{", b'"', b"\\u0000", b"\\ud800", b"1e999", b"-", b",", b"\0")) + data[at:],
        data[:at] + b"[" * 100_000 + data[at:],
        data[:at] + b"9" * 5000 + data[at:],
    )
    return made[dice.randrange(len(made) if dice.randrange(20) == 0 else 4)]


def mutant(sample: bytes, dice: random.Random) -> bytes:
    """A valid message as a stranger changes it: JSON with other values in it most of the time, else other bytes."""
    try:
        text = sample if dice.randrange(4) else b""
        for _ in range(dice.choice((1, 1, 1, 2, 3))):
            text = json.dumps(_changed(json.loads(text), dice)).encode()
    except ValueError:
        text = b""
    return text if 0 < len(text) <= frames.MAX_META_BYTES else _torn(sample, dice)


# ---- decoders --------------------------------------------------------------------------------------------------------


def _frame(kind: Type, payload: bytes) -> Frame:
    return Frame(Header(kind, 0, len(payload), 0, 0, 0), payload)


def _message(kind: Type) -> Callable[[bytes], object]:
    return lambda text: messages.decode(_frame(kind, len(text).to_bytes(4, "big") + text))


def _pack(data: bytes) -> object:
    """Meta data, then the table of digests and the files, told apart by a line end."""
    meta, _, tail = data.partition(b"\n")
    return packs.decode(_frame(Type.PACK, len(meta).to_bytes(4, "big") + meta + tail))


def _found_pack(data: bytes) -> object:
    """The same, as the answer for four files."""
    meta, _, tail = data.partition(b"\n")
    found, files = packs.decode_found(_frame(Type.FOUND_PACK, len(meta).to_bytes(4, "big") + meta + tail), 4)
    assert [len(file) for file in files] == list(found.sizes_bytes)
    return found


def _stream(data: bytes) -> object:
    """The bytes of a connection, cut somewhere; headers are those of a peer that knows how to make them."""
    decoder, found = frames.Decoder(), []
    kind, length, body = (*data, 0)[0], int.from_bytes(data[1:5], "big"), data[5:]
    start = frames._CHECKED.pack(frames.VERSION, kind, 0, length, 7, 7, decoder.checksum(body[:length]))
    whole = start + decoder.checksum(start).to_bytes(4, "big") + body
    cut = len(whole) // 2
    for part in (whole[:cut], whole[cut:]):
        decoder.feed(part)
        found += [messages.decode(frame) for frame in decoder.frames() if frame.header.type not in frames.BULK]
    return tuple(found)


def _greeted(text: bytes) -> object:
    """A HELLO, as far as a router goes with it for somebody who has no key."""
    hello = _message(Type.HELLO)(text)
    assert isinstance(hello, messages.Hello)
    known = peer_keys.Keys({"k": peer_keys.Key("k", b"s" * 16, "")}, (_LINE,), _SERVICE)
    key = known.get(hello.key)
    if key is None:
        return known.unknown(hello.key)
    welcome = messages.Welcome("router", "2" * 32, "crc32", "blake2b-128", 5)
    return messages.proof(key.secret, "hello", hello, welcome)


def _welcomed(text: bytes) -> object:
    hello = _MESSAGES[0]
    welcome = _message(Type.WELCOME)(text)
    assert isinstance(welcome, messages.Welcome)
    return greeting.accept(hello, welcome, b"s" * 16)


def _announced(text: bytes) -> object:
    """A router's links, whoever's key signs what is in them."""
    links = _message(Type.LINKS)(text)
    assert isinstance(links, messages.Links)
    signature = _SIGNER.sign(link_book.KIND, link_book._signed_text(links))
    book = link_book.Book("me:1", _OTHER, 1)
    links = dataclasses.replace(links, key=_SIGNER.public, signature=signature)
    if book.accept(links, "here:1", 10.0).newer:
        book.graph(10.0)
        book.rows(10.0)
        messages.encode(book.aged(links.router, 10.0), frames.checksums()["crc32"])
    return links


def _signed_body(kind: str, data: bytes) -> str:
    """A text ``BODY.SIGNATURE`` whose signature holds, whatever the body says."""
    body = data.decode("utf-8", "surrogatepass")
    return f"{base64.urlsafe_b64encode(data).decode()}.{_SIGNER.sign(kind, body)}"


def _capability(data: bytes) -> object:
    try:
        text = _signed_body(capability.KIND, data)
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    asked = dataclasses.replace(_OPEN, capability=text)
    found = capability.read(text)
    with contextlib.suppress(capability.BadCapability):
        capability.allow(asked, {_SIGNER.public: ""}, "t:1", 5)
    return found


def _warrant(data: bytes) -> object:
    found, _, _ = warrant.read(f"{base64.urlsafe_b64encode(data).decode()}.{'0' * 64}")
    try:
        warrant.check(found, _OPERATION, "router", _EPOCH)
        warrant.check(found, _OPEN, "router", _EPOCH)
    except warrant.BadWarrant:
        pass
    return found


def _token(data: bytes) -> object:
    """Either half of what a token says."""
    header, said = (_HEADER, data) if b"alg" not in data else (data, _CLAIMS)
    name = token.MARK + ".".join(base64.urlsafe_b64encode(half).decode().rstrip("=") for half in (header, said))
    token.known_as(name)
    peer_keys.Keys({}, (_LINE,), _SERVICE).unknown(name)
    found = token.claims(name, 5.0, _SERVICE)
    token.secret(name, found.key, b"x" * 32)
    return found


def _handed_over(data: bytes) -> object:
    message = handoff.decode_body(data)
    found: list[object] = [message["op"]]
    for read in (handoff.offered_files, handoff.offered_context, handoff.accepted_receipt):
        with contextlib.suppress(handoff.BadMessage):
            found.append(read(message))
    return found


def _text(read: Callable[[str], object]) -> Callable[[bytes], object]:
    return lambda data: read(data.decode("utf-8", "surrogateescape"))


_RECEIPT = f"r:1,[::1]:2 {'ab' * 16} 1-30 99"
_LINE = peer_keys.Signed("*", "POOL", b"x" * 32, "")
_HEADER = b'{"alg":"HS256","kid":"POOL"}'
_SERVICE = token.Service("pool", frozenset({"here"}))
_CLAIMS = json.dumps(
    {"sub": "user@pool", "exp": 9, "iat": 1, "nbf": 1, "scope": "condor:/WRITE", "iss": "pool", "aud": ["here"]}
).encode()
_OPEN = messages.Open(_ORIGIN, 1, "d/f", 3 * messages.BLOCK_BYTES, messages.BLOCK_BYTES, 99, "t:1", "c", "s", _ORIGIN)
_OPERATION = messages.Operation(_ORIGIN, 2, "publish", "d/f", 99, after=(1,), tid=4, size_bytes=5, blocks=1,
                               manifest="ab" * 32, terminal="t:1,u:2")  # fmt: skip
_MESSAGES: tuple[Any, ...] = (
    messages.Hello("node", "1" * 32, ("crc32",), ("blake2b-128",), 5, "k"),
    messages.Welcome("router", "2" * 32, "crc32", "blake2b-128", 5, "ab" * 32, _EPOCH),
    messages.Prove("ab" * 32),
    messages.Refuse("no", 5, 3),
    messages.Via(("a:1", "b:2"), _ORIGIN, "who", 3, 99),
    _OPEN,
    messages.Opened(4, _EPOCH, ((0, 2), (4, 9)), True, True),
    messages.NoSpace(_ORIGIN, 1, 5),
    messages.Attach(4),
    messages.Get("d/f", 1, 2, 3, "c", "s", "t:1", 4, 99, True, "f"),
    messages.Found(5, messages.BLOCK_BYTES, 3, 0o644, "ab" * 32, "blake2b-128"),
    messages.Stat("d/f", "c", "s", "t:1"),
    messages.List("d"),
    messages.Answer(
        ("a", "b"), ("file", "link"), (1, 2), (0o644, 0o777), (5, 6), 3, True, 0, "", _EPOCH, "b", "n", "ab" * 32, "d"
    ),
    messages.Staged(4, ((0, 2), (4, 9)), _EPOCH),
    _OPERATION,
    messages.Operation(_ORIGIN, 3, "rename", "d/f", 99, target="e/g", absent=True, attributes=("mode", "size")),
    messages.Copy(_ORIGIN, 1, "d/f", 3, "t:1", "e/g", 5, 0o644, 99, "w"),
    messages.Copying(_ORIGIN, 1, 3, 5, "slow", 4),
    messages.Pack(_ORIGIN, 1, 99, ("a", "b"), (1, 2), (0o644, 0o600), "ab" * 32, after=(1,), cancelled=(2,)),
    messages.Packed(_ORIGIN, 1, (3, 0), (1,), ("failed",), ("why",), (4,)),
    messages.Result(_ORIGIN, 1, "done", "why", 3, 4),
    messages.Custody(_ORIGIN, 1, "r:1"),
    messages.Status(_ORIGIN, 1, 5),
    messages.Cancel(_ORIGIN, 1, True),
    messages.Low(_ORIGIN, 1),
    messages.Lot(_ORIGIN, "reserve", 5, 60, "d"),
    messages.Reserved(_ORIGIN, 5, 99, 3, "why", 4),
    messages.Lease("who", ("ab" * 32,), 60, True),
    messages.Leased((0, 2)),
    messages.Heartbeat(1, 2),
    messages.Links("r:1", _SIGNER.public, 3, 4, (("a:1", 1000, 200), ("[::1]:2", 0, 0)), "s", 5),
    messages.Routes("t:1", 2),
    messages.Routed("t:1", (("a:1", "t:1"),), (("b:1",),), ("why", "so"), "good"),
    messages.Known(2, (("a:1", "b:1", 1000, 200, 5),), "r:1", 9, 8, (("a:1", "site", 3, 1, 1000, 8),)),
    messages.Probe(5),
    messages.Probed(5, 6),
    messages.GetPack(("a", "d/b"), "c", "s", 3, 99),
    messages.FoundPack((3, 0), (0o644, 0), (0, 40)),
)


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _samples(cls: type[Any]) -> list[bytes]:
    return [_json(messages.to_meta(one)) for one in _MESSAGES if type(one) is cls]


def _welcomes() -> list[bytes]:
    hello, welcome = _MESSAGES[:2]
    return [
        _json(
            messages.to_meta(dataclasses.replace(welcome, proof=messages.proof(b"s" * 16, "welcome", hello, welcome)))
        )
    ]


def _packs() -> list[bytes]:
    files = [b"one", b"", b"three" * 100]
    tables = [frames.digests()["blake2b-128"](data) for data in files]
    pack = messages.Pack(_ORIGIN, 1, 99, ("a", "b", "c"), tuple(map(len, files)), (0o644,) * 3, packs.manifest(tables))
    return [_json(messages.to_meta(pack)) + b"\n" + b"".join((*tables, *files))]


def _found_packs() -> list[bytes]:
    found = messages.FoundPack((3, 0, 500, 0), (0o644,) * 4, (0, 0, 0, 40))
    return [_json(messages.to_meta(found)) + b"\n" + b"one" + b"three" * 100]


def _streams() -> list[bytes]:
    made = [(messages.TYPES[type(one)], frames.encode_meta(messages.to_meta(one))) for one in _MESSAGES]
    made += [(Type.PART, b"123456789"), (Type.BLOCK, b"1" * 200_000)]
    return [bytes([kind]) + len(payload).to_bytes(4, "big") + payload for kind, payload in made]


def _reports() -> list[bytes]:
    file = custody.FileReport(
        "out", "http://h/out", 5, "WAITING", "curl", 1, 7, "why", 9, "size", 1, 3, 4, "md5:00", 2, 900, "a:1", 1
    )
    box = custody.SandboxReport(
        "schedd#1.0#5", 1, "owner", State.ACCEPTED.value, 3, "", 0, (_ORIGIN,), 1, 1, 5, 5, 0, 20, 0, 7, "slot1",
        (file,), (_RECEIPT,), ("r:1 3 500 7",), 1, 1, "physics", 8, 9, 1, 2, 3
    )  # fmt: skip
    server = custody.ServerReport("curl://h", "open", "refused", 3, 5, 9)
    flow = custody.FlowReport("curl://h", 5, 6, 0.5, 2, 3, "kept", 4, 5, 6, 7)
    report = custody.Report(
        "m", _SIGNER.public, 4, 9, {"schedd": 3}, 5, (box,), (server,), ("schedd",), 60, (flow,), 8, 24, 5, 9
    )
    return [custody.payload_of(custody.report_ad(report)).encode()]


def _orders() -> list[bytes]:
    order = custody.Order(1, custody.Action.CONFIRM, "schedd#1.0#5", 1, (_ORIGIN,), 1, 3)
    sheet = custody.OrderSheet("schedd", "m", 9, (order,), _SIGNER.public, "s", 4, 900.0)
    return [custody.payload_of(custody.orders_ad(sheet)).encode()]


def _notices() -> list[bytes]:
    vouch = custody.Vouch(_SIGNER.public, _OTHER.public, "signature")
    notice = custody.AgentNotice("schedd", "schedd", _OTHER.public, 4, 9, "https://h:1", "ab" * 32, {"x": 1}, (vouch,))
    return [custody.payload_of(custody.notice_ad(notice)).encode()]


def _handoffs() -> list[bytes]:
    receipt = handoff.Receipt(_ORIGIN, "m", _SIGNER.public, 2, 5)
    context = handoff.TransferContext((handoff.OfferedCredential("token", "scitokens", 5),), "[a=1]", "[b=2]")
    offer = handoff.offer_frames([handoff.OfferedFile("http://h/f", "/scratch/f", 5)], "/plugin", context)
    return [_json(message) for message in (*offer, handoff.accepted_message(receipt), {"op": "linking"})]


def _renewals() -> list[bytes]:
    ask = renewal.Ask("schedd#1.0#5", 1, _ORIGIN, "token", "scitokens", "ab" * 32)
    return [renewal.request_bytes("m", "schedd", "ab" * 32, [ask], _SIGNER.sign)]


def _renewal(data: bytes) -> object:
    """A request, its payload changed where the rest is whole."""
    if data.startswith(b'{"payload"'):
        return renewal.read_request(data)
    return renewal.read_request(_json({"payload": data.decode("utf-8", "surrogateescape"), "signature": "s"}))


def _capabilities() -> list[bytes]:
    names, some = ("", "d"), ("t:1",)
    texts = [capability.issue(_SIGNER, _OTHER.public, name, capability.RIGHTS, 99, 5, 3, some) for name in names]
    return [base64.urlsafe_b64decode(text.partition(".")[0]) for text in texts]


def _warrants() -> list[bytes]:
    made = warrant.Warrant("k", "router", _EPOCH, _ORIGIN, 1, "d/f", 5, 99, 0o644, True, 3)
    return [base64.urlsafe_b64decode(warrant.write(made, b"s" * 16).partition(".")[0])]


#: Every decoder of :mod:`stageout.wire`, and the first that each message meets behind it.
DECODERS: Mapping[str, Decoder] = {
    **{
        kind.name: Decoder(_samples(cls), _message(kind), BadFrame)
        for cls, kind in messages.TYPES.items()
    },
    "stream of frames": Decoder(_streams(), _stream, BadFrame),
    "files of a pack": Decoder(_packs(), _pack, BadFrame),
    "files of a pack that was asked for": Decoder(_found_packs(), _found_pack, BadFrame),
    "greeting of who connects": Decoder(_samples(messages.Hello), _greeted, BadFrame),
    "greeting of a router": Decoder(_welcomes(), _welcomed, BadFrame),
    "announced links": Decoder(_samples(messages.Links), _announced, BadFrame),
    "capability": Decoder(_capabilities(), _capability, capability.BadCapability),
    "warrant": Decoder(_warrants(), _warrant, warrant.BadWarrant),
    "token": Decoder([_CLAIMS, _HEADER], _token, token.BadToken),
    "receipt": Decoder([_RECEIPT.encode()], _text(deposits.read_receipt), deposits.BadReceipt),
    "numbers": Decoder([b"1-3,7,5"], _text(deposits.read_numbers), deposits.BadReceipt),
    "holdings": Decoder([b"r:1 3 500 7"], _text(lambda text: deposits.read_holdings([text])), ()),
    "address": Decoder([b"host.example:1", b"[::1]:2"], _text(address.split_address), ValueError),
    "routes": Decoder([b"a:1,b:2;direct", b"[::1]:3"], _text(route.parse_routes), route.BadRoute),
    "targets": Decoder([b"/a=http://h/b /c=http://[::1]:1/d"], _text(egress.read_targets), egress.BadEgress),
    "hand-off": Decoder(_handoffs(), _handed_over, handoff.BadMessage),
    "report": Decoder(_reports(), _text(custody.read_report), custody.BadPayload),
    "orders": Decoder(_orders(), _text(custody.read_orders), custody.BadPayload),
    "notice": Decoder(_notices(), _text(custody.read_notice), custody.BadPayload),
    "renewal": Decoder([*_renewals(), json.loads(_renewals()[0])["payload"].encode()], _renewal, renewal.BadRenewal),
    "renewed": Decoder(
        [renewal.answer_bytes([renewal.Answer(b"x")])],
        lambda data: renewal.read_answers(data, 1),
        renewal.BadRenewal,
    ),
}  # fmt: skip


# ---- what must hold --------------------------------------------------------------------------------------------------


def ill_typed(value: object, hint: Any = None) -> str:
    """Which part of a decoded message is not of the type that it is declared as; "" for none."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = get_type_hints(type(value))
        rows = ((name, ill_typed(getattr(value, name), hint)) for name, hint in hints.items())
        return next((f"{type(value).__name__}.{name}: {problem}" for name, problem in rows if problem), "")
    if hint is None or hint is Any:
        return ""
    base, inner = typing.get_origin(hint), typing.get_args(hint)
    if base is tuple:
        return _ill_typed_row(value, inner)
    if base is not None and isinstance(value, Mapping):
        return next(filter(None, (ill_typed(one, inner[1]) for one in value.values())), "")
    fitting = (int, float) if hint is float else hint
    if base is None and (not isinstance(value, fitting) or (isinstance(value, bool) and hint is not bool)):
        return f"{value!r:.60} is no {hint}"
    return ""


def _ill_typed_row(value: object, inner: tuple[Any, ...]) -> str:
    if not isinstance(value, tuple):
        return f"{value!r:.60} is no tuple"
    hints = [inner[0]] * len(value) if inner[1:] == (...,) else inner
    if len(hints) != len(value):
        return f"{value!r:.60} has not {len(hints)} items"
    return next(filter(None, map(ill_typed, value, hints)), "")


def wrong(name: str, seed: int, measures: bool = False) -> str:
    """The fault of one decoder with one changed message; "" for none.

    :param seed: of the change. :param measures: memory, too, which takes longer.
    """
    decoder, dice = DECODERS[name], random.Random(f"{name} {seed}")
    data = mutant(dice.choice(decoder.samples), dice)
    if measures:
        tracemalloc.start()
    try:
        problem = ill_typed(decoder.read(data))
    except decoder.refuses:
        problem = ""
    except Exception as error:
        problem = f"{error!r:.200}"
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1] if measures else 0
        tracemalloc.stop()
    if peak_bytes > _MEMORY_BYTES + _MEMORY_PER_BYTE * len(data):
        problem = problem or f"{peak_bytes} bytes of memory for {len(data)}"
    return f"{name}, seed {seed}: {problem}; of {data[:300]!r}" if problem else ""


def _try(first: int, last: int) -> list[str]:
    names = list(DECODERS)
    tried = (wrong(names[number % len(names)], number, number % 50 == 0) for number in range(first, last))
    return [text for text in tried if text]


def main() -> int:
    """Try many; the last line says how many were wrong, and the status is 1 if any was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    started_s, step, count = time.monotonic(), 1000, 0
    starts = range(given.first, given.first + given.examples, step)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(_try, starts, (min(start + step, starts.stop) for start in starts)):
            count += len(found)
            for text in found:
                print(text, flush=True)
    print(f"hostile: {given.examples} messages for {len(DECODERS)} decoders, {count} wrong, "
          f"{time.monotonic() - started_s:.0f} s")  # fmt: skip
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
