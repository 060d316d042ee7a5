"""The plugin's end of the connection to the sandbox manager."""

from __future__ import annotations

import _socket as socket  # the Python module above it imports selectors and more, and every job waits for it
import os
import struct
import time
from collections.abc import Sequence
from typing import Any

from stageout.handoff.place import Place
from stageout.wire import handoff as wire

_TIMEOUT_S = 2.0
_CREDENTIALS = struct.Struct("3i")


class HandoffRefused(Exception):
    """The hand-off fails; the text is the reason.

    :param code: of the reason (:mod:`stageout.core.synchronous`), "" for a manager that sends none.
    """

    def __init__(self, text: str, code: str) -> None:
        super().__init__(text)
        self.code = code


class ManagerConnection:
    """The connection to the manager. Every wait ends at the current limit.

    :raises HandoffRefused: nothing listens on the socket, or a process that must not have the files.
    """

    def __init__(self, where: Place) -> None:
        self._timeout_s = _timeout_s()
        self.limit(self._timeout_s, "it agreed to take files")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._connect(where)
            self._check_listener(where)
        except BaseException:
            self._socket.close()
            raise

    def _connect(self, where: Place) -> None:
        directory = os.open(where.run, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # A socket's path may have 107 bytes only; this one is as short for every spool.
            self._socket.settimeout(self._left_s())
            self._socket.connect(f"/proc/self/fd/{directory}/{wire.socket_name(where.execute)}")
        except (FileNotFoundError, ConnectionRefusedError):
            raise HandoffRefused("the sandbox manager is not running", "NoManager") from None
        except BlockingIOError:
            raise HandoffRefused("the sandbox manager has too many hand-offs waiting", "Busy") from None
        finally:
            os.close(directory)

    def _check_listener(self, where: Place) -> None:
        """Check that root, the startd's user, or the plugin's own user listens. Other listeners get no files."""
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        listener = _CREDENTIALS.unpack(raw)[1]
        if listener not in (0, os.geteuid(), os.stat(where.execute).st_uid):
            whose = f"uid {listener}, which does not run HTCondor here"
            raise HandoffRefused(f"the socket of the sandbox manager belongs to {whose}", "NoManager")

    def limit(self, limit_s: float, what: str) -> None:
        """Limit the total time of all waits from now on, until ``what``."""
        self._limit_s, self._what = limit_s, what
        self._end_s = time.monotonic() + limit_s

    def extend(self, more_s: float) -> None:
        """Extend the limit."""
        self._limit_s += more_s
        self._end_s += more_s

    def tell(self, message: dict[str, Any]) -> None:
        """Send a frame that needs no answer."""
        self._socket.settimeout(self._timeout_s)
        wire.send_frame(self._socket, message)

    def ask(self, messages: Sequence[dict[str, Any]], expected: str) -> dict[str, Any]:
        """Send frames and return the answer. :raises HandoffRefused: it is not ``expected``, or comes too late."""
        try:
            self._send(messages)
            self._socket.settimeout(self._left_s())
            answer = wire.receive_frame(self._socket)
        except (TimeoutError, socket.timeout):  # two classes before Python 3.10
            raise self._too_late() from None
        except EOFError:
            raise HandoffRefused(
                f"the sandbox manager closed the connection before {self._what}", "ManagerSlow"
            ) from None
        if answer["op"] == "refuse":
            raise HandoffRefused(str(answer.get("reason")), wire.refused_code(answer))
        if answer["op"] != expected:
            raise HandoffRefused(
                f"the sandbox manager said {answer['op']!r} where {expected!r} was expected", "Version"
            )
        return answer

    def _send(self, messages: Sequence[dict[str, Any]]) -> None:
        try:
            for message in messages:
                self._socket.settimeout(self._left_s())
                wire.send_frame(self._socket, message)
        except (BrokenPipeError, ConnectionResetError):
            pass  # The manager may have refused before it had read everything. Its answer can still be read.

    def close(self) -> None:
        """Close the connection. The manager undoes a hand-off that it has not accepted."""
        self._socket.close()

    def _left_s(self) -> float:
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise self._too_late()
        return left_s

    def _too_late(self) -> HandoffRefused:
        return HandoffRefused(
            f"the sandbox manager needed more than {self._limit_s:g} s until {self._what}", "ManagerSlow"
        )


def _timeout_s() -> float:
    try:
        return float(os.environ["STAGEOUT_HANDOFF_TIMEOUT"])
    except (KeyError, ValueError):
        return _TIMEOUT_S
