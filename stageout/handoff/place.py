"""The directories of this job, and the socket of its sandbox manager. Every job waits for this import, so it uses
``os`` only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

#: Maximum number of bytes to read of a machine's ad.
_AD_BYTES = 1 << 20
_SPOOL = b'\nStageOutSpool = "'


class Place:
    """A job's directories and its manager's socket.

    :param scratch: the job's scratch directory. :param execute: HTCondor's EXECUTE.
    :param run: directory of the manager's sockets.
    :raises ValueError: STAGEOUT_SPOOL is relative, so that a job's own directory could replace it.

    The spool is beside EXECUTE, or at the path in the environment or the machine's ad. The job may write either, so the
    files go only to a listener of root, of the startd's user or of the job's own (:mod:`.connection`).
    """

    __slots__ = ("execute", "run", "scratch")

    def __init__(self, scratch: str, execute: str) -> None:
        self.scratch = scratch
        self.execute = execute
        spool = os.environ.get("STAGEOUT_SPOOL") or _told(scratch) or f"{execute}/../stageout"
        if not spool.startswith("/"):
            raise ValueError(f"STAGEOUT_SPOOL = {spool}: write an absolute path into the configuration of the node")
        self.run = os.path.join(spool, "run")


def _told(scratch: str) -> str:
    """Return STAGEOUT_SPOOL from the machine's ad; "" if it is absent."""
    try:
        with open(f"{scratch}/.machine.ad", "rb") as stream:
            _, found, rest = b"\n".join((b"", stream.read(_AD_BYTES))).partition(_SPOOL)
    except OSError:
        return ""
    return os.fsdecode(rest.partition(b'"')[0]) if found else ""


def find(local_path: str) -> Place | None:
    """Find the job's scratch directory and the manager's socket; None if either is missing.

    The scratch directory is ``EXECUTE/dir_PID/scratch``, or ``EXECUTE/dir_PID`` before HTCondor 24.

    :param local_path: any file of the job, used if the working directory is no scratch directory.
    """
    for directory in _candidates(local_path):
        execute = _execute_of(directory)
        if execute:
            place = Place(directory, execute)
            return place if os.path.isdir(place.run) else None
    return None


def _candidates(local_path: str) -> Iterator[str]:
    yield os.path.realpath(".")
    job_ad = os.environ.get("_CONDOR_JOB_AD")
    if job_ad:
        yield os.path.dirname(os.path.realpath(job_ad))
    directory = os.path.dirname(os.path.realpath(local_path))
    while directory not in ("/", ""):
        yield directory
        directory = os.path.dirname(directory)


def _execute_of(directory: str) -> str:
    """Return EXECUTE when ``directory`` is a scratch directory, else ""."""
    above, name = os.path.split(directory)
    if name == "scratch":
        above, name = os.path.split(above)
    return above if name.startswith("dir_") and name[4:].isdigit() else ""
