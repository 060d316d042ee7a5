"""``stageout cancel``."""

from __future__ import annotations

from stageout.cli.request import STATUS
from stageout.cli.request import add_arguments as add_arguments
from stageout.cli.request import run as run

DESCRIPTION = "Stop delivering a job's output and delete it. The job is not run again." + STATUS
