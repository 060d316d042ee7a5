"""The part of WebDAV that uploads need: creation of missing collections, and the properties of a file."""

from __future__ import annotations

import re

import pycurl

from stageout.core.errors import TransferFailure
from stageout.protocols.curl.address import Address
from stageout.protocols.curl.http import Http
from stageout.protocols.curl.transport import Reply

#: The answer to a PUT or MKCOL if the parent collection is missing.
NO_COLLECTION = frozenset({404, 409})
_EXISTS = frozenset({405})  # the answer to MKCOL for an existing collection
_MOST_COLLECTIONS = 64  # parent collections of one file
_MAKING_S = 30.0
_BODY = '<?xml version="1.0" encoding="utf-8"?><propfind xmlns="DAV:"><prop><getcontentlength/></prop></propfind>'
_HEADERS = ("Depth: 0", 'Content-Type: application/xml; charset="utf-8"')
_LENGTH = re.compile(r"\s*([0-9]{1,18})\s*")


def make_collections(http: Http, address: Address) -> TransferFailure | None:
    """Create the collection of a destination with MKCOL, and its missing parents.

    :returns: the first refusal. When another job creates the collection at the same time, some servers refuse with
        another status than 405 (Apache: 403). Only the next PUT shows whether the collection exists.
    :raises TransferFailure: no answer.
    """
    missing: list[Address] = []
    refused = None
    folder = address.parent()
    while folder is not None and len(missing) < _MOST_COLLECTIONS:
        reply = http.ask("MKCOL", folder, limit_s=_MAKING_S)
        if reply.status not in NO_COLLECTION:
            refused = _refusal(http, reply, folder)
            break
        missing.append(folder)
        folder = folder.parent()
    for folder in reversed(missing):
        reply = http.ask("MKCOL", folder, limit_s=_MAKING_S)
        refused = refused or _refusal(http, reply, folder)
    return refused


def _refusal(http: Http, reply: Reply, folder: Address) -> TransferFailure | None:
    if reply.success or reply.status in _EXISTS:
        return None
    return http.failure(reply, f"making of the collection {folder.shown}")


def properties(http: Http, address: Address) -> Reply | None:
    """Query one destination with PROPFIND; None without an answer."""
    return http.question("PROPFIND", address, _HEADERS, {pycurl.POSTFIELDS: _BODY})


def length_in(body: bytes) -> int | None:
    """Return the length of the file in a multi-status answer; None without a length."""
    from xml.etree import ElementTree

    try:
        text = ElementTree.fromstring(body).findtext(".//{DAV:}getcontentlength") or ""
    except ElementTree.ParseError:
        return None
    found = _LENGTH.fullmatch(text)
    return int(found[1]) if found else None
