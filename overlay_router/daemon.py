"""The process: settings, signals, the listening socket. A child of condor_master, or alone (a site gateway)."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import gc
import importlib.util
import os
import signal
import socket
import sqlite3
import ssl
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlay_router import report, verify
from overlay_router.copying.copies import Copies, CopyStore
from overlay_router.custodians.custodian import Custodian
from overlay_router.custodians.forwarder import Forwarding
from overlay_router.custodians.spool import CustodyStore, EgressStore
from overlay_router.delivery.egress import Egress
from overlay_router.delivery.leases import Leases
from overlay_router.delivery.lessee import Lessee
from overlay_router.delivery.outflow import Means
from overlay_router.ends import Ends
from overlay_router.local.destination import Destination
from overlay_router.local.makers import Makers
from overlay_router.local.place import reason_against
from overlay_router.local.store import Store
from overlay_router.local.tree import Tree
from overlay_router.peers.circuits import Neighbours
from overlay_router.peers.cover import Cover
from overlay_router.peers.deposits import Terminals, read_terminals
from overlay_router.peers.keys import Credential, OwnCredential, add_key, read_credential, read_keys
from overlay_router.peers.rights import Rights, read_issuers
from overlay_router.relay import Router
from overlay_router.routing.book import Book
from overlay_router.routing.directory import Directory
from overlay_router.routing.identity import identity, keep
from overlay_router.routing.neighbours import INTERVALS_TO_AGE, Neighbourhood
from overlay_router.rules.lots import Spool
from stageout import __version__
from stageout.core import log
from stageout.core.clock import SystemClock, boot_clock_s
from stageout.core.collector import CollectorChild
from stageout.core.config import (
    ConfigError,
    Settings,
    condor_settings,
    environment_settings,
    file_settings,
    misspelt,
    reload_condor,
)
from stageout.core.ending import end
from stageout.core.errors import StageoutError
from stageout.movers.plugins_table import PLUGIN_LIFETIME_S
from stageout.overlay.channel import Gateway
from stageout.overlay.uplink import Uplink, uplink_at
from stageout.wire.egress import BadEgress, read_targets
from stageout.wire.fields import MAX_LINKS
from stageout.wire.route import BadRoute, address, addresses, written

EXIT_NO_RESTART = 99
"""condor_master does not start a daemon again that exits with this status."""
#: Among the neighbours: all routers that are found through the collector.
_FOUND = "collector"
_LESSOR_SILENCE_S = 10.0
#: Bytes a second with which some tens of connections still move within the time after which peers give up.
_LEAST_UPLINK = 50_000.0
#: What a directory is refused with that another start finds no better.
_NOT_TO_BE_HAD = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.EEXIST, errno.ENOTDIR})
#: A root that is away is looked for after so long, and spoken of.
_ROOT_AGAIN_S, _SAID_AGAIN_S = 1.0, 60.0
#: New objects after which Python looks for those that hold each other.
_OBJECTS_TO_LOOK = 20_000


@dataclass(frozen=True)
class Place:
    """Where a router works. :param root: files arrive below it. :param records: its database."""

    root: Path
    records: Path


def place_of(settings: Settings) -> Place | None:
    """Root and database, None where no files arrive. :raises ConfigError: one is missing, or nothing is to do."""
    root = settings.text("STAGEOUT_ROUTER_ROOT")
    others = ("STAGEOUT_ROUTER_NEIGHBOURS", "STAGEOUT_ROUTER_TERMINALS", "STAGEOUT_ROUTER_EGRESS")
    if not root and any(settings.text(name) for name in others):
        return None
    if not root:
        raise ConfigError(
            "STAGEOUT_ROUTER_ROOT is not set: name the directory below which files arrive, neighbours for a relay"
            " (STAGEOUT_ROUTER_NEIGHBOURS), or terminals for a custodian (STAGEOUT_ROUTER_TERMINALS)"
        )
    if not Path(root).is_dir():
        raise ConfigError(f"STAGEOUT_ROUTER_ROOT = {root}: there is no such directory: make it, or mount it")
    return Place(Path(root), home_of(settings) / "router.sqlite")


def home_of(settings: Settings) -> Path:
    """Directory of the records. :raises ConfigError: it is not named."""
    return Path(settings.path("STAGEOUT_ROUTER_DIR"))


def credential_of(settings: Settings) -> Credential:
    """What this router shows to others; nothing where it connects to nobody. :raises BadKeys: it cannot be used."""
    others = ("STAGEOUT_ROUTER_NEIGHBOURS", "STAGEOUT_ROUTER_TERMINALS", "STAGEOUT_ROUTER_EGRESS_LEASES")
    if not any(settings.text(name) for name in others):
        return Credential()
    return read_credential(Path(settings.text("STAGEOUT_ROUTER_KEY")))


def _made(place: Path) -> Path:
    """A directory of the records, made where it is missing. :raises ConfigError: it cannot be."""
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as problem:
        if problem.errno not in _NOT_TO_BE_HAD:
            raise
        why = f"{problem.filename}: {problem.strerror}; make it, so that this router's user may write there"
        raise ConfigError(f"STAGEOUT_ROUTER_DIR: {why}") from None
    return place


def neighbours_of(settings: Settings, own: OwnCredential) -> Neighbours:
    """Whom circuits are passed on to. :raises ConfigError: an address cannot be used, or there are too many."""
    words = settings.text("STAGEOUT_ROUTER_NEIGHBOURS").replace(",", " ").split()
    try:
        allowed = addresses(" ".join(word for word in words if word != _FOUND))
    except BadRoute as problem:
        raise ConfigError(f"STAGEOUT_ROUTER_NEIGHBOURS: {problem}") from None
    if len(allowed) > MAX_LINKS:
        raise ConfigError(f"STAGEOUT_ROUTER_NEIGHBOURS has more than {MAX_LINKS} addresses: use routers in between")
    return Neighbours(frozenset(allowed), own, finds=_FOUND in words)


def address_of(settings: Settings, node: str, port: int) -> str:
    """``HOST:PORT`` that others reach this router by. :raises ConfigError: it is none."""
    try:
        return written(*address(settings.text("STAGEOUT_ROUTER_ADDRESS") or f"{node}:{port}"))
    except BadRoute as problem:
        raise ConfigError(f"STAGEOUT_ROUTER_ADDRESS: {problem}") from None


def links_of(settings: Settings, node: str, port: int, neighbours: Neighbours) -> tuple[Neighbourhood, int]:
    """What this router says to others about itself, and the number of this start.

    :raises StageoutError: address, key or directory are unusable.
    """
    interval_s = settings.number("STAGEOUT_ROUTER_INTERVAL")
    home = _made(home_of(settings))
    key, incarnation = identity(home)
    book = Book(address_of(settings, node, port), key, incarnation, INTERVALS_TO_AGE * interval_s)
    return Neighbourhood(node, book, neighbours.own, interval_s, neighbours.allowed), incarnation


def rights_of(settings: Settings) -> Rights:
    """Whose capabilities count, and how much a peer may have under way. :raises StageoutError: issuers are unusable."""
    path = settings.text("STAGEOUT_ROUTER_ISSUERS")
    return Rights(
        read_issuers(Path(path)) if path else {},
        settings.flag("STAGEOUT_ROUTER_CAPABILITIES"),
        settings.count("STAGEOUT_ROUTER_PEER_TRANSFERS"),
    )


def cover_of(settings: Settings) -> Cover:
    """How this router does TLS. :raises ConfigError: certificate or key cannot be used."""
    cert, key = settings.text("STAGEOUT_ROUTER_CERT"), settings.text("STAGEOUT_ROUTER_CERT_KEY")
    insists = settings.flag("STAGEOUT_ROUTER_TLS_ONLY")
    try:
        if cert:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key or None)
        elif insists:
            raise ConfigError("STAGEOUT_ROUTER_TLS_ONLY needs a certificate: STAGEOUT_ROUTER_CERT")
    except (OSError, ssl.SSLError) as problem:
        raise ConfigError(f"STAGEOUT_ROUTER_CERT = {cert}, STAGEOUT_ROUTER_CERT_KEY = {key}: {problem}") from None
    return Cover(cert, key, insists)


def listen(settings: Settings) -> socket.socket:
    """The listening socket. :raises ConfigError: the address cannot be used."""
    host, port = settings.text("STAGEOUT_ROUTER_HOST"), settings.count("STAGEOUT_ROUTER_PORT")
    try:
        return socket.create_server((host, port), backlog=512)
    except OSError as problem:
        taken = problem.errno == errno.EADDRINUSE
        why = f"another program listens there ('ss -ltnp sport = :{port}' shows it)" if taken else problem.strerror
        raise ConfigError(f"STAGEOUT_ROUTER_HOST = {host}, STAGEOUT_ROUTER_PORT = {port}: {why}") from None


async def run(load: Callable[[], Settings], local_name: str | None = None) -> None:
    """Serve until SIGTERM, SIGINT or SIGQUIT; SIGHUP reads keys (its own, too) and neighbours again.

    :param local_name: as HTCondor's daemon, whose collector knows other routers; None without HTCondor.
    :raises StageoutError: settings, keys or database cannot be used.
    """
    told = asyncio.Event()  # a router that waits for its root is not ended by what has it read its keys again
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, told.set)
    settings = load()
    place, keys = place_of(settings), read_keys(Path(settings.text("STAGEOUT_ROUTER_KEYS")))
    own = OwnCredential(credential_of(settings))
    neighbours = neighbours_of(settings, own)
    node = settings.condor("FULL_HOSTNAME") or socket.getfqdn()
    with contextlib.ExitStack() as stack:
        destination = await _destination(place, settings.count("STAGEOUT_ROUTER_WORKERS"), stack) if place else None
        listening = stack.enter_context(listen(settings))
        port = listening.getsockname()[1]
        links, incarnation = links_of(settings, node, port, neighbours)
        links.uplink = _uplink(settings, stack)
        terminals = read_terminals(settings.text("STAGEOUT_ROUTER_TERMINALS"))
        custodian = _custodian(settings, terminals, address_of(settings, node, port), stack) if terminals else None
        goes_out = bool(neighbours.allowed or neighbours.finds or terminals)
        copies = _copies(settings, address_of(settings, node, port), stack) if place and goes_out else None
        egress = _egress(settings, stack)
        ends, rights = Ends(destination, custodian, egress, copies), rights_of(settings)
        rights.address = links.address
        rights.remember(ends.transfers())
        router = Router(
            node, ends, keys, settings.count("STAGEOUT_ROUTER_WORKERS"), neighbours, links, rights,
            settings.count("STAGEOUT_ROUTER_PEER_CONNECTIONS"), settings.number("STAGEOUT_ROUTER_PEER_MESSAGES"),
            cover_of(settings),
            forwarding_of(settings, own) if custodian or copies else None,
            means_of(settings, links.address, own) if egress else None,
            Leases(home_of(settings) / "lessor", boot_clock_s()),
        )  # fmt: skip
        stop = _signals_heard(lambda: _reconfigure(router, own, load), told.is_set())
        log.event("started", pid=os.getpid(), port=port, root=place.root if place else "")
        collector = None if local_name is None else CollectorChild(local_name)
        directory = Directory(collector, links.address, router.meet) if collector else None
        beside = [keep(home_of(settings), incarnation), *([directory.run()] if directory else [])]
        await _until_stopped(router, beside, listening, stop)
        log.event("stopped")


def _uplink(settings: Settings, stack: contextlib.ExitStack) -> Uplink | None:
    rate = settings.number("STAGEOUT_ROUTER_UPLINK_MB_S") * 1e6
    if 0 < rate < _LEAST_UPLINK:
        raise ConfigError(f"STAGEOUT_ROUTER_UPLINK_MB_S: at least {_LEAST_UPLINK / 1e6}, or 0: no limit")
    return stack.enter_context(uplink_at(home_of(settings), rate)) if rate else None


async def _destination(place: Place, makers: int, stack: contextlib.ExitStack) -> Destination:
    _made(place.records.parent)
    store = stack.enter_context(contextlib.closing(Store(place.records)))
    with store.read():
        await _root_of(store, place.root)
        tree = _tree(place.root, "STAGEOUT_ROUTER_ROOT", stack, empties_in_thread=True)
        store.belong_to(tree.place)
        destination = Destination(store, tree, lambda: int(time.time()), Makers(makers, place.root))
    return stack.enter_context(contextlib.closing(destination))


async def _root_of(store: Store, root: Path) -> None:
    """Wait until the root that these records are of is there: what came before would go to the disk below a mount."""
    said_s = float("-inf")
    while problem := _reason_against(root, store.place):
        if time.monotonic() - said_s >= _SAID_AGAIN_S:
            said_s = time.monotonic()
            log.error("root-away", problem=problem, advice="the router goes on by itself when it is there")
        await asyncio.sleep(_ROOT_AGAIN_S)


def _reason_against(root: Path, name: str) -> str:
    try:
        return reason_against(root, name) if name else ""
    except PermissionError:
        return ""  # which is said by who makes the tree
    except OSError as problem:
        return f"{root} cannot be read: {problem.strerror}"


def _tree(place: Path, setting: str, stack: contextlib.ExitStack, empties_in_thread: bool = False) -> Tree:
    """What data come into. :param setting: that names it. :raises ConfigError: it cannot be written to."""
    try:
        return stack.enter_context(contextlib.closing(Tree(place, empties_in_thread)))
    except OSError as problem:
        if problem.errno not in _NOT_TO_BE_HAD:
            raise
        why = f"{problem.filename}: {problem.strerror}; let this router's user write there"
        raise ConfigError(f"{setting} = {place}: {why}") from None


def forwarding_of(settings: Settings, own: OwnCredential) -> Forwarding:
    """How a custodian delivers. :raises ConfigError: a setting cannot be used."""
    return Forwarding(own, settings.count("STAGEOUT_ROUTER_DELIVERIES"), home_of(settings) / report.NAME)


def lessee_of(settings: Settings, here: str, own: OwnCredential) -> Lessee | None:
    """Who asks for leases, None where nobody gives them. :raises ConfigError: the router that gives them is none."""
    lessor = settings.text("STAGEOUT_ROUTER_EGRESS_LEASES")
    if not lessor:
        return None
    try:
        host, port = address(lessor)
    except BadRoute as problem:
        raise ConfigError(f"STAGEOUT_ROUTER_EGRESS_LEASES: {problem}") from None

    def reached() -> Gateway:
        now = own.now
        return Gateway(host, port, *now.key, timeout_s=_LESSOR_SILENCE_S, ca=now.ca)

    return Lessee(reached, here)


def means_of(settings: Settings, here: str, own: OwnCredential) -> Means:
    """What plugins are run with. :raises ConfigError: the router that gives leases is unusable."""
    credentials = settings.text("STAGEOUT_ROUTER_EGRESS_CREDENTIALS")
    lifetime = settings.condor("MAX_FILE_TRANSFER_PLUGIN_LIFETIME")
    return Means(
        home_of(settings) / "movers",
        home_of(settings) / "egress" / "fetched",
        home_of(settings) / report.EGRESS_NAME,
        tuple(settings.condor("FILETRANSFER_PLUGINS").replace(",", " ").split()),
        settings.count("STAGEOUT_ROUTER_DELIVERIES"),
        float(lifetime) if lifetime.isdigit() else PLUGIN_LIFETIME_S,
        Path(credentials) if credentials else None,
        lessee_of(settings, here, own),
        settings.number("STAGEOUT_ROUTER_EGRESS_KEEP"),
    )


def _egress(settings: Settings, stack: contextlib.ExitStack) -> Egress | None:
    try:
        targets = read_targets(settings.text("STAGEOUT_ROUTER_EGRESS"))
    except BadEgress as problem:
        raise ConfigError(f"STAGEOUT_ROUTER_EGRESS: {problem}") from None
    if not targets:
        return None
    place, spool = _spool(settings, "egress")
    store = stack.enter_context(contextlib.closing(EgressStore(home_of(settings) / "egress.sqlite")))
    tree = _tree(place, "STAGEOUT_ROUTER_DIR", stack)
    with store.read():
        return Egress(store, tree, spool, targets, SystemClock())


def _spool(settings: Settings, name: str) -> tuple[Path, Spool]:
    place = _made(home_of(settings) / name)
    size_bytes = settings.count("STAGEOUT_ROUTER_SPOOL_MB") * 1024 * 1024
    if not size_bytes:
        disk = os.statvfs(place)
        size_bytes = disk.f_blocks * disk.f_frsize // 2
    return place, Spool(size_bytes)


def _custodian(settings: Settings, terminals: Terminals, name: str, stack: contextlib.ExitStack) -> Custodian:
    place, spool = _spool(settings, "spool")
    store = stack.enter_context(contextlib.closing(CustodyStore(home_of(settings) / "custody.sqlite")))
    tree = _tree(place, "STAGEOUT_ROUTER_DIR", stack)
    with store.read():
        return Custodian(store, tree, spool, terminals, name, SystemClock())


def _copies(settings: Settings, name: str, stack: contextlib.ExitStack) -> Copies:
    store = stack.enter_context(contextlib.closing(CopyStore(home_of(settings) / "copies.sqlite")))
    with store.read():
        return Copies(store, name, SystemClock())


def _signals_heard(reload: Callable[[], None], is_told: bool) -> asyncio.Event:
    """What is set when the router is to end. :param is_told: SIGHUP came before."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, reload)
    if is_told:
        reload()
    return stop


async def _until_stopped(
    router: Router, beside: Sequence[Coroutine[Any, Any, None]], listening: socket.socket, stop: asyncio.Event
) -> None:
    serving = asyncio.ensure_future(router.serve(listening))
    waiting = asyncio.ensure_future(stop.wait())
    others = [asyncio.ensure_future(work) for work in beside]
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    await end((serving, waiting, *others))
    problem = None if serving.cancelled() else serving.exception()
    if problem is not None:
        raise problem


def _reconfigure(router: Router, own: OwnCredential, load: Callable[[], Settings]) -> None:
    try:
        settings = load()
        keys, neighbours = read_keys(Path(settings.text("STAGEOUT_ROUTER_KEYS"))), neighbours_of(settings, own)
        credential = credential_of(settings)
        rights, cover = rights_of(settings), cover_of(settings)
    except StageoutError as problem:
        log.error("reconfigured", problem=f"{problem}; the old keys and neighbours stay")
        return
    router.have_keys(keys)
    router.cover = cover
    if credential.key[0]:  # else what is in custody, or commanded, could not leave with none
        own.now = credential
    router.rights.become(rights)
    router.have_neighbours(neighbours)
    log.event("reconfigured", keys=len(keys), neighbours=len(router.neighbours.allowed))


def main(argv: list[str] | None = None) -> int:
    """Entry point: 99 tells condor_master not to try again."""
    options = _options(argv)
    on_terminal = options.alone or options.terminal
    try:
        load = _loader(options)
        settings = load()
        if options.custody or options.new_key:
            print(_answer(options, settings))
            return 0
        if options.verify is not None:
            return _verified(settings, options.verify)
        log.open_daemon_log(settings, "STAGEOUT_ROUTER_LOG", "StageoutRouterLog", on_terminal)
    except StageoutError as problem:
        print(f"stageout-router: {problem}", file=sys.stderr)
        return EXIT_NO_RESTART
    try:
        for sentence in misspelt(settings):
            log.warn("unknown-setting", problem=sentence)
        gc.freeze()  # with thousands of files in packs, which die by themselves, it would look at all this all the time
        gc.set_threshold(_OBJECTS_TO_LOOK)
        asyncio.run(run(load, None if options.alone else options.local_name))
    except (StageoutError, OSError, sqlite3.Error) as problem:
        log.error("cannot-start", problem=problem)
        if not on_terminal:
            print(f"stageout-router: {problem}", file=sys.stderr)
        return EXIT_NO_RESTART if isinstance(problem, StageoutError) else 1
    return 0


def _loader(options: argparse.Namespace) -> Callable[[], Settings]:
    """Where the settings come from. :raises ConfigError: from HTCondor, which is not here."""
    if options.settings:
        return lambda: file_settings(options.settings)
    if options.alone:
        return lambda: environment_settings("")
    if importlib.util.find_spec("htcondor2") is None:
        raise ConfigError(f"HTCondor's Python module is not installed here: {_WITHOUT}")

    def load() -> Settings:
        reload_condor()
        return condor_settings(options.local_name)

    return load


def _answer(options: argparse.Namespace, settings: Settings) -> str:
    if options.new_key:
        return add_key(Path(settings.text("STAGEOUT_ROUTER_KEYS")), options.new_key)
    return report.all_shown(home_of(settings), time.time())


def _verified(settings: Settings, rate_mb_s: float) -> int:
    """Compare what was published: 1 when some of it is damaged. :raises StageoutError: it cannot be."""
    place = place_of(settings)
    if place is None or rate_mb_s <= 0:
        raise ConfigError("--verify needs a rate above 0, and a router with files of its own (STAGEOUT_ROUTER_ROOT)")
    log.open_log(None)
    found = verify.verify(place.root, place.records, rate_mb_s)
    print(found)
    return int(found.damaged > 0)


_WITHOUT = "give --alone (settings from the environment) or --settings FILE where there is no HTCondor"
_ABOUT = """\
The overlay's router: takes files from afar, whole and verified (docs/OVERLAY.md). condor_master starts it; without
HTCondor --alone or --settings does. Its settings are those of condor_config.d/20-stageout-router.conf.

exit status: 0 stopped, or nothing is damaged, 1 --verify has found damaged files, or a disk has failed,
99 a setting is wrong, or something that it names: another start changes nothing"""


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="stageout-router", description=_ABOUT,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--alone", action="store_true", help="settings from the environment, log to the terminal")
    parser.add_argument(
        "--settings", metavar="FILE", type=Path,
        help="as --alone, with settings from a file of NAME=VALUE lines (examples/overlay/gateway.env) before these",
    )  # fmt: skip
    parser.add_argument(
        "--verify", metavar="MB_S", nargs="?", type=float, const=verify.RATE_MB_S,
        help="compare published files with the digests that are kept of them, reading so many MB (10^6) a second"
        f" (default: {verify.RATE_MB_S:.0f}), also while the router runs; those that are damaged go to the standard"
        " error, and end it with 1",
    )  # fmt: skip
    parser.add_argument("--custody", action="store_true", help="show what the router here has in custody, and end")
    parser.add_argument(
        "--new-key", metavar=("NAME", "PREFIX"), nargs="+",
        help="make a key for names below PREFIX (/ for all, - for none), add it to STAGEOUT_ROUTER_KEYS, print the line"
        " for its holder, and end; 'router' behind PREFIX: for another router",
    )  # fmt: skip
    parser.add_argument("-f", action="store_true", help="ignored, for likeness with HTCondor's daemons")
    parser.add_argument("-t", dest="terminal", action="store_true", help="log to the terminal")
    parser.add_argument("-local-name", dest="local_name", default="", help="of this router among several")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    options = parser.parse_args(argv)
    options.alone = options.alone or options.settings is not None
    return options


if __name__ == "__main__":
    sys.exit(main())
