"""The file of STAGEOUT_ROUTER_CUSTODY: routers to which a custodian delivers, and who may leave operations for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from overlay_router.peers.keys import BadKeys
from stageout.overlay.http.claims import Issuer, share_name
from stageout.overlay.rules.rights import Entry
from stageout.overlay.wire.route import BadRoute, address, written

#: Subject of a line for all subjects of an issuer.
ANYBODY = "*"
#: In place of a file of certificates: a router without TLS, on this machine.
PLAIN = "plain"
#: Prefix of a line for signed operations only.
SIGNED_ONLY = "-"
_FORM = (
    "write 'router NAME HOST:PORT [CA-FILE | plain]' or 'custody ISSUER SUBJECT NAME PREFIX' (PREFIX - for signed only)"
)


@dataclass(frozen=True)
class Listed:
    """A router of the list.

    :param ca: file of certificates that are trusted there, "" for those of the machine. :param plain: without TLS.
    """

    name: str
    address: str
    ca: str = ""
    plain: bool = False


@dataclass(frozen=True)
class CustodyTable:
    """Content of the file.

    :param entries: by issuer (of a user's key the thumbprint), name of the subject's share, and NAME of the next
        router.
    """

    routers: Mapping[str, Listed] = field(default_factory=dict)
    entries: Mapping[tuple[str, str, str], Entry] = field(default_factory=dict)

    def entry(self, issuer: str, share: str, router: str) -> Entry | None:
        """Return what a subject may leave here for a router, None for nothing."""
        found = self.entries.get((issuer, share, router))
        return found or self.entries.get((issuer, ANYBODY, router))


def read_custody(path: Path, prints: Mapping[str, str]) -> CustodyTable:
    """Read the file. :param prints: thumbprints of users' keys by their names. :raises BadKeys: it cannot be used."""
    routers: dict[str, Listed] = {}
    entries: dict[tuple[str, str, str], Entry] = {}
    try:
        lines = [line.split("#")[0].split() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as problem:
        raise BadKeys(f"cannot read the table of custody: {problem}") from None
    for number, words in enumerate(lines, 1):
        try:
            if words[:1] == ["router"] and len(words) in (3, 4):
                name = words[1].lower()
                plain = words[3:] == [PLAIN]
                ca = str(path.parent / words[3]) if words[3:] and not plain else ""
                routers[name] = Listed(name, written(*address(words[2])), ca, plain)
            elif words[:1] == ["custody"] and len(words) == 5:
                _, issuer, subject, router, prefix = words
                if subject != ANYBODY:
                    subject = share_name(Issuer(issuer, "", is_own="://" not in issuer), subject)
                place = prints.get(issuer, issuer), subject, router.lower()
                entries[place] = Entry(None if prefix == SIGNED_ONLY else prefix)
            elif words:
                raise BadKeys(f"{path}, line {number}: {_FORM}")
        except BadRoute as problem:
            raise BadKeys(f"{path}, line {number}: {problem}") from None
    unknown = {router for _, _, router in entries} - set(routers)
    if unknown:
        raise BadKeys(f"{path}: no line 'router {min(unknown)} HOST:PORT' says where that router is")
    return CustodyTable(routers, entries)
