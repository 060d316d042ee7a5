"""Credentials in custody: given to the plugin again, to nobody else, renewed, and gone at the end."""

from __future__ import annotations

import asyncio
import base64
import datetime
import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from handoff_site import ALICE, BOB, Child, RawPlugin, needs_root, site_for, wait_for, write_files
from manager_site import PYTHON, Node, Site, made, run

from sandbox_manager.custody import queries
from sandbox_manager.custody.credentials import BadCredential, Credential, examine
from stageout.core.classad_parser import parse_ads
from stageout.core.errors import ErrorClass
from stageout.core.states import State
from stageout.handoff import client
from stageout.movers.scrub import Secrets
from stageout.wire import handoff as wire
from stageout.wire.custody import Action
from tests.polling import until

SECRET = "s3cr3t-token-of-alice-0123456789"
OTHER = "an0ther-token-of-alice-9876543210"


def jwt(ends_in_s: float, who: str = "alice") -> str:
    """A token that says when it ends."""
    claims = {"sub": who, "exp": int(time.time() + ends_in_s)}
    text = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"eyJhbGciOiJub25lIn0.{text}.c2lnbmF0dXJl"


def proxy(ends_in_s: float, chain: int = 2) -> bytes:
    """A chain of certificates with a key, of which the first ends first."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "alice")])
    now = datetime.datetime.now(datetime.timezone.utc)
    parts = []
    for number in range(chain):
        end = now + datetime.timedelta(seconds=ends_in_s + 3600 * number)
        made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        made = made.serial_number(number + 1).not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(end)
        parts.append(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return parts[0] + private + b"".join(parts[1:])


@pytest.fixture
def site() -> Iterator[Site]:
    with made() as new:
        yield new


def holding(base: Path, *secrets: str) -> list[str]:
    """Files below a directory in which one of the secrets stands."""
    found = []
    for folder, _, names in os.walk(base):  # passes over a directory that the manager has removed in this moment
        for path in (Path(folder, name) for name in names):
            with suppress(FileNotFoundError):  # or a file
                content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
                found += [str(path) for secret in secrets if secret.encode() in content]
    return found


# ---- what can be read from a credential ------------------------------------------------------------------------------


def test_ends() -> None:
    soon = int(time.time()) + 600
    assert abs(examine("token", "s", jwt(600).encode()).expires_at - soon) <= 1
    beside = json.dumps({"access_token": "opaque", "expires_at": soon + 0.5}).encode()
    assert examine("token", "s", beside).expires_at == soon
    both = json.dumps({"access_token": jwt(60), "expires_at": soon + 999}).encode()
    assert abs(examine("token", "s", both).expires_at - soon + 540) <= 1
    assert abs(examine("proxy", "", proxy(600)).expires_at - soon) <= 2


@pytest.mark.parametrize(
    "text", ["opaque", "a.b.c", "a.eyJleHAiOiAibm8ifQ.c", '{"access_token": "x", "expires_at": []}']
)
def test_an_end_that_cannot_be_read_is_none(text: str) -> None:
    assert examine("token", "s", text.encode()).expires_at == 0


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("token", b""), ("token", b" \n"), ("token", b"\xff\xfe"), ("token", b"{"), ("token", b'{"other": 1}'),
        ("token", b"x" * 300_000), ("proxy", b"no certificate"),
        ("proxy", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
    ],
)  # fmt: skip
def test_what_is_no_credential(kind: str, content: bytes) -> None:
    with pytest.raises(BadCredential) as told:
        examine(kind, "site", content)
    assert "access" not in str(told.value) or "holds no access_token" in str(told.value)


def test_secrets_are_taken_out_of_texts() -> None:
    key = proxy(60)
    hide = Secrets([json.dumps({"access_token": SECRET, "refresh": OTHER}).encode(), key])
    assert hide.scrub(f"sent {SECRET}, Bearer={OTHER}; fine") == "sent ***, Bearer=***; fine"
    left = hide.scrub(key.decode())
    assert not [line for line in key.decode().splitlines() if len(line) > 12 and " " not in line and line in left]


def test_passwords_in_urls_are_taken_out_of_texts() -> None:
    hide = Secrets([], ["https://bob:pw@h:1/a@b", "https://bob:pw@h:1/c", "dav://h/x@y", "copy:///f"])
    assert hide.scrub("PUT https://bob:pw@h:1/a@b: 500, x@y") == "PUT https://***@h:1/a@b: 500, x@y"


# ---- sending ---------------------------------------------------------------------------------------------------------


def test_the_plugin_finds_what_the_starter_gave_it(site: Site) -> None:
    async def work() -> None:
        async with site.manager() as node:
            chain = proxy(3600)
            receipt = await node.hand_off(
                {"team+copy://h/ok/f": b"12345"}, credentials={"team": jwt(3600).encode(), "": chain},
                job_ad='[ Owner = "alice"; Shards = { 1, 2 } ]',
                plugin_data='[ PluginData = [ a = 1 ]; copy_PluginData = "x" ]',
            )  # fmt: skip
            held = site.base / "spool" / "sandboxes" / receipt.ticket / "credentials"
            assert stat.S_IMODE(held.stat().st_mode) == 0o700 and held.stat().st_uid == os.geteuid()
            assert {stat.S_IMODE(path.stat().st_mode) for path in held.iterdir()} == {0o600}
            await node.confirm(receipt)
            await node.until_state(State.RELEASED)
            (call,) = site.calls()
            assert call["proxy"].encode() == chain
            ((name, (token, mode)),) = call["tokens"].items()
            assert (name, token.count("."), stat.S_IMODE(mode)) == ("team.use", 2, 0o600)
            assert call["job"].splitlines() == ['Owner = "alice"', "Shards = { 1, 2 }"]
            assert call["env"]["_CONDOR_CREDS"].startswith(call["cwd"])
            first, second, request = parse_ads(call["requests"])
            assert first == {"PluginData": {"a": 1}}
            assert second == {"Protocol": "copy", "copy_PluginData": "x"}
            assert set(request) == {"Url", "LocalFileName"}
            token = token.split(".")[1]
            assert holding(site.base / "spool", token, chain.decode().splitlines()[1]) == []

    run(work())


def test_data_stands_in_each_request_of_protocol_2(site: Site) -> None:
    site.plugin = site.write_plugin("second_plugin", "copy", protocol=2)
    site.plugins = [site.plugin]

    async def work() -> None:
        async with site.manager() as node:
            receipt = await node.hand_off({"copy://h/ok/f": b"1"}, plugin_data="[ PluginData = [ a = 1 ] ]")
            await node.confirm(receipt)
            await node.until_state(State.RELEASED)
            # The test's plugin of protocol 2 looks for the URL first.
            (request,) = parse_ads(site.calls()[0]["requests"])
            assert request["PluginData"] == {"a": 1}
            assert "tokens" in site.calls()[0] and site.calls()[0]["tokens"] is None

    run(work())


def test_only_what_has_the_same_credentials_travels_together(site: Site) -> None:
    """Three jobs of one owner, two of them with the same token; and one without."""

    async def work() -> None:
        async with site.manager(moving=False) as node:
            given = [SECRET, OTHER, SECRET, None]
            for number, token in enumerate(given):
                facts = node.facts(f"{number}.0", slot_id=number)
                credentials = {"team": token.encode()} if token else None
                receipt = await node.hand_off({f"copy://h/ok/{number}": b"1"}, facts, credentials=credentials)
                await node.confirm(receipt, facts=facts)
            task = asyncio.ensure_future(node.pipeline.run())
            await until(lambda: len(site.delivered()) == 4, "four deliveries")
            task.cancel()
        told = {tuple(sorted(url[-1] for url in call["urls"])): call["tokens"] for call in site.calls()}
        assert {names: tokens and tokens["team.use"][0] for names, tokens in told.items()} == {
            ("0", "2"): SECRET, ("1",): OTHER, ("3",): None,
        }  # fmt: skip

    run(work())


def test_secrets_reach_neither_log_nor_reason(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with site.manager() as node:
            chain = proxy(3600)
            receipt = await node.hand_off(
                {"copy://h/leak/f": b"1"}, credentials={"team": SECRET.encode(), "": chain}
            )  # fmt: skip
            await node.confirm(receipt)
            box = await node.until_state(State.RETRY_WAIT)
            assert "the server does not like ***" in box.reason
            held = holding(site.base / "spool", SECRET, chain.decode().splitlines()[2])
            assert {Path(path).parent.name for path in held} == {"credentials"}
            printed = caplog.text
            assert "mover-failed" in printed and "sending ***" in printed and SECRET not in printed
            await node.order(Action.CANCEL)
            await until(lambda: not holding(site.base / "spool", SECRET), "the secret to be gone")

    run(work())


# ---- the end of a credential -----------------------------------------------------------------------------------------


async def ended(node: Node, **knobs: Any) -> tuple[str, Credential]:
    """A confirmed sandbox whose token ended before it was its turn. Returns ticket and record of the token."""
    receipt = await node.hand_off({"copy://h/ok/f": b"1"}, credentials={"team": jwt(1).encode()})
    (held,) = await node.ledger.read(queries.tickets_with_credentials)
    await until(lambda: time.time() > held.expires_at, "the end of the token")
    await node.confirm(receipt)
    box = await node.until_state(State.RETRY_WAIT)
    assert box.reason.startswith("needs credential: the token of team ended at 20")
    assert box.error_code == ErrorClass.CREDENTIAL_EXPIRED.code
    assert box.deadline_at == held.expires_at
    assert (box.attempts, box.excused) == (1, 1)
    return receipt.ticket, held.credentials[0]


def test_what_has_ended_waits_for_a_new_one_and_goes_on_with_it(site: Site) -> None:
    """No attempt is counted, nobody is asked in vain, and the server's gate learns nothing from it."""
    site.knobs["STAGEOUT_ATTEMPTS"] = "1"

    async def work() -> None:
        async with site.manager() as node:
            ticket, old = await ended(node)
            assert site.calls() == []
            put = node.pipeline.custody.renewal.put
            assert not await put(ticket, old, jwt(-5).encode())
            assert not await put("0" * 32, old, jwt(60).encode())
            with pytest.raises(BadCredential):
                await put(ticket, old, b"{}")
            assert node.state() is State.RETRY_WAIT
            new = jwt(60).encode()
            assert await put(ticket, old, new)
            await node.until_state(State.RELEASED)
            (call,) = site.calls()
            assert call["tokens"]["team.use"][0].encode() == new
            assert not await put(ticket, old, jwt(90).encode())
            assert holding(site.base / "spool", new.decode()) == []

    run(work())


def test_a_refused_credential_waits_too_and_its_gate_opens(site: Site) -> None:
    site.plugin = site.write_script("picky_plugin", PICKY.format(python=PYTHON, base=site.base))
    site.plugins = [site.plugin]
    site.knobs["STAGEOUT_ATTEMPTS"] = "1"

    async def work() -> None:
        async with site.manager() as node:
            receipt = await node.hand_off({"copy://h/ok/f": b"1"}, credentials={"team": SECRET.encode()})
            await node.confirm(receipt)
            box = await node.until_state(State.RETRY_WAIT)
            assert box.reason == "needs credential: 401 for ***"
            (held,) = await node.ledger.read(queries.tickets_with_credentials)
            assert await node.pipeline.custody.renewal.put(receipt.ticket, held.credentials[0], OTHER.encode())
            await node.until_state(State.RELEASED)

    run(work())


PICKY = """#!{python} -I
import os, re, sys
from pathlib import Path
if sys.argv[1:] == ["-classad"]:
    print('MultipleFileSupport = true\\nProtocolVersion = 4\\nSupportedMethods = "copy"')
    sys.exit(0)
url, name = re.findall(r'Url = "([^"]*)"; LocalFileName = "([^"]*)"', Path(sys.argv[2]).read_text())[0]
creds = os.environ.get("_CONDOR_CREDS")
token = Path(creds, "team.use").read_text() if creds else "nobody"
good = token.startswith("an0ther")
more = ('TransferFileBytes = 1' if good else 'TransferError = "401 for %s"; TransferErrorData = '
        '{{ [ ErrorType = "Authorization"; FailureType = "Authentication"; ErrorCode = 401 ] }}' % token)
ad = '[ TransferSuccess = %s; TransferFileName = "%s"; TransferUrl = "%s"; %s ]'
Path(sys.argv[4]).open("r+").write(ad % (str(good).lower(), os.path.basename(name), url, more))
sys.exit(not good)
"""


def test_a_401_is_final_where_nothing_can_be_renewed(site: Site) -> None:
    site.plugin = site.write_script("picky_plugin", PICKY.format(python=PYTHON, base=site.base))
    site.plugins = [site.plugin]

    async def work() -> None:
        async with site.manager() as node:
            await node.confirm(await node.hand_off({"copy://h/ok/f": b"1"}))
            box = await node.until_state(State.FAILED)
            assert (box.error_code, box.reason) == (ErrorClass.CREDENTIAL_REFUSED.code, "401 for nobody")

    run(work())


def test_retention_ends_the_wait_for_a_credential(site: Site) -> None:
    site.knobs.update(STAGEOUT_DELIVERY_TIMEOUT="60", STAGEOUT_RETENTION="1000")

    async def work() -> None:
        async with site.manager() as node:
            await ended(node)
            node.clock.ahead_s = 500
            await node.pipeline.run_housekeeping()
            await node.until_state(State.RETRY_WAIT)  # it may just be trying again
            node.clock.ahead_s = 1100

            async def has_failed() -> bool:  # a sandbox that is just trying again is looked at later
                await node.pipeline.run_housekeeping()
                return bool(node.state() is State.FAILED)

            await until(has_failed, "the end of a sandbox whose credential has ended")
            box = node.box()
            # as the plugin said it, or, where another try came first, as the manager did
            assert "gave up" in box.reason and ("needs credential" in box.reason or "token of team ended" in box.reason)
            node.clock.ahead_s = 3000
            await node.pipeline.run_housekeeping()
            await until(lambda: not list((site.base / "spool" / "sandboxes").iterdir()), "the spool to be empty")

    run(work())


def test_a_renewal_cut_off_before_the_ledger_is_mended_at_start(site: Site) -> None:
    async def work() -> None:
        async with site.manager() as node:
            ticket, old = await ended(node)
            node.spool.safe.replace(ticket, old, jwt(600).encode())
        async with site.manager() as node:
            await node.until_state(State.RELEASED)

    run(work())


@pytest.mark.parametrize("action", [Action.CANCEL, Action.SUPERSEDE])
def test_nothing_remains_at_the_end(site: Site, action: Action) -> None:
    async def work() -> None:
        async with site.manager() as node:
            receipt = await node.hand_off({"copy://h/ok/f": b"1"}, credentials={"team": SECRET.encode()})
            assert holding(site.base / "spool", SECRET)
            await node.order(action)
            await until(lambda: not holding(site.base / "spool", SECRET), "the secret to be gone")
            await until(lambda: (box := node.box()) and box.freed, "the ledger to say so")
            rows = await node.ledger.read(lambda db: db.execute("SELECT count(*) FROM credentials").fetchone()[0])
            assert (rows, (site.base / "spool" / "sandboxes" / receipt.ticket).exists()) == (0, False)

    run(work())


def test_destinations_of_credentials_that_nobody_has_are_forgotten(site: Site) -> None:
    async def work() -> None:
        async with site.manager() as node:
            receipt = await node.hand_off({"copy://h/ok/f": b"1"}, credentials={"team": SECRET.encode()})
            await node.confirm(receipt)
            await node.until_state(State.RELEASED)
            await node.pipeline.forget_old_jobs()
            assert len(node.pipeline.store.registry.destinations) == 1
            await node.order(Action.FORGET)
            await until(lambda: node.box() is None, "the record to be gone")
            await node.pipeline.forget_old_jobs()
            assert node.pipeline.store.registry.destinations == {}

    run(work())


# ---- the hand-off ----------------------------------------------------------------------------------------------------


def offered(content: bytes, service: str = "team", kind: str = "token") -> client.Carried:
    """One credential on its way."""
    return client.Carried(wire.TransferContext((wire.OfferedCredential(kind, service, len(content)),)), [content])


@pytest.mark.parametrize("way", [pytest.param("root", marks=needs_root), "one user"])
def test_a_hand_off_takes_the_credentials_and_nobody_else_can_read_them(way: str) -> None:
    with site_for(way != "root") as site:
        scratch = site.scratch()
        write_files(scratch, site.user, {"out": b"x"})
        requests = [("https://store.test/out", str(scratch / "out"))]
        secret = jwt(600).encode()
        carried = offered(secret)
        answer = site.plugin(scratch, lambda: client.offer(requests, "/p", carried).reason).result()
        assert answer == ""
        [record] = site.notes("accepted")
        assert record["credentials"] == [["token", "team"]]
        held = site.spool / "sandboxes" / record["ticket"] / "credentials"
        assert (held / "team.use").read_bytes() == secret
        assert stat.S_IMODE(held.stat().st_mode) == 0o700 and stat.S_IMODE((held / "team.use").stat().st_mode) == 0o600
        assert holding(site.spool, secret.decode()) == [str(held / "team.use")]
        if way == "root":
            for uid in (ALICE, BOB):
                assert Child(lambda: os.access(held / "team.use", os.R_OK), uid).result() is False
        for bad, words in ((jwt(-9).encode(), "past its end"), (b'{"a": 1}', "no access_token")):
            reason = site.plugin(scratch, lambda bad=bad: client.offer(requests, "/p", offered(bad)).reason).result()
            assert words in reason
        assert len(site.notes("accepted")) == 1 and site.is_clean()


@pytest.mark.parametrize("when", ["kill-before", "kill-after", "ENOSPC"])
def test_a_plugin_that_dies_at_a_credential_leaves_no_trace_of_it(when: str) -> None:
    with site_for(True) as site:
        scratch, secret = site.scratch(), jwt(600).encode()
        write_files(scratch, site.user, {"out": b"x"})
        requests = [("https://store.test/out", str(scratch / "out"))]
        faults = {"STAGEOUT_FAULTS": f"handoff-credential={when}"}
        found = site.plugin(scratch, lambda: client.offer(requests, "/p", offered(secret)).reason, env=faults).result()
        assert "No space left" in found if when == "ENOSPC" else found is None
        wait_for(site.is_clean, "the end of the hand-off")
        assert holding(site.spool, secret.decode()) == []
        assert site.notes("accepted") == []
        assert site.plugin(scratch, lambda: client.offer(requests, "/p", offered(secret)).reason).result() == ""
        [record] = site.notes("accepted")
        held = site.spool / "sandboxes" / record["ticket"] / "credentials" / "team.use"
        assert holding(site.spool, secret.decode()) == [str(held)]


@pytest.mark.parametrize("trick", ["symlink", "hard link", "directory", "other size", "missing"])
def test_a_credential_that_is_not_a_file_of_the_user_is_refused(trick: str) -> None:
    with site_for(one_user=True) as site:
        scratch = site.scratch()
        write_files(scratch, site.user, {"out": b"x", "secret": b"of somebody"})

        def work() -> str:
            talk = RawPlugin(site)
            talk.offer([("https://h/out", str(scratch / "out"), 1)], credentials=[["token", "team", 11]])
            answer = talk.answer()
            place = Path(answer["directory"])
            os.link(scratch / "out", place / "0")
            link = place / wire.credential_link(0)
            if trick == "symlink":
                link.symlink_to(scratch / "secret")
            elif trick == "hard link":
                os.link(scratch / "secret", link)
            elif trick == "directory":
                link.mkdir()
            elif trick == "other size":
                link.write_bytes(b"1")
            answer = talk.linked()
            return str(answer["op"] + answer.get("reason", ""))

        assert site.plugin(scratch, work).result().startswith("refuse")
        assert site.is_clean()


@pytest.mark.parametrize(
    "rows",
    [
        [["token", "../x", 1]], [["token", "", 1]], [["token", "a", -1]], [["token", "a", 1 << 30]], [["key", "a", 1]],
        [["proxy", "a", 1]], [["token", "a", 1]] * 2, [["token", "a"]], "x", [["token", str(n), 1] for n in range(99)],
        [["token", ".hidden", 1]], [["token", "a/b", 1]], [["token", "a\n", 1]],
    ],
)  # fmt: skip
def test_bad_surroundings_are_no_message(rows: Any) -> None:
    with pytest.raises(wire.BadMessage):
        wire.offered_context({"op": "offer", "credentials": rows})
    for text in (7, "x" * 600_000, "ü"):
        with pytest.raises(wire.BadMessage):
            wire.offered_context({"op": "offer", "plugin_data": text})
