"""The pool's end of the helper process that answers questions inside the access point."""

from __future__ import annotations

import json
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.harness.pool import namespace
from tests.harness.pool.ads import Ad
from tests.harness.pool.errors import PoolError
from tests.harness.pool.image import PREFIX
from tests.harness.pool.node import Node

_TIMEOUT_S = 30.0


class Queries:
    """Client of the helper, which it starts when it is missing and replaces when it does not answer."""

    def __init__(self, node: Node, directory: Path) -> None:
        self._node = node
        self._script = directory / "helper.py"
        shutil.copy(Path(__file__).with_name("helper.py"), self._script)
        self._child: subprocess.Popen[bytes] | None = None

    def ask(self, op: str, **args: Any) -> Any:
        """Call a function of :mod:`tests.harness.pool.helper`; PoolError after a failure or 30 s of silence."""
        child = self._running()
        assert child.stdin is not None
        try:
            child.stdin.write(json.dumps({"op": op, "args": args}).encode() + b"\n")
            child.stdin.flush()
            reply = json.loads(self._read_line(child), object_pairs_hook=Ad)
        except (OSError, ValueError) as broken:
            self.close()
            raise PoolError(f"{op}: no answer from inside {self._node.name}: {broken}") from broken
        if "error" in reply:
            raise PoolError(f"{op}({args}): {reply['error']}")
        return reply["value"]

    def close(self) -> None:
        """End the helper."""
        child, self._child = self._child, None
        if child is not None:
            namespace.kill_tree(child.pid)
            child.wait()
            for stream in (child.stdin, child.stdout):
                if stream is not None:
                    stream.close()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is not None:
            self.close()
        if self._child is None:
            argv, env = self._node.command([f"{PREFIX}/bin/python", "-u", str(self._script)])
            with open(self._script.with_suffix(".log"), "ab") as errors:
                self._child = subprocess.Popen(
                    argv,
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    bufsize=0,
                    start_new_session=True,
                )
        return self._child

    def _read_line(self, child: subprocess.Popen[bytes]) -> bytes:
        assert child.stdout is not None
        deadline, line = time.monotonic() + _TIMEOUT_S, b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))
            part = child.stdout.read(1 << 20) if readable else b""
            if not part:
                raise OSError("it ended" if readable else f"nothing for {_TIMEOUT_S:.0f} s")
            line += part
        return line
