"""Python's clients at a router: urllib, aiohttp, which waits for "100 Continue", and the plugin for HTTP of a job."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.overlay.http_site import Site, site

_PLUGIN = Path(__file__).resolve().parents[2] / "plugins/stageout_curl_plugin"
_CONTENT = os.urandom(12 * 1024 * 1024 + 5)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("site")) as found:
        yield found


def _context(here: Site) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(here.ca))


def _urllib(here: Site, path: str, user: str = "alice", data: object = None, **fields: str) -> tuple[int, bytes]:
    """Status and body of a GET, or of a PUT with data."""
    headers = {"Authorization": f"Bearer {here.token(user)}", **fields}
    method = "GET" if data is None else "PUT"
    request = urllib.request.Request(here.url + path, data, headers, method=method)  # type: ignore[arg-type]
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=_context(here))
    )
    try:
        with opener.open(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as problem:
        return problem.code, problem.read()


def test_urllib(here: Site, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(_CONTENT)
    assert _urllib(here, "/urllib", data=_CONTENT)[0] == 201
    with (tmp_path / "source").open("rb") as source:  # without a length: chunked
        assert _urllib(here, "/urllib", data=source)[0] == 204
    assert (here.root / "urllib").read_bytes() == _CONTENT
    status, rest = _urllib(here, "/urllib", Range=f"bytes={5 << 20}-")
    assert (status, rest) == (206, _CONTENT[5 << 20 :])


def test_urllib_sees_a_refusal_though_it_sends_the_body(here: Site) -> None:
    """It reads no answer before all is sent: the router reads on."""
    for _ in range(5):
        status, text = _urllib(here, "/refused", "bob", _CONTENT)
        assert status == 403 and b"the token gives no right" in text
    assert not (here.root / "refused").exists()


def test_the_plugin_of_a_job(here: Site, tmp_path: Path) -> None:
    """With the job's credential as token; the plugin asks for the digest after the upload."""
    (tmp_path / "source").write_bytes(_CONTENT)
    (tmp_path / "credentials").mkdir()
    (tmp_path / "credentials/vo.use").write_text(here.token())
    environment = {**os.environ, "_CONDOR_CREDS": str(tmp_path / "credentials"), "SSL_CERT_FILE": str(here.ca)}
    for name, option in (("source", ["-upload"]), ("back", [])):
        url = f"vo+{here.url}/job/out"
        (tmp_path / "in").write_text(f'[ Url = "{url}"; LocalFileName = "{tmp_path / name}" ]\n')
        command = [sys.executable, str(_PLUGIN), "-infile", str(tmp_path / "in"), "-outfile", str(tmp_path / "out")]
        subprocess.run([*command, *option], env=environment, check=True, timeout=60)
        told = (tmp_path / "out").read_text()
        assert "TransferSuccess = true" in told, told
        assert not option or 'StageOutVerified = "sha256"' in told, told
    assert (here.root / "job/out").read_bytes() == (tmp_path / "back").read_bytes() == _CONTENT


def test_aiohttp(here: Site) -> None:
    sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal sent
        for at in range(0, len(_CONTENT), 1 << 16):
            sent += 1
            yield _CONTENT[at : at + (1 << 16)]

    async def run() -> None:
        nonlocal sent
        connector = aiohttp.TCPConnector(ssl=_context(here))
        async with aiohttp.ClientSession(here.url, connector=connector) as session:
            headers = {"Authorization": f"Bearer {here.token()}"}
            for status in (201, 204):
                async with session.put("/aiohttp", data=pieces(), headers=headers, expect100=True) as answer:
                    assert answer.status == status
            sent = 0
            of_bob = {"Authorization": f"Bearer {here.token('bob')}"}
            async with session.put("/aiohttp", data=pieces(), headers=of_bob, expect100=True) as answer:
                assert answer.status == 403 and (await answer.json(content_type=None))["status"] == 403
            assert sent == 0, "it knew before it had sent anything"
            async with session.get("/aiohttp", headers=headers) as answer:  # as far as it comes
                etag, begun = answer.headers["ETag"], await answer.content.readexactly(1 << 20)
            onward = {**headers, "Range": f"bytes={len(begun)}-", "If-Range": etag}
            async with session.get("/aiohttp", headers=onward) as answer:
                assert answer.status == 206 and begun + await answer.read() == _CONTENT
            await asyncio.gather(*(_put(session, headers, number) for number in range(16)))

    async def _put(session: aiohttp.ClientSession, headers: dict[str, str], number: int) -> None:
        async with session.put(f"/many/{number}", data=str(number).encode(), headers=headers) as answer:
            assert answer.status == 201

    asyncio.run(run())
    assert (here.root / "aiohttp").read_bytes() == _CONTENT
    assert {int(path.read_text()) for path in (here.root / "many").iterdir()} == set(range(16))
