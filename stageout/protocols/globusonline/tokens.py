"""Bearer tokens from HTCondor's credential directory, selected by resource server and read again for each request."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.api import Context

TRANSFER = "transfer.api.globus.org"
TRANSFER_SCOPE = "urn:globus:auth:scope:transfer.api.globus.org:all"


@dataclass(frozen=True)
class Tokens:
    """The tokens of one job (or, in a batch, of its owner).

    :param context: context of any file of the call. :param service: service of the credmon.
    :param handle: handle in the URL for its Transfer token; "" for none.
    """

    context: Context
    service: str
    handle: str = ""

    def bearer(self, resource_server: str) -> str:
        """Return the access token for a resource server: Transfer, or HTTPS access to a collection (its UUID).

        :raises TransferFailure: CREDENTIAL_MISSING; the text shows the line for the submit file.
        """
        if resource_server == TRANSFER and self.handle:
            return self.context.credential(self.service, self.handle)
        for handle, document in self._documents():
            if _is_for(document, resource_server):
                return self.context.credential(self.service, handle)
        raise TransferFailure(ErrorClass.CREDENTIAL_MISSING, self._remedy(resource_server))

    def has_expired(self, resource_server: str) -> bool:
        """Tell whether the file itself states that its token has expired."""
        now = time.time()
        for _, document in self._documents():
            if _is_for(document, resource_server):
                end = document.get("expires_at")
                return isinstance(end, (int, float)) and end <= now
        return False

    def _documents(self) -> list[tuple[str, dict[str, Any]]]:
        """Yield handle and content of each token file of the service."""
        folder = os.environ.get("_CONDOR_CREDS", "")
        found = []
        for path in sorted(Path(folder).glob(f"{self.service}*.use")) if folder else []:
            handle = path.name[len(self.service) : -len(".use")]
            if not handle or handle.startswith("_"):
                found.append((handle[1:], _read(path)))
        return found

    def _remedy(self, resource_server: str) -> str:
        is_transfer = resource_server == TRANSFER
        handle = "transfer" if is_transfer else "https"
        scope = TRANSFER_SCOPE if is_transfer else f"https://auth.globus.org/scopes/{resource_server}/https"
        who = "the Transfer service" if is_transfer else f"the HTTPS side of collection {resource_server}"
        return (
            f"the job has no token for {who}: write use_oauth_services = {self.service} and "
            f"{self.service}_oauth_permissions_{handle} = {scope}"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _is_for(document: dict[str, Any], resource_server: str) -> bool:
    stated = document.get("resource_server")
    if isinstance(stated, str):
        return stated == resource_server
    scope = document.get("scope") or document.get("scopes") or ""
    words = scope.split() if isinstance(scope, str) else [str(word) for word in scope]
    if not words:
        return resource_server == TRANSFER
    marks = {TRANSFER: TRANSFER_SCOPE}
    wanted = marks.get(resource_server, f"https://auth.globus.org/scopes/{resource_server}/")
    return any(word.startswith(wanted) for word in words)
