"""Before Python 3.10 a lock, event or queue of asyncio belongs to the loop that was there when it was made: made
before :func:`asyncio.run` it works until somebody has to wait for it, and then fails."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import overlay_router.daemon
import policy_service.daemon
import sandbox_manager.daemon
import schedd_agent.daemon
import stageout_web.daemon

_BOUND = (asyncio.Lock, asyncio.Event, asyncio.Condition, asyncio.Semaphore, asyncio.Queue)
_MAINS: dict[str, Callable[[], object]] = {
    "agent": lambda: schedd_agent.daemon.main([]),
    "manager": lambda: sandbox_manager.daemon.main(["-t"]),
    "policy": lambda: policy_service.daemon.main(["--alone"]),
    "router": lambda: overlay_router.daemon.main(["--alone"]),
    "web": lambda: stageout_web.daemon.main(["-t"]),
}


@pytest.mark.parametrize("name", _MAINS)
def test_what_belongs_to_a_loop_is_made_in_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def only_in_a_loop(kind: Any) -> Callable[..., None]:
        made = kind.__init__

        def make(self: Any, *facts: Any, **more: Any) -> None:
            asyncio.get_running_loop()
            made(self, *facts, **more)

        return make

    def run(work: Coroutine[Any, Any, None]) -> None:
        work.close()
        ran.append(name)

    ran: list[str] = []
    (tmp_path / "tokens").write_text(f"cern.ch {'t' * 40}\n")
    (tmp_path / "tokens").chmod(0o600)
    monkeypatch.setenv("CONDOR_CONFIG", "/dev/null")
    places = {"LOG": "", "STAGEOUT_POLICY_TOKENS": "tokens", "STAGEOUT_POLICY_DIR": "policy"}
    for knob, place in places.items():
        monkeypatch.setenv(f"_CONDOR_{knob}", str(tmp_path / place))
    monkeypatch.setattr(asyncio, "run", run)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(gc, "set_threshold", lambda objects: None)
    for kind in _BOUND:
        monkeypatch.setattr(kind, "__init__", only_in_a_loop(kind))
    _MAINS[name]()
    assert ran == [name]
