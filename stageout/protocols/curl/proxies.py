"""The HTTP proxy of a request. libcurl chooses it from the environment, and does not report its choice."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from stageout.plugin.api import Context
from stageout.plugin.urls import host_of


def named_by_environment() -> bool:
    """Tell whether the environment names a proxy, which may use TLS."""
    return any(name.lower().endswith("_proxy") for name in os.environ)


def named_by_machine(url: str, context: Context) -> str:
    """Return the proxy for a URL in the machine's ad; "" if there is none, or the environment names one."""
    scheme = url.partition(":")[0].lower()
    found = context.machine_attribute(f"{scheme}_proxy")
    return found if isinstance(found, str) and not _of_environment(scheme) else ""


def proxy_in_use(url: str, context: Context) -> str:
    """Return host and port of the proxy for this URL, "" for none."""
    parts = urlsplit(url)
    proxy = _of_environment(parts.scheme) or named_by_machine(url, context)
    if not proxy or _excepted(parts.hostname or ""):
        return ""
    return host_of(proxy if "://" in proxy else f"http://{proxy}")


def _excepted(host: str) -> bool:
    """Tell whether the environment exempts a host from the proxy: names, their domains, or ``*``."""
    names = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").replace(",", " ").lower().split()
    return "*" in names or any(f".{host}".endswith(f".{name.lstrip('.')}") for name in names)


def _of_environment(scheme: str) -> str:
    """Look up the proxy as libcurl does. In a CGI program HTTP_PROXY in capitals could be a header of a request."""
    own = [f"{scheme}_proxy"] if scheme == "http" else [f"{scheme}_proxy", f"{scheme.upper()}_PROXY"]
    return next((os.environ[name] for name in [*own, "all_proxy", "ALL_PROXY"] if os.environ.get(name)), "")
