"""A Debian package and an RPM of a tree, by the distributions' own programs: dpkg-deb and rpmbuild."""

from __future__ import annotations

import email.utils
import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
_DEBIAN_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_SUMMARY = "Delivers the output of HTCondor jobs after their end, verified"
_LONG = (
    "Frees a job's CPU slot the moment the job ends. Transfer plugins and daemons",
    "for unmodified HTCondor: execute points, access points, pilots, the overlay's",
    "routers, the policy service and the web page. A role is switched on by a link",
    "from /etc/condor/config.d to its fragment in",
    "/usr/share/stageout/condor_config.d.",
)


class Facts(NamedTuple):
    """The description of a package.

    :param release: such as "1.deb12". :param python: such as "3.11". :param epoch: time of the sources, in s since
        1970. :param license: SPDX expression of all that it contains. :param requires: further packages, of an RPM.
    """

    version: str
    release: str
    python: str
    machine: str
    epoch: int
    address: str
    author: str
    author_email: str
    license: str
    requires: Sequence[str] = ()

    @property
    def next_python(self) -> str:
        """Return the first version that it does not fit."""
        major, minor = self.python.split(".")
        return f"{major}.{int(minor) + 1}"


def make_deb(root: Path, facts: Facts, out: Path) -> None:
    """Make a Debian package. The tree gets its change log and its control files."""
    machine = _DEBIAN_MACHINES[facts.machine]
    maintainer = f"{facts.author} <{facts.author_email}>"
    changed = (
        f"stageout ({facts.version}-{facts.release}) unstable; urgency=medium\n\n"
        f"  * Release {facts.version}: see changelog.gz.\n\n"
        f" -- {maintainer}  {email.utils.formatdate(facts.epoch)}\n"
    )
    log = root / "usr/share/doc/stageout/changelog.Debian.gz"
    log.write_bytes(gzip.compress(changed.encode(), 9, mtime=0))
    control = root / "DEBIAN"
    control.mkdir()
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    sizes = sum(-(-path.stat().st_size // 1024) for path in files)
    lines = [
        "Package: stageout",
        f"Version: {facts.version}-{facts.release}",
        f"Architecture: {machine}",
        f"Maintainer: {maintainer}",
        f"Installed-Size: {sizes}",
        f"Depends: python3 (>= {facts.python}), python3 (<< {facts.next_python}), libc6 (>= 2.28), libgcc-s1, zlib1g",
        "Suggests: condor",
        "Section: net",
        "Priority: optional",
        f"Homepage: {facts.address}",
        f"Description: {_SUMMARY}",
        *(f" {line}" for line in _LONG),
    ]
    (control / "control").write_text("".join(f"{line}\n" for line in lines))
    sums = (f"{hashlib.md5(path.read_bytes()).hexdigest()}  {path.relative_to(root)}\n" for path in files)
    (control / "md5sums").write_text("".join(sums))
    for ours, theirs in (("postinstall.sh", "postinst"), ("preremove.sh", "prerm")):
        shutil.copyfile(HERE / ours, control / theirs)
    for path in [log, control, *control.iterdir()]:
        path.chmod(0o755 if path.is_dir() or path.name in ("postinst", "prerm") else 0o644)
        os.utime(path, (facts.epoch, facts.epoch))
    name = out / f"stageout_{facts.version}-{facts.release}_{machine}.deb"
    _run("dpkg-deb", "dpkg", "--root-owner-group", "-Zxz", "-z3", "--threads-max=1", "--build", str(root), str(name))


def make_rpm(root: Path, facts: Facts, out: Path) -> None:
    """Make an RPM. Its payload's names begin with ``./``: who unpacks it elsewhere writes there."""
    with tempfile.TemporaryDirectory() as scratch:
        values = {
            "topdir": scratch, "tree": str(root), "ver": facts.version, "rel": facts.release,
            "summary": _SUMMARY, "license_tag": facts.license, "address": facts.address, "scripts": str(HERE),
            "author": f"{facts.author} <{facts.author_email}>", "long": "\n".join(_LONG),
            "requires": " ".join([f"python(abi) = {facts.python}", *facts.requires]),
            "changed": time.strftime("%a %b %d %Y", time.gmtime(facts.epoch)),
        }  # fmt: skip
        defines = [part for name, value in values.items() for part in ("--define", f"_{name} {value}")]
        spec = str(HERE / "stageout.spec")
        _run("rpmbuild", "rpm", "--quiet", "-bb", "--target", f"{facts.machine}-linux", *defines, spec)
        (rpm,) = Path(scratch).glob("RPMS/*/*.rpm")
        shutil.copyfile(rpm, out / rpm.name)


def _run(program: str, package: str, *arguments: str) -> None:
    if shutil.which(program) is None:
        sys.exit(f"packages: NOT BUILT: {program} is not installed (Debian's package {package})")
    subprocess.run([program, *arguments], check=True)
