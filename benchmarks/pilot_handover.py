"""2,000 files of 4 KiB that a pilot hands over to a custodian on the loopback interface, beside the same one by one.

The plugin is called as the manager calls it, and its start counts. A file counts when its receipt is there, so when it
is on the custodian's disk. The terminal is away: nothing is delivered meanwhile.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from common import Figure, main

from stageout.core.errors import StageoutError
from stageout.overlay.channel import Gateway
from stageout.overlay.key_file import read_key
from stageout.overlay.many import Crew
from stageout.overlay.safekeeping import Custodian, deposit_copies
from stageout.wire.deposits import name_of, new_seed, operation_of
from tests.harness.router import RouterProcess, custodian_for

ROOT = Path(__file__).resolve().parents[1]
FILES, SIZE_BYTES, AT_ONCE = 2000, 4096, 4


class Pilot:
    """Small files, and the custodian that gets them for a terminal that is away."""

    def __init__(self, home: Path, custodian: RouterProcess, terminal: str, files: int) -> None:
        self._home, self._custodian, self._terminal = home, custodian, terminal
        self._key = custodian.key_file("site")
        self._files = [home / "sandbox" / f"out{number}" for number in range(1, files + 1)]
        self._files[0].parent.mkdir()
        for file in self._files:
            file.write_bytes(os.urandom(SIZE_BYTES))

    def packed(self) -> float:
        """Files a second by the plugin, in one call."""
        place = f"overlay://{self._terminal}/{new_seed('')}"
        rows = [f'[ Url = "{place}/{one.name}"; LocalFileName = "{one}" ]' for one in self._files]
        infile, outfile = self._home / "in", self._home / "out"
        infile.write_text("\n".join(rows))
        given = {
            "STAGEOUT_OVERLAY_KEY": str(self._key),
            "STAGEOUT_OVERLAY_HANDOVER": self._custodian.address,
            "STAGEOUT_OVERLAY_SEED": new_seed(""),
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, ROOT / "plugins/overlay_router_plugin", "-infile", infile, "-outfile", outfile]
        started = time.perf_counter()
        subprocess.run([*command, "-upload"], check=True, env={**os.environ, **given})
        took_s = time.perf_counter() - started
        if outfile.read_text().count("StageOutCustody") != len(self._files):
            raise StageoutError("not every file has a receipt")
        return len(self._files) / took_s

    def one_by_one(self) -> float:
        """Files a second, each on connections of its own, some at a time; without the start of a plugin."""
        gateway = Gateway("127.0.0.1", self._custodian.port, *read_key(self._key))
        place, seed = Custodian(gateway, self._terminal), new_seed("")
        given: list[object] = []

        def give(number: int, file: Path) -> None:
            origin, seq = operation_of(name_of(seed, number), gateway.secret)
            path = f"{seed}/{file.name}"
            given.extend(deposit_copies([place], file, path, copies=1, origin=origin, seq=seq))

        started = time.perf_counter()
        with Crew(AT_ONCE) as crew:
            for number, file in enumerate(self._files, 1):
                crew.do(partial(give, number, file))
        took_s = time.perf_counter() - started
        if len(given) != len(self._files):
            raise StageoutError("not every file was taken")
        return len(self._files) / took_s


def measure(quick: bool) -> list[Figure]:
    """The figures."""
    rates: dict[str, list[float]] = {"packed": [], "one by one": []}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        with RouterProcess(home / "terminal") as terminal, custodian_for(home / "custodian", [terminal]) as custodian:
            terminal.stop()
            pilot = Pilot(home, custodian, terminal.address, FILES // 10 if quick else FILES)
            for _ in range(1 if quick else 3):
                rates["packed"].append(pilot.packed())
                rates["one by one"].append(pilot.one_by_one())
    packed, alone = statistics.median(rates["packed"]), statistics.median(rates["one by one"])
    return [Figure("files handed over, in packs", packed, "1/s", "one by one", alone)]


if __name__ == "__main__":
    sys.exit(main("pilot_handover", measure))
