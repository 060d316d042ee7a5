"""The plugin as installed, and real servers on the loopback address."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from stageout.testing.starter import PluginTable, installed
from tests.curl.beside import stock_plugin
from tests.curl.interposer import Interposer
from tests.curl.plugin import Plugin
from tests.curl.servers import S3, Apache, Ftp, WebDav
from tests.harness.destination import Destination
from tests.harness.pool.errors import PoolUnavailable

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def executable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(ROOT / "plugins" / "stageout_curl_plugin", tmp_path_factory.mktemp("libexec"))


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HTCondor's own plugin; skips with the reason where there is none (in CI: fails)."""
    try:
        return stock_plugin(tmp_path_factory.mktemp("stock"))
    except PoolUnavailable as reason:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def plugin_table(executable: Path) -> PluginTable:
    table = PluginTable([executable])
    assert table.bad == {}
    return table


@pytest.fixture
def plugin(tmp_path: Path, plugin_table: PluginTable, executable: Path) -> Plugin:
    return Plugin(tmp_path, plugin_table, executable)


@pytest.fixture(scope="session")
def nginx() -> Iterator[Destination]:
    folder = Path(tempfile.mkdtemp(prefix="stageout-nginx-"))  # not below pytest's own: its user could not enter it
    with Destination(folder) as server:
        yield server
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def apache() -> Iterator[Apache]:
    folder = Path(tempfile.mkdtemp(prefix="stageout-apache-"))  # not below pytest's own: its user could not enter it
    server = Apache(folder)
    yield server
    server.close()
    shutil.rmtree(folder)


@pytest.fixture
def door(nginx: Destination) -> Iterator[Interposer]:
    """nginx behind faults."""
    server = Interposer(nginx.port)
    yield server
    server.close()


@pytest.fixture
def dav(tmp_path: Path) -> Iterator[WebDav]:
    root = tmp_path / "dav"
    root.mkdir()
    server = WebDav(root)
    yield server
    server.close()


@pytest.fixture
def dav_door(dav: WebDav) -> Iterator[Interposer]:
    """WsgiDAV behind faults."""
    server = Interposer(dav.port)
    yield server
    server.close()


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="session")
def ftp_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ftp]:
    """One for all: pyftpdlib has one loop in a process."""
    server = Ftp(tmp_path_factory.mktemp("ftp"))
    yield server
    server.close()


@pytest.fixture
def ftp(ftp_server: Ftp) -> Iterator[Ftp]:
    """Empty."""
    yield ftp_server
    for path in ftp_server.root.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    server = S3()
    yield server
    server.close()
