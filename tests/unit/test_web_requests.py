"""Requests to change a delivery on the web page: who may ask, for whose output, and what is recorded."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from stageout.core import log
from stageout.core.config import mapping_settings
from stageout.core.tokens import TokenTable
from stageout.wire.owner_requests import Verb, parse_request
from stageout_web.queue import QueueError
from stageout_web.readers import Readers, Rights
from stageout_web.server import Server
from stageout_web.service import rights_of
from tests.unit.web_site import Site, ad_of, job_name, sandbox

OPERATOR, ALICE, BOB, READER = (f"{name}-token-0123456789" for name in ("operator", "alice", "bob", "reader"))
USER = "alice@example.org"
_PAGE = f"/job?id={job_name(7).replace('#', '%23')}"
_RIGHTS = Rights(frozenset({"shift", "duty"}), owners=True)
Client = TestClient[Any, Any]
Work = Callable[[Client, Site], Awaitable[None]]
SENT = {
    "retry": "retry run=1", "pause": "pause run=1", "resume": "resume run=1", "cancel": "cancel run=1",
    "redirect": "redirect run=1 ID https://other.example.org/alice/ a.root",
}  # fmt: skip


def serve(folder: Path, work: Work, rights: Rights = _RIGHTS, **box: Any) -> None:
    """Run ``work`` against a page with a failed output of alice. :param box: its fields."""
    tokens = folder / "tokens"
    names = {"shift": OPERATOR, USER: ALICE, "bob@example.org": BOB, "other": READER}
    tokens.write_text("".join(f"{name} {token}\n" for name, token in names.items()))
    tokens.chmod(0o600)

    async def all_of_it() -> None:
        site = Site(folder, ad_of(1, sandbox(7, box.pop("state", "Failed"), code=box.pop("code", 72), **box)))
        site.queue.jobs["job7_0"] = {
            "ClusterId": 7, "ProcId": 0, "GlobalJobId": job_name(7), "StageOutGuard": True, "User": USER,
            "NumShadowStarts": 1,
        }  # fmt: skip
        await site.tick()
        server = Server(site.state, Readers(TokenTable(tokens), rights))
        async with TestClient(TestServer(server.application())) as client:
            await work(client, site)
        site.ring.close()

    asyncio.run(all_of_it())


def form(verb: str, **more: str) -> dict[str, str]:
    """Return the fields that a browser sends."""
    url = {"url": "https://other.example.org/alice/", "file": "a.root"} if verb == "redirect" else {}
    sure = {"sure": "yes"} if verb == "cancel" else {}
    return {"id": "7.0", "verb": verb, "run": "1", "reason": "disk of the site is full", **url, **sure, **more}


def bearer(token: str, **more: str) -> dict[str, str]:
    """Headers."""
    return {"Authorization": f"Bearer {token}", **more} if token else more


async def ask(client: Client, given: dict[str, str], token: str = OPERATOR, **headers: str) -> tuple[int, str]:
    """Send a form."""
    answer = await client.post("/request", data=given, headers=bearer(token, **headers), allow_redirects=False)
    return answer.status, await answer.text()


@pytest.mark.parametrize("token", [OPERATOR, ALICE])
@pytest.mark.parametrize("verb", [verb.value for verb in Verb])
def test_a_request_is_written_with_the_reader_and_the_reason(
    verb: str, token: str, tmp_path: Path
) -> None:  # fmt: skip
    log.open_log(logging.FileHandler(tmp_path / "Log"))

    async def work(client: Client, site: Site) -> None:
        status, _ = await ask(client, form(verb), token)
        assert status == 303
        ((job, run, user, request, by),) = site.queue.written
        reader = "shift" if token == OPERATOR else USER
        assert (job, run, user) == ("7.0", 1, USER)
        assert re.sub(r" [0-9a-f]{8} ", " ID ", request) == SENT[verb]
        assert parse_request(request).verb is Verb(verb)
        assert by == f"{verb} by {reader}: disk of the site is full"
        text = await (await client.get("/job?id=7.0", headers=bearer(token))).text()
        assert "waits for the agent" in text and by in text

    serve(tmp_path, work)
    (line,) = [line for line in (tmp_path / "Log").read_text().splitlines() if " request-stored " in line]
    reader = "shift" if token == OPERATOR else USER
    assert f" INFO request-stored job=7.0 user={USER} reader={reader} " in line
    assert line.endswith('reason="disk of the site is full"')


@pytest.mark.parametrize("token", ["", BOB, READER, "unknown-token-0123456789"])
def test_others_may_not_ask_and_are_offered_nothing(token: str, tmp_path: Path) -> None:
    async def work(client: Client, site: Site) -> None:
        text = await (await client.get(_PAGE, headers=bearer(token))).text()
        assert "stageout retry 7.0" in text and "/request" not in text
        assert (await client.get("/request?id=7.0&verb=cancel", headers=bearer(token))).status == 403
        assert (await ask(client, form("cancel"), token))[0] == 403
        assert site.queue.written == []

    serve(tmp_path, work)


@pytest.mark.parametrize("rights", [Rights(), Rights(frozenset({"duty"})), Rights(frozenset({"shift"}))])
def test_without_the_settings_nobody_may_ask(rights: Rights, tmp_path: Path) -> None:
    async def work(client: Client, site: Site) -> None:
        for token in (OPERATOR, ALICE):
            is_allowed = token == OPERATOR and "shift" in rights.operators
            assert (await ask(client, form("pause"), token))[0] == (303 if is_allowed else 403)

    serve(tmp_path, work, rights)


def test_the_settings_name_operators() -> None:
    settings = mapping_settings({"STAGEOUT_WEB_OPERATORS": "shift, duty", "STAGEOUT_WEB_OWNERS": "true"})
    assert rights_of(settings) == _RIGHTS
    nobody = rights_of(mapping_settings({}))
    assert nobody == Rights()
    assert not nobody.allow("", "") and not nobody.allow("shift", "shift")
    assert not _RIGHTS.allow("", ""), "a job without a user belongs to nobody"


@pytest.mark.parametrize(
    "headers", [{"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}]
)
def test_forms_of_other_sites_are_refused(headers: dict[str, str], tmp_path: Path) -> None:
    """A proxy may add the token, so that it is no proof that the reader has asked."""

    async def work(client: Client, site: Site) -> None:
        assert (await ask(client, form("cancel"), OPERATOR, **headers))[0] == 403
        assert site.queue.written == []

    serve(tmp_path, work)


@pytest.mark.parametrize(
    ("given", "status", "words"),
    [
        (form("cancel", sure=""), 400, "Confirm that the output is to be deleted"),
        (form("pause", reason=" "), 400, "Write a reason"),
        (form("pause", reason="x" * 201), 400, "Write a reason"),
        (form("pause", reason="a\nb"), 400, "Write a reason"),
        (form("pause", run="0"), 400, "has begun run 1"),
        (form("redirect", url="https://alice:secret@h/"), 400, "everybody can read"),
        (form("redirect", url="https://h/a b"), 400, "without spaces"),
        (form("redirect", url=""), 400, "Correct the URL"),
        (form("redirect", file="a\nb"), 400, "in one line"),
        (form("redirect", file="f" * 1001), 400, "in one line"),
        (form("explode"), 404, "Not Found"),
        (form("pause", id="8.0"), 403, "Forbidden"),
        (form("pause", id="7.0 || true"), 404, "Not Found"),
    ],
)
def test_a_form_that_cannot_be_used_writes_nothing(
    given: dict[str, str], status: int, words: str, tmp_path: Path
) -> None:
    async def work(client: Client, site: Site) -> None:
        found, text = await ask(client, given, ALICE)
        assert (found, site.queue.written) == (status, [])
        assert words in text
        if status == 400:
            assert 'role="alert"' in text and 'method="post"' in text, "the form is shown again"

    serve(tmp_path, work)


def test_the_schedd_may_refuse_or_be_silent(tmp_path: Path) -> None:
    async def work(client: Client, site: Site) -> None:
        site.queue.refusal = "another request waits"
        status, text = await ask(client, form("pause"))
        assert (status, "another request waits" in text, "disk of the site is full" in text) == (409, True, True)
        site.queue.problem = "timed out"
        assert (await ask(client, form("pause")))[0] == 503
        assert (await client.get("/request?id=7.0&verb=pause", headers=bearer(OPERATOR))).status == 503

        async def silent(*_: object) -> None:
            raise QueueError("the schedd did not answer within 10 s")

        site.queue.problem = ""
        site.queue.request = silent  # type: ignore[method-assign, assignment]
        status, text = await ask(client, form("pause"))
        assert (status, "did not answer within 10 s" in text) == (503, True)

    serve(tmp_path, work)


@pytest.mark.parametrize(
    ("box", "verbs"),
    [
        ({}, ["retry", "redirect", "cancel"]),
        ({"state": "RetryWait", "code": 51}, ["retry", "redirect", "pause", "cancel"]),
        ({"state": "Moving", "code": 0}, ["redirect", "pause", "cancel"]),
        ({"state": "Confirmed", "code": 0, "paused": 1}, ["redirect", "resume", "cancel"]),
        ({"state": "Delivered", "code": 0}, []),
        ({"state": "Lost", "code": 99}, []),
    ],
)
def test_a_job_offers_what_makes_sense(box: dict[str, Any], verbs: list[str], tmp_path: Path) -> None:
    async def work(client: Client, site: Site) -> None:
        text = await (await client.get(_PAGE, headers=bearer(OPERATOR))).text()
        assert re.findall(r"/request\?id=7\.0&amp;verb=([a-z]+)", text) == verbs
        for verb in verbs:
            answer = await client.get(f"/request?id=7.0&verb={verb}", headers=bearer(OPERATOR))
            shown = await answer.text()
            assert answer.status == 200 and 'method="post"' in shown and "http-equiv" not in shown
            assert ('name="sure"' in shown, 'name="url"' in shown) == (verb == "cancel", verb == "redirect")

    serve(tmp_path, work, **box)
