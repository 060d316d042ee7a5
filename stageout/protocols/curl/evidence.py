"""Evidence about an upload after a 2xx answer: decide whether further answers contradict it.

A further answer confirms the upload, contradicts it, or says nothing. Two contradictions outweigh the 2xx answer. One
does not, because servers, proxies and caches report wrong lengths. :data:`SAYS_NOTHING` lists answers without evidence.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from stageout.protocols.curl.digests import Stated, stated_by_server
from stageout.protocols.curl.transport import Reply

_WITH_FILE = frozenset({200, 206, 207})
GONE = frozenset({404, 410})
_ENOUGH_TO_CONTRADICT = 2
_CLOCK_S = 2.0  # dates of HTTP are whole seconds
_TOTAL = re.compile(r"bytes (?:[0-9]+-[0-9]+|\*)/([0-9]{1,18})")
_LENGTH = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class Sent:
    """An upload that the server answered with 2xx.

    :param date: the date in the server's answer, "" for none. :param took_s: seconds from the begin to the answer.
    :param accepted: the answer was 202: the server may need time.
    :param page: the answer is a web page, for instance of a log-in, which may not describe the file.
    :param shows: the server normally shows stored files, so that 404 means that the file is missing.
    """

    size_bytes: int
    date: str = ""
    took_s: float = 0.0
    accepted: bool = False
    page: bool = False
    shows: bool = False

    @property
    def begin_s(self) -> float | None:
        """Return the start of the upload by the server's clock; None if its answer has no date."""
        date_s = http_date_s(self.date)
        return None if date_s is None else date_s - self.took_s


class Witness(NamedTuple):
    """Another answer about the file.

    :param size_bytes: size of the file, None if the answer does not contain it. :param silent: the reason why a
        difference does not count; "" if it counts. :param missing: the answer says that the file does not exist.
    """

    name: str
    size_bytes: int | None
    stated: Stated = Stated()
    silent: str = ""
    missing: bool = False


def is_page(reply: Reply) -> bool:
    """Tell whether an answer is a web page."""
    return reply.headers.get("content-type", "").strip().lower().startswith(("text/html", "application/xhtml"))


def _is_cached(reply: Reply) -> bool:
    age = reply.headers.get("age", "").strip()
    marks = " ".join(reply.headers.get(name, "") for name in ("x-cache", "x-cache-status", "cf-cache-status"))
    return (age.isdigit() and int(age) > 0) or bool(re.search(r"\b(hit|stale)\b", marks, re.IGNORECASE))


def _is_older(reply: Reply, sent: Sent) -> bool:
    """Tell whether the answer describes a version from before the upload, by the server's own dates."""
    modified_s, begin_s = http_date_s(reply.headers.get("last-modified", "")), sent.begin_s
    return modified_s is not None and begin_s is not None and modified_s < begin_s - _CLOCK_S


#: Reasons why an answer that disagrees says nothing, in the order of the checks.
SAYS_NOTHING: tuple[tuple[str, Callable[[Reply, Sent], bool]], ...] = (
    ("the upload was accepted for later (202)", lambda reply, sent: sent.accepted),
    ("it does not find the file", lambda reply, sent: reply.status in GONE and not sent.shows),
    ("it is refused", lambda reply, sent: reply.status not in _WITH_FILE | GONE and not _total(reply)),
    ("another place answered", lambda reply, sent: reply.redirected and not sent.page),
    ("it is a web page", lambda reply, sent: reply.status not in GONE and is_page(reply) and not sent.page),
    ("it is about a coded form", lambda reply, sent: _coding(reply) not in ("", "identity")),
    ("it comes from a cache", lambda reply, sent: _is_cached(reply)),
    ("it is about an older version", _is_older),
)


def witness_of(name: str, reply: Reply, sent: Sent, size_bytes: int | None = None) -> Witness:
    """Interpret an answer.

    :param size_bytes: size from the body of the answer; None: use the head.
    """
    agrees = reply.status in _WITH_FILE and sent.size_bytes in (size_bytes, _stated_size(reply))
    stated = stated_by_server(reply.headers, whole_body=True)
    rules = SAYS_NOTHING[:-1] if agrees and not stated.names else SAYS_NOTHING
    silent = next((why for why, applies in rules if applies(reply, sent)), "")  # parsing dates needs a slow import
    if reply.status in GONE:
        return Witness(name, None, silent=silent, missing=not silent)
    size_bytes = _stated_size(reply) if size_bytes is None else size_bytes
    if reply.status not in _WITH_FILE and not _total(reply):
        return Witness(name, None, silent=silent)
    missing = sent.page and is_page(reply) and size_bytes != sent.size_bytes
    silent = silent or ("it states no length" if size_bytes is None and not missing else "")
    return Witness(name, size_bytes, stated, silent, missing)


class Verdict:
    """The combined evidence about one upload."""

    def __init__(self, sent: Sent) -> None:
        self._sent = sent
        self._doubts = int(sent.page)
        self.confirmed = False
        self.last = Witness("PUT", None)

    @property
    def doubtful(self) -> bool:
        """Tell whether another request could change the result."""
        return 0 < self._doubts < _ENOUGH_TO_CONTRADICT and not self.confirmed

    @property
    def contradicted(self) -> bool:
        """Tell whether enough answers say that the file is missing or different."""
        return self._doubts >= _ENOUGH_TO_CONTRADICT and not self.confirmed

    def hear(self, witness: Witness) -> None:
        """Add one more answer."""
        self.confirmed = self.confirmed or witness.size_bytes == self._sent.size_bytes
        if witness.silent or witness.size_bytes == self._sent.size_bytes:
            return
        self._doubts += 1
        self.last = witness


def _coding(reply: Reply) -> str:
    return reply.headers.get("content-encoding", "").strip().lower()


def _total(reply: Reply) -> str:
    """Return the length of the file in the answer to a range request."""
    found = _TOTAL.fullmatch(reply.headers.get("content-range", "").strip())
    return found[1] if found else ""


def _stated_size(reply: Reply) -> int | None:
    if reply.status == 206 or _total(reply):
        return int(_total(reply)) if _total(reply) else None
    length = reply.headers.get("content-length", "")
    plain = reply.status == 200 and _coding(reply) in ("", "identity")
    return int(length) if plain and _LENGTH.fullmatch(length) and "transfer-encoding" not in reply.headers else None


def http_date_s(text: str) -> float | None:
    """Return an HTTP date in seconds; None for other text."""
    if not text:
        return None
    from email.utils import parsedate_to_datetime

    try:
        return parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
