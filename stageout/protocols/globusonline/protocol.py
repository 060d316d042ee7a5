"""The protocol class of ``plugins/globusonline_plugin``: choose the method for each file of a call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.api import BatchProtocol, Context, Transfer
from stageout.plugin.text import one_line
from stageout.protocols.globusonline.address import Address, address_of
from stageout.protocols.globusonline.direct import Direct, Servers
from stageout.protocols.globusonline.journal import Journal
from stageout.protocols.globusonline.personal import PersonalEndpoint
from stageout.protocols.globusonline.plan import Move, Pair
from stageout.protocols.globusonline.service import RateLimiter, Service, Stopped, TimeLimit
from stageout.protocols.globusonline.settings import GlobusSettings, read_settings
from stageout.protocols.globusonline.task_executor import Group, TaskExecutor
from stageout.protocols.globusonline.tokens import Tokens

_JOBS = "STAGEOUT_JOBS"  # of a batch; the sandbox manager sets it


class GlobusProtocol(BatchProtocol):
    """globusonline and globus: one task for all files that a collection of this node contains, HTTPS for the others."""

    def move(self, transfers: Sequence[Transfer], upload: bool, concurrency: int) -> None:
        """Move all files. When the plugin has to end, running tasks are cancelled and the rest stays unfinished."""
        call = _Call(transfers, read_settings(), upload)
        try:
            for transfer in transfers:
                call.sort(transfer)
            call.run(concurrency)
        except Stopped:
            raise TransferFailure(
                ErrorClass.NOT_ATTEMPTED, "the plugin was stopped before this file was over"
            ) from None
        finally:
            call.close()


@dataclass(frozen=True)
class _Straight:
    """A file that is sent over HTTPS."""

    transfer: Transfer
    address: Address
    service: Service


class _Call:
    """One call of the plugin."""

    def __init__(self, transfers: Sequence[Transfer], settings: GlobusSettings, upload: bool) -> None:
        self.journal = Journal()
        self._transfers = transfers
        self._context: Context = transfers[0].context
        self._settings = settings
        self._upload = upload
        self._rate_limiter = RateLimiter()
        self._services: dict[tuple[str, str], Service] = {}
        self._groups: dict[tuple[str, str, Pair], Group] = {}
        self._straight: list[_Straight] = []
        self._local = settings.local
        self._personal: PersonalEndpoint | None = None
        self._problem: TransferFailure | None = None

    def close(self) -> None:
        """Clean up."""
        if self._personal is not None:
            self._personal.stop()
        self.journal.finish()

    def sort(self, transfer: Transfer) -> None:
        """Choose the method for one file, or refuse the file."""
        request = transfer.request
        try:
            address = address_of(request.encoded_url, self._settings.collections)
            if self._upload and address.is_folder:
                raise TransferFailure(ErrorClass.BAD_URL, f"{address.shown} names no file to write")
            service = self._service(address)
            self._make_endpoint(service)
            move = self._move(transfer, address)
        except TransferFailure as failure:
            transfer.finish(failure)
            return
        if move is None:
            transfer.context.log("by https", reason="no collection of this node sees the file")
            self._straight.append(_Straight(transfer, address, service))
            return
        assert self._local is not None
        between = (self._local.collection, address.collection)
        between = between if self._upload else (between[1], between[0])
        key = (address.service, address.handle, between)
        self._groups.setdefault(key, Group(service, between)).moves.append(move)

    def _service(self, address: Address) -> Service:
        key = (address.service or self._settings.credential, address.handle)
        if key not in self._services:
            tokens = Tokens(self._context, *key)
            self._services[key] = Service(
                tokens, self._settings.transfer_url, TimeLimit(self._context), self._rate_limiter
            )
        return self._services[key]

    def _make_endpoint(self, service: Service) -> None:
        """Create a personal endpoint if the administrator has allowed it and none exists yet.

        :raises TransferFailure: it could not be created, for this file or for an earlier one.
        """
        if self._problem is not None:
            raise self._problem
        if self._local is not None or not self._settings.personal:
            return
        self._personal = PersonalEndpoint(service, self._settings.personal, self._folders())
        try:
            self._local = self._personal.start()
        except TransferFailure as failure:
            self._problem = failure
            raise
        self._context.log("by a personal endpoint", collection=self._local.collection)

    def _folders(self) -> list[Path]:
        """List the directories of this node that the call reads or writes."""
        if not self._upload:
            return [Path.cwd().resolve()]
        return sorted({Path(transfer.request.local_path).resolve().parent for transfer in self._transfers})

    def _move(self, transfer: Transfer, address: Address) -> Move | None:
        """Plan the file as part of a task; None when no collection of this node contains it."""
        local = Path(transfer.request.local_path)
        here = local.resolve() if self._upload else self._arrival(transfer, local)
        there = self._local.there(here) if self._local else None
        if there is None:
            return None
        size_bytes = here.stat().st_size if self._upload else 0
        pair = (there, address.path) if self._upload else (address.path, there)
        return Move(transfer, address, here, pair, size_bytes)

    def _arrival(self, transfer: Transfer, local: Path) -> Path:
        """Return the temporary path of a download. It is the same when the call is repeated."""
        return self.journal.folder.resolve() / f"in-{transfer.request.index}" / (local.name or "all")

    # ---- execution
    # ----------------------------------------------------------------------------------------------------------

    def run(self, concurrency: int) -> None:
        """Execute the plan.

        :raises Stopped: the plugin has to end.
        """
        executor = TaskExecutor(self.journal, self._settings, self._upload, self._jobs())
        servers = Servers()
        with ThreadPoolExecutor(max(1, concurrency)) as pool:
            going = [pool.submit(self._go, item, servers) for item in self._straight]
            try:
                executor.run(self._groups.values())
            finally:
                for one in going:
                    one.result()

    def _go(self, item: _Straight, servers: Servers) -> None:
        context = item.transfer.context
        if item.service.time_limit.is_over:
            return
        try:
            service = item.service.twin()
            base = servers.base(service, item.address.collection)
            direct = Direct(service, base, item.address, item.transfer.request, context)
            item.transfer.finish(direct.upload() if self._upload else direct.download())
        except TransferFailure as failure:
            item.transfer.finish(failure)
        except Stopped:
            return

    def _jobs(self) -> str:
        """Return the jobs of these files, for people."""
        return one_line(os.environ.get(_JOBS) or str(self._context.job_attribute("GlobalJobId") or ""), 100)
