"""The page over HTTP: headers, readers, names that stay hidden, bounds, paths behind a proxy."""

from __future__ import annotations

import asyncio
import html
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from stageout.core.config import mapping_settings
from stageout.core.history import FILE_NAME
from stageout.core.tokens import TokenTable
from stageout.movers.results import PLUGINS_WORD
from stageout.wire.control import Tuning
from stageout.wire.custody import ServerReport
from stageout_web.format import moment, offsets, zone
from stageout_web.html import Markup, join, tag
from stageout_web.readers import Readers
from stageout_web.server import STATIC, Server
from stageout_web.service import names_of
from stageout_web.views import destinations
from tests.unit.web_site import (
    NOW,
    SECRET_NAME,
    SECRET_PATH,
    SECRET_WORDS,
    Site,
    ad_of,
    file_record,
    job_name,
    policy_ad,
    router_ad,
    sandbox,
)

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "reader-token-0123456789"
JOB = f"/job?id={job_name(1).replace('#', '%23')}"
PAGES = [
    "/", "/?span=month", "/jobs", "/jobs?group=trouble", "/jobs?q=1.0", "/jobs?state=Failed&error=72", JOB,
    "/owners", "/destinations", "/destination?server=store.example.org", "/nodes", "/nodes?condition=trouble",
    "/node?name=manager@ep1.example.org", "/sign-in",
    "/history", "/history?by=owner&first=2027-01-01", "/routers", "/router?name=gw1.example.org:9620", "/policy",
]  # fmt: skip

Client = TestClient[Any, Any]
Work = Callable[[Client, Server], Awaitable[None]]


def serve(
    folder: Path, work: Work, *, with_tokens: bool = True, ads: tuple[dict[str, Any], ...] = (), **more: Any
) -> None:
    """Run ``work`` against a server over a pool with a failed, a waiting and a moving output, and ``ads``."""
    tokens = folder / "tokens"
    tokens.write_text(f"ops {TOKEN}\n")
    tokens.chmod(0o600)
    away = ServerReport("gone.example.org", "open", SECRET_WORDS, 3, NOW - 600, NOW + 30)
    boxes = (
        sandbox(1, "Failed", code=72),
        sandbox(2, "RetryWait", code=51, next_attempt_at=NOW + 90),
        sandbox(3, "Moving"),
    )
    site = Site(folder, ad_of(1, *boxes, servers=(away,)), ad_of(2, sandbox(4, owner="<b>bob</b>")), *ads)
    site.collector.services += [router_ad("gw1.example.org:9620"), policy_ad()]
    site.queue.jobs["job9_0"] = {"ClusterId": 9, "ProcId": 0, "GlobalJobId": job_name(9), "StageOutGuard": True,
                                 "StageOutState": "Lost", "StageOutReason": SECRET_WORDS}  # fmt: skip

    site.history.append([file_record(1, StageOutState="Failed", TransferError=SECRET_WORDS, StageOutErrorCode=72)])

    async def all_of_it() -> None:
        await site.tick()
        server = Server(site.state, Readers(TokenTable(tokens) if with_tokens else None), pool="pool", **more)
        async with TestClient(TestServer(server.application())) as client:
            await work(client, server)

    try:
        asyncio.run(all_of_it())
    finally:
        site.ring.close()


def test_every_answer_has_the_headers_and_no_script_of_its_own(tmp_path: Path) -> None:
    async def work(client: Client, server: Server) -> None:
        for path in [*PAGES, "/nothing", "/grid.json", "/series.json", "/static/page.css", "/static/none.css"]:
            answer = await client.get(path)
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy, path
            assert "unsafe" not in policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Referrer-Policy"] == "same-origin"
            if answer.content_type == "text/html":
                text = await answer.text()
                assert not re.search(r"<script[^>]*>[^<]|<style| style=| on\w+=|javascript:", text), path
                assert not re.search(r"(?:src|href|action)=\"(?:https?:)?//", text), path
                assert answer.headers["Cache-Control"] == "no-store"

    serve(tmp_path, work)


@pytest.mark.parametrize("path", [*PAGES, "/job?id=9.0", "/grid.json", "/series.json", "/events", "/history.csv"])
def test_names_and_urls_need_a_token(tmp_path: Path, path: str) -> None:
    async def work(client: Client, server: Server) -> None:
        answer = await client.get(path)
        assert answer.status == 200, path
        text = await _some(answer)
        assert not [word for word in (SECRET_NAME, SECRET_PATH, SECRET_WORDS) if word in text]

    serve(tmp_path, work)


async def _some(answer: Any) -> str:
    """Return the whole answer, or the first event of a stream."""
    if answer.content_type == "text/event-stream":
        return (await answer.content.readuntil(b"\n\n")).decode()
    return str(await answer.text())


def test_a_token_shows_names_by_header_and_by_cookie(tmp_path: Path) -> None:
    async def work(client: Client, server: Server) -> None:
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        text = await (await client.get(JOB, headers=bearer)).text()
        assert all(word in text for word in (SECRET_NAME, SECRET_PATH, SECRET_WORDS))
        assert SECRET_NAME not in await (await client.get(JOB)).text(), "a page of one reader is none for another"
        wrong = await client.post("/sign-in", data={"token": "wrong-token-0123456789"})
        assert wrong.status == 403
        assert "not valid" in await wrong.text()
        good = await client.post("/sign-in", data={"token": TOKEN}, allow_redirects=False)
        cookie = good.headers["Set-Cookie"]
        assert good.status == 303
        assert all(word in cookie for word in ("HttpOnly", "SameSite=Strict", "Path=/"))
        assert TOKEN not in cookie
        assert SECRET_NAME in await (await client.get(JOB)).text()
        await client.post("/sign-out")
        assert SECRET_NAME not in await (await client.get(JOB)).text()

    serve(tmp_path, work)


def test_a_session_ends_with_its_token(tmp_path: Path) -> None:
    async def work(client: Client, server: Server) -> None:
        await client.post("/sign-in", data={"token": TOKEN})
        assert SECRET_NAME in await (await client.get(JOB)).text()
        tokens = tmp_path / "tokens"
        for token, is_shown in (("other-token-9876543210", False), (TOKEN, True)):
            tokens.write_text(f"renamed {token}\n")
            server.readers.tokens = TokenTable(tokens)
            assert (SECRET_NAME in await (await client.get(JOB)).text()) is is_shown

    serve(tmp_path, work)


def test_free_text_of_a_plugin_needs_a_token(tmp_path: Path) -> None:
    box = sandbox(70, "Moving")
    texts = (("size", "curl_plugin"), (PLUGINS_WORD, ""), ("md5 of /hidden/file", "/hidden/plugin"))
    files = tuple(replace(box.files[0], verified=verified, plugin=plugin) for verified, plugin in texts)
    path = f"/job?id={job_name(70).replace('#', '%23')}"

    async def work(client: Client, server: Server) -> None:
        text = await (await client.get(path)).text()
        assert "verified: size" in text
        assert "verified: plugin&#x27;s word" in text
        assert "curl_plugin" in text
        assert "hidden" not in text
        shown = await (await client.get(path, headers={"Authorization": f"Bearer {TOKEN}"})).text()
        assert "md5 of /hidden/file" in shown
        assert "/hidden/plugin" in shown

    serve(tmp_path, work, ads=(ad_of(7, replace(box, files=files)),))


_PAGE = ("Host", "page.example.org:9622")
_HTTPS = ("X-Forwarded-Proto", "https")


def _origin(text: str) -> tuple[str, str]:
    return "Origin", text


@pytest.mark.parametrize(
    ("headers", "is_own"),
    [
        ([_PAGE], True),  # a program
        ([_PAGE, ("Sec-Fetch-Site", "same-origin")], True),
        ([_PAGE, ("Sec-Fetch-Site", "none")], True),
        ([_PAGE, ("Sec-Fetch-Site", "cross-site")], False),
        ([_PAGE, ("Sec-Fetch-Site", "same-site")], False),
        ([_PAGE, ("Sec-Fetch-Site", "")], False),
        ([_PAGE, ("Sec-Fetch-Site", "same-origin"), ("Sec-Fetch-Site", "cross-site")], False),
        ([_PAGE, _origin("http://page.example.org:9622"), ("Sec-Fetch-Site", "cross-site")], False),
        # A proxy may give the page another name. The browser compares it with its own address.
        ([_PAGE, _origin("https://other.example.org"), ("Sec-Fetch-Site", "same-origin")], True),
        # Browsers without Sec-Fetch-Site: pages over http.
        ([_PAGE, _origin("http://page.example.org:9622")], True),
        ([_PAGE, _origin("http://PAGE.example.org:9622")], True),
        ([_PAGE, _origin("https://page.example.org:9622")], False),
        ([_PAGE, _origin("http://page.example.org")], False),
        ([_PAGE, _origin("http://page.example.org:80")], False),
        ([_PAGE, _origin("http://evil.example.com:9622")], False),
        ([_PAGE, _origin("http://page.example.org:9622.evil.com")], False),
        ([_PAGE, _origin("http://page.example.org:9622@evil.com")], False),
        ([_PAGE, _origin("http://page.example.org:9622/")], False),
        ([_PAGE, _origin("http://localhost:9622")], False),
        ([_PAGE, _origin("page.example.org:9622")], False),
        ([_PAGE, _origin("file://page.example.org:9622")], False),
        ([_PAGE, _origin("null")], False),
        ([_PAGE, _origin("")], False),
        ([_PAGE, _origin("http://page.example.org:9622"), _origin("http://evil.example.com")], False),
        ([_PAGE, _HTTPS, _origin("https://page.example.org:9622")], True),
        ([_PAGE, _HTTPS, _origin("http://page.example.org:9622")], False),
        ([("Host", "page.example.org"), _HTTPS, _origin("https://page.example.org")], True),
        ([("Host", "page.example.org:443"), _HTTPS, _origin("https://page.example.org")], True),
        ([("Host", "page.example.org"), _origin("http://page.example.org:80")], True),
        ([("Host", "[::1]:9622"), _origin("http://[::1]:9622")], True),
        ([("Host", "[::1]:9622"), _origin("http://[::2]:9622")], False),
    ],
)
def test_a_form_of_another_site_is_refused(tmp_path: Path, headers: list[tuple[str, str]], is_own: bool) -> None:
    async def work(client: Client, server: Server) -> None:
        for path in ("/sign-in", "/sign-out"):
            answer = await client.post(path, data={"token": TOKEN}, headers=headers, allow_redirects=False)
            assert answer.status == (303 if is_own else 403)
            assert ("Set-Cookie" in answer.headers) is is_own

    serve(tmp_path, work, names=("page.example.org",))


def test_without_tokens_nobody_signs_in(tmp_path: Path) -> None:
    async def work(client: Client, server: Server) -> None:
        assert "sign-in" not in await (await client.get(JOB)).text()
        assert (await client.post("/sign-in", data={"token": TOKEN})).status == 403

    serve(tmp_path, work, with_tokens=False)


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "POST"])
def test_the_page_only_reads(tmp_path: Path, method: str) -> None:
    async def work(client: Client, server: Server) -> None:
        for path in PAGES:
            if not (method == "POST" and path == "/sign-in"):
                assert (await client.request(method, path)).status == 405

    serve(tmp_path, work)


def test_links_stay_below_the_path_of_a_proxy(tmp_path: Path) -> None:
    async def check(client: Client, path: str, headers: dict[str, str]) -> None:
        text = await (await client.get(path, headers=headers)).text()
        links = re.findall(r"(?:href|src|action|data-\w+)=\"(/[^\"]*)\"", text)
        assert links
        assert all(link.startswith("/pool/page/") for link in links), links

    async def by_knob(client: Client, server: Server) -> None:
        for prefix in ("", "/pool/page"):
            for path in PAGES:
                await check(client, prefix + path, {})

    async def by_header(client: Client, server: Server) -> None:
        await check(client, "/", {"X-Forwarded-Prefix": "/pool/page/"})
        text = await (await client.get("/", headers={"X-Forwarded-Prefix": '/"><script>'})).text()
        assert "<script>" not in text
        https = {"X-Forwarded-Proto": "https", "X-Forwarded-Prefix": "/pool"}
        answer = await client.post("/sign-in", data={"token": TOKEN}, headers=https, allow_redirects=False)
        assert "Secure" in answer.headers["Set-Cookie"]
        assert "Path=/pool/" in answer.headers["Set-Cookie"]
        assert answer.headers["Location"] == "/pool/"

    serve(tmp_path, by_knob, base="/pool/page")
    (tmp_path / "ring.sqlite").unlink()
    (tmp_path / FILE_NAME).unlink()
    serve(tmp_path, by_header)


def test_streams_are_bounded_and_end_with_the_daemon(tmp_path: Path) -> None:
    async def work(client: Client, server: Server) -> None:
        first, second = await client.get("/events"), await client.get("/events")
        third = await client.get("/events")
        assert third.status == 503
        assert third.headers["Retry-After"] == "60"
        second.close()
        begun = await first.content.readuntil(b"\n\n")
        assert json.loads(begun.decode().partition("data: ")[2])["figures"]["moving"] == 1
        server.tick()
        assert b"event: tick" in await first.content.readuntil(b"\n\n")
        server.close()
        assert await first.content.read() == b""

    serve(tmp_path, work, most_streams=2)


def test_a_page_before_the_first_reading_says_so(tmp_path: Path) -> None:
    async def work(client: Client, server: Server) -> None:
        assert "for the first time" not in await (await client.get("/")).text()
        server.tick()
        server._state.updated_at = 0.0
        assert "for the first time" in await (await client.get("/")).text()

    serve(tmp_path, work)


def test_text_from_elsewhere_is_escaped(tmp_path: Path) -> None:
    async def work(client: Client, server: Server) -> None:
        text = await (await client.get("/jobs")).text()
        assert "&lt;b&gt;bob" in text
        assert "<b>bob" not in text
        found = await (await client.get("/jobs?q=%22%3E%3Cimg%20src=x%3E")).text()
        assert "<img" not in found

    serve(tmp_path, work)


def test_the_reason_of_a_failure_is_two_clicks_away(tmp_path: Path) -> None:
    async def follow(client: Client, text: str, pattern: str) -> str:
        found = re.search(rf'<a href="([^"]*)">[^<]*{pattern}[^<]*</a>', text)
        assert found, pattern
        return str(await (await client.get(html.unescape(found[1]))).text())

    async def work(client: Client, server: Server) -> None:
        start = await (await client.get("/")).text()
        listed = await follow(client, start, "Your quota")
        assert listed.count('scope="row"') == 1
        text = await follow(client, listed, r"1\.0")
        assert "Your quota at the destination is used up." in text
        assert "stageout retry 1.0" in text

    serve(tmp_path, work)


def test_a_job_that_no_manager_reports_is_looked_up(tmp_path: Path) -> None:
    async def work(client: Client, server: Server) -> None:
        assert "/job?id=9.0" in await (await client.get("/jobs?q=9")).text()
        assert "lost" in await (await client.get("/job?id=9.0")).text()
        for name in ("77.0", "nonsense", "1" * 400, "-1.0", ""):
            assert (await client.get("/job", params={"id": name})).status == 404

    serve(tmp_path, work)


def test_wrong_parameters_are_no_failure(tmp_path: Path) -> None:
    async def work(client: Client, server: Server) -> None:
        for path in (
            "/jobs?page=-1",
            "/jobs?page=x&error=x",
            "/?span=x",
            "/nodes?condition=x",
            "/series.json?server=x",
        ):
            assert (await client.get(path)).status == 200, path
        for path in (
            "/destination?server=none",
            "/node",
            "/router",
            "/router?name=none",
            "/static/..%2f..%2fdaemon.py",
        ):
            assert (await client.get(path)).status == 404, path

    serve(tmp_path, work)


@pytest.mark.parametrize(
    "odd",
    [
        {"accepted_at": 2**62}, {"next_attempt_at": 2**62}, {"owner": "a\ud800"}, {"job": "a\ud800#1.0#1"},
        {"group": "\ud800"}, {"reason": "\ud800"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("state", ["Failed", "Accepted"])
def test_odd_words_and_times_of_a_report_break_no_page(tmp_path: Path, odd: dict[str, Any], state: str) -> None:
    box = sandbox(70, state, **{"accepted_at": NOW - 9999, "code": 72, **odd})
    files = tuple(replace(one, name="out\udcff.root") for one in box.files)

    async def work(client: Client, server: Server) -> None:
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        job = f"/job?id={job_name(70).replace('#', '%23')}"
        for path in (*PAGES, "/grid.json", "/series.json", "/node?name=manager@ep7.example.org", job):
            answer = await client.get(path, headers=bearer)
            assert answer.status in ((200, 404) if path == job else (200,)), path

    serve(tmp_path, work, ads=(ad_of(7, replace(box, files=files)),))


def test_attempts_that_do_not_count_are_not_shown_against_the_limit(tmp_path: Path) -> None:
    box = sandbox(70, "RetryWait", code=72)
    files = tuple(replace(one, attempts=23, excused=20) for one in box.files)

    async def work(client: Client, server: Server) -> None:
        answer = await client.get(f"/job?id={job_name(70).replace('#', '%23')}")
        assert re.search(r"<td[^>]*>3 of 20</td>", await answer.text())

    serve(tmp_path, work, ads=(ad_of(7, replace(box, files=files)),))


def test_a_page_that_fails_has_the_headers_and_a_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(client: Client, server: Server) -> None:
        monkeypatch.setattr("stageout_web.views.listing.Listing.table", lambda *_: 1 // 0)
        answer = await client.get("/owners")
        assert answer.status == 500
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "ZeroDivisionError" not in await answer.text()

    serve(tmp_path, work)
    assert "request-failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_the_charts_are_empty_while_the_history_cannot_be_read(tmp_path: Path) -> None:
    async def work(client: Client, server: Server) -> None:
        server._state.ring._db.execute("DROP TABLE fine")
        found = await (await client.get("/series.json")).json()
        assert found["values"] == [[] for _ in found["names"]]

    serve(tmp_path, work)


def test_data_are_made_once_for_all_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(client: Client, server: Server) -> None:
        asked: list[int] = []
        series = server._state.ring.series

        def counted(names: Iterable[str], now: int, span_s: int) -> list[list[float | None]]:
            asked.append(span_s)
            return series(names, now, span_s)

        monkeypatch.setattr(server._state.ring, "series", counted)
        for _ in range(3):
            for span in ("hour", "month"):
                found = await (await client.get(f"/series.json?span={span}")).json()
                assert len(found["names"]) == len(found["values"])
            await client.get("/grid.json")
        assert asked == [3600, 30 * 86400]
        server.tick()
        for span in ("hour", "month"):
            await client.get(f"/series.json?span={span}")
        assert asked == [3600, 30 * 86400, 3600], "a month changes every five minutes"

    serve(tmp_path, work)


def test_a_page_is_made_once_for_readers_who_see_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(client: Client, server: Server) -> None:
        made: list[str] = []
        do = server._work.do

        async def counted(key: Any, work: Callable[[], Any]) -> Any:
            made.append(key[1])
            return await do(key, work)

        monkeypatch.setattr(server._work, "do", counted)
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        for headers in ({}, {}, bearer, bearer):
            for path in ("/owners", "/nodes"):
                assert (await client.get(path, headers=headers)).status == 200
        assert made == ["/owners", "/nodes"] * 2, "once without names and once with them"
        server.tick()
        await client.get("/owners")
        assert made[4:] == ["/owners"]
        monkeypatch.setattr("stageout_web.server._PAGES_KEPT", len(server._kept))
        for _ in range(2):
            await client.get("/nodes")
        assert made[5:] == ["/nodes", "/nodes"], "there is no room for more"

    serve(tmp_path, work)


def test_a_page_names_its_time_zone_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.fullmatch(r"2027-01-1\d \d\d:\d\d:\d\d", moment(NOW))
    assert moment(2**62) == moment(0) == ""
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()

    async def work(client: Client, server: Server) -> None:
        for path in PAGES:
            text = await (await client.get(path)).text()
            assert text.count("IST") == 1, path
            assert "All times: IST (UTC+05:30)" in text
            assert "UTC" not in text.replace("UTC+05:30", "")

    try:
        serve(tmp_path, work)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_the_charts_know_when_the_offset_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Zurich")
    time.tzset()
    change = 1_774_746_000  # 2026-03-29 01:00 UTC
    try:
        assert offsets(change - 20 * 86400, change - 1) == [(change - 20 * 86400, 3600)]
        assert offsets(change - 20 * 86400, change + 9) == [(change - 20 * 86400, 3600), (change, 7200)]
        assert offsets(change, change + 86400) == [(change, 7200)]
        assert (zone(change - 1), zone(change)) == ("CET (UTC+01:00)", "CEST (UTC+02:00)")
    finally:
        monkeypatch.undo()
        time.tzset()


def test_elements_escape_all_but_markup() -> None:
    assert tag("p", "<&>", Markup("<b>"), None, 3, title='"', hidden=True, id=None, open=False) == (
        '<p title="&quot;" hidden>&lt;&amp;&gt;<b>3</p>'
    )
    assert join(["<", tag("br")]) == "&lt;<br>"


def test_the_static_files_are_those_of_the_lock_file() -> None:
    """The library of the charts is committed as tools/web/build made it."""
    version = json.loads((ROOT / "tools/web/package.json").read_text())["dependencies"]["uplot"]
    locked = json.loads((ROOT / "tools/web/package-lock.json").read_text())["packages"]["node_modules/uplot"]
    assert locked["version"] == version
    assert locked["integrity"].startswith("sha512-")
    for name in ("uplot.js", "uplot.css"):
        assert (STATIC / name).read_text().startswith(f"/* uPlot {version}, see uplot.LICENSE */"), name
    assert "MIT" in (STATIC / "uplot.LICENSE").read_text()


def test_every_state_of_a_tuner_has_words() -> None:
    assert set(destinations.TUNING) == set(Tuning)


def test_the_history_can_be_exported_but_not_by_everybody_at_once(tmp_path: Path) -> None:
    async def work(client: Client, server: Server) -> None:
        text = await (await client.get("/history")).text()
        assert "/history.csv?first=" in text
        assert "1 day" in text
        answer = await client.get("/history.csv")
        assert answer.content_type == "text/csv"
        assert "attachment" in answer.headers["Content-Disposition"]
        assert answer.headers["Cache-Control"] == "no-store"
        assert (await answer.text()).count("\n") == 2
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        assert SECRET_NAME in await (await client.get("/history.csv", headers=bearer)).text()
        server._exports = 2
        assert (await client.get("/history.csv")).status == 503

    serve(tmp_path, work)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:9622", 200), ("127.0.0.1", 200), ("[::1]:9622", 200), ("AP.example.org:9622", 200),
        ("page.example.org", 200), ("page.example.org.", 200), ("evil.example.com", 421), ("localhost.evil.com", 421),
        ("127.0.0.1.evil.com", 421), ("[evil.com]:80", 421), ("", 421),
        ("LOCALHOST", 200), ("localhost.", 200), ("Page.Example.org.:9622", 200), ("192.0.2.7:80", 200),
        ("[2001:DB8::1]", 200), ("[::ffff:127.0.0.1]:9622", 200),
        ("[::1]evil", 421), ("[::1].evil.com", 421), ("[::1]:80evil", 421), ("[::1]:", 421), ("[::1", 421),
        ("[::1]]", 421), ("[]", 421), ("[127.0.0.1]", 421), ("[localhost]", 421), ("[::1%25lo]", 421), ("::1", 421),
        ("127.0.0.1:80evil", 421), ("127.0.0.1:", 421), ("127.0.0.1:80:80", 421), ("192.0.2.7.", 421),
        ("localhost:", 421), ("localhost:80evil", 421), ("localhost:-1", 421), ("localhost:\u0661", 421),
        ("localhost..", 421), (".localhost", 421), ("localhost.evil", 421), ("localhostevil", 421),
        ("localhost@evil", 421), ("localhost:80@evil", 421), ("evil@localhost", 421), ("localhost/evil", 421),
        ("localhost evil", 421), ("localhost,evil", 421), ("localhost#", 421), ("localhost?", 421), ("2130706433", 421),
    ],
)  # fmt: skip
def test_a_name_of_another_site_does_not_lead_to_the_page(tmp_path: Path, host: str, status: int) -> None:
    """A page of that site could read the answers (DNS rebinding)."""

    async def work(client: Client, server: Server) -> None:
        for path in ("/", "/jobs", "/series.json", "/nothing"):
            answer = await client.get(path, headers={"Host": host})
            assert answer.status == (404 if (path, status) == ("/nothing", 200) else status), path
            assert "Content-Security-Policy" in answer.headers
            if status == 421:
                assert "STAGEOUT_WEB_NAMES" in await answer.text()

    settings = mapping_settings({"STAGEOUT_WEB_NAMES": "page.example.org, other", "FULL_HOSTNAME": "ap.example.org"})
    serve(tmp_path, work, names=names_of(settings))


@pytest.mark.parametrize(
    "hosts", [["localhost", "evil.com"], ["evil.com", "localhost"], ["localhost", "localhost"], []]
)
def test_several_names_or_none_do_not_lead_to_the_page(tmp_path: Path, hosts: list[str]) -> None:
    async def work(client: Client, server: Server) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        lines = ["GET /jobs HTTP/1.1", *(f"Host: {host}" for host in hosts), "Connection: close", "", ""]
        writer.write("\r\n".join(lines).encode())
        status = (await reader.readline()).split()[1]
        writer.close()
        assert status in (b"400", b"421"), "the parser or the page refuses it"
        assert not server._is_own(hosts), "a parser that lets several pass must not matter"

    serve(tmp_path, work)
