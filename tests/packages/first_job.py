"""The quick start with a package, followed in clean roots to a delivered job: a part of ``make dist-test``."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.harness.pool.image import Image, run_host
from tests.packages.followed import Command, File, Machine, steps
from tests.packages.roots import base_container as base_container
from tests.packages.roots import build_container, clean_root, el9_root, install_deb, package, shell
from tests.packages.transplant import add_htcondor

PAGE, SECTION = "docs/start/quick-start.md", "A personal pool from the package"
#: On a loaded machine the script that tunes the kernel takes longer than condor_master waits for it.
_PATIENT = "ENABLE_KERNEL_TUNING = false\n"


def debian_root(suite: str) -> Callable[[Path], Image]:
    def make(place: Path) -> Image:
        image = clean_root(place, suite, [])
        settings = run_host(["apt-config", "dump", "Acquire::Check-Valid-Until"]).stdout
        (image.root / "etc/apt/apt.conf.d/99host").write_text(f'{settings}APT::Get::Assume-Yes "true";\n')
        policy = image.root / "usr/sbin/policy-rc.d"  # systemd is not there to start what is installed
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
        shell(image, "apt-get update -q")
        return image

    return make


def install_as_the_page_says(image: Image, command: Command, distribution: str) -> None:
    """Run the page's command for the installation, with the network of this machine."""
    deb = package(f"stageout_*.{distribution}_amd64.deb")
    shutil.copy(deb, image.root / "root")
    text = command.text.replace(".deb14_", f".{distribution}_")
    assert f"./{deb.name}" in text, text
    shell(image, f"cd /root; {text}")


def follow(image: Image, rest: Sequence[Command | File], folder: Path) -> None:
    """Do what the page says after the installation."""
    (image.root / "etc/condor/config.d/05-loaded-machine").write_text(_PATIENT)
    machine = Machine(image, folder)
    try:
        machine.start_htcondor()
        machine.follow(rest)
    finally:
        machine.end()


@pytest.mark.parametrize(("distribution", "suite"), [("deb13", "trixie"), ("deb14", "forky")])
def test_the_quick_start_ends_with_a_delivered_job(distribution: str, suite: str, tmp_path: Path) -> None:
    """All is the distribution's own: HTCondor, its bindings, Python."""
    image = debian_root(suite)(tmp_path)
    install, *rest = steps(PAGE, SECTION)
    assert isinstance(install, Command)
    install_as_the_page_says(image, install, distribution)
    follow(image, rest, tmp_path / "machine")


def deb12_root(place: Path) -> Image:
    image = clean_root(place, "bookworm", ["python3"])
    install_deb(image, "deb12")
    return image


def rpm_root(place: Path) -> Image:
    image = el9_root(place)
    shutil.copy(package("stageout-*.el9.x86_64.rpm"), image.root / "tmp/stageout.rpm")
    shell(image, "rpm -i --nodeps /tmp/stageout.rpm")
    return image


@pytest.mark.parametrize(("make_root", "python"), [(deb12_root, "3.11"), (rpm_root, "3.9")])
def test_the_quick_start_where_htcondor_is_from_elsewhere(
    make_root: Callable[[Path], Image], python: str, tmp_path: Path
) -> None:
    """Package, Python and pycurl are real; HTCondor is Debian 14's (transplant.py); the RPM's root is a Debian 11."""
    image = make_root(tmp_path)
    add_htcondor(image, python)
    follow(image, steps(PAGE, SECTION)[1:], tmp_path / "machine")


@pytest.mark.timeout(1800)
def test_the_trial_container_delivers_two_jobs(base_container: list[str], tmp_path: Path) -> None:
    """Built as any container, then run as a machine of its own: buildah would share this machine's ports with it."""
    name = build_container("trial", base_container)
    root = Path(run_host([*base_container, "mount", name]).stdout.split()[-1])
    machine = Machine(Image("trial", root, tmp_path), tmp_path / "machine")
    began = time.monotonic()
    try:
        done = machine.run("trial", as_root=True)
    finally:
        machine.end()
    print(f"{done.stdout}  {time.monotonic() - began:.0f} s from the start to both deliveries")
    assert not done.returncode, done.stdout + done.stderr
    assert {"1.0 alice Delivered", "1.1 alice Delivered"} <= set(done.stdout.splitlines())
    assert done.stdout.count(" 100000000 ") == 2
