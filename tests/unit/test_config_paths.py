"""A setting that names a path is absolute: a daemon's working directory is not where its administrator thinks it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from overlay_router.daemon import home_of
from policy_service.service import database_of
from policy_service.site_policy import PolicyError, open_policy
from sandbox_manager.daemon import spool_directory
from schedd_agent.custodian_client import keys_of
from stageout.core.config import KNOBS, ConfigError, mapping_settings
from stageout.core.errors import TransferFailure
from stageout.handoff.client import offer
from stageout.overlay import settings as overlay
from stageout.protocols.globusonline.journal import Journal

#: Settings whose doc or default speaks of a file, a directory or a program.
_PATHS = {
    "STAGEOUT_SPOOL", "STAGEOUT_POLICY_TOKEN", "STAGEOUT_CUSTODIAN_KEY", "STAGEOUT_POLICY_CERT", "STAGEOUT_POLICY_KEY",
    "STAGEOUT_POLICY_TOKENS", "STAGEOUT_POLICY_DIR", "STAGEOUT_ROUTER_ROOT", "STAGEOUT_ROUTER_DIR",
    "STAGEOUT_ROUTER_KEYS", "STAGEOUT_ROUTER_ISSUERS", "STAGEOUT_ROUTER_CERT", "STAGEOUT_ROUTER_CERT_KEY",
    "STAGEOUT_ROUTER_KEY", "STAGEOUT_ROUTER_EGRESS_CREDENTIALS", "STAGEOUT_OVERLAY_KEY", "STAGEOUT_PROFILES",
    "STAGEOUT_GLOBUS_PERSONAL", "STAGEOUT_WEB_CERT", "STAGEOUT_WEB_CERT_KEY", "STAGEOUT_WEB_TOKENS", "STAGEOUT_WEB_DIR",
    "STAGEOUT_MANAGER_METRICS_FILE",
}  # fmt: skip


def test_every_knob_with_a_path_as_its_default_is_among_them() -> None:
    defaults = {knob.name for knob in KNOBS.values() if isinstance(knob.default, str) and "/" in knob.default}
    assert defaults <= _PATHS


@pytest.mark.parametrize("name", sorted(_PATHS))
def test_a_relative_path_is_refused_with_knob_value_and_what_to_write(name: str) -> None:
    settings = mapping_settings({name: "some/place"})
    with pytest.raises(ConfigError, match=f"^{name} = some/place: write an absolute path, such as /some/place"):
        settings.text(name)
    assert mapping_settings({name: "/some/place"}).text(name) == "/some/place"


def test_each_file_of_a_custodian_key_is_absolute() -> None:
    settings = mapping_settings({"STAGEOUT_CUSTODIAN_KEY": "/etc/new.key, /etc/old.key"})
    assert keys_of(settings) == (Path("/etc/new.key"), Path("/etc/old.key"))
    with pytest.raises(ConfigError, match=r"^STAGEOUT_CUSTODIAN_KEY: write absolute paths, .* not 'old.key'"):
        keys_of(mapping_settings({"STAGEOUT_CUSTODIAN_KEY": "/etc/new.key, old.key"}))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"EXECUTE": "here"}, "STAGEOUT_SPOOL = here/../stageout: write an absolute path"),
        ({}, "STAGEOUT_SPOOL = $(EXECUTE)/../stageout, and EXECUTE is not set"),
    ],
)
def test_a_spool_below_a_relative_execute_is_refused(values: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        spool_directory(mapping_settings(values))


@pytest.mark.parametrize(("place", "name"), [(home_of, "ROUTER_DIR"), (database_of, "POLICY_DIR")])
def test_records_below_a_relative_spool_are_refused(place: object, name: str) -> None:
    assert callable(place)
    with pytest.raises(ConfigError, match=f"STAGEOUT_{name} = spool/stageout_.*: write an absolute path"):
        place(mapping_settings({"SPOOL": "spool"}))


def test_the_module_of_a_site_policy_has_an_absolute_path() -> None:
    with pytest.raises(PolicyError, match=r"site/policy\.py.*the absolute path of a Python module"):
        open_policy("site/policy.py")


def test_a_plugin_looks_for_no_manager_below_the_job_s_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "execute" / "dir_7" / "scratch"
    (scratch / "mine" / "run").mkdir(parents=True)
    monkeypatch.chdir(scratch)
    monkeypatch.setenv("STAGEOUT_SPOOL", "mine")
    answer = offer([("https://a/b", str(scratch / "out"))], "/plugin")
    assert not answer.accepted
    assert answer.reason.startswith("STAGEOUT_SPOOL = mine: write an absolute path")


def test_plugins_refuse_them_as_a_fault_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEOUT_STATE_DIR", "state")
    with pytest.raises(TransferFailure, match="STAGEOUT_STATE_DIR = state: write an absolute path"):
        Journal()
    monkeypatch.setattr(overlay, "_configured", lambda: mapping_settings({"STAGEOUT_OVERLAY_KEY": "key"}))
    with pytest.raises(TransferFailure, match="STAGEOUT_OVERLAY_KEY = key: write an absolute path"):
        overlay.key_file_of()
