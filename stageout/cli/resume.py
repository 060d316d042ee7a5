"""``stageout resume``."""

from __future__ import annotations

from stageout.cli.request import STATUS
from stageout.cli.request import add_arguments as add_arguments
from stageout.cli.request import run as run

DESCRIPTION = "Continue the delivery after 'stageout pause'." + STATUS
