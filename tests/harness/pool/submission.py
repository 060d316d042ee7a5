"""A submission, and the names of its jobs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.harness.pool.errors import PoolError

_DEFAULTS = {"log": "job.log", "output": "job.out", "error": "job.err"}


@dataclass(frozen=True)
class Submission:
    """One condor_submit. Its text is the first job's id, so it can stand wherever a job id can.

    :param ids: "cluster.proc" of each job.
    :param dir: directory that it was submitted from.
    :param log: path of the user log.
    """

    cluster: int
    ids: tuple[str, ...]
    dir: Path
    user: str
    log: Path

    def __str__(self) -> str:
        return self.ids[0]

    @classmethod
    def parse(cls, output: str, place: Path, user: str, text: str) -> Submission:
        """Read what condor_submit printed."""
        cluster = submitted_cluster(output)
        found = re.search(r"(\d+) job\(s\) submitted", output)
        ids = tuple(f"{cluster}.{proc}" for proc in range(int(found.group(1)) if found else 1))
        given = re.search(r"^\s*log\s*=\s*(\S+)", text, re.IGNORECASE | re.MULTILINE)
        return cls(cluster, ids, place, user, place / (given.group(1) if given else _DEFAULTS["log"]))


def submitted_cluster(output: str) -> int:
    """Cluster number in the output of condor_submit or condor_submit_dag."""
    found = re.search(r"submitted to cluster (\d+)", output)
    if not found:
        raise PoolError(f"Nothing was submitted: {output}")
    return int(found.group(1))


def job_constraint(job: str | Submission) -> str:
    """ClassAd constraint of a submission (all its jobs), of "cluster.proc", of "cluster"; or the text itself."""
    text = f"{job.cluster}" if isinstance(job, Submission) else job
    found = re.fullmatch(r"(\d+)(?:\.(\d+))?", text)
    if not found:
        return text
    cluster = f"ClusterId == {found.group(1)}"
    return f"{cluster} && ProcId == {found.group(2)}" if found.group(2) else cluster


def with_defaults(text: str) -> str:
    """Submit text with log, output and error where it names none, and a queue statement."""
    missing = [
        f"{name} = {value}"
        for name, value in _DEFAULTS.items()
        if not re.search(rf"^\s*{name}\s*=", text, re.IGNORECASE | re.MULTILINE)
    ]
    queue = "" if re.search(r"^\s*queue\b", text, re.IGNORECASE | re.MULTILINE) else "queue\n"
    return "\n".join([*missing, text.rstrip("\n"), queue])


def prepare_directory(parent: Path, ids: tuple[int, int], files: Mapping[str, bytes | str]) -> Path:
    """Make the next numbered directory below `parent`, with the files, all owned by those ids."""
    if not parent.exists():
        parent.mkdir()
        os.chown(parent, *ids)
    place = next(path for path in (parent / str(n) for n in range(1, 1_000_000)) if not path.exists())
    place.mkdir(mode=0o755)
    os.chown(place, *ids)
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o755 if data.startswith(b"#!") else 0o644)
        for made in (path, *(up for up in path.parents if place in up.parents)):
            os.chown(made, *ids)
    return place
