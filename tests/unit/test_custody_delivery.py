"""The queue and its process against a terminal that does what a test says. No router runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from overlay_router.operations.delivery import Delivery
from stageout.overlay.rules.operations import Identity, Kind
from tests.unit.test_custody_http import Ask, Site


def in_loop(test: Callable[[Any], Coroutine[Any, Any, None]]) -> Callable[[Any], None]:
    """Run a test in a loop."""

    def runs(running: Running) -> None:
        asyncio.run(test(running))

    return runs


def in_loop_with_log(test: Callable[[Any, Any], Coroutine[Any, Any, None]]) -> Callable[[Any, Any], None]:
    """Run a test that reads the log in a loop."""

    def runs(running: Running, caplog: pytest.LogCaptureFixture) -> None:
        asyncio.run(test(running, caplog))

    return runs


class Terminal:
    """Answers as told. :ivar states: of operations, by number. :ivar came: requests, oldest first."""

    def __init__(self) -> None:
        self.came: list[tuple[str, str, dict[str, str], bytes]] = []
        self.answer: Callable[[str, str], tuple[int, dict[str, Any]]] = lambda method, what: _TAKES[method, what]
        self._server: ThreadingHTTPServer | None = None
        self.port = 0

    def start(self) -> None:
        terminal = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                terminal.came.append((self.command, self.path, dict(self.headers), body))
                last = self.path.rpartition("/")[2]
                status, facts = terminal.answer(self.command, last if last.isalpha() else "")
                told = json.dumps(facts).encode() if status != 204 else b""
                self.send_response(status)
                if status != 204:
                    self.send_header("Content-Length", str(len(told)))
                self.end_headers()
                self.wfile.write(told)

            do_PUT = do_GET = do_DELETE = answer

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def order(self, method: str = "PUT") -> list[str]:
        return [path.split("/")[5] for one, path, _, _ in self.came if one == method and path.count("/") == 5]


_TAKES = {
    ("PUT", ""): (201, {"state": "receiving"}),
    ("PUT", "data"): (204, {}),
    ("PUT", "manifest"): (200, {"state": "done", "etag": '"1"'}),
    ("GET", ""): (200, {"state": "done"}),
    ("DELETE", ""): (200, {"state": "cancelled"}),
}


class Running:
    """A custodian and its queue. :ivar delivery: the queue."""

    def __init__(self, site: Site, terminal: Terminal) -> None:
        self.site, self.terminal = site, terminal
        site.far = lambda name: _far(terminal)

    async def _on_disk(self, call: Callable[[], Any]) -> Any:
        return call()

    async def logs(self, caplog: pytest.LogCaptureFixture, *words: str) -> None:
        async def said() -> None:
            while not all(word in caplog.text for word in words):
                await asyncio.sleep(0.01)

        await asyncio.wait_for(said(), 20)

    async def until(self, ask: Ask, *states: str) -> None:
        async def reached() -> None:
            while self.site.state(ask) not in states:
                await asyncio.sleep(0.01)

        try:
            await asyncio.wait_for(reached(), 20)
        except asyncio.TimeoutError:
            pytest.fail(f"the operation is {self.site.state(ask)}: {self.terminal.came}")

    @contextlib.asynccontextmanager
    async def runs(self) -> AsyncIterator[None]:
        address = f"127.0.0.1:{self.terminal.port}"
        self.delivery = Delivery(self.site.custodian, self._on_disk, 4, lambda name: address)
        self.site.wake = self.delivery.look
        task = asyncio.ensure_future(self.delivery.run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def _far(terminal: Terminal) -> Any:
    from overlay_router.operations.custodian import Far

    return Far(f"127.0.0.1:{terminal.port}", "", "token", plain=True)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    site, terminal = Site(tmp_path), Terminal()
    terminal.start()
    yield Running(site, terminal)
    terminal.stop()
    site.stop()


@in_loop
async def test_a_file_is_delivered(running: Running) -> None:
    ask = running.site.take()
    async with running.runs():
        await running.until(ask, "done")
    put, data, manifest = running.terminal.came
    assert put[3] == b"jws" and put[2]["Content-Type"] == "application/jose"
    assert put[2]["Authorization"] == "Bearer token" and put[2]["Stageout-Token"] == "t"
    epoch, order = running.site.stored(ask).row.hop[1:3]
    assert put[2]["Stageout-Custodian"] == f"gw {epoch} {order} 10000"
    assert data[2]["Content-Range"] == "bytes 0-9/10" and data[3] == b"some bytes"
    assert manifest[2]["Stageout-Signature"] == "sig" and len(manifest[3]) == 32
    assert not running.site.has_bytes(ask)


@in_loop
async def test_versions_in_order_and_a_chain(running: Running) -> None:
    asks = [running.site.take(seq, path="alice/f", via=("gw2", "t")) for seq in (1, 2, 3)]
    async with running.runs():
        for ask in asks:
            await running.until(ask, "done")
    assert running.terminal.order() == []
    puts = [path for method, path, _, _ in running.terminal.came if not path.endswith(("data", "manifest"))]
    assert puts == [f"/.via/t/.stageout/v1/o/{'ab' * 16}/{seq}" for seq in (1, 2, 3)]


@in_loop_with_log
async def test_a_terminal_that_is_away(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    running.terminal.stop()
    asks = [running.site.take(seq) for seq in range(1, 7)]
    async with running.runs():
        await running.logs(caplog, "router-lost")
        running.terminal.start()
        running.delivery.reached(f"127.0.0.1:{running.terminal.port}")
        for ask in asks:
            await running.until(ask, "done")
    # An attempt that was under way may find out once more; not each operation does.
    assert caplog.text.count("router-lost") <= 2


@in_loop
async def test_refused_and_then_allowed(running: Running) -> None:
    ask, later = running.site.take(path="alice/f"), running.site.take(2, path="alice/f")
    running.terminal.answer = lambda method, what: (403, {"status": 403, "detail": "no right"})
    async with running.runs():
        await running.until(ask, "refused")
        assert running.site.stored(ask).row.reason == "no right" and running.site.has_bytes(ask)
        await running.until(later, "refused")
        running.terminal.answer = lambda method, what: _TAKES[method, what]
        await running.delivery.retry()
        await running.until(ask, "done")
        await running.until(later, "done")


@in_loop
async def test_a_terminal_with_a_new_epoch(running: Running) -> None:
    """It may have forgotten what ran: files are brought again, but not over later versions; a delete is not."""
    later, older, other = (
        running.site.take(seq, path=name) for seq, name in ((2, "alice/f"), (1, "alice/f"), (3, "alice/g"))
    )
    running.site.try_once(later, "done")
    gone = running.site.asks(4, kind=Kind.DELETE, size=None)
    running.site.begin(gone)

    def answer(method: str, what: str) -> tuple[int, dict[str, Any]]:
        if method == "PUT" and not what and "Stageout-Known-Epoch" not in running.terminal.came[-1][2]:
            return 409, {"status": 409, "reason": "ask-first", "epoch": 77}
        return _TAKES[method, what]

    running.terminal.answer = answer
    async with running.runs():
        await running.until(other, "done")
        await running.until(older, "superseded")
        await running.until(gone, "refused")
    assert {
        head["Stageout-Known-Epoch"] for _, _, head, _ in running.terminal.came if "Stageout-Known-Epoch" in head
    } == {"77"}
    assert running.site.stored(gone).row.reason == "ask-first"


@in_loop
async def test_busy_and_held(running: Running) -> None:
    ask = running.site.take()
    answers = iter([(503, {"status": 503}), (500, {}), (202, {"state": "held", "missing": [7]})])
    running.terminal.answer = lambda method, what: next(answers, _TAKES[method, what])
    async with running.runs():
        await running.until(ask, "done")
    assert running.terminal.came[-1][1].endswith("manifest")


@in_loop
async def test_blocks_that_the_terminal_finds_wrong(running: Running) -> None:
    ask = running.site.take()
    answers = iter([(422, {"blocks": [0]})])

    def answer(method: str, what: str) -> tuple[int, dict[str, Any]]:
        return next(answers, _TAKES[method, what]) if what == "manifest" else _TAKES[method, what]

    running.terminal.answer = answer
    async with running.runs():
        await running.until(ask, "done")
    assert [path.rpartition("/")[2] for _, path, _, _ in running.terminal.came[1:]] == ["data", "manifest"] * 2


@in_loop
async def test_blocks_that_are_never_right(running: Running) -> None:
    ask = running.site.take()
    running.terminal.answer = lambda method, what: (
        (422, {"blocks": [0]}) if what == "manifest" else _TAKES[method, what]
    )
    async with running.runs():
        await running.until(ask, "refused")
    assert "signed list" in running.site.stored(ask).row.reason and running.site.has_bytes(ask)


@in_loop
async def test_blocks_that_rotted_in_the_spool(running: Running) -> None:
    ask = running.site.take()
    running.site.receiving.path(ask.identity).write_bytes(b"some bites")
    async with running.runs():
        await running.until(ask, "lost")
    assert [one for one in running.terminal.came if one[1].endswith("data")] == []


@in_loop
async def test_a_cancel_overtakes_a_delivery(running: Running) -> None:
    ask, stop = running.site.take(), threading.Event()

    def answer(method: str, what: str) -> tuple[int, dict[str, Any]]:
        if what == "data":
            stop.wait(20)
        return _TAKES[method, what] if what != "manifest" else (410, {"status": 410, "state": "cancelled"})

    running.terminal.answer = answer
    async with running.runs():
        await running.until(ask, "delivering")
        assert running.site.cancel(ask) == "cancelling"
        await running.until(ask, "cancelled")
        stop.set()
        await asyncio.sleep(0.1)
    assert running.site.state(ask) == "cancelled" and not running.site.has_bytes(ask)
    assert next(body for method, _, _, body in running.terminal.came if method == "DELETE") == b"jws"


@in_loop_with_log
async def test_a_fault_in_one_operation_stops_no_other(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    bad, worse, good = (running.site.take(seq) for seq in (1, 2, 3))
    running.site.custodian._spool.file(bad.identity).write_text("{}\n")
    real = running.site.custodian.work

    def work(identity: Identity) -> Any:
        if identity == worse.identity:
            raise OverflowError("a number that no operation should have")
        return real(identity)

    running.site.custodian.work = work  # type: ignore[method-assign]
    async with running.runs():
        await running.until(good, "done")
        await running.logs(caplog, "OverflowError", "KeyError")
    assert running.site.state(bad) == running.site.state(worse) == "custody"


@in_loop_with_log
async def test_the_process_dies(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    ask, stop = running.site.take(), threading.Event()

    def answer(method: str, what: str) -> tuple[int, dict[str, Any]]:
        if what == "data" and not stop.is_set():
            stop.set()
            running.delivery._process._process.kill()  # type: ignore[union-attr]
        return _TAKES[method, what]

    running.terminal.answer = answer
    async with running.runs():
        await running.until(ask, "done")
    assert "delivery-process-died" in caplog.text


@in_loop
async def test_an_expired_operation_is_asked_about(running: Running) -> None:
    ask = running.site.take()
    running.site.now = 20_001
    async with running.runs():
        await running.until(ask, "done")
    assert [method for method, _, _, _ in running.terminal.came] == ["GET"]
