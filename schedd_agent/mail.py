"""Mail to the owners of jobs, through HTCondor's mailer, as the job's ``notification`` asks.

HTCondor sends one mail per job. A full destination fails thousands of jobs at once. So the agent sends an address at
most one mail per ``STAGEOUT_MAIL_INTERVAL``, with all news in it. Mail that waits is lost when the agent dies. The
hold, the job's log and ``stageout history`` tell the same.
"""

from __future__ import annotations

import enum
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stageout.core import log
from stageout.core.config import Settings, checked_path
from stageout.model.job import MailRecipient

#: Jobs that a mail names at most, and clusters.
_NAMED = 50
_REASON_CHARS = 500
_MAILERS = 4
#: Messages of one program that wait for its turn at most.
_MOST_WAITING = 1000
_MAILER_TIMEOUT_S = 60.0
_MOST_ADDRESSES = 5
#: Owners choose the address, which becomes an argument of the mailer. It must not be an option, a pipe or a file.
_ADDRESS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=-]*@[A-Za-z0-9][A-Za-z0-9.-]*\Z")


class MailKind(enum.Enum):
    """Kinds of news for an owner, in the words of a mail's subject."""

    HELD = "put on hold"
    FAILED = "stage-out failed"
    DELIVERED = "output delivered"
    ATTEMPT_FAILED = "delivery attempt failed, retries go on"
    ALL_DELIVERED = "all output delivered"
    SOME_DELIVERED = "output delivered for some jobs only"


#: Ends of the output of a cluster or a DAG.
END_KINDS = frozenset({MailKind.ALL_DELIVERED, MailKind.SOME_DELIVERED})
#: News about a cluster or a DAG, each at most once.
GROUP_KINDS = END_KINDS | {MailKind.ATTEMPT_FAILED}


class Notification(enum.IntEnum):
    """JobNotification."""

    NEVER = 0
    ALWAYS = 1
    COMPLETE = 2
    ERROR = 3
    START = 4


_FAILURES = frozenset({MailKind.HELD, MailKind.FAILED})
#: The kinds follow ``Email::shouldSend`` of HTCondor. But `Complete` includes failures, because HTCondor has already
#: sent its "exited normally" at the hand-off.
_WANTED: dict[int, frozenset[MailKind]] = {
    Notification.NEVER: frozenset(),
    Notification.COMPLETE: _FAILURES | END_KINDS,
    Notification.ERROR: _FAILURES | {MailKind.ATTEMPT_FAILED},
    Notification.START: frozenset(),
}


def is_wanted(notification: int, kind: MailKind) -> bool:
    """Tell whether the owner wants this mail. HTCondor takes an unknown number for `Always`."""
    return kind in _WANTED.get(notification, frozenset(MailKind))


def is_of_group(kind: MailKind) -> bool:
    """Tell whether news of this kind is about a cluster or a DAG."""
    return kind in GROUP_KINDS


class Mailer(Protocol):
    """Interface to a program that sends mail."""

    def addresses(self, to: MailRecipient) -> tuple[str, ...]:
        """Return the full addresses of an owner; none where no mail can be sent."""

    def send(self, addresses: Sequence[str], subject: str, body: str) -> None:
        """Start to send a mail, without waiting for its end."""

    def reap(self, now_s: float, at_once: bool = False) -> bool:
        """Log mails that could not be sent, and start those that wait. Return False when nothing is left.

        :param at_once: start all that wait.
        """


@dataclass
class _PendingMail:
    lines: list[tuple[MailKind, str]] = field(default_factory=list)
    counts: Counter[MailKind] = field(default_factory=Counter)
    subject: str = ""

    def add(self, what: str, kind: MailKind, reason: str) -> None:
        """Add news. Many jobs leave room for news about clusters."""
        self.counts[kind] += 1
        self.subject = f"Condor {what} {kind.value}"
        if sum(is_of_group(known) == is_of_group(kind) for known, _ in self.lines) < _NAMED:
            self.lines.append((kind, f"{what}: {kind.value}\n    {_printable(reason)}\n"))


class MailQueue:
    """Mail that waits for the next mail to its address.

    :param interval_s: least seconds between two mails to one address.
    """

    def __init__(self, mailer: Mailer, interval_s: float) -> None:
        self.mailer = mailer
        self._former: list[Mailer] = []
        self._interval_s = interval_s
        self._pending: dict[tuple[str, ...], _PendingMail] = {}
        self._sent_s: dict[tuple[str, ...], float] = {}

    def replace_mailer(self, mailer: Mailer, interval_s: float) -> None:
        """Send with another mailer from now on. Programs of the former one are still collected."""
        self._former.append(self.mailer)
        self.mailer, self._interval_s = mailer, interval_s

    def wants(self, to: MailRecipient, kinds: Collection[MailKind]) -> bool:
        """Tell whether the owner wants some of these kinds and has an address."""
        return any(is_wanted(to.notification, kind) for kind in kinds) and bool(self.mailer.addresses(to))

    def post(self, to: MailRecipient, what: str, kind: MailKind, reason: str) -> None:
        """Add news to the owner's next mail, if the job's ``notification`` asks for it.

        :param what: object of the news, for example "Job 7.0".
        """
        if self.wants(to, [kind]):
            self._pending.setdefault(self.mailer.addresses(to), _PendingMail()).add(what, kind, reason)

    def send(self, now_s: float, at_once: bool = False) -> None:
        """Send the mails that are due. :param at_once: send all mails."""
        self._former = [mailer for mailer in self._former if mailer.reap(now_s)]
        self._sent_s = {who: at_s for who, at_s in self._sent_s.items() if now_s - at_s < self._interval_s}
        for addresses in [who for who in self._pending if at_once or who not in self._sent_s]:
            pending = self._pending.pop(addresses)
            self._sent_s[addresses] = now_s
            self.mailer.send(addresses, _subject(pending), _body(pending))
        self.mailer.reap(now_s, at_once)


def _printable(text: str) -> str:
    """Return one line of a mail. Reasons are texts of servers."""
    return "".join(char if char.isprintable() else " " for char in text)[:_REASON_CHARS]


def _subject(pending: _PendingMail) -> str:
    total = sum(pending.counts.values())
    if total == 1:
        return f"[Condor] {pending.subject}"
    counted = ", ".join(f"{count} {kind.value}" for kind, count in pending.counts.items())
    return f"[Condor] {total} {'messages on ' if any(map(is_of_group, pending.counts)) else ''}Condor jobs: {counted}"


def _body(pending: _PendingMail) -> str:
    lines: list[str] = []
    for of_group, noun in ((True, "clusters"), (False, "jobs")):
        named = [line for kind, line in pending.lines if is_of_group(kind) == of_group]
        total = sum(number for kind, number in pending.counts.items() if is_of_group(kind) == of_group)
        lines += [*named, *([f"and {total - len(named)} more {noun}\n"] if total > len(named) else [])]
    return "\n".join([*lines, "`stageout status` shows jobs in the queue, `stageout history` those that have left it."])


@dataclass(frozen=True)
class _Message:
    """A program's arguments, its standard input, and facts for the log."""

    argv: Sequence[str]
    text: str
    to: str
    subject: str


class Programs:
    """Programs that send messages, a few at once. :param advice: for the log when one cannot be started."""

    def __init__(self, advice: str) -> None:
        self._advice = advice
        self._running: list[tuple[subprocess.Popen[bytes], float]] = []
        self._waiting: deque[_Message] = deque()

    def start(self, argv: Sequence[str], text: str, addresses: Sequence[str], subject: str) -> None:
        """Start a program with a text on standard input, now or when others have ended, without waiting for its end."""
        message = _Message(argv, text, " ".join(addresses), subject)
        if len(self._waiting) >= _MOST_WAITING:
            log.warn("mail-dropped", to=message.to, advice=f"{argv[0]} is slow or hangs")
            return
        self._waiting.append(message)
        self._start_waiting(_MAILERS)

    def _start_waiting(self, most: int) -> None:
        while self._waiting and len(self._running) < most:
            message = self._waiting.popleft()
            to, program = message.to, message.argv[0]
            try:
                self._running.append((_started(message), time.monotonic()))
            except OSError as problem:
                log.warn("mail-failed", to=to, program=program, problem=problem, advice=self._advice)
            else:
                log.event("mail-sent", to=to, program=program, subject=message.subject)

    def reap(self, at_once: bool = False) -> bool:
        """Collect programs that have ended, kill those that hang, and start those that wait.

        :param at_once: start all that wait. :returns: False when nothing runs and waits.
        """
        for process, started_s in self._running:
            if process.poll() is None and time.monotonic() - started_s > _MAILER_TIMEOUT_S:
                process.kill()
            elif process.poll():
                log.warn("mail-failed", problem=f"{process.args!r} exited with {process.returncode}")
        self._running = [one for one in self._running if one[0].poll() is None]
        self._start_waiting(_MAILERS + (_MOST_WAITING if at_once else 0))
        return bool(self._running)


def _started(message: _Message) -> subprocess.Popen[bytes]:
    """Start a program. Its input is a file, because a pipe would block until the program reads.

    :raises OSError: it cannot be started, or there is no room for the file.
    """
    with tempfile.TemporaryFile() as stream:
        stream.write(message.text.encode("utf-8", "replace"))
        stream.seek(0)
        return subprocess.Popen(message.argv, stdin=stream, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class CondorMailer:
    """HTCondor's own mailer: SENDMAIL, or else MAIL."""

    def __init__(self, settings: Settings, name: str) -> None:
        sendmail = settings.condor("SENDMAIL").strip()
        self._sendmail = (shutil.which(sendmail) or sendmail) if sendmail else ""
        self._mail = settings.condor("MAIL").strip()
        self._sender = settings.condor("MAIL_FROM").strip()
        self._email_domain = settings.condor("EMAIL_DOMAIN").strip()
        self._uid_domain = settings.condor("UID_DOMAIN").strip()
        contact = settings.condor("CONDOR_SUPPORT_EMAIL") or settings.condor("CONDOR_ADMIN")
        self._end = settings.condor("EMAIL_SIGNATURE") or (f"Questions? Ask {contact}." if contact else "")
        self._head = f"This is an automated mail of stageout on the access point {name}. Do not reply.\n"
        self._programs = Programs("set MAIL or SENDMAIL")

    def addresses(self, to: MailRecipient) -> tuple[str, ...]:
        """Return the full addresses of an owner, with the domain that HTCondor would add."""
        domain = self._email_domain or to.domain or self._uid_domain
        named = to.address.replace(",", " ").split()[:_MOST_ADDRESSES]
        full = (name if "@" in name else f"{name}@{domain}" for name in named)
        return tuple(address for address in full if _ADDRESS.match(address))

    def send(self, addresses: Sequence[str], subject: str, body: str) -> None:
        """Start the mailer. At most a few run at once. Further mails wait."""
        argv, head = self._command(addresses, subject)
        if argv:
            self._programs.start(argv, f"{head}{self._head}\n{body}\n\n{self._end}\n", addresses, subject)

    def reap(self, now_s: float, at_once: bool = False) -> bool:
        """Collect mailers that have ended, kill those that hang, and start those that wait."""
        return self._programs.reap(at_once)

    def _command(self, addresses: Sequence[str], subject: str) -> tuple[list[str], str]:
        """Return the mailer's arguments, and the mail's header where the mailer reads one."""
        if self._sendmail:
            sender = f"From: {self._sender}\n" if self._sender else ""
            head = f"{sender}Subject: {subject}\nTo: {', '.join(addresses)}\n\n"
            return [self._sendmail, "-t", "-i"], head
        sender_option = ["-r", self._sender] if self._sender else []
        return ([self._mail, "-s", subject, *sender_option, *addresses] if self._mail else []), ""


class MailerWithCommand:
    """HTCondor's mailer, and beside it the administrator's program (STAGEOUT_NOTIFY_COMMAND), with the same messages.

    :param command: absolute path. It gets an object of JSON on standard input: ``to``, ``subject`` and ``text``.
    """

    def __init__(self, mailer: Mailer, command: str) -> None:
        self._mailer = mailer
        self._command = command
        self._programs = Programs("correct STAGEOUT_NOTIFY_COMMAND")

    def addresses(self, to: MailRecipient) -> tuple[str, ...]:
        """Return the full addresses of an owner."""
        return self._mailer.addresses(to)

    def send(self, addresses: Sequence[str], subject: str, body: str) -> None:
        """Start both, without waiting for their end."""
        self._mailer.send(addresses, subject, body)
        message = {"to": list(addresses), "subject": subject, "text": f"{subject}\n\n{body}"}
        text = json.dumps(message, ensure_ascii=False)
        self._programs.start([self._command], text, addresses, subject)

    def reap(self, now_s: float, at_once: bool = False) -> bool:
        """Collect programs that have ended, kill those that hang, and start those that wait."""
        is_mailing = self._mailer.reap(now_s, at_once)
        return self._programs.reap(at_once) or is_mailing


def mailer_of(settings: Settings, name: str) -> Mailer:
    """Return the mailer that the settings ask for.

    :param name: of the access point. :raises ConfigError: the command is no absolute path.
    """
    mailer, command = CondorMailer(settings, name), settings.text("STAGEOUT_NOTIFY_COMMAND").strip()
    if not command:
        return mailer
    return MailerWithCommand(mailer, checked_path("STAGEOUT_NOTIFY_COMMAND", command, "the path of a program"))
