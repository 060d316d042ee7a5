"""The manager's side of a hand-off against plugins that are slow, broken, hostile or dead."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import secrets
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import pytest
from handoff_site import ALICE, BOB, PATIENT, Child, RawPlugin, Site, needs_root, write_files

from sandbox_manager.intake.listener import _OVERRUN_S
from stageout.core import durable
from stageout.wire import handoff as wire
from tests.polling import wait_for

Rows = list[tuple[str, str, int]]


@pytest.fixture(params=[pytest.param("root", marks=needs_root), "one user"])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    made = Site(one_user=request.param != "root")
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture
def root_site() -> Iterator[Site]:
    made = Site(one_user=False)
    try:
        made.start()
        yield made
    finally:
        made.close()


def _list(directory: Path) -> list[Path]:
    return list(directory.iterdir())


def ended(site: Site) -> None:
    """The hand-off is over and has left nothing."""
    wait_for(site.is_clean, "the end of the hand-off")
    assert site.notes("accepted") == []


def still_works(site: Site) -> None:
    """The next plugin is served."""
    scratch = site.scratch(number=900)
    write_files(scratch, site.user, {"out": b"x"})
    answer = site.offer(scratch, ["out"])
    assert answer.accepted, answer.reason


# ---- what is linked is not what was offered --------------------------------------------------------------------------


def _symlink(directory: Path, scratch: Path) -> None:
    (directory / "0").symlink_to("/etc/passwd")


def _fifo(directory: Path, scratch: Path) -> None:
    os.mkfifo(directory / "0")


def _directory(directory: Path, scratch: Path) -> None:
    (directory / "0").mkdir()
    (directory / "0" / "x").touch()


def _device(directory: Path, scratch: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(str(directory / "0"))


def _wrong_size(directory: Path, scratch: Path) -> None:
    os.link(scratch / "out", directory / "0")
    with open(scratch / "out", "ab") as stream:
        stream.write(b"more")


def _extra_name(directory: Path, scratch: Path) -> None:
    os.link(scratch / "out", directory / "0")
    os.link(scratch / "out", directory / "1")


def _other_name(directory: Path, scratch: Path) -> None:
    os.link(scratch / "out", directory / "00")


def _nothing(directory: Path, scratch: Path) -> None:
    pass


def _unreadable(directory: Path, scratch: Path) -> None:
    os.link(scratch / "out", directory / "0")
    (scratch / "out").chmod(0)


def _closed(directory: Path, scratch: Path) -> None:
    (directory / "sub").mkdir()
    (directory / "sub" / "file").touch()
    (directory / "sub").chmod(0o000)
    directory.chmod(0o000)


@pytest.mark.parametrize(
    ("trick", "reason"),
    [
        (_symlink, "not a regular file"),
        (_fifo, "not a regular file"),
        (_directory, "not a regular file"),
        (_device, "not a regular file"),
        (_wrong_size, "5 bytes, 1 were offered"),
        (_extra_name, "2 or more names were linked where 1"),
        (_other_name, "where 1 files were offered"),
        (_nothing, "0 names"),
        (_unreadable, "cannot be read by its owner"),
        (_closed, ""),
    ],
)
def test_links_are_checked_against_the_offer(site: Site, trick: Callable[[Path, Path], None], reason: str) -> None:
    scratch = site.scratch()
    write_files(scratch, site.user, {"out": b"x"})

    def plugin() -> Any:
        raw = RawPlugin(site)
        trick(raw.go([("s://h/out", str(scratch / "out"), 1)]), scratch)
        return raw.linked()

    answer = site.plugin(scratch, plugin).result()
    assert answer["op"] == "refuse" and reason in answer["reason"]
    ended(site)
    still_works(site)


def test_a_tree_too_deep_for_recursion_is_removed(site: Site) -> None:
    scratch = site.scratch()

    def plugin() -> Any:
        (scratch / "0").mkdir()
        os.chdir(scratch / "0")
        for _ in range(2200):  # beyond PATH_MAX (4096), and what Python calls within itself
            Path("d").mkdir(0o700)
            os.chdir("d")
        Path("closed").mkdir(0o000)
        raw = RawPlugin(site)
        (scratch / "0").rename(raw.go([("s://h/out", str(scratch / "out"), 1)]) / "0")
        return raw.linked()

    answer = site.plugin(scratch, plugin).result()
    assert "not a regular file" in answer["reason"]
    ended(site)
    still_works(site)


@needs_root
def test_somebody_elses_file_cannot_be_handed_off(root_site: Site) -> None:
    """A hard link to a file that the user may write but does not own is legal; taking it over would be theft."""
    scratch = root_site.scratch()
    theirs = root_site.base / "theirs"
    theirs.write_bytes(b"x")
    theirs.chmod(0o666)
    os.chown(theirs, BOB, BOB)

    def plugin() -> Any:
        raw = RawPlugin(root_site)
        os.link(theirs, raw.go([("s://h/out", str(scratch / "out"), 1)]) / "0")
        return raw.linked()

    answer = root_site.plugin(scratch, plugin).result()
    assert f"belongs to uid {BOB}" in answer["reason"]
    assert theirs.stat().st_uid == BOB and theirs.read_bytes() == b"x"
    ended(root_site)


@needs_root
def test_nobody_enters_the_hand_off_of_another_nor_his_own_after_the_end(root_site: Site) -> None:
    scratch = root_site.scratch()
    write_files(scratch, ALICE, {"out": b"x"})

    def denied(*calls: Callable[[], Any]) -> list[bool]:
        found = []
        for call in calls:
            try:
                call()
                found.append(False)
            except PermissionError:
                found.append(True)
        return found

    def plugin() -> Any:
        raw = RawPlugin(root_site)
        directory = raw.go([("s://h/out", str(scratch / "out"), 1)])
        held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        os.write(told, str(directory).encode())
        os.read(may_go_on, 1)
        os.link(scratch / "out", directory / "0")
        assert raw.linked()["op"] == "accepted"
        place = root_site.spool / "sandboxes" / directory.name
        return denied(
            (place / "0").read_bytes,
            lambda: os.unlink("0", dir_fd=held),
            lambda: os.link(scratch / "out", "1", dst_dir_fd=held),
            lambda: (place / "0").unlink(),
            lambda: (place / "2").touch(),
            lambda: _list(place),
            lambda: _list(place.parent),
            lambda: place.chmod(0o777),
            lambda: place.rename(place.parent / "mine"),
        )

    tell, told = os.pipe()
    may_go_on, go_on = os.pipe()
    alice = root_site.plugin(scratch, plugin)
    directory = Path(os.read(tell, 1000).decode())
    bob = Child(
        lambda: denied(
            lambda: _list(directory),
            (directory / "0").touch,
            lambda: _list(directory.parent),
            directory.rmdir,
        ),
        BOB,
    )
    assert bob.result() == [True] * 4
    os.write(go_on, b"x")
    assert alice.result() == [True] * 9
    held = root_site.spool / "sandboxes" / directory.name
    for end in (tell, told, may_go_on, go_on):
        os.close(end)
    held_by_bob = Child(lambda: denied((held / "0").read_bytes, lambda: _list(held)), BOB)
    assert held_by_bob.result() == [True, True]


# ---- more than was offered -------------------------------------------------------------------------------------------

_MB = 1024 * 1024


def _write(directory: Path, scratch: Path, size_bytes: int, raw: RawPlugin) -> None:
    """Write into the intake, a part after the other, as a copy of a file does."""
    with open(directory / "0", "ab") as stream:
        stream.write(bytes(size_bytes))


def _grow(directory: Path, scratch: Path, size_bytes: int, raw: RawPlugin) -> None:
    """Let a file grow that is linked already."""
    if not (directory / "0").exists():
        os.link(scratch / "out", directory / "0")
    with open(scratch / "out", "ab") as stream:
        stream.write(bytes(size_bytes))


def _reserve(directory: Path, scratch: Path, size_bytes: int, raw: RawPlugin) -> None:
    """Take blocks beyond the end of a file, which its size does not show (FALLOC_FL_KEEP_SIZE)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(directory / "0", "ab") as stream:
        at = os.fstat(stream.fileno()).st_blocks * 512
        libc.fallocate(stream.fileno(), 1, ctypes.c_long(at), ctypes.c_long(size_bytes))


def _names(directory: Path, scratch: Path, size_bytes: int, raw: RawPlugin) -> None:
    for _ in range(10):
        (directory / secrets.token_hex(8)).touch()


def _folders(directory: Path, scratch: Path, size_bytes: int, raw: RawPlugin) -> None:
    (directory / "d").mkdir(exist_ok=True)
    with open(directory / "d" / "x", "ab") as stream:
        stream.write(bytes(size_bytes))


@pytest.mark.parametrize("chatters", [False, True])
@pytest.mark.parametrize(
    ("trick", "reason"),
    [
        (_write, "where 10 were offered"), (_grow, "where 10 were offered"), (_reserve, "where 10 were offered"),
        (_names, "names were linked where 1 files"), (_folders, "d is not a regular file"),
    ],
)  # fmt: skip
def test_a_hand_off_on_its_way_takes_no_more_than_was_offered(
    site: Site, trick: Callable[[Path, Path, int, RawPlugin], None], reason: str, chatters: bool
) -> None:
    """And the run waits: it would do the same again. Its plugin sends the output itself meanwhile."""
    scratch = site.scratch()
    write_files(scratch, site.user, {"out": b"0123456789"})
    rows = [("s://h/out", str(scratch / "out"), 10)]

    def plugin() -> Any:
        raw = RawPlugin(site)
        directory, parts = raw.go(rows), 0
        while not select.select([raw.sock], [], [], 0.02)[0] and parts < 400:
            with suppress(OSError):  # its directory is taken away
                trick(directory, scratch, _MB, raw)
                parts += 1
            if chatters:
                with suppress(BrokenPipeError):  # the refusal can be read all the same
                    wire.send_frame(raw.sock, {"op": "linking"})
        answer, again = raw.answer(), RawPlugin(site)
        again.offer(rows)
        return parts, answer, again.answer()

    parts, answer, again = site.plugin(scratch, plugin).result()
    assert (answer["op"], answer["code"]) == ("refuse", "Files") and reason in answer["reason"]
    assert parts < 400, "it was stopped on its way"
    assert again["op"] == "refuse" and "put more into the spool than it had offered" in again["reason"]
    ended(site)
    if site.user == ALICE:
        other = site.scratch(BOB, number=900)
        write_files(other, BOB, {"out": b"x"})
        assert site.offer(other, ["out"], BOB).accepted, "another run does not wait"
    for _ in range(math.ceil(_OVERRUN_S / PATIENT.silence_s * 4 / 3)):
        site.let_time_pass()
    write_files(scratch, site.user, {"out": b"0123456789"})
    assert site.offer(scratch, ["out"]).accepted


# ---- the plugin stops ------------------------------------------------------------------------------------------------


def _before_offer(raw: RawPlugin, rows: Rows) -> None:
    pass


def _within_a_frame(raw: RawPlugin, rows: Rows) -> None:
    raw.sock.sendall(struct.pack(">I", 1000) + b'{"op"')


def _within_the_offer(raw: RawPlugin, rows: Rows) -> None:
    wire.send_frame(raw.sock, next(iter(wire.offer_frames([wire.OfferedFile(*row) for row in rows], "p"))))


def _after_go(raw: RawPlugin, rows: Rows) -> None:
    raw.go(rows)


def _within_the_links(raw: RawPlugin, rows: Rows) -> None:
    directory = raw.go(rows)
    os.link(rows[0][1], directory / "0")
    (directory / "half").write_bytes(b"half a copy")


def _at_linked(raw: RawPlugin, rows: Rows) -> None:
    os.link(rows[0][1], raw.go(rows) / "0")
    raw.sock.sendall(wire.encode_frame({"op": "linked"})[:7])


@pytest.mark.parametrize("end", ["dies", "is silent"])
@pytest.mark.parametrize(
    "moment", [_before_offer, _within_a_frame, _within_the_offer, _after_go, _within_the_links, _at_linked]
)
def test_a_plugin_that_stops_leaves_nothing(site: Site, moment: Callable[[RawPlugin, Rows], None], end: str) -> None:
    scratch = site.scratch()
    write_files(scratch, site.user, {"out": b"x"})

    def plugin() -> bytes:
        raw = RawPlugin(site)
        moment(raw, [("s://h/out", str(scratch / "out"), 1)])
        os.write(tell, b"s")
        # Silent: until the manager hangs up.
        return b"" if end == "dies" else raw.sock.recv(1)

    told, tell = os.pipe()
    child = site.plugin(scratch, plugin)
    os.close(tell)
    os.read(told, 1)
    os.close(told)
    while end == "is silent" and not child.has_ended():
        site.let_time_pass()
    assert child.result() == b""
    ended(site)
    still_works(site)


def test_a_plugin_that_is_gone_is_not_recorded(site: Site) -> None:
    """It ends behind its last word: the manager, which does nothing meanwhile, finds both."""
    scratch = site.scratch()
    write_files(scratch, site.user, {str(at): b"" for at in range(20)})
    rows = [("s://h/out", str(scratch / str(at)), 0) for at in range(20)]
    (linked, has_linked), (goes_on, go_on) = os.pipe(), os.pipe()

    def plugin() -> None:
        raw = RawPlugin(site)
        directory = raw.go(rows)
        for at, row in enumerate(rows):
            os.link(row[1], directory / str(at))
        os.write(has_linked, b"l")
        os.read(goes_on, 1)
        wire.send_frame(raw.sock, {"op": "linked"})

    child = site.plugin(scratch, plugin)
    os.close(has_linked)
    os.close(goes_on)
    os.read(linked, 1)
    with site.stopped():
        with suppress(BrokenPipeError):  # it failed, and says how
            os.write(go_on, b"g")
        child.result()
    os.close(linked)
    os.close(go_on)
    ended(site)


def test_work_in_progress_is_waited_for(site: Site) -> None:
    """Copies take longer than the silence that is allowed; the plugin says that it is alive."""
    scratch = site.scratch()
    write_files(scratch, site.user, {"out": b"x"})

    def plugin() -> Any:
        raw = RawPlugin(site)
        directory = raw.go([("s://h/out", str(scratch / "out"), 1)])
        for _ in range(3):
            wire.send_frame(raw.sock, {"op": "linking"})
            raw.wait_until_heard()
            os.write(tell, b"l")
            os.read(goes_on, 1)
        os.link(scratch / "out", directory / "0")
        return raw.linked()["op"]

    (told, tell), (goes_on, go_on) = os.pipe(), os.pipe()
    child = site.plugin(scratch, plugin)
    for end in (tell, goes_on):
        os.close(end)
    while os.read(told, 1):
        site.let_time_pass()
        os.write(go_on, b"g")
    assert child.result() == "accepted"
    for end in (told, go_on):
        os.close(end)


# ---- nonsense --------------------------------------------------------------------------------------------------------


def _frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


_HEAD = {"op": "offer", "version": wire.VERSION, "plugin": "p", "files": 1, "size_bytes": 1}


@pytest.mark.parametrize(
    "said",
    [
        struct.pack(">I", 1 << 30),
        struct.pack(">I", wire.MAX_FRAME_BYTES + 1) + b"x" * 100,
        b"GET / HTTP/1.1\r\n\r\n",
        _frame(b""),
        _frame(b"[1]"),
        _frame(b"\xff\xfe"),
        _frame(b"[" * 100_000),
        _frame(b'{"op": 7}'),
        _frame(b'{"op": "linked"}'),
        _frame(json.dumps({**_HEAD, "version": 99}).encode()),
        _frame(json.dumps({**_HEAD, "files": 10**9}).encode()),
        _frame(json.dumps({**_HEAD, "files": -1}).encode()),
        _frame(json.dumps({**_HEAD, "files": True}).encode()),
        _frame(json.dumps({**_HEAD, "files": "1"}).encode()),
        _frame(json.dumps({**_HEAD, "plugin": None}).encode()),
        _frame(json.dumps(_HEAD).encode()) + _frame(b'{"op":"files","files":[["a","b",-1]]}'),
        _frame(json.dumps(_HEAD).encode()) + _frame(b'{"op":"files","files":[["a","b",1],["a","b",1]]}'),
        _frame(json.dumps(_HEAD).encode()) + _frame(b'{"op":"files","files":{"a":1}}'),
        _frame(json.dumps(_HEAD).encode()) + _frame(b'{"op":"files","files":[]}') * 5,
    ],
)
def test_nonsense_is_refused(said: bytes, nonsense_site: Site) -> None:
    raw = RawPlugin(nonsense_site)
    raw.sock.sendall(said)
    while not select.select([raw.sock], [], [], 0.1)[0]:
        nonsense_site.let_time_pass()
    with pytest.raises((EOFError, AssertionError)):
        assert raw.answer()["op"] != "refuse"
        raise AssertionError
    ended(nonsense_site)


@pytest.fixture(scope="module")
def nonsense_site() -> Iterator[Site]:
    made = Site(one_user=True)
    try:
        made.start()
        yield made
        still_works(made)
    finally:
        made.close()


def test_endless_offers_use_bounded_memory(site: Site) -> None:
    site.kill()
    site.start(limits=replace(PATIENT, offers_bytes=1_000_000))
    raw = RawPlugin(site)
    with suppress(BrokenPipeError, ConnectionResetError):  # refused before all of it is read
        raw.offer([("s://h/" + "x" * 3000, "/p", 1)] * 1000)
    assert "too many files on offer" in raw.answer()["reason"]
    still_works(site)


def _manager_mb(site: Site, field: str) -> int:
    assert site._manager is not None
    text = Path(f"/proc/{site._manager.pid}/status").read_text()
    return int(text.partition(f"{field}:")[2].split()[0]) // 1024


def _frames_without_end(site: Site, count: int) -> list[RawPlugin]:
    """Send frames of 4 MB but for the last byte, each by a connection of its own."""
    length = wire.MAX_FRAME_BYTES
    body = memoryview(struct.pack(">I", length) + b" " * (length - 1))
    raws = [RawPlugin(site) for _ in range(count)]
    for raw in raws:
        raw.sock.settimeout(1)
        with suppress(OSError):
            raw.sock.sendall(body)
    return raws


def _answers_to(raws: list[RawPlugin]) -> list[str]:
    """Return the manager's reasons; a connection that it waits for has none."""
    answers = []
    for raw in raws:
        with suppress(OSError, EOFError):
            answers.append(raw.answer()["reason"])
    return answers


def test_nothing_is_read_from_a_process_that_is_no_job_s(root_site: Site) -> None:
    root_site.tell(strangers=[BOB])
    before = _manager_mb(root_site, "VmHWM")
    answers = Child(lambda: _answers_to(_frames_without_end(root_site, 60)), BOB).result()
    assert answers == ["not a process of a job"] * 60
    assert _manager_mb(root_site, "VmHWM") - before < 8
    still_works(root_site)


@contextmanager
def closing_pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


def test_unfinished_frames_of_a_user_s_jobs_are_bounded_and_leave_room_for_others(root_site: Site) -> None:
    root_site.kill()
    root_site.start(limits=replace(PATIENT, offers_bytes=64 << 20, offers_bytes_per_user=16 << 20))
    before = _manager_mb(root_site, "VmHWM")
    with closing_pipe() as sent, closing_pipe() as over:

        def hold() -> Any:
            raws = _frames_without_end(root_site, 30)  # those that are not refused stay open until the end
            answers = _answers_to(raws)
            os.write(sent[1], b"x")
            os.read(over[0], 1)
            return answers

        held = Child(hold, BOB)
        os.read(sent[0], 1)
        still_works(root_site)
        os.write(over[1], b"x")
        answers = held.result()
    assert len(answers) >= 26
    assert all("too many files of uid" in answer for answer in answers)
    assert _manager_mb(root_site, "VmHWM") - before < 32


def test_too_many_clients_are_told_so(site: Site) -> None:
    site.kill()
    site.start(limits=replace(PATIENT, clients_per_user=3))
    waiting = [RawPlugin(site) for _ in range(3)]
    late = RawPlugin(site)
    assert "busy" in late.answer()["reason"]
    for raw in waiting:
        raw.sock.close()

    def served() -> bool:
        raw = RawPlugin(site)
        with contextlib.suppress(BrokenPipeError):  # who is refused at once may find the socket closed
            raw.offer([("s://h/o", "/p", 1)])
        return raw.answer()["op"] == "go"

    wait_for(served, "a place for the next client")


# ---- what must not be taken ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("control", "reason"),
    [
        ({"facts": {"guard": False}}, "did not consent"),
        ({"facts": {"guard": False, "left_out": "DagNode"}}, "nodes of a DAG"),
        ({"facts": {"encrypted": True}}, "ENCRYPT_EXECUTE_DIRECTORY"),
        ({"facts": {"checkpoint_destination": "https://store.test/out"}}, "a checkpoint"),
        ({"refuse": "the data slot is full"}, "the data slot is full"),
        ({"accept_error": "no room for the ledger"}, "no room for the ledger"),
    ],
)
def test_refusals_reach_the_plugin(site: Site, control: dict[str, Any], reason: str) -> None:
    scratch = site.scratch()
    write_files(scratch, site.user, {"out": b"x"})
    site.tell(**control)
    answer = site.offer(scratch, ["out"])
    assert not answer.accepted and reason in answer.reason
    ended(site)
    site.tell()
    assert site.offer(scratch, ["out"]).accepted


def test_output_beside_the_checkpoints_is_taken(site: Site) -> None:
    scratch = site.scratch()
    write_files(scratch, site.user, {"out": b"x"})
    site.tell(facts={"checkpoint_destination": "https://store.test/ou"})
    assert site.offer(scratch, ["out"]).accepted


def test_an_encrypted_execute_directory_is_respected(site: Site) -> None:
    site.kill()
    site.start(settings={"ENCRYPT_EXECUTE_DIRECTORY": "True"})
    scratch = site.scratch()
    write_files(scratch, site.user, {"out": b"x"})
    assert "ENCRYPT_EXECUTE_DIRECTORY" in site.offer(scratch, ["out"]).reason


def test_a_url_that_no_ledger_can_hold(site: Site) -> None:
    scratch = site.scratch()
    name = os.fsdecode(b"\xff")
    write_files(scratch, site.user, {name: b"x"})
    assert "not UTF-8" in site.offer(scratch, [name]).reason


# ---- the manager stops -----------------------------------------------------------------------------------------------


def test_sigterm_lets_a_hand_off_end(site: Site) -> None:
    scratch = site.scratch()
    write_files(scratch, site.user, {"out": b"x"})
    site.tell(accept_s=1.0)

    def plugin() -> Any:
        raw = RawPlugin(site)
        os.link(scratch / "out", raw.go([("s://h/out", str(scratch / "out"), 1)]) / "0")
        os.write(told, b"x")
        return raw.linked()["op"]

    tell, told = os.pipe()
    child = site.plugin(scratch, plugin)
    os.read(tell, 1)
    for end in (tell, told):
        os.close(end)
    wait_for(lambda: list((site.spool / "sandboxes").iterdir()), "the files in the spool")
    site.stop()
    assert child.result() == "accepted" and len(site.notes("accepted")) == 1
    assert not site.socket.exists()


_BEFORE_RECORD = [
    f"{label}={moment}"
    for label in ("intake-mkdir", "intake-claim", "spool-move")
    for moment in ("kill-before", "kill-after", "EIO")
]


@pytest.mark.parametrize("fault", [*_BEFORE_RECORD, "handoff-reply=kill-before"])
def test_killed_before_the_reply(site: Site, fault: str) -> None:
    """The plugin uploads itself; the next manager holds what was recorded, and nothing else."""
    scratch = site.scratch()
    write_files(scratch, site.user, {"out": b"x"})
    site.kill()
    site.start(faults=fault)
    answer = site.offer(scratch, ["out"])
    assert not answer.accepted and answer.reason
    if "kill" in fault:
        site.wait_killed()
        site.start()
    wait_for(site.is_clean, "a clean spool")
    recorded = [row["ticket"] for row in site.notes("accepted")]
    assert len(recorded) == (1 if fault.startswith("handoff-reply") else 0)
    assert [place.name for place in (site.spool / "sandboxes").iterdir()] == recorded
    if "kill" in fault:
        still_works(site)


def test_killed_after_the_record(site: Site) -> None:
    scratch = site.scratch()
    write_files(scratch, site.user, {"out": b"data"})
    site.kill()
    site.start(faults="handoff-reply=kill-after")
    answer = site.offer(scratch, ["out"])
    site.wait_killed()
    site.start()
    [record] = site.notes("accepted")
    assert (site.spool / "sandboxes" / record["ticket"] / "0").read_bytes() == b"data"
    assert answer.receipt["Ticket"] == record["ticket"]


def test_all_labels_of_a_hand_off_exist() -> None:
    text = (Path(__file__).parents[2] / "docs/developer/durable-steps.md").read_text()
    labels = (
        "intake-mkdir",
        "handoff-link",
        "intake-claim",
        "spool-move",
        "handoff-reply",
        "spool-release",
    )
    assert all(f"`{label}`" in text for label in labels)
    assert durable.parse_faults("spool-move=EIO")
