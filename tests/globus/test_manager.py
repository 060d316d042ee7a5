"""Output of many jobs through the sandbox manager: few tasks, found again whatever dies, cancelled with their job."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stageout.core.states import State
from stageout.testing.starter import installed
from stageout.wire.custody import Action
from tests.globus.conftest import QUICK, ROOT
from tests.harness.globus import Emulator
from tests.polling import until
from tests.unit.manager_site import Node, Site, made, run


class GlobusSite:
    """A manager's node that a collection of the emulated service sees."""

    def __init__(self, site: Site, globus: Emulator) -> None:
        self.site = site
        self.globus = globus
        self.archive = globus.collection("archive")
        self.node = globus.collection("node", site.base)
        self.plugin = installed(ROOT / "plugins" / "globusonline_plugin", site.base, _everybodys_python())
        self.token = json.dumps(globus.token()).encode()
        site.plugins.append(self.plugin)

    def url(self, path: str) -> str:
        """Address of a path of the archive."""
        return f"globus://{self.archive.id}/{path}"

    def delivered(self) -> dict[str, bytes]:
        """The files of the archive."""
        top = Path(self.archive.root)
        return {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}

    async def hand_off(self, node: Node, job: int, files: dict[str, bytes]) -> Any:
        """Output of one job, confirmed."""
        facts = node.facts(f"{job}.0", dslot_id=job)
        credentials = {"globus": self.token}
        urls = {self.url(name): data for name, data in files.items()}
        await node.confirm(await node.hand_off(urls, facts, self.plugin, credentials), facts=facts)
        return facts

    def kill_plugin(self) -> None:
        """``kill -9`` of the plugin that runs."""
        pids = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if self._is_plugin(path)]
        assert pids
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _is_plugin(self, path: Path) -> bool:
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            return os.fsencode(self.plugin) in words and b"-upload" in words and not words[3].endswith(b"/launch.py")
        return False


def _everybodys_python() -> str:
    """An interpreter that the job's user may run."""
    mine = Path(sys.executable).resolve()
    return sys.executable if all(path.stat().st_mode & 0o001 for path in mine.parents) else "/usr/bin/python3"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GlobusSite]:
    with Emulator(tmp_path / "globus") as globus, made({"NUM_CPUS": "20", "STAGEOUT_MAX_MOVERS": "4"}) as site:
        found = GlobusSite(site, globus)
        knobs = {"TRANSFER_URL": globus.address, "LOCAL": f"{found.node.id} {os.path.realpath(site.base)}=/", **QUICK}
        for name, value in knobs.items():
            monkeypatch.setenv(f"_CONDOR_STAGEOUT_GLOBUS_{name}", value)
        packages = sysconfig.get_paths()["purelib"]
        monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{packages}")
        monkeypatch.setenv("PATH", "/usr/bin:/bin")
        yield found


def _output(job: int, files: int = 10) -> dict[str, bytes]:
    return {f"run/{job}.0/{number}": os.urandom(100 + number) for number in range(files)}


def test_output_of_twenty_jobs_is_few_tasks(place: GlobusSite) -> None:
    expected: dict[str, bytes] = {}

    async def story() -> None:
        async with place.site.manager() as node:
            facts = []
            for job in range(1, 21):
                files = _output(job)
                expected.update(files)
                facts.append(await place.hand_off(node, job, files))
            for one in facts:
                await node.until_state(State.RELEASED, one)

    run(story())
    assert place.delivered() == expected
    tasks = place.globus.tasks
    assert len(tasks) <= 10, [task.files for task in tasks]
    assert sum(task.files_transferred for task in tasks) == 200
    assert any(task.document["label"].startswith("HTCondor output of ap-") for task in tasks)
    assert any(" and " in task.document["label"] for task in tasks), [task.document["label"] for task in tasks]


def test_a_killed_plugin_s_task_is_found_again(place: GlobusSite) -> None:
    place.globus.change(place.archive.id, rate_bytes_s=100e3)
    files = {"run/a": os.urandom(150_000), "run/b": os.urandom(100)}

    async def story() -> None:
        async with place.site.manager() as node:
            facts = await place.hand_off(node, 1, files)
            await until(lambda: place.globus.tasks and place.globus.tasks[0].bytes_transferred, "the task to run")
            place.kill_plugin()
            box = await node.until_state(State.RELEASED, facts)
            assert box.attempts == 2

    run(story())
    assert place.delivered() == files
    assert len(place.globus.tasks) == 1


def test_a_new_manager_finds_the_task_of_the_one_before(place: GlobusSite) -> None:
    place.globus.change(place.archive.id, rate_bytes_s=100e3)
    files = {"run/a": os.urandom(200_000), "run/b": os.urandom(100)}

    async def first() -> None:
        async with place.site.manager() as node:
            await place.hand_off(node, 1, files)
            await until(lambda: place.globus.tasks and place.globus.tasks[0].bytes_transferred, "the task to run")
            place.kill_plugin()  # as the kernel does when the manager dies

    async def second() -> None:
        async with place.site.manager() as node:
            await node.until_state(State.RELEASED, node.facts("1.0", dslot_id=1))

    run(first())
    run(second())
    assert place.delivered() == files
    assert len(place.globus.tasks) == 1


def test_the_task_of_a_cancelled_job_is_cancelled_at_once(place: GlobusSite) -> None:
    place.globus.change(place.archive.id, rate_bytes_s=1000.0)

    async def story() -> None:
        async with place.site.manager() as node:
            facts = await place.hand_off(node, 1, {"run/a": os.urandom(500_000)})
            await until(lambda: place.globus.tasks and place.globus.tasks[0].bytes_transferred, "the task to run")
            await node.order(Action.CANCEL, facts)
            await until(lambda: place.globus.tasks[0].status == "FAILED", "the task to be cancelled")

    run(story())
    (task,) = place.globus.tasks
    assert task.fatal_error and task.fatal_error["code"] == "CANCELED"


def test_a_denied_directory_fails_its_own_job_only(place: GlobusSite) -> None:
    place.globus.change(place.archive.id, denied=("/run/2.0",))

    async def story() -> None:
        async with place.site.manager(moving=False) as node:
            facts = [await place.hand_off(node, job, _output(job, 2)) for job in (1, 2, 3)]
            moving = asyncio.ensure_future(node.pipeline.run())
            for one, state in zip(facts, (State.RELEASED, State.FAILED, State.RELEASED)):
                await node.until_state(state, one)
            moving.cancel()

    run(story())
    assert sorted(name.split("/")[1] for name in place.delivered()) == ["1.0", "1.0", "3.0", "3.0"]
