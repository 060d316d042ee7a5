"""Entry of the ``stageout`` command: reads the command line and loads the one subcommand that was called."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import stageout
from stageout.cli.exits import CommandError, Exit, signals_end_it
from stageout.core.errors import StageoutError, TransferFailure

_DESCRIPTION = """\
Shows and steers the delivery of job output that was handed off when the job ended.
JOB is a cluster (1234) or a job of it (1234.0), as condor_q shows them."""

_JOB = "a cluster (1234) or a job of it (1234.0)"

_STATUS = """\
Without JOB: every job of yours whose output was handed off, one line each. With JOB: that job, file by file.
Reads the job queue and, for the newest figures, what the sandbox managers tell the collector."""

_WAIT = """\
Waits until the output of all JOBs is delivered: jobs that still run are waited for, jobs that have left the queue
are looked up in the history, and a restart of the schedd is waited out. Output that was transferred before the job
ended counts as delivered. A job held because of its output has failed; one held for another reason is waited for.

exit status: 0 delivered, 1 failed, lost or cancelled, 2 timed out, 3 unknown job

For all nodes of a DAG, put this line into the DAG file:
  INCLUDE /opt/stageout/share/stageout/stageout.dag
As POST script of a single node (a POST script decides about its node, so hand it the job's own status):
  SCRIPT DEFER 2 60 POST A /opt/stageout/bin/stageout wait --timeout 20 --return $RETURN $JOBID
With DEFER, DAGMan asks again every minute, and a node that waits takes none of the places for POST scripts."""

_ASK = {
    "retry": "Tries failed and waiting files again at once, with fresh attempts. On success a held job completes.\n"
    "What the sub-code of a hold asks for first is in docs/COMMANDS.md, 'A held job'.",
    "cancel": "Gives up the delivery of a job's output; the execute point deletes it. The job is not run again.",
    "pause": "Sends nothing more of a job's output until 'stageout resume'. A file on its way is finished.",
    "resume": "Goes on with the delivery after 'stageout pause'.",
}

_ASK_STATUS = """

The agent of the schedd carries it out; this command waits until it has, and says what became of the output.
exit status: 0 carried out, 1 refused, 2 no answer in time (the request stays), 3 unknown job"""

_HISTORY = """\
Jobs that have left the queue and whose output was handed off, newest first; with JOB, every run of that job with the
files of its hand-off. Reads HTCondor's own records: the history (condor_history) and the OUTPUT records of the epoch
history (condor_history -transfer-history:O); what is rotated away there is gone here too."""

_DOCTOR = """\
Checks the installation on this machine and says what to fix. Run it as root, or as the user that HTCondor runs as:
what may not be looked at is reported as unchecked.

exit status: 0 no check failed (warnings are allowed), 1 at least one failed"""


_WRAP = """\
Makes a front end for each PLUGIN: an executable of the same name that answers -classad from what the plugin said, hands
uploads off to the sandbox manager and turns into the plugin for everything else. Prints the line of configuration that
names the front ends in the place of their plugins. The sandbox manager renews a front end when its plugin changes.

exit status: 0 made, 1 one cannot be made"""


_ESTIMATE = """\
Answers ClassAds with dap_type = "Estimation", src_url, dest_url and filesize: how many streams the transfer needs, how
fast it will be and how long it takes. Moves a few samples with the installed transfer plugins, at most a twentieth of
filesize; samples of uploads stay at the destination as empty files named .stageout-sample-N.

exit status: 0 all answered, 1 at least one could not be (its answer says why), 64 FILE cannot be read"""


_PROFILE = """\
Writes samples into a directory of a server and reads them again, with other block sizes, streams, files at once and
file sizes; shows rate, CPU and memory, also of a server on this machine. What is found is kept for 'stageout estimate'
and for the sandbox manager. Samples stay at the server as empty files named .stageout-sample-N.

exit status: 0 measured, 1 it could not be (or not be kept), 64 the URL cannot be used"""


_PUT = """\
Sends files to a router of the overlay. Each appears under its name only when it is whole, checked by digest and on the
router's disk; directories that are missing are made. With several FILEs, or a / at its end, URL is a directory.
With -r small files travel many at a time, and one that fails does not stop the others.

exit status: 0 all arrived, 1 one did not (those behind it were not sent), 64 the URL cannot be used"""


_FATE = """\
Asks a router what became of a file that 'stageout put --custody' gave to it, or that 'stageout copy --background' told
it to copy: in custody, how far it has come, done, failed, expired, lost, cancelled, or unknown (it has lost its
records). With --cancel it is given up; ask again whether that was in time.

exit status: 0 the file is at its destination, 1 it is not and nobody will bring it there, 2 not yet, 64 wrong URL"""


_GET = """\
Fetches a file from a router of the overlay. It appears under its name only when it is whole. With -r everything below
a directory; what fails does not stop the others, and symbolic links count as failed.

exit status: 0 it is there, 1 it is not, 64 the URL cannot be used"""


_ROUTES = """\
Shows the links that a router of the overlay knows of, with measured rates and round trips, and the routes that it takes
to TERMINAL (without: to every router that it knows of), with the reason for each.

exit status: 0 shown, 1 the router does not answer or refuses, 64 an address cannot be read"""


_CAPABILITY = """\
Makes a capability: what somebody may do at routers of the overlay that trust its issuer, for a time. It is printed
as the line to be added to that person's key file (--key of put); the line holds a secret. The issuer's key is made when
it is missing; its public key, printed by --public, goes into the routers' STAGEOUT_ROUTER_ISSUERS.

exit status: 0 made, 1 the key cannot be used, 64 the command line cannot be used"""


_LOT = """\
Reserves space at a router before there is anything to send: it is allocated, and nobody else can have it, until puts
have used it ('stageout put --lot ID'), it is released, or its time is over. Prints the ID.

exit status: 0 done, 1 not done, 64 the command line cannot be used"""

_NAMES_STATUS = """

exit status: 0 done, 1 not done, 64 a URL cannot be used"""

_LS = (
    "Lists a directory at a router of the overlay, or one file. Symbolic links are shown, not followed." + _NAMES_STATUS
)
_STAT = "Says what a name is; its generation counts how often the overlay has changed it." + _NAMES_STATUS
_RM = "Removes files, with -r also directories and all that is in them, in the order given." + _NAMES_STATUS
_MKDIR = "Makes directories in the order given." + _NAMES_STATUS
_MV = "Gives a file or directory another name at the same router. A file of that name is replaced." + _NAMES_STATUS

_COPY = """\
Copies a file from a router to another (or the same). The first sends it to the second in your name, with your rights at
both; interrupted, it is given up. Where the first cannot reach the second, or with --carry, the bytes pass through this
machine's memory, a MiB at a time, not over its disk, and that is said. The copy appears under its name only when it is
whole, checked by digest and on the router's disk.

exit status: 0 it is there, 1 it is not, 64 a URL cannot be used"""


class _Parser(argparse.ArgumentParser):
    """Ends with EX_USAGE: 2 means 'timed out' here."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(Exit.USAGE, f"{self.prog}: {message}\n")


def build_parser(word: str = "") -> argparse.ArgumentParser:
    """The whole command line. :param word: only what belongs to this command, if there is one of that name."""
    parser = _Parser(prog="stageout", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"stageout {stageout.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", parser_class=_Parser)
    known = any(word in names for names, _ in _COMMANDS)
    for names, add in _COMMANDS:
        if not known or word in names:
            add(commands)
    return parser


def _add(commands: argparse._SubParsersAction[_Parser], name: str, short: str, text: str, module: str) -> _Parser:
    command = commands.add_parser(
        name, help=short, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.set_defaults(module=module)
    return command


def _add_schedd(command: argparse.ArgumentParser) -> None:
    command.add_argument("-n", "--name", metavar="SCHEDD", help="ask this schedd instead of the local one")
    command.add_argument("--pool", metavar="HOST", help="find it with this collector")


def _add_status(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = _add(commands, "status", "shows what is delivered, what waits and why", _STATUS, "status")
    command.add_argument("jobs", metavar="JOB", nargs="*", help=_JOB)
    command.add_argument("-a", "--all", "-allusers", dest="all_users", action="store_true", help="jobs of all users")
    _add_json(command)
    command.add_argument("--watch", action="store_true", help="show it anew every 2 s until all is delivered or Ctrl-C")
    command.add_argument("--node", action="store_true", help="ask this machine's sandbox manager instead of a schedd")
    _add_schedd(command)


def _add_wait(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = _add(commands, "wait", "waits until output is delivered (for scripts and DAGs)", _WAIT, "wait")
    command.add_argument("jobs", metavar="JOB", nargs="+", help=_JOB)
    command.add_argument("--timeout", metavar="S", type=_seconds, help="give up after so many seconds (exit status 2)")
    command.add_argument(
        "--return", metavar="STATUS", type=int, default=0, dest="returned",
        help="the job's own exit status; when it is not 0, end with it (2 and signals become 1) instead of 0",
    )  # fmt: skip
    # For stageout_dag_post alone: the one process that waits for a DAG.
    command.add_argument("--dag", type=int, default=0, help=argparse.SUPPRESS)
    command.add_argument("--answers", default="", help=argparse.SUPPRESS)
    _add_json(command)
    _add_schedd(command)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError
    return value


_seconds.__name__ = "number of seconds"


def _whole(name: str, least: int, most: int = sys.maxsize) -> Callable[[str], int]:
    """Return a parser of whole numbers. :param name: for messages."""

    def read(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise ValueError
        return value

    read.__name__ = name
    return read


_files = _whole("number of files", 1)
_copies = _whole("number of copies (1 to 8)", 1, 8)
_priority = _whole("priority (0 to 10)", 0, 10)
_streams = _whole("number of streams (1 to 64)", 1, 64)


def _hours(text: str) -> float:
    value = float(text)
    if not 0 < value <= 168:
        raise ValueError
    return value


_hours.__name__ = "number of hours (at most 168)"


def _days(text: str) -> float:
    value = float(text)
    if not 0 < value <= 36500:
        raise ValueError
    return value


_days.__name__ = "number of days"


def _router(text: str) -> str:
    from stageout.wire.route import address, written  # other commands need none of it

    return written(*address(text))


_router.__name__ = "address of a router"


def _add_history(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = _add(commands, "history", "shows what was delivered, and what was not", _HISTORY, "history")
    command.add_argument("jobs", metavar="JOB", nargs="*", help=_JOB)
    command.add_argument("-a", "--all", "-allusers", dest="all_users", action="store_true", help="jobs of all users")
    command.add_argument("--limit", metavar="N", type=int, default=100, help="at most so many jobs (default: 100)")
    _add_json(command)
    _add_schedd(command)


def _add_doctor(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = _add(commands, "doctor", "checks the installation and says what to fix", _DOCTOR, "doctor")
    command.add_argument(
        "--role", choices=("ap", "ep", "pilot", "router"), action="append", help="default: what runs here"
    )
    command.add_argument(
        "--settings", metavar="FILE",
        help="look at a router without HTCondor that has these settings (NAME=VALUE lines, as stageout-router"
        " --settings); --role router does so with those of the environment where HTCondor is not installed",
    )  # fmt: skip
    _add_json(command)


def _add_wrap(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = _add(commands, "wrap", "gives another maker's transfer plugin the hand-off", _WRAP, "wrap")
    command.add_argument("plugins", metavar="PLUGIN", nargs="+", help="as FILETRANSFER_PLUGINS names it")
    command.add_argument(
        "--directory", metavar="DIR", default="/usr/local/libexec/stageout",
        help="where the front ends are put (default: %(default)s)",
    )  # fmt: skip


def _add_estimate(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = _add(commands, "estimate", "says how many streams a transfer needs, and how long", _ESTIMATE, "estimate")
    command.add_argument("file", metavar="FILE", help="file of ClassAds, - for standard input")
    command.add_argument("--most-streams", metavar="N", type=_streams, default=32, help="never more (default: 32)")
    command.add_argument("--printed", action="store_true", help="choose by the curve alone, as the model was published")
    command.add_argument("--fresh", action="store_true", help="sample even when there is a stored profile")
    _add_measuring(command)


def _add_profile(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = _add(commands, "profile", "measures how fast a server is, and what it costs", _PROFILE, "profile")
    command.add_argument("url", metavar="URL", help="directory on the server that may be written to, with / at its end")
    command.add_argument("--max-time", metavar="S", type=_seconds, default=120.0, help="default: 120 s")
    command.add_argument("--max-bytes", metavar="SIZE", type=_size, default=4 << 30, help="default: 4G")
    command.add_argument("--json", action="store_true", help="print JSON (its fields: docs/TUNING.md)")
    command.add_argument("--plot", metavar="FILE", help="draw plots into FILE.png, or FILE.html with the table")
    command.add_argument("--write-only", action="store_true", help="do not measure downloads")
    command.add_argument("--no-store", action="store_true", help="do not keep the profile")
    command.add_argument("--local", metavar="DIR", help="where the local files are (default: in memory)")
    command.add_argument(
        "--server-pid", metavar="PID", type=int, help="server on this machine (default: who listens on the URL's port)"
    )
    _add_measuring(command)


def _add_files(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = _add(commands, "put", "sends files to a router of the overlay", _PUT, "files")
    command.add_argument("files", metavar="FILE", nargs="+", help="- is standard input")
    command.add_argument("url", metavar="URL", help="overlay://HOST[:PORT]/path")
    command.add_argument("-r", "--recursive", action="store_true", help="FILEs are directories: send all below them")
    _add_update(command)
    command.add_argument("--lot", metavar="ID", default="", help="take the space from this lot (stageout lot)")
    _add_connections(command)
    _add_wishes(command)
    command.add_argument(
        "--through",
        metavar="HOST",
        help="custodian that delivers it, or several, A,B: from one to the next; wait until it is there",
    )
    command.add_argument(
        "--custody", action="store_true", help="with --through: return when the custodian has it; of 'A; B' the first"
    )
    command.add_argument(
        "--copies", metavar="N", type=_copies, default=1, help="with --custody: return when N of 'A; B; C' have it"
    )
    command.add_argument(
        "--wait", metavar="S", type=_seconds, default=0.0, help="with --custody: ask for so long when too few are there"
    )
    _add_json(command)
    _add_key(command)
    _add_ways(command)
    command = _add(commands, "ask", "asks a custodian of the overlay what became of a file", _FATE, "files")
    command.add_argument("url", metavar="URL", help="overlay://HOST[:PORT] of the custodian")
    command.add_argument("origin", metavar="ORIGIN", help="as put --custody or copy --background has printed it")
    command.add_argument("--cancel", action="store_true", help="give it up first")
    command.add_argument("--files", metavar="N", type=_files, default=1, help="of so many files, as put -r has said")
    _add_json(command)
    _add_key(command)
    command = _add(commands, "get", "fetches a file from a router of the overlay", _GET, "files")
    command.add_argument("url", metavar="URL", help="overlay://HOST[:PORT]/path")
    command.add_argument(
        "file", metavar="FILE", nargs="?",
        help="or a directory for it; default: its name, here. A file of that name is replaced. - is standard output",
    )  # fmt: skip
    command.add_argument("-r", "--recursive", action="store_true", help="a directory, with all that is below it")
    _add_update(command)
    _add_connections(command)
    command.add_argument(
        "--through", metavar="HOSTS", help="custodians ('A; B') to be asked when the router has no such file"
    )
    command.add_argument("--stale-ok", action="store_true", help="take a version that has not arrived there yet then")
    _add_wishes(command)
    _add_json(command)
    _add_key(command)
    _add_ways(command)


def _add_routes(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = _add(commands, "routes", "shows links and routes between routers of the overlay", _ROUTES, "routes")
    command.add_argument("router", metavar="ROUTER", help="HOST[:PORT] of the router that is asked")
    command.add_argument("terminals", metavar="TERMINAL", nargs="*", help="HOST[:PORT]")
    _add_json(command)
    _add_key(command)


def _add_wishes(command: argparse.ArgumentParser) -> None:
    command.add_argument("--priority", metavar="N", type=_priority, default=0, help="0 to 10: each doubles its share")
    command.add_argument("--within", metavar="S", type=_seconds, default=0, help="it should be there after S seconds")


def _add_ways(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--routes", metavar="ROUTES", default="",
        help="relays to pass: 'A; B,C; direct' are three routes (put uses all at once), 'ask A' those that A "
        "knows (default: STAGEOUT_OVERLAY_ROUTES)",
    )  # fmt: skip


def _add_capability(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = _add(commands, "capability", "makes a capability for the overlay", _CAPABILITY, "capability")
    command.add_argument("issuer", metavar="KEYFILE", help="private key of the issuer")
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--public", action="store_true", help="print the issuer's public key")
    what.add_argument("--prefix", metavar="PATH", help="for names at or below it; / for all")
    command.add_argument(
        "--terminal", metavar="HOST", type=_router, action="append", default=[],
        help="router where it holds, HOST or HOST:PORT as in its STAGEOUT_ROUTER_ADDRESS; may be given several times",
    )  # fmt: skip
    command.add_argument("--delete", action="store_true", help="with the right to delete and rename")
    command.add_argument("--read", action="store_true", help="with the right to get, stat and list")
    command.add_argument("--lot", metavar="SIZE", type=_size, default=0, help="most bytes under way at once")
    command.add_argument("--priority", metavar="N", type=int, default=0, help="highest priority (default: 0)")
    command.add_argument("--days", metavar="N", type=_days, default=30.0, help="until it expires (default: 30)")


def _add_names(commands: argparse._SubParsersAction[_Parser]) -> None:
    url = "overlay://HOST[:PORT]/path"
    command = _add(commands, "ls", "lists what is at a router of the overlay", _LS, "names")
    command.add_argument("-l", "--long", action="store_true", help="kind, mode, size and time, too")
    _add_json(command)
    command.add_argument("url", metavar="URL", help=url)
    _add_key(command)
    _add_ways(command)
    command = _add(commands, "stat", "says what a name at a router is", _STAT, "names")
    _add_json(command)
    command.add_argument("url", metavar="URL", help=url)
    _add_key(command)
    _add_ways(command)
    command = _add(commands, "rm", "removes names at a router", _RM, "names")
    command.add_argument("-r", "--recursive", action="store_true", help="directories, with all that is in them")
    command.add_argument("urls", metavar="URL", nargs="+", help=url)
    _add_json(command)
    _add_key(command)
    _add_ways(command)
    _add_custodian(command)
    command = _add(commands, "mkdir", "makes directories at a router", _MKDIR, "names")
    command.add_argument("-p", "--parents", action="store_true", help="those above, too, where they are missing")
    command.add_argument("urls", metavar="URL", nargs="+", help=url)
    _add_json(command)
    _add_key(command)
    _add_ways(command)
    _add_custodian(command)
    command = _add(commands, "mv", "renames a file or directory at a router", _MV, "names")
    command.add_argument("-p", "--parents", action="store_true", help="make the directories above NEW, too")
    command.add_argument("url", metavar="URL", help=url)
    command.add_argument("to", metavar="NEW", help="the new name, at the same router")
    _add_json(command)
    _add_key(command)
    _add_ways(command)
    _add_custodian(command)
    command = _add(commands, "copy", "copies a file from one router to another", _COPY, "names")
    command.add_argument("url", metavar="URL", help=url)
    command.add_argument("to", metavar="NEW", help="at any router; with / at its end a directory")
    _add_json(command)
    _add_key(command)
    _add_ways(command)
    command.add_argument("--to-key", metavar="FILE", default="", help="key for the router of NEW (default: --key)")
    command.add_argument("--to-routes", metavar="ROUTES", default="", help="ways to the router of NEW, as --routes")
    how = command.add_mutually_exclusive_group()
    how.add_argument("--background", action="store_true", help="return when the first router has taken it over")
    how.add_argument("--carry", action="store_true", help="move the bytes through this machine")


def _add_custodian(command: argparse.ArgumentParser) -> None:
    command.add_argument("--through", metavar="HOST", help="custodian that passes it on; --routes lead there then")


def _add_lot(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = _add(commands, "lot", "reserves space at a router of the overlay", _LOT, "lots")
    command.add_argument("action", choices=("reserve", "renew", "release"))
    command.add_argument("url", metavar="URL", help="overlay://HOST[:PORT]/path: for puts at or below it")
    command.add_argument("--size", metavar="SIZE", type=_size, default=0, help="how much to reserve, such as 500G")
    command.add_argument("--lot", metavar="ID", default="", help="which to renew or release")
    command.add_argument("--hours", metavar="N", type=_hours, default=24.0, help="from now, at most 168 (default: 24)")
    _add_json(command)
    _add_key(command)


def _add_update(command: argparse.ArgumentParser) -> None:
    command.add_argument("-u", "--update", action="store_true", help="with -r: only what is not the same there already")


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON (its fields: docs/COMMANDS.md)")


def _add_key(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--key", metavar="FILE", default="/etc/condor/stageout-overlay.key",
        help="your key for the router, NAME SECRET or a token of HTCondor (default: %(default)s)",
    )  # fmt: skip


def _size(text: str) -> int:
    from stageout.sampling.request import BadAd, size_of

    try:
        return size_of(text, "")
    except BadAd:
        raise ValueError from None


_size.__name__ = "size such as 500M"


def _add_measuring(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--profiles", metavar="DIR", help="directory of stored profiles (default: the knob STAGEOUT_PROFILES)"
    )
    command.add_argument(
        "--plugin", metavar="PATH", action="append", default=[],
        help="transfer plugin to use (default: those of HTCondor's configuration, else those installed with stageout)",
    )  # fmt: skip


def _add_connections(command: _Parser) -> None:
    command.add_argument(
        "--connections", metavar="N", type=_connections, default=0,
        help="that carry one file on each route (default: auto, at most STAGEOUT_OVERLAY_CONNECTIONS)",
    )  # fmt: skip


def _connections(text: str) -> int:
    return 0 if text == "auto" else _streams(text)


_connections.__name__ = "number of connections (1 to 64, or auto)"


def _add_requests(commands: argparse._SubParsersAction[_Parser]) -> None:
    for verb, text in _ASK.items():
        command = _add(commands, verb, text.split(".")[0].split(";")[0].lower(), text + _ASK_STATUS, "request")
        command.add_argument("jobs", metavar="JOB", nargs="+", help=_JOB)
        _add_json(command)
        _add_schedd(command)


def _add_help(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = _add(commands, "help", "explains a command", "Explains a command.", "")
    command.add_argument("topic", metavar="COMMAND", nargs="?")


#: Names, and who adds them to the command line; in the order of the help.
_COMMANDS: tuple[tuple[tuple[str, ...], Callable[[argparse._SubParsersAction[_Parser]], None]], ...] = (
    (("status",), _add_status),
    (("wait",), _add_wait),
    (tuple(_ASK), _add_requests),
    (("history",), _add_history),
    (("doctor",), _add_doctor),
    (("wrap",), _add_wrap),
    (("estimate",), _add_estimate),
    (("profile",), _add_profile),
    (("put", "ask", "get"), _add_files),
    (("ls", "stat", "rm", "mkdir", "mv", "copy"), _add_names),
    (("lot",), _add_lot),
    (("routes",), _add_routes),
    (("capability",), _add_capability),
    ((), _add_help),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    :param arguments: without the program's name; None for those of the process.
    :returns: the exit status.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    options: argparse.Namespace | None = None
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may have what the terminal's language has not
    try:
        parser = build_parser(words[0] if words else "")
        options = parser.parse_args(_protect_job_ids(words))
        if options.command in (None, "help"):
            return _help(parser, getattr(options, "topic", None))
        with signals_end_it():
            status = int(importlib.import_module(f"stageout.cli.{options.module}").run(options))
            if sys.stdout is not None:
                sys.stdout.flush()
            return status
    except (StageoutError, TransferFailure) as problem:
        _say(problem, getattr(options, "json", False))
        return int(problem.status if isinstance(problem, CommandError) else Exit.FAILED)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _drop_output()
        return 141
    except OSError as problem:
        _drop_output()
        _say(CommandError(f"{problem.filename or 'standard output'}: {problem.strerror}"), is_json=False)
        return int(Exit.FAILED)


def _drop_output() -> None:
    """Discard the output that is still to be printed: it would fail once more at the exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(problem: StageoutError | TransferFailure, is_json: bool) -> None:
    """Print an error as a line for people, and as an object with ``--json`` unless it was printed before."""
    from stageout.cli.bars import complain

    if is_json:
        from stageout.cli.results import Told, ending, tell

        if not isinstance(problem, Told):
            tell(ending(problem))
    complain(str(problem))


def _protect_job_ids(arguments: list[str]) -> list[str]:
    """DAGMan gives a node that was never submitted a negative job id, which must not be taken for an option."""
    return [f" {word}" if word[:1] == "-" and word[1:2].isdigit() and "." in word else word for word in arguments]


def _help(parser: argparse.ArgumentParser, topic: str | None) -> int:
    if topic is None:
        parser.print_help()
        return Exit.OK
    parser.parse_args([topic, "--help"])
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main())
