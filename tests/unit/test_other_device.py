"""Output that waits survives a start of the machine after which its disk has another number."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from stageout.core.states import State
from tests.unit.manager_site import made, run

needs_loop_devices = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("mkfs.ext4") or not Path("/dev/loop-control").exists(),
    reason="mounts a disk of its own: needs root and loop devices",
)
_SIZE_BYTES = 64 * 1024 * 1024


def _command(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def _attach(image: Path, place: Path) -> str:
    device = _command("losetup", "--find", "--show", str(image))
    _command("mount", device, str(place))
    return device


@needs_loop_devices
def test_output_is_delivered_from_a_disk_that_came_back_under_another_number() -> None:
    with made() as site:
        image, place, devices = site.base / "image", site.base / "spool", list[str]()
        with image.open("wb") as file:
            file.truncate(_SIZE_BYTES)
        _command("mkfs.ext4", "-q", str(image))
        place.mkdir()

        async def before() -> None:
            async with site.manager(moving=False) as node:
                receipt = await node.hand_off({"copy://h/ok/a": b"x"})
                await node.confirm(receipt)

        async def after() -> None:
            async with site.manager() as node:
                await node.until_state(State.RELEASED)

        try:
            devices.append(_attach(image, place))
            run(before())
            number = place.stat().st_dev
            _command("umount", str(place))
            devices.append(_attach(image, place))  # the first loop device is still taken, so this is another
            assert place.stat().st_dev != number, "the test needs another device"
            assert list(place.glob("sandboxes/*/0"))
            run(after())
        finally:
            subprocess.run(["umount", str(place)], check=False)
            for device in devices:
                subprocess.run(["losetup", "--detach", device], check=False)
        assert site.delivered() == ["a"]
