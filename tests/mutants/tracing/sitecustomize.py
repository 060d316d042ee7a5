"""Note which functions of the product each test calls. Python imports this at its start, where it lies on the path.

Programs that a test starts inherit the path, and the name of the test. Each note is written at once: a process may be
killed. Lines have a test (with ``(setup)``, ``(call)`` or ``(teardown)``), a file and a function, with tabs between.
"""

from __future__ import annotations

import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any

_INTO = os.environ.get("STAGEOUT_TRACED_INTO", "")
_ROOT = os.environ.get("STAGEOUT_TRACED_ROOT", "") + os.sep
_FOLDERS = tuple(_ROOT + name + os.sep for name in os.environ.get("STAGEOUT_TRACED_FOLDERS", "").split())
_TEST = b"PYTEST_CURRENT_TEST"
#: Bound here: tests put others in their places.
_environment, _open, _write, _close, _pid = os.environ._data, os.open, os.write, os.close, os.getpid  # type: ignore[attr-defined]
_seen: set[CodeType] = set()
_others: set[CodeType] = set()
_current = b""


def _note(frame: FrameType, event: str, argument: Any) -> None:
    global _current
    code = frame.f_code
    if code in _others:
        return
    test = _environment.get(_TEST, b"")
    if test != _current:
        _seen.clear()
        _current = test
    if code in _seen or not test:
        return
    if not code.co_filename.startswith(_FOLDERS):
        _others.add(code)
        return
    _seen.add(code)
    line = b"%s\t%s\t%s\n" % (test, code.co_filename[len(_ROOT) :].encode(), code.co_name.encode())
    try:
        file = _open(f"{_INTO}/{_pid()}", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        return  # no descriptor is left, or the process may not write
    try:
        _write(file, line)
    finally:
        _close(file)


if _INTO:
    threading.settrace(_note)
    sys.settrace(_note)
