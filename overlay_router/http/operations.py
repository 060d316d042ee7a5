"""Requests about operations in a worker: heads, signatures, and the bytes of files. The daemon decides.

The worker does not know the role of the router. It verifies tokens and signatures, writes blocks whose digests are
right into the file that the daemon hands it, and says which.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs

from overlay_router.http.exchange import Exchange
from overlay_router.http.files import Files
from stageout.overlay.http import operations, signing
from stageout.overlay.http.conditions import ranges
from stageout.overlay.http.heads import CHUNKED, Refused
from stageout.overlay.http.names import path_of
from stageout.overlay.http.operations import BLOCK_BYTES, FIELDS_TYPE, FOLDER, SIGNED_TYPE, DigestKind
from stageout.overlay.http.signing import BadJws
from stageout.overlay.http.tokens import Access
from stageout.overlay.rules.operations import BATCH_SIZE, Fields, Hop, bearer_owner, signed_owner
from stageout.overlay.rules.rights import (
    BadToken,
    Grant,
    NoRight,
    Right,
    Token,
    check_bearer,
    check_chain,
    issuer_of,
    owner_of,
    segments,
)

Facts = dict[str, Any]
_PLACE = re.compile(rf"{FOLDER}/o/([0-9a-f]{{32}})(?:/([^/]+))?(?:/([^/]+))?/?")
_LOTS = re.compile(rf"{FOLDER}/lots(?:/([0-9a-f]{{32}}))?/?")
_PAGE_BYTES = 4096
#: Digests of a block list that one question brings.
_LIST_BYTES = 128 * 1024
_MOST_LIST_BYTES = 64 << 20
_WAIT = re.compile(r"(?:^|,)\s*wait=([0-9]{1,4})\b")
_NO_STORE = {"Cache-Control": "no-store"}
_JSON = "application/json"
_PRIORITIES = range(11)


class Operations:
    """Answers requests below ``/.stageout/v1``. :param access: of this moment."""

    def __init__(self, access: Any) -> None:
        self._access = access

    def __call__(self, one: Exchange) -> None:
        """Answer one request. :raises Refused: it is refused."""
        lot = _LOTS.fullmatch(one.own)
        if lot is not None:
            return _Request(one, self._access(), "").lot(lot[1])
        found = _PLACE.fullmatch(one.own)
        if found is None:
            raise Refused(404, "there is no such resource")
        origin, number, part = found[1], found[2], found[3]
        request = _Request(one, self._access(), origin)
        methods = request.methods(number, part)
        handler = methods.get(one.head.method)
        if handler is None:
            raise Refused(405, "this is not done here", {"Allow": ", ".join(methods)})
        handler()
        return None

    def asker(self, one: Exchange) -> Facts:
        """Return who asks for something that has no number. :raises Refused: 403."""
        return _Request(one, self._access(), "")._asker()


class _Request:
    """One request about operations of an origin."""

    def __init__(self, one: Exchange, access: Access, origin: str) -> None:
        self._one, self._access, self._origin = one, access, origin
        self._seq, self._last, self._query = 0, 0, parse_qs(one.query, keep_blank_values=True)

    def methods(self, number: str | None, part: str | None) -> Mapping[str, Any]:
        """Return what can be done at a place. :raises Refused: there is none."""
        if number is None:
            return {"GET": self.results}
        if number == "low" and part is None:
            return {"PUT": self.low}
        if "-" in number and part is None:
            first, _, last = number.partition("-")
            self._seq, self._last = operations.seq_of(first), operations.seq_of(last)
            return {"PUT": self.batch}
        self._seq = operations.seq_of(number)
        if part is None:
            return {"PUT": self.begin, "GET": self.state, "DELETE": self.cancel}
        if part == "data":
            return {"PUT": self.data, "GET": self.bytes_kept}
        if part == "manifest":
            return {"PUT": self.manifest, "GET": self.list_kept}
        raise Refused(404, "there is no such resource")

    def begin(self) -> None:
        """``PUT O``."""
        fields, jws, signer = self._fields(signing.OPERATION)
        who, hop, token = self._who(fields, signer)
        release = self._one.head.get("stageout-release") or "delivered"
        if release not in ("delivered", "custody"):
            raise Refused(400, "Stageout-Release is delivered or custody")
        self._answer(
            "begin", who=who, fields=operations.to_json(fields).decode(), jws=jws, hop=hop, token=token,
            release=release, wishes=self._wishes(),
        )  # fmt: skip

    def cancel(self) -> None:
        """``DELETE O``."""
        fields, jws, signer = self._fields(signing.CANCEL)
        self._check_terminal(fields)
        self._answer("cancel", who=self._asker(signer), fields=operations.to_json(fields).decode(), jws=jws)

    def state(self) -> None:
        """``GET O``."""
        facts = {"origin": self._origin, "seq": self._seq, "until": self._until(), "wait_s": self._wait_s()}
        self._answer("state", who=self._asker(), **facts)

    def results(self) -> None:
        """``GET`` of an origin: commit and push."""
        first, to = operations.seq_of(self._asked("from", "1")), self._asked("to", "")
        last = operations.seq_of(to) if to else 0
        if last and last < first:
            raise Refused(400, "from and to are numbers in their order")
        facts, _ = self._ask(
            "results", who=self._asker(), origin=self._origin, first=first, last=last, until=self._until(),
            wait_s=self._wait_s(),
        )  # fmt: skip
        self._json(200, facts)

    def low(self) -> None:
        """``PUT low``."""
        body = self._one.body(operations.MOST_FIELDS_BYTES)
        jws, signer = "", ""
        if self._one.head.get("content-type").partition(";")[0].strip() == SIGNED_TYPE:
            jws = body.decode("latin-1")
            signer, body = self._verified(signing.LOW, jws)
        facts = operations.json_object(body, operations.MOST_FIELDS_BYTES)
        if facts.keys() - {"below", "origin"} or (jws and facts.get("origin") != self._origin):
            raise Refused(400, 'the body is {"below": NUMBER}, signed with its origin')
        below = operations.whole(facts.get("below"), "below", 1)
        self._ask("low", who=self._asker(signer), origin=self._origin, below=below, jws=jws)
        self._one.answer(204, _NO_STORE)

    def lot(self, number: str | None) -> None:
        """``POST`` of a lot; ``GET`` and ``DELETE`` of one."""
        methods = ("GET", "DELETE") if number else ("POST",)
        if self._one.head.method not in methods:
            raise Refused(405, "this is not done here", {"Allow": ", ".join(methods)})
        if number:
            releases = self._one.head.method == "DELETE"
            told, _ = self._ask("lot", who=self._asker(), number=number, releases=releases)
            if releases:
                self._one.answer(204, _NO_STORE)
            else:
                self._json(200, told)
            return
        facts = operations.json_object(self._one.body(operations.MOST_FIELDS_BYTES), operations.MOST_FIELDS_BYTES)
        if facts.keys() - {"bytes", "seconds", "below"} or not isinstance(facts.get("below", "/"), str):
            raise Refused(400, 'the body is {"bytes": NUMBER, "seconds": NUMBER, "below": PATH}')
        below = path_of(facts.get("below", "/"))[0]
        size, seconds = (operations.whole(facts.get(name), name, 1) for name in ("bytes", "seconds"))
        self._one.allow(Right.CREATE, below)
        told, _ = self._ask("reserve", who=self._asker(), bytes=size, seconds=seconds, below=below)
        body = json.dumps({**told, "below": facts.get("below", "/")}).encode() + b"\n"
        place = {"Location": f"{FOLDER}/lots/{told['id']}", "Content-Type": _JSON, **_NO_STORE}
        self._one.answer(201, place, body)

    def data(self) -> None:
        """``PUT O/data``: a range of the file."""
        head = self._one.head
        first, end = operations.content_range(head.get("content-range"), None)
        size = None if head.get("content-range").endswith("/*") else int(head.get("content-range").rpartition("/")[2])
        if head.body_bytes == CHUNKED or head.body_bytes != end - first:
            raise Refused(400, "the body has the length of its range, not chunked")
        if end % BLOCK_BYTES and end != size:
            raise Refused(400, "a range ends with a whole block, or with the file")
        number, count = first // BLOCK_BYTES, operations.blocks_of(end - first)
        who, place = self._asker(), {"origin": self._origin, "seq": self._seq}
        files = self._one.files
        facts, file = self._ask(
            "claim", who=who, **place, first=number, count=count, size=size, digests=head.get("stageout-blocks"),
            has=files.at,
        )  # fmt: skip
        if file >= 0:
            files.take(facts["at"], file)
        sizes = operations.SIZES[facts["block_kind"]]
        said = operations.digests_of(head.get("stageout-blocks"), sizes)
        range_ = _Range(self._one, files, _kind(facts["block_kind"]), _kind(facts["digest_kind"]))
        kept = {int(at): bytes.fromhex(text) for at, text in facts["kept"].items()}
        try:
            range_.run(number, end - first, said, kept)
        finally:
            # what came before a cut counts
            with suppress(OSError, Refused) if range_.is_cut else nullcontext():
                self._ask("received", who=who, **place, first=number, count=count, blocks=range_.blocks)
        if range_.wrong:
            raise Refused(422, "the digests of some blocks are others", None, {"blocks": range_.wrong})
        if range_.differs:
            members = {"reason": "block-differs", "blocks": range_.differs}
            raise Refused(409, "a block has another digest here", None, members)
        self._one.answer(204, _NO_STORE)

    def manifest(self) -> None:
        """``PUT O/manifest``."""
        head = self._one.head
        size_text = head.get("stageout-size")
        if not size_text.isascii() or not size_text.isdigit() or len(size_text) > 18:
            raise Refused(400, "Stageout-Size is the size of the file")
        signed, signer, jws = None, "", head.get("stageout-signature")
        if jws:
            signer, payload = self._verified(signing.MANIFEST, jws)
            signed = {"signer": signer, "payload": operations.json_object(payload, operations.MOST_FIELDS_BYTES)}
        listed, who = self._one.body(_MOST_LIST_BYTES), self._asker(signer)
        for at in range(0, len(listed), _LIST_BYTES):
            self._ask("list", who=who, data=listed[at : at + _LIST_BYTES].hex())
        self._answer(
            "manifest", who=who, origin=self._origin, seq=self._seq, size=int(size_text), jws=jws, signed=signed
        )

    def batch(self) -> None:
        """``PUT`` of small files in one body."""
        head = self._one.head
        size, jws, signer = head.body_bytes, head.get("stageout-signature"), ""
        if head.get("content-type").partition(";")[0].strip() != operations.BATCH_TYPE:
            raise Refused(415, f"the body is {operations.BATCH_TYPE}")
        if not 0 < size <= BATCH_SIZE + operations.MOST_LINE_BYTES:  # chunked ones are -1
            raise Refused(413 if size > 0 else 400, "a batch has its length, and at most 64 MiB of files")
        _, file = self._ask("room", who=self._asker(), size=size)
        try:
            with mmap.mmap(file, size) as memory, memoryview(memory) as view:
                filled = 0
                while filled < size:
                    filled += self._one.read_into(view[filled:])
                end = memory.find(b"\n", 0, operations.MOST_LINE_BYTES + 1)
                if end < 0:
                    raise Refused(400, "a batch begins with a line of JSON")
                line = bytes(view[:end])
                if jws:
                    signer, payload = self._verified(signing.BATCH, jws)
                    if payload != signing.batch_payload(line):
                        raise Refused(403, "the signature is for another batch")
                with view[end + 1 :] as data:
                    who, denied = self._checked(data, line, signer)
        finally:
            os.close(file)
        told, _ = self._ask(
            "batch", who=who, line=end, size=size, origin=self._origin, first=self._seq, last=self._last, jws=jws,
            denied=denied,
        )  # fmt: skip
        lines = [*told["failed"], {"done": self._last - self._seq + 1 - len(told["failed"])}]
        body = b"".join(json.dumps(one).encode() + b"\n" for one in lines)
        self._one.answer(200, {"Content-Type": "application/x-ndjson", **_NO_STORE}, body)

    def _checked(self, data: memoryview, line: bytes, signer: str) -> tuple[Facts, dict[str, str]]:
        """Return who brings a batch, and why files are denied, by number. :raises Refused: 422: digests are wrong."""
        files = operations.batch_of(line, self._origin, self._seq, self._last)
        who, at, wrong, denied = self._asker(signer), 0, [], dict[str, str]()
        digest = _kind(files[0][0].digest_kind).of
        for fields, said in files:
            end = at + (fields.size or 0)
            if end > len(data) or digest(data[at:end]) != said:
                wrong.append(fields.seq)
            at = end
            why = self._who(fields, signer)[0]["denied"]
            if why:
                denied[str(fields.seq)] = why
        if at != len(data):
            raise Refused(400, "the batch has other bytes than its line says")
        if wrong:
            raise Refused(422, "the digests of some files are others", None, {"files": wrong[:1000]})
        return who, denied

    def bytes_kept(self) -> None:
        """``GET O/data``: what is kept here of a file."""
        facts, file = self._ask("bytes", who=self._asker(), origin=self._origin, seq=self._seq)
        try:
            size = facts["size"] or 0
            parts = ranges(self._one.head, size, "", "") or [(0, size)]
            first, end = parts[0][0], parts[-1][1]
            numbers = range(first // BLOCK_BYTES, operations.blocks_of(end))
            if not all(any(low <= at <= high for low, high in facts["have"]) for at in numbers):
                raise Refused(409, "not all of these bytes are here", None, {"have": facts["have"]})
            status = 206 if len(parts) == 1 and self._one.head.get("range") else 200
            fields = {"Content-Length": str(end - first), "Content-Type": "application/octet-stream", **_NO_STORE}
            if status == 206:
                fields["Content-Range"] = f"bytes {first}-{end - 1}/{size}"
            self._one.begin(status, {**fields, **self._one.safe})
            self._one.stream.send_file(file, first, end - first)
        finally:
            os.close(file)

    def list_kept(self) -> None:
        """``GET O/manifest``."""
        facts, _ = self._ask("kept_list", who=self._asker(), origin=self._origin, seq=self._seq)
        body = bytes.fromhex(facts["list"])
        self._one.answer(200, {"Content-Type": "application/octet-stream", **_NO_STORE}, body)

    def _ask(self, question: str, **facts: Any) -> tuple[Facts, int]:
        return self._one.desk.ask(f"operation-{question}", via=self._one.via, **facts)

    def _answer(self, question: str, **facts: Any) -> None:
        """Ask, and answer with the state."""
        told, _ = self._ask(question, **facts)
        status, state = told["status"], told["state"]
        if status >= 400:
            raise Refused(status, f"the operation is {state['state']}", None, {**state, "reason": state["state"]})
        self._json(status, state)

    def _json(self, status: int, facts: Facts) -> None:
        applied = {"Preference-Applied": f"wait={self._wait_s():.0f}"} if self._wait_s() else {}
        body = json.dumps(facts).encode() + b"\n"
        self._one.answer(status, {"Content-Type": _JSON, **_NO_STORE, **applied}, body)

    def _fields(self, kind: str) -> tuple[Fields, str, str]:
        """Return the fields in the body, their signature, and the thumbprint of its key."""
        body, jws, signer = self._one.body(operations.MOST_FIELDS_BYTES), "", ""
        media = self._one.head.get("content-type").partition(";")[0].strip().lower()
        if media == SIGNED_TYPE:
            jws = body.decode("latin-1")
            signer, body = self._verified(kind, jws)
        elif media != FIELDS_TYPE:
            raise Refused(415, f"the body is {FIELDS_TYPE} or {SIGNED_TYPE}")
        fields = operations.from_json(body)
        if (fields.origin, fields.seq) != (self._origin, self._seq):
            raise Refused(400, "the fields are of another operation than the URL")
        _kind(fields.block_kind)
        _kind(fields.digest_kind)
        return fields, jws, signer

    def _verified(self, kind: str, jws: str) -> tuple[str, bytes]:
        """Return the thumbprint of the key that signed, and the payload. :raises Refused: 403."""
        try:
            signer = signing.signer(jws)
            known = self._access.key(signer)
            public = known[0] if known else self._holder_key()
            if not public:
                raise Refused(403, "the key of the signature is not known here")
            return signer, signing.verified(kind, jws, public)
        except BadJws as why:
            raise Refused(403, f"the signature cannot be used: {why}") from None

    def _holder_key(self) -> str:
        """Return the key to which the sender's token is bound, "" without one. :raises Refused: 403."""
        text = self._one.head.get("stageout-token")
        try:
            return (self._access.chain(text) if text else self._one.subject).holder_key
        except BadToken as why:
            raise Refused(403, str(why)) from None

    def _check_terminal(self, fields: Fields) -> None:
        """:raises Refused: the operation is for another router."""
        here = self._one.via[-1] if self._one.via else ""
        if (here and fields.terminal.lower() != here) or (not here and fields.terminal not in self._access.audiences):
            raise Refused(403, f"the operation is for {fields.terminal}")

    def _asker(self, signer: str = "") -> Facts:
        """Return who asks. :param signer: of this request."""
        subject = self._one.subject
        authority = self._access.authority(subject)
        token = replace(subject.token, issuer=authority[0])
        owners = [bearer_owner(token.issuer, token.subject)]
        is_user = subject.token.is_own and token.subject == subject.token.issuer and not token.holder
        if is_user:
            owners.append(signed_owner(token.issuer))
        elif token.holder:
            owners.append(signed_owner(token.holder))
        is_router = is_user and subject.token.issuer in self._access.routers
        if signer and (signer in (token.issuer, token.holder) or is_router):
            owners.insert(0, signed_owner(signer))
        elif signer:
            raise Refused(403, "another key has signed this than the one of the token")
        return {
            "owner": owner_of(token, signer), "means": self._one.head.get("stageout-owner"),
            "owners": owners, "issuer": issuer_of(token, signer),
            "share": subject.name, "router": subject.token.issuer if is_router else "", "denied": "",
            "authority": authority,
        }  # fmt: skip

    def _who(self, fields: Fields, signer: str) -> tuple[Facts, Hop, str]:
        """Return who brings an operation, with what its token denies; the hop; and the sender's own token.

        :raises Refused: the operation is for another router, or its token cannot be used.
        """
        self._check_terminal(fields)
        who, head, now = self._asker(signer), self._one.head, time.time()
        router, hop = who["router"], self._hop(who["router"])
        text, authority = head.get("stageout-token"), who["authority"]
        try:
            known_as = self._access.chain if signer else self._access.subject
            subject = known_as(text) if text else self._one.subject
            authority = self._access.authority(subject)
            token = replace(subject.token, issuer=authority[0])
            if signer and not text and router:  # a user's own key, which needs no token
                known = self._access.key(signer)
                authority = (signer, known[1] if known else "-")
                token = _of_key(*authority)
            token = replace(token, audiences=frozenset({fields.terminal}))
            who["authority"], who["issuer"] = authority, issuer_of(token, signer)
            prefixes = {authority[0]: "" if authority[1] == "-" else authority[1]}
            received, listed = hop.received, frozenset({router} if router else ())
            if signer:
                check_chain(fields, token, signer, fields.terminal, prefixes, now, received, router, listed)
            else:
                check_bearer(fields, token, fields.terminal, prefixes, now)
        except NoRight as why:
            who["denied"] = str(why)
        except BadToken as why:
            raise Refused(403, str(why)) from None
        return who, hop, text or subject.delegated

    def _hop(self, router: str) -> Hop:
        """Return the hop of a request: custodian, epoch, order, time of receipt, known epoch of the terminal."""
        known = _number(self._one.head.get("stageout-known-epoch"), "Stageout-Known-Epoch")
        told = self._one.head.get("stageout-custodian").split()
        if not told or not router:
            return Hop(known_epoch=known)
        if len(told) != 4 or told[0] != router:
            raise Refused(403, "Stageout-Custodian names another router than the token")
        epoch, order, received = (_number(one, "Stageout-Custodian") for one in told[1:])
        return Hop(router, epoch, order, received, known)

    def _wishes(self) -> dict[str, str]:
        found = {name: self._one.head.get(f"stageout-{name}") for name in ("lot", "priority", "deadline")}
        if found["priority"] and _number(found["priority"], "Stageout-Priority") not in _PRIORITIES:
            raise Refused(400, "Stageout-Priority is 0 to 10")
        _number(found["deadline"], "Stageout-Deadline")
        return {name: value for name, value in found.items() if value}

    def _asked(self, name: str, default: str) -> str:
        return self._query.get(name, [default])[-1]

    def _until(self) -> str:
        until = self._asked("until", "done")
        if until not in ("done", "custody"):
            raise Refused(400, "until is done or custody")
        return until

    def _wait_s(self) -> float:
        found = _WAIT.search(self._one.head.get("prefer"))
        return float(min(60, int(found[1]))) if found else 0.0


class _Range:
    """A range on its way to the disk. :ivar blocks: number and digests of those that are right, as they are told.

    :ivar wrong: those with other digests than said. :ivar differs: those with other digests than before.
    """

    def __init__(self, one: Exchange, files: Files, block: DigestKind, listed: DigestKind) -> None:
        self._one, self._files, self._digest, self._listed = one, files, block, listed
        self.blocks: list[list[object]] = []
        self.wrong: list[int] = []
        self.differs: list[int] = []
        self.is_cut = False

    def run(self, number: int, size: int, said: list[bytes], kept: Mapping[int, bytes]) -> None:
        """Read, compare and write all of it. :raises Refused: 507. :raises OSError: the connection is cut."""
        memory, at = self._files.block(), 0
        try:
            while size:
                view, filled = memory[: min(size, BLOCK_BYTES)], 0
                self.is_cut = True
                while filled < len(view):
                    filled += self._one.read_into(view[filled:])
                self.is_cut = False
                self._block(number + at, view, said[at] if said else b"", kept.get(number + at))
                size, at = size - len(view), at + 1
        except OSError as problem:
            if problem.errno in (errno.ENOSPC, errno.EDQUOT):
                raise Refused(507, "the router's disk is full", {"Retry-After": "60"}) from problem
            raise

    def _block(self, number: int, data: memoryview, said: bytes, kept: bytes | None) -> None:
        digest = self._digest.of(data)
        if said and digest != said:
            self.wrong.append(number)
            return
        if kept is not None:
            if digest != kept:
                self.differs.append(number)
            return
        is_direct = self._files.direct >= 0 and len(data) % _PAGE_BYTES == 0
        target, offset, left = self._files.direct if is_direct else self._files.file, number * BLOCK_BYTES, data
        while left:
            written = os.pwrite(target, left, offset)
            left, offset = left[written:], offset + written
        listed = digest if self._listed is self._digest else self._listed.of(data)
        self.blocks.append([number, digest.hex(), listed.hex()])


_KINDS = operations.digest_kinds()


def _kind(name: str) -> DigestKind:
    """Return a kind of digests. :raises Refused: this machine cannot compute it."""
    found = _KINDS.get(name)
    if found is None:
        raise Refused(400, f"digests are of these kinds here: {', '.join(_KINDS)}")
    return found


def _of_key(print_of_it: str, prefix: str) -> Token:
    """Return the rights of a user's own key, as a token would have them."""
    grants = () if prefix == "-" else (Grant(frozenset(Right), segments(prefix)),)
    return Token(print_of_it, "", frozenset(), grants, 0, 0, float("inf"), is_own=True)


def _number(text: str, name: str) -> int:
    if not text:
        return 0
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise Refused(400, f"{name} is malformed")
    return int(text)
