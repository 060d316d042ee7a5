"""``stageout retry``."""

from __future__ import annotations

from stageout.cli.request import STATUS
from stageout.cli.request import add_arguments as add_arguments
from stageout.cli.request import run as run

DESCRIPTION = (
    "Send failed and waiting files again at once, with fresh attempts. On success a held job completes.\n"
    "For the action that a hold needs first, look up its sub-code in docs/reference/hold-codes.md." + STATUS
)
