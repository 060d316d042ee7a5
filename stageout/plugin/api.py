"""The interface of a protocol's author: one class with ``download`` and ``upload`` and a few declared abilities."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Protocol

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.abilities import Abilities

__all__ = ["Abilities", "BatchProtocol", "Context", "Outcome", "Request", "Transfer", "TransferProtocol"]


class Request:
    """One file to move.

    :param url: HTCondor's URL, prefix (``service+https``) and query included. Never log it: use ``safe_url``.
    :param local_path: absolute path in the sandbox, to write (download) or to read (upload).
    :param index: position in the batch.
    :param data: ``PluginData`` merged with the ``<scheme>_PluginData`` that applies to this file.
    :param encoded_url: the URL for requests. HTCondor appends raw file names to ``output_destination``, and to
        ``checkpoint_destination`` in both directions. In this URL the file name is percent-encoded (``#``, ``?``,
        ``%``, blanks), and a query in the middle is moved to the end.
    """

    __slots__ = ("data", "encoded_url", "index", "local_path", "url")

    def __init__(
        self, url: str, local_path: str, index: int = 0, data: Mapping[str, Any] | None = None, encoded_url: str = ""
    ) -> None:
        self.url = url
        self.local_path = local_path
        self.index = index
        self.data: Mapping[str, Any] = data or {}
        self.encoded_url = encoded_url or url


class Outcome:
    """A transfer that succeeded.

    :param size_bytes: size of the file.
    :param transferred_bytes: bytes that crossed the network for it, all attempts together.
    :param connection_s: seconds of all requests since their connections were made; 0: the framework uses the time from
        the file's begin to its end.
    :param verified: the destination's evidence: "" (none), "size" or the name of a digest ("md5", ...).
    :param digests: digest name -> hexadecimal value, computed while the file was read or written.
    :param developer: further facts for DeveloperData (scalars only, no secrets).
    """

    __slots__ = ("connection_s", "developer", "digests", "size_bytes", "transferred_bytes", "verified")

    def __init__(
        self,
        size_bytes: int,
        transferred_bytes: int = 0,
        connection_s: float = 0.0,
        verified: str = "",
        digests: dict[str, str] | None = None,
        developer: dict[str, Any] | None = None,
    ) -> None:
        self.size_bytes = size_bytes
        self.transferred_bytes = transferred_bytes
        self.connection_s = connection_s
        self.verified = verified
        self.digests = {} if digests is None else digests
        self.developer = {} if developer is None else developer


class Context(Protocol):
    """The services of the framework during one transfer. Safe to use from the worker's thread."""

    @property
    def remaining_s(self) -> float:
        """Return the seconds until the plugin's own deadline."""

    @property
    def decided(self) -> bool:
        """Tell whether another file of this call has failed permanently, and with it the job's transfer: do not
        retry.
        """

    def credential(self, service: str, handle: str = "") -> str:
        """Read the bearer token of a ``service+`` or ``service.handle+`` URL; read its file on each call.

        :raises TransferFailure: CREDENTIAL_MISSING when there is none.
        """

    def job_attribute(self, name: str) -> Any:
        """Return an attribute of the job's ad, None when absent. The job wrote it: never use it for authorization.

        After the job's end only the attributes in ``Abilities.job_attributes`` are available.
        """

    def machine_attribute(self, name: str) -> Any:
        """Return an attribute of the machine's ad, None when absent."""

    def setting(self, name: str, default: str) -> str:
        """Look up a knob for this plugin (``STAGEOUT_<name>`` in the starter's environment, or the machine ad)."""

    @property
    def parallelism(self) -> int:
        """Return the number of streams for this file (``STAGEOUT_PARALLELISM``, default 1)."""

    def attempt_failed(self, failure: Exception) -> None:
        """Record a failed attempt before a retry; it becomes an element of TransferErrorData."""

    def progress(self, transferred_bytes: int) -> None:
        """Report the bytes moved so far for this file, all attempts together. Call it as data moves.

        :raises TransferFailure: the plugin has to end (deadline, SIGTERM): remove temporary files and let it propagate.
        """

    def log(self, message: str, **facts: object) -> None:
        """Write one line to the plugin's log (kept in memory, given to the starter only after a failure)."""


class TransferProtocol(abc.ABC):
    """Base of all protocols. One instance serves a whole batch. Several threads call its methods."""

    @abc.abstractmethod
    def download(self, request: Request, context: Context) -> Outcome:
        """Fetch ``request.url`` into ``request.local_path``. The file must get that name only when it is complete.

        :raises TransferFailure: classified; the framework writes the result ad.
        """

    @abc.abstractmethod
    def upload(self, request: Request, context: Context) -> Outcome:
        """Send ``request.local_path`` to ``request.url``. It must be idempotent, because it may be called again.

        :raises TransferFailure: classified; the framework writes the result ad.
        """

    def delete(self, request: Request, context: Context) -> Outcome:
        """Delete the file at ``request.url``. A missing file counts as deleted.

        The framework calls it only for the methods of ``Abilities.deletes``.

        :raises TransferFailure: classified; the framework writes the result ad.
        """
        raise TransferFailure(ErrorClass.NOT_SUPPORTED, "this plugin cannot delete files")

    def close(self) -> None:  # noqa: B027 - most protocols have nothing to close
        """Release resources. The framework calls it once after the last file."""


class Transfer:
    """One file of a batch that moves as a whole.

    :param finish: call it once with the result of the file, from any thread; further calls have no effect.
    """

    __slots__ = ("context", "finish", "request")

    def __init__(self, request: Request, context: Context, finish: Callable[[Outcome | TransferFailure], None]) -> None:
        self.request = request
        self.context = context
        self.finish = finish


class BatchProtocol(abc.ABC):
    """Base of protocols that move all files of a call together: one list for one program, one task of a service."""

    @abc.abstractmethod
    def move(self, transfers: Sequence[Transfer], upload: bool, concurrency: int) -> None:
        """Move all files, and ``finish`` each as soon as its result is known. Called once, from one thread.

        :param concurrency: files that may move at once (``STAGEOUT_CONCURRENCY``, else ``Abilities.parallel``).
        :raises TransferFailure: for all files that are not finished.
        """

    def delete(self, transfers: Sequence[Transfer]) -> None:
        """Delete the files at the URLs, and ``finish`` each. Called only for the methods of ``Abilities.deletes``.

        :raises TransferFailure: for all files that are not finished.
        """
        raise TransferFailure(ErrorClass.NOT_SUPPORTED, "this plugin cannot delete files")
