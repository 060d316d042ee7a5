"""Records of the AP's epoch history: which bytes are one record, and which run it is about. Pure.

HTCondor writes strings raw: it escapes the quote and nothing else. A string may therefore hold line ends, and the
quoted name of an attribute may hold quotes as well. The texts of a job's own plugin are such strings, so text that
looks like a record of another job may stand inside a record. Only a reader that knows strings finds its end.

The syntax is ambiguous all the same: ``\\"`` is an escaped quote, or a backslash and the end of the string. A record
must therefore agree with its banner, and the caller checks more (:mod:`schedd_agent.receipts`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

#: HTCondor's own rule: a quote behind a backslash ends the string only at the end of a line.
STRING = rb'"[^"\\]*(?:\\(?:"(?!\n)|(?!"))[^"\\]*)*(?:\\(?="\n))?"'
_NAME = rb"[A-Za-z_][\w.]* = "
_PLAIN = rb"[^\"'\\\n]*"
#: Between a string and what follows it stands one of these. The content of a string seldom begins with one: a reader
#: that takes the inside of strings for their outside notices it here.
_BEHIND = rb"(?=[ ;,)\]}\n])"
_QUOTED_NAME = rb"'[^'\"\\\n]*'"
_SIMPLE_LINES = re.compile(
    b"(?:" + _NAME + _PLAIN + rb'(?:"[^"\\\n]*"' + _BEHIND + _PLAIN + b")*\n)+",
)
#: The first attributes of records about checkpoints and common files are a plugin's texts, and no run is named before
#: them. So these must be simple.
_LINE_BEGUN = (
    b"(?!(?:Checkpoint|Common)Plugin)"
    + _NAME + _PLAIN + b"(?:(?:" + STRING + _BEHIND + b"|" + _QUOTED_NAME + b")" + _PLAIN + b")*"
)  # fmt: skip
_LINE = re.compile(_LINE_BEGUN + b"\n")
#: The beginning of a line or banner whose end is not there yet.
_BEGUN = re.compile(
    b"(?:[A-Za-z_][\\w.]*(?: =?)?|[*][^\n]*|"
    + _LINE_BEGUN + rb"""(?:"[^"\\]*(?:\\(?:"(?!\n)|(?!"))[^"\\]*)*\\?"?|'[^'"\\\n]*)?)?\Z"""
)  # fmt: skip
_BANNER = re.compile(
    rb'\*\*\* (\w+) ClusterId=(\d{1,18}) ProcId=(-?\d{1,18}) RunInstanceId=(\d{1,18}) Owner="([^"\n]*)"[^\n]*\n'
)
_BANNER_LINE = re.compile(rb"^" + _BANNER.pattern, re.M)
_FACT = re.compile(
    rb"^(ClusterId|ProcId|Owner|EpochAdType|RunInstanceId|NumShadowStarts|GlobalJobId) = ([^\n]*)$", re.M | re.I
)


class Epoch(NamedTuple):
    """One record.

    :param kind: OUTPUT, INPUT, EPOCH, ... :param run: NumShadowStarts. :param job: GlobalJobId; "" from 23.x, which
    does not write it. :param text: without the banner. :param end: where the next record begins.
    """

    kind: str
    cluster: int
    proc: int
    run: int
    job: str
    owner: str
    text: bytes
    end: int


class Banner(NamedTuple):
    """The last line of a record. :param ids: cluster, process and run. :param end: where the next line begins."""

    kind: str
    ids: tuple[int, int, int]
    end: int


class NotARecord(Exception):
    """The text is no record, or it disagrees with its banner.

    :param begun: its first lines. They name its run, because plugins' texts come behind them.
    """

    def __init__(self, begun: bytes) -> None:
        facts: dict[bytes, bytes] = {}
        for name, value in _FACT.findall(begun):
            facts.setdefault(name.lower(), value.strip(b'"'))
        self._kind = facts.get(b"epochadtype", b"").decode("utf-8", "replace")
        self._cluster = facts.get(b"clusterid", b"")
        self._run = facts.get(b"numshadowstarts", b"")
        self.job = facts.get(b"globaljobid", b"").decode("utf-8", "replace")
        super().__init__(self.job)

    @property
    def names_its_run(self) -> bool:
        """True when the first lines say of which run the record is."""
        return bool(self._cluster and self._run)

    def may_end_with(self, banner: Banner) -> bool:
        """True when the first lines and the banner say the same, as far as they say anything."""
        cluster, _, run = banner.ids
        return (
            self._kind in ("", banner.kind)
            and self._cluster in (b"", b"%d" % cluster)
            and self._run in (b"", b"%d" % run)
        )


def next_record(data: bytes, start: int) -> Epoch | None:
    """Return the record that begins at ``start``; None while its end is not there yet.

    :raises NotARecord: nothing up to its own banner can be believed.
    """
    at = start
    while True:
        simple = _SIMPLE_LINES.match(data, at)
        at = simple.end() if simple else at
        banner = _BANNER.match(data, at)
        if banner:
            return _agreeing(data, start, banner)
        line = _LINE.match(data, at)
        if line:
            at = line.end()
        elif _BEGUN.match(data, at):
            return None
        else:
            raise NotARecord(data[start:at])


def banners(data: bytes) -> Iterator[Banner]:
    """All that looks like a banner, in texts, too."""
    for found in _BANNER_LINE.finditer(data):
        kind, cluster, proc, instance, _ = found.groups()
        yield Banner(kind.decode(), (int(cluster), int(proc), int(instance) + 1), found.end())


def _agreeing(data: bytes, start: int, banner: re.Match[bytes]) -> Epoch:
    """The record before the banner, if what both say agrees and nothing is said twice."""
    text = data[start : banner.start()]
    said = {name.lower(): value for name, value in _FACT.findall(text)}
    kind, cluster, proc, instance, owner = banner.groups()
    job = said.get(b"globaljobid", b'""')
    wanted = {
        b"clusterid": cluster, b"procid": proc, b"owner": b'"%s"' % owner, b"epochadtype": b'"%s"' % kind,
        b"runinstanceid": instance, b"numshadowstarts": b"%d" % (int(instance) + 1), b"globaljobid": job,
    }  # fmt: skip
    told_twice = len(said) < len(_FACT.findall(text))
    named = job == b'""' or re.fullmatch(rb'"[^"]*#%s\.%s#\d+"' % (cluster, proc), job)
    if told_twice or not named or any(value != wanted[name] for name, value in said.items()):
        raise NotARecord(text)
    return Epoch(
        kind.decode(), int(cluster), int(proc), int(instance) + 1, _text(job), _text(owner), text, banner.end()
    )  # fmt: skip


def _text(value: bytes) -> str:
    return value.strip(b'"').decode("utf-8", "replace")
