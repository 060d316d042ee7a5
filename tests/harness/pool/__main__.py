"""``python -m tests.harness.pool``: a pool to try things in, for people."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stageout.core.errors import StageoutError
from stageout.core.units import count
from tests.harness.pool import leftovers, namespace
from tests.harness.pool.errors import PoolError
from tests.harness.pool.image import find_image
from tests.harness.pool.logs import collect
from tests.harness.pool.node import PILOT, NodeSpec
from tests.harness.pool.pool import Pool

_ME = f"{os.path.relpath(sys.executable)} -m tests.harness.pool"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors are printed as one sentence, with status 1."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.function(arguments)
    except StageoutError as error:
        print(f"stageout pool: {error}", file=sys.stderr)
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=_ME, description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    build = commands.add_parser("build", help="fetch HTCondor into the cache, so that later starts are quick")
    build.set_defaults(function=_build)
    start = commands.add_parser("start", help="start a pool that runs until `stop`")
    start.set_defaults(function=_start)
    start.add_argument("--execute-points", type=int, default=1, metavar="N")
    start.add_argument("--pilots", type=int, default=0, metavar="N", help="execute points run by an ordinary user")
    start.add_argument("--cpus", type=int, default=2, metavar="N", help="of each execute point")
    start.add_argument("--config", default="", metavar="FILE", help="further HTCondor settings for all nodes")
    start.add_argument("--plain", action="store_true", help="without stageout: stock HTCondor")
    for command in (build, start):
        command.add_argument("--version", help="release of HTCondor (25.14, 23.9)")
    _add(commands, "status", _status, "running pools, their slots and jobs")
    shell = _add(commands, "shell", _shell, "a shell (or a command) on a node")
    shell.add_argument("--node", default="ap")
    shell.add_argument("--user", default="alice")
    shell.add_argument("command", nargs="*", help="put -- before it")
    _add(commands, "stop", _stop, "end a pool and remove its directory")
    logs = _add(commands, "logs", _logs, "copy all logs of a pool")
    logs.add_argument("dest", type=Path)
    return parser


def _add(commands: Any, name: str, function: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text)
    parser.add_argument("--pool", type=Path, metavar="DIR", help="directory of the pool, when several run")
    parser.set_defaults(function=function)
    return parser


def _build(arguments: argparse.Namespace) -> int:
    print(find_image(arguments.version).root)
    return 0


def _start(arguments: argparse.Namespace) -> int:
    config = Path(arguments.config).read_text() if arguments.config else ""
    points = [NodeSpec()] * arguments.execute_points + [PILOT] * arguments.pilots
    pool = Pool(
        version=arguments.version,
        execute_points=points,
        cpus=arguments.cpus,
        config=config,
        stageout=not arguments.plain,
        detached=True,
    )
    pool.start().detach()
    print(f"A pool with {count(len(points), 'execute point')} runs in {pool.dir}.")
    print(f"  {_ME} shell                    a shell on the access point as alice (condor_submit, condor_q)")
    print(f"  {_ME} shell --node ep1 --user root")
    print(f"  {_ME} stop")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    for directory, state in leftovers.running().items():
        print(f"{directory} (owner pid {state['owner'][0]}{', detached' if state['detached'] else ''})")
        for name, (pid, born, user) in state["nodes"].items():
            words = "running" if namespace.start_time(pid) == born else "off"
            processes = len(list(namespace.processes(pid))) if words == "running" else 0
            print(f"  {name}: {words}, {processes} processes, condor_master as {user}")
        sys.stdout.flush()
        pid, born, _ = state["nodes"]["ap"]
        for command in (["condor_status"], ["condor_q", "-allusers"]) if namespace.start_time(pid) == born else ():
            _inside(directory, "ap", "root", command)
    return 0


def _shell(arguments: argparse.Namespace) -> int:
    return _inside(_chosen(arguments), arguments.node, arguments.user, arguments.command or ["bash", "-l"])


def _stop(arguments: argparse.Namespace) -> int:
    directory = _chosen(arguments)
    leftovers.end(directory)
    print(f"{directory} is gone.")
    return 0


def _logs(arguments: argparse.Namespace) -> int:
    print(collect(_chosen(arguments), arguments.dest))
    return 0


def _chosen(arguments: argparse.Namespace) -> Path:
    """Directory of the pool that is meant: given, or the only one that was started by hand."""
    if arguments.pool:
        return Path(arguments.pool).resolve()
    found = [path for path, state in leftovers.running().items() if state["detached"]]
    if len(found) != 1:
        names = ", ".join(map(str, found)) or "none"
        raise PoolError(f"Say which pool with --pool; running: {names}. `{_ME} start` starts one.")
    return found[0]


def _inside(directory: Path, node: str, user: str, command: Sequence[str]) -> int:
    """Run a command on a node with this terminal."""
    nodes = leftovers.read(directory).get("nodes", {})
    if node not in nodes:
        raise PoolError(f"{directory} has no node {node}; it has {', '.join(nodes) or 'none'}.")
    pid = nodes[node][0]
    uid, gid, home = namespace.account(pid, user)
    env = namespace.environment(user, home, {"TERM": os.environ.get("TERM", "dumb")})
    return subprocess.run(namespace.enter(pid, command, uid=uid, gid=gid, cwd=home), env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
