"""Jobs: the search, and the page of one job."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from stageout.core.errors import ErrorClass
from stageout.core.eta import Eta
from stageout.core.reasons import FAILURES
from stageout.core.states import State, plain_word
from stageout.wire.custody import FileReport, SandboxReport
from stageout.wire.expected import for_runs
from stageout_web.format import count, duration, expected, size
from stageout_web.html import Markup, join, moment, table, tag, with_code
from stageout_web.model import GROUP_OF, LEFT, MOVING, TROUBLE, WAITING, Node, Pool, SandboxSummary, server_of
from stageout_web.state import PageState
from stageout_web.views import requests
from stageout_web.views.listing import Column, Listing
from stageout_web.views.page import PageContext, choice
from stageout_web.views.why import Why, happened_now

ROWS = 50
_JOB_ID = re.compile(r"\d{1,10}(\.\d{1,10})?\Z", re.A)
#: Confirmation of a file whose plugin states none.
_PLUGINS_WORD = "plugin's word"
_GROUPS = {"": "all", "waiting": "waiting", "moving": "moving", "trouble": "failed or lost", "delivered": "delivered",
           LEFT: "job has left the queue"}  # fmt: skip
#: Order of the groups in the list.
_FIRST = {TROUBLE: 0, MOVING: 1, WAITING: 2}


Pair = tuple[Node, SandboxSummary]


class Filter(NamedTuple):
    """The search. Empty fields select everything.

    :param q: job, owner, schedd or node. :param error: code of an error class.
    """

    q: str = ""
    group: str = ""
    state: str = ""
    server: str = ""
    error: str = ""
    owner: str = ""
    node: str = ""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Filter:
        """Return the search in a query."""
        return cls(*(query.get(name, "").strip()[:200] for name in cls._fields))

    def selects(self, pool: Pool, node: Node, sandbox: SandboxSummary) -> bool:
        """Tell whether a sandbox is searched for."""
        return (
            (pool.has_left(sandbox) if self.group == LEFT else self.group in ("", sandbox.group))
            and (not self.state or sandbox.state == self.state)
            and (not self.server or sandbox.server == self.server)
            and (not self.error or str(sandbox.error_code) == self.error)
            and (not self.owner or sandbox.owner == self.owner)
            and (not self.node or node.name == self.node)
            and (not self.q or self._matches(node, sandbox))
        )

    def _matches(self, node: Node, sandbox: SandboxSummary) -> bool:
        if _JOB_ID.match(self.q):
            return sandbox.job_id == self.q or sandbox.job_id.startswith(f"{self.q}.")
        return self.q in sandbox.owner or self.q in node.name or self.q in sandbox.job


def _order(pair: Pair) -> tuple[int, int, str]:
    sandbox = pair[1]
    return _FIRST.get(sandbox.group, 3), sandbox.accepted_at, sandbox.job


def listing(context: PageContext, state: PageState, query: Mapping[str, str]) -> Listing[Pair]:
    """Return the list of outputs that an address asks for: those in trouble first, then the oldest."""
    pool, wanted = state.pool, Filter.of(query)
    found = (pair for pair in pool.sandboxes() if wanted.selects(pool, *pair))
    return Listing(
        view="jobs", noun="output", columns=_columns(context, pool), found=found, query=query, order=_order, rows=ROWS
    )


def _columns(context: PageContext, pool: Pool) -> list[Column[Pair]]:
    why = Why(pool)
    return [
        Column("job", "Job", lambda pair: pair[1].job_id,
               lambda pair: tag("a", pair[1].job_id, href=context.job_link(pair[1].job)),
               order=lambda pair: job_order(pair[1])),
        Column("id", "", lambda pair: pair[1].job),
        Column("run", "", lambda pair: pair[1].number),
        Column("owner", "Owner", lambda pair: pair[1].owner),
        Column("group", "", lambda pair: pair[1].accounting_group),
        Column("state", "State", lambda pair: pair[1].state, lambda pair: _state(pool, *pair)),
        Column("reason", "Reason", lambda pair: why.of(*pair)),
        Column("code", "", lambda pair: pair[1].error_code),
        Column("next", "Next attempt", lambda pair: pair[1].next_attempt_at or None,
               lambda pair: "" if pool.is_silent(pair[0]) else _until(pair[1].next_attempt_at, pool.now_at)),
        Column("files", "", lambda pair: pair[1].files_left),
        Column("left", "Left", lambda pair: pair[1].bytes_left,
               lambda pair: f"{count(pair[1].files_left, 'file')}, {size(pair[1].bytes_left)}", is_number=True),
        Column("server", "Destination", lambda pair: pair[1].server, lambda pair: _server(context, pair[1].server)),
        Column("node", "Node", lambda pair: pair[0].host,
               lambda pair: tag("a", pair[0].host, href=context.link("node", name=pair[0].name))),
        Column("since", "Since", lambda pair: pair[1].accepted_at, lambda pair: moment(pair[1].accepted_at)),
    ]  # fmt: skip


def job_order(sandbox: SandboxSummary) -> tuple[int, int, str]:
    """Return the place of a job by its numbers."""
    cluster, _, proc = sandbox.job_id.partition(".")
    is_id = bool(_JOB_ID.match(sandbox.job_id))
    return int(cluster) if is_id else -1, int(proc or 0) if is_id else -1, sandbox.job


def _server(context: PageContext, server: str) -> Markup | None:
    return tag("a", server, href=context.link("destination", server=server)) if server else None


def jobs(context: PageContext, state: PageState, query: Mapping[str, str]) -> Markup:
    """Return the search with its results."""
    wanted, found = Filter.of(query), listing(context, state, query)
    look_up = None if len(found) else _look_up(context, wanted.q)
    live = tag("div", found.table(context, "No reported output matches."), look_up, data_live="jobs", id="jobs")
    return join(_form(context, wanted, query.get("sort", "")), live)


def _look_up(context: PageContext, q: str) -> Markup | None:
    """Return a link to a job that no manager reports, if the search is a job's id."""
    if not _JOB_ID.match(q):
        return None
    job = q if "." in q else f"{q}.0"
    return tag("p", tag("a", f"Look for job {job} in the job queue", href=context.link("job", id=job)))


def _form(context: PageContext, wanted: Filter, sort: str) -> Markup:
    """Return the search's form. Fields that only links set stay as hidden fields."""
    kept = [
        tag("input", type="hidden", name=name, value=value)
        for name, value in (
            ("state", wanted.state),
            ("server", wanted.server),
            ("error", wanted.error),
            ("owner", wanted.owner),
            ("node", wanted.node),
            ("sort", sort[:40]),
        )
        if value
    ]
    said = [f"{name}: {value}" for name, value in (
        ("state", plain_word(wanted.state)), ("destination", wanted.server),
        ("error", _happened(wanted.error)), ("owner", wanted.owner),
        ("node", wanted.node.rpartition("@")[2]),
    ) if value]  # fmt: skip
    only = [tag("p", "Only ", "; ".join(said), " ", tag("a", "Show all", href=context.link("jobs")))] if said else None
    field = tag("input", name="q", type="search", value=wanted.q, id="q", placeholder="1234.0, owner, node")
    return join(
        tag("form", tag("label", "Job, owner, schedd or node ", field), choice("group", "State", _GROUPS, wanted.group),
            kept, tag("button", "Search", type="submit"), role="search", class_="search", action=context.link("jobs")),
        only,
    )  # fmt: skip


def _happened(code: str) -> str:
    return happened_now(int(code)) if re.match(r"\d{1,3}\Z", code, re.A) else ""


def _state(pool: Pool, node: Node, sandbox: SandboxSummary) -> Markup:
    """Return the state of output that is not delivered; for a silent node since when that is all that is known."""
    if pool.has_left(sandbox):
        return join(_state_of_output(pool, node, sandbox), tag("br"), tag("small", "job has left the queue"))
    return _state_of_output(pool, node, sandbox)


def _state_of_output(pool: Pool, node: Node, sandbox: SandboxSummary) -> Markup:
    if not pool.is_silent(node) or sandbox.group not in (WAITING, MOVING):
        return state_mark(sandbox.state)
    text = f"node silent, {plain_word(sandbox.state)} as of {duration(pool.now_at - node.heard_at)} ago"
    return tag("span", text, class_=f"state {TROUBLE}")


def state_mark(state: str) -> Markup:
    """Return the words of a state with the colour of its group."""
    return tag("span", plain_word(state), class_=f"state {GROUP_OF.get(state, WAITING)}")


def _until(at: int, now_at: int) -> str:
    """Return the time until the next attempt."""
    if not at:
        return ""
    return f"in {duration(at - now_at)}" if at > now_at else "due now"


# ---- one job ---------------------------------------------------------------------------------------------------------


def job(context: PageContext, state: PageState, name: str, ad: Mapping[str, Any] | None, problem: str,
        may_ask: bool = False) -> Markup | None:  # fmt: skip
    """Return the page of one job.

    :param name: GlobalJobId, or ``cluster.proc`` of this schedd. :param ad: its ad in the queue.
    :param problem: reason why the ad is not known. :param may_ask: the reader may change the delivery.
    :returns: None if nothing is known about the job.
    """
    runs = _runs(state.pool, name, str(ad.get("User", "")) if ad else "")
    if not runs and ad is None:
        return tag("p", f"The schedd does not answer: {problem}") if problem else None
    parts = [_run(context, run, state.pool) for run in runs]
    if not runs and ad is not None:
        parts = [_from_ad(context, ad)]
    asked = _requests(context, runs, ad) if may_ask and ad is not None else None
    return tag("div", _timeline(runs, ad), parts, asked, _commands(name, runs, ad), data_live="job", id="job")


def _requests(context: PageContext, runs: list[_Run], ad: Mapping[str, Any]) -> Markup | None:
    newest = runs[0] if runs else None
    is_paused = newest is not None and newest.said is not None and bool(newest.said.paused)
    verbs = requests.offered(newest.sandbox if newest else None, is_paused)
    return requests.links(context, f"{ad['ClusterId']}.{ad['ProcId']}", verbs, ad)


class _Run(NamedTuple):
    """One run of a job. :param said: its whole report."""

    node: Node
    sandbox: SandboxSummary
    said: SandboxReport | None
    eta: Eta | None


def _runs(pool: Pool, name: str, user: str) -> list[_Run]:
    """Return the runs of a job, the newest first. :param name: GlobalJobId. :param user: of the job, "" if unknown."""
    found = []
    for node, sandbox in pool.find(name, user):
        report = node.report()
        said = next((one for one in report.sandboxes if one.run == sandbox.run), None)
        etas = for_runs(report, pool.now_at, [said.run] if said else [])
        found.append(_Run(node, sandbox, said, etas.get(said.run) if said else None))
    return found


def _run(context: PageContext, run: _Run, pool: Pool) -> Markup:
    """Return one run of the job: why it waits, and its files."""
    (node, sandbox, said, eta), now_at = run, pool.now_at
    is_silent = pool.is_silent(node)
    why = tag(
        "p", _SILENT if is_silent else _why(sandbox, said, context.sees_names_of(sandbox.owner), now_at), class_="why"
    )
    facts = tag(
        "dl",
        _fact("State", _state(pool, node, sandbox)),
        _fact("Owner", sandbox.owner),
        _fact("Destination", tag("a", sandbox.server, href=context.link("destination", server=sandbox.server))),
        _fact("Node", tag("a", node.host, href=context.link("node", name=node.name))),
        _fact(
            "Left", f"{count(sandbox.files_left, 'file')}, {size(sandbox.bytes_left)} of {size(sandbox.bytes_total)}"
        ),
        None
        if is_silent
        else _fact("Next attempt", join(moment(sandbox.next_attempt_at), " ", _until(sandbox.next_attempt_at, now_at))),
        _fact("Expected", expected(eta)) if is_expected(sandbox) and not is_silent else None,
    )
    files = _files(context, said, context.sees_names_of(sandbox.owner), now_at) if said is not None else None
    return tag("section", tag("h2", f"Run {sandbox.number}"), why, facts, files)


_SILENT = (
    "The node sends no reports any more. The output is taken for lost after STAGEOUT_LEASE at the latest, and the job "
    "runs again. If the node comes back before, the delivery goes on."
)


def is_expected(sandbox: SandboxSummary) -> bool:
    """Tell whether the node will deliver the output, as far as it knows."""
    return sandbox.group in (WAITING, MOVING) and sandbox.state != State.HANDED_OVER


def _fact(name: str, value: Any) -> Markup:
    return tag("div", tag("dt", name), tag("dd", value))


def _why(sandbox: SandboxSummary, said: SandboxReport | None, sees_names: bool, now_at: int) -> Markup:
    """Return why the output is not delivered, and the next step."""
    reason = f" {said.reason}." if said is not None and said.reason and sees_names else ""
    if sandbox.group == TROUBLE:
        explanation = FAILURES[ErrorClass.from_code(sandbox.error_code)]
        happened, action = explanation.happened, explanation.action
        if sandbox.state == State.LOST:
            happened, action = "The output was lost.", "Nothing: the agent runs the job again."
        return join(tag("strong", happened), reason, " ", with_code(action))
    text = _WHY.get(sandbox.state, "")
    if sandbox.state == State.RETRY_WAIT:
        again = _until(sandbox.next_attempt_at, now_at) or "by itself"
        text = f"{happened_now(sandbox.error_code)} The node tries again {again}."
    return join(text, reason)


_WHY = {
    State.ACCEPTED.value: "The node keeps the output until the access point confirms that this run is the final one. "
    "The agent does that within seconds after the job's end.",
    State.CONFIRMED.value: "The output waits for a free data slot of the node.",
    State.LEASED.value: "The output has a data slot. Its transfer begins now.",
    State.MOVING.value: "The node sends the output.",
    State.HANDED_OVER.value: "Routers of the overlay have the output and deliver it.",
    State.DELIVERED.value: "The output is at its destination and verified.",
    State.RELEASED.value: "The output is at its destination and verified.",
    State.CANCELLED.value: "Nobody wants the output any more.",
    State.SUPERSEDED.value: "A later run of the job replaces this output.",
}


def _files(context: PageContext, said: SandboxReport, sees_names: bool, now_at: int) -> Markup:
    """Return the files of a run, those in trouble first. Without a token they have numbers in place of names."""
    rows = [_file(sees_names, number, one, said.attempts_limit, now_at) for number, one in enumerate(said.files, 1)]
    hidden = said.files_total - len(said.files)
    return join(
        table("Files", ("File", "State", "Attempts", "Next attempt", "Size", "Reason", "Plugin"), rows, (2, 4)),
        tag("p", f"{count(hidden, 'file')} more, not in trouble.") if hidden > 0 else None,
        None if sees_names or not context.may_sign_in else
        tag("p", tag("a", "Show file names and URLs", href=context.link("sign-in"))),
    )  # fmt: skip


def _file(sees_names: bool, number: int, one: FileReport, limit: int, now_at: int) -> Iterator[Any]:
    if sees_names:
        yield join(one.name, tag("br"), tag("small", one.url))
    else:
        yield join(f"File {number}", tag("br"), tag("small", server_of(one.url)))
    yield state_mark(one.state)
    counted = max(0, one.attempts - one.excused)
    yield f"{counted} of {limit}" if limit and one.attempts else str(counted)
    yield _until(one.next_attempt_at, now_at)
    yield size(one.size_bytes)
    yield _reason(one, sees_names)
    yield one.plugin if sees_names or _is_word(one.plugin) else ""


def _is_word(text: str) -> bool:
    """Tell whether text of a plugin is a plain name, which cannot be a path or a URL."""
    return text == _PLUGINS_WORD or re.fullmatch(r"[A-Za-z0-9_-]{1,40}", text) is not None


def _reason(one: FileReport, sees_names: bool) -> Markup | str:
    """Return the reason of a file's failure. The words of servers may have names in them."""
    if not one.error_code:
        return f"verified: {one.verified}" if one.verified and (sees_names or _is_word(one.verified)) else ""
    happened = happened_now(one.error_code)
    return join(happened, tag("br"), tag("small", one.error)) if sees_names and one.error else happened


def _timeline(runs: list[_Run], ad: Mapping[str, Any] | None) -> Markup:
    """Return the moments of the job in their order."""
    names = {"QDate": "Submitted", "JobCurrentStartExecutingDate": "Last run began", "CompletionDate": "Job ended"}
    found = [(ad.get(name), text) for name, text in names.items()] if ad is not None else []
    for node, sandbox, said, _ in runs:
        found.append((sandbox.accepted_at, f"{node.host} took the output of run {sandbox.number}"))
        if said is not None:
            found.append((said.confirmed_at, f"The access point confirmed run {sandbox.number}"))
            found.append((said.ended_at, f"The output of run {sandbox.number}: {plain_word(sandbox.state)}"))
    moments = sorted((at, text) for at, text in found if isinstance(at, int) and at > 0)
    items = [tag("li", moment(at), " ", text) for at, text in moments]
    now = [tag("li", tag("strong", "Now: "), plain_word(runs[0].sandbox.state))] if runs else []
    return tag("section", tag("h2", "Timeline"), tag("ol", items, now, class_="timeline"))


def _from_ad(context: PageContext, ad: Mapping[str, Any]) -> Markup:
    """Return what the job's ad says about its output, when no manager reports it."""
    if ad.get("StageOutGuard") is not True:
        return tag("p", "The job does not take part in stage-out: its output moves before the job ends.")
    state = str(ad.get("StageOutState") or "None")
    if state == "None":
        return tag("p", "The job has not handed output off. Its program runs, or has not begun.")
    sees_names = context.sees_names_of(str(ad.get("User") or ""))
    reason = str(ad.get("StageOutReason") or "") if sees_names else ""
    return tag("p", state_mark(state), f" {reason}")


def _commands(name: str, runs: list[_Run], ad: Mapping[str, Any] | None) -> Markup:
    """Return the commands for the job."""
    sandbox = runs[0].sandbox if runs else None
    number = sandbox.job_id if sandbox else f"{ad['ClusterId']}.{ad['ProcId']}" if ad else name
    lines = [f"stageout status {number}"]
    if sandbox is not None and sandbox.group == TROUBLE:
        lines = [f"stageout retry {number}", *lines, f"condor_release {number}"]
    elif sandbox is not None and sandbox.state == State.RETRY_WAIT:
        lines = [f"stageout retry {number}", *lines]
    where = tag("p", "Run these commands on ", tag("code", shlex.quote(sandbox.schedd)), ".") if sandbox else None
    shown = [tag("li", tag("code", line, class_="command")) for line in lines]
    return tag("section", tag("h2", "Commands"), where, tag("ul", shown, class_="commands"))
