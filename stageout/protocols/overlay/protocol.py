"""The protocol class of ``plugins/overlay_router_plugin``."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Gateway, gateway_of
from stageout.overlay.client import EXPIRES_AFTER_S, put
from stageout.overlay.fetch import get
from stageout.overlay.sending import report
from stageout.overlay.settings import routes_of
from stageout.plugin.api import Context, Outcome, Request, TransferProtocol
from stageout.plugin.urls import as_written, safe_url
from stageout.wire.overlay import MAX_CLOCK_SKEW_S
from stageout.wire.route import DEFAULT_PORT, BadRoute, address, written

_KEY = "/etc/condor/stageout-overlay.key"
_SILENCE_S = 60.0
_LEAST_S = 1.0


class OverlayProtocol(TransferProtocol):
    """overlay."""

    def download(self, request: Request, context: Context) -> Outcome:
        """Fetch a published file; every block is checked on arrival."""
        gateway, path = _target(as_written(request.url), context)
        routes = routes_of(context.setting("OVERLAY_ROUTES", ""), gateway)
        size_bytes = get(gateway, path, Path(request.local_path), progress=context.progress, routes=routes)
        return Outcome(size_bytes, size_bytes, verified="crc32c")

    def upload(self, request: Request, context: Context) -> Outcome:
        """Send a file; it is on the destination's disk, under its name and digest-checked, when this returns."""
        gateway, path = _target(request.encoded_url, context)
        local = Path(request.local_path)
        try:
            mode = local.stat().st_mode
        except OSError as problem:
            raise TransferFailure(ErrorClass.LOCAL_FILE, f"{local}: {problem.strerror}") from None
        gateway, terminal = _through(gateway, context)
        done = put(
            gateway, local, path, mode=mode & 0o777, connections=context.parallelism, progress=context.progress,
            terminal=terminal, expires_after_s=_expires_after_s(terminal, context),
            routes=routes_of(context.setting("OVERLAY_ROUTES", ""), gateway),
        )  # fmt: skip
        return Outcome(
            done.size_bytes, done.sent_bytes, verified=done.digest_name,
            developer={"Generation": done.generation, "Manifest": done.manifest, "Routes": report(done.shares)},
        )  # fmt: skip


def _expires_after_s(terminal: str, context: Context) -> float:
    """A custodian need not try for longer than this plugin waits; clocks may differ."""
    return min(EXPIRES_AFTER_S, max(MAX_CLOCK_SKEW_S, context.remaining_s)) if terminal else EXPIRES_AFTER_S


def _through(gateway: Gateway, context: Context) -> tuple[Gateway, str]:
    """The custodian that takes uploads, and the terminal behind it; without one the router itself and ""."""
    custodian = context.setting("OVERLAY_GATEWAY", "")
    if not custodian:
        return gateway, ""
    try:
        host, port = address(custodian)
    except BadRoute as problem:
        raise TransferFailure(ErrorClass.BAD_REQUEST, f"STAGEOUT_OVERLAY_GATEWAY: {problem}") from None
    return replace(gateway, host=host, port=port), written(gateway.host, gateway.port)


def _target(url: str, context: Context) -> tuple[Gateway, str]:
    """The router and the path below its root. :raises TransferFailure: the URL or the key cannot be used."""
    parts = urlsplit(url)
    path = os.fsdecode(unquote_to_bytes(parts.path)).strip("/")
    if not parts.hostname or not path or parts.query or parts.fragment or parts.username:
        raise TransferFailure(ErrorClass.BAD_URL, f"{safe_url(url)}: write overlay://HOST[:PORT]/path/of/the/file")
    try:
        port = parts.port or DEFAULT_PORT
    except ValueError:
        raise TransferFailure(ErrorClass.BAD_URL, f"{safe_url(url)}: the port is not a number") from None
    key = Path(context.setting("OVERLAY_KEY", _KEY))
    silence_s = max(_LEAST_S, min(_SILENCE_S, context.remaining_s))
    return gateway_of(parts.hostname, port, key, silence_s), path
