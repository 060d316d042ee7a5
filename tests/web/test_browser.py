"""The page in Chromium: accessibility, live figures, keyboard, narrow windows, and the way to a reason."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest

from stageout.wire.custody import FlowReport
from tests.polling import wait_for
from tests.unit.web_site import NOW, SECRET_NAME, SECRET_WORDS, Site, ad_of, job_name, router_ad, sandbox
from tests.web.browser import Browser, browser, missing
from tests.web.page_server import NAME, TOKEN, serve

AXE = Path(__file__).resolve().parents[2] / "tools/web/node_modules/axe-core/axe.min.js"
_FAILED = job_name(4018).replace("#", "%23")
VIEWS = {
    "now": "/", "jobs": "/jobs", "job": f"/job?id={_FAILED}", "destinations": "/destinations",
    "destination": "/destination?server=s3.example.net", "nodes": "/nodes", "owners": "/owners",
    "node": "/node?name=manager@ep5.example.org", "sign-in": "/sign-in",
    "history": "/history?by=destination", "routers": "/routers", "router": "/router?name=gw1.example.org:9620",
    "policy": "/policy",
}  # fmt: skip
_CHECK = """
const done = arguments[arguments.length - 1];
axe.run(document, {resultTypes: ["violations"]}).then((found) => done(found.violations.map(
    (one) => `${one.id}: ${one.nodes.map((node) => node.target.join(" ")).slice(0, 5).join(", ")}`)));
"""


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Browser, str, Site]]:
    """A browser and a page."""
    lacks = missing() or ("" if AXE.exists() else "axe-core (tools/web/build)")
    if lacks and not os.environ.get("CI"):
        pytest.skip(f"{lacks} is not installed")
    with serve(tmp_path_factory.mktemp("page")) as (url, site), browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened, url, site


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("width", [1200, 400])
def test_every_view_is_accessible_and_breaks_no_policy(
    window: tuple[Browser, str, Site], view: str, theme: str, width: int
) -> None:  # fmt: skip
    opened, url, _ = window
    opened.theme(theme)
    opened.size(width, 900)
    opened.open(url + VIEWS[view])
    if view in ("now", "destination"):
        wait_for(lambda: opened.run("return document.querySelectorAll('.u-wrap canvas').length") == 2, "the charts")
    opened.run(AXE.read_text())
    assert opened.run_async(_CHECK) == []
    assert [one["message"] for one in opened.messages() if one["level"] == "SEVERE"] == []


@pytest.mark.parametrize("view", VIEWS)
def test_a_phone_needs_no_sideways_scrolling(window: tuple[Browser, str, Site], view: str) -> None:
    opened, url, _ = window
    opened.size(360, 740)
    opened.open(url + VIEWS[view])
    assert opened.run("return document.documentElement.scrollWidth") <= 360


_SHIFTS = """
const observer = new PerformanceObserver(() => {});
observer.observe({ type: "layout-shift", buffered: true });
return observer.takeRecords().reduce((sum, one) => sum + one.value, 0);
"""


@pytest.mark.parametrize("width", [1200, 400])
@pytest.mark.parametrize("view", VIEWS)
def test_nothing_moves_while_a_page_loads(window: tuple[Browser, str, Site], view: str, width: int) -> None:
    opened, url, _ = window
    opened.size(width, 900)
    opened.open(url + VIEWS[view])
    if view in ("now", "destination"):
        wait_for(lambda: opened.run("return document.querySelectorAll('.u-wrap canvas').length") == 2, "the charts")
    if view == "nodes":
        wait_for(lambda: opened.run("return document.querySelector('[data-grid]').style.height") != "", "the grid")
    assert opened.run(_SHIFTS) < 0.01


def test_charts_have_the_times_of_the_page_whatever_the_browser_s_zone(window: tuple[Browser, str, Site]) -> None:
    opened, url, _ = window
    opened.size(1200, 900)
    opened.zone("Pacific/Auckland")
    try:
        opened.open(url)
        rows = "return document.querySelector('[data-table=cpu] tr:nth-child(2) th')?.textContent ?? ''"
        wait_for(lambda: opened.run(rows), "the table of the chart")
        shown, offset = opened.run(rows), opened.run("return JSON.parse(document.body.dataset.offsets)[0][1]")
        at = opened.run(
            "return fetch('/series.json').then((answer) => answer.json()).then(({values}) => values[0].slice(-1)[0])"
        )
        newest = datetime.fromisoformat(shown).replace(tzinfo=timezone.utc).timestamp() - offset
        assert abs(newest - at) < 300
    finally:
        opened.zone("")


def test_the_reason_of_a_failed_file_is_two_clicks_away(window: tuple[Browser, str, Site]) -> None:
    opened, url, _ = window
    opened.size(1200, 900)
    opened.open(url)
    opened.click(".matters a[href*='state=Failed']")
    wait_for(lambda: "/jobs" in opened.run("return location.pathname"), "the list of jobs")
    opened.click("#jobs tbody th a")
    wait_for(lambda: opened.run("return location.pathname") == "/job", "the job")
    text = opened.run("return document.querySelector('main').innerText")
    assert "stageout retry" in text
    assert "quota" in text or "may not write" in text
    assert SECRET_NAME not in text


def test_a_token_shows_names_with_the_keyboard_alone(window: tuple[Browser, str, Site]) -> None:
    opened, url, _ = window
    opened.open(f"{url}/sign-in")
    opened.run("document.getElementById('token').focus()")
    opened.press(f"{TOKEN}\ue007")
    wait_for(lambda: "Hide file names" in opened.run("return document.body.innerText"), "the session")
    opened.open(url + VIEWS["job"])
    text = opened.run("return document.querySelector('main').innerText")
    assert SECRET_NAME in text
    assert SECRET_WORDS in text
    opened.run("document.querySelector('footer button').focus()")
    opened.press("\ue007")
    wait_for(lambda: "Show file names" in opened.run("return document.body.innerText"), "the end of the session")


_FORM = """
const form = document.createElement("form");
form.method = "post";
form.action = arguments[0];
form.innerHTML = `<input name="token" value="${arguments[1]}">`;
document.documentElement.append(form);
form.submit();
"""


def test_a_form_over_http_works_for_the_page_and_for_no_other_site(window: tuple[Browser, str, Site]) -> None:
    """The browser sends no Sec-Fetch-Site there, only Origin: ``null`` for a page without an address."""
    opened, url, _ = window
    named = url.replace("127.0.0.1", NAME)
    opened.open("data:text/html,<title>another site</title>")
    opened.run(_FORM, f"{named}/sign-in", TOKEN)
    wait_for(lambda: opened.run("return location.href") == f"{named}/sign-in", "the answer to the form")
    assert "Forbidden" in opened.run("return document.body.innerText")
    opened.open(f"{named}/sign-in")
    opened.run("document.getElementById('token').focus()")
    opened.press(f"{TOKEN}\ue007")
    wait_for(lambda: "Hide file names" in opened.run("return document.body.innerText"), "the session")
    opened.run("document.querySelector('footer button').focus()")
    opened.press("\ue007")
    wait_for(lambda: "Show file names" in opened.run("return document.body.innerText"), "the end of the session")


def test_the_first_stop_of_the_keyboard_leads_to_the_content(window: tuple[Browser, str, Site]) -> None:
    opened, url, _ = window
    opened.open(url)
    opened.press("\ue004")
    assert opened.run("return document.activeElement.textContent") == "Skip to content"


def test_figures_change_without_a_new_page_and_the_focus_stays(window: tuple[Browser, str, Site]) -> None:
    opened, url, site = window
    opened.open(url)
    opened.run("window.isSame = true; document.querySelector('.cards a').focus()")
    shown = "return document.querySelectorAll('.cards .value')[1].textContent"
    before = int(opened.run(shown))
    site.collector.put(ad_of(0, sandbox(99_000, "Moving"), number=9, heard_at=NOW + 1000))
    wait_for(lambda: int(opened.run(shown)) == before + 1, "one more output moves")
    assert opened.run("return window.isSame") is True
    assert opened.run("return document.activeElement.closest('.cards') !== null")


def test_the_keyboard_leads_from_the_menu_to_a_routers_page(window: tuple[Browser, str, Site]) -> None:
    opened, url, _ = window
    opened.size(1200, 900)
    opened.open(url)
    for link, path in (("nav a[href='/routers']", "/routers"), ("#routers a[href*=gw1]", "/router")):
        opened.run(f'document.querySelector("{link}").focus()')
        opened.press("\ue007")
        wait_for(lambda path=path: opened.run("return location.pathname") == path, path)  # type: ignore[misc]
    text = opened.run("return document.querySelector('main').innerText")
    assert "Routes in use" in text
    assert SECRET_WORDS not in text


def test_a_router_that_comes_appears_in_the_open_page(window: tuple[Browser, str, Site]) -> None:
    opened, url, site = window
    opened.open(f"{url}/routers")
    opened.run("window.isSame = true")
    new = router_ad("new.example.org:9620", NOW + 1000)
    site.collector.services.append(new)
    try:
        wait_for(lambda: "new.example.org" in opened.run("return document.body.innerText"), "the router")
        assert opened.run("return window.isSame") is True
    finally:
        site.collector.services.remove(new)


def test_a_job_that_is_no_longer_reported_is_marked(window: tuple[Browser, str, Site]) -> None:
    opened, url, site = window
    site.collector.put(ad_of(900, sandbox(99_900, "Moving"), heard_at=NOW + 2000))
    page = f"{url}/job?id={job_name(99_900).replace('#', '%23')}"

    def is_shown() -> bool:
        opened.open(page)
        return bool(opened.run("return document.getElementById('job') !== null"))

    wait_for(is_shown, "the job")
    site.collector.put(ad_of(900, number=2, heard_at=NOW + 3000))
    wait_for(lambda: "no longer reported" in opened.run("return document.body.innerText"), "the mark")


def test_an_update_keeps_the_focus_on_a_copy_button(window: tuple[Browser, str, Site]) -> None:
    opened, url, _ = window
    opened.open(url + VIEWS["job"])
    opened.run("window.button = document.querySelector('.command + button'); window.button.focus()")
    opened.run("window.shown = document.getElementById('updated').textContent")
    wait_for(lambda: opened.run("return document.getElementById('updated').textContent !== window.shown"), "an update")
    assert opened.run("return document.activeElement === window.button && window.button.isConnected") is True


def test_the_stream_is_opened_again_after_a_refusal(window: tuple[Browser, str, Site]) -> None:
    """A proxy answers 502 while the daemon starts again. The browser itself gives up then."""
    opened, url, _ = window
    opened.open(url)
    found = opened.run_async(
        """
        const done = arguments[arguments.length - 1];
        const Kept = window.EventSource;
        let opened = 0;
        window.EventSource = class extends EventTarget {
          static CLOSED = 2;
          constructor() { super(); opened += 1; this.readyState = 2; setTimeout(() => this.onerror(), 0); }
          close() {}
        };
        const wait = window.setTimeout;
        window.setTimeout = (work, time) => wait(work, Math.min(time, 20));
        Object.defineProperty(document, "hidden", { value: false, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
        wait(() => { window.setTimeout = wait; window.EventSource = Kept; done(opened); }, 500);
        """
    )
    assert found >= 3


def test_a_hidden_page_has_no_stream(window: tuple[Browser, str, Site]) -> None:
    opened, url, _ = window
    opened.open(url)
    found = opened.run(
        """
        const Kept = window.EventSource, log = [];
        window.EventSource = class extends EventTarget {
          constructor() { super(); log.push("open"); }
          close() { log.push("close"); }
        };
        const show = (hidden) => {
          Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
          document.dispatchEvent(new Event("visibilitychange"));
        };
        show(true); show(false); show(true);
        window.EventSource = Kept;
        return log;
        """
    )
    assert found == ["open", "close"]


@pytest.fixture
def operator(window: tuple[Browser, str, Site]) -> Iterator[tuple[Browser, str, Site]]:
    """The browser of a reader who may change deliveries."""
    opened, url, _ = window
    opened.size(1200, 900)
    opened.open(f"{url}/sign-in")
    opened.run("document.getElementById('token').focus()")
    opened.press(f"{TOKEN}\ue007")
    wait_for(lambda: "Hide file names" in opened.run("return document.body.innerText"), "the session")
    yield window
    opened.open(url)
    opened.click("footer button")
    wait_for(lambda: "Show file names" in opened.run("return document.body.innerText"), "the end of the session")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("page", ["job", "retry", "redirect", "pause", "cancel"])
def test_requests_are_accessible(operator: tuple[Browser, str, Site], page: str, theme: str) -> None:
    opened, url, _ = operator
    opened.messages()
    opened.theme(theme)
    opened.open(url + (VIEWS["job"] if page == "job" else f"/request?id=4018.0&verb={page}"))
    opened.run(AXE.read_text())
    assert opened.run_async(_CHECK) == []
    opened.size(360, 740)
    assert opened.run("return document.documentElement.scrollWidth") <= 360
    assert [one["message"] for one in opened.messages() if one["level"] == "SEVERE"] == []


def test_a_delivery_is_redirected_by_hand(operator: tuple[Browser, str, Site]) -> None:
    opened, url, site = operator
    opened.open(url + VIEWS["job"])
    opened.click("a[href*='verb=redirect']")
    wait_for(lambda: opened.run("return location.pathname") == "/request", "the form")
    opened.run("document.getElementById('url').focus()")
    opened.press("https://other.example.org/alice/")
    opened.run("document.getElementById('reason').focus()")
    opened.press("quota is full\ue007")
    wait_for(lambda: opened.run("return location.pathname") == "/job", "the job")
    (written,) = [one for one in site.queue.written if one[0] == "4018.0"]
    assert re.fullmatch(r"redirect run=1 [0-9a-f]{8} https://other\.example\.org/alice/", written[3])
    assert written[4] == "redirect by ops: quota is full"
    text = opened.run("return document.querySelector('main').innerText")
    assert "The request 'redirect' waits for the agent and the node." in text
    assert opened.run("return document.querySelector(\"a[href*='verb=']\")") is None, "one request at a time"


def test_output_is_cancelled_after_a_confirmation_only(operator: tuple[Browser, str, Site]) -> None:
    opened, url, site = operator
    opened.open(f"{url}/request?id=4060.0&verb=cancel")
    opened.run("document.getElementById('reason').focus()")
    opened.press("nobody needs it\ue007")
    assert (
        opened.run("return location.pathname + document.querySelector(':invalid[type=checkbox]').id") == "/requestsure"
    )
    assert not [one for one in site.queue.written if one[0] == "4060.0"]
    opened.click("#sure")
    opened.click("form.request button")
    wait_for(lambda: opened.run("return location.pathname") == "/job", "the job")
    ((_, run, _, request, by),) = [one for one in site.queue.written if one[0] == "4060.0"]
    assert (run, request, by) == (1, "cancel run=1", "cancel by ops: nobody needs it")


_REQUEST = """
const form = document.createElement("form");
form.method = "post";
form.action = arguments[0] + "/request";
for (const [name, value] of Object.entries({id: "4018.0", verb: "cancel", run: "1", reason: "evil", sure: "yes"})) {
  const field = document.createElement("input");
  Object.assign(field, { name, value });
  form.append(field);
}
document.documentElement.append(form);
form.submit();
"""


def test_no_other_site_can_ask_in_a_reader_s_name(operator: tuple[Browser, str, Site]) -> None:
    opened, url, site = operator
    before = list(site.queue.written)
    opened.open("data:text/html,<title>evil</title>")
    opened.run(_REQUEST, url)
    wait_for(lambda: "Forbidden" in opened.run("return document.body.innerText"), "the refusal")
    assert site.queue.written == before
    opened.open(url)


def test_the_end_of_a_node_is_counted_down(window: tuple[Browser, str, Site]) -> None:
    opened, url, site = window
    flow = FlowReport("https://store.example.org", 1000, 1000, 0.1, files_waiting=1, bytes_waiting=10**9)

    def report(number: int, ends_in_s: int) -> None:
        more = {"flows": (flow,), "ends_in_s": ends_in_s}
        box = sandbox(99_901, bytes_left=10**9)
        site.collector.put(ad_of(901, box, number=number, heard_at=NOW + 4000 + number, more=more))

    report(1, 300)
    shown = "return document.querySelector('[role=timer]')?.textContent ?? ''"

    def begun() -> str:
        opened.open(f"{url}/node?name=manager@ep901.example.org")
        return str(opened.run(shown))

    wait_for(begun, "the node")
    before = opened.run(shown)
    assert re.fullmatch(r"in ([34] min \d\d s|5 min 00 s)", before)
    wait_for(lambda: opened.run(shown) not in (before, ""), "the next second")
    text = opened.run("return document.querySelector('main').innerText")
    assert re.search(r"Output away by then\s+probably not, 1.0 GB at risk", text)
    report(2, 1)
    wait_for(lambda: opened.run(shown) == "has ended", "the end")


def test_a_page_without_a_connection_says_so(window: tuple[Browser, str, Site]) -> None:
    """The problem of a daemon appears in the page that is open."""
    opened, url, site = window
    opened.open(url)
    site.collector.problem = "no route to host"
    try:
        wait_for(lambda: "no route to host" in opened.run("return document.body.innerText"), "the problem")
    finally:
        site.collector.problem = ""
    wait_for(lambda: "no route to host" not in opened.run("return document.body.innerText"), "the recovery")
