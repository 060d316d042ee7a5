"""The peers that may connect: shared keys from a file, one ``NAME SECRET PREFIX [router]`` a line.

A line ``NAME ed25519:KEY PREFIX`` has a public key: who has the private one makes tokens for HTTP with it.

A line ``token:IDENTITY FILE PREFIX [router]`` is for who has a token of HTCondor for that identity (``*`` stands for
any part of it), signed by the key in FILE. Of several lines for one token the first counts.
"""

from __future__ import annotations

import fnmatch
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stageout.core.errors import StageoutError
from stageout.overlay.key_file import read_ca
from stageout.overlay.wire import token
from stageout.overlay.wire.token import MARK, BadToken, Service

_LEAST_LENGTH = 16
_NONE = Service()
#: Beginning of a public key, and its length as text.
_PUBLIC, _PUBLIC_CHARS = "ed25519:", 51
_PATTERN = re.compile(r"[A-Za-z0-9._@+*-]{1,64}")
_NAME = re.compile(r"[A-Za-z0-9._@+-]{1,64}")


class BadKeys(StageoutError):
    """The file of keys cannot be used; the text says what to do. Never holds a key."""


@dataclass(frozen=True)
class Key:
    """One key.

    :param prefix: its holder may only name paths at or below it; "" for the whole root, "-" for none by itself.
    :param is_router: its holder is another router: it may say which links it has, and be sent through.
    :param ends: when connections with it end, in Unix time: that of a token; 0: never.
    """

    name: str
    secret: bytes = field(repr=False)
    prefix: str
    is_router: bool = False
    ends: float = 0

    def allows(self, path: str) -> bool:
        """Tell whether its holder may name this path."""
        if self.prefix == "-":
            return False
        return not self.prefix or path == self.prefix or path.startswith(self.prefix + "/")


@dataclass(frozen=True)
class Signed:
    """A line for tokens.

    :param identity: or a pattern with ``*``. :param key: name of the key that signs them.
    :param file: content of the file with that key.
    """

    identity: str
    key: str
    file: bytes = field(repr=False)
    prefix: str
    is_router: bool = False

    def is_for(self, claims: token.Claims) -> bool:
        """Tell whether it is the line of a token."""
        return claims.key == self.key and fnmatch.fnmatchcase(claims.identity, self.identity)

    def named(self, identity: str, secret: bytes = b"", ends: float = 0) -> Key:
        """The key of an identity: ``token:KEY:IDENTITY``, the name of no shared key, nor what any token says."""
        return Key(f"{MARK}{self.key}:{identity}", secret, self.prefix, self.is_router, ends)


@dataclass(frozen=True)
class PublicKey:
    """A line of a user who signs tokens for HTTP. :param public: as ``ed25519:`` text. :param prefix: as of a key.

    :param is_router: its holder is a custodian, which says when it took an operation.
    """

    name: str
    public: str
    prefix: str
    is_router: bool = False


class Keys(Mapping[str, Key]):
    """The keys by the name that HELLO says: that of a shared key, or ``token:`` and what a token says.

    A token is found only while it holds. All tokens of an identity that one key has signed are the same key.

    :param service: that tokens must be for. :ivar public: keys for HTTP, by name.
    """

    def __init__(
        self,
        shared: Mapping[str, Key],
        signed: Sequence[Signed] = (),
        service: Service = _NONE,
        public: Mapping[str, PublicKey] | None = None,
    ) -> None:
        self._shared, self._signed, self._service = shared, signed, service
        self.public = dict(public or {})

    def __getitem__(self, name: str) -> Key:
        if not name.startswith(MARK):
            return self._shared[name]
        try:
            claims = token.claims(name, time.time(), self._service)
        except BadToken:
            raise KeyError(name) from None
        line = self._line(claims)
        if line is None:
            raise KeyError(name)
        return line.named(claims.identity, token.secret(name, line.key, line.file), claims.ends)

    def __iter__(self) -> Iterator[str]:
        """Names of the shared keys: tokens cannot be listed."""
        return iter(self._shared)

    def __len__(self) -> int:
        return len(self._shared)

    def proved(self, name: str, ends: float = 0) -> Key | None:
        """The key of this :attr:`Key.name`, for a peer that has proved it before; that of tokens has no secret.

        :param ends: as of the key that was proved.
        """
        found = self._behind(name)
        identity = name[len(MARK) :].partition(":")[2]
        return found.named(identity, ends=ends) if isinstance(found, Signed) else found

    def unknown(self, name: str) -> str:
        """Return why there is no key of a name, for who said it."""
        if not name.startswith(MARK):
            return f"no key of the name {name!r} is known here: ask for one, and for its line in the keys file"
        try:
            claims = token.claims(name, time.time(), self._service)
        except BadToken as problem:
            return str(problem)
        return (
            f"no token of {claims.identity} signed by the key {claims.key[:100]!r} is taken here: ask for a line"
            f" '{MARK}{claims.identity} FILE PREFIX' in the keys file"
        )

    @property
    def takes_tokens(self) -> bool:
        """Tell whether there is a line for tokens."""
        return bool(self._signed)

    def withdraws(self, name: str, later: Keys) -> bool:
        """Tell whether later keys lack the key of this :attr:`Key.name`, or have changed it."""
        found = self._behind(name)
        return found is not None and found != later._behind(name)

    def _behind(self, name: str) -> Key | Signed | None:
        """Return the line of a :attr:`Key.name`."""
        if not name.startswith(MARK):
            return self._shared.get(name)
        key, _, identity = name[len(MARK) :].partition(":")
        return self._line(token.Claims(identity, key))

    def _line(self, claims: token.Claims) -> Signed | None:
        return next((line for line in self._signed if line.is_for(claims)), None)


def read_keys(path: Path, service: Service = _NONE) -> Keys:
    """The keys by name. :param service: that tokens must be for; without an issuer none is taken.

    :raises BadKeys: missing, open to all users, empty or unreadable.
    """
    try:
        lines = _secret(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        advice = "'stageout-router --new-key NAME PREFIX' makes one (PREFIX / for the whole root)"
        raise BadKeys(f"cannot read the keys: {problem}; {_remedy(problem, advice)}") from problem
    words = ((line.split(), f"{path}, line {number}") for number, line in enumerate(lines, 1))
    kept = [(found, place) for found, place in words if found and not found[0].startswith("#")]
    if not kept:
        raise BadKeys(f"{path} has no key: write one 'NAME SECRET PREFIX' a line (PREFIX / for the whole root), or have"
                      " 'stageout-router --new-key NAME PREFIX' make it")  # fmt: skip
    public = [_public(found, place) for found, place in kept if found[1:] and found[1].startswith(_PUBLIC)]
    others = [(found, place) for found, place in kept if not (found[1:] and found[1].startswith(_PUBLIC))]
    shared = [_key(found, place) for found, place in others if not found[0].startswith(MARK)]
    signed = [_line(found, place) for found, place in others if found[0].startswith(MARK)]
    return Keys({key.name: key for key in shared}, signed, service, {key.name: key for key in public})


def add_key(path: Path, words: Sequence[str]) -> str:
    """Make a key, and add its line to the file, which is made where it is missing. Returns the line of its holder.

    :param words: name and prefix, and ``router`` for another router's. :raises BadKeys: they, or the file, are no such.
    """
    name, secret = words[0], secrets.token_hex(24)
    line = " ".join([name, secret, *words[1:]]).split()  # as it will be read
    key = _key(line, "the new key")
    try:
        before = _secret(path).decode() if path.exists() else ""
        has_keys = any(found and not found[0].startswith("#") for found in map(str.split, before.splitlines()))
        if has_keys and name in read_keys(path):
            raise BadKeys(f"{path} has a key of the name {name}: take that, another name, or the line out")
        end = "" if not before or before.endswith("\n") else "\n"  # an editor may leave the last line without one
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as file:
            file.write(f"{end}{' '.join(line)}\n")
    except (OSError, UnicodeDecodeError) as problem:
        raise BadKeys(f"cannot add to the keys: {problem}") from None
    return f"{key.name} {secret}"


def _remedy(problem: Exception, advice: str) -> str:
    return "give the file to the router's user (chown)" if isinstance(problem, PermissionError) else advice


def _secret(path: Path) -> bytes:
    """Content of a file that must not be open to all. :raises BadKeys: it is. :raises OSError: it cannot be read."""
    if path.stat().st_mode & 0o007:
        raise BadKeys(f"{path} holds secrets and is open to all users: chmod o= {path}")
    return path.read_bytes()


def read_own_key(path: Path) -> tuple[str, bytes]:
    """Name and secret that this router shows to its neighbours. :raises BadKeys: no ``NAME SECRET`` and no token."""
    try:
        words = path.read_text().split()
    except (OSError, UnicodeDecodeError) as problem:
        advice = _remedy(problem, "write one 'NAME SECRET'")
        raise BadKeys(f"cannot read this router's own key: {problem}; {advice}") from problem
    if words and token.is_token(words[0]):
        return token.key_of(words[0])
    if len(words) < 2:
        raise BadKeys(f"{path}: write 'NAME SECRET', the key that the neighbours know this router by")
    return words[0], words[1].encode()


@dataclass(frozen=True)
class Credential:
    """The certificate that this router shows to others.

    :param key: name and secret that they know it by, ("", b"") for none.

    :param ca: file of certificates, one of which each of them has: connections to them are in TLS. "" for none.
    """

    key: tuple[str, bytes] = field(default=("", b""), repr=False)
    ca: str = ""


@dataclass
class OwnCredential:
    """The one that all parts of this router share, and look up for each connection that they make.

    :ivar now: replaced as a whole when the router is reconfigured; any thread may read it.
    """

    now: Credential = field(default_factory=Credential)


def read_credential(path: Path) -> Credential:
    """This router's own key file. :raises BadKeys: it cannot be used."""
    return Credential(read_own_key(path), read_ca(path))


def _key(words: list[str], place: str) -> Key:
    if len(words) not in (3, 4) or not _NAME.fullmatch(words[0]) or words[3:] not in ([], ["router"]):
        raise BadKeys(f"{place}: write 'NAME SECRET PREFIX' (PREFIX / for the whole root, - for none), or with 'router'"
                      " behind it for the key of another router")  # fmt: skip
    if len(words[1]) < _LEAST_LENGTH:
        raise BadKeys(f"{place}: the key is shorter than {_LEAST_LENGTH} characters; try 'openssl rand -hex 24'")
    return Key(words[0], words[1].encode(), words[2].strip("/"), len(words) == 4)


def _public(words: list[str], place: str) -> PublicKey:
    right = len(words) in (3, 4) and words[3:] in ([], ["router"])
    if not right or not _NAME.fullmatch(words[0]) or len(words[1]) != _PUBLIC_CHARS:
        raise BadKeys(
            f"{place}: write 'NAME ed25519:KEY PREFIX' (PREFIX / for the whole root), or with 'router' behind it"
        )
    return PublicKey(words[0], words[1], words[2].strip("/"), bool(words[3:]))


def _line(words: list[str], place: str) -> Signed:
    identity = words[0][len(MARK) :]
    if len(words) not in (3, 4) or not _PATTERN.fullmatch(identity) or words[3:] not in ([], ["router"]):
        raise BadKeys(f"{place}: write '{MARK}IDENTITY FILE PREFIX', such as {MARK}*@pool.example.org"
                      " /etc/condor/passwords.d/overlay /pilots")  # fmt: skip
    try:
        file = _secret(Path(words[1]))
    except OSError as problem:
        raise BadKeys(f"{place}: cannot read the key that signs tokens: {problem}") from None
    if len(file) < _LEAST_LENGTH or not _NAME.fullmatch(Path(words[1]).name):
        raise BadKeys(f"{place}: {words[1]} is shorter than {_LEAST_LENGTH} bytes, or its name is not plain")
    return Signed(identity, Path(words[1]).name, file, words[2].strip("/"), len(words) == 4)
