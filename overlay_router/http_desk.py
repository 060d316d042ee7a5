"""The daemon's side of HTTP: it decides about names for the connections that workers serve."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import sqlite3
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from overlay_router.ends import Ends
from overlay_router.http_relay import Relaying
from overlay_router.local.destination import Destination
from overlay_router.local.replies import Published, Reply
from overlay_router.local.tree import no_room
from overlay_router.operations.desk import MARK, OperationsDesk, Talk
from overlay_router.peers.keys import Key
from overlay_router.peers.limits import Limits, TooMany
from overlay_router.peers.rights import Rights
from stageout.core import log
from stageout.core.errors import ErrorClass
from stageout.overlay.http.conditions import is_among
from stageout.overlay.http.heads import Refused
from stageout.overlay.wire import frames
from stageout.overlay.wire.messages import BLOCK_BYTES, Answer, Open, Operation, Result

#: Senders of transfers that come by HTTP: they end with their connections.
SENDER = "http:"
#: A body may take so long.
_EXPIRES_S = 86_400
_LINE_BYTES = 1 << 20
_AGAIN = {"Retry-After": "5"}
Facts = dict[str, Any]
T = TypeVar("T")
OnDisk = Callable[[Callable[[], T]], Awaitable[T]]


class HttpDesk:
    """Answers the questions of all workers.

    :param on_disk: runs a call in the thread that owns the disk. :param deliver: sends replies to others.
    :param relaying: connects clients to other routers. :param operations: answers about operations.
    """

    def __init__(
        self,
        ends: Ends,
        rights: Rights,
        limits: Limits,
        on_disk: OnDisk[Any],
        deliver: Callable[[list[Reply]], None],
        relaying: Relaying,
        operations: OperationsDesk,
    ) -> None:
        self.ends, self.rights, self.limits, self.on_disk, self.deliver = ends, rights, limits, on_disk, deliver
        self.relaying, self.operations = relaying, operations

    async def serve(self, channel: socket.socket, raw: socket.socket, host: str, end: Callable[[], object]) -> None:
        """Answer about one connection until its worker ends it.

        :param raw: the connection, which is shut when this ends. :param end: ends this task.
        """
        with contextlib.ExitStack() as counted:
            counted.callback(_shut, raw)
            proved = counted.enter_context(self.limits.stranger(host, end))
            talk = _Talk(self, proved, end)
            try:
                await talk.run(channel)
            finally:
                await talk.forget()


class _Talk:
    """The conversation about one connection."""

    def __init__(self, desk: HttpDesk, proved: Callable[[str], None], end: Callable[[], object]) -> None:
        self._desk, self._proved, self._end = desk, proved, end
        self._counted = contextlib.ExitStack()
        self._origin, self._seq, self._tid = secrets.token_hex(16), 0, 0
        self._operations = Talk()

    async def run(self, channel: socket.socket) -> None:
        """Answer one question after the other. :raises OSError: the worker has ended."""
        loop, data = asyncio.get_running_loop(), bytearray()
        while True:
            while (at := data.find(b"\n")) < 0:
                part = await loop.sock_recv(channel, 65536)
                if not part or len(data) > _LINE_BYTES:
                    return
                data += part
            question = json.loads(data[:at])
            del data[: at + 1]
            descriptor = -1
            try:
                answer, descriptor = await self._answer(question.pop("ask"), question)
            except Refused as why:
                answer = {
                    "refused": why.status, "reason": why.reason, "headers": why.headers, "members": why.members
                }  # fmt: skip
            except TooMany as why:
                answer = {"refused": 429, "reason": str(why), "headers": _AGAIN}
            except (OSError, sqlite3.Error) as problem:
                answer = _of_disk(problem)
            told = json.dumps(answer).encode() + b"\n"
            try:
                if descriptor >= 0:
                    told = told[socket.send_fds(channel, [told], [descriptor]) :]
                await loop.sock_sendall(channel, told)
            finally:
                if descriptor >= 0:
                    os.close(descriptor)

    async def forget(self) -> None:
        """The connection has ended: what it began and did not finish is dropped."""
        self._counted.close()
        await self._desk.operations.forget(self._operations)
        with contextlib.suppress(OSError, sqlite3.Error):  # they expire, then
            if self._tid:
                await self._drop()
            if self._seq:
                await self._desk.on_disk(lambda: self._tree.forget_origin(self._origin))

    @property
    def _tree(self) -> Destination:
        if self._desk.ends.destination is None:
            raise Refused(404, "this router keeps no files")
        return self._desk.ends.destination

    async def _answer(self, name: str, facts: Facts) -> tuple[Facts, int]:
        if name == "proved":
            self._counted.close()
            self._proved(facts["share"])
            self._counted.enter_context(self._desk.limits.peer(facts["share"], self._end))
            return {}, -1
        if name == "connect":
            return {}, (await self._desk.relaying.connected(**facts)).detach()
        if name.startswith(MARK):
            return await self._desk.operations.answer(self._operations, name, facts)
        tree = self._tree
        if name == "look":
            self._is_here(facts["path"])
            found: tuple[Facts, int] = await self._desk.on_disk(partial(look, tree, **facts))
            return found
        if name == "open":
            return await self._open(tree, facts)
        if name == "staged":
            first = facts["first"]
            blocks = [(first + at, bytes.fromhex(digest)) for at, digest in enumerate(facts["digests"])]
            await self._desk.on_disk(lambda: tree.staged(self._tid, blocks))
            return {}, -1
        if name == "publish":
            return await self._publish(tree, facts), -1
        if name == "drop":
            await self._drop()
            return {}, -1
        return await self._operate(tree, facts), -1

    def _is_here(self, *paths: str) -> None:
        """:raises Refused: a plugin delivers what is below one of these names."""
        if any(map(self._desk.ends.goes_out, paths)):
            raise Refused(501, "a plugin delivers what is below this name: use stageout put and get")

    def _may_write(self, *paths: str) -> None:
        self._is_here(*paths)
        if self._desk.rights.insists:
            raise Refused(403, "this router takes nothing without a capability: use stageout put")

    async def _open(self, tree: Destination, facts: Facts) -> tuple[Facts, int]:
        path = facts["path"]
        self._may_write(path)
        if self._tid:
            await self._drop()
        digest = next(iter(frames.digests()))
        key = Key(facts["share"], b"", "")
        self._seq += 1
        ask = Open(self._origin, self._seq, path, facts["size"], BLOCK_BYTES, int(time.time()) + _EXPIRES_S)
        full = self._desk.rights.reserve(key, ask, int(time.time()))
        if full:
            raise Refused(429, full, _AGAIN)
        sender = f"{facts['share']}/{self._origin}"

        def opened() -> tuple[int, int]:
            _check(tree, facts)
            message = tree.open(ask, sender, digest).message
            tid = getattr(message, "tid", 0)
            if not tid:
                status = 409 if isinstance(message, Result) else 507
                raise Refused(status, getattr(message, "reason", "") or "the router's disk is full", _AGAIN)
            found = tree.attach(tid)
            assert found is not None
            return tid, found.file

        try:
            self._tid, file = await self._desk.on_disk(opened)
        except BaseException:
            self._release()
            raise
        return {"digest": digest}, file

    async def _publish(self, tree: Destination, facts: Facts) -> Facts:
        sender, tid, path = f"{facts['share']}/{self._origin}", self._tid, facts["path"]
        operation = Operation(
            self._origin, self._seq, "publish", path, int(time.time()) + _EXPIRES_S, absent=facts["absent"], tid=tid,
            size_bytes=facts["size"], blocks=facts["blocks"], manifest=facts["manifest"], parents=facts["parents"],
        )  # fmt: skip

        def published() -> tuple[list[Reply], int, str]:
            before = _check(tree, facts)
            tree.sized(tid, facts["size"])
            replies = tree.operate(operation, sender)
            return replies, 204 if before else 201, tree.etag(path)

        replies, status, etag = await self._desk.on_disk(published)
        self._judge(replies, sender)
        self._tid = 0
        self._release()
        return {"status": status, "etag": etag}

    async def _operate(self, tree: Destination, facts: Facts) -> Facts:
        path, target = facts["path"], facts.get("target", "")
        self._may_write(path, target)
        self._seq += 1
        sender = f"{facts['share']}/{self._origin}"
        operation = Operation(
            self._origin, self._seq, facts["kind"], path, int(time.time()) + _EXPIRES_S, target=target, mode=0o755
        )  # fmt: skip

        def done() -> tuple[list[Reply], bool]:
            kind, there = facts["kind"], bool(tree.etag(path))
            if kind == "mkdir" and there:
                raise Refused(405, "there is something under that name already")
            if kind != "mkdir" and not there:
                raise Refused(404, "there is no such name")
            match = facts.get("match")
            if match and not is_among(tree.etag(path), match):
                raise Refused(412, "there is another version under that name")
            had = bool(target) and bool(tree.etag(target))
            if had and facts["absent"]:
                raise Refused(412, "there is something under that name already")
            if had and facts["creates"]:
                raise Refused(403, "the token gives no right to modify this name")
            return tree.operate(operation, sender), had

        replies, had = await self._desk.on_disk(done)
        self._judge(replies, sender)
        return {"replaced": had}

    def _judge(self, replies: list[Reply], sender: str) -> None:
        """:raises Refused: the operation was not done."""
        mine = [reply.message for reply in replies if reply.to == sender]
        self._desk.deliver([reply for reply in replies if reply.to != sender])
        result = next((one for one in mine if isinstance(one, Result)), None)
        if result is None:
            raise Refused(503, "the operation waits for others", _AGAIN)
        if result.outcome == "done":
            return
        if result.reason == "precondition":
            raise Refused(412, "there is another version under that name")
        if result.reason.startswith("conflict: "):
            raise Refused(409, result.reason.partition(" ")[2])
        raise Refused(403 if result.reason == os.strerror(13) else 500, result.reason or result.outcome)

    async def _drop(self) -> None:
        tid, self._tid = self._tid, 0
        self._release()
        await self._desk.on_disk(lambda: self._tree.drop(tid))

    def _release(self) -> None:
        self._desk.rights.release(self._origin, self._seq)


def look(tree: Destination, path: str, first: int = 0, blocks: int = 0) -> tuple[Facts, int]:
    """Return what a name is, and its descriptor. :raises Refused: 404. :raises OSError: it cannot be read.

    :param first: block from which on its kept digests are wanted, and how many :param blocks:.
    """
    if path:
        found = tree.published(path, -1, first, blocks or 1)
        if isinstance(found, Published):
            kept = {"kind": found.content.digest, "digests": found.digests.hex()} if blocks and found.content else {}
            return {"directory": False, "etag": tree.tag_of(path, os.fstat(found.file)), **kept}, found.file
        if found.code == ErrorClass.PERMISSION_DENIED.code:
            raise Refused(403, "the router's user may not read it")
        if found.code != ErrorClass.CONFLICT.code:
            raise _missing(found)
    try:
        return {"directory": True}, tree.directory(path)
    except NotADirectoryError:
        raise Refused(403, "this name is neither a file nor a directory") from None


def _missing(found: Answer) -> Refused:
    if found.code == ErrorClass.NOT_FOUND.code:
        return Refused(404, "there is no such name")
    return Refused(503, found.message, _AGAIN)


def _check(tree: Destination, facts: Facts) -> bool:
    """Check conditions of a PUT; whether something is under its name. :raises Refused: one does not hold."""
    etag = tree.etag(facts["path"])
    if (etag and facts["absent"]) or (facts["match"] and not (etag and is_among(etag, facts["match"]))):
        raise Refused(412, "there is another version under that name")
    if etag and facts["creates"]:
        raise Refused(403, "the token gives no right to modify this name")
    return bool(etag)


def _of_disk(problem: Exception) -> Facts:
    if no_room(problem):
        return {"refused": 507, "reason": "the router's disk is full", "headers": {"Retry-After": "60"}}
    log.error("http-request-failed", problem=repr(problem))
    words = problem.strerror if isinstance(problem, OSError) else ""
    return {"refused": 503, "reason": f"the router's disk: {words or 'its records'}", "headers": {"Retry-After": "30"}}


def _shut(raw: socket.socket) -> None:
    with contextlib.suppress(OSError):
        raw.shutdown(socket.SHUT_RDWR)
