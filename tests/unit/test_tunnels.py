"""Tunnels of TLS, without TLS: how they end."""

from __future__ import annotations

import socket
import ssl
import threading

import pytest

from stageout.core import tls


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
