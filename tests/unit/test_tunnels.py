"""Tunnels of TLS, without TLS: how they end."""

from __future__ import annotations

import errno
import socket
import ssl
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.threads import NoThread
from stageout.overlay import channel, tls


@pytest.mark.parametrize("half", [False, True])
def test_a_silent_peer_is_cut_off_when_nobody_hears_it_any_more(half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thread and sockets stayed as long as the peer liked, whatever limits the daemon had for it."""
    monkeypatch.setattr(tls, "_CLOSES_S", 0.01)
    peer, raw = socket.socketpair()
    mine, other = socket.socketpair()
    tunnel = tls.Tunnel(raw, other, ssl.create_default_context(), "host")
    tunnel.answered_plainly = True
    runs = threading.Thread(target=tunnel.run, daemon=True)
    with peer, mine:
        runs.start()
        if half:
            mine.shutdown(socket.SHUT_WR)
            assert peer.recv(1) == b""
            peer.sendall(b"words")
            assert mine.recv(5) == b"words", "who says no more still hears"
        mine.close()
        runs.join(20)
        assert not runs.is_alive()


def _open(tunnel: tls.Tunnel) -> None:
    """As after a handshake; what is sealed is as it was."""

    def nothing(size_bytes: int) -> bytes:
        raise ssl.SSLWantReadError

    one: Any = tunnel
    one._tls = SimpleNamespace(write=one._outgoing.write, read=nothing)


def test_a_peer_that_reads_nothing_is_cut_off_when_nobody_sends_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that sent to it, and so the one that hears it, stayed as long as the peer liked."""
    monkeypatch.setattr(tls, "_CLOSES_S", 0.01)
    peer, raw = socket.socketpair()
    mine, other = socket.socketpair()
    tunnel = tls.Tunnel(raw, other, ssl.create_default_context(), "host")
    _open(tunnel)
    runs = threading.Thread(target=tunnel.run, daemon=True)
    with peer, mine:
        runs.start()
        mine.settimeout(0.2)
        with pytest.raises(OSError, match="timed out"):
            mine.sendall(bytes(8 << 20))
        runs.join(0.05)
        assert runs.is_alive(), "who sends decides how long he waits"
        mine.close()
        runs.join(20)
        assert not runs.is_alive()


def test_a_slow_peer_gets_all_of_what_was_sent_before_the_end() -> None:
    peer, raw = socket.socketpair()
    mine, other = socket.socketpair()
    tunnel = tls.Tunnel(raw, other, ssl.create_default_context(), "host")
    _open(tunnel)
    runs, sent = threading.Thread(target=tunnel.run, daemon=True), bytes(range(256)) * 8192

    def send() -> None:
        with mine:
            mine.sendall(sent)

    sends = threading.Thread(target=send, daemon=True)
    with peer:
        runs.start()
        sends.start()
        found = bytearray()
        while part := peer.recv(65536):
            found += part
        assert found == sent
        peer.close()
        runs.join(20)
        assert not runs.is_alive()


def test_a_handshake_has_one_time_for_all_of_it() -> None:
    """A byte now and then kept the thread for hours."""
    peer, raw = socket.socketpair()
    mine, other = socket.socketpair()
    tunnel, over = tls.Tunnel(raw, other, ssl.create_default_context(), "host"), threading.Event()

    def dribble() -> None:
        peer.send(bytes([tls.CLIENT_HELLO, 3, 3, 0xFF, 0xFF]))
        while not over.wait(0.001):
            peer.send(b"x")

    def want() -> None:
        raise ssl.SSLWantReadError

    one: Any = tunnel
    one._tls = SimpleNamespace(do_handshake=want)
    dribbles = threading.Thread(target=dribble, daemon=True)
    with peer, raw, mine, other:
        dribbles.start()
        ended = threading.Thread(target=_times_out, args=(tunnel, over), daemon=True)
        ended.start()
        assert over.wait(20), "it goes on"
        dribbles.join()
        ended.join()


def _times_out(tunnel: tls.Tunnel, over: threading.Event) -> None:
    with pytest.raises(OSError, match=r"timed out|within"):
        tunnel.handshake(0.5)
    over.set()


def test_a_peer_that_says_much_without_tls_does_not_stop_the_handshake() -> None:
    """Nobody reads the plain side before the handshake is over: it was waited for as long as the process lived."""
    peer, raw = socket.socketpair()
    mine, other = socket.socketpair()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)
    tunnel = tls.Tunnel(raw, other, ssl.create_default_context(), "host")
    with peer, raw, mine, other:
        peer.sendall(bytes(128 * 1024))
        agrees = threading.Thread(target=tunnel.handshake, args=(20,), daemon=True)
        agrees.start()
        agrees.join(20)
        assert not agrees.is_alive()
        assert tunnel.answered_plainly
        assert mine.recv(1) == b"\0"


def test_a_process_that_may_have_no_more_threads_asks_for_no_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*arguments: object) -> socket.socket:
        raise NoThread(errno.EAGAIN, "as many threads as it may")

    monkeypatch.setattr(tls, "secured", none)
    monkeypatch.setattr(channel, "trusting", lambda ca: None)
    monkeypatch.setattr(channel, "connect", lambda *arguments: socket.socket())
    with pytest.raises(TransferFailure, match=r"as many threads as it may$") as caught:
        channel.Channel(channel.Gateway("host", 1, "key", b"secret", ca="ca.pem"))
    assert caught.value.kind is ErrorClass.CONNECT_FAILED
