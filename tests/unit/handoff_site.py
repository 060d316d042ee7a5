"""A node without HTCondor for tests of the hand-off: execute directory, spool, a manager process, users.

Manager and plugins are forked, so that they can be other users than this one where it is root.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import termios
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import pytest

from sandbox_manager.custody.spool import Spool
from sandbox_manager.intake.acceptance import Handoff, Refusal, Reservation
from sandbox_manager.intake.listener import Intake, IntakeLimits
from sandbox_manager.intake.peers import NotIdentified, Peer
from stageout.core import durable
from stageout.core.clock import SystemClock
from stageout.core.config import mapping_settings
from stageout.core.synchronous import Reason
from stageout.handoff import client, connection, links  # noqa: F401 - loaded before a child becomes somebody else
from stageout.model.run import Account, RunFacts
from stageout.model.sandbox import SlotKey
from stageout.wire import handoff as wire
from stageout.wire.custody import Run
from stageout.wire.handoff import Receipt
from tests.polling import wait_for

ALICE, BOB, PILOT = 64001, 64002, 64010
ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="needs root: plugins of several users")
#: Longer than a busy machine stands still: tests of silence let the time pass.
PATIENT = IntakeLimits(silence_s=60)
_DEADLINE_S = 60.0


def become(uid: int) -> None:
    """Be this user from now on (in a forked child)."""
    if os.geteuid() != uid:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        # As after exec: without this /proc/self belongs to root.
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)


class Child:
    """A forked process that runs one function as a user and brings its result or exception back."""

    def __init__(
        self, work: Callable[[], Any], uid: int, cwd: Path | None = None, env: dict[str, str] | None = None
    ) -> None:
        self._read, write = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self._read)
                if cwd is not None:
                    os.chdir(cwd)
                become(uid)
                os.environ.update(env or {})
                durable._faults.update(durable.parse_faults((env or {}).get("STAGEOUT_FAULTS", "")))
                try:
                    answer: Any = (True, work())
                except BaseException as problem:
                    answer = (False, RuntimeError(f"{problem!r}\n{traceback.format_exc()}"))
                with open(write, "wb") as stream:
                    pickle.dump(answer, stream)
                status = 0
            finally:
                os._exit(status)
        os.close(write)

    def result(self) -> Any:
        """Wait for the end; None when it was killed."""
        with open(self._read, "rb") as stream:
            data = stream.read()
        os.waitpid(self.pid, 0)
        if not data:
            return None
        good, value = pickle.loads(data)
        if not good:
            raise value
        return value

    def has_ended(self) -> bool:
        """Whether its result is there, or never comes."""
        return bool(select.select([self._read], [], [], 0)[0])

    def kill(self) -> None:
        """End it at once."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._read)


class FakeIdentity:
    """Takes the peer's uid for its owner; facts come from a file that the test writes."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def identify(self, peer: Peer) -> RunFacts:
        facts = RunFacts(
            run=Run("ap#1.0#1700000000", 1, f"u{peer.uid}@test"), user=f"u{peer.uid}", uid=peer.uid, gid=peer.gid,
            slot=SlotKey("ep", 1, 1), slot_name="slot1_1@ep", guard=True,
        )  # fmt: skip
        control = self._site.control()
        if peer.uid in control.get("strangers", ()):
            raise NotIdentified("not a process of a job")
        await asyncio.sleep(control.get("identify_s", 0))
        told = dict(control.get("facts", {}))
        run = replace(facts.run, owner=told.pop("owner", facts.owner))
        return replace(facts, run=run, **told)


class FakeCustody:
    """A ledger of JSON lines, each fsync'ed."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.reservations = 0

    def may_accept(
        self, facts: RunFacts, files: int, size_bytes: int, urls: Sequence[str], plugin: str
    ) -> Reservation | Refusal:
        if "refuse" in self._site.control():
            return Refusal(Reason("SlotFull", self._site.control()["refuse"]))
        self.reservations += 1
        self._site.note("reserved", self.reservations)
        account = Account(*self._site.control()["account"]) if "account" in self._site.control() else None
        return Reservation(self.reservations, account)

    def may_copy(self, reservation: Reservation, size_bytes: int) -> float | Refusal:
        self._site.note("copy", size_bytes)
        control = self._site.control()
        if "refuse_copy" in control:
            return Refusal(Reason("OtherFilesystem", control["refuse_copy"]))
        return float(control.get("sending_s", "inf"))

    def unreserve(self, reservation: Reservation) -> None:
        self.reservations -= 1
        self._site.note("reserved", self.reservations)

    async def accept(self, handoff: Handoff) -> Receipt:
        control = self._site.control()
        await asyncio.sleep(control.get("accept_s", 0))
        if "accept_error" in control:
            raise OSError(28, control["accept_error"])
        files = [[item.position, item.url, item.name, item.size_bytes] for item in handoff.files]
        self.unreserve(handoff.reservation)
        given = handoff.stored.credentials if handoff.stored else ()
        self._site.note(
            "accepted",
            {
                "ticket": handoff.ticket, "uid": handoff.facts.uid, "plugin": handoff.plugin, "files": files,
                "credentials": [[item.kind, item.service] for item in given],
            },
        )  # fmt: skip
        return Receipt(handoff.ticket, "sm@ep", "", len(handoff.files), handoff.size_bytes)


class Site:
    """One execute directory with its spool and manager.

    :param one_user: everything runs as one ordinary user, as in a pilot; else the manager is root.
    """

    def __init__(self, one_user: bool, base: Path | None = None, spool: Path | None = None) -> None:
        self.base = base or Path(tempfile.mkdtemp(prefix="stageout-handoff-"))
        self.base.chmod(0o755)
        self.one_user = one_user
        self.manager_uid = (PILOT if ROOT else os.geteuid()) if one_user else 0
        self.execute = self.base / "execute"
        self.spool = spool or self.base / "stageout"
        self._manager: Child | None = None
        for place in (self.execute, self.base / "notes"):
            place.mkdir(mode=0o755)
            os.chown(place, self.manager_uid, self.manager_uid)
        if self.one_user:
            os.chown(self.base, self.manager_uid, self.manager_uid)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.base, ignore_errors=True)

    # ---- the manager -------------------------------------------------------------------------------------------------

    @property
    def user(self) -> int:
        """Uid of jobs."""
        return self.manager_uid if self.one_user else ALICE

    @property
    def socket(self) -> Path:
        return self.spool / "run" / wire.socket_name(str(self.execute))

    def start(
        self, faults: str = "", limits: IntakeLimits | None = None, settings: dict[str, str] | None = None
    ) -> None:
        """Start the manager and wait until it listens."""
        self.socket.unlink(missing_ok=True)
        self._manager = Child(
            lambda: asyncio.run(self._manage(limits or PATIENT, settings or {})),
            self.manager_uid,
            env={"STAGEOUT_FAULTS": faults},
        )
        wait_for(self.socket.exists, "the manager's socket")

    async def _manage(self, limits: IntakeLimits, values: dict[str, str]) -> None:
        spool = Spool(self.spool, self.execute)
        spool.open({})
        recorded = {row["ticket"] for row in self.notes("accepted")}
        spool.remove_parts()
        spool.remove_unknown(spool.set_aside(set(spool.directories()) - recorded))
        custody: Any = FakeCustody(self)
        self.note("reserved", 0)
        intake = Intake(spool, FakeIdentity(self), custody, mapping_settings(values), SystemClock(), limits=limits)
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        loop.add_signal_handler(signal.SIGUSR1, self._be_later, loop, limits.silence_s * 3 / 4)
        await intake.start(self.socket)
        await stop.wait()
        await intake.stop(grace_s=2)
        spool.close()

    def stop(self) -> None:
        """Ask the manager to end, and wait."""
        assert self._manager is not None
        os.kill(self._manager.pid, signal.SIGTERM)
        manager, self._manager = self._manager, None
        manager.result()

    def kill(self) -> None:
        """kill -9 of the manager."""
        if self._manager is not None:
            self._manager.kill()
            self._manager = None

    def _be_later(self, loop: asyncio.AbstractEventLoop, by_s: float) -> None:
        before = loop.time
        loop.time = lambda: before() + by_s  # type: ignore[method-assign]
        self.note("later", by_s)

    def let_time_pass(self) -> None:
        """For the manager, who waits for messages, three quarters of what it takes for silence."""
        assert self._manager is not None
        passed = len(self.notes("later"))
        os.kill(self._manager.pid, signal.SIGUSR1)
        wait_for(lambda: len(self.notes("later")) > passed, "the time to pass")

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """The manager does nothing meanwhile, and finds afterwards what came."""
        assert self._manager is not None
        os.kill(self._manager.pid, signal.SIGSTOP)
        os.waitpid(self._manager.pid, os.WUNTRACED)
        try:
            yield
        finally:
            os.kill(self._manager.pid, signal.SIGCONT)

    def wait_killed(self) -> None:
        """Wait until a planned fault has ended the manager."""
        assert self._manager is not None
        manager, self._manager = self._manager, None
        assert manager.result() is None

    # ---- what it wrote, and what it is told --------------------------------------------------------------------------

    def note(self, kind: str, value: Any) -> None:
        with open(self.base / "notes" / kind, "a") as stream:
            stream.write(json.dumps(value) + "\n")

    def notes(self, kind: str) -> list[Any]:
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in (self.base / "notes" / kind).read_text().splitlines()]
        return []

    def control(self) -> dict[str, Any]:
        with contextlib.suppress(FileNotFoundError):
            return dict(json.loads((self.base / "control").read_text()))
        return {}

    def tell(self, **values: Any) -> None:
        aside = self.base / "control.new"
        aside.write_text(json.dumps(values))
        aside.chmod(0o644)
        aside.rename(self.base / "control")

    def is_clean(self) -> bool:
        """No half hand-off: intake empty, reservations given back, only recorded tickets in the spool."""
        held = {place.name for place in (self.spool / "sandboxes").iterdir()}
        recorded = {row["ticket"] for row in self.notes("accepted")}
        return not list((self.spool / "intake").iterdir()) and held <= recorded and self.notes("reserved")[-1:] == [0]

    # ---- jobs --------------------------------------------------------------------------------------------------------

    def scratch(self, uid: int | None = None, number: int = 100, inner: bool = True) -> Path:
        """Make the scratch directory of a job."""
        uid = self.user if uid is None else uid
        place = self.execute / f"dir_{number}"
        place.mkdir(mode=0o755 if inner else 0o700)
        if inner:
            os.chown(place, self.manager_uid, self.manager_uid)
            place = place / "scratch"
            place.mkdir(mode=0o700)
        os.chown(place, uid, uid)
        return place

    def plugin(
        self, scratch: Path, work: Callable[[], Any], uid: int | None = None, env: dict[str, str] | None = None
    ) -> Child:
        """A plugin process of a job, which waits for the manager as long as a busy machine lets it."""
        return Child(
            work, self.user if uid is None else uid, scratch, {"STAGEOUT_HANDOFF_TIMEOUT": "60", **(env or {})}
        )

    def offer(
        self, scratch: Path, names: Sequence[str], uid: int | None = None, env: dict[str, str] | None = None
    ) -> client.Offer:
        """Offer files of a scratch directory as its job's user would."""
        requests = [(f"https://store.test/out/{name}", str(scratch / name)) for name in names]
        answer = self.plugin(scratch, lambda: _plain(client.offer(requests, "/opt/curl_plugin")), uid, env).result()
        assert answer is not None, "the plugin was killed"
        return client.Offer(*answer)


def _plain(answer: client.Offer) -> tuple[bool, str, dict[str, Any]]:
    return answer.accepted, answer.reason, dict(answer.receipt)


def write_files(scratch: Path, uid: int, files: dict[str, bytes]) -> None:
    """Make output files that belong to the job."""
    for name, data in files.items():
        path = scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        for made in (path, *(parent for parent in path.parents if scratch in parent.parents)):
            os.chown(made, uid, uid)
        path.chmod(0o600)


class RawPlugin:
    """Speaks the protocol by hand, and wrongly where a test wants it."""

    def __init__(self, site: Site) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_DEADLINE_S)
        self.sock.connect(str(site.socket))

    def offer(self, files: Sequence[tuple[str, str, int]], **head: Any) -> None:
        """Send an offer of (URL, path, size)."""
        frames = list(wire.offer_frames([wire.OfferedFile(*row) for row in files], "/opt/p"))
        frames[0].update(head)
        for frame in frames:
            wire.send_frame(self.sock, frame)

    def answer(self) -> dict[str, Any]:
        """Next frame of the manager."""
        return wire.receive_frame(self.sock)

    def go(self, files: Sequence[tuple[str, str, int]]) -> Path:
        """Offer and get the directory for the links."""
        self.offer(files)
        answer = self.answer()
        assert answer["op"] == "go", answer
        return Path(answer["directory"])

    def wait_until_heard(self) -> None:
        """Until the manager has read all that was said."""
        wait_for(lambda: not struct.unpack("i", fcntl.ioctl(self.sock, termios.TIOCOUTQ, bytes(4)))[0], "the manager")

    def linked(self) -> dict[str, Any]:
        """Say that the links are there, and get the answer."""
        wire.send_frame(self.sock, {"op": "linked"})
        return self.answer()


@contextlib.contextmanager
def site_for(one_user: bool) -> Iterator[Site]:
    """A site with a running manager."""
    made = Site(one_user)
    try:
        made.start()
        yield made
    finally:
        made.close()
