"""Cases about credentials, redirects, ``file`` URLs and downloads that break."""

from __future__ import annotations

from collections.abc import Callable
from email.utils import formatdate

import trustme

from tests.curl.beside import Ask, Case, Stage
from tests.curl.interposer import changed, cut, status

DATA = bytes(range(256)) * 400
_TOKEN = "abc.def.ghi"
_FILE_HOST = frozenset({"DeveloperData.TransferHostName"})
_RESUMED = frozenset({"DeveloperData.TransferHTTPStatusCode", "TransferFileBytes"})


def _token(content: str) -> Callable[[Stage], Ask]:
    """A credential file as persons and tools write it."""

    def arrange(stage: Stage) -> Ask:
        stage.store.always("GET", changed())
        stage.store.files["file"] = DATA
        url = stage.store.url("file").replace("http://", "service+http://")
        return stage.get(url, DATA, tokens={"service": content})

    return arrange


def _x509_proxy_broken(stage: Stage) -> Ask:
    """A public server, and a job whose X.509 proxy cannot be read."""
    authority = trustme.CA()
    certificates = stage.folder("certificates")
    bundle = certificates / "authority.pem"
    authority.cert_pem.write_to_path(bundle)
    server = stage.webdav(stage.certificate("127.0.0.1", authority=authority))
    (server.root / "file").write_bytes(DATA)
    broken = stage.home / "x509up"
    broken.write_text("no certificate")
    env = {"SSL_CERT_FILE": str(bundle), "X509_USER_PROXY": str(broken)}
    return stage.get(f"https://127.0.0.1:{server.port}/file", DATA, env=env)


def _redirects(hops: int) -> Callable[[Stage], Ask]:
    def arrange(stage: Stage) -> Ask:
        stage.store.next("GET", *(status(302, Location=f"/file?{hop}") for hop in range(hops)))
        return stage.get_from_store(DATA)

    return arrange


def _null(stage: Stage) -> Ask:
    return stage.get("file:///dev/null", b"")


def _folder(stage: Stage) -> Ask:
    folder = stage.folder("source")
    (folder / "name").write_bytes(DATA)
    (folder / ".hidden").write_bytes(DATA)
    return stage.get(f"file://{folder}", b"name\n")


def _flaky(version: dict[str, str | None]) -> Callable[[Stage], Ask]:
    """A line that breaks three times, and a server that gives ranges."""

    def arrange(stage: Stage) -> Ask:
        stage.store.headers.update(version)
        stage.store.next("GET", *[cut(25_000, "end")] * 3)
        return stage.get_from_store(DATA)

    return arrange


SMALL = [
    Case("get-token-comment", _token(f"# made by a tool\n{_TOKEN}\n")),
    Case("get-token-json-comment", _token(f'# made by a tool\n{{"access_token": "{_TOKEN}"}}\n')),
    Case("get-x509-proxy-broken", _x509_proxy_broken),
    Case("get-10-redirects", _redirects(10)),
    Case("get-30-redirects", _redirects(30)),
    Case("get-31-redirects", _redirects(31)),
    Case("get-file-null", _null, other=_FILE_HOST),
    Case("get-file-directory", _folder, other=_FILE_HOST),
    Case("get-flaky-weak-tag", _flaky({"ETag": 'W/"weak"'}), other=_RESUMED),
    Case("get-flaky-new-date", _flaky({"ETag": None, "Last-Modified": formatdate(usegmt=True)}), other=_RESUMED),
]
