"""gsiftp:// with X.509 proxies, against a GridFTP server with GSI and a certificate authority of our own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stageout.core.errors import ErrorClass
from stageout.protocols.gsiftp.proxy import read_proxy
from tests.gsiftp.authority import FULL, LIMITED, Authority
from tests.gsiftp.conftest import Client, codes
from tests.harness.gridftp import GridFtpServer


@pytest.fixture(scope="module")
def authority(open_folder: Path) -> Authority:
    return Authority(open_folder / "authority")


@pytest.fixture(scope="module")
def gsi(open_folder: Path, authority: Authority):
    with GridFtpServer(open_folder / "gsi", gsi=authority.server()) as running:
        running.files.chmod(0o777)
        yield running


def _with(client: Client, authority: Authority, proxy: Path | None) -> None:
    client.environment["X509_CERT_DIR"] = str(authority.trust)
    if proxy is not None:
        client.environment["X509_USER_PROXY"] = str(proxy)


@pytest.mark.parametrize("policy", [FULL, LIMITED])
def test_full_and_limited_proxies_are_taken(
    client: Client, authority: Authority, gsi: GridFtpServer, policy: str
) -> None:
    _with(client, authority, authority.proxy(policy))
    data = os.urandom(300_000)
    client.write("up", data)
    run = client.call({"up": gsi.url(f"up-{policy}")}, True, STAGEOUT_PARALLELISM="2")
    assert codes(run) == [None], run.ads[0]["TransferError"]
    assert (gsi.files / f"up-{policy}").read_bytes() == data
    assert run.ads[0]["DeveloperData"]["StageOutVerified"] == "md5"


def test_a_proxy_past_its_end_is_said_before_anything_moves(client: Client, authority: Authority) -> None:
    _with(client, authority, authority.proxy(ends_h=-1))
    client.write("up", b"x")
    run = client.call({"up": "gsiftp://localhost:1/nobody/asks"}, True)
    assert codes(run) == [ErrorClass.CREDENTIAL_EXPIRED.code]
    assert "grid-proxy-init" in run.ads[0]["TransferError"]


def test_no_proxy_and_no_certificate(client: Client, authority: Authority, tmp_path: Path) -> None:
    client.write("up", b"x")
    _with(client, authority, tmp_path / "none")
    run = client.call({"up": "gsiftp://localhost:1/x"}, True)
    assert codes(run) == [ErrorClass.CREDENTIAL_MISSING.code]
    (tmp_path / "none").write_text("nothing of use")
    run = client.call({"up": "gsiftp://localhost:1/x"}, True)
    assert codes(run) == [ErrorClass.CREDENTIAL_REFUSED.code]


def test_a_user_whom_the_server_does_not_know(client: Client, gsi: GridFtpServer, authority: Authority) -> None:
    """The map is emptied: the proxy is good, the server refuses; a limited one is named as such."""
    (authority.home / "gridmap").write_text("")
    client.write("up", b"x")
    try:
        for policy, words in ((FULL, "is the subject"), (LIMITED, "DELEGATE_FULL_JOB_GSI_CREDENTIALS")):
            _with(client, authority, authority.proxy(policy))
            run = client.call({"up": gsi.url("never")}, True)
            assert codes(run) == [ErrorClass.CREDENTIAL_REFUSED.code], run.ads
            assert words in run.ads[0]["TransferError"]
    finally:
        authority.server()


def test_a_server_of_another_authority(
    client: Client, gsi: GridFtpServer, authority: Authority, tmp_path: Path
) -> None:
    _with(client, Authority(tmp_path / "other"), authority.proxy())
    client.write("up", b"x")
    run = client.call({"up": gsi.url("never")}, True)
    assert codes(run) == [ErrorClass.TLS_UNTRUSTED.code], run.ads


def test_what_a_proxy_file_says(authority: Authority) -> None:
    assert read_proxy(authority.proxy(LIMITED).read_bytes()).limited
    assert not read_proxy(authority.proxy(FULL).read_bytes()).limited
    for damaged in (b"", b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----"):
        with pytest.raises(ValueError, match="it "):
            read_proxy(damaged)
