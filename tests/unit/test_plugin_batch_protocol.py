"""Protocols that move all files of a call together, and the two settings for streams."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stageout.core.errors import ErrorClass
from stageout.testing.starter import EmbeddedStarter, PluginRun, PluginTable, Wanted, installed

_PLUGIN = """#!/usr/bin/env python3
import time
from pathlib import Path
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.plugin import Abilities, run
from stageout.plugin.api import BatchProtocol, Outcome

class Together(BatchProtocol):
    def move(self, transfers, upload, concurrency):
        for transfer in transfers:
            word = transfer.request.url.rpartition("/")[2]
            if word == "silent":
                continue
            if word == "all":
                raise TransferFailure(ErrorClass.SERVER_BUSY, "later")
            if word == "bug":
                raise RuntimeError("oops")
            Path(transfer.request.local_path).write_text(
                f"{len(transfers)} {concurrency} {transfer.context.parallelism}")
            transfer.finish(Outcome(1, 1, verified="size"))
            transfer.finish(TransferFailure(ErrorClass.UNKNOWN, "too late"))
        time.sleep(0.2)
        Path("over").write_text("")

run(Abilities(methods=("together",), version="1", parallel=3), "__main__:Together")
"""


@pytest.fixture
def call(tmp_path: Path):
    """Downloads by the plugin: words of URLs, settings -> result and scratch directory."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "together_plugin").write_text(_PLUGIN)
    (tmp_path / "together_plugin").chmod(0o755)
    (tmp_path / "in").mkdir()
    plugin = installed(tmp_path / "together_plugin", tmp_path / "in")

    def download(*words: str, machine_ad: dict | None = None, **settings: str) -> tuple[PluginRun, Path]:
        environment = {"PATH": os.defpath, "PYTHONPATH": os.environ.get("PYTHONPATH", ""), **settings}
        starter = EmbeddedStarter(
            tmp_path / "scratch", PluginTable([plugin], environment), {}, machine_ad or {}, None, environment
        )
        wanted = [Wanted(f"together://h/{word}", f"f{index}") for index, word in enumerate(words)]
        (run,) = starter.download(wanted)
        return run, tmp_path / "scratch"

    return download


def _codes(run: PluginRun) -> list[int | None]:
    return [ad["DeveloperData"].get("StageOutErrorCode") for ad in run.ads]


def test_all_files_come_in_one_call_and_a_file_is_finished_once(call) -> None:
    result, scratch = call("a", "b", "c", "d", "e")
    assert result.succeeded
    assert {(scratch / f"f{index}").read_text() for index in range(5)} == {"5 3 1"}
    assert (scratch / "over").exists(), "the protocol was not let end"


def test_streams_come_from_the_environment_or_the_machine(call) -> None:
    _, scratch = call("a", STAGEOUT_CONCURRENCY="7", STAGEOUT_PARALLELISM="4")
    assert (scratch / "f0").read_text() == "1 7 4"
    _, scratch = call("a", machine_ad={"STAGEOUT_PARALLELISM": 2, "STAGEOUT_CONCURRENCY": 5})
    assert (scratch / "f0").read_text() == "1 5 2"


@pytest.mark.parametrize("nonsense", ["0", "-3", "many", ""])
def test_a_setting_without_sense_is_the_default_and_too_much_is_bounded(call, nonsense: str) -> None:
    _, scratch = call("a", STAGEOUT_CONCURRENCY=nonsense, STAGEOUT_PARALLELISM=nonsense)
    assert (scratch / "f0").read_text() == "1 3 1"
    _, scratch = call("a", STAGEOUT_CONCURRENCY="1000", STAGEOUT_PARALLELISM="1000")
    assert (scratch / "f0").read_text() == "1 64 64"


def test_what_is_not_finished_has_failed(call) -> None:
    assert _codes(call("a", "silent")[0]) == [None, ErrorClass.PLUGIN_BROKEN.code]
    assert _codes(call("a", "all", "b")[0]) == [None, ErrorClass.SERVER_BUSY.code, ErrorClass.SERVER_BUSY.code]
    assert _codes(call("bug")[0]) == [ErrorClass.PLUGIN_BROKEN.code]
