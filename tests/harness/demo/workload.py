"""The jobs of demonstration and benchmarks: their input, their output and the files that must arrive."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

MB = 1_000_000
INPUT_NAME = "input.dat"

# The wait stands for the computation: the cores of a small machine stay free for the pool that is measured.
SCRIPT = """\
#!/bin/sh
# usage: job.sh COMPUTE_S FILES FILE_BYTES [INPUT]; prints what it did, and the time as its last instruction
date +'started %s.%N'
start=$(date +%s%N)
[ -z "$4" ] || sha256sum "$4" | sed 's/^/input /'
n=1
while [ "$n" -le "$2" ]; do
    head -c "$3" /dev/urandom >"result-$n.dat"
    sha256sum "result-$n.dat" | sed 's/^/wrote /'
    n=$((n + 1))
done
left=$(( $1 * 1000 - ($(date +%s%N) - start) / 1000000 ))
[ "$left" -le 0 ] || sleep "$(printf '%d.%03d' $((left / 1000)) $((left % 1000)))"
exec date +'ended %s.%N'
"""


@dataclass(frozen=True)
class Workload:
    """Equal jobs in one submit file.

    :param jobs: how many.
    :param compute_s: whole seconds from a job's first to its last instruction (longer if writing takes longer).
    :param files: output files of each. :param file_bytes: size of each file.
    :param input_bytes: size of the file that each job fetches by URL; 0: none.
    """

    jobs: int
    compute_s: int
    files: int
    file_bytes: int
    input_bytes: int = 0

    @property
    def job_bytes(self) -> int:
        """Output of one job."""
        return self.files * self.file_bytes

    def arguments(self) -> list[str]:
        """Command line of the job's script."""
        given = INPUT_NAME if self.input_bytes else ""
        return [str(self.compute_s), str(self.files), str(self.file_bytes), *([given] if given else [])]

    def names(self) -> list[str]:
        """Output files of one job."""
        return [f"result-{number}.dat" for number in range(1, self.files + 1)]

    def submit_text(self, url: str, *, attributes: str = "") -> str:
        """The submit file.

        :param url: of the destination; job N's files go below ``url/N/``.
        :param attributes: further lines.
        """
        inputs = f"transfer_input_files    = {url}/{INPUT_NAME}\n" if self.input_bytes else ""
        destination = f"output_destination      = {url}/$(ProcId)/\n" if self.files else ""
        return (
            "executable              = job.sh\n"
            f"arguments               = {' '.join(self.arguments())}\n"
            f"{inputs}"
            "should_transfer_files   = YES\n"
            f"transfer_output_files   = {', '.join(self.names()) or chr(34) * 2}\n"
            f"{destination}"
            "output                  = job.$(ProcId).out\n"
            "request_cpus            = 1\n"
            "request_disk            = 100MB\n"
            f"{attributes}"
            f"queue {self.jobs}\n"
        )

    def put_input(self, root: Path) -> str:
        """Write the input file at the destination and return its SHA-256."""
        if not self.input_bytes:
            return ""
        data = hashlib.sha256(b"input").digest() * (self.input_bytes // 32 + 1)
        (root / INPUT_NAME).write_bytes(data[: self.input_bytes])
        return hashlib.sha256(data[: self.input_bytes]).hexdigest()


@dataclass
class JobReport:
    """A job's standard output.

    :param started_s: wall clock of its first instruction. :param ended_s: of its last.
    :param input_digest: SHA-256 of what it got. :param digests: output file -> SHA-256 of what it wrote.
    """

    started_s: float = 0.0
    ended_s: float = 0.0
    input_digest: str = ""
    digests: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> JobReport:
        """Read the output of the script; what is missing stays empty."""
        report = cls()
        for line in text.splitlines():
            word, *rest = line.split()
            if word == "started":
                report.started_s = float(rest[0])
            elif word == "ended":
                report.ended_s = float(rest[0])
            elif word == "input":
                report.input_digest = rest[0]
            elif word == "wrote":
                report.digests[rest[1]] = rest[0]
        return report


def file_digest(path: Path) -> str:
    """SHA-256 of a file, "" when it is not there."""
    if not path.is_file():
        return ""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
