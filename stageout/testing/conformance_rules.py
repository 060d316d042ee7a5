"""The rules of the conformance suite. Each is one function: it returns what is wrong, "" when nothing is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from stageout.core.classad_parser import parse_old
from stageout.core.classads import ClassAd, Expr, quote, unparse_ad
from stageout.testing.examination import CONTENT, ODD_NAMES, Examination, NotApplicable, story
from stageout.testing.starter import PREALLOCATED_BYTES, PluginError, PluginRun, Result, Wanted, dropped, listed

_SECRETS = ("pAsSwOrD4711xyz", "tOkEn0815xyzabc")
_BAD_TEXTS = ("\n", "||", "; SHADOW", "; STARTER", "|Error: ")
_MESSAGE_CHARS = 1024
_QUIET_BYTES = 200
#: Limits of a machine that starts Python in 0.05 s or faster. On a slower one they grow with the time of that start.
_KILL_AFTER_S, _QUICK_S, _START_S = 3.0, 0.3, 0.05
#: A machine that needs longer to start Python says nothing about a plugin.
_TOO_SLOW_S = 1.0
#: A quick plugin is now and then slow on a busy machine; a slow one is never quick.
_QUERIES = 20
_DATA_ADS = '[ PluginData = [ a = { 1, "x;]", [ b = undefined ] } ] ][ Protocol = "x"; x_PluginData = [ c = 1.5 ] ]'
_FAILURE_TYPES = {
    "Resolution": {"Definitive", "PreContact", "PostContact"},
    "Authorization": {"Authentication", "Authorization"},
    "Transfer": {"TooSlow", "NoSpace", "TimedOut", "Quota"},
}
_NEEDED = {
    "Parameter": {"PluginVersion", "PluginLaunched"},
    "Resolution": {"FailedName", "FailureType"},
    "Contact": {"FailedServer"},
    "Authorization": {"FailedServer", "FailureType"},
    "Specification": {"FailedServer"},
    "Transfer": {"FailedServer", "FailureType"},
}


class Rule(NamedTuple):
    """One rule. :param level: "must" or "should"."""

    name: str
    level: str
    title: str
    advice: str
    test: Callable[[Examination], str]


RULES: list[Rule] = []


def _scaled(exam: Examination, limit_s: float) -> float:
    """Scale the limit to this machine.

    :raises NotApplicable: it is too slow to judge.
    """
    if exam.python_start_s > _TOO_SLOW_S:
        raise NotApplicable(f"this machine is too slow to judge: Python alone starts in {exam.python_start_s:.2f} s")
    return limit_s * max(1.0, exam.python_start_s / _START_S)


def _rule(name: str, level: str, title: str, advice: str) -> Callable[[Callable[[Examination], str]], None]:
    def add(test: Callable[[Examination], str]) -> None:
        RULES.append(Rule(name, level, title, advice, test))

    return add


# ---- the query


@_rule("query-answers", "must", "-classad names SupportedMethods", 'print SupportedMethods = "..." and exit with 0')
def _query_answers(exam: Examination) -> str:
    try:
        printed, status = exam.printed
        if "No module named 'stageout'" in printed:
            return f"{exam.first_line} has no stageout: name a Python that has it, as #!/opt/stageout/bin/python"
        return "" if exam.answer and status == 0 else f"exit status {status}"
    except PluginError as problem:
        return str(problem)


@_rule("query-quick", "should", "-classad is in every job's way", "import what transfers need only when you transfer")
def _query_quick(exam: Examination) -> str:
    best_s, limit_s = math.inf, _scaled(exam, _QUICK_S)
    for _ in range(_QUERIES):
        started = time.monotonic()
        exam.ask()
        best_s = min(best_s, time.monotonic() - started)
        if best_s < limit_s:
            return ""
    return f"{best_s:.2f} s at best; Python alone starts in {exam.python_start_s:.2f} s here"


@_rule("query-clean", "must", "-classad prints attributes and nothing else", "keep warnings off stderr: it is read too")
def _query_clean(exam: Examination) -> str:
    lines = [line for line in exam.printed[0].split("\n") if line.strip() and not line.startswith("#")]
    bad = [line for line in lines if not parse_old(line) or any(isinstance(v, Expr) for v in parse_old(line).values())]
    return f"not an attribute with a literal: {bad[0][:80]!r}" if bad else ""


@_rule("query-methods", "must", "methods are letters and digits", "HTCondor cuts a scheme at its last '+', '-' or '.'")
def _query_methods(exam: Examination) -> str:
    bad = [name for name in listed(exam.answer.text("SupportedMethods")) if not (name.isascii() and name.isalnum())]
    return f"never found: {', '.join(bad)}" if bad else ""


@_rule("query-protocol", "should", "speaks protocol 2 or 4", "MultipleFileSupport = true and ProtocolVersion = 4")
def _query_protocol(exam: Examination) -> str:
    version = exam.plugins.protocol(exam.plugin) if exam.answer else 0
    several = exam.answer.get("MultipleFileSupport") is True
    return "" if version in (2, 4) and several else f"protocol {version}, MultipleFileSupport {several}"


@_rule(
    "query-startd-attrs",
    "must",
    "StartdAttrs lists names of scalars in the same output",
    "anything else there and the slot advertises no file transfer at all, for any plugin",
)
def _query_startd_attrs(exam: Examination) -> str:
    if "StartdAttrs" not in exam.answer:
        return ""
    value = exam.answer["StartdAttrs"]
    names = listed(value) if isinstance(value, str) else []
    bad = [name for name in names if not isinstance(exam.answer.get(name), (str, int, float))]
    return "" if names and not bad else f"StartdAttrs = {value!r}"


@_rule("query-reserved", "should", "no attribute that HTCondor sets itself", "leave Path and FailedMethods out")
def _query_reserved(exam: Examination) -> str:
    return ", ".join(name for name in ("Path", "FailedMethods", "TransferClass") if name in exam.answer)


# ---- a download that works


@_rule(
    "download-works", "must", "files arrive whole, exit status 0", "check the plugin by hand with such an input file"
)
def _download_works(exam: Examination) -> str:
    starter, run = exam.good
    for name, data in CONTENT.items():
        path = starter.scratch / name
        if not path.is_file() or path.read_bytes() != data:
            return f"{name} did not arrive whole; {story(run)}"
    return "" if run.succeeded else story(run)


@_rule(
    "one-ad-per-file",
    "must",
    "one result ad for each file, in the file's own words",
    "HTCondor compares nothing; what is missing is missing in silence. Write an ad for files not tried, too",
)
def _one_ad_per_file(exam: Examination) -> str:
    for (starter, run), names in ((exam.good, list(CONTENT)), (exam.partial, ["a", "b", "c"])):
        wanted = sorted(str(starter.scratch / name) for name in names)
        seen = sorted(ad.text("TransferFileName") for ad in run.ads)
        if seen != wanted:
            return f"{len(wanted)} files, ads for {[Path(name).name for name in seen]}; {run.unread or story(run)}"
    return ""


@_rule(
    "literal-types",
    "must",
    "values have exactly the types that HTCondor keeps",
    "times and bytes are integers, ConnectionTimeSeconds is a real with a '.', TransferSuccess a boolean",
)
def _literal_types(exam: Examination) -> str:
    bad = {name for run in (exam.good[1], exam.partial[1]) for ad in run.ads for name in dropped(ad)}
    return f"dropped: {', '.join(sorted(bad))}" if bad else ""


@_rule(
    "statistics",
    "must",
    "success carries TransferProtocol and TransferTotalBytes",
    "without both the job has no transfer statistics",
)
def _statistics(exam: Examination) -> str:
    for ad in exam.good[1].ads:
        size = len(CONTENT.get(Path(ad.text("TransferFileName")).name, b""))
        if not ad.text("TransferProtocol") or ad.integer("TransferTotalBytes", -1) < size:
            return unparse_ad({name: ad.get(name) for name in ("TransferProtocol", "TransferTotalBytes")})
    return "" if exam.good[1].ads else "no ad at all"


@_rule("no-transfer-class", "must", "TransferClass is HTCondor's own", "leave it out: it by-passes the filter")
def _no_transfer_class(exam: Examination) -> str:
    return "found" if any("TransferClass" in ad for ad in exam.good[1].ads + exam.partial[1].ads) else ""


@_rule(
    "outfile-kept",
    "must",
    "the output file is updated in place",
    "open it for update; a truncated, replaced or deleted one loses the report when the disk is full",
)
def _outfile_kept(exam: Examination) -> str:
    for _, run in (exam.good, exam.partial):
        if not run.outfile_kept:
            return "replaced or deleted"
        if run.outfile_bytes < PREALLOCATED_BYTES:
            return f"cut from {PREALLOCATED_BYTES} to {run.outfile_bytes} bytes"
    return ""


@_rule(
    "silent",
    "must",
    "a transfer that works prints nothing",
    "the starter keeps all printed text in memory, and a line a minute for an hour kills it",
)
def _silent(exam: Examination) -> str:
    size = len(exam.good[1].printed)
    return f"{size} bytes, e.g. {exam.good[1].printed[:60]!r}" if size > _QUIET_BYTES else ""


@_rule("clean-scratch", "should", "nothing is left in the job's sandbox", "the job sees it and pays for its disk")
def _clean_scratch(exam: Examination) -> str:
    known = {".job.ad", ".machine.ad", f".{exam.plugin.name}.in", f".{exam.plugin.name}.out"}
    found = {path.name for path in exam.good[0].scratch.iterdir()} - known - set(CONTENT)
    found |= {path.name for path in exam.partial[0].scratch.iterdir()} - known - {"a", "b", "c"}
    return ", ".join(sorted(found))


# ---- failures


@_rule(
    "failure-status",
    "must",
    "exit status is not 0 exactly when a file failed",
    "with 0 the job starts without its input; nothing but the exit status counts",
)
def _failure_status(exam: Examination) -> str:
    if not exam.good[1].succeeded:
        return f"all files there: {story(exam.good[1])}"
    run = exam.partial[1]
    if run.exit_code is None or not 0 < run.exit_code < 126:
        return f"a file missing: {story(run)}"
    return ""


@_rule("failure-goes-on", "should", "one failure does not stop the other files", "try each file")
def _failure_goes_on(exam: Examination) -> str:
    missing = [name for name in ("a", "c") if not (exam.partial[0].scratch / name).is_file()]
    return f"not delivered: {', '.join(missing)}" if missing else ""


@_rule(
    "failure-said",
    "must",
    "a failed file has TransferSuccess false, TransferError, TransferUrl, TransferFileName",
    "TransferError is the only text that the user sees; the others make the hold reason",
)
def _failure_said(exam: Examination) -> str:
    failed = [ad for ad in exam.partial[1].ads if ad.get("TransferSuccess") is not True]
    if len(failed) != 1:
        return f"{len(failed)} ads say failure, one file is missing"
    needed = ("TransferError", "TransferUrl", "TransferFileName")
    return ", ".join(f"no {name}" for name in needed if not failed[0].text(name))


@_rule("failure-no-rest", "must", "a failed download leaves no file under its name", "write to another name and rename")
def _failure_no_rest(exam: Examination) -> str:
    return "the missing file exists" if (exam.partial[0].scratch / "b").exists() else ""


@_rule(
    "failure-text",
    "must",
    "messages are one short line without HTCondor's separators",
    "newline, '||', '; SHADOW', '; STARTER' and '|Error: ' cut the hold reason",
)
def _failure_text(exam: Examination) -> str:
    for ad in exam.partial[1].ads:
        text = ad.text("TransferError")
        bad = [mark for mark in _BAD_TEXTS if mark in text]
        if bad or len(text) > _MESSAGE_CHARS:
            return f"{len(text)} characters, with {bad!r}" if bad else f"{len(text)} characters"
    return ""


@_rule(
    "error-data",
    "should",
    "protocol 4 failures carry a complete TransferErrorData",
    "a list of ads: ErrorType with its attributes, ErrorCode, ErrorString; Retryable -1, 0 or seconds",
)
def _error_data(exam: Examination) -> str:
    if exam.plugins.protocol(exam.plugin) != 4:
        raise NotApplicable("belongs to protocol 4")
    for ad in exam.partial[1].ads:
        if ad.get("TransferSuccess") is not True:
            elements = ad.get("TransferErrorData")
            if not isinstance(elements, list) or not elements:
                return "none"
            return "; ".join(filter(None, map(_error_problem, elements)))
    return "no failed ad"


def _error_problem(element: object) -> str:
    if not isinstance(element, ClassAd):
        return "an element is not an ad"
    kind = element.text("ErrorType")
    if kind not in _NEEDED:
        return f"ErrorType {kind!r}"
    missing = [name for name in {"ErrorCode", "ErrorString"} | _NEEDED[kind] if name not in element]
    if missing:
        return f"{kind} without {', '.join(sorted(missing))}"
    failure = element.text("FailureType")
    if "FailureType" in element and failure not in _FAILURE_TYPES.get(kind, ()):
        return f"{kind} with FailureType {failure!r}"
    return "" if element.integer("Retryable") >= -1 else "Retryable below -1"


@_rule(
    "secrets",
    "must",
    "no password, token or signed query in results or output",
    "cut userinfo and query from URLs, and take secrets out of every text: result ads are readable by all",
)
def _secrets(exam: Examination) -> str:
    scheme, _, rest = exam.endpoint.url("missing").partition("://")
    url = f"{scheme}://user:{_SECRETS[0]}@{rest}?token={_SECRETS[1]}"
    starter = exam.starter()
    run = starter.download([Wanted(url, "x")])[0]
    told = run.printed + "".join(unparse_ad(ad) for ad in run.ads)
    found = [word for word, secret in zip(("password", "query"), _SECRETS) if secret in told]
    return f"told: {', '.join(found)}" if found else ""


@_rule("unknown-scheme", "must", "a URL of another scheme gets a failure ad", "write an ad on every path")
def _unknown_scheme(exam: Examination) -> str:
    _ = exam.endpoint
    starter = exam.starter()
    text = unparse_ad({"Url": "nosuchscheme://host/x", "LocalFileName": str(starter.scratch / "x")})
    return _refused(starter.run(exam.plugin, text, False))


@_rule("broken-infile", "must", "an input file that breaks off gets a failure ad", "catch it and write an ad")
def _broken_infile(exam: Examination) -> str:
    return _refused(exam.move(f'[ Url = "{exam.endpoint.url("one")}"; LocalFile'))


@_rule("bad-arguments", "must", "unknown arguments are an error", "exit with a status between 1 and 125")
def _bad_arguments(exam: Examination) -> str:
    _ = exam.endpoint
    wrapper = exam.wrapped(
        "other arguments", "sys.argv[1:] = sys.argv[1:] if sys.argv[1] == '-classad' else ['-outfile']"
    )
    starter = exam.starter(wrapper)
    run = starter.run(wrapper, "", False)
    return "" if run.exit_code and run.exit_code < 126 else story(run)


def _refused(run: PluginRun) -> str:
    if run.exit_code in (0, None) or (run.exit_code or 0) > 125:
        return story(run)
    if not run.ads or run.ads[0].get("TransferSuccess") is not False:
        return f"no failure ad; {run.unread or story(run)}"
    return ""


# ---- what input may look like


@_rule(
    "classad-input",
    "must",
    "the input file is ClassAd language",
    "names ignore case; skip attributes and ads that you do not know; strings have octal escapes. No regexps",
)
def _classad_input(exam: Examination) -> str:
    name = 'sp "ace\u00e9'
    exam.endpoint.put("one", CONTENT["one"])
    starter = exam.starter()
    extra = ""
    if exam.plugins.protocol(exam.plugin) == 4:
        extra = _DATA_ADS
    local = quote(str(starter.scratch / name))
    later = 'Later = (TARGET.x > 3) ? "]" : f({1})'
    text = f"{extra}[ {later}; LOCALFILENAME = {local}; URL = {quote(exam.endpoint.url('one'))} ]"
    run = starter.run(exam.plugin, text + "   ", False)
    path = starter.scratch / name
    if not path.is_file() or path.read_bytes() != CONTENT["one"]:
        return f"the file did not arrive; {story(run)}"
    return "" if run.succeeded and len(run.ads) == 1 else f"{len(run.ads)} ads; {story(run)}"


@_rule("many-files", "must", "a call with 100 files works", "write all ads, however long the output file becomes")
def _many_files(exam: Examination) -> str:
    exam.endpoint.put("one", CONTENT["one"])
    run = exam.starter().download([Wanted(exam.endpoint.url("one"), f"many{i}") for i in range(100)])[0]
    return "" if run.succeeded and len(run.ads) == 100 else f"{len(run.ads)} ads; {run.unread or story(run)}"


@_rule("same-name", "should", "two URLs for one file are an error", "the second would overwrite the first in silence")
def _same_name(exam: Examination) -> str:
    for name in ("one", "two"):
        exam.endpoint.put(name, CONTENT[name])
    run = exam.starter().download([Wanted(exam.endpoint.url(name), "same") for name in ("one", "two")])[0]
    return "" if not run.succeeded else "both reported as success"


@_rule(
    "bare-environment",
    "must",
    "works with PATH alone in the environment",
    "of the job's environment only NAME_* reaches the plugin NAME; HOME and locale may be missing",
)
def _bare_environment(exam: Examination) -> str:
    exam.endpoint.put("one", CONTENT["one"])
    run = exam.starter(bare=True).download([Wanted(exam.endpoint.url("one"), "one")])[0]
    return "" if run.succeeded else story(run)


@_rule("nameless-node", "must", "works where the node's own name does not resolve", "do not look your own host name up")
def _nameless_node(exam: Examination) -> str:
    exam.endpoint.put("one", CONTENT["one"])
    code = (
        "import ctypes, socket\n"
        "if ctypes.CDLL(None, use_errno=True).unshare(0x04000000):\n    sys.exit(125)\n"
        "socket.sethostname('no-such-node.invalid')"
    )
    wrapper = exam.wrapped("a host name that does not resolve", code)
    starter = exam.starter(wrapper)
    try:
        run = starter.download([Wanted(exam.endpoint.url("one"), "one")])[0]
    except PluginError:
        raise NotApplicable("needs root: the host name is changed in a namespace") from None
    return "" if run.succeeded else story(run)


# ---- the end


@_rule("small-outfile", "should", "an empty output file is no trouble", "let it grow")
def _small_outfile(exam: Examination) -> str:
    exam.endpoint.put("one", CONTENT["one"])
    starter = exam.starter()
    text = unparse_ad({"Url": exam.endpoint.url("one"), "LocalFileName": str(starter.scratch / "one")})
    run = starter.run(exam.plugin, text, False, outfile_bytes=0)
    return "" if run.succeeded and len(run.ads) == 1 else story(run)


@_rule(
    "full-disk",
    "should",
    "a full disk does not silence the report",
    "write failure ads into the pre-allocated space first, as short as need be",
)
def _full_disk(exam: Examination) -> str:
    code = (
        # Some versions of Python leave a module's bytecode cut off where it did not fit, for every later start.
        "import resource, signal\nos.environ['PYTHONDONTWRITEBYTECODE'] = '1'\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({PREALLOCATED_BYTES}, {PREALLOCATED_BYTES}))"
    )
    wrapper = exam.wrapped("no file may grow", code)
    starter = exam.starter(wrapper)
    run = starter.download([Wanted(exam.endpoint.url(f"missing{i}"), f"x{i}") for i in range(60)])[0]
    return "" if run.ads and not run.unread and run.exit_code else f"{len(run.ads)} ads; {run.unread or story(run)}"


@_rule(
    "killed",
    "must",
    "a SIGKILL at any moment leaves an ad for each file",
    "there is no warning: write failure ads first and update them as files end",
)
def _killed(exam: Examination) -> str:
    exam.endpoint.put("one", CONTENT["one"])
    starter = exam.starter(lifetime_s=_scaled(exam, _KILL_AFTER_S))
    wanted = [Wanted(exam.endpoint.url("one"), "one"), Wanted(exam.endpoint.stall(), "never")]
    run = starter.download(wanted)[0]
    if run.result is not Result.TIMED_OUT:
        raise NotApplicable("the plugin did not wait for a source that stalls")
    if len(run.ads) != 2 or run.unread:
        return f"2 files, {len(run.ads)} ads; {run.unread}"
    never = [ad for ad in run.ads if ad.text("TransferFileName").endswith("never")]
    return "" if never and never[0].get("TransferSuccess") is False else "success told of a file that did not arrive"


# ---- uploads


@_rule("upload-works", "must", "uploads arrive whole, exit status 0, one ad each", "check by hand with -upload")
def _upload_works(exam: Examination) -> str:
    run = exam.uploaded
    for name, data in CONTENT.items():
        if exam.endpoint.get(f"up/{name}") != data:
            return f"{name} did not arrive whole; {story(run)}"
    return "" if run.succeeded and len(run.ads) == len(CONTENT) else f"{len(run.ads)} ads; {story(run)}"


@_rule(
    "upload-ads",
    "must",
    "each upload's ad has TransferSuccess, TransferUrl, TransferFileName",
    "the shadow takes an ad that lacks one for an error",
)
def _upload_ads(exam: Examination) -> str:
    for ad in exam.uploaded.ads:
        lacks = [name for name in ("TransferUrl", "TransferFileName") if not ad.text(name)]
        if lacks or not isinstance(ad.get("TransferSuccess"), bool):
            return f"an ad without {', '.join(lacks) or 'TransferSuccess'}"
    return "" if exam.uploaded.ads else "no ad at all"


@_rule(
    "upload-again",
    "must",
    "the same upload works a second time, also with other content",
    "HTCondor repeats uploads after reconnects and when a job runs again",
)
def _upload_again(exam: Examination) -> str:
    exam.upload({"up/again": b"old content"})
    run = exam.upload({"up/again": b"new"})
    if not run.succeeded:
        return story(run)
    return "" if exam.endpoint.get("up/again") == b"new" else "success told, old content kept"


@_rule("upload-missing", "must", "a missing local file fails alone", "one failure ad, and the other files go on")
def _upload_missing(exam: Examination) -> str:
    starter = exam.starter()
    (starter.scratch / "there").write_bytes(b"there")
    wanted = [Wanted(exam.endpoint.url(f"up/{name}"), name) for name in ("gone", "there")]
    run = starter.upload(wanted)[0]
    if run.exit_code in (0, None) or len(run.ads) != 2:
        return f"{len(run.ads)} ads; {story(run)}"
    return "" if exam.endpoint.get("up/there") == b"there" else "the other file did not arrive"


@_rule(
    "upload-odd-names",
    "should",
    "names with blanks, '#', '?', '%' arrive under their own name",
    "HTCondor appends the name raw to output_destination: encode what stands behind it",
)
def _upload_odd_names(exam: Examination) -> str:
    starter = exam.starter()
    destination = f"{exam.endpoint.url_base}/odd"
    with (starter.scratch / ".job.ad").open("a") as job_ad:
        job_ad.write(f"OutputDestination = {quote(destination)}\n")
    for name in ODD_NAMES:
        (starter.scratch / name).write_bytes(name.encode())
    run = starter.upload([Wanted(f"{destination}/{name}", name) for name in ODD_NAMES])[0]
    bad = [name for name in ODD_NAMES if exam.endpoint.get(f"odd/{name}") != name.encode()]
    return f"not there: {bad!r}; {story(run)}" if bad else ""
