"""A connection to a router's port, and whom to believe there; the greeting is :mod:`channel`'s."""

from __future__ import annotations

import socket
from functools import lru_cache
from typing import TYPE_CHECKING

from stageout.core import log
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.tcp import as_a_client
from stageout.overlay.wire.route import written

if TYPE_CHECKING:
    import ssl

#: TCP asks 0, 1, 3, 7 and 15 s after the beginning, then ever more seldom: whoever needs the connection begins anew.
_CONNECTS_S = 20.0
#: Answers of a resolver that knows. All others, SERVFAIL among them, say nothing of the name.
_NO_SUCH_NAME = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


def connect(place: tuple[str, int], server: str, timeout_s: float, congestion: str = "") -> socket.socket:
    """A connection to the first hop.

    :param server: the end of the way, which failures name. :param timeout_s: silence after which it counts as dead.
    :param congestion: TCP's congestion control, "" for the kernel's default.
    :raises TransferFailure: NAME_NOT_RESOLVED, NAME_LOOKUP_FAILED, CONNECT_FAILED.
    """
    connects_s = min(timeout_s, _CONNECTS_S)
    try:
        sock = socket.create_connection(place, connects_s)
    except socket.gaierror as problem:
        kind = ErrorClass.NAME_NOT_RESOLVED if problem.errno in _NO_SUCH_NAME else ErrorClass.NAME_LOOKUP_FAILED
        raise TransferFailure(kind, f"{place[0]}: {problem.strerror}", server) from None
    except UnicodeError as problem:
        words = f"{place[0]}: no host has such a name: {problem}"
        raise TransferFailure(ErrorClass.NAME_NOT_RESOLVED, words, server) from None
    except OSError as problem:
        text = _why_unreached(problem, connects_s)
        raise TransferFailure(ErrorClass.CONNECT_FAILED, f"{written(*place)}: {text}", server) from None
    sock.settimeout(timeout_s)
    if congestion:
        _control_congestion(sock, congestion)
    return as_a_client(sock)


@lru_cache(maxsize=8)
def trusting(ca: str) -> ssl.SSLContext:
    """The TLS context that trusts the certificates in that file. :raises TransferFailure: CREDENTIAL_MISSING."""
    import ssl  # most links have none: its library takes as long as a small file

    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as problem:
        raise TransferFailure(ErrorClass.CREDENTIAL_MISSING, f"{ca}: no certificates there: {problem}") from None


def _why_unreached(problem: OSError, timeout_s: float) -> str:
    if isinstance(problem, socket.timeout):
        return f"no answer in {timeout_s:.0f} s: is the address right, and does a firewall let it through?"
    if isinstance(problem, ConnectionRefusedError):
        return f"{problem.strerror}: does a router run there, at that port?"
    return problem.strerror or str(problem)


def _control_congestion(sock: socket.socket, name: str) -> None:
    """A kernel without it goes on with its own: slower, perhaps, but the file arrives."""
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError as problem:
        log.warn("congestion-control-unsupported", wanted=name, problem=problem.strerror,
                 remedy="see net.ipv4.tcp_allowed_congestion_control, and load its module")  # fmt: skip
