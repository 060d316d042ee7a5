"""URLs in HTCondor's form, without their secrets, and encoded for requests."""

from __future__ import annotations

import re
from typing import NamedTuple

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.+)", re.S)
_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>]+")
# Characters, besides letters and digits, that may stand unencoded in a URL that a person wrote.
_AS_WRITTEN = "!$&'()*+,;=:@/?#[]%"
_HOST = re.compile(r"(\[[^\]]*\]|[^:]*):?(.*)", re.S)
_SCHEME_ENDS = re.compile(r"[+.-]")
_AUTHORITY_ENDS = re.compile(r"[/?#]")
_PATH_ENDS = re.compile(r"[?#]")
_PORT = re.compile(r"[0-9]{1,5}")
HIDDEN = "***"
_UNRESERVED = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~"
_STRAY_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")


class Scheme(NamedTuple):
    """The parts of a URL scheme.

    :param method: HTCondor's plugin method: the part after the last ``+``, ``-`` or ``.``, in lower case.
    :param service: credential service of ``service+method``, "" when there is none.
    :param handle: credential handle of ``service.handle+method``, "" when there is none.
    """

    method: str
    service: str
    handle: str


def is_url(text: str) -> bool:
    """Tell whether HTCondor treats the text as a URL."""
    return _URL.match(text) is not None


def split_scheme(url: str) -> Scheme:
    """Split the scheme of a URL into its parts.

    :raises ValueError: when the text is not a URL.
    """
    found = _URL.match(url)
    if not found:
        raise ValueError("not a URL: write scheme://host/path")
    scheme = found[1]
    prefix, plus, _ = scheme.rpartition("+")
    service, _, handle = prefix.partition(".") if plus else ("", "", "")
    return Scheme(_SCHEME_ENDS.split(scheme)[-1].lower(), service, handle)


def bare_url(url: str) -> str:
    """Remove the credential prefix of a URL: ``service+https://h/p`` becomes ``https://h/p``."""
    scheme, mark, rest = url.partition("://")
    return split_scheme(url).method + mark + rest if mark else scheme


def split_authority(rest: str) -> tuple[str, str]:
    """Split the text after ``://`` into the authority and the rest: path, query, fragment."""
    authority = _AUTHORITY_ENDS.split(rest, maxsplit=1)[0]
    return authority, rest[len(authority) :]


def host_of(url: str) -> str:
    """Return host and port of a URL, "" when it has none."""
    return split_authority(url.partition("://")[2])[0].rpartition("@")[2]


def safe_url(url: str) -> str:
    """Remove userinfo, query and fragment from a URL, so that it is safe for logs, result ads and messages.

    If a part of a password may follow the host (``user:pass#word@host``), keep only the scheme.
    """
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url
    if may_split_password(url):
        return f"{scheme}{mark}{HIDDEN}"
    authority, tail = split_authority(rest)
    return scheme + mark + authority.rpartition("@")[2] + _PATH_ENDS.split(tail, maxsplit=1)[0]


def may_split_password(url: str) -> bool:
    """Tell whether host and port may be the begin of a password with ``/``, ``?`` or ``#``."""
    authority, tail = split_authority(url.partition("://")[2])
    host, port = _HOST.fullmatch(authority.rpartition("@")[2]).groups()  # type: ignore[union-attr]  # matches all
    if port and not _PORT.fullmatch(port):
        return True
    if "@" not in tail:
        return False
    is_host = "." in host or host.startswith("[") or host.lower() in ("localhost", "")
    has_more = bool(port) or "@" in authority
    return (not is_host and (has_more or tail[0] == "#")) or (bool(port) and tail[0] in "?#")


def safe_urls_in(text: str) -> str:
    """Make every URL in a text safe."""
    return _IN_TEXT.sub(lambda found: safe_url(found[0]), text) if "://" in text else text


def encode_url(url: str, destination: str = "") -> str:
    """Encode the URL for requests.

    :param url: HTCondor's URL.
    :param destination: a URL of the job to which HTCondor has appended the raw name of a file, whose characters are all
        encoded; "" for none. A URL with another beginning was written by a person (a remap): then only invalid
        characters are encoded.
    """
    if destination and url.startswith(destination) and len(url) > len(destination):
        base, query, rest = destination.partition("?")
        name = _quoted(url[len(destination) :].lstrip("/"), "/!$&'()*+,;=:@")
        return as_written(base).rstrip("/") + "/" + name + (as_written(query + rest) if query else "")
    return as_written(url)


def is_checkpoint(url: str, destination: str, job: str) -> bool:
    """Tell whether HTCondor composed this URL for a checkpoint's file: destination, job, number, raw name.

    :param destination: the job's ``checkpoint_destination``. :param job: its GlobalJobId.
    """
    base = destination.rstrip("/")
    below = url[len(base) :].lstrip("/")  # the shadow, which requests the file, does not check for a slash at the end
    folder = job.replace("#", "_") + "/"
    number = below[len(folder) :].partition("/")[0]
    return bool(base and job) and url.startswith(f"{base}/") and below.startswith(folder) and number.isdigit()


def as_written(url: str) -> str:
    """Encode blanks, control characters, bytes above 127 and stray ``%`` of a URL that a person wrote."""
    repaired = _STRAY_PERCENT.sub("%25", url)
    return _quoted(repaired, _AS_WRITTEN)


def _quoted(text: str, safe: str) -> str:
    """Encode all but unreserved and ``safe`` characters. Importing urllib's function costs more than this whole
    module.
    """
    kept = (_UNRESERVED + safe).encode()
    data = text.encode("utf-8", "surrogateescape")
    return "".join(chr(byte) if byte in kept else f"%{byte:02X}" for byte in data)
