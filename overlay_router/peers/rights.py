"""The rights of a peer: by its key, by the capability that a message carries, and how much at once.

A message with a capability is judged by that alone: the key of the connection may be that of a custodian, which may
write nothing in its own name. Without one the key's prefix counts, unless this router insists on capabilities.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from overlay_router.local.store import Transfer
from overlay_router.peers.keys import BadKeys, Key
from overlay_router.peers.origins import as_known
from stageout.overlay.wire.capability import BadCapability, Capability, Look, allow, read
from stageout.overlay.wire.greeting import SAFE_DIGESTS
from stageout.overlay.wire.messages import MAX_CLOCK_SKEW_S, Get, GetPack, List, Message, Open, Operation, Pack, Stat
from stageout.wire.deposits import MOST_EXPIRES_AFTER_S


class Lot(NamedTuple):
    """A transfer under way. :param capability: number of the one that it was opened with, "" for none."""

    key: str
    capability: str
    size_bytes: int
    expires: int


@dataclass
class Rights:
    """The rules of one router, and the transfers that count against its limits.

    :param issuers: public key -> prefix. :param insists: nothing is written without a capability.
    :param most_transfers: under way of one key. :param address: ``HOST:PORT`` of this router, as capabilities name it.
    """

    issuers: Mapping[str, str] = field(default_factory=dict)
    insists: bool = False
    most_transfers: int = 1024
    address: str = ""
    _lots: dict[tuple[str, int], Lot] = field(default_factory=dict)
    _transfers: Counter[str] = field(default_factory=Counter)
    _bytes: Counter[str] = field(default_factory=Counter)

    def refusal(self, key: Key, message: Message, now: int, nonce: str = "") -> str:
        """Return why a peer may not ask for this, "" if it may. :param nonce: of this router on its connection."""
        if isinstance(message, Look) and not message.capability:
            paths = message.paths if isinstance(message, GetPack) else (message.path,)
            return next((outside(key, path) for path in paths if not key.allows(path)), "")
        if isinstance(message, Look):
            return self._look(message, now, nonce)
        if isinstance(message, (Open, Operation, Pack)) and (message.capability or self.insists):
            try:
                self._allowed(message, now)
            except BadCapability as problem:
                return str(problem)
            return ""
        return outside_of(key, message)

    def deposit_refusal(self, key: Key, message: Open | Operation | Pack, now: int) -> str:
        """Return why a peer may not deposit this for another router, "" if it may.

        That router decides, but a file that it would refuse takes no room here before. The address by which the
        capability names it is not known here.
        """
        if not message.capability:
            return outside_of(key, message)
        try:
            allow(message, self.issuers, None, now)
        except BadCapability as problem:
            return str(problem)
        return ""

    def reserve(self, key: Key, ask: Open, now: int) -> str:
        """Count a transfer that is asked for. Why it is too much now, or "".

        :param ask: as the peer has said it: its signature is checked here. The lot of its capability is for its
            terminal to judge.
        """
        place = as_known(ask, key).origin, ask.seq
        self.release(*place)
        if self._transfers[key.name] >= self.most_transfers:
            return f"the key {key.name!r} has {self.most_transfers} transfers under way"
        found = None
        if ask.capability and not ask.terminal:  # with a warrant it was judged by that
            found = read(ask.capability) if ask.warrant else self._allowed(ask, now)
        if found and found.lot_bytes and self._bytes[found.number] + ask.size_bytes > found.lot_bytes:
            return f"the capability is for {found.lot_bytes} bytes at once"
        self._count(place, Lot(key.name, found.number if found else "", max(0, ask.size_bytes), ask.expires))
        return ""

    def become(self, rules: Rights) -> None:
        """From now on the rules of another one; what is under way stays."""
        self.issuers, self.insists, self.most_transfers = rules.issuers, rules.insists, rules.most_transfers

    def release(self, origin: str, seq: int) -> None:
        """A transfer has ended. :param origin: as this router knows it."""
        lot = self._lots.pop((origin, seq), None)
        if lot:
            self._transfers[lot.key] -= 1
            self._bytes[lot.capability] -= lot.size_bytes

    def release_up_to(self, origin: str, seq: int) -> None:
        """All transfers of an origin up to a number have ended."""
        for place in [place for place in self._lots if place[0] == origin and place[1] <= seq]:
            self.release(*place)

    def expire(self, now: int) -> None:
        """Transfers whose time has ended count no longer."""
        for place in [place for place, lot in self._lots.items() if lot.expires < now]:
            self.release(*place)
        self._transfers, self._bytes = +self._transfers, +self._bytes

    def remember(self, transfers: Iterable[Transfer]) -> None:
        """After a start: transfers that were under way before."""
        for one in transfers:
            lot = Lot(one.sender.split("/")[0], "", max(0, one.ask.size_bytes), one.ask.expires)
            self._count((one.ask.origin, one.ask.seq), lot)

    def _look(self, message: Stat | List | Get | GetPack, now: int, nonce: str) -> str:
        try:
            further = getattr(message, "terminal", "")  # a custodian is asked for what is on its way there
            allow(message, self.issuers, further.rpartition(",")[2] or self.address, now, nonce)
        except BadCapability as problem:
            return str(problem)
        return ""

    def _count(self, place: tuple[str, int], lot: Lot) -> None:
        self._lots[place] = lot
        self._transfers[lot.key] += 1
        self._bytes[lot.capability] += lot.size_bytes

    def _allowed(self, message: Open | Operation | Pack, now: int) -> Capability:
        if not message.capability:
            raise BadCapability("this router takes nothing without a capability: ask its administrator for one")
        return allow(message, self.issuers, self.address, now)


def too_late(message: Message, now: int) -> str:
    """Return why an operation may not go on for so long, "" if it may: what nobody ends must end by itself.

    :param now: Unix time; the sender's may differ by as much as a greeting lets pass.
    """
    if getattr(message, "expires", 0) <= now + MOST_EXPIRES_AFTER_S + MAX_CLOCK_SKEW_S:
        return ""
    return f"it expires more than {MOST_EXPIRES_AFTER_S // 86400} days from now: let it expire earlier"


def forgeable(message: Message, digest: str) -> str:
    """Return why data that a capability vouches for may not come by a connection, "" if they may.

    A signature stands for the bytes only with a digest for which nobody can find other bytes. For a copy with a
    warrant, the copying router vouches.

    :param digest: the kind that the connection has chosen.
    """
    signed = isinstance(message, Pack) or (isinstance(message, Open) and not message.warrant)
    if not signed or not getattr(message, "capability", "") or digest in SAFE_DIGESTS:
        return ""
    return f"a capability demands the digest {SAFE_DIGESTS[0]}, this connection has {digest}: upgrade whoever sends"


def outside_of(key: Key, message: Message) -> str:
    """Return why a key is not for the paths of a message, "" if it is."""
    if not key.prefix:
        return ""
    names = getattr(message, "paths", ()) or (getattr(message, "path", ""), getattr(message, "target", ""))
    return next((outside(key, path) for path in names if path and not key.allows(path)), "")


def outside(key: Key, path: str) -> str:
    """The words for a path that a key is not for."""
    return f"the key {key.name!r} is not for {path[:500]!r}, only for what is below {key.prefix!r}"


def read_issuers(path: Path) -> dict[str, str]:
    """Public keys whose capabilities are taken, and their prefixes; "" for a router without such a file.

    :raises BadKeys: the file cannot be read, or a line is not ``NAME ed25519:KEY PREFIX``.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise BadKeys(f"cannot read the issuers: {problem}; write one 'NAME ed25519:KEY PREFIX' a line") from None
    found = {}
    for number, words in enumerate((line.split("#")[0].split() for line in lines), 1):
        if words and (len(words) != 3 or not words[1].startswith("ed25519:") or len(words[1]) != 51):
            raise BadKeys(f"{path}, line {number}: write 'NAME ed25519:KEY PREFIX' (PREFIX / for the whole root)")
        if words:
            found[words[1]] = words[2].strip("/")
    return found
