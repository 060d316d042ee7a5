"""A link that is silent for 45 s: what was on its way goes on soon after it is back. Real TCP; needs root."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess
from tests.harness.wide_area import Link, WideArea

_RATE, _MIB = 4e6, 1 << 20
_DOWN_S = 45.0
#: Of these, five are for the bytes. TCP by itself sends lost bytes again 6 to 31 s after such an outage.
_SOON_S = 20.0
_PORT = 9621


class Site:
    """A sender, a relay and a custodian on the near side of a link, their terminal on the far side."""

    def __init__(self, home: Path) -> None:
        self._home, self._stack = home, ExitStack()
        self.area = WideArea(Link(_RATE, 0.05))
        self.end = f"{self.area.far_address}:{_PORT}"
        self.hop, self.custodian = (f"{self.area.near_address}:{_PORT + number}" for number in (1, 2))

    def __enter__(self) -> Site:
        with ExitStack() as stack:
            stack.enter_context(self.area)
            self.terminal = stack.enter_context(self._router("terminal", self.area.far, self.end))
            onward = {"STAGEOUT_ROUTER_NEIGHBOURS": self.end}
            for name, address, further in (
                ("relay", self.hop, {"STAGEOUT_ROUTER_ROOT": ""}),
                ("custodian", self.custodian, {"STAGEOUT_ROUTER_TERMINALS": self.end}),
            ):
                stack.enter_context(self._router(name, self.area.near, address, {**onward, **further}))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _router(
        self, name: str, inside: tuple[str, ...], address: str, further: dict[str, str] | None = None
    ) -> RouterProcess:
        home = self._home / name
        settings = {
            "STAGEOUT_ROUTER_HOST": "0.0.0.0",
            "STAGEOUT_ROUTER_ADDRESS": address,
            "STAGEOUT_ROUTER_KEY": str(home / "carrier.key"),
            "STAGEOUT_ROUTER_WORKERS": "1",
            **(further or {}),
        }
        return RouterProcess(home, settings, int(address.rpartition(":")[2]), wrapper=inside)

    def put(self, *options: str) -> subprocess.Popen[str]:
        """Begin to send something from the near side."""
        key = str(self.terminal.key_file("site"))
        command = [*self.area.near, sys.executable, "-m", "stageout.cli.main", "put", "--key", key, *options]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    if os.geteuid() != 0:
        pytest.fail("needs root: network namespaces")
    with Site(tmp_path) as running:
        yield running


def _by_relay(site: Site, source: Path) -> list[str]:
    return ["--routes", site.hop, str(source / "large"), f"overlay://{site.end}/large"]


def _by_custodian(site: Site, source: Path) -> list[str]:
    return ["--through", site.custodian, str(source / "large"), f"overlay://{site.end}/large"]


def _small_by_custodian(site: Site, source: Path) -> list[str]:
    return ["-r", "--through", site.custodian, str(source / "small"), f"overlay://{site.end}/"]


def _make(source: Path) -> None:
    """Data that take the link some seconds, in one file and in many."""
    (source / "small").mkdir(parents=True)
    (source / "large").write_bytes(os.urandom(24 * _MIB))
    data = os.urandom(20_000)
    for number in range(1200):
        (source / "small" / str(number)).write_bytes(data[: 20_000 - number])


def _is_under_way(site: Site) -> bool:
    """Whether a good part of it has come over the link."""
    rows = subprocess.run([*site.area.far, "cat", "/proc/net/dev"], capture_output=True, text=True, check=True).stdout
    (came,) = (row.split()[1] for row in rows.splitlines() if row.strip().startswith("wan0:"))
    return int(came) > 8 * _MIB


@pytest.mark.pool
@pytest.mark.parametrize("way", [_by_relay, _by_custodian, _small_by_custodian])
def test_what_an_outage_has_stopped_goes_on_when_it_is_over(
    site: Site, tmp_path: Path, way: Callable[[Site, Path], list[str]]
) -> None:
    _make(tmp_path / "source")
    with site.put(*way(site, tmp_path / "source")) as sending:
        wait_until(lambda: _is_under_way(site), timeout_s=60, what="a part of it to arrive")
        site.area.change_rate(0)
        time.sleep(_DOWN_S)  # that is what is tested
        assert sending.poll() is None
        site.area.change_rate(_RATE)
        back_s = time.monotonic()
        said, _ = sending.communicate(timeout=300)
        took_s = time.monotonic() - back_s
    print(f"{way.__name__}: {took_s:.1f} s after the link's return")
    assert sending.returncode == 0, said
    assert took_s < _SOON_S
