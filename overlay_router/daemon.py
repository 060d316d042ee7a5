"""``stageout-router``: settings and the listening socket. A child of condor_master, or alone (a site gateway)."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import gc
import os
import socket
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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
from overlay_router.http_access import HttpAccess, read_token_issuers
from overlay_router.http_desk import SENDER
from overlay_router.issuer_keys import IssuerKeys
from overlay_router.local.destination import Destination
from overlay_router.local.makers import Makers
from overlay_router.local.place import reason_against
from overlay_router.local.store import Store
from overlay_router.local.tree import Tree
from overlay_router.operations.custodian import MakesCustodian
from overlay_router.operations.custody_site import OwnTokens, custodian_at
from overlay_router.operations.custody_table import CustodyTable, read_custody
from overlay_router.operations.table import Table
from overlay_router.operations.terminal import MakesTerminal, terminal_at
from overlay_router.peers.brought import Brought
from overlay_router.peers.circuits import Neighbours
from overlay_router.peers.cover import Cover
from overlay_router.peers.deposits import Terminals, read_terminals
from overlay_router.peers.keys import BadKeys, Credential, Keys, OwnCredential, add_key, read_credential, read_keys
from overlay_router.peers.rights import Rights, read_issuers
from overlay_router.relay import Router
from overlay_router.routing.book import Book
from overlay_router.routing.directory import Directory
from overlay_router.routing.identity import identity, keep
from overlay_router.routing.neighbours import INTERVALS_TO_AGE, Neighbourhood
from overlay_router.rules.lots import Spool
from stageout import daemon
from stageout.condor.collector_child import CollectorChild
from stageout.core import log
from stageout.core.clock import SystemClock, boot_clock_s
from stageout.core.config import ConfigError, Settings
from stageout.core.ending import end
from stageout.core.metrics import Readings
from stageout.core.signing import load_or_make_key
from stageout.core.units import MB
from stageout.movers.plugins_table import PLUGIN_LIFETIME_S
from stageout.overlay.channel import Gateway
from stageout.overlay.http.claims import ANY
from stageout.overlay.http.signing import thumbprint
from stageout.overlay.uplink import Uplink, uplink_at
from stageout.overlay.wire.egress import BadEgress, read_targets
from stageout.overlay.wire.fields import MAX_LINKS
from stageout.overlay.wire.route import BadRoute, address, addresses, written
from stageout.overlay.wire.token import Service
from stageout.wire.services import RouterReport

PROGRAM = daemon.Program(
    name="stageout-router",
    subsystem="STAGEOUT_ROUTER",
    log_file="StageoutRouterLog",
    about="""\
Router of the overlay: receives files over the network, complete and verified (docs/overlay/gateways.md).
condor_master starts it; without HTCondor use --alone or --settings. Its settings are those of
condor_config.d/20-stageout-router.conf.
--verify ends with status 1 when it has found damaged files.""",
    metrics="STAGEOUT_ROUTER_METRICS",
    runs_alone=True,
)
#: Among the neighbours: all routers that are found through the collector.
_FOUND = "collector"
_LESSOR_SILENCE_S = 10.0
#: Bytes a second with which some tens of connections still move within the time after which peers give up.
_LEAST_UPLINK = 50_000.0
#: Errors of a directory that another start does not mend.
_NOT_TO_BE_HAD = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.EEXIST, errno.ENOTDIR})
#: STAGEOUT_ROUTER_HOST of a router that listens on all addresses of its machine.
_EVERYWHERE = "*"
_BACKLOG = 512
#: Messages that are read from a control connection in a second.
_MESSAGES_PER_S = 5000.0
#: Seconds for which a file that a plugin fetched is kept, for downloads that continue with the same version.
_KEEP_FETCHED_S = 60.0
#: Errors of a machine that knows IPv6, and has it switched off.
_NO_IPV6 = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})
#: A root that is away is looked for after so long, and spoken of.
_ROOT_AGAIN_S, _SAID_AGAIN_S = 1.0, 60.0
#: New objects after which Python looks for those that hold each other.
_OBJECTS_TO_LOOK = 20_000


@dataclass(frozen=True)
class Place:
    """The directories of a router. :param root: files arrive below it. :param records: its database."""

    root: Path
    records: Path


def place_of(settings: Settings) -> Place | None:
    """Root and database, None where no files arrive. :raises ConfigError: one is missing, or nothing is to do."""
    root = settings.text("STAGEOUT_ROUTER_ROOT")
    others = (
        "STAGEOUT_ROUTER_NEIGHBOURS", "STAGEOUT_ROUTER_TERMINALS", "STAGEOUT_ROUTER_EGRESS", "STAGEOUT_ROUTER_CUSTODY",
    )  # fmt: skip
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
    """The certificate that this router shows to others; nothing where it connects to nobody.

    :raises BadKeys: it cannot be used.
    """
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
    """The routers to which circuits are passed on.

    :raises ConfigError: an address cannot be used, or there are too many.
    """
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


def names_of(settings: Settings, node: str) -> frozenset[str]:
    """The names by which tokens know this router: its host, with and without the port.

    :raises ConfigError: its address is none.
    """
    here = settings.text("STAGEOUT_ROUTER_ADDRESS") or node
    try:
        return frozenset({address(here)[0], written(*address(here))})
    except BadRoute as problem:
        raise ConfigError(f"STAGEOUT_ROUTER_ADDRESS: {problem}") from None


def http_of(settings: Settings, node: str) -> HttpAccess:
    """Read the issuers of tokens for HTTP. :raises StageoutError: the issuers cannot be used."""
    names, issuers = names_of(settings, node), settings.text("STAGEOUT_ROUTER_TOKEN_ISSUERS")
    audiences = names | {f"https://{name}" for name in names}
    keys, published = read_token_issuers(Path(issuers), home_of(settings)) if issuers else ({}, {})
    return HttpAccess(
        audiences | (frozenset(ANY) if settings.flag("STAGEOUT_ROUTER_TOKEN_ANY_AUDIENCE") else frozenset()),
        settings.flag("STAGEOUT_ROUTER_HTTP_PLAIN"),
        keys,
        tuple(settings.text("STAGEOUT_ROUTER_COPY_HOSTS").lower().replace(",", " ").split()),
        published,
    )


def custody_of(settings: Settings, keys: Keys) -> CustodyTable | None:
    """Read the table of custody, None without one. :raises BadKeys: it cannot be used."""
    path = settings.text("STAGEOUT_ROUTER_CUSTODY")
    prints = {name: thumbprint(key.public) for name, key in keys.public.items()}
    return read_custody(Path(path), prints) if path else None


def keys_of(settings: Settings, node: str) -> Keys:
    """The keys that may connect. :raises StageoutError: they cannot be used, or it is not known whose tokens count.

    A token with ``aud`` is for this router when that is its address, with or without the port.
    """
    path, issuer = Path(settings.text("STAGEOUT_ROUTER_KEYS")), settings.condor("TRUST_DOMAIN").strip()
    keys = read_keys(path, Service(issuer, names_of(settings, node)))
    if keys.takes_tokens and not issuer:
        raise BadKeys(
            f"{path} has a line for tokens, and their issuer is not known: set TRUST_DOMAIN to that of the pool"
        )
    return keys


def links_of(settings: Settings, node: str, port: int, neighbours: Neighbours) -> tuple[Neighbourhood, int]:
    """The advert of this router, and the number of this start.

    :raises StageoutError: address, key or directory are unusable.
    """
    interval_s = settings.number("STAGEOUT_ROUTER_INTERVAL")
    home = _made(home_of(settings))
    key, incarnation = identity(home)
    book = Book(address_of(settings, node, port), key, incarnation, INTERVALS_TO_AGE * interval_s)
    return Neighbourhood(node, book, neighbours.own, interval_s, neighbours.allowed), incarnation


def rights_of(settings: Settings) -> Rights:
    """The keys whose capabilities count, and the limits of a peer. :raises StageoutError: issuers are unusable."""
    path = settings.text("STAGEOUT_ROUTER_ISSUERS")
    return Rights(
        read_issuers(Path(path)) if path else {},
        settings.flag("STAGEOUT_ROUTER_CAPABILITIES"),
        settings.count("STAGEOUT_ROUTER_PEER_TRANSFERS"),
    )


def cover_of(settings: Settings) -> Cover:
    """Return how this router does TLS. :raises ConfigError: certificate or key cannot be used."""
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
        return _listening_everywhere(port) if host == _EVERYWHERE else _listening(host.strip("[]"), port)
    except OSError as problem:
        taken = problem.errno == errno.EADDRINUSE
        why = f"another program listens there ('ss -ltnp sport = :{port}' shows it)" if taken else problem.strerror
        raise ConfigError(f"STAGEOUT_ROUTER_HOST = {host}, STAGEOUT_ROUTER_PORT = {port}: {why}") from None


def _listening_everywhere(port: int) -> socket.socket:
    """By IPv6 and IPv4 where the machine has both."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
        except OSError as problem:
            if problem.errno not in _NO_IPV6:
                raise
    return socket.create_server(("", port), backlog=_BACKLOG)


def _listening(host: str, port: int) -> socket.socket:
    """At one address. A name may have several: one of IPv4 comes first."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_, place = min(found, key=lambda one: one[0] != socket.AF_INET)
    return socket.create_server(place, family=family, backlog=_BACKLOG)


class Daemon:
    """One router.

    :param load: reads the settings (again). :param local_name: as HTCondor's daemon, whose collector knows other
        routers; None without HTCondor.
    """

    def __init__(self, load: Callable[[], Settings], local_name: str | None = None) -> None:
        self._load, self._local_name = load, local_name
        self._stop = asyncio.Event()
        self._router: Router | None = None
        self._home: Path | None = None
        self._own = OwnCredential()
        self._issuers: IssuerKeys | None = None

    async def serve(self, started: Callable[..., None] = daemon.log_started) -> None:
        """Serve until :meth:`stop`. :raises StageoutError: settings, keys or database cannot be used."""
        serving = asyncio.ensure_future(self._serve(started))
        waiting = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        await end((serving, waiting))
        problem = None if serving.cancelled() else serving.exception()
        if problem is not None:
            raise problem

    def stop(self, fast: bool) -> None:
        """Ask the router to end. :param fast: makes no difference, others go on where a transfer was cut off."""
        self._stop.set()

    async def metrics(self) -> Readings:
        """The values of this moment, as old as the file that ``--custody`` shows."""
        home = self._home
        if home is None:
            return Readings()
        return await asyncio.get_running_loop().run_in_executor(None, lambda: report.readings(home))

    async def reload(self) -> Settings:
        """Read keys (its own, too), neighbours, rights and certificate again.

        :raises StageoutError: they cannot be used, and the old ones stay.
        """
        settings, own = self._load(), self._own
        keys, neighbours = keys_of(settings, _node(settings)), neighbours_of(settings, own)
        credential = credential_of(settings)
        rights, cover = rights_of(settings), cover_of(settings)
        http, lists = http_of(settings, _node(settings)), custody_of(settings, keys)
        if self._router is not None:
            self._router.have_keys(keys, http, cover)
            if self._issuers is not None:
                self._issuers.want()
            self._router.rights.become(rights)
            self._router.have_neighbours(neighbours)
            self._router.have_custody(lists)
        if credential.key[0]:  # else what is in custody, or commanded, could not leave with none
            own.now = credential
        return settings

    async def _report(self) -> RouterReport:
        """Return the figures for the ad."""
        assert self._router is not None and self._home is not None
        custody = await asyncio.get_running_loop().run_in_executor(None, report.custody_reports, self._home)
        return replace(await self._router.links.report(), custody=custody)

    async def _serve(self, started: Callable[..., None]) -> None:
        settings = self._load()
        node = _node(settings)
        place, keys = place_of(settings), keys_of(settings, node)
        own = self._own = OwnCredential(credential_of(settings))
        neighbours = neighbours_of(settings, own)
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
            operations = _operations(settings, destination, stack) if destination else None
            lists = custody_of(settings, keys)
            custody = _custody(settings, lists, address_of(settings, node, port), stack) if lists else None
            ends, rights = Ends(destination, custodian, egress, copies, operations, custody), rights_of(settings)
            rights.address = links.address
            brought = _brought(settings, stack) if ends else None
            if destination is not None:
                destination.drop_of(SENDER)
            rights.remember(ends.transfers())
            router = self._router = Router(
                node, ends, keys, settings.count("STAGEOUT_ROUTER_WORKERS"), neighbours, links, rights,
                settings.count("STAGEOUT_ROUTER_PEER_CONNECTIONS"), _MESSAGES_PER_S,
                cover_of(settings),
                forwarding_of(settings, own) if custodian or copies else None,
                means_of(settings, links.address, own) if egress else None,
                Leases(home_of(settings) / "lessor", boot_clock_s()),
                brought,
                http_of(settings, node),
            )  # fmt: skip
            self._home = home_of(settings)
            started(port=port, root=place.root if place else "")
            collector = None if self._local_name is None else CollectorChild(self._local_name)
            directory = Directory(collector, links.address, router.meet, self._report) if collector else None
            self._issuers = IssuerKeys(self._home, lambda: router.http.published, router.have_issuer)
            work = [keep(self._home, incarnation), self._issuers.run(), *([directory.run()] if directory else [])]
            beside = [asyncio.ensure_future(item) for item in work]
            try:
                await router.serve(listening)
            finally:
                await end(beside)


def _node(settings: Settings) -> str:
    return settings.condor("FULL_HOSTNAME") or socket.getfqdn()


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
            log.error("root-lost", problem=problem, advice="the router goes on by itself when it is there")
        await asyncio.sleep(_ROOT_AGAIN_S)


def _reason_against(root: Path, name: str) -> str:
    try:
        return reason_against(root, name) if name else ""
    except PermissionError:
        return ""  # which is said by who makes the tree
    except OSError as problem:
        return f"{root} cannot be read: {problem.strerror}"


def _tree(place: Path, setting: str, stack: contextlib.ExitStack, empties_in_thread: bool = False) -> Tree:
    """The place that data come into. :param setting: that names it. :raises ConfigError: it cannot be written to."""
    try:
        return stack.enter_context(contextlib.closing(Tree(place, empties_in_thread)))
    except OSError as problem:
        if problem.errno not in _NOT_TO_BE_HAD:
            raise
        why = f"{problem.filename}: {problem.strerror}; let this router's user write there"
        raise ConfigError(f"{setting} = {place}: {why}") from None


def forwarding_of(settings: Settings, own: OwnCredential) -> Forwarding:
    """Return how a custodian delivers. :raises ConfigError: a setting cannot be used."""
    return Forwarding(own, settings.count("STAGEOUT_ROUTER_DELIVERIES"), home_of(settings) / report.NAME)


def lessee_of(settings: Settings, here: str, own: OwnCredential) -> Lessee | None:
    """The client that asks for leases, None where nobody gives them.

    :raises ConfigError: the router that gives them is none.
    """
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
    """The parameters of plugin calls. :raises ConfigError: the router that gives leases is unusable."""
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
        _KEEP_FETCHED_S,
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
    size_bytes = settings.count("STAGEOUT_ROUTER_SPOOL_MB") * MB
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


def _operations(settings: Settings, destination: Destination, stack: contextlib.ExitStack) -> MakesTerminal:
    table = stack.enter_context(contextlib.closing(Table(home_of(settings) / "operations.sqlite")))
    return terminal_at(table, destination)


def _custody(settings: Settings, lists: CustodyTable, address: str, stack: contextlib.ExitStack) -> MakesCustodian:
    path = settings.text("STAGEOUT_ROUTER_OWN_KEY")
    if not path:
        raise ConfigError("STAGEOUT_ROUTER_CUSTODY needs a key of this router: STAGEOUT_ROUTER_OWN_KEY")
    name = address.rpartition(":")[0].strip("[]")
    tokens = OwnTokens(load_or_make_key("router-own-key", Path(path)), name)
    plain, size = settings.flag("STAGEOUT_ROUTER_HTTP_PLAIN"), settings.count("STAGEOUT_ROUTER_SPOOL_MB") * MB
    return custodian_at(_made(home_of(settings)), lists, name, tokens, size=size, plain=plain, stack=stack)


def _brought(settings: Settings, stack: contextlib.ExitStack) -> Brought:
    return stack.enter_context(contextlib.closing(Brought(_made(home_of(settings)) / "brought.sqlite")))


def _copies(settings: Settings, name: str, stack: contextlib.ExitStack) -> Copies:
    store = stack.enter_context(contextlib.closing(CopyStore(home_of(settings) / "copies.sqlite")))
    with store.read():
        return Copies(store, name, SystemClock())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router, or what an option asks for instead. :returns: the exit status."""
    options = _options(argv)
    local_name = None if daemon.is_alone(options) else options.local_name

    def prepare(_: Settings, load: daemon.Load) -> Callable[[], Daemon]:
        gc.freeze()  # with thousands of files in packs, which die by themselves, it would look at all this all the time
        gc.set_threshold(_OBJECTS_TO_LOOK)
        return lambda: Daemon(load, local_name)

    asks = options.custody or options.new_key or options.verify is not None
    return daemon.run(PROGRAM, options, prepare, (lambda settings: _answered(options, settings)) if asks else None)


def _answered(options: argparse.Namespace, settings: Settings) -> int:
    """Print the answer to an option, and return the exit status."""
    if options.new_key:
        print(add_key(Path(settings.text("STAGEOUT_ROUTER_KEYS")), options.new_key))
    elif options.custody:
        print(report.all_shown(home_of(settings), time.time()))
    else:
        return _verified(settings, options.verify)
    return 0


def _verified(settings: Settings, rate_mb_s: float) -> int:
    """Compare what was published: 1 when some of it is damaged. :raises StageoutError: it cannot be."""
    place = place_of(settings)
    if place is None or rate_mb_s <= 0:
        raise ConfigError("--verify needs a rate above 0, and a router with files of its own (STAGEOUT_ROUTER_ROOT)")
    log.open_log()
    found = verify.verify(place.root, place.records, rate_mb_s)
    print(found)
    return int(found.damaged > 0)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = daemon.command_line(PROGRAM)
    parser.add_argument(
        "--verify", metavar="MB_S", nargs="?", type=float, const=verify.RATE_MB_S,
        help="compare published files with their digests, reading MB_S MB (10^6) a second"
        f" (default: {verify.RATE_MB_S:.0f}), also while the router runs. Print damaged files to the standard error,"
        " and end with status 1",
    )  # fmt: skip
    parser.add_argument("--custody", action="store_true", help="show the files in custody of this router, and end")
    parser.add_argument(
        "--new-key", metavar=("NAME", "PREFIX"), nargs="+",
        help="make a key for names below PREFIX (/ for all, - for none), add it to STAGEOUT_ROUTER_KEYS, print the line"
        " for its holder, and end; write 'router' after PREFIX if the holder is a router",
    )  # fmt: skip
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
