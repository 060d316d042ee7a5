"""Keys of a router's peers, and how addresses are written."""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlay_router.peers.greeting import connect
from overlay_router.peers.keys import BadKeys, Key, Keys, Signed, add_key, read_keys, read_own_key
from overlay_router.peers.limits import plain
from overlay_router.peers.terms import Terms
from overlay_router.routing import identity as starts
from overlay_router.routing.identity import IdentityError, identity
from stageout.core import durable
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.wire import token
from stageout.overlay.wire.route import written
from stageout.wire.address import is_address, split_address

_SECRET = "long-enough-to-be-a-key"


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_a_name_that_no_host_can_have_is_an_address_that_is_not_there() -> None:
    """A client that connected to it went on for ever, or ended without a word."""
    name = "a" * 64 + ".example.org"
    with pytest.raises(OSError, match="no host has such a name"):
        asyncio.run(connect(f"{name}:9621"))
    with pytest.raises(TransferFailure, match="no host has such a name") as caught:
        Channel(Gateway(name, 9621, "k", b"secret"))
    assert caught.value.kind is ErrorClass.NAME_NOT_RESOLVED


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (socket.EAI_NONAME, ErrorClass.NAME_NOT_RESOLVED), (socket.EAI_NODATA, ErrorClass.NAME_NOT_RESOLVED),
        (socket.EAI_AGAIN, ErrorClass.NAME_LOOKUP_FAILED), (socket.EAI_FAIL, ErrorClass.NAME_LOOKUP_FAILED),
        (socket.EAI_SYSTEM, ErrorClass.NAME_LOOKUP_FAILED),
    ],
)  # fmt: skip
def test_only_a_resolver_that_knows_denies_a_name(code: int, kind: ErrorClass, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **more: object) -> None:
        raise socket.gaierror(code, "as it says")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    with pytest.raises(TransferFailure, match="as it says") as caught:
        Channel(Gateway("data.example.org", 9621, "k", b"secret"))
    assert caught.value.kind is kind


def test_a_line_is_one_key(tmp_path: Path) -> None:
    text = f"# comment\nsite {_SECRET} /\nalice {_SECRET} /a/lice\n\nr2 {_SECRET} - router\n"
    assert dict(read_keys(_file(tmp_path, text))) == {
        "site": Key("site", _SECRET.encode(), ""),
        "alice": Key("alice", _SECRET.encode(), "a/lice"),
        "r2": Key("r2", _SECRET.encode(), "-", is_router=True),
    }


def test_a_key_is_made_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "new"
    for words, is_router in (["alice", "/a"], False), (["r2", "-", "router"], True):
        name, secret = add_key(path, words).split()
        assert read_keys(path)[name] == Key(name, secret.encode(), words[1].strip("/"), is_router)
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_text()
    for bad in (["alice", "/b"], ["b"], ["b", ""], ["b", "/a b"], ["b", "/", "rooter"], ["a/b", "/"]):
        with pytest.raises(BadKeys, match=r"has a key of the name|write 'NAME SECRET PREFIX'"):
            add_key(path, bad)
    assert path.read_text() == before
    for other in (f"site {_SECRET} /", "# none yet\n"):
        path.write_text(other)
        name, secret = add_key(path, ["bob", "/b"]).split()
        assert read_keys(path)[name] == Key(name, secret.encode(), "b")
        assert path.read_text().startswith(other)


@pytest.mark.parametrize("line", ["", f"site {_SECRET}", "site short /", f"a/b {_SECRET} /", f"r {_SECRET} / rooter"])
def test_what_is_no_key_is_refused_with_what_to_write(tmp_path: Path, line: str) -> None:
    with pytest.raises(BadKeys, match=r"write (one )?'NAME SECRET PREFIX'|try 'openssl"):
        read_keys(_file(tmp_path, line))


def test_keys_that_the_router_may_not_read_are_to_be_given_to_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _file(tmp_path, f"site {_SECRET} /")

    def denied(_: Path) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", denied)
    monkeypatch.setattr(Path, "read_text", denied)
    for read in (read_keys, read_own_key):
        with pytest.raises(BadKeys, match=f"{path}.*chown"):
            read(path)


#: Made by condor_token_create of HTCondor 25.14 with keys of these names; the file with both is below.
_FILE = b"file of a key of HTCondor\0\xde\xad\xbe\xef whose bytes do not matter"
_OF_POOL = (
    "eyJhbGciOiJIUzI1NiIsImtpZCI6IlBPT0wifQ.eyJpYXQiOjE3OTUzMTgwNjAsImlzcyI6InBvb2wuZXhhbXBsZS5vcmciLCJqd"
    "GkiOiJlY2UwZWIzMWExZjUxMzMxZmE3YzBkNjUxNjE2MDNlMSIsInN1YiI6ImFsaWNlQHBvb2wuZXhhbXBsZS5vcmcifQ.wz2GVI"
    "R2ZdV1eZalqCM6yFZmLJHbgluIZILoX5nTVjs"
)
_OF_OVERLAY = (
    "eyJhbGciOiJIUzI1NiIsImtpZCI6Im92ZXJsYXkifQ.eyJpYXQiOjE3OTUzMTgwNjAsImlzcyI6InBvb2wuZXhhbXBsZS5vcmciL"
    "CJqdGkiOiIyNDk2MjU5NWRkMjhjZDA3MDFjZGI4YzhmNDI4MjA3MiIsInN1YiI6ImFsaWNlQHBvb2wuZXhhbXBsZS5vcmcifQ.Xm"
    "zxr6fa1Slsmx47IS18bmyTguB4-n-wBvdH65g9zmw"
)
_OLD = (
    "eyJhbGciOiJIUzI1NiIsImtpZCI6Im92ZXJsYXkifQ.eyJleHAiOjE3OTUzMTgwNjEsImlhdCI6MTc5NTMxODA2MCwiaXNzIjoic"
    "G9vbC5leGFtcGxlLm9yZyIsImp0aSI6IjUxZjZiMTBlODg3NTc5OWU0MGRiNGE5MDM5MTA0YTA3Iiwic3ViIjoiYWxpY2VAcG9vb"
    "C5leGFtcGxlLm9yZyJ9.ArFhGBUn4liKMiyu5M7F06JBkMQDdG_v9XnT-ebcD60"
)
_READS = (
    "eyJhbGciOiJIUzI1NiIsImtpZCI6Im92ZXJsYXkifQ.eyJpYXQiOjE3OTUzMTgwNjAsImlzcyI6InBvb2wuZXhhbXBsZS5vcmciL"
    "CJqdGkiOiJiOWI4NmY5NTBkNjk4OGQzMTQyYzA2NjMxODI3YTBmZSIsInNjb3BlIjoiY29uZG9yOlwvUkVBRCIsInN1YiI6ImFsa"
    "WNlQHBvb2wuZXhhbXBsZS5vcmcifQ.tv1R3UP-fl3dibNLnXWkTt-8JIVukrNqsAw3RUTcQ5g"
)


_HERE = token.Service("pool.example.org", frozenset({"gw.example.org", "gw.example.org:9621"}))


def _tokens(tmp_path: Path, *lines: str) -> Keys:
    for name in ("POOL", "overlay"):
        (tmp_path / name).write_bytes(_FILE)
        (tmp_path / name).chmod(0o600)
    return read_keys(_file(tmp_path, "\n".join(line.replace(" @", f" {tmp_path}/", 1) for line in lines)), _HERE)


@pytest.mark.parametrize(("text", "line"), [(_OF_POOL, "POOL"), (_OF_OVERLAY, "overlay")])
def test_the_signature_of_a_token_is_the_secret_and_is_not_said(tmp_path: Path, text: str, line: str) -> None:
    name, secret = token.key_of(text)
    assert secret.decode() not in name
    keys = _tokens(tmp_path, f"site {_SECRET} /", f"token:*@pool.example.org @{line} pilots")
    assert keys.get(name) == Key(f"token:{line}:alice@pool.example.org", secret, "pilots")
    assert keys.proved(keys[name].name) == Key(keys[name].name, b"", "pilots")
    assert [token.known_as(one) for one in (name, "site", "token:x")] == [keys[name].name, "site", "token:x"]
    assert keys.get(keys[name].name) is None, "the name alone proves nothing"
    assert keys.get("site") == keys.proved("site")


def test_a_token_is_for_its_identity_and_key_alone(tmp_path: Path) -> None:
    name, _ = token.key_of(_OF_OVERLAY)
    for line in ("token:bob@pool.example.org @overlay /", "token:*@pool.example.org @POOL /"):
        keys = _tokens(tmp_path, line)
        assert keys.get(name) is None
        assert "line 'token:alice@pool.example.org FILE PREFIX'" in keys.unknown(name)
    keys = _tokens(tmp_path, "token:alice@pool.example.org @overlay - router", "token:* @overlay /")
    assert keys[name].is_router


def test_a_token_is_for_its_issuer_and_service_and_ends(tmp_path: Path) -> None:
    """Clocks may differ by a minute."""
    keys, soon = _tokens(tmp_path, "token:* @overlay /"), time.time() + 50
    for more in ({}, {"aud": "gw.example.org"}, {"aud": ["x", "gw.example.org:9621"]}, {"nbf": soon, "iat": soon}):
        assert keys[_changed(_OF_OVERLAY, **more)].ends == 0
    lasting, short = (keys[_changed(_OF_OVERLAY, exp=end)] for end in (soon + 1, soon))
    assert (lasting.ends, short.ends, lasting.name) == (soon + 1, soon, short.name)
    assert keys.proved(short.name, short.ends) == replace(short, secret=b"")
    nobodys = read_keys(tmp_path / "keys")
    assert nobodys.takes_tokens and not read_keys(_file(tmp_path, f"site {_SECRET} /")).takes_tokens
    assert "is of the issuer 'pool.example.org'" in nobodys.unknown(token.key_of(_OF_OVERLAY)[0])


def test_connections_end_with_their_tokens_and_no_others() -> None:
    ended: list[object] = []
    terms = Terms(lambda name, ends: ended.append((name, ends)))
    one, later, never = Key("t", b"", "", ends=10), Key("t", b"", "", ends=11), Key("k", b"", "")
    with terms.of(one, lambda: ended.append(1)), terms.of(later, lambda: ended.append(2)), terms.of(never, ended.clear):
        with terms.of(one, lambda: ended.append(3)):
            terms.look(9.9)
        assert ended == []
        terms.look(10)
        assert ended == [1, ("t", 10)]
    terms.look(10.5)
    assert ended == [1, ("t", 10), ("t", 10)], "one that has gone to a worker since"
    terms.look(11)
    assert ended[3:] == [("t", 11)]
    terms.look(12)
    assert len(ended) == 4


def test_a_connection_that_serves_again_has_the_rights_that_it_had(tmp_path: Path) -> None:
    for first, second in (("POOL", "overlay"), ("overlay", "POOL")):
        keys = _tokens(tmp_path, f"token:* @{first} {first}", f"token:* @{second} {second}")
        found = [keys[token.key_of(text)[0]] for text in (_OF_POOL, _OF_OVERLAY)]
        assert [keys.proved(one.name) for one in found] == [replace(one, secret=b"") for one in found]
        assert [one.prefix for one in found] == ["POOL", "overlay"]


def test_what_a_later_file_withdraws(tmp_path: Path) -> None:
    lines = f"one {_SECRET} /", f"two {_SECRET} a", f"three {_SECRET} -", "token:* @overlay pilots"
    before = _tokens(tmp_path, *lines)
    alice = before[token.key_of(_OF_OVERLAY)[0]].name
    later = _tokens(tmp_path, lines[0], lines[1].replace(" a", " b"), lines[2] + " router", lines[3])
    names = ("one", "two", "three", alice, "unknown", "tls")
    assert [name for name in names if before.withdraws(name, later)] == ["two", "three"]
    less = _tokens(tmp_path, "token:bob@pool.example.org @overlay pilots")
    assert [name for name in names if before.withdraws(name, less)] == ["one", "two", "three", alice]


def _changed(text: str, **fields: object) -> str:
    """The name of a token that says something else."""
    header, content, _ = text.split(".")
    said = {**json.loads(base64.urlsafe_b64decode(content + "==")), **fields}
    return f"{token.MARK}{header}.{base64.urlsafe_b64encode(json.dumps(said).encode()).decode().rstrip('=')}"


def test_who_changes_a_token_does_not_know_its_secret(tmp_path: Path) -> None:
    keys = _tokens(tmp_path, "token:* @overlay /")
    other = keys[_changed(_OF_OVERLAY, sub="root@pool.example.org")]
    assert other.secret != token.key_of(_OF_OVERLAY)[1]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (token.key_of(_OLD)[0], "has expired"),
        (token.key_of(_READS)[0], "is not for WRITE"),
        (_changed(_OF_OVERLAY, exp=float("nan")), "has expired"),
        (_changed(_OF_OVERLAY, exp=True), "has expired"),
        (_changed(_OF_OVERLAY, nbf=4_000_000_000), "is not valid yet"),
        (_changed(_OF_OVERLAY, iat=4_000_000_000), "is not valid yet"),
        (_changed(_OF_OVERLAY, nbf=float("nan")), "is not valid yet"),
        (_changed(_OF_OVERLAY, iat=None), "is not valid yet"),
        (_changed(_OF_OVERLAY, iss="other.example.org"), "is of the issuer 'other.example.org'"),
        (_changed(_OF_OVERLAY, iss=["pool.example.org"]), "is of the issuer"),
        (_changed(_OF_OVERLAY, aud="ANY"), "ask for one for gw.example.org or gw.example.org:9621"),
        (_changed(_OF_OVERLAY, aud=None), "is for another service"),
        (_changed(_OF_OVERLAY, aud=[["gw.example.org"]]), "is for another service"),
        (_changed(_OF_OVERLAY, sub="a/b"), "no identity"),
        (_changed(_OF_OVERLAY, sub=["alice"]), "no identity"),
        ("token:eyJhbGciOiJub25lIn0.eyJzdWIiOiJhIn0", "HS256"),
        ("token:", "no token"),
        ("token:W10.W10", "no token"),
        ("token:a.b.c", "no token"),
        ("token:\u00e9.\u00e9", "no token"),
    ],
)
def test_tokens_that_give_no_right(tmp_path: Path, name: str, words: str) -> None:
    keys = _tokens(tmp_path, "token:* @overlay /", "token:* @POOL /")
    assert keys.get(name) is None
    assert words in keys.unknown(name)


@given(st.text(max_size=60))
def test_any_name_is_looked_up_without_ado(name: str) -> None:
    keys = Keys({}, [Signed("*", "POOL", _FILE, "")])
    assert keys.get(name) is keys.get(token.MARK + name) is None
    assert Keys({}).unknown(token.MARK + name)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("token:a/b @overlay /", "write 'token:IDENTITY FILE PREFIX'"),
        ("token:alice@pool.example.org @overlay", "write 'token:IDENTITY FILE PREFIX'"),
        ("token:alice @nowhere /", "cannot read the key that signs"),
        ("token:alice @short /", "shorter than 16"),
        ("token:alice @open /", "open to all users"),
    ],
)
def test_lines_for_tokens_that_cannot_be_used(tmp_path: Path, line: str, words: str) -> None:
    for name, text, mode in (("short", b"x", 0o600), ("open", _FILE, 0o644)):
        (tmp_path / name).write_bytes(text)
        (tmp_path / name).chmod(mode)
    with pytest.raises(BadKeys, match=words):
        _tokens(tmp_path, line)


def test_paths_of_a_key() -> None:
    assert Key("k", b"", "").allows("any")
    assert Key("k", b"", "a").allows("a/b")
    assert not Key("k", b"", "a").allows("ab")
    assert not Key("k", b"", "-").allows("any")
    assert not Key("k", b"", "-").allows("-/any")


def test_addresses() -> None:
    assert split_address("router-1.example.org:9621") == ("router-1.example.org", 9621)
    assert split_address("[::1]:80") == ("::1", 80)
    for text in ("", "host", "host:0", "host:65536", "a b:1", ":1", "host:1\n", "-h:1", "x" * 200 + ":1", "[::1:80"):
        assert not is_address(text), text


def test_addresses_of_ipv6_have_one_form() -> None:
    for host, form in (
        ("0:0::1", "[::1]:80"), ("2001:DB8::A", "[2001:db8::a]:80"), ("fe80::0:1%eth0", "[fe80::1%eth0]:80"),
        ("a:b", "[a:b]:80"), ("Gw.example.org", "gw.example.org:80"), ("127.0.0.1", "127.0.0.1:80"),
    ):  # fmt: skip
        assert written(host, 80) == form
    assert [plain(host) for host in ("::ffff:192.0.2.1", "::1", "::ffff:1", "192.0.2.1", "a::ffff:192.0.2.1")] == [
        "192.0.2.1", "::1", "::ffff:1", "192.0.2.1", "a::ffff:192.0.2.1",
    ]  # fmt: skip


class _Death(Exception):
    """The process is gone."""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("label", ["router-key", "router-incarnation"])
def test_numbers_of_starts_only_grow_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label: str, when: str
) -> None:
    key, first = identity(tmp_path)
    (tmp_path / "incarnation").write_text(f"{first + 10**9}\n")  # written by a clock that was ahead
    if label == "router-key":
        (tmp_path / "router_key").unlink()
    with monkeypatch.context() as patched:
        patched.setattr(durable, "step", _dying(label, when))
        with pytest.raises(_Death):
            identity(tmp_path)
    again, later = identity(tmp_path)
    assert later > first + 10**9
    assert (again.public == key.public) == (label != "router-key")
    (tmp_path / "incarnation").write_text("damaged")
    with pytest.raises(IdentityError, match="remove it"):
        identity(tmp_path)


def test_a_full_disk_does_not_keep_a_router_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, first = identity(tmp_path)
    (tmp_path / "incarnation").write_text(f"{first + 10**9}\n")
    with monkeypatch.context() as full:
        full.setattr(durable, "_faults", durable.parse_faults("router-incarnation=ENOSPC"))
        _, later = identity(tmp_path)
    assert later == first + 10**9 + 1
    assert int((tmp_path / "incarnation").read_text()) == first + 10**9
    monkeypatch.setattr(starts, "_AGAIN_S", 0.001)
    arm = tmp_path / "arm"
    arm.touch()
    monkeypatch.setattr(durable, "_faults", durable.parse_faults(f"router-incarnation=ENOSPC@{arm}"))
    asyncio.run(starts.keep(tmp_path, later))
    assert (int((tmp_path / "incarnation").read_text()), arm.exists()) == (later, False)


def _dying(label: str, when: str) -> Callable[[str], AbstractContextManager[None]]:
    real = durable.step

    @contextmanager
    def step(name: str) -> Iterator[None]:
        if (name, when) == (label, "before"):
            raise _Death
        with real(name):
            yield
        if name == label:
            raise _Death

    return step
