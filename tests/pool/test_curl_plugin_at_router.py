"""HTCondor's own curl_plugin writes files to a router of the overlay, and reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.pool.errors import PoolError
from tests.harness.pool.image import CA_BUNDLE, Image, find_image
from tests.overlay.http_site import Site, site
from tests.pool.conftest import VERSION

pytestmark = pytest.mark.pool

_INSIDE = "/mnt"
_CONTENT = os.urandom(5 * 1024 * 1024 + 7)
_PLUGIN = "exec $(condor_config_val LIBEXEC)/curl_plugin -infile /mnt/in -outfile /mnt/out"


@pytest.fixture
def image(stageout_pools: Any) -> Image:
    """HTCondor, as pools have it."""
    return find_image(VERSION)


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path / "router") as running:
        yield running


class _Node:
    """The plugin as a starter runs it: its files, and the token of a user among the credentials of the job."""

    def __init__(self, image: Image, router: Site, home: Path, token: str) -> None:
        self._image, self._router, self.home = image, router, home
        home.mkdir()
        (home / "router.use").write_text(token)

    def transfer(self, name: str, path: str, *options: str) -> str:
        """Carry out one transfer; what the plugin reports. :raises PoolError: it ended with another status than 0."""
        url = f"router+{self._router.url}/{path}"
        (self.home / "in").write_text(f'[ Url = "{url}"; LocalFileName = "{_INSIDE}/{name}" ]\n')
        environment = [f"_CONDOR_CREDS={_INSIDE}", "CURL_MAX_RETRY_ATTEMPTS=1", "no_proxy=localhost"]
        binds = {self.home: _INSIDE, self._router.ca: str(CA_BUNDLE)}
        command = ["env", *environment, "sh", "-c", " ".join([_PLUGIN, *options])]
        self._image.run(command, binds=binds, timeout_s=60)
        return (self.home / "out").read_text()


def test_it_puts_and_gets_whole_files(image: Image, router: Site, tmp_path: Path) -> None:
    node = _Node(image, router, tmp_path / "node", router.token())
    for content in (_CONTENT, b""):
        (node.home / "source").write_bytes(content)
        assert "TransferSuccess = true" in node.transfer("source", "run7/results.tar", "-upload")
        assert (router.root / "run7/results.tar").read_bytes() == content
        (node.home / "target").unlink(missing_ok=True)
        said = node.transfer("target", "run7/results.tar")
        assert "TransferSuccess = true" in said and f"TransferFileBytes = {len(content)}" in said
        assert (node.home / "target").read_bytes() == content


def test_what_the_token_does_not_permit_fails(image: Image, router: Site, tmp_path: Path) -> None:
    (router.root / "secret").write_bytes(b"x")
    node = _Node(image, router, tmp_path / "node", router.token("bob"))
    (node.home / "source").write_bytes(_CONTENT)
    for options in (("-upload",), ()):
        with pytest.raises(PoolError):
            node.transfer("source", "secret", *options)
        said = (node.home / "out").read_text()
        assert "TransferSuccess = false" in said and "TransferHTTPStatusCode = 403" in said
    assert (router.root / "secret").read_bytes() == b"x"
