"""A law workflow whose branch sends a file to a URL through HTCondor, and a task that fetches it from there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import law

law.contrib.load("htcondor")

URL = os.environ.get("TEST_URL", "")
_HERE = Path(__file__).resolve().parent


class Make(law.htcondor.HTCondorWorkflow, law.LocalWorkflow):
    """Write the file in the scratch directory of the job."""

    def create_branch_map(self) -> dict[int, str]:
        """Return one branch."""
        return {0: "big"}

    def htcondor_output_directory(self) -> Any:
        """Return the directory where law keeps what it knows of its jobs."""
        return law.LocalDirectoryTarget(str(_HERE / "jobs"))

    def htcondor_bootstrap_file(self) -> Any:
        """Return the script that a job runs first."""
        return law.JobInputFile(str(_HERE / "bootstrap.sh"), share=True)

    def htcondor_use_local_scheduler(self) -> bool:
        """Run the branch without a daemon of luigi's."""
        return True

    def htcondor_job_config(self, config: Any, job_num: Any, branches: Any) -> Any:
        """Add the lines for a URL."""
        config.custom_content += [
            ("should_transfer_files", "YES"),
            ("transfer_output_files", "big"),
            ("output_destination", URL),
            ("request_memory", "50"),
            ("request_disk", "10M"),
        ]
        if os.environ.get("TEST_ASK"):
            config.custom_content.append(("MY.StageOutAsync", "true"))
        return config

    def output(self) -> Any:
        """Return a mark that the branch has run."""
        return law.LocalFileTarget(str(_HERE / "made"))

    def run(self) -> None:
        """Write it to the directory from which HTCondor sends it."""
        Path(os.environ["_CONDOR_SCRATCH_DIR"], "big").write_text("data\n")
        self.output().touch()


class Use(law.Task):
    """Read the file."""

    def requires(self) -> Any:
        """Return the workflow."""
        return Make.req(self, workflow="htcondor", poll_interval="3s", no_poll=False, transfer_logs=False)

    def output(self) -> Any:
        """Return a file for the text that was fetched."""
        return law.LocalFileTarget(str(_HERE / "used"))

    def run(self) -> None:
        """Fetch it."""
        with urlopen(f"{URL}/big") as answer:
            self.output().dump(answer.read().decode(), formatter="text")
