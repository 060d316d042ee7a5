"""Mail to the owners of jobs: through HTCondor's mailer, by the job's ``notification``, one mail for many jobs.

HTCondor sends one mail per job. A destination that is full fails thousands of jobs at once, so an address gets at most
one mail per ``STAGEOUT_MAIL_INTERVAL`` here, which sums up. What waits for its mail is lost when the agent dies: the
hold, the job's log and ``stageout history`` say the same.
"""

from __future__ import annotations

import enum
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from schedd_agent.model import MailTo
from stageout.core import log
from stageout.core.config import Settings

_JOBS_NAMED = 50
_REASON_CHARS = 500
_MAILERS = 4
_MAILER_TIMEOUT_S = 60.0
_MOST_ADDRESSES = 5
#: Owners choose the address, and it becomes an argument of the mailer: never an option, a pipe or a file.
_ADDRESS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=-]*@[A-Za-z0-9][A-Za-z0-9.-]*\Z")


class News(enum.Enum):
    """Kinds of news for an owner, in the words of the subject."""

    HELD = "put on hold"
    FAILED = "stage-out failed"
    DELIVERED = "output delivered"


class Notification(enum.IntEnum):
    """JobNotification."""

    NEVER = 0
    ALWAYS = 1
    COMPLETE = 2
    ERROR = 3


def wants(notification: int, news: News) -> bool:
    """Tell whether the owner wants this mail: `Complete` gets failures too, as HTCondor mailed at the hand-off."""
    if notification in (Notification.ALWAYS, Notification.COMPLETE):
        return True
    return notification == Notification.ERROR and news is not News.DELIVERED


class Mailer(Protocol):
    """Sends one mail."""

    def addresses(self, to: MailTo) -> tuple[str, ...]:
        """Full addresses of an owner; none where mail cannot be sent there."""

    def send(self, addresses: Sequence[str], subject: str, body: str) -> None:
        """Send it, without waiting for its end."""

    def look_after(self, now_s: float) -> None:
        """Say which mails could not be sent."""


@dataclass
class _Waiting:
    lines: list[str] = field(default_factory=list)
    counts: Counter[News] = field(default_factory=Counter)
    subject: str = ""


class Outbox:
    """Mail that waits for its turn.

    :param interval_s: least seconds between two mails to one address.
    """

    def __init__(self, mailer: Mailer, interval_s: float) -> None:
        self.mailer = mailer
        self.interval_s = interval_s
        self._waiting: dict[tuple[str, ...], _Waiting] = {}
        self._sent_s: dict[tuple[str, ...], float] = {}

    def post(self, to: MailTo, job_id: str, news: News, reason: str) -> None:
        """Put a piece of news into the owner's next mail, if the job's ``notification`` asks for it."""
        if not wants(to.notification, news):
            return
        addresses = self.mailer.addresses(to)
        if not addresses:
            return
        waiting = self._waiting.setdefault(addresses, _Waiting())
        waiting.counts[news] += 1
        waiting.subject = f"Condor Job {job_id} {news.value}"
        if len(waiting.lines) < _JOBS_NAMED:
            waiting.lines.append(f"Job {job_id}: {news.value}\n    {_printable(reason)}\n")

    def send(self, now_s: float, at_once: bool = False) -> None:
        """Send what is due. :param at_once: everything."""
        self.mailer.look_after(now_s)
        self._sent_s = {who: at_s for who, at_s in self._sent_s.items() if now_s - at_s < self.interval_s}
        for addresses in [who for who in self._waiting if at_once or who not in self._sent_s]:
            waiting = self._waiting.pop(addresses)
            self._sent_s[addresses] = now_s
            self.mailer.send(addresses, _subject(waiting), _body(waiting))


def _printable(text: str) -> str:
    """One line of a mail: reasons are words of servers."""
    return "".join(char if char.isprintable() else " " for char in text)[:_REASON_CHARS]


def _subject(waiting: _Waiting) -> str:
    jobs = sum(waiting.counts.values())
    if jobs == 1:
        return f"[Condor] {waiting.subject}"
    counted = ", ".join(f"{count} {news.value}" for news, count in waiting.counts.items())
    return f"[Condor] {jobs} Condor jobs: {counted}"


def _body(waiting: _Waiting) -> str:
    more = sum(waiting.counts.values()) - len(waiting.lines)
    lines = [*waiting.lines, *([f"and {more} more jobs\n"] if more else [])]
    return "\n".join([*lines, "`stageout status` shows jobs in the queue, `stageout history` those that have left it."])


class CondorMailer:
    """HTCondor's own mailer, as its configuration names it: SENDMAIL, or else MAIL."""

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
        self._running: list[tuple[subprocess.Popen[str], float]] = []

    def addresses(self, to: MailTo) -> tuple[str, ...]:
        """Full addresses of an owner; a domain is added as HTCondor does."""
        domain = self._email_domain or to.domain or self._uid_domain
        named = to.address.replace(",", " ").split()[:_MOST_ADDRESSES]
        full = (name if "@" in name else f"{name}@{domain}" for name in named)
        return tuple(address for address in full if _ADDRESS.match(address))

    def send(self, addresses: Sequence[str], subject: str, body: str) -> None:
        """Start the mailer. At most a few run at once; further mails are dropped, and the log says so."""
        argv, head = self._command(addresses, subject)
        if not argv:
            return
        if len(self._running) >= _MAILERS:
            log.warn("mail-dropped", to=" ".join(addresses), advice="HTCondor's mailer (MAIL) is slow or hangs")
            return
        text = f"{head}{self._head}\n{body}\n\n{self._end}\n"
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True
            )
            self._running.append((process, time.monotonic()))
            assert process.stdin is not None
            with process.stdin as stream:
                stream.write(text)  # less than a pipe holds
        except OSError as problem:
            log.warn("mail-failed", to=" ".join(addresses), problem=problem, advice="set MAIL or SENDMAIL")
            return
        log.event("mail-sent", to=" ".join(addresses), subject=subject)

    def look_after(self, now_s: float) -> None:
        """Collect mailers that have ended, and end those that hang."""
        for process, started_s in self._running:
            if process.poll() is None and time.monotonic() - started_s > _MAILER_TIMEOUT_S:
                process.kill()
            elif process.poll():
                log.warn("mail-failed", problem=f"{process.args!r} exited with {process.returncode}")
        self._running = [one for one in self._running if one[0].poll() is None]

    def _command(self, addresses: Sequence[str], subject: str) -> tuple[list[str], str]:
        """The mailer's arguments, and the head that it wants to read."""
        if self._sendmail:
            sender = f"From: {self._sender}\n" if self._sender else ""
            head = f"{sender}Subject: {subject}\nTo: {', '.join(addresses)}\n\n"
            return [self._sendmail, "-t", "-i"], head
        sender_option = ["-r", self._sender] if self._sender else []
        return ([self._mail, "-s", subject, *sender_option, *addresses] if self._mail else []), ""
