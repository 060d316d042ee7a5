"""The programs of the report: what runs beside what, for how long, and what becomes of those that fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.polling import wait_for

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from published import runs  # noqa: E402
from published.programs import PROGRAMS, needed  # noqa: E402
from published.schedule import Job, Span, beside, limit_s, next_job, plan, total_s  # noqa: E402

KEEPER = BENCHMARKS / "published/keeper.py"
WAITS, BUSY = 0.3, 2.0
#: A process that outlives the program, in a session of its own.
LEAVES = "import subprocess; subprocess.Popen(['setsid', 'sleep', '600']);"


@pytest.mark.parametrize(("quick", "goal_s"), [(True, 10 * 60), (False, 60 * 60)])
def test_a_run_keeps_within_its_time(quick: bool, goal_s: float) -> None:
    assert total_s(plan([PROGRAMS[name].job(name, quick) for name in needed(quick)])) <= goal_s


@pytest.mark.parametrize("quick", [True, False])
def test_at_most_two_programs_run_at_a_time_and_leave_cores_free(quick: bool) -> None:
    jobs = {name: PROGRAMS[name].job(name, quick) for name in needed(quick)}
    spans = plan(list(jobs.values()))
    assert {span.name for span in spans} == set(jobs)
    for span in spans:
        at_once = [jobs[other.name] for other in spans if other.start_s <= span.start_s < other.end_s]
        assert len(at_once) <= 2
        assert len(at_once) == 1 or sum(job.cores for job in at_once) <= 1.2


@pytest.mark.parametrize("name", ["profiles", "overlay_lots"])
def test_a_program_that_saturates_a_core_or_the_disk_runs_alone(name: str) -> None:
    spans = plan([PROGRAMS[key].job(key, True) for key in needed(True)])
    assert beside(spans)[name] == []


def test_the_longest_that_waits_comes_first() -> None:
    busy, long, short = Job("busy", 900, BUSY), Job("long", 60, WAITS), Job("short", 30, WAITS)
    assert next_job([busy, short, long], []) == long
    assert next_job([busy, short], [long]) == short
    assert next_job([busy], [long]) is None
    assert next_job([busy], []) == busy
    assert next_job([short], [busy]) is None
    assert next_job([Job("third", 1, WAITS)], [long, short]) is None


def test_two_that_need_more_cores_than_are_free_do_not_meet() -> None:
    first, second = Job("first", 60, 0.7), Job("second", 50, 0.7)
    assert next_job([second], [first]) is None
    assert total_s(plan([first, second])) == 110


def test_running_programs_count_with_the_time_that_they_still_need() -> None:
    running = [(Job("one", 100, WAITS), 40.0), (Job("late", 10, WAITS), 30.0)]
    assert total_s(plan([Job("next", 50, WAITS)], running)) == 60
    assert total_s(plan([], [])) == 0


def test_programs_that_overlap_ran_beside_each_other() -> None:
    spans = [Span("c", 10, 20), Span("a", 0, 10), Span("b", 5, 12)]
    assert beside(spans) == {"a": ["b"], "b": ["a", "c"], "c": ["b"]}


def test_the_reason_is_what_the_program_says() -> None:
    assert runs.reason_of("x: 1\nlots: could not be measured: no disk: full\nmore\n") == "no disk: full"
    assert runs.reason_of("Traceback\nValueError: odd\n\n") == "ValueError: odd"
    assert runs.reason_of("") == "it printed nothing"


def kept(log: Path, limit: float, code: str) -> dict[str, object]:
    """Run a program below the keeper."""
    command = [sys.executable, str(KEEPER), str(log), str(limit), sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return dict(json.loads(done.stdout))


def test_processes_that_a_program_leaves_are_ended(tmp_path: Path) -> None:
    ended = kept(tmp_path / "log", 60, f"{LEAVES} print('said'); raise SystemExit(3)")
    assert (ended["status"], ended["stopped"], ended["left"]) == (3, False, 1)
    assert (tmp_path / "log").read_text() == "said\n"


def test_a_program_that_is_too_slow_may_clean_up(tmp_path: Path) -> None:
    code = "import time\ntry: time.sleep(600)\nfinally: print('cleaned')"
    ended = kept(tmp_path / "log", 0.5, f"{LEAVES}\n{code}")
    assert (ended["stopped"], ended["left"]) == (True, 1)
    assert (tmp_path / "log").read_text().startswith("cleaned\n")


def test_the_rest_goes_on_when_a_program_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(name: str, quick: bool, folder: Path) -> list[str]:
        if name == "overlay_lots":
            return [sys.executable, "-c", "raise SystemExit('lots: could not be measured: no disk')"]
        return [sys.executable, "-c", f"open({str(folder / (name + '.json'))!r}, 'w').close()"]

    monkeypatch.setattr(runs, "_command", command)
    said: list[str] = []
    names = ["overlay_lots", "overlay_wan", "adapt"]
    ran = runs.Runner(tmp_path, names, True, said.append).run()
    assert {name: one.reason for name, one in ran.items()} == {
        "overlay_lots": "no disk",
        "overlay_wan": "",
        "adapt": "",
    }
    assert ran == runs.read_runs(tmp_path)
    assert ran["overlay_lots"].beside == []
    assert ran["adapt"].beside == ["overlay_wan"]
    ends = [line for line in said if "measured" in line]
    assert [line.partition(" (")[2][:6] for line in ends] == ["1 of 3", "2 of 3", "3 of 3"]
    assert "not measured: no disk" in ends[-1]
    assert "nothing left" in ends[-1]


def test_an_interrupt_stops_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "pid"
    started = f"{LEAVES.removesuffix(';').replace('subprocess.Popen', 'left = subprocess.Popen')}"
    code = f"{started}; import time; open({str(note)!r}, 'w').write(f'{{left.pid}} '); time.sleep(600)"
    monkeypatch.setattr(runs, "_command", lambda *_: [sys.executable, "-c", code])

    def interrupt(line: str) -> None:
        if "adapt" in line:
            wait_for(lambda: note.exists() and note.read_text().endswith(" "), what="the first program's process")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.Runner(tmp_path, ["adapt", "overlay_wan"], True, interrupt).run()
    assert not Path(f"/proc/{int(note.read_text())}").exists()


def test_the_limit_leaves_room_for_a_busy_machine() -> None:
    assert limit_s(100) >= 300
