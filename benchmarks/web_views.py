"""Times of the web page's views with many outputs, and of a small answer while others ask for long lists.

The page has the reports of a collector that is played: no pool is needed, unlike in web_page.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web
from common import Figure, main, percentile
from scale.web_program import sandbox

from stageout_web.readers import Readers
from stageout_web.server import Server
from tests.unit.web_site import Site, ad_of

_VIEWS = (
    "/", "/jobs", "/jobs?sort=-left", "/jobs?sort=reason", "/jobs?q=user7", "/jobs.json?sort=-job&rows=1000",
    "/destinations", "/owners", "/nodes", "/nodes?sort=-at_risk", "/routers", "/policy", "/history", "/grid.json",
)  # fmt: skip
_EACH, _ROUNDS, _READERS = 10, 5, 4


def measure(quick: bool) -> list[Figure]:
    """Ask for each view after a reading of the pool, when nothing of it is kept."""
    outputs = 10_000 if quick else 100_000
    with tempfile.TemporaryDirectory(prefix="stageout-web-") as name, _page(Path(name), outputs) as (url, tick):
        views = []
        for view in _VIEWS:
            times: list[float] = []
            for _ in range(_ROUNDS):
                tick()
                times.append(_get_s(url + view))
            views.append(Figure(f"{outputs:,} outputs: {view}", 1000 * percentile(times, 50), "ms", goal=2000.0))
        alone = [_get_s(f"{url}/health") for _ in range(50)]
        beside = _beside(url)
    return [
        *views,
        Figure("/health alone, 95 %", 1000 * percentile(alone, 95), "ms"),
        Figure(f"/health beside {_READERS} long lists, 95 %", 1000 * percentile(beside, 95), "ms", goal=500.0),
    ]  # fmt: skip


def _beside(url: str) -> list[float]:
    """Return times of a small answer while readers ask for lists that nobody else asks for."""
    stop = threading.Event()

    def read(number: int) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            _get_s(f"{url}/jobs?sort=reason&q=user&turn={number}.{turn}")

    readers = [threading.Thread(target=read, args=(number,)) for number in range(_READERS)]
    for one in readers:
        one.start()
    try:
        return [_get_s(f"{url}/health") for _ in range(50)]
    finally:
        stop.set()
        for one in readers:
            one.join()


def _get_s(url: str) -> float:
    begin_s = time.monotonic()
    with urllib.request.urlopen(url, timeout=120) as answer:
        answer.read()
    return time.monotonic() - begin_s


@contextmanager
def _page(folder: Path, outputs: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Serve the page from a thread. Give its address, and a function after which nothing is kept."""
    site = Site(folder)
    site.ring.close()  # the thread opens it for itself
    for node in range(outputs // _EACH):
        site.collector.put(ad_of(node, *(sandbox(node * _EACH + one, 1) for one in range(_EACH))))
    loop, ready = asyncio.new_event_loop(), threading.Event()
    server = Server(site.state, Readers(None))
    runner = web.AppRunner(server.application(), access_log=None)

    async def begin() -> None:
        await site.tick()
        gc.collect()
        gc.freeze()  # as the daemon does after its first reading
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ready.set()

    def run() -> None:
        loop.run_until_complete(begin())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", lambda: loop.call_soon_threadsafe(server.tick)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        site.ring.close()


if __name__ == "__main__":
    sys.exit(main("web_views", measure))
