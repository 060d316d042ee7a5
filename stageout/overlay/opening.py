"""A file at a router as Python's own files are: read from any position, or written and published as a whole."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Gateway
from stageout.overlay.client import Put, put
from stageout.overlay.fetch import read
from stageout.overlay.operations import Session
from stageout.overlay.wire.messages import BLOCK_BYTES
from stageout.overlay.wire.route import Route

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


@overload
def open_file(
    gateway: Gateway, path: str, mode: Literal["rb"] = ..., *, routes: Sequence[Route] = ..., permissions: int = ...
) -> io.BufferedReader: ...


@overload
def open_file(
    gateway: Gateway, path: str, mode: Literal["wb"], *, routes: Sequence[Route] = ..., permissions: int = ...
) -> Writer: ...


def open_file(
    gateway: Gateway,
    path: str,
    mode: Literal["rb", "wb"] = "rb",
    *,
    routes: Sequence[Route] = ((),),
    permissions: int = 0o644,
) -> io.BufferedReader | Writer:
    """A published file to be read (``rb``), or a :class:`Writer` of a new one (``wb``).

    All reads get one version, that of the moment of opening, also after a lost connection. Bytes arrive while they are
    used; to seek begins a new request.

    :param path: below the router's root. :param routes: ways to the router, as of :func:`stageout.overlay.fetch.get`.
    :param permissions: of a new file. :raises TransferFailure: classified; later, CONFLICT when it was replaced.
    :raises ValueError: another mode.
    """
    if mode == "wb":
        return Writer(gateway, path, routes, permissions)
    if mode != "rb":
        raise ValueError(f"mode {mode!r}: files at routers are opened with 'rb', or with 'wb' to be written anew")
    return io.BufferedReader(_Reader(gateway, path, routes), BLOCK_BYTES)


class _Reader(io.RawIOBase):
    """Asks for all behind its position, and uses what comes as long as nobody seeks."""

    def __init__(self, gateway: Gateway, path: str, routes: Sequence[Route]) -> None:
        with Session(gateway, routes=routes) as session:
            entry = session.stat(path)
        if entry.kind != "file":
            raise TransferFailure(ErrorClass.CONFLICT, f"{path}: not a file", gateway.server)
        self._gateway, self._path, self._routes = gateway, path, routes
        self._size_bytes, self._generation = entry.size_bytes, entry.generation
        self._position, self._rest = 0, memoryview(b"")
        self._parts: Iterator[bytes] | None = None
        self._failure: TransferFailure | None = None

    def close(self) -> None:
        """Let go of the connection, of which something may still be under way."""
        self._parts, self._rest = None, memoryview(b"")
        super().close()

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Bytes from the beginning."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go on there, also after a failure. :raises ValueError: in front of the beginning."""
        position = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size_bytes}[whence] + offset
        if position < 0:
            raise ValueError(f"{position} is in front of the beginning")
        if position != self._position or self._failure is not None:
            self._failure = None
            self._position, self._parts, self._rest = position, None, memoryview(b"")
        return position

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Some bytes, at least one unless it is the end.

        :raises TransferFailure: classified; the same from then on, until somebody seeks: what was read may be lost.
        """
        if self._failure is not None:
            raise self._failure
        if self._position >= self._size_bytes:
            return 0
        if self._parts is None:
            self._parts = read(
                self._gateway, self._path, self._position, generation=self._generation, routes=self._routes
            )
        view = memoryview(buffer).cast("B")
        try:
            self._rest = self._rest or memoryview(next(self._parts, b""))
            if not self._rest:
                text = f"{self._path}: it ended before its {self._size_bytes} bytes had come"
                raise TransferFailure(ErrorClass.CONTENT_MISMATCH, text, self._gateway.server)
        except TransferFailure as failure:
            self._failure = failure
            raise
        count = min(len(view), len(self._rest))
        view[:count] = self._rest[:count]
        self._position, self._rest = self._position + count, self._rest[count:]
        return count


class Writer(io.BufferedWriter):
    """A new file, gathered on this machine's disk for temporary files, and sent when it is closed.

    After an exception in its ``with``, or when it is never closed, nothing is published.

    :ivar published: what became of it, once it is closed.
    """

    def __init__(self, gateway: Gateway, path: str, routes: Sequence[Route], permissions: int) -> None:
        handle, name = tempfile.mkstemp(prefix="stageout-")
        super().__init__(io.FileIO(handle, "wb"), BLOCK_BYTES)
        self._local, self._gateway, self._path = Path(name), gateway, path
        self._routes, self._permissions = routes, permissions
        self._is_wanted = True
        self.published: Put | None = None

    def close(self) -> None:
        """Send it: on return it is at the router under its name, on its disk. :raises TransferFailure: classified."""
        if self.closed:
            return
        try:
            super().close()
            if self._is_wanted:
                self.published = put(
                    self._gateway, self._local, self._path, mode=self._permissions, routes=self._routes
                )
        finally:
            self._local.unlink(missing_ok=True)

    def give_up(self) -> None:
        """Close it and publish nothing."""
        self._is_wanted = False
        self.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.give_up()

    def __del__(self, *_: Any) -> None:
        self.give_up()
