"""The manager as a client of the real policy service: leases, and what counts when the service is away."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from policy_site import TOKENS, Service

from sandbox_manager.scheduling.streams import grants_of
from stageout.core.clock import SystemClock
from stageout.core.config import ConfigError, mapping_settings
from stageout.tuning import policy_grants as grants_module
from stageout.tuning.policy_client import (
    Address,
    Lease,
    NoLeaseError,
    PolicyClient,
    SilentError,
    address_of,
    service_name,
)
from stageout.tuning.policy_grants import PolicyGrants
from tests.polling import until

SERVER = "https://dest.example.org:443"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are looked at more often than once a second, because these tests turn the clock by hand."""
    monkeypatch.setattr(grants_module, "_LOOK_S", 0.05)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path, INITIAL=4, INCREMENT=4, MAX_PAIR=10, MAX_CLIENT=8, LEASE=60).start()
    yield made
    made.close()


def _client(service: Service, token: str = TOKENS["cms"]) -> PolicyClient:
    path = service.folder / "own.token"
    path.write_text(token + "\n")
    return PolicyClient(Address(f"http://127.0.0.1:{service._port}", path, "site"))


def test_request_renew_report_and_release(service: Service) -> None:
    client = _client(service)
    lease = client.request("node1", "dest", 100)
    assert (lease.streams, lease.counted) == (4, 4)
    assert 55 < lease.ends_in_s <= 60
    assert client.renew(lease.id, 100, 4).streams == 8
    client.report(lease.id, 3, 12.5)
    assert "1.25e+07" in service.ask("GET", "/metrics", owner="").text
    client.release(lease.id)
    assert service.granted() == 0
    with pytest.raises(NoLeaseError, match="stop using"):
        client.renew(lease.id, 100, 4)


def test_what_goes_wrong_says_what_to_do(service: Service) -> None:
    with pytest.raises(SilentError, match="refuses the token of STAGEOUT_POLICY_TOKEN"):
        _client(service, "wrong-token-0123456789").request("node1", "dest", 1)
    with pytest.raises(SilentError, match="No such file"):
        PolicyClient(Address("http://127.0.0.1:1", service.folder / "none", "site")).request("n", "d", 1)
    client = _client(service)
    service.kill()
    with pytest.raises(SilentError, match="refused"):
        client.request("node1", "dest", 1)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"STAGEOUT_POLICY_URL": "dest.example.org:9620"}, "write https://HOST:PORT"),
        ({"STAGEOUT_POLICY_URL": "http://policy.example.org:9620"}, "the token would be sent in clear"),
    ],
)
def test_an_address_that_cannot_be_used_is_said_at_the_start(values: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        grants_of(mapping_settings(values))


def test_the_address_of_the_configuration() -> None:
    assert grants_of(mapping_settings({})) is None
    assert grants_of(mapping_settings({"STAGEOUT_POLICY_URL": "/"})) is None
    values = {"STAGEOUT_POLICY_URL": "https://policy:9620/", "FULL_HOSTNAME": "ep7.example.org"}
    assert address_of(mapping_settings(values)) == Address(
        "https://policy:9620", Path("/etc/condor/stageout-policy.token"), "example.org"
    )
    assert address_of(mapping_settings({**values, "STAGEOUT_SITE": "here"})).site == "here"


@pytest.mark.parametrize(("text", "name"), [("manager@ep 1/x", "manager@ep-1/x"), ("[::1]", "1-"), ("", "none")])
def test_names_are_made_such_that_the_service_takes_them(text: str, name: str) -> None:
    assert service_name(text) == name
    assert len(service_name("x" * 999)) == 255


def _renewals(service: Service) -> int:
    text = service.ask("GET", "/metrics", owner="").text
    found = re.search(r'requests_total\{operation="renew",status="200"\} (\d+)', text)
    return int(found[1]) if found else 0


# ---- leases ---------------------------------------------------------------------------------------------------------


class Hands:
    """A clock that tests turn; it goes on by itself too."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self._real = SystemClock()

    def monotonic_s(self) -> float:
        return self._real.monotonic_s() + self.ahead_s

    def wall_s(self) -> float:
        return self._real.wall_s() + self.ahead_s


@asynccontextmanager
async def _running(service: Any, clock: Hands | None = None) -> Any:
    changes: list[int] = []
    grants = PolicyGrants(service, "manager@ep1", clock or Hands(), lambda: changes.append(1), _supervise)
    try:
        yield grants
    finally:
        await grants.close()


async def _supervise(name: str, work: Callable[[], Awaitable[None]]) -> None:
    await work()


def _story(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))  # type: ignore[arg-type]


def test_streams_are_asked_for_when_files_wait_and_given_back_when_none_do(service: Service) -> None:
    async def story() -> None:
        clock = Hands()
        async with _running(_client(service), clock) as grants:
            assert grants.streams(SERVER) == 0, "nothing before the first answer"
            grants.note(SERVER, 6, 0)
            await until(lambda: grants.streams(SERVER) == 4, "the first grant")
            grants.note(SERVER, 6, 4, rate_mb_s=7.5)
            await until(lambda: grants.streams(SERVER) == 6, "more after a step, no more than wanted")
            assert "7.5e+06" in service.ask("GET", "/metrics", owner="").text
            [lease] = service.ask("GET", "/v1/leases").json["leases"]
            assert (lease["client"], lease["destination"]) == (f"manager@ep1/{SERVER}", "dest.example.org")
            before = _renewals(service)
            clock.ahead_s += grants_module._IDLE_S
            await until(lambda: _renewals(service) > before, "files that move for long keep their streams")
            assert grants.streams(SERVER) == 6
            grants.note(SERVER, 0, 0)
            clock.ahead_s += grants_module._IDLE_S
            await until(lambda: service.granted() == 0, "the streams are given back")

    _story(story)


def test_all_streams_are_given_back_at_the_end(service: Service) -> None:
    async def story() -> None:
        async with _running(_client(service)) as grants:
            grants.note(SERVER, 6, 0)
            grants.note("gsiftp://other", 6, 0)
            await until(lambda: grants.streams(SERVER) == grants.streams("gsiftp://other") == 4, "two leases")

    _story(story)
    assert service.granted() == 0


def test_nothing_is_asked_for_after_the_end() -> None:
    begun: list[str] = []

    async def supervise(name: str, work: Callable[[], Awaitable[None]]) -> None:
        begun.append(name)

    async def story() -> None:
        for closes in (False, True):
            grants = PolicyGrants(Forgetful(), "manager@ep1", Hands(), lambda: None, supervise)
            if closes:
                await grants.close()
            grants.note(SERVER, 6, 0)
            await asyncio.sleep(0)

    _story(story)
    assert begun == ["streams"]


def test_a_service_that_is_gone_leaves_the_last_grant_until_its_end_and_then_the_nodes_limits(
    service: Service,
) -> None:
    async def story() -> None:
        clock = Hands()
        async with _running(_client(service), clock) as grants:
            grants.note(SERVER, 8, 0)
            await until(lambda: grants.streams(SERVER) == 4, "the first grant")
            service.kill()
            clock.ahead_s += 25
            await until(lambda: "does not answer" in grants.reason(SERVER), "the silence is noticed")
            assert grants.streams(SERVER) == 4
            assert "its last grant of 4 streams holds for" in grants.reason(SERVER)
            clock.ahead_s += 36
            assert grants.streams(SERVER) is None
            assert "the limits of this node count" in grants.reason(SERVER)

    _story(story)


def test_a_service_that_was_never_there_means_the_nodes_limits(service: Service) -> None:
    client = _client(service)
    service.kill()

    async def story() -> None:
        async with _running(client) as grants:
            grants.note(SERVER, 8, 0)
            await until(lambda: grants.streams(SERVER) is None, "the node's own limits")

    _story(story)


def test_killed_and_started_again_it_keeps_the_grant_and_is_used_again(service: Service) -> None:
    service.knobs["PORT"] = str(service._port)

    async def story() -> None:
        clock = Hands()
        async with _running(_client(service), clock) as grants:
            grants.note(SERVER, 8, 0)
            await until(lambda: grants.streams(SERVER) == 4, "the first grant")
            service.kill()
            grants.note(SERVER, 8, 4, rate_mb_s=1.0)
            await until(lambda: "does not answer" in grants.reason(SERVER), "the silence is noticed")
            service.start()
            clock.ahead_s += 2
            await until(lambda: "does not answer" not in grants.reason(SERVER), "it answers again")
            [lease] = service.ask("GET", "/v1/leases").json["leases"]
            assert lease["streams"] == grants.streams(SERVER) == 8, "the same lease, with its next increment"

    _story(story)


class Forgetful:
    """A service that has forgotten the lease: its database was removed, or the lease had ended there."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def request(self, client: str, destination: str, wanted: int) -> Lease:
        self.calls.append("request")
        return Lease(f"L{len(self.calls)}", 4, 4, 60, 20, "")

    def renew(self, lease: str, wanted: int, in_use: int) -> Lease:
        self.calls.append("renew")
        raise NoLeaseError("no such lease")

    def report(self, lease: str, in_use: int, rate_mb_s: float) -> None:
        self.calls.append("report")

    def release(self, lease: str) -> None:
        raise NoLeaseError("no such lease")


def test_a_lost_lease_is_asked_for_anew_and_counts_for_nothing_until_then() -> None:
    service, seen = Forgetful(), []

    async def story() -> None:
        clock = Hands()
        async with _running(service, clock) as grants:
            ask = service.request

            def request(client: str, destination: str, wanted: int) -> Lease:
                seen.append(grants.streams(SERVER))
                return ask(client, destination, wanted)

            service.request = request  # type: ignore[method-assign]
            grants.note(SERVER, 8, 0)
            await until(lambda: grants.streams(SERVER) == 4, "the first grant")
            clock.ahead_s += 21
            await until(lambda: len(seen) == 2 and grants.streams(SERVER) == 4, "a new lease")

    _story(story)
    assert seen == [0, 0]
    assert service.calls == ["request", "renew", "request"]
