"""WebDAV uploads: PUT under a temporary name, checked, then moved to the final one; collections are made as needed."""

from __future__ import annotations

import re

import pycurl

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.protocols.curl.address import Address
from stageout.protocols.curl.digests import stated_by_server
from stageout.protocols.curl.localfile import temporary_name
from stageout.protocols.curl.task import Task
from stageout.protocols.curl.transport import Reply
from stageout.protocols.curl.upload import NO_DIRECTORY, HttpUpload, Stored

_PROPERTIES = (
    '<?xml version="1.0" encoding="utf-8"?><propfind xmlns="DAV:"><prop><getcontentlength/>'
    '<checksums xmlns="http://owncloud.org/ns"/></prop></propfind>'
)
_EXISTS = frozenset({405})  # the answer to MKCOL of what is there
_CANNOT_MOVE = frozenset({405, 501, 502})
# There are servers that decode a Destination before they take it apart: "a?b" would be written over "a".
_MISREAD = re.compile(r"[;?#%\x00-\x1f\x7f]")


class DavUpload(HttpUpload):
    """The way of one file to a WebDAV server."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._left_over = False

    def abandon(self) -> None:
        """Remove the temporary file."""
        if self._left_over:
            try:
                self._http.ask("DELETE", self._target)
            except TransferFailure as failure:
                self._task.context.log("a temporary file stays on the server", name=self._target.name, why=failure)

    def _send(self) -> Stored:
        if self._can_move():
            if self._target == self._address:
                self._target = self._address.beside(temporary_name(self._address.name))
            self._left_over = True
        else:
            self._target = self._address
        return super()._send()

    def _put(self) -> Reply:
        reply = super()._put()
        if reply.status in NO_DIRECTORY:
            with self._task.servers.making(self._address.origin):
                refused = self._make_collections(self._target)
            reply = super()._put()
            if refused is not None and reply.status in NO_DIRECTORY:
                raise refused
        return reply

    def _can_move(self) -> bool:
        """Ask the server, once for all files: one that speaks WebDAV has MOVE."""
        if self._address.signed or _MISREAD.search(self._address.path):
            return False
        known = self._task.servers.moves(self._address.origin)
        if known is None:
            headers = self._http.ask("OPTIONS", self._address).headers
            known = "dav" in headers or "MOVE" in headers.get("allow", "MOVE").upper()  # says nothing: it is tried
            self._task.servers.learn_moving(self._address.origin, known)
        return known

    def _make_collections(self, address: Address) -> TransferFailure | None:
        """MKCOL of the collection around a place, and of those around it as far as they are missing.

        :returns: the first refusal. When another job makes the collection at the same time some servers refuse with
            other statuses than 405 (Apache: 403): only the next PUT shows whether the collection exists.
        """
        missing: list[Address] = []
        refused = None
        folder = address.parent()
        while folder is not None:
            reply = self._http.ask("MKCOL", folder)
            if reply.status not in NO_DIRECTORY:
                refused = self._refusal(reply, folder)
                break
            missing.append(folder)
            folder = folder.parent()
        for folder in reversed(missing):
            reply = self._http.ask("MKCOL", folder)
            refused = refused or self._refusal(reply, folder)
        return refused

    def _refusal(self, reply: Reply, folder: Address) -> TransferFailure | None:
        if reply.success or reply.status in _EXISTS:
            return None
        return self._http.failure(reply, f"making of the collection {folder.shown}")

    def _look(self) -> Stored:
        stored = super()._look()
        servers, origin = self._task.servers, self._address.origin
        told = stored.digests or self._target.signed or self._task.no_digests or servers.silent(origin)
        if stored.size_bytes is not None and told:
            return stored
        asked = self._properties()
        if stored.size_bytes is not None and not asked.digests:
            servers.learn_silent(origin)
        size_bytes = asked.size_bytes if stored.size_bytes is None else stored.size_bytes
        return Stored(size_bytes, {**asked.digests, **stored.digests})

    def _shows_what_it_has(self) -> bool:
        return self._task.servers.moves(self._address.origin) is True

    def _properties(self) -> Stored:
        body = {pycurl.POSTFIELDS: _PROPERTIES}
        headers = ("Depth: 0", 'Content-Type: application/xml; charset="utf-8"')
        reply = self._http.ask("PROPFIND", self._target, headers, options=body)
        return _stored_by_properties(reply.text) if reply.status == 207 else Stored()

    def _publish(self) -> bool:
        if self._target == self._address:
            return True
        reply = self._http.ask("MOVE", self._target, (f"Destination: {self._address.url}", "Overwrite: T"))
        if reply.status in _CANNOT_MOVE:
            self.abandon()
            return self._rename_no_more(f"the server cannot rename files ({reply.status})")
        if reply.status == 404:
            return self._published_before()
        if not reply.success or reply.status == 207:
            raise self._http.failure(reply, f"renaming of {self._path.name} to its final name")
        self._left_over = False
        return self._arrived()

    def _rename_no_more(self, why: str) -> bool:
        """Send this file, and all others to this server, under the final name."""
        self._left_over = False
        self._task.servers.learn_moving(self._address.origin, moves=False)
        self._task.context.log(f"{why}; sent again under the final name")
        return False

    def _arrived(self) -> bool:
        """Look, after the first rename into a collection: what stands between may know it by another path."""
        collection = (self._address.parent() or self._address).url
        if self._task.servers.confirmed(collection):
            return True
        self._target = self._address
        try:
            self._compare(super()._look())
        except TransferFailure as failure:
            if failure.kind not in (ErrorClass.SIZE_MISMATCH, ErrorClass.CONTENT_MISMATCH):
                raise
            return self._rename_no_more("the server renamed the file to another place")
        self._task.servers.confirm(collection)
        return True

    def _published_before(self) -> bool:
        """The temporary file is gone: either the answer to an earlier MOVE was lost, or the server lost the file."""
        temporary, self._target = self._target, self._address
        try:
            self._check()
        except TransferFailure as failure:
            if failure.kind not in (ErrorClass.SIZE_MISMATCH, ErrorClass.CONTENT_MISMATCH):
                raise
            self._target = temporary
            return False
        self._left_over = False
        return True


def _stored_by_properties(body: bytes) -> Stored:
    """Size and digests out of a multi-status answer."""
    from xml.etree import ElementTree

    try:
        tree = ElementTree.fromstring(body)
    except ElementTree.ParseError:
        return Stored()
    length = tree.findtext(".//{DAV:}getcontentlength") or ""
    texts = [element.text or "" for element in tree.iter("{http://owncloud.org/ns}checksum")]
    digests = stated_by_server({"oc-checksum": " ".join(texts)}, whole_body=True)
    return Stored(int(length) if length.strip().isdigit() else None, digests)
