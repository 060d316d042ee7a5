"""Faults about names, as standard tools would meet them: depth, many files in one directory, bytes that are no text."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import requests

from stageout.movers import trees
from tests.overlay.http_site import Site, site
from tests.polling import wait_for

#: As deep as a path may be, nearly.
_LEVELS = 1500
_FILES = 30_000
#: Nobody else waits so long while many files are removed. Without others on the machine it is a few milliseconds.
_PAUSE_S = 1.0


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    """At the end nothing is left that would be too deep for whoever removes the directories of tests."""
    with site(tmp_path) as running:
        yield running
    for path in running.root.iterdir():
        trees.remove(running.root, path.name)


class _Client(requests.Session):
    """A connection that stays."""

    def __init__(self, here: Site) -> None:
        super().__init__()
        self.trust_env, self.verify, self._here = False, str(here.ca), here

    def status(self, method: str, path: str, data: bytes = b"", **fields: str) -> int:
        token = {"Authorization": f"Bearer {self._here.token()}"}
        return self.request(
            method, self._here.url + path, data=data, headers={**token, **fields}, timeout=60
        ).status_code


def _left(here: Site) -> list[Path]:
    return [*(here.root / ".stageout/trash").iterdir()]


def test_what_is_deep_is_deleted_and_the_router_starts_again(here: Site) -> None:
    """Fault 3."""
    with _Client(here) as client:
        assert client.status("PUT", "/d" * (_LEVELS - 5) + "/f", b"deep") == 201
        for level in range(_LEVELS - 4, _LEVELS + 1):
            assert client.status("MKCOL", "/d" * level) == 201, level
        assert client.status("DELETE", "/d") == 204
        here.router.kill()
        here.router.start()
        wait_for(lambda: not _left(here), "what was deleted to be removed")
        assert client.status("MKCOL", "/d") == 201
    here.router.stop()
    here.router.start()
    assert [path.name for path in here.root.iterdir() if path.name != ".stageout"] == ["d"]


def _fill(directory: Path, files: int) -> None:
    directory.mkdir()
    place = os.open(directory, os.O_RDONLY)
    for number in range(files):
        os.close(os.open(f"f{number}", os.O_WRONLY | os.O_CREAT, dir_fd=place))
    os.close(place)


def test_nobody_waits_while_many_files_are_removed(here: Site) -> None:
    """Fault 7. Another client writes and reads all the time."""
    _fill(here.root / "many", _FILES)
    (here.root / "other").mkdir()
    pauses: list[float] = []
    ended = threading.Event()

    def other() -> None:
        with _Client(here) as client:
            while not ended.is_set():
                began_s = time.monotonic()
                assert client.status("PUT", "/other/f", b"x") in (201, 204)
                assert client.status("GET", "/other/f") == 200
                pauses.append(time.monotonic() - began_s)

    working = threading.Thread(target=other)
    working.start()
    wait_for(lambda: pauses, "the other client to be served")
    with _Client(here) as client:
        before = len(pauses)
        assert client.status("DELETE", "/many") == 204
        assert _left(here), "the answer came behind the last file"
        wait_for(lambda: not _left(here), "what was deleted to be removed")
    during = pauses[before:]
    ended.set()
    working.join()
    print(f"{len(during)} requests beside {_FILES} files that are removed: the longest took {max(during):.3f} s")
    assert len(during) > 1
    assert max(during) < _PAUSE_S


#: Bytes that are no UTF-8, half of a pair of surrogates as UTF-8 would write it, and characters that look like others.
_NAMES = (
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\xed\xb3\xbf",
    b"caf\xe9",
    "e\u0301".encode(),
    b"a\\b",
    b"%41",
    b"\r\n",
    b"-rf",
)


def test_any_bytes_are_a_name(here: Site) -> None:
    """Fault 25: none of them disturbs the router, and each comes back as it was."""
    with _Client(here) as client:
        for name in _NAMES:
            path = "/n/" + quote(name, safe="")
            moved = "/m-" + quote(name, safe="")
            assert client.status("PUT", path, name) == 201, name
            assert name in [os.fsencode(one.name) for one in (here.root / "n").iterdir()]
            assert client.status("HEAD", path) == 200
            assert client.status("PROPFIND", path, Depth="1") == 207
            assert client.status("GET", "/n/?list") == 200
            assert client.status("GET", "/n/") == 200
            assert client.status("MOVE", path, Destination=here.url + moved) == 201
            assert client.status("GET", moved) == 200
            assert client.status("DELETE", moved) == 204
    assert " http-request-failed " not in here.router.log and " task-failed " not in here.router.log


def test_half_a_character_in_a_token_is_refused(here: Site) -> None:
    """Fault 25: a claim is JSON, where half a character can stand."""
    for claims in (
        {"sub": "\ud800"},
        {"jti": "\udfff"},
        {"scope": "storage.read:/\ud800"},
        {"aud": ["localhost", "\ud800"]},
    ):
        assert here.curl("/", token=here.token(**claims))[0] in (200, 401, 403), claims
    assert here.curl("/", token=here.token())[0] == 200
    assert " http-request-failed " not in here.router.log and " task-failed " not in here.router.log
