"""The protocol class of ``plugins/overlay_router_plugin``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Gateway
from stageout.overlay.client import Put
from stageout.overlay.fetch import get
from stageout.overlay.key_file import gateway_of
from stageout.overlay.many import Crew, put_many
from stageout.overlay.packs import SmallPut
from stageout.overlay.safekeeping import Custodian, deposit_copies
from stageout.overlay.sending import Share, report
from stageout.overlay.settings import congestion_of, connections_of, key_file_of, routes_of
from stageout.overlay.small_deposits import Small, deposit_small
from stageout.overlay.wire.messages import MAX_CLOCK_SKEW_S
from stageout.overlay.wire.packs import MAX_FILE_BYTES
from stageout.overlay.wire.route import DEFAULT_PORT, BadRoute, address, written
from stageout.plugin.api import BatchProtocol, Context, Outcome, Transfer
from stageout.plugin.urls import as_written, safe_url
from stageout.wire.deposits import EXPIRES_AFTER_S, BadReceipt, Receipt, name_of, operation_of, read_numbers

_SILENCE_S = 60.0
_LEAST_S = 1.0
#: Seconds of silence after which another custodian is tried.
_NEXT_AFTER_S = 10.0


class OverlayProtocol(BatchProtocol):
    """overlay: small files of a call are sent together."""

    def delete(self, transfers: Sequence[Transfer]) -> None:
        """Delete files at their routers, one after the other. A finished file is gone from the disk."""
        from stageout.overlay.operations import Session

        for transfer in transfers:
            try:
                host, port, path = _place(transfer.request.encoded_url)
                gateway = _gateway(host, port, transfer.context)
                routes = routes_of(transfer.context.setting("OVERLAY_ROUTES", ""), gateway)
                with Session(gateway, routes=routes) as session:
                    session.delete(path)
                    session.push()
            except TransferFailure as failure:
                transfer.finish(failure if failure.kind is not ErrorClass.NOT_FOUND else Outcome(0, verified="deleted"))
            else:
                transfer.finish(Outcome(0, verified="deleted"))

    def move(self, transfers: Sequence[Transfer], upload: bool, concurrency: int) -> None:
        """Move all files: the files for one router together, the routers one after the other."""
        if not upload:
            with Crew(concurrency) as crew:
                for transfer in transfers:
                    crew.do(partial(_download, transfer))
            return
        custodians = transfers[0].context.setting("OVERLAY_HANDOVER", "") if transfers else ""
        if custodians:
            _hand_over(transfers, custodians.split(","), concurrency)
            return
        for (host, port), group in _by_router(transfers).items():
            _upload(host, port, group, concurrency)


def _download(transfer: Transfer) -> None:
    """Fetch a published file. Each block is verified on arrival."""
    request, context = transfer.request, transfer.context
    shares: list[Share] = []
    try:
        host, port, path = _place(as_written(request.encoded_url))
        gateway = _gateway(host, port, context)
        routes = routes_of(context.setting("OVERLAY_ROUTES", ""), gateway)
        (connections, most), (priority, deadline) = _connections(context, len(routes)), _wishes(context)
        size_bytes = get(
            gateway, path, Path(request.local_path), progress=context.progress, routes=routes,
            priority=priority, deadline=deadline, connections=connections, most_connections=most, ended=shares.extend,
        )  # fmt: skip
    except TransferFailure as failure:
        transfer.finish(failure)
    else:
        transfer.finish(Outcome(size_bytes, size_bytes, verified="crc32c", developer={"Routes": report(shares)}))


def _by_router(transfers: Sequence[Transfer]) -> dict[tuple[str, int], list[tuple[Transfer, str]]]:
    """Group the files by router, with their paths. Finish a file without a destination as failed."""
    groups: dict[tuple[str, int], list[tuple[Transfer, str]]] = {}
    for transfer in transfers:
        try:
            host, port, path = _place(transfer.request.encoded_url)
        except TransferFailure as failure:
            transfer.finish(failure)
        else:
            groups.setdefault((host, port), []).append((transfer, path))
    return groups


def _upload(host: str, port: int, group: list[tuple[Transfer, str]], concurrency: int) -> None:
    """Send files. A finished file is durable at the destination under its name, with a verified digest."""
    context = group[0][0].context
    try:
        gateway, terminal = _through(_gateway(host, port, context), context.setting("OVERLAY_GATEWAY", ""))
        routes = routes_of(context.setting("OVERLAY_ROUTES", ""), gateway)
        connections, most = _connections(context, len(routes))
    except TransferFailure as failure:
        for transfer, _ in group:
            transfer.finish(failure)
        return
    files = ((transfer, transfer.request.local_path, path) for transfer, path in group)
    priority, deadline = _wishes(context)
    put_many(
        gateway, files, _finish, connections=connections, most_connections=most, routes=routes, at_once=concurrency,
        priority=priority, deadline=deadline,
        terminal=terminal, expires_after_s=_expires_after_s(terminal, context),
        progress=lambda transfer, sent_bytes: transfer.context.progress(sent_bytes),
    )  # fmt: skip


@dataclass(frozen=True)
class _Deposit:
    """A file to hand over. :param name: name of the deposit, as in its receipt. :param gateway: its destination."""

    transfer: Transfer
    gateway: Gateway
    path: str
    name: str

    @property
    def operation(self) -> tuple[str, int]:
        """Return origin and number of the operation, which are the same for all attempts and custodians."""
        return operation_of(self.name, self.gateway.secret)

    def finish(self, custodians: Sequence[str], expires: int, size_bytes: int, sent_bytes: int) -> None:
        """Record the custodians that hold the file durably before it reaches its destination."""
        seed, _, number = self.name.rpartition("/")
        receipt = Receipt(",".join(custodians), seed, int(number), int(number), expires)
        self.transfer.finish(Outcome(size_bytes, sent_bytes, developer={"StageOutCustody": str(receipt)}))


def _hand_over(transfers: Sequence[Transfer], custodians: Sequence[str], concurrency: int) -> None:
    """Hand files over to custodians: small ones in packs, large ones in parallel."""
    small: dict[tuple[str, int], list[_Deposit]] = {}
    with Crew(concurrency) as crew:
        for deposit in _deposits(transfers):
            if _is_small(deposit):
                small.setdefault((deposit.gateway.host, deposit.gateway.port), []).append(deposit)
            else:
                crew.do(partial(_give, deposit, custodians))
        for group in small.values():
            _give_packed(group, custodians, lambda deposit: crew.do(partial(_give, deposit, custodians)))


def _deposits(transfers: Sequence[Transfer]) -> Iterator[_Deposit]:
    """Find the files with the numbers of their deposits. Repeated attempts get the manager's numbers again.

    A file without a destination is finished as failed.
    """
    context = transfers[0].context
    text, seed = context.setting("OVERLAY_NUMBERS", ""), context.setting("OVERLAY_SEED", "")
    numbers = _numbers(text)
    for transfer in transfers:
        index = transfer.request.index
        try:
            if text and index >= len(numbers):
                words = f"STAGEOUT_OVERLAY_NUMBERS = {text[:100]} has no number for file {index + 1}"
                raise TransferFailure(ErrorClass.BAD_REQUEST, words)
            host, port, path = _place(transfer.request.encoded_url)
            gateway = _gateway(host, port, context)
        except TransferFailure as failure:
            transfer.finish(failure)
        else:
            yield _Deposit(transfer, gateway, path, name_of(seed, numbers[index] if text else index + 1))


def _numbers(text: str) -> list[int]:
    try:
        return read_numbers(text)
    except BadReceipt:
        return []


def _is_small(deposit: _Deposit) -> bool:
    try:
        return Path(deposit.transfer.request.local_path).stat().st_size <= MAX_FILE_BYTES
    except OSError:
        return False  # opening the file reports the problem


def _give_packed(group: Sequence[_Deposit], custodians: Sequence[str], by_itself: Callable[[_Deposit], None]) -> None:
    """Send small files for one router to custodians. :param by_itself: sends a file that does not fit into a pack."""
    context, end = group[0].transfer.context, group[0].gateway

    def ended(file: Small[_Deposit], failure: TransferFailure | None) -> None:
        if failure is not None and failure.kind is ErrorClass.NOT_SUPPORTED:
            by_itself(file.key)
        elif failure is not None:
            file.key.transfer.finish(failure)
        else:
            kept = file.kept
            sent_bytes = sum(one.size_bytes for one in kept)
            file.key.finish([one.custodian for one in kept], kept[0].expires, kept[0].size_bytes, sent_bytes)

    try:
        places, copies, wait_s = _custodians(end, custodians, context)
        (_, most), (priority, deadline) = _connections(context), _wishes(context)
    except TransferFailure as failure:
        for deposit in group:
            deposit.transfer.finish(failure)
        return
    files = [
        Small(one, one.transfer.request.local_path, one.path, *one.operation) for one in group
    ]  # fmt: skip
    deposit_small(
        places, files, ended, copies=copies, wait_s=wait_s, priority=priority, deadline=deadline, most_connections=most
    )


def _custodians(end: Gateway, custodians: Sequence[str], context: Context) -> tuple[list[Custodian], int, float]:
    """Return the custodians, the number of copies, and the seconds to keep trying.

    If there are several, a silent one delays the others for seconds only, because a pilot has no more time.
    """
    if len(custodians) > 1:
        end = replace(end, timeout_s=min(end.timeout_s, _NEXT_AFTER_S))
    copies = int(context.setting("OVERLAY_COPIES", "1"))
    places = [Custodian(*_through(end, custodian)) for custodian in custodians]
    return places, copies, context.remaining_s / 2 if copies > 1 else 0.0


def _give(deposit: _Deposit, custodians: Sequence[str]) -> None:
    """Send one file to custodians."""
    request, context = deposit.transfer.request, deposit.transfer.context
    try:
        places, copies, wait_s = _custodians(deposit.gateway, custodians, context)
        (connections, most), (priority, deadline) = _connections(context), _wishes(context)
        local, (origin, seq) = Path(request.local_path), deposit.operation
        given = deposit_copies(
            places, local, deposit.path, copies=copies, wait_s=wait_s, mode=local.stat().st_mode & 0o777,
            connections=connections, most_connections=most, priority=priority, deadline=deadline,
            progress=context.progress, origin=origin, seq=seq,
        )  # fmt: skip
    except TransferFailure as failure:
        deposit.transfer.finish(failure)
    except OSError as problem:
        deposit.transfer.finish(TransferFailure(ErrorClass.LOCAL_FILE, f"{request.local_path}: {problem.strerror}"))
    else:
        sent_bytes = sum(one.sent_bytes for one in given)
        deposit.finish([one.custodian for one in given], given[0].expires, given[0].size_bytes, sent_bytes)


def _connections(context: Context, routes: int = 1) -> tuple[int, int]:
    """Choose the connections of a file on each route, at first and at most: those granted for all routes, but at least
    one on each, else the node's own limit.
    """
    granted = str(max(1, context.parallelism // max(1, routes))) if context.setting("PARALLELISM", "") else ""
    return connections_of(text=granted or context.setting("OVERLAY_CONNECTIONS", ""))


def _wishes(context: Context) -> tuple[int, int]:
    """Read the job's priority and deadline, which order only the files of its owner."""
    priority = context.job_attribute("StageOutPriority")
    if priority is None:
        priority = context.job_attribute("JobPrio")
    return max(0, _number(priority, 0)), max(0, _number(context.job_attribute("StageOutDeadline"), 0))


def _number(value: object, default: int) -> int:
    """Parse a number; return the default for other text."""
    try:
        return int(str(value))
    except ValueError:
        return default


def _finish(transfer: Transfer, result: Put | SmallPut | TransferFailure) -> None:
    if isinstance(result, TransferFailure):
        transfer.finish(result)
        return
    developer: dict[str, object] = {"Generation": result.generation}
    if isinstance(result, SmallPut):
        sent_bytes, developer["Packed"] = result.size_bytes, True
    else:
        sent_bytes = result.sent_bytes
        developer.update(Manifest=result.manifest, Routes=report(result.shares))
    transfer.finish(Outcome(result.size_bytes, sent_bytes, verified=result.digest_name, developer=developer))


def _expires_after_s(terminal: str, context: Context) -> float:
    """Limit a custodian's attempts: it need not try for longer than this plugin waits. Clocks may differ."""
    return min(EXPIRES_AFTER_S, max(MAX_CLOCK_SKEW_S, context.remaining_s)) if terminal else EXPIRES_AFTER_S


def _through(gateway: Gateway, custodian: str) -> tuple[Gateway, str]:
    """Find the custodian that accepts uploads, and the terminal behind it; without one the router itself and ""."""
    if not custodian:
        return gateway, ""
    try:
        host, port = address(custodian)
    except BadRoute as problem:
        raise TransferFailure(ErrorClass.BAD_REQUEST, f"the custodian: {problem}") from None
    return replace(gateway, host=host, port=port), written(gateway.host, gateway.port)


def _place(url: str) -> tuple[str, int, str]:
    """Return host and port of the router, and the path below its root. :raises TransferFailure: BAD_URL."""
    parts = urlsplit(url)
    path = os.fsdecode(unquote_to_bytes(parts.path)).strip("/")
    if not parts.hostname or not path or parts.query or parts.fragment or parts.username:
        raise TransferFailure(ErrorClass.BAD_URL, f"{safe_url(url)}: write overlay://HOST[:PORT]/path/of/the/file")
    try:
        return parts.hostname, parts.port or DEFAULT_PORT, path
    except ValueError:
        raise TransferFailure(ErrorClass.BAD_URL, f"{safe_url(url)}: the port is not a number") from None


def _gateway(host: str, port: int, context: Context) -> Gateway:
    """Find the gateway and its key. :raises TransferFailure: the key cannot be used."""
    key = key_file_of(context.setting("OVERLAY_KEY", ""))
    gateway = gateway_of(host, port, key, max(_LEAST_S, min(_SILENCE_S, context.remaining_s)))
    return replace(gateway, congestion=congestion_of(context.setting("OVERLAY_CONGESTION", "")))
