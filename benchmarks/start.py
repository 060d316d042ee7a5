"""How long plugins and ``stageout`` take from their start to their end, with one small file at most.

All run under this interpreter, in turn, with compiled bytecode as an installation has it. The interpreter alone stands
beside; ``classad_query.py`` has what plugins take to answer ``-classad``. The router is on this machine.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from common import Figure, main

from stageout.testing.starter import installed
from tests.harness.router import RouterProcess

ROOT = Path(__file__).resolve().parents[1]
Command = Sequence["str | Path"]


def medians_ms(commands: Mapping[str, Command], rounds: int, environment: Mapping[str, str]) -> dict[str, float]:
    """Median wall time of each command, run in turn; the first round, which compiles, is not counted."""
    times_ms: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds + 1):
        for name, command in commands.items():
            started = time.perf_counter()
            subprocess.run(
                command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment
            )  # fmt: skip
            times_ms[name].append((time.perf_counter() - started) * 1000)
    return {name: statistics.median(values[1:]) for name, values in times_ms.items()}


def measure(quick: bool) -> list[Figure]:
    """The figures."""
    with tempfile.TemporaryDirectory() as folder, RouterProcess(Path(folder) / "router") as router:
        home = Path(folder)
        key = router.key_file("site")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"PYTHONPATH": str(ROOT), "STAGEOUT_OVERLAY_KEY": str(key)}
        commands = {
            "interpreter": [sys.executable, "-c", "pass"],
            **_plugins(home, router.port),
            **_words(home, router.port, key),
        }
        medians = medians_ms(commands, 7 if quick else 31, environment)
    bare_ms = medians.pop("interpreter")
    return [Figure(f"{name}, median", found, "ms", "the interpreter alone", bare_ms) for name, found in medians.items()]


def _plugins(home: Path, port: int) -> dict[str, Command]:
    file, commands = home / "file", dict[str, Command]()
    file.write_bytes(b"x")
    for name, url in (
        ("stageout_curl_plugin", f"file://{home}/there"),
        ("overlay_router_plugin", f"overlay://127.0.0.1:{port}/there"),
    ):
        order = home / f"{name}.in"
        order.write_text(f'[ Url = "{url}"; LocalFileName = "{file}" ]\n')
        commands[f"{name}, one small file"] = [
            sys.executable, installed(ROOT / "plugins" / name, home),
            "-infile", order, "-outfile", home / f"{name}.out", "-upload",
        ]  # fmt: skip
    return commands


def _words(home: Path, port: int, key: Path) -> dict[str, Command]:
    """The command, as it is called."""
    call: Command = [sys.executable, "-m", "stageout.cli.main"]
    url, credential = f"overlay://127.0.0.1:{port}/", ["--key", key]
    return {
        "stageout put, one small file": [*call, "put", home / "file", f"{url}put", *credential],
        "stageout get, one small file": [*call, "get", f"{url}put", home / "got", *credential],
        "stageout ls": [*call, "ls", url, *credential],
        "stageout status --help": [*call, "status", "--help"],
        "stageout wait --help": [*call, "wait", "--help"],
    }


if __name__ == "__main__":
    sys.exit(main("start", measure))
