"""GET and HEAD of names behind ``/.via``: versions that are in custody here, for their owners."""

from __future__ import annotations

import os

from overlay_router.http.exchange import Exchange
from overlay_router.http.operations import Operations
from overlay_router.http.reading import Reading
from stageout.overlay.http.heads import Refused
from stageout.overlay.http.names import encoded

_READS = ("GET", "HEAD")


class Via:
    """Answers such requests. Everything else that has a name of another router is an operation."""

    def __init__(self, operations: Operations, reading: Reading) -> None:
        self._operations, self._reading = operations, reading

    def __call__(self, one: Exchange) -> None:
        """Answer one request. :raises Refused: it is refused."""
        if one.head.method not in _READS:
            raise Refused(
                405, "put, move and delete names of other routers as operations", {"Allow": ", ".join(_READS)}
            )
        try:
            who = self._operations.asker(one)
            facts, file = one.desk.ask("operation-newest", via=one.via, who=who, path=one.path)
        except Refused as why:
            if why.status == 404:
                why.headers["Link"] = f'<https://{one.via[-1]}{encoded(one.path)}>; rel="canonical"'
            raise
        try:
            self._reading.file(one, file, facts["etag"], {"Stageout-State": facts["state"]})
        finally:
            os.close(file)
