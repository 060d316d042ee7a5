"""The table of cases that both plugins get. Each function prepares servers and says what to move."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace

import trustme

from tests.curl.beside import Ask, Case, Stage
from tests.curl.beside_faults import FAULTS
from tests.curl.beside_jobs import JOBS
from tests.curl.beside_small import SMALL
from tests.curl.interposer import changed, status

DATA = bytes(range(256)) * 40
#: HTCondor's own takes the first part of the path of a ``file`` URL for a host.
_FILE_HOST = frozenset({"DeveloperData.TransferHostName"})
#: Versions of libcurl have different codes for a refused CONNECT.
_LIBCURL = frozenset({"DeveloperData.LibcurlReturnCode"})
_AUTHORITIES = ("X509_CERT_DIR", "SSL_CERT_DIR", "SSL_CERT_FILE", "CURL_CA_BUNDLE")
#: HTCondor's own turns ``dav`` into ``http`` in its report.
_DAV = frozenset({"TransferProtocol"})


def get(stage: Stage) -> Ask:
    return stage.get_from_store(DATA)


def put(stage: Stage) -> Ask:
    return stage.put_to_store(DATA)


def get_empty(stage: Stage) -> Ask:
    return stage.get_from_store(b"")


def get_many(stage: Stage) -> Ask:
    names = [f"file{number}" for number in range(20)]
    stage.store.files.update(dict.fromkeys(names, DATA))
    return Ask([stage.wanted(stage.store.url(name), DATA, name) for name in names])


def get_through_cache(stage: Stage) -> Ask:
    stage.store.always("GET", changed(X_Cache="HIT", Via="1.1 cache.example.org"))
    return stage.get_from_store(DATA)


def get_dav(stage: Stage) -> Ask:
    server = stage.webdav()
    (server.root / "file").write_bytes(DATA)
    return stage.get(f"dav://127.0.0.1:{server.port}/file", DATA)


def put_dav(stage: Stage) -> Ask:
    server = stage.webdav()
    path = server.root / "file"
    return stage.put(f"dav://127.0.0.1:{server.port}/file", DATA, lambda: path.read_bytes() if path.exists() else None)


def get_ftp(stage: Stage) -> Ask:
    url, folder = stage.ftp()
    (folder / "file").write_bytes(DATA)
    return stage.get(f"{url}/file", DATA)


def put_ftp(stage: Stage) -> Ask:
    url, folder = stage.ftp()
    path = folder / "file"
    return stage.put(f"{url}/file", DATA, lambda: path.read_bytes() if path.exists() else None)


def get_ftp_missing(stage: Stage) -> Ask:
    return stage.get(f"{stage.ftp()[0]}/missing", DATA)


def get_file(stage: Stage) -> Ask:
    path = stage.home / "source"
    path.write_bytes(DATA)
    return stage.get(f"file://{path}", DATA)


def put_file(stage: Stage) -> Ask:
    path = stage.home / "target"
    return stage.put(f"file://{path}", DATA, lambda: path.read_bytes() if path.exists() else None)


def get_file_missing(stage: Stage) -> Ask:
    return stage.get(f"file://{stage.home}/missing", DATA)


def get_missing(stage: Stage) -> Ask:
    return stage.get(stage.store.url("missing"), DATA)


def no_server_few_retries(stage: Stage) -> Ask:
    return stage.get("http://127.0.0.1:1/file", DATA, job_env={"CURL_MAX_RETRY_ATTEMPTS": "2"})


def no_server_administrator(stage: Stage) -> Ask:
    """The administrator's own variable wins."""
    env = {"CONDOR_CURL_MAX_RETRY_ATTEMPTS": "1"}
    return stage.get("http://127.0.0.1:1/file", DATA, env=env, job_env={"CURL_MAX_RETRY_ATTEMPTS": "30"})


def get_with_token(stage: Stage) -> Ask:
    url = stage.store.url("file").replace("http://", "service+http://")
    stage.store.files["file"] = DATA
    return stage.get(url, DATA, tokens={"service": '{"access_token": "abc.def.ghi"}'})


def get_token_missing(stage: Stage) -> Ask:
    url = stage.store.url("file").replace("http://", "service+http://")
    return stage.get(url, DATA, tokens={"another": "abc.def.ghi"})


def unknown_authority(stage: Stage) -> Ask:
    server = stage.webdav(stage.certificate("127.0.0.1", authority=trustme.CA()))
    return stage.get(f"https://127.0.0.1:{server.port}/file", DATA)


def private_authority(variable: str, of_job: bool = False) -> Callable[[Stage], Ask]:
    """A server of a private authority, whose certificate a variable of the starter or of the job names."""

    def arrange(stage: Stage) -> Ask:
        authority, bundle = trustme.CA(), stage.folder("authorities") / "ca.pem"
        authority.cert_pem.write_to_path(bundle)
        hashed = ["openssl", "x509", "-hash", "-noout", "-in", str(bundle)]
        name = subprocess.run(hashed, check=True, capture_output=True, text=True).stdout.strip()
        bundle.with_name(f"{name}.0").write_bytes(bundle.read_bytes())
        env = {variable: str(bundle.parent if variable.endswith("_DIR") else bundle)}
        server = stage.webdav(stage.certificate("127.0.0.1", authority=authority))
        (server.root / "file").write_bytes(DATA)
        url = f"https://127.0.0.1:{server.port}/file"
        return stage.get(url, DATA, job_env=env) if of_job else stage.get(url, DATA, env=env)

    return arrange


def broken_bundle_of_job(stage: Stage) -> Ask:
    path = stage.home / "broken.pem"
    path.write_text("no certificate")
    ask = private_authority("X509_CERT_DIR")(stage)
    return replace(ask, job_env={"CURL_CA_BUNDLE": str(path)})


def proxy(stage: Stage) -> Ask:
    door = stage.proxy(stage.store)
    return stage.get_from_store(DATA, env={"http_proxy": f"http://127.0.0.1:{door.port}"})


def proxy_ignored(stage: Stage) -> Ask:
    return stage.get_from_store(DATA, env={"http_proxy": "http://127.0.0.1:1"}, job_env={"CURL_IGNORE_HTTP_PROXY": "1"})


def proxy_refuses_tunnel(stage: Stage) -> Ask:
    door = stage.proxy(stage.store)
    return stage.get("https://data.example.org/file", DATA, env={"https_proxy": f"http://127.0.0.1:{door.port}"})


def proxy_wants_password(stage: Stage) -> Ask:
    door = stage.proxy(stage.store)
    door.always("GET", status(407))
    return stage.get_from_store(DATA, env={"http_proxy": f"http://127.0.0.1:{door.port}"})


CASES = [
    Case("get", get),
    Case("get-empty", get_empty),
    Case("get-20-files", get_many),
    Case("get-through-cache", get_through_cache),
    Case("get-dav", get_dav, other=_DAV),
    Case("get-ftp", get_ftp),
    Case("get-file", get_file, other=_FILE_HOST),
    Case("put", put),
    Case("put-dav", put_dav, other=_DAV),
    Case("put-ftp", put_ftp),
    Case("put-file", put_file, other=_FILE_HOST),
    Case("get-missing", get_missing),
    Case("no-server-2-retries", no_server_few_retries, failure_slack_s=4),
    Case("no-server-administrator", no_server_administrator, failure_slack_s=4),
    Case("get-ftp-missing", get_ftp_missing),
    Case("get-file-missing", get_file_missing, other=_FILE_HOST),
    Case("get-token", get_with_token),
    Case("get-token-missing", get_token_missing),
    Case("https-unknown-authority", unknown_authority),
    *(Case(f"https-{name}", private_authority(name)) for name in _AUTHORITIES),
    Case("https-job-CURL_CA_BUNDLE", private_authority("CURL_CA_BUNDLE", of_job=True)),
    Case("https-job-CURL_CA_BUNDLE-broken", broken_bundle_of_job),
    Case("proxy", proxy),
    Case("proxy-ignored", proxy_ignored),
    Case("proxy-wants-password", proxy_wants_password),
    Case("proxy-refuses-tunnel", proxy_refuses_tunnel, other=_LIBCURL),
    *FAULTS,
    *SMALL,
    *JOBS,
]
