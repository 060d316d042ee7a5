"""``stageout plugin new``: write a small working transfer plugin as a start for its author."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from stageout.cli.arguments import add_json
from stageout.cli.exits import CommandError, Exit, UsageError
from stageout.cli.results import tell

#: HTCondor cuts a URL's scheme at its last ``+``, ``-`` or ``.``, and looks up the rest.
_NAME = re.compile(r"[a-z][a-z0-9]*\Z", re.A)
#: Placeholder for the name in the files of the template.
_MARK = "NAME"

_EXECUTABLE = '''\
#!/usr/bin/env python3
"""Move files of NAME:// URLs for HTCondor jobs."""

from stageout.plugin import Abilities, run

run(Abilities(methods=("NAME",), version="0.1", verifies=True), "NAME_protocol:Protocol")
'''

_PROTOCOL = '''\
"""Protocol of NAME:// URLs. As written here it copies to and from directories that the node has mounted.

The top directory of each filesystem needs a file .NAME, which shows that the filesystem is mounted.
"""

import os
import shutil
from pathlib import Path
from urllib.parse import unquote, urlsplit

from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin.api import Context, Outcome, Request, TransferProtocol

CLASSES = {FileNotFoundError: ErrorClass.NOT_FOUND, PermissionError: ErrorClass.PERMISSION_DENIED}


class Protocol(TransferProtocol):
    """Copy each file. Several threads call the methods of one object."""

    def download(self, request: Request, context: Context) -> Outcome:
        return copy(path_of(request), Path(request.local_path))

    def upload(self, request: Request, context: Context) -> Outcome:
        return copy(Path(request.local_path), path_of(request))


def path_of(request: Request) -> Path:
    """Return the path in the URL: NAME:///mount/project/file is /mount/project/file.

    :raises TransferFailure: the filesystem is not mounted. That is nobody's file, so it counts as no attempt.
    """
    path = Path(unquote(urlsplit(request.encoded_url).path)).resolve()
    if not any((folder / ".NAME").exists() for folder in path.parents):  # or the node's own disk has the output
        raise TransferFailure(ErrorClass.CONNECT_FAILED, f"{path} is not mounted: no directory above it has .NAME")
    return path


def copy(source: Path, target: Path) -> Outcome:
    """Copy a file. Replace this function by the calls of your storage.

    :raises TransferFailure: with the class of the error, which decides about retries and about the hold of the job.
    """
    part = target.with_name(f".{target.name}.{os.getpid()}")  # under its name a file must be whole
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, part)
        with part.open("rb") as stream:
            os.fsync(stream.fileno())  # what counts as verified is on the disk
        size_bytes = part.stat().st_size
        if size_bytes != source.stat().st_size:
            raise TransferFailure(ErrorClass.SIZE_MISMATCH, f"only {size_bytes} bytes of {source.name} arrived")
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        kind = CLASSES.get(type(error), ErrorClass.SERVER_ERROR)
        raise TransferFailure(kind, f"{target}: {error.strerror}") from error
    return Outcome(size_bytes, size_bytes, verified="size")
'''

_TEST = '''\
"""Conformance of NAME_plugin with the rules by which HTCondor treats transfer plugins. Run: python3 -m pytest"""

import shutil
from pathlib import Path

from stageout.testing.conformance import check, failures, table
from stageout.testing.endpoints import Endpoint
from stageout.testing.starter import installed

HERE = Path(__file__).parent


def test_conformance(tmp_path):
    folder = tmp_path / "files"  # the directory that the URLs below NAME:// lead to
    folder.mkdir()
    (folder / ".NAME").touch()  # it is mounted
    plugin = installed(HERE / "NAME_plugin", tmp_path)
    shutil.copy(HERE / "NAME_protocol.py", tmp_path)
    findings = check(plugin, Endpoint(f"NAME://{folder}", folder))
    assert not failures(findings), table(findings)
'''

_SETUP = """\
# Install with the pip of the Python environment that has stageout: pip install --no-deps .
[build-system]
requires = ["setuptools >= 64"]
build-backend = "setuptools.build_meta"

[project]
name = "stageout-NAME-plugin"
version = "0.1"
requires-python = ">= 3.9"

[tool.setuptools]
py-modules = ["NAME_protocol"]
script-files = ["NAME_plugin"]
"""

#: File of the template -> text.
_FILES = {
    "NAME_plugin": _EXECUTABLE,
    "NAME_protocol.py": _PROTOCOL,
    "test_NAME.py": _TEST,
    "pyproject.toml": _SETUP,
}

DESCRIPTION = """\
Write a small transfer plugin for NAME:// URLs into a new directory: the executable, a module with its protocol, a
conformance test that passes, and pyproject.toml. The plugin copies to and from mounted directories, if their top
directory has a file .NAME.

exit status: 0 written, 1 the directory is not empty or cannot be written, 64 NAME cannot be a URL scheme"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    command.add_argument("action", choices=("new",))
    command.add_argument("name", metavar="NAME", help="URL scheme of the plugin: lower-case letters and digits")
    command.add_argument("--directory", metavar="DIR", help="where it is written (default: NAME_plugin, here)")
    add_json(command)


def run(options: argparse.Namespace) -> int:
    """Write the plugin and print the next steps."""
    folder = Path(options.directory or f"{options.name}_plugin")
    written = list(map(str, write(options.name, folder)))
    if options.json:
        tell({"name": options.name, "files": written})
        return int(Exit.OK)
    print("\n".join(written))
    print(f"\nTest it:  cd {folder} && python3 -m pytest\nInstall:  pip install --no-deps {folder}")
    return int(Exit.OK)


def write(name: str, folder: Path) -> list[Path]:
    """Write the files of a plugin.

    :param name: the URL scheme. :param folder: created if missing; must be empty.
    :returns: the files.
    :raises UsageError: no plugin can have that name. :raises CommandError: the folder has files.
    """
    if not _NAME.match(name):
        raise UsageError(f"'{name}' cannot be a URL scheme for HTCondor: use lower-case letters and digits")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise CommandError(f"{folder} is not empty: give another place with --directory")
    written = []
    for file, text in _FILES.items():
        path = folder / file.replace(_MARK, name)
        path.write_text(text.replace(_MARK, name))
        written.append(path)
    written[0].chmod(0o755)
    return written
