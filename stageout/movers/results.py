"""Convert a plugin's result ads and exit status to one answer per file. Pure.

The exit status decides, as in HTCondor. But a file counts as delivered if its ad has the destination's confirmation,
even when another file of the same call failed. A file without an ad has failed.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

from stageout.core.classad_parser import parse_ads, parse_old
from stageout.core.classads import ClassAd, ClassAdSyntaxError
from stageout.core.errors import OF_NODE, ErrorClass, classify_foreign
from stageout.wire.deposits import BadReceipt, Receipt, read_receipt

PLUGINS_WORD = "plugin's word"
CUSTODY = "custody"
"""What stands for a file's verification while only a custodian has it."""
_MESSAGE_CHARS = 500
_ROUTE_CHARS = 300
#: Numbers above this are neither times nor durations.
_MOST_COUNT = 1 << 40


@dataclass(frozen=True)
class Failure:
    """A failed attempt of one file.

    :param message: the plugin's own message, for the owner. :param retry_after_s: delay that the server asked for.
    :param at_once: a retry without delay is reasonable.
    :param of_node: the node or its plugin failed, which the class alone does not show.
    """

    kind: ErrorClass
    message: str
    retry_after_s: float = 0.0
    at_once: bool = False
    of_node: bool = False

    @property
    def blames_destination(self) -> bool:
        """Tell whether a plugin ran and its failure is the server's, or the server was unreachable."""
        return not self.of_node and self.kind not in OF_NODE


@dataclass(frozen=True)
class SentFile:
    """One file of a batch.

    :param source: path in the spool; for a download the path of the new file, on the filesystem of the batch's
        directory. :param name: the job's base name of the file; in a plugin's answer: the local file's, unique in the
        batch. :param size_bytes: bytes to send.
    :param deposit: allows a custodian to accept it; None: no custodian.
    """

    source: Path
    url: str
    name: str
    size_bytes: int
    deposit: Receipt | None = None


@dataclass(frozen=True)
class Ending:
    """The end of a plugin's process.

    :param status: exit status, negative for a signal, None when it could not be started.
    :param lifetime_s: its time limit, if that stopped it; else 0. :param text: why it could not be started.
    """

    status: int | None
    lifetime_s: float = 0.0
    text: str = ""


@dataclass(frozen=True)
class TransferFacts:
    """Figures of one transfer, as its plugin reports them; 0 and "" for unreported ones.

    Each is a column of the ledger and a field of :class:`stageout.wire.custody.FileReport`, with the same name.

    :param began_at: wall clock time of the first byte, seconds. :param ended_at: wall clock time of the last byte,
        seconds.
    :param transfer_ms: duration of the data transfer. :param streams: number of connections.
    :param route: routers of the overlay, with the bytes that each has carried.
    """

    began_at: int = 0
    ended_at: int = 0
    transfer_ms: int = 0
    streams: int = 0
    route: str = ""


NO_FACTS = TransferFacts()


@dataclass(frozen=True)
class Delivered:
    """The destination has the file.

    :param verified: its confirmation, or :data:`PLUGINS_WORD`. :param digest: ``name:value`` pairs, or "".
    """

    verified: str
    digest: str = ""
    facts: TransferFacts = NO_FACTS


@dataclass(frozen=True)
class InCustody:
    """A custodian of the overlay has the file, and its delivery is not certain yet.

    :param receipt: for queries to the custodian (:mod:`stageout.wire.deposits`).
    """

    receipt: str


Answer = Union[Delivered, InCustody, Failure]


def read_answers(sent: Sequence[SentFile], output: str, ending: Ending) -> list[Answer]:
    """Parse one answer per file of a call with protocol 2 or 4, in the order of ``sent``.

    :param output: content of the out-file.
    """
    try:
        ads = _matched(sent, _good_ads(output))
        return [_answer(item, ad, ending) if ad is not None else _no_ad(ending) for item, ad in zip(sent, ads)]
    except Exception as problem:
        return [_unreadable(problem)] * len(sent)


Gone = Union[Delivered, InCustody]
"""Answers after which a file need not be sent again."""


def only_delivered(answers: Sequence[Answer]) -> dict[int, Gone]:
    """Return the answers that need no further action, by their index."""
    return {index: answer for index, answer in enumerate(answers) if isinstance(answer, (Delivered, InCustody))}


def read_single(item: SentFile, stdout: str, ending: Ending) -> Answer:
    """Parse the answer of a call with protocol 1, whose stdout is one ad in the old syntax, or nothing."""
    try:
        return _single(item, parse_old(stdout), ending)
    except Exception as problem:
        return _unreadable(problem)


def _single(item: SentFile, ad: ClassAd, ending: Ending) -> Answer:
    if ending.status != 0:
        return _failure(ad, ending) if "TransferError" in ad else _no_ad(ending)
    if ad.get("TransferSuccess") is False:
        return _failure(ad, ending)
    told = _told_bytes(ad)
    if told and item.size_bytes not in told:
        return _size_mismatch(item, told)
    return Delivered(PLUGINS_WORD, facts=_facts(ad, ClassAd()))


def _good_ads(output: str) -> list[ClassAd]:
    ads: list[ClassAd] = []
    with contextlib.suppress(ClassAdSyntaxError):  # ads before the damaged one count, as in HTCondor
        ads.extend(ad for ad in parse_ads(output) if ad)
    return ads


def _matched(sent: Sequence[SentFile], ads: Sequence[ClassAd]) -> list[ClassAd | None]:
    by_name = {item.name: index for index, item in enumerate(sent)}
    bases = Counter(_base(item.name) for item in sent)
    by_base = {_base(item.name): index for index, item in enumerate(sent) if bases[_base(item.name)] == 1}
    by_url = {item.url: index for index, item in enumerate(sent)}
    found: list[ClassAd | None] = [None] * len(sent)
    nameless = []
    for ad in ads:
        name, url = ad.text("TransferFileName"), ad.text("TransferUrl")
        index = by_name.get(name, by_base.get(_base(name), by_url.get(url)))
        if index is not None:
            found[index] = ad
        elif not name and not url:
            nameless.append(ad)
    for index in range(len(sent)):
        if found[index] is None and nameless:
            found[index] = nameless.pop(0)
    return found


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def _answer(item: SentFile, ad: ClassAd, ending: Ending) -> Answer:
    if ad.get("TransferSuccess") is not True:
        return _failure(ad, ending)
    developer = _sub_ad(ad, "DeveloperData")
    custody = developer.text("StageOutCustody")
    if custody:
        return _custody(item, custody, _told_bytes(ad))
    verified, told = _one_line(developer.text("StageOutVerified")), _told_bytes(ad)
    if verified:
        if told and item.size_bytes not in told:
            return _size_mismatch(item, told)
        return Delivered(verified, _one_line(developer.text("StageOutDigests")), _facts(ad, developer))
    if ending.status != 0:
        text = f"the plugin calls this file delivered, but {_end_text(ending)}; the file is sent again by itself"
        return Failure(ErrorClass.UNKNOWN, text, at_once=True, of_node=True)
    if not told:
        return _unproven("the plugin calls this file delivered, but not how many bytes it sent")
    if item.size_bytes not in told:
        return _size_mismatch(item, told)
    return Delivered(PLUGINS_WORD, facts=_facts(ad, developer))


def _custody(item: SentFile, text: str, told: Sequence[int]) -> Answer:
    try:
        receipt = read_receipt(text)
    except BadReceipt as problem:
        return _unproven(f"the plugin's receipt of a custodian cannot be read: {problem}")
    if item.deposit is None:
        return _unproven(f"the plugin gave the file to {receipt.custodian}, as nobody had asked")
    if not receipt.is_of(item.deposit):
        text = f"the plugin's receipt, {receipt}, is of something else than it was given, {item.deposit}"
        return _unproven(f"{text}: is this the plugin that came with the manager?")
    return InCustody(str(receipt)) if item.size_bytes in told else _size_mismatch(item, told or [0])


def _unproven(message: str) -> Failure:
    """Return the failure of a file without confirmation from the plugin. The destination may have it."""
    return Failure(ErrorClass.NOT_VERIFIED, message, of_node=True)


def _facts(ad: ClassAd, developer: ClassAd) -> TransferFacts:
    """Return the figures of a transfer. Numbers out of range count as not reported."""
    began_at, ended_at = (_count(ad, name) for name in ("TransferStartTime", "TransferEndTime"))
    seconds = _seconds(developer.get("StageOutSeconds")) or _seconds(ad.get("ConnectionTimeSeconds"))
    seconds = seconds or max(0, ended_at - began_at)
    route = _one_line(developer.text("Routes"))[:_ROUTE_CHARS]
    return TransferFacts(began_at, ended_at, round(1000 * seconds), _count(developer, "Streams"), route)


def _count(ad: ClassAd, name: str) -> int:
    value = ad.get(name)
    return value if type(value) is int and 0 <= value <= _MOST_COUNT else 0


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0.0
    return float(value) if 0 <= value <= _MOST_COUNT else 0.0


def _told_bytes(ad: ClassAd) -> list[int]:
    return [ad.integer(name) for name in ("TransferFileBytes", "TransferTotalBytes") if type(ad.get(name)) is int]


def _size_mismatch(item: SentFile, told: Sequence[int]) -> Failure:
    text = f"the file has {item.size_bytes} bytes, the plugin reports {told[0]}"
    return Failure(ErrorClass.SIZE_MISMATCH, text)


def _failure(ad: ClassAd, ending: Ending) -> Failure:
    errors = ad.get("TransferErrorData")
    newest = errors[-1] if isinstance(errors, list) and errors and isinstance(errors[-1], ClassAd) else ClassAd()
    retryable = newest.get("Retryable") if type(newest.get("Retryable")) is int else None
    own = _sub_ad(ad, "DeveloperData").get("StageOutErrorCode")
    if type(own) is int:
        kind = ErrorClass.from_code(own)
    else:
        kind = classify_foreign(newest.text("ErrorType") or None, newest.text("FailureType") or None, retryable)
    message = ad.text("TransferError") or newest.text("ErrorString")
    message = message or f"the plugin gave no reason; {_end_text(ending)}"
    return Failure(kind, _one_line(message), float(min(max(0, retryable or 0), _MOST_COUNT)))


def _unreadable(problem: Exception) -> Failure:
    """Return the failure for results that cannot be parsed. It counts as an attempt, so that retries end."""
    text = f"the plugin's result cannot be read: {problem!r}"
    return Failure(ErrorClass.PLUGIN_BROKEN, _one_line(text))


def _no_ad(ending: Ending) -> Failure:
    kind = ErrorClass.DEADLINE if ending.lifetime_s else ErrorClass.PLUGIN_BROKEN
    return Failure(kind, f"the plugin wrote no result for this file; {_end_text(ending)}")


def _end_text(ending: Ending) -> str:
    if ending.status is None:
        return f"it could not be started: {ending.text}"
    if ending.lifetime_s:
        return f"it ran past its limit of {ending.lifetime_s:.0f} s"
    if ending.status < 0:
        return f"it was killed by signal {-ending.status}"
    return f"it ended with status {ending.status}"


def _sub_ad(ad: ClassAd, name: str) -> ClassAd:
    value: Any = ad.get(name)
    return value if isinstance(value, ClassAd) else ClassAd()


def _one_line(text: str) -> str:
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())[:_MESSAGE_CHARS]
