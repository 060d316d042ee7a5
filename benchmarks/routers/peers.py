"""Servers of the programs that the overlay is compared with, where these are installed: XRootD and rclone."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stageout.core.errors import StageoutError


@contextmanager
def xrootd(folder: Path) -> Iterator[int]:
    """An XRootD server whose root is ``xrootd`` in the folder; gives its port."""
    place, admin = folder / "xrootd", folder / "xrootd-admin"
    for path in (place, admin):
        path.mkdir()
        path.chmod(0o777)
    port = _free_port()
    config = folder / "xrootd.cfg"
    lines = [f"xrd.port {port}", "all.export /", f"oss.localroot {place}", f"all.adminpath {admin}"]
    config.write_text("\n".join([*lines, f"all.pidpath {admin}"]) + "\n")
    user = ["-R", "daemon"] if os.getuid() == 0 else []
    with _running(["xrootd", *user, "-c", str(config), "-l", str(admin / "log")], port):
        yield port


@contextmanager
def rclone(folder: Path) -> Iterator[int]:
    """``rclone serve webdav`` of ``rclone`` in the folder; gives its port. It sees at once that a file was removed."""
    place, port = folder / "rclone", _free_port()
    place.mkdir()
    command = ["rclone", "--config", "", "serve", "webdav", str(place), "--dir-cache-time", "0s"]
    with _running([*command, "--addr", f"127.0.0.1:{port}"], port):
        yield port


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@contextmanager
def _running(command: list[str], port: int) -> Iterator[None]:
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port, server, command[0])
        yield
    finally:
        server.terminate()
        server.wait(30)


def _wait_for(port: int, server: subprocess.Popen[bytes], name: str) -> None:
    end_s = time.monotonic() + 30
    while server.poll() is None and time.monotonic() < end_s:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise StageoutError(f"{name} does not answer")
