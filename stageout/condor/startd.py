"""The startd of this machine, asked directly. The calls block."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stageout.condor.collector import Collector
from stageout.core.config import Settings


def slot_ads(settings: Settings, projection: Sequence[str]) -> list[Any]:
    """Return the bindings' ads of the slots.

    :param projection: attributes; none for whole ads. :raises CondorError: the startd does not answer.
    :raises OSError: the file with its address cannot be read.
    """
    # Read each time: a startd that was started again may have another address.
    default = str(Path(settings.condor("LOG")) / ".startd_address")
    address = Path(settings.condor("STARTD_ADDRESS_FILE", default)).read_text().splitlines()[0]
    return Collector(address).query("Startd", projection=projection)
