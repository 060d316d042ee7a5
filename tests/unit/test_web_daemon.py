"""The page's daemon: settings that are read again, and a reading that fails."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stageout.core.config import ConfigError, Settings
from stageout_web.service import Daemon, base_of


@pytest.fixture
def knobs(tmp_path: Path) -> dict[str, str]:
    """Settings of a page on any free port."""
    return {"STAGEOUT_WEB_DIR": str(tmp_path), "STAGEOUT_WEB_PORT": "0", "COLLECTOR_HOST": "cm.example.org"}


@contextlib.contextmanager
def made(knobs: dict[str, str]) -> Iterator[Daemon]:
    """A daemon that does not listen."""
    daemon = Daemon(lambda: Settings(knobs.get))
    try:
        yield daemon
    finally:
        daemon._ring.close()


@pytest.mark.parametrize("base", ["/st+out", "stageout", "/a//b", "/a b", "/{a}", "/\u00fc"])
def test_a_base_that_no_link_can_have_is_refused(base: str) -> None:
    with pytest.raises(ConfigError, match="STAGEOUT_WEB_BASE"):
        base_of(Settings({"STAGEOUT_WEB_BASE": base}.get))


def test_a_reconfiguration_says_which_settings_need_a_restart(
    knobs: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        with made(knobs) as daemon:
            await daemon.reload()
            assert "setting-ignored" not in caplog.text
            knobs.update(STAGEOUT_WEB_PORT="1234", STAGEOUT_WEB_BASE="/new", STAGEOUT_WEB_READERS="7")
            await daemon.reload()
            assert daemon._server.most_streams == 7

    asyncio.run(work())
    for name in ("STAGEOUT_WEB_PORT", "STAGEOUT_WEB_BASE"):
        assert f"{name} has changed" in caplog.text
    assert caplog.text.count("setting-ignored") == 2


def test_an_unexpected_failure_of_a_reading_does_not_end_the_daemon(
    knobs: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        with made(knobs) as daemon:
            daemon._interval_s = 0
            readings = 0

            async def tick() -> None:
                nonlocal readings
                readings += 1
                if readings == 3:
                    daemon.stop(False)
                raise OverflowError("too large")

            daemon._state.tick = tick  # type: ignore[method-assign]
            await asyncio.wait_for(daemon._update_until_stop(), 30)
            assert readings >= 3

    asyncio.run(work())
    assert caplog.text.count("reading-failed") == 1


def certify(folder: Path) -> bytes:
    """Write a new certificate and its key. Return the certificate in DER."""
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem"), "-subj", "/CN=localhost"]
    subprocess.run([*argv, *files], check=True, capture_output=True)
    return ssl.PEM_cert_to_DER_cert((folder / "cert.pem").read_text())


async def presented(context: ssl.SSLContext) -> bytes:
    """Return the certificate that a server with this context presents, in DER."""
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), ssl=trusting)
    found: bytes = writer.get_extra_info("ssl_object").getpeercert(True)
    writer.close()
    server.close()
    return found


def test_a_reconfiguration_takes_a_renewed_certificate(knobs: dict[str, str], tmp_path: Path) -> None:
    async def work() -> None:
        old = certify(tmp_path)
        knobs.update(
            STAGEOUT_WEB_CERT=str(tmp_path / "cert.pem"), STAGEOUT_WEB_CERT_KEY=str(tmp_path / "key.pem")
        )  # fmt: skip
        with made(knobs) as daemon:
            assert daemon._tls is not None
            assert await presented(daemon._tls) == old
            new = certify(tmp_path)
            await daemon.reload()
            assert await presented(daemon._tls) == new != old

    asyncio.run(work())
