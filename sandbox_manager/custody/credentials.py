"""Credentials in custody: what a job's plugin needs to reach its destination after the job's end.

They lie in ``sandboxes/TICKET/credentials/``, a directory of mode 0700 that is the manager's, each file 0600, and go
with the ticket. The ledger has their kind, service, end and a digest, never their content. Nothing that a plugin says
or prints leaves this process before :class:`stageout.movers.scrub.Secrets` has been over it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stageout.core import durable
from stageout.core.credentials import BadCredential as BadCredential
from stageout.core.credentials import end_of, shown
from stageout.wire.handoff import MAX_CREDENTIAL_BYTES, OfferedCredential

DIRECTORY = "credentials"


@dataclass(frozen=True)
class Credential:
    """The ledger's record of one credential.

    :param kind: "token" or "proxy". :param service: of a token, as in ``use_oauth_services``.
    :param expires_at: wall clock of its end, 0 when it cannot be read. :param digest: of its content.
    """

    kind: str
    service: str
    expires_at: int
    digest: str

    @property
    def file_name(self) -> str:
        """Name of the credential's file in the ticket's directory of credentials."""
        return OfferedCredential(self.kind, self.service, 0).file_name

    @property
    def shown(self) -> str:
        """For people."""
        return shown(self.kind, self.service)


@dataclass(frozen=True)
class StoredCredentials:
    """The credentials of a ticket's files.

    :param job_ad: attributes that the plugin may read, as an ad in the new syntax; "" for none.
    :param plugin_data: data of the job for the plugin, as an ad in the new syntax; "" for none.
    """

    ticket: str
    job_ad: str
    plugin_data: str
    credentials: tuple[Credential, ...]

    @property
    def digest(self) -> str:
        """The same for tickets whose files may travel in one call; "" when there is nothing."""
        if not (self.job_ad or self.plugin_data or self.credentials):
            return ""
        parts = [self.job_ad, self.plugin_data, *(f"{item.file_name} {item.digest}" for item in self.credentials)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    @property
    def expires_at(self) -> int:
        """Return the end of the first of its credentials (wall clock); 0 when none is known to end."""
        return min((item.expires_at for item in self.credentials if item.expires_at), default=0)

    def expired(self, now: float) -> Credential | None:
        """Return a credential that has expired, None if none has."""
        return next((item for item in self.credentials if 0 < item.expires_at <= now), None)


class Safe:
    """The credentials' files. Methods block for as long as the disk does.

    :param sandboxes: directory of the tickets.
    """

    def __init__(self, sandboxes: Path) -> None:
        self._sandboxes = sandboxes

    def examine_offered(self, ticket: str, offered: Sequence[OfferedCredential], now: float) -> tuple[Credential, ...]:
        """Examine what the spool has claimed.

        :raises BadCredential: one cannot be read or is past its end. :raises OSError: the disk fails.
        """
        found = []
        for item in offered:
            made = examine(item.kind, item.service, self.content(ticket, item.file_name))
            if 0 < made.expires_at <= now:
                raise BadCredential(f"{made.shown} is past its end; renew it and submit anew")
            found.append(made)
        return tuple(found)

    def content(self, ticket: str, file_name: str) -> bytes:
        """Read a credential's file. :raises OSError: it is not there."""
        return durable.read_file(self._sandboxes / ticket / DIRECTORY / file_name)

    def contents(self, held: StoredCredentials) -> dict[str, bytes]:
        """All of a ticket, by file name."""
        return {item.file_name: self.content(held.ticket, item.file_name) for item in held.credentials}

    def replace(self, ticket: str, credential: Credential, content: bytes) -> None:
        """Put a renewed credential in the place of the old one. On return it is on the disk."""
        path = self._sandboxes / ticket / DIRECTORY / credential.file_name
        durable.write_file("credential-replace", path, content, 0o600)

    def examined(self, held: StoredCredentials) -> tuple[Credential, ...]:
        """Return the credentials of a ticket as their files are now.

        :raises BadCredential: one cannot be used. :raises OSError: one cannot be read.
        """
        return tuple(
            examine(item.kind, item.service, self.content(held.ticket, item.file_name)) for item in held.credentials
        )


def examine(kind: str, service: str, content: bytes) -> Credential:
    """Describe a credential.

    :raises BadCredential: there is none in the file.
    """
    if len(content) > MAX_CREDENTIAL_BYTES or not content.strip():
        raise BadCredential(f"{shown(kind, service)} is empty or too large")
    return Credential(kind, service, end_of(kind, service, content), hashlib.sha256(content).hexdigest())
