"""What TLS costs on the overlay's connections, and what a capability costs (blocks are then digested with BLAKE2b).

One file from memory to memory over the loopback interface, through the product: a router and ``put`` with two
connections. All ways alternate; medians. The certificate is made here.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import trustme
from common import Figure, main

from stageout.core.signing import load_or_make_key, new_key
from stageout.overlay.channel import Gateway, gateway_of
from stageout.overlay.client import put
from stageout.testing.router import RouterProcess
from stageout.wire.capability import Credential, issue

_MIB = 1 << 20
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_DAY_S = 86400


@dataclass(frozen=True)
class Run:
    """One transfer. :param sender: and router: seconds of the processor for a GB."""

    rate_mb_s: float
    sender: float
    router: float


def measure(quick: bool) -> list[Figure]:
    """The figures."""
    size_bytes, rounds = (256 * _MIB, 2) if quick else (1024 * _MIB, 5)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        home = Path(folder)
        source = home / "source"
        source.write_bytes(os.urandom(_MIB) * (size_bytes // _MIB))
        with RouterProcess(home / "router", _settings(home)) as router:
            ways = _ways(home, router)
            runs: dict[str, list[Run]] = {name: [] for name in ways}
            for _ in range(rounds):
                for name, gateway in ways.items():
                    runs[name].append(_run(gateway, router, source))
    return [figure for name in ways if name != "plain" for figure in _figures(name, runs)]


def _settings(home: Path) -> dict[str, str]:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(home / "ca.pem"))
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(home / "cert.pem"))
    issuer = load_or_make_key("capability-key", home / "issuer.key")
    (home / "issuers").write_text(f"site {issuer.public} /\n")
    return {"STAGEOUT_ROUTER_CERT": str(home / "cert.pem"), "STAGEOUT_ROUTER_ISSUERS": str(home / "issuers")}


def _ways(home: Path, router: RouterProcess) -> dict[str, Gateway]:
    plain = gateway_of("127.0.0.1", router.port, router.key_file("site"))
    holder, issuer = new_key(), load_or_make_key("capability-key", home / "issuer.key")
    text = issue(issuer, holder.public, "", ("write",), int(time.time()) + _DAY_S)
    return {
        "plain": plain,
        "TLS": dataclasses.replace(plain, ca=str(home / "ca.pem")),
        "capability": dataclasses.replace(plain, credential=Credential(text, holder)),
    }


def _run(gateway: Gateway, router: RouterProcess, source: Path) -> Run:
    pids = [router.pid, *router.workers()]
    before_s, cpu_s, start_s = _cpu_s(pids), time.process_time(), time.monotonic()
    done = put(gateway, source, "file", connections=2)
    took_s = time.monotonic() - start_s
    giga = done.size_bytes / 1e9
    spent_s = _cpu_s(pids) - before_s
    (router.root / "file").unlink()
    return Run(done.size_bytes / took_s / 1e6, (time.process_time() - cpu_s) / giga, spent_s / giga)


def _cpu_s(pids: list[int]) -> float:
    fields = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(words[11]) + int(words[12]) for words in fields) / _TICKS_PER_S


def _figures(name: str, runs: Mapping[str, list[Run]]) -> list[Figure]:
    def median(way: str, what: str) -> float:
        return statistics.median(getattr(run, what) for run in runs[way])

    return [
        Figure(
            f"{name}: rate, 2 connections", median(name, "rate_mb_s"), "MB/s", "plain", median("plain", "rate_mb_s")
        ),
        Figure(f"{name}: sender's processor", median(name, "sender"), "s/GB", "plain", median("plain", "sender")),
        Figure(f"{name}: router's processor", median(name, "router"), "s/GB", "plain", median("plain", "router")),
    ]


if __name__ == "__main__":
    sys.exit(main("overlay_tls", measure))
