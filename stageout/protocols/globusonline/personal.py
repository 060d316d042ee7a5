"""A personal endpoint for one call, on a node without a local collection: created, connected, used and removed.

Off unless ``STAGEOUT_GLOBUS_PERSONAL`` names Globus Connect Personal's program. The name of an endpoint begins with the
node's. By this name the next call of the same user on the node finds and removes an endpoint that a killed call left
behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.protocols.globusonline.service import Service
from stageout.protocols.globusonline.settings import LocalCollection

_CONNECT_S = 120.0
_LOOK_S = 0.5
_SETUP_S = 60.0
_STOP_S = 0.4  # part of the framework's 2 s
_LEFT_BEHIND_S = 600.0
_LISTED = 100


class PersonalEndpoint:
    """The endpoint of this call.

    :param program: path of ``globusconnectpersonal``. :param folders: directories that it may read and write.
    """

    def __init__(self, service: Service, program: str, folders: list[Path]) -> None:
        self._service = service
        self._program = program
        self._folders = folders
        self._id = ""
        self._home = Path()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> LocalCollection:
        """Register the endpoint, start the program and wait until the service sees it.

        :raises TransferFailure: a step failed; nothing is left behind. :raises Stopped: the plugin has to end.
        """
        try:
            self._remove_left_behind()
            key = self._register()
            self._home = Path(tempfile.mkdtemp(prefix=".globusconnect-", dir=Path.cwd()))
            self._run("-setup", key, "-dir", str(self._home))
            self._connect()
        except BaseException:
            self.stop()
            raise
        return LocalCollection(self._id, ((Path("/"), Path("/")),))

    def stop(self) -> None:
        """End the program and remove the endpoint, in any state."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._id:
            endpoint, self._id = self._id, ""
            self._service.last_word(lambda client: client.delete_endpoint(endpoint))
        if self._home != Path():
            shutil.rmtree(self._home, ignore_errors=True)

    # ---- the endpoint at the service ---------------------------------------------------------------------------------

    def _register(self) -> str:
        """Create the endpoint. Return its setup key."""
        name = f"{_prefix()}{time.time():.0f}-{os.urandom(4).hex()}"
        body = {"DATA_TYPE": "endpoint", "is_globus_connect": True, "display_name": name}
        made = self._service.ask("making a personal endpoint", lambda client: client.post("/v0.10/endpoint", data=body))
        self._id = str(made["id"])
        return str(made["globus_connect_setup_key"])

    def _remove_left_behind(self) -> None:
        """Remove endpoints of earlier calls on this node that are neither connected nor starting."""
        found = self._service.ask(
            "looking for personal endpoints of earlier calls",
            lambda client: client.endpoint_search(filter_scope="my-gcp-endpoints", limit=_LISTED),
        )
        for row in found["DATA"]:
            if _is_left_behind(row):
                endpoint = row["id"]
                with contextlib.suppress(TransferFailure):
                    self._service.ask("removing the endpoint of an earlier call", partial(_delete, endpoint))

    # ---- the program -------------------------------------------------------------------------------------------------

    def _run(self, *arguments: str) -> None:
        try:
            done = subprocess.run(
                [self._program, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_SETUP_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as problem:
            raise _broken(f"{self._program} cannot be run: {type(problem).__name__}") from None
        if done.returncode:
            raise _broken(f"{self._program} {arguments[0]} ended with status {done.returncode}")

    def _connect(self) -> None:
        allowed = ",".join(f"rw{folder}" for folder in self._folders)
        try:
            self._process = subprocess.Popen(
                [self._program, "-start", "-dir", str(self._home), "-restrict-paths", allowed],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as problem:
            raise _broken(f"{self._program} cannot be run: {problem.strerror}") from None
        until_s = time.monotonic() + _CONNECT_S
        while True:
            shown = self._service.ask(
                "asking about the personal endpoint", lambda client: client.get_endpoint(self._id)
            )
            if shown.get("gcp_connected"):
                return
            if self._process.poll() is not None:
                raise _broken(f"{self._program} -start has ended before it was connected")
            if time.monotonic() > until_s:
                text = f"the personal endpoint was not connected within {_CONNECT_S:.0f} s; is TCP port 2223 open?"
                raise TransferFailure(ErrorClass.CONNECT_FAILED, text)
            self._service.time_limit.sleep(_LOOK_S)


def _delete(endpoint: str, client: Any) -> Any:
    return client.delete_endpoint(endpoint)


def _prefix() -> str:
    return f"stageout-{socket.gethostname().split('.')[0]}-"


def _is_left_behind(row: Any) -> bool:
    name = str(row.get("display_name") or "")
    if not name.startswith(_prefix()) or row.get("gcp_connected"):
        return False
    born, _, _ = name[len(_prefix()) :].partition("-")
    return born.isdigit() and time.time() - int(born) > _LEFT_BEHIND_S


def _broken(text: str) -> TransferFailure:
    return TransferFailure(ErrorClass.PLUGIN_BROKEN, f"the personal endpoint: {text}")
