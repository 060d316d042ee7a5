"""Ways to a router as its users have them: commands over the protocol of frames, and curl and commands over HTTP."""

from __future__ import annotations

import subprocess
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from tests.overlay.http_site import Site


@dataclass(frozen=True)
class Wire(ABC):
    """One way. :param port: where the client connects: the router's, or of somebody in between; 0: the router's."""

    here: Site
    port: int = 0

    #: Durable steps of a router that takes a file so.
    steps: ClassVar[tuple[str, ...]] = (
        "overlay-grant", "overlay-stage", "overlay-intent", "overlay-publish", "overlay-settle"
    )  # fmt: skip

    @abstractmethod
    def _command(self, verb: str, path: str, *words: str) -> list[str]:
        """Return the command for it. :param words: local file, or the other name."""

    def begin(self, verb: str, path: str, *words: str) -> subprocess.Popen[str]:
        """Start put, get, rm, mkdir or mv."""
        command = self._command(verb, path, *words)
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, verb: str, path: str, *words: str) -> str:
        """Do it; "" if that went well, else what was said."""
        with self.begin(verb, path, *words) as process:
            said, _ = process.communicate(timeout=300)
        return f"{process.returncode}: {said}" if process.returncode else ""


class Frames(Wire):
    """``stageout put overlay://...``."""

    def _command(self, verb: str, path: str, *words: str) -> list[str]:
        port, key = self.port or self.here.router.port, str(self.here.router.key_file("site"))
        url = f"overlay://127.0.0.1:{port}"
        arguments = {
            "put": [*words, f"{url}{path}"], "get": [f"{url}{path}", *words],
            "mv": [f"{url}{path}", *(f"{url}{word}" for word in words)],
        }  # fmt: skip
        return [sys.executable, "-m", "stageout.cli.main", verb, "--key", key, *arguments.get(verb, [f"{url}{path}"])]


class Tools(Wire):
    """``curl https://...``."""

    def _command(self, verb: str, path: str, *words: str) -> list[str]:
        mine = self.here.router.port
        options = {
            "put": ["--upload-file", *words], "get": ["--output", *words], "rm": ["--request", "DELETE"],
            "mkdir": ["--request", "MKCOL"],
            "mv": ["--request", "MOVE", *(f"--header=Destination: {self.here.url}{word}" for word in words)],
        }[verb]  # fmt: skip
        options = [part for one in options for part in one.split("=", 1)]
        if self.port:
            options += ["--connect-to", f"localhost:{mine}:127.0.0.1:{self.port}"]
        return [
            "curl", "--silent", "--show-error", "--fail", "--max-time", "120", "--cacert", str(self.here.ca),
            "--header", f"Authorization: Bearer {self.here.token()}", *options, f"{self.here.url}{path}",
        ]  # fmt: skip


class Client(Tools):
    """``stageout put https://...``. Names are changed with curl."""

    steps = ("operation-row", "operation-blocks", "operation-intent", "overlay-publish", "operation-end")

    def _command(self, verb: str, path: str, *words: str) -> list[str]:
        if verb not in ("put", "get"):
            return super()._command(verb, path, *words)
        key = self.here.router.home / "alice.key"
        self.here.keys["alice"].store("key", key)
        url = f"https://localhost:{self.port or self.here.router.port}{path}"
        names = [*words, url] if verb == "put" else [url, *words]
        known = ["--key", str(key), "--user", "alice", "--cacert", str(self.here.ca)]
        return [sys.executable, "-m", "stageout.cli.main", verb, *known, *names]


#: Each test of a promise runs by each of these.
WIRES = (Frames, Tools, Client)
