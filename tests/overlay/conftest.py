"""A router for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stageout.overlay.channel import Gateway
from stageout.overlay.key_file import read_key
from tests.harness.router import RouterProcess


@pytest.fixture
def router(tmp_path: Path) -> Iterator[RouterProcess]:
    with RouterProcess(tmp_path / "router") as running:
        yield running


@pytest.fixture
def gateway(router: RouterProcess) -> Gateway:
    return Gateway("127.0.0.1", router.port, *read_key(router.key_file("site")), timeout_s=20)
