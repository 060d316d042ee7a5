"""The protocol class of ``plugins/stageout_curl_plugin``: choose the transfer for a URL."""

from __future__ import annotations

import os
from collections.abc import Callable

import pycurl

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.api import Context, Outcome, Request, TransferProtocol
from stageout.protocols.curl.address import Address, address_of
from stageout.protocols.curl.attempts import Movement, run_attempts
from stageout.protocols.curl.download import FtpDownload, HttpDownload
from stageout.protocols.curl.local import LocalDownload, LocalUpload
from stageout.protocols.curl.servers import Servers
from stageout.protocols.curl.settings import for_test_url, is_test_url, positive_number, read_settings, value_of
from stageout.protocols.curl.task import FileProgress, Task
from stageout.protocols.curl.transport import Transport
from stageout.protocols.curl.upload import FtpUpload, HttpUpload

_DOWNLOADS: dict[str, Callable[[Task], Movement]] = {"file": LocalDownload, "ftp": FtpDownload}
_UPLOADS: dict[str, Callable[[Task], Movement]] = {
    "file": LocalUpload,
    "ftp": FtpUpload,
}


def _download(task: Task) -> Movement:
    made = _DOWNLOADS.get(task.address.method)
    if made is not None:
        return made(task)
    if task.context.parallelism > 1 or value_of(task.request.data, "sample_bytes"):
        from stageout.protocols.curl.ranges import RangedDownload

        return RangedDownload(task, task.settings.split_bytes)
    return HttpDownload(task)


def _upload(task: Task) -> Movement:
    made = _UPLOADS.get(task.address.method)
    if made is None and ("s3_parts" in task.request.data or "s3_multipart" in task.request.data):
        from stageout.protocols.curl.parts import PartsUpload, wants_parts

        made = PartsUpload if wants_parts(task) else None
    return (made or HttpUpload)(task)


def _carried_out(movement_of: Callable[[Task], Movement], task: Task, file_code: int) -> Outcome:
    """Move the file. The result has libcurl's code and the connection time, as HTCondor's own plugin reports them.

    :param file_code: libcurl's code for a failed ``file`` URL, which this plugin moves without libcurl.
    :raises TransferFailure: classified.
    """
    try:
        outcome = run_attempts(movement_of(task), task)
    except TransferFailure as failure:
        failure.connection_s = task.progress.connected_s
        if task.address.method == "file":
            failure.developer.setdefault("LibcurlReturnCode", file_code)
        raise
    outcome.connection_s = task.progress.connected_s
    outcome.developer.setdefault("LibcurlReturnCode", pycurl.E_OK)
    return outcome


class CurlProtocol(TransferProtocol):
    """http, https, ftp, file, dav and davs."""

    def __init__(self) -> None:
        self._transport = Transport()
        self._servers = Servers()

    def download(self, request: Request, context: Context) -> Outcome:
        """Fetch a file under a temporary name, verify it by the checksum policy, sync it and rename it."""
        task = self._task(request, address_of(request.encoded_url), context)
        return _carried_out(_download, task, pycurl.E_FILE_COULDNT_READ_FILE)

    def upload(self, request: Request, context: Context) -> Outcome:
        """Send a file, verify it at the server, and rename it if it has a temporary name."""
        task = self._task(request, address_of(request.encoded_url), context)
        if not task.address.name:
            text = f"{task.address.shown} names no file to write"
            raise TransferFailure(ErrorClass.BAD_URL, text, task.address.host)
        return _carried_out(_upload, task, pycurl.E_WRITE_ERROR)

    def delete(self, request: Request, context: Context) -> Outcome:
        """Delete a file at its server, or at the path of a ``file`` URL."""
        from stageout.protocols.curl.deletion import deletion

        task = self._task(request, address_of(request.encoded_url), context)
        return _carried_out(deletion, task, pycurl.E_FILE_COULDNT_READ_FILE)

    def _task(self, request: Request, address: Address, context: Context) -> Task:
        if positive_number(context, "CURL_IGNORE_HTTP_PROXY"):
            os.environ.pop("http_proxy", None)
        settings = read_settings(context, request.data)
        if is_test_url(request, context):
            settings = for_test_url(settings)
        return Task(request, address, context, settings, self._transport, self._servers, FileProgress(context))
