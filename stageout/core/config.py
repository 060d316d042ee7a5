"""Settings: one table of knobs, read with HTCondor's parameter system.

``condor_config.d/`` shows every knob with its default; a test holds both against each other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

from stageout.core.errors import StageoutError

if TYPE_CHECKING:
    from pathlib import Path

Value = Union[str, int, float, bool]
_TOOL_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Knob:
    """One setting.

    :param name: as in condor_config. :param default: fixes the type too.
    :param role: "ep", "pilot", "ap", "policy", "globus", "router": the
        fragment that shows it; "both": all do.
    :param doc: one line; says the unit.
    :param least, most: bounds of a number. :param choices: the words that a text may be, in any case.
    """

    name: str
    default: Value
    role: str
    doc: str
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()


class PathKnob(Knob):
    """One setting that names a file or a directory. It must be absolute."""


KNOBS: dict[str, Knob] = {
    knob.name: knob
    for knob in (
        PathKnob(
            "STAGEOUT_SPOOL",
            "$(EXECUTE)/../stageout",
            "ep",
            "where accepted output waits; same filesystem as EXECUTE, outside it",
        ),
        Knob(
            "STAGEOUT_SPOOL_QUOTA_MB", 0, "ep", "most MB of accepted output on this node; 0: half of the filesystem", 0
        ),
        Knob("STAGEOUT_OWNER_QUOTA_MB", 0, "ep", "most MB of one owner; 0: half of the spool's quota", 0),
        Knob(
            "STAGEOUT_SPOOL_HIGH_PERCENT",
            90,
            "ep",
            "% of the quota waiting to be sent at which the node takes no new jobs",
            1,
            100,
        ),
        Knob("STAGEOUT_SPOOL_LOW_PERCENT", 70, "ep", "% of the quota at which it takes jobs again", 0, 100),
        Knob("STAGEOUT_DATA_SLOT_ACTIVE", 1, "ep", "sandboxes of one CPU slot that are sent to one server at once", 1),
        Knob("STAGEOUT_DATA_SLOT_DEPTH", 2, "ep", "further sandboxes of one CPU slot that may wait", 0),
        Knob("STAGEOUT_MAX_MOVERS", 4, "ep", "plugin processes that move data at once on this node", 1),
        Knob("STAGEOUT_MAX_MOVERS_PER_DESTINATION", 3, "ep", "of these, at most so many to one host", 1),
        Knob("STAGEOUT_MAX_MOVERS_PER_OWNER", 3, "ep", "of these, at most so many of one owner", 1),
        Knob(
            "STAGEOUT_TUNING",
            "crowding",
            "ep",
            "who chooses how many files move at once: crowding, running, fixed",
            choices=("crowding", "running", "fixed"),
        ),
        Knob("STAGEOUT_TUNING_INITIAL", 4, "ep", "files at once to one server at the start", 1),
        Knob("STAGEOUT_TUNING_MAX", 16, "ep", "most files at once to one server", 1),
        Knob("STAGEOUT_TUNING_STREAMS", 4, "ep", "streams of each file, where the plugin can send a file in parts", 1),
        Knob("STAGEOUT_TUNING_DELAY", 4, "ep", "files that have moved between two steps", 1),
        Knob("STAGEOUT_TUNING_STEP", 1, "ep", "files at once more, or fewer, in one step", 1),
        Knob("STAGEOUT_TUNING_THRESHOLD", 1.0, "ep", "running: MB/s that the rate must change by for a step", 0),
        Knob("STAGEOUT_POLICY_URL", "", "ep", "the policy service, https://HOST:PORT; empty: there is none"),
        PathKnob(
            "STAGEOUT_POLICY_TOKEN", "/etc/condor/stageout-policy.token", "ep", "file with this node's token for it"
        ),
        Knob("STAGEOUT_SITE", "", "ep", "name of this node's site for the policy service; empty: the host's domain"),
        Knob("STAGEOUT_BATCH_FILES", 200, "ep", "most files in one call of a plugin", 1),
        Knob("STAGEOUT_BATCH_MB", 1024, "ep", "MB after which a batch takes no further file", 1),
        Knob("STAGEOUT_URGENT", 3600, "ep", "s before a deadline from which on output goes before all other", 0),
        Knob("STAGEOUT_ATTEMPTS", 20, "ep", "attempts per file before it counts as failed; 0: only the time counts", 0),
        Knob("STAGEOUT_RETRY_FIRST", 20, "ep", "s before the second attempt; doubles each time", 1),
        Knob("STAGEOUT_RETRY_MAX", 1800, "ep", "most s between two attempts", 1),
        Knob(
            "STAGEOUT_GIVE_UP",
            259200,
            "ep",
            "s after acceptance, or a retry, at which a file fails that was tried and still cannot be delivered",
            60,
        ),
        Knob(
            "STAGEOUT_CONFIRM_TIMEOUT",
            3600,
            "ep",
            "s without the agent's word after which the sandbox is reported as unconfirmed",
            1,
        ),
        Knob("STAGEOUT_RETENTION", 604800, "ep", "s that the bytes of a failed or unconfirmed sandbox are kept", 0),
        Knob(
            "STAGEOUT_REQUIRE_VERIFIED", False, "ep", "true: only plugins that verify uploads may move accepted output"
        ),
        Knob(
            "STAGEOUT_HANDOFF_TIMEOUT", 2.0, "ep", "s that a plugin waits for the manager before it uploads itself", 0.1
        ),
        Knob("STAGEOUT_STARTD_TIMEOUT", 0.25, "ep", "s that the startd has to say whose job a plugin serves", 0.05),
        Knob("STAGEOUT_AGENT_FRESH", 180, "ep", "s after which an agent that was not heard of counts as gone", 10),
        Knob(
            "STAGEOUT_AGENT_KEYS",
            "",
            "ep",
            "SCHEDD=KEY ...: access points that this node obeys; empty: see SECURITY.md",
        ),
        Knob(
            "STAGEOUT_ACCOUNTS",
            "",
            "ep",
            "accounts that keep output of jobs under slot users: NAME, ...; empty: such jobs upload themselves",
        ),
        Knob("STAGEOUT_RENEWAL_INTERVAL", 60, "ep", "s between two looks for credentials that must be renewed", 1),
        Knob("STAGEOUT_ORDER_INTERVAL", 5, "ep", "s between two looks at the agents' orders", 1),
        Knob("STAGEOUT_REPORT_INTERVAL", 300, "ep", "s between two reports when nothing changed", 10),
        Knob("STAGEOUT_STOP_GRACE", 20, "ep", "s that running transfers get to end on a graceful stop", 0),
        Knob("STAGEOUT_PILOT", False, "pilot", "true: the spool goes away when HTCondor stops on this node"),
        Knob("STAGEOUT_PILOT_END", 0, "pilot", "s since 1970 at which the pilot ends; 0: not known", 0),
        Knob("STAGEOUT_PILOT_CLOSE", 600, "pilot", "s before that end at which no new job starts", 0),
        Knob("STAGEOUT_PILOT_GRACE", 90, "pilot", "s from the signal to stop until the manager's last report", 1),
        Knob(
            "STAGEOUT_PILOT_ROUTER",
            "",
            "pilot",
            "router that takes what a pilot cannot deliver: HOST:PORT, ...; empty: none",
        ),
        Knob("STAGEOUT_PILOT_COPIES", 1, "pilot", "routers that must have a file before the pilot lets go of it", 1),
        Knob(
            "STAGEOUT_CUSTODIANS", "", "ap", "routers that are asked about pilots' output: HOST:PORT, ...; empty: none"
        ),
        PathKnob(
            "STAGEOUT_CUSTODIAN_KEY", "/etc/condor/stageout-overlay.key", "ap", "NAME SECRET for them, the pilots' own"
        ),
        Knob(
            "STAGEOUT_AGENT_KEY",
            "",
            "ap",
            "public key of the agent (stageout-schedd-agent --key), told to nodes by jobs",
        ),
        Knob("STAGEOUT_CREDENTIAL_PORT", 0, "ap", "TCP port where nodes fetch renewed credentials; 0: none", 0, 65535),
        Knob("STAGEOUT_CREDENTIAL_HOST", "", "ap", "its name or address for the nodes; empty: this machine's"),
        Knob("STAGEOUT_POLL_INTERVAL", 5, "ap", "s between two looks at the job queue", 1),
        Knob("STAGEOUT_NOTICE_INTERVAL", 60, "ap", "s between two ads of the agent about itself", 5),
        Knob(
            "STAGEOUT_EDIT_INTERVAL",
            20,
            "ap",
            "least s between two edits of one job's progress (ends are written at once)",
            0,
        ),
        Knob(
            "STAGEOUT_LEASE",
            7200,
            "ap",
            "s of silence, while collector and agent are up, after which a manager's sandboxes are lost",
            60,
        ),
        Knob(
            "STAGEOUT_MAX_RERUNS",
            2,
            "ap",
            "times that a job runs again because its output was lost; then it is held",
            0,
        ),
        Knob("STAGEOUT_LEAVE_LIMIT", 604800, "ap", "s that a completed job waits for its output without an agent", 60),
        Knob("STAGEOUT_MAIL_INTERVAL", 600, "ap", "least s between two mails to one owner; each sums up", 0),
        Knob("STAGEOUT_POLICY", "greedy", "policy", "greedy, fair-share, priority, reserved, or the path of a module"),
        Knob("STAGEOUT_POLICY_INITIAL", 4, "policy", "streams that the greedy policy gives a new client", 0),
        Knob("STAGEOUT_POLICY_INCREMENT", 4, "policy", "streams that it adds when a client renews", 0),
        Knob("STAGEOUT_POLICY_MAX_PAIR", 128, "policy", "most streams between a source and a destination", 0),
        Knob("STAGEOUT_POLICY_MAX_CLIENT", 32, "policy", "of these, most of one client", 0),
        Knob("STAGEOUT_POLICY_RESERVED", "", "policy", "reserved policy: OWNER=STREAMS, ... that only this owner gets"),
        Knob("STAGEOUT_POLICY_PRIORITIES", "", "policy", "priority policy: OWNER=NUMBER, ...; larger first, else 0"),
        Knob("STAGEOUT_POLICY_LEASE", 300.0, "policy", "s after which streams that are not renewed are free", 1),
        Knob(
            "STAGEOUT_POLICY_HOST", "127.0.0.1", "policy", "address to listen on; all but loopback need a certificate"
        ),
        Knob("STAGEOUT_POLICY_PORT", 9620, "policy", "TCP port; 0: any free one (see the log)", 0, 65535),
        PathKnob("STAGEOUT_POLICY_CERT", "", "policy", "PEM file of the certificate and its chain"),
        PathKnob("STAGEOUT_POLICY_KEY", "", "policy", "PEM file of its key; empty: in the same file"),
        PathKnob("STAGEOUT_POLICY_TOKENS", "/etc/condor/stageout-policy.tokens", "policy", "one OWNER TOKEN a line"),
        PathKnob("STAGEOUT_POLICY_DIR", "$(SPOOL)/stageout_policy", "policy", "where leases are kept over restarts"),
        PathKnob(
            "STAGEOUT_ROUTER_ROOT",
            "",
            "router",
            "directory below which files arrive; empty: only a relay",
        ),
        PathKnob("STAGEOUT_ROUTER_DIR", "$(SPOOL)/stageout_router", "router", "where the router keeps its records"),
        Knob("STAGEOUT_ROUTER_HOST", "0.0.0.0", "router", "address to listen on"),
        Knob("STAGEOUT_ROUTER_PORT", 9621, "router", "TCP port; 0: any free one (see the log)", 0, 65535),
        PathKnob("STAGEOUT_ROUTER_KEYS", "/etc/condor/stageout-router.keys", "router", "one NAME SECRET PREFIX a line"),
        PathKnob(
            "STAGEOUT_ROUTER_ISSUERS", "", "router", "file of trusted issuers of capabilities: NAME ed25519:KEY PREFIX"
        ),
        Knob("STAGEOUT_ROUTER_CAPABILITIES", False, "router", "true: nothing is written without a capability"),
        PathKnob("STAGEOUT_ROUTER_CERT", "", "router", "PEM file of the certificate and its chain; empty: no TLS"),
        PathKnob("STAGEOUT_ROUTER_CERT_KEY", "", "router", "PEM file of its key; empty: in the same file"),
        Knob("STAGEOUT_ROUTER_TLS_ONLY", False, "router", "true: senders and routers without TLS are refused"),
        Knob("STAGEOUT_ROUTER_PEER_TRANSFERS", 1024, "router", "most transfers of one key under way at once", 1),
        Knob("STAGEOUT_ROUTER_PEER_CONNECTIONS", 512, "router", "most connections of one key at once", 1),
        Knob("STAGEOUT_ROUTER_PEER_MESSAGES", 5000.0, "router", "most messages a second on a control connection", 1),
        Knob("STAGEOUT_ROUTER_ADDRESS", "", "router", "HOST:PORT that others reach it by; empty: full host name, port"),
        Knob(
            "STAGEOUT_ROUTER_NEIGHBOURS", "", "router", "routers that it may connect to: HOST:PORT, ..., or: collector"
        ),
        PathKnob(
            "STAGEOUT_ROUTER_KEY", "/etc/condor/stageout-overlay.key", "router", "its NAME SECRET for its neighbours"
        ),
        Knob("STAGEOUT_ROUTER_INTERVAL", 15.0, "router", "s between announcements of its links; alike on all", 0.05),
        Knob(
            "STAGEOUT_ROUTER_TERMINALS", "", "router", "takes custody for these: HOST:PORT[=KEY,KEY] ...; empty: none"
        ),
        Knob("STAGEOUT_ROUTER_SPOOL_MB", 0, "router", "MB of its spool for that; 0: half of the filesystem", 0),
        Knob("STAGEOUT_ROUTER_DELIVERIES", 4, "router", "files that it delivers at once out of its spool", 1),
        Knob(
            "STAGEOUT_ROUTER_EGRESS", "", "router", "delivered by FILETRANSFER_PLUGINS: /PATH=URL ...; empty: nothing"
        ),
        PathKnob(
            "STAGEOUT_ROUTER_EGRESS_CREDENTIALS",
            "",
            "router",
            "directory of the plugins' tokens (SERVICE.use) and proxy (x509_proxy); empty: none",
        ),
        Knob(
            "STAGEOUT_ROUTER_EGRESS_LEASES",
            "",
            "router",
            "router that says who may deliver, where gateways share URLs: HOST:PORT; empty: none do",
        ),
        Knob(
            "STAGEOUT_ROUTER_EGRESS_KEEP",
            60.0,
            "router",
            "seconds for which it keeps a file that plugins fetched, for who goes on with that version",
            0,
        ),
        Knob(
            "STAGEOUT_ROUTER_UPLINK_MB_S",
            0.0,
            "router",
            "MB/s (10^6 bytes) that all it sends shares, and never exceeds; 0: not known, no limit",
            0,
        ),
        Knob("STAGEOUT_ROUTER_WORKERS", 2, "router", "processes that move data, and as many that make small files", 1),
        PathKnob(
            "STAGEOUT_OVERLAY_KEY", "/etc/condor/stageout-overlay.key", "ep", "NAME SECRET that overlay:// routers know"
        ),
        Knob(
            "STAGEOUT_OVERLAY_GATEWAY", "", "ep", "custodian that overlay:// uploads go through: HOST:PORT; empty: none"
        ),
        Knob(
            "STAGEOUT_OVERLAY_ROUTES", "", "ep", "ways to overlay:// routers: RELAY, ...; ask RELAY, ...; empty: direct"
        ),
        Knob("STAGEOUT_OVERLAY_CONNECTIONS", 24, "ep", "most connections of a file on each route, without a grant", 1),
        Knob(
            "STAGEOUT_OVERLAY_CONGESTION",
            "",
            "ep",
            "TCP congestion control of overlay:// uploads, as bbr; empty: the kernel's",
        ),
        PathKnob(
            "STAGEOUT_PROFILES", "/var/lib/stageout/profiles", "ep", "what stageout profile measured about servers"
        ),
        Knob(
            "STAGEOUT_GLOBUS_LOCAL",
            "",
            "globus",
            "collection that sees this node's files: UUID /here=/there, ...; empty: HTTPS to the other collection",
        ),
        PathKnob(
            "STAGEOUT_GLOBUS_PERSONAL",
            "",
            "globus",
            "program of Globus Connect Personal, to make an endpoint for each call without LOCAL; empty: never",
        ),
        Knob("STAGEOUT_GLOBUS_COLLECTIONS", "", "globus", "names that URLs may use for collections: NAME=UUID, ..."),
        Knob("STAGEOUT_GLOBUS_CREDENTIAL", "globus", "globus", "service of the credmon whose tokens are used"),
        Knob(
            "STAGEOUT_GLOBUS_LEASE",
            2700.0,
            "globus",
            "s after which a task ends that no plugin watches any more; renewed meanwhile",
            2,
        ),
        Knob("STAGEOUT_GLOBUS_POLL", 15.0, "globus", "most s between two looks at a running task", 0.05),
        Knob("STAGEOUT_GLOBUS_TASKS", 2, "globus", "tasks of one plugin call that run at once; the others queue", 1),
        Knob("STAGEOUT_GLOBUS_TASK_FILES", 10000, "globus", "most files in one task", 1),
        Knob(
            "STAGEOUT_GLOBUS_SYNC",
            "checksum",
            "globus",
            "files that are there already are not sent again when they agree in: exists, size, mtime, checksum",
            choices=("exists", "size", "mtime", "checksum"),
        ),
        Knob(
            "STAGEOUT_GLOBUS_FAULT_PATIENCE",
            60.0,
            "globus",
            "s without progress after which a denied path, a full quota or a missing file ends a task",
            0.1,
        ),
        Knob("STAGEOUT_GLOBUS_STALL", 900.0, "globus", "s without progress after which any other task ends", 0.1),
        Knob("STAGEOUT_GLOBUS_PAUSE", 3600.0, "globus", "s that a task which Globus has paused is waited for", 0.1),
        Knob(
            "STAGEOUT_GLOBUS_RATE_MB",
            20.0,
            "globus",
            "MB/s that a task is expected to reach, until one was seen",
            0.001,
        ),
        Knob(
            "STAGEOUT_GLOBUS_TRANSFER_URL", "", "globus", "base URL of the Transfer service; empty: the public service"
        ),
        Knob("STAGEOUT_DEBUG", False, "both", "true: more in the logs"),
    )
}


class ConfigError(StageoutError):
    """A setting cannot be used; the text names it and says what is allowed."""


class Settings:
    """Typed look-up of knobs.

    :param source: returns the text of a parameter, or None when it is not set.
    :param names: of all that is set, where that is known.
    """

    def __init__(self, source: Callable[[str], str | None], names: Sequence[str] = ()) -> None:
        self._source, self.names = source, names

    def text(self, name: str) -> str:
        """Value of a text knob."""
        return str(self._value(name))

    def path(self, name: str) -> str:
        """Value of a path knob, which may begin with a parameter of HTCondor that nobody has expanded.

        :raises ConfigError: that parameter is not set, or relative.
        """
        text = self.text(name)
        parameter, mark, rest = text.partition(")")
        if not mark or not text.startswith("$("):
            return text
        above = self._source(parameter[2:])
        if not above:
            doc = KNOBS[name].doc
            raise ConfigError(f"{name} = {text}, and {parameter[2:]} is not set: write an absolute path ({doc})")
        return checked_path(name, above + rest, KNOBS[name].doc)

    def number(self, name: str) -> float:
        """Value of a numeric knob, in the unit that the table names."""
        return float(self._value(name))

    def count(self, name: str) -> int:
        """Value of an integer knob."""
        return int(self._value(name))

    def flag(self, name: str) -> bool:
        """Value of a boolean knob."""
        return bool(self._value(name))

    def condor(self, name: str, default: str = "") -> str:
        """A parameter of HTCondor itself, such as LOG or EXECUTE."""
        found = self._source(name)
        return default if found is None else found

    def _value(self, name: str) -> Value:
        knob = KNOBS[name]
        text = self._source(name)
        if text is None or not text.strip():
            return knob.default
        value = _parse(knob, text.strip())
        _check(knob, text, value)
        return value


def checked_path(name: str, text: str, doc: str = "") -> str:
    """The path, when it is absolute. :raises ConfigError: it is relative to whatever directory a process runs in."""
    if text.startswith("/"):
        return text
    what = f" ({doc})" if doc else ""
    raise ConfigError(f"{name} = {text}: write an absolute path, such as /{text.lstrip('./')}{what}")


def _check(knob: Knob, text: str, value: Value) -> None:
    if knob.choices and str(value).lower() not in knob.choices:
        raise ConfigError(f"{knob.name} = {text}: write one of {', '.join(knob.choices)}")
    if isinstance(knob, PathKnob) and not text.strip().startswith("$("):
        checked_path(knob.name, text.strip(), knob.doc)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{knob.name} = {text}: write a number ({knob.doc})")
    if knob.least is not None and float(value) < knob.least:
        raise ConfigError(f"{knob.name} = {text}: must be at least {knob.least:g} ({knob.doc})")
    if knob.most is not None and float(value) > knob.most:
        raise ConfigError(f"{knob.name} = {text}: must be at most {knob.most:g} ({knob.doc})")


def _parse(knob: Knob, text: str) -> Value:
    if isinstance(knob.default, bool):
        lowered = text.lower()
        if lowered in ("true", "false", "yes", "no", "1", "0"):
            return lowered in ("true", "yes", "1")
        raise ConfigError(f"{knob.name} = {text}: write true or false ({knob.doc})")
    if isinstance(knob.default, str):
        return text
    try:
        return type(knob.default)(text)
    except ValueError:
        raise ConfigError(f"{knob.name} = {text}: write a number ({knob.doc})") from None


def condor_settings(local_name: str = "") -> Settings:
    """Settings of the HTCondor configuration that this process sees.

    :param local_name: as given to a daemon by ``-local-name``; ``NAME.KNOB`` then comes before ``KNOB``.
    """
    import htcondor2

    def look_up(name: str) -> str | None:
        for key in ([f"{local_name}.{name}"] if local_name else []) + [name]:
            found = htcondor2.param.get(key)
            if found is not None:
                return str(found)
        return None

    return Settings(look_up)


def flocked_to(settings: Settings) -> list[str]:
    """Collectors of the pools to which the schedd's jobs flock."""
    found = settings.condor("FLOCK_COLLECTOR_HOSTS") or settings.condor("FLOCK_TO")
    return list(dict.fromkeys(found.replace(",", " ").split()))


def tool_settings(prefix: str) -> Settings:
    """Settings of the HTCondor configuration for programs that must do without the bindings (plugins).

    ``condor_config_val`` is asked once, about 20 ms. Where it is not installed or finds no configuration, the
    environment counts, in HTCondor's ``_CONDOR_NAME`` form.

    :param prefix: of the parameters that are wanted, such as ``STAGEOUT_GLOBUS_``.
    """
    import shutil  # only where there are no bindings: every call of the command loads this module
    import subprocess

    tool = shutil.which("condor_config_val")
    if tool is None:
        return environment_settings()
    command = [tool, "-dump", "-expanded", f"^{prefix}"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TOOL_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return environment_settings()
    lines = (line.partition(" = ") for line in done.stdout.decode(errors="replace").splitlines())
    return Settings({name.strip().upper(): value for name, mark, value in lines if mark}.get)


def reload_condor() -> None:
    """Read the HTCondor configuration again (SIGHUP)."""
    import htcondor2

    htcondor2.reload_config()


def mapping_settings(values: Mapping[str, str]) -> Settings:
    """Settings of a plain mapping (tests, single-file pilots without bindings)."""
    return Settings(values.get)


def file_settings(path: Path) -> Settings:
    """Settings of a file with one NAME=VALUE a line, as systemd reads it (``EnvironmentFile``), else the environment.

    :raises ConfigError: it cannot be read, or a line is none.
    """
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path}: {getattr(problem, 'strerror', '') or problem}") from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        name, equals, value = (part.strip() for part in line.partition("="))
        if not line or line[0] in "#;":
            continue
        if not equals or not name.isidentifier():
            raise ConfigError(f"{path}, line {number}: write NAME=VALUE")
        found[name] = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value
    return Settings({**os.environ, **found}.get, (*found, *os.environ))


def misspelt(settings: Settings) -> list[str]:
    """A sentence for each name that looks like one of our settings and is none."""
    import difflib

    wrong = sorted(name for name in set(settings.names) if name.startswith("STAGEOUT_ROUTER_") and name not in KNOBS)
    near = {name: difflib.get_close_matches(name, KNOBS, 1) for name in wrong}
    return [f"there is no setting {name}{': is it ' + near[name][0] + '?' if near[name] else ''}" for name in wrong]


def environment_settings(prefix: str = "_CONDOR_") -> Settings:
    """Settings of the environment, in HTCondor's ``_CONDOR_NAME`` form."""
    names = tuple(name[len(prefix) :] for name in os.environ if name.startswith(prefix))
    return Settings(lambda name: os.environ.get(prefix + name), names)
