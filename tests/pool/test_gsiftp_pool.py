"""A job with input and output by GridFTP and an X.509 proxy on a real pool, against Debian's GridFTP server."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.gsiftp.authority import Authority
from tests.harness.destination import Destination
from tests.harness.gridftp import GridFtpServer
from tests.harness.pool.image import PATH, USERS
from tests.harness.pool.pytest_plugin import keep_logs
from tests.pool.conftest import QUICK_AP, QUICK_EP, Site, open_directory

pytestmark = pytest.mark.pool

GIVEN = b"from the GridFTP server\n"
#: Those of the node's own C library stay behind: the node has another one.
_NODE_HAS = ("libc.", "libm.", "ld-linux", "libdl.", "libpthread.", "librt.", "libresolv.", "linux-vdso")
_EP = """
FILETRANSFER_PLUGINS = /opt/stageout/bin/gsiftp_plugin, $(FILETRANSFER_PLUGINS)
STARTD_ENVIRONMENT = "PATH={path} X509_CERT_DIR={trust}"
SANDBOX_MANAGER_ENVIRONMENT = "PATH={path} X509_CERT_DIR={trust}"
"""


def _install_client(folder: Path) -> None:
    """globus-url-copy of this machine with its libraries, for a node that has none of its packages."""
    program = shutil.which("globus-url-copy")
    assert program, "tools/install installs globus-url-copy"
    libraries = folder / "lib"
    libraries.mkdir(parents=True)
    shutil.copy(program, folder / "program")
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    needed = [Path(path) for path in re.findall(r" => (/\S+)", listed)]
    loaded = list(needed[0].parent.glob("libglobus_*.so*"))  # drivers that it opens by name
    for path in (*needed, *loaded):
        if not path.name.startswith(_NODE_HAS):
            shutil.copy(path, libraries / path.name)
    script = folder / "globus-url-copy"
    script.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={libraries} exec {folder}/program "$@"\n')
    script.chmod(0o755)


def test_output_goes_by_gridftp_when_the_slot_is_free(
    stageout_pools: Any, destination: Destination, request: pytest.FixtureRequest
) -> None:
    with open_directory("gsiftp") as shared:
        authority = Authority(shared / "authority")
        _install_client(shared / "client")
        node = _EP.format(path=f"{PATH}:{shared}/client", trust=authority.trust)
        with GridFtpServer(shared / "server", gsi=authority.server()) as server:
            server.files.chmod(0o777)
            (server.files / "given").write_bytes(GIVEN)
            settings = {
                "version": "25.14", "execute_points": 1, "cpus": 2, "binds": (shared,), "ap_config": QUICK_AP,
                "ep_config": f"{QUICK_EP}{node}",
            }  # fmt: skip
            with stageout_pools(**settings) as pool:
                _play(Site(pool, destination, "gsiftp", shared), server, authority)
                keep_logs(request, [pool])


def _play(site: Site, server: GridFtpServer, authority: Authority) -> None:
    proxy = authority.proxy()
    shutil.chown(proxy, USERS["alice"], USERS["alice"])
    job = site.submit(
        extra=f"x509userproxy = {proxy}\ntransfer_input_files = {server.url('given')}\n"
        "transfer_output_files = out1, out2, given",
        destination=server.url("results/$(Cluster)"),
    )
    ad = site.wait_left(job, timeout_s=120)
    handed_off = site.epoch_results(job)[0]
    assert handed_off["TransferProtocol"] == "stageout", str(handed_off["DeveloperData"])
    assert ad["StageOutState"] == "Delivered"
    arrived = server.files / "results" / str(job.cluster)
    assert (arrived / "given").read_bytes() == GIVEN
    for name, digest in site.wrote(job).items():
        assert hashlib.sha256((arrived / name).read_bytes()).hexdigest() == digest
