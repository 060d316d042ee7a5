"""Files that go from custodian to custodian."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stageout.cli.main import main
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.overlay.channel import Channel, Gateway
from stageout.overlay.client import put
from stageout.overlay.copying import state
from stageout.overlay.key_file import gateway_of
from stageout.overlay.wire.messages import BLOCK_BYTES, Custody, Operation, Result
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess, custodian_for
from tests.overlay.depositing import deposit

Chain = tuple[RouterProcess, RouterProcess, RouterProcess]


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[Chain]:
    """Two custodians and a terminal; the first knows nothing of the terminal."""
    with contextlib.ExitStack() as stack:
        terminal = stack.enter_context(RouterProcess(tmp_path / "terminal"))
        second = stack.enter_context(custodian_for(tmp_path / "second", [terminal]))
        first = stack.enter_context(custodian_for(tmp_path / "first", [second]))
        yield first, second, terminal


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(os.urandom(2 * BLOCK_BYTES + 5))
    return path


def _end(router: RouterProcess) -> Gateway:
    return gateway_of("127.0.0.1", router.port, router.key_file("site"), timeout_s=20)


def _empty(custodian: RouterProcess) -> bool:
    return not any((custodian.home / "records/spool/.stageout/staging").iterdir())


def test_each_keeps_a_file_until_the_terminal_has_it(chain: Chain, source: Path) -> None:
    first, second, terminal = chain
    way = f"{second.address},{terminal.address}"
    terminal.stop()
    given = deposit(_end(first), source, "some/where", way)
    wait_until(lambda: " custody-accepted " in second.log, what="custody of the second")
    assert not _empty(first)
    second.kill()
    second.start()
    terminal.start()

    def said() -> str:
        answer = state(_end(first), given.origin)
        return answer.outcome if isinstance(answer, Result) else ""

    assert wait_until(said, what="the delivery") == "done"
    assert (terminal.root / "some/where").read_bytes() == source.read_bytes()
    wait_until(lambda: _empty(first) and _empty(second), what="empty spools")
    rename = Operation(given.origin, 2, "rename", "some/where", given.expires, target="else", after=(1,), terminal=way)
    with Channel(_end(first)) as control:
        control.send(rename)
        assert isinstance(control.receive(), Custody)
        assert control.receive() == Result(given.origin, 2, "done", generation=2)
    assert (terminal.root / "else").read_bytes() == source.read_bytes()


def test_from_the_command_line_and_who_is_not_on_the_way(chain: Chain, source: Path) -> None:
    first, second, terminal = chain
    key, through = str(first.key_file("site")), f"{first.address},{second.address}"
    assert main(["put", str(source), f"overlay://{terminal.address}/f", "--key", key, "--through", through]) == 0
    assert (terminal.root / "f").read_bytes() == source.read_bytes()
    with pytest.raises(TransferFailure, match=f"nothing into custody for {terminal.address}") as caught:
        put(_end(first), source, "g", terminal=terminal.address)
    assert caught.value.kind is ErrorClass.PERMISSION_DENIED
    assert main(["put", str(source), f"overlay://{terminal.address}/f", "--key", key, "--through", " "]) == 64
