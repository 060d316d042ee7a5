"""Output of a node that ends: whether it can be delivered before. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from stageout.core.eta import Eta
from stageout.core.states import FREED, State
from stageout.wire.custody import Report, Run, SandboxReport


class Outlook(NamedTuple):
    """Sandboxes that remain at the end of their node, with their bytes.

    :param late: those that probably do not arrive in time. :param unknown: those without an estimate.
    """

    late: int
    late_bytes: int
    unknown: int
    unknown_bytes: int


def outlook(report: Report, etas: Mapping[Run, Eta], left_s: float) -> Outlook:
    """Return the remaining output at a node's end. :param etas: of the sandboxes. :param left_s: seconds until
    the end.
    """
    late, unknown = list[int](), list[int]()
    for sandbox in report.sandboxes:
        if sandbox.state in FREED or not sandbox.files_left:
            continue
        eta = etas.get(sandbox.run)
        if _is_late(sandbox, eta, left_s):
            late.append(sandbox.bytes_left)
        elif eta is None or eta.high_s is None:
            unknown.append(sandbox.bytes_left)
    return Outlook(len(late), sum(late), len(unknown), sum(unknown))


def _is_late(sandbox: SandboxReport, eta: Eta | None, left_s: float) -> bool:
    """Tell whether a sandbox probably arrives after the end. Failed output waits for its owner."""
    if sandbox.state == State.FAILED:
        return True
    return eta is not None and (eta.low_s if eta.high_s is None else eta.high_s) > left_s
