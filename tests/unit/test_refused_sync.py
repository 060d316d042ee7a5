"""A disk takes output into its cache and cannot write it: the kernel says so once, then the file holds zeros."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from manager_site import Site, made, run

from stageout.core.states import State
from tests.overlay.loop_disk import loop_disk, needs_loop_disk
from tests.polling import until

pytestmark = needs_loop_disk
_MB = 1 << 20
_BACKED = "size=24m"
_OUTPUT = b"x" * (35 * _MB)


def _mount(*how: str) -> None:
    subprocess.run(("mount", *how), check=True, capture_output=True)


@pytest.fixture
def thin_disk() -> Iterator[Path]:
    """A filesystem of 96 MB over 24 MB, as one that is thinly provisioned. Yields what is below it."""
    with tempfile.TemporaryDirectory(prefix="stageout-thin-") as name:
        place = Path(name)
        place.chmod(0o755)
        below = place / "below"
        below.mkdir()
        _mount("-t", "tmpfs", "-o", _BACKED, "below", str(below))
        try:
            with loop_disk(below / "image", place / "disk"):
                yield below
        finally:
            subprocess.run(["umount", "-l", str(below)], check=True)


@pytest.fixture
def site(thin_disk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Its ledger is on another disk, which works: else nothing could be sent at all."""
    monkeypatch.setattr(tempfile, "tempdir", str(thin_disk.parent / "disk"))
    with made({"STAGEOUT_SPOOL_QUOTA_MB": "1000"}) as found:
        ledger = found.base / "spool" / "ledger"
        ledger.mkdir(parents=True)
        _mount("-t", "tmpfs", "ledger", str(ledger))
        try:
            yield found
        finally:
            subprocess.run(["umount", "-l", str(ledger)], check=True)


def test_output_that_the_disk_did_not_take_is_lost_and_never_sent(site: Site, thin_disk: Path) -> None:
    async def handed_off() -> None:
        async with site.manager() as node:
            receipt = await node.hand_off({"copy://h/ok/big": _OUTPUT})
            box = await node.until_state(State.LOST)
            assert "No space left on device" in box.reason
            _mount("-o", "remount,size=200m", str(thin_disk))  # from now on every sync succeeds
            await until(lambda: not node.spool.directories(), "its bytes to go")
            await node.confirm(receipt)
            assert node.state() is State.LOST

    async def started_again() -> None:
        async with site.manager() as node:
            assert node.state() is State.LOST

    run(handed_off())
    run(started_again())
    assert site.delivered() == []
