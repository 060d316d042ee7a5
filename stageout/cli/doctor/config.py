"""Checks of the configuration: it must be complete, and the same in the running daemons. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import PurePath

from stageout.cli.doctor.findings import Finding, Machine, Unseen, fail, ok, reports_as, unchecked, warn, words
from stageout.core import front_end, stored_answer
from stageout.core.classad_parser import parse_old
from stageout.core.classads import ClassAd, ClassAdSyntaxError
from stageout.core.config import KNOBS, ConfigError
from stageout.core.trust import Kind, matching, names_of

AGENT_PROGRAM = "stageout-schedd-agent"
MANAGER_PROGRAM = "stageout-sandbox-manager"
CRON_PROGRAM = "stageout-startd-cron"
ROUTER_PROGRAM = "stageout-router"

TRANSFORMS = ("StageOutInit", "StageOut")
#: Protected attributes. With the first group an owner could forge consent or an end; with the others only confuse
#: himself.
GUARDED = (
    "StageOutGuard", "StageOutAsync", "StageOutState", "StageOutRun", "StageOutReason", "StageOutUserLeave",
)  # fmt: skip
#: These must stay the owner's.
OPEN = {
    "StageOutRequest": "no owner can retry or cancel",
    "LeaveJobInQueue": "JobRouter, HTCondor-CE and Condor-C cannot end their jobs and remove them with their output",
}
SHOWN = (
    "StageOutBytesLeft", "StageOutFilesLeft", "StageOutAttempts", "StageOutNextAttempt", "StageOutManager",
    "StageOutReruns", "StageOutStats", "StageOutCustody", "StageOutUntold", "StageOutKeptUntil",
    "StageOutRefused",
)  # fmt: skip
#: Attributes of a job that the manager reads from the startd (architecture, "Who speaks the truth").
JOB_ATTRIBUTES = ("GlobalJobId", "RemoteUser", "NumShadowStarts", "StageOutGuard", "OutputDestination", "JobPrio")
#: Attributes without which a hand-off works, but less safely, or for fewer jobs.
USEFUL_JOB_ATTRIBUTES = (
    "StageOutAsync", "CheckpointDestination", "EncryptExecuteDirectory", "StageOutAgentKey", "StageOutSynchronousCode",
    "StageOutFallback",
)  # fmt: skip
#: Lists of attributes that only the schedd writes.
_SECURE = ("SECURE_JOB_ATTRS", "SYSTEM_SECURE_JOB_ATTRS")
#: HTCondor's own attributes by which the manager identifies a job.
_IDENTITY = ("GlobalJobId", "NumShadowStarts")
_CHIRP = "CHIRP_DELAYED_UPDATE_PREFIX"
_CHIRP_DEFAULT = "Chirp*"
_CHIRP_SWITCHES = ("ENABLE_CHIRP", "ENABLE_CHIRP_DELAYED")
_SHOWN_NAMES = 3
#: Macros of the fragments that no program reads.
MACROS = (
    "STAGEOUTSPOOL",  # belongs to the machine's ad
    "STAGEOUT_BIN", "STAGEOUT_DEFAULT", "STAGEOUT_WORKFLOW_JOBS", "STAGEOUT_RETRY_METHODS", "STAGEOUT_RETRY_LIMIT",
)  # fmt: skip

#: The directory of front ends that ``stageout wrap`` makes.
FRONT_ENDS = "/usr/local/libexec/stageout"

_TESTED = (25,)
_WEAKER = (23, 9)
_CLASSAD_TIMEOUT_S = 20.0
_CLASSAD_SLOW_S = 0.5
_SLOW = f"has not ended within {_CLASSAD_TIMEOUT_S:.0f} s: is this machine overloaded, or its filesystem a slow one?"
#: Programs for which --help is not an option print their usage and exit with 2.
_GOOD_STATUS = (0, 2)
_JOB_USER = "nobody"
_STORE = (
    "the manager stores it within a minute; if not, plugin-answer-not-stored in SandboxManagerLog has the reason "
    "(only root may write to the plugin's directory)"
)
_READABLE = "let all users read and run the installation: chmod -R go+rX on the directory above STAGEOUT_BIN"
_INSTALL_AP = "put condor_config.d/20-stageout-ap.conf into the configuration directory, then condor_restart"
_INSTALL_ROUTER = "put condor_config.d/20-stageout-router.conf into the configuration directory, then condor_restart"
_INSTALL_EP = "put condor_config.d/20-stageout-ep.conf into the configuration directory, then condor_restart"
#: Directories and files of the agent in SPOOL, as 20-stageout-ap.conf names them for condor_preen.
AGENT_IN_SPOOL = (
    "stageout_agent", "stageout_agent_key", "stageout_agent_seen", "stageout_agent_tls", "stageout_agent_custody",
    "stageout_agent_failures", "stageout_agent_watched",
)  # fmt: skip
_DAEMON_SETTINGS = ("", "_LOG", "_DEBUG", "_USERID", "_ENVIRONMENT", "_ARGS", "_LOCAL_NAME")
_ALIKE = 0.85
#: Seconds for which condor_who waits for daemons that are starting.
_WHO_S = 3
_STATE_OF_DAEMON = re.compile(r'^\s*(\w+) = "?(\w+)"?\s*$', re.M)
#: Prefixes of parameter names to compare. A comparison with all of HTCondor's thousand parameters is slow.
_BEGINNING = "STA"


def _later(parameter: str) -> str:
    """Return a hint how to find the file that replaced a list to which our fragment adds."""
    return (
        f"or, where it is there: 'condor_config_val -verbose {parameter}' names the later file that replaces its value"
    )


def version(machine: Machine) -> Iterator[Finding]:
    """Check that the parts were tested with this version of HTCondor."""
    text = machine.version()
    number = tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
    if number >= _TESTED:
        yield ok("version", f"HTCondor {text}")
    elif number >= _WEAKER:
        remedy = "docs/administrator/upgrade.md#mixed-versions lists the effects; HTCondor 25 has none of them"
        yield warn("version", f"HTCondor {text} lacks some of what is used", remedy)
    else:
        yield fail("version", f"HTCondor {text} was never tried", "use HTCondor 25, or 23.9 at least")


def settings(machine: Machine) -> Iterator[Finding]:
    """Check that every knob has a valid value, and that no parameter is a misspelt knob."""
    bad = 0
    for knob in KNOBS.values():
        try:
            machine.settings.text(knob.name)
        except ConfigError as problem:
            bad += 1
            yield fail("settings", str(problem), f"correct {knob.name} and run condor_reconfig")
    if not bad:
        yield ok("settings", f"all {len(KNOBS)} knobs can be read")
    yield from _unknown(machine)


def _unknown(machine: Machine) -> Iterator[Finding]:
    """Report parameters that look like knobs but that no program reads: HTCondor ignores a misspelt name."""
    known = {*KNOBS, *MACROS}
    alike = {name for name in map(str.upper, machine.parameters()) if name.startswith(_BEGINNING)}
    for name in sorted(alike - known - _of_daemons(machine)):
        meant = difflib.get_close_matches(name, known, 1, _ALIKE)
        remedy = (
            f"did you mean {meant[0]}? If not, delete it"
            if meant
            else "condor_config.d/ has all names, each in its role's file"
        )
        if meant or name.startswith("STAGEOUT_"):
            yield warn("settings", f"{name} is set, but nothing reads it", remedy)


def _of_daemons(machine: Machine) -> set[str]:
    """List the parameters that condor_master reads for daemons; an administrator may name our daemons like a knob."""
    daemons = {
        "STAGEOUT_POLICY_SERVICE",
        "STAGEOUT_ROUTER",
        "STAGEOUT_WEB",
        *words(machine.settings.condor("DAEMON_LIST").upper()),
    }
    return {f"{daemon}{end}" for daemon in daemons for end in _DAEMON_SETTINGS}


@reports_as("role")
def misplaced_daemons(machine: Machine) -> Iterator[Finding]:
    """Check that no daemon of ours runs on a machine where it has nothing to serve, because of another role's
    fragment.
    """
    listed = {word.upper(): PurePath(machine.settings.condor(word)).name
              for word in words(machine.settings.condor("DAEMON_LIST"))}  # fmt: skip
    ours, strange = set(listed.values()), False
    for program, wanted, served, fragment in (
        (AGENT_PROGRAM, "SCHEDD", "schedd", "20-stageout-ap.conf"),
        (MANAGER_PROGRAM, "STARTD", "startd", "20-stageout-ep.conf"),
    ):
        if program in ours and not any(word.startswith(wanted) for word in listed):
            strange = True
            remedy = f"take {fragment} out of this machine's configuration directory, then condor_restart"
            yield fail(
                "role", f"{program} is in DAEMON_LIST, but no {served} is: this machine has no such role", remedy
            )
    if not strange:
        yield ok("role", "no daemon of stageout runs here without the daemon that it serves")


def daemons_alive(machine: Machine) -> Iterator[Finding]:
    """Check that condor_master had a recent sign of life from every daemon (``IsReady`` of condor_who)."""
    ran = machine.run(["condor_who", f"-wait:{_WHO_S}", "IsReady"], _WHO_S + _CLASSAD_TIMEOUT_S)
    states = dict(_STATE_OF_DAEMON.findall(ran.output))
    silent = [f"{name} ({state})" for name, state in states.items() if state in ("Startup", "Hung", "Dead")]
    if "IsReady" not in states:
        said = (ran.output.strip().splitlines() or [f"exit status {ran.status}"])[-1]
        yield unchecked("daemons-alive", f"condor_who does not tell the states of the daemons: {said}")
    elif silent:
        text = f"condor_master has not heard that these daemons are alive: {', '.join(silent)}"
        remedy = "wait a minute after a start; then look for master-tell-failed in the log of the daemon"
        yield warn("daemons-alive", text, remedy)
    else:
        yield ok("daemons-alive", "condor_master counts all daemons as alive")


def daemon(machine: Machine, program: str, name: str, remedy: str) -> Iterator[Finding]:
    """Check that condor_master starts this program."""
    for word in words(machine.settings.condor("DAEMON_LIST")):
        path = machine.settings.condor(word)
        if PurePath(path).name != program:
            continue
        try:
            machine.stat(path)
        except FileNotFoundError:
            yield fail(name, f"{word} = {path} does not exist", "set STAGEOUT_BIN to where the package is installed")
            return
        if trouble := _cannot_start(machine, path, "--help", machine.settings.condor(f"{word}_USERID", "condor")):
            yield fail(name, f"{word} = {path} cannot run: {trouble}", _READABLE)
            return
        yield ok(name, f"{word} in DAEMON_LIST is {path}")
        return
    yield fail(name, f"no daemon in DAEMON_LIST is {program}", f"{remedy}; {_later('DAEMON_LIST')}")


def _cannot_start(machine: Machine, path: str, option: str, user: str) -> str:
    """Return the reason why a user cannot run a program of ours; "" when a trial run works.

    :raises Unseen: the trial run takes too long. This says nothing about the permissions of files.
    """
    user = user if machine.user_id(user) is not None else ""
    ran = machine.run([path, option], _CLASSAD_TIMEOUT_S, user)
    if not ran.has_ended:
        raise Unseen(f"{path} {option} {_SLOW}")
    if ran.status in _GOOD_STATUS and ran.output:
        return ""
    last = (ran.output.strip().splitlines() or [f"exit status {ran.status}"])[-1]
    return f"as {user}: {last}" if user else last


def plugins_for_jobs(machine: Machine) -> Iterator[Finding]:
    """Check that job users may run our plugins. An installation with umask 077 is readable for root only."""
    name = "plugins-for-jobs"
    paths = [path for path in words(machine.settings.condor("FILETRANSFER_PLUGINS")) if is_ours(machine, path)]
    bad = 0
    for path in paths:
        try:
            trouble = _cannot_start(machine, path, "-classad", _JOB_USER)
        except Unseen as reason:
            bad += 1
            yield unchecked(name, str(reason))
            continue
        if trouble:
            bad += 1
            yield fail(name, f"jobs cannot run {path}: {trouble}", _READABLE)
    if not bad:
        yield ok(name, f"{len(paths)} plugins of ours can be run by jobs")


def stored_answers(machine: Machine) -> Iterator[Finding]:
    """Check that our plugins answer ``-classad`` without Python, because HTCondor queries them for each job and
    direction.
    """
    name, good, bad = "stored-answers", 0, 0
    for path in words(machine.settings.condor("FILETRANSFER_PLUGINS")):
        try:
            if not (is_ours(machine, path) and stored_answer.is_asked_in(machine.read(path))):
                continue
            problem = stored_answer.trouble(path, machine.read(f"{path}.answer"), machine.stat)
        except FileNotFoundError:
            problem = "is missing"
        except OSError as reason:
            yield unchecked(name, f"the stored answer of {path} cannot be read: {reason.strerror}")
            bad += 1
            continue
        if problem:
            bad += 1
            yield warn(name, f"the stored answer of {path} {problem}, so each question starts Python", _STORE)
        good += not problem
    if not bad:
        yield ok(
            name, f"{good} plugins print stored answers to -classad" if good else "no plugin here has stored answers"
        )


def router_daemon(machine: Machine) -> Iterator[Finding]:
    """Check that condor_master starts the overlay's router."""
    yield from daemon(machine, ROUTER_PROGRAM, "router-daemon", _INSTALL_ROUTER)


def agent_daemon(machine: Machine) -> Iterator[Finding]:
    """Check that condor_master starts the schedd agent."""
    yield from daemon(machine, AGENT_PROGRAM, "agent-daemon", _INSTALL_AP)


def manager_daemon(machine: Machine) -> Iterator[Finding]:
    """Check that condor_master starts the sandbox manager."""
    yield from daemon(machine, MANAGER_PROGRAM, "manager-daemon", _INSTALL_EP)


def transforms(machine: Machine) -> Iterator[Finding]:
    """Check that the job transforms exist in order, and that the running schedd has them."""
    names = words(machine.settings.condor("JOB_TRANSFORM_NAMES"))
    places = [names.index(name) if name in names else -1 for name in TRANSFORMS]
    if -1 in places or places != sorted(places):
        remedy = f"{_INSTALL_AP}; {_later('JOB_TRANSFORM_NAMES')}"
        yield fail("transforms", f"JOB_TRANSFORM_NAMES lacks {' before '.join(TRANSFORMS)}", remedy)
        return
    chosen = machine.settings.condor("STAGEOUT_DEFAULT", "opt-out")
    if chosen not in ("opt-in", "opt-out"):
        text = f"STAGEOUT_DEFAULT = {chosen}: jobs are treated as with opt-out"
        yield fail("transforms", text, "write opt-in or opt-out, and condor_reconfig")
        return
    if not machine.is_expression(f"({machine.settings.condor('STAGEOUT_WORKFLOW_JOBS')})"):
        text = "STAGEOUT_WORKFLOW_JOBS is no ClassAd expression, so jobs of workflow managers are not told apart"
        remedy = f"correct it (false: no such jobs) and condor_reconfig; where it is missing: {_INSTALL_AP}"
        yield fail("transforms", text, remedy)
        return
    body = machine.settings.condor("JOB_TRANSFORM_StageOut")
    if "StageOutGuard" not in body or "LeaveJobInQueue" not in body:
        yield fail("transforms", "JOB_TRANSFORM_StageOut does not set StageOutGuard and LeaveJobInQueue", _INSTALL_AP)
        return
    yield from _in_effect(machine, "transforms", "schedd", "JOB_TRANSFORM_NAMES", TRANSFORMS)


def protected_attributes(machine: Machine) -> Iterator[Finding]:
    """Check that owners can change only their own attributes."""
    name = "protected-attributes"
    listed = {word.lower() for word in words(machine.settings.condor("PROTECTED_JOB_ATTRS"))}
    open_ = [word for word in GUARDED if word.lower() not in listed]
    if open_:
        yield fail(name, f"owners can forge {', '.join(open_)}", f"add them to PROTECTED_JOB_ATTRS ({_INSTALL_AP})")
        return
    for word, means in OPEN.items():
        if word.lower() in listed:
            yield fail(name, f"{word} is protected, so {means}", "take it out of PROTECTED_JOB_ATTRS")
            return
    shown = [word for word in SHOWN if word.lower() not in listed]
    if shown:
        yield warn(name, f"owners can overwrite {', '.join(shown)}", "add them to PROTECTED_JOB_ATTRS")
    yield from _in_effect(machine, name, "schedd", "PROTECTED_JOB_ATTRS", GUARDED)


def secure_attributes(machine: Machine) -> Iterator[Finding]:
    """Check that no owner can write the attributes that identify a job, although stageout does not rely on them
    alone.
    """
    name, wanted = "secure-attributes", _IDENTITY[0]
    for parameter in _SECURE:
        if wanted.lower() in words(machine.settings.condor(parameter).lower()):
            yield from _in_effect(machine, name, "schedd", parameter, [wanted])
            return
    remedy = f"set SECURE_JOB_ATTRS = $(SECURE_JOB_ATTRS) {wanted}, and condor_reconfig ({_INSTALL_AP})"
    yield warn(name, f"owners can write {wanted}, and jobs with a false one are refused", remedy)


def superuser(machine: Machine) -> Iterator[Finding]:
    """Check that the agent may edit other users' jobs."""
    users = {word.split("@")[0] for word in words(machine.settings.condor("QUEUE_SUPER_USERS", "root, condor"))}
    agents = [
        word for word in words(machine.settings.condor("DAEMON_LIST"))
        if PurePath(machine.settings.condor(word)).name == AGENT_PROGRAM
    ]  # fmt: skip
    account = next((machine.settings.condor(f"{word}_USERID") for word in agents), "") or "root"
    if account in users:
        yield ok("superuser", f"the agent runs as {account}, a queue super user")
    else:
        yield fail("superuser", f"the agent runs as {account}, who may not edit jobs", "add it to QUEUE_SUPER_USERS")


def order_numbers(machine: Machine) -> Iterator[Finding]:
    """Check that condor_preen leaves the agent's directories and files in SPOOL alone."""
    kept = words(machine.settings.condor("VALID_SPOOL_FILES"))
    missing = [name for name in AGENT_IN_SPOOL if not any(fnmatch(name, pattern) for pattern in kept)]
    if not missing:
        yield ok("order-numbers", "condor_preen leaves the agent's files in SPOOL alone")
    else:
        names = ", ".join(missing)
        remedy = f"add {names} to VALID_SPOOL_FILES ({_INSTALL_AP})"
        yield fail("order-numbers", f"condor_preen removes the agent's files from SPOOL: {names}", remedy)


@reports_as("job-records", "epoch-history", "history")
def histories(machine: Machine) -> Iterator[Finding]:
    """Check that HTCondor writes the records that the agent and ``stageout wait`` read."""
    directory = PurePath(machine.settings.condor("JOB_EPOCH_HISTORY_DIR"))
    in_spool = directory.parent == PurePath(machine.settings.condor("SPOOL"))
    if in_spool and directory.name not in words(machine.settings.condor("VALID_SPOOL_FILES")):
        remedy = f"add {directory.name} to VALID_SPOOL_FILES ({_INSTALL_AP})"
        yield fail("job-records", f"condor_preen removes {directory} from SPOOL", remedy)
    elif directory.name:
        yield ok("job-records", f"records of each job's transfers: {directory}")
    else:
        remedy = f"set JOB_EPOCH_HISTORY_DIR = $(SPOOL)/stageout_agent_runs ({_INSTALL_AP})"
        yield warn("job-records", "without records of transfers, managers are believed without receipts", remedy)
    if machine.settings.condor("JOB_EPOCH_HISTORY"):
        yield ok("epoch-history", f"records of all transfers: {machine.settings.condor('JOB_EPOCH_HISTORY')}")
    else:
        remedy = "set JOB_EPOCH_HISTORY = $(SPOOL)/epoch_history"
        yield warn("epoch-history", "'stageout history' and 'stageout status' lack records of transfers", remedy)
    if machine.settings.condor("HISTORY"):
        yield ok("history", f"jobs that left: {machine.settings.condor('HISTORY')}")
    else:
        yield warn("history", "HISTORY is not set", "'stageout wait' cannot tell how a job left; set HISTORY")


def startd_attributes(machine: Machine) -> Iterator[Finding]:
    """Check that the startd publishes the job attributes that the manager needs."""
    name = "startd-attributes"
    text = f"{machine.settings.condor('STARTD_JOB_ATTRS')} {machine.settings.condor('STARTD_JOB_EXPRS')}"
    listed = {word.lower() for word in words(text)}
    missing = [word for word in JOB_ATTRIBUTES if word.lower() not in {*listed, "globaljobid", "remoteuser"}]
    if missing:
        remedy = f"{_INSTALL_EP}; {_later('STARTD_JOB_ATTRS')}"
        yield fail(name, f"STARTD_JOB_ATTRS lacks {', '.join(missing)}: every transfer is synchronous", remedy)
        return
    late = [word for word in USEFUL_JOB_ATTRIBUTES if word.lower() not in listed]
    if late:
        text = f"STARTD_JOB_ATTRS lacks {', '.join(late)}, which this version uses"
        yield warn(name, text, f"{_INSTALL_EP}; {_later('STARTD_JOB_ATTRS')}")
    yield from _in_effect(machine, name, "startd", "STARTD_JOB_ATTRS", [w for w in JOB_ATTRIBUTES if w in text.split()])


def chirp_updates(machine: Machine) -> Iterator[Finding]:
    """Check that no job can change attributes in the startd's ad through condor_chirp."""
    patterns = machine.settings.condor(_CHIRP, _CHIRP_DEFAULT)
    off = [name for name in _CHIRP_SWITCHES if machine.settings.condor(name).lower() == "false"]
    ours = sorted(name for name in names_of(Kind.JOB, Kind.SLOT) if name.startswith("StageOut"))
    found = matching(words(patterns), [*_IDENTITY, *ours])
    if not found:
        yield ok("chirp-updates", f"no attribute of stageout matches {_CHIRP} = {patterns}")
    elif off:
        yield ok("chirp-updates", f"jobs send no updates: {off[0]} is false")
    else:
        shown = ", ".join(found[:_SHOWN_NAMES]) + (", ..." if len(found) > _SHOWN_NAMES else "")
        remedy = f"set {_CHIRP} = {_CHIRP_DEFAULT}, or a list that matches none of them, and condor_reconfig"
        yield fail("chirp-updates", f"{_CHIRP} = {patterns} lets a job change {shown} on this node", remedy)


def start_expression(machine: Machine) -> Iterator[Finding]:
    """Check that a node with a full spool accepts no new jobs."""
    if "stageoutaccept" in machine.settings.condor("START").lower():
        yield ok("start-expression", "START heeds StageOutAccept")
    else:
        remedy = "START was set after our fragment: add the second line of START in 20-stageout-ep.conf to it"
        yield warn("start-expression", "START does not look at StageOutAccept: a full node takes new jobs", remedy)


def startd_cron(machine: Machine) -> Iterator[Finding]:
    """Check that the slot ads contain the free data slots and the spool space."""
    for job in words(machine.settings.condor("STARTD_CRON_JOBLIST")):
        path = machine.settings.condor(f"STARTD_CRON_{job}_EXECUTABLE")
        if PurePath(path).name == CRON_PROGRAM:
            if trouble := _cannot_start(machine, path, "--help", "condor"):
                yield fail("startd-cron", f"the startd cannot run {path}: {trouble}", _READABLE)
                return
            yield ok("startd-cron", f"STARTD_CRON_{job}_EXECUTABLE is {path}")
            return
    remedy = f"{_INSTALL_EP}; {_later('STARTD_CRON_JOBLIST')}"
    yield fail("startd-cron", f"no job in STARTD_CRON_JOBLIST is {CRON_PROGRAM}: no back-pressure", remedy)


def _in_effect(machine: Machine, name: str, daemon: str, parameter: str, needed: object) -> Iterator[Finding]:
    """Check that the running daemon has the configuration of the files."""
    wanted = list(needed) if isinstance(needed, (list, tuple)) else []
    try:
        live = {word.lower() for word in words(machine.ask_daemon(daemon, parameter) or "")}
    except Unseen as reason:
        yield unchecked(name, f"{parameter} is right in the files; {reason}")
        return
    late = [word for word in wanted if word.lower() not in live]
    if late:
        remedy = f"run condor_reconfig -daemon {daemon}, or condor_restart"
        yield fail(name, f"the running {daemon} does not have {', '.join(late)} in {parameter} yet", remedy)
    else:
        yield ok(name, f"{parameter} is in effect")


@reports_as("plugins", "front-ends")
def plugins(machine: Machine) -> Iterator[Finding]:
    """Check that each registered plugin answers quickly and with a valid ad, and that ``https`` belongs to our
    plugin.
    """
    owners: dict[str, str] = {}
    yield from registered(machine, owners)
    yield from _front_ends(machine, owners)
    winner = owners.get("https", "")
    if not winner:
        yield fail(
            "plugins",
            "no plugin takes https",
            "let FILETRANSFER_PLUGINS name stageout_curl_plugin, after the others",
        )
    elif not is_ours(machine, winner):
        later = _later("FILETRANSFER_PLUGINS")
        remedy = f"later entries win: let FILETRANSFER_PLUGINS end with stageout_curl_plugin; {later}"
        yield fail("plugins", f"https belongs to {winner}, which never hands off", remedy)
    else:
        yield ok("plugins", f"https belongs to {winner}")


def _front_ends(machine: Machine, owners: Mapping[str, str]) -> Iterator[Finding]:
    """Check that each registered plugin offers hand-offs, and that each front end finds its plugin."""
    listed = words(machine.settings.condor("FILETRANSFER_PLUGINS"))
    bare = [path for path in listed if path in owners.values() and not is_ours(machine, path)]
    for path in listed:
        yield from _front_end(machine, path)
    if bare:
        methods = ", ".join(method for method, path in owners.items() if path in bare)
        made = {path: f"{FRONT_ENDS}/{PurePath(path).name}" for path in bare}
        line = front_end.replaced(listed, made)
        remedy = f"run 'stageout wrap {' '.join(bare)}' as root and set {line}"
        yield warn("front-ends", f"{', '.join(bare)}: uploads by {methods} hold their slot until they are done", remedy)
    else:
        yield ok("front-ends", "each plugin in use hands off")


def _front_end(machine: Machine, path: str) -> Iterator[Finding]:
    try:
        text = machine.read(path)
        plugin = front_end.wrapped(text)
        if plugin and not front_end.is_fresh(text, machine.stat(plugin)):
            remedy = f"run 'stageout wrap --directory {PurePath(path).parent} {plugin}' as root"
            yield warn("front-ends", f"{path} asks {plugin} for each job: it was made for another version", remedy)
    except OSError:
        return  # the check of this plugin reports it


def registered(machine: Machine, owners: dict[str, str]) -> Iterator[Finding]:
    """Check that each registered plugin answers, and fill in the plugin of each method."""
    for path in words(machine.settings.condor("FILETRANSFER_PLUGINS")):
        yield from _plugin(machine, path, owners)


def is_ours(machine: Machine, path: str) -> bool:
    """Tell whether a plugin is built on our framework, so that it can hand off."""
    try:
        return front_end.is_ours(machine.read(path))
    except OSError:
        return False


def _plugin(machine: Machine, path: str, owners: dict[str, str]) -> Iterator[Finding]:
    name = f"plugin {PurePath(path).name}"
    try:
        machine.stat(path)
    except FileNotFoundError:
        yield unchecked(name, f"{path} is not installed; HTCondor passes it over")
        return
    ran = machine.run([path, "-classad"], _CLASSAD_TIMEOUT_S)
    if not ran.has_ended:
        yield unchecked(name, f"{path} -classad {_SLOW}")
        return
    ad = parse_old(ran.output)
    methods = words(ad.text("SupportedMethods"))
    complaint = _complaint(ran.output, ad)
    if not methods or complaint:
        level = fail if is_ours(machine, path) else warn
        last = (ran.output.strip().splitlines() or [f"nothing, status {ran.status}"])[-1]
        said = complaint if methods else last
        yield level(name, f"{path} -classad is not usable: {said}", f"run '{path} -classad' as the user condor")
        return
    owners.update(dict.fromkeys((method.lower() for method in methods), path))
    text = f"{path}: {', '.join(methods)}; -classad in {ran.took_s * 1000:.0f} ms"
    if ran.took_s > _CLASSAD_SLOW_S:
        if is_ours(machine, path):
            remedy = "every job waits for this: is the package on a slow network filesystem?"
        else:
            remedy = "every job waits for this: leave it out of FILETRANSFER_PLUGINS where nobody uses it"
        yield warn(name, text, remedy)
    else:
        yield ok(name, text)


def _complaint(output: str, ad: ClassAd) -> str:
    """Return the parts of a query's answer that would break the starter's ad."""
    for word in words(ad.text("StartdAttrs")):
        if word not in ad:
            return f"StartdAttrs names {word}, which is not in the answer"
        if not isinstance(ad[word], (str, int, float, bool)):
            return f"{word}, named by StartdAttrs, is not a plain value"
    for line in output.splitlines():
        if line.strip() and not line.lstrip().startswith("#") and not _is_attribute(line):
            return f"'{line.strip()[:60]}' is no attribute"
    return ""


def _is_attribute(line: str) -> bool:
    try:
        return len(parse_old(line)) == 1
    except ClassAdSyntaxError:
        return False


COMMON = (version, settings, misplaced_daemons, daemons_alive)
ACCESS_POINT = (
    agent_daemon,
    transforms,
    protected_attributes,
    secure_attributes,
    superuser,
    order_numbers,
    histories,
)
EXECUTE_POINT = (
    manager_daemon,
    startd_attributes,
    chirp_updates,
    startd_cron,
    start_expression,
    plugins,
    plugins_for_jobs,
    stored_answers,
)
