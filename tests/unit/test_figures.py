"""The report of published headlines: it names figures that benchmarks have, invents none and needs no other file."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from published.headlines import HEADLINES, Row  # noqa: E402
from published.measured import MET, MISSED, NOT_ENOUGH, verdict  # noqa: E402
from published.programs import PROGRAMS, Program  # noqa: E402

from stageout.core.profiles import Measurement, Profile  # noqa: E402

MACHINE = "a planted machine, 2 cores"
ROWS = [row for headline in HEADLINES for row in headline.rows]
MEASURED = [row for row in ROWS if row.program]
#: Fewer letters of a name say nothing about it.
_LEAST_LETTERS = 5


def names(program: str) -> Iterator[re.Pattern[str]]:
    """Return the texts of a benchmark as patterns: a place of an f-string stands for any text."""
    path = BENCHMARKS / ("published/measured.py" if program == "demo" else f"{program}.py")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.compile(re.escape(node.value))
        elif isinstance(node, ast.JoinedStr):
            parts = [str(one.value) if isinstance(one, ast.Constant) else None for one in node.values]
            if sum(len(part or "") for part in parts) >= _LEAST_LETTERS:
                yield re.compile("".join(".+" if part is None else re.escape(part) for part in parts))


def is_in_source(row: Row) -> bool:
    """Tell whether the benchmark can make a figure of this name, with or without the name of a part."""
    patterns = list(names(row.program))
    whole = row.figure.replace("*", "30")
    wanted = {whole, whole.partition(": ")[2] or whole}
    return any(pattern.fullmatch(name) for name in wanted for pattern in patterns)


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row.program}: {row.figure}")
def test_a_headline_names_a_figure_of_its_benchmark(row: Row) -> None:
    assert is_in_source(row)


def test_a_name_that_no_benchmark_has_is_found() -> None:
    assert not is_in_source(Row("", "", "overlay_hops", "away: all files gone after"))


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_parts_are_those_of_the_benchmark(program: Program) -> None:
    text = (BENCHMARKS / f"{program.script}.py").read_text() if program.parts else ""
    assert all(has_part(text, part) for part in program.parts)


def has_part(source: str, part: str) -> bool:
    """Tell whether a part stands in a program's source, by itself or put together from its words."""
    count, _, noun = part.rpartition(" ")
    return f'"{part}"' in source or part.isdigit() or f'{noun}"' in source.replace(f'"{count} ', '"')


def test_no_two_programs_measure_the_same_part() -> None:
    parts = [(program.script, part) for program in PROGRAMS.values() for part in program.parts or ("",)]
    assert len(set(parts)) == len(parts)


def test_every_program_is_needed() -> None:
    assert {row.program for row in MEASURED} == {program.script for program in PROGRAMS.values()}


def planted(value: float = 1.5, **others: object) -> dict[str, Any]:
    """Return a figure as a benchmark writes it."""
    figure = {"what": "", "value": value, "unit": "s", "peer": "", "peer_value": None, "goal": None, "met": None}
    return {**figure, **others}


def report(folder: Path, program: str, *figures: dict[str, Any]) -> str:
    """Return the report of one planted file; no benchmark runs."""
    (folder / "quick").mkdir(parents=True, exist_ok=True)
    content = {"name": program, "machine": MACHINE, "figures": figures}
    (folder / "quick" / f"{program}.json").write_text(json.dumps(content))
    command = [sys.executable, str(BENCHMARKS / "figures.py"), "--quick", "--no-run", "--out", str(folder)]
    subprocess.run([*command, "--note", "Planted <here>."], check=True, capture_output=True)
    return (folder / "quick/figures.html").read_text()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of two planted figures of the overlay."""
    put = planted(11.25, what="default: put", unit="MB/s")
    four = planted(9.5, what="4: put", unit="MB/s", peer="iperf3, 4 streams", peer_value=12.125, goal=12.1, met=False)
    return report(tmp_path_factory.mktemp("figures"), "overlay_wan", put, four)


def line(text: str, what: str) -> str:
    """Return the line of the table that begins with these words."""
    (found,) = re.findall(rf"<tr><td>{re.escape(what)}.*?</tr>", text)
    return str(found)


def test_a_figure_stands_beside_the_published_one(text: str) -> None:
    row = line(text, "put that chooses its connections, a larger")
    assert row.index("10.77 MB/s") < row.index("11.2 MB/s")


def test_the_peer_and_a_missed_goal_are_shown(text: str) -> None:
    row = line(text, "put with four connections")
    assert "12.1 MB/s: iperf3, 4 streams" in row
    assert "at least 12.1, missed" in row


def test_a_figure_without_a_file_was_not_measured(text: str) -> None:
    assert text.count("not measured") == len(ROWS) - 2


@pytest.mark.parametrize("row", [row for row in ROWS if not row.program], ids=lambda row: row.what)
def test_a_headline_without_a_benchmark_was_not_measured(text: str, row: Row) -> None:
    assert "not measured" in line(text, row.what)


def test_a_program_that_failed_leaves_its_reason(tmp_path: Path) -> None:
    ran = {"took_s": 300.0, "cores": 0.5, "others_cores": 0.1, "reason": "stopped <late>", "beside": ["demo"]}
    (tmp_path / "quick").mkdir()
    (tmp_path / "quick/programs.json").write_text(json.dumps({"overlay_lots": ran}))
    shown = report(tmp_path, "overlay_wan")
    assert "not measured: stopped &lt;late&gt;" in line(shown, "rate of a put out of a lot")
    assert "its program did not run" in line(shown, "GridFTP, upload")
    assert "<td>overlay_lots</td><td>5:00</td><td>demo</td>" in shown


@pytest.mark.parametrize(
    ("value", "goal", "met", "rounds", "noise", "expected"),
    [
        (0.899, 0.9, False, 1, None, NOT_ENOUGH),
        (0.899, 0.9, False, 3, None, MISSED),
        (0.7, 0.9, False, 1, None, MISSED),
        (0.042, 0.05, True, 1, None, NOT_ENOUGH),
        (0.01, 0.05, True, 1, None, MET),
        (0.55, 0.05, False, 1, 0.66, NOT_ENOUGH),
        (0.02, 0.03, True, 21, 0.04, NOT_ENOUGH),
        (-0.02, 0.03, True, 5, 0.04, MET),
        (0.0, 0.0, True, 1, None, MET),
        (1.0, None, None, 1, None, ""),
    ],
)
def test_a_goal_is_decided_by_enough_data(
    value: float, goal: float | None, met: bool | None, rounds: int, noise: float | None, expected: str
) -> None:
    figure = planted(value, unit="ratio", goal=goal, met=met, rounds=rounds, noise=noise)
    assert verdict(figure) == expected


def test_rounds_that_vary_decide_nothing_when_they_are_few() -> None:
    assert verdict(planted(4.7, rounds=1, varies=True)) == NOT_ENOUGH
    assert verdict(planted(4.7, rounds=3, varies=True)) == ""


def test_a_goal_without_enough_data_is_neither_met_nor_missed(tmp_path: Path) -> None:
    lost = planted(10.5, what="get bbr, 0.1 % lost", unit="MB/s", goal=10.6, met=False)
    row = line(report(tmp_path, "overlay_wan", lost), "get, one packet of a thousand is lost")
    assert "at least 10.6, not enough data" in row
    assert "missed" not in row


def test_machine_and_note_are_in_the_head(text: str) -> None:
    head = text.partition("<section")[0]
    assert MACHINE in head
    assert "Planted &lt;here&gt;." in head


class Links(HTMLParser):
    """Collect the addresses that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep the addresses of one element."""
        assert tag not in ("script", "link", "iframe", "object", "base")
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data", "srcset")]


def test_the_report_needs_no_other_file(text: str) -> None:
    links = Links()
    links.feed(text)
    assert links.found
    assert not [link for link in links.found if not link.startswith(("#", "data:image/png;base64,"))]
    assert not re.findall(r"@import|url\((?!#)", text)


def cost_of_space(pairs: int) -> list[float]:
    """The figures of a profile with so many pairs of writes: 8 bytes/s with reserved space, 10 without."""
    from profiles import figures_of

    common = {"file_bytes": 1, "streams": 1, "concurrency": 1, "block_bytes": 0, "moved_bytes": 1, "seconds": 1.0}
    common |= {"client_cpu_s": 0.0, "client_rss_bytes": 0}
    kinds = [(8.0, True), (10.0, False)] * pairs
    runs = [Measurement("upload", rate_bytes_per_s=rate, reserved=kept, **common) for rate, kept in kinds]
    return [figure.as_json()["value"] for figure in figures_of("directory", Profile("", "file", 0, runs=runs))]


def test_the_cost_of_reserved_space_is_a_number() -> None:
    assert cost_of_space(5) == [pytest.approx(0.2)]


def test_noise_is_no_cost_of_reserved_space() -> None:
    assert cost_of_space(1) == []
