"""The questions of a worker to its daemon about one connection: a line of JSON each, and a descriptor if need be."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

from stageout.overlay.http.heads import Refused
from stageout.overlay.tcp import wait_at_most

_READ_BYTES = 64 * 1024
#: A disk may take long to sync.
_ANSWERS_S = 120.0
Facts = dict[str, Any]


class Lost(Refused):
    """The daemon did not answer: an answer that comes late belongs to no question."""


class Desk:
    """The worker's end. :param channel: belongs to it from now on."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        wait_at_most(channel, _ANSWERS_S)

    def ask(self, question: str, **facts: object) -> tuple[Facts, int]:
        """Return the daemon's answer, and a descriptor that is the caller's to close, -1 for none.

        :raises Refused: the daemon refuses, or says nothing. :raises OSError: it has ended.
        """
        try:
            self._channel.sendall(json.dumps({"ask": question, **facts}).encode() + b"\n")
            data, found = b"", -1
            while not data.endswith(b"\n"):
                part, descriptors, _, _ = socket.recv_fds(self._channel, _READ_BYTES, 1)
                found = descriptors[0] if descriptors else found
                if not part:
                    raise ConnectionResetError("the daemon has ended this connection")
                data += part
        except BlockingIOError:
            raise Lost(503, "the disk is slow", {"Retry-After": "30"}) from None
        answer: Facts = json.loads(data)
        if "refused" in answer:
            if found >= 0:
                os.close(found)
            raise Refused(answer["refused"], answer["reason"], answer.get("headers"), answer.get("members"))
        return answer, found

    def close(self) -> None:
        """The daemon forgets what was begun and not finished."""
        self._channel.close()
