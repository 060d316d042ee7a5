"""The REST interface: the work behind each operation of :mod:`policy_service.operations`.

Every answer except the HTML page is JSON or plain text.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel

from policy_service import openapi, views
from policy_service.bodies import LeaseAnswer, LeasesAnswer, read_body
from policy_service.lease_table import LeaseTable
from policy_service.model import Lease, RequestRefused
from policy_service.operations import OPERATIONS, Operation
from stageout.core import log
from stageout.core.metrics import Readings
from stageout.core.metrics_server import content_type, rendered
from stageout.core.tokens import TokenTable

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_MOST_BODY_BYTES = 16_384
_POLICY_FOR_PAGES = "default-src 'none'; style-src 'unsafe-inline'"


class Api:
    """The service's routes over one lease table.

    :param worker: one thread, which does all work on the table.
    """

    def __init__(self, table: LeaseTable, tokens: TokenTable, worker: ThreadPoolExecutor) -> None:
        self.table = table
        self.tokens = tokens
        self._worker = worker
        self._requests: Counter[tuple[str, int]] = Counter()

    def replace_tokens(self, tokens: TokenTable) -> None:
        """Let these tokens count from now on."""
        self.tokens = tokens

    def application(self) -> web.Application:
        """Return the application that aiohttp serves."""
        app = web.Application(middlewares=[self._answer], client_max_size=_MOST_BODY_BYTES)
        for operation in OPERATIONS:
            app.router.add_route(operation.method, operation.path, self._handler(operation), name=operation.name)
        return app

    async def call(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the lease table, in its thread.

        :raises RequestRefused: by ``work``, or with status 503 when the disk of the leases fails.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, work)
        except (sqlite3.Error, OSError) as problem:
            log.error("grant-write-failed", problem=problem, advice="see to the disk of STAGEOUT_POLICY_DIR")
            text = "the grant cannot be recorded: try again later, or tell the service's administrator"
            raise RequestRefused(503, text) from problem

    async def readings(self) -> Readings:
        """Return the metrics of this moment."""
        state = await self.call(lambda: views.LeaseSnapshot.of(self.table))
        return views.readings(state, self._requests)

    def _handler(self, operation: Operation) -> Handler:
        method: Callable[..., Awaitable[web.StreamResponse]] = getattr(self, f"_{operation.name}")

        async def handle(request: web.Request) -> web.StreamResponse:
            if operation.open_to_all:
                return await method()
            owner = self._owner(request)
            given: dict[str, Any] = dict(request.match_info)
            given.update(read_body(await request.read(), operation.body).model_dump())
            return await method(owner, **given)

        return handle

    def _owner(self, request: web.Request) -> str:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        owner = self.tokens.owner(token.strip()) if scheme.lower() == "bearer" else None
        if owner is None:
            raise RequestRefused(401, "send 'Authorization: Bearer TOKEN' with a token that this service knows")
        return owner

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn every failure into a JSON answer with one sentence, and count the request."""
        try:
            response = await handler(request)
        except RequestRefused as problem:
            response = _failed(problem.status, str(problem))
        except web.HTTPException as problem:
            response = _failed(problem.status, f"{problem.reason}: see /openapi.json")
            if "Allow" in problem.headers:
                response.headers["Allow"] = problem.headers["Allow"]
        name = request.match_info.route.name or "unknown"
        self._requests[name, response.status] += 1
        return response

    async def _request(self, owner: str, client: str, source: str, destination: str, wanted: int) -> web.Response:
        lease = await self.call(lambda: self.table.request(owner, client, source.lower(), destination.lower(), wanted))
        return _json(self._shown(lease), 201)

    async def _list_own(self, owner: str) -> web.Response:
        leases = await self.call(self.table.leases)
        return _json(LeasesAnswer(leases=[self._shown(lease) for lease in leases if lease.owner == owner]))

    async def _renew(self, owner: str, lease: str, wanted: int | None, in_use: int | None) -> web.Response:
        return _json(self._shown(await self.call(lambda: self.table.renew(owner, lease, wanted, in_use))))

    async def _report(self, owner: str, lease: str, in_use: int, rate_mb_s: float | None) -> web.Response:
        return _json(self._shown(await self.call(lambda: self.table.report(owner, lease, in_use, rate_mb_s))))

    async def _release(self, owner: str, lease: str) -> web.Response:
        await self.call(lambda: self.table.release(owner, lease))
        return web.Response(status=204)

    async def _metrics(self) -> web.Response:
        body = rendered(await self.readings(), with_process=False)
        return web.Response(body=body, headers={"Content-Type": content_type()})

    async def _describe(self) -> web.Response:
        return web.json_response(openapi.description(OPERATIONS))

    async def _page(self) -> web.Response:
        state = await self.call(lambda: views.LeaseSnapshot.of(self.table))
        headers = {"Content-Security-Policy": _POLICY_FOR_PAGES, "Refresh": "5"}
        return web.Response(text=views.page(state), content_type="text/html", headers=headers)

    def _shown(self, lease: Lease) -> LeaseAnswer:
        left_s = self.table.left_s(lease)
        return LeaseAnswer(
            lease=lease.id,
            client=lease.client,
            source=lease.source,
            destination=lease.destination,
            streams=lease.streams,
            in_use=lease.in_use,
            wanted=lease.wanted,
            ends_in_s=round(left_s, 3),
            renew_in_s=round(left_s / 3, 3),
            reason=_reason(lease, self.table.rules.limits.max_pair),
        )


def _reason(lease: Lease, max_pair: int) -> str:
    way = f"from {lease.source} to {lease.destination}"
    if lease.streams == 0 and lease.wanted == 0:
        return "None are wanted: renew with what you want."
    if lease.streams == 0:
        return f"None of the {max_pair} streams {way} is yours for now: renew to ask again, before the lease ends."
    if lease.in_use > lease.streams:
        return f"{lease.streams} streams {way}: use no more for new transfers, and report when fewer are in use."
    return f"{lease.streams} streams {way}."


def _json(answer: BaseModel, status: int = 200) -> web.Response:
    return web.Response(text=answer.model_dump_json(), status=status, content_type="application/json")


def _failed(status: int, text: str) -> web.Response:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return web.json_response({"error": text}, status=status, headers=headers)
