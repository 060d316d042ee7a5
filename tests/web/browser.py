"""Chromium without a screen, driven by chromedriver's HTTP interface (W3C WebDriver)."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.harness.ports import free_ports
from tests.polling import wait_for

_TIMEOUT_S = 60.0


def missing() -> str:
    """Return the program that is not installed, "" when all are."""
    return next((name for name in ("chromium", "chromedriver") if not shutil.which(name)), "")


class Browser:
    """One window. :param url: of the driver's session."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, method: str, path: str, body: object | None = None) -> Any:
        """Send a command and return its value."""
        data = None if body is None and method == "GET" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)["value"]

    def open(self, url: str) -> None:
        """Load a page."""
        self.ask("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: object) -> Any:
        """Run a script in the page; ``return`` gives its value."""
        return self.ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def run_async(self, script: str) -> Any:
        """Run a script that calls its last argument with its value."""
        return self.ask("POST", "/execute/async", {"script": script, "args": []})

    def click(self, css: str) -> None:
        """Click on the first element that the selector finds, in one step: a page may replace its elements."""
        self.run("document.querySelector(arguments[0]).click()", css)

    def press(self, keys: str) -> None:
        """Press keys, one after the other."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.ask("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def size(self, width: int, height: int) -> None:
        """Give the page this size, in pixels."""
        self._devtools("Emulation.setDeviceMetricsOverride",
                       {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False})  # fmt: skip

    def theme(self, name: str) -> None:
        """Prefer "light" or "dark"."""
        self._devtools("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": name}]})

    def zone(self, name: str) -> None:
        """Set the browser's time zone; "": that of the machine."""
        self._devtools("Emulation.setTimezoneOverride", {"timezoneId": name})

    def screenshot(self) -> bytes:
        """Return the window as a PNG."""
        return base64.b64decode(self.ask("GET", "/screenshot"))

    def messages(self) -> list[dict[str, Any]]:
        """Return messages of the console since the last call."""
        found: list[dict[str, Any]] = self.ask("POST", "/se/log", {"type": "browser"})
        return found

    def _devtools(self, command: str, parameters: dict[str, Any]) -> None:
        self.ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})


@contextlib.contextmanager
def browser(folder: Path, *options: str) -> Iterator[Browser]:
    """Start a browser for a test. :param folder: for profile, log and downloads. :param options: of Chromium."""
    [port] = free_ports(1)
    arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                 "--host-resolver-rules=MAP *.example.org 127.0.0.1",
                 f"--user-data-dir={folder / 'profile'}", "--window-size=1200,900", *options]  # fmt: skip
    downloads = {"download.default_directory": str(folder)}
    wanted = {"goog:chromeOptions": {"args": arguments, "binary": shutil.which("chromium"), "prefs": downloads},
              "goog:loggingPrefs": {"browser": "ALL"}}  # fmt: skip
    with (folder / "driver.log").open("wb") as log:
        driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=log, stderr=log)
    base = Browser(f"http://127.0.0.1:{port}")
    try:
        wait_for(lambda: _is_ready(base), "chromedriver listens")
        made = base.ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        window = Browser(f"http://127.0.0.1:{port}/session/{made['sessionId']}")
        try:
            yield window
        finally:
            window.ask("DELETE", "")
    finally:
        driver.terminate()
        driver.wait()


def _is_ready(base: Browser) -> bool:
    with contextlib.suppress(OSError):
        return bool(base.ask("GET", "/status")["ready"])
    return False
