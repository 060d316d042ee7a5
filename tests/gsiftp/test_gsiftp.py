"""gsiftp_plugin against a real GridFTP server."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
from pathlib import Path

import pytest

from stageout.core.errors import ErrorClass
from stageout.testing.conformance import check, failures, table
from stageout.testing.endpoints import Endpoint
from stageout.testing.starter import EmbeddedStarter, PluginError, PluginTable, query
from tests.gsiftp.conftest import Client, codes
from tests.harness.gridftp import GridFtpServer

E = ErrorClass


def test_it_keeps_the_rules(client: Client, server: GridFtpServer) -> None:
    place = server.files / "rules"
    place.mkdir()
    place.chmod(0o777)
    former = os.umask(0)  # the server's user writes into what the rules make
    try:
        findings = check(client.plugin, Endpoint(server.url("rules"), place))
    finally:
        os.umask(former)
    wrong = failures(findings)
    # The program itself takes no other names than ASCII: such a file is refused, which the rule counts as a failure.
    assert [item.rule for item in wrong] == ["upload-odd-names"], table(findings)
    assert "not there: ['café']" in wrong[0].detail, table(findings)
    assert "rename the file" in wrong[0].detail


def test_a_batch_goes_up_and_comes_back(client: Client, server: GridFtpServer) -> None:
    data = {f"f {index}": os.urandom(50_000 + index) for index in range(12)}
    for name, content in data.items():
        client.write(name, content)
    urls = {name: server.url(f"batch/new/{name}") for name in data}
    run = client.call(urls, True, STAGEOUT_PARALLELISM="3", STAGEOUT_CONCURRENCY="2")
    assert codes(run) == [None] * 12, run.printed
    for (name, content), ad in zip(data.items(), run.ads):
        assert (server.files / "batch/new" / name).read_bytes() == content
        assert ad["DeveloperData"]["StageOutVerified"] == "md5"
        assert f"md5:{hashlib.md5(content).hexdigest()}" in ad["DeveloperData"]["StageOutDigests"]
        (client.scratch / name).unlink()
    assert codes(client.call(urls, False)) == [None] * 12
    assert {name: (client.scratch / name).read_bytes() for name in data} == data
    assert {path.name for path in client.scratch.iterdir() if path.name.startswith("f ")} == set(data)


def test_one_refused_file_does_not_spoil_the_others(client: Client, server: GridFtpServer) -> None:
    names = ["a", "b", "c", "d"]
    for name in names:
        client.write(name, name.encode() * 1000)
    urls = {name: server.url(f"some/{name}") for name in names}
    urls["b"] = urls["b"].replace(str(server.files), "/root")
    run = client.call(urls, True)
    assert [code is None for code in codes(run)] == [True, False, True, True]
    assert [(server.files / "some" / name).exists() for name in "acd"] == [True] * 3


def test_failures_have_their_class(client: Client, server: GridFtpServer) -> None:
    closed = socket.socket()
    closed.bind(("127.0.0.1", 0))
    port = closed.getsockname()[1]
    (server.files / "taken").mkdir(exist_ok=True)
    (server.files / "shut").mkdir(exist_ok=True, mode=0o700)
    (server.files / "shut").chmod(0o700)
    client.write("up", b"data")
    for url, upload, kind in (
        (server.url("nothing"), False, E.NOT_FOUND),
        (server.url("shut/x"), True, E.PERMISSION_DENIED),
        (server.url("taken"), False, E.CONFLICT),
        (f"ftp://127.0.0.1:{port}/x", True, E.CONNECT_FAILED),
        ("ftp://no-such-host.invalid/x", True, E.NAME_NOT_RESOLVED),
        ("ftp://127.0.0.1/directory/", True, E.BAD_URL),
    ):
        run = client.call({"up" if upload else "down": url}, upload)
        if kind is E.NAME_NOT_RESOLVED:  # where the DNS answers nobody it cannot be known
            assert codes(run)[0] in (kind.code, E.NAME_LOOKUP_FAILED.code)
        else:
            assert codes(run) == [kind.code], (url, run.ads)
    assert [path.name for path in client.scratch.iterdir() if path.name not in ("up",)] == [
        path.name for path in client.scratch.iterdir() if path.name.startswith(".") and "part" not in path.name
    ]
    closed.close()


def test_a_server_without_checksums_is_asked_for_the_size(client: Client, open_folder: Path) -> None:
    client.write("a", b"12345")
    with GridFtpServer(open_folder / "plain", no_checksums=True) as plain:
        run = client.call({"a": plain.url("a")}, True)
        assert [ad["DeveloperData"].get("StageOutVerified") for ad in run.ads] == ["size"]
        run = client.call({"a": plain.url("b")}, True, STAGEOUT_CHECKSUM_POLICY="required")
        assert codes(run) == [E.NOT_VERIFIED.code]
        run = client.call({"a": plain.url("c")}, True, STAGEOUT_CHECKSUM_POLICY="strict")
        assert codes(run) == [E.BAD_REQUEST.code]


def test_without_globus_url_copy_nothing_is_advertised(client: Client, tmp_path: Path) -> None:
    bare = {"PATH": str(tmp_path)}
    with pytest.raises(PluginError, match="names no SupportedMethods"):
        query(client.plugin, bare)
    assert query(client.plugin, client.environment).text("SupportedMethods") == "gsiftp,ftp"
    (client.scratch / "in").write_text(f'[ Url = "ftp://h/x"; LocalFileName = "{client.scratch}/x" ]')
    done = subprocess.run(
        [str(client.plugin), "-infile", "in", "-outfile", "out"], cwd=client.scratch, env=bare, check=False
    )
    assert done.returncode in (1, 11)
    assert "globus-gass-copy-progs" in (client.scratch / "out").read_text()


@pytest.mark.parametrize("size_bytes", [1000, 3_000_000])
def test_a_sample_is_the_beginning_of_a_file(client: Client, server: GridFtpServer, size_bytes: int) -> None:
    content = os.urandom(2_000_000)
    (server.files / "long").write_bytes(content)
    data = f"PluginData = [ sample_bytes = {size_bytes} ]"
    ad = f'[ Url = "{server.url("long")}"; LocalFileName = "{client.scratch}/x"; {data} ]'
    environment = client.environment
    starter = EmbeddedStarter(client.scratch, PluginTable([client.plugin], environment), {}, {}, None, environment)
    run = starter.run(client.plugin, ad, False)
    assert codes(run) == [None], run.ads
    assert (client.scratch / "x").read_bytes() == content[:size_bytes]


def test_many_samples_go_in_one_list(client: Client, server: GridFtpServer) -> None:
    content = os.urandom(500_000)
    (server.files / "sampled").write_bytes(content)
    urls = [server.url("sampled")] * 3 + [server.url("no-such-file")]
    files = "".join(f'[ Url = "{url}"; LocalFileName = "{client.scratch}/s{n}" ]' for n, url in enumerate(urls))
    environment = client.environment
    starter = EmbeddedStarter(client.scratch, PluginTable([client.plugin], environment), {}, {}, None, environment)
    run = starter.run(client.plugin, "[ PluginData = [ sample_bytes = 70000 ] ]" + files, False)
    assert codes(run) == [None, None, None, E.NOT_FOUND.code], run.ads
    assert [(client.scratch / f"s{n}").read_bytes() for n in range(3)] == [content[:70000]] * 3


def test_a_program_that_cannot_run_is_told_from_a_server_that_cannot_be_reached(client: Client, tmp_path: Path) -> None:
    broken = tmp_path / "globus-url-copy"
    broken.write_text("#!/bin/sh\necho 'Error -1, activating gass copy module' >&2\nexit 1\n")
    broken.chmod(0o755)
    client.environment["PATH"] = f"{tmp_path}:{client.environment['PATH']}"
    client.write("up", b"x")
    run = client.call({"up": "ftp://127.0.0.1:1/up"}, True)
    assert codes(run) == [ErrorClass.PLUGIN_BROKEN.code]
    assert "Error -1, activating gass copy module" in run.ads[0]["TransferError"]
    broken.unlink()
    run = client.call({"up": "ftp://127.0.0.1:1/up"}, True)
    assert codes(run) == [ErrorClass.CONNECT_FAILED.code]
