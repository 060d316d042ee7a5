"""A user with a shell or a job on an execute point cannot take the manager's memory, disk, log or control socket."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stageout.wire import handoff
from tests.harness.pool import Node
from tests.pool.test_full_spool import machine

pytestmark = pytest.mark.pool

_MB = 1 << 20
_COMMAND = "/opt/stageout/bin/stageout"

#: Connections that stay open until stdin ends. With a length: each sends a frame of so many bytes but for the last.
CONNECTIONS = r"""
import select, socket, struct, sys
path, count, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rest = {}
for _ in range(count):
    talk = socket.socket(socket.AF_UNIX)
    talk.connect(path)
    talk.setblocking(False)
    rest[talk] = memoryview(struct.pack(">I", length) + b" " * (length - 1)) if length else b""
writing = [talk for talk in rest if rest[talk]]
while writing:
    _, ready, _ = select.select([], writing, [], 2)
    if not ready:
        break
    for talk in ready:
        try:
            rest[talk] = rest[talk][talk.send(rest[talk]):]
        except OSError:
            rest[talk] = b""
        if not rest[talk]:
            writing.remove(talk)
print("ready", flush=True)
sys.stdin.read()
"""

_FLOOD = r"""
import socket, sys
for _ in range(int(sys.argv[2])):
    talk = socket.socket(socket.AF_UNIX)
    talk.connect(sys.argv[1])
    talk.close()
"""

#: A job that hands off names of one empty file again and again, by itself.
_NAMES = r"""#!/usr/bin/python3
import glob, json, os, socket, struct, sys, time
spool, name, calls, names, version = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
plugin, url = sys.argv[6], sys.argv[7]
open("empty", "w").close()
def send(talk, message):
    body = json.dumps(message).encode()
    talk.sendall(struct.pack(">I", len(body)) + body)
def receive(talk):
    (length,) = struct.unpack(">I", talk.recv(4, socket.MSG_WAITALL))
    return json.loads(talk.recv(length, socket.MSG_WAITALL))
taken, reason = 0, ""
for call in range(calls):
    talk = socket.socket(socket.AF_UNIX)
    talk.connect(spool + "/run/" + name)
    rows = [["%s/%d/%d/%s" % (url, call, n, "u" * 4000), os.path.abspath("empty"), 0] for n in range(names)]
    try:
        send(talk, {"op": "offer", "version": version, "plugin": plugin, "files": names, "size_bytes": 0})
        send(talk, {"op": "files", "files": rows})
        answer = receive(talk)
        if answer["op"] == "go":
            for n in range(names):
                os.link("empty", answer["directory"] + "/" + str(n))
            send(talk, {"op": "linked", "files": names})
            answer = receive(talk)
    except OSError as problem:
        answer = {"op": "gone", "reason": str(problem)}
    taken += answer["op"] == "accepted"
    reason = answer.get("reason", reason)
    talk.close()
with open(sys.argv[8] + ".new", "w") as out:
    json.dump({"taken": taken, "reason": reason}, out)
os.rename(sys.argv[8] + ".new", sys.argv[8])
time.sleep(600)
"""


def spool_of(node: Node) -> Path:
    """STAGEOUT_SPOOL as seen from here."""
    return node.root / node.config_val("STAGEOUT_SPOOL").lstrip("/")


def sockets(node: Node) -> tuple[str, str]:
    """Paths of the hand-off and of the control socket inside."""
    run = f"{node.config_val('STAGEOUT_SPOOL')}/run"
    return f"{run}/{handoff.socket_name(node.config_val('EXECUTE'))}", f"{run}/control"


def peak_mb(node: Node) -> int:
    """Most memory of the manager since :func:`forget_peak`."""
    (pid,) = node.pids("stageout-sandbox-manager")
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) // 1024


def forget_peak(node: Node) -> int:
    """Count the most memory from now on. Returns MB of now."""
    (pid,) = node.pids("stageout-sandbox-manager")
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak_mb(node)


@contextmanager
def open_connections(node: Node, user: str, socket: str, count: int, length: int = 0) -> Iterator[None]:
    """Connections of a user, until the end of the block."""
    command, environment = node.command(
        ["python3", "-c", CONNECTIONS, socket, str(count), str(length)], user=user, cwd="/"
    )
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as held:
        assert held.stdin and held.stdout
        assert held.stdout.readline() == b"ready\n"
        yield
        held.stdin.close()


def status_of(node: Node, user: str = "root") -> Any:
    """``stageout status --node`` as that user."""
    return node.run([_COMMAND, "status", "--node", "--json"], user=user, check=False)


def test_unfinished_frames_of_a_stranger_take_no_memory(site: Any) -> None:
    node = site.pool.eps[0]
    before = forget_peak(node)
    with open_connections(node, "bob", sockets(node)[0], 190, 4 * _MB):
        after = peak_mb(node)
    print(f"manager: {before} MB before, {after} MB with 190 frames of 4 MB that do not end")
    assert after - before < 16


def test_idle_connections_of_a_user_leave_root_its_place(site: Any) -> None:
    node = site.pool.eps[0]
    with open_connections(node, "bob", sockets(node)[1], 80):
        root, alice = status_of(node), status_of(node, "alice")
        print(f"status with 80 idle connections: root {root.returncode} {root.stderr}, alice {alice.returncode}")
        assert root.returncode == 0, root.stderr
        assert alice.returncode == 0, alice.stderr
    assert status_of(node, "bob").returncode == 0


def test_a_flood_of_connections_is_a_few_lines_in_the_log(site: Any) -> None:
    node = site.pool.eps[0]
    before = len(node.log("SandboxManagerLog").splitlines())
    for socket in sockets(node):
        node.run(["python3", "-c", _FLOOD, socket, "5000"], user="bob", cwd="/", timeout_s=120)
    assert status_of(node).returncode == 0
    lines = node.log("SandboxManagerLog").splitlines()[before:]
    print(f"{len(lines)} lines for 10000 connections: {lines[-1]}")
    assert len(lines) < 50


def test_names_without_bytes_are_bounded_and_given_back(site: Any) -> None:
    node = site.pool.eps[0]
    ledger = spool_of(node) / "ledger"

    def ledger_mb() -> int:
        return sum(path.stat().st_size for path in ledger.glob("ledger.sqlite*")) // _MB

    before, answer = ledger_mb(), site.gates / "names.json"
    plugin = node.config_val("FILETRANSFER_PLUGINS").replace(",", " ").split()[-1]
    words = [node.config_val("STAGEOUT_SPOOL"), Path(sockets(node)[0]).name, "64", "1000", str(handoff.VERSION)]
    job = site.pool.submit(
        "alice",
        f"""executable = names.py
        arguments = {" ".join([*words, plugin, site.url(), str(answer)])}
        should_transfer_files = YES
        output_destination = {site.url()}
        requirements = Machine == "{machine(site, node)}"
        request_memory = 50
        request_disk = 10M
        queue""",
        files={"names.py": _NAMES},
    )
    site.pool.wait(answer.exists, timeout_s=300, what="the job's hand-offs")
    found, held = json.loads(answer.read_text()), ledger_mb()
    print(f"{found}; ledger {before} MB before, {held} MB with them")
    site.pool.rm(job)
    site.pool.wait(lambda: ledger_mb() < before + 30, timeout_s=240, what="the ledger to shrink")
    print(f"ledger {ledger_mb()} MB after condor_rm")
    assert 0 < found["taken"] <= 32
    assert "hand-offs" in found["reason"]
