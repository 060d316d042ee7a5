"""Names in requests: the percent-encoded path stands for bytes, is decoded once, and never leaves the root."""

from __future__ import annotations

import os
import re
from urllib.parse import SplitResult, quote, unquote_to_bytes, urlsplit

from stageout.overlay.http.heads import Refused

_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_MOST_SEGMENT_BYTES, _MOST_BYTES = 255, 4096
#: First segments that belong to routers.
_RESERVED = frozenset({".stageout", ".via"})


def path_of(target: str) -> tuple[str, str]:
    """Return the path that a target names, without slashes at its ends, and the query.

    :raises Refused: 400 for a path that cannot be below a root.
    """
    if not target.startswith("/"):
        raise Refused(400, "the target of a request is a path")
    raw, _, query = target.partition("?")
    return decoded(raw), query


def decoded(raw: str) -> str:
    """Return the path that a percent-encoded one stands for. :raises Refused: 400: it cannot be below a root."""
    if _ESCAPE.search(raw) or "#" in raw or not raw.isascii() or re.search(r"%2[fF]|%00", raw):
        raise Refused(400, "the path is not percent-encoded as it should be")
    path = unquote_to_bytes(raw)
    if len(path) > _MOST_BYTES:
        raise Refused(400, f"a path has at most {_MOST_BYTES} bytes")
    inner = path.strip(b"/") if path in (b"/", b"") else path[1:].removesuffix(b"/")
    segments = inner.split(b"/") if inner else []
    if any(one in (b"", b".", b"..") or len(one) > _MOST_SEGMENT_BYTES for one in segments):
        raise Refused(400, f"a path has no empty names, no . and no .., and no name above {_MOST_SEGMENT_BYTES} bytes")
    name = os.fsdecode(inner)
    if segments and os.fsdecode(segments[0]).lower() in _RESERVED:
        raise Refused(403, "this name belongs to the router")
    return name


def encoded(path: str, is_directory: bool = False) -> str:
    """Return the absolute percent-encoded path of a name."""
    end = "/" if is_directory and path else ""
    return "/" + quote(os.fsencode(path), safe="/!$&'()*+,;=:@-._~") + end


def parts_of(url: str) -> SplitResult:
    """Return the parts of a URL. :raises Refused: 400: it is malformed."""
    try:
        return urlsplit(url)
    except ValueError:
        raise Refused(400, "the URL of the other name is malformed") from None


def is_here(url: str, host: str) -> str:
    """Return the path of an absolute URL, or absolute path, of this host. :raises Refused: 502: of another one."""
    if url.startswith("/") and not url.startswith("//"):
        return url
    parts = parts_of(url)
    if parts.scheme not in ("http", "https", "dav", "davs") or parts.netloc.lower() != host.lower():
        raise Refused(502, "the destination is not a name of this router")
    return parts.path
