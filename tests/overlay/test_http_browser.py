"""A browser reads at a router, and nothing that users have stored there acts in it."""

from __future__ import annotations

import base64
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tests.overlay.http_site import Site, site
from tests.polling import wait_for
from tests.web.browser import Browser, browser, missing

_CONTENT = os.urandom(1 << 20)
#: Says so if it runs, and writes with the rights of who looks at it.
_SCRIPT = "document.title = 'it ran'; window.ran = true; fetch('/stolen', {method: 'PUT', body: 'x'});"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("site")) as found:
        top = found.root / "top"
        (top / "inner").mkdir(parents=True)
        (top / "data").write_bytes(_CONTENT)
        (top / "page.html").write_text(f"<html><body><h1>Page</h1><script>{_SCRIPT}</script></body></html>")
        (top / "code.js").write_text(_SCRIPT)
        (top / "<img src=x onerror=alert(1)><script>alert(2)<∕script>").write_bytes(b"")
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chromium")


@pytest.fixture(scope="module")
def window(here: Site, folder: Path) -> Iterator[Browser]:
    """A browser that has signed in with the token as password, and looks at a directory."""
    if missing() and not os.environ.get("CI"):
        pytest.skip(f"{missing()} is not installed")
    certificate = x509.load_pem_x509_certificate(Path(here.router.environment["STAGEOUT_ROUTER_CERT"]).read_bytes())
    key = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    pin = base64.b64encode(hashlib.sha256(key).digest()).decode()
    with browser(folder, f"--ignore-certificate-errors-spki-list={pin}") as opened:
        opened.open(f"{here.url.replace('://', f'://any:{here.token()}@')}/top/")
        yield opened


def _links(window: Browser) -> list[str]:
    return [str(one) for one in window.run("return [...document.links].map((one) => one.textContent)")]


def _click(window: Browser, name: str) -> None:
    window.run("[...document.links].find((one) => one.textContent == arguments[0]).click()", name)


def test_it_lists_directories_and_downloads_files(here: Site, window: Browser, folder: Path) -> None:
    window.open(f"{here.url}/top/")
    assert {"../", "inner/", "data", "page.html", "code.js"} < set(_links(window))
    _click(window, "data")
    wait_for((folder / "data").exists, "the download")
    assert (folder / "data").read_bytes() == _CONTENT
    _click(window, "inner/")
    wait_for(lambda: _links(window) == ["../"], "the directory")


def test_what_users_have_stored_does_not_run(here: Site, window: Browser, folder: Path) -> None:
    window.open(f"{here.url}/top/")
    _click(window, "page.html")
    wait_for((folder / "page.html").exists, "the download")
    assert window.run("return [document.title, window.ran]") == ["/top", None]
    assert window.run("return document.querySelectorAll('img, script').length") == 0, "a name is no markup"
    assert not (here.root / "stolen").exists()


class _Page(BaseHTTPRequestHandler):
    """Any page of another site."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!DOCTYPE html><title>elsewhere</title>")

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def _elsewhere() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://evil.example.org:{server.server_port}/"
        server.shutdown()


def test_other_sites_cannot_use_what_the_browser_may(here: Site, window: Browser) -> None:
    """The browser would send the password by itself: to scripts, frames and requests of any page."""
    with _elsewhere() as url:
        window.open(url)
        for method in ("PUT", "DELETE", "POST", "GET"):
            told = window.run_async(
                f"const done = arguments[arguments.length - 1]; fetch('{here.url}/top/data', {{method: '{method}',"
                " credentials: 'include'}).then(() => done('answered'), (why) => done('refused'));"
            )
            assert told == "refused", method
        told = window.run_async(
            "const done = arguments[arguments.length - 1], one = document.createElement('script');"
            f" one.src = '{here.url}/top/code.js'; one.onload = () => done('ran'); one.onerror = () => done('blocked');"
            " document.head.append(one);"
        )
        assert told == "blocked"
        assert window.run("return [document.title, window.ran]") == ["elsewhere", None]
    assert (here.root / "top/data").read_bytes() == _CONTENT and not (here.root / "stolen").exists()
