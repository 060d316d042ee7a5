"""The bound on connections of the page, with real sockets: idle ones, streams that nobody reads, TLS, an export."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from stageout_web.connections import Connections, listen
from stageout_web.readers import Readers
from stageout_web.server import Server
from tests.polling import until
from tests.unit.test_web_daemon import certify
from tests.unit.web_site import Site, ad_of, file_record, sandbox

_MOST = 20


class Page:
    """A page that is served, with few connections."""

    def __init__(self, server: Server, site: Site, port: int, tls: ssl.SSLContext | None) -> None:
        self.server, self.site, self.port, self._tls = server, site, port, tls
        self._opened: list[socket.socket] = []

    async def dial(self, receive_bytes: int = 0) -> socket.socket:
        """Open a connection and send nothing. :param receive_bytes: of the receive buffer; 0: as many as usual."""
        one = socket.socket()
        if receive_bytes:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        one.setblocking(False)
        self._opened.append(one)
        await asyncio.get_running_loop().sock_connect(one, ("127.0.0.1", self.port))
        return one

    async def get(self, path: str = "/owners") -> str:
        """Return the status line of an answer, on a new connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=self._tls)
        writer.write(request(path))
        line = await asyncio.wait_for(reader.readline(), 30)
        writer.close()
        return line.decode()

    def close(self) -> None:
        """Close all that was opened."""
        for one in self._opened:
            one.close()


def request(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


async def first_line(one: socket.socket, path: str) -> bytes:
    """Send a request on a connection that is open. Return the beginning of the answer."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(one, request(path))
    return await asyncio.wait_for(loop.sock_recv(one, 15), 30)


def is_closed(one: socket.socket) -> bool:
    """Tell whether the page has closed a connection."""
    try:
        while one.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True


@contextlib.asynccontextmanager
async def served(folder: Path, with_tls: bool = False) -> AsyncIterator[Page]:
    site = Site(folder, ad_of(1, sandbox(1)))
    await site.tick()
    server = Server(site.state, Readers(None), most_streams=2)
    server.connections.set_most(_MOST)
    runner = web.AppRunner(server.application(), access_log=None, shutdown_timeout=1, handler_cancellation=True)
    await runner.setup()
    context = trusting = None
    if with_tls:
        certify(folder)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        trusting = ssl.create_default_context(cafile=str(folder / "cert.pem"))
        trusting.check_hostname = False
    [listener] = await listen("127.0.0.1", 0, server.connections)
    await web.SockSite(runner, listener, ssl_context=context).start()
    page = Page(server, site, listener.getsockname()[1], trusting)
    try:
        yield page
    finally:
        page.close()
        server.close()
        await runner.cleanup()
        site.ring.close()


def run(folder: Path, work: Callable[[Page], Awaitable[None]], with_tls: bool = False) -> None:
    async def all_of_it() -> None:
        async with served(folder, with_tls) as page:
            await work(page)

    asyncio.run(asyncio.wait_for(all_of_it(), 120))


@pytest.mark.parametrize("with_tls", [False, True])
def test_idle_connections_keep_nobody_out(tmp_path: Path, with_tls: bool, caplog: pytest.LogCaptureFixture) -> None:
    """With TLS none of them begins the handshake."""

    async def work(page: Page) -> None:
        idle = [await page.dial() for _ in range(15 * _MOST)]
        assert "200" in await page.get()
        await until(lambda: sum(map(is_closed, idle)) >= len(idle) - _MOST, "all but the newest are closed")
        assert len(page.server.connections) <= _MOST
        assert not is_closed(idle[-1])

    run(tmp_path, work, with_tls)
    assert caplog.text.count("connections-limited") == 1


def test_the_longest_idle_connection_is_closed(tmp_path: Path) -> None:
    async def work(page: Page) -> None:
        old = [await page.dial() for _ in range(_MOST)]
        await until(lambda: len(page.server.connections) == _MOST, "all are accepted")
        assert b"200" in await first_line(old[0], "/owners")
        await page.dial()
        await until(lambda: is_closed(old[1]), "the longest idle one is closed")
        assert not is_closed(old[2])
        assert b"200" in await first_line(old[2], "/owners")

    run(tmp_path, work)


def test_a_request_that_never_ends_is_closed_as_an_idle_connection_is(tmp_path: Path) -> None:
    async def work(page: Page) -> None:
        slow = await page.dial()
        head = b"POST /sign-in HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000\r\n\r\ntoken="
        await asyncio.get_running_loop().sock_sendall(slow, head)
        idle = [await page.dial() for _ in range(_MOST)]
        await until(lambda: is_closed(slow) or any(map(is_closed, idle)), "one is closed")
        for _ in range(_MOST):
            await page.dial()
        await until(lambda: is_closed(slow), "the slow one is closed")

    run(tmp_path, work)


def test_streams_and_exports_in_progress_are_not_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = asyncio.Event()

    async def rows(*_: object) -> AsyncIterator[bytes]:
        yield b"begun\n"
        await hold.wait()
        yield b"ended\n"

    async def work(page: Page) -> None:
        page.site.history.append([file_record(1)])
        monkeypatch.setattr("stageout_web.server.export", rows)
        stream, export = await page.dial(), await page.dial()
        assert b"200" in await first_line(stream, "/events")
        assert b"200" in await first_line(export, "/history.csv")
        idle = [await page.dial() for _ in range(3 * _MOST)]
        await until(lambda: sum(map(is_closed, idle)) >= 2 * _MOST, "idle ones are closed")
        received = b""
        hold.set()
        while b"ended" not in received:
            part = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(export, 1 << 16), 30)
            assert part, "the export goes on"
            received += part
        assert not is_closed(stream)
        assert page.server.streams == 1

    run(tmp_path, work)


def test_a_stream_that_nobody_reads_ends(tmp_path: Path) -> None:
    async def work(page: Page) -> None:
        page.server.stalled_s = 0.3
        dead, live = await page.dial(receive_bytes=1), await page.dial()
        for one in (dead, live):
            await asyncio.get_running_loop().sock_sendall(one, request("/events"))
        await until(lambda: page.server.streams == 2, "both streams")
        page.site.state.problems = {"x" * 5000: ""}  # a large event
        waiting_bytes = []

        def one_is_left() -> bool:
            page.server.tick()
            is_closed(live)  # it reads
            waiting_bytes.extend(one.get_write_buffer_size() for one in page.server._streams)
            return page.server.streams == 1

        await until(one_is_left, "the stream that is not read ends")
        assert 0 < max(waiting_bytes) < 10_000, "no second event waits in the daemon's memory"
        assert not is_closed(live)

    run(tmp_path, work)


def test_the_oldest_stream_gives_way_to_a_new_one(tmp_path: Path) -> None:
    async def work(page: Page) -> None:
        first, second = await page.dial(), await page.dial()
        for one in (first, second):
            assert b"200" in await first_line(one, "/events")
        assert "503" in await page.get("/events")
        page.server.least_stream_s = 0.0
        third = await page.dial()
        assert b"200" in await first_line(third, "/events")
        assert page.server.streams == 2
        await until(lambda: is_closed(first), "the oldest is closed")
        assert not is_closed(second)
        assert not is_closed(third)

    run(tmp_path, work)


def test_an_address_in_use_is_named() -> None:
    async def work() -> None:
        [first] = await listen("127.0.0.1", 0, Connections(9))
        port = first.getsockname()[1]
        with contextlib.closing(first), pytest.raises(OSError, match=rf"127\.0\.0\.1:{port}: Address already in use"):
            await listen("127.0.0.1", port, Connections(9))

    asyncio.run(work())


def test_a_host_with_two_addresses_has_two_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async def both(host: str, port: int, **_: object) -> list[object]:
            two = [
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("127.0.0.1", "127.0.0.2")
            ]
            return [*two, two[0]]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", both)
        found = await listen("page.example.org", 0, Connections(9))
        assert [one.getsockname()[0] for one in found] == ["127.0.0.1", "127.0.0.2"]
        for one in found:
            one.close()

    asyncio.run(work())
