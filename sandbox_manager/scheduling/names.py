"""Names in the DNS: whether a name that does not exist is the matter of its owner, or of the node's resolver. Pure.

A resolver that is wrongly set up, or cut off, may deny all names. So a denial counts only if the resolver has found
another name since it first denied this one, and has never found this one.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping

from stageout.core.errors import ErrorClass
from stageout.movers.results import Answer, Delivered, Failure

#: Names of each kind that are remembered, the newest ones.
MOST = 1000
#: Failures that a server reports. Its name was resolved before.
_SAID = frozenset(
    {
        ErrorClass.TLS_UNTRUSTED, ErrorClass.CREDENTIAL_REFUSED, ErrorClass.PERMISSION_DENIED, ErrorClass.NOT_FOUND,
        ErrorClass.CONFLICT, ErrorClass.TOO_LARGE, ErrorClass.THROTTLED, ErrorClass.SERVER_BUSY,
        ErrorClass.SERVER_ERROR, ErrorClass.NO_SPACE_REMOTE, ErrorClass.QUOTA_EXCEEDED,
    }
)  # fmt: skip


def is_owners_matter(host: str, denied: Mapping[str, float], found: Mapping[str, float]) -> bool:
    """Tell whether the denial of a name says something of the name.

    :param denied: monotonic time of the first denial of each name. :param found: monotonic time after which each name
        was resolved last.
    """
    if host not in denied or host in found:
        return False
    return any(at_s > denied[host] for at_s in found.values())


class NameRecord:
    """The names that this node has resolved, or could not, since its manager started."""

    def __init__(self) -> None:
        self._denied: dict[str, float] = {}
        self._found: dict[str, float] = {}

    def heard(self, place: str, answers: Iterable[Answer], began_s: float, now_s: float) -> bool:
        """Learn from the answers of a batch. Return whether a denied name is the matter of its owner.

        :param place: host and port of its server. :param began_s: monotonic time of the call, :param now_s: of its end.
        """
        host = _name_in(place)
        if not host:
            return False
        told = list(answers)
        if any(map(_has_answered, told)):
            self._denied.pop(host, None)
            _put(self._found, host, began_s)
        elif host not in self._denied and any(map(_has_denied, told)):
            _put(self._denied, host, now_s)
        return is_owners_matter(host, self._denied, self._found)


def _has_answered(answer: Answer) -> bool:
    return isinstance(answer, Delivered) or (
        isinstance(answer, Failure) and answer.blames_destination and answer.kind in _SAID
    )


def _has_denied(answer: Answer) -> bool:
    return isinstance(answer, Failure) and answer.kind is ErrorClass.NAME_NOT_RESOLVED


def _name_in(place: str) -> str:
    """Return the host if it is a name that only a resolver knows, else ""."""
    host = place.rpartition("@")[2]
    if host.startswith("["):
        return ""
    host = host.partition(":")[0].rstrip(".").lower()
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return "" if host in ("", "localhost") else host
    return ""


def _put(names: dict[str, float], host: str, at_s: float) -> None:
    names.pop(host, None)
    names[host] = at_s
    if len(names) > MOST:
        del names[next(iter(names))]
