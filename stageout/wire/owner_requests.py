"""An owner's request, as the command writes it into StageOutRequest and the agent reads it there."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

#: Word behind the verb. No id of a redirect looks like it, so requests without a run stay readable.
_RUN = re.compile(r"run=([1-9][0-9]{0,9})", re.A)


class Verb(str, enum.Enum):
    """Kind of a request. The schedd has checked that it comes from the job's owner."""

    RETRY = "retry"
    CANCEL = "cancel"
    PAUSE = "pause"
    RESUME = "resume"
    REDIRECT = "redirect"


_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+._-]*\Z")
_URL_CHARS = 4000
_VERBS = {verb.value: verb for verb in Verb}


@dataclass(frozen=True)
class OwnerRequest:
    """Request of an owner: ``VERB run=RUN``, and for a redirect ``redirect run=RUN ID URL FILE``.

    :param verb: None for a text that is no request.
    :param run: NumShadowStarts of the run. 0: the text names none, so the request applies to the job's last run.
    :param redirect_id: name of a redirect, which its answer repeats. :param url: new URL of a redirect.
    :param file: file to redirect; "" for all.
    """

    verb: Verb | None = None
    run: int = 0
    redirect_id: str = ""
    url: str = ""
    file: str = ""

    def __str__(self) -> str:
        """Return the text for the job's ad."""
        run = f"run={self.run}" if self.run > 0 else ""
        words = (self.verb.value if self.verb else "", run, self.redirect_id, self.url, self.file)
        return " ".join(filter(None, words))

    @property
    def name(self) -> str:
        """Return the words by which StageOutRefused names this request; "" when no command waits for them."""
        if self.verb is Verb.REDIRECT:
            return self.redirect_id
        return f"{self.verb.value} run={self.run}" if self.verb and self.run else ""

    def is_for(self, first_run: int, last_run: int) -> bool:
        """Tell whether the request is for a run that has one of these numbers."""
        return not self.run or first_run <= self.run <= last_run

    def is_same(self, other: OwnerRequest) -> bool:
        """Tell whether both requests have the same answer."""
        return (self.verb, self.run, self.redirect_id) == (other.verb, other.run, other.redirect_id)


def redirect_problem(url: str) -> str:
    """Return why output cannot be redirected to this URL; "" if it can. Orders and job ads are public."""
    scheme, mark, rest = url.partition("://")
    if not (_SCHEME.match(scheme) and mark and rest and url.isascii() and url.isprintable() and " " not in url):
        return "the URL must be scheme://host/path, without spaces and with other than ASCII characters encoded"
    if len(url) > _URL_CHARS:
        return f"the URL has more than {_URL_CHARS} characters"
    if "@" in rest.partition("/")[0] or "?" in url or "#" in url:
        return "the URL has a user, a password, a query or a fragment, and everybody can read the job's ad"
    return ""


def parse_request(text: str) -> OwnerRequest:
    """Parse StageOutRequest. Return a request without a verb for an invalid text."""
    word, _, rest = text.partition(" ")
    verb, run = _VERBS.get(word), 0
    first, _, behind = rest.partition(" ")
    named = _RUN.fullmatch(first)
    if named:
        run, rest = int(named[1]), behind
    if verb is Verb.REDIRECT:
        redirect_id, _, rest = rest.partition(" ")
        url, _, file = rest.partition(" ")
        return OwnerRequest(verb, run, redirect_id, url, file)
    return OwnerRequest(verb, run) if verb and not rest else OwnerRequest()
