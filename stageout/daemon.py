"""Start-up of the daemons: command line, settings, log, signals, and the end together with condor_master.

Signals as condor_master sends them: SIGTERM (and SIGINT) stop gracefully, SIGQUIT fast, SIGHUP reads the settings
again. Exit status 99 tells condor_master not to start the daemon again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import logging
import os
import re
import signal
import sqlite3
import sys
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stageout import __version__
from stageout.condor import bindings, master
from stageout.condor.configuration import condor_settings, reload_condor
from stageout.core import log
from stageout.core.config import (
    ConfigError,
    Settings,
    checked_path,
    environment_settings,
    file_settings,
    misspelt,
)
from stageout.core.ending import end
from stageout.core.errors import StageoutError
from stageout.core.metrics import Readings
from stageout.core.metrics_server import MetricsServer, metrics_settings
from stageout.core.rotation import LogSettings, log_settings

EXIT_NO_RESTART = 99
"""condor_master does not start a daemon again that exits with this status."""
EXIT_RESTART = 1
"""The daemon failed; condor_master starts it again."""

_PARENT_INTERVAL_S = 1.0
#: Faults of a log file that no other start finds mended.
_LASTING = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
#: Libraries of the daemons that report faults of their own.
_LIBRARIES = ("asyncio", "aiohttp")
_STATUSES = """\
exit status: 0 stopped as requested, 1 failed, and another start may help, 2 wrong command line,
99 a setting is wrong, or something that it names: another start changes nothing"""


class LogUnavailable(ConfigError):
    """The log cannot be written now, such as on a full disk."""

    is_temporary = True


@dataclass(frozen=True)
class Program:
    """One daemon's program.

    :param name: of the command. :param subsystem: HTCondor's name, as in ``<SUBSYS>_LOG`` and ``MAX_<SUBSYS>_LOG``.
    :param log_file: its file in ``$(LOG)`` where ``<SUBSYS>_LOG`` is not set. :param about: begins ``--help``.
    :param metrics: prefix of the settings of its metrics. :param runs_alone: there are settings for machines without
        HTCondor.
    """

    name: str
    subsystem: str
    log_file: str
    about: str
    metrics: str
    runs_alone: bool = False


class Service(Protocol):
    """A daemon's work. It is made in the event loop."""

    async def serve(self, started: Callable[..., None]) -> None:
        """Work until :meth:`stop`.

        :param started: call it once, with facts for the log, when everything is open. :meth:`reload` may come then.
        :raises StageoutError: the service cannot start.
        """

    def stop(self, fast: bool) -> None:
        """Ask :meth:`serve` to end, also before it has called ``started``."""

    async def reload(self) -> Settings:
        """Read the settings again and return them.

        :raises StageoutError: they cannot be used. The old ones all stay.
        """

    async def metrics(self) -> Readings:
        """Return the values of this moment."""


Load = Callable[[], Settings]


def command_line(program: Program) -> argparse.ArgumentParser:
    """Return a parser of the options that all daemons have."""
    parser = argparse.ArgumentParser(
        program.name, description=program.about, epilog=_STATUSES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if program.runs_alone:
        parser.add_argument(
            "--alone", action="store_true",
            help="run without HTCondor: read each setting from the environment, as NAME or as _CONDOR_NAME",
        )  # fmt: skip
        parser.add_argument(
            "--settings", metavar="FILE", type=Path,
            help="run without HTCondor: read settings from a file of NAME=VALUE lines, then from the environment",
        )  # fmt: skip
    parser.add_argument("-f", action="store_true", help="accepted and ignored: the daemon stays in the foreground")
    parser.add_argument("-t", dest="terminal", action="store_true", help="write the log to the terminal")
    parser.add_argument(
        "-local-name", "--local-name", metavar="NAME", dest="local_name", default="",
        help="read each setting as NAME.SETTING first, and write a log of this name",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    return parser


def is_alone(options: argparse.Namespace) -> bool:
    """Return True when the options say that this machine has no HTCondor."""
    return bool(getattr(options, "alone", False) or getattr(options, "settings", None))


def reader_of(program: Program, options: argparse.Namespace) -> Load:
    """Return the function that reads the settings. :raises ConfigError: HTCondor's Python module is missing."""
    if is_alone(options):
        return lambda: file_settings(options.settings) if options.settings else environment_settings("", "_CONDOR_")
    if not bindings.are_installed():
        advice = ": give --alone or --settings FILE where there is no HTCondor" if program.runs_alone else ""
        raise ConfigError(f"HTCondor's Python module htcondor2 is not installed here{advice}")

    def read() -> Settings:
        reload_condor()
        return condor_settings(options.local_name)

    return read


def run(
    program: Program,
    options: argparse.Namespace,
    prepare: Callable[[Settings, Load], Callable[[], Service]],
    command: Callable[[Settings], int] | None = None,
) -> int:
    """Run a daemon until it ends.

    :param prepare: is called before there are threads or a log, and returns what makes the service in the loop.
    :param command: runs instead of the daemon, where an option asks for an answer only.
    :returns: the exit status.
    """
    parent = os.getppid()  # before anything takes time: a parent that ends meanwhile is noticed
    settings = make = None
    try:
        read = reader_of(program, options)

        def load() -> Settings:
            settings = read()
            log_settings(settings, program.subsystem)  # nothing of a configuration is taken when this is wrong
            metrics_settings(settings, program.metrics)
            return settings

        settings = read()
        if command is not None:
            return command(settings)
        metrics_settings(settings, program.metrics)
        silence_s = 0 if is_alone(options) or not master.has_master() else master.silence_s(settings, program.subsystem)
        make = prepare(settings, load)
        path = open_log(program, options, settings)
    except StageoutError as problem:
        if settings is not None and command is None and _opens_last_log(program, options, settings, make is not None):
            return _fail(program, problem, on_terminal=False)
        print(f"{program.name}: {problem}", file=sys.stderr)
        return _status_of(problem)
    _warn_of_names(settings)
    try:
        reopen_log = functools.partial(open_log, program, options)
        published = MetricsServer(program.name, program.metrics, settings)
        asyncio.run(supervise(make, reopen_log, 0 if is_alone(options) else parent, published, silence_s))
    except (StageoutError, OSError, sqlite3.Error) as problem:
        return _fail(program, problem, path is None)
    except Exception:
        # condor_master starts the daemon again and discards stderr: the reason must be in the log.
        log.error("daemon-crashed", trace=traceback.format_exc())
        return EXIT_RESTART
    return 0


def _warn_of_names(settings: Settings) -> None:
    for sentence in misspelt(settings):
        log.warn("setting-ignored", problem=sentence)


def _fail(program: Program, problem: Exception, on_terminal: bool) -> int:
    status = _status_of(problem)
    words = f"the database fails: {problem}; is its disk sound, and has it room?"
    text = words if isinstance(problem, sqlite3.Error) else str(problem)
    log.error("daemon-failed", problem=text, status=status)
    if not on_terminal:
        print(f"{program.name}: {text}", file=sys.stderr)
    return status


def _status_of(problem: Exception) -> int:
    is_lasting = isinstance(problem, StageoutError) and not problem.is_temporary
    return EXIT_NO_RESTART if is_lasting else EXIT_RESTART


def _opens_last_log(program: Program, options: argparse.Namespace, settings: Settings, may_create: bool) -> bool:
    """Open the log file for the reason of a failed start. Its own settings, which may be that reason, do not count.

    :param may_create: this process has the user that writes the log later. :returns: it is open.
    """
    with contextlib.suppress(StageoutError, OSError):
        path = None if options.terminal else _log_path(program, options, settings)
        if path and (may_create or path.exists()):
            log.open_log(logging.FileHandler(path))
            return True
    return False


def log_started(**facts: object) -> None:
    """Log that a daemon is ready. :param facts: of this kind of daemon."""
    log.event("daemon-started", logging.INFO, pid=os.getpid(), version=__version__, **facts)


async def supervise(
    make: Callable[[], Service],
    reopen_log: Callable[[Settings], object] = lambda settings: None,
    parent: int = 0,
    published: MetricsServer | None = None,
    silence_s: int = 0,
) -> None:
    """Serve with signals, until the service ends.

    :param reopen_log: is called with new settings. :param parent: pid of condor_master, with which the daemon ends;
        0: there is none. :param published: the daemon's metrics. :param silence_s: after which condor_master is to kill
        the daemon; 0: nobody tells it that the daemon is alive. :raises StageoutError: the service cannot start.
    """
    loop = asyncio.get_running_loop()
    asked, ready = asyncio.Event(), asyncio.Event()
    loop.set_debug(log.is_debug())
    loop.add_signal_handler(signal.SIGHUP, asked.set)
    service = make()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        loop.add_signal_handler(number, service.stop, number == signal.SIGQUIT)

    def started(**facts: object) -> None:
        log_started(**facts)
        ready.set()

    beside = [loop.create_task(_reload_on_request(service, reopen_log, published, ready, asked))]
    if silence_s:
        beside.append(loop.create_task(_tell_master(ready, silence_s)))
    if parent:
        beside.append(loop.create_task(_end_with(parent, service)))
    try:
        await service.serve(started)
    finally:
        await end(beside)
        if published:
            await published.close()
    log.event("daemon-stopped")


async def _tell_master(ready: asyncio.Event, silence_s: int) -> None:
    """Tell condor_master that the daemon is alive, from when it is ready."""
    await ready.wait()
    await master.keep_telling(silence_s)


async def _reload_on_request(
    service: Service,
    reopen_log: Callable[[Settings], object],
    published: MetricsServer | None,
    ready: asyncio.Event,
    asked: asyncio.Event,
) -> None:
    """Publish the metrics when the service is ready, and read the settings again whenever this is asked."""
    await ready.wait()
    if published:
        await _publish(published.start(service))
    while True:
        await asked.wait()
        asked.clear()
        settings = await _reload(service, reopen_log)
        if published and settings:
            await _publish(published.update_settings(settings))


async def _publish(work: Coroutine[None, None, None]) -> None:
    """Start the metrics or change them. Log a fault: it must not end the daemon's answer to SIGHUP."""
    try:
        await work
    except Exception:
        log.error("metrics-failed", problem=traceback.format_exc())


async def _reload(service: Service, reopen_log: Callable[[Settings], object]) -> Settings | None:
    """Read the settings again. Return them, None when they cannot be used."""
    try:
        settings = await service.reload()
        reopen_log(settings)
        _warn_of_names(settings)
        asyncio.get_running_loop().set_debug(log.is_debug())
    except StageoutError as problem:
        log.error("configuration-refused", problem=f"{problem}; the old value stays")
    except Exception:
        log.error("configuration-refused", trace=traceback.format_exc())
    else:
        log.event("configuration-reloaded")
        return settings
    return None


async def _end_with(parent: int, service: Service) -> None:
    """Stop when condor_master ends: the next one starts a daemon of its own, which needs the same files and ports."""
    while os.getppid() == parent:
        await asyncio.sleep(_PARENT_INTERVAL_S)
    log.warn("master-lost", parent=parent)
    service.stop(fast=True)


def open_log(program: Program, options: argparse.Namespace, settings: Settings) -> Path | None:
    """Send the log where options and settings want it, from now on.

    :returns: the file, None for the terminal. :raises ConfigError: the file cannot be written, until a person mends it.
    :raises LogUnavailable: it cannot be written now.
    """
    found = log_settings(settings, program.subsystem)
    path = None if options.terminal else _log_path(program, options, settings)
    try:
        log.open_log(found.handler(path) if path else None, found.is_debug, found.is_json)
    except OSError as problem:
        text = f"{program.subsystem}_LOG: the log {path}: {problem.strerror}"
        if not isinstance(problem, _LASTING):
            raise LogUnavailable(text) from None
        raise ConfigError(f"{text}; name a file that this daemon's user may write") from None
    _hear_libraries(found)
    return path


def _log_path(program: Program, options: argparse.Namespace, settings: Settings) -> Path | None:
    """Return the path of the log, None for standard error.

    A daemon without a setting ``SUBSYSTEM_LOG`` logs into HTCondor's LOG directory. A daemon with a local name has a
    log of its own there, whose name begins with the local name, as HTCondor's daemons have.

    :raises ConfigError: the path is relative.
    """
    knob, directory = f"{program.subsystem}_LOG", "" if is_alone(options) else settings.condor("LOG")
    name = options.local_name
    path = settings.condor(f"{name}.{knob}" if name else knob)
    if not path and directory:
        words = re.split(r"[\s_]+", name)
        path = f"{directory}/{''.join(map(str.capitalize, words))}{program.log_file}"
    return Path(checked_path(knob, path)) if path else None


def _hear_libraries(wanted: LogSettings) -> None:
    for name in _LIBRARIES:
        logger = logging.getLogger(name)
        logger.handlers[:] = [_LibraryHandler()]
        logger.setLevel(logging.DEBUG if wanted.is_debug else logging.WARNING)
        logger.propagate = False


class _LibraryHandler(logging.Handler):
    """Messages of libraries as events: without it those of asyncio and aiohttp go to stderr, which nobody reads."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write the event."""
        trace = {"trace": "".join(traceback.format_exception(*record.exc_info))} if record.exc_info else {}
        log.event("library-logged", record.levelno, library=record.name, text=record.getMessage(), **trace)
