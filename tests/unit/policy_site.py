"""A policy service for tests: the real program in a process of its own, and a client for it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.polling import wait_for

TOKENS = {"cms": "cms-token-0123456789abcdef", "atlas": "atlas-token-0123456789abcdef"}
ROOT_DIR = Path(__file__).resolve().parents[2]
_LIMIT_S = 30.0


class Answer:
    """One HTTP answer."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.text = response.read().decode()

    @property
    def json(self) -> Any:
        return json.loads(self.text)


class Service:
    """The running program, started as ``stageout-policy-service --alone``.

    :param folder: for database, tokens and log. :param knobs: without ``STAGEOUT_POLICY``'s underscore: MAX_PAIR, ...
    """

    def __init__(self, folder: Path, environment: dict[str, str] | None = None, **knobs: object) -> None:
        self.folder = folder
        self.tokens = folder / "tokens"
        self.tokens.write_text("".join(f"{owner} {token}\n" for owner, token in TOKENS.items()))
        self.tokens.chmod(0o600)
        self.knobs = {"DIR": str(folder / "db"), "TOKENS": str(self.tokens), "PORT": "0"}
        self.knobs.update({name: str(value) for name, value in knobs.items()})
        self.environment = environment or {}
        self.log = folder / "log"
        self.context: ssl.SSLContext | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def settings(self) -> dict[str, str]:
        """Its knobs as it reads them from the environment."""
        found = {f"_CONDOR_STAGEOUT_POLICY_{name}": value for name, value in self.knobs.items() if name != "POLICY"}
        found["_CONDOR_STAGEOUT_POLICY"] = self.knobs.get("POLICY", "")
        found.setdefault("_CONDOR_STAGEOUT_POLICY_SERVICE_LOG", str(self.log))
        return found

    def start(self, arguments: Sequence[str] = ("--alone",)) -> Service:
        """Start it and wait until it listens."""
        begun = self.log.stat().st_size if self.log.exists() else 0
        process = self.launch(arguments)

        def listening() -> re.Match[str] | None:
            assert process.poll() is None, self.log.read_text()
            return re.search(r" daemon-started .*url=https?://[^:]+:(\d+)", self.log.read_text()[begun:])

        self._port = int(wait_for(listening, "the service listens")[1])
        return self

    def launch(self, arguments: Sequence[str] = ("--alone",)) -> subprocess.Popen[bytes]:
        """Start it only."""
        settings = self.settings if "--alone" in arguments else {}
        self.log.touch()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "policy_service.daemon", *arguments],
            cwd=ROOT_DIR, env={**os.environ, **settings, **self.environment}, stderr=subprocess.PIPE,
        )  # fmt: skip
        return self._process

    def signal(self, number: int) -> None:
        assert self._process
        self._process.send_signal(number)

    def kill(self) -> None:
        """As the out-of-memory killer does it."""
        self.signal(signal.SIGKILL)
        self.ended()

    def stop(self) -> int:
        """Gracefully. :returns: its exit status."""
        self.signal(signal.SIGTERM)
        return self.ended()

    def ended(self) -> int:
        assert self._process
        status = self._process.wait(_LIMIT_S)
        self._process.communicate()
        return status

    def close(self) -> None:
        if self._process and self._process.poll() is None:
            self.kill()

    def ask(self, method: str, path: str, body: object = None, owner: str = "cms", raw: bytes | None = None) -> Answer:
        """One request on a connection of its own. :param owner: whose token; "" for none."""
        headers = {"Authorization": f"Bearer {TOKENS[owner]}"} if owner else {}
        return self.send(method, path, json.dumps(body).encode() if raw is None and body is not None else raw, headers)

    def send(self, method: str, path: str, data: bytes | None, headers: dict[str, str]) -> Answer:
        if self.context:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                "127.0.0.1", self._port, timeout=_LIMIT_S, context=self.context
            )
        else:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_LIMIT_S)
        try:
            connection.request(method, path, data, headers)
            return Answer(connection.getresponse())
        finally:
            connection.close()

    def lease(
        self, client: str, owner: str = "cms", wanted: int = 1000, pair: tuple[str, str] = ("here", "there")
    ) -> Any:
        """Request streams; the lease as JSON."""
        body = {"client": client, "source": pair[0], "destination": pair[1], "wanted": wanted}
        answer = self.ask("POST", "/v1/leases", body, owner)
        assert answer.status == 201, answer.text
        return answer.json

    def renew(self, lease: Any, owner: str = "cms", **body: int) -> Any:
        answer = self.ask("POST", f"/v1/leases/{lease['lease']}/renew", body, owner)
        assert answer.status == 200, answer.text
        return answer.json

    def granted(self) -> int:
        """Streams of all pairs, as /metrics counts them."""
        text = self.ask("GET", "/metrics", owner="").text
        return sum(
            int(float(line.rsplit(" ", 1)[1]))
            for line in text.splitlines()
            if line.startswith("stageout_policy_streams_granted{")
        )
