"""Make the single file for pilots: ``python tools/pilot/build.py [--python 3.11]... OUTPUT``.

Plugins, manager and command line with everything that they need beside Python itself, for several versions of Python.
Wheels are those of requirements/pilot.txt, for a fixed platform, so that the machine that builds does not matter. The
same file content is stored once however many versions use it.
"""

from __future__ import annotations

import argparse
import configparser
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PYTHONS = ("3.9", "3.10", "3.11", "3.12", "3.13", "3.14")
#: Packages of the product that a pilot runs.
_PACKAGES = ("stageout", "sandbox_manager")
_LEFT_OUT = ("stageout/testing/",)
_PROGRAMS = ("stageout", "stageout-sandbox-manager", "stageout-startd-cron")
_STAMP = (2020, 1, 1, 0, 0, 0)


def main() -> int:
    """Build; prints the name and size of what was made."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", default=[], help=f"version, else {', '.join(PYTHONS)}")
    parser.add_argument("--machine", default="x86_64", help="default: %(default)s; aarch64 is the other one")
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    ours = dict(_own_files(setup))
    files = {}
    wheels: list[Path] = []
    with tempfile.TemporaryDirectory() as scratch:
        for version in options.python or PYTHONS:
            site = Path(scratch) / version
            wheels += _install(version, options.machine, Path(scratch), site)
            files[version] = {**dict(_files(site)), **ours}
        notices = [sys.executable, str(ROOT / "tools/packages/notices.py"), *map(str, wheels)]
        papers = subprocess.run(notices, check=True, capture_output=True).stdout
    options.output.parent.mkdir(parents=True, exist_ok=True)
    _write(options.output, options.machine, files, papers)
    print(f"{options.output}: {options.output.stat().st_size / 1e6:.1f} MB for Python {', '.join(files)}")
    return 0


def _install(version: str, machine: str, scratch: Path, site: Path) -> list[Path]:
    """Unpack the wheels for one version of Python; return them. Of what they keep outside it, a pilot needs nothing."""
    wheels = scratch / f"wheels-{version}"
    lock = ROOT / "requirements" / "pilot.txt"
    command = [sys.executable, str(ROOT / "tools/packages/wheels.py"), str(lock), version, str(wheels)]
    subprocess.run([*command, "--machine", machine], check=True)
    found = sorted(wheels.glob("*.whl"))
    for path in found:
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(site, [name for name in wheel.namelist() if ".data/" not in name])
    return found


def _files(site: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(site.rglob("*")):
        name = path.relative_to(site).as_posix()
        if path.is_file() and not name.startswith("bin/") and "__pycache__" not in path.parts:
            yield name, path.read_bytes()


def _own_files(setup: configparser.ConfigParser) -> Iterator[tuple[str, bytes]]:
    """The product's modules, its programs, and its configuration fragments for pilots."""
    for package in _PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(_LEFT_OUT):
                yield name, path.read_bytes()
    for path in sorted((ROOT / "plugins").glob("*_plugin")):
        yield f"programs/{path.name}", path.read_bytes()
    for line in setup.get("options.entry_points", "console_scripts").split("\n"):
        name, _, target = (part.strip() for part in line.partition("="))
        if name in _PROGRAMS:
            module, _, function = target.partition(":")
            yield f"programs/{name}", f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n".encode()
    for name in ("20-stageout-ep.conf", "30-stageout-pilot.conf"):
        yield f"condor_config.d/{name}", (ROOT / "condor_config.d" / name).read_bytes()


def _write(output: Path, machine: str, files: Mapping[str, Mapping[str, bytes]], papers: bytes) -> None:
    """The archive, with shell before it. The same input makes the same file, byte for byte.

    :param papers: notices of the software of other authors, for who looks into the archive.
    """
    blobs = {_name(data): data for content in files.values() for data in content.values()}
    index = {tag: {path: _name(data) for path, data in sorted(content.items())} for tag, content in files.items()}
    manifest = json.dumps({"machine": machine, "pythons": list(files), "files": index}, sort_keys=True).encode()
    scripts = {name: (HERE / name).read_text() for name in ("launcher.py", "unpack.py")}
    build = _name(manifest + "".join(scripts.values()).encode())
    # The launcher is read at every start, and with it the archive's list of contents: the rest is one entry in it.
    with tempfile.TemporaryDirectory() as scratch:
        payload = Path(scratch) / "payload.zip"
        with zipfile.ZipFile(payload, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            _add(archive, "manifest.json", manifest)
            _add(archive, "THIRD-PARTY.txt", papers)
            for name, data in sorted(blobs.items()):
                _add(archive, f"blobs/{name}", data)
        aside = output.with_name(f".{output.name}.new")
        with open(aside, "wb") as stream:
            stream.write(_head().encode())
            with zipfile.ZipFile(stream, "w") as archive:
                _add(archive, "__main__.py", scripts["launcher.py"].replace("@BUILD@", build).encode())
                _add(archive, "unpack.py", scripts["unpack.py"].encode())
                _add(archive, "payload.zip", payload.read_bytes())
    aside.chmod(0o755)
    aside.replace(output)


def _head() -> str:
    """The beginning of plugins, up to the search for their interpreter: here it is that of the path."""
    text = (ROOT / "plugins" / "stageout_curl_plugin").read_text()
    answering = text[text.index("if [") : text.index("self=")]
    return f'#!/bin/sh\n{answering}exec python3 "$0" "$@"\n'


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    entry = zipfile.ZipInfo(name, _STAMP)
    entry.compress_type = archive.compression
    entry.external_attr = 0o644 << 16
    archive.writestr(entry, data)


def _name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:20]


if __name__ == "__main__":
    sys.exit(main())
