"""Parts of URLs that say which plugin moves them, and who is down when it is down. Pure."""

from __future__ import annotations


def method_of(scheme: str) -> str:
    """The part of a scheme that selects a plugin: behind the last ``+``, ``-`` or ``.``."""
    for mark in "+-.":
        scheme = scheme.rpartition(mark)[2]
    return scheme.lower()


def split_url(url: str) -> tuple[str, str]:
    """Scheme and host (with port, without userinfo) of a URL, lower case."""
    scheme, _, rest = url.partition("://")
    for mark in "/?#":
        rest = rest.partition(mark)[0]
    return scheme.lower(), rest.rpartition("@")[2].lower()
