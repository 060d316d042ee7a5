"""The cost of TLS on the overlay's connections, and of a capability (blocks are then digested with BLAKE2b).

One file from memory to memory over the loopback interface, through the product: a router and ``put`` with two
connections; also through a relay: spliced (plain, and with the sender's TLS to the end), and with TLS between the
routers alone. All ways alternate; medians. The certificate is made here.
"""

from __future__ import annotations

import contextlib
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
from stageout.overlay.channel import Gateway
from stageout.overlay.client import put
from stageout.overlay.key_file import gateway_of
from stageout.overlay.wire.capability import Credential, issue
from tests.harness.router import RouterProcess, relay

_MIB = 1 << 20
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_DAY_S = 86400


@dataclass(frozen=True)
class Run:
    """One transfer. :param sender: router: and relay: seconds of the processor for a GB."""

    rate_mb_s: float
    sender: float
    router: float
    relay: float = 0.0


@dataclass(frozen=True)
class Way:
    """How a file goes. :param relay: through it, None for none. :param against: the way that it is compared with."""

    gateway: Gateway
    relay: RouterProcess | None = None
    against: str = "plain"


def measure(quick: bool) -> list[Figure]:
    """The figures."""
    size_bytes, rounds = (256 * _MIB, 2) if quick else (1024 * _MIB, 5)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        home = Path(folder)
        source = home / "source"
        source.write_bytes(os.urandom(_MIB) * (size_bytes // _MIB))
        with RouterProcess(home / "router", _settings(home)) as router, contextlib.ExitStack() as stack:
            ways = _ways(home, router, stack)
            runs: dict[str, list[Run]] = {name: [] for name in ways}
            for _ in range(rounds):
                for name, way in ways.items():
                    runs[name].append(_run(way, router, source))
    return [figure for name, way in ways.items() if name != way.against for figure in _figures(name, way, runs)]


def _settings(home: Path) -> dict[str, str]:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(home / "ca.pem"))
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(home / "cert.pem"))
    issuer = load_or_make_key("capability-key", home / "issuer.key")
    (home / "issuers").write_text(f"site {issuer.public} /\n")
    return {"STAGEOUT_ROUTER_CERT": str(home / "cert.pem"), "STAGEOUT_ROUTER_ISSUERS": str(home / "issuers")}


def _ways(home: Path, router: RouterProcess, stack: contextlib.ExitStack) -> dict[str, Way]:
    plain = gateway_of("127.0.0.1", router.port, router.key_file("site"))
    holder, issuer = new_key(), load_or_make_key("capability-key", home / "issuer.key")
    terminals = (router.own_address,)
    text = issue(issuer, holder.public, "", ("write",), int(time.time()) + _DAY_S, terminals=terminals)
    covered = dataclasses.replace(plain, ca=str(home / "ca.pem"))
    splicing, covering = (stack.enter_context(relay(home / name, [router])) for name in ("splicing", "covering"))
    covering.stop()
    with (home / "covering" / "hop.key").open("a") as key:
        key.write(f"ca {home / 'ca.pem'}\n")
    covering.start()
    return {
        "plain": Way(plain),
        "TLS": Way(covered),
        "capability": Way(dataclasses.replace(plain, credential=Credential(text, holder))),
        "relay": Way(plain, splicing, "relay"),
        "relay, TLS to the end": Way(covered, covering, "relay"),
        "relay, TLS between routers": Way(plain, covering, "relay"),
    }


def _run(way: Way, router: RouterProcess, source: Path) -> Run:
    before_s, cpu_s, start_s = _cpu_s(router), time.process_time(), time.monotonic()
    relayed_s, routes = _cpu_s(way.relay), [(way.relay.address,)] if way.relay else [()]
    done = put(way.gateway, source, "file", connections=2, routes=routes)
    took_s = time.monotonic() - start_s
    giga = done.size_bytes / 1e9
    spent_s, relayed_s = _cpu_s(router) - before_s, _cpu_s(way.relay) - relayed_s
    (router.root / "file").unlink()
    mine = (time.process_time() - cpu_s) / giga
    return Run(done.size_bytes / took_s / 1e6, mine, spent_s / giga, relayed_s / giga)


def _cpu_s(router: RouterProcess | None) -> float:
    pids = [router.pid, *router.workers()] if router else []
    fields = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(words[11]) + int(words[12]) for words in fields) / _TICKS_PER_S


def _figures(name: str, way: Way, runs: Mapping[str, list[Run]]) -> list[Figure]:
    def median(of: str, what: str) -> float:
        return statistics.median(getattr(run, what) for run in runs[of])

    def figure(words: str, unit: str, what: str) -> Figure:
        return Figure(f"{name}: {words}", median(name, what), unit, way.against, median(way.against, what))

    return [
        figure("rate, 2 connections", "MB/s", "rate_mb_s"),
        figure("sender's processor", "s/GB", "sender"),
        figure("router's processor", "s/GB", "router"),
        *([figure("relay's processor", "s/GB", "relay")] if way.relay else []),
    ]


if __name__ == "__main__":
    sys.exit(main("overlay_tls", measure))
