"""The context of a transfer (:class:`stageout.plugin.api.Context`), and its data."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from typing import Any

from stageout.core.classad_parser import parse_old
from stageout.core.classads import ClassAd, decode
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.results import Record
from stageout.plugin.text import Scrubber, one_line
from stageout.plugin.urls import is_checkpoint

MOST_STREAMS = 64
"""Of one file, and files of one batch, whatever a setting says."""

_LINES_KEPT = 150
_LINE_CHARS = 300
_DEFAULT_LIFETIME_S = 72000.0  # HTCondor's MAX_FILE_TRANSFER_PLUGIN_LIFETIME
_MARGIN_SHARE, _MARGIN_MAX_S = 0.1, 300.0


class PluginLog:
    """The last log lines, which the starter's log gets in one piece, and only after a failure.

    HTCondor keeps a plugin's output in memory, and continuous output delays the starter's keepalive.
    """

    def __init__(self, scrubber: Scrubber) -> None:
        self._scrubber = scrubber
        self._lines: deque[tuple[float, str, dict[str, object]]] = deque(maxlen=_LINES_KEPT)
        self._start_s = time.monotonic()

    def add(self, message: str, **facts: object) -> None:
        """Add one line. Its facts are formatted only when the log is printed."""
        self._lines.append((time.monotonic() - self._start_s, message, facts))

    def text(self) -> str:
        """Return all lines, without secrets."""
        return "".join(self._line(*line) for line in self._lines)

    def _line(self, when_s: float, message: str, facts: dict[str, object]) -> str:
        text = " ".join([message, *(f"{name}={value}" for name, value in facts.items())])
        return f"{when_s:.3f}s {one_line(self._scrubber.scrub(text), _LINE_CHARS)}\n"


class PluginEnvironment:
    """Job ad, machine ad, credentials and knobs. They are read on demand, ads and knobs only once."""

    def __init__(self, scrubber: Scrubber) -> None:
        self._scrubber = scrubber
        self._ads: dict[str, ClassAd] = {}
        self._settings: dict[str, str | None] = {}
        self._lock = threading.Lock()

    def ad(self, variable: str) -> ClassAd:
        """Read the ad whose file an environment variable names; empty without one."""
        with self._lock:
            if variable not in self._ads:
                self._ads[variable] = _read_ad(os.environ.get(variable, ""))
            return self._ads[variable]

    def destination(self, url: str, upload: bool) -> str:
        """Find the job's destination to which HTCondor has appended a raw file name; "" if a person wrote the whole
        URL.
        """
        ad = self.ad("_CONDOR_JOB_AD")
        checkpoints = ad.text("CheckpointDestination")
        if is_checkpoint(url, checkpoints, ad.text("GlobalJobId")):
            return checkpoints
        if not upload or url in (ad.text("OriginalOut"), ad.text("OriginalErr")):
            return ""
        return ad.text("OutputDestination")

    def setting(self, name: str, default: str) -> str:
        """Look up ``STAGEOUT_<name>`` in the environment, else in the machine ad."""
        if name not in self._settings:
            full = f"STAGEOUT_{name}"
            value = os.environ.get(full)
            if value is None:
                value = self.ad("_CONDOR_MACHINE_AD").get(full)
            self._settings[name] = None if value is None else str(value)
        found = self._settings[name]
        return default if found is None else found

    def count(self, name: str, default: int) -> int:
        """Look up a setting that is a number of at least 1; return the default without one."""
        try:
            value = int(self.setting(name, str(default)))
        except ValueError:
            return default
        return value if value >= 1 else default

    def credential(self, service: str, handle: str) -> str:
        """Read the token in ``$_CONDOR_CREDS/service[_handle].use``: JSON with ``access_token``, or the token itself.

        :raises TransferFailure: CREDENTIAL_MISSING, no token can be read.
        """
        name = credential_name(service, handle)
        folder = os.environ.get("_CONDOR_CREDS", "")
        if not folder or "/" in name:
            text = f"no credentials came with this job; ask for them with use_oauth_services = {service}"
            raise TransferFailure(ErrorClass.CREDENTIAL_MISSING, text)
        try:
            with open(f"{folder}/{name}.use") as stream:
                content = stream.read()
        except (OSError, UnicodeDecodeError) as error:
            text = f"cannot read the credential {name}.use ({type(error).__name__}); check use_oauth_services"
            raise TransferFailure(ErrorClass.CREDENTIAL_MISSING, text) from None
        token = _token_in(content)
        if not token:
            raise TransferFailure(ErrorClass.CREDENTIAL_MISSING, f"the credential {name}.use holds no access_token")
        self._scrubber.learn(token)
        return token


def credential_name(service: str, handle: str) -> str:
    """Return the file name, without ``.use``, of the token of a ``service.handle+`` URL."""
    return "_".join(part for part in (service, handle) if part).replace(".", "_")


def _read_ad(path: str) -> ClassAd:
    if not path:
        return ClassAd()
    try:
        with open(path, "rb") as stream:
            return parse_old(decode(stream.read()))
    except OSError:
        return ClassAd()


def _token_in(content: str) -> str:
    """Parse the token as HTCondor's own plugin does: lines with # are comments, a plain token is one line."""
    lines = [line for line in content.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    text = "\n".join(lines).strip()
    if not text.startswith("{"):
        return lines[0].strip() if lines else ""
    try:
        token = json.JSONDecoder().raw_decode(text)[0].get("access_token")
    except ValueError:
        return ""
    return token.strip() if isinstance(token, str) else ""


class Deadline:
    """The plugin's own time limit, which ends before HTCondor kills the plugin without a warning.

    :ivar decided: a file has failed permanently, so the job's transfer has failed in any case.
    """

    def __init__(self) -> None:
        self.decided = False
        lifetime_s = _DEFAULT_LIFETIME_S
        with contextlib.suppress(ValueError):
            lifetime_s = float(os.environ.get("STAGEOUT_PLUGIN_LIFETIME_S", "") or lifetime_s)
        self._end_s = time.monotonic() + lifetime_s - min(_MARGIN_MAX_S, lifetime_s * _MARGIN_SHARE)
        self._stopped: TransferFailure | None = None

    @property
    def remaining_s(self) -> float:
        """Return the seconds left; 0 when the plugin has to end."""
        return 0.0 if self._stopped else max(0.0, self._end_s - time.monotonic())

    @property
    def stopped(self) -> TransferFailure | None:
        """Return the reason why running transfers must end now; None while they may continue."""
        return self._stopped

    def stop(self, reason: TransferFailure) -> None:
        """End running transfers at their next ``progress``."""
        self._stopped = self._stopped or reason


class FileContext:
    """The context of one file; see :class:`stageout.plugin.api.Context`."""

    def __init__(self, record: Record, environment: PluginEnvironment, deadline: Deadline, log: PluginLog) -> None:
        self._record = record
        self._environment = environment
        self._deadline = deadline
        self._log = log

    @property
    def remaining_s(self) -> float:
        """Return the seconds until the plugin's own deadline."""
        return self._deadline.remaining_s

    @property
    def decided(self) -> bool:
        """Tell whether another file of this call has failed permanently."""
        return self._deadline.decided

    def credential(self, service: str, handle: str = "") -> str:
        """Read a bearer token; read its file on each call."""
        return self._environment.credential(service, handle)

    def job_attribute(self, name: str) -> Any:
        """Return an attribute of the job's ad, None when absent."""
        return self._environment.ad("_CONDOR_JOB_AD").get(name)

    def machine_attribute(self, name: str) -> Any:
        """Return an attribute of the machine's ad, None when absent."""
        return self._environment.ad("_CONDOR_MACHINE_AD").get(name)

    def setting(self, name: str, default: str) -> str:
        """Look up a knob."""
        return self._environment.setting(name, default)

    @property
    def parallelism(self) -> int:
        """Return the number of streams for this file."""
        return min(MOST_STREAMS, self._environment.count("PARALLELISM", 1))

    def attempt_failed(self, failure: Exception) -> None:
        """Record a failed attempt before a retry."""
        if not isinstance(failure, TransferFailure):
            failure = TransferFailure(ErrorClass.UNKNOWN, f"{type(failure).__name__}: {failure}")
        self._record.failed_attempts.append(failure)
        self._log.add("attempt failed", file=self._record.item.shown_url, error=failure)

    def progress(self, transferred_bytes: int) -> None:
        """Report the bytes moved so far for this file, by all attempts. :raises Stopped: the plugin has to end."""
        self._record.moved_bytes = transferred_bytes
        self._record.pace.note(transferred_bytes)
        if self._deadline.stopped:
            raise self._deadline.stopped

    def log(self, message: str, **facts: object) -> None:
        """Add one line to the plugin's log."""
        self._log.add(message, file=self._record.item.shown_url, **facts)
