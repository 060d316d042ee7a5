"""Checks of daemons that listen for HTTP: the web page, its certificate and tokens, and the ports of all daemons."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import NamedTuple

from stageout.cli.doctor import config
from stageout.cli.doctor.findings import Finding, Machine, fail, ok, warn, words
from stageout.core.config import ConfigError
from stageout.core.listening import in_url, tls_of
from stageout.core.tokens import TokenError, TokenTable

WEB_PROGRAM, POLICY_PROGRAM = "stageout-web", "stageout-policy-service"
_TLS = "STAGEOUT_WEB_HOST", "STAGEOUT_WEB_CERT", "STAGEOUT_WEB_CERT_KEY"
_TOKENS, _PORT = "STAGEOUT_WEB_TOKENS", "STAGEOUT_WEB_PORT"
_WEEK_S = 7 * 86400
_RUN_S = 20.0
#: Programs whose answers are recognized, and the prefixes of the settings of their metrics ports.
_METRICS = {
    config.AGENT_PROGRAM: "STAGEOUT_AGENT_METRICS", config.MANAGER_PROGRAM: "STAGEOUT_MANAGER_METRICS",
    POLICY_PROGRAM: "STAGEOUT_POLICY_METRICS", WEB_PROGRAM: "STAGEOUT_WEB_METRICS",
    config.ROUTER_PROGRAM: "STAGEOUT_ROUTER_METRICS",
}  # fmt: skip
#: Settings of their other ports.
_OTHERS = {
    config.AGENT_PROGRAM: "STAGEOUT_CREDENTIAL_PORT", POLICY_PROGRAM: "STAGEOUT_POLICY_PORT", WEB_PROGRAM: _PORT,
    config.ROUTER_PROGRAM: "STAGEOUT_ROUTER_PORT",
}  # fmt: skip
_SHARED_PORT, _SHARED_PORT_DEFAULT = "SHARED_PORT_PORT", "9618"


class _Place(NamedTuple):
    """A port of a daemon. :param setting: its knob. :param metrics: prefix of the metrics settings; "" for other
    ports.
    """

    setting: str
    port: int
    program: str = ""
    metrics: str = ""


def web_page(machine: Machine) -> Iterator[Finding]:
    """Check that the web page can use its certificate and its tokens, and that it answers."""
    name, word = "web-page", _daemons(machine).get(WEB_PROGRAM)
    if word is None:
        yield ok(name, "no web page runs here")
        return
    yield from config.daemon(machine, WEB_PROGRAM, name, "put condor_config.d/20-stageout-web.conf in place")
    user = machine.settings.condor(f"{word}_USERID", "condor")
    faults = [*_tokens(machine, name, user), *_certificate(machine, name, user)]
    yield from faults
    if not any(fault.remedy and "expires" not in fault.text for fault in faults):
        yield _page(machine, name)


def _daemons(machine: Machine) -> dict[str, str]:
    """Return the names in DAEMON_LIST by program."""
    listed = words(machine.settings.condor("DAEMON_LIST"))
    return {PurePath(machine.settings.condor(word)).name: word for word in listed}


def _tokens(machine: Machine, name: str, user: str) -> Iterator[Finding]:
    path = machine.settings.text(_TOKENS)
    if not path:
        return
    try:
        TokenTable(Path(path))
    except TokenError as problem:
        yield fail(
            name, f"{_TOKENS}: {problem}", "correct that, then condor_reconfig and condor_on -daemon STAGEOUT_WEB"
        )
        return
    yield from _readable(machine, name, user, _TOKENS, path)


def _certificate(machine: Machine, name: str, user: str) -> Iterator[Finding]:
    try:
        tls = tls_of(machine.settings, *_TLS)
    except ConfigError as problem:
        yield fail(name, f"the page does not start: {problem}", "then condor_on -daemon STAGEOUT_WEB")
        return
    if tls is None:
        return
    for setting in _TLS[1:]:
        if path := machine.settings.text(setting):
            yield from _readable(machine, name, user, setting, path)
    path = machine.settings.text(_TLS[1])
    for limit_s, say, text in ((0, fail, "has expired"), (_WEEK_S, warn, "expires within a week")):
        command = ["openssl", "x509", "-noout", "-checkend", str(limit_s), "-in", path]
        if machine.run(command, _RUN_S).status == 1:
            yield say(name, f"the certificate {path} {text}", "renew it, then condor_reconfig")
            return


def _readable(machine: Machine, name: str, user: str, setting: str, path: str) -> Iterator[Finding]:
    """Check that the user of the page can read a file. The doctor runs as root and could read all."""
    if machine.user_id(user) is not None and machine.run(["test", "-r", path], _RUN_S, user).status == 1:
        yield fail(name, f"{setting}: {user}, as whom the page runs, cannot read {path}", f"chown {user} {path}")


def _page(machine: Machine, name: str) -> Finding:
    host, port = _here(machine.settings.text(_TLS[0])), machine.settings.count(_PORT)
    path = machine.settings.text(_TLS[1])
    base = (
        f"{'https' if path else 'http'}://{in_url(host)}:{port}{machine.settings.text('STAGEOUT_WEB_BASE').rstrip('/')}"
    )
    if not port:
        return ok(name, f"{_PORT} = 0: its log names the port")
    try:
        text = machine.http_text(f"{base}/matters.json", _digest_of(path) if path else "")
    except OSError as problem:
        remedy = _last_problem(machine) or "is it up (condor_who -daemons)? StageoutWebLog says why it ended"
        if machine.listens(host, port):
            remedy = f"find out who listens there (ss -ltnp 'sport = :{port}'), or set {_PORT} to a free port"
            return fail(name, f"another program than the web page answers at {base} ({problem})", remedy)
        return fail(name, f"nothing answers at {base} ({problem})", remedy)
    if '"matters"' not in text:
        return fail(name, f"another program than the web page answers at {base}", f"set {_PORT} to a free port")
    return ok(name, f"it answers at {base}/")


def _here(host: str) -> str:
    host = host.strip("[]")
    return {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _digest_of(path: str) -> str:
    """Return the digest of the first certificate in a file: an answer with another certificate is not the page's."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    body = Path(path).read_text().partition(begin)[2].partition(end)[0]
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(f"{begin}{body}{end}")).hexdigest()


def _last_problem(machine: Machine) -> str:
    """Return the last problem in the page's log; "" if its last line is none."""
    lines = machine.end_of(machine.settings.condor("STAGEOUT_WEB_LOG")).splitlines()
    return f"StageoutWebLog ends with: {lines[-1]}" if lines and " ERROR " in lines[-1] else ""


def ports(machine: Machine) -> Iterator[Finding]:
    """Check that no two daemons on this machine share a port, and that the right daemon answers at each metrics
    port.
    """
    name, places = "ports", _places(machine)
    by_port: dict[int, list[str]] = {}
    for place in places:
        by_port.setdefault(place.port, []).append(place.setting)
    clashes = {port: settings for port, settings in by_port.items() if len(settings) > 1}
    for port, settings in clashes.items():
        yield fail(name, f"{' and '.join(settings)} are both {port}", "give each of them a port of its own")
    wrong = False
    for place in places:
        if place.metrics and place.port not in clashes:
            for fault in _metrics(machine, name, place):
                wrong = True
                yield fault
    if not clashes and not wrong:
        shown = ", ".join(f"{place.setting} {place.port}" for place in places if place.program)
        yield ok(name, shown or "no daemon of stageout here has a port of its own")


def _places(machine: Machine) -> list[_Place]:
    """Return the ports of this machine's daemons. Port 0 means none, or any free one."""
    here, found = _daemons(machine), []
    for program in _METRICS:
        if program in here:
            metrics = f"{_METRICS[program]}_PORT"
            if program in _OTHERS:
                found.append(_Place(_OTHERS[program], machine.settings.count(_OTHERS[program]), program))
            found.append(_Place(metrics, machine.settings.count(metrics), program, _METRICS[program]))
    shared = machine.settings.condor(_SHARED_PORT, _SHARED_PORT_DEFAULT)
    if found and shared.isdigit():
        found.append(_Place(_SHARED_PORT, int(shared)))
    return [place for place in found if place.port]


def _metrics(machine: Machine, name: str, place: _Place) -> Iterator[Finding]:
    host = _here(machine.settings.text(f"{place.metrics}_HOST"))
    url = f"http://{in_url(host)}:{place.port}/metrics"
    try:
        text = machine.http_text(url, "")
    except OSError as problem:
        text, why = "", f"nobody answers at {url} ({problem})"
    else:
        why = f"another program answers at {url}"
    if f'daemon="{place.program}"' not in text:
        remedy = f"metrics-open-failed in the log of {place.program} says why; set {place.setting} to a free port"
        yield fail(name, f"{place.setting}: {why}", remedy)


#: Checks for each machine with HTCondor.
COMMON = (web_page, ports)
