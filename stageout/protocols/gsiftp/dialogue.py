"""Parser of globus-url-copy's debug output (``-dbg``): commands and answers of its control connections."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from stageout.core.errors import ErrorClass
from stageout.protocols.gsiftp.replies import ERRNO_WORDS, class_of

_SENT = re.compile(r"debug: sending command to (\S+):$")
_ANSWER = re.compile(r"debug: response from (\S+):$")
_LOGIN = re.compile(r"debug: authenticating with (\S+)$")
_CODE = re.compile(r"(\d{3})([ -])(.*)")
_GLOBUS = re.compile(r"GlobusError: v=\d+ c=([A-Z_]+)")
_ERRNO = re.compile(r"GridFTP-Errno: (\d+)")
_SYSTEM = re.compile(r"System error in \w+: (.+)")
_SIZE = re.compile(r"(?:^|[ ;])Size=(\d+);", re.IGNORECASE)
_DIGEST = re.compile(r"213 ([0-9a-fA-F]{32})$")
_SIDE_STEPS = ("MKD", "SITE", "FEAT", "MLST", "SIZE", "CKSM", "OPTS", "CLIENTINFO")
_BULK = ("debug: data callback", "debug: reading", "debug: writing")


@dataclass
class Answer:
    """One answer of a server. :param command: the command that it answers, "" for the greeting."""

    command: str
    code: int = 0
    text: str = ""
    globus: str = ""
    number: int = 0

    @property
    def kind(self) -> ErrorClass:
        """Return the meaning of a negative answer."""
        return class_of(self.code, self.globus, self.number)


@dataclass
class Dialogue:
    """Record of the dialogue with the servers of one run.

    :param sizes_bytes: URL -> size that its server states. :param digests: URL -> MD5 that it states.
    :param login: a log-in was begun. :param errors: the program's own error lines. :param began: it printed its
        operations.
    :param first_words: its first line, if it did not begin.
    """

    answers: list[Answer] = field(default_factory=list)
    sizes_bytes: dict[str, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    login: bool = False
    began: bool = False
    first_words: str = ""
    errors: list[str] = field(default_factory=list)

    @property
    def refusal(self) -> Answer | None:
        """Return the first negative answer to a relevant command; None without one."""
        told = (answer for answer in self.answers if answer.code >= 400)
        return next((answer for answer in told if not answer.command.startswith(_SIDE_STEPS)), None)

    @property
    def logged_in(self) -> bool:
        """Tell whether a server accepted the log-in."""
        return any(answer.code in (230, 235) for answer in self.answers)


def wanted(line: str) -> bool:
    """Tell whether a line carries information. Lines about single buffers do not."""
    return not line.startswith(_BULK)


def read_dialogue(lines: Iterable[str]) -> Dialogue:
    """Read the program's standard error."""
    reader = _Reader()
    for line in lines:
        reader.take(line.rstrip("\r\n"))
    return reader.dialogue


class _Reader:
    def __init__(self) -> None:
        self.dialogue = Dialogue()
        self._commands: dict[str, str] = {}
        self._sending = ""
        self._url = ""
        self._answer: Answer | None = None

    def take(self, line: str) -> None:
        if not self.dialogue.began and not self.dialogue.first_words:
            self.dialogue.first_words = line.strip()
        sent, answer = _SENT.match(line), _ANSWER.match(line)
        if sent:
            self._sending, self._answer = sent[1], None
        elif answer:
            self._url, self._sending = answer[1], ""
            self._answer = Answer(self._commands.pop(self._url, ""))
            self.dialogue.answers.append(self._answer)
        elif _LOGIN.match(line):
            self.dialogue.login = True
        elif self._sending and line:
            self._commands[self._sending] = line
            self._sending = ""
        elif line.startswith(("error:", "continuing on error:")):
            self._answer = None
            self.dialogue.errors.append(line.partition("error:")[2].strip())
        elif line.startswith("debug:"):
            self.dialogue.began = True
            self._answer = None
        elif self._answer is not None:
            self._content(self._answer, line)
        elif self.dialogue.errors and line.strip():
            self.dialogue.errors.append(line.strip())

    def _content(self, answer: Answer, line: str) -> None:
        code = _CODE.match(line)
        if code and not answer.code:
            answer.code, answer.text = int(code[1]), code[3]
        if found := _GLOBUS.search(line):
            answer.globus = found[1]
        if found := _ERRNO.search(line):
            answer.number = int(found[1])
        elif found := _SYSTEM.search(line):
            answer.number = answer.number or ERRNO_WORDS.get(found[1].strip(), 0)
            answer.text = found[0]
        if found := _SIZE.search(line):
            self.dialogue.sizes_bytes[self._url] = int(found[1])
        elif answer.command.startswith("SIZE") and code and code[1] == "213" and code[3].strip().isdigit():
            self.dialogue.sizes_bytes[self._url] = int(code[3])
        if answer.command.startswith("CKSM") and (found := _DIGEST.match(line)):
            self.dialogue.digests[self._url] = found[1].lower()
