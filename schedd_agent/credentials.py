"""Renewed credentials of jobs in this queue, only for the managers that hold their output."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from schedd_agent.credential_reader import CredentialReader, NoCredential
from stageout.core import log
from stageout.core.signing import BadSignature, check
from stageout.model.job import Status
from stageout.model.run import RunRecord
from stageout.wire.custody import JobKey, is_job_name
from stageout.wire.renewal import KIND, Answer, Ask, BadRenewal, Request

_READY = (Status.COMPLETED, Status.HELD)


def services_of(needed: str) -> frozenset[str]:
    """Return the file names of OAuthServicesNeeded: ``service*handle`` is ``service_handle.use``."""
    return frozenset(item.replace("*", "_") for item in needed.replace(",", " ").split())


class CredentialOwner(NamedTuple):
    """The job to which a credential belongs, as the queue has it.

    :param user: Owner. :param run: NumShadowStarts. :param proxy: x509userproxy, "" for none.
    :param services: requested services (OAuthServicesNeeded), by file name.
    """

    job: JobKey
    user: str
    status: int
    run: int
    proxy: str
    services: frozenset[str]


@dataclass(frozen=True)
class CredentialIssuer:
    """Issuer of credentials. Calls block, and run in the thread of the agent's passes.

    :param agent: name of the agent and its schedd. :param certificate: SHA-256 of the server's certificate.
    :param record: finds the OUTPUT record of a run.
    :param owners: finds the jobs with these GlobalJobIds in the queue.
    """

    agent: str
    certificate: str
    record: Callable[[JobKey, int], RunRecord | None]
    owners: Callable[[Collection[str]], Mapping[str, CredentialOwner]]
    reader: CredentialReader

    def answer(self, request: Request) -> list[Answer]:
        """Return one answer per credential asked for. :raises BadRenewal: the request is for another agent."""
        if request.agent != self.agent or request.certificate != self.certificate:
            raise BadRenewal("the request was made for another agent")
        owners = self.owners({item.job for item in request.asks if is_job_name(item.job)})
        return [self._one(request, item, owners) for item in request.asks]

    def _one(self, request: Request, ask: Ask, owners: Mapping[str, CredentialOwner]) -> Answer:
        try:
            owner = owners.get(ask.job)
            if owner is None:
                raise NoCredential("the access point has no receipt of this manager for this run")
            self._check_receipt(request, ask, owner)
            if owner.run != ask.run_number or owner.status not in _READY:
                raise NoCredential("the job is not in the queue with this run completed")
            if ask.kind == "token" and ask.service not in owner.services:
                raise NoCredential(f"the job did not ask for tokens of {ask.service} (OAuthServicesNeeded)")
            content = self.reader.read(ask.kind, owner.user, ask.service if ask.kind == "token" else owner.proxy)
        except NoCredential as no:
            return Answer(None, str(no))
        if sha256(content).hexdigest() == ask.digest:
            return Answer(None, "there is no newer one on the access point")
        log.event("credential-sent", job=ask.job, run=ask.run_number, manager=request.manager, kind=ask.kind,
                  service=ask.service)  # fmt: skip
        return Answer(content)

    def _check_receipt(self, request: Request, ask: Ask, owner: CredentialOwner) -> None:
        """Check that the access point's record of the run names the manager's key for this hand-off."""
        record = self.record(owner.job, ask.run_number)
        tickets = record.tickets if record else ()
        ticket = next((item for item in tickets if item.name == ask.ticket), None)
        if ticket is None or ticket.manager_name != request.manager or not ticket.key:
            raise NoCredential("the access point has no receipt of this manager for this run")
        try:
            check(KIND, request.payload, request.signature, ticket.key)
        except BadSignature as problem:
            log.warn("credential-refused", job=ask.job, manager=request.manager, problem=problem)
            raise NoCredential("the request is not signed with the key of the run's receipt") from None
