"""The startd, asked from a process of its own.

HTCondor's bindings hold the interpreter while they wait for the network: a startd that hangs would hold up the whole
manager, not only the thread that asks it. Run as ``python -m sandbox_manager.intake.startd_process LOCAL_NAME`` this
module is the child: a line on stdin is the question, a line of JSON on stdout the answer. An empty line asks for the
slots, any other is an expression.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from sandbox_manager.intake.startd import SlotAd, ask_about_machine, ask_startd
from stageout.condor.configuration import condor_settings
from stageout.condor.limits import STARTD_S
from stageout.core.children import module_command
from stageout.core.sockets import readable


class StartdError(Exception):
    """The startd cannot be asked; the text says why."""


class StartdProcess:
    """A function that asks the startd for its slots. It blocks without holding the interpreter; use it in a thread.

    :param local_name: as of the daemon. :param timeout_s: for one question, then the child is replaced.
    """

    def __init__(self, local_name: str = "", timeout_s: float = STARTD_S) -> None:
        self._argv = module_command("sandbox_manager.intake.startd_process", local_name)
        self._timeout_s = timeout_s
        self._turn = threading.Lock()
        self._child = self._start()

    def __call__(self) -> Sequence[SlotAd]:
        """Return all slots. :raises StartdError: no answer, or an error for one."""
        slots: list[SlotAd] = self._answer("", "slots")
        return slots

    def evaluate(self, expression: str) -> object:
        """Evaluate an expression in the machine's ad. Return None when it has no value.

        :raises StartdError: no answer, or an error for one.
        """
        return self._answer(" ".join(expression.split()), "value")

    def _answer(self, question: str, name: str) -> Any:
        with self._turn:
            if self._child.poll() is not None:
                self._child = self._start()
            try:
                line = self._query(self._child, question)
            except (OSError, StartdError):
                self._end()
                raise
        answer = json.loads(line)
        if "error" in answer:
            raise StartdError(answer["error"])
        return answer[name]

    def close(self) -> None:
        """End the child."""
        self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def _end(self) -> None:
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _query(self, child: subprocess.Popen[bytes], question: str) -> bytes:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(f"{question}\n".encode())
        child.stdin.flush()
        if not readable([child.stdout.fileno()], self._timeout_s):
            raise StartdError(f"it did not answer within {self._timeout_s:g} s")
        line = child.stdout.readline()
        if not line:
            raise StartdError("the process that asks it ended")
        return line


def main() -> int:
    """Answer until stdin ends."""
    # The bindings may print; what they print must not look like an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = condor_settings(sys.argv[1] if len(sys.argv) > 1 else "")
    ask, evaluate = ask_startd(settings), ask_about_machine(settings)
    for line in sys.stdin:
        question = line.strip()
        try:
            answer: dict[str, object] = {"value": evaluate(question)} if question else {"slots": ask()}
        except Exception as problem:
            answer = {"error": str(problem) or type(problem).__name__}
        print(json.dumps(answer, default=str), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
