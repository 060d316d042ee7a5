"""examples/overlay: a gateway with the settings and the unit that stand there."""

from __future__ import annotations

import configparser
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from stageout.cli.main import main
from stageout.core.config import KNOBS
from tests.harness.pool.waiting import wait_until
from tests.harness.router import RouterProcess

_FOLDER = Path(__file__).resolve().parents[2] / "examples" / "overlay"


def _env() -> list[str]:
    return (_FOLDER / "gateway.env").read_text().splitlines()


def _settings(lines: Iterable[str]) -> dict[str, str]:
    """The settings there, with those that are commented out."""
    pairs = (line.lstrip("#").partition("=") for line in lines if not line.startswith("# "))
    return {name: value for name, equals, value in pairs if equals}


def _unit() -> configparser.ConfigParser:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(_FOLDER / "stageout-router.service")
    return unit


def test_settings_and_unit_name_the_same_things() -> None:
    settings, service = _settings(_env()), _unit()["Service"]
    assert {name for name in settings if name not in KNOBS or KNOBS[name].role != "router"} == set()
    program, option, file = service["ExecStart"].split()
    assert (program, option) == ("/opt/stageout/bin/stageout-router", "--settings")
    assert service["ReadWritePaths"] == settings["STAGEOUT_ROUTER_ROOT"] == _unit()["Unit"]["RequiresMountsFor"]
    assert settings["STAGEOUT_ROUTER_DIR"] == f"/var/lib/{service['StateDirectory']}"
    readme = (_FOLDER / "README.md").read_text()
    assert f"--settings {file} --new-key" in readme
    assert "EnvironmentFile" not in service, "a reload reads the file again, and not the environment"
    assert settings["STAGEOUT_ROUTER_KEYS"] in readme


def test_a_gateway_with_these_settings_takes_a_file_and_reads_its_keys_again(tmp_path: Path) -> None:
    settings = _settings(line for line in _env() if not line.startswith("#"))
    for place, here in (("/data", "data"), ("/var/lib", "lib"), ("/etc/stageout", "etc")):
        (tmp_path / here).mkdir()
        settings = {name: value.replace(place, str(tmp_path / here)) for name, value in settings.items()}
    (tmp_path / "data/incoming").mkdir()
    keys, own, file = Path(settings["STAGEOUT_ROUTER_KEYS"]), tmp_path / "own.key", tmp_path / "file"
    keys.write_text(f"cluster {'0' * 48} /\n")
    own.write_text(f"alice {'1' * 48}\n")
    file.write_bytes(b"data")
    for path in (keys, own):
        path.chmod(0o600)
    with RouterProcess(tmp_path / "router", {**settings, "STAGEOUT_ROUTER_PORT": "0"}) as router:
        put = ["put", str(file), f"overlay://127.0.0.1:{router.port}/run7/file", "--key", str(own)]
        assert main(put) != 0
        keys.write_text(f"{keys.read_text()}alice {'1' * 48} /run7\n")
        os.kill(router.pid, signal.SIGHUP)
        wait_until(lambda: " configuration-reloaded" in router.log, timeout_s=30, what="the keys to be read again")
        assert main(put) == 0
        there = f"overlay://127.0.0.1:{router.port}"
        (tmp_path / "back").mkdir()
        assert main(["put", str(file), f"{there}/", "--key", str(keys)]) == 0
        assert main(["get", f"{there}/file", str(tmp_path / "back"), "--key", str(keys)]) == 0
    assert (tmp_path / "data/incoming/file").read_bytes() == (tmp_path / "back/file").read_bytes() == b"data"
    assert (tmp_path / "data/incoming/run7/file").read_bytes() == b"data"
