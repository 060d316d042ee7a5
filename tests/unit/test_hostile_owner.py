"""A job's owner who does not play fair: with the files, with the directories, with the socket."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from handoff_site import ALICE, BOB, ROOT, Child, RawPlugin, Site, needs_root, site_for, write_files
from manager_site import UID, made, run

from sandbox_manager.custody.spool import Spool
from stageout.core.states import State
from stageout.movers import trees
from tests.polling import until, wait_for

SIZE = 10


# ---- files that change after they were handed off --------------------------------------------------------------------


def _write_back(path: Path) -> None:
    """Other content of the same size, and the times of before."""
    before = path.stat()
    path.write_bytes(b"y" * before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _unlink(path: Path) -> None:
    path.unlink()


def _write_back_and_unlink(path: Path) -> None:
    _write_back(path)
    path.unlink()


@pytest.mark.parametrize(
    ("trick", "state", "puts"),
    [
        (_write_back, State.FAILED, 1),
        (_unlink, State.RELEASED, 2),
        (_write_back_and_unlink, State.RELEASED, 2),
    ],
)
def test_what_happens_to_another_name_of_a_file_while_it_is_sent(
    trick: Callable[[Path], None], state: State, puts: int
) -> None:
    """The owner has kept a second name: with the times set back only the ctime tells, and it must be looked at."""
    with made() as site:

        async def story() -> None:
            async with site.manager() as node:
                site.flag("hold")
                receipt = await node.hand_off({"copy://h/wait/a": b"x" * SIZE})
                other = site.base / "other"
                os.link(node.spool.path(receipt.ticket, 0), other)
                await node.confirm(receipt)
                await until((site.base / "waiting").exists, "the plugin at work")
                trick(other)
                site.flag("hold", up=False)
                await until(lambda: node.state() is state, lambda: f"{node.box()}")
                if state is State.FAILED:
                    assert "changed after the job had ended" in node.box().reason

        run(story())
        assert site.delivered() == ["a"] * puts, "never called delivered without a look that leaves no doubt"


# ---- files that others delete ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "while", "after a part"])
def test_output_whose_file_is_gone_from_the_spool_is_lost(when: str) -> None:
    """Nobody could deliver it by hand, so its job runs again; as it does when that is found out at a start."""
    with made() as site:

        async def story() -> None:
            async with site.manager() as node:
                site.flag("hold")
                urls = {"copy://h/ok/a": b"x"} if when == "before" else {"copy://h/wait/a": b"x"}
                receipt = await node.hand_off(urls | ({"copy://other/busy/b": b"x"} if when == "after a part" else {}))
                gone = node.spool.path(receipt.ticket, 0)
                if when == "before":
                    gone.unlink()
                await node.confirm(receipt)
                if when != "before":
                    await until((site.base / "waiting").exists, "the plugin at work")
                    gone.unlink()
                site.flag("hold", up=False)
                box = await node.until_state(State.LOST)
                assert box.reason.startswith("a is gone from the spool")
                await until(lambda: not node.spool.directories(), "the rest is removed")

        run(story())
        assert site.delivered() == []


def test_a_spool_that_is_away_for_a_while_loses_nothing() -> None:
    """A filesystem that is not mounted says of every file that there is none."""
    with made() as site:

        async def story() -> None:
            async with site.manager() as node:
                receipt = await node.hand_off({"copy://h/ok/a": b"x"})
                place = node.spool.root / "sandboxes"
                place.rename(node.spool.root / "away")
                await node.confirm(receipt)
                box = await node.until_state(State.RETRY_WAIT)
                assert "mounted" in box.reason
                (node.spool.root / "away").rename(place)
                await node.until_state(State.RELEASED)

        run(story())


# ---- who can reach what is in custody --------------------------------------------------------------------------------


def _can_open(path: Path, uid: int, gid: int) -> bool:
    def look() -> bool:
        try:
            os.close(os.open(path, os.O_RDONLY))
        except OSError:
            return False
        return True

    def as_user() -> bool:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
        return look()

    return bool(Child(as_user, 0).result())


@needs_root
def test_only_a_mover_reaches_the_files_by_their_path() -> None:
    """Neither the owner's other processes nor others of a shared primary group, who know the ticket."""
    with made() as site:

        async def story() -> None:
            async with site.manager() as node:
                site.flag("hold")
                receipt = await node.hand_off({"copy://h/wait/a": b"x" * SIZE})
                path = node.spool.path(receipt.ticket, 0)
                path.chmod(0o644)
                assert not _can_open(path, UID, UID), "the owner, as who he is outside a mover"
                assert not _can_open(path, UID + 1, UID), "another user with the same primary group"
                await node.confirm(receipt)
                await until((site.base / "waiting").exists, "the plugin at work")
                assert not _can_open(path, UID + 1, UID)
                site.flag("hold", up=False)
                await node.until_state(State.RELEASED)

        run(story())
        (call,) = site.calls()
        assert call["uid"] == UID
        assert site.delivered() == ["a"]


@needs_root
def test_where_groups_cannot_be_made_up_the_owners_group_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container whose user namespace maps few groups."""
    real = os.chown

    def chown(path: Any, uid: int, gid: int, **more: Any) -> None:
        if gid > 1 << 20:
            raise OSError(22, "Invalid argument")
        real(path, uid, gid, **more)

    monkeypatch.setattr(os, "chown", chown)
    with made() as site:

        async def story() -> None:
            async with site.manager() as node:
                receipt = await node.hand_off({"copy://h/ok/a": b"x" * SIZE})
                assert node.spool.path(receipt.ticket, 0).parent.stat().st_gid == UID
                await node.confirm(receipt)
                await node.until_state(State.RELEASED)

        run(story())
        assert site.delivered() == ["a"]


# ---- tricks with links, below a root manager and where all is one user -----------------------------------------------


@pytest.fixture(params=[pytest.param("root", marks=needs_root), "one user"])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    found = Site(one_user=request.param != "root")
    try:
        found.start()
        yield found
    finally:
        found.close()


@pytest.fixture
def root_site() -> Iterator[Site]:
    found = Site(one_user=False)
    try:
        found.start()
        yield found
    finally:
        found.close()


_PROTECTED = Path("/proc/sys/fs/protected_hardlinks")


@contextlib.contextmanager
def _protected_hardlinks(on: bool) -> Iterator[None]:
    before = _PROTECTED.read_text()
    _PROTECTED.write_text("1" if on else "0")
    try:
        yield
    finally:
        _PROTECTED.write_text(before)


@needs_root
@pytest.mark.parametrize("protected", [True, False])
def test_hard_links_to_files_of_others_are_not_taken(root_site: Site, protected: bool) -> None:
    """With fs.protected_hardlinks off the kernel lets anybody link anything; it is the owner that counts."""
    try:
        guard = _protected_hardlinks(protected)
        guard.__enter__()
    except OSError:
        pytest.skip("this container may not set fs.protected_hardlinks")
    try:
        scratch = root_site.scratch()
        write_files(scratch, ALICE, {"own": b"mine"})
        write_files(scratch, BOB, {"bobs": b"secret"})
        write_files(scratch, 0, {"roots": b"hash"})
        for name in ("bobs", "roots"):

            def hand_off(name: str = name) -> dict[str, Any]:
                plugin = RawPlugin(root_site)
                place = plugin.go([("s://h/0", str(scratch / name), 4 if name == "roots" else 6)])
                try:
                    os.link(scratch / name, place / "0")
                except PermissionError:
                    return {"op": "refuse", "reason": "the kernel"}
                return plugin.linked()

            answer = root_site.plugin(scratch, hand_off, uid=ALICE).result()
            assert answer["op"] == "refuse"
            assert protected or "belongs to uid" in answer["reason"]
        assert root_site.notes("accepted") == []
        wait_for(root_site.is_clean, "the end")
    finally:
        guard.__exit__(None, None, None)


def test_names_that_are_swapped_all_the_time(site: Site) -> None:
    """A thread renames, replaces and links while the manager looks: what was offered is recorded, or nothing."""
    scratch = site.scratch()
    write_files(scratch, site.user, {"out": b"0123456789", "other": b"x"})

    def attack() -> list[dict[str, Any]]:
        plugin = RawPlugin(site)
        place = plugin.go([("s://h/0", str(scratch / "out"), SIZE)])
        os.link(scratch / "out", place / "0")
        going = threading.Event()

        def swap() -> None:
            handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            (place / "evil").symlink_to("/etc/passwd")
            while not going.is_set():
                for name in ("evil", "1", "other"):
                    with contextlib.suppress(OSError):
                        os.rename("0", name, src_dir_fd=handle, dst_dir_fd=handle)
                        os.symlink("/etc/passwd", "0", dir_fd=handle)
                        os.unlink("0", dir_fd=handle)
                        os.link(scratch / "other", "0", dst_dir_fd=handle)
                        os.rename(name, "0", src_dir_fd=handle, dst_dir_fd=handle)

        thread = threading.Thread(target=swap)
        thread.start()
        try:
            return [plugin.linked()]
        except (OSError, EOFError):
            return []
        finally:
            going.set()
            thread.join()

    for _ in range(5):
        site.plugin(scratch, attack).result()
    held = {row["ticket"] for row in site.notes("accepted")}
    for ticket in held:
        path = site.spool / "sandboxes" / ticket / "0"
        assert path.is_file() and not path.is_symlink()
        assert path.stat().st_size == SIZE
        assert sorted(entry.name for entry in path.parent.iterdir()) == ["0"] or site.one_user
    if site.one_user:  # who is the same user can add names while they are removed: strays go at the next start
        site.kill()
        site.start()
    wait_for(site.is_clean, "nothing is left")


def test_a_directory_stuffed_with_names_costs_little_and_goes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "_AT_ONCE", 100)
    scratch = site.scratch()
    write_files(scratch, site.user, {"out": b"x"})

    def attack() -> dict[str, Any]:
        plugin = RawPlugin(site)
        place = plugin.go([("s://h/0", str(scratch / "out"), 1)])
        os.link(scratch / "out", place / "0")
        with contextlib.suppress(OSError):  # the manager takes the directory away as soon as it has seen the names
            for number in range(1_050):
                (place / f"n{number}").symlink_to("x")
        with contextlib.suppress(OSError):
            return plugin.linked()
        return plugin.answer()

    answer = site.plugin(scratch, attack).result()
    assert "names were linked where 1 files were offered" in answer["reason"]
    wait_for(site.is_clean, "the names are gone")


def test_growing_and_sparse_files(site: Site) -> None:
    scratch = site.scratch()
    write_files(scratch, site.user, {"grows": b"x", "sparse": b""})
    os.truncate(scratch / "sparse", 1 << 40)
    answer = site.offer(scratch, ["sparse"])
    assert answer.accepted, "a hole costs nothing, and its size is said truly"
    assert site.notes("accepted")[-1]["files"][0][3] == 1 << 40

    def attack() -> dict[str, Any]:
        plugin = RawPlugin(site)
        place = plugin.go([("s://h/0", str(scratch / "grows"), 1)])
        os.link(scratch / "grows", place / "0")
        with open(scratch / "grows", "ab") as stream:
            stream.write(b"more")
        return plugin.linked()

    assert "it still changes" in site.plugin(scratch, attack).result()["reason"]


@needs_root
def test_the_ticket_of_another_opens_nothing(root_site: Site) -> None:
    scratch = root_site.scratch()
    write_files(scratch, ALICE, {"out": b"x"})
    offered: list[Any] = [("s://h/0", str(scratch / "out"), 1)]
    alice = RawPlugin(root_site)

    def identify_as(uid: int) -> None:
        root_site.tell(facts={"uid": uid, "gid": uid, "user": f"u{uid}", "owner": f"u{uid}@test"})

    identify_as(ALICE)
    place = alice.go(offered)

    def bob() -> list[str]:
        caught = []
        for work in (
            lambda: list(place.iterdir()),
            lambda: (place / "0").symlink_to("/etc/passwd"),
            lambda: place.rename(place.with_name("x")),
            place.rmdir,
            lambda: list(place.parent.iterdir()),
        ):
            try:
                work()
            except PermissionError:
                caught.append("refused")
        return caught

    assert Child(bob, BOB).result() == ["refused"] * 5
    alice.sock.close()
    wait_for(root_site.is_clean, "the end")


# ---- tricks with the socket ------------------------------------------------------------------------------------------


def _local_user(work: Callable[[], Any], site: Site) -> Child:
    return Child(work, BOB if ROOT and not site.one_user else site.user)


def test_ten_thousand_connections_leave_nothing_behind() -> None:
    """A local user opens what he can. Meanwhile plugins may have to upload themselves; afterwards all is as before."""
    with site_for(one_user=not ROOT) as site:
        _flood(site)


def _flood(site: Site) -> None:

    def flood() -> int:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 11_000), hard))
        kept: list[socket.socket] = []
        opened = 0
        for _ in range(10_000):
            talk = socket.socket(socket.AF_UNIX)
            talk.connect(str(site.socket))
            opened += 1
            kept.append(talk)
            if len(kept) > 900:
                for old in kept[:450]:
                    old.close()
                del kept[:450]
        return opened

    scratch = site.scratch()
    write_files(scratch, site.user, {"out": b"x"})
    flooding = _local_user(flood, site)
    assert flooding.result() == 10_000
    wait_for(lambda: site.offer(scratch, ["out"]).accepted, "a hand-off after the flood")


@pytest.mark.parametrize("said", [b"", b"\0", b"\0\0\1\0"], ids=["nothing", "a byte", "bytes"])
def test_a_client_that_says_next_to_nothing_is_dropped(site: Site, said: bytes) -> None:
    """Slow drips do not prolong a frame: it has its time as a whole."""

    def drip() -> str:
        talk = socket.socket(socket.AF_UNIX)
        talk.settimeout(20)
        talk.connect(str(site.socket))
        try:
            talk.sendall(said)
        except ConnectionError:  # time has passed meanwhile
            return "dropped"
        ended = threading.Event()

        def keep_on() -> None:
            with contextlib.suppress(OSError):
                while not ended.is_set():
                    talk.send(b"\1")
                    time.sleep(0.05)

        thread = threading.Thread(target=keep_on if said else ended.wait)
        thread.start()
        try:
            return repr(talk.recv(10))
        except ConnectionError:
            return "dropped"
        finally:
            ended.set()
            thread.join()

    dripping = _local_user(drip, site)
    while not dripping.has_ended():
        site.let_time_pass()
    assert dripping.result() in ("b''", "dropped")


def test_reading_a_stuffed_directory_stops_early(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / str(number)).touch()
    with trees.opened(tmp_path) as directory:
        assert len(trees.names(directory, 10)) == 10
        assert len(trees.names(directory)) == 50


def test_groups_of_movers_are_nobody_elses() -> None:
    assert Spool.private_group(1000) != Spool.private_group(1001)
    assert Spool.private_group(0xFFFFFFF0) is None, "such an account has no group of its own"
    assert ctypes.sizeof(ctypes.c_uint32) == 4 and (Spool.private_group(1000) or 0) < 2**32 - 2
