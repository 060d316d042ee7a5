"""Questions about names to a router. Many are under way at once, so a long line is waited for once, not for each.

The router answers the questions of a connection in their order, so the answers need no numbers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Union

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.pauses import growing_s
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.kept import Room
from stageout.overlay.wire.messages import Answer, List, Stat
from stageout.overlay.wire.route import Route

#: Questions without an answer, and their bytes. Both fit into the buffers on the way: while a router waits for a client
#: that takes a long answer, that client must not wait for the router to read a question.
_UNDER_WAY, _UNDER_WAY_BYTES = 256, 96 * 1024
#: Connections that may be lost between two answers.
_RESUMES = 3
_LOST = frozenset({ErrorClass.CONNECTION_LOST, ErrorClass.STALLED})
Question = Union[Stat, List]


class Asking:
    """A connection for questions, made when it is needed; one that is lost is made anew. Use from one thread.

    :param routes: ways to the router: the first that works.
    :ivar ahead_s: the router's clock before ours, in seconds, once there was an answer.
    """

    def __init__(self, gateway: Gateway, routes: Sequence[Route] = ((),)) -> None:
        self._gateway, self._routes = gateway, tuple(routes) or ((),)
        self._channel: Channel | None = None
        self._lost, self._room = 0, Room()
        self.ahead_s = 0

    def __enter__(self) -> Asking:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the next question makes another one."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def answers(self, questions: Sequence[Question]) -> Iterator[Answer | None]:
        """The answers in order, of a directory page by page. To be taken at once: a router waits a minute for that.

        None: the connection was lost. The question of which the last answer is not here yet is answered from its
        beginning then. A caller that takes no further answers closes the connection.

        :raises TransferFailure: the router cannot be reached, or refuses.
        """
        answered = 0
        while answered < len(questions):
            try:
                for answer in self._asked(questions[answered:]):
                    self._lost, self._room = 0, Room()
                    answered += not answer.more
                    yield answer
            except TransferFailure as failure:
                self.close()
                self._prepare_retry(failure)
                yield None

    def refusal(self, answer: Answer) -> TransferFailure:
        """Return the message for an answer with this code."""
        return TransferFailure(ErrorClass.from_code(answer.code), answer.message, self._gateway.server)

    def _asked(self, questions: Sequence[Question]) -> Iterator[Answer]:
        left, sizes_bytes, unanswered_bytes = iter(questions), deque[int](), 0
        channel = self._connected()
        while True:
            if 2 * len(sizes_bytes) <= _UNDER_WAY and 2 * unanswered_bytes <= _UNDER_WAY_BYTES:
                frames = list(_some(channel, left, _UNDER_WAY - len(sizes_bytes), _UNDER_WAY_BYTES - unanswered_bytes))
                sizes_bytes.extend(map(len, frames))
                unanswered_bytes += sum(map(len, frames))
                if frames:
                    channel.send_frames(frames)
            if not sizes_bytes:
                return
            answer = channel.receive()
            if not isinstance(answer, Answer):
                raise channel.failure(ErrorClass.NOT_SUPPORTED, f"{type(answer).__name__} where ANSWER was due")
            if not answer.more:
                unanswered_bytes -= sizes_bytes.popleft()
            yield answer

    def _connected(self) -> Channel:
        """The connection; a new one by the first route that works."""
        for left in reversed(range(len(self._routes))):
            if self._channel is not None:
                break
            try:
                self._channel = Channel(self._gateway, self._routes[0])
                self.ahead_s = self._channel.ahead_s
            except TransferFailure:
                if not left:
                    raise
                self._routes = (*self._routes[1:], self._routes[0])
        assert self._channel is not None
        return self._channel

    def _prepare_retry(self, failure: TransferFailure) -> None:
        """Wait before the rest is asked again. :raises TransferFailure: this one, if that would be of no use."""
        if self._room.made(failure):
            return
        if failure.kind not in _LOST or self._lost == _RESUMES:
            raise failure
        self._lost += 1
        self._routes = (*self._routes[1:], self._routes[0])
        time.sleep(growing_s(0.25, 4.0, self._lost))


def _some(channel: Channel, questions: Iterator[Question], most: int, most_bytes: int) -> Iterator[bytes]:
    """Frames of the next questions: at most so many, and no further one once they have so many bytes."""
    for question in islice(questions, most):
        yield (frame := channel.encoded(question))
        most_bytes -= len(frame)
        if most_bytes <= 0:
            return
