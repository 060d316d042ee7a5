"""Addresses of routers and routes through them, as people write them. No I/O."""

from __future__ import annotations

from stageout.wire.address import split_address

DEFAULT_PORT = 9621
#: Relays between the two ends of a circuit, and the last end with them (rule 13 of the design).
MAX_HOPS = 8
DIRECT = "direct"

Route = tuple[str, ...]


class BadRoute(ValueError):
    """An address or a route cannot be used; the text says how to write it."""


def address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST[:PORT]``; an IPv6 address stands in brackets. :raises BadRoute: it is none."""
    whole = text if ":" in text.rpartition("]")[2] else f"{text}:{DEFAULT_PORT}"
    try:
        return split_address(whole)
    except ValueError:
        raise BadRoute(f"{text!r} is no address of a router: write HOST or HOST:PORT") from None


def written(host: str, port: int) -> str:
    """The address in the one form in which addresses are compared."""
    return f"[{_compressed(host.lower())}]:{port}" if ":" in host else f"{host.lower()}:{port}"


def _compressed(host: str) -> str:
    """An IPv6 address in its shortest form; any other text as it is."""
    from ipaddress import IPv6Address  # most addresses are names

    literal, percent, scope = host.partition("%")
    try:
        return f"{IPv6Address(literal).compressed}{percent}{scope}"
    except ValueError:
        return host


def addresses(text: str) -> Route:
    """``HOST[:PORT], HOST[:PORT] ...`` in their one form. :raises BadRoute: one is none."""
    return tuple(written(*address(word)) for word in text.replace(",", " ").split())


def parse_routes(text: str) -> tuple[Route, ...]:
    """Routes apart by semicolons: the relays of each in order, or the word ``direct``; at least one.

    :raises BadRoute: one cannot be used, or stands there twice.
    """
    found: list[Route] = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        route = () if part == DIRECT else addresses(part)
        check(route)
        if route in found:
            raise BadRoute(f"the route {part!r} stands there twice: name each once")
        found.append(route)
    return tuple(found) or ((),)


def check(route: Route) -> None:
    """Refuse a route of relays that is too long or comes back to one of them. :raises BadRoute: it does."""
    if len(route) >= MAX_HOPS:
        raise BadRoute(f"a route has at most {MAX_HOPS - 1} relays, this one {len(route)}: {shown(route)}")
    if len(set(route)) != len(route):
        raise BadRoute(f"a route passes each router once: {shown(route)}")


def next_hop(terminal: str) -> tuple[str, str]:
    """Where a custodian takes a file next, and the terminal as it is said there: the rest of ``HOP,HOP,TERMINAL``."""
    first, _, rest = terminal.partition(",")
    return first, rest


def shown(route: Route) -> str:
    """A route for a person."""
    return ",".join(route) or DIRECT
