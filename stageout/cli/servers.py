"""The server of a URL, and whether it accepts connections from this machine."""

from __future__ import annotations

import socket
import time
from typing import NamedTuple
from urllib.parse import urlsplit

from stageout.movers.schemes import method_of

PORTS = {"http": 80, "https": 443, "dav": 80, "davs": 443, "ftp": 21, "gsiftp": 2811, "root": 1094, "overlay": 9621}
"""Port of a method when the URL names none."""
_TIMEOUT_S = 5.0


class Server(NamedTuple):
    """Host and port of a URL. Port 0 means that the method has no default port."""

    method: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.port else self.host


def server_of(url: str) -> Server:
    """Return the server of a URL; its host is "" for URLs without one."""
    method = method_of(url.partition("://")[0])
    try:
        parts = urlsplit("x://" + url.partition("://")[2])
        return Server(method, parts.hostname or "", parts.port or PORTS.get(method, 0))
    except ValueError:
        return Server(method, "", 0)


def milliseconds_to(server: Server) -> int:
    """Connect and disconnect. Return the time in milliseconds.

    :raises OSError: nothing accepts connections, or the name has no address.
    """
    start_s = time.monotonic()
    socket.create_connection((server.host, server.port), _TIMEOUT_S).close()
    return round(1000 * (time.monotonic() - start_s))
