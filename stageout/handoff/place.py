"""The place of this plugin, and the socket of its sandbox manager. Imports ``os`` only: it is in every job's way."""

from __future__ import annotations

import os
from collections.abc import Iterator

#: Of a machine's ad so much is read.
_AD_BYTES = 1 << 20
_SPOOL = b'\nStageOutSpool = "'


class Place:
    """A job's directories and its manager's socket.

    :param scratch: the job's scratch directory. :param execute: HTCondor's EXECUTE.
    :param run: directory of the manager's sockets.
    :raises ValueError: STAGEOUT_SPOOL is relative, so a job's own directory could stand for it.

    The spool is beside EXECUTE, or where the environment or the machine's ad says. The job may write either, and so
    the files go to a listener of root, of the startd's user or of the job's own only (:mod:`.connection`).
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
    """Return STAGEOUT_SPOOL as the machine's ad has it; "" when it is not there."""
    try:
        with open(f"{scratch}/.machine.ad", "rb") as stream:
            _, found, rest = b"\n".join((b"", stream.read(_AD_BYTES))).partition(_SPOOL)
    except OSError:
        return ""
    return os.fsdecode(rest.partition(b'"')[0]) if found else ""


def find(local_path: str) -> Place | None:
    """Find the job's scratch directory and the manager's socket; None where either is lacking.

    The scratch directory is ``EXECUTE/dir_PID/scratch``, or ``EXECUTE/dir_PID`` before HTCondor 24.

    :param local_path: of any file of the job, used when the working directory says nothing.
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
