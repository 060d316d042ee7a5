"""Checks of an execute point: spool, space, the manager, and what the startd tells the manager. Pure."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import PurePath

from stageout.cli.doctor.findings import Finding, Machine, Unseen, fail, ok, reports_as, unchecked, warn, words
from stageout.core.config import KNOBS
from stageout.core.units import MB, size

_MIB = 1024 * 1024  # HTCondor's unit of RESERVED_DISK
_REPORTS_MISSED = 3
#: The manager takes output again when half of this space is free.
_USABLE_BYTES = 128 * _MIB
_REBOOT_SIGNS = {
    "/run/systemd/shutdown/scheduled": "a shutdown is scheduled",
    "/run/nologin": "a shutdown is under way",
    "/var/run/reboot-required": "an update wants a reboot",
}


def spool_path(machine: Machine) -> str:
    """Return STAGEOUT_SPOOL or its default, without symbolic links."""
    return machine.real(machine.settings.path("STAGEOUT_SPOOL"))


def spool_place(machine: Machine) -> Iterator[Finding]:
    """Check that the spool lies outside all directories that HTCondor empties, and on EXECUTE's filesystem."""
    spool = PurePath(spool_path(machine))
    remedy = f"set {KNOBS['STAGEOUT_SPOOL'].name} = {KNOBS['STAGEOUT_SPOOL'].default}"
    for name in ("EXECUTE", "SPOOL", "LOG"):
        swept = PurePath(machine.real(machine.settings.condor(name)))
        if swept == spool or swept in spool.parents:
            yield fail("spool-place", f"{spool} is inside {name}, which HTCondor empties", remedy)
            return
    yield ok("spool-place", f"{spool}, outside EXECUTE, SPOOL and LOG")


def spool_known(machine: Machine) -> Iterator[Finding]:
    """Check that plugins find the spool. They do not read HTCondor's configuration, because this would delay
    every job.
    """
    spool, beside = spool_path(machine), machine.real(f"{machine.settings.condor('EXECUTE')}/../stageout")
    text = machine.settings.text("STAGEOUT_SPOOL")
    in_ad = machine.settings.condor("StageOutSpool") == f'"{text}"' and "stageoutspool" in words(
        machine.settings.condor("STARTD_ATTRS").lower()
    )
    if spool == beside or in_ad or f"STAGEOUT_SPOOL={text}" in machine.settings.condor("STARTD_ENVIRONMENT"):
        yield ok("spool-known", "plugins find the spool")
    else:
        remedy = "take over StageOutSpool and STARTD_ATTRS from 20-stageout-ep.conf, and restart the startd"
        yield fail("spool-known", f"plugins look into {beside}: every transfer is synchronous", remedy)


def spool_filesystem(machine: Machine) -> Iterator[Finding]:
    """Check that files can be linked from the scratch directories into the spool."""
    name, spool, execute = "spool-filesystem", spool_path(machine), machine.settings.condor("EXECUTE")
    try:
        here, there = machine.stat(spool).st_dev, machine.stat(execute).st_dev
    except FileNotFoundError as problem:
        yield unchecked(name, f"{problem.filename} is not there yet; the manager makes the spool when it starts")
        return
    copies = _copies_lately(machine)
    if here != there:
        remedy = "put STAGEOUT_SPOOL on the filesystem of EXECUTE"
        yield warn(name, f"the spool is on another filesystem than EXECUTE: every hand-off is a copy{copies}", remedy)
    elif _is_true(machine, "STARTD_ENFORCE_DISK_LIMITS") or copies:
        remedy = "leave it if that is fine; a plugin sends at once when the copy has no room or would take longer"
        yield warn(
            name, f"jobs' directories are other filesystems than the spool: a hand-off is a copy{copies}", remedy
        )
    else:
        yield ok(name, "the spool is on EXECUTE's filesystem: a hand-off is a link, whatever the size")


def _copies_lately(machine: Machine) -> str:
    """Describe the cost of the last hour's copies in a sentence; "" without copies."""
    try:
        said = machine.manager_answer()
    except (OSError, Unseen):
        return ""
    count, count_bytes = said.integer("HandoffsCopied"), said.integer("HandoffBytesCopied")
    took_s = said.integer("HandoffCopyMs") / 1000
    return f" ({count} in the last hour, {size(count_bytes)} in {took_s:.1f} s)" if count else ""


def _is_true(machine: Machine, name: str) -> bool:
    return machine.settings.condor(name).strip().lower() in ("true", "yes", "1")


def spool_owner(machine: Machine) -> Iterator[Finding]:
    """Check that the spool belongs to the manager, and that only the manager may write into it."""
    spool = spool_path(machine)
    try:
        seen = machine.stat(spool)
    except FileNotFoundError:
        yield unchecked("spool-owner", f"{spool} is not there yet; the manager makes it when it starts")
        return
    wanted = 0 if _root_runs_jobs(machine) else machine.stat(machine.settings.condor("EXECUTE")).st_uid
    mode = stat.S_IMODE(seen.st_mode)
    if seen.st_uid != wanted:
        remedy = f"stop the manager, chown {spool} to uid {wanted}, start it again"
        yield fail("spool-owner", f"{spool} belongs to uid {seen.st_uid}, not to {wanted}", remedy)
    elif mode & 0o022:
        yield fail("spool-owner", f"{spool} has mode {mode:04o}: others can write into it", f"chmod go-w {spool}")
    else:
        yield ok("spool-owner", f"uid {wanted}, mode {mode:04o}")


def _root_runs_jobs(machine: Machine) -> bool:
    """Tell whether a root master runs jobs: EXECUTE then belongs to root or condor, and otherwise to a pilot's user."""
    owner = machine.stat(machine.settings.condor("EXECUTE")).st_uid
    return owner in (0, machine.user_id("condor"))


def space(machine: Machine) -> Iterator[Finding]:
    """Check that the quota fits the disk, and that HTCondor reserves this space."""
    total, free = _filesystem(machine)
    quota = machine.settings.count("STAGEOUT_SPOOL_QUOTA_MB") * MB or total // 2
    is_default = not machine.settings.count("STAGEOUT_SPOOL_QUOTA_MB")
    if total < _USABLE_BYTES:
        remedy = "put STAGEOUT_SPOOL and EXECUTE on a larger one; until then every transfer is synchronous"
        yield fail("space", f"the spool's filesystem has {size(total)}, too little for any output", remedy)
        return
    if quota > total:
        yield fail("space", f"the quota of {size(quota)} is above the disk's {size(total)}", "lower the quota")
        return
    reserved = _integer(machine.settings.condor("RESERVED_DISK", "0")) * _MIB
    text = f"quota {size(quota)}, free {size(free)} of {size(total)}, RESERVED_DISK {size(reserved)}"
    if free + _held_bytes(machine) < quota:
        yield warn("space", f"{text}: the disk is full before the quota is", "lower the quota, or make room")
    elif reserved // _MIB < quota // _MIB and not _has_a_disk_of_its_own(machine):
        # The startd measures the free space once, at its start (STARTD_RECOMPUTE_DISK_FREE).
        what = f"set RESERVED_DISK = {quota // _MIB}"
        if is_default:
            what += " (half of the disk), or STAGEOUT_SPOOL_QUOTA_MB and RESERVED_DISK to what you can spare"
        why = "else jobs are matched to space that waiting output takes"
        yield warn("space", text, f"{what}, and restart the startd: {why}")
    else:
        yield ok("space", text)


def _filesystem(machine: Machine) -> tuple[int, int]:
    """Return size and free bytes of the spool's filesystem. Before the spool exists, use EXECUTE's."""
    try:
        return machine.free_bytes(spool_path(machine))
    except FileNotFoundError:
        return machine.free_bytes(machine.settings.condor("EXECUTE"))


def _has_a_disk_of_its_own(machine: Machine) -> bool:
    """Tell whether jobs cannot fill the spool's disk, so that RESERVED_DISK does not apply to it."""
    if _is_true(machine, "STARTD_ENFORCE_DISK_LIMITS"):
        return True  # HTCondor subtracts RESERVED_DISK from the space of the volume group.
    try:
        return machine.stat(spool_path(machine)).st_dev != machine.stat(machine.settings.condor("EXECUTE")).st_dev
    except FileNotFoundError:
        return False


def _held_bytes(machine: Machine) -> int:
    """Return the bytes in the spool; 0 when no manager answers."""
    try:
        return machine.manager_answer().integer("BytesAtRisk")
    except (OSError, Unseen):
        return 0


def _integer(text: str) -> int:
    try:
        return int(float(text))
    except ValueError:
        return 0


def encryption(machine: Machine) -> Iterator[Finding]:
    """Check that the spool encrypts output if the administrator wants encrypted scratch directories."""
    if _is_true(machine, "ENCRYPT_EXECUTE_DIRECTORY"):
        text = "ENCRYPT_EXECUTE_DIRECTORY: output is not taken over, because the spool is not encrypted"
        yield warn("encryption", text, "nothing, if that is wanted")
        return
    yield ok("encryption", "scratch directories are not encrypted")


@reports_as("manager", "manager-user")
def manager(machine: Machine) -> Iterator[Finding]:
    """Check that the manager answers and can serve the jobs of this node."""
    remedy = _last_problem(machine) or (
        "look into SandboxManagerLog in the LOG directory; is it in DAEMON_LIST, and is condor_master up?"
    )
    try:
        said = machine.manager_answer()
    except FileNotFoundError:
        yield fail("manager", f"no sandbox manager listens in {spool_path(machine)}/run", remedy)
        return
    except ConnectionRefusedError:
        yield fail("manager", "the sandbox manager's socket is there, but nobody answers", remedy)
        return
    yield ok("manager", f"{said.text('Manager')} answers on its socket")
    yield from _manager_uid(machine, said.integer("Uid", -1))


def _last_problem(machine: Machine) -> str:
    """Return the last problem in the manager's log; "" if its last line is none."""
    lines = machine.end_of(machine.settings.condor("SANDBOX_MANAGER_LOG")).splitlines()
    last = lines[-1] if lines else ""
    if " ERROR " not in last:
        return ""
    return f"SandboxManagerLog ends with: {last}. Mend that, then condor_reconfig and condor_on -daemon sandbox_manager"


def _manager_uid(machine: Machine, uid: int) -> Iterator[Finding]:
    owner = machine.stat(machine.settings.condor("EXECUTE")).st_uid
    if uid in (0, owner):
        who = "root" if uid == 0 else f"uid {uid}, as all jobs here"
        yield ok("manager-user", f"it runs as {who}")
    else:
        text = f"it runs as uid {uid}, which can neither link nor read the files of jobs: all uploads are synchronous"
        remedy = "run it as root below a root condor_master, or as the one user of a pilot: remove its _USERID setting"
        yield fail("manager-user", text, remedy)


@reports_as("plugins-needed")
def plugins_for_waiting(machine: Machine) -> Iterator[Finding]:
    """Check that a plugin exists for all output in custody, and for a pilot's drain target."""
    name = "plugins-needed"
    try:
        missing = machine.manager_answer().text("MissingPlugins")
    except (FileNotFoundError, ConnectionRefusedError):
        raise Unseen("no sandbox manager answers") from None
    if missing:
        remedy = "name a plugin for it in FILETRANSFER_PLUGINS, then condor_reconfig: what waits is sent by itself"
        yield fail(name, f"no plugin here moves {missing}, and output waits for one", remedy)
    else:
        yield ok(name, "there is a plugin for all that is held here")


@reports_as("manager-report")
def last_report(machine: Machine) -> Iterator[Finding]:
    """Check that the manager still makes reports. Without them access points learn nothing and nothing is sent."""
    name = "manager-report"
    try:
        said = machine.manager_answer()
    except (FileNotFoundError, ConnectionRefusedError):
        raise Unseen("no sandbox manager answers") from None
    problem, age_s = said.text("ReportProblem"), said.integer("ReportAge")
    remedy = (
        "see 'report-failed' in SandboxManagerLog, and whether the disk of the spool is sound; then restart the manager"
    )
    if problem:
        yield fail(name, f"the manager cannot make its report, so it sends and takes nothing: {problem}", remedy)
    elif age_s > _REPORTS_MISSED * machine.settings.number("STAGEOUT_REPORT_INTERVAL"):
        yield fail(name, f"the manager made its last report {age_s} s ago", remedy)
    else:
        yield ok(name, f"the manager made its last report {age_s} s ago")


@reports_as("output-unknown")
def unknown_output(machine: Machine) -> Iterator[Finding]:
    """Check that the ledger has a record of all output in the spool."""
    name = "output-unknown"
    try:
        count = machine.manager_answer().integer("UnknownOutput")
    except (FileNotFoundError, ConnectionRefusedError):
        raise Unseen("no sandbox manager answers") from None
    if count:
        remedy = (
            "if an old ledger was put back, replace it by the newest one (docs/administrator/monitoring.md); else do "
            "nothing: the jobs run again, and the files are deleted after STAGEOUT_RETENTION"
        )
        yield warn(name, f"{count} hand-offs without a record lie in {spool_path(machine)}/unknown", remedy)
    else:
        yield ok(name, "the ledger has a record of all output in the spool")


@reports_as("output-deleted")
def deleted_output(machine: Machine) -> Iterator[Finding]:
    """Check that the spool has all output in custody, and that its filesystem is mounted."""
    name = "output-deleted"
    try:
        problem = machine.manager_answer().text("SpoolProblem")
    except (FileNotFoundError, ConnectionRefusedError):
        raise Unseen("no sandbox manager answers") from None
    if not problem:
        yield ok(name, "the spool has all output that the manager holds")
    elif "mounted" in problem:
        yield fail(name, problem, "mount it again; the manager goes on by itself")
    else:
        remedy = (
            f"its jobs run again. Find who deletes files in {spool_path(machine)}, or whether the disk fails (dmesg), "
            "and keep cleaners away; then restart the manager, which forgets this"
        )
        yield fail(name, problem, remedy)


def startd_answers(machine: Machine) -> Iterator[Finding]:
    """Check that the startd tells the manager the owner of a slot's job. The manager asks at each hand-off."""
    name = "startd-answers"
    busy = [ad for ad in machine.slots() if ad.text("State") == "Claimed" and ad.text("Activity") == "Busy"]
    if not busy:
        yield unchecked(name, "no job runs here now", "run the doctor again while a job runs")
        return
    for ad in busy:
        missing = [word for word in ("GlobalJobId", "RemoteUser", "NumShadowStarts") if word not in ad]
        if missing:
            yield fail(name, f"{ad.text('Name')} does not say {', '.join(missing)}", "see startd-attributes")
            return
    yield ok(name, f"{len(busy)} busy slots say which run of which job they have")


def restart_risk(machine: Machine) -> Iterator[Finding]:
    """Check that no restart is planned while output is in custody here."""
    try:
        at_risk = machine.manager_answer().integer("BytesAtRisk")
    except (FileNotFoundError, ConnectionRefusedError):
        raise Unseen("no sandbox manager answers") from None
    signs = [text for path, text in _REBOOT_SIGNS.items() if _exists(machine, path)]
    if not at_risk:
        yield ok("restart-risk", "no output waits here: this node may be restarted")
    elif signs:
        remedy = (
            "drain first: condor_off -peaceful -daemon startd, and wait until 'stageout status --node --empty' ends "
            "with 0. Output survives a restart on the disk, but waits for the node to come back"
        )
        yield warn("restart-risk", f"{size(at_risk)} of output wait here, and {signs[0]}", remedy)
    else:
        text = f"{size(at_risk)} of output wait here; before 'condor_off -master' or a reboot, drain"
        yield ok("restart-risk", f"{text} and wait until 'stageout status --node --empty' ends with 0")


def _exists(machine: Machine, path: str) -> bool:
    try:
        machine.stat(path)
    except OSError:
        return False
    return True


EXECUTE_POINT = (
    spool_place, spool_known, spool_filesystem, spool_owner, space, encryption, manager, last_report,
    plugins_for_waiting, unknown_output, deleted_output, startd_answers, restart_risk,
)  # fmt: skip
