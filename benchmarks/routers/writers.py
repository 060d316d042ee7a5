"""Several writers, or readers, in one process; prints JSON. ``writers.py JOB``.

The job: ``folder`` of sources, ``key`` file, ``at_once``, and ``files``, each with ``do`` (put, get, deposit, rename or
delete), ``end``, ``path``, ``size_bytes``, and as needed ``routes``, ``terminal``, ``origin``, ``compute_s`` (before
it), ``target`` (its name afterwards), ``optional`` (nobody waits for it), ``leave`` (nor for its delivery). Of each
file is said, in seconds from the beginning: ``free_s`` (the writer may go on), ``there_s`` (it is at its destination),
``named_s`` (under its last name); and ``sent_bytes``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import put
from stageout.overlay.fetch import get
from stageout.overlay.key_file import gateway_of
from stageout.overlay.operations import Session
from stageout.overlay.safekeeping import Custodian, deposit_copies
from stageout.overlay.wire.messages import Result, Status
from stageout.overlay.wire.route import Route, address, parse_routes

_MIB = 1 << 20
_ASK_AGAIN_S = 5.0


class Work:
    """All of a job."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._folder, self._key, self._start_s = Path(job["folder"]), Path(job["key"]), time.monotonic()
        self._files: list[dict[str, Any]] = job["files"]
        self._todo: SimpleQueue[int] = SimpleQueue()
        self._told: list[dict[str, Any]] = [{} for _ in self._files]
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(job.get("at_once", 1))]
        self._awaited = [number for number, file in enumerate(self._files) if not file.get("optional")]
        self._failures: list[str] = []
        self._sources = {file["size_bytes"]: self._source(file["size_bytes"]) for file in self._files}

    def run(self) -> list[dict[str, Any]]:
        """The outcome of each file, in order. :raises RuntimeError: one failed."""
        for number in range(len(self._files)):
            self._todo.put(number)
        self._start_s = time.monotonic()
        for thread in self._threads:
            thread.start()
        while not self._failures and not all(self._told[number] for number in self._awaited):
            time.sleep(0.01)
        if self._failures:
            raise RuntimeError(self._failures[0])
        return self._told

    def _source(self, size_bytes: int) -> Path:
        path = self._folder / f"source{size_bytes}"
        if not path.exists() or path.stat().st_size != size_bytes:
            path.write_bytes((os.urandom(_MIB) * (size_bytes // _MIB + 1))[:size_bytes])
        return path

    def _run(self) -> None:
        while True:
            try:
                number = self._todo.get_nowait()
            except Empty:
                return
            file = self._files[number]
            try:
                time.sleep(file.get("compute_s", 0.0))
                self._told[number] = self._one(number, file)
            except Exception as problem:
                if not file.get("optional"):
                    self._failures.append(f"{file['path']}: {problem!r}")

    def _one(self, number: int, file: dict[str, Any]) -> dict[str, Any]:
        end, what = gateway_of(*address(file["end"]), self._key), file["do"]
        routes: tuple[Route, ...] = parse_routes(file.get("routes", ""))
        local, sent_bytes = self._sources[file["size_bytes"]], file["size_bytes"]
        if what == "get":
            get(end, file["path"], self._folder / f"back{number}", routes=routes)
        elif what == "deposit":
            return self._deposit(end, file, local)
        elif what == "put":
            sent_bytes = put(end, local, file["path"], routes=routes, terminal=file.get("terminal", "")).sent_bytes
        else:
            with Session(end) as session:
                session.rename(file["path"], file["target"]) if what == "rename" else session.delete(file["path"])
                session.push()
        there_s = named_s = self._now_s()
        if what == "put" and "target" in file:
            with Session(end) as session:
                session.rename(file["path"], file["target"])
                session.push()
            named_s = self._now_s()
        return {"free_s": there_s, "there_s": there_s, "named_s": named_s, "sent_bytes": sent_bytes}

    def _deposit(self, end: Gateway, file: dict[str, Any], local: Path) -> dict[str, Any]:
        """:return: ``there_s`` is known later: somebody else waits for it."""
        custodians, origin = [Custodian(end, file["terminal"])], file.get("origin", "")
        (given,) = deposit_copies(custodians, local, file["path"], copies=1, origin=origin)
        told = {"free_s": self._now_s(), "sent_bytes": given.sent_bytes}
        if not file.get("leave"):
            threading.Thread(target=self._wait, args=(end, given.origin, told), daemon=True).start()
        return told

    def _wait(self, end: Gateway, origin: str, told: dict[str, Any]) -> None:
        """On one connection: questions that each make one would cost the custodian more than the file does."""
        with Channel(end) as channel:
            channel.send(Status(origin, 1))
            while not isinstance(answer := channel.receive(), Result) or answer.outcome == "pending":
                while not channel.has_more(_ASK_AGAIN_S):
                    channel.send(Status(origin, 1))
        if answer.outcome != "done":
            self._failures.append(f"a deposit is {answer.outcome}: {answer.reason}")
        told["there_s"] = self._now_s()

    def wait_there(self) -> None:
        """Until every file that somebody waits for has arrived."""
        while not self._failures and not all(
            "there_s" in self._told[number] for number in self._awaited if not self._files[number].get("leave")
        ):
            time.sleep(0.01)
        if self._failures:
            raise RuntimeError(self._failures[0])

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s


def main() -> None:
    """Do it."""
    work = Work(json.loads(sys.argv[1]))
    told = work.run()
    work.wait_there()
    print(json.dumps({"files": told}), flush=True)
    os._exit(0)  # whoever is not awaited may hang


if __name__ == "__main__":
    main()
