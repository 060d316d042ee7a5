"""Powers of somebody on the path, as docs/administrator/security.md says it, "Without TLS"."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from stageout.overlay.channel import Gateway
from stageout.overlay.client import put
from stageout.overlay.key_file import gateway_of
from stageout.overlay.wire.messages import BLOCK_BYTES
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess
from tests.overlay.between import Between
from tests.overlay.forging import Forger

_PAGE = Path(__file__).resolve().parents[2] / "docs/administrator/security.md"


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    """It offers TLS."""
    home = tmp_path_factory.mktemp("router")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(home / "ca.pem"))
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(home / "cert.pem"))
    with RouterProcess(home, {"STAGEOUT_ROUTER_CERT": str(home / "cert.pem")}) as running:
        yield running


@pytest.fixture
def gateway(router: RouterProcess) -> Gateway:
    return gateway_of("127.0.0.1", router.port, router.key_file("site"), timeout_s=20)


@pytest.fixture
def victim(router: RouterProcess) -> Path:
    """A file of somebody else."""
    path = router.root / "victim"
    path.write_bytes(b"kept")
    return path


def _source(tmp_path: Path, blocks: int) -> Path:
    path = tmp_path / "source"
    path.write_bytes(os.urandom(blocks * BLOCK_BYTES))
    return path


def test_without_tls_the_path_replaces_bytes_and_deletes_files(
    router: RouterProcess, gateway: Gateway, victim: Path, tmp_path: Path
) -> None:
    source = _source(tmp_path, 2)
    forged = bytes(source.stat().st_size)
    with Forger(router.port, forged, victim.name) as man:
        put(dataclasses.replace(gateway, port=man.port), source, "f", connections=1)
    assert (router.root / "f").read_bytes() == forged, "put reported success"
    wait_until(lambda: not victim.exists(), what="the other file to be deleted")


def test_with_tls_what_the_path_changes_is_sent_again(
    router: RouterProcess, gateway: Gateway, victim: Path, tmp_path: Path
) -> None:
    source = _source(tmp_path, 9)
    with Between(router.port, flips=2) as man:
        put(dataclasses.replace(gateway, port=man.port, ca=str(router.home / "ca.pem")), source, "g")
    assert man.flipped == 2
    assert (router.root / "g").read_bytes() == source.read_bytes()
    assert victim.exists()


def test_the_page_says_so() -> None:
    (section,) = re.findall(r"^### Without TLS\n(.*?)(?=^#|^\*\*)", _PAGE.read_text(), re.S | re.M)
    for words in ("replace", "delete", "reports success", "TLS between sites", "STAGEOUT_ROUTER_TLS_ONLY = true"):
        assert words in section, words
