"""``stageout check``: try a destination with a small file before jobs deliver to it."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from stageout.cli.arguments import add_json, seconds
from stageout.cli.exits import CommandError, Exit, UsageError
from stageout.cli.own_credentials import OwnCredentials, own_credentials
from stageout.cli.pool_plugins import Chosen, plugin_for
from stageout.cli.render import clean
from stageout.cli.results import ending, tell
from stageout.condor.plugins import node_settings
from stageout.core.errors import UNREACHABLE, Advice, ErrorClass
from stageout.movers.mover import Equipment, PluginCall, StoppableMover
from stageout.movers.plugins_table import Plugin
from stageout.movers.results import Answer, Delivered, Failure, SentFile
from stageout.movers.schemes import NODE_PATH, is_node_path, method_of, shown_url

DESCRIPTION = """\
Try a destination before jobs deliver to it. Write a small file below URL with your credentials and the pool's transfer
plugin, read it back, compare it, and delete it. The file gets a new name, so that nothing is overwritten.

exit status: 0 every step that the plugin can do succeeded, 1 a step failed, 64 URL is no URL"""

OK, FAILED, NOT_SUPPORTED, NOT_TRIED = "ok", "failed", "not supported", "not tried"
_REMEDIES = {
    Advice.RETRY_HERE: "try again later, and ask the server's administrator if it stays so",
    Advice.RETRY_ELSEWHERE: "ask the administrator of this machine",
    Advice.NEEDS_CREDENTIAL: "renew the credential, name its file with --token, or write SERVICE+ before the scheme",
    Advice.NEEDS_PERSON: "correct the URL, or ask the server's administrator for the right to do this",
}
_NO_ANSWER = "check host and port of the URL; is the server up, and is there a firewall in between?"
#: Write failures that occur before the server can have created a file.
_NOTHING_WRITTEN = frozenset(
    {
        ErrorClass.BAD_URL,
        ErrorClass.NAME_NOT_RESOLVED,
        ErrorClass.NAME_LOOKUP_FAILED,
        ErrorClass.CONNECT_FAILED,
        ErrorClass.TLS_UNTRUSTED,
        ErrorClass.CREDENTIAL_MISSING,
        ErrorClass.CREDENTIAL_REFUSED,
        ErrorClass.CREDENTIAL_EXPIRED,
        ErrorClass.PERMISSION_DENIED,
        ErrorClass.NOT_FOUND,
        ErrorClass.NOT_SUPPORTED,
        ErrorClass.REQUEST_REJECTED,
    }
)


class Step(NamedTuple):
    """The result of one step. :param kind: class of the error, None without one."""

    name: str
    outcome: str
    milliseconds: int = 0
    text: str = ""
    kind: ErrorClass | None = None


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    command.add_argument("url", metavar="URL", help="directory at the destination, as in output_destination")
    command.add_argument("--token", metavar="FILE", default="", help="file of the token that the URL names")
    command.add_argument(
        "--plugin", metavar="PATH", action="append", default=[],
        help="transfer plugin to use (default: the plugins of HTCondor's configuration)",
    )  # fmt: skip
    command.add_argument(
        "--timeout", metavar="S", type=seconds, default=60.0, help="seconds that a step may take (default: 60)"
    )
    add_json(command)


def run(options: argparse.Namespace) -> int:
    """Run the steps and print each one when it has ended."""
    scheme, mark, rest = options.url.partition("://")
    if not mark or not rest or not method_of(scheme).isalnum():
        raise UsageError(f"{options.url} is not a URL: write scheme://host/directory")
    place = probe_url(options.url)
    chosen = plugin_for(scheme, options.plugin)
    held = own_credentials(options.url, node_settings(), options.token)
    if held.left_out:
        print(f"stageout: {held.left_out}", file=sys.stderr)
    probe = Probe(chosen.plugin, place, held, max(1.0, options.timeout))
    if not options.json:
        print(f"{chosen.plugin.path} ({chosen.source}), {held.sentence(time.time())}", flush=True)
        if is_node_path(options.url):
            print(f"note: {NODE_PATH}; this check tries the path on this machine", flush=True)
    try:
        steps = probe.run(_silent if options.json else _show)
    finally:
        if probe.left_behind:
            place = shown_url(probe.url)
            print(f"stageout: the file may still be there, delete it yourself: {place}", file=sys.stderr)
    problem = _problem(steps, options.url)
    if options.json:
        tell({**_facts(options.url, probe, chosen, held, steps), **ending(problem)})
    if problem is not None:
        print(f"stageout: {problem}", file=sys.stderr)
    return int(Exit.OK if problem is None else Exit.FAILED)


def probe_url(url: str) -> str:
    """Return the URL of a file below ``url`` with a new name. A query stays at the end.

    :raises UsageError: the URL has a fragment. The name would become a part of it, and the step would overwrite the URL
        itself.
    """
    if "#" in url:
        raise UsageError("a destination has no fragment: write %23 for #")
    place, mark, query = url.partition("?")
    return f"{place.rstrip('/')}/stageout-check-{secrets.token_hex(16)}{mark}{query}"


class Probe:
    """A small file that is written, read and deleted.

    :param url: URL of the file. :param step_s: time limit of each step in seconds.
    :ivar left_behind: True while the file may exist at the destination.
    """

    def __init__(self, plugin: Plugin, url: str, credentials: OwnCredentials, step_s: float) -> None:
        self.url = url
        self._plugin = plugin
        self._credentials = credentials
        self._step_s = step_s
        self._content = f"written by stageout check {secrets.token_hex(16)}\n".encode()
        self.left_behind = False

    def run(self, told: Callable[[Step], None]) -> list[Step]:
        """Run the steps. An interruption deletes the file before it propagates. :param told: called at the end of each
        step.
        """
        done: list[Step] = []

        def add(step: Step) -> None:
            done.append(step)
            told(step)

        with tempfile.TemporaryDirectory(prefix="stageout-check-") as name:
            try:
                add(self._write(Path(name)))
                add(self._read(Path(name)) if done[0].outcome == OK else Step("read", NOT_TRIED))
            except BaseException:
                self._delete(Path(name))
                raise
            add(self._delete(Path(name)))
        return done

    def _write(self, folder: Path) -> Step:
        source = folder / "probe"
        source.write_bytes(self._content)
        self.left_behind = True
        answer, milliseconds = self._call(folder / "write", source)
        if isinstance(answer, Failure):
            self.left_behind = answer.kind not in _NOTHING_WRITTEN
            return self._failed("write", answer, milliseconds)
        verified = answer.verified if isinstance(answer, Delivered) else "a custodian has it"
        return Step("write", OK, milliseconds, f"confirmed by the destination: {verified}")

    def _read(self, folder: Path) -> Step:
        target = folder / "copy"
        answer, milliseconds = self._call(folder / "read", target, fetches=True)
        if isinstance(answer, Failure):
            return self._failed("read", answer, milliseconds)
        if target.read_bytes() == self._content:
            return Step("read", OK, milliseconds, "the same content")
        text = "the destination returned other content than was written"
        return Step("read", FAILED, milliseconds, text, ErrorClass.CONTENT_MISMATCH)

    def _delete(self, folder: Path) -> Step:
        if not self.left_behind:
            return Step("delete", NOT_TRIED)
        method = method_of(self.url.partition("://")[0])
        if method not in self._plugin.deletes:
            text = f"{self._plugin.path.name} cannot delete {method} URLs"
            return Step("delete", NOT_SUPPORTED, 0, text, ErrorClass.NOT_SUPPORTED)
        answer, milliseconds = self._call(folder / "delete", folder / "none", deletes=True)
        if isinstance(answer, Failure):
            return self._failed("delete", answer, milliseconds)
        self.left_behind = False
        return Step("delete", OK, milliseconds)

    def _call(self, directory: Path, local: Path, fetches: bool = False, deletes: bool = False) -> tuple[Answer, int]:
        """Run the plugin as the sandbox manager does. Return its answer and its duration in milliseconds."""
        cargo = SentFile(local, self.url, "probe", 0 if deletes else len(self._content))
        call = PluginCall(
            directory, self._plugin, os.geteuid(), os.getegid(), (cargo,), self._step_s,
            Equipment(self._credentials.contents), fetches=fetches, deletes=deletes,
        )  # fmt: skip
        start_s = time.monotonic()
        (answer,) = _run_apart(call)
        return answer, round(1000 * (time.monotonic() - start_s))

    def _failed(self, name: str, failure: Failure, milliseconds: int) -> Step:
        outcome = NOT_SUPPORTED if failure.kind is ErrorClass.NOT_SUPPORTED and name != "write" else FAILED
        text = clean(failure.message)
        # plugins stop a little before their time limit
        if failure.kind is ErrorClass.DEADLINE and milliseconds >= 800 * self._step_s:
            text = f"not finished within {self._step_s:g} s (--timeout)"
        return Step(name, outcome, milliseconds, text, failure.kind)


def _run_apart(call: PluginCall) -> list[Answer]:
    """Run a plugin in a thread, so that an interruption of this thread ends the plugin before it propagates."""
    mover = StoppableMover()
    with ThreadPoolExecutor(1) as executor:
        try:
            return executor.submit(mover.run, call).result()
        except BaseException:
            mover.stop()
            raise


def _silent(step: Step) -> None:
    del step


def _show(step: Step) -> None:
    took = f"{step.milliseconds} ms" if step.milliseconds else "-"
    print(f"{step.name:<7} {step.outcome:<13} {took:>9}  {step.text}".rstrip(), flush=True)


def _problem(steps: list[Step], url: str) -> CommandError | None:
    """Return the first failed step as an error with its remedy."""
    step = next((step for step in steps if step.outcome == FAILED), None)
    if step is None or step.kind is None:
        return None
    meaning = {
        "write": f"output cannot be delivered to {shown_url(url)}",
        "read": f"output can be written to {shown_url(url)}, but not read back",
        "delete": f"output can be written to {shown_url(url)}; only the deletion of the probe failed",
    }
    remedy = _remedy(step.kind)
    text = f"{meaning[step.name]} ({step.kind.name}, error {step.kind.code}): {remedy}"
    return CommandError(text, step.kind)


def _remedy(kind: ErrorClass) -> str:
    if kind is ErrorClass.DEADLINE:
        return "ask the server's administrator whether it is slow, or try again with a larger --timeout"
    return _NO_ANSWER if kind in UNREACHABLE else _REMEDIES[kind.advice]


def _facts(url: str, probe: Probe, chosen: Chosen, held: OwnCredentials, steps: list[Step]) -> dict[str, object]:
    return {
        "url": shown_url(url),
        "probe": shown_url(probe.url),
        "plugin": str(chosen.plugin.path),
        "plugin_source": chosen.source,
        "credential": held.name,
        "credential_source": held.source,
        "credential_expires_at": held.expires_at,
        "steps": [_step_facts(step) for step in steps],
        "left_behind": probe.left_behind,
    }


def _step_facts(step: Step) -> dict[str, object]:
    kind = step.kind
    return {
        "step": step.name,
        "outcome": step.outcome,
        "milliseconds": step.milliseconds,
        "reason": step.text,
        "error_class": kind.name if kind else "",
        "error_code": kind.code if kind else 0,
    }
