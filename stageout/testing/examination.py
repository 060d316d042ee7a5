"""The subject of the conformance suite's rules: one plugin, and runs of it that several rules share."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from stageout.core.classads import ClassAd
from stageout.testing.endpoints import Endpoint
from stageout.testing.starter import EmbeddedStarter, PluginError, PluginRun, PluginTable, Wanted, run_query

CONTENT = {"one": b"first\n" * 100, "two": bytes(range(256)) * 300, "empty": b""}
ODD_NAMES = ("a b", "per%20cent", "hash#tag", "question?mark", "plus+&=;", "caf\u00e9")


class NotApplicable(Exception):
    """A rule says nothing about this plugin, and why."""


class Examination:
    """One plugin under examination; runs that several rules look at are made once."""

    def __init__(
        self, plugin: Path, endpoint: Endpoint | None, folder: Path, environment: Mapping[str, str] | None
    ) -> None:
        self.plugin = plugin
        self._endpoint = endpoint
        self._folder = folder
        self._environment = environment
        self._count = 0

    @cached_property
    def printed(self) -> tuple[str, int]:
        """Output and status of the query."""
        return self.ask()

    @property
    def first_line(self) -> str:
        """The plugin's first line, which names its interpreter."""
        with open(self.plugin, "rb") as stream:
            return stream.readline(200).decode("utf-8", "replace").strip()

    @cached_property
    def python_start_s(self) -> float:
        """Seconds that Python alone takes to start and end here: the best of five times."""
        times_s = []
        for _ in range(5):
            started = time.monotonic()
            subprocess.run([sys.executable, "-I", "-c", ""], check=True)
            times_s.append(time.monotonic() - started)
        return min(times_s)

    def ask(self) -> tuple[str, int]:
        """Run the query."""
        return run_query(self.plugin, self._environment)

    @cached_property
    def plugins(self) -> PluginTable:
        """HTCondor's table with this plugin alone."""
        return PluginTable([self.plugin], self._environment)

    @property
    def answer(self) -> ClassAd:
        """The query's ad."""
        if self.plugin in self.plugins.bad:
            raise PluginError(self.plugins.bad[self.plugin])
        return self.plugins.answers[self.plugin]

    @property
    def endpoint(self) -> Endpoint:
        """The place to move files from and to."""
        if self._endpoint is None:
            raise NotApplicable("no place to transfer from: give --url-base and --folder")
        if self.plugins.protocol(self.plugin) == 1:
            raise NotApplicable("the plugin speaks protocol 1, one process per file")
        return self._endpoint

    def starter(self, plugin: Path | None = None, lifetime_s: float = 120, bare: bool = False) -> EmbeddedStarter:
        """Make a starter with a new scratch directory."""
        self._count += 1
        scratch = self._folder / f"scratch-{self._count}"
        scratch.mkdir()
        environment = self._environment
        if bare:
            environment = {"PATH": (os.environ if environment is None else environment).get("PATH", os.defpath)}
        table = self.plugins if plugin is None else PluginTable([plugin], environment)
        return EmbeddedStarter(scratch, table, environment=environment, lifetime_s=lifetime_s)

    def move(self, text: str, upload: bool = False, **how: int) -> PluginRun:
        """Run the plugin with this input file."""
        return self.starter().run(self.plugin, text, upload, **how)

    @cached_property
    def good(self) -> tuple[EmbeddedStarter, PluginRun]:
        """A download of which everything is there."""
        for name, data in CONTENT.items():
            self.endpoint.put(name, data)
        starter = self.starter()
        return starter, starter.download([Wanted(self.endpoint.url(name), name) for name in CONTENT])[0]

    @cached_property
    def partial(self) -> tuple[EmbeddedStarter, PluginRun]:
        """A download in the middle of which one file is missing at the source."""
        self.endpoint.put("one", CONTENT["one"])
        starter = self.starter()
        names = {"one": "a", "missing": "b", "two": "c"}
        self.endpoint.put("two", CONTENT["two"])
        return starter, starter.download([Wanted(self.endpoint.url(name), local) for name, local in names.items()])[0]

    @cached_property
    def uploaded(self) -> PluginRun:
        """An upload of good files."""
        return self.upload({f"up/{name}": data for name, data in CONTENT.items()})

    def upload(self, files: Mapping[str, bytes], raw: bool = False) -> PluginRun:
        """Upload files under these names; ``raw`` as output_destination does, without encoding."""
        starter = self.starter()
        wanted = []
        for number, (name, data) in enumerate(files.items()):
            (starter.scratch / f"f{number}").write_bytes(data)
            url = f"{self.endpoint.url_base}/{name}" if raw else self.endpoint.url(name)
            wanted.append(Wanted(url, f"f{number}"))
        return starter.upload(wanted)[0]

    def wrapped(self, name: str, code: str) -> Path:
        """Write an executable that runs Python code and then becomes the plugin."""
        self._count += 1
        wrapper = self._folder / f"wrapper-{self._count}" / self.plugin.name
        wrapper.parent.mkdir()
        plugin = str(self.plugin)
        wrapper.write_text(
            f"#!{sys.executable}\n# {name}\nimport os, sys\n{code}\nos.execv({plugin!r}, [{plugin!r}, *sys.argv[1:]])\n"
        )
        wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
        return wrapper


def story(run: PluginRun) -> str:
    """Describe a run's end and output, for a finding."""
    end = f"signal {run.exit_signal}" if run.exit_signal else f"exit status {run.exit_code}"
    said = next((ad.text("TransferError") for ad in run.ads if ad.text("TransferError")), "")
    return f"{end}; {said or run.printed.strip()[-160:] or 'nothing said'}"
