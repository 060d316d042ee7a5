"""The embedded starter: runs transfer plugins exactly as condor_starter does, without HTCondor.

Same arguments, file names, pre-allocated output file, environment, working directory, limits, and the same reading
of answers, exit statuses and result ads (HTCondor manual, *File transfer plugins*; ``condor_utils/file_transfer.cpp``).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import groupby
from pathlib import Path
from typing import Any

from stageout.core.classad_parser import parse_ads, parse_old
from stageout.core.classads import ClassAd, ClassAdSyntaxError, Expr, decode, unparse_ad, unparse_old

__all__ = ["EmbeddedStarter", "PluginError", "PluginRun", "Result", "Wanted", "installed", "query"]

PREALLOCATED_BYTES = 19_264
QUERY_TIMEOUT_S = 20.0
DEFAULT_LIFETIME_S = 72_000.0
_ETIME = 62
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://.", re.S)
_HIDDEN_VARIABLES = ("CONDOR_INHERIT", "CONDOR_PRIVATE_INHERIT", "CONDOR_DCADDR")


class Result(IntEnum):
    """HTCondor's own classes of a plugin's end."""

    SUCCESS = 0
    ERROR = 1
    TIMED_OUT = 3
    EXEC_FAILED = 4


@dataclass
class PluginRun:
    """One plugin process and what HTCondor makes of it.

    :param exit_code: None when a signal ended it. :param exit_signal: None when it exited.
    :param ads: result ads up to the first that is broken or empty. :param unread: why it stopped there.
    :param outfile_bytes: size of the output file afterwards. :param outfile_kept: it is still the same file.
    :param printed: stdout and stderr together. :param subcode: what the job's hold reason would carry.
    """

    plugin: Path
    result: Result
    subcode: int
    exit_code: int | None = None
    exit_signal: int | None = None
    ads: list[ClassAd] = field(default_factory=list)
    unread: str = ""
    outfile_bytes: int = 0
    outfile_kept: bool = True
    printed: str = ""
    duration_s: float = 0.0

    @property
    def succeeded(self) -> bool:
        """Tell whether the call succeeded: HTCondor decides by the exit status alone."""
        return self.result is Result.SUCCESS


@dataclass(frozen=True)
class Wanted:
    """One file: its URL, and its name in the scratch directory."""

    url: str
    name: str


class PluginError(Exception):
    """A plugin cannot be used, or there is none for a URL; the text says which."""


def installed(plugin: Path, folder: Path, python: str = sys.executable) -> Path:
    """Copy a Python plugin into ``folder`` so that it runs under ``python``, as pip installs scripts."""
    lines = plugin.read_text().split("\n")
    copy = folder / plugin.name
    copy.write_text("\n".join([f"#!{python}", *lines[1:]]))
    copy.chmod(0o755)
    return copy


def method_of(url: str) -> str:
    """Return the method that HTCondor looks up: behind the last ``+``, ``-`` or ``.`` of the scheme; "" for no URL."""
    found = _SCHEME.match(url)
    return re.split(r"[+.-]", found[1])[-1].lower() if found else ""


def plugin_name(plugin: Path) -> str:
    """Return the name whose variables (``NAME_*``) of the job's environment reach the plugin."""
    base = plugin.name
    head, found, _ = base.partition("_plugin")
    return (head if found else base.split(".")[0]).upper()


class PluginTable:
    """The plugin for each method; a later plugin wins.

    :param plugins: executables in the order of FILETRANSFER_PLUGINS.
    :ivar bad: plugins that gave no usable answer, and why.
    """

    def __init__(self, plugins: Iterable[Path], environment: Mapping[str, str] | None = None) -> None:
        self._methods: dict[str, Path] = {}
        self.answers: dict[Path, ClassAd] = {}
        self.bad: dict[Path, str] = {}
        for plugin in plugins:
            try:
                answer = query(plugin, environment)
            except PluginError as problem:
                self.bad[plugin] = str(problem)
                continue
            self.answers[plugin] = answer
            for method in listed(answer.text("SupportedMethods")):
                self._methods[method.lower()] = plugin

    @property
    def methods(self) -> list[str]:
        """All methods, as HasFileTransferPluginMethods would say."""
        return sorted(self._methods)

    def find(self, url: str) -> Path:
        """Find the plugin for a URL.

        :raises PluginError: there is none.
        """
        plugin = self._methods.get(method_of(url))
        if plugin is None:
            raise PluginError(f"no plugin for {method_of(url) or 'something that is not a URL'} (subcode -1001)")
        return plugin

    def protocol(self, plugin: Path) -> int:
        """Return the version of the protocol that HTCondor uses with the plugin.

        :raises PluginError: it gave no usable answer.
        """
        if plugin in self.bad:
            raise PluginError(self.bad[plugin])
        answer = self.answers[plugin]
        several = answer.get("MultipleFileSupport") is True
        version = answer.integer("ProtocolVersion")
        return version if 1 <= version <= 100 else 2 if several else 1


def listed(text: str) -> list[str]:
    """Split a list with commas or blanks."""
    return [item for item in re.split(r"[,\s]+", text) if item]


def run_query(plugin: Path, environment: Mapping[str, str] | None = None) -> tuple[str, int]:
    """Run ``-classad``; its output, stderr included, and its exit status.

    :raises PluginError: it cannot be started, or does not end in time.
    """
    try:
        done = subprocess.run(
            [str(plugin), "-classad"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=QUERY_TIMEOUT_S,
            env=_visible(os.environ if environment is None else environment),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise PluginError(f"{plugin} -classad: {problem}") from None
    return decode(done.stdout), done.returncode


def query(plugin: Path, environment: Mapping[str, str] | None = None) -> ClassAd:
    """Read a plugin's answer about itself as HTCondor reads it.

    :raises PluginError: no answer, or one without SupportedMethods.
    """
    printed, _ = run_query(plugin, environment)
    answer = parse_old("\n".join(line for line in printed.split("\n") if not line.startswith("#")))
    if not listed(answer.text("SupportedMethods")):
        raise PluginError(f"{plugin} -classad names no SupportedMethods; it said: {printed[:200]!r}")
    return answer


def _visible(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in _HIDDEN_VARIABLES}


class EmbeddedStarter:
    """Transfers of one job.

    :param scratch: the job's scratch directory, made by the caller; plugins run in it.
    :param job_ad: written to ``.job.ad``; PluginData and scheme_PluginData of it reach the plugins.
    :param machine_ad: written to ``.machine.ad``.
    :param credentials: directory with ``*.use`` files, or None.
    :param environment: of the starter; this process's own when None.
    :param job_environment: of the job; only ``NAME_*`` of it reaches the plugin called NAME.
    :param lifetime_s: MAX_FILE_TRANSFER_PLUGIN_LIFETIME.
    """

    def __init__(
        self,
        scratch: Path,
        plugins: PluginTable,
        job_ad: Mapping[str, Any] | None = None,
        machine_ad: Mapping[str, Any] | None = None,
        credentials: Path | None = None,
        environment: Mapping[str, str] | None = None,
        job_environment: Mapping[str, str] | None = None,
        lifetime_s: float = DEFAULT_LIFETIME_S,
    ) -> None:
        self.scratch = scratch
        self._plugins = plugins
        self._job_ad = ClassAd(job_ad or {})
        self._credentials = credentials
        self._environment = dict(os.environ if environment is None else environment)
        self._job_environment = dict(job_environment or {})
        if self._job_environment:
            self._job_ad["Environment"] = " ".join(f"'{n}={value}'" for n, value in self._job_environment.items())
        self._lifetime_s = lifetime_s
        (scratch / ".job.ad").write_text(unparse_old(self._job_ad))
        (scratch / ".machine.ad").write_text(unparse_old(machine_ad or {}))

    def download(self, wanted: Sequence[Wanted]) -> list[PluginRun]:
        """Transfer input: run each plugin once, with all of its URLs.

        :raises PluginError: there is no plugin for a URL.
        """
        return self._each(sorted(wanted, key=lambda item: str(self._plugins.find(item.url))), upload=False)

    def upload(self, wanted: Sequence[Wanted]) -> list[PluginRun]:
        """Transfer output: sort files by scheme, and run one process for each run of files with the same plugin.

        :raises PluginError: there is no plugin for a URL.
        """
        return self._each(sorted(wanted, key=lambda item: method_of(item.url)), upload=True)

    def _each(self, wanted: Sequence[Wanted], upload: bool) -> list[PluginRun]:
        runs = []
        for plugin, files in groupby(wanted, key=lambda item: self._plugins.find(item.url)):
            if self._plugins.protocol(plugin) > 1:
                runs.append(self.run(plugin, self.input_text(plugin, list(files)), upload))
            else:
                runs.extend(self.run_single(plugin, item, upload) for item in files)
        return runs

    def input_text(self, plugin: Path, files: Sequence[Wanted]) -> str:
        """Write the input file: ads with nothing between them, and PluginData where the version puts it."""
        schemes = list(dict.fromkeys(method_of(item.url) for item in files))
        data = {name: self._job_ad[name] for name in ["PluginData"] if name in self._job_ad}
        named = {scheme: f"{scheme}_PluginData" for scheme in schemes if f"{scheme}_PluginData" in self._job_ad}
        ads: list[dict[str, Any]] = []
        shared: dict[str, Any] = {}
        if self._plugins.protocol(plugin) == 4:
            ads = [data] if data else []
            ads += [{"Protocol": scheme, name: self._job_ad[name]} for scheme, name in named.items()]
        elif self._plugins.protocol(plugin) == 2:
            shared = {**data, **{name: self._job_ad[name] for name in named.values()}}
        ads += [{"LocalFileName": str(self.scratch / item.name), "Url": item.url, **shared} for item in files]
        return "".join(map(unparse_ad, ads))

    def run(self, plugin: Path, input_text: str, upload: bool, outfile_bytes: int = PREALLOCATED_BYTES) -> PluginRun:
        """Run one process in the form with ``-infile`` and ``-outfile``.

        :param outfile_bytes: blanks in the output file beforehand; HTCondor always writes the default.
        """
        infile, outfile = self.scratch / f".{plugin.name}.in", self.scratch / f".{plugin.name}.out"
        infile.write_text(input_text)
        outfile.write_text(" " * outfile_bytes)
        inode = outfile.stat().st_ino
        arguments = [str(plugin), "-infile", str(infile), "-outfile", str(outfile), *(["-upload"] if upload else [])]
        run = self._process(plugin, arguments, self._variables(plugin), stderr=subprocess.STDOUT)
        if run.result is not Result.EXEC_FAILED:
            try:
                run.ads, run.unread = read_results(decode(outfile.read_bytes()))
                run.outfile_bytes, run.outfile_kept = outfile.stat().st_size, outfile.stat().st_ino == inode
            except OSError as problem:
                run.unread, run.outfile_kept = f"unable to open output file: {problem.strerror}", False
            _judge_ads(run)
        if run.succeeded:
            infile.unlink(missing_ok=True)
            outfile.unlink(missing_ok=True)
        return run

    def run_single(self, plugin: Path, item: Wanted, upload: bool) -> PluginRun:
        """Run one process in the form ``SOURCE DESTINATION``; each line of stdout is an attribute of its result."""
        local = str(self.scratch / item.name)
        arguments = [str(plugin), *([local, item.url] if upload else [item.url, local])]
        run = self._process(plugin, arguments, {**self._environment, **self._variables(plugin)}, stderr=None)
        run.ads = [parse_old(run.printed)]
        return run

    def _variables(self, plugin: Path) -> dict[str, str]:
        variables = _visible(self._environment)
        prefix = plugin_name(plugin) + "_"
        variables.update((n, value) for n, value in self._job_environment.items() if n.upper().startswith(prefix))
        if self._credentials:
            variables["_CONDOR_CREDS"] = str(self._credentials)
        variables["_CONDOR_JOB_AD"] = str(self.scratch / ".job.ad")
        variables["_CONDOR_MACHINE_AD"] = str(self.scratch / ".machine.ad")
        return variables

    def _process(self, plugin: Path, arguments: list[str], variables: dict[str, str], stderr: int | None) -> PluginRun:
        started = time.monotonic()
        try:
            process = subprocess.Popen(
                arguments,
                cwd=self.scratch,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        except OSError as problem:
            return PluginRun(plugin, Result.EXEC_FAILED, -1003, printed=str(problem))
        with process:
            printed, timed_out = _wait(process, self._lifetime_s)
        run = PluginRun(plugin, *_judge(process.returncode, timed_out), printed=decode(printed))
        run.exit_code = process.returncode if process.returncode >= 0 else None
        run.exit_signal = -process.returncode if process.returncode < 0 else None
        run.duration_s = time.monotonic() - started
        return run


def _wait(process: subprocess.Popen[bytes], lifetime_s: float) -> tuple[bytes, bool]:
    """Read until everybody closed the pipe; at the limit kill this one process, without a warning.

    Its children end a second later, as they do when the job leaves the slot.
    """
    try:
        return process.communicate(timeout=lifetime_s)[0] or b"", False
    except subprocess.TimeoutExpired as problem:
        process.kill()
        try:
            return process.communicate(timeout=1)[0] or b"", True
        except subprocess.TimeoutExpired:  # a child may hold the pipe for ever
            return problem.output or b"", True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _judge(status: int, timed_out: bool) -> tuple[Result, int]:
    if timed_out:
        return Result.TIMED_OUT, _ETIME
    if status < 0:
        return Result.ERROR, -status
    return (Result.ERROR, status << 8) if status else (Result.SUCCESS, 0)


def _judge_ads(run: PluginRun) -> None:
    """Judge the ads. Without a single ad the exit status counts for nothing."""
    if not run.ads and run.exit_signal is None:
        run.result, run.subcode = Result.ERROR, -1004


def read_results(text: str) -> tuple[list[ClassAd], str]:
    """Read result ads as HTCondor does, up to the first that is broken or empty. Return also what is left unread."""
    ads: list[ClassAd] = []
    try:
        for ad in parse_ads(text):
            if not ad:
                return ads, "an empty ad"
            ads.append(ad)
    except ClassAdSyntaxError as problem:
        return ads, str(problem)
    return ads, ""


_ERROR_TYPES: dict[str, type] = {
    "ErrorType": str,
    "ErrorCode": int,
    "ErrorString": str,
    "Retryable": int,
    "PluginVersion": str,
    "PluginLaunched": bool,
    "FailedName": str,
    "FailedServer": str,
    "FailureType": str,
    "ShouldRefresh": bool,
    "IntermediateServer": str,
    "IntermediateServerErrorType": str,
    "DeveloperData": ClassAd,
}
_RESULT_TYPES: dict[str, type] = {
    "TransferSuccess": bool,
    "TransferError": str,
    "TransferProtocol": str,
    "TransferType": str,
    "TransferFileName": str,
    "TransferUrl": str,
    "TransferFileBytes": int,
    "TransferTotalBytes": int,
    "TransferStartTime": int,
    "TransferEndTime": int,
    "ConnectionTimeSeconds": float,
    "TransferErrorData": list,
    "DeveloperData": ClassAd,
    "TransferData": list,
}


def filtered(ad: ClassAd) -> ClassAd:
    """Return the attributes that reach the epoch history: known names with exactly the right literal type."""
    kept = _typed(ad, _RESULT_TYPES)
    if "TransferErrorData" in kept:
        elements = kept["TransferErrorData"]
        kept["TransferErrorData"] = [_typed(item, _ERROR_TYPES) for item in elements if isinstance(item, ClassAd)]
    return kept


def dropped(ad: ClassAd) -> list[str]:
    """List the names that the filter drops although it knows them: their values have a wrong type."""
    names = _wrong(ad, _RESULT_TYPES, "")
    elements = ad.get("TransferErrorData")
    for item in elements if isinstance(elements, list) else []:
        if isinstance(item, ClassAd):
            names += _wrong(item, _ERROR_TYPES, "TransferErrorData.")
        else:
            names.append("TransferErrorData")
    return names


def _fits(value: object, kind: type) -> bool:
    return type(value) is kind and not isinstance(value, Expr)


def _typed(ad: ClassAd, types: dict[str, type]) -> ClassAd:
    return ClassAd({name: ad[name] for name, kind in types.items() if name in ad and _fits(ad[name], kind)})


def _wrong(ad: ClassAd, types: dict[str, type], prefix: str) -> list[str]:
    return [prefix + name for name, kind in types.items() if name in ad and not _fits(ad[name], kind)]
