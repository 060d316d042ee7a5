"""Renewed credentials: who gets which over the agent's port, and what becomes of them on the node."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from handoff_site import BOB, Child, needs_root
from manager_site import AGENT, SCHEDD, Node, Site, made, run
from test_credentials import ended, holding, jwt, proxy

from sandbox_manager.custody import queries
from sandbox_manager.report.credential_fetch import Fetcher, NotReached, post
from schedd_agent.credential_reader import LocalCredentialReader, NoCredential, open_reader
from schedd_agent.credential_server import Certificate, CredentialServer, addresses_of
from schedd_agent.credentials import CredentialIssuer, CredentialOwner, services_of
from stageout.core.config import ConfigError, mapping_settings
from stageout.core.signing import SigningKey
from stageout.core.states import State
from stageout.model.run import RunRecord, Ticket
from stageout.model.sandbox import SyncState
from stageout.wire.custody import AgentNotice, JobKey
from stageout.wire.renewal import Answer, Ask, BadRenewal, answer_bytes, read_answers, read_request, request_bytes
from tests.polling import until

KEY, OTHER_KEY = SigningKey(b"k" * 32), SigningKey(b"o" * 32)
MANAGER = "manager@ep"
JOB = f"{SCHEDD}#7.0#1700000000"
JOB_KEY = JobKey(JOB, "alice@test")
ASK = Ask(JOB, 2, "t" * 32, "token", "team", "0" * 64)


def asked(*asks: Ask, key: SigningKey = KEY, manager: str = MANAGER, agent: str = SCHEDD, seen: str = "c1") -> Any:
    """A request as the agent reads it."""
    return read_request(request_bytes(manager, agent, seen, asks, key.sign))


class World:
    """An access point: a job of alice's with a receipt, her token and her proxy."""

    def __init__(self, base: Path) -> None:
        self.tokens = base / "oauth"
        (self.tokens / "alice").mkdir(parents=True)
        self.token = self.tokens / "alice" / "team.use"
        self.token.write_bytes(b"fresh")
        self.owner = CredentialOwner(JOB_KEY, "alice", 4, 2, "", services_of("box, team*read other team"))
        self.ticket = Ticket("t" * 32, MANAGER, KEY.public, 1, 1)
        self.reader = LocalCredentialReader(self.tokens)

    def keeper(self, certificate: str = "c1") -> CredentialIssuer:
        return CredentialIssuer(
            SCHEDD,
            certificate,
            lambda *run: RunRecord((self.ticket,)) if run == (JOB_KEY, 2) else None,
            lambda names: {JOB: self.owner} if JOB in names else {},
            self.reader,
        )

    def ask(self, ask: Ask = ASK, **how: Any) -> Answer:
        (answer,) = self.keeper().answer(asked(ask, **how))
        return answer


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


# ---- who gets what ---------------------------------------------------------------------------------------------------


def test_the_manager_of_the_receipt_gets_the_owners_token(world: World) -> None:
    assert world.ask() == Answer(b"fresh")
    known = replace(ASK, digest=sha256(b"fresh").hexdigest())
    assert world.ask(known) == Answer(None, "there is no newer one on the access point")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"key": OTHER_KEY}, "not signed with the key"),
        ({"manager": "manager@elsewhere"}, "no receipt of this manager"),
        ({"ask": replace(ASK, ticket="u" * 32)}, "no receipt"),
        ({"ask": replace(ASK, run_number=3)}, "no receipt"),
        ({"ask": replace(ASK, job=f"{SCHEDD}#8.0#1700000000")}, "no receipt"),
        ({"ask": replace(ASK, job="nonsense")}, "no receipt"),
        ({"ask": replace(ASK, job=f"{SCHEDD}#7.0#1700000001")}, "no receipt"),
        ({"ask": replace(ASK, service="../bob/team")}, "did not ask for"),
        ({"ask": replace(ASK, service="secret")}, "did not ask for tokens of secret"),
        ({"ask": replace(ASK, service="team_read")}, "no more on the access point"),
        ({"ask": replace(ASK, service="other")}, "no more on the access point"),
        ({"ask": replace(ASK, kind="proxy", service="")}, ""),
    ],
)
def test_nobody_else_gets_anything(world: World, how: dict[str, Any], words: str) -> None:
    answer = world.ask(**how)
    assert answer.content is None and words in answer.reason


def test_a_receipt_without_a_key_gives_nothing(world: World) -> None:
    world.ticket = replace(world.ticket, key="")
    assert world.ask().content is None


@pytest.mark.parametrize(
    "change", [
        {"run": 3}, {"status": 2}, {"status": 1}, {"user": "../alice"}, {"user": ""},
        {"job": JobKey(JOB, "bob@test")},
    ],
)  # fmt: skip
def test_only_of_the_run_that_is_completed(world: World, change: dict[str, Any]) -> None:
    world.owner = world.owner._replace(**change)
    assert world.ask().content is None


@pytest.mark.parametrize("how", [{"agent": "other-ap"}, {"seen": "c2"}])
def test_a_request_made_for_somebody_else_is_no_use(world: World, how: dict[str, str]) -> None:
    """A daemon that was taken for the agent cannot pass the request on."""
    with pytest.raises(BadRenewal):
        world.keeper().answer(asked(ASK, **how))


@pytest.fixture
def public_directory() -> Iterator[Path]:
    """One that every user can reach, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as path:
        Path(path).chmod(0o755)
        yield Path(path)


def test_a_proxy_is_read_only_if_it_is_the_owners(world: World, public_directory: Path, monkeypatch: Any) -> None:
    account = type("Account", (), {"pw_uid": 64001, "pw_gid": 64001})
    monkeypatch.setattr("schedd_agent.credential_reader.pwd.getpwnam", lambda name: account)
    folder = public_directory
    path = folder / "x509"
    path.write_bytes(proxy(60))
    uid = 64001 if os.geteuid() == 0 else os.geteuid()
    account.pw_uid = account.pw_gid = uid
    want = replace(ASK, kind="proxy", service="")
    world.owner = world.owner._replace(proxy=str(path))
    if os.geteuid() == 0:
        assert world.ask(want).content is None, "somebody else's file was read"
        os.chown(path, uid, uid)
    path.chmod(0o600)
    assert world.ask(want).content == path.read_bytes()
    path.write_bytes(b"something else of alice's")
    assert "holds no certificate" in world.ask(want).reason
    link = folder / "link"
    link.symlink_to(path)
    world.owner = world.owner._replace(proxy=str(link))
    assert world.ask(want).content is None


@needs_root
def test_an_agent_that_was_started_as_root_reads_through_a_child(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.token.chmod(0o600)
    settings = mapping_settings({"SEC_CREDENTIAL_DIRECTORY_OAUTH": str(world.tokens), "CONDOR_IDS": f"{BOB}.{BOB}"})

    def work() -> Any:
        reader = open_reader(settings)
        found = [reader.read("token", "alice", "team")]
        for wrong in (("token", "alice", "none"), ("token", "..", "team"), ("proxy", "nobody-at-all", "/etc/passwd")):
            try:
                found.append(reader.read(*wrong))
            except NoCredential as no:
                found.append(str(no))
        return os.getresuid(), os.access(world.token, os.R_OK), found

    ids, readable, found = Child(work, 0).result()
    assert ids == (BOB, BOB, BOB) and not readable
    assert found[0] == b"fresh"
    assert ["no more" in found[1], "no service" in found[2], "no account" in found[3]] == [True] * 3


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"payload": "[]", "signature": ""}', b"\xff", b"[" * 10**5])
def test_bad_requests(body: bytes) -> None:
    with pytest.raises(BadRenewal):
        read_request(body)


def test_bad_answers() -> None:
    assert read_answers(answer_bytes([Answer(b"\0x"), Answer(None, "no")]), 2) == [Answer(b"\0x"), Answer(None, "no")]
    for body in (b"", b"{}", b'{"answers": []}', b'{"answers": [1]}', b'{"answers": [{"content": "?", "reason": ""}]}'):
        with pytest.raises(BadRenewal):
            read_answers(body, 1)


# ---- over the port ---------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def open_port(keeper: Any, certificate: Certificate) -> Any:
    """The agent's port; its URL."""

    async def respond(request: Any) -> list[Answer]:
        found: list[Answer] = keeper.answer(request)
        return found

    number = free_port()
    port = CredentialServer("127.0.0.1", number, certificate, respond)
    await port.open()
    try:
        yield f"https://127.0.0.1:{number}"
    finally:
        await port.close()


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return Certificate(tmp_path / "tls")


def test_only_the_certificate_of_the_notice_is_talked_to(
    world: World, certificate: Certificate, tmp_path: Path
) -> None:
    async def work() -> None:
        async with open_port(world.keeper(certificate.digest), certificate) as url:
            body = request_bytes(MANAGER, SCHEDD, certificate.digest, [ASK], KEY.sign)
            assert read_answers(await asyncio.to_thread(post, url, certificate.digest, body), 1) == [Answer(b"fresh")]
            for what, bad in ((sha256(b"x").hexdigest(), body), (certificate.digest, b"{}")):
                with pytest.raises(NotReached):
                    await asyncio.to_thread(post, url, what, bad)
        with pytest.raises(NotReached):
            await asyncio.to_thread(post, url, certificate.digest, body)

    run(work())
    assert Certificate(tmp_path / "tls").digest == certificate.digest, "made anew at a restart"
    assert (tmp_path / "tls").stat().st_mode & 0o777 == 0o600
    (tmp_path / "tls").write_text("damaged")
    with pytest.raises(ConfigError, match="remove it"):
        Certificate(tmp_path / "tls")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"NETWORK_INTERFACE": "10.0.0.7"}, ("10.0.0.7", "10.0.0.7")),
        ({"NETWORK_INTERFACE": "eth*", "FULL_HOSTNAME": "ap.test"}, ("ap.test", "")),
        ({"NETWORK_INTERFACE": "::1"}, ("[::1]", "::1")),
        ({"STAGEOUT_CREDENTIAL_HOST": "door.test", "NETWORK_INTERFACE": "10.0.0.7"}, ("door.test", "10.0.0.7")),
    ],
)
def test_addresses(values: dict[str, str], told: tuple[str, str]) -> None:
    assert addresses_of(mapping_settings(values)) == told


# ---- on the node -----------------------------------------------------------------------------------------------------


@pytest.fixture
def site() -> Iterator[Site]:
    with made() as new:
        yield new


def heard(node: Node, url: str = "", digest: str = "") -> Fetcher:
    """A manager that has heard of an agent with this port."""
    node.agents.record_notice(AgentNotice(AGENT, SCHEDD, "", 2, 2, url, digest), 0)
    return Fetcher(node.pipeline, node.agents, KEY.sign)


class Fixed:
    """A keeper that gives the same to everybody, and remembers what was asked."""

    def __init__(self, answer: Answer) -> None:
        self.given = answer
        self.asks: list[Ask] = []

    def answer(self, request: Any) -> list[Answer]:
        self.asks += request.asks
        return [self.given] * len(request.asks)


def test_what_waits_for_a_credential_gets_it_over_the_port(site: Site, certificate: Certificate) -> None:
    fresh = jwt(600)
    keeper = Fixed(Answer(None, "there is no newer one on the access point"))

    async def work() -> None:
        async with site.manager() as node, open_port(keeper, certificate) as url:
            ticket, old = await ended(node)
            fetcher = heard(node, url, certificate.digest)
            await fetcher.round()
            box = node.box()
            assert box is not None and box.reason.endswith("; there is no newer one on the access point")
            assert keeper.asks == [Ask(box.run.job, 1, ticket, "token", "team", old.digest)]
            keeper.given = Answer(b"rubbish: {")
            await fetcher.round()
            keeper.given = Answer(fresh.encode())
            await fetcher.round()
            await node.until_state(State.RELEASED)
            await fetcher.round()
            assert len(keeper.asks) == 3
            assert holding(site.base / "spool", fresh) == []

    run(work())


def test_a_credential_near_its_end_is_renewed_while_its_output_waits(site: Site, certificate: Certificate) -> None:
    keeper = Fixed(Answer(jwt(90_000).encode()))

    async def work() -> None:
        async with site.manager(moving=False) as node, open_port(keeper, certificate) as url:
            for job, ends_in_s in (("1.0", 600), ("2.0", 80_000)):
                facts = node.facts(job, slot_id=int(job[0]))
                token = {"team": jwt(ends_in_s).encode()}
                receipt = await node.hand_off({"copy://h/ok/f": b"1"}, facts, credentials=token)
                await node.confirm(receipt, facts=facts)
            await heard(node, url, certificate.digest).round()
            assert [ask.job.split("#")[1] for ask in keeper.asks] == ["1.0"]
            held = await node.ledger.read(queries.tickets_with_credentials)
            assert len({item.digest for item in held}) == 2
            assert all(item.expires_at > node.clock.wall_s() + 70_000 for item in held)

    run(work())


def test_why_it_is_not_renewed_is_said(site: Site) -> None:
    async def work() -> None:
        async with site.manager() as node:
            await ended(node)
            await heard(node).round()
            await until(lambda: (box := node.box()) and "STAGEOUT_CREDENTIAL_PORT" in box.reason, "the reason")
            change = node.box().change  # type: ignore[union-attr]
            node.agents.record_notice(
                AgentNotice(AGENT, SCHEDD, "", 3, 3, f"https://127.0.0.1:{free_port()}", "0" * 64), 0
            )
            fetcher = Fetcher(node.pipeline, node.agents, KEY.sign)
            await fetcher.round()
            box = node.box()
            assert box is not None and "cannot be reached" in box.reason and box.change > change
            assert box.reason.startswith("needs credential: the token of team ended")
            await fetcher.round()
            assert node.box().change == box.change, "the same words were written again"  # type: ignore[union-attr]

    run(work())


@pytest.mark.parametrize("when", ["kill-before", "kill-after"])
def test_a_manager_that_dies_at_the_record_of_a_renewed_credential_finds_it_out(site: Site, when: str) -> None:
    """At `record-renewed`, behind `credential-replace`: the ledger may still say the old end."""
    fresh = jwt(90_000)

    async def renew() -> None:
        async with site.manager(moving=False) as node:
            receipt = await node.hand_off({"copy://h/ok/f": b"1"}, credentials={"team": jwt(600).encode()})
            await node.confirm(receipt)

            async def is_on_disk() -> bool:
                return (await node.ledger.read(queries.kept_tickets))[receipt.ticket][1] is SyncState.DONE

            await until(is_on_disk, "the sync: a death in its middle would be a loss")
            (held,) = await node.ledger.read(queries.tickets_with_credentials)
            await node.pipeline.custody.renewal.put(held.ticket, held.credentials[0], fresh.encode())

    faults = {"STAGEOUT_FAULTS": f"record-renewed={when}"}
    assert Child(lambda: run(renew()), os.geteuid(), env=faults).result() is None, "it has not died"

    async def again() -> None:
        async with site.manager() as node:
            await node.until_state(State.RELEASED)

    async def known() -> None:
        async with site.manager(moving=False) as node:
            (held,) = await node.ledger.read(queries.tickets_with_credentials)
            (credential,) = held.credentials
            assert credential.digest == sha256(fresh.encode()).hexdigest()
            assert credential.expires_at > node.clock.wall_s() + 80_000

    run(known())
    run(again())
    (call,) = site.calls()
    assert [content for content, _ in call["tokens"].values()] == [fresh]
    assert holding(site.base / "spool", fresh) == []
