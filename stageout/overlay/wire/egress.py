"""Which names of a gateway are delivered by a transfer plugin, and where to. Pure: shared by router and doctor."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, urlsplit, urlunsplit

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s]+")
_NO_NAMES = frozenset({"", ".", ".."})


class BadEgress(ValueError):
    """The setting cannot be used; the text says what to write."""


@dataclass(frozen=True)
class Target:
    """A name at or below ``prefix`` ("" is everything) goes below ``url``."""

    prefix: str
    url: str

    def url_of(self, path: str) -> str:
        """The destination of a file."""
        rest = path[len(self.prefix) :].lstrip("/")
        return f"{self.url.rstrip('/')}/{quote(rest, errors='surrogateescape')}"

    @property
    def scheme(self) -> str:
        """Of the URL."""
        return self.url.partition("://")[0].lower()

    @property
    def shown(self) -> str:
        """The URL for logs and senders, without what may be secret."""
        parts = urlsplit(self.url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


@dataclass(frozen=True)
class Targets:
    """All of a gateway."""

    known: tuple[Target, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.known)

    def find(self, path: str) -> Target | None:
        """The one for a path: that with the longest prefix. A prefix itself is no file."""
        fitting = [one for one in self.known if not one.prefix or path.startswith(one.prefix + "/")]
        return max(fitting, key=lambda one: len(one.prefix), default=None)

    def covers(self, path: str) -> Target | None:
        """The one that a path is at or below."""
        return self.find(path + "/") or self.find(path)


def read_targets(text: str) -> Targets:
    """``/PATH=URL ...``, apart by blanks. :raises BadEgress: it is something else."""
    found: dict[str, Target] = {}
    for word in text.split():
        path, mark, url = word.partition("=")
        prefix = path.strip("/")
        try:
            parts = urlsplit(url)
        except ValueError as problem:
            raise BadEgress(f"{word!r}: {problem}") from None
        if not mark or not path.startswith("/") or not _URL.fullmatch(url):
            raise BadEgress(f"{word!r}: write /PATH=SCHEME://HOST/PATH, apart by blanks")
        if parts.query or parts.fragment:
            raise BadEgress(f"{path}: names go behind the URL, so it can have no ? and no #")
        if prefix and not _NO_NAMES.isdisjoint(prefix.split("/")):
            raise BadEgress(f"{path}: write names joined by single slashes, no . and no ..")
        if prefix in found:
            raise BadEgress(f"{path} is named twice")
        found[prefix] = Target(prefix, url)
    return Targets(tuple(found.values()))
