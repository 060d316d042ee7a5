"""Capabilities: the rights of a key's holder at terminals that trust the issuer. Pure; see docs/developer/wire.md.

A capability is a text, ``BODY.SIGNATURE``: base64url of a JSON object, and the issuer's Ed25519 signature over that
JSON. It names the holder's public key. Each OPEN, OPERATION, PACK, STAT, LIST, GET and GET_PACK carries it with the
holder's signature over what is asked, so whoever passes one on can neither change it nor ask for anything else. A
message that only reads has no number that makes it the same however often it is said: there the signature is for one
connection.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeVar, Union

from stageout.core import signing
from stageout.core.signing import BadSignature, SigningKey
from stageout.overlay.wire.fields import MAX_NUMBER, MAX_PATH_BYTES
from stageout.overlay.wire.messages import Get, GetPack, List, Open, Operation, Pack, Stat

RIGHTS = ("write", "delete", "read")
#: The rights that each kind of operation needs.
NEEDED = {
    "publish": ("write",),
    "mkdir": ("write",),
    "setattr": ("write",),
    "delete": ("delete",),
    "rename": ("write", "delete"),
}
KIND = "OverlayCapability"
_OPEN = ("origin", "seq", "path", "size_bytes", "block_bytes", "expires")
_OPERATION = (
    "origin", "seq", "kind", "path", "expires", "target", "after", "absent", "generation", "size_bytes", "blocks",
    "manifest", "parents", "mode", "priority", "attributes",
)  # fmt: skip
_PACK = ("origin", "seq", "expires", "paths", "sizes_bytes", "modes", "manifest")
_LOOK = ("path",)
Look = (Stat, List, Get, GetPack)
"""What changes nothing: for the right to read."""
Asked = Union[Open, Operation, Pack, Stat, List, Get, GetPack]
Signed = TypeVar("Signed", bound=Asked)
_SIGNED: dict[type[Any], tuple[tuple[str, ...], str]] = {
    Open: (_OPEN, "OverlayOpen"),
    Operation: (_OPERATION, "OverlayOperation"),
    Pack: (_PACK, "OverlayPack"),
    Stat: (_LOOK, "OverlayStat"),
    List: (_LOOK, "OverlayList"),
    Get: (_LOOK, "OverlayGet"),
    GetPack: (("paths",), "OverlayGetPack"),
}


class BadCapability(ValueError):
    """A text is no capability, or does not allow what is asked; the words are for its holder."""


@dataclass(frozen=True)
class Capability:
    """The rights that it gives.

    :param issuer: public key. :param holder: public key of the origin that may use it. :param number: random.
    :param prefix: names at or below it; "" for all. :param rights: of :data:`RIGHTS`.
    :param lot_bytes: most bytes of its transfers that are under way at once; 0: no limit.
    :param max_priority: of its operations and GETs. :param expires: Unix time in seconds.
    :param terminals: addresses of the routers where it holds: what is signed for one site means nothing at another.
    """

    issuer: str
    holder: str
    number: str
    prefix: str
    rights: tuple[str, ...]
    lot_bytes: int
    max_priority: int
    expires: int
    terminals: tuple[str, ...]


@dataclass(frozen=True)
class Credential:
    """A capability and the private key of its holder: what an origin has. :param text: of the capability."""

    text: str
    key: SigningKey

    @cached_property
    def may_read(self) -> bool:
        """Tell whether it has that right. :raises BadCapability: it is none."""
        return "read" in read(self.text).rights

    @cached_property
    def expires(self) -> int:
        """When it ends: Unix time in seconds. :raises BadCapability: it is none."""
        return read(self.text).expires

    def signed(self, message: Signed, nonce: str = "") -> Signed:
        """The message with the capability and the holder's signature.

        :param nonce: of the WELCOME on the connection; for what is only read.
        """
        return replace(message, capability=self.text, signature=self.key.sign(*_asked(message, nonce)))


def issue(
    issuer: SigningKey,
    holder: str,
    prefix: str,
    rights: tuple[str, ...],
    expires: int,
    lot_bytes: int = 0,
    max_priority: int = 0,
    terminals: tuple[str, ...] = (),
) -> str:
    """Return the text of a new capability. Without ``terminals`` no router takes it."""
    number = os.urandom(16).hex()
    made = Capability(
        issuer.public, holder, number, prefix.strip("/"), rights, lot_bytes, max_priority, expires, terminals
    )  # fmt: skip
    body = json.dumps(asdict(made), separators=(",", ":"))
    return f"{base64.urlsafe_b64encode(body.encode('utf-8', 'surrogatepass')).decode()}.{issuer.sign(KIND, body)}"


def read(text: str) -> Capability:
    """The capability in a text, signed by the issuer that it names. :raises BadCapability: it is none."""
    try:
        body, signature = _parts(text)
        found = _capability(json.loads(body))
        signing.check(KIND, body, signature, found.issuer)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise BadCapability("the capability is damaged: ask for another") from None
    except BadSignature as problem:
        raise BadCapability(f"the capability: {problem}") from None
    return found


def holder_of(text: str) -> str:
    """The public key of the holder in a text that :func:`read` has checked before."""
    return str(json.loads(_parts(text)[0])["holder"])


def _parts(text: str) -> tuple[str, str]:
    """Body and signature. :raises ValueError: it is no capability."""
    encoded, _, signature = text.partition(".")
    return base64.b64decode(encoded, altchars=b"-_", validate=True).decode("utf-8", "surrogatepass"), signature


def allow(
    message: Asked,
    issuers: Mapping[str, str],
    terminal: str | None,
    now: int,
    nonce: str = "",
    signed: tuple[str, str, str] | None = None,
) -> Capability:
    """The capability that a message carries, if it allows what is asked.

    :param terminal: ``HOST:PORT`` of the router where that is to be done; None: that router looks at it itself.
    :param issuers: public key -> prefix below which it may issue. :param now: Unix time in seconds.
    :param nonce: of the WELCOME on the connection that it came by.
    :param signed: kind, text and signature of what the holder has signed, if that is not the message itself.
    :raises BadCapability: it does not; the text says why.
    """
    found = read(message.capability)
    if found.issuer not in issuers or not below(found.prefix, issuers[found.issuer]):
        raise BadCapability(
            f"this router does not take capabilities of {found.issuer} for {_shown(found.prefix)}; its administrator"
            " can name them in STAGEOUT_ROUTER_ISSUERS"
        )
    if terminal is not None:
        _check_terminal(found, terminal)
    if now > found.expires:
        raise BadCapability(f"the capability expired {now - found.expires} s ago: ask for another")
    try:
        signing.check(*(signed or (*_asked(message, nonce), message.signature)), found.holder)
    except BadSignature as problem:
        raise BadCapability(f"what is asked was not signed by the holder of the capability: {problem}") from None
    check_expiry(message, found)
    _allow_names(message, found)
    return found


def _check_terminal(found: Capability, terminal: str) -> None:
    """:raises BadCapability: it does not hold there."""
    if not found.terminals:
        raise BadCapability(
            "the capability names no terminal, for an older stageout has issued it: its issuer has to upgrade, and "
            f"issue another ('stageout capability --terminal {terminal}')"
        )
    if terminal not in found.terminals:
        raise BadCapability(f"the capability is for {', '.join(found.terminals)[:500]}, not for {terminal}")


def check_expiry(message: Asked, found: Capability) -> None:
    """:raises BadCapability: an operation would end later than the capability that it carries."""
    if not isinstance(message, Look) and message.expires > found.expires:
        raise BadCapability(f"it expires after its capability: let it expire by {found.expires} (Unix time)")


def below(path: str, prefix: str) -> bool:
    """Tell whether a path is a prefix or below it."""
    return not prefix or path == prefix or path.startswith(prefix + "/")


def _allow_names(message: Asked, found: Capability) -> None:
    operation = message if isinstance(message, Operation) else None
    names = message.paths if isinstance(message, (Pack, GetPack)) else (message.path,)
    target = (operation.target,) if operation and operation.target else ()
    for path in (*names, *target):
        if not below(path, found.prefix):  # "" is the root
            raise BadCapability(f"the capability is for {_shown(found.prefix)}, not for {path[:500]!r}")
    needed = ("read",) if isinstance(message, Look) else NEEDED[operation.kind if operation else "publish"]
    missing = set(needed) - set(found.rights)
    if missing:
        raise BadCapability(f"the capability lacks the right to {', '.join(sorted(missing))}")
    if isinstance(message, (Get, GetPack, Operation)) and message.priority > found.max_priority:
        raise BadCapability(f"the capability allows no higher priority than {found.max_priority}")
    if isinstance(message, Look):
        return
    size_bytes = sum(message.sizes_bytes) if isinstance(message, Pack) else message.size_bytes
    if found.lot_bytes and size_bytes > found.lot_bytes:
        raise BadCapability(f"the capability is for {found.lot_bytes} bytes at once, {size_bytes} are asked for")


def _asked(message: Asked, nonce: str) -> tuple[str, str]:
    """Kind and text of what a holder signs; not signed is what differs between routers, such as the tid."""
    names, kind = _SIGNED[type(message)]
    values = [getattr(message, name) for name in names]
    return kind, json.dumps([nonce, *values] if isinstance(message, Look) else values, separators=(",", ":"))


def _capability(facts: Any) -> Capability:
    """:raises ValueError: a field is of another kind or out of its range."""
    facts = {"terminals": (), **facts}
    values = {item.name: facts[item.name] for item in fields(Capability)}
    rights = values["rights"] = tuple(values["rights"])
    terminals = values["terminals"] = tuple(values["terminals"])
    texts = (*(values[name] for name in ("issuer", "holder", "number", "prefix")), *terminals)
    numbers = (values[name] for name in ("lot_bytes", "max_priority", "expires"))
    if not all(isinstance(text, str) and len(text) <= MAX_PATH_BYTES for text in texts):
        raise ValueError
    if not all(type(number) is int and 0 <= number <= MAX_NUMBER for number in numbers):
        raise ValueError
    if not set(rights) <= set(RIGHTS):
        raise ValueError
    return Capability(**values)


def _shown(prefix: str) -> str:
    return repr(prefix) if prefix else "the whole root"
