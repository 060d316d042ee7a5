"""A worker of Dask-jobqueue that sends a file to a URL through HTCondor, and a cluster that is closed at its end.

Usage: dask_run.py URL [KEY=VALUE]
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from dask.distributed import Client
from dask_jobqueue.htcondor import HTCondorCluster


def make() -> str:
    """Write the file in the scratch directory of the worker."""
    Path(os.environ["_CONDOR_SCRATCH_DIR"], "big").write_text("data\n")
    return "made"


def main() -> int:
    """Run the task, wait until the worker has ended by itself, and close the cluster."""
    extra = {
        "should_transfer_files": "YES",
        "transfer_output_files": "big",
        "output_destination": sys.argv[1],
        "transfer_executable": "false",
        **dict(word.split("=", 1) for word in sys.argv[2:]),
    }
    with HTCondorCluster(
        cores=1,
        memory="200MB",
        disk="10MB",
        death_timeout="120",
        worker_extra_args=["--lifetime", "20s"],
        job_extra_directives=extra,
        interface="lo",
        scheduler_options={"dashboard": False},
    ) as cluster:
        cluster.scale(jobs=1)
        with Client(cluster) as client:
            print(client.submit(make).result(timeout=180), flush=True)
            (job,) = (worker.job_id for worker in cluster.workers.values())
            while _status(job) not in ("4", ""):
                time.sleep(1)
            print("job", job, _status(job) or "gone", flush=True)
    return 0


def _status(job: str) -> str:
    """JobStatus of a job in the queue; "" for none."""
    return subprocess.run(["condor_q", job, "-af", "JobStatus"], capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
