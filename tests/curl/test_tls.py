"""TLS with a private authority: what is trusted, and what each distrust is called."""

from __future__ import annotations

import datetime

import pytest
import trustme

from stageout.core.errors import ErrorClass as K
from tests.curl.servers import WebDav


@pytest.fixture
def bundle(tmp_path, authority):
    path = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(path)
    return path


@pytest.fixture
def serve(tmp_path, authority):
    """Makes a server with a certificate for these names."""
    servers = []

    def start(*names, issuer=authority, **facts):
        path = tmp_path / f"server{len(servers)}.pem"
        issuer.issue_cert(*names, **facts).private_key_and_cert_chain_pem.write_to_path(path)
        root = tmp_path / f"root{len(servers)}"
        root.mkdir()
        servers.append(WebDav(root, certificate=path))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.mark.parametrize("scheme", ["https", "davs"])
def test_private_authority(plugin, serve, bundle, scheme):
    server = serve("127.0.0.1")
    url = f"{scheme}://127.0.0.1:{server.port}/file"
    assert plugin.put(url, b"data", env={"SSL_CERT_FILE": str(bundle)}).ok
    assert plugin.get(url, env={"SSL_CERT_FILE": str(bundle)}).ok
    assert plugin.got() == b"data"


def test_a_bundle_for_the_programs_of_the_job_decides_nothing(plugin, serve, bundle):
    """CURL_CA_BUNDLE of a job reaches the plugin; HTCondor's own ignores it."""
    url = f"https://127.0.0.1:{serve('127.0.0.1').port}/file"
    assert plugin.put(url, env={"CURL_CA_BUNDLE": str(bundle)}).kind is K.TLS_UNTRUSTED
    broken = bundle.with_name("broken.pem")
    broken.write_text("no certificate")
    assert plugin.put(url, env={"CURL_CA_BUNDLE": str(broken), "SSL_CERT_FILE": str(bundle)}).ok


def test_folder_of_authorities(plugin, serve, bundle, tmp_path):
    """X509_CERT_DIR as grids have it: files named by the hash of the subject."""
    import subprocess

    server = serve("127.0.0.1")
    folder = tmp_path / "certificates"
    folder.mkdir()
    command = ["openssl", "x509", "-hash", "-noout", "-in", str(bundle)]
    name = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    (folder / f"{name}.0").write_text(bundle.read_text())
    assert plugin.put(f"https://127.0.0.1:{server.port}/file", env={"X509_CERT_DIR": str(folder)}).ok


def test_distrust(plugin, serve, bundle):
    """Nothing is sent, nothing is tried again, and the owner reads which of the three it is."""
    now = datetime.datetime.now(datetime.timezone.utc)
    day = datetime.timedelta(days=1)
    cases = [
        (serve("other.example.org"), "another name"),
        (serve("127.0.0.1", issuer=trustme.CA()), "authority"),
        (serve("127.0.0.1", not_before=now - 2 * day, not_after=now - day), "expired"),
    ]
    for server, word in cases:
        for move in (plugin.get, plugin.put):
            result = move(f"https://127.0.0.1:{server.port}/file", env={"SSL_CERT_FILE": str(bundle)})
            assert result.failures == [K.TLS_UNTRUSTED]
            assert word in result.ad["TransferError"]
            assert server.asked == []


def test_no_tls_there(plugin, dav):
    result = plugin.get(f"https://127.0.0.1:{dav.port}/file", env={"STAGEOUT_RETRY_BUDGET_S": "0"})
    assert result.failures == [K.CONNECT_FAILED]


@pytest.mark.parametrize("content", [b"no certificate", b"", b"-----BEGIN CERTIFICATE-----\nbroken\n"])
def test_x509_proxy_that_cannot_be_used(plugin, serve, bundle, tmp_path, content):
    """A public server asks for none."""
    proxy = tmp_path / "x509up"
    proxy.write_bytes(content)
    url = f"https://127.0.0.1:{serve('127.0.0.1').port}/file"
    env = {"SSL_CERT_FILE": str(bundle), "X509_USER_PROXY": str(proxy)}
    for result in (plugin.put(url, b"data", env=env), plugin.get(url, env=env)):
        assert result.ok
        assert result.failures == []
    assert plugin.got() == b"data"
    missing = plugin.get(url.replace("file", "missing"), env=env)
    assert missing.failures == [K.NOT_FOUND]
