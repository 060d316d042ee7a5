"""Note which functions of the product each test calls. Python imports this at its start, where it lies on the path.

Programs that a test starts find it there, too. ``traced`` beside it has the folder for the notes and, line by line, the
folders of the product. Each note is written at once: a process may be killed. It has a test with its phase, ``(setup)``
or ``(call)``, a file and a function, each with a zero behind it: the name of a test may have any other character.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_ROOT = f"{Path(__file__).resolve().parent}{os.sep}"
_INTO, *_folders = Path(_ROOT, "traced").read_text().splitlines()
_FOLDERS = tuple(f"{_ROOT}{name}{os.sep}" for name in _folders)
#: Programs may be started with an environment of their own: the test that runs is noted, too.
_NOW = f"{_INTO}/now"
_TEST = b"PYTEST_CURRENT_TEST"
#: Bound here: tests put others in their places.
_environment, _open, _write, _close, _pid = os.environ._data, os.open, os.write, os.close, os.getpid  # type: ignore[attr-defined]
_seen: set[CodeType] = set()
_others: set[CodeType] = set()
_current = b""
_of_start = b""


def _add(path: str, flags: int, data: bytes) -> None:
    try:
        file = _open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o666)
    except OSError:
        return  # no descriptor is left, or the process may not write
    try:
        _write(file, data)
    finally:
        _close(file)


def _note(frame: FrameType, event: str, argument: Any) -> None:
    global _current
    test = _environment.get(_TEST, _of_start)
    if test != _current:
        _seen.clear()
        _current = test
        if test != _of_start:
            _add(_NOW, os.O_TRUNC, test)
    code = frame.f_code
    if code in _others or code in _seen or not test:
        return
    if code.co_filename.startswith(_FOLDERS):
        _seen.add(code)
        words = (test, code.co_filename[len(_ROOT) :].encode(), code.co_name.encode(), b"")
        _add(f"{_INTO}/{_pid()}", os.O_APPEND, b"\0".join(words))
    else:
        _others.add(code)


try:
    with open(_NOW, "rb") as _started:
        _of_start = _started.read()
except OSError:
    pass
threading.settrace(_note)
sys.settrace(_note)
