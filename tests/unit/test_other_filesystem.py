"""Output of a job whose directory is another filesystem than the spool: room is asked for, and time is bounded."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sandbox_manager.intake import listener
from sandbox_manager.scheduling import deadlines
from sandbox_manager.scheduling.deadlines import Observed
from sandbox_manager.scheduling.rates import Rates, ServerRate
from stageout.cli.doctor.probe import try_handoff
from stageout.core.config import mapping_settings
from stageout.core.eta import FILE_BYTES
from stageout.handoff import links
from stageout.wire import handoff as wire
from tests.polling import wait_for
from tests.unit.handoff_site import ROOT, RawPlugin, Site, write_files

MIB = 1 << 20
needs_mounts = pytest.mark.skipif(
    not ROOT or not Path("/dev/loop-control").exists(), reason="mounts filesystems of its own: needs root"
)


@contextmanager
def mounted(place: Path, *command: str) -> Iterator[None]:
    owner, mode = place.stat(), place.stat().st_mode & 0o7777
    subprocess.run(["mount", *command, str(place)], check=True)
    try:
        os.chown(place, owner.st_uid, owner.st_gid)
        place.chmod(mode)
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture(params=["root", "pilot"])
def site(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A node with a job whose scratch directory is a tmpfs. No copy is too short to be compared with sending."""
    monkeypatch.setattr(listener, "_LEAST_COPY_S", 1e-6)
    made = Site(request.param == "pilot")
    try:
        with mounted(made.scratch(), "-t", "tmpfs", "-o", "size=80m", "tmpfs"):
            made.start()
            yield made
    finally:
        made.close()


def scratch(site: Site) -> Path:
    return site.execute / "dir_100" / "scratch"


@needs_mounts
def test_output_is_copied_after_room_was_reserved_for_it(site: Site) -> None:
    data = {"a": os.urandom(3 * MIB + 17), "b": b"", "c": b"c" * 100}
    write_files(scratch(site), site.user, data)
    answer = site.offer(scratch(site), list(data))
    assert answer.accepted, answer.reason
    assert site.notes("copy") == [3 * MIB + 117]
    held = site.spool / "sandboxes" / str(answer.receipt["Ticket"])
    assert [(held / str(position)).read_bytes() for position in range(3)] == list(data.values())
    assert (held / "0").stat().st_mode & 0o777 == 0o600


@needs_mounts
def test_only_what_cannot_be_linked_needs_room(site: Site) -> None:
    """The job's directory is the spool's filesystem, and one of its directories is another."""
    place = site.scratch(number=200)
    inner = place / "big"
    inner.mkdir()
    os.chown(inner, site.user, site.user)
    with mounted(inner, "-t", "tmpfs", "tmpfs"):
        write_files(place, site.user, {"a": b"a" * 100, "big/b": b"b" * 30})
        answer = site.offer(place, ["a", "big/b"])
    assert answer.accepted, answer.reason
    assert site.notes("copy") == [30]
    held = site.spool / "sandboxes" / str(answer.receipt["Ticket"])
    assert (held / "0").stat().st_ino == (place / "a").stat().st_ino


@needs_mounts
def test_without_room_nothing_is_copied(site: Site) -> None:
    site.tell(refuse_copy="no room there")
    write_files(scratch(site), site.user, {"out": b"x" * MIB})
    answer = site.offer(scratch(site), ["out"])
    assert not answer.accepted and answer.reason == "no room there"
    site.stop()
    assert site.notes("accepted") == [] and site.is_clean()


@needs_mounts
def test_a_copy_that_would_take_longer_than_sending_is_given_up(site: Site) -> None:
    site.tell(sending_s=0.0)
    write_files(scratch(site), site.user, {"out": b"x" * (20 * MIB)})
    answer = site.offer(scratch(site), ["out"])
    assert not answer.accepted and "copy of 21.0 MB would take longer than" in answer.reason
    site.stop()
    assert site.notes("accepted") == [] and site.is_clean()


@needs_mounts
@pytest.mark.parametrize(
    "messages",
    [
        [{"op": "copy"}],
        [{"op": "copy", "size_bytes": -1}],
        [{"op": "copy", "size_bytes": 11}],
        [{"op": "copy", "size_bytes": 10}, {"op": "copy", "size_bytes": 10}],
        [{"op": "too-slow"}],
    ],
)
def test_messages_that_are_not_in_the_protocol_are_refused(site: Site, messages: list[dict[str, Any]]) -> None:
    place = scratch(site)
    write_files(place, site.user, {"out": b"x" * 10})

    def plugin() -> list[str]:
        raw = RawPlugin(site)
        raw.go([("s://h/out", str(place / "out"), 10)])
        answers = []
        for message in messages:
            wire.send_frame(raw.sock, message)
            answers.append(str(raw.answer()["op"]))
        return answers

    assert site.plugin(place, plugin).result() == ["go"] * (len(messages) - 1) + ["refuse"]
    wait_for(site.is_clean, "the end of the hand-off")


@pytest.fixture
def site_with_small_spool() -> Iterator[Site]:
    """A node whose spool is a filesystem of 8 MiB."""
    made = Site(one_user=False)
    try:
        made.spool.mkdir()
        with mounted(made.spool, "-t", "tmpfs", "-o", "size=8m", "tmpfs"):
            made.start()
            yield made
            made.stop()
    finally:
        made.close()


@needs_mounts
def test_the_copy_finds_the_disk_full(site_with_small_spool: Site) -> None:
    """Another process took the room that was free a moment ago: the plugin is told, and nothing is left."""
    site = site_with_small_spool
    place = site.scratch()
    write_files(place, site.user, {"out": b"x" * (9 * MIB)})
    answer = site.offer(place, ["out"])
    assert not answer.accepted and "No space left" in answer.reason
    wait_for(site.is_clean, "the end of the hand-off")
    assert site.notes("accepted") == []


@needs_mounts
def test_the_doctor_s_probe_is_copied_too(site_with_small_spool: Site) -> None:
    site = site_with_small_spool
    site.tell(strangers=[0])
    settings = mapping_settings({"EXECUTE": str(site.execute), "STAGEOUT_SPOOL": str(site.spool)})
    assert try_handoff(settings, "ap", "p") == ""
    assert len(site.notes("copy")) == 1
    wait_for(site.is_clean, "the end of the probe")


@pytest.mark.parametrize("ways", ["kernel", "read and write"])
def test_both_ways_of_copying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ways: str) -> None:
    if ways != "kernel":
        monkeypatch.setattr(links, "_ranged", lambda reading, writing: 0)
    data = os.urandom(2 * MIB + 5)
    (tmp_path / "out").write_bytes(data)
    (tmp_path / "intake").mkdir()
    found = links.sources([str(tmp_path / "out")], str(tmp_path))
    links.copy(found, [0], str(tmp_path / "intake"), 60.0, lambda: None)
    assert (tmp_path / "intake" / "0").read_bytes() == data


def test_a_file_that_grows_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"x" * 10)
    (tmp_path / "intake").mkdir()
    found = links.sources([str(tmp_path / "out")], str(tmp_path))
    (tmp_path / "out").write_bytes(b"x" * (5 * MIB))
    links.copy(found, [0], str(tmp_path / "intake"), 60.0, lambda: None)
    assert 10 < (tmp_path / "intake" / "0").stat().st_size <= MIB


def test_a_slow_copy_is_given_up_at_its_first_steps(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"x" * (8 * MIB))
    (tmp_path / "intake").mkdir()
    found = links.sources([str(tmp_path / "out")], str(tmp_path))
    with pytest.raises(links.TooSlow):
        links.copy(found, [0], str(tmp_path / "intake"), 1e-6, lambda: None)
    assert (tmp_path / "intake" / "0").stat().st_size <= MIB


def test_sending_is_estimated_at_the_slowest_server_s_rate() -> None:
    rates, now, rate = Rates(), 1_800_000_000.0, 50e6
    rates._rates = {"https://slow": _known(rate, now), "https://quick": _known(2 * rate, now)}
    work_bytes = 49_000_000 + FILE_BYTES
    assert rates.sending_s({"https://quick"}, 1, 49_000_000, now) == pytest.approx(work_bytes / rate / 2)
    assert rates.sending_s({"https://quick", "https://slow"}, 1, 49_000_000, now) == pytest.approx(work_bytes / rate)
    assert rates.sending_s({"https://quick", "https://new"}, 1, 49_000_000, now) == math.inf
    assert rates.sending_s({"https://slow"}, 1, 49_000_000, now + 2 * deadlines.OLD_S) == math.inf


def _known(rate_bytes_s: float, now: float) -> ServerRate:
    return ServerRate(Observed(math.log(rate_bytes_s), 0.1, now))


@needs_mounts
@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
def test_blocks_are_shared_where_the_filesystem_can(tmp_path: Path, kind: str) -> None:
    image, place = tmp_path / "image", tmp_path / "disk"
    with image.open("wb") as stream:
        stream.truncate(400 * MIB)
    subprocess.run([f"mkfs.{kind}", "-q", str(image)], check=True)
    place.mkdir()
    with mounted(place, "-o", "loop", str(image)):
        (place / "out").write_bytes(os.urandom(60 * MIB))
        (place / "intake").mkdir()
        os.sync()
        free_bytes = _free_bytes(place)
        (found,) = links.sources([str(place / "out")], str(place))
        found.own = False  # so that it is not linked
        assert links.bring([found], str(place / "intake"), lambda: None) == []
        os.sync()
        assert free_bytes - _free_bytes(place) < 10 * MIB
        assert (place / "intake" / "0").read_bytes() == (place / "out").read_bytes()


def _free_bytes(place: Path) -> int:
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize
