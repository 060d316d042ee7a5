"""Parts of URLs: the method that selects a plugin, the server that may be down, and URLs for people. Pure."""

from __future__ import annotations

from stageout.wire.owner_requests import redirect_problem

#: Limited because reports repeat the fallback of each job.
_FALLBACK_CHARS = 1000
_USUAL_PORTS = {"http": 80, "https": 443, "ftp": 21}


#: The meaning of a ``file`` URL, for people. Its path may look like a path of the access point.
NODE_PATH = "a file URL names a path of the node that runs the job"


def method_of(scheme: str) -> str:
    """Return the part of a scheme that selects a plugin: after the last ``+``, ``-`` or ``.``."""
    for mark in "+-.":
        scheme = scheme.rpartition(mark)[2]
    return scheme.lower()


def split_url(url: str) -> tuple[str, str]:
    """Return scheme and host (with port, without userinfo) of a URL, in lower case."""
    return url.partition("://")[0].lower(), _authority(url).rpartition("@")[2].lower()


def is_node_path(url: str) -> bool:
    """Tell whether a URL names a path of the node that delivers to it."""
    return "://" in url and method_of(split_url(url)[0]) == "file"


def shown_url(url: str) -> str:
    """Remove userinfo, query and fragment from a URL, to show it to people."""
    scheme, mark, rest = url.partition("://")
    host, slash, path = rest.partition("#")[0].partition("?")[0].partition("/")
    return f"{scheme}{mark}{host.rpartition('@')[2]}{slash}{path}"


def userinfo(url: str) -> str:
    """Return the user information of a URL: a user, perhaps with a password."""
    return _authority(url).rpartition("@")[0]


def fallback_problem(url: str) -> str:
    """Return why this URL cannot be a job's fallback; "" if it can."""
    if len(url) > _FALLBACK_CHARS:
        return f"StageOutFallback has more than {_FALLBACK_CHARS} characters"
    problem = redirect_problem(url)
    return f"StageOutFallback: {problem}" if problem else ""


def credential_of(url: str) -> str:
    """Return the name of the token in a URL, as in ``service.handle+https``, in its own case; "" for none."""
    return url.partition("://")[0].rpartition("+")[0].replace(".", "_")


def comparable_url(url: str) -> str:
    """Return a normal form. Equal forms certainly name the same file; scheme, token, case and port may differ."""
    scheme, mark, rest = url.partition("://")
    method, authority = method_of(scheme), _authority(url)
    user, at, host = authority.rpartition("@")
    port = _USUAL_PORTS.get(method)
    name = host.lower().removesuffix(f":{port}") if port else host.lower()
    return f"{method}{mark}{user}{at}{name}{rest[len(authority) :]}"


def _authority(url: str) -> str:
    rest = url.partition("://")[2]
    for mark in "/?#":
        rest = rest.partition(mark)[0]
    return rest
