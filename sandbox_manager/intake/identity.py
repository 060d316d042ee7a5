"""The owner of offered output: the peer's starter, its slot, and what the startd says about that slot's job.

Nothing that a job can write (``.job.ad``, ``.machine.ad``, arguments, environment) is believed.
"""

from __future__ import annotations

import os
import pwd
import re
import time
from collections.abc import Callable

from sandbox_manager.intake import peers
from sandbox_manager.intake.peers import Families, Lineage, NotIdentified, Peer
from sandbox_manager.intake.startd import JOB_ATTRIBUTES, SlotAd, SlotTable
from stageout.model.run import RunFacts
from stageout.model.sandbox import SlotKey
from stageout.wire.custody import Run, is_name_of

_ACCOUNT_S = 10.0
#: Job owners choose the name of their group, and each report repeats it.
_GROUP = re.compile(r"[\w.@+-]{1,200}", re.A)
__all__ = ["JOB_ATTRIBUTES", "Identity", "NotIdentified"]


class Identity:
    """The identification of the run for which a peer works.

    :param slots: the startd's slots. :param local_name: ``-local-name`` of the startd that this manager serves.
    :param master: pid of the condor_master above this manager, asked anew for each peer.
    """

    def __init__(self, slots: SlotTable, local_name: str = "", master: Callable[[], int] = os.getppid) -> None:
        self._slots = slots
        self._local_name = local_name
        self._master = master
        self._own_uid = os.geteuid()
        self._families = Families()
        self._accounts = Accounts()

    async def identify(self, peer: Peer) -> RunFacts:
        """Find the facts about the peer's run.

        :raises NotIdentified: with the reason for a synchronous upload.
        """
        self._check_user(peer)
        master = self._master()
        found = peers.lineage(self._families.of(peer.pid, master), master, self._own_uid)
        if found.local_name != self._local_name:
            raise NotIdentified(
                f"the job runs below the startd with local name {found.local_name!r}, "
                f"this sandbox manager serves the one with {self._local_name!r}"
            )
        slot = await self._slots.slot(found.slot, found.starter.started_s)
        if slot is None:
            raise NotIdentified(f"the startd has no slot {found.slot} (any more)")
        self._check_unchanged(peer, found)
        return self._facts(peer, slot)

    def _check_user(self, peer: Peer) -> None:
        if self._own_uid == 0 and peer.uid == 0:
            raise NotIdentified("a job does not run as root", "SlotUser")
        if self._own_uid not in (0, peer.uid):
            raise NotIdentified(
                f"the sandbox manager runs as {self._accounts.name(self._own_uid)}, the job as "
                f"{self._accounts.name(peer.uid)}: it could not read the output; start it as root, or as the user of "
                "all jobs",
                "SlotUser",
            )

    def _check_unchanged(self, peer: Peer, found: Lineage) -> None:
        """Check that the starter, the peer and its pid still live: the startd's answer is about this starter only."""
        again = peers.read_kinship(found.starter.pid)
        if again.started_ticks != found.starter.started_ticks or not peer.is_alive():
            raise NotIdentified("the plugin or its condor_starter ended during the hand-off")

    def _facts(self, peer: Peer, slot: SlotAd) -> RunFacts:
        run, name = run_of(slot), _text(slot, "Name")
        user = self._accounts.name(peer.uid)
        return RunFacts(
            run=run,
            user=user,
            uid=peer.uid,
            gid=peer.gid,
            slot=SlotKey(name.partition("@")[2], _count(slot, "SlotID"), _count(slot, "DSlotId")),
            slot_name=name,
            guard=slot.get("StageOutGuard") is True,
            async_wish=slot.get("StageOutAsync") is not False,
            output_destination=_text(slot, "OutputDestination"),
            checkpoint_destination=_text(slot, "CheckpointDestination"),
            encrypted=slot.get("EncryptExecuteDirectory") is True,
            priority=_count(slot, "JobPrio"),
            shared_uid=self._own_uid != 0,
            agent_key=_text(slot, "StageOutAgentKey"),
            left_out=_text(slot, "StageOutSynchronousCode"),
            foreign_account=self._own_uid == 0 and user != run.owner.partition("@")[0],
            group=accounting_group(_text(slot, "AccountingGroup"), run.owner.partition("@")[0]),
            fallback=str(slot.get("StageOutFallback", "")),
        )


def run_of(slot: SlotAd) -> Run:
    """Return the run in a slot. Its job is the one that the startd names, whatever GlobalJobId its owner has written.

    :raises NotIdentified: the startd does not name a job, or GlobalJobId is that of another one.
    """
    name, schedd, job_id = (_text(slot, attribute) for attribute in ("GlobalJobId", "RemoteScheddName", "JobId"))
    run = Run(name, _count(slot, "NumShadowStarts"), _text(slot, "RemoteUser"))
    if not run.owner or not job_id or not name or run.number < 1:
        raise NotIdentified(
            f"the startd does not say which run {slot.get('Name')} has; add GlobalJobId and NumShadowStarts to "
            "STARTD_JOB_ATTRS (20-stageout-ep.conf) and restart it",
            "StartdSilent",
        )
    if not schedd:
        raise NotIdentified(
            f"the startd does not name the schedd of {slot.get('Name')} (RemoteScheddName), as after condor_now",
            "StartdSilent",
        )
    if not is_name_of(name, schedd, job_id):
        raise NotIdentified(
            f"the job is {job_id} of {schedd}, and its GlobalJobId says {name!r:.200}: somebody has changed it; "
            "remove the job and submit it again",
            "Identity",
        )
    return run


def accounting_group(submitter: str, owner: str) -> str:
    """Return the group in a slot's ``GROUP.USER@DOMAIN``; "" where the name has none that is valid.

    :param owner: of the job, without a domain; usually the user in that name, which may contain dots.
    """
    name = submitter.rpartition("@")[0] or submitter
    own = f".{owner}"
    group = name[: -len(own)] if owner and name.endswith(own) else name.rpartition(".")[0]
    return group if _GROUP.fullmatch(group) else ""


def _text(slot: SlotAd, name: str) -> str:
    value = slot.get(name)
    return value if isinstance(value, str) else ""


def _count(slot: SlotAd, name: str) -> int:
    value = slot.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


class Accounts:
    """Names of accounts, remembered for some seconds: a look may go over the network."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[float, str]] = {}

    def name(self, uid: int) -> str:
        """Return the account's name, ``uid 17`` where there is none."""
        now_s = time.monotonic()
        until_s, name = self._names.get(uid, (0.0, ""))
        if now_s >= until_s:
            try:
                name = pwd.getpwuid(uid).pw_name
            except KeyError:
                name = f"uid {uid}"
            self._names[uid] = (now_s + _ACCOUNT_S, name)
        return name
