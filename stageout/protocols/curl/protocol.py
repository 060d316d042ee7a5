"""The curl plugin's protocol: sends each request to the part that knows its scheme."""

from __future__ import annotations

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.api import Context, Outcome, Request, TransferProtocol
from stageout.plugin.urls import split_scheme
from stageout.protocols.curl import ftp, local, web
from stageout.protocols.curl.exchange import Exchanger


class CurlProtocol(TransferProtocol):
    """http, https, dav, davs, ftp and file."""

    def __init__(self) -> None:
        self._exchanger = Exchanger()

    def download(self, request: Request, context: Context) -> Outcome:
        """Fetch one file. :raises TransferFailure: classified."""
        method = split_scheme(request.url).method
        if method == "file":
            return local.download(request, context)
        if method == "ftp":
            return ftp.download(self._exchanger, request, context)
        self._check(method)
        return web.download(self._exchanger, request, context)

    def upload(self, request: Request, context: Context) -> Outcome:
        """Send one file. :raises TransferFailure: classified."""
        method = split_scheme(request.url).method
        if method == "file":
            return local.upload(request, context)
        if method == "ftp":
            return ftp.upload(self._exchanger, request, context)
        self._check(method)
        return web.upload(self._exchanger, request, context)

    @staticmethod
    def _check(method: str) -> None:
        if method not in ("http", "https", "dav", "davs"):
            raise TransferFailure(ErrorClass.BAD_URL, f"{method}:// is not a scheme of the curl plugin")
