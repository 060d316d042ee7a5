"""``stageout explain``: explain how a job's output will travel, before the job is submitted or while it waits."""

from __future__ import annotations

import argparse
import functools
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from stageout.cli.arguments import add_json, add_schedd
from stageout.cli.condor import Pool, Queue, load_bindings
from stageout.cli.exits import CommandError, Exit, Unavailable, UnknownJob, UsageError
from stageout.cli.explain_job import Story, story
from stageout.cli.jobs import ATTRIBUTES as JOB_ATTRIBUTES
from stageout.cli.jobs import STATUS_WORDS, Job, parse_job_id
from stageout.cli.outputs import OUTPUT_ATTRIBUTES, Output, outputs_of
from stageout.cli.own_credentials import kept_token, service_of
from stageout.cli.pool_plugins import plugin_for
from stageout.cli.render import clean
from stageout.cli.request import NOTICE_FRESH_S, agent_silence_s
from stageout.cli.results import tell
from stageout.cli.servers import milliseconds_to, server_of
from stageout.cli.submit_file import first_job, transformed
from stageout.condor.ads import read_old
from stageout.condor.configuration import condor_settings
from stageout.condor.plugins import ask, beside
from stageout.core.classads import ClassAd
from stageout.core.config import Settings
from stageout.core.errors import ErrorClass
from stageout.core.reasons import Cause, named, sentence_of
from stageout.core.units import count, duration, rate, size
from stageout.movers.schemes import NODE_PATH, fallback_problem, method_of, shown_url

DESCRIPTION = """\
Explain how the output of a job will be delivered, without submitting or changing anything. FILE is a submit file; its
first job counts. JOB is a job in the queue, or one that has left it. Of a job that has ended the command says what
happened to its output, and what holds now. The command expands the file with condor_submit and applies the access
point's own job transforms. It connects to the servers, but writes nothing. A line says 'unknown' if the access point
cannot know the answer. CODE is the code of a refusal (SlotFull), the name of an error class (CONNECT_FAILED), or the
sub-code of a hold if no job has that number (20020). The command then says who can act, and what to do.

exit status: 0 no obstacle found, 1 an obstacle found or FILE cannot be used, 3 unknown job, 64 wrong command line"""

OK, PROBLEM, UNKNOWN = "ok", "problem", "unknown"
_DAYS = 7
_MOST_JOBS = 50
_FEW_JOBS = 3
#: Attributes to read of a job in the queue.
ATTRIBUTES = (
    *JOB_ATTRIBUTES, *OUTPUT_ATTRIBUTES, "TransferPlugins", "OAuthServicesNeeded", "x509userproxy",
    "x509UserProxyExpiration", "StageOutFallback",
)  # fmt: skip


class Line(NamedTuple):
    """One line of the explanation. :param level: OK, PROBLEM or UNKNOWN."""

    name: str
    level: str
    text: str


class Subject(NamedTuple):
    """The job to explain.

    :param ad: the schedd's ad, or the ad it would have. :param is_marked: the job transforms were applied.
    :param is_file: the ad comes from a submit file. :param asks: the file itself sets ``MY.StageOutAsync = true``.
    :param in_queue: False: the job is in the history.
    """

    title: str
    ad: ClassAd
    is_marked: bool
    is_file: bool = False
    asks: bool = False
    in_queue: bool = True


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    command.add_argument(
        "subject",
        metavar="FILE|JOB|CODE",
        help="a submit file, a cluster (1234), a job of it (1234.0), or the code of a reason",
    )
    add_json(command)
    add_schedd(command)


def run(options: argparse.Namespace) -> int:
    """Explain one job, or one reason."""
    cause = None if Path(options.subject).is_file() else named(options.subject)
    if cause and not options.subject.isdigit():
        return _explain_cause(cause, options.json)
    load_bindings()
    settings, queue = condor_settings(), Queue(options.name, options.pool)
    try:
        subject = _subject(options.subject, settings, queue)
    except UnknownJob:
        if cause is None:
            raise
        return _explain_cause(cause, options.json)
    outputs = outputs_of(subject.ad)
    known = None if subject.is_file else story(_job(subject), outputs, queue, Pool(options.pool))
    delivery = known.delivery if known else decision(subject, outputs)
    lines = _story_lines(known) if known else [_delivery_line(*delivery)]
    places = [*outputs, *_fallback_of(subject.ad, delivery[0])]
    if known and known.open:
        lines += [*fallback_lines(subject.ad, delivery[0]), *_server_lines(places)]
        lines += [*_node_lines(places, Pool(options.pool)), *_credential_lines(subject.ad, places, settings)]
    elif outputs and not known:
        lines += [*_dag_lines(subject, delivery[0]), *fallback_lines(subject.ad, delivery[0])]
        lines += [*_pool_lines(places, queue, Pool(options.pool), _own_plugins(subject.ad)), *_server_lines(places)]
        lines += [*_node_lines(outputs, Pool(options.pool)), *_credential_lines(subject.ad, places, settings)]
        lines += [_time_line(outputs, queue)]
    if options.json:
        tell(_facts(subject, outputs, delivery, lines))
    else:
        print("\n".join([clean(subject.title), *map(_shown_output, outputs), "", *map(_shown, lines)]))
    return int(Exit.FAILED if any(line.level == PROBLEM for line in lines) else Exit.OK)


def _explain_cause(cause: Cause, as_json: bool) -> int:
    numbers = {"error_code": cause.kind.code, "hold_subcode": cause.hold_subcode} if cause.kind else {}
    if as_json:
        tell({"code": cause.name, "reason": cause.happened, "who": cause.actor.value, "what_to_do": cause.action}
             | numbers)  # fmt: skip
    else:
        shown = f" (error code {cause.kind.code}, hold sub-code {cause.hold_subcode})" if cause.kind else ""
        print(f"{cause.name}{shown}: {cause.happened}", f"  who        {cause.actor.value}",
              f"  what to do {cause.action}", sep="\n")  # fmt: skip
    return int(Exit.OK)


def _subject(text: str, settings: Settings, queue: Queue) -> Subject:
    """Find the submit file or job of the command line. :raises CommandError: there is no such file or job."""
    if "://" in text and not Path(text).is_file():
        raise url_problem(text)
    if Path(text).is_file() or not re.fullmatch(r"[0-9.]+", text):
        plain_text = first_job(Path(text), settings)
        marked = transformed(plain_text, settings)
        written = read_old(plain_text)
        ad = read_old(marked) if marked else written
        asks = written.get("StageOutAsync") is True
        return Subject(f"First job of {text}", ad, marked is not None, is_file=True, asks=asks)
    wanted = parse_job_id(text)
    queued = queue.first_ad(wanted, ATTRIBUTES)
    found = queued or queue.ended_ad(wanted, ATTRIBUTES)
    if found is None:
        raise UnknownJob(f"{wanted}: no such job in the queue or the history of {queue.name()}")
    job_id = f"{found.integer('ClusterId')}.{found.integer('ProcId')}"
    word = STATUS_WORDS.get(found.integer("JobStatus"), "in an unknown status")
    return Subject(f"Job {job_id}, {word}", found, True, in_queue=queued is not None)


def url_problem(url: str) -> CommandError:
    """Return the error for a URL in place of a submit file, with the command that tests the URL if there is one."""
    shown, method, ours = clean(shown_url(url)), method_of(url.partition("://")[0]), _own_methods()
    if method in ours:
        return UsageError(
            f"{shown} is a URL: name a submit file or a job, or try the URL with 'stageout check {shown}'"
        )
    return CommandError(
        f"{shown}: {_not_ours(method, ours)} 'stageout explain FILE' with this URL as output_destination says which "
        "nodes have such a plugin.", ErrorClass.NOT_SUPPORTED,
    )  # fmt: skip


@functools.cache
def _own_methods() -> list[str]:
    """Return the methods of the plugins that are installed with this command."""
    return sorted({method for plugin in map(ask, beside()) if plugin for method in plugin.methods})


def _not_ours(method: str, ours: Sequence[str]) -> str:
    return (
        f"no plugin of stageout moves {method}:// URLs (they move {', '.join(ours) or 'nothing here'}). Choose a URL "
        f"of these, or ask the administrator to give the nodes' plugin for {method}:// a front end (stageout wrap): "
        "without one its transfers are synchronous."
    )


def decision(subject: Subject, outputs: Sequence[Output]) -> tuple[str, str, str]:
    """Return "hand-off", "synchronous", "none" or "unknown", with the code of the reason and the reason."""
    ad = subject.ad
    if not outputs:
        return "none", "", "no output goes to a URL: it returns to the access point when the job ends"
    if not subject.is_marked:
        return "unknown", "", "this machine's configuration has no job transforms of stageout (20-stageout-ap.conf)"
    if ad.get("StageOutGuard") is not True:
        code = ad.text("StageOutSynchronousCode") or "NotMarked"
        return "synchronous", code, sentence_of(code)
    if _own_plugins(ad).keys() & {server_of(output.url).method for output in outputs}:
        return "synchronous", "Plugin", "the job brings a transfer plugin of its own (transfer_plugins)"
    return "hand-off", "", "after the job's end, if the sandbox manager of its node accepts the files then"


def _own_plugins(ad: ClassAd) -> dict[str, str]:
    """Return the plugins that the job brings, by method (``tag1=plugin1;tag2,tag3=plugin2``)."""
    pairs = [pair.partition("=") for pair in ad.text("TransferPlugins").split(";")]
    return {method.strip().lower(): path.strip() for methods, _, path in pairs for method in methods.split(",")}


def _delivery_line(kind: str, code: str, reason: str) -> Line:
    if kind == "synchronous":
        return Line("delivery", OK, f"synchronous, while the job holds its slot ({code}): {reason}")
    return Line("delivery", UNKNOWN if kind == "unknown" else OK, f"{kind}: {reason}")


def _job(subject: Subject) -> Job:
    return replace(Job.from_ad(subject.ad), in_queue=subject.in_queue)


def _story_lines(known: Story) -> list[Line]:
    """Yield lines about output that was handed off or is being sent."""
    kind, _, reason = known.delivery
    state = Line("output", PROBLEM if known.failed else OK, known.state)
    facts = [Line(name, PROBLEM if name == "note" else OK, text) for name, text in known.facts]
    return [Line("delivery", OK, f"{kind}: {reason}"), state, *facts]


def _dag_lines(subject: Subject, kind: str) -> Iterator[Line]:
    """Explain delivery for a node of a DAG. A submit file does not show whether DAGMan submits it."""
    if kind == "hand-off" and subject.is_file and not subject.asks:
        text = f"if DAGMan submits the file: synchronous (DagNode): {sentence_of('DagNode')}"
        yield Line("dag", OK, text)


def fallback_lines(ad: ClassAd, kind: str) -> Iterator[Line]:
    """Explain how the job's fallback is used. :param kind: as of :func:`decision`."""
    if ad.get("StageOutFallback") is None:
        return
    text, url = "not used: the output is not handed off", _fallback_url(ad)
    problem = fallback_problem(url)
    if problem:
        yield Line("fallback", PROBLEM, f"it is ignored: {problem}")
    else:
        yield Line("fallback", OK, text if kind == "synchronous" else f"if delivery fails: {clean(url)}")


def _fallback_url(ad: ClassAd) -> str:
    """Return the value of StageOutFallback if it is a string, which alone can be a URL."""
    return ad.text("StageOutFallback") or str(ad.get("StageOutFallback", ""))


def _fallback_of(ad: ClassAd, kind: str) -> list[Output]:
    """Return the fallback as one more output destination, if the job uses it."""
    url = _fallback_url(ad)
    return [] if kind == "synchronous" or fallback_problem(url) else [Output("fallback", url)]


def _pool_lines(outputs: Sequence[Output], queue: Queue, pool: Pool, own: Mapping[str, str]) -> Iterator[Line]:
    """Explain plugins and managers of the pool's nodes, and the agent. :param own: plugins of the job, by method."""
    try:
        constraint = 'MyType == "Machine" && DynamicSlot =!= true'
        slots = pool.ads(constraint, ["Machine", "HasFileTransferPluginMethods", "StageOutManager"])
        silence_s = agent_silence_s(queue, pool, time.time())
    except Unavailable as problem:
        yield Line("plugin", UNKNOWN, str(problem))
        return
    for method in sorted({server_of(output.url).method for output in outputs}):
        if method in own:
            yield Line("plugin", OK, f"{method}: the job brings {clean(own[method])} (transfer_plugins)")
        else:
            yield _plugin_line(method, slots)
    if silence_s <= NOTICE_FRESH_S:
        yield Line("agent", OK, f"heard {duration(silence_s)} ago")
    else:
        since = "the collector knows none" if silence_s == float("inf") else f"not heard for {duration(silence_s)}"
        yield Line("agent", PROBLEM, f"{since}: nodes hand nothing off (NoAgent); tell the administrator")


def _plugin_line(method: str, slots: Sequence[ClassAd]) -> Line:
    """Count the machines that support a method, and name the plugin that this machine would use."""
    able = [slot for slot in slots if method in _methods(slot)]
    machines = {slot.text("Machine") for slot in able}
    managed = {slot.text("Machine") for slot in able if slot.text("StageOutManager")}
    count = len({slot.text("Machine") for slot in slots})
    if not machines:
        text = f"none of {count} machines has a plugin for {method}://; the job would not run"
        ours = _own_methods()
        is_ours = method in ours
        advice = "correct the URL, or tell the administrator" if is_ours else _not_ours(method, ours)
        return Line("plugin", PROBLEM if count or not is_ours else UNKNOWN, f"{text}: {advice}")
    try:
        here = f"; {plugin_for(method).plugin.path.name} on this machine"
    except CommandError:
        here = ""
    text = f"{method}: {len(machines)} of {count} machines have one, {len(managed)} of them a sandbox manager{here}"
    ours = _own_methods()
    return Line("plugin", OK, text) if method in ours else Line("plugin", UNKNOWN, f"{text}; {_not_ours(method, ours)}")


def _methods(slot: ClassAd) -> list[str]:
    return slot.text("HasFileTransferPluginMethods").lower().replace(",", " ").split()


def _server_lines(outputs: Sequence[Output]) -> Iterator[Line]:
    for server in dict.fromkeys(server_of(output.url) for output in outputs):
        if server.method == "file":
            yield Line("server", UNKNOWN, f"{NODE_PATH}: use it only if all nodes mount the same filesystem there")
        elif not server.host:
            yield Line("server", UNKNOWN, f"the URL names no server; the plugin for {server.method}:// chooses it")
        elif not server.port:
            yield Line("server", UNKNOWN, f"{clean(str(server))}: the port of {server.method} is not known here")
        else:
            try:
                text = f"{clean(str(server))} accepts connections of this machine ({milliseconds_to(server)} ms)"
                yield Line("server", OK, text)
            except OSError as problem:
                yield Line("server", PROBLEM, f"{clean(str(server))} cannot be reached from here: {problem}")


def _credential_lines(ad: ClassAd, outputs: Sequence[Output], settings: Settings) -> Iterator[Line]:
    """Explain the tokens that URLs name, and the job's proxy."""
    services = [name.strip().replace("*", "_") for name in ad.text("OAuthServicesNeeded").split(",")]
    names = {service_of(output.url): output.url.partition("+")[0].partition(".")[0] for output in outputs}
    for service, name in names.items():
        if service and service not in services:
            advice = f"add use_oauth_services = {name}"
            yield Line("credential", PROBLEM, f"the URL names the token of {service}, and the job has none: {advice}")
        elif service:
            yield _token_line(service, settings)
    if ad.text("x509userproxy"):
        yield _end_line(f"the X.509 proxy {ad.text('x509userproxy')}", ad.integer("x509UserProxyExpiration"))


def _token_line(service: str, settings: Settings) -> Line:
    try:
        found = kept_token(service, settings)
    except CommandError as problem:
        return Line("credential", PROBLEM, str(problem))
    if found is None:
        return Line("credential", UNKNOWN, f"the token of {service}: this user cannot read the tokens of this machine")
    return _end_line(found.name, found.expires_at)


def _end_line(name: str, expires_at: int) -> Line:
    now = time.time()
    if not expires_at:
        return Line("credential", UNKNOWN, f"{clean(name)}; its end is not known")
    if expires_at <= now:
        return Line("credential", PROBLEM, f"{clean(name)} ended {duration(now - expires_at)} ago: renew it")
    return Line("credential", OK, f"{clean(name)} ends in {duration(expires_at - now)}")


def _node_lines(outputs: Sequence[Output], pool: Pool) -> Iterator[Line]:
    """Explain the servers' state from managers' reports: which nodes cannot reach them, and the number of transfers."""
    wanted = {server_of(output.url) for output in outputs}
    try:
        reports = pool.reports()
    except Unavailable as problem:
        yield Line("streams", UNKNOWN, str(problem))
        return
    away = [one for report in reports for one in report.servers if server_of(one.server) in wanted]
    if away:
        text = f"{count(len(away), 'node')} cannot reach {clean(away[0].server)}: {clean(away[0].reason)}"
        yield Line("server", PROBLEM, text)
    flows = [one for report in reports for one in report.flows if one.limit and server_of(one.server) in wanted]
    if not flows:
        yield Line("streams", UNKNOWN, "no node sends to the server now; the sandbox manager of the node decides")
        return
    limits = sorted(flow.limit for flow in flows)
    each = str(limits[0]) if limits[0] == limits[-1] else f"{limits[0]} to {limits[-1]}"
    text = f"{count(len(flows), 'node')} sending to the server now: {each} files at once for each node"
    rates = [flow.rate_bytes_per_s for flow in flows if flow.rate_bytes_per_s]
    yield Line("streams", OK, text + (f", {rate(statistics.median(rates))} (median)" if rates else ""))


def _time_line(outputs: Sequence[Output], queue: Queue) -> Line:
    """Explain how long the delivery of earlier jobs' output to the first server took."""
    place = re.match(r"[^/]*://[^/]*/", outputs[0].url)
    try:
        since_at = int(time.time()) - _DAYS * 86400
        stats = queue.delivered_to(place[0], since_at, _MOST_JOBS) if place else []
    except Unavailable as problem:
        return Line("time", UNKNOWN, str(problem))
    if len(stats) < _FEW_JOBS:
        text = f"not enough data: {count(len(stats), 'job')} delivered to this server in {_DAYS} days"
        return Line("time", UNKNOWN, text)
    took = sorted(float(ad.integer("Seconds")) for ad in stats)
    bytes_each = statistics.median(ad.integer("Bytes") for ad in stats)
    text = f"{duration(statistics.median(took))} after the job's end (median of {len(stats)} jobs to this server, "
    return Line("time", OK, f"{text}{duration(took[0])} to {duration(took[-1])}, {size(int(bytes_each))} each)")


def _shown_output(output: Output) -> str:
    return f"  {clean(output.name) or 'all new files'} -> {clean(shown_url(output.url))}"


def _shown(line: Line) -> str:
    return f"{line.name:<10} {line.level:<8} {line.text}"


def _facts(
    subject: Subject, outputs: Sequence[Output], delivery: tuple[str, str, str], lines: Sequence[Line]
) -> dict[str, object]:
    return {
        "subject": subject.title,
        "delivery": delivery[0],
        "code": delivery[1],
        "reason": delivery[2],
        "outputs": [{"name": output.name, "url": shown_url(output.url)} for output in outputs],
        "lines": [line._asdict() for line in lines],
    }
