"""One measured call of a transfer plugin: rate, CPU and memory of the plugin, and of the server when it is here."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from stageout.condor.plugins import Plugin
from stageout.core import log
from stageout.core.classad_parser import parse_ads
from stageout.core.classads import ClassAd, ClassAdSyntaxError, decode, unparse_ad
from stageout.core.errors import StageoutError
from stageout.core.profiles import Measurement
from stageout.core.units import size
from stageout.sampling.processes import Usage, usage_of

_SAMPLE_NAME = ".stageout-sample-{}"
_PATTERN_BYTES = 4 << 20
_OUTFILE_BYTES = 19264
_TIDY_TRIES = 3
_EMPTY_TRIES = 3  # the quicker one counts: a machine that is busy for a moment must not make rates look higher
_LOOK_S = 0.04
_GRACE_S = 15.0
_LEAST_SPLIT_BYTES = 64 << 10
_STEADY_MOST = 1.4


@dataclass(frozen=True)
class Setting:
    """The transfer to measure.

    :param file_bytes: of each file. :param files: how many. :param streams: of each file.
    :param concurrency: files at once. :param block_bytes: of reads and writes, 0: the plugin's choice.
    :param reserve: whether space is reserved first; None: as it comes. :param first: number of the first sample's name.
    """

    file_bytes: int
    files: int = 1
    streams: int = 1
    concurrency: int = 1
    block_bytes: int = 0
    reserve: bool | None = None
    first: int = 0


@dataclass
class Carrier:
    """Transfer of samples between this machine and one URL.

    :param url: a file to download; for an upload a place to write to: a directory (``/`` at its end), or a file beside
        which the samples are put under names of their own.
    :param folder: where the local ends are: on a disk, or in memory. :param limit_s: longest time of one call.
    :param server_pid: of the server, when it runs on this machine; 0: not looked at.
    :param steady: rates are to be those of a transfer that goes on for long, without its begin and end.
    :param settings: further environment of the plugin. :param most_bytes: all calls together move no more; 0: no limit.
    :ivar moved_bytes: over the network, all calls together. :ivar spent_s: time of all calls together.
    """

    plugin: Plugin
    url: str
    upload: bool
    folder: Path
    limit_s: float = 60.0
    server_pid: int = 0
    steady: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    most_bytes: int = 0
    moved_bytes: int = 0
    spent_s: float = 0.0
    _empty_s: float = field(default=-1.0, repr=False)

    @property
    def method(self) -> str:
        """Scheme of the URL."""
        return urlsplit(self.url).scheme.lower().rpartition("+")[2]

    @property
    def server(self) -> str:
        """Host and port."""
        return urlsplit(self.url).netloc.rpartition("@")[2].lower()

    @property
    def multi_stream(self) -> bool:
        """One file moves over several streams; else several files are moved at once."""
        return self.plugin.multi_stream(self.method, self.upload)

    def streams(self, count: int, all_bytes: int) -> Setting:
        """Find the setting that uses this many streams at once to move this many bytes in all."""
        if self.multi_stream:
            return Setting(max(1, all_bytes), 1, count, 1)
        return Setting(max(1, all_bytes // count), count, 1, count)

    def empty_s(self) -> float:
        """Return the seconds of an upload without bytes (connecting, checks); 0 for downloads. Measured once.

        :raises StageoutError: it failed; the text is the plugin's.
        """
        if self.upload and self._empty_s < 0:
            self._empty_s = 0.0
            tries = [self._results_of(Setting(0)) for _ in range(_EMPTY_TRIES)]
            self._empty_s = min(_seconds(ads[0]) for ads, *_ in tries)
        return max(0.0, self._empty_s)

    @property
    def left_bytes(self) -> int:
        """Return the bytes that may still be moved, where there is a limit."""
        return max(0, self.most_bytes - self.moved_bytes)

    def run(self, setting: Setting) -> Measurement:
        """Move what the setting says and measure it.

        :raises StageoutError: it failed; the text is the plugin's. Or it is more than may still be moved.
        """
        all_bytes = setting.file_bytes * setting.files
        if self.most_bytes and all_bytes > self.left_bytes:
            text = f"a sample of {size(all_bytes)} is more than the {size(self.left_bytes)} left for sampling"
            raise StageoutError(f"{text}: name a larger file, or use one stream")
        self.empty_s()
        ads, seconds, client, before, server = self._results_of(setting)
        return self._measured(setting, ads, seconds, client, before, server)

    def _results_of(self, setting: Setting) -> tuple[list[ClassAd], float, Usage, Usage, Usage]:
        """Run the plugin. Return its result ads, the wall time, its usage, and the server's usage before and after."""
        with tempfile.TemporaryDirectory(prefix="stageout-sample-", dir=self.folder) as name:
            place = Path(name)
            if self.upload:
                self._write_samples(place, setting)
            (place / "in").write_text("".join(unparse_ad(ad) for ad in self._requests(place, setting)))
            (place / "out").write_text(" " * _OUTFILE_BYTES)
            before = usage_of(self.server_pid)
            start_s = time.monotonic()
            client, server = self._call(place, setting)
            seconds = time.monotonic() - start_s
            self.spent_s += seconds
            ads = _results(place / "out")
        failed = next((ad for ad in ads if ad.get("TransferSuccess") is not True), None)
        if not ads or (failed is not None and not any(map(_steady, ads))):
            text = failed.text("TransferError") if failed is not None else "it said nothing about the files"
            raise StageoutError(f"{self.plugin.path.name}: {text}")
        return ads, seconds, client, before, server

    def tidy(self, most_files: int) -> None:
        """Make the samples that uploads left behind empty: a transfer plugin cannot delete.

        In a local directory they are removed. Does its best: a failure here costs nobody a measurement.
        """
        if not self.upload:
            return
        if self.method == "file":
            for number in range(most_files):
                Path(urlsplit(self.target(number)).path).unlink(missing_ok=True)
            return
        for _ in range(_TIDY_TRIES):
            try:
                self.run(Setting(0, most_files, 1, min(4, most_files)))
            except StageoutError as problem:
                log.warn("samples-cleanup-failed", place=self.url, problem=problem)
            else:
                return

    def _write_samples(self, place: Path, setting: Setting) -> None:
        pattern = os.urandom(min(_PATTERN_BYTES, max(1, setting.file_bytes)))
        for number in range(setting.files):
            left = setting.file_bytes
            with (place / str(number)).open("wb") as file:
                while left > 0:
                    left -= file.write(pattern[:left])

    def target(self, number: int) -> str:
        """Return the URL of a sample that an upload leaves."""
        return self.url[: self.url.rfind("/") + 1] + _SAMPLE_NAME.format(number)

    def _requests(self, place: Path, setting: Setting) -> list[ClassAd]:
        ads = []
        for number in range(setting.files):
            data: dict[str, object] = {"checksum_policy": "off"}
            if not self.upload:
                data["sample_bytes"] = setting.file_bytes
            url = self.target(setting.first + number) if self.upload else self.url
            ads.append(ClassAd({"Url": url, "LocalFileName": str(place / str(number)), "PluginData": data}))
        return ads

    def _environment(self, setting: Setting) -> dict[str, str]:
        split_bytes = max(_LEAST_SPLIT_BYTES, -(-setting.file_bytes // setting.streams))
        known = {
            "STAGEOUT_MOVER": "1",  # no hand-off, one attempt
            "STAGEOUT_PARALLELISM": str(setting.streams),
            "STAGEOUT_CONCURRENCY": str(setting.concurrency),
            "STAGEOUT_SPLIT_BYTES": str(split_bytes),  # equal parts: as long a run for each stream as there can be
            "STAGEOUT_PLUGIN_LIFETIME_S": f"{self.limit_s / 0.9:.1f}",
            "STAGEOUT_CHECKSUM_POLICY": "off",
        }
        if setting.block_bytes:
            known["STAGEOUT_GSIFTP_BLOCK_BYTES"] = str(setting.block_bytes)
        if setting.reserve is not None:
            known["STAGEOUT_RESERVE_SPACE"] = "true" if setting.reserve else "false"
        return {**os.environ, **known, **self.settings}

    def _call(self, place: Path, setting: Setting) -> tuple[Usage, Usage]:
        """Run the plugin; usage of the plugin, and of the server at the end."""
        command = [str(self.plugin.path), "-infile", "in", "-outfile", "out", *(["-upload"] if self.upload else [])]
        with (place / "log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=place, env=self._environment(setting), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        end_s = time.monotonic() + self.limit_s + _GRACE_S
        most_rss = server_rss = 0
        try:
            while True:
                most_rss = max(most_rss, usage_of(process.pid).rss_bytes)
                server_rss = max(server_rss, usage_of(self.server_pid).rss_bytes)
                done, _, used = os.wait4(process.pid, os.WNOHANG)
                if done:
                    break
                if time.monotonic() > end_s:
                    raise StageoutError(f"{self.plugin.path.name} did not end within {self.limit_s + _GRACE_S:.0f} s")
                time.sleep(_LOOK_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        process.returncode = 0  # already waited for
        server = usage_of(self.server_pid)
        own = Usage(used.ru_utime + used.ru_stime, max(most_rss, used.ru_maxrss * 1024))
        return own, Usage(server.cpu_s, max(server_rss, server.rss_bytes))

    def _measured(
        self, setting: Setting, ads: list[ClassAd], seconds: float, client: Usage, before: Usage, after: Usage
    ) -> Measurement:
        moved = [ad.integer("TransferTotalBytes") for ad in ads]
        self.moved_bytes += sum(moved)
        here = self.server_pid != 0
        return Measurement(
            "upload" if self.upload else "download",
            setting.file_bytes,
            setting.streams,
            setting.concurrency,
            setting.block_bytes,
            sum(moved),
            round(seconds, 3),
            self._rate(setting, ads, sum(moved), seconds),
            round(client.cpu_s, 3),
            client.rss_bytes,
            round(after.cpu_s - before.cpu_s, 3) if here else None,
            after.rss_bytes if here else None,
            setting.reserve,
        )

    def _rate(self, setting: Setting, ads: list[ClassAd], moved_bytes: int, call_s: float) -> float:
        """Compute the bytes per second of all files together.

        Bytes are seen as they arrive. Of what is sent, megabytes of each stream may wait in the kernel and are not at
        the server: there the whole time counts, without that of an empty file. Of many files it is what the call took,
        the plugin's start and the checks included: that is their cost. Where a steady rate is wanted, see
        :func:`steady_rate`.
        """
        if len(ads) > setting.concurrency:
            return moved_bytes / call_s
        seen = float(sum(map(_steady, ads))) if all(map(_steady, ads)) else 0.0
        if not self.upload and seen:
            return seen
        took_s = max(1e-3, *map(_seconds, ads))
        whole = moved_bytes / (
            took_s - min(self.empty_s(), took_s / 2)
        )  # half: on a busy machine the empty one may be slower
        return steady_rate(seen, whole) if self.steady and seen else whole


def steady_rate(seen: float, whole: float) -> float:
    """Estimate the rate of an upload that goes on for long.

    The plugin measures it while 40 to 90 % of the bytes leave the plugin. The measurement is wrong if it shows only how
    the kernel's buffers fill. The buffers were full by then if they hold at most 40 % of the bytes. Emptying them must
    also explain all the time that the upload took longer than at that rate.

    :param seen: by the plugin, bytes/s. :param whole: all bytes over the whole time.
    """
    return seen if seen <= _STEADY_MOST * whole else whole


def _steady(ad: ClassAd) -> int:
    return _developer(ad).integer("StageOutBytesPerSecond")


def _developer(ad: ClassAd) -> ClassAd:
    found = ad.get("DeveloperData")
    return found if isinstance(found, ClassAd) else ClassAd()


def _seconds(ad: ClassAd) -> float:
    value = _developer(ad).get("StageOutSeconds")
    if isinstance(value, (int, float)):
        return float(value)
    return float(ad.integer("TransferEndTime") - ad.integer("TransferStartTime"))


def _results(path: Path) -> list[ClassAd]:
    try:
        return list(parse_ads(decode(path.read_bytes()).strip()))
    except (OSError, ClassAdSyntaxError):
        return []
