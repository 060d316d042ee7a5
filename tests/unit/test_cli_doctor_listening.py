"""The doctor's checks of the web page, its certificate and tokens, and of the ports of all daemons."""

from __future__ import annotations

import datetime
import os
import ssl
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import trustme

from stageout.cli.doctor import listening
from stageout.cli.doctor.config import AGENT_PROGRAM
from stageout.cli.doctor.findings import Finding, Level, Ran
from stageout.cli.doctor.machine import ThisMachine
from tests.harness.ports import free_ports
from tests.unit.doctor_machine import SETTINGS, Fake

PAGE = '{"schema": 1, "at": 1, "matters": []}'
METRICS = 'stageout_build_info{daemon="%s",version="1"} 1.0\n'


class Machine(Fake):
    """A machine with a web page, whose commands and connections are real."""

    def run(self, argv: object, timeout_s: float, user: str = "") -> Ran:
        if isinstance(argv, list) and argv[0] in ("openssl", "test"):
            return object.__new__(ThisMachine).run(argv, timeout_s, user if user == "nobody" else "")
        return Ran(0, "usage", 0.1)

    def http_text(self, url: str, certificate: str) -> str:
        return object.__new__(ThisMachine).http_text(url, certificate)

    def listens(self, host: str, port: int) -> bool:
        return object.__new__(ThisMachine).listens(host, port)

    def user_id(self, name: str) -> int | None:
        return 1


@contextmanager
def serving(answers: dict[str, str], tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Serve these pages and yield the port."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = answers.get(self.path)
            self.send_response(200 if text is not None else 404)
            self.end_headers()
            self.wfile.write((text or "").encode())

        def log_message(self, *arguments: object) -> None:
            return None

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        if tls:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server.server_port
        server.shutdown()


def machine(**settings: str) -> Machine:
    """A machine with a web page and these settings."""
    web = {
        "DAEMON_LIST": "MASTER, SCHEDD, STAGEOUT_AGENT, STAGEOUT_WEB", "STAGEOUT_WEB": "/opt/stageout/bin/stageout-web",
        "STAGEOUT_WEB_USERID": "condor", "STAGEOUT_WEB_LOG": "/log",
    }  # fmt: skip
    found = Machine(values={**SETTINGS, **web, **settings})
    found.files["/opt/stageout/bin/stageout-web"] = found.files[SETTINGS["STAGEOUT_AGENT"]]
    return found


def worst(findings: Iterator[Finding]) -> Finding:
    return max(findings, key=lambda one: one.level)


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    return written(tmp_path / "page.pem", datetime.timedelta(days=90))


def written(path: Path, lives: datetime.timedelta) -> Path:
    """Write a certificate with its key that ends after a time."""
    ends_at = datetime.datetime.now(datetime.timezone.utc) + lives
    made = trustme.CA().issue_cert("ap.example.org", not_after=ends_at)
    path.write_bytes(made.private_key_and_cert_chain_pem.bytes())
    return path


def tls_of(path: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(path)
    return context


def test_a_machine_without_a_page_has_nothing_to_check() -> None:
    assert worst(listening.web_page(Fake())).text == "no web page runs here"
    assert worst(listening.ports(Fake())).text == "no daemon of stageout here has a port of its own"


def test_a_page_that_answers_is_in_order(certificate: Path) -> None:
    with serving({"/matters.json": PAGE}) as port:
        found = worst(listening.web_page(machine(STAGEOUT_WEB_PORT=str(port))))
    assert (found.level, found.text) == (Level.OK, f"STAGEOUT_WEB in DAEMON_LIST is {'/opt/stageout/bin/stageout-web'}")
    settings = {"STAGEOUT_WEB_CERT": str(certificate), "STAGEOUT_WEB_BASE": "/so", "STAGEOUT_WEB_HOST": "0.0.0.0"}
    with serving({"/so/matters.json": PAGE}, tls_of(certificate)) as port:
        *_, page = listening.web_page(machine(STAGEOUT_WEB_PORT=str(port), **settings))
    assert (page.level, page.text) == (Level.OK, f"it answers at https://127.0.0.1:{port}/so/")


def test_a_page_with_another_certificate_than_the_file_is_another_program(certificate: Path, tmp_path: Path) -> None:
    other = written(tmp_path / "other.pem", datetime.timedelta(days=9))
    with serving({"/matters.json": PAGE}, tls_of(other)) as port:
        found = worst(listening.web_page(machine(STAGEOUT_WEB_PORT=str(port), STAGEOUT_WEB_CERT=str(certificate))))
    assert found.level is Level.FAIL and "another program than the web page" in found.text


@pytest.mark.parametrize("answers", [{"/": "hello"}, {"/matters.json": "hello"}])
def test_another_program_on_the_port_of_the_page_is_found(answers: dict[str, str]) -> None:
    with serving(answers) as port:
        found = worst(listening.web_page(machine(STAGEOUT_WEB_PORT=str(port))))
    assert (
        found.level is Level.FAIL
        and f"another program than the web page answers at http://127.0.0.1:{port}" in found.text
    )


def test_a_page_that_does_not_run_is_found_with_the_last_words_of_its_log() -> None:
    (port,) = free_ports(1)
    spoilt = machine(STAGEOUT_WEB_PORT=str(port))
    spoilt.end_of = lambda path: 'x\n2027 ERROR daemon-failed problem="cannot listen"\n'  # type: ignore[method-assign]
    found = worst(listening.web_page(spoilt))
    assert found.level is Level.FAIL and "nothing answers at" in found.text
    assert "StageoutWebLog ends with: 2027 ERROR daemon-failed" in found.remedy


def test_tokens_that_the_page_cannot_use_are_found(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"ops {'x' * 20}\n")
    path.chmod(0o644)
    found = worst(listening.web_page(machine(STAGEOUT_WEB_TOKENS=str(path))))
    assert found.level is Level.FAIL and "open to all users: chmod o=" in found.text
    path.chmod(0o600)
    path.write_text("ops short\n")
    assert "shorter than 16" in worst(listening.web_page(machine(STAGEOUT_WEB_TOKENS=str(path)))).text
    path.unlink()
    assert "cannot read the tokens" in worst(listening.web_page(machine(STAGEOUT_WEB_TOKENS=str(path)))).text


def test_a_file_that_only_root_can_read_is_found() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can look as another user")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = written(Path(folder) / "page.pem", datetime.timedelta(days=90))
        for mode, is_found in ((0o600, True), (0o644, False)):
            path.chmod(mode)
            spoilt = machine(STAGEOUT_WEB_CERT=str(path), STAGEOUT_WEB_USERID="nobody")
            said = "nobody, as whom the page runs, cannot read" in worst(listening.web_page(spoilt)).text
            assert said == is_found


@pytest.mark.parametrize(
    ("days", "level", "words"), [(-1, Level.FAIL, "has expired"), (3, Level.WARN, "expires within a week")]
)
def test_a_certificate_that_ends_is_found(days: int, level: Level, words: str, tmp_path: Path) -> None:
    path = written(tmp_path / "old.pem", datetime.timedelta(days=days))
    with serving({"/matters.json": PAGE}, tls_of(path)) as port:
        found = list(listening.web_page(machine(STAGEOUT_WEB_PORT=str(port), STAGEOUT_WEB_CERT=str(path))))
    assert (worst(iter(found)).level, words in worst(iter(found)).text) == (level, True), found


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"STAGEOUT_WEB_HOST": "0.0.0.0"}, "tokens would be sent in clear"),
        ({"STAGEOUT_WEB_CERT": "/no/such.pem"}, "STAGEOUT_WEB_CERT, STAGEOUT_WEB_CERT_KEY"),
    ],
)
def test_a_page_that_its_settings_keep_from_starting_is_found(settings: dict[str, str], words: str) -> None:
    found = worst(listening.web_page(machine(**settings)))
    assert found.level is Level.FAIL and words in found.text


def test_two_daemons_on_one_port_are_found() -> None:
    found = worst(listening.ports(machine(STAGEOUT_WEB_PORT="9631", STAGEOUT_AGENT_METRICS_PORT="9631")))
    assert (found.level, found.text) == (Level.FAIL, "STAGEOUT_AGENT_METRICS_PORT and STAGEOUT_WEB_PORT are both 9631")
    found = worst(listening.ports(machine(STAGEOUT_WEB_PORT="9618")))
    assert (found.level, found.text) == (Level.FAIL, "STAGEOUT_WEB_PORT and SHARED_PORT_PORT are both 9618")
    assert worst(listening.ports(machine(STAGEOUT_POLICY_PORT="9622"))).level is Level.OK, "no policy service runs here"


def test_metrics_that_another_program_answers_are_found() -> None:
    with serving({"/metrics": METRICS % AGENT_PROGRAM}) as port:
        found = worst(listening.ports(machine(STAGEOUT_AGENT_METRICS_PORT=str(port))))
        assert found.level is Level.OK and f"STAGEOUT_AGENT_METRICS_PORT {port}" in found.text
    with serving({"/metrics": "node_load1 1\n"}) as port:
        found = worst(listening.ports(machine(STAGEOUT_AGENT_METRICS_PORT=str(port))))
        assert found.level is Level.FAIL and f"another program answers at http://127.0.0.1:{port}/metrics" in found.text
    (port,) = free_ports(1)
    found = worst(listening.ports(machine(STAGEOUT_AGENT_METRICS_PORT=str(port))))
    assert found.level is Level.FAIL and "nobody answers at" in found.text and "metrics-open-failed" in found.remedy
