"""The policy service as its clients see it: the real program, real HTTP, kill -9 and restarts."""

from __future__ import annotations

import contextlib
import re
import signal
import ssl
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest
import trustme
from openapi_spec_validator import validate
from policy_site import TOKENS, Service

from policy_service import daemon, views
from policy_service.model import Lease
from policy_service.service import Daemon
from stageout.core.metrics import METRICS
from stageout.core.metrics_server import rendered
from tests.harness.ports import free_ports
from tests.polling import wait_for

Start = Callable[..., Service]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    services: list[Service] = []

    def make(**knobs: object) -> Service:
        services.append(Service(tmp_path, **knobs))  # type: ignore[arg-type]
        return services[-1].start()

    yield make
    for service in services:
        service.close()


def test_a_lease_from_request_to_release(start: Start) -> None:
    service = start()
    lease = service.lease("mover-1", pair=("Site.A", "site.b"))
    assert (lease["streams"], lease["source"], lease["destination"]) == (4, "site.a", "site.b")
    assert 299 < lease["ends_in_s"] <= 300
    assert lease["reason"].startswith("4 streams from site.a to site.b")
    assert service.renew(lease, in_use=4)["streams"] == 8
    path = f"/v1/leases/{lease['lease']}"
    assert service.ask("POST", f"{path}/report", {"in_use": 6, "rate_mb_s": 81.5}).json["in_use"] == 6
    assert [one["lease"] for one in service.ask("GET", "/v1/leases").json["leases"]] == [lease["lease"]]
    assert service.ask("DELETE", path).status == 204
    assert service.ask("DELETE", path).status == 404
    assert service.granted() == 0
    assert service.stop() == 0


def test_asked_twice_it_is_the_same_lease(start: Start) -> None:
    service = start()
    first, second = service.lease("m"), service.lease("m")
    assert first["lease"] == second["lease"]
    assert service.lease("m", pair=("here", "elsewhere"))["lease"] != first["lease"]
    assert service.lease("m", owner="atlas")["lease"] != first["lease"]


def test_nothing_left_is_an_honest_zero_until_somebody_releases(start: Start) -> None:
    service = start(MAX_PAIR=8, INITIAL=8)
    first, second = service.lease("a"), service.lease("b")
    assert (first["streams"], second["streams"]) == (8, 0)
    assert "renew to ask again" in second["reason"]
    service.ask("DELETE", f"/v1/leases/{first['lease']}")
    assert service.renew(second)["streams"] == 8


def test_a_dead_client_gives_its_streams_back(start: Start) -> None:
    service = start(MAX_PAIR=8, INITIAL=8, LEASE=1)
    dead, alive = service.lease("dead"), service.lease("alive")
    assert (dead["streams"], alive["streams"]) == (8, 0)
    wait_for(lambda: service.renew(alive)["streams"] == 8, "the streams of the dead client are free")
    answer = service.ask("POST", f"/v1/leases/{dead['lease']}/renew", {})
    assert answer.status == 404
    assert "stop using" in answer.json["error"]
    assert "stageout_policy_leases_expired_total 1.0" in service.ask("GET", "/metrics", owner="").text


def test_streams_still_in_use_are_not_given_to_others(start: Start) -> None:
    service = start(POLICY="fair-share", MAX_PAIR=16, MAX_CLIENT=16)
    first, second = service.lease("a"), service.lease("b")
    assert (first["streams"], second["streams"]) == (16, 0)
    first = service.renew(first, in_use=16)
    assert (first["streams"], first["in_use"]) == (8, 16)
    assert service.renew(second)["streams"] == 0
    service.ask("POST", f"/v1/leases/{first['lease']}/report", {"in_use": 10})
    assert service.renew(second)["streams"] == 6
    refused = service.ask("POST", f"/v1/leases/{first['lease']}/report", {"in_use": 16})
    assert refused.status == 409
    assert "only 10 are granted" in refused.json["error"]
    assert service.renew(first, in_use=8)["streams"] == 8
    assert service.renew(second)["streams"] == 8
    assert service.granted() == 16


@pytest.mark.parametrize("when", ["policy-record=kill-after", "policy-record=kill-before"])
def test_a_grant_counts_from_the_moment_it_is_on_the_disk(start: Start, tmp_path: Path, when: str) -> None:
    arming = tmp_path / "armed"
    service = start(environment={"STAGEOUT_FAULTS": f"{when}@{arming}"}, INITIAL=16)
    kept = service.lease("kept")
    arming.touch()
    with pytest.raises(OSError):
        service.lease("during")
    assert service.ended() == -signal.SIGKILL
    service.start()
    assert service.granted() == (32 if when.endswith("after") else 16)
    assert service.renew(kept)["lease"] == kept["lease"]


def test_kill_and_restart_keep_all_grants(start: Start) -> None:
    service = start(MAX_PAIR=12, LEASE=60)
    leases = [service.lease(f"c{number}", wanted=4) for number in range(5)]
    assert [lease["streams"] for lease in leases] == [4, 4, 4, 0, 0]
    service.kill()
    service.start()
    assert service.granted() == 12
    assert service.lease("new")["streams"] == 0
    again = [service.renew(lease) for lease in leases]
    assert [lease["streams"] for lease in again] == [4, 4, 4, 0, 0]


def test_what_ended_while_the_service_was_down_is_free(start: Start) -> None:
    service = start(MAX_PAIR=4, LEASE=1)
    lease = service.lease("a")
    service.kill()
    time.sleep(1.05)
    service.start()
    assert service.ask("POST", f"/v1/leases/{lease['lease']}/renew", {}).status == 404
    assert service.lease("b")["streams"] == 4


def test_64_clients_at_once_never_pass_the_maximum(start: Start) -> None:
    service = start(MAX_PAIR=100, MAX_CLIENT=16, POLICY="fair-share")
    held = dict.fromkeys(range(64), 0)
    lock, problems, most = threading.Lock(), [], 0

    def hammer(number: int) -> None:
        nonlocal most
        try:
            lease = service.lease(f"c{number}")
            for turn in range(6):
                with lock:
                    # Used less before it is said, and more only after it is granted: as a real client does.
                    held[number] = min(held[number], lease["streams"]) if turn else lease["streams"]
                    most = max(most, sum(held.values()))
                lease = service.renew(lease, in_use=held[number])
                with lock:
                    if lease["streams"] >= held[number]:
                        held[number] = lease["streams"]
                    most = max(most, sum(held.values()))
            with lock:
                held[number] = 0
            assert service.ask("DELETE", f"/v1/leases/{lease['lease']}").status == 204
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=hammer, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    seen = 0
    while any(thread.is_alive() for thread in threads):
        seen = max(seen, service.granted())
    assert problems == []
    assert 50 < seen <= 100
    assert 50 < most <= 100
    assert service.granted() == 0


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"{", "body: Invalid JSON"),
        (b"[]", "body: Input should be an object"),
        (b"\xff\xfe", "body: Invalid JSON"),
        (b"[" * 10_000, "body: Invalid JSON"),
        (b"{}", "client: Field required"),
        (b'{"client": "a", "source": "b"}', "destination: Field required"),
        (
            b'{"client": "a", "source": "b", "destination": "c", "want": 1}',
            "want: Extra inputs are not permitted (known are client, source, destination, wanted)",
        ),
        (b'{"client": 7, "source": "b", "destination": "c"}', "client: Input should be a valid string"),
        (b'{"client": "a b", "source": "b", "destination": "c"}', "client: String should match pattern"),
        (b'{"client": "<script>", "source": "b", "destination": "c"}', "client: String should match pattern"),
        (
            b'{"client": "a", "source": "b", "destination": "c", "wanted": -1}',
            "wanted: Input should be greater than or equal to 0",
        ),
        (
            b'{"client": "a", "source": "b", "destination": "c", "wanted": 1.5}',
            "wanted: Input should be a valid integer",
        ),
        (
            b'{"client": "a", "source": "b", "destination": "c", "wanted": true}',
            "wanted: Input should be a valid integer",
        ),
        (
            b'{"client": "a", "source": "b", "destination": "c", "wanted": 1e999}',
            "wanted: Input should be a valid integer",
        ),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(service: Service, raw: bytes, says: str) -> None:
    answer = service.ask("POST", "/v1/leases", raw=raw)
    assert answer.status == 400
    assert says in answer.json["error"]
    assert service.granted() == 0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One for the tests that leave nothing behind."""
    one = Service(tmp_path_factory.mktemp("policy")).start()
    yield one
    one.close()


def test_other_bad_requests(service: Service) -> None:
    assert service.ask("POST", "/v1/leases", raw=b"x" * 100_000).status == 413
    assert service.ask("GET", "/nowhere").status == 404
    wrong = service.ask("PUT", "/v1/leases")
    assert (wrong.status, wrong.headers["Allow"]) == (405, "GET,POST")
    assert "error" in wrong.json
    assert service.ask("POST", "/v1/leases/none/renew", {}).status == 404
    assert service.ask("POST", "/v1/leases/none/report", {"in_use": 1, "rate_mb_s": -1}).status == 400
    assert service.ask("POST", "/v1/leases/none/report", raw=b'{"in_use": 1, "rate_mb_s": NaN}').status == 400


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer x", f"Basic {TOKENS['cms']}", f"Bearer {TOKENS['cms']}x", "Bearer \xff"]
)
def test_without_a_known_token_nothing_is_answered(service: Service, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    for method, path in (("GET", "/v1/leases"), ("POST", "/v1/leases"), ("DELETE", "/v1/leases/x")):
        answer = service.send(method, path, None, headers)
        assert answer.status == 401
        assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_leases_of_others_are_out_of_reach(start: Start) -> None:
    service = start()
    lease = service.lease("m", owner="cms")
    for method, what in (("POST", "/renew"), ("DELETE", "")):
        assert service.ask(method, f"/v1/leases/{lease['lease']}{what}", owner="atlas").status == 404
    assert service.ask("GET", "/v1/leases", owner="atlas").json == {"leases": []}
    assert service.granted() == 4


def test_the_description_is_that_of_the_routes(service: Service) -> None:
    from concurrent.futures import ThreadPoolExecutor
    from typing import cast

    from policy_service.api import Api

    document = service.ask("GET", "/openapi.json", owner="").json
    validate(document)
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    application = Api(cast(Any, None), cast(Any, None), ThreadPoolExecutor(1)).application()
    routes = {(route.method, route.resource.canonical) for route in application.router.routes() if route.resource}
    assert routes - {("HEAD", path) for _, path in described} == described
    for method, path in described:
        status = service.ask(method, path.replace("{lease}", "x"), owner="").status
        open_to_all = not document["paths"][path][method.lower()]["security"]
        assert status == (200 if open_to_all else 401), (method, path)


def test_answers_have_the_members_that_are_described(start: Start) -> None:
    service = start()
    schema = service.ask("GET", "/openapi.json", owner="").json["components"]["schemas"]["LeaseAnswer"]
    lease = service.lease("m")
    assert set(lease) == set(schema["properties"])
    kinds = {"string": str, "integer": int, "number": (int, float)}
    assert all(isinstance(lease[name], kinds[member["type"]]) for name, member in schema["properties"].items())


def test_metrics_are_prometheus_text(start: Start) -> None:
    service = start(INITIAL=8, MAX_PAIR=8)
    lease = service.lease("a", pair=("x", "y"))
    service.lease("b", pair=("x", "y"))
    service.ask("POST", f"/v1/leases/{lease['lease']}/report", {"in_use": 8, "rate_mb_s": 12.5})
    answer = service.ask("GET", "/metrics", owner="")
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    line = re.compile(r'# (HELP|TYPE) \w+ .+|\w+(\{\w+="[^"]*"(,\w+="[^"]*")*\})? [0-9.e+]+')
    assert all(line.fullmatch(one) for one in answer.text.splitlines())
    for expected in (
        'streams_granted{destination="y",source="x"} 8.0',
        'clients_holding{destination="y",source="x"} 1.0',
        'clients_waiting{destination="y",source="x"} 1.0',
        'rate_bytes_per_second{destination="y",source="x"} 1.25e+07',
        'requests_total{operation="request",status="201"} 2.0',
        "streams_max 8.0",
        "policy_ok 1.0",
    ):
        assert f"stageout_policy_{expected}\n" in answer.text


def test_a_port_of_their_own_for_metrics(start: Start) -> None:
    first, second = free_ports(2)
    service = start(METRICS_PORT=first)

    def scrape(port: int) -> str:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            return str(answer.read().decode())
        return ""

    service.ask("GET", "/v1/leases", owner="")
    text = wait_for(lambda: scrape(first), "the port")
    declared = {name for name, metric in METRICS.items() if metric.part in ("policy", "all")}
    assert {name for name in declared if f"# TYPE {name} " in text} == declared
    assert 'stageout_policy_refusals_total{status="401"} 1.0' in text
    assert 'stageout_build_info{daemon="stageout-policy-service",version=' in text
    assert "process_resident_memory_bytes" in text
    service.stop()
    service.knobs["METRICS_PORT"] = str(second)
    service.start()
    wait_for(lambda: scrape(second), "the other port")
    assert not scrape(first)


def test_pairs_of_sites_in_metrics_are_bounded() -> None:
    leases = tuple(
        (Lease(str(number), "cms", "m", f"s{number}", "d", number, 0, 1, 1, 0.0), 1.0) for number in range(1, 61)
    )
    snapshot = views.LeaseSnapshot(leases, 128, "greedy", (), True, True, 0)
    text = rendered(views.readings(snapshot, {}), with_process=False).decode()
    assert text.count("stageout_policy_streams_granted{") == 51
    assert f'stageout_policy_streams_granted{{destination="other",source="other"}} {sum(range(1, 11))}.0' in text


def test_the_page_shows_who_has_what(start: Start) -> None:
    service = start(INITIAL=8, MAX_PAIR=8)
    assert "Nobody has streams" in service.ask("GET", "/", owner="").text
    service.lease("mover@node-1", pair=("x", "y"))
    service.lease("mover@node-2", pair=("x", "y"), owner="atlas")
    page = service.ask("GET", "/", owner="")
    assert page.headers["Content-Type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert "x &rarr; y: 8 of 8" in page.text
    assert "<td>cms</td><td>mover@node-1</td><td class=n>8</td>" in page.text
    assert "<td>atlas</td><td>mover@node-2</td><td class=n>waits</td>" in page.text
    assert not any(token in page.text for token in TOKENS.values())


def test_tokens_are_read_again_on_reconfig_and_a_bad_file_is_refused(start: Start) -> None:
    service = start()
    new = "a-new-token-of-good-length"
    headers = {"Authorization": f"Bearer {new}"}
    assert service.send("GET", "/v1/leases", None, headers).status == 401
    service.tokens.write_text(f"# comment\ncms {new}\n")
    service.signal(signal.SIGHUP)
    wait_for(lambda: service.send("GET", "/v1/leases", None, headers).status == 200, "the new token counts")
    assert service.ask("GET", "/v1/leases").status == 401
    service.tokens.write_text("cms short\n")
    service.signal(signal.SIGHUP)
    wait_for(lambda: "configuration-refused" in service.log.read_text(), "the bad file is refused")
    assert service.send("GET", "/v1/leases", None, headers).status == 200
    assert "short" not in service.log.read_text().replace("is shorter than", "")


def test_tls_keeps_tokens_off_the_network(tmp_path: Path) -> None:
    authority = trustme.CA()
    pem = tmp_path / "cert.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(pem)
    service = Service(tmp_path, HOST="0.0.0.0", CERT=pem)
    service.context = ssl.create_default_context()
    authority.configure_trust(service.context)
    try:
        assert service.start().lease("m")["streams"] == 4
    finally:
        service.close()


@pytest.mark.parametrize(
    ("knobs", "says", "status"),
    [
        ({"HOST": "0.0.0.0"}, "tokens would be sent in clear", 99),
        ({"HOST": "localhost.example"}, "tokens would be sent in clear", 99),
        ({"TOKENS": "/nonexistent"}, "cannot read the tokens", 99),
        ({"MAX_PAIR": "many"}, "STAGEOUT_POLICY_MAX_PAIR = many: write a number", 99),
        ({"RESERVED": "cms=200"}, "reserve less", 99),
        ({"PRIORITIES": "cms=high"}, "write OWNER=NUMBER", 99),
        ({"DIR": "$(SPOOL)/x"}, "STAGEOUT_POLICY_DIR = $(SPOOL)/x, and SPOOL is not set: write an absolute path", 99),
        ({"TOKENS": "tokens"}, "STAGEOUT_POLICY_TOKENS = tokens: write an absolute path", 99),
        ({"SERVICE_LOG": "log"}, "_LOG = log: write an absolute path", 99),
        ({"CERT": "/nonexistent"}, "STAGEOUT_POLICY_CERT", 99),
        ({"PORT": "70000"}, "STAGEOUT_POLICY_PORT = 70000: must be at most 65535", 99),
        ({"SERVICE_LOG": "/nonexistent/log"}, "_LOG: the log /nonexistent/log: No such file or directory; name", 99),
        ({"DIR": "/dev/null/x"}, "mend its directory", 1),
    ],
)
def test_what_cannot_be_used_is_said_at_the_start(
    tmp_path: Path,
    knobs: dict[str, str],
    says: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Here without a process of its own: those below show that what the program says and ends with is the same."""
    for name, value in Service(tmp_path, **knobs).settings.items():  # type: ignore[arg-type]
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Daemon, "serve", lambda *_: pytest.fail("it was started"))
    assert daemon.main(["--alone"]) == status
    assert says in capsys.readouterr().err


def test_tokens_open_to_all_are_refused(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.tokens.chmod(0o644)
    process = service.launch()
    _, said = process.communicate(timeout=30)
    assert "chmod o=" in said.decode()
    assert process.returncode == 99


def test_one_database_has_one_service(start: Start, tmp_path: Path) -> None:
    service = start()
    second = Service(tmp_path)
    process = second.launch()
    _, said = process.communicate(timeout=30)
    assert "Stop the service that uses it" in said.decode()
    assert process.returncode == 1
    assert service.lease("m")["streams"] == 4


def test_a_full_disk_is_no_grant(start: Start, tmp_path: Path) -> None:
    arming = tmp_path / "armed"
    service = start(environment={"STAGEOUT_FAULTS": f"policy-record=ENOSPC@{arming}"})
    arming.touch()
    body = {"client": "m", "source": "a", "destination": "b"}
    answer = service.ask("POST", "/v1/leases", body)
    assert answer.status == 503
    assert "cannot be recorded" in answer.json["error"]
    assert service.granted() == 0
    assert service.ask("POST", "/v1/leases", body).status == 201
