"""Wheels of one lock file for one version of Python: ``python tools/packages/wheels.py LOCK PYTHON DIRECTORY``.

pip can download for another Python than its own, but it evaluates a marker (``python_version < "3.11"``) for its own.
So the markers are evaluated here, and pip gets a list without any.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

#: The first one is that of the files without a machine in their name.
MACHINES = ("x86_64", "aarch64")


def main() -> int:
    """Download what the command line names. No source is built: it would be for this machine only."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lock", type=Path, help="file of requirements/ with hashes")
    parser.add_argument("python", help="such as 3.11")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--machine", choices=MACHINES, default=MACHINES[0], help="default: %(default)s")
    options = parser.parse_args()
    download(options.lock, options.python, options.directory, options.machine)
    return 0


def download(lock: Path, version: str, directory: Path, machine: str, without: Collection[str] = ()) -> list[Path]:
    """Download the wheels that one version of Python needs; pip checks their hashes.

    :param version: such as "3.11". :param without: names of requirements to leave out.
    :return: one wheel for each requirement; others may be in the directory already.
    :raises subprocess.CalledProcessError: a wheel cannot be had, or has another hash.
    """
    directory.mkdir(parents=True, exist_ok=True)
    platforms = [part for name in ("_2_28", "_2_17", "2014") for part in ("--platform", f"manylinux{name}_{machine}")]
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    with tempfile.TemporaryDirectory() as scratch:
        wanted = Path(scratch) / "wanted.txt"
        wanted.write_text("".join(f"{line}\n" for line in applicable(lock.read_text(), version, without)))
        fresh = Path(scratch) / "wheels"
        subprocess.run(
            [*command, "--only-binary=:all:", "--require-hashes", *platforms, "--python-version", _full(version),
             "--dest", str(fresh), "-r", str(wanted)],
            check=True,
        )  # fmt: skip
        return [path.replace(directory / path.name) for path in sorted(fresh.glob("*.whl"))]


def _full(version: str) -> str:
    """Return a late patch release: packages exclude the first ones, which "3.9" alone would mean."""
    return f"{version}.99"


def applicable(lock: str, version: str, without: Collection[str] = ()) -> Iterator[str]:
    """Yield the requirements of a lock file that hold for one version of Python, with hashes and without markers."""
    environment = {**default_environment(), "python_version": version, "python_full_version": _full(version)}
    for line in re.sub(r"\\\n", " ", lock).splitlines():
        text, *hashes = re.split(r"\s+(?=--hash=)", line.partition(" #")[0].strip())
        if not text or text.startswith(("#", "-")):
            continue
        requirement = Requirement(text)
        applies = requirement.marker is None or requirement.marker.evaluate(environment)
        if applies and requirement.name not in without:
            yield " ".join([f"{requirement.name}{requirement.specifier}", *hashes])


if __name__ == "__main__":
    sys.exit(main())
