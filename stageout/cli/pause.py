"""``stageout pause``."""

from __future__ import annotations

from stageout.cli.request import STATUS
from stageout.cli.request import add_arguments as add_arguments
from stageout.cli.request import run as run

DESCRIPTION = "Stop sending a job's output until 'stageout resume'. A file that is being sent is completed." + STATUS
