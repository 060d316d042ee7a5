"""``stageout status`` and ``history``: rows from ads and reports, tables, bars, and the JSON that scripts read."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from dataclasses import asdict, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

from stageout.cli import render
from stageout.cli import status as status_module
from stageout.cli.exits import Unavailable
from stageout.cli.history import details, entry, overview
from stageout.cli.main import main
from stageout.cli.node import LocalReport
from stageout.cli.rows import (
    Destination,
    Row,
    about,
    as_json,
    destinations,
    explained,
    merge,
    needs_node,
    rows_of_report,
    server_totals,
)
from stageout.cli.status import Snapshot, lines
from stageout.cli.why import why
from stageout.core.classads import ClassAd
from stageout.core.reasons import sentence_of
from stageout.core.states import PLAIN, State
from stageout.core.units import duration, size
from stageout.wire.control import StreamsReport
from stageout.wire.custody import (
    FileReport,
    FlowReport,
    Report,
    SandboxReport,
    ServerReport,
    encoded,
    read_report,
    report_ad,
)
from tests.unit.test_cli_jobs import job

NOW = 1_800_000_000.0
MB = 10**6


def box(**changes: Any) -> SandboxReport:
    values: dict[str, Any] = {
        "job": "ap#12.0#1795251831", "number": 1, "owner": "alice@x", "state": "RetryWait", "change": 7,
        "reason": "507 from dest", "error_code": 71, "tickets": ("t",), "files_total": 3, "files_left": 1,
        "bytes_total": 3 * MB, "bytes_left": MB, "attempts": 2, "attempts_limit": 20,
        "next_attempt_at": int(NOW) + 200, "accepted_at": int(NOW) - 60, "files": FILES, **changes,
    }  # fmt: skip
    return SandboxReport(**values)


FILES = (
    FileReport("b.dat", "https://dest/b.dat", MB, "RetryWait", "curl_plugin", 2, 71, "507: full", int(NOW) + 200),
    FileReport("a.dat", "https://dest/a.dat", 2 * MB, "Delivered", "curl_plugin", 1, verified="md5"),
)


def report(*boxes: SandboxReport, number: int = 5, manager: str = "ep1") -> Report:
    return Report(manager, "", number, int(NOW) - 3, {}, 0, tuple(boxes))


def test_the_report_is_newer_than_the_jobs_ad() -> None:
    (row,) = merge([job(StageOutState="Moving", StageOutBytesLeft=3 * MB)], [report(box())])
    assert (row.state, row.bytes_left, row.attempts_limit, row.manager) == ("RetryWait", MB, 20, "ep1")
    assert row.reported_at == NOW - 3
    assert row.files == FILES


def test_a_sandbox_that_has_not_changed_need_not_be_encoded_again() -> None:
    odd = replace(box(), reason='"sandboxes":[] \\"sandboxes":[]', state="Released")
    whole = replace(report(box(), odd), manager='"sandboxes":[]', acknowledged={"sandboxes": 1})
    alike = report_ad(replace(whole, sandboxes=()), None, map(encoded, whole.sandboxes))
    assert alike == report_ad(whole) and alike["StageOutSandboxes"] == 1
    assert read_report(alike["StageOutPayload"]) == whole
    assert json.loads(alike["StageOutPayload"])["sandboxes"][1]["reason"] == odd.reason
    assert read_report(report_ad(report())["StageOutPayload"]) == report()


def test_a_server_that_is_away_is_named_with_reason_and_next_probe() -> None:
    away = ServerReport("https://dest", "open", "connection\nrefused", 3, int(NOW) - 200, int(NOW) + 20)
    probed = ServerReport("https://other", "half-open", "busy", 1, int(NOW) - 5, 0)
    seen = replace(report(box()), servers=(away, probed))
    assert read_report(report_ad(seen)["StageOutPayload"]) == seen
    assert render.server_notes([seen], NOW) == [
        "https://dest cannot be reached from ep1 for 3m20s (open, next probe in 20s): connection refused",
        "https://other cannot be reached from ep1 for 5s (half-open, being probed): busy",
    ]


def test_servers_that_only_others_output_goes_to_are_not_named() -> None:
    servers = tuple(ServerReport(f"https://{name}", "open", "refused", 1, 1, 1) for name in ("dest", "other"))
    others = replace(report(manager="ep2"), servers=servers)
    seen = replace(report(box()), servers=servers)

    def named(*files: FileReport, **facts: Any) -> list[str]:
        rows = merge([job()], [replace(seen, sandboxes=(box(files=files, **facts),)), others])
        return [one.server for known in about(rows, [seen, others]) for one in known.servers]

    waiting, delivered = FILES
    assert named(*FILES) == ["https://dest"]
    assert named(replace(waiting, url="site+https://OTHER/b"), delivered) == ["https://other"]
    assert named(replace(waiting, state="Failed"), delivered) == []
    assert named(*FILES, files_left=2) == ["https://dest", "https://other"], "of one of them nothing is said"


@pytest.mark.parametrize(
    ("state", "awaited"),
    [("RetryWait", {"ep1", "ep2"}), ("Failed", set()), ("HandedOver", set()), ("Moving", {"ep1", "ep2"})],
)
def test_a_custodian_that_is_silent_is_named(state: str, awaited: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector tells by its own clock which node is silent: that of the node may be a day behind."""
    waiting = job(StageOutState=state, StageOutManager="ep1,ep2")
    assert render.awaited_managers(merge([waiting], [])) == awaited
    pool: Any = SimpleNamespace(reports=lambda managers: [replace(report(), sent_at=1)], heard=lambda managers: {"ep2"})
    pool.agent_heard_at = lambda schedd: int(time.time())
    pool.left_output = lambda schedd: {}
    queue: Any = SimpleNamespace(jobs_in_stage_out=lambda owner: [waiting], name=lambda: "ap")
    notes = status_module.look(queue, pool, [], None, {}).notes
    assert [note.partition(" Its output")[0] for note in notes] == [
        "nothing was heard of ep1 for 15m00s or more: is its node up?" for _ in awaited if _ == "ep1"
    ]


def test_a_job_that_is_held_without_output_in_custody_says_why() -> None:
    held = job(JobStatus=5, TransferOutputStats=None, HoldReasonCode=12, HoldReasonSubCode=256, HoldReason="no out2")
    (text, reason, *_) = lines(Snapshot(merge([held], []), []), NOW, 0, in_detail=True)
    assert (text, reason) == ("Job 12.0 of alice: held", "  reason    no out2")


def test_what_was_removed_waits_for_nothing() -> None:
    gone = job(JobStatus=3, StageOutState="RetryWait", StageOutNextAttempt=int(NOW) + 9, RemoveReason="via condor_rm",
               StageOutReason="507: full; attempt 2 of 20")  # fmt: skip
    (text, reason, *_) = lines(Snapshot(merge([gone], []), []), NOW, 0, in_detail=True)
    assert (text, reason) == ("Job 12.0 of alice: removed", "  reason    via condor_rm")
    item = entry(gone, [])
    assert (item["reason"], item["state"]) == ("via condor_rm", "RetryWait")


def test_an_end_is_true_only_when_the_jobs_ad_says_so() -> None:
    claimed = report(box(state="Delivered", files_left=0, bytes_left=0))
    (row,) = merge([job(StageOutState="Failed", StageOutRun=1, StageOutReason="full")], [claimed])
    assert (row.state, row.reason) == ("Failed", "full")


def test_the_newest_of_several_reports_counts() -> None:
    old, new = report(box(change=3, state="Leased")), report(box(change=9, state="Moving"), manager="ep2")
    for order in ([old, new], [new, old]):
        assert merge([job()], order)[0].state == "Moving"


def test_what_routers_have_is_not_delivered_and_stands_with_since_when() -> None:
    one = f"gw1:9621 2 {2 * MB} {int(NOW) - 200}"
    two = f"gw1:9621,gw2:9621 1 {MB} {int(NOW) - 20}"
    there = box(state="HandedOver", files_left=0, bytes_left=0, holdings=(one, two), custody=("r",))
    assert read_report(report_ad(report(there))["StageOutPayload"]) == report(there)
    (row,) = merge([job()], [report(there)])
    (late,) = merge([job(StageOutState="HandedOver", StageOutFilesLeft=0, StageOutBytesLeft=0,
                         StageOutCustody=f"{one}; {two}; bad 1 x 2")], [])  # fmt: skip
    for found in (row, late):
        assert (found.files_left, found.bytes_left) == (3, 3 * MB)
        text = "\n".join(lines(Snapshot([found], []), NOW, 0, True))
        assert "only copy 2 files, 2.0 MB at gw1:9621 for 3m20s" in text
        assert "copies    1 file, 1.0 MB at gw1:9621,gw2:9621 for 20s" in text
        assert "0 of 3 files" in text
    (gone,) = merge([job(StageOutState="Delivered", StageOutRun=1)], [report(replace(there, state="Delivered"))])
    assert (gone.custody, gone.files_left) == ((), 0)


def test_reports_about_other_runs_and_jobs_are_not_mixed_in() -> None:
    others = report(box(number=2), box(job="ap#13.0#1"), box(job="other#12.0#1795251831"))
    (row,) = merge([job(StageOutState="Confirmed")], [others])
    assert (row.state, row.reported_at, row.files) == ("Confirmed", None, ())


def test_a_run_that_went_on_over_a_restart_has_an_older_number_at_its_node() -> None:
    old, last = box(number=1, state="Superseded", change=9), box(number=2, state="Moving")
    for boxes in ((old, last), (last, old)):
        assert merge([job(NumShadowStarts=3)], [report(*boxes)])[0].state == "Moving"
    assert merge([job(NumShadowStarts=3, TransferOutputStats=None)], [report(last)])[0].state == "None"


def test_without_a_report_the_jobs_ad_is_enough() -> None:
    (row,) = merge([job(StageOutState="Moving", StageOutBytesLeft=5, StageOutFilesLeft=2, StageOutAttempts=1)], [])
    assert (row.files_left, row.files_total, row.bytes_left, row.attempts) == (2, 3, 5, 1)
    (row,) = merge([job()], [])
    assert (row.files_left, row.bytes_left) == (3, 3 * MB), "nothing is known to have arrived"
    (row,) = merge([job(StageOutState="Delivered", StageOutRun=1)], [])
    assert (row.files_left, row.bytes_left) == (0, 0)


def test_rows_are_in_the_order_of_the_ids() -> None:
    jobs = [job(ClusterId=cluster, ProcId=proc) for cluster, proc in ((2, 0), (10, 1), (10, 0), (1, 5))]
    assert [row.job for row in merge(jobs, [])] == ["1.5", "2.0", "10.0", "10.1"]


def test_a_nodes_own_rows() -> None:
    (row,) = rows_of_report(report(box()))
    assert (row.job, row.owner, row.run, row.job_status) == ("12.0", "alice@x", 1, "Unknown")


def test_overview() -> None:
    text = lines(Snapshot(merge([job()], [report(box())]), []), NOW, 0, in_detail=False)
    assert text == [
        "JOB   OWNER  STATE             FILES           SIZE  ATTEMPT   NEXT  ETA  REASON",
        "12.0  alice  waiting to retry    1/3  1.0 MB/3.0 MB  2 of 20  3m20s    -  507 from dest",
        "",
        "1 job; 1 file, 1.0 MB still to deliver",
    ]


def test_file_by_file() -> None:
    text = "\n".join(lines(Snapshot(merge([job()], [report(box())]), []), NOW, 0, in_detail=True))
    assert "Job 12.0 of alice: waiting to retry" in text
    assert "2 of 3 files, 2.0 MB of 3.0 MB" in text
    assert re.search(
        r"b\.dat +1\.0 MB +waiting to retry +curl_plugin +2 of 20 +3m20s +- +https://dest/b\.dat +507: full", text
    )
    assert re.search(r"a\.dat +2\.0 MB +delivered +curl_plugin +1 of 20 +- +md5 +https://dest/a\.dat +-", text)
    assert "(1 file not shown here" in text


def test_where_the_files_of_delivered_output_are_found() -> None:
    done = merge([job(StageOutState="Delivered", StageOutBytesLeft=0, StageOutFilesLeft=0)], [])
    text = lines(Snapshot(done, []), NOW, 0, in_detail=True)
    assert text[-1] == "('stageout history 12.0' shows its 3 files)"


def test_a_node_shows_what_goes_where_at_once_and_why() -> None:
    one = StreamsReport("https://dest", "crowding", 4, 1, 3, 3, 8, 12.5, "4 transfers carry 3.9: no step.", "Granted.")
    flow = FlowReport("https://dest", 10**7, 10**7, 0.5, files_waiting=9, bytes_waiting=900 * MB)
    said = replace(report(box()), flows=(flow,))
    streams = [one, replace(one, server="https://idle", rate_mb_s=0.0)]
    places = tuple(destinations([said], NOW))
    text = lines(Snapshot(merge([job()], [said]), [], streams, destinations=places), NOW, 0, False)
    assert text[-3:] == [
        "SERVER        AT ONCE  STREAMS       RATE  WAITING      ETA  WHY",
        "https://dest      3/4      3/8  12.5 MB/s   900 MB  0-5 min  4 transfers carry 3.9: no step. Granted.",
        "https://idle      3/4      3/8          -        -        -  4 transfers carry 3.9: no step. Granted.",
    ]
    assert as_json([], NOW, [], [one])["streams"] == [asdict(one)]
    assert "streams" not in as_json([], NOW)


def test_the_output_of_all_users_has_sums_for_each_server() -> None:
    near = FlowReport(
        "https://near", 10**7, 10**7, 0.5, files_waiting=1, bytes_waiting=10 * MB, files_moving=1, bytes_moving=MB
    )
    far = FlowReport("https://far", 0, 0, 0.0, files_waiting=2, bytes_waiting=500 * MB)
    said = [
        replace(report(box()), manager="one", flows=(near, far)),
        replace(report(box()), manager="two", flows=(far,)),
    ]
    seen = Snapshot(merge([job()], said[:1]), [], destinations=tuple(destinations(said, NOW)))
    text = lines(seen._replace(is_of_all=True), NOW, 0, in_detail=False)
    assert [line.split() for line in text[-3:]] == [
        ["SERVER", "NODES", "FILES", "SIZE", "RATE", "ETA"],
        ["https://far", "2", "4", "1.0", "GB", "-", "-"],
        ["https://near", "1", "2", "11.0", "MB", "10.0", "MB/s", "0-1", "s"],
    ]
    assert "SERVER" not in "".join(lines(seen, NOW, 0, in_detail=False))


@pytest.mark.parametrize(
    ("etas", "shown"),
    [
        (((10, 20), (30, 300)), (30, 300)),
        (((10, 20), (30, None)), (30, None)),
        (((10, 20), (None, None)), (10, None)),
        (((None, None),), (None, None)),
    ],
)
def test_all_has_arrived_when_the_last_node_is_done(etas: Any, shown: tuple[int | None, int | None]) -> None:
    places = [Destination("ep", "https://dest", 1, 0.1, 1, 1, "kept", 1, 1, 0, 0, *eta) for eta in etas]
    (total,) = server_totals(places)
    assert (total.eta_low_s, total.eta_high_s) == shown


def test_a_synchronous_job_says_so() -> None:
    (row,) = merge([job(TransferOutputStats=None)], [])
    text = "\n".join(lines(Snapshot([row], []), NOW, 0, in_detail=True))
    assert "synchronous" in text and "nothing was handed off" in text


def test_notes_and_nothing_to_show() -> None:
    assert lines(Snapshot([], ["collector down"]), NOW, 0, False) == [
        "Note: collector down",
        "No output is in stage-out.",
    ]


def test_what_others_wrote_cannot_steer_the_terminal() -> None:
    evil = "x\x1b[2Jy\r\nz\x9b1m"
    jobs = [job(Owner=evil, StageOutReason=evil, StageOutState="Moving")]
    files = (FileReport(evil, evil, 1, evil, evil, 1, 1, evil, 0, evil),)
    for rows in (merge(jobs, []), merge(jobs, [report(box(reason=evil, files=files))])):
        for detail, live in ((True, False), (False, False), (False, True)):
            text = "\n".join(lines(Snapshot(rows, []), NOW, 80, detail, live))
            assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)


_LONG_REASON = "507 Insufficient Storage: " + "the quota of the directory is used up, " * 4 + "ask its owner"


def test_a_reason_without_room_stands_below_its_row() -> None:
    jobs = [job(StageOutReason=_LONG_REASON, StageOutState="RetryWait")]
    seen = Snapshot(merge(jobs, [report(box(reason=_LONG_REASON))]), [])
    narrow = lines(seen, NOW, 80, False)
    assert narrow[:2] == [
        "JOB   OWNER  STATE             FILES           SIZE  ATTEMPT   NEXT  ETA",
        "12.0  alice  waiting to retry    1/3  1.0 MB/3.0 MB  2 of 20  3m20s    -",
    ]
    assert max(map(len, narrow)) <= 80
    assert " ".join(" ".join(narrow[2:-2]).split()) == f"REASON: {_LONG_REASON}"
    assert _LONG_REASON in lines(seen, NOW, 0, False)[1]


@pytest.mark.parametrize("columns", [40, 80, 100])
@pytest.mark.parametrize(("detail", "live"), [(True, False), (False, False), (False, True)])
def test_nothing_is_cut_at_any_width(detail: bool, live: bool, columns: int) -> None:
    rows = merge([job(StageOutState="RetryWait")], [report(box(reason=_LONG_REASON))])
    shown = lines(Snapshot(rows, []), NOW, columns, detail, live)
    text = " ".join(" ".join(shown).split())
    assert "…" not in text
    assert _LONG_REASON in text
    assert "https://dest/b.dat" in text or not detail


@pytest.mark.parametrize(
    ("text", "count"),
    [("0 B", 0), ("999 B", 999), ("1.0 kB", 1000), ("1.0 MB", MB), ("99.9 MB", int(99.9 * MB)), ("100 MB", 100 * MB),
     ("999 MB", 999 * MB), ("1.0 GB", 1000 * MB), ("4.1 GB", 4096 * MB), ("2000 PB", 2 * 10**18)],
)  # fmt: skip
def test_sizes(text: str, count: int) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("text", "seconds"), [("0s", -3), ("0s", 0.4), ("59s", 59.9), ("3m20s", 200), ("2h05m", 7500), ("4d03h", 356400)]
)
def test_durations(text: str, seconds: float) -> None:
    assert duration(seconds) == text


def test_a_bar_is_full_only_when_all_is_done() -> None:
    assert render.bar(0, 100, 10) == "." * 10
    assert render.bar(999_999, 1_000_000, 10) == "#" * 9 + "."
    assert render.bar(100, 100, 10) == "#" * 10
    assert render.bar(0, 0, 10) == "." * 10


def test_what_is_redrawn_fits_the_terminal() -> None:
    assert render.fit(["a" * 100, "b"], 20, 24) == ["a" * 19 + "…", "b"]
    assert render.fit([str(number) for number in range(50)], 40, 10) == [*map(str, range(8)), "... and 42 more lines"]
    assert render.fit(["结" * 20], 20, 10) == ["结" * 9 + "…"]


class Terminal(io.StringIO):
    """Standard output that is a terminal, or is not."""

    def __init__(self, live: bool) -> None:
        super().__init__()
        self.live = live

    def isatty(self) -> bool:
        return self.live


def watched(live: bool, monkeypatch: Any) -> str:
    """The output of ``--watch`` while a job is delivered, with the schedd away for a while."""
    half, done = box(bytes_left=2 * MB, files_left=2), box(bytes_left=0, files_left=0, state="Delivered")
    looks: list[Any] = [half, half, Unavailable("the schedd does not answer."), done]

    def look() -> Snapshot:
        seen = looks.pop(0)
        if isinstance(seen, Exception):
            raise seen
        return Snapshot(merge([job()], [report(seen)]), [])

    screen = Terminal(live)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setenv("COLUMNS", "100")
    assert status_module._watch(look, lambda seen: lines(seen, NOW, 100, False, live), live) == 0
    assert not looks
    return screen.getvalue()


def test_watching_on_a_terminal_draws_bars_in_place(monkeypatch: Any) -> None:
    text = watched(True, monkeypatch)
    assert re.findall(r"\x1b\[(\d)F\x1b\[J", text) == ["3", "3", "1"], "the reason has a line of its own"
    assert "[###......." in text and "33%" in text and "100%" in text


def test_watching_elsewhere_prints_changes_only(monkeypatch: Any) -> None:
    text = watched(False, monkeypatch)
    assert "\x1b" not in text
    assert text.count("JOB ") == 2 and text.count("stageout: the schedd does not answer.") == 1


def test_wide_characters_keep_the_columns_straight() -> None:
    header, one, two = render.table(("JOB", "REASON"), [("结果", "x"), ("abcd", "y")])
    assert (one.index("x"), two.index("y"), header.index("REASON")) == (4, 6, 6)


def test_json_of_status() -> None:
    said = replace(report(box()), flows=(FlowReport("https://dest"),))
    places = destinations([said], NOW)
    data = json.loads(json.dumps(as_json(merge([job()], [said]), NOW, ["note"], places=places)))
    assert [list(place) for place in data["destinations"]] == [[item.name for item in fields(Destination)]]
    assert list(data) == ["schema", "at", "jobs", "destinations", "notes", "agent_heard_at"]
    assert (data["schema"], data["at"], data["notes"]) == (1, int(NOW), ["note"])
    (row,) = data["jobs"]
    assert list(row) == [item.name for item in fields(Row)]
    assert list(row["files"][0]) == [item.name for item in fields(FileReport)]
    assert row["files"][0]["error"] == "507: full"


RECORD = ClassAd(
    {
        "NumShadowStarts": 1,
        "RemoteHost": "slot1_1@ep1",
        "OutputPluginResultList": [
            ClassAd(
                {
                    "TransferFileName": "a.dat", "TransferSuccess": True, "TransferUrl": "https://dest/a.dat?s=secret",
                    "TransferFileBytes": 5, "TransferProtocol": "stageout",
                    "DeveloperData": ClassAd({"StageOutReceipt": ClassAd({"Ticket": "0af", "ManagerName": "ep1"})}),
                }
            ),
            ClassAd({"TransferFileName": "b.dat", "TransferSuccess": False, "TransferError": "refused"}),
        ],
    }
)  # fmt: skip


STATS = {"Bytes": 5, "Files": 1, "Seconds": 75, "Attempts": 2, "VerifiedBy": "md5"}


def test_history_of_a_job() -> None:
    item = entry(job(StageOutState="Delivered", StageOutRun=1, StageOutStats=ClassAd(STATS)), [RECORD])
    assert item["delivered"] is True
    assert item["stats"] == STATS
    (run,) = item["runs"]
    assert run["tickets"] == ["0af"]
    assert run["files"][0] == {
        "name": "a.dat", "url": "https://dest/a.dat", "size_bytes": 5, "handed_off": True, "success": True, "error": "",
        "synchronous_code": "", "synchronous_reason": "",
    }  # fmt: skip
    text = "\n".join(details(item))
    for line in ("output    1 file, 5 B", "took      1m15s after the job's end", "attempts  2", "verified  md5"):
        assert f"\n  {line}\n" in text
    assert "Run 1 on slot1_1@ep1, ticket 0af" in text
    assert re.search(r"a\.dat +5 B +handed off +https://dest/a\.dat +-", text)
    assert re.search(r"b\.dat +0 B +failed +- +refused", text)
    assert "secret" not in json.dumps(item)


@pytest.mark.parametrize(
    ("end", "delivered", "changes"),
    [
        ("delivered", True, {"StageOutState": "Delivered", "StageOutRun": 1}),
        ("removed", False, {"JobStatus": 3, "StageOutState": "Moving"}),
        ("cancelled", False, {"StageOutState": "Cancelled"}),
        ("synchronous", True, {"TransferOutputStats": None}),
        ("delivered", False, {"StageOutState": "Delivered", "StageOutRun": 1, "NumShadowStarts": 2}),
    ],
)
def test_ends_in_the_history(end: str, delivered: bool, changes: dict[str, Any]) -> None:
    item = entry(job(**changes), [])
    assert item["delivered"] is delivered
    assert overview([item], 0)[1].split()[2] == end


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("full", {"StageOutReason": "full", "RemoveReason": "by hand"}),
        ("by hand", {"StageOutReason": "full", "RemoveReason": "by hand", "JobStatus": 3}),
        ("full", {"StageOutReason": "full", "JobStatus": 3}),
        ("by hand", {"RemoveReason": "by hand"}),
        (sentence_of("DagNode"), {"StageOutGuard": False, "StageOutSynchronousCode": "DagNode"}),
        ("full", {"StageOutReason": "full", "StageOutGuard": False, "StageOutSynchronousCode": "DagNode"}),
    ],
)
def test_the_reason_in_the_history_is_of_the_end(reason: str, changes: dict[str, Any]) -> None:
    assert entry(job(**changes), [])["reason"] == reason


def test_a_history_without_records_says_why() -> None:
    assert "rotated away" in details(entry(job(), []))[-1]


@pytest.mark.parametrize(
    ("live", "settings", "wanted"),
    [
        (True, {}, True),
        (True, {"NO_COLOR": ""}, True),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {}, False),
    ],
)
def test_colours_are_for_terminals_and_honour_no_color(
    live: bool, settings: dict[str, str], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert render.wants_colours(Terminal(live)) is wanted


def test_states_are_painted_and_nothing_else_changes() -> None:
    wide = {"Owner": "失敗failed", "StageOutReason": "failed " * 30}
    jobs = [job(StageOutState="Failed", StageOutRun=1, **wide), job(ProcId=1, StageOutState="Moving")]
    seen = Snapshot(merge(jobs, [report(box(job="ap#12.1#1"))]), [])
    for detail in (True, False):
        for width in (0, 60, 22):
            plain, painted = (lines(seen, NOW, width, detail, colour=colour) for colour in (False, True))
            assert [re.sub(r"\x1b\[\d+m", "", line) for line in painted] == plain
            assert "".join(painted).count("\x1b[31mfailed\x1b[0m") == (width != 22 or detail)


# ---- plain answers ---------------------------------------------------------------------------------------------------


def first_row(**changes: Any) -> Row:
    (row,) = merge([job()], [report(box(**changes))])
    return row


@pytest.mark.parametrize(
    ("attempts", "excused", "column", "text"),
    [
        (1, 1, "0 of 20", "0 of 20; 1 more did not count, because a server, a credential or the node failed"),
        (3, 2, "1 of 20", "1 of 20; 2 more did not count, because a server, a credential or the node failed"),
        (3, 0, "3 of 20", "3 of 20"),
        (0, 0, "-", ""),
    ],
)
def test_the_limit_of_attempts_does_not_run_away(attempts: int, excused: int, column: str, text: str) -> None:
    row = first_row(attempts=attempts, excused=excused)
    assert column in render.jobs_table([row], NOW)[1]
    assert dict(render.facts(row, NOW))["attempt"] == text


def test_owners_read_plain_words_and_administrators_the_ledgers() -> None:
    assert set(PLAIN) == set(State)
    for state in State:
        row = first_row(state=state.value, next_attempt_at=0)
        assert render.state_word(row) == PLAIN[state], "owner"
        assert render.state_word(row, ledger=True) == state.value, "administrator"
    here = Snapshot(rows_of_report(report(box(state="Leased"))), [], [])
    assert lines(here, NOW, 0, in_detail=False)[1].split()[2] == "Leased"
    assert "starting to send" in lines(here._replace(streams=None), NOW, 0, in_detail=False)[1]
    assert as_json(here.rows, NOW)["jobs"][0]["state"] == "Leased"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"TransferOutputStats": None, "JobStatus": 6}, "transferring output"),
        ({"TransferOutputStats": None, "JobStatus": 2}, "running"),
        ({}, "waiting for a report"),
    ],
)
def test_jobs_without_a_state_show_their_status_in_plain_words(changes: dict[str, Any], word: str) -> None:
    (row,) = merge([job(**changes)], [])
    assert render.state_word(row) == word


def waiting_for(probe_at: int, state: str = "RetryWait", next_at: int = int(NOW) - 300) -> Row:
    """Output that is due, for a server that does not answer."""
    away = ServerReport("https://dest", "open", "refused", 3, int(NOW) - 300, probe_at)
    files = (replace(FILES[0], state=state, next_attempt_at=next_at), FILES[1])
    seen = replace(report(box(state=state, next_attempt_at=next_at, files=files)), servers=(away,))
    (row,) = merge([job()], [seen])
    return row


def test_output_for_a_server_that_does_not_answer_waits_for_the_next_probe() -> None:
    """Files that are due wait until one of them has reached the server."""
    for state in ("RetryWait", "Confirmed"):
        row = waiting_for(int(NOW) + 20, state)
        assert (row.waits_for_server, row.next_attempt_at) == ("https://dest", int(NOW) + 20)
        assert row.files[0].next_attempt_at == int(NOW) + 20
        assert render.state_word(row) == "waiting for the server"
        assert render.next_word(row, NOW) == "20s"
        assert render.next_word(waiting_for(0, state), NOW) == "probing"
    assert render.next_word(waiting_for(int(NOW) + 20, next_at=int(NOW) + 90), NOW) == "1m30s"
    assert waiting_for(int(NOW) + 20, "Moving").waits_for_server == ""


def test_output_for_two_servers_of_which_one_answers_waits_for_no_server() -> None:
    away = ServerReport("https://dest", "open", "refused", 3, int(NOW) - 300, int(NOW) + 20)
    other = replace(FILES[0], name="c.dat", url="https://other/c.dat", next_attempt_at=int(NOW) + 5)
    seen = replace(report(box(files=(*FILES, other), next_attempt_at=int(NOW) + 5)), servers=(away,))
    (row,) = merge([job()], [seen])
    assert (row.waits_for_server, row.next_attempt_at) == ("", int(NOW) + 5)


@pytest.mark.parametrize(
    ("left", "text"), [(2, "nothing confirmed yet"), (1, "1 of 2 files confirmed")], ids=["nothing", "one"]
)
def test_output_that_is_being_sent_says_since_when_and_what_is_confirmed(left: int, text: str) -> None:
    begun = replace(FILES[0], state="Moving", began_at=int(NOW) - 240, next_attempt_at=0, error="", error_code=0)
    row = first_row(
        state="Moving", reason="", files=(begun, FILES[1])[:left] if left == 1 else (begun,), files_total=2,
        files_left=left, next_attempt_at=0,
    )  # fmt: skip
    assert render.reason(row, NOW) == f"sending to dest for 4m00s, {text}"
    assert f"sending to dest for 4m00s, {text}" in render.jobs_table([row], NOW)[1]
    assert render.reason(replace(row, files=()), NOW) == ""


def test_paused_output_has_no_next_attempt() -> None:
    (row,) = merge([job()], [report(box(paused=1))])
    assert not re.search(r"next +in ", "\n".join(lines(Snapshot([row], []), NOW, 0, in_detail=True)))
    assert (row.next_attempt_at, {file.next_attempt_at for file in row.files}) == (0, {0})


def test_paused_output_is_called_so() -> None:
    for row in (first_row(paused=1, state="Confirmed"), *rows_of_report(report(box(paused=1)))):
        assert (render.state_word(row), row.paused) == ("paused", True)


@pytest.mark.parametrize(("state", "word"), [("RetryWait", "due"), ("Confirmed", "-"), ("Moving", "-")])
def test_no_attempt_is_promised_for_the_past(state: str, word: str) -> None:
    assert render.next_word(first_row(state=state, next_attempt_at=int(NOW) - 300), NOW) == word
    assert "now" not in render.jobs_table([first_row(next_attempt_at=int(NOW) - 300)], NOW)[1].split()


def test_delivered_output_whose_job_is_in_the_queue_says_when_it_leaves() -> None:
    delivered = job(StageOutState="Delivered", StageOutRun=1, StageOutReason="1 file, 5 B delivered")
    (row,) = merge([delivered], [])
    assert render.reason(row, NOW) == "leaves the queue within a minute; 1 file, 5 B delivered"
    (kept,) = merge([job(StageOutState="Delivered", StageOutRun=1, StageOutUserLeave=True)], [])
    (gone,) = merge([replace(delivered, in_queue=False)], [])
    assert (kept.leaves_queue, gone.leaves_queue) == (False, False)


@pytest.mark.parametrize(
    ("silent_s", "note"),
    [
        (5, []),
        (720, ["the schedd agent of ap does not answer (last heard of 12m00s ago)"]),
        (None, ["the schedd agent of ap does not answer (the collector knows none)"]),
    ],
)
def test_status_says_that_the_agent_is_away(
    silent_s: int | None, note: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW)
    heard_at = 0 if silent_s is None else int(NOW) - silent_s
    pool: Any = SimpleNamespace(
        reports=lambda managers: [],
        heard=set,
        agent_heard_at=lambda schedd: heard_at if schedd == "ap" else 1,
        left_output=lambda schedd: {},
    )
    queue: Any = SimpleNamespace(jobs_in_stage_out=lambda owner: [job(StageOutState="Moving")], name=lambda: "ap")
    seen = status_module.look(queue, pool, [], None, {})
    assert [text.partition(":")[0] for text in seen.notes] == note
    assert as_json(seen.rows, NOW, seen.notes, None, seen.agent_heard_at)["agent_heard_at"] == heard_at
    queue.jobs_in_stage_out = lambda owner: [job(StageOutState="Delivered", StageOutRun=1)]
    assert status_module.look(queue, pool, [], None, {}).agent_heard_at is None, "nothing waits for the agent"


ENDED = [box(job=f"ap#{number}.0#1", state=state) for number, state in enumerate(("Cancelled", "Superseded"), 20)]
AWAY = ServerReport("https://dest", "open", "refused", 3, int(NOW) - 300, int(NOW) + 20)


def on_node(
    monkeypatch: pytest.MonkeyPatch, *boxes: SandboxReport, is_whole: bool = True, words: str = "--node"
) -> tuple[int, str]:
    """Exit status and text of ``stageout status`` on a node with these sandboxes."""
    seen = replace(report(*boxes), servers=(AWAY,))
    monkeypatch.setattr("stageout.cli.node.local_report", lambda now: LocalReport(seen, is_whole))
    monkeypatch.setattr("stageout.cli.node.local_streams", list)
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    status = main(["status", *words.split()])
    return status, screen.getvalue()


def test_a_node_without_output_can_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the breaker of a server to which nothing is to go, nor what was cancelled, is shown."""
    for words in ("--node", "--node --empty"):
        assert on_node(monkeypatch, *ENDED, words=words) == (0, "Nothing waits here: this node can be removed.\n")
    assert on_node(monkeypatch, *ENDED, is_whole=False) == (0, "None of your output waits here.\n")
    assert "Cancelled" in on_node(monkeypatch, *ENDED, words="--node 20.0")[1], "shown when it is asked for"


@pytest.mark.parametrize("state", ["RetryWait", "Failed", "Released", "Lost", "HandedOver"])
def test_a_node_that_is_needed_says_what_for(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The access point has not recorded the end of what is released or lost: without the node the job runs again."""
    status, text = on_node(monkeypatch, box(state=state), *ENDED, words="--node --empty")
    assert status == 1 and state in text and "Cancelled" not in text
    assert on_node(monkeypatch, box(state=state))[0] == 0
    assert needs_node(rows_of_report(report(box(state=state)))[0])


def test_only_those_who_see_all_output_may_ask_whether_a_node_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_node(monkeypatch, is_whole=False, words="--node --empty")[0] == 1
    for words in ("--empty", "--node --empty --watch", "--node --empty 12.0"):
        assert on_node(monkeypatch, words=words)[0] == 64


def _file(name: str, url: str, state: str = "RetryWait") -> FileReport:
    return FileReport(name, url, 1, state)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--state failed", ["31.0"]),
        ("--state Failed --state paused", ["31.0", "32.0"]),
        ("--owner bob@x", ["32.0"]),
        ("--destination b.org", ["31.0"]),
        ("--destination davs://a.org", ["30.0"]),
        ("--destination a.org --state failed", []),
        ("--state idle", []),
    ],
)
def test_rows_are_chosen(words: str, shown: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Delivered files wait for no server."""
    delivered = _file("g", "davs://b.org/g", "Delivered")
    boxes = [
        box(job="ap#30.0#1", files=(_file("f", "davs://a.org/d/f"), delivered)),
        box(job="ap#31.0#1", state="Failed", files=(_file("f", "davs://b.org/d/f", "Failed"),)),
        box(job="ap#32.0#1", owner="bob@x", paused=1),
    ]
    status, text = on_node(monkeypatch, *boxes, words=f"--node {words} -af job")
    assert (status, text.split()) == (0, shown)


def test_a_choice_without_a_row_is_no_empty_node(monkeypatch: pytest.MonkeyPatch) -> None:
    status, text = on_node(monkeypatch, box(), words="--node --state idle")
    assert (status, text.splitlines()[-1]) == (0, "None of your output waits here.")
    assert on_node(monkeypatch, words="--node --empty --owner bob")[0] == 64


def test_fields_are_printed_as_condor_q_prints_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    fields_wanted = "job state bytes_left paused eta_low_s reason"
    status, text = on_node(monkeypatch, box(reason="507\x1b[2J from dest"), words=f"--node -af {fields_wanted}")
    assert status == 0 and re.fullmatch(r"12\.0 RetryWait 1000000 false (undefined|\d+) 507 .*from dest\n", text), text
    assert "\x1b" not in text
    for words in ("--node -af nothing", "--node -af job --json"):
        assert on_node(monkeypatch, words=words)[0] == 64
    with pytest.raises(SystemExit, match="64"):
        on_node(monkeypatch, words="--node --state nothing")


DELIVERED = {"StageOutState": "Delivered", "StageOutRun": 1}


@pytest.mark.parametrize(
    ("queued", "text"),
    [
        ([], "goes."),
        ([job(**DELIVERED)], "goes. Delivered, and about to leave the queue: 12.0."),
        ([job(StageOutState="Moving")], "goes. 'stageout status' shows the output that is not delivered yet."),
    ],
)
def test_an_empty_history_names_what_is_still_in_the_queue(
    queued: list[Any], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = SimpleNamespace(recent_history=lambda owner, limit: [], jobs_in_stage_out=lambda owner: queued)
    monkeypatch.setattr("stageout.cli.condor.Queue", lambda schedd, pool: queue)
    assert main(["history", "-n", "ap", "--all"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("No job whose output was handed off has left the queue") and printed.endswith(f"{text}\n")


def test_history_says_of_each_file_why_it_was_not_handed_off() -> None:
    why = ClassAd({"StageOutSynchronous": "the spool of the node is full", "StageOutSynchronousCode": "SpoolFull"})
    late = ClassAd({"TransferFileName": "c.dat", "TransferSuccess": True, "DeveloperData": why})
    both = ClassAd({**RECORD, "OutputPluginResultList": [*RECORD["OutputPluginResultList"], late]})
    item = entry(job(**DELIVERED), [both])
    assert [file["synchronous_code"] for file in item["runs"][0]["files"]] == ["", "", "SpoolFull"]
    assert re.search(r"c\.dat +0 B +synchronous +- +the spool of the node is full", "\n".join(details(item)))


@pytest.mark.parametrize(
    ("age_s", "interval_s", "is_silent"), [(120, 40, False), (121, 40, True), (660, 0, False), (661, 0, True)]
)
def test_a_node_whose_reports_are_missing_is_silent(age_s: int, interval_s: int, is_silent: bool) -> None:
    seen = replace(report(box(state="Moving")), sent_at=int(NOW) - age_s, interval_s=interval_s)
    (row,) = merge([job(StageOutState="Moving")], [seen], NOW)
    assert (row.silent_s > 0) is is_silent
    text = "\n".join(lines(Snapshot([row], []), NOW, 0, in_detail=False))
    assert ("node silent" in text, f"as of {render.duration(age_s)} ago: " in text) == (is_silent, is_silent)
    if is_silent:
        assert (row.next_attempt_at, row.eta_low_s, row.waits_for_server) == (0, None, "")
        assert not any(file.next_attempt_at for file in row.files)


def test_delivered_output_needs_no_node_any_more() -> None:
    seen = replace(report(box(state="Delivered")), sent_at=int(NOW) - 5000, interval_s=40)
    (row,) = merge([job(StageOutState="Delivered", StageOutRun=1)], [seen], NOW)
    assert (row.state, row.silent_s) == ("Delivered", 0)


@pytest.mark.parametrize(
    "hostile", [{"ClusterId": 13}, {"User": "mallory@x"}, {"ClusterId": 13, "User": "mallory@x"}], ids=str
)
def test_the_output_of_another_job_or_user_is_not_shown(hostile: dict[str, Any]) -> None:
    """Owners can write the GlobalJobId of another job into theirs."""
    (row,) = merge([job(StageOutState="None", **hostile)], [report(box())], NOW)
    assert (row.reason, row.manager, row.files) == ("", "", ())


def test_a_job_with_the_name_of_another_one_says_so() -> None:
    other = job(ClusterId=13, TransferOutputStats=None)
    (row,) = explained(merge([other], []), {str(other.id): why(other, ())})
    assert (row.synchronous_code, row.reason[:28]) == ("Identity", "GlobalJobId of the job is no"[:28])
