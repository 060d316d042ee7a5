"""Fields of reports: older and newer versions read each other, and the size stays bounded."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from stageout.cli.clocks import shifted
from stageout.wire import custody
from stageout.wire.control import Tuning
from stageout.wire.custody import (
    FILES_SHOWN,
    REFUSALS_SHOWN,
    SERVERS_SHOWN,
    FileReport,
    FlowReport,
    RefusalReport,
    Report,
    SandboxReport,
    ServerReport,
    payload_of,
    read_report,
    report_ad,
)
from stageout.wire.typed import LATEST_AT
from tests.unit.test_eta import NOW, box, report

PAGE = Path(__file__).resolve().parents[2] / "docs/developer/reports.md"
DIGEST = "sha256:" + "ab" * 32


def delivered(number: int) -> SandboxReport:
    """A sandbox of one file, with all figures."""
    file = FileReport(
        "out.dat", f"https://dest.example.org/alice/{number}/out.dat", 734_003_200, "Delivered", "stageout_curl_plugin",
        1, verified="size sha256", began_at=NOW - 70, ended_at=NOW - 10, digest=DIGEST, streams=4, transfer_ms=59_123,
    )  # fmt: skip
    return box(
        number, state="Released", files=(file,), files_left=0, bytes_left=0, group="physics", confirmed_at=NOW - 80,
        ended_at=NOW - 10, data_slot="slot1_1@ep7.example.org", tickets=(f"{number:032x}",),
    )  # fmt: skip


def size_of(found: Report) -> int:
    """Bytes of a report's payload."""
    return len(payload_of(report_ad(found)))


def test_a_reader_ignores_fields_of_a_newer_version() -> None:
    said = json.loads(payload_of(report_ad(report(box()))))
    said["later"] = said["sandboxes"][0]["later"] = said["sandboxes"][0]["files"][0]["later"] = {"any": [1]}
    assert read_report(json.dumps(said)) == report(box())


def test_whose_fault_a_failure_is_comes_over() -> None:
    file = replace(delivered(1).files[0], state="RetryWait", error="the spool cannot be read", of_node=1)
    (found,) = read_report(payload_of(report_ad(report(box(1, files=(file,)))))).sandboxes
    assert found.files == (file,)


def test_times_that_no_clock_can_show_are_read_as_the_nearest_that_can() -> None:
    said = json.loads(payload_of(report_ad(report(box()))))
    said["sandboxes"][0].update(next_attempt_at=2**62, accepted_at=-1)
    found = read_report(json.dumps(said)).sandboxes[0]
    assert (found.next_attempt_at, found.accepted_at) == (LATEST_AT, 0)
    assert datetime.fromtimestamp(found.next_attempt_at, timezone.utc).year > 6000


def test_half_a_surrogate_pair_does_not_get_past_the_reader() -> None:
    ad = report_ad(report(box(1, reason="full \udcff \U0001f4be")))
    assert read_report(payload_of(ad)).sandboxes[0].reason == "full ? \U0001f4be"


def test_fields_with_their_default_value_are_left_out() -> None:
    text = payload_of(report_ad(replace(report(box()), flows=())))
    for kind in (FileReport, SandboxReport, Report, FlowReport):
        for item in fields(kind):
            if item.name in custody._may_lack(kind):
                assert item.default in (0, 0.0, "", ()) or item.default_factory is dict, item.name
                assert f'"{item.name}"' not in text


def test_every_field_is_documented() -> None:
    words = set(re.findall(r"`([^`\n]+)`", PAGE.read_text()))
    for kind in (Report, SandboxReport, FileReport, FlowReport, ServerReport, RefusalReport):
        assert {item.name for item in fields(kind)} <= words
    assert {str(state) for state in Tuning} <= words


def test_what_a_report_grows_by_is_bounded() -> None:
    whole = [delivered(number) for number in range(1000)]
    none: dict[str, Any] = {"began_at": 0, "ended_at": 0, "digest": "", "streams": 0, "transfer_ms": 0}
    bare = [
        replace(
            one, group="", confirmed_at=0, ended_at=0,
            files=tuple(replace(file, **none) for file in one.files),
        )
        for one in whole
    ]  # fmt: skip
    grown = (size_of(report(*whole, flows=())) - size_of(report(*bare, flows=()))) / len(whole)
    assert grown < 260
    flow = FlowReport("https://" + "d" * 60, 10**9, 10**9, 0.123, 64, 64, "unmeasured", 10**6, 10**15, 1000, 10**12)
    assert size_of(report(flows=(flow,) * SERVERS_SHOWN)) - size_of(report(flows=())) < 400 * SERVERS_SHOWN
    assert FILES_SHOWN == 50
    job, owner = "ap.example.org#1234567.0#1795251831", "production@example.org"
    refusal = RefusalReport(job, 1, "OtherFilesystem", "r" * 300, owner)
    assert size_of(report(refusals=(refusal,) * REFUSALS_SHOWN)) - size_of(report()) < 450 * REFUSALS_SHOWN


def test_all_times_of_a_report_are_told_by_the_readers_clock() -> None:
    away = ServerReport("s", "open", "why", 1, NOW, NOW + 5)
    found = shifted(report(delivered(1), servers=(away,)), 100)

    def times(said: Any) -> list[int]:
        names = [item.name for item in fields(said) if item.name.endswith("_at")]
        return [getattr(said, name) for name in names if getattr(said, name)]

    before = delivered(1)
    assert times(found.sandboxes[0]) == [at + 100 for at in times(before)]
    assert times(found.sandboxes[0].files[0]) == [at + 100 for at in times(before.files[0])]
    assert times(found.servers[0]) == [at + 100 for at in times(away)]
