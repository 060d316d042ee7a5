"""Everything about one file: the request, its address, its settings, and the objects that move it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.api import Context, Request
from stageout.protocols.curl.address import Address
from stageout.protocols.curl.digests import stated_by_user
from stageout.protocols.curl.servers import Servers
from stageout.protocols.curl.settings import ChecksumPolicy, Settings, value_of
from stageout.protocols.curl.transport import Transport


class FileProgress:
    """Bytes and connection time of one file over all its requests. It reports bytes to the framework as they move."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._before_bytes = 0
        self.total_bytes = 0
        self.connected_s = 0.0

    def begin(self) -> None:
        """Prepare for a request."""
        self._before_bytes = self.total_bytes

    def moved(self, request_bytes: int) -> None:
        """Record the transferred bytes of the current request.

        :raises TransferFailure: the plugin has to end.
        """
        self.total_bytes = self._before_bytes + request_bytes
        self._context.progress(self.total_bytes)

    def connected(self, seconds: float) -> None:
        """Add the duration of a request since its connection was made."""
        self.connected_s += seconds


@dataclass(frozen=True)
class Task:
    """One file to move.

    :param address: the target of its URL. :param progress: its transferred bytes.
    """

    request: Request
    address: Address
    context: Context
    settings: Settings
    transport: Transport
    servers: Servers
    progress: FileProgress

    @property
    def path(self) -> Path:
        """Return the path of the file in the sandbox."""
        return Path(self.request.local_path)

    @property
    def no_digests(self) -> bool:
        """Tell whether the policy turns off the comparison of digests."""
        return self.settings.checksum_policy is ChecksumPolicy.OFF

    @property
    def digest_required(self) -> bool:
        """Tell whether the policy fails a transfer without a digest."""
        return self.settings.checksum_policy is ChecksumPolicy.REQUIRED

    def user_digests(self) -> dict[str, str]:
        """Return the checksum that the job's owner states: ``checksum``, or ``checksums`` by file name, in PluginData.

        :raises TransferFailure: BAD_REQUEST for an invalid value.
        """
        data, by_name = self.request.data, value_of(self.request.data, "checksums")
        stated = value_of(by_name, self.path.name) if isinstance(by_name, dict) else None
        stated = value_of(data, "checksum") if stated is None else stated
        if stated is None:
            return {}
        try:
            return stated_by_user(str(stated))
        except ValueError as error:
            raise TransferFailure(ErrorClass.BAD_REQUEST, f"PluginData: {error}") from None
