"""A block of Parsl that sends a file to a URL through HTCondor, and a program that fetches it at the end of the block.

Usage: parsl_run.py URL [SUBMIT-LINE]
"""

from __future__ import annotations

import os
import sys
import time
from urllib.error import HTTPError
from urllib.request import urlopen

import parsl
from parsl.executors import HighThroughputExecutor
from parsl.launchers import SimpleLauncher
from parsl.providers import CondorProvider


@parsl.bash_app
def make() -> str:
    """Write the file in the scratch directory of the block."""
    return "echo data > $_CONDOR_SCRATCH_DIR/big"


def main() -> int:
    """Run the app, wait for the end of the block, and fetch the file."""
    url, lines = sys.argv[1], sys.argv[2:]
    options = [f"output_destination = {url}", "transfer_output_files = big", "request_disk = 10M", *lines]
    provider = CondorProvider(
        init_blocks=1,
        max_blocks=1,
        mem_per_slot=0.1,
        environment={"PATH": os.environ["PATH"]},
        scheduler_options="\n".join(options),
        launcher=SimpleLauncher(),
    )
    executor = HighThroughputExecutor(provider=provider, max_workers_per_node=1, drain_period=20, address="127.0.0.1")
    with parsl.load(parsl.Config(executors=[executor], strategy="none", run_dir="parsl")):
        make().result(timeout=180)
        block = executor.blocks_to_job_id["0"]
        while not (state := provider.status([block])[0]).terminal:
            time.sleep(1)
        print("block", block, state.state.name, flush=True)
        try:
            with urlopen(f"{url}/big") as answer:
                print("fetched", answer.read().decode().strip(), flush=True)
        except HTTPError as problem:
            print("not there", problem.code, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
