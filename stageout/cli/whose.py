"""The default owner of the jobs that a command shows."""

from __future__ import annotations

import os
import pwd

from stageout.cli.exits import CommandError


def whose_jobs() -> str | None:
    """Return the owner whose jobs a command shows without --all: the user; root sees all, as with condor_q.

    :raises CommandError: this account has no name.
    """
    if os.geteuid() == 0:
        return None
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise CommandError("this account has no name here; ask for the jobs of all users with --all") from None
