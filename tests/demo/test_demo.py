"""The demonstration's parts: what is read from logs and outputs, and that it never claims what did not happen."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from tests.harness.demo import report
from tests.harness.demo.picture import draw
from tests.harness.demo.record import JobRecord, Occupation, Record, check_files, occupations
from tests.harness.demo.workload import JobReport, Workload, file_digest
from tests.harness.narrow_destination import Transfer

START_LOG = """\
1000.738 slot1: Request accepted.
1000.756 slot1_1: Remote job ID is 1.0
1000.762 slot1_1: Changing activity: Idle -> Busy
1000.763 slot1_2: Remote job ID is 1.1
1000.769 slot1_2: Changing activity: Idle -> Busy
1003.568 slot1_1: Changing activity: Busy -> Cleaning
1003.574 slot1_1: Changing activity: Cleaning -> Idle
1003.578 slot1_1: Remote job ID is 1.2
1003.581 slot1_1: Changing activity: Idle -> Busy
1004.100 slot1_2: Changing state and activity: Claimed/Busy -> Preempting/Killing
1004.200 slot1_2: Changing state and activity: Preempting/Killing -> Owner/Idle
"""


def test_slots_are_free_when_the_startd_says_so() -> None:
    assert occupations(START_LOG) == [
        Occupation("1.0", "slot1_1", 1000.756, 1003.574),
        Occupation("1.1", "slot1_2", 1000.763, 1004.2),
        Occupation("1.2", "slot1_1", 1003.578, None),
    ]


def test_job_reports_are_read() -> None:
    text = "started 10.5\ninput aa  input.dat\nwrote bb  result-1.dat\nwrote cc  result-2.dat\nended 12.25\n"
    assert JobReport.parse(text) == JobReport(10.5, 12.25, "aa", {"result-1.dat": "bb", "result-2.dat": "cc"})


def _record(tmp_path: Path, *, content: bytes = b"right", sent_after_s: float = 1.0) -> Record:
    (tmp_path / "wrote").write_bytes(b"right")
    digest = file_digest(tmp_path / "wrote")
    place = tmp_path / "0"
    place.mkdir(exist_ok=True)
    (place / "result-1.dat").write_bytes(content)
    transfer = Transfer("PUT", "/0/result-1.dat", 112.0, 112.0 + sent_after_s, 5, 201)
    job = JobRecord(0, "slot1_1", JobReport(102.0, 112.0, "", {"result-1.dat": digest}), 112.5, [transfer])
    check_files(job, place)
    return Record("a run", 100.0, [job], 1)


def test_the_last_line_and_the_table_say_what_was_measured(tmp_path: Path) -> None:
    run = _record(tmp_path)
    assert report.last_line([run, run]) == (
        "demo: delivered 2/2 jobs, 2/2 files verified; slot held after exit: synchronous 0.50 s, stage-out 0.50 s; "
        "makespan: synchronous 13.0 s, stage-out 13.0 s"
    )
    assert report.shortfalls(run, run) == []
    assert "13.0 s" in report.table(run, run)


def test_a_wrong_byte_and_a_synchronous_transfer_are_shortfalls(tmp_path: Path) -> None:
    wrong = _record(tmp_path, content=b"wrong")
    assert (wrong.delivered, wrong.verified) == (0, 0)
    assert len(report.shortfalls(wrong, _record(tmp_path))) == 1
    held = _record(tmp_path, sent_after_s=0.4)
    assert ["still held" in sentence for sentence in report.shortfalls(_record(tmp_path), held)] == [True]


def test_a_missing_file_is_not_delivered(tmp_path: Path) -> None:
    run = _record(tmp_path)
    (tmp_path / "0/result-1.dat").unlink()
    check_files(run.jobs[0], tmp_path / "0")
    assert run.delivered == 0


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    run = _record(tmp_path)
    draw([run, run], tmp_path / "timeline.svg", subtitle="one job")
    picture = ElementTree.parse(tmp_path / "timeline.svg").getroot()
    kinds = [part.get("class") for part in picture.iter("{http://www.w3.org/2000/svg}rect")]
    assert kinds.count("busy") == 2 * len(run.jobs) + 1, "the legend has one, too"
    assert int(picture.attrib["viewBox"].split()[2]) <= 480, "letters of 14 pixels can be read at 400"
    assert "prefers-color-scheme:dark" in (tmp_path / "timeline.svg").read_text()


def test_the_submit_file_of_a_job_without_output_names_no_destination() -> None:
    text = Workload(1, 1, 0, 0).submit_text("http://host")
    assert 'transfer_output_files   = ""' in text
    assert "output_destination" not in text
