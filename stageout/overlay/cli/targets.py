"""Routers, paths, custodians and files that a command line names."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit

from stageout.cli.bars import printable
from stageout.cli.exits import CommandError, UsageError
from stageout.core.errors import TransferFailure
from stageout.overlay.channel import Gateway
from stageout.overlay.key_file import gateway_of
from stageout.overlay.wire.fields import MAX_PATH_BYTES
from stageout.overlay.wire.route import DEFAULT_PORT, BadRoute, address, addresses, check, written

#: Characters that are no part of a path in a URL, or that are dropped from it in silence.
_LOST_IN_URLS = frozenset("?#\t\r\n")


def target(url: str, key: str) -> tuple[Gateway, str]:
    """Router and path of an overlay URL. :raises CommandError: it is none, or the key cannot be read."""
    if set(url) & _LOST_IN_URLS:
        raise UsageError(
            f"{printable(url)}: in a URL write %3F for ?, %23 for #, %0A for the end of a line, %09 for a tab"
        )
    try:
        parts = urlsplit(url)
    except ValueError as problem:
        raise UsageError(f"{printable(url)}: {problem}") from None
    path = os.fsdecode(unquote_to_bytes(os.fsencode(parts.path))).strip("/")
    if parts.scheme != "overlay" or not parts.hostname:
        raise UsageError(f"{url}: write overlay://HOST[:PORT]/path")
    if "@" in parts.netloc:
        raise UsageError(f"{url}: nobody is named in a URL: --key is the file that says who you are")
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise UsageError(f"{url[:100]}...: its path is longer than {MAX_PATH_BYTES} bytes")
    try:
        return gateway_of(parts.hostname, _port(parts), Path(key)), path
    except ValueError:
        raise UsageError(f"{url}: the port is not a number from 1 to 65535") from None
    except TransferFailure as failure:
        raise CommandError(f"{failure} (--key)", failure.kind) from None


def _port(parts: SplitResult) -> int:
    """:raises ValueError: it is none."""
    if parts.port == 0:
        raise ValueError
    return parts.port or DEFAULT_PORT


def named(url: str, path: str) -> str:
    """The path of a URL. :raises UsageError: it has none."""
    if not path:
        raise UsageError(f"{printable(url)}: this is all of the router: name what is meant in it")
    return path


def is_directory(path: str, url: str) -> bool:
    """Tell whether a URL means a directory: it ends with /, or has no path."""
    return not path or url.endswith("/")


def check_names(names: Sequence[str]) -> None:
    """:raises UsageError: two files would get the same name, and only the last would stay."""
    for name, times in Counter(names).items():
        if times > 1:
            raise UsageError(f"{times} of these would be {printable(name)} there: send them to different directories")


def name_there(path: str, url: str, local: str, into: bool = False) -> str:
    """The path of a file at the router. :param path: of the URL. :param into: it is a directory, however written."""
    if into or is_directory(path, url):
        return f"{path}/{Path(local).name}".lstrip("/")
    return path


def through(gateway: Gateway, custodian: str) -> tuple[Gateway, str]:
    """The first of the custodians, and what is behind it, the terminal last. :raises UsageError: an address is none."""
    first, *more = custodians_of(custodian)
    host, port = address(first)
    return replace(gateway, host=host, port=port), ",".join([*more, written(gateway.host, gateway.port)])


def custodians_of(text: str) -> tuple[str, ...]:
    """Custodians on one way, in their order. :raises UsageError: an address is none."""
    try:
        found = addresses(text)
        check(found)
    except BadRoute as problem:
        raise UsageError(f"--through: {problem}") from None
    if not found:
        raise UsageError("--through: name a custodian: HOST or HOST:PORT")
    return found


def ask_with(gateway: Gateway, origin: str) -> str:
    """The command that tells what became of a file."""
    return f"stageout ask overlay://{gateway.server} {origin}"
