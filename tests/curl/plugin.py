"""Runs stageout_curl_plugin as condor_starter does and reads what it says."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stageout.core.classads import ClassAd
from stageout.core.errors import ErrorClass
from stageout.testing.starter import EmbeddedStarter, PluginRun, PluginTable, Wanted

# Short, so that failures come soon; each is a documented knob.
KNOBS = {
    "STAGEOUT_CONNECT_TIMEOUT_S": "3",
    "STAGEOUT_STALL_WINDOW_S": "1.5",
    "STAGEOUT_RESPONSE_TIMEOUT_S": "2.5",
    "STAGEOUT_RETRY_BUDGET_S": "20",
}
NO_RETRY = {"STAGEOUT_RETRY_BUDGET_S": "0"}
#: The job's ad at an access point that retries failed transfers (20-stageout-ap.conf).
RETRYING = {"StageOutRetryDelay": 300}


@dataclass
class Result:
    """Result ads of one call."""

    run: PluginRun

    @property
    def ad(self) -> ClassAd:
        """Of the first file."""
        return self.run.ads[0]

    @property
    def ok(self) -> bool:
        """All arrived, and nothing was printed."""
        good = self.run.succeeded and all(ad["TransferSuccess"] is True for ad in self.run.ads)
        assert good == (self.run.exit_code == 0), self.run
        assert not (good and self.run.printed), self.run.printed
        return good

    @property
    def failures(self) -> list[ErrorClass]:
        """Class of every failed attempt at the first file, oldest first."""
        errors = self.ad.get("TransferErrorData") or []
        return [ErrorClass.from_code(error["ErrorCode"]) for error in errors]

    @property
    def kind(self) -> ErrorClass | None:
        """Why the first file did not arrive; None when it did."""
        return None if self.ad["TransferSuccess"] else self.failures[-1]

    @property
    def verified(self) -> str:
        """The destination's confirmation of the first file."""
        return str(self.ad["DeveloperData"]["StageOutVerified"])

    @property
    def everything(self) -> str:
        """All that leaves the plugin."""
        return "".join(map(str, self.run.ads)) + self.run.printed


class Plugin:
    """Calls of the plugin, each in a scratch directory of its own below ``folder``."""

    def __init__(self, folder: Path, table: PluginTable, executable: Path) -> None:
        self.folder = folder
        self.scratch = folder
        self._table = table
        self._executable = executable
        self._calls = 0

    def new_scratch(self) -> Path:
        """The scratch directory of the next call."""
        self._calls += 1
        self.scratch = self.folder / f"scratch{self._calls}"
        self.scratch.mkdir()
        return self.scratch

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """The starter's environment."""
        hidden = ("STAGEOUT_", "SSL_", "CURL_", "X509_", "_CONDOR")
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(hidden) and not name.lower().endswith("_proxy")
        }
        return {**kept, **KNOBS, **more}

    def call(
        self,
        wanted: Sequence[Wanted],
        upload: bool,
        env: Mapping[str, str] = {},
        job: Mapping[str, Any] | None = None,
        machine: Mapping[str, Any] | None = None,
        credentials: Path | None = None,
        executable: Path | None = None,
        lifetime_s: float = 120,
    ) -> Result:
        """One call with several files, in the present scratch directory."""
        starter = EmbeddedStarter(
            self.scratch,
            self._table,
            job_ad=job,
            machine_ad=machine,
            credentials=credentials,
            environment=self.environment(env),
            lifetime_s=lifetime_s,
        )
        text = starter.input_text(self._executable, list(wanted))
        run = starter.run(executable or self._executable, text, upload)
        assert len(run.ads) == len(wanted), run
        return Result(run)

    def get(self, url: str, name: str = "file", **more: Any) -> Result:
        """Download one file."""
        self.new_scratch()
        return self.call([Wanted(url, name)], upload=False, **more)

    def put(self, url: str, data: bytes = b"some data", name: str = "file", **more: Any) -> Result:
        """Upload one file."""
        (self.new_scratch() / name).write_bytes(data)
        return self.call([Wanted(url, name)], upload=True, **more)

    def got(self, name: str = "file") -> bytes:
        """The content that the last call downloaded."""
        return (self.scratch / name).read_bytes()

    def leftovers(self) -> list[str]:
        """Names in the scratch directory, without HTCondor's own."""
        own = {".job.ad", ".machine.ad", ".stageout_curl_plugin.in", ".stageout_curl_plugin.out"}
        return sorted(path.name for path in self.scratch.iterdir() if path.name not in own)
