"""Check of an execute point whose jobs do not run under their owners' accounts. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from stageout.cli.doctor.findings import Finding, Machine, fail, ok, warn, words

_NAME = "accounts"
#: SLOT1_USER, SLOT1_2_USER, NOBODY_SLOT_USER.
_SLOT_USER = re.compile(r"(NOBODY_SLOT|SLOT\d\w*)_USER", re.IGNORECASE)


def accounts(machine: Machine) -> Iterator[Finding]:
    """Check that the manager can keep output of jobs under slot users, in accounts that nothing else uses."""
    slot_users = _slot_users(machine)
    names = words(machine.settings.text("STAGEOUT_ACCOUNTS"))
    if not names and (slot_users or not _runs_as_owner(machine)):
        text = f"jobs run under {', '.join(sorted(slot_users)) or 'nobody'}: all their uploads are synchronous"
        yield warn(
            _NAME, text, "name accounts that no job has in STAGEOUT_ACCOUNTS (docs/administrator/execute-point.md)"
        )
        return
    used = {machine.user_id(name): name for name in ("root", "condor", "nobody", *slot_users)}
    for name in names:
        uid = machine.user_id(name)
        if uid is None:
            text = f"STAGEOUT_ACCOUNTS names {name}, and there is no such account here: the manager does not start"
            yield fail(_NAME, text, f"useradd -r {name}, or remove the name")
            return
        if uid in used:
            text = f"STAGEOUT_ACCOUNTS names {name}, which is the account of jobs or daemons ({used[uid]})"
            yield fail(_NAME, text, "name accounts there that nothing else uses")
            return
    if names:
        yield ok(_NAME, f"output of {len(names)} owners of jobs under slot users can wait here at once")
    else:
        yield ok(_NAME, "no slot users are configured")


def _slot_users(machine: Machine) -> set[str]:
    found = {machine.settings.condor(name) for name in machine.parameters() if _SLOT_USER.fullmatch(name)}
    return found - {""}


def _runs_as_owner(machine: Machine) -> bool:
    return machine.settings.condor("STARTER_ALLOW_RUNAS_OWNER", "true").strip().lower() not in ("false", "no", "0")


EXECUTE_POINT = (accounts,)
