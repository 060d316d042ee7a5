"""Cold start of the single file: unpack what this Python needs, once, however many start at the same time.

The directory appears under its name only when it is whole. One process unpacks and the others wait for it: the lock
goes with the process that holds it, so one that is killed leaves nothing but a half-made directory, which the next one
removes.
"""

import errno
import fcntl
import json
import marshal
import os
import py_compile
import shutil
import sys
import tempfile
import zipfile


class Refused(Exception):
    """This file is of no use here; the text says what to do."""


def unpack(archive, parent, wanted):
    """Make ``parent/wanted`` out of the archive unless somebody else has done so meanwhile.

    :raises Refused: the archive is not for this Python. :raises OSError: it cannot be written there.
    """
    os.makedirs(parent, mode=0o700, exist_ok=True)
    with open(os.path.join(parent, "lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ready = os.path.join(parent, wanted)
        if os.path.isdir(ready):
            return
        for name in os.listdir(parent):
            if name.startswith("half-"):
                shutil.rmtree(os.path.join(parent, name), ignore_errors=True)
        half = tempfile.mkdtemp(prefix="half-", dir=parent)
        try:
            _fill(archive, half, ready)
            os.chmod(half, 0o755)
            os.rename(half, ready)
        except BaseException:
            shutil.rmtree(half, ignore_errors=True)
            raise


def _fill(archive, directory, ready):
    major, minor = sys.version_info[:2]
    with zipfile.ZipFile(archive) as outer, zipfile.ZipFile(outer.open("payload.zip")) as file:
        manifest = json.loads(file.read("manifest.json"))
        machine = os.uname().machine
        if machine != manifest["machine"]:
            raise Refused(f"this file was made for {manifest['machine']}, and this is {machine}")
        files = manifest["files"].get(f"{major}.{minor}")
        if files is None:
            known = ", ".join(manifest["pythons"])
            raise Refused(f"this file was made for Python {known}, and this is {major}.{minor}")
        made = set()
        for path, blob in files.items():
            target = os.path.join(directory, path)
            parent = os.path.dirname(target)
            if parent not in made:
                os.makedirs(parent, exist_ok=True)
                made.add(parent)
            with open(target, "wb") as stream:
                stream.write(file.read("blobs/" + blob))
    for path in files:
        if path.endswith(".py"):
            _compile(os.path.join(directory, path), os.path.join(ready, path))


def _compile(source, name):
    """Bytecode that is whole: before 3.12.8, Python leaves what fits of it on a full disk, and says nothing."""
    # As whoever finds it: time stamps may change when a directory is copied, contents do not.
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    try:
        made = py_compile.compile(source, dfile=name, doraise=True, invalidation_mode=mode)
    except py_compile.PyCompileError:
        return  # a package's template, or for another version
    with open(made, "rb") as stream:
        stream.seek(16)
        try:
            marshal.loads(stream.read())
        except (EOFError, ValueError, TypeError):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
