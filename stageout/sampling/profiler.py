"""Profiles a server: rate, CPU and memory against block size, streams, files at once and file size, within bounds.

After G. Kola, T. Kosar, M. Livny, "Profiling Grid Data Transfer Protocols and Servers": block size against streams,
files at once against streams (their figures 3 and 4), for writes and reads, and what space reservation costs writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from stageout.core.errors import StageoutError
from stageout.core.profiles import Best, Measurement, Profile
from stageout.core.units import size
from stageout.sampling.carrier import Carrier, Setting
from stageout.tuning.choice import choose

STREAMS = (1, 2, 4, 8)
FILES_AT_ONCE = (1, 2, 4, 8)
BLOCKS_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
_SIZES_BYTES = (64 << 10, 1 << 20, 16 << 20)
_PROBE_BYTES = 4 << 20
_PROBE_STEP = 8
_MOST_FILES = 32
_MEASURES = 40  # how many runs of the usual size the limits should allow
_RESERVED_PAIRS = 5
_WITHIN = 0.03
#: Equal measurements by which the noise is known, and numbers of streams or of files among which one is chosen.
_EQUAL, LEAST_LEVELS = 3, 3
#: Measurements of each kind for a comparison: the range of five is an interval with 94 % confidence of their median.
_FOR_COMPARISON = 5


@dataclass(frozen=True)
class Limits:
    """The bounds of a profile's cost. :param time_s: start nothing after it. :param size_bytes: move no more."""

    time_s: float = 120.0
    size_bytes: int = 4 * 10**9


@dataclass(frozen=True)
class Outcome:
    """A profile, and what was left out of the plan and why ("" for nothing)."""

    profile: Profile
    left_out: int
    why: str


class Profiler:
    """Measurement of the profile of one server.

    :param upload: writes samples. :param download: builds the carrier that reads them again, from a file's URL; None:
        only writes are measured. :param blocks: the plugin lets its block size be set.
    :param said: called with each result.
    """

    def __init__(
        self,
        upload: Carrier,
        download: Callable[[str], Carrier] | None,
        blocks: bool,
        limits: Limits,
        said: Callable[[Measurement], None] = lambda run: None,
    ) -> None:
        self._upload = upload
        self._download = download
        self._blocks = blocks
        self._limits = limits
        self._log_run = said
        self._start_s = time.monotonic()
        self._runs: list[Measurement] = []
        self._moved_bytes = 0
        self._stop_reason = ""

    def run(self) -> Outcome:
        """Measure as much of the plan as the limits allow; samples are made empty or removed at the end.

        :raises StageoutError: not even the first transfer worked.
        """
        left_out = 0
        try:
            usual = self._usual_bytes()
            plans = [(self._upload, self._plan(self._upload, usual))]
            if self._download is not None:
                self._upload.run(Setting(usual, first=_MOST_FILES))  # beside those that other writes replace
                reader = self._download(self._upload.target(_MOST_FILES))
                plans.append((reader, self._plan(reader, usual)))
            left_out = self._measure(plans)
        finally:
            self._upload.tidy(_MOST_FILES + 1)
        best = {
            way: _best(self._runs, way) for way in ("upload", "download") if any(r.direction == way for r in self._runs)
        }
        if not best:
            raise StageoutError(self._stop_reason)
        profile = Profile(self._upload.server, self._upload.method, int(time.time()), best, tuple(self._runs))
        return Outcome(profile, left_out, self._stop_reason)

    def _usual_bytes(self) -> int:
        """Choose the size of a file that moves for about a second, within the limits of each measurement.

        Or for four times as long as connecting and the checks take: over a long way a second of it is nothing but slow
        start. Probes grow until one is about as large: a small one tells
        more about the plugin's start.
        """
        each_s = min(max(1.0, 4 * self._upload.empty_s()), self._limits.time_s / (2 * _MEASURES))
        most = self._limits.size_bytes // _MEASURES
        probe_bytes = min(_PROBE_BYTES, most)
        while True:
            size = min(int(self._upload.run(Setting(probe_bytes)).rate_bytes_per_s * each_s), most)
            if size < _PROBE_STEP * probe_bytes or probe_bytes == most:
                return max(64 << 10, 1 << (max(1, size).bit_length() - 1))
            probe_bytes = min(_PROBE_STEP * probe_bytes, most)

    def _measure(self, plans: Sequence[tuple[Carrier, list[Setting]]]) -> int:
        """Measure both directions in turn, so that a limit cuts both at the same place. Return what was left out."""
        left_out = 0
        for step in range(max(len(plan) for _, plan in plans)):
            for carrier, plan in plans:
                if step >= len(plan):
                    continue
                setting = plan[step]
                if self._over(setting):
                    left_out += 1
                    continue
                try:
                    self._one(carrier, setting)
                except StageoutError as problem:
                    left_out, self._stop_reason = left_out + 1, str(problem)
        return left_out

    def _one(self, carrier: Carrier, setting: Setting) -> None:
        run = carrier.run(setting)
        self._moved_bytes += run.moved_bytes
        self._runs.append(run)
        self._log_run(run)

    def _over(self, setting: Setting) -> bool:
        if time.monotonic() - self._start_s > self._limits.time_s:
            self._stop_reason = f"the time was up ({self._limits.time_s:.0f} s)"
            return True
        if self._moved_bytes + setting.file_bytes * setting.files > self._limits.size_bytes:
            self._stop_reason = f"the bytes were used up ({size(self._limits.size_bytes)})"
            return True
        return False

    def _plan(self, carrier: Carrier, usual: int) -> list[Setting]:
        """List the measurements, the most telling first.

        None is there twice, except for the pairs with and without reservation, and the first one, for the noise.
        """
        plan: list[Setting] = []
        for setting in self._settings(carrier, usual):
            if setting.reserve is not None or setting not in plan:
                plan.append(setting)
        first, step = plan[0], len(STREAMS)
        for count in range(1, _EQUAL):  # apart from each other, so that they differ as the others do
            plan.insert(count * step, first)
        return plan

    def _settings(self, carrier: Carrier, usual: int) -> Iterator[Setting]:
        streams = STREAMS if carrier.multi_stream else (1,)
        for count in streams:
            yield Setting(usual, 1, count, 1)
        for count in FILES_AT_ONCE:
            part = carrier.upload or carrier.multi_stream  # else only whole files can be read
            yield Setting(max(1, usual // count) if part else usual, count, 1, count)
        if carrier.upload or carrier.multi_stream:
            for size in _SIZES_BYTES:
                if size < usual:
                    yield Setting(size, max(1, min(_MOST_FILES, usual // size)), 1, 4)
        if carrier.upload and carrier.method == "file":
            for _ in range(_RESERVED_PAIRS):
                for reserve in (False, True):
                    yield Setting(usual, 1, 1, 1, reserve=reserve)
        if self._blocks:
            for block in BLOCKS_BYTES:
                for count in streams:
                    yield Setting(usual, 1, count, 1, block_bytes=block)
        for files in FILES_AT_ONCE[1:]:
            for count in streams[1:]:
                yield Setting(max(1, usual // files), files, count, files)


def _best(runs: Sequence[Measurement], direction: str) -> Best:
    """Choose the fewest streams of one file, the fewest files at once, and the best rate that either reaches."""
    found = levels(runs, direction)
    if not found.by_streams or not found.by_files:
        return Best(1, 1, max(run.rate_bytes_per_s for run in _plain(runs, direction)))
    within = max(_WITHIN, found.noise or 0.0)
    streams, files = (choose(known, within, margin=1.0) for known in (found.by_streams, found.by_files))
    return Best(streams.streams, files.streams, max(streams.rate, files.rate))


class Levels(NamedTuple):
    """The rates (bytes/s) that were measured in one direction.

    :param by_streams: of one file. :param by_files: files at once, with one stream each.
    :param single: median rate of one file with one stream.
    :param noise: difference of the largest and the smallest rate of one file with one stream, as a fraction of
        ``single``; None when this was measured less than three times.
    """

    by_streams: dict[int, float]
    by_files: dict[int, float]
    single: float
    noise: float | None

    @property
    def are_enough(self) -> bool:
        """Tell whether a number of streams or of files at once can be chosen."""
        return self.noise is not None and max(len(self.by_streams), len(self.by_files)) >= LEAST_LEVELS


def levels(runs: Sequence[Measurement], direction: str) -> Levels:
    """Return the rates of the measurements of about the same size; of equal ones their median."""
    plain = _plain(runs, direction)
    streams: dict[int, list[float]] = {}
    files: dict[int, list[float]] = {}
    for run in plain:
        if run.concurrency == 1:
            streams.setdefault(run.streams, []).append(run.rate_bytes_per_s)
        if run.streams == 1 and run.all_at_once:
            files.setdefault(run.concurrency, []).append(run.rate_bytes_per_s)
    equal = [run.rate_bytes_per_s for run in plain if run.concurrency == run.streams == 1 and run.all_at_once]
    single = median(equal) if equal else 0.0
    noise = (max(equal) - min(equal)) / single if len(equal) >= _EQUAL else None
    by_streams, by_files = ({number: median(rates) for number, rates in found.items()} for found in (streams, files))
    return Levels(by_streams, by_files, single, noise)


def _plain(runs: Sequence[Measurement], direction: str) -> list[Measurement]:
    plain = [run for run in runs if run.direction == direction and not run.block_bytes and run.reserved is None]
    largest = max((run.moved_bytes for run in plain), default=0)
    return [run for run in plain if run.moved_bytes > largest // 2]


class Comparison(NamedTuple):
    """Result of a comparison of two kinds of measurements.

    :param cost: share of the median rate that the first kind costs (negative: a gain). :param pairs: of measurements.
    :param is_clear: there are five of each, and the intervals of the medians with 94 % confidence do not overlap.
    """

    cost: float
    pairs: int
    is_clear: bool


def reservation_cost(runs: Sequence[Measurement]) -> Comparison | None:
    """Compare writes with and without reserved space; None if that was not measured."""
    kept, free = ([run.rate_bytes_per_s for run in runs if run.reserved is way] for way in (True, False))
    if not kept or not free:
        return None
    count = min(len(kept), len(free))
    apart = max(kept) < min(free) or max(free) < min(kept)
    return Comparison(1 - median(kept) / median(free), count, count >= _FOR_COMPARISON and apart)


def writer(carrier: Carrier) -> Carrier:
    """Make the same carrier for uploads into the directory of its URL.

    :raises StageoutError: the URL names no directory.
    """
    if not carrier.url.endswith("/"):
        raise StageoutError(f"{carrier.url} must name a directory that may be written to, with / at its end")
    return replace(carrier, upload=True)
