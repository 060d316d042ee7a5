"""Addresses and TLS of daemons that listen for HTTP."""

from __future__ import annotations

import contextlib
import ipaddress
import ssl

from stageout.core.config import ConfigError, Settings


def tls_of(settings: Settings, host: str, certificate: str, key: str) -> ssl.SSLContext | None:
    """Return the TLS context of a listening socket; None on loopback without a certificate.

    :param host, certificate, key: names of the knobs for the address, the certificate and its key.
    :raises ConfigError: secrets would cross the network unencrypted, or the certificate cannot be used.
    """
    address, chain = settings.text(host), settings.text(certificate)
    if not chain:
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(address).is_loopback:
                return None
        raise ConfigError(
            f"{host} = {address}: tokens would be sent in clear; set {certificate},"
            " or 127.0.0.1 behind a proxy with TLS"
        )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(chain, settings.text(key) or None)
    except (OSError, ssl.SSLError) as problem:
        raise ConfigError(f"{certificate}, {key}: {problem}") from problem
    return context


def in_url(host: str) -> str:
    """Return a host as URLs have it: an IPv6 address in brackets (RFC 3986, 3.2.2)."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def name_of_pool(collectors: str) -> str:
    """Return the host of the first collector. :param collectors: COLLECTOR_HOST."""
    first = (collectors.replace(",", " ").split() or [""])[0]
    if first.startswith("["):
        return first[1:].partition("]")[0]
    return first if first.count(":") > 1 else first.partition(":")[0]
