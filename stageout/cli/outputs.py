"""The output files of a job that go to URLs, from its ad. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from stageout.core.classads import ClassAd

_REMAP = re.compile(r"\s*((?:[^;=\\]|\\.)+?)\s*=\s*((?:[^;\\]|\\.)*?)\s*(?:;|$)")
#: Attributes to read for :func:`outputs_of`.
OUTPUT_ATTRIBUTES = ("OutputDestination", "TransferOutput", "TransferOutputRemaps")


class Output(NamedTuple):
    """One output file, or (name "") all files that the job makes, and its URL."""

    name: str
    url: str


def outputs_of(ad: ClassAd) -> list[Output]:
    """Return the output files of a job that go to URLs. The URLs may contain secrets."""
    remaps: dict[str, str] = dict(_REMAP.findall(ad.text("TransferOutputRemaps")))
    found = [Output(name, target) for name, target in remaps.items() if "://" in target]
    place = ad.text("OutputDestination")
    if "://" in place:
        names = [name.strip() for name in ad.text("TransferOutput").split(",") if name.strip()]
        found += [Output(name, f"{place.rstrip('/')}/{name}") for name in names if name not in remaps]
        found += [] if names else [Output("", place)]
    return found
