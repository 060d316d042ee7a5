"""Third-party plugins behind front ends: HTCondor's curl_plugin and box_plugin.py, and Pelican's protocol."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import trustme

from stageout.movers.results import PLUGINS_WORD
from tests.harness.destination import Destination
from tests.harness.pool.pytest_plugin import keep_logs
from tests.pool.conftest import JOB, QUICK_AP, QUICK_EP, VERSION, Site, open_directory, wait_until_acquainted
from tests.pool.test_credentials_pool import Credmon

pytestmark = pytest.mark.pool

_PELICAN = Path(__file__).resolve().parents[1] / "pelican_plugin"
_TOKEN = "a-token-of-box"


class Box(ThreadingHTTPServer):
    """Box's service behind a proxy: folders, and uploads of small files with one token.

    :ivar files: content by name; what else was asked for is refused.
    """

    daemon_threads = True

    def __init__(self, certificate: ssl.SSLContext) -> None:
        super().__init__(("127.0.0.1", 0), _BoxHandler)
        self.certificate = certificate
        self.files: dict[str, bytes] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """A plugin that hangs up is no news."""

    def close(self) -> None:
        """End it."""
        self.shutdown()
        self.server_close()


class _BoxHandler(BaseHTTPRequestHandler):
    server: Box

    def do_CONNECT(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.connection = self.server.certificate.wrap_socket(self.connection, server_side=True)
        self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb", 0)
        self.close_connection = False

    def do_GET(self) -> None:
        self._answer(200, {"entries": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != f"Bearer {_TOKEN}":
            self._answer(401, {})
        elif self.path.endswith("/folders"):
            self._answer(201, {"id": json.loads(body)["name"]})
        else:
            attributes, content = _parts(self.headers["Content-Type"], body)
            self.server.files[json.loads(attributes)["name"]] = content
            self._answer(201, {"entries": [{"size": len(content)}]})

    def _answer(self, status: int, what: dict[str, Any]) -> None:
        data = json.dumps(what).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def _parts(kind: str, body: bytes) -> list[bytes]:
    """The contents of a multipart body (RFC 7578)."""
    boundary = b"--" + kind.partition("boundary=")[2].encode()
    return [part.partition(b"\r\n\r\n")[2][:-2] for part in body.split(boundary)[1:-1]]


@pytest.fixture(scope="module")
def setting(stageout_pools: Any, destination: Destination) -> Iterator[tuple[Any, Box]]:
    """A pool on which every third-party plugin has a front end, and no plugin of ours is registered."""
    with open_directory("front-ends") as shared, contextlib.ExitStack() as stack:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(shared / "ca.pem"))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("api.box.com", "upload.box.com").configure_cert(context)
        box = stack.enter_context(contextlib.closing(Box(context)))
        credmon = Credmon(shared / "oauth")
        credmon.put("alice", _TOKEN, "box")
        (shared / "federation").write_text(destination.url("").partition("://")[2].rstrip("/"))
        pelican = shared / "stash_plugin"
        pelican.write_text(_PELICAN.read_text())
        pelican.chmod(0o755)
        ap = f"{QUICK_AP}SEC_CREDENTIAL_DIRECTORY_OAUTH = {credmon.directory}\n"
        ep = (
            f"{QUICK_EP}FILETRANSFER_PLUGINS = $(LIBEXEC)/data_plugin, $(LIBEXEC)/curl_plugin,"
            f" $(LIBEXEC)/box_plugin.py, $(LIBEXEC)/gdrive_plugin.py, $(LIBEXEC)/onedrive_plugin.py, {pelican}\n"
            f'SANDBOX_MANAGER_ENVIRONMENT = "https_proxy=http://127.0.0.1:{box.server_port}'
            f' REQUESTS_CA_BUNDLE={shared}/ca.pem"\n'
        )
        options = {"ap_config": ap, "ep_config": ep, "binds": (shared,)}
        with stageout_pools(version=VERSION, execute_points=1, cpus=4, **options) as pool:
            wrap(pool)
            yield pool, box


def wrap(pool: Any) -> None:
    """Do what the doctor proposes."""
    (node,) = pool.eps
    doctor = node.run(["/opt/stageout/bin/stageout", "doctor", "--role", "ep", "--json"], check=False).stdout
    (proposed,) = [item["remedy"] for item in json.loads(doctor)["checks"] if item["name"] == "front-ends"]
    command, line = re.findall(r"'stageout (.*)' as root and set (.*)", proposed)[0]
    node.run(["/opt/stageout/bin/stageout", *command.split(), "--directory", str(node.home / "front-ends")])
    line = line.replace("/usr/local/libexec/stageout", str(node.home / "front-ends"))
    node.configure(line, reconfig=False)
    node.restart()
    wait_until_acquainted(pool)
    methods = {"http", "box", "gdrive", "onedrive", "osdf", "pelican", "data"}
    pool.wait(lambda: methods <= _methods(pool), what="all plugins to be advertised")


def _methods(pool: Any) -> set[str]:
    ads = pool.startd_ads("true", ["HasFileTransferPluginMethods"])
    return set(str(ads[0]["HasFileTransferPluginMethods"]).split(",")) if ads else set()


@pytest.fixture
def site(setting: Any, destination: Destination, request: pytest.FixtureRequest) -> Iterator[Site]:
    pool, _ = setting
    made = Site(pool, destination, request.node.name.translate({ord(char): "-" for char in "_[]:/"}), Path("/nowhere"))
    yield made
    destination.resume()
    keep_logs(request, [pool])
    for job in made.jobs:
        if pool.q(job, ["JobStatus"]) is not None:
            pool.rm(job)


def handed_off(site: Site, job: Any) -> dict[str, Any]:
    """The ad of a job that has left the queue, whose output was delivered after its end by the plugin's word."""
    history = site.wait_left(job, timeout_s=120)
    assert history["TransferOutputStats"]["STAGEOUTFilesCountLastRun"] == 2
    assert history["StageOutState"] == "Delivered"
    assert history["StageOutStats"]["VerifiedBy"] == PLUGINS_WORD
    return history


@pytest.mark.parametrize("scheme", ["http://{host}/", "pelican://{host}/", "osdf:///"])
def test_uploads_of_stock_plugins_are_handed_off(site: Site, scheme: str) -> None:
    host = site.url().partition("://")[2].partition("/")[0]
    place = site.destination.file(site.prefix)
    place.mkdir(exist_ok=True)
    place.chmod(0o777)
    site.destination.pause()
    job = site.submit(destination=scheme.format(host=host) + f"{site.prefix}/$(Cluster).$(Process)")
    site.pool.wait_status(job, "Completed", timeout_s=60)
    told = json.loads(site.stageout("status", "--json", str(job)).stdout)
    assert told["jobs"][0]["state"] != "Synchronous"
    site.destination.resume()
    handed_off(site, job)
    site.check_delivered(job)
    files = json.loads(site.stageout("history", "--json", str(job), check=False).stdout or "{}")
    assert files


def test_a_python_plugin_of_htcondors_gets_its_token(site: Site, setting: Any) -> None:
    box: Box = setting[1]
    job = site.submit(destination="box://$(Cluster).$(Process)", extra='MY.OAuthServicesNeeded = "box"')
    handed_off(site, job)
    wrote = site.wrote(job)
    assert {name: hashlib.sha256(box.files[name]).hexdigest() for name in wrote} == wrote


def test_downloads_and_refused_hand_offs_go_through(site: Site) -> None:
    place = site.destination.file(site.prefix)
    place.mkdir(exist_ok=True)
    place.chmod(0o777)
    (place / "input").write_text("some input\n")
    host = site.url().partition("://")[2].partition("/")[0]
    text = f"""
executable = job.sh
arguments = out1
transfer_input_files = osdf:///{site.prefix}/input, {site.url()}/input, data:,word
transfer_output_files = out1, input
output_destination = pelican://{host}/{site.prefix}/$(Cluster).$(Process)
MY.StageOutAsync = false
request_memory = 50
request_disk = 10M
queue
"""
    job = site.pool.submit("alice", text.replace(", data:,word", ""), files={"job.sh": JOB})
    site.jobs.append(job)
    history = site.wait_left(job, timeout_s=90)
    assert history["JobStatus"] == 4
    assert "STAGEOUTFilesCountLastRun" not in history["TransferOutputStats"]
    site.check_delivered(job)
    assert site.file(job, "input").read_text() == "some input\n"


def test_a_missing_input_is_told_in_the_plugins_words(site: Site) -> None:
    """Its exit status 11 goes through, too: HTCondor's policy for Pelican has the job try again."""
    job = site.submit(extra=f"transfer_input_files = osdf:///{site.prefix}/missing")
    site.pool.wait(lambda: "Pelican Client Error" in job.log.read_text(), timeout_s=60, what="the plugin's error")
