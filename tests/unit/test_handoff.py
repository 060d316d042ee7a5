"""The plugin's side of a hand-off, against a real manager process over a real socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from handoff_site import ALICE, BOB, ROOT, Child, Site, needs_root, write_files

from stageout.handoff import client
from stageout.wire import handoff as wire
from tests.polling import wait_for


@pytest.fixture(params=[pytest.param("root", marks=needs_root), "one user"])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    made = Site(one_user=request.param != "root")
    try:
        made.start()
        yield made
    finally:
        made.close()


def test_all_files_are_taken_over_and_the_receipt_says_so(site: Site) -> None:
    scratch = site.scratch()
    write_files(scratch, site.user, {"out1": b"first", "d/e/out2": b"second one"})
    answer = site.offer(scratch, ["out1", "d/e/out2"])
    assert answer.accepted, answer.reason
    [record] = site.notes("accepted")
    assert answer.receipt == {
        "Ticket": record["ticket"], "ManagerName": "sm@ep", "ManagerKey": "", "Files": 2, "Bytes": 15,
    }  # fmt: skip
    assert record["uid"] == site.user and record["plugin"] == "/opt/curl_plugin"
    assert record["files"] == [
        [0, "https://store.test/out/out1", "out1", 5],
        [1, "https://store.test/out/d/e/out2", "d/e/out2", 10],
    ]
    held = site.spool / "sandboxes" / record["ticket"]
    assert (held / "1").read_bytes() == b"second one"
    assert (held / "0").stat().st_ino == (scratch / "out1").stat().st_ino, "it was copied, not linked"
    assert site.is_clean()


def test_layout_of_htcondor_23(site: Site) -> None:
    scratch = site.scratch(inner=False)
    write_files(scratch, site.user, {"d/out": b"x"})
    assert site.offer(scratch, ["d/out"]).accepted
    assert site.notes("accepted")[0]["files"][0][2] == "d/out"


def test_names_of_any_bytes(site: Site) -> None:
    scratch = site.scratch()
    names = ["a b", "new\nline", os.fsdecode(b"caf\xe9"), "ünï", "-rf", "dir_7/scratch/x", "'\";$(id)"]
    write_files(scratch, site.user, {name: b"x" * at for at, name in enumerate(names)})
    requests = [(f"https://store.test/{at}", str(scratch / name)) for at, name in enumerate(names)]
    answer = site.plugin(scratch, lambda: client.offer(requests, "p").reason).result()
    assert answer == ""
    [record] = site.notes("accepted")
    shown = [row[2] for row in record["files"]]
    assert shown[1:3] == ["new\\nline", "caf\\xe9"] and shown[3] == "ünï"
    assert [(site.spool / "sandboxes" / record["ticket"] / str(at)).stat().st_size for at in range(7)] == list(range(7))


def test_ten_thousand_files(site: Site) -> None:
    scratch = site.scratch()
    names = [f"f{number}" for number in range(10_000)]
    write_files(scratch, site.user, {"one": b""})
    for name in names:  # of one file: to make as many takes longer than all the rest
        os.link(scratch / "one", scratch / name)
    answer = site.offer(scratch, names, env={"STAGEOUT_HANDOFF_TIMEOUT": "60"})
    assert answer.accepted and answer.receipt["Files"] == 10_000, answer.reason


def test_links_inside_the_sandbox_are_followed_and_none_leads_out(site: Site) -> None:
    scratch = site.scratch()
    outside = site.base / "outside"
    outside.mkdir()
    write_files(outside, site.user, {"secret": b"s"})
    write_files(scratch, site.user, {"d/real": b"real"})
    (scratch / "inside").symlink_to("d/real")
    (scratch / "file").symlink_to(outside / "secret")
    (scratch / "folder").symlink_to(outside)
    (scratch / "dangling").symlink_to("nothing")
    assert site.offer(scratch, ["inside"]).accepted
    for name in ("file", "folder/secret"):
        answer = site.offer(scratch, ["inside", name])
        assert not answer.accepted and "outside the scratch directory" in answer.reason
    assert not site.offer(scratch, ["dangling"]).accepted
    assert len(site.notes("accepted")) == 1 and site.is_clean()


@pytest.mark.parametrize("kind", ["directory", "fifo", "socket", "missing"])
def test_only_regular_files(site: Site, kind: str) -> None:
    scratch = site.scratch()
    if kind == "directory":
        (scratch / "odd").mkdir()
    elif kind == "fifo":
        os.mkfifo(scratch / "odd")
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(str(scratch / "odd"))
    assert not site.offer(scratch, ["odd"]).accepted
    assert site.notes("accepted") == []


@needs_root
def test_a_file_that_the_user_does_not_own_is_copied() -> None:
    site = Site(one_user=False)
    try:
        site.start()
        scratch = site.scratch()
        (scratch / "roots").write_bytes(b"readable" * 100)
        answer = site.offer(scratch, ["roots"])
        assert answer.accepted, answer.reason
        held = site.spool / "sandboxes" / str(answer.receipt["Ticket"]) / "0"
        assert held.read_bytes() == b"readable" * 100
        assert held.stat().st_ino != (scratch / "roots").stat().st_ino and held.stat().st_uid == ALICE
    finally:
        site.close()


def test_files_are_copied_to_another_filesystem(tmp_path: Path) -> None:
    shared_memory = Path("/dev/shm")
    assert shared_memory.stat().st_dev != Path("/tmp").stat().st_dev, "this test needs a second filesystem"
    spool = shared_memory / f"stageout-test-{os.getpid()}"
    site = Site(one_user=not ROOT, spool=spool)
    try:
        site.start()
        scratch = site.scratch()
        data = os.urandom(40_000_000)
        write_files(scratch, site.user, {"big": data, "empty": b""})
        answer = site.offer(scratch, ["big", "empty"], env={"STAGEOUT_SPOOL": str(spool)})
        assert answer.accepted, answer.reason
        assert (spool / "sandboxes" / str(answer.receipt["Ticket"]) / "0").read_bytes() == data
    finally:
        site.close()
        subprocess.run(["rm", "-rf", str(spool)], check=True)


@pytest.mark.parametrize("spool_name", ["spool", "a spool with spaces"])
def test_the_machines_ad_names_the_spool(spool_name: str, tmp_path: Path) -> None:
    spool = Path(f"/tmp/stageout-told-{os.getpid()}") / spool_name
    spool.parent.mkdir()
    site = Site(one_user=not ROOT, spool=spool)
    try:
        site.start()
        scratch = site.scratch()
        write_files(scratch, site.user, {"a": b"a"})
        assert not site.offer(scratch, ["a"]).accepted
        (scratch / ".machine.ad").write_text(f'Arch = "X86_64"\nStageOutSpool = "{spool}"\nTotalCpus = 8\n')
        answer = site.offer(scratch, ["a"])
        assert answer.accepted, answer.reason
    finally:
        site.close()
        subprocess.run(["rm", "-rf", str(spool.parent)], check=True)


def test_paths_longer_than_a_socket_address() -> None:
    base = Path("/tmp") / f"stageout-long-{os.getpid()}"
    deep = base.joinpath(*["x" * 60] * 4)
    deep.mkdir(parents=True)
    site = Site(one_user=not ROOT, base=deep)
    try:
        site.start()
        scratch = site.scratch()
        write_files(scratch, site.user, {"out": b"x"})
        assert site.offer(scratch, ["out"]).accepted
    finally:
        site.close()
        subprocess.run(["rm", "-rf", str(base)], check=True)


# ---- synchronous, and why --------------------------------------------------------------------------------------------


def test_without_a_manager_nothing_is_loaded_and_nothing_waited_for(tmp_path: Path) -> None:
    scratch = tmp_path / "dir_1" / "scratch"
    scratch.mkdir(parents=True)
    code = (
        "import sys; before = set(sys.modules)\n"
        "from stageout.handoff.client import offer\n"
        "answer = offer([('x://h/f', 'f')], 'p')\n"
        "assert not answer.accepted and 'no sandbox manager' in answer.reason, answer.reason\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    patient = {**os.environ, "STAGEOUT_HANDOFF_TIMEOUT": "3600"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=scratch, env=patient, capture_output=True, text=True, check=True, timeout=60)
    heavy = {"socket", "json", "dataclasses", "hashlib", "sqlite3", "asyncio", "pathlib", "stageout.wire.handoff"}
    assert not heavy & set(done.stdout.split())


def test_a_manager_that_is_gone(site: Site) -> None:
    scratch = site.scratch()
    write_files(scratch, site.user, {"out": b"x"})
    site.kill()
    assert site.offer(scratch, ["out"]).reason == "the sandbox manager is not running"
    site.socket.unlink()
    assert site.offer(scratch, ["out"]).reason == "the sandbox manager is not running"


def test_the_managers_own_transfers_are_not_offered(site: Site) -> None:
    scratch = site.scratch()
    write_files(scratch, site.user, {"out": b"x"})
    assert not site.offer(scratch, ["out"], env={"STAGEOUT_MOVER": "1"}).accepted


@pytest.mark.parametrize("speak", [b"", b"\0", b"\xff\xff\xff\xff", b"\0\0\0\2[]", b'\0\0\0\x0b{"op":"go"}'])
def test_a_manager_that_hangs_or_talks_nonsense_costs_the_limit_at_most(site: Site, speak: bytes) -> None:
    scratch = site.scratch()
    write_files(scratch, site.user, {"out": b"x"})
    site.kill()
    listener = socket.socket(socket.AF_UNIX)
    site.socket.unlink()
    listener.bind(str(site.socket))
    site.socket.chmod(0o666)
    listener.listen()

    def talk() -> None:
        connection, _ = listener.accept()
        connection.sendall(speak)
        time.sleep(60)

    manager = Child(talk, site.manager_uid)
    try:
        start_s = time.monotonic()
        answer = site.offer(scratch, ["out"], env={"STAGEOUT_HANDOFF_TIMEOUT": "0.5"})
        assert not answer.accepted and answer.reason
        assert time.monotonic() - start_s < 20, "as long as the manager hangs"
    finally:
        manager.kill()
        listener.close()


@needs_root
def test_files_go_to_no_impostor() -> None:
    site = Site(one_user=False)
    try:
        (site.spool / "run").mkdir(parents=True, mode=0o755)
        listener = socket.socket(socket.AF_UNIX)

        def listen() -> bytes:
            listener.listen()
            os.write(ready, b"x")
            connection, _ = listener.accept()
            return connection.recv(100)

        listener.bind(str(site.socket))
        site.socket.chmod(0o666)
        scratch = site.scratch()
        write_files(scratch, ALICE, {"out": b"x"})
        is_ready, ready = os.pipe()
        bob = Child(listen, BOB)
        os.read(is_ready, 1)
        for end in (is_ready, ready):
            os.close(end)
        answer = site.offer(scratch, ["out"])
        assert f"belongs to uid {BOB}" in answer.reason
        assert bob.result() == b"", "something was said to the impostor"
    finally:
        site.close()


def test_no_receipt_in_time_means_not_accepted(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_ACCEPT_S", 0.3)
    scratch = site.scratch()
    write_files(scratch, site.user, {"out": b"x"})
    site.tell(accept_s=1.5)
    answer = site.offer(scratch, ["out"])
    assert not answer.accepted and "until it accepted the files" in answer.reason
    # The manager may have it on record all the same: no run that completes will ever name this ticket.
    wait_for(lambda: site.notes("accepted"), "the record")


def test_the_manager_is_slow_to_agree(site: Site) -> None:
    scratch = site.scratch()
    write_files(scratch, site.user, {"out": b"x"})
    site.tell(identify_s=1.0)
    answer = site.offer(scratch, ["out"], env={"STAGEOUT_HANDOFF_TIMEOUT": "0.3"})
    assert not answer.accepted and "needed more than 0.3" in answer.reason
    site.stop()
    assert site.notes("accepted") == [] and site.notes("reserved") == [0] and site.is_clean()


@pytest.mark.parametrize("moment", ["kill-before", "kill-after"])
def test_a_plugin_that_dies_while_linking_leaves_nothing(site: Site, moment: str) -> None:
    scratch = site.scratch()
    write_files(scratch, site.user, {"a": b"x", "b": b"y"})
    requests = [(f"https://s/{name}", str(scratch / name)) for name in ("a", "b")]
    faults = {"STAGEOUT_FAULTS": f"handoff-link={moment}"}
    assert site.plugin(scratch, lambda: client.offer(requests, "p").reason, env=faults).result() is None
    wait_for(site.is_clean, "the end of the hand-off")
    assert site.offer(scratch, ["a", "b"]).accepted


def test_a_full_disk_while_linking_is_an_answer(site: Site) -> None:
    scratch = site.scratch()
    write_files(scratch, site.user, {"a": b"x"})
    answer = site.offer(scratch, ["a"], env={"STAGEOUT_FAULTS": "handoff-link=ENOSPC"})
    assert not answer.accepted and "No space left" in answer.reason
    wait_for(site.is_clean, "the end of the hand-off")


def test_names_of_sockets_do_not_depend_on_symbolic_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert wire.socket_name(str(tmp_path / "link")) == wire.socket_name(str(tmp_path / "real"))
    assert wire.socket_name(str(tmp_path / "link")) != wire.socket_name(str(tmp_path))
