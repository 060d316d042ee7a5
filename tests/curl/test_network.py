"""Names, addresses and proxies."""

from __future__ import annotations

import itertools
import os
import socket
import struct
import threading

import pytest

from stageout.core.errors import ErrorClass as K
from tests.curl.interposer import Interposer, Reply, status
from tests.curl.plugin import NO_RETRY

root_only = pytest.mark.skipif(
    os.getuid() != 0, reason="a name server of its own needs root (mount namespace, port 53)"
)


_NUMBERS = itertools.count()


class NameServer:
    """Answers every question in the same way: "nothing", "no such name" or "broken"."""

    def __init__(self, answer: str, address: str) -> None:
        self._answer = answer
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((address, 53))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        code = {"no such name": 3, "there is none": 3, "broken": 2}.get(self._answer)
        while True:
            try:
                question, peer = self._socket.recvfrom(512)
            except OSError:
                return
            if code is not None:
                head = question[:2] + struct.pack(">HHHHH", 0x8180 | code, 1, 0, 0, 0)
                self._socket.sendto(head + question[12:], peer)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def resolving(tmp_path, executable):
    """The plugin in a mount namespace whose resolver asks our name server; returns its path."""
    servers = []

    def make(answer):
        # A thread that waits in recvfrom keeps the address of a closed server.
        address = f"127.53.{os.getpid() % 250 + 1}.{next(_NUMBERS) % 250 + 1}"
        servers.append(NameServer(answer, address))
        (tmp_path / "resolv.conf").write_text(f"nameserver {address}\noptions timeout:1 attempts:1\n")
        (tmp_path / "nsswitch.conf").write_text("hosts: files dns\n")
        wrapper = tmp_path / "stageout_curl_plugin"
        binds = "".join(
            f"[ ! -e /etc/{name} ] || mount --bind {tmp_path}/{name} /etc/{name}\n"
            for name in ("resolv.conf", "nsswitch.conf")
        )
        wrapper.write_text(f'#!/bin/sh\nunshare -m sh -e -c \'{binds}exec {executable} "$@"\' sh "$@"\n')
        wrapper.chmod(0o755)
        return wrapper

    yield make
    for server in servers:
        server.close()


@root_only
@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("nothing", K.NAME_LOOKUP_FAILED),
        ("broken", K.NAME_LOOKUP_FAILED),
        ("no such name", K.NAME_NOT_RESOLVED),
    ],
)
def test_name(plugin, resolving, answer, kind):
    """A dead resolver is the node's trouble and passes; a name that does not exist is the owner's, or the site's."""
    wrapper = resolving(answer)
    result = plugin.get("http://data.example.org/file", env=NO_RETRY, executable=wrapper)
    assert result.failures == [kind]
    assert result.ad["TransferErrorData"][0]["FailedName"].startswith("data.example.org")
    assert "data.example.org" in result.ad["TransferError"]
    assert result.run.duration_s < 12


def test_ipv6(plugin, nginx):
    """A literal address in brackets, through a server that listens there."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        seen = []

        def answer() -> None:
            peer, _ = server.accept()
            seen.append(peer.recv(10_000))
            peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\ndata")
            peer.close()

        threading.Thread(target=answer, daemon=True).start()
        assert plugin.get(f"http://[::1]:{port}/file").ok
    assert plugin.got() == b"data"
    assert f"Host: [::1]:{port}".encode() in seen[0]


@pytest.mark.parametrize("url", ["http:///file", "http://host:99999/file", "http://[::1/file", "http://a b/file"])
def test_what_is_no_url(plugin, url):
    result = plugin.get(url, env=NO_RETRY)
    assert result.kind in (K.BAD_REQUEST, K.NAME_NOT_RESOLVED)
    assert result.run.duration_s < 12


@pytest.fixture
def proxy(nginx):
    """Takes requests in the absolute form, as a proxy does, and has the server answer them."""

    class Proxy(Interposer):
        def forward(self, asked: object) -> Reply:
            asked.path = "/" + asked.path.split("/", 3)[3]
            return super().forward(asked)

    server = Proxy(nginx.port)
    yield server
    server.close()


def test_proxy_of_the_environment(plugin, nginx, proxy):
    nginx.file("proxied").write_bytes(b"data")
    address = f"http://127.0.0.1:{proxy.port}"
    assert plugin.get(nginx.url("proxied"), env={"http_proxy": address}).ok
    assert plugin.put(nginx.url("proxied-up"), env={"http_proxy": address}).ok
    assert {asked.method for asked in proxy.asked} == {"GET", "PUT", "HEAD"}
    proxy.asked.clear()
    assert plugin.get(nginx.url("proxied"), env={"http_proxy": address, "no_proxy": "127.0.0.1"}).ok
    assert plugin.get(nginx.url("proxied"), env={"https_proxy": address}).ok
    assert proxy.asked == []


def test_proxy_of_the_machine(plugin, nginx, proxy):
    """The slot's ad counts where the environment has no value."""
    nginx.file("proxied").write_bytes(b"data")
    machine = {"http_proxy": f"http://127.0.0.1:{proxy.port}"}
    assert plugin.get(nginx.url("proxied"), machine=machine).ok
    assert proxy.methods().count("GET") == 1
    assert plugin.get(nginx.url("proxied"), machine=machine, env={"no_proxy": "127.0.0.1"}).ok
    assert proxy.methods().count("GET") == 1


def test_proxy_that_is_down(plugin, nginx):
    result = plugin.get(nginx.url("x"), env={"http_proxy": "http://127.0.0.1:1", **NO_RETRY})
    assert result.failures == [K.CONNECT_FAILED]
    assert blamed(result) == ("127.0.0.1:1", "127.0.0.1:1", "Connection")
    assert "proxy 127.0.0.1:1" in result.ad["TransferError"]
    result = plugin.get(nginx.url("x"), env={"http_proxy": "http://user:proxy-pass@127.0.0.1:1", **NO_RETRY})
    assert "proxy-pass" not in result.everything


def blamed(result):
    """The server that the newest error names, and what it says of a proxy."""
    error = result.ad["TransferErrorData"][-1]
    server = error.get("FailedServer") or error.get("FailedName")
    return server, error.get("IntermediateServer"), error.get("IntermediateServerErrorType")


@root_only
def test_proxy_whose_name_does_not_exist(plugin, resolving):
    wrapper = resolving("there is none")
    for variable in ("http_proxy", "all_proxy"):
        env = {variable: "http://user:proxy-pass@proxy.example.org:3128"}
        result = plugin.get("http://127.0.0.1:1/x", env=env, executable=wrapper)
        assert result.failures == [K.NAME_NOT_RESOLVED]
        assert blamed(result) == ("proxy.example.org:3128", "proxy.example.org:3128", "Connection")
        assert "proxy-pass" not in result.everything


def test_proxy_that_opens_no_tunnel(plugin, proxy):
    """Its answer to CONNECT is not the target's."""
    address = f"127.0.0.1:{proxy.port}"
    result = plugin.get("https://data.example.org/x", env={"https_proxy": f"http://{address}", **NO_RETRY})
    assert result.failures == [K.NOT_SUPPORTED]
    assert blamed(result) == (address, address, "PostConnection")
    assert "TransferHTTPStatusCode" not in result.ad["DeveloperData"]


def test_proxy_that_wants_a_password(plugin, nginx, proxy):
    proxy.always("GET", status(407))
    address = f"127.0.0.1:{proxy.port}"
    result = plugin.get(nginx.url("x"), env={"http_proxy": f"http://{address}"})
    assert result.failures == [K.PERMISSION_DENIED]
    assert blamed(result) == (address, address, "PostConnection")


def test_server_behind_a_proxy(plugin, nginx, proxy):
    """An error that the proxy passes on belongs to the server."""
    result = plugin.get(nginx.url("missing"), env={"http_proxy": f"http://127.0.0.1:{proxy.port}"})
    assert result.failures == [K.NOT_FOUND]
    assert blamed(result) == (f"127.0.0.1:{nginx.port}", None, None)
