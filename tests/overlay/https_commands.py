"""``stageout put`` and ``get`` with ``https://`` URLs, as scripts call them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.overlay.http_site import Site


@dataclass
class Commands:
    """Commands for one router, with a key that it knows. :ivar err: what the last one said to people."""

    site: Site
    home: Path
    user: str = "alice"
    err: str = ""
    options: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        key = self.home / f"{self.user}.key"
        self.site.keys[self.user].store("key", key)
        self.options = ["--key", str(key), "--user", self.user, "--cacert", str(self.site.ca), *self.options]

    def url(self, path: str) -> str:
        """Of a name that is percent-encoded."""
        return f"{self.site.url}/{path}"

    def command(self, *words: str) -> list[str]:
        """The command line of one."""
        return [sys.executable, "-m", "stageout.cli.main", words[0], *self.options, *words[1:], "--json"]

    def begun(self, *words: str) -> subprocess.Popen[str]:
        """One that runs."""
        return subprocess.Popen(self.command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def ended(self, process: subprocess.Popen[str], status: int = 0) -> list[dict[str, Any]]:
        """The objects of one that was begun."""
        out, self.err = process.communicate(timeout=300)
        assert process.returncode == status, (process.returncode, out, self.err)
        return [json.loads(line) for line in out.splitlines()]

    def __call__(self, *words: str, status: int = 0) -> list[dict[str, Any]]:
        """Run one; returns its objects."""
        return self.ended(self.begun(*words), status)
