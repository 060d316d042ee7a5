"""Keys of a router's peers, and how addresses are written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from overlay_router import identity as starts
from overlay_router.identity import IdentityError, identity
from overlay_router.keys import BadKeys, Key, read_keys
from stageout.core import durable
from stageout.wire.address import is_address, split_address

_SECRET = "long-enough-to-be-a-key"


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_a_line_is_one_key(tmp_path: Path) -> None:
    text = f"# comment\nsite {_SECRET} /\nalice {_SECRET} /a/lice\n\nr2 {_SECRET} - router\n"
    assert read_keys(_file(tmp_path, text)) == {
        "site": Key("site", _SECRET.encode(), ""),
        "alice": Key("alice", _SECRET.encode(), "a/lice"),
        "r2": Key("r2", _SECRET.encode(), "-", is_router=True),
    }


@pytest.mark.parametrize("line", ["", f"site {_SECRET}", "site short /", f"a/b {_SECRET} /", f"r {_SECRET} / rooter"])
def test_what_is_no_key_is_refused_with_what_to_write(tmp_path: Path, line: str) -> None:
    with pytest.raises(BadKeys, match=r"write (one )?'NAME SECRET PREFIX'|try 'openssl"):
        read_keys(_file(tmp_path, line))


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
