"""One authenticated connection to a router. Blocking; one thread may send while another receives."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.wire import frames, overlay
from stageout.wire.frames import BadFrame, Header, Type
from stageout.wire.overlay import Hello, Message, Prove, Refuse, Welcome

DEFAULT_PORT = 9621


@dataclass(frozen=True)
class Gateway:
    """A router and the key that it knows us by.

    :param timeout_s: silence after which a connection counts as dead.
    """

    host: str
    port: int
    key_name: str
    secret: bytes
    timeout_s: float = 60.0

    @property
    def server(self) -> str:
        """Host and port, for messages."""
        return f"{self.host}:{self.port}"


def read_key(path: Path) -> tuple[str, bytes]:
    """Name and secret from a file with one ``NAME SECRET``. :raises TransferFailure: CREDENTIAL_MISSING."""
    try:
        words = path.read_text().split()
    except (OSError, UnicodeDecodeError) as problem:
        raise TransferFailure(ErrorClass.CREDENTIAL_MISSING, f"no key for the overlay: {problem}") from None
    if len(words) < 2:
        raise TransferFailure(ErrorClass.CREDENTIAL_MISSING, f"{path}: write 'NAME SECRET'")
    return words[0], words[1].encode()


class Channel:
    """Connect and prove the key.

    :param gateway: who to talk to.
    :raises TransferFailure: not reached, not understood, or refused.
    """

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._checksum: frames.Checksum = zlib.crc32
        self._socket = _connect(gateway)
        try:
            self._greet()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; a thread that receives on it is woken."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def finish(self) -> None:
        """Say that nothing more comes, and wait until the other side has taken everything and closed."""
        with self._failures():
            self._socket.shutdown(socket.SHUT_WR)
            while self._socket.recv(65536):
                pass

    def send(self, message: Message) -> None:
        """Send one message. :raises TransferFailure: the connection is lost."""
        with self._failures():
            self._socket.sendall(overlay.encode(message, self._checksum))

    def send_block(self, tid: int, block: int, data: frames.Buffer) -> None:
        """Send one block without copying it. :raises TransferFailure: the connection is lost."""
        header = frames.encode_header(Type.BLOCK, data, self._checksum, tid, block)
        with self._failures():
            sent = self._socket.sendmsg([header, data])
            if sent < len(header):
                self._socket.sendall(header[sent:])
                sent = len(header)
            if sent < len(header) + len(data):
                self._socket.sendall(memoryview(data)[sent - len(header) :])

    def receive(self) -> Message:
        """The next message. :raises TransferFailure: the connection is lost, or the router refuses."""
        with self._failures():
            header, payload = self._frame()
            message = overlay.decode(frames.Frame(header, payload))
        if isinstance(message, Refuse):
            raise TransferFailure(ErrorClass.PERMISSION_DENIED, message.message, self.gateway.server)
        return message

    def receive_block(self, view: memoryview) -> tuple[int, int]:
        """The next block into ``view``: its position and length. :raises TransferFailure: as :meth:`receive`."""
        with self._failures():
            header = frames.decode_header(self._exactly(frames.HEADER_BYTES), self._checksum)
            if header.type is Type.REFUSE:
                payload = self._exactly(header.length_bytes)
                told = overlay.decode(frames.Frame(header, payload))
                raise BadFrame(getattr(told, "message", ""))
            if header.type is not Type.BLOCK or header.length_bytes > len(view):
                raise BadFrame(f"{header.type.name} of {header.length_bytes} bytes where a block was due")
            data = view[: header.length_bytes]
            self._fill(data)
            if self._checksum(data) != header.checksum:
                raise BadFrame(f"block {header.block} does not fit its checksum")
        return header.block, header.length_bytes

    def _greet(self) -> None:
        offered = Hello(
            socket.gethostname(),
            secrets.token_hex(16),
            tuple(frames.checksums()),
            tuple(frames.digests()),
            int(time.time()),
            self.gateway.key_name,
        )
        self.send(offered)
        welcome = self.receive()
        if not isinstance(welcome, Welcome):
            raise self.failure(ErrorClass.NOT_SUPPORTED, f"{type(welcome).__name__} where WELCOME was due")
        if welcome.checksum not in frames.checksums() or welcome.digest not in frames.digests():
            raise self.failure(ErrorClass.NOT_SUPPORTED, "the router chose a checksum that was not offered")
        expected = overlay.proof(self.gateway.secret, "welcome", offered, welcome)
        if not hmac.compare_digest(welcome.proof, expected):
            raise self.failure(
                ErrorClass.CREDENTIAL_REFUSED, f"the router does not have the key {self.gateway.key_name!r}"
            )
        self._checksum = frames.checksums()[welcome.checksum]
        self.digest = frames.digests()[welcome.digest]
        self.digest_name = welcome.digest
        self.node = welcome.node
        self.send(Prove(overlay.proof(self.gateway.secret, "hello", offered, welcome)))

    def _frame(self) -> tuple[Header, bytes]:
        header = frames.decode_header(self._exactly(frames.HEADER_BYTES), self._checksum)
        payload = self._exactly(header.length_bytes)
        if self._checksum(payload) != header.checksum:
            raise BadFrame(f"a {header.type.name} does not fit its checksum")
        return header, payload

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise ConnectionResetError("the router closed the connection")
            view = view[count:]

    def _failures(self) -> _Failures:
        return _Failures(self)

    def failure(self, kind: ErrorClass, message: str) -> TransferFailure:
        """A failure that names the router."""
        return TransferFailure(kind, f"{self.gateway.server}: {message}", self.gateway.server)


class _Failures:
    """Turns what a socket raises into failures of the table."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, problem: BaseException | None, trace: object) -> None:
        failure = self._channel.failure
        if isinstance(problem, socket.timeout):
            raise failure(ErrorClass.STALLED, f"silent for {self._channel.gateway.timeout_s:.0f} s") from None
        if isinstance(problem, BadFrame):
            raise failure(ErrorClass.CONNECTION_LOST, str(problem)) from None
        if isinstance(problem, OSError):
            raise failure(ErrorClass.CONNECTION_LOST, problem.strerror or str(problem)) from None


def _connect(gateway: Gateway) -> socket.socket:
    try:
        sock = socket.create_connection((gateway.host, gateway.port), gateway.timeout_s)
    except socket.gaierror as problem:
        kind = ErrorClass.NAME_LOOKUP_FAILED if problem.errno == socket.EAI_AGAIN else ErrorClass.NAME_NOT_RESOLVED
        raise TransferFailure(kind, f"{gateway.host}: {problem.strerror}", gateway.server) from None
    except OSError as problem:
        text = problem.strerror or str(problem)
        raise TransferFailure(ErrorClass.CONNECT_FAILED, f"{gateway.server}: {text}", gateway.server) from None
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
