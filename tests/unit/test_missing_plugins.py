"""Output that no plugin of the node moves is named when the daemon starts, not when it is tried."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon_site import accepted, in_thread, served
from manager_site import Site, made, run
from test_overlay_egress import Gate, _means, gate

from overlay_router.delivery.outflow import Outflow
from stageout.core.clock import SystemClock
from tests.polling import until
from tests.unit.test_overlay_destination import home

__all__ = ["gate", "home"]


@pytest.fixture
def site() -> Iterator[Site]:
    with made() as found:
        yield found


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Lines about missing plugins so far."""
    monkeypatch.setattr(logging.getLogger("stageout"), "propagate", True)
    return lambda: [one.getMessage() for one in caplog.records if "-unsupported " in one.getMessage()]


def test_a_manager_names_what_waits_for_a_plugin_when_it_starts(site: Site, said: Callable[[], list[str]]) -> None:
    async def story() -> None:
        site.flag("down")
        async with served(site) as node:
            await accepted(node, "copy://h/ok/a", "other://h/ok/b")
            assert node.collector.reports and not said()
        plugin = site.write_plugin("copy_plugin", "copy")
        async with served(site) as node:
            (line,) = said()
            assert "method=other" in line and "1 jobs" in line and "FILETRANSFER_PLUGINS" in line
            (answer,) = await in_thread(lambda: node.ask(op="metrics"))
            assert answer["metrics"]["MissingPlugins"] == "other"
            site.write_plugin("copy_plugin", "copy,other,third")
            await node.daemon.reload()
            await until(
                lambda: (
                    node.daemon._table.find("", "third") is not None
                    and not node.daemon._missing.facts()["MissingPlugins"]
                ),
                "the plugin",
            )
            assert plugin.exists() and len(said()) == 1

    run(story())


@pytest.mark.parametrize(("methods", "lines"), [("copy", 1), ("copy,overlay", 0)])
def test_a_pilot_without_a_plugin_for_its_way_out_says_so(
    methods: str, lines: int, said: Callable[[], list[str]]
) -> None:
    with made({"STAGEOUT_PILOT": "true", "STAGEOUT_PILOT_GRACE": "1", "STAGEOUT_PILOT_ROUTER": "gw:9621"}) as site:
        site.write_plugin("copy_plugin", methods)

        async def story() -> None:
            async with served(site):
                assert len(said()) == lines
                assert all("method=overlay" in line and "STAGEOUT_PILOT_ROUTER" in line for line in said())

        run(story())


def test_a_router_names_targets_that_no_plugin_delivers_to(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    async def story() -> None:
        begun = asyncio.Event()

        def ready(busy: object) -> tuple[list[Any], list[Any]]:
            begun.set()
            return [], []

        async def on_disk(work: Callable[[], Any]) -> Any:
            return work()

        monkeypatch.setattr(gate.one, "ready", ready)
        task = asyncio.ensure_future(
            Outflow(gate.one, _means(tmp_path), on_disk, lambda replies: None, SystemClock()).run()
        )
        await asyncio.wait_for(begun.wait(), 30)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(story())
    assert [line.split()[1:3] for line in map(_facts, said())] == [
        ["prefix=/out", "to=https://s.example/base/"],
        ["prefix=/out/raw", "to=root://r.example//x"],
    ]


def _facts(line: str) -> str:
    return line[line.index("-unsupported") :]
