"""TLS between a connection and a plain one, in a worker."""

from __future__ import annotations

import contextlib
import socket
import ssl
import zlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from stageout.overlay.tcp import wait_at_most
from stageout.overlay.tls import Tunnel
from stageout.overlay.wire.messages import Refuse, encode

_HANDSHAKE_S, _FIRST_S = 20.0, 10.0
_READ_BYTES = 4096


def cover(
    connection: socket.socket,
    plain: socket.socket,
    cert: str,
    cert_key: str,
    host: str,
    problem: Callable[[str], None],
    http: Callable[[Tunnel, bytes], None] = lambda tunnel, first: None,
) -> None:
    """TLS on ``connection``, until both have ended; both are closed.

    :param http: called with the first bytes of a request in HTTP: it serves the connection to its end.

    :param cert: file of the certificate, and :param cert_key: of its key. :param host: of the other side, on the side
        that connects: then ``cert`` has the certificates that it trusts. :param problem: called with what went wrong.
    """
    with connection, plain:
        try:
            changed_ns = Path(cert).stat().st_mtime_ns
            context = _trusting(cert, changed_ns) if host else _certified(cert, cert_key, changed_ns)
            tunnel = Tunnel(connection, plain, context, host)
            tunnel.handshake(_HANDSHAKE_S)
            if not host:
                first = tunnel.first(_FIRST_S)
                if first[:1].isupper():
                    return http(tunnel, first)
                plain.sendall(first)
            tunnel.run()
        except OSError as failed:
            problem(f"TLS: {failed}")
            if host:  # whoever waits for a greeting hears why there is none
                with contextlib.suppress(OSError):
                    _last_words(plain, encode(Refuse(_no_tls(cert, failed)), zlib.crc32))


def _last_words(plain: socket.socket, words: bytes) -> None:
    """Send them, and take what still comes: who greets a connection that is closed already never reads them."""
    wait_at_most(plain, _HANDSHAKE_S)
    plain.sendall(words)
    plain.shutdown(socket.SHUT_WR)
    while plain.recv(_READ_BYTES):
        pass


@lru_cache(maxsize=4)
def _certified(cert: str, cert_key: str, changed_ns: int) -> ssl.SSLContext:
    """With the certificate as it was at that time: a renewed one is read anew."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, cert_key or None)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["http/1.1"])
    return context


@lru_cache(maxsize=4)
def _trusting(ca: str, changed_ns: int) -> ssl.SSLContext:
    """With the certificates in a file as it was at that time."""
    return ssl.create_default_context(cafile=ca)


def _no_tls(cert: str, problem: OSError) -> str:
    if isinstance(problem, ssl.SSLCertVerificationError):
        return f"its certificate is not one of {cert}: {problem.verify_message}"
    return f"TLS with it: {problem}; has it a certificate (STAGEOUT_ROUTER_CERT)?"
