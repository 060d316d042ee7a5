"""``stageout put`` with ``https://`` URLs through a custodian, as users call it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import trustme

from stageout.core.signing import new_key
from tests.harness.pool.waiting import wait_until
from tests.overlay.custody_site import content
from tests.overlay.http_site import Site, site
from tests.overlay.https_commands import Commands

#: NAMEs are hosts: the two of this machine.
_TERMINAL, _CUSTODIAN = "127.0.0.1", "localhost"


class _Through(Commands):
    """Commands with URLs of the terminal."""

    def url(self, path: str) -> str:
        return f"https://{_TERMINAL}/{path}"


@contextmanager
def _two(home: Path) -> Iterator[tuple[Site, Site, Commands]]:
    """A terminal, a custodian for it, and commands that go through that one."""
    authority, keys = trustme.CA(), {"alice": new_key(), _CUSTODIAN: new_key()}
    with ExitStack() as stack:
        own = {"STAGEOUT_ROUTER_ADDRESS": _TERMINAL, "STAGEOUT_ROUTER_INTERVAL": "3600"}
        users = {"alice": "/alice", _CUSTODIAN: "/alice router"}
        terminal = stack.enter_context(site(home / "terminal", own, users, authority, keys))
        place = home / "custodian"
        place.mkdir()
        keys[_CUSTODIAN].store("router-own-key", place / "own.key")
        (place / "custody").write_text(
            f"router {_TERMINAL} 127.0.0.1:{terminal.router.port} ca.pem\ncustody alice * {_TERMINAL} -\n"
        )
        own = {
            "STAGEOUT_ROUTER_ADDRESS": _CUSTODIAN, "STAGEOUT_ROUTER_ROOT": "", "STAGEOUT_ROUTER_INTERVAL": "3600",
            "STAGEOUT_ROUTER_CUSTODY": str(place / "custody"), "STAGEOUT_ROUTER_OWN_KEY": str(place / "own.key"),
        }  # fmt: skip
        custodian = stack.enter_context(site(place, own, {"alice": "-"}, authority, keys))
        run = _Through(custodian, home)
        run.options += ["--through", f"{_CUSTODIAN}:{custodian.router.port}"]
        yield terminal, custodian, run


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, Site, Commands]]:
    with _two(tmp_path_factory.mktemp("custody")) as found:
        yield found


def test_put_waits_for_the_delivery(two: tuple[Site, Site, Commands], tmp_path: Path) -> None:
    terminal, _, run = two
    (tmp_path / "f").write_bytes(content())
    (told,) = run("put", str(tmp_path / "f"), run.url("alice/f"))
    assert (terminal.root / "alice/f").read_bytes() == (tmp_path / "f").read_bytes()
    assert told["state"] == "done" and told["sent_bytes"] == told["size_bytes"]


def test_put_leaves_a_file_with_a_custodian(tmp_path: Path) -> None:
    with _two(tmp_path) as (terminal, _, run):
        terminal.router.stop()
        (tmp_path / "f").write_bytes(content())
        (told,) = run("put", "--custody", str(tmp_path / "f"), run.url("alice/f"))
        assert told["state"] == "custody" and told["custodians"] == [_CUSTODIAN]
        (tmp_path / "f").rename(tmp_path / "kept")
        terminal.router.start()
        file = terminal.root / "alice/f"
        wait_until(file.exists, timeout_s=30, what="the delivery")
        assert file.read_bytes() == (tmp_path / "kept").read_bytes()


def test_what_cannot_be_kept(two: tuple[Site, Site, Commands], tmp_path: Path) -> None:
    _, _, run = two
    (tmp_path / "f").write_bytes(b"data")
    run("put", "--custody", str(tmp_path / "f"), "https://elsewhere.example.org/f", status=1)
    assert "no router elsewhere.example.org in its list" in run.err
    run("put", "-r", str(tmp_path), run.url("alice/"), status=64)
    (tmp_path / "token").write_text("a.b.c")
    run("put", "--token", str(tmp_path / "token"), str(tmp_path / "f"), run.url("alice/f"), status=64)
    assert "--through needs a key" in run.err


def test_a_job_hands_over_with_its_own_key(tmp_path: Path) -> None:
    with _two(tmp_path) as (terminal, _, run):
        terminal.router.stop()
        job, token, file = tmp_path / "job.key", tmp_path / "job.token", tmp_path / "f"
        file.write_bytes(content())
        words = [sys.executable, "-m", "stageout.cli.main", "token"]
        public = subprocess.run([*words, str(job), "--public"], check=True, capture_output=True, text=True).stdout
        words += [str(tmp_path / "alice.key"), "--user", "alice", "--holder", public.strip()]
        words += ["--router", _CUSTODIAN, "--router", _TERMINAL, "--scope", "storage.modify:/alice/run7"]
        token.write_text(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
        own = ["--token", str(token), "--key", str(job)]
        (told,) = run("put", "--custody", *own, str(file), run.url("alice/run7/f"))
        assert told["state"] == "custody"
        other = ["--token", str(token), "--key", str(tmp_path / "other.key")]
        new_key().store("other", tmp_path / "other.key")
        (told,) = run("put", "--custody", *other, str(file), run.url("alice/run7/g"), status=1)
        assert told["error_class"] == "CREDENTIAL_REFUSED", "the token is of another key"
        job.unlink()
        terminal.router.start()
        there = terminal.root / "alice/run7/f"
        wait_until(there.exists, timeout_s=30, what="the delivery")
        assert there.read_bytes() == file.read_bytes()
