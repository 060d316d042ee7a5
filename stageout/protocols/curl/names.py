"""The reason why a host name did not resolve. libcurl does not tell a missing name from a silent name server."""

from __future__ import annotations

import queue
import socket
import threading

from stageout.core.errors import ErrorClass

_PATIENCE_S = 5.0
_QUICK_S = 0.2
_DEFINITIVE = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}


def lookup_failure(host: str, one_attempt: bool = False) -> tuple[ErrorClass, str]:
    """Classify a name that libcurl could not resolve, with a sentence. A second look-up gets the resolver's code.

    :param one_attempt: limit the wait for the code.
    """
    code = _ask(host, _QUICK_S if one_attempt else _PATIENCE_S)
    if code in _DEFINITIVE:
        return ErrorClass.NAME_NOT_RESOLVED, f"there is no host {host} in the DNS as seen from here; check the URL"
    return ErrorClass.NAME_LOOKUP_FAILED, f"the DNS did not answer for {host}; check the node's resolver"


def _ask(host: str, patience_s: float) -> int | None:
    """Query the resolver for its code; 0 when the name now resolves, None when it takes too long."""
    answer: queue.SimpleQueue[int] = queue.SimpleQueue()

    def look() -> None:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            answer.put(0)
        except socket.gaierror as error:
            answer.put(error.args[0])
        except (OSError, UnicodeError):
            answer.put(socket.EAI_NONAME)

    threading.Thread(target=look, daemon=True).start()
    try:
        return answer.get(timeout=patience_s)
    except queue.Empty:
        return None
