"""Run the checks of a role and print their findings."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath

from stageout.cli.arguments import add_json
from stageout.cli.doctor import (
    accounts,
    alone,
    config,
    credentials,
    handoffs,
    leftovers,
    listening,
    node,
    pilot,
    policy,
    pool,
    router,
    trust,
)
from stageout.cli.doctor.findings import Check, Finding, Level, Machine, Role, Unseen, fail, names_of, unchecked, words
from stageout.cli.exits import CommandError, Exit
from stageout.cli.render import clean, painted, wants_colours
from stageout.cli.rows import SCHEMA
from stageout.condor.bindings import are_installed
from stageout.core.config import ConfigError, environment_settings, file_settings

_EXECUTE_POINT: tuple[Check, ...] = (
    *config.COMMON, *listening.COMMON, *config.EXECUTE_POINT,
    *leftovers.EXECUTE_POINT, *node.EXECUTE_POINT, *pool.COMMON,
    *pool.EXECUTE_POINT, *handoffs.EXECUTE_POINT, *trust.EXECUTE_POINT, *credentials.EXECUTE_POINT,
    *policy.EXECUTE_POINT, *accounts.EXECUTE_POINT,
)  # fmt: skip
CHECKS: dict[Role, tuple[Check, ...]] = {
    Role.AP: (
        *config.COMMON,
        *listening.COMMON,
        *config.ACCESS_POINT,
        *pool.COMMON,
        *pool.ACCESS_POINT,
        *trust.ACCESS_POINT,
        *credentials.ACCESS_POINT,
    ),
    Role.EP: _EXECUTE_POINT,
    Role.PILOT: (*_EXECUTE_POINT, pilot.pilot_end),
    Role.ROUTER: (*config.COMMON, *listening.COMMON, *router.ROUTER),
}

DESCRIPTION = """\
Check the installation on this machine and print what to correct. Run it as root, or as the user of HTCondor's daemons.
A check that needs more permissions is reported as unchecked.

exit status: 0 no check failed (warnings are allowed), 1 at least one failed"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    command.add_argument(
        "--role",
        choices=("ap", "ep", "pilot", "router"),
        action="append",
        help="role to check (default: the roles whose daemons run here)",
    )
    command.add_argument(
        "--settings", metavar="FILE",
        help="check a router without HTCondor that has these settings (NAME=VALUE lines, as stageout-router"
        " --settings). Without HTCondor, --role router uses the settings of the environment",
    )  # fmt: skip
    add_json(command)


def run(options: argparse.Namespace) -> int:
    """Check this machine. Return 0 if no check failed."""
    from stageout.cli.doctor.machine import RouterMachine, ThisMachine

    roles = [Role(word) for word in options.role or ()]
    if options.settings or (roles == [Role.ROUTER] and not are_installed()):
        settings = file_settings(Path(options.settings)) if options.settings else environment_settings("")
        roles = [Role.ROUTER]
        findings = run_checks(alone.CHECKS, RouterMachine(settings))
    else:
        machine = ThisMachine()
        roles = roles or roles_of(machine)
        findings = examine(machine, roles)
    if options.json:
        print(json.dumps(as_json(roles, findings), indent=2))
    else:
        print("\n".join(as_text(roles, findings, colour=wants_colours(sys.stdout))))
    return Exit.FAILED if any(item.level is Level.FAIL for item in findings) else Exit.OK


def roles_of(machine: Machine) -> list[Role]:
    """Return the roles of this machine, from DAEMON_LIST.

    An execute point whose EXECUTE belongs to an ordinary user is a pilot.

    :raises CommandError: the machine runs no schedd, no startd and no router.
    """
    daemons = {word.upper() for word in words(machine.settings.condor("DAEMON_LIST"))}
    roles = [Role.AP] if "SCHEDD" in daemons else []
    if any(word.startswith("STARTD") for word in daemons):
        roles.append(Role.PILOT if _is_pilot(machine) else Role.EP)
    programs = {PurePath(machine.settings.condor(word)).name for word in daemons}
    if config.ROUTER_PROGRAM in programs:
        roles.append(Role.ROUTER)
    if not roles:
        raise CommandError(
            "DAEMON_LIST here has neither SCHEDD nor STARTD nor our router. Is this a machine of the pool, and does "
            "condor_config_val DAEMON_LIST find its configuration? Say --role to check for one all the same."
        )
    return roles


def _is_pilot(machine: Machine) -> bool:
    try:
        owner = machine.stat(machine.settings.condor("EXECUTE")).st_uid
    except OSError:
        return False
    return owner not in (0, machine.user_id("condor"))


def examine(machine: Machine, roles: Iterable[Role]) -> list[Finding]:
    """Run all checks of the roles, each one once."""
    return run_checks(dict.fromkeys(check for role in roles for check in CHECKS[role]), machine)


def run_checks(checks: Iterable[Check], machine: Machine) -> list[Finding]:
    """Run these checks."""
    return [finding for check in checks for finding in _examine_one(check, machine)]


def _examine_one(check: Check, machine: Machine) -> list[Finding]:
    """Return the findings of a check, at least one for each of its names."""
    found: list[Finding] = []
    problem = None
    try:
        found.extend(check(machine))
    except (Unseen, ConfigError, OSError) as reason:
        problem = reason
    names = names_of(check)
    missing = [name for name in names if not any(item.name == name for item in found)]
    return [*found, *(_unreported(name, names[0], problem) for name in missing)]


def _unreported(name: str, first: str, problem: Exception | None) -> Finding:
    """Return the finding of a check that could not run. :param first: name of the finding that has the reason."""
    if isinstance(problem, PermissionError):
        return unchecked(name, f"{problem.filename or 'something'} may not be looked at", "run the doctor as root")
    if isinstance(problem, FileNotFoundError):
        return fail(name, f"{problem.filename} does not exist", "is this machine configured for the role?")
    return unchecked(name, str(problem) if problem else f"see {first}")


def as_json(roles: Sequence[Role], findings: Sequence[Finding]) -> dict[str, object]:
    """Return the objects that ``stageout doctor --json`` prints (fields: ``docs/reference/json.md``)."""
    return {
        "schema": SCHEMA,
        "roles": [role.value for role in roles],
        "healthy": not any(item.level is Level.FAIL for item in findings),
        "checks": [
            {"name": item.name, "level": item.level.name.lower(), "text": item.text, "remedy": item.remedy}
            for item in findings
        ],
    }


_COLOURS = {Level.OK: "32", Level.UNCHECKED: "36", Level.WARN: "33", Level.FAIL: "31"}


def as_text(roles: Sequence[Role], findings: Sequence[Finding], colour: bool) -> list[str]:
    """Write one line per finding, a remedy below it, and a line with the counts."""
    lines = [f"Checked as {', '.join(role.value.upper() for role in roles)}:"]
    for item in findings:
        word = f"{item.level.name.lower():<9}"
        word = painted(word, _COLOURS[item.level] * colour)
        lines.append(f"{word} {item.name:<22} {clean(item.text)}")
        lines += textwrap.wrap(
            f"-> {clean(item.remedy)}", 110, initial_indent=" " * 10, subsequent_indent=" " * 13, break_on_hyphens=False
        ) if item.remedy else []  # fmt: skip
    counts = {level: sum(item.level is level for item in findings) for level in Level}
    lines += ["", ", ".join(f"{counts[level]} {level.name.lower()}" for level in Level)]
    return lines
