"""Paths behind ``/.via/T``: the chain of routers that a request names, and whether this router takes it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from urllib.parse import quote, unquote

from stageout.overlay.rules.operations import Malformed
from stageout.overlay.rules.rights import NoRight

#: A request names at most so many routers behind the one that reads it.
MOST_HOPS = 4
_NAME = re.compile(r"[a-z0-9._:\[\]-]{1,255}")


def split(path: str) -> tuple[tuple[str, ...], str]:
    """Split the percent-encoded path of a request, without its query, into NAMEs of routers and the rest.

    ``/.via/gw2/.via/archive/alice/f`` gives ``("gw2", "archive"), "/alice/f"``: the last NAME is the terminal. The rest
    keeps its encoding and begins with ``/``. A path without ``/.via`` has no hops. NAMEs are lower-cased.

    :raises Malformed: 400: a NAME is missing, or cannot be one.
    """
    hops: list[str] = []
    rest = path
    while unquote(rest[1:].partition("/")[0]).lower() == ".via":
        name, slash, rest = rest[1:].partition("/")[2].partition("/")
        hops.append(unquote(name).lower())
        rest = slash + rest if slash else "/"
        if not _NAME.fullmatch(hops[-1]):
            raise Malformed("the path needs the NAME of a router after /.via")
    return tuple(hops), rest


def joined(hops: Sequence[str], rest: str) -> str:
    """Return the path that :func:`split` takes apart."""
    return "".join(f"/.via/{quote(name, safe=':[]')}" for name in hops) + rest


def check_hops(hops: Sequence[str], own_name: str, known: Collection[str]) -> None:
    """Check a chain before anything is stored or dialled. Each router that it names checks its own next one.

    The chain gets shorter on each hop, so no header has to count hops.

    :param known: NAMEs of this router's list. :raises Malformed: 400: too long, or a circle.
    :raises NoRight: 403: this router does not know the next one.
    """
    chain = [own_name.lower(), *(name.lower() for name in hops)]
    if len(hops) > MOST_HOPS or len(set(chain)) < len(chain):
        raise Malformed(f"a chain has at most {MOST_HOPS} routers, each one once")
    if hops and chain[1] not in {name.lower() for name in known}:
        raise NoRight(f"this router has no router {chain[1]} in its list")
