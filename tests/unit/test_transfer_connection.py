"""Connections of the client of HTTP: strict answers, checked heads, silence, relays."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.transfer.connection import Address, Connection, Place, Refusal, Trust


@contextmanager
def _answering(*answers: bytes) -> Iterator[tuple[Place, list[bytes]]]:
    """A server of one connection that sends an answer for each head that comes. Its last answer ends the connection."""
    heard: list[bytes] = []

    def serve() -> None:
        sock, _ = listening.accept()
        with sock:
            for answer in answers:
                data = b""
                while b"\r\n\r\n" not in data:
                    part = sock.recv(65536)
                    if not part:
                        return
                    data += part
                heard.append(data)
                sock.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Place(Address("127.0.0.1", listening.getsockname()[1]), Trust(is_plain=True), lambda: "Bearer t"), heard
        thread.join(10)


def _asked(answer: bytes, method: str = "GET") -> tuple[int, bytes]:
    with _answering(answer) as (place, _):
        connection = Connection(place)
        try:
            found, body = connection.ask(method, "/f")
        finally:
            connection.close()
    return found.status, body


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
        (b"HTTP/1.1 200\r\ncontent-LENGTH:3 \r\n\r\nabc", b"abc"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1;x=y\r\nc\r\n0\r\n\r\n", None),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\nA\r\n0123456789\r\n0\r\nX: y\r\n\r\n",
         b"ab0123456789"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    ],
)  # fmt: skip
def test_answers(answer: bytes, body: bytes | None) -> None:
    if body is None:
        with pytest.raises(TransferFailure, match="hexadecimal"):
            _asked(answer)
    else:
        assert _asked(answer)[1] == body


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 0\n\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1, 1\r\n\r\na",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\na",
        b"HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\na",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\na",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\r\n folded\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX : a\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\rContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\nContent-Length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    ],
)
def test_answers_that_leave_something_open(answer: bytes) -> None:
    with pytest.raises(TransferFailure) as caught:
        _asked(answer)
    assert caught.value.kind is ErrorClass.SERVER_ERROR


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Le", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc"]
)
def test_a_connection_that_ends_too_early(answer: bytes) -> None:
    with pytest.raises(TransferFailure) as caught:
        _asked(answer)
    assert caught.value.kind is ErrorClass.CONNECTION_LOST


def test_heads_are_made_of_checked_values() -> None:
    with _answering() as (place, _):
        connection = Connection(place)
        for target, fields in (
            ("/a b", {}),
            ("/a\r\nX: y", {}),
            ("/ü", {}),
            ("/", {"X": "a\r\nY: b"}),
            ("/", {"X Y": ""}),
        ):
            with pytest.raises(ValueError):
                connection.request("GET", target, fields)
        connection.close()


def test_a_request(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    ok = b"HTTP/1.1 204 No Content\r\n\r\n"
    with _answering(ok, ok) as (place, heard), (tmp_path / "f").open("rb") as file:
        connection, moved = Connection(place), [0]

        def count(size: int) -> None:
            moved[0] += size

        connection.request("PUT", "/f", {"X": "y"}, more_bytes=4)
        connection.send_file(file.fileno(), 3, 4, count)
        assert connection.answer().status == 204 and moved == [4]
        assert connection.ask("DELETE", "/f", body=b"why")[0].status == 204
        with pytest.raises(TransferFailure, match="shorter"):
            connection.send_file(file.fileno(), 8, 4, count)
        connection.close()
    head, _, body = heard[0].partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0] == b"PUT /f HTTP/1.1" and b"3456".startswith(body)
    assert {b"X: y", b"Authorization: Bearer t", b"Content-Length: 4"} <= set(head.split(b"\r\n"))
    assert heard[1].endswith(b"\r\n\r\nwhy")


def test_a_refusal_has_its_class_its_wait_and_its_reason() -> None:
    problem = b'{"status": 503, "detail": "many wait", "blocks": [3]}'
    answer = b"HTTP/1.1 503 Busy\r\nRetry-After: 7\r\nContent-Length: %d\r\n\r\n" % len(problem) + problem
    with _answering(answer) as (place, _):
        connection = Connection(place)
        found, body = connection.ask("GET", "/f")
        refusal = connection.refused(found, body, "/f")
        connection.close()
    assert isinstance(refusal, Refusal) and refusal.kind is ErrorClass.SERVER_BUSY
    assert (refusal.status, refusal.retry_after_s, refusal.facts["blocks"]) == (503, 7.0, [3])
    assert "many wait" in str(refusal)


def test_a_relay_that_says_more_than_it_should() -> None:
    for answer, words in (
        (b"HTTP/1.1 200 OK\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", "behind its answer"),
        (b"HTTP/1.1 407 No\r\nContent-Length: 2\r\n\r\n{}", "the relay"),
    ):
        with _answering(answer) as (relay, heard):
            place = Place(
                Address("terminal.example", 9621), relay.trust, relay_authorization=lambda by, to: f"Bearer {to}"
            )
            with pytest.raises(TransferFailure, match=words):
                Connection(place, (relay.address,))
        assert heard[0].startswith(b"CONNECT terminal.example:9621 HTTP/1.1\r\n")
        assert b"Proxy-Authorization: Bearer terminal.example:9621\r\n" in heard[0]


def test_another_thread_ends_a_wait() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        place = Place(Address("127.0.0.1", listening.getsockname()[1]), Trust(is_plain=True))
        connection = Connection(place)
        connection.request("GET", "/f")
        threading.Timer(0.2, connection.abort).start()
        with pytest.raises(TransferFailure) as caught:
            connection.answer()
        assert caught.value.kind is ErrorClass.CONNECTION_LOST and connection.is_ended
        connection.close()
    with pytest.raises(TransferFailure) as caught:
        Connection(place)
    assert caught.value.kind is ErrorClass.CONNECT_FAILED
