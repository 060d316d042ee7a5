"""Break uploads in the middle, and look under their final names: ``python tools/broken_uploads.py URL...``.

Each URL is a directory of a running server (http or ftp). Half of a file is sent to a new name and over an older file;
then the connection is reset. A line shows how many of the uploads left a part of the file under its name, during the
upload and behind it, and how many kept the older file. ``docs/developer/decisions/0048-plain-uploads.md`` has the
figures.
"""

from __future__ import annotations

import argparse
import contextlib
import ftplib
import http.client
import io
import os
import socket
import struct
import sys
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

_SIZE_BYTES = 1 << 20
_OLDER = b"an older version"
_SETTLE_S = 0.5
_TIMEOUT_S = 10.0


class Http:
    """A directory of an HTTP server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._folder = parts.path.rstrip("/")

    def put(self, name: str, data: bytes) -> None:
        """Upload a file whole."""
        self._ask("PUT", name, data)

    def length(self, name: str) -> int | None:
        """Return the length of a file; None where there is none."""
        status, body = self._ask("GET", name)
        return len(body) if status == 200 else None

    def begin(self, name: str, data: bytes) -> socket.socket:
        """Send half of a file."""
        link = socket.create_connection((self._host, self._port), timeout=_TIMEOUT_S)
        head = f"PUT {self._folder}/{name} HTTP/1.1\r\nHost: {self._host}\r\nContent-Length: {len(data)}\r\n\r\n"
        link.sendall(head.encode() + data[: len(data) // 2])
        return link

    def _ask(self, method: str, name: str, data: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            connection.request(method, f"{self._folder}/{name}", data)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


class Ftp:
    """A directory of an FTP server."""

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)

    def put(self, name: str, data: bytes) -> None:
        """Upload a file whole."""
        with self._session() as session:
            session.storbinary(f"STOR {name}", io.BytesIO(data))

    def length(self, name: str) -> int | None:
        """Return the length of a file; None where there is none."""
        with self._session() as session, contextlib.suppress(ftplib.error_perm):
            return session.size(name)
        return None

    def begin(self, name: str, data: bytes) -> socket.socket:
        """Send half of a file."""
        self._open = self._session()
        link = self._open.transfercmd(f"STOR {name}")
        link.sendall(data[: len(data) // 2])
        return link

    def _session(self) -> ftplib.FTP:
        session = ftplib.FTP(timeout=_TIMEOUT_S)
        session.connect(self._parts.hostname or "", self._parts.port or 21)
        session.login(self._parts.username or "", self._parts.password or "")
        if self._parts.path.strip("/"):
            session.cwd(self._parts.path.strip("/"))
        session.voidcmd("TYPE I")
        return session


def measure(place: Http | Ftp, count: int) -> str:
    """Break uploads to one server; returns the line about it."""
    data = os.urandom(_SIZE_BYTES)
    during = behind = kept = gone = 0
    for number in range(2 * count):
        name, over = f"broken-{os.urandom(4).hex()}", number % 2
        if over:
            place.put(name, _OLDER)
        whole = len(_OLDER) if over else None
        link = place.begin(name, data)
        time.sleep(_SETTLE_S)
        during += place.length(name) != whole
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        link.close()
        if isinstance(place, Ftp) and place._open.sock:
            place._open.close()
        time.sleep(_SETTLE_S)
        found = place.length(name)
        behind += found not in (None, whole)
        kept += bool(over) and found == whole
        gone += bool(over) and found is None
    return f"during {during} of {2 * count}, behind {behind} of {2 * count}, older kept {kept}, gone {gone} of {count}"


def main(argv: Sequence[str]) -> int:
    """Measure each server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("urls", nargs="+")
    parser.add_argument("--count", type=int, default=10)
    options = parser.parse_args(argv)
    for url in options.urls:
        place = Ftp(url) if url.startswith("ftp:") else Http(url)
        print(url, measure(place, options.count), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
