"""Scripted HTTP and FTP servers in one thread: each has a port, files in memory, and a fault at one of its steps."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Union
from urllib.parse import unquote, urlsplit

Header = tuple[str, Union[str, bytes]]
_ENDLESS_PIECE = b"never ending " * 80
_ENDLESS_PAUSE_S = 0.02
#: A fault that lasts ends then, with the connection: long after a client should have lost its patience.
_PATIENCE_S = 25.0


@dataclass
class Request:
    """One request; ``headers`` with names in lower case, ``path`` decoded and without its query."""

    method: str
    target: str
    path: str
    headers: dict[str, str]
    body: bytes = b""


@dataclass
class Answer:
    """The answer to a request.

    :param how: ``whole``; or ``hang`` (nothing comes), ``stall`` (silence behind the head), ``endless``,
        ``endless-head``, ``short`` (more is announced than comes), ``long`` (more comes than is announced), ``half``
        (ends in the middle of the body), ``reset`` (the connection ends), ``garbage`` (no HTTP).
    """

    status: int
    headers: list[Header] = field(default_factory=list)
    body: bytes = b""
    how: str = "whole"


#: Changes the answer at a step: gets the door, the request, and the honest answer as a function.
Fault = Callable[["Door", Request, Callable[[], Answer]], Answer]


class Door:
    """One server.

    :ivar files: path without the first slash -> content. :ivar folders: directories that exist, "" for the top.
    :ivar steps: all steps that were made, oldest first. :ivar taken_bytes: of all bodies of uploads.
    :ivar fired: how many times the fault was given. :ivar unknown: requests that are no known step.
    """

    def __init__(self, step_of: Callable[[Door, Request], str], answer: Callable[[Door, Request], Answer]) -> None:
        self.files: dict[str, bytes] = {}
        self.folders: set[str] = {""}
        self.steps: list[str] = []
        self.requests: list[Request] = []
        self.taken_bytes = 0
        self.fired = 0
        self.port = 0
        self.stored = False  # an upload has ended
        self.faults: dict[str, Fault] = {}
        self.extra: Fault | None = None  # for each step that is not in ``plain``
        self.plain: frozenset[str] = frozenset()
        self.most_fires: int | None = None
        self._step_of = step_of
        self._answer = answer

    def fault(self, step: str) -> Fault | None:
        """Return the fault for a step that is being made, and count it."""
        found = self.faults.get(step)
        if found is None and self.extra is not None and step not in self.plain:
            found = self.extra
        if found is None or (self.most_fires is not None and self.fired >= self.most_fires):
            return None
        self.fired += 1
        return found

    def serve(self, request: Request) -> Answer:
        """Answer one request of HTTP."""
        step = self._step_of(self, request)
        self.steps.append(step)
        self.requests.append(request)
        if request.method == "PUT":
            self.taken_bytes += len(request.body)
        fault = self.fault(step)
        return fault(self, request, lambda: self._answer(self, request)) if fault else self._answer(self, request)


Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Hall:
    """The thread in which all doors are served.

    >>> with Hall() as hall:                                                     # doctest: +SKIP
    ...     hall.open(door)
    """

    def __enter__(self) -> Hall:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._servers: list[asyncio.AbstractServer] = []
        self._talks: set[asyncio.Task[None]] = set()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def open(self, door: Door) -> int:
        """Serve a door by HTTP; returns its port."""
        door.port = self.listen(lambda reader, writer: _talk_http(door, reader, writer))
        return door.port

    def listen(self, talk: Talk) -> int:
        """Serve every connection to a new port with ``talk``."""
        return asyncio.run_coroutine_threadsafe(self._listen(talk), self._loop).result(30)

    async def _listen(self, talk: Talk) -> int:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._talks.add(task)
            with contextlib.suppress(
                OSError, asyncio.IncompleteReadError, asyncio.CancelledError, asyncio.TimeoutError, ValueError
            ):
                await talk(reader, writer)
            self._talks.discard(task)
            with contextlib.suppress(Exception):
                writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        talks = list(self._talks)
        for talk in talks:
            talk.cancel()
        await asyncio.gather(*talks, return_exceptions=True)


async def _talk_http(door: Door, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        first = await reader.readline()
        if not first:
            return
        method, target, _ = first.decode("latin-1").split(" ", 2)
        headers: dict[str, str] = {}
        while (line := await reader.readline()) not in (b"\r\n", b"\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(int(headers.get("content-length") or 0))
        path = unquote(urlsplit(target).path).lstrip("/")
        request = Request(method, target, path, headers, body)
        if not await _send(door.serve(request), method, writer, reader):
            return


async def _send(answer: Answer, method: str, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> bool:
    """Give an answer. Returns whether the connection goes on."""
    how = answer.how
    if how == "reset":
        writer.transport.abort()
        return False
    if how == "garbage":
        writer.write(b"\x00\x01 this is no answer\r\n\r\n")
        return False
    if how != "hang":
        writer.write(_head(answer, method))
    if how == "endless-head":
        return await _endless(writer, b"X-More: " + _ENDLESS_PIECE + b"\r\n")
    if how == "endless":
        return await _endless(writer, b"%x\r\n%s\r\n" % (len(_ENDLESS_PIECE), _ENDLESS_PIECE))
    if how in ("hang", "stall"):
        return await _silence(reader)
    if how == "half":
        writer.write(answer.body[: len(answer.body) // 2])
    elif method != "HEAD" or how == "long":
        writer.write(answer.body)
        writer.write(b"more than was announced" if how == "long" else b"")
    await writer.drain()
    return how == "whole"


def _head(answer: Answer, method: str) -> bytes:
    lines = [f"HTTP/1.1 {answer.status} Status".encode()]
    names = {name.lower() for name, _ in answer.headers}
    for name, value in answer.headers:
        lines.append(name.encode() + b": " + (value if isinstance(value, bytes) else value.encode("latin-1")))
    if answer.how == "endless-head":
        return b"\r\n".join(lines) + b"\r\n"
    if answer.how == "endless" and method != "HEAD":
        lines = [line for line in lines if not line.lower().startswith(b"content-length")]
        lines.append(b"Transfer-Encoding: chunked")
    elif "content-length" not in names and answer.status not in (204, 304):
        more = 1000 if answer.how in ("short", "stall") else 0
        lines.append(b"Content-Length: %d" % (len(answer.body) + more))
    return b"\r\n".join([*lines, b"", b""])


async def _silence(reader: asyncio.StreamReader) -> bool:
    """Say nothing until the other side gives up."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(reader.read(), _PATIENCE_S)
    return False


async def _endless(writer: asyncio.StreamWriter, piece: bytes) -> bool:
    """Send until the other side gives up."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + _PATIENCE_S
    while loop.time() < end_s and not writer.transport.is_closing():
        writer.write(piece)
        await asyncio.wait_for(writer.drain(), _PATIENCE_S)
        await asyncio.sleep(_ENDLESS_PAUSE_S)
    return False


# --- FTP


#: Changes the reply to an FTP command: a text (``"550 No."``), or one of ``hang``, ``endless``, ``reset``.
FtpFault = str


class FtpDoor:
    """One FTP server; attributes as those of :class:`Door`.

    :ivar faults: step -> reply. A step is a command; those behind the end of the first upload are ``COMMAND after``.
    :ivar stores: what it keeps of an upload.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.folders: set[str] = {""}
        self.steps: list[str] = []
        self.taken_bytes = 0
        self.fired = 0
        self.port = 0
        self.stored = False
        self.faults: dict[str, FtpFault] = {}
        self.extra: FtpFault | None = None
        self.plain: frozenset[str] = frozenset()
        self.most_fires: int | None = None
        self.stores: Callable[[bytes], bytes] = lambda data: data

    def fault(self, step: str) -> FtpFault | None:
        """Return the reply that replaces the honest one, and count it."""
        found = self.faults.get(step)
        if found is None and self.extra is not None and step not in self.plain:
            found = self.extra
        if found is None or (self.most_fires is not None and self.fired >= self.most_fires):
            return None
        self.fired += 1
        return found


_HIDDEN = re.compile(r"(^|/)\.[^/]*$|\.part$")


def is_hidden(path: str) -> bool:
    """Tell whether a path is that of a temporary file."""
    return bool(_HIDDEN.search(path))


class _FtpTalk:
    """One control connection."""

    def __init__(self, hall: Hall, door: FtpDoor, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._hall, self._door = hall, door
        self._reader, self._writer = reader, writer
        self._folder = ""
        self._start = 0
        self._renamed = ""
        self._data: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] | None = None

    async def run(self) -> None:
        await self._say("220 ready")
        while line := await self._reader.readline():
            command, _, argument = line.decode("utf-8", "replace").strip().partition(" ")
            command = command.upper()
            step = self._step(command, argument)
            self._door.steps.append(step)
            fault = self._door.fault(step)
            if fault is not None:
                if not await self._misbehave(fault):
                    return
            elif command == "QUIT":
                await self._say("221 bye")
                return
            else:
                await self._obey(command, argument)

    def _step(self, command: str, argument: str) -> str:
        hidden = (
            "hidden " if command in ("STOR", "SIZE", "HASH", "MDTM", "MLST", "RETR") and is_hidden(argument) else ""
        )
        return f"{hidden}{command}{' after' if self._door.stored else ''}"

    async def _misbehave(self, fault: FtpFault) -> bool:
        if fault == "reset":
            self._writer.transport.abort()
            return False
        if fault == "hang":
            return await _silence(self._reader)
        if fault == "endless":
            return await _endless(self._writer, b"213-never ending\r\n")
        if self._data is not None and not fault.startswith(("1", "2", "3")):
            self._data.cancel()
            self._data = None
        await self._say(fault)
        return not fault.startswith("421")

    async def _say(self, *lines: str) -> None:
        self._writer.write("".join(f"{line}\r\n" for line in lines).encode())
        await self._writer.drain()

    def _path(self, argument: str) -> str:
        path = argument if argument.startswith("/") else f"{self._folder}/{argument}"
        return path.strip("/")

    async def _obey(self, command: str, argument: str) -> None:
        door, path = self._door, self._path(argument)
        simple = {
            "USER": "331 password?",
            "PASS": "230 come in",
            "TYPE": "200 done",
            "NOOP": "200 done",
            "PWD": f'257 "/{self._folder}"',
            "SYST": "215 UNIX Type: L8",
            "OPTS": "200 done",
        }
        if command in simple:
            await self._say(simple[command])
        elif command == "CWD":
            self._folder = path if path in door.folders else self._folder
            await self._say("250 done" if path in door.folders else "550 no such directory")
        elif command == "MKD":
            made = path not in door.folders and path.rpartition("/")[0] in door.folders
            door.folders.update({path} if made else ())
            await self._say(f'257 "/{path}"' if made else "550 cannot make it")
        elif command in ("EPSV", "PASV"):
            await self._passive(command)
        elif command == "REST":
            self._start = int(argument)
            await self._say("350 go on")
        elif command == "SIZE":
            await self._say(f"213 {len(door.files[path])}" if path in door.files else "550 no such file")
        elif command == "MLST":
            facts = f"250-listing\r\n type=file;size={len(door.files.get(path, b''))}; /{path}\r\n250 end"
            await self._say(facts if path in door.files else "550 no such file")
        elif command == "STOR":
            await self._store(path)
        elif command == "RETR":
            await self._retrieve(path)
        elif command == "DELE":
            await self._say("250 deleted" if door.files.pop(path, None) is not None else "550 no such file")
        elif command == "RNFR":
            self._renamed = path if path in door.files else ""
            await self._say("350 go on" if self._renamed else "550 no such file")
        elif command == "RNTO":
            if self._renamed:
                door.files[path] = door.files.pop(self._renamed)
            await self._say("250 renamed" if self._renamed else "503 RNFR first")
            self._renamed = ""
        else:
            await self._say("502 not implemented")

    async def _passive(self, command: str) -> None:
        loop = asyncio.get_running_loop()
        made: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = loop.create_future()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if not made.done():
                made.set_result((reader, writer))

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        made.add_done_callback(lambda done: server.close())
        loop.call_later(20, made.cancel)
        port = server.sockets[0].getsockname()[1]
        self._data = made
        if command == "EPSV":
            await self._say(f"229 Entering Extended Passive Mode (|||{port}|)")
        else:
            await self._say(f"227 Entering Passive Mode (127,0,0,1,{port >> 8},{port & 255})")

    async def _store(self, path: str) -> None:
        if path.rpartition("/")[0] not in self._door.folders or self._data is None:
            await self._say("553 no such directory")
            return
        await self._say("150 send")
        reader, writer = await asyncio.wait_for(self._data, 20)
        data = await reader.read(-1)
        writer.close()
        self._door.taken_bytes += len(data)
        self._door.files[path] = self._door.stores(data)
        self._door.stored = True
        self._data = None
        await self._say("226 stored")

    async def _retrieve(self, path: str) -> None:
        data = self._door.files.get(path)
        if data is None or self._data is None:
            await self._say("550 no such file")
            return
        await self._say(f"150 {len(data)} bytes")
        _, writer = await asyncio.wait_for(self._data, 20)
        writer.write(data[self._start :])
        await writer.drain()
        writer.close()
        self._start, self._data = 0, None
        await self._say("226 sent")


def open_ftp(hall: Hall, door: FtpDoor) -> int:
    """Serve a door by FTP; returns its port."""
    door.port = hall.listen(lambda reader, writer: _FtpTalk(hall, door, reader, writer).run())
    return door.port
