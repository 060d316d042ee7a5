"""A file in the custody of one router, given as everybody gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stageout.overlay.channel import Gateway
from stageout.overlay.client import Deposit
from stageout.overlay.safekeeping import Custodian, deposit_copies


def deposit(gateway: Gateway, local: Path, path: str, terminal: str, **wishes: Any) -> Deposit:
    """Give a file to a custodian, which delivers it to ``terminal``."""
    (given,) = deposit_copies([Custodian(gateway, terminal)], local, path, copies=1, **wishes)
    return given
