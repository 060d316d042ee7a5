"""The check of the policy service that allocates streams to this node. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from urllib.parse import urlsplit

from stageout.cli.doctor.findings import Finding, Machine, fail, ok, warn

_NAME = "policy-service"
_LOG = "look into StageoutPolicyLog on its machine"


def policy_service(machine: Machine) -> Iterator[Finding]:
    """Check that the service at STAGEOUT_POLICY_URL answers and accepts this node's token."""
    url = machine.settings.text("STAGEOUT_POLICY_URL").rstrip("/")
    if not url:
        yield ok(_NAME, "no STAGEOUT_POLICY_URL: this node's own limits bound its streams")
        return
    parts = urlsplit(url)
    if not parts.hostname or parts.scheme not in ("http", "https"):
        yield fail(_NAME, f"STAGEOUT_POLICY_URL = {url} is no address", "write https://HOST:PORT")
    elif parts.scheme == "http" and not _is_loopback(parts.hostname):
        yield fail(_NAME, f"{url}: the token would be sent in clear, so the manager does not start", "write https://")
    else:
        yield _asked(machine, url)


def _asked(machine: Machine, url: str) -> Finding:
    path = machine.settings.text("STAGEOUT_POLICY_TOKEN")
    token = machine.read(path).strip()
    try:
        status = machine.http_status(f"{url}/v1/leases", token)
    except OSError as problem:
        text = f"{url} does not answer ({problem}): output is sent, within this node's own limits"
        return warn(_NAME, text, f"is it running, and may this node reach it? {_LOG}")
    if status == 200:
        return ok(_NAME, f"{url} answers and knows this node's token")
    if status == 401:
        return fail(_NAME, f"{url} refuses the token in {path}", "put one of the lines of STAGEOUT_POLICY_TOKENS there")
    return fail(_NAME, f"{url} answers with status {status}", f"is that a policy service? {_LOG}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


EXECUTE_POINT = (policy_service,)
