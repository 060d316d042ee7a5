"""Requests to the Transfer service: rate-limited, retried when useful, abandoned when the plugin has to end."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

for _name in [name for name in os.environ if name.startswith("GLOBUS_SDK_")]:  # could redirect tokens to another server
    if _name not in ("GLOBUS_SDK_VERIFY_SSL", "GLOBUS_SDK_HTTP_TIMEOUT"):
        del os.environ[_name]

from stageout.core.extras import needs  # noqa: E402

with needs("globus"):
    from globus_sdk import GlobusAPIError, GlobusError, NetworkError, TransferClient
    from globus_sdk.authorizers import GlobusAuthorizer
    from globus_sdk.transport import RequestsTransport, RetryConfig

from stageout.core.errors import ErrorClass, TransferFailure  # noqa: E402
from stageout.core.pauses import growing_s  # noqa: E402
from stageout.plugin.api import Context  # noqa: E402
from stageout.protocols.globusonline import failures  # noqa: E402
from stageout.protocols.globusonline.tokens import TRANSFER, Tokens  # noqa: E402

_REQUESTS_PER_S = 10.0  # the service allows a user 20, averaged over 10 s
_BURST = 40
_HTTP_TIMEOUT_S = 30.0
_LAST_WORD_TIMEOUT_S = 1.5  # the framework gives transfers 2 s to end
_PATIENCE_S = 120.0
_SLICE_S = 0.1
_PENDING_WAIT_S = 60.0


class Stopped(Exception):
    """The plugin has to end: by a signal, by its deadline, or because the starter has ended."""


class TimeLimit:
    """The time limit of the plugin. :param context: context of any file of the call."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @property
    def is_over(self) -> bool:
        """Tell whether the plugin has to end."""
        return self._context.remaining_s <= 0

    @property
    def has_run_out(self) -> bool:
        """Tell whether only the time limit ends the plugin, so that a later call may continue."""
        try:
            self._context.progress(0)
        except TransferFailure as reason:
            return reason.kind is ErrorClass.DEADLINE
        return self.is_over

    def sleep(self, seconds: float) -> None:
        """Wait.

        :raises Stopped: the plugin has to end.
        """
        until = time.monotonic() + seconds
        while not self.is_over:
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, _SLICE_S))
        raise Stopped


class RateLimiter:
    """Limit of the request rate, over all threads of this plugin."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._credit = float(_BURST)
        self._at_s = time.monotonic()

    def wait_s(self) -> float:
        """Reserve a time slot. Return the seconds until it begins."""
        with self._lock:
            now_s = time.monotonic()
            self._credit = min(_BURST, self._credit + (now_s - self._at_s) * _REQUESTS_PER_S)
            self._at_s = now_s
            self._credit -= 1
            return max(0.0, -self._credit / _REQUESTS_PER_S)


class _FileAuthorizer(GlobusAuthorizer):
    """Source of the token. It reads the file for each request because a credmon may have renewed it."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def get_authorization_header(self) -> str:
        return f"Bearer {self._tokens.bearer(TRANSFER)}"


class Service:
    """The Transfer service for one thread.

    :param tokens: the user's tokens. :param base_url: "" for the public service.
    """

    def __init__(self, tokens: Tokens, base_url: str, time_limit: TimeLimit, rate_limiter: RateLimiter) -> None:
        self.tokens = tokens
        self.time_limit = time_limit
        self._base_url = base_url
        self._rate_limiter = rate_limiter
        self._client = self._connect(_HTTP_TIMEOUT_S)

    def twin(self) -> Service:
        """Make the same service for another thread."""
        return Service(self.tokens, self._base_url, self.time_limit, self._rate_limiter)

    def _connect(self, timeout_s: float) -> TransferClient:
        return TransferClient(
            authorizer=_FileAuthorizer(self.tokens),
            base_url=self._base_url or None,
            transport=RequestsTransport(http_timeout=timeout_s),
            retry_config=RetryConfig(max_retries=0),  # its waits could not be interrupted
        )

    # ---- one request -------------------------------------------------------------------------------------------------

    def ask(self, doing: str, request: Callable[[TransferClient], Any], timeout_s: float = _PATIENCE_S) -> Any:
        """Send a request, and retry it while this is useful.

        :param doing: for messages, such as ``submitting the task``. :param timeout_s: seconds after the first failure.
        :raises TransferFailure: it was refused, or not answered in time. :raises Stopped: the plugin has to end.
        """
        deadline_s: float | None = None
        attempt = 0
        while True:
            self.time_limit.sleep(self._rate_limiter.wait_s())
            token = self.tokens.bearer(TRANSFER)
            try:
                return request(self._client)
            except GlobusError as error:
                now_s = time.monotonic()
                deadline_s = now_s + timeout_s if deadline_s is None else deadline_s
                wait_s = self._wait_s(error, attempt, token)
                if wait_s is None or (now_s + wait_s > deadline_s and not _is_queue(error)):
                    raise self._failure(error, doing) from None
            attempt += 1
            self.time_limit.sleep(wait_s)

    def _wait_s(self, error: GlobusError, attempt: int, token: str) -> float | None:
        """Return the seconds until the next attempt; None for no further attempt."""
        backoff_s = growing_s(0.25, 15.0, attempt + 1) * random.uniform(0.8, 1.2)
        if isinstance(error, NetworkError):
            return backoff_s
        if not isinstance(error, GlobusAPIError):
            return None
        if error.http_status == 401:
            return 0.0 if self.tokens.bearer(TRANSFER) != token else None
        if _is_queue(error):
            return min(_PENDING_WAIT_S, 4 * backoff_s)
        if error.http_status in failures.TRANSIENT_STATUSES:
            return max(backoff_s, failures.retry_after_s(error) or 0.0)
        return None

    def _failure(self, error: GlobusError, doing: str) -> TransferFailure:
        failure = failures.request_failure(error, doing)
        if failure.kind is ErrorClass.CREDENTIAL_REFUSED and self.tokens.has_expired(TRANSFER):
            failure.kind = ErrorClass.CREDENTIAL_EXPIRED
        return failure

    def last_word(self, request: Callable[[TransferClient], Any]) -> bool:
        """Send a request once, with a short time limit, when the plugin has to end. Return False if it failed."""
        try:
            request(self._connect(_LAST_WORD_TIMEOUT_S))
        except (GlobusError, TransferFailure):
            return False
        return True

    # ---- tasks and collections ---------------------------------------------------------------------------------------

    def rows(self, doing: str, task: str, name: str) -> Iterator[dict[str, Any]]:
        """Yield all rows of ``task_successful_transfers`` or ``task_skipped_errors``, page by page."""
        marker: str | None = None
        while True:
            query = {"marker": marker} if marker is not None else {}
            page = self.ask(doing, partial(_page, name, task, query))
            yield from page["DATA"]
            marker = page.get("next_marker")
            if marker is None:
                return

    def sizes(self, collection: str, folder: str) -> dict[str, int]:
        """Return the size in bytes of each file in a directory of a collection; empty when there is no such directory.

        :raises TransferFailure: the collection does not answer, or does not allow it.
        """
        try:
            listing = self.ask(f"listing {folder}", lambda client: client.operation_ls(collection, path=folder))
        except TransferFailure as failure:
            if failure.kind is ErrorClass.NOT_FOUND:
                return {}
            raise
        return {row["name"]: int(row.get("size") or 0) for row in listing["DATA"] if row["type"] == "file"}


def _page(name: str, task: str, query: dict[str, Any], client: TransferClient) -> Any:
    return getattr(client, name)(task, query_params=query)


def _is_queue(error: GlobusError) -> bool:
    """Tell whether the user has the maximum number of queued tasks, and this one must wait for a free place."""
    return isinstance(error, GlobusAPIError) and error.code == failures.TOO_MANY
