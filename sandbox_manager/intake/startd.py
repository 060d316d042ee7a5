"""The startd's ads of its slots: asked directly, off the event loop, never waited for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sandbox_manager.intake.peers import TICK_S, NotIdentified
from stageout.condor.ads import Expression, OnSkipped, SkippedAttributes, decoded
from stageout.condor.startd import slot_ads
from stageout.core.clock import boot_clock_s
from stageout.core.config import Settings

#: The startd makes these itself, out of the claim and of what the access point told it. No owner can write them.
SLOT_ATTRIBUTES = ("Name", "SlotID", "DSlotId", "RemoteUser", "RemoteScheddName", "JobId", "AccountingGroup")
#: Of the job, and so its owner's to write. The startd shows them because the fragment adds them to STARTD_JOB_ATTRS.
JOB_ATTRIBUTES = (
    "GlobalJobId",
    "NumShadowStarts",
    "StageOutGuard",
    "StageOutAsync",
    "OutputDestination",
    "CheckpointDestination",
    "EncryptExecuteDirectory",
    "JobPrio",
    "StageOutAgentKey",
    "StageOutSynchronousCode",
    "StageOutFallback",
)
#: Attributes that a hand-off may lack without a refusal. The value replaces an attribute that cannot be decoded.
_OPTIONAL = {"StageOutFallback": False}
SlotAd = Mapping[str, Any]
_CACHED_S = 1.0
_THREADS = 2


def ask_startd(settings: Settings) -> Callable[[], Sequence[SlotAd]]:
    """Make a function that asks the startd of this node for its slots (blocking, some ms)."""
    projection = [*SLOT_ATTRIBUTES, *JOB_ATTRIBUTES]
    skipped = SkippedAttributes()

    def ask() -> list[SlotAd]:
        return readable_slots(slot_ads(settings, projection), projection, skipped.add)

    return ask


def ask_about_machine(settings: Settings) -> Callable[[str], object]:
    """Make a function that evaluates an expression in the machine's ad, as the startd has it (blocking, some ms)."""

    def ask(expression: str) -> object:
        return value_in_machine(slot_ads(settings, []), expression, settings.condor("STARTD_JOB_ATTRS"))

    return ask


def value_in_machine(slots: Iterable[Any], expression: str, job_attributes: str) -> object:
    """Evaluate an expression in the ad of the machine's first slot; None without a slot.

    Attributes that jobs can write into that ad count for nothing.

    :param slots: changed here. :param job_attributes: STARTD_JOB_ATTRS: names with spaces or commas between.
    """
    whole = [ad for ad in slots if not ad.get("DynamicSlot")]
    if not whole:
        return None
    machine = min(whole, key=lambda ad: int(ad.get("SlotID", 0)))
    of_jobs = {name.lower() for name in (*JOB_ATTRIBUTES, *job_attributes.replace(",", " ").split())}
    for name in [name for name in machine if name.lower() in of_jobs]:
        del machine[name]
    return Expression(expression).value_in(machine)


def readable_slots(ads: Iterable[Mapping[str, Any]], projection: Sequence[str], on_skipped: OnSkipped) -> list[SlotAd]:
    """Return the slots' attributes. A slot whose job has an attribute that cannot be decoded is left out.

    Without that attribute a hand-off of the job might be accepted that must be refused. The fallback is no such
    attribute.
    """
    faults: list[tuple[str, str]] = []
    found: list[SlotAd] = []
    for ad in ads:
        before = len(faults)
        slot = decoded(ad, projection, lambda *fault: faults.append(fault))
        missing = {name for _, name in faults[before:]}
        if missing <= _OPTIONAL.keys():
            found.append({**slot, **{name: _OPTIONAL[name] for name in missing}})
    for fault in faults:
        on_skipped(*fault)
    return found


def startd_timeout_s(settings: Settings) -> float:
    """Return the seconds until the startd counts as silent.

    With LVM it runs vgs several times at each end of a job, and answers nothing meanwhile: 0.25 s were too few, 1.5 s
    not. The plugin hears the reason before it gives up.
    """
    return 0.75 * settings.number("STAGEOUT_HANDOFF_TIMEOUT")


class SlotTable:
    """The startd's slots, remembered for a second.

    :param ask: blocking question, see :func:`ask_startd`.
    :param timeout_s: s until the startd counts as silent, see :func:`startd_timeout_s`.
    """

    def __init__(self, ask: Callable[[], Sequence[SlotAd]], timeout_s: float) -> None:
        self._ask = ask
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="startd")
        self._slots: dict[str, SlotAd] = {}
        self._asked_at_s = float("-inf")
        self._running: list[tuple[float, asyncio.Future[Sequence[SlotAd]]]] = []

    async def slot(self, name: str, since_s: float) -> SlotAd | None:
        """Return the ad of the slot ``slot1_1``, None when the startd has none of that name.

        :param since_s: s since boot when the slot's starter started: an older answer is about an earlier job.
        :raises NotIdentified: the startd did not answer in time.
        """
        oldest_s = max(since_s + TICK_S, boot_clock_s() - _CACHED_S)
        if self._asked_at_s >= oldest_s and name in self._slots:
            return self._slots[name]
        try:
            ads = await asyncio.wait_for(asyncio.shield(self._question(oldest_s)), self._timeout_s)
        except asyncio.TimeoutError:
            raise NotIdentified(
                f"the startd did not answer within {self._timeout_s:g} s (three quarters of STAGEOUT_HANDOFF_TIMEOUT)",
                "StartdSilent",
            ) from None
        except Exception as problem:
            why = f"the startd cannot be asked: {problem or type(problem).__name__}"
            raise NotIdentified(why, "StartdSilent") from problem
        return next((ad for ad in ads if _short(ad) == name), None)

    def close(self) -> None:
        """Forget the threads; one that still waits for the startd ends by itself."""
        self._threads.shutdown(wait=False)

    def _question(self, oldest_s: float) -> asyncio.Future[Sequence[SlotAd]]:
        """Return a question that is on its way and recent enough, or else a new one."""
        self._running = [(at, future) for at, future in self._running if not future.done()]
        for at, future in self._running:
            if at >= oldest_s:
                return future
        if len(self._running) >= _THREADS:
            raise NotIdentified("the startd has not answered earlier questions yet", "StartdSilent")
        asked_at_s = boot_clock_s()
        # A task is never done when it is made. The executor's future may be (Python 3.14): the rest of a burst, which
        # gets its turn before the callback, would ask again.
        task = asyncio.get_running_loop().create_task(self._answer())
        task.add_done_callback(lambda done: self._remember(asked_at_s, done))
        self._running.append((asked_at_s, task))
        return task

    async def _answer(self) -> Sequence[SlotAd]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._ask)

    def _remember(self, asked_at_s: float, done: asyncio.Future[Sequence[SlotAd]]) -> None:
        if not done.cancelled() and done.exception() is None and asked_at_s > self._asked_at_s:
            self._slots = {_short(ad): ad for ad in done.result()}
            self._asked_at_s = asked_at_s


def _short(ad: SlotAd) -> str:
    return str(ad.get("Name", "")).split("@", 1)[0]
