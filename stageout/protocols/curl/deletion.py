"""Deletion of one file. A missing file counts as deleted, because the answer to an earlier request may be lost."""

from __future__ import annotations

from stageout.core.errors import TransferFailure
from stageout.plugin.api import Outcome
from stageout.protocols.curl.attempts import Movement
from stageout.protocols.curl.failures import remote_failure
from stageout.protocols.curl.ftp import Ftp
from stageout.protocols.curl.http import Http
from stageout.protocols.curl.local import path_of
from stageout.protocols.curl.task import Task

_GONE = frozenset({404, 410})
DELETED = "deleted"
"""Stands for the verification in a result."""


def deletion(task: Task) -> Movement:
    """Return the deletion of the file at the URL of a task."""
    return {"file": _LocalDeletion, "ftp": _FtpDeletion}.get(task.address.method, _HttpDeletion)(task)


class _Deletion(Movement):
    """The deletion of one file."""

    def abandon(self) -> None:
        """Do nothing, because a deletion leaves nothing behind."""

    def attempt(self) -> Outcome:
        """Delete the file.

        :raises TransferFailure: the file may still exist.
        """
        self._delete()
        return Outcome(0, verified=DELETED)

    def _delete(self) -> None:
        raise NotImplementedError


class _HttpDeletion(_Deletion):
    """DELETE by http, https, dav and davs."""

    def _delete(self) -> None:
        http = Http(self._task)
        reply = http.ask("DELETE", self._task.address)
        if not reply.success and reply.status not in _GONE:
            raise http.failure(reply, f"deletion of {self._task.address.name}")


class _FtpDeletion(_Deletion):
    """DELE. An FTP server refuses it with the same reply whether or not the file exists."""

    def _delete(self) -> None:
        ftp = Ftp(self._task)
        try:
            ftp.delete(self._task.address)
        except TransferFailure:
            if ftp.exists(self._task.address):
                raise


class _LocalDeletion(_Deletion):
    """Removal of a file of this machine."""

    def _delete(self) -> None:
        path = path_of(self._task.address)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise remote_failure(error, str(path)) from None
