"""Stork's Estimation ads: what is asked, read strictly, and the answer in the same words."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from stageout.core.classads import ClassAd, Expr
from stageout.core.errors import StageoutError
from stageout.core.units import read_size

_KNOWN = {
    "dap_type", "src_url", "dest_url", "filesize", "disk_transfer", "arguments", "x509proxy", "dap_id", "nodes", "nic",
    "stripes", "cred_name",
}  # fmt: skip


class BadAd(StageoutError):
    """An ad cannot be answered; the text says which attribute and what to write."""


@dataclass(frozen=True)
class Estimation:
    """One ad.

    :param file_bytes: to be transferred. :param sample_bytes: most bytes of one sample (``-s``), 0: ours to choose.
    :param disk: the local end of samples is on a disk, not in memory. :param nic: of one node in Mbit/s; 0: not given.
    :param nodes: that may be used. :param stripes: most per node.
    """

    source: str
    target: str
    file_bytes: int
    sample_bytes: int
    disk: bool
    proxy: str
    dap_id: int
    nodes: int
    nic: float
    stripes: int


def size_of(text: object, name: str) -> int:
    """Read a size: ``2GB``, ``50M``, ``1.5 GiB`` or a number. K, M, G, T are powers of 1000, Ki to Ti of 1024.

    :raises BadAd: it is no size. :param name: of the attribute, for that.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    size = read_size(text) if isinstance(text, str) else 0
    if size <= 0:
        raise BadAd(f'{name} = {text!r}: write a size such as "2GB", "50M" or a number of bytes')
    return size


def read_estimation(ad: ClassAd) -> Estimation:
    """Read an ad.

    :raises BadAd: its type is unknown, or an attribute is missing or invalid.
    """
    kind = ad.text("dap_type")
    if kind.lower() != "estimation":
        raise BadAd(f'dap_type = "{kind}": only "Estimation" is answered here')
    unknown = sorted(name for name in ad if name.lower() not in _KNOWN)
    if unknown:
        raise BadAd(f"{', '.join(unknown)}: not known; known are {', '.join(sorted(_KNOWN))}")
    source, target = (_url(ad, name) for name in ("src_url", "dest_url"))
    options = _arguments(ad)
    return Estimation(
        source,
        target,
        _file_bytes(ad, source),
        options,
        _yes(ad, "disk_transfer"),
        ad.text("x509proxy", "default"),
        ad.integer("dap_id"),
        _count(ad, "nodes", 1),
        float(_count(ad, "nic", 0)),
        _count(ad, "stripes", 1),
    )


def _url(ad: ClassAd, name: str) -> str:
    url = ad.text(name)
    parts = urlsplit(url)
    if not parts.scheme or not url[len(parts.scheme) :].startswith("://"):
        raise BadAd(f'{name} = "{url}": write a URL such as "gsiftp://host/directory/file" or "file:///directory/file"')
    if parts.scheme != "file" and not parts.hostname:
        raise BadAd(f'{name} = "{url}": it names no host')
    return url


def _file_bytes(ad: ClassAd, source: str) -> int:
    if "filesize" in ad:
        return size_of(ad["filesize"], "filesize")
    parts = urlsplit(source)
    path = Path(unquote(parts.path))
    if parts.scheme == "file" and path.is_file() and path.stat().st_size:
        return path.stat().st_size
    raise BadAd('filesize is missing: write for example filesize = "2GB" (it is only known of a file:// source)')


def _arguments(ad: ClassAd) -> int:
    words = shlex.split(ad.text("arguments"))
    if not words:
        return 0
    if len(words) != 2 or words[0] != "-s":
        raise BadAd(f'arguments = "{ad.text("arguments")}": only "-s SIZE" (of one sample) is understood')
    return size_of(words[1], "arguments -s")


def _yes(ad: ClassAd, name: str) -> bool:
    value = ad.get(name, False)
    text = str(value).lower()
    if text not in ("yes", "no", "true", "false"):
        raise BadAd(f'{name} = {value!r}: write "yes" or "no"')
    return text in ("yes", "true")


def _count(ad: ClassAd, name: str, default: int) -> int:
    value = ad.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < default:
        raise BadAd(f"{name} = {value!r}: write a whole number, at least {max(1, default)}")
    return value


def duration_text(seconds: float) -> str:
    """Write a duration as the estimation service does: ``0 hours, 3 mins, 1 secs``."""
    whole = round(seconds)
    return f"{whole // 3600} hours, {whole % 3600 // 60} mins, {whole % 60} secs"


def stamp() -> Expr:
    """Write the present time as a ClassAd's absolute time."""
    return Expr(f'absTime("{time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())}+0000")')
