"""WebDAV at a router: rclone, and each method by itself."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from tests.overlay.http_site import Site, site

_CONTENT = os.urandom(2 * 1024 * 1024 + 5)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("site")) as found:
        yield found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(_CONTENT)
    return path


def _rclone(here: Site, *arguments: str) -> str:
    settings = {
        "RCLONE_CONFIG_R_TYPE": "webdav", "RCLONE_CONFIG_R_URL": here.url, "RCLONE_CONFIG_R_VENDOR": "other",
        "RCLONE_CONFIG_R_BEARER_TOKEN": here.token(), "RCLONE_CA_CERT": str(here.ca), "RCLONE_CONFIG": "/dev/null",
    }  # fmt: skip
    done = subprocess.run(
        ["rclone", *arguments], env={**os.environ, **settings}, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_rclone(here: Site, source: Path, tmp_path: Path) -> None:
    _rclone(here, "copyto", str(source), "R:rclone/new/f")
    assert (here.root / "rclone/new/f").read_bytes() == _CONTENT
    assert _rclone(here, "lsf", "--recursive", "R:rclone").split() == ["new/", "new/f"]
    _rclone(here, "moveto", "R:rclone/new/f", "R:rclone/g")
    _rclone(here, "copyto", "R:rclone/g", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == _CONTENT
    _rclone(here, "mkdir", "R:rclone/empty")
    _rclone(here, "rmdir", "R:rclone/empty")
    _rclone(here, "deletefile", "R:rclone/g")
    assert [path.name for path in (here.root / "rclone").iterdir()] == ["new"]
    tree = tmp_path / "tree"
    for number in range(30):
        (tree / str(number % 3)).mkdir(parents=True, exist_ok=True)
        (tree / str(number % 3) / f"f{number}").write_bytes(os.urandom(number * 100))
    _rclone(here, "sync", str(tree), "R:rclone/tree")
    _rclone(here, "check", "--download", str(tree), "R:rclone/tree")
    _rclone(here, "purge", "R:rclone/tree")
    assert not (here.root / "rclone/tree").exists()


class _Dav:
    """Requests of a user."""

    def __init__(self, here: Site, user: str = "alice", **claims: object) -> None:
        self._here, self._token = here, here.token(user, **claims)

    def __call__(self, method: str, path: str, data: bytes = b"", **fields: str) -> requests.Response:
        headers = {name.replace("_", "-"): value for name, value in fields.items()}
        headers["Authorization"] = f"Bearer {self._token}"
        with requests.Session() as session:
            session.trust_env = False
            url = self._here.url + path
            return session.request(method, url, data=data, headers=headers, verify=str(self._here.ca), timeout=30)

    def status(self, method: str, path: str, data: bytes = b"", **fields: str) -> int:
        return self(method, path, data, **fields).status_code


def test_propfind(here: Site) -> None:
    dav = _Dav(here)
    (here.root / "props/inner").mkdir(parents=True)
    (here.root / "props/f&<").write_bytes(b"123")
    (here.root / "props/link").symlink_to("/etc")
    assert dav.status("PROPFIND", "/props") == 403
    assert dav.status("PROPFIND", "/props", Depth="infinity") == 403
    assert dav.status("PROPFIND", "/none", Depth="0") == 404
    one = dav("PROPFIND", "/props", Depth="0").text
    assert one.count("<D:response>") == 1 and "<D:href>/props/</D:href>" in one and "<D:collection/>" in one
    all_of_it = dav("PROPFIND", "/props/", Depth="1").text
    assert all_of_it.count("<D:response>") == 3 and "/etc" not in all_of_it and "/props/link" not in all_of_it
    assert "<D:href>/props/f&amp;%3C</D:href>" in all_of_it
    body = b'<propfind xmlns="DAV:"><prop><getcontentlength/><x xmlns="a&quot;:b"/></prop></propfind>'
    asked = dav("PROPFIND", "/props/f&%3C", body, Depth="0")
    assert asked.status_code == 207
    assert "<D:getcontentlength>3</D:getcontentlength>" in asked.text and "getlastmodified" not in asked.text
    assert "404 Not Found" in asked.text
    for bad in (
        b"<propfind", b"<other/>", b'<!DOCTYPE a [<!ENTITY b "c">]><propfind xmlns="DAV:"><prop>&b;</prop></propfind>',
        '<?xml version="1.0" encoding="utf-16"?><!DOCTYPE a><propfind xmlns="DAV:"/>'.encode("utf-16"),
    ):  # fmt: skip
        assert dav.status("PROPFIND", "/props", bad, Depth="0") == 400
    assert dav.status("PROPFIND", "/props", bytes(100_000), Depth="0") == 413
    assert dav.status("PROPPATCH", "/props") == 403
    assert dav("OPTIONS", "/").headers["DAV"] == "1"


def test_names_change(here: Site) -> None:
    dav = _Dav(here)
    assert dav.status("MKCOL", "/names/inner") == 409
    assert dav.status("MKCOL", "/names/") == 201
    assert dav.status("MKCOL", "/names/") == 405
    assert dav.status("MKCOL", "/names/x", b"body") == 415
    assert dav.status("PUT", "/names/f", b"1") == 201
    assert dav.status("PUT", "/names/g", b"2") == 201
    to = f"{here.url}/names/g"
    assert dav.status("MOVE", "/names/f", Destination=to, Overwrite="F") == 412
    assert dav.status("MOVE", "/names/f", Destination="https://other.example.org/g") == 502
    assert dav.status("MOVE", "/names/f", Destination=f"{here.url}/.stageout/x") == 403
    assert dav.status("MOVE", "/names/f", Destination=f"{here.url}/none/g") == 409
    assert dav.status("MOVE", "/names/f") == 400
    for method in ("MOVE", "COPY"):
        assert dav.status(method, "/names/f", Destination="https://[::1/g") == 400
    assert dav.status("MOVE", "/names/none", Destination=to) == 404
    assert dav.status("MOVE", "/names/f", Destination=to) == 204
    assert (here.root / "names/g").read_bytes() == b"1"
    assert dav.status("COPY", "/names/g", Destination=f"{here.url}/names/h", Overwrite="F") == 201
    assert dav.status("COPY", "/names/g", Destination=f"{here.url}/names/h", Overwrite="F") == 412
    assert dav.status("COPY", "/names/g", Destination=f"{here.url}/names/h") == 204
    assert dav.status("COPY", "/names/g", Destination=f"{here.url}/none/h") == 409
    assert dav.status("COPY", "/names", Destination=f"{here.url}/names2") == 501
    assert dav.status("DELETE", "/names/h", If_Match='"other"') == 412
    assert dav.status("DELETE", "/names/h") == 204
    assert dav.status("DELETE", "/names/h") == 404
    assert dav.status("MOVE", "/names/", Destination=f"{here.url}/renamed/") == 201
    assert (here.root / "renamed/g").read_bytes() == b"1"
    assert dav.status("DELETE", "/renamed") == 204
    assert not (here.root / "renamed").exists()
    assert dav.status("DELETE", "/") == 403


def test_rights_to_change_names(here: Site) -> None:
    """A right at both names of a MOVE; and with one to create, nothing is replaced or removed."""
    (here.root / "bob").mkdir()
    for name in ("bob/f", "bob/g", "outside"):
        (here.root / name).write_bytes(b"x")
    bob, creator = _Dav(here, "bob"), _Dav(here, scope="storage.create:/bob storage.read:/bob")
    for source, target in (("/bob/f", "/outside"), ("/outside", "/bob/h"), ("/none", "/bob/h"), ("/bob/f", "/bobby")):
        assert bob.status("MOVE", source, Destination=here.url + target) == 403
        assert bob.status("COPY", source, Destination=here.url + target) == 403
    for method, path in (("DELETE", "/outside"), ("DELETE", "/none"), ("MKCOL", "/new"), ("PROPFIND", "/outside")):
        assert bob.status(method, path, Depth="0") == 403
    assert creator.status("DELETE", "/bob/f") == 403
    assert creator.status("MOVE", "/bob/f", Destination=f"{here.url}/bob/new") == 403
    assert creator.status("COPY", "/bob/f", Destination=f"{here.url}/bob/g") == 403
    assert creator.status("COPY", "/bob/f", Destination=f"{here.url}/bob/new") == 201
    assert creator.status("MKCOL", "/bob/inner") == 201
    assert (here.root / "bob/g").read_bytes() == b"x"
