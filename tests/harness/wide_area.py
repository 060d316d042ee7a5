"""A wide-area link on one machine, with real TCP: two network namespaces, and a process that delays packets in between.

Not every kernel has netem. So each namespace has a TUN device, and one process takes packets out of one and puts them
into the other: after the time that the rate of the link and its length take, dropped at random or when the queue is
full. Needs root.

>>> with WideArea(Link(rate_bytes_per_s=20e6, round_trip_s=0.1)) as area:     # doctest: +SKIP
...     subprocess.run([*area.near, "ping", "-c1", area.far_address])
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from stageout.core.errors import StageoutError

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_MTU_BYTES = 9000
_START_S = 10.0


@dataclass(frozen=True)
class Link:
    """The properties of the link, the same in both directions.

    :param queue_s: how long packets may wait for their turn; those that would wait longer are dropped.
    :param loss: share of packets that are dropped at random.
    :param window_bytes: most bytes that one TCP connection keeps under way; 0: the kernel's limits.
    :param mtu_bytes: largest packet.
    :param congestion: TCP's congestion control; one of tcp_allowed_congestion_control, namespaces get no other.
    """

    rate_bytes_per_s: float
    round_trip_s: float
    queue_s: float = 0.1
    loss: float = 0.0
    window_bytes: int = 0
    congestion: str = "reno"
    mtu_bytes: int = _MTU_BYTES


@dataclass
class WideArea:
    """Two namespaces with a link between them.

    :ivar near: command prefix of the near side. :ivar far: of the far side.
    """

    link: Link
    name: str = field(default_factory=lambda: f"so{os.getpid()}{random.randrange(1000):03}")
    near_address: str = "10.201.0.1"
    far_address: str = "10.201.0.2"
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def near(self) -> tuple[str, ...]:
        """Put before a command, it runs on the near side."""
        return ("ip", "netns", "exec", f"{self.name}n")

    @property
    def far(self) -> tuple[str, ...]:
        """Likewise on the far side."""
        return ("ip", "netns", "exec", f"{self.name}f")

    def __enter__(self) -> WideArea:
        if os.geteuid() != 0:
            raise StageoutError("a wide-area link needs root: it makes network namespaces")
        try:
            for end in "nf":
                _run("ip", "netns", "add", self.name + end)
                self._hosts(end).parent.mkdir(parents=True)
                # No name server is reached from there; "ip netns exec" shows this file as /etc/hosts.
                names = f"127.0.0.1 localhost {socket.gethostname()}"
                self._hosts(end).write_text(f"{names}\n{self.near_address} near\n{self.far_address} far\n")
            self._start()
            for end, own, other in (
                ("n", self.near_address, self.far_address),
                ("f", self.far_address, self.near_address),
            ):
                self._configure(self.name + end, own, other)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def change_rate(self, rate_bytes_per_s: float) -> None:
        """Let both directions carry so much from now on. With 0 the link is down: packets vanish without a word."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{rate_bytes_per_s}\n".encode())
        self._process.stdin.flush()

    def stop(self) -> None:
        """Take it all away."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
        for end in "nf":
            subprocess.run(["ip", "netns", "del", self.name + end], capture_output=True, check=False)
            shutil.rmtree(self._hosts(end).parent, ignore_errors=True)

    def _hosts(self, end: str) -> Path:
        return Path(f"/etc/netns/{self.name}{end}/hosts")

    def _start(self) -> None:
        link = self.link
        figures = [link.rate_bytes_per_s, link.round_trip_s / 2, link.queue_s, link.loss]
        command = [
            sys.executable,
            "-m",
            "tests.harness.wide_area",
            f"{self.name}n",
            f"{self.name}f",
            *map(str, figures),
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _START_S)
        if not ready or self._process.stdout.readline() != b"ready\n":
            raise StageoutError("the link's process did not start; is there /dev/net/tun?")

    def _configure(self, namespace: str, own: str, other: str) -> None:
        inside = ("ip", "-n", namespace)
        _run(*inside, "link", "set", "lo", "up")
        _run(*inside, "addr", "add", own, "peer", other, "dev", "wan0")
        _run(*inside, "link", "set", "wan0", "mtu", str(self.link.mtu_bytes), "up")
        settings = {"tcp_congestion_control": self.link.congestion, "tcp_no_metrics_save": "1"}
        if self.link.window_bytes:
            # The kernel gives half of the receive buffer to the window.
            settings["tcp_rmem"] = f"4096 65536 {2 * self.link.window_bytes}"
            settings["tcp_wmem"] = f"4096 65536 {2 * self.link.window_bytes}"
        for name, value in settings.items():
            _run("ip", "netns", "exec", namespace, "sysctl", "-qw", f"net.ipv4.{name}={value}")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StageoutError(f"{' '.join(command)}: {done.stderr.strip()}")


class _Way:
    """One direction: packets that are under way."""

    def __init__(self, target: int, rate: float, delay_s: float, queue_s: float, loss: float) -> None:
        self._target = target
        self.rate = rate
        self._delay_s = delay_s
        self._queue_s = queue_s
        self._loss = loss
        self._free_s = 0.0
        self._under_way: deque[tuple[float, bytes]] = deque()

    def take(self, packet: bytes, now_s: float) -> None:
        if not self.rate or (self._loss and random.random() < self._loss):
            return
        start_s = max(now_s, self._free_s)
        if start_s - now_s > self._queue_s:
            return
        self._free_s = start_s + len(packet) / self.rate
        self._under_way.append((self._free_s + self._delay_s, packet))

    def give(self, now_s: float) -> float:
        """Deliver what is due; seconds until the next one."""
        while self._under_way and self._under_way[0][0] <= now_s:
            with contextlib.suppress(OSError):  # the device is not up yet, or is full: lost
                os.write(self._target, self._under_way.popleft()[1])
        return self._under_way[0][0] - now_s if self._under_way else 1.0


def _device(namespace: str) -> int:
    """A TUN device in a namespace; it lives as long as the descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{namespace}").open("rb") as place:
        if libc.setns(place.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", b"wan0", _IFF_TUN | _IFF_NO_PI))
    return descriptor


def _forward(namespaces: list[str], figures: list[float]) -> None:
    os.nice(-10)  # a busy machine is not to change the link
    near, far = (_device(name) for name in namespaces)
    ways = {near: _Way(far, *figures), far: _Way(near, *figures)}
    print("ready", flush=True)
    wait_s = 1.0
    parent = os.getppid()
    while os.getppid() == parent:
        readable, _, _ = select.select([near, far, 0], [], [], max(0.0, wait_s))
        now_s = time.monotonic()
        if 0 in readable:
            told = os.read(0, 4096).split()
            if not told:
                return
            for way in ways.values():
                way.rate = float(told[-1])
        for descriptor in ways.keys() & readable:
            with contextlib.suppress(BlockingIOError):
                for _ in range(64):
                    ways[descriptor].take(os.read(descriptor, _MTU_BYTES + 100), now_s)
        wait_s = min(way.give(time.monotonic()) for way in ways.values())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _forward(sys.argv[1:3], [float(word) for word in sys.argv[3:]])
