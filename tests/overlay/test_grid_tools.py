"""Tools of the grid at routers: gfal2 as FTS uses it, XRootD, davix, and litmus, which checks WebDAV."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from tests.curl.real_servers import House, Running, program
from tests.harness.ports import free_ports
from tests.overlay.http_site import Site, site

_CONTENT = os.urandom(3 * 1024 * 1024 + 11)
_ADLER = f"{zlib.adler32(_CONTENT):08x}"
_TIMEOUT_S = 60


@dataclass
class _Grid:
    """Two routers that know the same users, and copy from and to each other."""

    here: Site
    there: Site
    home: Path
    authority: trustme.CA

    def url(self, site: Site, path: str) -> str:
        """As gfal2 writes it."""
        return f"davs{site.url.removeprefix('https')}{path}"

    def run(self, *command: str, expect: int = 0) -> str:
        """Output of a tool that sends a token of alice, and ends with this code."""
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, cwd=self.home, check=False,
            env={
                **os.environ, "BEARER_TOKEN": self.here.token(), "X509_CERT_DIR": str(self.home / "certificates"),
                "GFAL_PYTHONBIN": "/usr/bin/python3",  # the bindings are Debian's
            },
        )  # fmt: skip
        said = done.stdout + done.stderr
        assert done.returncode == expect, said
        return said

    def davix(self, tool: str, *arguments: str, expect: int = 0) -> str:
        """Output of one of davix's programs."""
        token = f"Authorization: Bearer {self.here.token()}"
        certificates = str(self.home / "certificates")
        return self.run(f"davix-{tool}", "--capath", certificates, "--header", token, *arguments, expect=expect)


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Grid]:
    home, authority = tmp_path_factory.mktemp("grid"), trustme.CA()
    (home / "certificates").mkdir()
    authority.cert_pem.write_to_path(str(home / "certificates/ca.pem"))
    subprocess.run(["openssl", "rehash", str(home / "certificates")], check=True)
    (home / "source").write_bytes(_CONTENT)
    settings = {
        "SSL_CERT_FILE": str(home / "certificates/ca.pem"), "STAGEOUT_ROUTER_COPY_HOSTS": "localhost",
        "STAGEOUT_ROUTER_HTTP_PLAIN": "true",
    }  # fmt: skip
    with ExitStack() as stack:
        here = stack.enter_context(site(home / "here", settings, authority=authority))
        there = stack.enter_context(site(home / "there", settings, authority=authority, keys=here.keys))
        yield _Grid(here, there, home, authority)


def test_gfal_changes_names_and_compares_digests(grid: _Grid) -> None:
    source, top = f"file://{grid.home}/source", grid.url(grid.here, "/gfal")
    grid.run("gfal-mkdir", "-p", f"{top}/inner")
    grid.run("gfal-copy", "-K", "ADLER32", source, f"{top}/f")
    assert (grid.here.root / "gfal/f").read_bytes() == _CONTENT
    grid.run("gfal-copy", "-K", f"ADLER32:{_ADLER}", f"{top}/f", f"file://{grid.home}/gfal-back")
    assert (grid.home / "gfal-back").read_bytes() == _CONTENT
    assert _ADLER in grid.run("gfal-sum", f"{top}/f", "ADLER32")
    for kind in ("MD5", "SHA-256", "SHA-512"):
        ours = grid.run("gfal-sum", f"{top}/f", kind).split()[-1]
        program = f"{kind.lower().replace('-', '')}sum"
        assert ours == grid.run(program, f"{grid.home}/source").split()[0]
    assert "3145739\tregular file" in grid.run("gfal-stat", f"{top}/f")
    assert set(grid.run("gfal-ls", f"{top}/").split()) == {"f", "inner"}
    assert "File exists" in grid.run("gfal-copy", source, f"{top}/f", expect=17)
    grid.run("gfal-copy", "-f", "-K", "MD5", source, f"{top}/f")
    wrong = grid.run("gfal-copy", "-f", "-K", "ADLER32:00000001", source, f"{top}/wrong", expect=5)
    assert "CHECKSUM MISMATCH" in wrong and not (grid.here.root / "gfal/wrong").exists()
    grid.run("gfal-rename", f"{top}/f", f"{top}/inner/g")
    assert "No such file" in grid.run("gfal-stat", f"{top}/f", expect=2)
    grid.run("gfal-rm", f"{top}/inner/g")
    grid.run("gfal-rm", "-r", top)
    assert not (grid.here.root / "gfal").exists()


@pytest.mark.parametrize("mode", ["pull", "push", "streamed"])
@pytest.mark.parametrize("is_within", [False, True], ids=["between two routers", "within one"])
def test_gfal_copies_between_routers(grid: _Grid, mode: str, is_within: bool) -> None:
    """As FTS does it: the source answers with its digest, one router does the work, and the digest is compared."""
    (grid.here.root / "copied").mkdir(exist_ok=True)
    (grid.here.root / "copied/source").write_bytes(_CONTENT)
    to = grid.here if is_within else grid.there
    source, target = grid.url(grid.here, "/copied/source"), grid.url(to, f"/copied/new/{mode}")
    said = grid.run("gfal-copy", "-vv", "-p", "--copy-mode", mode, "-K", "ADLER32", source, target)
    assert re.search(rf"Copy succeeded using mode .*{mode}", said), said
    assert (to.root / f"copied/new/{mode}").read_bytes() == _CONTENT


_XROOTD = """\
all.export /
oss.localroot {root}
all.adminpath {home}/admin
all.pidpath {home}/admin
xrd.port {native}
xrd.protocol http:{port} libXrdHttp.so
xrd.tls {home}/cert.pem {home}/key.pem
xrd.tlsca certdir {home}/certificates
http.exthandler xrdtpc libXrdHttpTPC.so
xrootd.chksum max 2 adler32
"""


@pytest.fixture(scope="module")
def xrootd(grid: _Grid) -> Iterator[Running]:
    """XRootD with HTTPS, which does third-party copies and everybody's wishes."""
    with House() as house:
        home, (port, native) = house.home(), free_ports(2)
        root = house.root(home)
        certificate = grid.authority.issue_cert("localhost")
        certificate.private_key_pem.write_to_path(str(home / "key.pem"))
        certificate.cert_chain_pems[0].write_to_path(str(home / "cert.pem"))
        (home / "key.pem").chmod(0o400)
        shutil.copytree(grid.home / "certificates", home / "certificates")
        (home / "admin").mkdir()
        user = ["-R", "nobody"] if os.getuid() == 0 else []
        if user:
            for path in (home / "admin", home / "key.pem"):
                shutil.chown(path, "nobody")
        (home / "cf").write_text(_XROOTD.format(root=root, home=home, port=port, native=native))
        command = [program("xrootd", "xrootd-server"), "-c", home / "cf", "-n", "t", "-l", home / "xrootd.log", *user]
        house.start(command, port, home / "log")
        yield Running(f"https://localhost:{port}", root)


@pytest.mark.parametrize("mode", ["pull", "push", "streamed"])
def test_gfal_copies_between_a_router_and_xrootd(grid: _Grid, xrootd: Running, mode: str) -> None:
    """Each of them reads from and writes to the other."""
    (grid.here.root / "for-xrootd").write_bytes(_CONTENT)
    there = f"davs{xrootd.base.removeprefix('https')}"
    options = ("gfal-copy", "-vv", "--copy-mode", mode, "-K", "ADLER32")
    said = grid.run(*options, grid.url(grid.here, "/for-xrootd"), f"{there}/dir/{mode}")
    assert re.search(rf"Copy succeeded using mode .*{mode}", said), said
    assert (xrootd.root / f"dir/{mode}").read_bytes() == _CONTENT
    said = grid.run(*options, f"{there}/dir/{mode}", grid.url(grid.here, f"/from-xrootd-{mode}"))
    assert re.search(rf"Copy succeeded using mode .*{mode}", said), said
    assert (grid.here.root / f"from-xrootd-{mode}").read_bytes() == _CONTENT


def test_davix(grid: _Grid) -> None:
    top = f"{grid.here.url}/davix"
    grid.davix("mkdir", top)
    grid.davix("put", "source", f"{top}/f")
    assert (grid.here.root / "davix/f").read_bytes() == _CONTENT
    assert re.search(r"^-.* 3145739 .* f$", grid.davix("ls", "-l", f"{top}/"), re.M)
    grid.davix("get", f"{top}/f", "davix-back")
    assert (grid.home / "davix-back").read_bytes() == _CONTENT
    part = grid.davix("http", "--header", "Range: bytes=5-14", f"{top}/f", "-o", "part")
    assert (grid.home / "part").read_bytes() == _CONTENT[5:15], part
    # davix-mv 0.8.4 ends with 255 whatever the answer is, here and with Apache; what fails, it says
    assert "Error" not in grid.davix("mv", f"{top}/f", f"{top}/g", expect=255)
    assert (grid.here.root / "davix/g").read_bytes() == _CONTENT
    assert "HTTP 404" in grid.davix("mv", f"{top}/f", f"{top}/g", expect=255)
    grid.davix("rm", f"{top}/g")
    assert not list((grid.here.root / "davix").iterdir())


#: Tests of litmus that fail, because a router copies no directories, lets only a file replace a file, and keeps no
#: properties. The eighth one of copymove finds what the seventh one has left.
_NOT_HERE = {
    "copymove": {"copy_overwrite", "copy_coll", "copy_shallow", "move", "move_coll"},
    "props": {"propset", "propmanyns", "propget"},
}


@pytest.mark.parametrize("suite", ["basic", "copymove", "props", "http"])
def test_litmus(grid: _Grid, suite: str) -> None:
    (grid.here.root / suite).mkdir()
    scheme = "http" if suite == "http" else "https"  # litmus leaves out its test of Expect in TLS
    url = f"{scheme}{grid.here.url.removeprefix('https')}/{suite}/"
    done = subprocess.run(
        ["litmus", "-k", url, "alice", grid.here.token()], cwd=grid.here.root.parent, capture_output=True, text=True,
        env={**os.environ, "TESTS": suite}, timeout=_TIMEOUT_S, check=False,
    )  # fmt: skip
    passed = re.findall(r"(\w+)\.+ pass\b", done.stdout)
    failed = set(re.findall(r"(\w+)\.+ FAIL\b", done.stdout))
    assert "begin" in passed and "finish" in passed, done.stdout + done.stderr
    assert failed == _NOT_HERE.get(suite, set()), done.stdout
    if suite == "http":
        assert "expect100" in passed
