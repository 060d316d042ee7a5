"""Parts of URLs that say which plugin moves them, and who is down when it is down. Pure."""

from __future__ import annotations


def method_of(scheme: str) -> str:
    """The part of a scheme that selects a plugin: behind the last ``+``, ``-`` or ``.``."""
    for mark in "+-.":
        scheme = scheme.rpartition(mark)[2]
    return scheme.lower()


def split_url(url: str) -> tuple[str, str]:
    """Scheme and host (with port, without userinfo) of a URL, lower case."""
    return url.partition("://")[0].lower(), _authority(url).rpartition("@")[2].lower()


def userinfo(url: str) -> str:
    """Return the user information of a URL: a user, perhaps with a password."""
    return _authority(url).rpartition("@")[0]


def _authority(url: str) -> str:
    rest = url.partition("://")[2]
    for mark in "/?#":
        rest = rest.partition(mark)[0]
    return rest
