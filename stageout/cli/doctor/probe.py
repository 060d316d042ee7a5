"""A trial hand-off without a job: the plugin's side of the protocol, with a file of a few bytes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from stageout.cli.node import spool_directory
from stageout.core.config import Settings
from stageout.handoff import client, links
from stageout.handoff.connection import HandoffRefused, ManagerConnection
from stageout.handoff.place import Place
from stageout.wire import handoff as wire

_URL = "https://stageout-doctor.invalid/probe"
_CONTENT = b"written by stageout doctor\n"
_ACCEPT_S = 30.0


def try_handoff(settings: Settings, schedd: str, plugin: str) -> str:
    """Hand off a file up to the record, as a job of this schedd would.

    :return: the reason why the manager refuses; "" if it accepts. :raises OSError: the probe file cannot be made.
    """
    execute = settings.condor("EXECUTE")
    with tempfile.TemporaryDirectory(prefix="stageout-doctor-", dir=execute) as name:
        scratch = os.path.realpath(name)
        path = Path(scratch) / "probe"
        path.write_bytes(_CONTENT)
        place = Place(scratch, execute)
        place.run = os.path.join(spool_directory(settings), "run")  # noqa: PTH118 - as the plugin has it
        try:
            _talk(place, str(path), schedd, plugin)
        except (HandoffRefused, links.CannotOffer, OSError) as problem:
            return str(problem)
    return ""


def _talk(place: Place, path: str, schedd: str, plugin: str) -> None:
    manager = ManagerConnection(place)
    try:
        found = links.sources([path], place.scratch)
        files = [wire.OfferedFile(_URL, path, found[0].size_bytes)]
        head, *rest = wire.offer_frames(files, plugin, wire.TransferContext())
        go = manager.ask([{**head, "probe": schedd}, *rest], "go")
        client.bring(manager, found, str(go["directory"]))
        manager.limit(_ACCEPT_S, "it checked the file")
        manager.ask([{"op": "linked", "files": 1}], "probed")
    finally:
        manager.close()
