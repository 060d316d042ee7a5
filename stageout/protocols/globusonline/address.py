"""URLs: ``globusonline://[user@]COLLECTION[:]/path[?recursive=1]``, also ``globus://``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.urls import safe_url, split_scheme
from stageout.protocols.globusonline.settings import PREFIX, UUID

_PLACE = re.compile(r"(?:(?P<user>[^@/?]*)@)?(?P<collection>[^:/?@]*):?(?P<path>/[^?]*)?(?:\?(?P<query>.*))?", re.S)
_TRUE, _FALSE = ("1", "true", "yes"), ("0", "false", "no")


@dataclass(frozen=True)
class Address:
    """The collection and path of a URL.

    :param collection: UUID. :param path: in the collection, decoded, begins with a slash.
    :param is_folder: the URL stands for everything below the path. :param service: credential service of the URL, ""
        for none.
    :param handle: credential handle of the URL, "" for none. :param shown: the URL for people.
    """

    collection: str
    path: str
    is_folder: bool
    service: str
    handle: str
    shown: str

    @property
    def parent(self) -> str:
        """The directory of the path."""
        return self.path.rstrip("/").rpartition("/")[0] + "/"


def address_of(url: str, names: Mapping[str, str]) -> Address:
    """Parse a URL.

    :param names: lower-case name -> UUID of the collections that the pool has named.
    :raises TransferFailure: BAD_URL; the text shows the correct form.
    """
    shown = safe_url(url)
    found = _PLACE.fullmatch(url.partition("://")[2])
    if not found or not found["collection"]:
        raise _bad(shown, "names no collection: write globusonline://COLLECTION/path, COLLECTION a UUID or a name")
    path = unquote(found["path"] or "", errors="surrogateescape")
    if not path:
        raise _bad(shown, "has no path: write globusonline://COLLECTION/path")
    if ".." in path.split("/") or "\0" in path:
        raise _bad(shown, "leads through '..': write the path itself")
    scheme = split_scheme(url)
    is_folder = path.endswith("/") or _recursive(shown, found["query"] or "")
    uuid = _uuid(shown, found["collection"], names)
    return Address(uuid, path, is_folder, scheme.service, scheme.handle, shown)


def _uuid(shown: str, name: str, names: Mapping[str, str]) -> str:
    lowered = unquote(name).lower()
    if UUID.fullmatch(lowered):
        return lowered
    if lowered in names:
        return names[lowered]
    known = f" (known: {', '.join(sorted(names))})" if names else ""
    text = f"collection {name} has no entry in {PREFIX}COLLECTIONS of this node{known}: write the collection's UUID"
    raise _bad(shown, text)


def _recursive(shown: str, query: str) -> bool:
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name.lower() != "recursive" or value.lower() not in _TRUE + _FALSE:
            raise _bad(shown, f"has an option {name!r} that does not exist: there is recursive=1 only")
        return value.lower() in _TRUE
    if query:
        raise _bad(shown, "has something behind '?' that cannot be read: write %3F for a question mark in a name")
    return False


def _bad(shown: str, what: str) -> TransferFailure:
    return TransferFailure(ErrorClass.BAD_URL, f"{shown} {what}")
