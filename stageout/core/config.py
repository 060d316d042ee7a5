"""Settings: one table of knobs, read with HTCondor's parameter system.

``condor_config.d/`` shows every knob with its default; a test holds both against each other.
"""

from __future__ import annotations

import math
import os
import pwd
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

from stageout.core.errors import StageoutError

if TYPE_CHECKING:
    from pathlib import Path

Value = Union[str, int, float, bool]
_TOOL_TIMEOUT_S = 20.0
#: Settings of a daemon's log that are in no table: HTCondor has them for each daemon.
_OF_DAEMONS = frozenset(
    f"{subsystem}_{end}" for subsystem in ("STAGEOUT_ROUTER", "STAGEOUT_POLICY_SERVICE") for end in ("LOG", "DEBUG")
)


@dataclass(frozen=True)
class Knob:
    """One setting.

    :param name: as in condor_config. :param default: fixes the type too.
    :param role: "ep", "pilot", "ap", "policy", "globus", "router", "web": the
        fragment that shows it; "both": all do.
    :param doc: one line, with the unit. :param who: the person who sets it, and when.
    :param least, most: bounds of a number. :param choices: the words that a text may be, in any case.
    """

    name: str
    default: Value
    role: str
    doc: str
    who: str
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()


class PathKnob(Knob):
    """One setting that names a file or a directory. It must be absolute."""


KNOBS: dict[str, Knob] = {
    knob.name: knob
    for knob in (
        Knob(
            "STAGEOUT_LOG_FORMAT",
            "text",
            "both",
            "Lines of the daemons' logs: `text`, or `json` for an object in each line",
            "Administrators who collect logs in a program set `json`",
            choices=("text", "json"),
        ),
        PathKnob(
            "STAGEOUT_SPOOL",
            "$(EXECUTE)/../stageout",
            "ep",
            "Directory of accepted output, on the filesystem of EXECUTE but outside EXECUTE",
            "Administrators set it when EXECUTE is a mount point, or when several startds share a machine",
        ),
        Knob(
            "STAGEOUT_SPOOL_QUOTA_MB",
            0,
            "ep",
            "Megabytes (10^6 bytes) of accepted output that the node may hold; 0: half of the filesystem",
            "Administrators set it when other programs need the same filesystem",
            0,
        ),
        Knob(
            "STAGEOUT_OWNER_QUOTA_MB",
            0,
            "ep",
            "Megabytes (10^6 bytes) of output that one owner may have on the node; 0: half of the spool's quota",
            "Administrators lower it when many owners share a node, and raise it on nodes of one owner",
            0,
        ),
        Knob(
            "STAGEOUT_SPOOL_HIGH_PERCENT",
            90,
            "ep",
            "Percentage of the quota, waiting to be sent, at which the node takes no new jobs; 20 below, it goes on",
            "Administrators lower it when jobs that still run fill the spool beyond its quota",
            1,
            100,
        ),
        Knob(
            "STAGEOUT_DATA_SLOT_ACTIVE",
            1,
            "ep",
            "Sandboxes of one CPU slot that are sent to one server at the same time",
            "Administrators raise it when jobs end faster than one transfer after the other",
            1,
        ),
        Knob(
            "STAGEOUT_DATA_SLOT_DEPTH",
            2,
            "ep",
            "Sandboxes of one CPU slot that may wait in addition to those being sent",
            "Administrators raise it when short jobs wait for a slow destination, and set 0 to limit output that waits",
            0,
        ),
        Knob(
            "STAGEOUT_MAX_MOVERS",
            4,
            "ep",
            "Plugin processes that may transfer data on the node at the same time",
            "Administrators raise it on nodes with a fast network, and lower it where transfers disturb jobs",
            1,
        ),
        Knob(
            "STAGEOUT_MAX_MOVERS_PER_DESTINATION",
            3,
            "ep",
            "Plugin processes that may send to one host at the same time",
            "Administrators lower it to protect a weak server",
            1,
        ),
        Knob(
            "STAGEOUT_MAX_MOVERS_PER_OWNER",
            3,
            "ep",
            "Plugin processes that may send one owner's output at the same time",
            "Administrators lower it when one owner takes all transfers of a node",
            1,
        ),
        Knob(
            "STAGEOUT_TUNING",
            "crowding",
            "ep",
            "Algorithm that chooses the number of files in transfer to a server: crowding, running or fixed",
            "Administrators set `fixed` when the number of transfers must not change",
            choices=("crowding", "running", "fixed"),
        ),
        Knob(
            "STAGEOUT_TUNING_MAX",
            16,
            "ep",
            "Files that may be in transfer to one server at the same time",
            "Administrators lower it to protect a weak server, and set it for STAGEOUT_TUNING = `fixed`",
            1,
        ),
        Knob(
            "STAGEOUT_TUNING_STREAMS",
            4,
            "ep",
            "Streams for each file, where the plugin can send a file in parts",
            "Administrators raise it for long distances, after a measurement with `stageout profile`",
            1,
        ),
        Knob(
            "STAGEOUT_POLICY_URL",
            "",
            "ep",
            "URL of the policy service, https://HOST:PORT; empty: the pool has none",
            "Administrators set it when the pool has a policy service",
        ),
        PathKnob(
            "STAGEOUT_POLICY_TOKEN",
            "/etc/condor/stageout-policy.token",
            "ep",
            "File with the node's token for the policy service",
            "Administrators set it when the token is in another file",
        ),
        Knob(
            "STAGEOUT_SITE",
            "",
            "ep",
            "Name of the node's site for the policy service; empty: the domain of the host",
            "Administrators set it when machines of one site have several domains",
        ),
        Knob(
            "STAGEOUT_BATCH_FILES",
            200,
            "ep",
            "Files that one call of a plugin may have",
            "Administrators lower it for plugins that fail with many files",
            1,
        ),
        Knob(
            "STAGEOUT_URGENT_WINDOW",
            3600,
            "ep",
            "Seconds before a deadline in which output is sent before all other output, and credentials are renewed",
            "Administrators raise it when jobs with deadlines come late, and lower it for credentials of minutes",
            0,
        ),
        Knob(
            "STAGEOUT_ATTEMPTS",
            20,
            "ep",
            "Attempts to send a file before it fails; 0: only STAGEOUT_DELIVERY_TIMEOUT counts",
            "Administrators raise it, or set 0, for servers that often fail",
            0,
        ),
        Knob(
            "STAGEOUT_RETRY_INITIAL_DELAY",
            20,
            "ep",
            "Seconds to wait before the second attempt; the wait doubles with each attempt",
            "Administrators raise it when early attempts disturb a server",
            1,
        ),
        Knob(
            "STAGEOUT_RETRY_MAX",
            1800,
            "ep",
            "Seconds to wait between two attempts at most",
            "Administrators lower it when output must follow soon after a server returns",
            1,
        ),
        Knob(
            "STAGEOUT_DELIVERY_TIMEOUT",
            259200,
            "ep",
            "Seconds to try to deliver a file, after its acceptance or a retry, before it fails",
            "Administrators raise it when servers are away for longer, such as over holidays",
            60,
        ),
        Knob(
            "STAGEOUT_FALLBACK_AFTER",
            0,
            "ep",
            "Seconds to try to deliver output, after its acceptance or a retry, before it goes to the job's "
            "StageOutFallback; 0: only when it fails",
            "Administrators set it when output must leave the node although its server is away",
            0,
        ),
        Knob(
            "STAGEOUT_CONFIRM_TIMEOUT",
            3600,
            "ep",
            "Seconds to wait for the agent's confirmation before a sandbox is reported as unconfirmed",
            "Administrators raise it when an access point is often away for longer",
            1,
        ),
        Knob(
            "STAGEOUT_RETENTION",
            604800,
            "ep",
            "Seconds to keep the output of a failed or unconfirmed sandbox before it is deleted",
            "Administrators lower it when spools are small, and raise it when owners need more time",
            0,
        ),
        Knob(
            "STAGEOUT_REQUIRE_VERIFIED",
            False,
            "ep",
            "true: only plugins that verify uploads may deliver accepted output",
            "Administrators set it when a checksum is required for each file",
        ),
        Knob(
            "STAGEOUT_HANDOFF_TIMEOUT",
            2.0,
            "ep",
            "Seconds for which a plugin waits for the manager before it uploads itself; three quarters for the startd",
            "Administrators raise it on nodes with slow disks, a high load or LVM",
            0.1,
        ),
        Knob(
            "STAGEOUT_AGENT_TIMEOUT",
            180,
            "ep",
            "Seconds to wait for a notice of an agent before the agent counts as gone",
            "Administrators raise it when the collector is often slow",
            10,
        ),
        Knob(
            "STAGEOUT_AGENT_KEYS",
            "",
            "ep",
            "Access points whose orders the node obeys: SCHEDD=KEY ...; empty: the agents that the node met first",
            "Administrators set it to name the trusted access points before the first job",
        ),
        Knob(
            "STAGEOUT_ACCOUNTS",
            "",
            "ep",
            "Accounts that keep the output of jobs under slot users: NAME, ...; empty: such jobs upload themselves",
            "Administrators set it when jobs run under slot users",
        ),
        Knob(
            "STAGEOUT_ORDER_INTERVAL",
            5,
            "ep",
            "Seconds between two queries for the agents' orders",
            "Administrators raise it when nodes load a large pool's collector too much",
            1,
        ),
        Knob(
            "STAGEOUT_REPORT_INTERVAL",
            300,
            "ep",
            "Seconds between two reports when nothing has changed",
            "Administrators raise it when nodes load a large pool's collector too much",
            10,
        ),
        Knob(
            "STAGEOUT_STOP_GRACE",
            20,
            "ep",
            "Seconds to wait for running transfers before a graceful stop ends them",
            "Administrators raise it when transfers of large files should end before a restart",
            0,
        ),
        Knob(
            "STAGEOUT_MANAGER_METRICS_PORT",
            0,
            "ep",
            "TCP port where Prometheus reads the metrics of the sandbox manager; 0: none",
            "Administrators with Prometheus set it",
            0,
            65535,
        ),
        Knob(
            "STAGEOUT_MANAGER_METRICS_HOST",
            "127.0.0.1",
            "ep",
            "Address to listen on for metrics; whoever reaches it can read them",
            "Administrators set it when another machine reads the metrics",
        ),
        PathKnob(
            "STAGEOUT_MANAGER_METRICS_FILE",
            "",
            "ep",
            "File, NAME.prom, that the manager writes every 30 seconds for node_exporter; empty: none",
            "Administrators with node_exporter set it",
        ),
        Knob(
            "STAGEOUT_NEVER_RETURNS",
            "false",
            "ep",
            "Expression over the machine's ad: the node never comes back when it is gone; its jobs soon run again then",
            "Administrators set it on cloud nodes and pilots",
        ),
        Knob(
            "STAGEOUT_SHORT_LEASE",
            900,
            "ep",
            "Seconds for which such a node sends output after its last report that the access point has read",
            "Administrators change it together with STAGEOUT_NEVER_RETURNS: a shorter time runs jobs again sooner",
            60,
            7200,
        ),
        Knob(
            "STAGEOUT_PILOT",
            False,
            "pilot",
            "true: the spool is deleted when HTCondor stops on the node",
            "The fragment for pilots sets it",
        ),
        Knob(
            "STAGEOUT_PILOT_END",
            0,
            "pilot",
            "Time at which the pilot ends, in seconds since 1970; 0: not known",
            "The script that starts a pilot sets it, from the limits of its batch system",
            0,
        ),
        Knob(
            "STAGEOUT_PILOT_CLOSE",
            600,
            "pilot",
            "Seconds before the end of the pilot from which no new job starts",
            "The script that starts a pilot raises it when jobs have much output",
            0,
        ),
        Knob(
            "STAGEOUT_PILOT_GRACE",
            90,
            "pilot",
            "Seconds to deliver output after the signal to stop, before the manager sends its last report",
            "The script that starts a pilot sets it to what the batch system leaves after its signal",
            1,
        ),
        Knob(
            "STAGEOUT_PILOT_ROUTER",
            "",
            "pilot",
            "Routers that take the output that a pilot cannot deliver: HOST:PORT, ...; empty: none",
            "Administrators of pilots set it when a router takes custody of output",
        ),
        Knob(
            "STAGEOUT_PILOT_COPIES",
            1,
            "pilot",
            "Routers that must hold a file before the pilot deletes it",
            "Administrators of pilots raise it when one router may fail for good",
            1,
        ),
        Knob(
            "STAGEOUT_CUSTODIANS",
            "",
            "ap",
            "Routers that the agent asks about the output of pilots: HOST:PORT, ...; empty: none",
            "Administrators set it when pilots name routers in STAGEOUT_PILOT_ROUTER",
        ),
        PathKnob(
            "STAGEOUT_CUSTODIAN_KEY",
            "/etc/condor/stageout-overlay.key",
            "ap",
            "File with NAME SECRET for these routers, as the pilots have it; several, with commas, while it changes",
            "Administrators set it when the key is in another file, or while it changes",
        ),
        Knob(
            "STAGEOUT_AGENT_KEY",
            "",
            "ap",
            "Public key of the agent (stageout-schedd-agent --key), which jobs carry to the nodes",
            "Administrators set it when nodes must know the agent from the first job on",
        ),
        Knob(
            "STAGEOUT_CREDENTIAL_PORT",
            0,
            "ap",
            "TCP port where nodes fetch renewed credentials; 0: none",
            "Administrators set it when output waits for longer than its credentials live",
            0,
            65535,
        ),
        Knob(
            "STAGEOUT_CREDENTIAL_HOST",
            "",
            "ap",
            "Name or address of that port for the nodes; empty: the name of this machine",
            "Administrators set it when nodes reach the access point under another name",
        ),
        Knob(
            "STAGEOUT_POLL_INTERVAL",
            5,
            "ap",
            "Seconds between two queries of the job queue",
            "Administrators raise it when the queue is very large",
            1,
        ),
        Knob(
            "STAGEOUT_NOTICE_INTERVAL",
            60,
            "ap",
            "Seconds between two notices that the agent sends to the collector",
            "Administrators of many access points raise it, together with STAGEOUT_AGENT_TIMEOUT on the nodes",
            5,
        ),
        Knob(
            "STAGEOUT_EDIT_INTERVAL",
            20,
            "ap",
            "Seconds to wait before a job's progress is written again, and a quarter of that after its end before it "
            "is written first; ends are written at once",
            "Administrators raise it when the schedd is busy",
            0,
        ),
        Knob(
            "STAGEOUT_LEASE",
            7200,
            "ap",
            "Seconds to wait for a manager's report, while collector and agent are up, before its sandboxes are lost",
            "Administrators raise it when networks are away for longer, and lower it to run lost jobs again sooner",
            60,
        ),
        Knob(
            "STAGEOUT_MAX_RERUNS",
            2,
            "ap",
            "Times that a job runs again because its output was lost; then the job is held",
            "Administrators raise it in pools whose nodes often disappear, and lower it for expensive jobs",
            0,
        ),
        Knob(
            "STAGEOUT_LEAVE_LIMIT",
            604800,
            "ap",
            "Seconds for which a completed job waits for its output while the agent is stopped",
            "Administrators raise it when an access point may be without its agent for longer",
            60,
        ),
        Knob(
            "STAGEOUT_MAIL_INTERVAL",
            600,
            "ap",
            "Seconds to collect messages for one owner before the next mail is sent",
            "Administrators raise it when owners get too many mails",
            0,
        ),
        Knob(
            "STAGEOUT_NOTIFY_COMMAND",
            "",
            "ap",
            "Program that gets the messages for owners as JSON on standard input, beside mail; empty: none",
            "Administrators set it when messages go to a chat or a ticket system",
        ),
        Knob(
            "MAX_STAGEOUT_HISTORY_LOG",
            20971520,
            "ap",
            "Bytes at which the history of delivered files is rotated",
            "Administrators raise it to keep records of delivered files for longer",
            1 << 20,
        ),
        Knob(
            "MAX_STAGEOUT_HISTORY_ROTATIONS",
            2,
            "ap",
            "Rotated parts of the history of delivered files to keep",
            "Administrators raise it to keep records of delivered files for longer",
            1,
        ),
        Knob(
            "STAGEOUT_AGENT_METRICS_PORT",
            0,
            "ap",
            "TCP port where Prometheus reads the metrics of the schedd agent and of the pool; 0: none",
            "Administrators with Prometheus set it",
            0,
            65535,
        ),
        Knob(
            "STAGEOUT_AGENT_METRICS_HOST",
            "127.0.0.1",
            "ap",
            "Address to listen on for metrics; whoever reaches it can read them",
            "Administrators set it when another machine reads the metrics",
        ),
        Knob(
            "STAGEOUT_DOCS_URL",
            "",
            "ap",
            "Address of this documentation, for a link in hold reasons; empty: no link",
            "Administrators set it when they publish this documentation for their owners",
        ),
        Knob(
            "STAGEOUT_POLICY",
            "greedy",
            "policy",
            "Policy: greedy, fair-share, priority, reserved, or the path of a module",
            "The operator of the policy service sets it when first come, first served is not fair enough",
        ),
        Knob(
            "STAGEOUT_POLICY_INITIAL",
            4,
            "policy",
            "Streams that the greedy policy grants to a new client",
            "The operator of the policy service lowers it when many clients start together",
            0,
        ),
        Knob(
            "STAGEOUT_POLICY_INCREMENT",
            4,
            "policy",
            "Streams that the greedy policy adds when a client renews its lease",
            "The operator of the policy service raises it when clients reach their number too slowly",
            0,
        ),
        Knob(
            "STAGEOUT_POLICY_MAX_PAIR",
            128,
            "policy",
            "Streams that may exist between a source and a destination",
            "The operator of the policy service sets it to what the network between two sites carries",
            0,
        ),
        Knob(
            "STAGEOUT_POLICY_MAX_CLIENT",
            32,
            "policy",
            "Streams between a source and a destination that one client may have",
            "The operator of the policy service lowers it so that no client takes most streams",
            0,
        ),
        Knob(
            "STAGEOUT_POLICY_RESERVED",
            "",
            "policy",
            "Streams that the reserved policy keeps for an owner: OWNER=STREAMS, ...",
            "The operator of the policy service sets it together with the policy `reserved`",
        ),
        Knob(
            "STAGEOUT_POLICY_PRIORITIES",
            "",
            "policy",
            "Priorities of owners for the priority policy: OWNER=NUMBER, ...; larger first, 0 for all others",
            "The operator of the policy service sets it together with the policy `priority`",
        ),
        Knob(
            "STAGEOUT_POLICY_LEASE",
            300.0,
            "policy",
            "Seconds to wait for the renewal of a lease before its streams are free",
            "The operator of the policy service lowers it so that streams of lost clients are free sooner",
            1,
        ),
        Knob(
            "STAGEOUT_POLICY_HOST",
            "127.0.0.1",
            "policy",
            "Address to listen on; any address but loopback needs a certificate",
            "The operator of the policy service sets it, together with a certificate, when other machines connect",
        ),
        Knob(
            "STAGEOUT_POLICY_PORT",
            9620,
            "policy",
            "TCP port to listen on; 0: any free port, which the log names",
            "The operator of the policy service sets it when another program has this port",
            0,
            65535,
        ),
        PathKnob(
            "STAGEOUT_POLICY_CERT",
            "",
            "policy",
            "PEM file of the certificate and its chain",
            "Administrators set it when other machines connect",
        ),
        PathKnob(
            "STAGEOUT_POLICY_KEY",
            "",
            "policy",
            "PEM file of the certificate's key; empty: the file of the certificate",
            "Administrators set it when the key is in a file of its own",
        ),
        PathKnob(
            "STAGEOUT_POLICY_TOKENS",
            "/etc/condor/stageout-policy.tokens",
            "policy",
            "File of the clients' tokens, one OWNER TOKEN a line",
            "The operator of the policy service sets it when the tokens are in another file",
        ),
        PathKnob(
            "STAGEOUT_POLICY_DIR",
            "$(SPOOL)/stageout_policy",
            "policy",
            "Directory of the leases, which survive a restart",
            "The operator of the policy service sets it on a machine without SPOOL",
        ),
        Knob(
            "STAGEOUT_POLICY_METRICS_PORT",
            0,
            "policy",
            "TCP port where Prometheus reads the metrics of the policy service; 0: none",
            "Administrators with Prometheus set it",
            0,
            65535,
        ),
        Knob(
            "STAGEOUT_POLICY_METRICS_HOST",
            "127.0.0.1",
            "policy",
            "Address to listen on for metrics; whoever reaches it can read them",
            "Administrators set it when another machine reads the metrics",
        ),
        Knob(
            "STAGEOUT_WEB_HOST",
            "127.0.0.1",
            "web",
            "Address to listen on; any address but loopback needs a certificate",
            "Administrators set it, together with a certificate, when browsers connect without a proxy",
        ),
        Knob(
            "STAGEOUT_WEB_PORT",
            9622,
            "web",
            "TCP port to listen on; 0: any free port, which the log names",
            "Administrators set it when another program has this port",
            0,
            65535,
        ),
        PathKnob(
            "STAGEOUT_WEB_CERT",
            "",
            "web",
            "PEM file of the certificate and its chain",
            "Administrators set it when browsers connect without a proxy",
        ),
        PathKnob(
            "STAGEOUT_WEB_CERT_KEY",
            "",
            "web",
            "PEM file of the certificate's key; empty: the file of the certificate",
            "Administrators set it when the key is in a file of its own",
        ),
        Knob(
            "STAGEOUT_WEB_BASE",
            "",
            "web",
            "Path below which a proxy shows the page, such as /stageout; empty: X-Forwarded-Prefix of the proxy",
            "Administrators set it when a proxy shows the page below a path and does not name that path",
        ),
        Knob(
            "STAGEOUT_WEB_NAMES",
            "",
            "web",
            "Host names, separated by commas, under which browsers reach the page; "
            "addresses, localhost and this host's full name are always allowed",
            "Administrators set it when browsers use another name than the host's, such as an alias",
        ),
        PathKnob(
            "STAGEOUT_WEB_TOKENS",
            "",
            "web",
            "File of the readers who see names of files and URLs, one NAME TOKEN a line; empty: nobody does",
            "Administrators set it when readers may see names of files",
        ),
        Knob(
            "STAGEOUT_WEB_OPERATORS",
            "",
            "web",
            "Names of tokens and users, separated by commas, that may change every delivery; empty: none",
            "Administrators set it when some persons may change deliveries of others",
        ),
        Knob(
            "STAGEOUT_WEB_OWNERS",
            False,
            "web",
            "A token with a user's name, and a user whom a proxy names, may change the delivery of own jobs",
            "Administrators set it when owners may change their deliveries in the browser",
        ),
        Knob(
            "STAGEOUT_WEB_PROXIES",
            "",
            "web",
            "Addresses and networks, separated by commas, of proxies that name the user of a request; empty: none may",
            "Administrators set it when a proxy with a login names the users",
        ),
        PathKnob(
            "STAGEOUT_WEB_PROXY_TOKEN",
            "",
            "web",
            "File of the secrets that these proxies send in X-Stageout-Proxy-Token, one NAME TOKEN a line",
            "Administrators set it when other programs share a proxy's address",
        ),
        Knob(
            "STAGEOUT_WEB_USER_HEADER",
            "X-Stageout-User",
            "web",
            "Header in which these proxies name the user, as in the attribute User of jobs",
            "Administrators set it when their proxy uses another header",
        ),
        Knob(
            "STAGEOUT_WEB_READERS",
            100,
            "web",
            "Browsers that may receive updates at the same time",
            "Administrators raise it when more browsers show the page",
            0,
        ),
        Knob(
            "STAGEOUT_WEB_INTERVAL",
            5,
            "web",
            "Seconds between two queries of the collector",
            "Administrators raise it in a large pool",
            1,
            60,
        ),
        Knob(
            "STAGEOUT_WEB_METRICS_PORT",
            0,
            "web",
            "TCP port where Prometheus reads the metrics of the web page; 0: none",
            "Administrators with Prometheus set it",
            0,
            65535,
        ),
        Knob(
            "STAGEOUT_WEB_METRICS_HOST",
            "127.0.0.1",
            "web",
            "Address to listen on for metrics; whoever reaches it can read them",
            "Administrators set it when another machine reads the metrics",
        ),
        PathKnob(
            "STAGEOUT_WEB_DIR",
            "$(SPOOL)/stageout_web",
            "web",
            "Directory of the figures of the last 30 days",
            "Administrators set it on a machine without SPOOL",
        ),
        PathKnob(
            "STAGEOUT_ROUTER_ROOT",
            "",
            "router",
            "Directory below which files arrive; empty: only a relay",
            "The operator of a router sets it on a router with files",
        ),
        PathKnob(
            "STAGEOUT_ROUTER_DIR",
            "$(SPOOL)/stageout_router",
            "router",
            "Directory of the router's records",
            "The operator of a router sets it on a machine without SPOOL, or for a faster disk",
        ),
        Knob(
            "STAGEOUT_ROUTER_HOST",
            "*",
            "router",
            "Address to listen on; *: all addresses of the machine, IPv6 and IPv4",
            "The operator of a router sets it when the machine has networks that must not reach the router",
        ),
        Knob(
            "STAGEOUT_ROUTER_PORT",
            9621,
            "router",
            "TCP port to listen on; 0: any free port, which the log names",
            "The operator of a router sets it when a firewall opens another port",
            0,
            65535,
        ),
        PathKnob(
            "STAGEOUT_ROUTER_KEYS",
            "/etc/condor/stageout-router.keys",
            "router",
            "File of the keys that may connect, one NAME SECRET PREFIX a line",
            "The operator of a router sets it when the keys are in another file",
        ),
        PathKnob(
            "STAGEOUT_ROUTER_ISSUERS",
            "",
            "router",
            "File of the trusted issuers of capabilities, one NAME ed25519:KEY PREFIX a line",
            "The operator of a router sets it when capabilities allow access",
        ),
        Knob(
            "STAGEOUT_ROUTER_CAPABILITIES",
            False,
            "router",
            "true: writing needs a capability",
            "The operator of a router sets it when a key alone must not allow writing",
        ),
        PathKnob(
            "STAGEOUT_ROUTER_CERT",
            "",
            "router",
            "PEM file of the certificate and its chain; empty: no TLS",
            "The operator of a router sets it when data leaves a trusted network",
        ),
        PathKnob(
            "STAGEOUT_ROUTER_CERT_KEY",
            "",
            "router",
            "PEM file of the certificate's key; empty: the file of the certificate",
            "The operator of a router sets it when the key is in a file of its own",
        ),
        Knob(
            "STAGEOUT_ROUTER_TLS_ONLY",
            False,
            "router",
            "true: the router refuses senders and routers without TLS",
            "The operator of a router sets it when all senders have TLS",
        ),
        Knob(
            "STAGEOUT_ROUTER_HTTP_PLAIN",
            False,
            "router",
            "true: the router answers HTTP without TLS too, and tokens travel in the clear",
            "The operator of a router sets it on one machine, or for a benchmark",
        ),
        PathKnob(
            "STAGEOUT_ROUTER_TOKEN_ISSUERS",
            "",
            "router",
            "File of token issuers for HTTP, one 'ISSUER PREFIX [JWKS file or URL]' a line; empty: none",
            "The operator of a router sets it when users have SciTokens or WLCG tokens",
        ),
        Knob(
            "STAGEOUT_ROUTER_TOKEN_ANY_AUDIENCE",
            False,
            "router",
            "true: the router takes tokens for every service (aud https://wlcg.cern.ch/jwt/v1/any)",
            "The operator of a router sets it when users have only such tokens",
        ),
        PathKnob(
            "STAGEOUT_ROUTER_CUSTODY",
            "",
            "router",
            "File of next routers and of subjects whose operations the router keeps for them; empty: none",
            "The operator of a router sets it when the router takes custody by HTTP",
        ),
        PathKnob(
            "STAGEOUT_ROUTER_OWN_KEY",
            "",
            "router",
            "File of the key that signs the router's tokens for others; made when it is missing",
            "The operator of a router sets it when the router takes custody by HTTP",
        ),
        Knob(
            "STAGEOUT_ROUTER_COPY_HOSTS",
            "",
            "router",
            "Servers that the router copies from and to (COPY of HTTP), with * as a pattern; empty: none",
            "The operator of a router sets it for third-party copies, such as those of FTS",
        ),
        Knob(
            "STAGEOUT_ROUTER_PEER_TRANSFERS",
            1024,
            "router",
            "Transfers that one key may have under way",
            "The operator of a router raises it when one key serves a large site",
            1,
        ),
        Knob(
            "STAGEOUT_ROUTER_PEER_CONNECTIONS",
            512,
            "router",
            "Connections that one key may have open",
            "The operator of a router raises it when one key serves a large site",
            1,
        ),
        Knob(
            "STAGEOUT_ROUTER_ADDRESS",
            "",
            "router",
            "HOST:PORT at which others reach the router; empty: full host name and port",
            "The operator of a router sets it behind a gateway that changes addresses",
        ),
        Knob(
            "STAGEOUT_ROUTER_NEIGHBOURS",
            "",
            "router",
            "Routers that the router may connect to: HOST:PORT, ..., or collector",
            "The operator of a router sets it when data goes on to other routers",
        ),
        PathKnob(
            "STAGEOUT_ROUTER_KEY",
            "/etc/condor/stageout-overlay.key",
            "router",
            "File with the router's NAME SECRET for its neighbours",
            "The operator of a router sets it when the key is in another file",
        ),
        Knob(
            "STAGEOUT_ROUTER_INTERVAL",
            15.0,
            "router",
            "Seconds between two announcements of links; the same on all routers",
            "The operators of all routers raise it together in a large overlay",
            0.05,
        ),
        Knob(
            "STAGEOUT_ROUTER_TERMINALS",
            "",
            "router",
            "Terminals for which the router takes custody: HOST:PORT[=KEY,KEY] ...; empty: none",
            "The operator of a router sets it when the router takes custody of files",
        ),
        Knob(
            "STAGEOUT_ROUTER_SPOOL_MB",
            0,
            "router",
            "Megabytes (10^6 bytes) of the router's custody spool; 0: half of the filesystem",
            "The operator of a router sets it when other programs need the same filesystem",
            0,
        ),
        Knob(
            "STAGEOUT_ROUTER_DELIVERIES",
            4,
            "router",
            "Files that the router delivers out of its spool at the same time",
            "The operator of a router raises it when several terminals are far away",
            1,
        ),
        Knob(
            "STAGEOUT_ROUTER_EGRESS",
            "",
            "router",
            "Targets that FILETRANSFER_PLUGINS deliver to: /PATH=URL ...; empty: none",
            "The operator of a router sets it when files leave the overlay through a plugin",
        ),
        PathKnob(
            "STAGEOUT_ROUTER_EGRESS_CREDENTIALS",
            "",
            "router",
            "Directory of the plugins' tokens (SERVICE.use) and proxy (x509_proxy); empty: none",
            "The operator of a router sets it when the targets need credentials",
        ),
        Knob(
            "STAGEOUT_ROUTER_EGRESS_LEASES",
            "",
            "router",
            "Router that grants the right to deliver where gateways share URLs: HOST:PORT; empty: none",
            "The operator of a router sets it when several gateways deliver to the same URLs",
        ),
        Knob(
            "STAGEOUT_ROUTER_UPLINK_MB_S",
            0.0,
            "router",
            "Rate that all data sent by the router share and never exceed, in MB/s (10^6 bytes); 0: no limit",
            "The operator of a router sets it when others need the same line",
            0,
        ),
        Knob(
            "STAGEOUT_ROUTER_WORKERS",
            2,
            "router",
            "Processes that move data, and the same number that create small files",
            "The operator of a router raises it for networks beyond what two cores carry",
            1,
        ),
        Knob(
            "STAGEOUT_ROUTER_METRICS_PORT",
            0,
            "router",
            "TCP port where Prometheus reads the metrics of the router; 0: none",
            "Administrators with Prometheus set it",
            0,
            65535,
        ),
        Knob(
            "STAGEOUT_ROUTER_METRICS_HOST",
            "127.0.0.1",
            "router",
            "Address to listen on for metrics; whoever reaches it can read them",
            "Administrators set it when another machine reads the metrics",
        ),
        PathKnob(
            "STAGEOUT_OVERLAY_KEY",
            "/etc/condor/stageout-overlay.key",
            "ep",
            "File with NAME SECRET for overlay:// routers",
            "Administrators set it when the key is in another file",
        ),
        Knob(
            "STAGEOUT_OVERLAY_GATEWAY",
            "",
            "ep",
            "Custodian through which overlay:// uploads go: HOST:PORT; empty: none",
            "Administrators set it when a router near the nodes takes custody of all uploads",
        ),
        Knob(
            "STAGEOUT_OVERLAY_ROUTES",
            "",
            "ep",
            "Routes to overlay:// routers: RELAY, ...; ask RELAY, ...; empty: direct",
            "Administrators set it when the direct way is slow or closed",
        ),
        Knob(
            "STAGEOUT_OVERLAY_CONNECTIONS",
            24,
            "ep",
            "Connections that a file may have on each route when no number was granted",
            "Administrators raise it for long distances, and lower it to protect a router",
            1,
        ),
        Knob(
            "STAGEOUT_OVERLAY_CONGESTION",
            "",
            "ep",
            "TCP congestion control of overlay:// uploads, such as bbr; empty: the kernel's default",
            "Administrators set `bbr` for lines with losses",
        ),
        Knob(
            "STAGEOUT_OVERLAY_WIRE",
            "frames",
            "ep",
            "Protocol of overlay:// URLs: frames, or http if --key is a key of stageout token or --token is given",
            "Administrators set `http` to try the new client with old URLs",
            choices=("frames", "http"),
        ),
        Knob(
            "STAGEOUT_OVERLAY_PLAIN",
            False,
            "ep",
            "true: put and get accept http:// URLs, without TLS",
            "Administrators set it for benchmarks on one machine",
        ),
        PathKnob(
            "STAGEOUT_PROFILES",
            "/var/lib/stageout/profiles",
            "ep",
            "Directory of the measurements of stageout profile",
            "Administrators set it when several machines share their measurements",
        ),
        Knob(
            "STAGEOUT_GLOBUS_LOCAL",
            "",
            "globus",
            "Collection that can read the node's files: UUID /here=/there, ...; empty: HTTPS to the other collection",
            "Administrators set it when the site has a collection for the node's files",
        ),
        PathKnob(
            "STAGEOUT_GLOBUS_PERSONAL",
            "",
            "globus",
            "Program of Globus Connect Personal, which makes an endpoint where the node has no collection; empty: none",
            "Administrators set it on nodes without a collection",
        ),
        Knob(
            "STAGEOUT_GLOBUS_COLLECTIONS",
            "",
            "globus",
            "Names that URLs may use for collections: NAME=UUID, ...",
            "Administrators set it so that owners write names and not UUIDs",
        ),
        Knob(
            "STAGEOUT_GLOBUS_CREDENTIAL",
            "globus",
            "globus",
            "Credential service whose tokens are used",
            "Administrators set it when their credential service has another name",
        ),
        Knob(
            "STAGEOUT_GLOBUS_LEASE",
            2700.0,
            "globus",
            "Seconds after which a task ends unless a plugin renews it",
            "Administrators raise it when nodes are often without a network for longer",
            2,
        ),
        Knob(
            "STAGEOUT_GLOBUS_TASKS",
            2,
            "globus",
            "Tasks of one plugin call that may run at the same time; further tasks wait",
            "Administrators lower it when many nodes share the limit of an account",
            1,
        ),
        Knob(
            "STAGEOUT_GLOBUS_TASK_FILES",
            10000,
            "globus",
            "Files that one task may have",
            "Administrators lower it when a collection is slow with large tasks",
            1,
        ),
        Knob(
            "STAGEOUT_GLOBUS_SYNC",
            "checksum",
            "globus",
            "Property by which a file counts as already delivered: exists, size, mtime or checksum",
            "Administrators set `size` or `mtime` where checksums take too long",
            choices=("exists", "size", "mtime", "checksum"),
        ),
        Knob(
            "STAGEOUT_GLOBUS_FAULT_PATIENCE",
            60.0,
            "globus",
            "Seconds to wait for progress before a denied path, a full quota or a missing file ends a task",
            "Administrators raise it when a collection reports such faults for a short time",
            0.1,
        ),
        Knob(
            "STAGEOUT_GLOBUS_STALL",
            900.0,
            "globus",
            "Seconds to wait for progress before any other task ends; four times as long while Globus has paused it",
            "Administrators raise it when collections are slow, such as those on tape, or paused for longer",
            0.1,
        ),
        Knob(
            "STAGEOUT_GLOBUS_TRANSFER_URL",
            "",
            "globus",
            "Base URL of the Transfer service; empty: the public service",
            "Administrators set it for a test instance of the service",
        ),
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
        """Read a text knob."""
        return str(self._value(name))

    def path(self, name: str) -> str:
        """Read a path knob, which may begin with a parameter of HTCondor that nobody has expanded.

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
        """Read a numeric knob, in the unit that the table names."""
        return float(self._value(name))

    def count(self, name: str) -> int:
        """Read an integer knob."""
        return int(self._value(name))

    def flag(self, name: str) -> bool:
        """Read a boolean knob."""
        return bool(self._value(name))

    def condor(self, name: str, default: str = "") -> str:
        """Look up a parameter of HTCondor itself, such as LOG or EXECUTE."""
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


def condor_ids(settings: Settings) -> tuple[int, int]:
    """Find uid and gid of the user condor, as whom HTCondor's daemons work below a root master.

    :raises ConfigError: ``CONDOR_IDS`` does not say it, and there is no such user.
    """
    told = settings.condor("CONDOR_IDS")
    try:
        if told:
            uid, _, gid = told.partition(".")
            return int(uid), int(gid)
        entry = pwd.getpwnam("condor")
    except (ValueError, KeyError):
        raise ConfigError(f"CONDOR_IDS = {told}: write UID.GID of the user condor, or make that user") from None
    return entry.pw_uid, entry.pw_gid


def checked_path(name: str, text: str, doc: str = "") -> str:
    """Return the path when it is absolute. :raises ConfigError: it is relative, and to no fixed directory."""
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


def flocked_to(settings: Settings) -> list[str]:
    """List the collectors of the pools to which the schedd's jobs flock."""
    found = settings.condor("FLOCK_COLLECTOR_HOSTS") or settings.condor("FLOCK_TO")
    return list(dict.fromkeys(found.replace(",", " ").split()))


def tool_settings(prefix: str) -> Settings:
    """Read settings of the HTCondor configuration for programs that must do without the bindings (plugins).

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


def mapping_settings(values: Mapping[str, str]) -> Settings:
    """Read settings from a mapping (tests, single-file pilots without bindings)."""
    return Settings(values.get)


def file_settings(path: Path) -> Settings:
    """Read settings from a file with one NAME=VALUE a line, as systemd's ``EnvironmentFile``, else the environment.

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
    """Write a sentence for each name that looks like a setting of a daemon without HTCondor and is none."""
    import difflib

    ours = {name for name in settings.names if name.startswith(("STAGEOUT_ROUTER_", "STAGEOUT_POLICY_"))}
    wrong = sorted(name for name in ours - _OF_DAEMONS if name not in KNOBS)
    near = {name: difflib.get_close_matches(name, KNOBS, 1) for name in wrong}
    return [f"there is no setting {name}{': is it ' + near[name][0] + '?' if near[name] else ''}" for name in wrong]


def environment_settings(*prefixes: str) -> Settings:
    """Read settings from the environment.

    :param prefixes: of the variables, the first that is set counts; HTCondor's ``_CONDOR_`` without any.
    """
    prefixes = prefixes or ("_CONDOR_",)
    found = {
        name[len(prefix) :]: value
        for prefix in reversed(prefixes)
        for name, value in os.environ.items()
        if name.startswith(prefix)
    }
    return Settings(found.get, tuple(found))
