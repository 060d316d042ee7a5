"""Fresh credentials of jobs in this queue, for the managers that hold their output and for nobody else."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from schedd_agent.model import Record, Status
from schedd_agent.reader import NoCredential, Reader
from stageout.core import log
from stageout.core.signing import BadSignature, check
from stageout.wire.renewal import KIND, Answer, Ask, BadRenewal, Request

_ID = re.compile(r"[^#]+#\d{1,9}\.\d{1,9}#\d+")
_READY = (Status.COMPLETED, Status.HELD)


def services_of(needed: str) -> frozenset[str]:
    """OAuthServicesNeeded as names of files: ``service*handle`` is ``service_handle.use``."""
    return frozenset(item.replace("*", "_") for item in needed.replace(",", " ").split())


class Owner(NamedTuple):
    """The queue's facts about a job.

    :param run: NumShadowStarts. :param proxy: its x509userproxy, "" for none.
    :param services: that it asked for (OAuthServicesNeeded), as their files are called.
    """

    user: str
    status: int
    run: int
    proxy: str
    services: frozenset[str]


@dataclass(frozen=True)
class Keeper:
    """Answers requests. Blocking; in the thread of the agent's passes.

    :param agent: name of the agent and its schedd. :param certificate: SHA-256 of the port's certificate.
    :param record: GlobalJobId, run and owner to the OUTPUT record of the run, None where there is none.
    :param owners: facts about the jobs with these GlobalJobIds that are in the queue.
    """

    agent: str
    certificate: str
    record: Callable[[str, int, str], Record | None]
    owners: Callable[[Collection[str]], Mapping[str, Owner]]
    reader: Reader

    def answer(self, request: Request) -> list[Answer]:
        """One answer per ask. :raises BadRenewal: the request was made for somebody else."""
        if request.agent != self.agent or request.certificate != self.certificate:
            raise BadRenewal("the request was made for another agent")
        owners = self.owners({item.job for item in request.asks if _ID.fullmatch(item.job)})
        return [self._one(request, item, owners) for item in request.asks]

    def _one(self, request: Request, ask: Ask, owners: Mapping[str, Owner]) -> Answer:
        try:
            owner = owners.get(ask.job)
            self._check_receipt(request, ask, owner.user if owner else "")
            if owner is None or owner.run != ask.run_number or owner.status not in _READY:
                raise NoCredential("the job is not in the queue with this run completed")
            if ask.kind == "token" and ask.service not in owner.services:
                raise NoCredential(f"the job did not ask for tokens of {ask.service} (OAuthServicesNeeded)")
            content = self.reader.read(ask.kind, owner.user, ask.service if ask.kind == "token" else owner.proxy)
        except NoCredential as no:
            return Answer(None, str(no))
        if sha256(content).hexdigest() == ask.digest:
            return Answer(None, "there is no newer one on the access point")
        log.event("credential-given", job=ask.job, run=ask.run_number, manager=request.manager, kind=ask.kind,
                  service=ask.service)  # fmt: skip
        return Answer(content)

    def _check_receipt(self, request: Request, ask: Ask, owner: str) -> None:
        """The manager must hold this very hand-off: the AP's own record of the run names its key."""
        if not _ID.fullmatch(ask.job):
            raise NoCredential("this is no job")
        record = self.record(ask.job, ask.run_number, owner)
        tickets = record.tickets if record else ()
        ticket = next((item for item in tickets if item.name == ask.ticket), None)
        if ticket is None or ticket.manager_name != request.manager or not ticket.key:
            raise NoCredential("the access point has no receipt of this manager for this run")
        try:
            check(KIND, request.payload, request.signature, ticket.key)
        except BadSignature as problem:
            log.warn("credential-refused", job=ask.job, manager=request.manager, problem=problem)
            raise NoCredential("the request is not signed with the key of the run's receipt") from None
