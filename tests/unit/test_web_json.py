"""JSON of the web page against its documentation, health, HEAD, and small answers beside slow ones."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path

import pytest

from stageout_web.server import LISTINGS, Server
from stageout_web.views import jobs
from stageout_web.work import Busy, Work
from tests.unit.test_web_http import PAGES, Client, serve
from tests.unit.web_site import SECRET_NAME, SECRET_PATH, SECRET_WORDS, ad_of, sandbox

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/administrator/web-json.md"


def documented() -> dict[str, list[str]]:
    """Return the fields in the table of each list."""
    found: dict[str, list[str]] = {}
    for part in PAGE.read_text().split("\n## ")[1:]:
        title, _, text = part.partition("\n")
        if title.endswith(".json"):
            cells = re.findall(r"^\| (`[^|]*`) \|", text, re.M)
            found[title[:-5]] = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    return found


def test_the_documentation_has_the_fields_of_each_list(tmp_path: Path) -> None:
    async def work(client: Client, server: Server) -> None:
        known = documented()
        assert set(known) == set(LISTINGS)
        for name, fields in known.items():
            found = await (await client.get(f"/{name}.json")).json()
            assert set(found) == {"schema", "at", "total", "page", "pages", "rows"}
            assert found["total"] >= len(found["rows"]) > 0, name
            assert sorted(found["rows"][0]) == sorted(fields), name
            for field in fields:
                assert (await client.get(f"/{name}.json?sort=-{field}")).status == 200
            assert not [word for word in (SECRET_NAME, SECRET_PATH, SECRET_WORDS) if word in str(found)]
        health = await (await client.get("/health")).json()
        assert all(f"`{field}`" in PAGE.read_text() for field in health)

    serve(tmp_path, work)


def test_the_rows_are_those_of_the_view(tmp_path: Path) -> None:
    async def work(client: Client, server: Server) -> None:
        for query in ("", "?group=trouble", "?sort=-job", "?q=bob", "?sort=state&page=2&rows=2"):
            found = await (await client.get(f"/jobs.json{query}")).json()
            text = await (await client.get(f"/jobs{query}")).text()
            assert [row["job"] for row in found["rows"]] == re.findall(r'<th scope="row"><a[^>]*>([^<]*)</a>', text)
        assert (found["total"], found["page"], found["pages"]) == (4, 2, 2)

    serve(tmp_path, work)


def test_head_is_answered_as_get_without_a_body(tmp_path: Path) -> None:
    async def work(client: Client, server: Server) -> None:
        for path in [*PAGES, "/health", "/jobs.json", "/matters.json", "/series.json", "/static/page.css"]:
            answer, got = await client.head(path), await client.get(path)
            assert (answer.status, answer.content_type) == (200, got.content_type), path
            assert await answer.read() == b""
            assert answer.headers["Content-Length"] == got.headers["Content-Length"]
            assert "Content-Security-Policy" in answer.headers
        assert (await client.head("/nothing")).status == 404
        assert (await client.head("/events")).status == 405

    serve(tmp_path, work)


def test_health_tells_of_old_figures(tmp_path: Path) -> None:
    async def work(client: Client, server: Server) -> None:
        state = server._state
        answer = await client.get("/health")
        assert (answer.status, (await answer.json())["healthy"]) == (200, True)
        for updated_at, problems in ((state.updated_at - 1000, {"collector": "no route"}), (0.0, {})):
            state.updated_at, state.problems = updated_at, problems
            answer = await client.get("/health")
            found = await answer.json()
            assert (answer.status, found["healthy"], found["problems"]) == (503, False, list(problems))
            assert "no route" not in await answer.text()

    serve(tmp_path, work)


def test_a_slow_list_holds_up_no_other_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, kept = threading.Event(), jobs.listing

    def slow(*given: object) -> object:
        if given[2] == {"q": "slow"}:
            assert go.wait(30)
        return kept(*given)  # type: ignore[arg-type]

    async def work(client: Client, server: Server) -> None:
        monkeypatch.setattr("stageout_web.views.jobs.listing", slow)
        waiting = [asyncio.ensure_future(client.get("/jobs?q=slow")) for _ in range(3)]
        for path in ("/health", "/matters.json", "/jobs", "/nodes", "/jobs?q=other", "/series.json", "/nodes.json"):
            assert (await asyncio.wait_for(client.get(path), 20)).status == 200, path
        assert not any(one.done() for one in waiting)
        waiting.pop().cancel()
        go.set()
        for one in waiting:
            assert (await one).status == 200

    try:
        serve(tmp_path, work, ads=(ad_of(7, sandbox(70)),))
    finally:
        go.set()


def test_equal_questions_are_worked_on_once_and_too_many_are_refused() -> None:
    go, made = threading.Event(), list[int]()

    def make() -> int:
        made.append(1)
        assert go.wait(30)
        return 7

    async def all_of_it() -> None:
        work = Work(threads=1, most=2)
        equal = [asyncio.ensure_future(work.do("a", make)) for _ in range(50)]
        other = asyncio.ensure_future(work.do("b", lambda: 8))
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await work.do("c", lambda: 9)
        equal.pop().cancel()
        go.set()
        assert [await one for one in equal] == [7] * 49
        assert (await other, made) == (8, [1])
        with pytest.raises(ZeroDivisionError):
            await work.do("d", lambda: 1 // 0)
        assert await work.do("c", lambda: 9) == 9
        work.close()

    asyncio.run(all_of_it())


def test_too_many_readers_get_a_503(tmp_path: Path) -> None:
    async def work(client: Client, server: Server) -> None:
        server._work.close()
        server._work = Work(most=0)
        answer = await client.get("/jobs")
        assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
        assert (await client.get("/health")).status == 200

    serve(tmp_path, work)
