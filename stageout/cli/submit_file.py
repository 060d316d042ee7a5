"""The job that a submit file describes, expanded and transformed by HTCondor's own tools without submission."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from stageout.cli.exits import CommandError, UsageError
from stageout.core.config import Settings

_TIMEOUT_S = 60.0
_ATTRIBUTE = re.compile(r"[A-Za-z_]\w* ?=")


def first_job(path: Path, settings: Settings) -> str:
    """Return the ad of the first job of a submit file, one attribute a line, as ``condor_submit -dry-run`` makes it.

    :raises UsageError: there is no such file. :raises CommandError: condor_submit refuses it.
    """
    if not path.is_file():
        raise UsageError(f"{path} is neither a submit file nor a job: write FILE.sub, 1234 or 1234.0")
    done = _run(settings, "condor_submit", ["-dry-run", "-", str(path)])
    lines = done.stdout.split("\n.\n")[0].splitlines()
    ad = "\n".join(line for line in lines if _ATTRIBUTE.match(line))
    if done.returncode != 0 or "ClusterId=" not in ad:
        words = " ".join((done.stderr or done.stdout).split())
        raise CommandError(f"condor_submit does not take {path}: {words or 'it names no job'}")
    return ad + "\n"


def transformed(ad: str, settings: Settings) -> str | None:
    """Return the ad after this machine's job transforms; None when none of them belongs to stageout.

    :raises CommandError: condor_transform_ads fails.
    """
    names = settings.condor("JOB_TRANSFORM_NAMES").replace(",", " ").split()
    known = [name for name in names if settings.condor(f"JOB_TRANSFORM_{name}")]  # the tool crashes on a missing one
    if "StageOut" not in known:
        return None
    done = _run(settings, "condor_transform_ads", ["-jobtransforms", ",".join(known), "-in:long", "-"], ad)
    if "StageOutGuard" not in done.stdout:
        words = " ".join(done.stderr.split()) or f"it ended with status {done.returncode}"
        raise CommandError(f"condor_transform_ads does not apply the job transforms of this machine: {words}")
    return done.stdout


def _run(settings: Settings, tool: str, words: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a tool of HTCondor. :raises CommandError: it cannot be started, or exceeds its time limit."""
    path = shutil.which(tool) or shutil.which(tool, path=settings.condor("BIN"))
    if path is None:
        raise CommandError(f"{tool} is not installed here: run this command on the access point")
    try:
        return subprocess.run(
            [path, *words],
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise CommandError(f"{tool}: {problem}") from None
