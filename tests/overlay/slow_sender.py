"""A sender to a custodian that gives its blocks one by one."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from overlay_router.peers.keys import Key
from overlay_router.peers.origins import known_as
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.key_file import gateway_of
from stageout.overlay.wire.messages import BLOCK_BYTES, Attach, Message, Open, Opened, Operation, Staged, Status
from tests.harness.router import RouterProcess


class Slow:
    """A sender that sends its blocks one by one."""

    def __init__(self, custodian: RouterProcess, terminal: RouterProcess, source: Path, release: str) -> None:
        self.gateway, self.data, self.epoch = _gateway(custodian), source.read_bytes(), ""
        self.origin, self.expires = os.urandom(16).hex(), int(time.time()) + 1000
        self.control = Channel(self.gateway)
        self.terminal, self.release = terminal, release
        self.control.send(
            Open(
                self.origin,
                1,
                "slow",
                len(self.data),
                BLOCK_BYTES,
                self.expires,
                terminal=terminal.address,
                release=release,
            )
        )
        opened = self.control.receive()
        assert isinstance(opened, Opened)
        self.tid, self.already = opened.tid, opened.staged

    def block(self, number: int) -> bytes:
        return self.data[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]

    @contextlib.contextmanager
    def attached(self) -> Iterator[Channel]:
        """A connection for its data."""
        with Channel(self.gateway) as channel:
            channel.send(Attach(self.tid))
            yield channel

    def send(self, *numbers: int) -> None:
        """On return they are STAGED."""
        left = set(numbers)
        with self.attached() as channel:
            for number in numbers:
                channel.send_block(self.tid, number, self.block(number))
            while left:
                left -= self.staged()

    def opened(self) -> Opened:
        """The blocks that the router reports to be there when its data are to come anew."""
        said = self.control.receive()
        assert isinstance(said, Opened)
        return said

    def staged(self) -> set[int]:
        """Blocks that the router says to be STAGED next, and in which epoch."""
        said = self.control.receive()
        assert isinstance(said, Staged)
        self.epoch = said.epoch
        return {block for first, end in said.staged for block in range(first, end)}

    def publish(self) -> None:
        blocks = -(-len(self.data) // BLOCK_BYTES)
        digests = b"".join(self.control.digest(self.block(number)) for number in range(blocks))
        self.control.send(
            Operation(
                self.origin, 1, "publish", "slow", self.expires, size_bytes=len(self.data), blocks=blocks,
                manifest=hashlib.sha256(digests).hexdigest(), terminal=self.terminal.address, release=self.release,
            )
        )  # fmt: skip

    def at_terminal(self) -> Message:
        """Ask the terminal, with the key of custodian and sender, about the origin that the custodian hands on."""
        handed_on = known_as(Key(self.gateway.key_name, b"", ""), self.origin)
        with Channel(_gateway(self.terminal)) as channel:
            channel.send(Status(handed_on, 1))
            return channel.receive()

    def is_at_terminal(self, blocks: int) -> bool:
        said = self.at_terminal()
        return isinstance(said, Staged) and said.staged == ((0, blocks),)


def _gateway(router: RouterProcess) -> Gateway:
    return gateway_of("127.0.0.1", router.port, router.key_file("site"), timeout_s=20)
