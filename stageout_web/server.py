"""HTTP of the page: routes, headers, readers with a token, and server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import json
import re
import secrets
import sqlite3
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web

from stageout.core import log
from stageout.wire.custody import is_job_name, is_name_of, job_id_of, schedd_of
from stageout.wire.matters import SCHEMA, as_json
from stageout.wire.owner_requests import Verb
from stageout_web.connections import Connections
from stageout_web.export import export
from stageout_web.html import Markup, tag
from stageout_web.queue import QueueError, RequestRefused
from stageout_web.readers import COOKIE, SESSION_S, ProxyRefused, Readers
from stageout_web.ring import COARSE_STEP_S, FINE_S
from stageout_web.state import SERIES, PageState
from stageout_web.views import destinations, history, jobs, nodes, now, owners, page, policy, requests, routers
from stageout_web.views.listing import SCHEMA as LIST_SCHEMA
from stageout_web.views.listing import Listing
from stageout_web.views.page import PageContext
from stageout_web.work import Busy, Work

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Build = Callable[[PageContext, web.Request], Markup]
MakeListing = Callable[[PageContext, PageState, Mapping[str, str]], Listing[Any]]
MakeView = Callable[[PageContext, PageState, Mapping[str, str]], Markup]

STATIC = Path(__file__).with_name("static")
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    # With "no-referrer" browsers would send `Origin: null` with the page's own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-store",
}
#: An address as in the headers Host and Origin. A name ends with at most one dot.
_ADDRESS = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9_-]+(?:\.[a-z0-9_-]+)*\.?))(?::([0-9]{1,5}))?", re.A | re.I)
_DEFAULT_PORTS = {"http": "80", "https": "443"}
BASE = re.compile(r"(/[A-Za-z0-9._~-]+)*\Z")
_BODY_BYTES = 4096
#: Pages that are kept until the next reading of the collector.
_PAGES_KEPT, _KEPT_CHARACTERS = 100, 200_000
_FOREIGN_NAME = "This page has another name. Its administrator allows names in STAGEOUT_WEB_NAMES."
#: Exports at the same time, and seconds that one may take.
_EXPORTS, _EXPORT_S = 2, 300.0
#: Connections besides those of streams. A browser opens up to six.
_OTHER_CONNECTIONS = 300
#: Seconds between two lines of the log about requests that name a user and must not.
_REFUSALS_S = 60.0
#: Answers that come in parts. They have no answer to HEAD.
_STREAMS = "/events", "/history.csv"
#: Figures that are older are no longer those of the pool.
_HEALTHY_S = 180.0
_JOB = re.compile(r"(\d{1,9})\.(\d{1,9})\Z", re.A)


_LISTS: tuple[tuple[str, str, MakeView], ...] = (
    ("jobs", "Jobs", jobs.jobs), ("destinations", "Destinations", destinations.destinations),
    ("nodes", "Nodes", nodes.nodes), ("owners", "Owners", owners.owners), ("routers", "Routers", routers.routers),
    ("policy", "Policy", policy.policy),
)  # fmt: skip


#: Lists for programs: address -> list.
LISTINGS: Mapping[str, MakeListing] = {
    "jobs": jobs.listing, "destinations": destinations.listing, "nodes": nodes.listing, "owners": owners.listing,
    "routers": routers.listing, "links": routers.links_listing, "history": history.state_listing,
}  # fmt: skip


class Wanted(NamedTuple):
    """The subject of a request: a job of this access point. :param run: the last one. :param name: GlobalJobId."""

    cluster: int
    proc: int
    verb: Verb
    run: int
    user: str
    name: str

    @property
    def job(self) -> str:
        """Return ``cluster.proc``."""
        return f"{self.cluster}.{self.proc}"


class Server:
    """The application.

    :param base: path below which a proxy shows the page; "": the proxy's X-Forwarded-Prefix counts.
    :param most_streams: browsers that may receive updates at the same time. :param pool: name of the pool.
    :param names: host names under which browsers reach the page, besides localhost.
    """

    def __init__(
        self,
        state: PageState,
        readers: Readers,
        base: str = "",
        most_streams: int = 100,
        pool: str = "",
        names: Iterable[str] = (),
    ) -> None:
        self._state, self.readers, self._base, self._pool = state, readers, base.rstrip("/"), pool
        self.connections = Connections(0)
        self.set_most_streams(most_streams)
        self._names = frozenset({"localhost", *(name.lower() for name in names)})
        self._streams: dict[asyncio.Transport, float] = {}
        self._exports = 0
        self._changed: asyncio.Event = asyncio.Event()
        self._work = Work()
        self._static, self._files = _static_files()
        self._data: dict[tuple[str, ...], tuple[int, str]] = {}
        self._ticks = 0
        self._kept: dict[tuple[str, str, bool, bool], Markup] = {}
        self._is_closing = False
        self._refused_s = float("-inf")
        self.stalled_s = 30.0
        """Seconds after which a stream ends whose reader takes nothing."""
        self.least_stream_s = 60.0
        """Seconds after which a stream gives way to a new one, if there are too many."""

    @property
    def streams(self) -> int:
        """Return the number of browsers that receive updates."""
        return len(self._streams)

    def set_most_streams(self, most: int) -> None:
        """Set how many browsers may receive updates at the same time. The bound on all connections follows it."""
        self.most_streams = most
        self.connections.set_most(most + _OTHER_CONNECTIONS)

    def application(self) -> web.Application:
        """Return the application that aiohttp serves."""
        app = web.Application(middlewares=[self._guard], client_max_size=_BODY_BYTES)
        routes: list[tuple[str, str, Handler]] = [
            ("GET", "/", self._view("", "Now", self._now)),
            *(("GET", f"/{name}", self._view(name, title, partial(_build, self._state, make)))
              for name, title, make in _LISTS),
            ("GET", "/job", self._job), ("GET", "/request", self._ask), ("POST", "/request", self._request),
            ("GET", "/destination", self._view("destinations", "", self._destination)),
            ("GET", "/node", self._view("nodes", "", self._node)),
            ("GET", "/router", self._view("routers", "", self._router)),
            ("GET", "/history", self._view("history", "History",
                                           lambda c, r: history.history(c, self._state.records, r.query))),
            ("GET", "/history.csv", self._export),
            *(("GET", f"/{name}.json", partial(self._list, name)) for name in LISTINGS),
            ("GET", "/health", self._health), ("GET", "/matters.json", self._matters),
            ("GET", "/grid.json", self._grid),
            ("GET", "/series.json", self._series), ("GET", "/events", self._events),
            ("GET", "/sign-in", self._view("", "Show file names", lambda c, r: page.sign_in(c, False))),
            ("POST", "/sign-in", self._sign_in), ("POST", "/sign-out", self._sign_out),
            ("GET", "/static/{name}", self._file),
        ]  # fmt: skip
        for base in dict.fromkeys(("", self._base)):
            for method, path, handler in routes:
                app.router.add_route(method, base + path, handler)
                if method == "GET" and path not in _STREAMS:
                    app.router.add_route("HEAD", base + path, handler)
        app.on_cleanup.append(self._end_work)
        return app

    async def _end_work(self, app: web.Application) -> None:
        self._work.close()

    def tick(self) -> None:
        """Tell all browsers that the state has changed."""
        self._ticks += 1
        self._kept.clear()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def close(self) -> None:
        """End the streams of events."""
        self._is_closing = True
        self.tick()

    # ---- frame -------------------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Give every answer the headers that protect the reader."""
        self.connections.used(request)
        try:
            if not self._is_own(request.headers.getall("Host", [])):
                raise web.HTTPMisdirectedRequest(text=_FOREIGN_NAME)
            self.readers.reader(request)  # refuses a false proxy
            response = await handler(request)
        except ProxyRefused as problem:
            self._note_refusal(request, str(problem))
            response = web.Response(status=403, text=str(problem))
        except Busy:
            text = "Many readers ask for long lists now. Try again in some seconds."
            response = web.Response(status=503, text=text, headers={"Retry-After": "5"})
        except web.HTTPMisdirectedRequest as problem:
            response = web.Response(status=problem.status, text=problem.text)
        except web.HTTPException as problem:
            start = tag("a", "to the start page", href=self._context(request).link(""))
            response = self._page(request, "", problem.reason, tag("p", f"{problem.reason}: ", start), problem.status)
        except Exception:
            if request.writer.output_size:
                raise  # a part of the answer is sent already
            log.error("request-failed", path=request.path, trace=traceback.format_exc())
            response = web.Response(status=500, text="The page cannot be made. The log of stageout-web says why.")
        if not response.prepared:
            for name, value in HEADERS.items():
                response.headers.setdefault(name, value)
        self.connections.used(request)
        return response

    def _is_own(self, hosts: Sequence[str]) -> bool:
        """Tell whether the Host header names this page, so that no other site's name can lead to it.

        :param hosts: all headers of that name.
        """
        found = _ADDRESS.fullmatch(hosts[0]) if len(hosts) == 1 else None
        if found is None:
            return False
        address, name, _ = found.groups()
        if name is not None and name.lower().rstrip(".") in self._names:
            return True
        with contextlib.suppress(ValueError):
            _ = ipaddress.IPv6Address(address) if name is None else ipaddress.IPv4Address(name)
            return True
        return False

    def _note_refusal(self, request: web.Request, problem: str) -> None:
        """Log a request that must not name a user, and not each of many."""
        now_s = time.monotonic()
        if now_s - self._refused_s >= _REFUSALS_S:
            self._refused_s = now_s
            log.warn("proxy-refused", address=request.remote, problem=problem)

    def _context(self, request: web.Request) -> PageContext:
        reader = self.readers.reader(request)
        base = self._base or self._forwarded(request, "X-Forwarded-Prefix").rstrip("/")
        return PageContext(
            base=base if BASE.match(base) else "",
            sees_names=self.readers.sees_all(reader),
            may_sign_in=self.readers.tokens is not None and not reader.is_user,
            pool=self._pool,
            static=self._static,
            problems=dict(self._state.problems),
            updated_at=self._state.updated_at,
            matters=len(self._state.matters),
            user=reader.name if reader.is_user else "",
        )

    def _forwarded(self, request: web.Request, name: str) -> str:
        """Return what a proxy says about the browser's address. Where proxies are listed, nothing else is believed."""
        proxies = self.readers.proxies
        return request.headers.get(name, "") if not proxies or proxies.speaks(request) else ""

    def _page(self, request: web.Request, view: str, title: str, content: Markup, status: int = 200) -> web.Response:
        text = page.page(self._context(request), view, title, content)
        return web.Response(text=text, status=status, content_type="text/html")

    def _view(self, view: str, title: str, build: Build) -> Handler:
        """Return a handler for a view. Its content for the next reader is made once until something changes.

        :param title: "" where the query names the object that is shown.
        """

        async def handle(request: web.Request) -> web.StreamResponse:
            context = self._context(request)
            key = context.base, request.path_qs, context.sees_names, context.may_sign_in
            content, ticks = self._kept.get(key), self._ticks
            if content is None:
                content = await self._work.do((*key, ticks), lambda: build(context, request))
                if len(self._kept) < _PAGES_KEPT and len(content) <= _KEPT_CHARACTERS and ticks == self._ticks:
                    self._kept[key] = content
            name = title or request.query.get("server") or request.query.get("name", "").rpartition("@")[2]
            return self._page(request, view, name, content)

        return handle

    # ---- views -------------------------------------------------------------------------------------------------------

    def _now(self, context: PageContext, request: web.Request) -> Markup:
        return now.now(context, self._state, _span(request))

    def _destination(self, context: PageContext, request: web.Request) -> Markup:
        found = destinations.destination(context, self._state, request.query.get("server", ""), _span(request))
        return _or_not_found(found)

    def _node(self, context: PageContext, request: web.Request) -> Markup:
        return _or_not_found(nodes.node(context, self._state, request.query.get("name", ""), request.query))

    def _router(self, context: PageContext, request: web.Request) -> Markup:
        return _or_not_found(routers.router(context, self._state, request.query.get("name", "")))

    async def _job(self, request: web.Request) -> web.StreamResponse:
        """Show one job. The schedd is queried about it, too, so this page is not kept."""
        name = request.query.get("id", "")[:300]
        short = job_id_of(name) if is_job_name(name) else name
        found = _JOB.match(short)
        if not found:
            raise web.HTTPNotFound
        ad, problem = None, ""
        try:
            ad = await self._state.queue.job(int(found[1]), int(found[2]))
        except QueueError as reason:
            problem = str(reason)
        if ad is not None and name == short:
            own = str(ad.get("GlobalJobId", ""))
            name = own if is_name_of(own, schedd_of(own), short) else name  # an owner may write another job's name
        elif ad is not None and ad.get("GlobalJobId") != name:
            ad = None  # a job of the same number in another queue
        may_ask = ad is not None and self.readers.rights.allow(
            self.readers.reader(request).name, str(ad.get("User", ""))
        )
        context = self._context(request)
        content = await self._work.do(object(), lambda: jobs.job(context, self._state, name, ad, problem, may_ask))
        return self._page(request, "jobs", f"Job {short}", _or_not_found(content))

    # ---- requests ----------------------------------------------------------------------------------------------------

    async def _ask(self, request: web.Request) -> web.StreamResponse:
        """Show the form of a request."""
        return self._form(request, await self._wanted(request, request.query), {})

    async def _request(self, request: web.Request) -> web.StreamResponse:
        """Write a request into the job's ad, with the reader and the reason."""
        self._check_origin(request)
        given = {name: str(value) for name, value in (await request.post()).items()}
        wanted = await self._wanted(request, given)
        reader, reason = self.readers.reader(request).name, given.get("reason", "").strip()
        asked = requests.request_of(wanted.verb, wanted.run, secrets.token_hex(4), given)
        problem = requests.problem_of(asked, reason, given, wanted.run)
        if problem:
            return self._form(request, wanted, given, problem, 400)
        text = str(asked)
        by = f"{wanted.verb.value} by {reader}: {reason}"
        try:
            await self._state.queue.request(wanted.cluster, wanted.proc, wanted.run, wanted.user, text, by)
        except (QueueError, RequestRefused) as refusal:
            return self._form(request, wanted, given, str(refusal), 409 if isinstance(refusal, RequestRefused) else 503)
        log.event("request-stored", job=wanted.job, user=wanted.user, reader=reader, request=text, reason=reason)
        return web.Response(status=303, headers={"Location": self._context(request).link("job", id=wanted.job)})

    async def _wanted(self, request: web.Request, given: Mapping[str, str]) -> Wanted:
        """Return what a form is about.

        :raises HTTPNotFound: there is no such job in the queue, or no such request. :raises HTTPForbidden: the reader
            may not change its delivery. :raises HTTPServiceUnavailable: the schedd does not answer.
        """
        found, verb = _JOB.match(given.get("id", "")), given.get("verb", "")
        reader = self.readers.reader(request).name
        if not reader:
            raise web.HTTPForbidden
        if not found or verb not in {one.value for one in Verb}:
            raise web.HTTPNotFound
        cluster, proc = int(found[1]), int(found[2])
        try:
            ad = await self._state.queue.job(cluster, proc)
        except QueueError:
            raise web.HTTPServiceUnavailable from None
        user = str(ad.get("User", "")) if ad is not None else ""
        if not self.readers.rights.allow(reader, user):
            raise web.HTTPForbidden
        if ad is None:
            raise web.HTTPNotFound
        run = ad.get("NumShadowStarts")
        return Wanted(
            cluster, proc, Verb(verb), run if isinstance(run, int) else 0, user, str(ad.get("GlobalJobId", ""))
        )

    def _form(
        self, request: web.Request, wanted: Wanted, given: Mapping[str, str], problem: str = "", status: int = 200
    ) -> web.Response:
        pairs = self._state.pool.find(wanted.name, wanted.user)
        sandbox = next((sandbox for _, sandbox in pairs), None)
        context = self._context(request)
        content = requests.form(
            context=context,
            job=wanted.job,
            verb=wanted.verb,
            run=wanted.run,
            sandbox=sandbox,
            given=given,
            problem=problem,
        )
        text = page.page(context, "jobs", requests.title(wanted.job, wanted.verb), content, is_form=True)
        return web.Response(text=text, status=status, content_type="text/html")

    # ---- data --------------------------------------------------------------------------------------------------------

    async def _grid(self, request: web.Request) -> web.StreamResponse:
        return await self._made(("grid",), lambda: nodes.grid(self._state.pool))

    async def _list(self, name: str, request: web.Request) -> web.StreamResponse:
        """Answer with the rows that the page of this list shows."""
        state = self._state

        def make() -> object:
            data = LISTINGS[name](PageContext(), state, request.query).data()
            return {"schema": LIST_SCHEMA, "at": state.pool.now_at, **data}

        return await self._made(("list", name, request.query_string), make)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        """Tell monitoring whether the figures are new."""
        state = self._state
        age_s = int(state.wall_s() - state.updated_at) if state.updated_at else None
        is_healthy = age_s is not None and age_s <= _HEALTHY_S
        found = {"schema": LIST_SCHEMA, "healthy": is_healthy, "age_s": age_s, "problems": sorted(state.problems)}
        return web.json_response(found, status=200 if is_healthy else 503)

    async def _matters(self, request: web.Request) -> web.StreamResponse:
        state = self._state

        def make() -> object:
            now_at = state.pool.now_at
            return {"schema": SCHEMA, "at": now_at, "matters": as_json(state.matters, now_at)}

        return self._json(("matters",), self._ticks, make)

    async def _made(self, key: tuple[str, ...], make: Callable[[], object]) -> web.Response:
        """Return data that a thread makes, once for each reading of the pool."""
        ticks, kept = self._ticks, self._data.get(key)
        if kept is not None and kept[0] == ticks:
            return web.Response(text=kept[1], content_type="application/json")
        text = await self._work.do((*key, ticks), lambda: json.dumps(make()))
        if len(text) > _KEPT_CHARACTERS:
            return web.Response(text=text, content_type="application/json")
        return self._json(key, ticks, lambda: text, str)

    def _json(
        self, key: tuple[str, ...], version: int, make: Callable[[], object], write: Callable[[Any], str] = json.dumps
    ) -> web.Response:
        """Return data, which are made once for each version."""
        kept = self._data.get(key)
        if kept is None or kept[0] != version:
            if len(self._data) >= _PAGES_KEPT:
                self._data.clear()
            kept = self._data[key] = version, write(make())
        return web.Response(text=kept[1], content_type="application/json")

    async def _series(self, request: web.Request) -> web.StreamResponse:
        span_s, _ = now.SPANS[_span(request)]
        server = request.query.get("server", "")
        names = [f"{kind} {server}" for kind in ("rate", "open", "trouble")] if server else SERIES
        labels, now_at = ["at", *(name.partition(" ")[0] for name in names)], int(self._state.wall_s())

        def make() -> object:
            return {"names": labels, "values": self._state.ring.series(names, now_at, span_s)}

        version = self._ticks if span_s <= FINE_S else now_at // COARSE_STEP_S
        try:
            return self._json(("series", str(span_s), server), version, make)
        except sqlite3.Error:  # the page names the problem
            return web.json_response({"names": labels, "values": [[] for _ in labels]})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Send an event with the numbers after each reading of the collector."""
        transport = request.transport
        if transport is None or not self._has_room():
            return web.Response(status=503, text="too many readers", headers={"Retry-After": "60"})
        self._streams[transport] = time.monotonic()
        response = web.StreamResponse(headers={**HEADERS, "X-Accel-Buffering": "no"})
        response.content_type = "text/event-stream"
        try:
            with contextlib.suppress(ConnectionError), self.connections.kept(request):  # the reader may go
                transport.set_write_buffer_limits(0)  # an event that the kernel does not take waits
                await self._send_events(request, response)
        except asyncio.TimeoutError:
            transport.abort()
        finally:
            self._streams.pop(transport, None)
        return response

    def _has_room(self) -> bool:
        """Tell whether one more stream may begin. The oldest gives way, and its browser opens a new one when it can."""
        if len(self._streams) < self.most_streams:
            return True
        oldest = next(iter(self._streams), None)
        if oldest is None or time.monotonic() - self._streams[oldest] < self.least_stream_s:
            return False
        del self._streams[oldest]
        oldest.abort()
        return True

    async def _send_events(self, request: web.Request, response: web.StreamResponse) -> None:
        """Send events until the daemon ends.

        :raises asyncio.TimeoutError: the reader takes none of them. :raises ConnectionError: it has gone.
        """
        await response.prepare(request)
        while not self._is_closing:
            event = f"event: tick\nretry: 10000\ndata: {self._numbers()}\n\n"
            await asyncio.wait_for(_send_all(response, request, event.encode()), self.stalled_s)
            await self._changed.wait()

    def _numbers(self) -> str:
        state = self._state
        return json.dumps({"at": int(state.updated_at), "figures": state.figures, "problems": sorted(state.problems)})

    async def _export(self, request: web.Request) -> web.StreamResponse:
        """Send the records of files as CSV, while they are read."""
        if self._exports >= _EXPORTS:
            return web.Response(status=503, text="other exports run", headers={"Retry-After": "60"})
        records = self._state.records
        wanted = history.Range.of(request.query, records.days())
        sees_names = self.readers.sees_all(self.readers.reader(request))
        rows = export(records.path, wanted.first, wanted.last, sees_names, history.EXPORT_ROWS)
        name = f"stageout-{wanted.first}-{wanted.last}.csv"
        response = web.StreamResponse(headers={**HEADERS, "Content-Disposition": f'attachment; filename="{name}"'})
        response.content_type, response.charset = "text/csv", "utf-8"
        self._exports += 1
        try:
            with self.connections.kept(request):
                await asyncio.wait_for(_send(response, request, rows), _EXPORT_S)
        except (OSError, asyncio.TimeoutError):
            if request.transport is not None:
                request.transport.abort()  # the reader must not take a part for the whole
        finally:
            self._exports -= 1
        return response

    async def _file(self, request: web.Request) -> web.StreamResponse:
        body = self._files.get(request.match_info["name"])
        if body is None:
            raise web.HTTPNotFound
        content_type = _TYPES[Path(request.match_info["name"]).suffix]
        lasting = "public, max-age=31536000, immutable" if "v" in request.query else "no-cache"
        return web.Response(body=body, content_type=content_type, charset="utf-8", headers={"Cache-Control": lasting})

    # ---- readers -----------------------------------------------------------------------------------------------------

    async def _sign_in(self, request: web.Request) -> web.StreamResponse:
        self._check_origin(request)
        context = self._context(request)
        cookie = self.readers.begin(str((await request.post()).get("token", "")))
        if cookie is None:
            return self._page(request, "", "Show file names", page.sign_in(context, True), 403)
        response = web.Response(status=303, headers={"Location": context.link("")})
        response.set_cookie(
            COOKIE, cookie, path=f"{context.base}/", max_age=int(SESSION_S), httponly=True, samesite="Strict",
            secure=self._is_secure(request),
        )  # fmt: skip
        return response

    async def _sign_out(self, request: web.Request) -> web.StreamResponse:
        self._check_origin(request)
        context = self._context(request)
        self.readers.end(request.cookies.get(COOKIE, ""))
        response = web.Response(status=303, headers={"Location": context.link("")})
        response.del_cookie(COOKIE, path=f"{context.base}/")
        return response

    def _check_origin(self, request: web.Request) -> None:
        """Refuse a form that another site sent. :raises HTTPForbidden: it did.

        Browsers send Sec-Fetch-Site only with https and to localhost. Programs send neither of the headers.
        """
        sites = request.headers.getall("Sec-Fetch-Site", [])
        if sites:
            is_own = all(site in ("same-origin", "none") for site in sites)
        else:
            own = _origin(f"{'https' if self._is_secure(request) else 'http'}://{request.headers['Host']}")
            is_own = all(_origin(origin) == own for origin in request.headers.getall("Origin", []))
        if not is_own:
            raise web.HTTPForbidden

    def _is_secure(self, request: web.Request) -> bool:
        """Tell whether the browser uses https, to this page or to its proxy."""
        return request.secure or self._forwarded(request, "X-Forwarded-Proto").lower() == "https"


def _build(state: PageState, make: MakeView, context: PageContext, request: web.Request) -> Markup:
    return make(context, state, request.query)


def _span(request: web.Request) -> str:
    found = request.query.get("span", "hour")
    return found if found in now.SPANS else "hour"


async def _send_all(response: web.StreamResponse, request: web.Request, part: bytes) -> None:
    """Send a part of an answer and wait until the kernel has it. :raises ConnectionError: the reader has gone."""
    await response.write(part)
    await request.writer.drain()


async def _send(response: web.StreamResponse, request: web.Request, parts: AsyncIterator[bytes]) -> None:
    """Send an answer part by part. :raises OSError: the parts cannot be read, or the reader has gone."""
    await response.prepare(request)
    async for part in parts:
        await response.write(part)
    await response.write_eof()


def _or_not_found(content: Markup | None) -> Markup:
    if content is None:
        raise web.HTTPNotFound
    return content


def _origin(text: str) -> tuple[str, ...] | None:
    """Return scheme, host and port of an origin; None for a text that is none, such as ``null``."""
    scheme, _, address = text.partition("://")
    found = _ADDRESS.fullmatch(address)
    if scheme not in _DEFAULT_PORTS or found is None:
        return None
    literal, name, port = found.groups()
    return scheme, (literal or name).lower(), port or _DEFAULT_PORTS[scheme]


def _static_files() -> tuple[Mapping[str, str], Mapping[str, bytes]]:
    """Return the addresses and the content of the static files. The address changes with the content."""
    files = {path.name: path.read_bytes() for path in sorted(STATIC.iterdir()) if path.suffix in _TYPES}
    digests = {name: hashlib.sha256(body).hexdigest()[:12] for name, body in files.items()}
    return {name: f"{name}?v={digest}" for name, digest in digests.items()}, files
