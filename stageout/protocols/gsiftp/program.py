"""One run of globus-url-copy: its command line, its time limits, and its end when the plugin ends."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Callable

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.api import Context
from stageout.protocols.gsiftp.dialogue import Dialogue, read_dialogue, wanted

_LOOK_INTERVAL_S = 0.2
_TERM_GRACE_S = 3.0
_KEPT_LINES = 20_000
_BLOCK_BYTES = 256 << 10


@dataclass(frozen=True)
class Knobs:
    """Settings of one batch.

    :param streams: data connections of one file (``-p``). :param concurrency: files at once (``-cc``).
    :param block_bytes: size of reads and writes (``-bs``).
    :param tcp_bytes: TCP buffer (``-tcp-bs``); 0: the kernel's choice.
    :param stall_s: seconds without a transferred byte before the run is given up.
    """

    streams: int
    concurrency: int
    block_bytes: int
    tcp_bytes: int
    stall_s: float


def read_knobs(context: Context, concurrency: int) -> Knobs:
    """Read the settings from the environment or the machine's ad. Values that are no numbers count as unset."""

    def number(name: str, default: int, least: int) -> int:
        text = context.setting(name, str(default))
        return int(text) if text.isdigit() and int(text) >= least else default

    return Knobs(
        context.parallelism,
        concurrency,
        number("GSIFTP_BLOCK_BYTES", _BLOCK_BYTES, 1024),
        number("GSIFTP_TCP_BYTES", 0, 0),
        float(number("STALL_WINDOW_S", 60, 1)),
    )


@dataclass(frozen=True)
class Pair:
    """One file of the list, with URLs in globus-url-copy's form."""

    source: str
    target: str


class Program:
    """Execution of globus-url-copy.

    :param path: path of the executable. :param upload: direction of the data, which determines how progress is
        measured.
    """

    def __init__(self, path: str, knobs: Knobs, upload: bool) -> None:
        self._path = path
        self._knobs = knobs
        self._upload = upload

    def transfer(
        self, pairs: Sequence[Pair], watch: Callable[[int], None], streams: int, most_bytes: int = 0
    ) -> Dialogue:
        """Move the files of a list.

        :param streams: connections of each file; 1: a plain FTP transfer unless there are several files.
        :param most_bytes: move only this number of bytes of each file; 0: all of it.
        :raises TransferFailure: STALLED, or a failure that ``watch`` raises.
        """
        knobs = self._knobs
        options = ["-c", "-bs", str(knobs.block_bytes)]
        options += ["-cd"] if self._upload else []
        options += ["-tcp-bs", str(knobs.tcp_bytes)] if knobs.tcp_bytes else []
        options += ["-p", str(streams)] if streams > 1 or len(pairs) > 1 else []
        options += ["-len", str(most_bytes)] if most_bytes else []
        if len(pairs) > 1:
            options += ["-pp"] + (["-cc", str(knobs.concurrency)] if knobs.concurrency > 1 else [])
        return self._run(options, pairs, watch)

    def compare(self, pairs: Sequence[Pair], digests: bool, watch: Callable[[int], None]) -> tuple[Dialogue, set[str]]:
        """Compare existing files through the servers. Move nothing.

        :returns: the servers' answers, and the targets that are missing or differ from their source.
        """
        with tempfile.TemporaryDirectory(prefix="stageout-gsiftp-") as name:
            dump = Path(name) / "differ"
            options = ["-c", "-sync", "-sync-level", "3" if digests else "1", "-do", str(dump)]
            dialogue = self._run(options, pairs, watch)
            text = dump.read_text(errors="replace") if dump.exists() else ""
        return dialogue, {line.split('"')[3] for line in text.splitlines() if line.count('"') >= 4}

    def _run(self, options: list[str], pairs: Sequence[Pair], watch: Callable[[int], None]) -> Dialogue:
        with tempfile.NamedTemporaryFile("w", prefix="stageout-gsiftp-", suffix=".list") as file:
            file.write("".join(f"{pair.source} {pair.target}\n" for pair in pairs))
            file.flush()
            process = subprocess.Popen(
                [self._path, "-dbg", *options, "-f", file.name],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            lines: list[str] = []
            assert process.stderr is not None
            reader = threading.Thread(target=_collect, args=(process.stderr, lines), daemon=True)
            reader.start()
            try:
                self._wait(process, watch)
            finally:
                _end(process)
                reader.join()
        return read_dialogue(lines)

    def _wait(self, process: subprocess.Popen[str], watch: Callable[[int], None]) -> None:
        moved_bytes, moved_s = 0, time.monotonic()
        while True:
            try:
                process.wait(_LOOK_INTERVAL_S)
                return
            except subprocess.TimeoutExpired:
                pass
            now_bytes = self._moved_bytes(process.pid)
            if now_bytes != moved_bytes:
                moved_bytes, moved_s = now_bytes, time.monotonic()
            watch(moved_bytes)
            if time.monotonic() - moved_s > self._knobs.stall_s:
                text = f"stalled: nothing moved within {self._knobs.stall_s:.0f} s, {moved_bytes} bytes before that"
                raise TransferFailure(ErrorClass.STALLED, text)

    def _moved_bytes(self, pid: int) -> int:
        """Return the bytes that the process has read and written, an approximation of its progress."""
        name = "rchar" if self._upload else "wchar"
        try:
            lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)


def _collect(stream: IO[str], lines: list[str]) -> None:
    for line in stream:
        if wanted(line) and len(lines) < _KEPT_LINES:
            lines.append(line)


def _end(process: subprocess.Popen[str]) -> None:
    for number, grace_s in ((signal.SIGTERM, _TERM_GRACE_S), (signal.SIGKILL, _TERM_GRACE_S)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            continue
