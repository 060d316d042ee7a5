"""One authenticated connection to a router. Blocking; one thread may send while another receives."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.sockets import readable
from stageout.core.threads import NoThread
from stageout.overlay.connecting import connect, trusting
from stageout.overlay.links import Claim, Lane, Tap
from stageout.overlay.proof import Proof
from stageout.overlay.tcp import (
    UNSENT_BYTES,
    Segments,
    acked_bytes,
    arrived_bytes,
    segments,
    send_both,
    send_from,
    unsent_bytes,
    wait_at_most,
)
from stageout.overlay.wire import frames, messages, packs
from stageout.overlay.wire.blocks import PART_BYTES
from stageout.overlay.wire.capability import Credential
from stageout.overlay.wire.frames import BadFrame, Header, Type
from stageout.overlay.wire.greeting import SAFE_DIGESTS, WrongKey, accept, offer
from stageout.overlay.wire.messages import (
    BLOCK_BYTES,
    Copy,
    FoundPack,
    Get,
    GetPack,
    List,
    Message,
    Open,
    Operation,
    Refuse,
    Stat,
    Via,
    Welcome,
)  # fmt: skip
from stageout.overlay.wire.route import BadRoute, Route, address, check, shown, written

#: A router answers a greeting within this time, also a far one that has much to do; behind relays, each of which makes
#: a connection in ten seconds or says that it cannot, it takes so much longer. One that has answered before has all the
#: time that a connection may be silent: it is a router, and perhaps stands still for a while.
_GREETING_S, _RELAY_S = 15.0, 10.0
_answered: set[str] = set()
#: Time of a block above which blocks leave in pieces, and their size.
_PROMPT_S = 0.01
#: Time of a part of a block, where that is slow.
_PART_S = 0.025
#: Block, descriptor and offset of a block that is in no file.
_NOWHERE = (-1, -1, 0)


@dataclass(frozen=True)
class Gateway:
    """A router and the key that it knows us by.

    :param timeout_s: silence after which a connection counts as dead.
    :param credential: a capability that OPEN and OPERATION carry, and STAT, LIST and GET if it allows to read; None for
        the key's own rights.
    :param digest: the only kind of digests of blocks that is used, "" for the best that both sides have.
    :param congestion: TCP's congestion control, such as ``bbr``; "" for the kernel's default.
    :param ca: file of certificates: TLS to the router, whose certificate must come from one of them; "" for none.
    """

    host: str
    port: int
    key_name: str
    secret: bytes = field(repr=False)
    timeout_s: float = 60.0
    credential: Credential | None = None
    ca: str = ""
    digest: str = ""
    congestion: str = ""

    @property
    def server(self) -> str:
        """Host and port, for messages."""
        return written(self.host, self.port)

    def until(self, after_s: float) -> int:
        """When an operation that is begun now expires, in Unix time: no later than its capability."""
        expires = int(time.time() + after_s)
        return min(expires, self.credential.expires) if self.credential is not None else expires


class Channel:
    """Connect and prove the key.

    :param gateway: who to talk to. :param route: relays to pass; the first must know the same key.
    :param lane: that its blocks and packs travel in; None: they go as TCP lets them.
    :param back: of what comes back on it (after a GET), for the relays.
    :param flow: that relays count it to, "" for that of the lane. :ivar flow: that they do, as long as it lasts.
    :ivar ahead_s: of the router's clock, before ours.
    :ivar received_bytes: that have come on it, of a frame that is not whole, too.
    :raises TransferFailure: not reached, not understood, or refused.
    """

    def __init__(
        self,
        gateway: Gateway,
        route: Route = (),
        lane: Lane | None = None,
        back: Claim | None = None,
        flow: str = "",
    ) -> None:
        self.flow = flow or (lane.claim.flow if lane else "")
        self.gateway, self.route, self._lane, self._back = gateway, route, lane, back
        self._tap: Tap | None = None
        self.received_bytes = 0
        self._block_s = 0.0
        self._unsent_bytes = UNSENT_BYTES
        self._acked_before = 0
        self._vouched = (-1, 0)
        self._kept_in = _NOWHERE
        self._checksum: frames.Checksum = zlib.crc32
        self._refused = ErrorClass.PERMISSION_DENIED, ErrorClass.SERVER_BUSY
        place = _first_hop(gateway, route)
        self._socket = self._wire = connect(place, gateway.server, gateway.timeout_s, gateway.congestion)
        try:
            if lane is not None:
                self._tap = lane.tap(self._acked)
            if route:
                self._pass_relays()
            if gateway.ca:
                self._cover()
            self._greet(gateway.server, len(route))
            wait_at_most(self._socket, gateway.timeout_s)
            self._refused = ErrorClass.PERMISSION_DENIED, ErrorClass.SERVER_BUSY
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
        if self._tap is not None:
            self._tap.close()

    def travel(self, lane: Lane | None) -> None:
        """From now on its blocks travel in that lane, for another file."""
        if self._tap is not None:
            self._tap.close()
        with contextlib.suppress(OSError):  # it has ended, as whoever uses it will see
            self._let_wait(UNSENT_BYTES)
        self._acked_before += self.acked_bytes
        self._lane, self._tap = lane, lane.tap(self._acked) if lane else None

    def abort(self) -> None:
        """End the connection from another thread than its own, which closes it: what was not yet sent is dropped."""
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._socket.shutdown(socket.SHUT_RDWR)

    def finish(self) -> None:
        """Say that nothing more comes, and wake a thread that receives; what was said before still arrives."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def send(self, message: Message) -> None:
        """Send one message, with the capability where it takes one. :raises TransferFailure: the connection is lost."""
        self.send_frames([self.encoded(message)])

    def send_frames(self, encoded: Sequence[bytes]) -> None:
        """Send messages together, each as :meth:`encoded`. :raises TransferFailure: the connection is lost."""
        with self._failures():
            self._socket.sendall(b"".join(encoded))

    def encoded(self, message: Message) -> bytes:
        """The frame of a message, with the capability where it takes one."""
        credential = self.gateway.credential
        if isinstance(message, (Open, Operation)) and credential and not message.capability:
            message = credential.signed(message)
        elif isinstance(message, (Stat, List, Get, GetPack)) and credential and credential.may_read:
            message = credential.signed(message, self._nonce)
        elif isinstance(message, Copy) and credential and credential.may_read:
            read = credential.signed(Get(message.source), self._nonce)
            message = replace(message, read_capability=read.capability, read_signature=read.signature)
        return messages.encode(message, self._checksum)

    def vouch(self, block: int, kind: str, checksum: int) -> None:
        """If that block is sent next, it is with this checksum of its bytes, where it is of the kind that goes here."""
        self._vouched = (block if kind == self._checksum_name else -1, checksum)

    def digest_of(self, block: int, data: frames.Buffer) -> bytes:
        """The digest of a block. If it is sent next, it is with the checksum that was found in the same pass."""
        checksum, digest = self._sums(data)
        self._vouched = block, checksum
        return digest

    def kept_in(self, block: int, file: int, offset: int) -> None:
        """If that block is sent next, its bytes are also in a file that is open, from that offset on."""
        self._kept_in = block, file, offset

    def send_block(self, tid: int, block: int, data: memoryview) -> None:
        """Send one block: out of the file that it is in, where the connection allows that, or as it was read.

        It leaves with the checksum of what was read; if the file has changed since, the router drops the connection.

        :raises TransferFailure: the connection is lost.
        """
        (known, checksum), self._vouched = self._vouched, (-1, 0)
        (kept, file, offset), self._kept_in = self._kept_in, _NOWHERE
        if known != block:
            checksum = self._checksum(data)
        header = frames.pack_header(Type.BLOCK, len(data), checksum, self._checksum, tid, block)
        # on a slow link, or one that others need more, it can be stopped in the middle
        slow = self._is_held or self._block_s > _PROMPT_S
        started_s = time.monotonic()
        with self._failures():
            for start, piece in self._pieces(data, slow, len(header)):
                if kept == block and self._socket is self._wire:
                    send_from(self._socket, header, file, offset + start, piece)
                else:
                    send_both(self._socket, header, piece)
                header = b""
            self._block_s = time.monotonic() - started_s
            self._let_wait(unsent_bytes(len(data), self._block_s))

    def lendable(self) -> int | None:
        """Descriptor of the connection, for who sends blocks by it from another process; None: that cannot be now.

        In TLS nobody else can, and where others need the link more, each piece has to wait for its turn.
        """
        return None if self._is_held or self._socket is not self._wire else self._socket.fileno()

    @property
    def _is_held(self) -> bool:
        return self._tap is not None and self._tap.held

    def _pieces(self, data: memoryview, cut: bool, head_bytes: int = 0) -> Iterator[tuple[int, memoryview]]:
        """The bytes that leave at once, when they may: all of them, or with ``cut`` small pieces. :return: with their
        places.

        :param head_bytes: that leave before the first.
        """
        piece_bytes = self._tap.piece_bytes if cut and self._tap is not None else len(data)
        for start in range(0, len(data), piece_bytes):
            piece = data[start : start + piece_bytes]
            if self._tap is not None:
                self._tap.take(len(piece) + head_bytes)
            head_bytes = 0
            yield start, piece

    @property
    def checksum_name(self) -> str:
        """The kind of the checksums that go here."""
        return self._checksum_name

    @property
    def prompt_bytes(self) -> int:
        """The bytes that leave within 25 ms, as the last block did: a multiple of a block's smallest part, at most a
        block."""
        parts = int(_PART_S / max(self._block_s, _PART_S) * BLOCK_BYTES) // PART_BYTES
        return max(PART_BYTES, parts * PART_BYTES)

    def send_part(self, tid: int, start: int, data: frames.Buffer) -> None:
        """Send a part of a block, at the end of a file. :param start: its position in the file.

        Less waits in the kernel from now on, so that all connections end at the same time.

        :raises TransferFailure: the connection is lost.
        """
        self._vouched, self._kept_in = (-1, 0), _NOWHERE
        header = frames.encode_header(Type.PART, data, self._checksum, tid, start)
        with self._failures():
            self._let_wait(PART_BYTES)
            for _, piece in self._pieces(memoryview(data), self._is_held, len(header)):
                send_both(self._socket, header, piece)
                header = b""

    def _let_wait(self, size_bytes: int) -> None:
        if size_bytes != self._unsent_bytes:
            self._wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, size_bytes)
            self._unsent_bytes = size_bytes

    def fileno(self) -> int:
        """Of its socket, for who waits for several things at once."""
        return self._socket.fileno()

    def has_more(self, within_s: float) -> bool:
        """Tell whether something (or the end) comes within so many seconds."""
        return bool(readable([self._socket.fileno()], within_s))

    @property
    def is_open(self) -> bool:
        """Tell whether it has not ended, as far as is known here."""
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    @property
    def acked_bytes(self) -> int:
        """The bytes of this file that the next hop has, in TLS or not; 0: the connection is closed, or no one knows."""
        return self._acked() or 0

    def _acked(self) -> int | None:
        told = acked_bytes(self._wire)
        return None if told is None else max(0, told - self._acked_before)

    @property
    def arrived_bytes(self) -> int:
        """The bytes that have come on it, also behind a lost packet; where nobody can say, the bytes received."""
        told = arrived_bytes(self._wire)
        return self.received_bytes if told is None else told

    @property
    def segments(self) -> Segments:
        """The bytes that it has sent, as the kernel counts."""
        return segments(self._wire)

    def send_pack(self, pack: messages.Pack, digests: Sequence[bytes], data: Sequence[frames.Buffer]) -> None:
        """Send small files, with the capability. :raises TransferFailure: the connection is lost."""
        pack = replace(pack, manifest=packs.manifest(digests))
        if self.gateway.credential:
            pack = self.gateway.credential.signed(pack)
        encoded = packs.encode(pack, digests, data, self._checksum)
        with self._failures():
            for _, piece in self._pieces(memoryview(encoded), self._is_held):
                self._socket.sendall(piece)

    def receive(self) -> Message:
        """The next message. :raises TransferFailure: the connection is lost, or the router refuses."""
        with self._failures():
            header, payload = self._frame()
            message = messages.decode(frames.Frame(header, payload))
        return self._unless_refused(message)

    def receive_pack(self, asked: int) -> tuple[FoundPack, list[memoryview]]:
        """The answer to a GET_PACK for so many files, and what is in each.

        :raises TransferFailure: as :meth:`receive`; CONTENT_MISMATCH for an answer that cannot be one.
        """
        with self._failures():
            frame = frames.Frame(*self._frame())
        try:
            if frame.header.type is Type.FOUND_PACK:
                return packs.decode_found(frame, asked)
            told = self._unless_refused(messages.decode(frame))
        except BadFrame as problem:
            raise self.failure(ErrorClass.CONTENT_MISMATCH, str(problem)) from None
        raise self.failure(ErrorClass.CONTENT_MISMATCH, f"{type(told).__name__} where FOUND_PACK was due")

    def _unless_refused(self, message: Message) -> Message:
        if isinstance(message, Refuse):
            again_s = message.retry_after_s
            kind = ErrorClass.from_code(message.code) if message.code else self._refused[again_s >= 0]
            raise TransferFailure(kind, message.message, self.gateway.server, float(again_s) if again_s >= 0 else None)
        return message

    def receive_block(self, view: memoryview, proof: Proof | None = None) -> tuple[int, int]:
        """The next block into ``view``: its position and length. :raises TransferFailure: as :meth:`receive`.

        :param proof: takes its digest, found in the same pass where the checksum allows that.
        """
        with self._failures():
            header = self._due(Type.BLOCK, len(view))
            data = view[: header.length_bytes]
            self._fill(data)
            is_wanted = proof is not None and proof.is_wanted
            checksum, digest = self._sums(data) if is_wanted else (self._checksum(data), b"")
            if checksum != header.checksum:
                raise BadFrame(f"block {header.block} does not fit its checksum")
            if proof is not None and is_wanted:
                proof.add(header.block, len(data), digest)
        return header.block, header.length_bytes

    def receive_part(self, view: memoryview) -> tuple[int, int]:
        """The next part of a block into ``view``: its position in the file, and its length.

        :raises TransferFailure: as :meth:`receive`.
        """
        with self._failures():
            header = self._due(Type.PART, len(view))
            self._fill(view[: header.length_bytes])
            if self._checksum(view[: header.length_bytes]) != header.checksum:
                raise BadFrame(f"the part at {header.block} does not fit its checksum")
        return header.block, header.length_bytes

    def _due(self, kind: Type, most_bytes: int) -> Header:
        """The header of the next frame. :raises BadFrame: it is of another kind, or larger."""
        header = frames.decode_header(self._exactly(frames.HEADER_BYTES), self._checksum)
        if header.type is Type.REFUSE:
            payload = self._exactly(header.length_bytes)
            told = messages.decode(frames.Frame(header, payload))
            raise BadFrame(getattr(told, "message", ""))
        if header.type is not kind or header.length_bytes > most_bytes:
            raise BadFrame(f"{header.type.name} of {header.length_bytes} bytes where a {kind.name} was due")
        return header

    def _pass_relays(self) -> None:
        """Have the circuit made; the HELLO to its end follows at once, so that it costs no wait of its own."""
        self._greet(self.route[0])
        claim = self._back or (self._lane.claim if self._lane else Claim())
        rest = (*self.route[1:], self.gateway.server)
        back = self._back is not None
        self.send(Via(rest, self.flow or claim.flow, claim.owner, claim.priority, claim.deadline, back))
        self._checksum = zlib.crc32
        self._refused = ErrorClass.PERMISSION_DENIED, ErrorClass.CONNECT_FAILED

    def _digests(self) -> tuple[str, ...]:
        if self.gateway.digest:
            return (self.gateway.digest,)
        return SAFE_DIGESTS if self.gateway.credential else tuple(frames.digests())

    def _cover(self) -> None:
        """TLS from here on, to the end of the route: relays see nothing of it."""
        import ssl  # most links have none: its library takes as long as a small file

        from stageout.overlay import tls

        raw, patience_s = self._socket, self._patience_s(self.gateway.server, len(self.route))
        try:
            self._socket = tls.secured(raw, trusting(self.gateway.ca), self.gateway.host, patience_s)
        except ssl.SSLCertVerificationError as problem:
            why = f"its certificate is not one of {self.gateway.ca}: {problem.verify_message}"
            raise self.failure(ErrorClass.TLS_UNTRUSTED, why) from None
        except ssl.SSLError as problem:
            raise self.failure(ErrorClass.TLS_UNTRUSTED, f"TLS: {problem.reason or problem}") from None
        except socket.timeout:
            raise self._unanswered(patience_s) from None
        except NoThread as problem:
            raise self.failure(ErrorClass.CONNECT_FAILED, str(problem.strerror)) from None
        except OSError as problem:
            words = f"{problem.strerror or problem}; has the router a certificate (STAGEOUT_ROUTER_CERT)?"
            raise self.failure(ErrorClass.CONNECTION_LOST, words) from None

    def _patience_s(self, server: str, relays: int) -> float:
        """Return how long a greeting may take. :param server: that is to answer. :param relays: that it passes."""
        timeout_s = self.gateway.timeout_s
        return timeout_s if server in _answered else min(timeout_s, _GREETING_S + relays * _RELAY_S)

    def _unanswered(self, patience_s: float) -> TransferFailure:
        words = f"connected, but no router has answered there in {patience_s:.0f} s"
        return self.failure(ErrorClass.CONNECT_FAILED, f"{words}: is it the router's port, and does the router run?")

    def _greet(self, server: str, relays: int = 0) -> None:
        hello = offer(socket.gethostname(), self.gateway.key_name, self._digests())
        self.send(hello)
        patience_s = self._patience_s(server, relays)
        if not self.has_more(patience_s):
            raise self._unanswered(patience_s)
        welcome = self.receive()
        if not isinstance(welcome, Welcome):
            raise self.failure(ErrorClass.NOT_SUPPORTED, f"{type(welcome).__name__} where WELCOME was due")
        try:
            proved = accept(hello, welcome, self.gateway.secret)
        except WrongKey as problem:
            raise self.failure(ErrorClass.CREDENTIAL_REFUSED, str(problem)) from None
        except BadFrame as problem:
            raise self.failure(ErrorClass.NOT_SUPPORTED, str(problem)) from None
        _answered.add(server)
        self._checksum_name, self._checksum = welcome.checksum, frames.checksums()[welcome.checksum]
        self._sums = frames.sums(welcome.checksum, welcome.digest)
        self.digest = frames.digests()[welcome.digest]
        self.store, self.cancels, self.packs = welcome.store, welcome.cancels, welcome.packs
        self.parts, self.packed_bytes = welcome.parts, welcome.packed_bytes or packs.MAX_FILE_BYTES
        self.digest_name = welcome.digest
        self.node, self._nonce = welcome.node, welcome.nonce
        self.ahead_s = welcome.clock - int(time.time())
        self.send(proved)

    def _frame(self) -> tuple[Header, bytearray]:
        header = frames.decode_header(self._exactly(frames.HEADER_BYTES), self._checksum)
        payload = self._exactly(header.length_bytes)
        if self._checksum(payload) != header.checksum:
            raise BadFrame(f"a {header.type.name} does not fit its checksum")
        return header, payload

    def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        self._fill(memoryview(data))
        return data

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise ConnectionResetError("the router closed the connection")
            self.received_bytes += count
            view = view[count:]

    def _failures(self) -> _Failures:
        return _Failures(self)

    def failure(self, kind: ErrorClass, message: str) -> TransferFailure:
        """A failure that names the router, and the way to it."""
        way = f"{self.gateway.server} by {shown(self.route)}" if self.route else self.gateway.server
        return TransferFailure(kind, f"{way}: {message}", self.gateway.server)


class _Failures:
    """Turns what a socket raises into failures of the table."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, problem: BaseException | None, trace: object) -> None:
        failure = self._channel.failure
        if isinstance(problem, (socket.timeout, BlockingIOError)):
            raise failure(ErrorClass.STALLED, f"silent for {self._channel.gateway.timeout_s:.0f} s") from None
        if isinstance(problem, BadFrame):
            raise failure(ErrorClass.CONNECTION_LOST, str(problem)) from None
        if isinstance(problem, OSError):
            raise failure(ErrorClass.CONNECTION_LOST, problem.strerror or str(problem)) from None


def _first_hop(gateway: Gateway, route: Route) -> tuple[str, int]:
    try:
        check(route)
        return address(route[0]) if route else (gateway.host, gateway.port)
    except BadRoute as problem:
        raise TransferFailure(ErrorClass.BAD_REQUEST, str(problem), gateway.server) from None
