"""The rate of plain TCP over a wide-area link: iperf3, which looks at no byte."""

from __future__ import annotations

import json
import shutil
import subprocess

from stageout.core.errors import StageoutError
from tests.harness.wide_area import WideArea

_PORT = 29631


def iperf(area: WideArea, streams: int, size_bytes: int) -> float:
    """MB/s of so many streams. :raises StageoutError: it is not installed, or has failed."""
    if shutil.which("iperf3") is None:
        raise StageoutError("iperf3 is not installed: apt-get install iperf3")
    with subprocess.Popen(
        [*area.far, "iperf3", "-s", "-1", "--forceflush", "-p", str(_PORT)], stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        server.stdout.readline()
        server.stdout.readline()  # "Server listening on ..."
        command = [*area.near, "iperf3", "-c", area.far_address, "-p", str(_PORT), "-P", str(streams), "-J"]
        command += ["-n", str(size_bytes)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            server.kill()
            raise StageoutError(f"iperf3 ended with {done.returncode}: {done.stdout[-200:]}{done.stderr[-200:]}")
    return float(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]) / 8e6
