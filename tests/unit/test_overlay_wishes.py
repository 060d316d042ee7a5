"""The demand of a job, or of another caller, on the links, and how much of it is allowed."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, cast

import pytest

from stageout.core.config import mapping_settings
from stageout.core.errors import ErrorClass, TransferFailure
from stageout.core.signing import new_key
from stageout.overlay import settings
from stageout.overlay.channel import Gateway
from stageout.overlay.client import allowed, deposit_order
from stageout.overlay.settings import connections_of
from stageout.overlay.wire import frames
from stageout.overlay.wire.capability import Credential, issue
from stageout.overlay.wire.messages import decode, encode
from stageout.plugin.api import Context
from stageout.protocols.overlay.abilities import ABILITIES
from stageout.protocols.overlay.protocol import _connections, _gateway, _wishes


class _Context:
    """Of a plugin's call. :param job: the job's ad. :param settings: without STAGEOUT_."""

    def __init__(self, job: dict[str, Any], **settings: str) -> None:
        self._job, self._settings = job, settings

    def job_attribute(self, name: str) -> Any:
        assert name in ABILITIES.job_attributes  # others are not there after the job's end
        return self._job.get(name)

    def setting(self, name: str, default: str) -> str:
        return self._settings.get(name, default)

    @property
    def remaining_s(self) -> float:
        return 600.0

    @property
    def parallelism(self) -> int:
        return int(self._settings["PARALLELISM"])


@pytest.mark.parametrize(
    ("job", "wishes"),
    [
        ({}, (0, 0)),
        ({"JobPrio": 4}, (4, 0)),
        ({"JobPrio": -4}, (0, 0)),
        ({"JobPrio": 4, "StageOutPriority": 2, "StageOutDeadline": 99}, (2, 99)),
        ({"StageOutPriority": "much", "StageOutDeadline": None}, (0, 0)),
    ],
)
def test_what_a_job_asks_for(job: dict[str, Any], wishes: tuple[int, int]) -> None:
    assert _wishes(cast(Context, _Context(job))) == wishes


def test_a_grant_is_the_limit_of_connections() -> None:
    assert _connections(cast(Context, _Context({}, PARALLELISM="7", OVERLAY_CONNECTIONS="30"))) == (2, 7)
    assert _connections(cast(Context, _Context({}, PARALLELISM="1"))) == (1, 1)
    assert _connections(cast(Context, _Context({}, PARALLELISM="12")), routes=4) == (2, 3)
    assert _connections(cast(Context, _Context({}, PARALLELISM="2")), routes=4) == (1, 1)
    assert _connections(cast(Context, _Context({}, OVERLAY_CONNECTIONS="30"))) == (2, 30)
    assert connections_of(5) == (5, 5)
    with pytest.raises(TransferFailure) as caught:
        connections_of(text="many")
    assert caught.value.kind is ErrorClass.BAD_REQUEST


@pytest.mark.parametrize("is_configured", [True, False])
def test_the_key_is_that_of_the_configuration(
    is_configured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pilot has no place in /etc, and what HTCondor's configuration says is in no plugin's environment."""
    key, other = tmp_path / "key", tmp_path / "other"
    key.write_text("pilots secret\n")
    other.write_text("others secret\n")
    for file in (key, other):
        file.chmod(0o600)
    configured = mapping_settings({"STAGEOUT_OVERLAY_KEY": str(key)})
    monkeypatch.setattr(settings, "_configured", lambda: configured)
    here = {} if is_configured else {"OVERLAY_KEY": str(other)}
    gateway = _gateway("host", 1, cast(Context, _Context({}, **here)))
    assert gateway.key_name == ("pilots" if is_configured else "others")


def test_no_more_priority_than_the_capability_allows() -> None:
    plain = Gateway("host", 1, "key", b"secret")
    assert [allowed(plain, priority) for priority in (-1, 3, 99)] == [0, 3, 10]
    issuer, holder = new_key(), new_key()
    text = issue(issuer, holder.public, "a", ("write",), 1 << 40, max_priority=2)
    assert allowed(Gateway("host", 1, "key", b"secret", credential=Credential(text, holder)), 5) == 2


def test_a_deadline_that_no_message_can_hold_is_the_latest_there_is() -> None:
    order = deposit_order("f", "", 0o644, 60, 0, 10**30, "")
    sent = encode(order, zlib.crc32)
    header = frames.decode_header(sent[: frames.HEADER_BYTES], zlib.crc32)
    assert decode(frames.Frame(header, sent[frames.HEADER_BYTES :])) == order
