"""The user whom a reverse proxy names: what its reader sees and may change, and who else is believed (nobody)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from stageout.core.config import ConfigError, mapping_settings
from stageout.core.tokens import TokenTable
from stageout_web.readers import TOKEN_HEADER, Readers, Rights
from stageout_web.server import Server
from stageout_web.service import proxies_of
from tests.unit.web_site import SECRET_NAME, SECRET_WORDS, Site, ad_of, job_name, sandbox

SECRET, READER = "proxy-secret-0123456789", "reader-token-0123456789"
ALICE, BOB, SHIFT = "alice@example.org", "bob@example.org", "shift@example.org"
USER = "X-Stageout-User"
_SECRETS = (SECRET_NAME, SECRET_WORDS)
Client = TestClient[Any, Any]
Work = Callable[[Client, Site], Awaitable[None]]
Headers = list[tuple[str, str]]


def job(cluster: int) -> str:
    """Return the page of a job: 7 is alice's, 8 is bob's."""
    return f"/job?id={job_name(cluster).replace('#', '%23')}"


def serve(folder: Path, work: Work, proxies: str = "127.0.0.1, ::1", **more: str) -> None:
    """Run ``work`` against a page with failed outputs of alice and bob. :param more: settings."""
    for name, text in (("tokens", f"readers {READER}\n"), ("proxy", f"nginx {SECRET}\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)
    given = {"STAGEOUT_WEB_PROXIES": proxies, "STAGEOUT_WEB_PROXY_TOKEN": str(folder / "proxy"), **more}
    rights = Rights(frozenset({SHIFT}), owners=True)

    async def all_of_it() -> None:
        boxes = [sandbox(cluster, "Failed", code=72, owner=owner) for cluster, owner in ((7, ALICE), (8, BOB))]
        site = Site(folder, ad_of(1, *boxes))
        for cluster, user in ((7, ALICE), (8, BOB)):
            site.queue.jobs[f"job{cluster}_0"] = {
                "ClusterId": cluster, "ProcId": 0, "GlobalJobId": job_name(cluster), "StageOutGuard": True,
                "User": user, "NumShadowStarts": 1,
            }  # fmt: skip
        await site.tick()
        readers = Readers(TokenTable(folder / "tokens"), rights, proxies_of(mapping_settings(given)))
        async with TestClient(TestServer(Server(site.state, readers).application())) as client:
            await work(client, site)
        site.ring.close()

    asyncio.run(all_of_it())


def by_proxy(user: str, *more: tuple[str, str]) -> Headers:
    """Headers of the proxy."""
    return [(TOKEN_HEADER, SECRET), (USER, user), *more]


async def names(client: Client, cluster: int, headers: Headers) -> bool:
    """Tell whether the page of a job shows names of files and words of servers: both or none."""
    text = await (await client.get(job(cluster), headers=headers)).text()
    found = {word in text for word in _SECRETS}
    assert len(found) == 1
    return found.pop()


def test_an_owner_sees_and_changes_only_own_output(tmp_path: Path) -> None:
    async def work(client: Client, site: Site) -> None:
        assert await names(client, 7, by_proxy(ALICE))
        assert not await names(client, 8, by_proxy(ALICE))
        own = await (await client.get(job(7), headers=by_proxy(ALICE))).text()
        assert f"Reader: {ALICE}" in own and "verb=retry" in own and "sign-in" not in own
        assert "/request" not in await (await client.get(job(8), headers=by_proxy(ALICE))).text()
        given = {"verb": "retry", "run": "1", "reason": "again"}
        for cluster, status in ((7, 303), (8, 403)):
            answer = await client.post("/request", data={**given, "id": f"{cluster}.0"}, headers=by_proxy(ALICE),
                                       allow_redirects=False)  # fmt: skip
            assert answer.status == status
        assert [(one[0], one[4]) for one in site.queue.written] == [("7.0", f"retry by {ALICE}: again")]
        export = await (await client.get("/history.csv", headers=by_proxy(ALICE))).text()
        assert '"url"' not in export, "records do not name the user"

    serve(tmp_path, work)


def test_an_operator_sees_and_changes_all(tmp_path: Path) -> None:
    async def work(client: Client, site: Site) -> None:
        for cluster in (7, 8):
            assert await names(client, cluster, by_proxy(SHIFT))
            assert "verb=retry" in await (await client.get(job(cluster), headers=by_proxy(SHIFT))).text()

    serve(tmp_path, work)


def test_a_page_of_one_user_is_none_for_another(tmp_path: Path) -> None:
    async def work(client: Client, site: Site) -> None:
        for path in ("/", "/jobs", "/owners", "/sign-in"):
            for user in (ALICE, BOB, SHIFT):
                text = await (await client.get(path, headers=by_proxy(user))).text()
                assert f"Reader: {user}" in text
            assert "Reader: " not in await (await client.get(path)).text()

    serve(tmp_path, work)


def test_the_user_counts_alone(tmp_path: Path) -> None:
    """A token or a session of the browser adds nothing to what the user may see."""

    async def work(client: Client, site: Site) -> None:
        bearer = ("Authorization", f"Bearer {READER}")
        assert await names(client, 7, [bearer])
        assert not await names(client, 8, by_proxy(ALICE, bearer))
        await client.post("/sign-in", data={"token": READER})
        assert await names(client, 8, [])
        assert not await names(client, 8, by_proxy(ALICE))

    serve(tmp_path, work)


def test_a_proxy_without_a_user_and_a_stranger_see_what_everybody_sees(tmp_path: Path) -> None:
    async def work(client: Client, site: Site) -> None:
        for headers in ([(TOKEN_HEADER, SECRET)], [], [("X-Remote-User", ALICE)], [("X-Forwarded-User", ALICE)]):
            assert not await names(client, 7, headers)
            assert "verb=" not in await (await client.get(job(7), headers=headers)).text()

    serve(tmp_path, work)


_FORWARDED = [("X-Forwarded-For", "127.0.0.1"), ("Forwarded", "for=127.0.0.1;proto=https"), ("X-Real-IP", "127.0.0.1")]


@pytest.mark.parametrize(
    "headers",
    [
        [(USER, ALICE)], [(USER, ALICE), *_FORWARDED], [(USER, ALICE), (TOKEN_HEADER, "")],
        [(USER, ALICE), (TOKEN_HEADER, "wrong-secret-0123456789")], [(USER, ALICE), (TOKEN_HEADER, READER)],
        [(USER, ALICE), (TOKEN_HEADER, f"{SECRET},{SECRET}")],
        [*by_proxy(ALICE), (TOKEN_HEADER, SECRET)], [*by_proxy(ALICE), (TOKEN_HEADER, "wrong-secret-0123456789")],
        [(TOKEN_HEADER, "wrong-secret-0123456789"), *by_proxy(ALICE)],
        [(USER, ALICE), ("X_Stageout_Proxy_Token", SECRET)], [*by_proxy(ALICE), ("X_Stageout_User", BOB)],
        [(TOKEN_HEADER, SECRET), ("X-Stageout_User", ALICE)],
        [*by_proxy(ALICE), (USER, ALICE)], [*by_proxy(BOB), (USER, ALICE)],
        [(USER, ""), *by_proxy(ALICE)],
        *(by_proxy(user) for user in (
            "", "@", "@example.org", "alice@", f"{ALICE},{BOB}", f"{ALICE} {BOB}", f"{ALICE};{BOB}",
            "alice%40example.org",
            "=?utf-8?q?alice=40example.org?=", f'"{ALICE}"', f"utf-8''{ALICE}", "alic\u00e9@example.org",
            "\u0430lice@example.org", "alice@example.org\u200b", "alice\u00a0@example.org", "alice@@example.org",
            "<b>alice</b>", "../alice", "a" * 65, f"alice@{'e' * 191}", "alice\t@example.org",
        )),
    ],
    ids=str,
)  # fmt: skip
def test_hostile_headers_are_refused_clearly(tmp_path: Path, headers: Headers) -> None:
    async def work(client: Client, site: Site) -> None:
        for path in ("/", job(7), "/matters.json", "/static/page.css", "/nothing"):
            answer = await client.get(path, headers=headers)
            text = await answer.text()
            assert answer.status == 403, path
            assert "proxy" in text.lower() or "STAGEOUT_WEB_PROXIES" in text
            assert not any(word in text for word in (*_SECRETS, SECRET, ALICE + ","))
            assert "Content-Security-Policy" in answer.headers
        given = {"id": "7.0", "verb": "retry", "run": "1", "reason": "again"}
        assert (await client.post("/request", data=given, headers=headers)).status == 403
        assert site.queue.written == []

    serve(tmp_path, work)


_TWICE = b"bob@example.org\r\nx-STAGEOUT-user: alice@example.org"


@pytest.mark.parametrize(
    "raw", [_TWICE, b"alice@example.org\x00", b"alice\xff", b"\xc3\xa9", b"alice\r\n bob", b"alice\x0b"]
)
def test_bytes_that_are_no_name_are_refused(tmp_path: Path, raw: bytes) -> None:
    async def work(client: Client, site: Site) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        head = f"GET {job(7)} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{TOKEN_HEADER}: {SECRET}\r\n"
        writer.write(head.encode() + f"{USER}: ".encode() + raw + b"\r\n\r\n")
        answer = await reader.read()
        writer.close()
        assert answer.split()[1] in (b"400", b"403")
        assert SECRET_NAME.encode() not in answer

    serve(tmp_path, work)


@pytest.mark.parametrize("extra", [[], _FORWARDED], ids=["plain", "forwarded"])
@pytest.mark.parametrize("proxies", ["192.0.2.7", "10.0.0.0/8", "::1", "2001:db8::/32"])
def test_another_address_is_no_proxy_whatever_it_sends(tmp_path: Path, proxies: str, extra: Headers) -> None:
    async def work(client: Client, site: Site) -> None:
        answer = await client.get(job(7), headers=by_proxy(ALICE, *extra))
        assert answer.status == 403
        assert "This address may not name users" in await answer.text()

    serve(tmp_path, work, proxies)


def test_the_address_of_a_network_is_a_proxy(tmp_path: Path) -> None:
    async def work(client: Client, site: Site) -> None:
        assert await names(client, 7, by_proxy(ALICE))

    serve(tmp_path, work, "192.0.2.7 127.0.0.0/8")


def test_without_proxies_a_user_is_refused(tmp_path: Path) -> None:
    async def work(client: Client, site: Site) -> None:
        answer = await client.get(job(7), headers=by_proxy(ALICE))
        assert answer.status == 403
        assert "No proxy may name users here" in await answer.text()
        assert (await client.get(job(7))).status == 200

    serve(tmp_path, work, "", STAGEOUT_WEB_PROXY_TOKEN="")


def test_where_proxies_are_listed_the_address_of_the_browser_comes_from_them_only(tmp_path: Path) -> None:
    forwarded = [("X-Forwarded-Prefix", "/pool"), ("X-Forwarded-Proto", "https")]

    async def work(client: Client, site: Site) -> None:
        for headers, is_believed in ((by_proxy(ALICE, *forwarded), True), (forwarded, False)):
            assert ('href="/pool/jobs"' in await (await client.get("/", headers=headers)).text()) is is_believed
            answer = await client.post("/sign-in", data={"token": READER}, headers=headers, allow_redirects=False)
            assert ("Secure" in answer.headers["Set-Cookie"]) is is_believed

    serve(tmp_path, work)


def test_the_header_of_the_user_can_have_another_name(tmp_path: Path) -> None:
    async def work(client: Client, site: Site) -> None:
        assert await names(client, 7, [(TOKEN_HEADER, SECRET), ("X-Remote-User", ALICE)])
        assert (await client.get("/", headers=[("X-Remote-User", ALICE)])).status == 403
        assert not await names(client, 7, by_proxy(ALICE))

    serve(tmp_path, work, STAGEOUT_WEB_USER_HEADER="X-Remote-User")


def test_refusals_are_logged_but_not_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work(client: Client, site: Site) -> None:
        for _ in range(5):
            await client.get("/", headers=[(USER, "x\u0441")])

    serve(tmp_path, work)
    assert caplog.text.count("proxy-refused") == 1
    assert "127.0.0.1" in caplog.text


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"STAGEOUT_WEB_PROXIES": "127.0.0.1"}, "set both"),
        ({"STAGEOUT_WEB_PROXIES": "proxy.example.org"}, "set both"),
        ({"STAGEOUT_WEB_PROXY_TOKEN": "proxy"}, "set both"),
        ({"STAGEOUT_WEB_PROXIES": "proxy.example.org", "STAGEOUT_WEB_PROXY_TOKEN": "proxy"}, "write addresses"),
        ({"STAGEOUT_WEB_PROXIES": "10.0.0.1/8", "STAGEOUT_WEB_PROXY_TOKEN": "proxy"}, "write addresses"),
        ({"STAGEOUT_WEB_USER_HEADER": "X User"}, "name of a header"),
        ({"STAGEOUT_WEB_USER_HEADER": "X_User"}, "name of a header"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(tmp_path: Path, given: dict[str, str], problem: str) -> None:
    (tmp_path / "proxy").write_text(f"nginx {SECRET}\n")
    (tmp_path / "proxy").chmod(0o600)
    found = {name: str(tmp_path / value) if value == "proxy" else value for name, value in given.items()}
    with pytest.raises(ConfigError, match=problem):
        proxies_of(mapping_settings(found))
