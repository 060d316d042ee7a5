"""Requests to change a delivery: the links on a job's page, and the form that asks for the details."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from stageout.core.states import State
from stageout.wire.owner_requests import OwnerRequest, Verb, parse_request, redirect_problem
from stageout_web.format import count, size
from stageout_web.html import Markup, tag
from stageout_web.model import MOVING, TROUBLE, WAITING, SandboxSummary
from stageout_web.views.page import PageContext

MOST_REASON, MOST_FILE = 200, 1000
#: First word of the answer to a redirect.
_REDIRECT_ID = re.compile(r"[0-9a-f]{8} ", re.A)
_ASKED = {
    Verb.RETRY: "Retry",
    Verb.REDIRECT: "Redirect",
    Verb.PAUSE: "Pause",
    Verb.RESUME: "Resume",
    Verb.CANCEL: "Cancel",
}
_EFFECTS = {
    Verb.RETRY: "Failed and waiting files are sent again at once. When they have arrived, a held job completes.",
    Verb.REDIRECT: "Failed and waiting files are sent to another URL, without another run of the job. Files that are "
    "delivered or being sent keep their URL.",
    Verb.PAUSE: "No more transfers of this output start. Transfers that have begun continue.",
    Verb.RESUME: "The delivery continues after a pause.",
    Verb.CANCEL: "The output that is not delivered is deleted, and nobody can bring it back. The job completes without "
    "it.",
}


def offered(sandbox: SandboxSummary | None, is_paused: bool) -> list[Verb]:
    """Return the requests that make sense for the newest run of a job."""
    if sandbox is None or sandbox.group not in (WAITING, MOVING, TROUBLE) or sandbox.state == State.LOST:
        return []
    if sandbox.group == TROUBLE:
        return [Verb.RETRY, Verb.REDIRECT, Verb.CANCEL]
    retry = [Verb.RETRY] if sandbox.state == State.RETRY_WAIT else []
    return [*retry, Verb.REDIRECT, Verb.RESUME if is_paused else Verb.PAUSE, Verb.CANCEL]


def links(context: PageContext, job: str, verbs: list[Verb], ad: Mapping[str, Any]) -> Markup | None:
    """Return the links of a job's page, or the request that waits for its answer. :param job: ``cluster.proc``."""
    asked = [tag("p", text) for text in _answers(ad)]
    shown = [tag("li", tag("a", _ASKED[one], href=context.link("request", id=job, verb=one.value))) for one in verbs]
    if not asked and not shown:
        return None
    known = tag("ul", shown, class_="commands") if shown and not ad.get("StageOutRequest") else None
    return tag("section", tag("h2", "Change the delivery"), asked, known)


def _answers(ad: Mapping[str, Any]) -> Iterator[str]:
    request, by = str(ad.get("StageOutRequest") or ""), str(ad.get("StageOutRequestBy") or "")
    if request:
        verb = parse_request(request).verb
        yield f"The request '{verb.value if verb else request}' waits for the agent and the node."
    elif ad.get("StageOutRefused"):
        yield f"The last request was refused: {_REDIRECT_ID.sub('', str(ad['StageOutRefused']))}"
    if by:
        yield f"Last request by this page: {by}"


def form(
    context: PageContext,
    job: str,
    verb: Verb,
    run: int,
    sandbox: SandboxSummary | None,
    given: Mapping[str, str],
    problem: str = "",
) -> Markup:
    """Return the form of a request. :param job: ``cluster.proc``. :param given: what was filled in before."""
    left = f" {count(sandbox.files_left, 'file')}, {size(sandbox.bytes_left)} are not delivered." if sandbox else ""
    fields = [
        _field("reason", "Reason, for the job's owner", given, required=True, maxlength=MOST_REASON),
        tag("p", tag("button", f"{_ASKED[verb]} the output of job {job}", type="submit"), " ",
            tag("a", "Back to the job", href=context.link("job", id=job))),
    ]  # fmt: skip
    if verb is Verb.REDIRECT:
        fields[:0] = [
            _field("url", "New URL: a directory; with a file its whole URL", given, required=True, maxlength=4000),
            _field("file", "File; empty: all that failed or wait", given, maxlength=MOST_FILE),
        ]
    if verb is Verb.CANCEL:
        sure = tag("input", name="sure", type="checkbox", value="yes", required=True, id="sure")
        fields.insert(1, tag("p", tag("label", sure, " Delete this output", for_="sure")))
    hidden = [tag("input", type="hidden", name=name, value=value)
              for name, value in (("id", job), ("verb", verb.value), ("run", str(run)))]  # fmt: skip
    wrong = tag("p", problem, role="alert", class_="problems") if problem else None
    about = tag("p", f"{_EFFECTS[verb]}{left}")
    return tag("form", wrong, about, hidden, fields, method="post", action=f"{context.base}/request", class_="request")


def title(job: str, verb: Verb) -> str:
    """Return the title of the form."""
    return f"{_ASKED[verb]} the output of job {job}"


def _field(name: str, label: str, given: Mapping[str, str], required: bool = False, maxlength: int = 0) -> Markup:
    value = given.get(name, "")
    entry = tag("input", name=name, value=value, id=name, required=required, maxlength=maxlength, autocomplete="off")
    return tag("p", tag("label", label, for_=name), tag("br"), entry)


def problem_of(asked: OwnerRequest, reason: str, given: Mapping[str, str], run: int) -> str:
    """Return why a form cannot be used; "" if it can. :param run: the job's last run, which the form has named."""
    if given.get("run") != str(run):
        return f"The job has begun run {run} meanwhile. Look at it, and ask again."
    if not reason or len(reason) > MOST_REASON or not reason.isprintable():
        return f"Write a reason of at most {MOST_REASON} characters in one line."
    if asked.verb is Verb.CANCEL and given.get("sure") != "yes":
        return "Confirm that the output is to be deleted."
    if asked.verb is not Verb.REDIRECT:
        return ""
    if not asked.file.isprintable() or len(asked.file) > MOST_FILE:
        return f"A name of a file has at most {MOST_FILE} characters in one line."
    wrong = redirect_problem(asked.url)
    return f"Correct the URL: {wrong}." if wrong else ""


def request_of(verb: Verb, run: int, redirect_id: str, given: Mapping[str, str]) -> OwnerRequest:
    """Return the request that a form asks for."""
    if verb is Verb.REDIRECT:
        return OwnerRequest(verb, run, redirect_id, given.get("url", "").strip(), given.get("file", "").strip())
    return OwnerRequest(verb, run)
